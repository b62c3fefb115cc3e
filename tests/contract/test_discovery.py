"""Real coordinators that find each other: by the settings, the registry folder, a template; and when they move."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from immortal.coordinator.operator import control
from immortal.coordinator.operator.unregister import unregister
from tests.helpers.processes import CoordinatorProcess, House, SocketApp

RETURN_S_MAX = 5.0  # of a machine that is busy; 0.5 is wanted, and printed


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    made = House(tmp_path / "home")
    yield made
    made.close()


def add_settings(house: House, name: str, *, front: str = "", end: str = "") -> None:
    path = house.registry.path(name)
    path.write_text(front + path.read_text() + end)


def move(house: House, name: str) -> None:
    """Another port for the peers of ``name``, as if its machine had changed."""
    settings = house.settings(name)
    unregister(house.registry, name)
    house.registry.register(name, "tcp://127.0.0.1:*", app_port=settings.app_port, app_auth="none")
    assert house.settings(name).peer != settings.peer


def peer_of(process: CoordinatorProcess, name: str) -> dict:
    return control.query(process.settings.folder, "peers")["peers"][name]  # type: ignore[no-any-return]


def forward(alice: SocketApp, *numbers: int) -> None:
    """Let ``alice`` call her peer with these numbers."""
    for number in numbers:
        alice.impulse(number)
    alice.until(lambda: alice.state["forwarded"][-1:] == [numbers[-1]])


def test_an_unknown_peer_holds_up_only_its_own_stream_until_it_is_registered(house: House) -> None:
    house.register("alice", "dave")
    process, alice = house.both("alice", peer="carol")
    forward(alice, 1, 2)
    process.line("nothing is sent to 'carol', its calls wait")
    output = process.status()["outputs"]["carol"]
    assert "there is no instance 'carol'" in output["error"]
    assert (output["endpoint"], output["connected"], output["acknowledged"]) == ("", False, 0)
    # A call from elsewhere is taken meanwhile.
    _, dave = house.both("dave", peer="alice")
    forward(dave, 7)
    alice.until(lambda: alice.state["told"] == [7])
    house.register("carol")
    _, carol = house.both("carol")
    carol.until(lambda: carol.state["told"] == [1, 2])
    process.line("peer found")
    forward(alice, 3)
    carol.until(lambda: carol.state["told"] == [1, 2, 3])
    shown = process.until(lambda status: status["outputs"]["carol"]["acknowledged"] == 3)["outputs"]["carol"]
    assert shown["error"] is None
    peer = peer_of(process, "carol")
    assert (peer["endpoint"], peer["origin"]) == (house.settings("carol").peer, "registry")
    assert peer["connected_s"] >= 0
    assert process.process.poll() is None


def test_a_peer_that_comes_back_under_another_address_is_found(house: House) -> None:
    house.register("alice", "bob")
    bob_process, bob = house.both("bob")
    process, alice = house.both("alice", peer="bob")
    forward(alice, 1)
    bob.until(lambda: bob.state["told"] == [1])
    bob_process.kill()
    bob.until_closed()
    forward(alice, 2, 3)
    move(house, "bob")
    process.line("peer moved")
    _, bob = house.both("bob")
    bob.until(lambda: bob.state["told"] == [1, 2, 3])
    forward(alice, 4)
    bob.until(lambda: bob.state["told"] == [1, 2, 3, 4])


def test_a_place_in_the_settings_is_taken_up_by_a_running_coordinator(house: House, tmp_path: Path) -> None:
    # bob is registered in another folder: alice knows him by her settings alone, then by a template.
    other = House(tmp_path / "other")
    try:
        other.register("bob")
        house.register("alice")
        bob_process, bob = other.both("bob")
        process, alice = house.both("alice", peer="bob")
        forward(alice, 1)
        process.line("nothing is sent to 'bob', its calls wait")
        add_settings(house, "alice", end=f'\n[peers]\nbob = "{bob_process.settings.peer}"\n')
        bob.until(lambda: bob.state["told"] == [1])
        assert peer_of(process, "bob")["origin"] == "settings"
        process.kill()
        alice.until_closed()
        unregister(house.registry, "alice")
        house.register("alice")
        port = bob_process.settings.peer.rpartition(":")[2]
        # The name in it is looked up as any: this one is known on every machine, and bob says that he is another.
        add_settings(house, "alice", front=f'peer_template = "tcp://{{name}}:{port}"\n')
        process, alice = house.both("alice", peer="localhost")
        forward(alice, 2)
        error = process.until(lambda status: status["outputs"].get("localhost", {}).get("error"))
        assert "this is 'bob', the message is for 'localhost'" in error["outputs"]["localhost"]["error"]
        assert peer_of(process, "localhost")["origin"] == "template"
    finally:
        other.close()


def test_two_names_at_one_place_do_not_disturb_each_other(house: House) -> None:
    # "mallory" is said to be where bob is: bob refuses those calls, again and again, and his own go on.
    house.register("alice", "bob")
    add_settings(house, "alice", end=f'\n[peers]\nmallory = "{house.settings("bob").peer}"\n')
    _, bob = house.both("bob")
    process, alice = house.both("alice", peer="bob")
    forward(alice, 1)
    bob.until(lambda: bob.state["told"] == [1])
    alice.peer, alice.attached = "mallory", False
    forward(alice, 2)
    process.line("this is 'bob', the message is for 'mallory'")
    alice.peer = "bob"
    forward(alice, *range(3, 40))
    bob.until(lambda: bob.state["told"] == [1, *range(3, 40)])
    assert process.count("stream stopped") == 1


@pytest.mark.parametrize("moved", [False, True], ids=["the same address", "another address"])
def test_a_peer_that_returns_is_reached_at_once(house: House, moved: bool) -> None:
    house.register("alice", "bob")
    bob_process, bob = house.both("bob")
    process, alice = house.both("alice", peer="bob")
    forward(alice, 1)
    bob.until(lambda: bob.state["told"] == [1])
    bob_process.kill()
    bob.until_closed()
    process.until(lambda status: not status["outputs"]["bob"]["connected"])
    if moved:
        move(house, "bob")
    back = house.start("bob")
    started = time.monotonic()
    process.until(lambda status: status["outputs"]["bob"]["connected"])
    connected_s = time.monotonic() - started
    bob = house.app("bob").ready()
    forward(alice, 2)
    asked = time.monotonic()
    bob.until(lambda: bob.state["told"] == [1, 2])
    print(
        f"connected {connected_s * 1000:.0f} ms after its return; "
        f"the first call took {(time.monotonic() - asked) * 1000:.0f} ms"
    )
    assert connected_s < RETURN_S_MAX
    assert back.process.poll() is None
