"""What a peer that may call tries to be taken for: the system, a client, another peer. Real processes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from immortal.appsdk.client import Client
from immortal.appsdk.handlers.decorators import CLOCK_METHOD_ID, EFFECT_METHOD_ID, INITIAL_METHOD_ID, method_id_of_name
from immortal.client import connect
from immortal.coordinator.instances.registry import Registry
from immortal.coordinator.operator import control
from immortal.coordinator.peers import keys
from immortal.messenger import Security
from immortal.protocol.messages import RpcKind, RpcType
from immortal.protocol.peer_frames import FrameType, RefusedCode
from immortal.protocol.system_methods import ORDER_METHOD_ID
from tests.helpers.cli import HOME, Run, immortal
from tests.security.forger import Forger, answer, call

VICTIM = """
import asyncio
from datetime import timedelta

import immortal
from immortal import Immortal, initial, peer, rpc


async def charge() -> str:
    await asyncio.sleep(3600)
    return "honestly"


class Ghost(Immortal):
    @rpc
    def total(self) -> int:
        return 42

    @rpc
    def tell(self, number: int) -> None:
        pass


class Victim(Immortal):
    starts: int
    seen: list[str]

    ghost = peer(Ghost, "ghost")

    def __init__(self) -> None:
        self.starts = 0
        self.seen = []

    @initial
    def begin(self) -> None:
        self.starts += 1

    @rpc
    def note(self, text: str) -> None:
        self.seen.append(text)

    @rpc
    async def nap(self) -> None:
        await immortal.sleep(timedelta(hours=1))
        await immortal.step(self.note, "woken")

    @rpc
    async def ask(self) -> None:
        await immortal.step(self.note, f"the ghost says {await self.ghost.total()}")

    @rpc
    async def pay(self) -> None:
        await immortal.step(self.note, f"paid {await immortal.effect(charge)}")

    @rpc
    def wait_for_all(self) -> None:
        self.nap.fork()
        self.ask.fork()
        self.pay.fork()

    @rpc
    async def wait_for(self, seconds: int) -> str:
        await immortal.sleep(timedelta(seconds=seconds))
        return "done"

    @rpc
    def state(self) -> tuple[int, list[str]]:
        return self.starts, self.seen
