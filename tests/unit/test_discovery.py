"""Where peers are found, in which order, and how changes are noticed; driven by a clock of the test's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from immortal.coordinator.config import ConfigError, read_settings, settings_text
from immortal.coordinator.instances.registry import Registry, UnknownInstanceError
from immortal.coordinator.peers.discovery import (
    FAST_POLL_NS,
    POLL_NS,
    UNCONNECTED_WARNING_NS,
    WARNING_REPEAT_NS,
    Discovery,
    Origin,
    Route,
    Routes,
)

GOOD = 'peer = "tcp://127.0.0.1:7001"\napp_port = 7002\n'


class Place:
    """A registry folder with the instance "alice", her routes, and a clock."""

    def __init__(self, home: Path) -> None:
        self.registry = Registry(home)
        home.mkdir()
        self.alice = ""
        self.rewrite("alice", GOOD)
        self.warnings: list[str] = []
        self.now_ns = 0
        self.connected: set[str] = set()
        self.discovery = Discovery(self.registry.load("alice"), self.registry)
        self.routes = Routes(self.discovery, self.warnings.append)

    def rewrite(self, name: str, text: str) -> None:
        path = self.registry.path(name)
        new = path.with_suffix(".new")  # another inode each time: two writes may share a moment
        new.write_text(text)
        new.rename(path)

    def put(self, name: str, endpoint: str) -> None:
        self.rewrite(name, f'peer = "{endpoint}"\napp_port = 7002\n')

    def find(self, name: str) -> Route:
        self.discovery.read_settings()
        return self.discovery.find(name)

    def look(self, after_ns: int = FAST_POLL_NS) -> list[tuple[str, str | None]]:
        self.now_ns += after_ns
        return self.routes.poll(self.now_ns, self.connected.__contains__)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path / "home")


# --- the order -------------------------------------------------------------------------------------------------------


def test_settings_come_first_then_the_registry_then_the_template(place: Place) -> None:
    with pytest.raises(UnknownInstanceError) as caught:
        place.find("bob")
    assert "there is no instance 'bob'" in str(caught.value)
    assert "register it there, or say where it is in" in str(caught.value)
    assert "alice.toml: under [peers], or by peer_template" in str(caught.value)
    place.rewrite("alice", 'peer_template = "tcp://{name}.immortals.svc:7400"\n' + GOOD)
    assert place.find("bob") == Route("tcp://bob.immortals.svc:7400", Origin.TEMPLATE)
    place.put("bob", "tcp://127.0.0.1:7101")
    assert place.find("bob") == Route("tcp://127.0.0.1:7101", Origin.REGISTRY)
    place.rewrite("alice", GOOD + '[peers]\nbob = "tcp://10.0.0.5:7400"\n')
    assert place.find("bob") == Route("tcp://10.0.0.5:7400", Origin.SETTINGS)


def test_a_registered_peer_whose_file_is_broken_is_not_looked_for_elsewhere(place: Place) -> None:
    place.rewrite("alice", 'peer_template = "tcp://{name}:7400"\n' + GOOD)
    place.rewrite("bob", "peer = 3\n")
    with pytest.raises(ConfigError, match="field 'peer': got 3"):
        place.find("bob")


@pytest.mark.parametrize("name", ["../alice", "", "a b", "x" * 65])
def test_a_name_that_no_instance_can_have_is_never_put_into_a_template(place: Place, name: str) -> None:
    place.rewrite("alice", 'peer_template = "tcp://{name}:7400"\n' + GOOD)
    with pytest.raises(ConfigError):
        place.find(name)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            GOOD + '[peers]\nbob = "10.0.0.5:7400"\n',
            "line 4, field 'peers.bob': got \"10.0.0.5:7400\", expected an end",
        ),
        (GOOD + '[peers]\nbob = "tcp://10.0.0.5:*"\n', "line 4, field 'peers.bob': got \"tcp://10.0.0.5:*\""),
        (GOOD + '[peers]\n"b b" = "tcp://10.0.0.5:1"\n', "line 4, table [peers]: 'b b' is no instance name"),
        (
            GOOD + '[peers]\nbob = "tcp://ho$t:1"\n',
            "line 4, field 'peers.bob': got \"tcp://ho$t:1\", expected an endpoint",
        ),
        (GOOD + "peers = 3\n", "line 3, field 'peers': got 3, expected a table [peers]"),
        (GOOD + 'peer_template = "tcp://svc:7400"\n', "line 3, field 'peer_template': got \"tcp://svc:7400\""),
        (GOOD + 'peer_template = "{name}"\n', "line 3, field 'peer_template': got \"{name}\", expected an endpoint"),
        (GOOD + 'peer_template = "tcp://{nam}:1"\n', "expected an endpoint with {name} in it"),
    ],
)
def test_what_is_wrong_in_the_settings_is_said(place: Place, text: str, words: str) -> None:
    place.rewrite("alice", text)
    with pytest.raises(ConfigError) as caught:
        read_settings(place.registry.path("alice"), "alice")
    assert words in str(caught.value)


def test_settings_are_written_back_as_they_were(place: Place) -> None:
    text = 'peer_template = "tcp://{name}:7400"\n' + GOOD + '[peers]\nbob = "tcp://10.0.0.5:7400"\n'
    place.rewrite("alice", text)
    settings = place.registry.load("alice")
    place.rewrite("alice", settings_text(settings, log=None))
    assert place.registry.load("alice") == settings
    assert settings.peers == {"bob": "tcp://10.0.0.5:7400"}


# --- looked at again -------------------------------------------------------------------------------------------------


def test_nothing_is_looked_at_before_anybody_is_called(place: Place) -> None:
    assert place.routes.next_deadline_ns() is None
    assert place.look() == []


def test_an_unknown_peer_is_warned_of_at_a_bounded_rate_and_found_when_it_is_there(place: Place) -> None:
    place.routes.add("bob", 0)
    place.routes.add("bob", 0)
    (warning,) = place.warnings
    assert warning.startswith("nothing is sent to 'bob', its calls wait: there is no instance 'bob'")
    assert place.routes.endpoint("bob") is None
    assert place.routes.next_deadline_ns() == FAST_POLL_NS
    for _ in range(WARNING_REPEAT_NS // FAST_POLL_NS - 1):
        assert place.look() == []
    assert len(place.warnings) == 1
    place.look()
    assert len(place.warnings) == 2
    place.put("bob", "tcp://127.0.0.1:7101")
    assert place.look(FAST_POLL_NS - 1) == [], "too early"
    assert place.look(1) == [("bob", None)]
    assert place.routes.endpoint("bob") == "tcp://127.0.0.1:7101"
    assert place.routes.describe("bob") == {
        "endpoint": "tcp://127.0.0.1:7101",
        "origin": "registry",
        "problem": None,
    }


def test_a_peer_that_moves_is_found_also_while_it_is_connected(place: Place) -> None:
    first, second = "tcp://127.0.0.1:7101", "tcp://127.0.0.1:7102"
    place.put("bob", first)
    place.routes.add("bob", 0)
    place.connected.add(first)
    assert place.look() == []
    place.put("bob", second)
    assert place.look(POLL_NS - 1) == []
    assert place.look(1) == [("bob", first)]
    assert place.look() == []
    assert list(place.routes.names_at(second)) == ["bob"]
    assert list(place.routes.names_at(first)) == []


def test_a_change_of_the_own_settings_is_found(place: Place) -> None:
    place.put("bob", "tcp://127.0.0.1:7101")
    place.routes.add("bob", 0)
    place.rewrite("alice", GOOD + '[peers]\nbob = "tcp://10.0.0.5:7400"\n')
    assert place.look() == [("bob", "tcp://127.0.0.1:7101")]
    assert place.routes.describe("bob")["origin"] == "settings"


def test_own_settings_that_break_stay_as_they_were_and_are_warned_of_once(place: Place) -> None:
    place.rewrite("alice", GOOD + '[peers]\nbob = "tcp://10.0.0.5:7400"\n')
    place.discovery.read_settings()
    place.routes.add("bob", 0)
    place.connected.add("tcp://10.0.0.5:7400")
    place.rewrite("alice", "nonsense")
    for _ in range(3):
        assert place.look(POLL_NS) == []
    (warning,) = place.warnings
    assert warning.startswith("the settings as they were stay in use: ")
    assert "alice.toml, line 1" in warning


def test_a_peer_that_is_unregistered_is_still_where_it_was(place: Place) -> None:
    place.put("bob", "tcp://127.0.0.1:7101")
    place.routes.add("bob", 0)
    place.connected.add("tcp://127.0.0.1:7101")
    place.registry.path("bob").unlink()
    assert place.look() == []
    assert place.routes.endpoint("bob") == "tcp://127.0.0.1:7101"
    assert place.warnings == []


def test_a_peer_that_stays_unconnected_is_warned_of(place: Place) -> None:
    place.put("bob", "tcp://127.0.0.1:7101")
    place.routes.add("bob", 0)
    looks = UNCONNECTED_WARNING_NS // FAST_POLL_NS
    for _ in range(looks - 1):
        place.look()
    assert place.warnings == [], "a peer that restarts is not worth a line"
    place.look()
    assert place.warnings == [
        "no connection to 'bob' at tcp://127.0.0.1:7101 (by the registry) for 10 s, its calls wait: start it, or "
        "correct where it is"
    ]
    place.connected.add("tcp://127.0.0.1:7101")
    place.look()
    assert place.routes.next_deadline_ns() == place.now_ns + POLL_NS
    place.connected.clear()
    place.look(POLL_NS)
    for _ in range(looks - 1):
        place.look()
    assert len(place.warnings) == 1
    place.look()
    assert len(place.warnings) == 2


def test_a_poll_that_is_late_says_nothing_about_the_peer(place: Place) -> None:
    """While a call of 200 MiB is copied, nobody hears that its receiver has connected."""
    place.put("bob", "tcp://127.0.0.1:7101")
    place.routes.add("bob", 0)
    place.look(UNCONNECTED_WARNING_NS + POLL_NS)
    place.connected.add("tcp://127.0.0.1:7101")
    place.look()
    assert place.warnings == []
