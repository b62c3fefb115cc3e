"""More waits for a peer than memory may hold: it goes to the log, and arrives once and in order, whatever happens."""

from __future__ import annotations

import re
import select
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from immortal.protocol.messages import RpcType, encode_attach_to, encode_outgoing_rpc
from tests.helpers.processes import DEADLINE_S, TOLD, CoordinatorProcess, House, SocketApp
from tests.helpers.spilling import CALL_SIZE_BYTES, Caller, limit_memory


class Pair:
    """alice, who calls bob, with little memory; bob is started later."""

    def __init__(self, house: House, *, memory_mib: int = 4, **options: object) -> None:
        self.house = house
        self.neighbours: list[SocketApp] = []
        house.register("alice", **options)
        house.register("bob")
        limit_memory(house.registry, "alice", memory_mib)

    def start_alice(self) -> None:
        self.alice_process = self.house.start("alice")
        self.alice = Caller(self.house.settings("alice"), self.neighbours, peer="bob")
        self.alice.ready()

    def kill_alice(self) -> None:
        self.alice_process.kill()
        self.alice.until_closed()

    def start_bob(self) -> None:
        self.bob_process = self.house.start("bob")
        self.bob = SocketApp(self.house.settings("bob"), self.neighbours).ready()

    def arrives(self, count: int) -> None:
        self.bob.until(lambda: len(self.bob.state["told"]) >= count)
        status = self.alice_process.until(lambda status: status["outputs"]["bob"]["acknowledged"] == count)
        assert self.bob.state["told"] == list(range(1, count + 1))
        assert (status["outputs"]["bob"]["waiting_bytes"], status["outputs"]["bob"]["state"]) == (0, "open")
        for process in (self.alice_process, self.bob_process):
            assert process.count(" error ") == 0, process.lines

    def close(self) -> None:
        for app in self.neighbours:
            app.close()


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    made = House(tmp_path / "home")
    yield made
    made.close()


def rss_mib(process: CoordinatorProcess) -> float:
    """What belongs to the process alone: pages of the log's file are the kernel's to take back."""
    text = Path(f"/proc/{process.process.pid}/status").read_text()
    found = re.search(r"RssAnon:\s+(\d+) kB", text)
    assert found is not None
    return int(found[1]) / 1024


@pytest.mark.parametrize("meanwhile", ["nothing", "a kill", "a checkpoint", "a checkpoint and a kill"])
@pytest.mark.usefixtures("started_anew")
def test_what_memory_has_no_room_for_waits_on_disk(house: House, meanwhile: str) -> None:
    calls = 800 if meanwhile == "nothing" else 200  # 200 MiB, 50 MiB
    pair = Pair(house, memory_mib=16 if meanwhile == "nothing" else 4)
    pair.start_alice()
    pair.alice.feed(1, calls // 2)
    if "checkpoint" in meanwhile:
        pair.alice_process.terminate()  # with a last checkpoint
        pair.alice.until_closed()
        assert pair.alice_process.ended()[0] == 0
        pair.start_alice()
    pair.alice.feed(calls // 2 + 1, calls)
    status = pair.alice_process.until(  # it may be paused for a moment, until the disk has what was spilled last
        lambda status: status["outputs"]["bob"]["position"] == calls and not status["app_paused"]
    )
    output = status["outputs"]["bob"]
    memory_bytes = (16 if meanwhile == "nothing" else 4) << 20
    assert output["memory_bytes"] <= memory_bytes
    assert output["waiting_bytes"] == output["memory_bytes"] + output["spilled_bytes"] >= calls * CALL_SIZE_BYTES
    assert status["held_up_for"] == []
    # Beside that memory: an idle coordinator's 22 MiB, groups on their way to the disk and their copies. It does not
    # grow with what waits, which is 200 MiB.
    assert rss_mib(pair.alice_process) < (memory_bytes >> 20) + 84
    assert "further ones go to disk" in pair.alice_process.line("'bob' takes no messages")
    if "kill" in meanwhile:
        pair.kill_alice()
        pair.start_alice()
    pair.start_bob()
    pair.arrives(calls)
    status = pair.alice_process.until(lambda status: status["log"]["used_bytes"] < calls * CALL_SIZE_BYTES // 2)
    assert status["outputs"]["bob"]["spilled_bytes"] == 0
    pair.close()


def test_kills_while_what_was_spilled_is_sent(house: House) -> None:
    pair = Pair(house)
    pair.start_alice()
    pair.alice.feed(1, 150)
    pair.start_bob()
    for told in (20, 60, 100):
        pair.bob.until(lambda: len(pair.bob.state["told"]) >= told)  # noqa: B023
        pair.kill_alice()
        pair.start_alice()
    pair.alice.feed(151, 160)
    pair.arrives(160)
    pair.close()


def test_beyond_the_limit_the_app_is_slowed_until_there_is_room(house: House) -> None:
    pair = Pair(house, memory_mib=1, spill_limit_mb=8)
    pair.start_alice()
    app = pair.alice
    app.send(encode_attach_to("bob"))
    app.socket.setblocking(False)
    told, pending = 0, b""
    deadline = time.monotonic() + DEADLINE_S
    while not pair.alice_process.status()["held_up_for"]:
        assert time.monotonic() < deadline
        for _ in range(10):
            argument = (told + 1).to_bytes(4, "little") + bytes(CALL_SIZE_BYTES)
            pending = pending or encode_outgoing_rpc("bob", TOLD, RpcType.FORK, argument)
            if select.select([], [app.socket], [], 0)[1]:
                pending = pending[app.socket.send(pending) :]
                told += not pending
    status = pair.alice_process.status()
    assert (status["held_up_for"], status["app_paused"]) == (["bob"], True)
    assert status["outputs"]["bob"]["waiting_bytes"] < 11 << 20
    assert "the app is held up, the limits are 1 MiB in memory and 8 MiB on disk" in pair.alice_process.line("held up")
    pair.start_bob()
    app.socket.setblocking(True)
    app.send(pending)
    told += bool(pending)
    pair.arrives(told)
    pair.alice_process.until(lambda status: not status["held_up_for"] and not status["app_paused"])
    pair.close()
