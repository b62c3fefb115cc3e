"""Two coordinators in two network namespaces, and the link between them goes: nothing lost, doubled or reordered."""

from __future__ import annotations

import select
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from immortal.coordinator.peers import keys
from tests.helpers.namespaces import ADDRESSES, Namespaces
from tests.helpers.processes import CoordinatorProcess, House, SocketApp

RECONNECT_S_MAX = 2.0  # two attempts to connect


class Ends:
    """alice on side 0 forwards numbers to bob on side 1."""

    def __init__(self, house: House, namespaces: Namespaces) -> None:
        self.house, self.namespaces = house, namespaces
        for side, name in enumerate(("alice", "bob")):
            endpoint = f"tcp://{ADDRESSES[side]}:*"
            namespaces.inside(side, lambda: house.registry.register(name, endpoint, app_auth="none"))  # noqa: B023
            keys.create(house.settings(name).folder)  # on such an address nobody starts without
        self.sent = 0

    def start(self, side: int) -> tuple[CoordinatorProcess, SocketApp]:
        name, peer = (("alice", "bob"), ("bob", ""))[side]
        process = self.namespaces.inside(side, lambda: self.house.start(name))
        return process, self.namespaces.inside(side, lambda: self.house.app(name, peer=peer)).ready()

    def feed(self, alice: SocketApp, count: int) -> None:
        for _ in range(count):
            self.sent += 1
            alice.impulse(self.sent)
        alice.until(lambda: len(alice.state["forwarded"]) == self.sent)

    def arrives(self, bob: SocketApp) -> None:
        bob.until(lambda: len(bob.state["told"]) >= self.sent)
        assert bob.state["told"] == list(range(1, self.sent + 1))


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[Ends]:
    house = House(tmp_path / "home")
    with Namespaces() as namespaces:
        try:
            yield Ends(house, namespaces)
        finally:
            house.close()


def test_the_link_goes_down_and_comes_back(ends: Ends) -> None:
    bob_process, bob = ends.start(1)
    alice_process, alice = ends.start(0)
    ends.feed(alice, 20)
    ends.arrives(bob)
    for side in (0, 1):
        ends.namespaces.pull(side)
        ends.feed(alice, 100)
        assert bob.state["told"] == list(range(1, ends.sent - 99))
        ends.namespaces.plug(side)
        ends.arrives(bob)
    for process in (alice_process, bob_process):
        assert process.count(" error ") == 0, process.lines


def test_the_peer_dies_behind_a_link_that_is_down(ends: Ends) -> None:
    """No end of the connection reaches alice: she learns of it when the link is back and her old connection unknown."""
    bob_process, bob = ends.start(1)
    _, alice = ends.start(0)
    ends.feed(alice, 20)
    ends.arrives(bob)
    ends.namespaces.pull()
    ends.feed(alice, 20)
    bob_process.kill()
    bob.until_closed()
    ends.namespaces.plug()
    _, bob = ends.start(1)
    ends.feed(alice, 20)
    ends.arrives(bob)


@pytest.mark.slow
def test_a_road_that_swallows_connections_is_tried_again_soon(ends: Ends, capsys: pytest.CaptureFixture[str]) -> None:
    """TCP itself would wait longer and longer before it asks again: after 8 s, until 11 s."""
    _, bob = ends.start(1)
    ends.namespaces.swallow()
    _, alice = ends.start(0)
    ends.feed(alice, 20)
    swallowed_until_s = time.monotonic() + 8.0
    while (left_s := swallowed_until_s - time.monotonic()) > 0:
        assert not select.select([bob.socket], [], [], left_s)[0], "the road does not swallow"
    ends.namespaces.deliver()
    delivered_s = time.monotonic()
    ends.arrives(bob)
    took_s = time.monotonic() - delivered_s
    with capsys.disabled():
        print(f"\nreached {took_s:.2f} s after the road swallowed nothing any more")
    assert took_s < RECONNECT_S_MAX
