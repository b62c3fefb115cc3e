"""Hostile structures through every door of running instances: whatever comes, they are there at the end.

    python -m tests.fuzz.campaign --messages 1000000

Instances of an environment: real coordinators, logs in memory and the real SDK. A peer (``evil``) and a client
(``worse``) say what they like; an honest caller calls all the while, and its calls count. What is not reached from
there, frames of clones and of pools and questions of operators, goes to what reads it.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec

import immortal
from immortal import CalleeFailed, CallRefused, EffectFailed, Handle, Immortal, Node, Retry, peer, query, rpc
from immortal.appsdk.handlers.decorators import EFFECT_METHOD_ID
from immortal.appsdk.handlers.definition import definition_of
from immortal.appsdk.ordering.messages import Propose
from immortal.appsdk.patterns.clone import frames as clone_frames
from immortal.appsdk.patterns.pirate import frames as pirate_frames
from immortal.coordinator.driver.turn import Driver
from immortal.coordinator.operator import control_server
from immortal.patterns.queue import Queue
from immortal.protocol.checksum import crc64
from immortal.protocol.client_frames import decode_client_frame
from immortal.protocol.decoding import DecodeError
from immortal.protocol.errors import ProtocolError
from immortal.protocol.messages import RpcKind, RpcType, encode_incoming_rpc
from immortal.protocol.peer_frames import decode_frame
from immortal.protocol.system_methods import (
    CANCEL_CALL_METHOD_ID,
    EXECUTED_METHOD_ID,
    FENCING_METHOD_ID,
    HANDLES_METHOD_ID,
    NODE_METHOD_ID,
    ORDERED_METHOD_ID,
    ORDERING_METHOD_ID,
)
from immortal.testing import Environment
from tests.fuzz.structures import Structures
from tests.helpers.hostile import HostileApp, client_says, hostile

BATCH_COUNT = 100  # messages between two looks at whether all is well
NUMBERS = (1, 2, 3, 17, (1 << 53) - 1)


class Shelf(Node):
    """What handles are of."""

    @rpc
    def look(self, value: Any) -> None:
        """Nothing comes of it."""


class Supplier(Immortal):
    """What the service believes that ``evil`` is."""

    @rpc
    def price(self, what: str) -> Any:
        return 1


def made(seed: int) -> Any:
    """An effect, whose result is sent by the campaign."""


class Service(Immortal):
    supplier = peer(Supplier, name="evil")
    count: int
    failed: int

    def __init__(self) -> None:
        self.count = self.failed = 0

    @rpc
    def take(self, value: Any) -> int:
        self.count += 1
        return self.count

    @rpc
    def typed(self, numbers: list[int], names: dict[str, float] | None = None) -> list[int]:
        return numbers

    @rpc
    def hold(self, handle: Handle[Shelf]) -> None:
        """It keeps none."""

    @rpc
    def good(self) -> int:
        self.count += 1
        return self.count

    @rpc
    async def ask(self) -> Any:
        try:
            return await self.supplier.price("tea")
        except (CalleeFailed, CallRefused):
            await immortal.step(self.note_failed)
            return None

    @rpc
    async def charge(self, seed: int) -> None:
        try:
            await immortal.effect.options(retry=Retry(attempts=None))(made, seed)
        except EffectFailed:
            await immortal.step(self.note_failed)

    @rpc
    def note_failed(self) -> None:
        self.failed += 1

    @query
    def total(self, value: Any = 0) -> Any:
        return value


def _never(seed: int) -> Any:
    raise TimeoutError("not yet")


SERVICES: dict[str, type[Immortal]] = {"service": Service, "queue": Queue}
OF_THE_SDK = (
    *(ORDERED_METHOD_ID, ORDERING_METHOD_ID, FENCING_METHOD_ID, EXECUTED_METHOD_ID),
    *(NODE_METHOD_ID, HANDLES_METHOD_ID, CANCEL_CALL_METHOD_ID, 0, 99),
)


class Campaign:
    """``sent``: by door."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._structures = Structures(self._rng)
        self.sent: Counter[str] = Counter()
        self._said: Counter[object] = Counter()  # by evil, to whom
        self._env = Environment(seed=seed, fail_alone=True)
        self._evil: HostileApp = hostile(self._env, "evil")
        self._evil.answer_with = self._answer
        self._instances: dict[str, Any] = {
            name: self._env.start(cls, name, effects={made: _never}) for name, cls in SERVICES.items()
        }
        self._doors: tuple[Callable[[], None], ...] = (
            *(self._peer_calls, self._peer_calls, self._answers, self._client_calls, self._client_queries, self._asks),
            *(self._multicasts, self._node_calls, self._effects, self._readers),
        )

    def run(self, count: int) -> None:
        while self.sent.total() < count:
            for _ in range(BATCH_COUNT):
                self._rng.choice(self._doors)()
            self._env.run()
            self._is_well()
        self._comes_back()

    # --- doors -------------------------------------------------------------------------------------------------------

    def _method(self, name: str) -> int:
        """Of ``name``, or of the SDK; none that a peer's own coordinator would not let out."""
        handlers = [handler.method_id for handler in definition_of(SERVICES[name]).handlers.values()]
        return self._rng.choice([one for one in (*handlers, *OF_THE_SDK) if one >= 0])

    def _peer_calls(self) -> None:
        name = self._rng.choice(tuple(SERVICES))
        rpc_type = self._rng.choice(tuple(RpcType))
        front = (b"\xa4evil", b"\x07") if rpc_type == RpcType.ASYNC else ()
        arguments = self._structures.array(*front) if self._rng.random() < 0.9 else self._structures.value()
        if rpc_type == RpcType.ASYNC and arguments[1:6] != b"\xa4evil":
            rpc_type = RpcType.FORK  # who names somebody else is refused as a whole
        self._evil.say(name, encode_incoming_rpc(self._method(name), rpc_type, arguments))
        self._said[name] += 1
        self.sent["calls of a peer"] += 1

    def _answers(self) -> None:
        name, rng = self._rng.choice(tuple(SERVICES)), self._rng
        kind, arguments = self._answer(rng.choice(NUMBERS))
        self._evil.say(name, encode_incoming_rpc(self._method(name), RpcType.ASYNC, arguments, kind))
        self._said[name] += 1
        self.sent["answers"] += 1

    def _answer(self, number: int) -> tuple[int, bytes]:
        kind = self._rng.choice((RpcKind.RETURNED_VALUE, RpcKind.RETURNED_NOTHING, RpcKind.RAISED))
        return kind, self._structures.array(msgspec.msgpack.encode(number))

    def _asks(self) -> None:
        """The service asks ``evil``, which answers with anything."""
        self._instances["service"].send(Service.ask)
        self.sent["answers that are waited for"] += 1

    def _multicasts(self) -> None:
        """The bytes of the calls are within those of the message that brings them."""
        name, method_id = self._rng.choice(tuple(SERVICES)), self._method("service")
        calls = [encode_incoming_rpc(method_id, RpcType.FORK, self._structures.array()) for _ in range(2)]
        self._said[name, "multicasts"] += 1
        propose = Propose(method_id, "evil", self._said[name, "multicasts"], 1, calls, alone=True)
        self._say(name, ORDERED_METHOD_ID, msgspec.msgpack.encode(propose))
        self.sent["multicasts"] += 1

    def _node_calls(self) -> None:
        name = self._rng.choice(tuple(SERVICES))
        front = msgspec.msgpack.encode(("evil", [self._rng.randbytes(16)], 1))
        self._say(name, NODE_METHOD_ID, b"\x94" + front[1:] + self._structures.value())
        self.sent["calls of nodes"] += 1

    def _say(self, name: str, method_id: int, arguments: bytes) -> None:
        self._said[name] += 1
        self._evil.say(name, encode_incoming_rpc(method_id, RpcType.FORK, arguments))

    def _effects(self) -> None:
        """As if the service's own app had sent them, with any number; sometimes with one that is waited for."""
        app = self._env._world.nodes["service"].local_app
        assert app is not None
        front = msgspec.msgpack.encode((1 << 40, "effect made", 0, False))[1:]  # of none
        waiting = app.dispatcher.tasks.effects.waiting
        if waiting and self._rng.random() < 0.7:
            number = next(iter(waiting))
            front = msgspec.msgpack.encode((number, waiting[number].what, waiting[number].detail, False))[1:]
        arguments = b"\x95" + front + self._structures.value()
        result = encode_incoming_rpc(EFFECT_METHOD_ID, RpcType.IMPULSE, arguments)

        def write(parts: list[bytes], arguments: tuple[Any, ...]) -> int:
            parts += (result, b"")
            return len(result)

        app.dispatcher.outbox.impulses._put("", write, ())
        self._instances["service"].send(Service.charge, self._rng.randrange(1 << 30))
        self.sent["results of effects"] += 1

    def _client_calls(self) -> None:
        name = self._rng.choice(tuple(SERVICES))
        arguments = self._structures.array() if self._rng.random() < 0.9 else self._structures.value()
        known = self._driver(name).machine.components.clients.table.get("worse")
        number = 1 if known is None else known.number + 1  # what was refused as a whole was not taken
        client_says(
            self._env, name, self._method(name), arguments, number=number, client_id="worse", acknowledged=number - 1
        )
        self.sent["calls of a client"] += 1

    def _client_queries(self) -> None:
        name, rng = self._rng.choice(tuple(SERVICES)), self._rng
        arguments, number = self._structures.array(), rng.randrange(1, 1 << 40)
        method_id = self._method(name)
        client_says(
            self._env, name, method_id, arguments, number=number, client_id="worse", query=True, runs=rng.random() < 0.2
        )
        self.sent["queries"] += 1

    def _readers(self) -> None:
        """What reads frames that no instance of this environment gets."""
        value = self._structures.value()
        clone = clone_frames.MAGIC + value
        clone += crc64(clone).to_bytes(8, "big")
        readers: tuple[tuple[Callable[[Any], object], object], ...] = (
            (clone_frames.decode_request, clone),
            (clone_frames.decode_answer, clone),
            (pirate_frames.decode_frame, value),
            (decode_frame, [value, value]),
            (decode_client_frame, b"\xc1" + value),
            (control_server._decode, self._json()),
        )
        for read, data in readers:
            with contextlib.suppress(ProtocolError, DecodeError):
                read(data)
        self.sent["frames and questions that are read alone"] += 1

    def _json(self) -> bytes:
        depth = self._rng.choice((1, 100, 1000, 20_000))
        return self._rng.choice(
            (b"[" * depth, b'{"verb":' * depth, b'{"verb":"status","argument":' + b"[" * depth, b"\xff")
        )

    # --- what must hold ----------------------------------------------------------------------------------------------

    def _driver(self, name: str) -> Driver:
        node = self._env._world.nodes[name]
        assert node._driver is not None, f"{name} has ended: {node.failure}"
        return node._driver

    def _status(self, name: str) -> dict[str, Any]:
        return self._driver(name).machine.view.status(0)

    def _is_well(self) -> None:
        """Each instance works, and an honest caller is answered; who sent what is known."""
        service = self._instances["service"]
        before = service.state.count
        assert service.call(Service.good) == before + 1
        assert self._instances["queue"].is_up
        for name in SERVICES:
            status = self._status(name)
            assert set(status["nested"]) <= {"evil", "~worse", name}
            assert status["inputs"]["evil"]["position"] >= self._said[name], "all of it has come"

    def _comes_back(self) -> None:
        """A crash: the replay passes over the same messages, and comes to the same state."""
        service = self._instances["service"]
        before = service.state.count, service.state.failed
        assert self._status("service")["nested"].keys() >= {"evil", "~worse"}, "it is known who sent what"
        for instance in self._instances.values():
            instance.crash()
            instance.recover()
        assert (service.state.count, service.state.failed) == before
        assert service.call(Service.good) == before[0] + 1
        assert service.state.failed, "some answers and results could not be read"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    begun_s, sent, seed = time.monotonic(), Counter[str](), options.seed
    while sent.total() < options.messages:
        campaign = Campaign(seed)
        campaign.run(min(10_000, options.messages - sent.total()))
        sent += campaign.sent
        seed += 1
        print(f"seed {seed}: {sent.total()} messages in {time.monotonic() - begun_s:.0f} s: {dict(sent)}", flush=True)


if __name__ == "__main__":
    main()
