"""Loops of services with the smallest windows, and a log that its app does not keep up with: real processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from immortal.protocol.messages import MessageType, RpcType, decode_incoming_rpc, encode_attach_to, encode_outgoing_rpc
from tests.helpers.processes import FORWARD, TOLD, House, SocketApp

SMALLEST = """
[tuning]
peer_window_kib_max = 64
receive_buffer_mib_max = 1
peer_buffer_mib_max = 1
"""
RING = 3
HOPS = 6
PADDING_SIZE_BYTES = 80 << 10  # more than a window


class RingApp(SocketApp):
    """Each impulse sends a message around: HOPS times to the next instance in turn, or to itself."""

    rung = 0

    def _called(self, data: bytes) -> None:
        rpc = decode_incoming_rpc(data)
        if rpc.rpc_type != RpcType.IMPULSE and rpc.method_id != RING:
            raise AssertionError(f"method {rpc.method_id}")
        hops = rpc.arguments[0]
        self.rung += 1
        if hops:
            if self.peer and not self.attached:
                self.attached = True
                self.send(encode_attach_to(self.peer))
            argument = bytes((hops - 1,)) + bytes(PADDING_SIZE_BYTES)
            self.send(encode_outgoing_rpc(self.peer, RING, RpcType.FORK, argument))

    def begin(self, count: int) -> None:
        for _ in range(count):
            self.send(encode_outgoing_rpc("", RING, RpcType.IMPULSE, bytes((HOPS,))))


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    made = House(tmp_path / "home")
    yield made
    made.close()


@pytest.mark.parametrize("names", [("alice",), ("alice", "bob", "carol")], ids=["self-calls", "a cycle of three"])
@pytest.mark.parametrize("spill_limit_mb", [0, 2])
def test_a_loop_under_full_load_goes_on(house: House, names: tuple[str, ...], spill_limit_mb: int) -> None:
    house.register(*names, spill_limit_mb=spill_limit_mb)
    apps: list[SocketApp] = []
    for name in names:
        with house.registry.path(name).open("a") as file:
            file.write(SMALLEST)
        house.start(name)
    ring = []
    for name, following in zip(names, (*names[1:], names[0]), strict=True):
        app = RingApp(house.settings(name), apps, peer="" if following == name else following)
        app.ready()
        ring.append(app)
    count = 30
    for app in ring:
        app.begin(count)
    ring[0].until(lambda: sum(app.rung for app in ring) == len(ring) * count * (HOPS + 1))
    assert [app.rung for app in ring] == [count * (HOPS + 1)] * len(ring)
    for app in apps:
        app.close()


def output(status: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = status["outputs"].get("bob", {})
    return found


def test_an_app_that_does_not_keep_up_blocks_its_peers_only_when_its_log_is_full(house: House) -> None:
    house.register("alice")
    house.register("bob", log_limit_mb=6)
    alice_process, bob_process = house.start("alice"), house.start("bob")
    bob = SocketApp(house.settings("bob"), []).ready()  # listens when the test lets it, and not before
    alice = SocketApp(house.settings("alice"), [], peer="bob").ready()
    alice.send(encode_attach_to("bob"))

    def tell(first: int, last: int) -> None:
        for number in range(first, last + 1):
            argument = number.to_bytes(4, "little") + bytes(100_000)
            alice.send(encode_outgoing_rpc("bob", TOLD, RpcType.FORK, argument))

    tell(1, 30)
    alice_process.until(lambda status: output(status).get("acknowledged") == 30)  # bob's app has taken nothing
    told = 30
    while not bob_process.status()["log"]["full"]:
        tell(told + 1, told + 10)
        told += 10
        alice_process.until(lambda status: output(status)["position"] == told)  # noqa: B023
        assert told < 1000, "the log grows without end"
    tell(told + 1, told + 50)
    told += 50
    line = bob_process.line("input from peers and impulses are held back: 'bob' is full: its log takes")
    assert "log_limit_mb is 6 MiB" in line
    assert "'bob' refuses this instance's messages: 'bob' is full" in alice_process.line("stream stopped")
    status = alice_process.until(lambda status: output(status)["state"] == "failed")
    assert 30 < output(status)["acknowledged"] < told
    assert "log_limit_mb is 6 MiB" in bob_process.status()["log"]["full"]
    bob.send(encode_outgoing_rpc("", FORWARD, RpcType.IMPULSE, (1).to_bytes(4, "little")))

    def caught_up() -> bool:
        return len(bob.state["told"]) == told and bool(bob.state["forwarded"])

    bob.until(caught_up)
    assert bob.state["told"] == list(range(1, told + 1))
    assert MessageType.TAKE_CHECKPOINT in bob.types, "the way to room"
    bob_process.line("the log has room again")

    def is_over() -> bool:
        return output(alice_process.status())["acknowledged"] == told and not bob_process.status()["log"]["full"]

    bob.serve_until(is_over)  # its last records may have filled the log once more
    assert bob_process.status()["log"]["used_bytes"] < 20 << 20
    alice.close()
    bob.close()