"""


FORGERS = [f"forger-{number}" for number in range(70)]  # one for each test, which begins a stream of its own
_names = iter(FORGERS)


@dataclass
class Victim:
    folder: Path
    endpoint: str


@pytest.fixture(scope="module")
def victim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    folder = tmp_path_factory.mktemp("victim")
    (folder / "victim.py").write_text(VICTIM)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("IMMORTAL_HOME", str(folder / HOME))
        registry = Registry(folder / HOME)
        for name in ("victim", *FORGERS):
            registry.register(name, "tcp://127.0.0.1:*")
            keys.create(registry.load(name).folder)
        run = Run(folder, "victim", "victim:Victim")
        try:
            run.line("ready")
            with connect("victim") as client:
                client.wait_for_all()
            yield Victim(folder, registry.resolve("victim"))
        finally:
            run.kill()


def status(victim: Victim) -> dict[str, Any]:
    return control.query(victim.folder / HOME / "victim", "status")


@pytest.fixture
def forger(victim: Victim) -> Iterator[Forger]:
    name, home = next(_names), victim.folder / HOME
    servers = keys.read_public_keys(home / "victim")
    security = Security(keys.read_pairs(home / name)[0], {}, lambda endpoint: servers)
    with Forger(name, "victim", victim.endpoint, security) as forger:
        yield forger


@pytest.fixture
def client(victim: Victim) -> Iterator[Client]:
    with connect("victim") as client:
        yield client


def pack(*arguments: object) -> bytes:
    return msgspec.msgpack.encode(arguments)


def refused(forger: Forger, *messages: bytes) -> str:
    """Nothing of it is logged."""
    reply = forger.send(*messages)
    assert (reply.frame_type, reply.code) == (FrameType.REFUSED, RefusedCode.MALFORMED), reply
    return reply.reason


SYSTEM = {
    "run_the_initial_handler_again": call(INITIAL_METHOD_ID, pack()),
    "tell_the_time": call(CLOCK_METHOD_ID, pack(1 << 62), RpcType.IMPULSE),
    "give_an_effects_result": call(EFFECT_METHOD_ID, pack(1, 1, "", False, "forged"), RpcType.IMPULSE),
    "order_as_an_operator": call(ORDER_METHOD_ID, pack("cancel", 1, "forged", "root", None), RpcType.IMPULSE),
    "give_an_effects_result_as_an_answer": answer(EFFECT_METHOD_ID, pack(1, "forged")),
    "tell_the_time_as_what_was_raised": answer(CLOCK_METHOD_ID, pack(1, "E", [], {}), RpcKind.RAISED),
}


@pytest.mark.parametrize("message", SYSTEM.values(), ids=SYSTEM)
@pytest.mark.parametrize("among", [0, 3])
def test_a_peer_cannot(victim: Victim, client: Client, forger: Forger, message: bytes, among: int) -> None:
    before = client.state()
    forbidden = status(victim)["forbidden"].get(forger.name, 0)
    honest = [call(method_id_of_name("state"), pack())] * among
    assert forger.send(*honest, message, *honest).frame_type is FrameType.TRIM_TO, "the message fails alone"
    assert status(victim)["forbidden"][forger.name] == forbidden + 1
    assert client.state() == before
    assert forger.send(call(method_id_of_name("state"), pack())).frame_type is FrameType.TRIM_TO


CALLERS = {
    "a_client": "~web",
    "all_clients": "~",
    "the_instance_itself": "victim",
    "oneself_of_the_instance": "",
    "another_peer": "ghost",
    "a_name_with_its_own_in_front": "{own}x",
}


@pytest.mark.parametrize("caller", CALLERS.values(), ids=CALLERS)
@pytest.mark.parametrize("form", ["plain", "str8", "str32", "array16", "array32"])
def test_a_peer_cannot_call_in_the_name_of(client: Client, forger: Forger, caller: str, form: str) -> None:
    name = caller.replace("{own}", forger.name).encode()
    array = {"array16": b"\xdc\x00\x02", "array32": b"\xdd\x00\x00\x00\x02"}.get(form, b"\x92")
    string = {"str8": b"\xd9" + bytes((len(name),)), "str32": b"\xdb" + len(name).to_bytes(4, "big")}.get(
        form, bytes((0xA0 | len(name),)) if len(name) < 32 else b"\xd9" + bytes((len(name),))
    )
    method = method_id_of_name("state")
    forged = call(method, array + string + name + b"\x01", RpcType.ASYNC)
    reason = refused(forger, forged)
    assert "its sender may give only" in reason
    assert repr(forger.name) in reason
    honest = call(method, pack(forger.name, 1), RpcType.ASYNC)
    assert forger.send(honest, honest, honest).frame_type is FrameType.TRIM_TO
    assert "its sender may give only" in refused(forger, honest, honest, honest, forged)


def test_a_peer_cannot_answer_another_clients_open_call(victim: Victim, client: Client, forger: Forger) -> None:
    """The forged answer would be a call in the client's name whose number is the open one's."""
    got: list[str] = []
    with connect("victim", client_id="web") as web:
        waiting = threading.Thread(target=lambda: got.append(web.wait_for(2)))
        waiting.start()
        for number in range(1, 4):
            refused(forger, call(method_id_of_name("wait_for"), pack("~web", number, 0), RpcType.ASYNC))
        waiting.join()
    assert got == ["done"]


def test_a_peer_cannot_answer_in_the_place_of_another(victim: Victim, client: Client, forger: Forger) -> None:
    guessed = [answer(method_id_of_name("total"), pack(number, 666)) for number in range(1, 60)]
    nothing = [answer(0, pack(number), RpcKind.RETURNED_NOTHING) for number in range(1, 60)]
    raised = [answer(0, pack(number, "Evil", [], {}), RpcKind.RAISED) for number in range(1, 60)]
    refused = status(victim)["verdicts"]["refused"]
    for kind in (guessed, nothing, raised):
        forger.send(*kind)
    assert forger.send(call(method_id_of_name("state"), pack())).frame_type is FrameType.TRIM_TO
    _, seen = client.state()
    assert not any("ghost" in one for one in seen), seen
    assert status(victim)["verdicts"]["refused"] == refused + 3, "one of each kind was for the open call"
    letters = immortal(victim.folder, "dead-letters", "victim")
    assert f"an answer of {forger.name!r} to call" in letters


def test_what_was_forged_replays_the_same(victim: Victim, forger: Forger) -> None:
    forger.send(*[answer(0, pack(number, 666)) for number in range(1, 60)])
    assert immortal(victim.folder, "verify", "victim").splitlines()[-1].startswith("victim: the same, in ")
