"""`immortal peers` as an operator types it, with real coordinators whose logs are wiped or replaced by older copies."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from immortal.coordinator.core.limits import Limits
from immortal.coordinator.fault_points import VARIABLE, FaultPoint
from immortal.coordinator.log.verify import verify_log
from tests.helpers.cli import HOME, immortal
from tests.helpers.processes import CoordinatorProcess, House, SocketApp


class Pair:
    """alice and bob, each of whom forwards to the other."""

    def __init__(self, folder: Path, *, extended: bool = False) -> None:
        self.folder = folder
        self.house = House(folder / HOME)
        self.house.register("alice", "bob")
        self.extended = extended  # the apps say Hello, and hold back nothing that a replay makes
        self.processes: dict[str, CoordinatorProcess] = {}
        self.apps: dict[str, SocketApp] = {}

    def start(self, name: str) -> None:
        self.processes[name], self.apps[name] = self.house.both(
            name, peer="bob" if name == "alice" else "alice", extended=self.extended
        )

    def kill(self, name: str) -> None:
        self.processes[name].kill()
        self.apps[name].until_closed()

    def stop(self, name: str) -> None:
        self.processes[name].terminate()
        self.apps[name].until_closed()
        assert self.processes[name].ended()[0] == 0

    def log(self, name: str) -> Path:
        return Path(self.house.settings(name).log)

    def wipe(self, name: str) -> None:
        self.kill(name)
        shutil.rmtree(self.log(name))

    def forward(self, name: str, *numbers: int) -> None:
        app = self.apps[name]
        before = len(app.state["forwarded"])
        for number in numbers:
            app.impulse(number)
        app.until(lambda: len(app.state["forwarded"]) == before + len(numbers))

    def told(self, name: str, *numbers: int) -> None:
        app = self.apps[name]
        app.until(lambda: len(app.state["told"]) >= len(numbers))
        assert app.state["told"] == list(numbers)

    def begin(self) -> None:
        """Each has called the other."""
        self.start("bob")
        self.start("alice")
        self.forward("alice", 1, 2, 3)
        self.told("bob", 1, 2, 3)
        self.forward("bob", 11, 12)
        self.told("alice", 11, 12)
        self.acknowledged("alice", 3)
        self.acknowledged("bob", 2)

    def go_on(self) -> None:
        """Two calls more of alice's, one more of bob's."""
        self.forward("alice", 4, 5)
        self.told("bob", 1, 2, 3, 4, 5)
        self.forward("bob", 13)
        self.told("alice", 11, 12, 13)
        self.acknowledged("alice", 5)
        self.acknowledged("bob", 3)

    def acknowledged(self, name: str, position: int) -> None:
        other = "bob" if name == "alice" else "alice"
        self.processes[name].until(lambda status: status["outputs"][other]["acknowledged"] == position)

    def shown(self, name: str) -> dict[str, Any]:
        found = json.loads(immortal(self.folder, "peers", "show", name, "--json"))
        assert found["name"] == name
        return found["peers"]  # type: ignore[no-any-return]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path)
    made.begin()
    yield made
    made.house.close()


@pytest.fixture
def modern_pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path, extended=True)
    made.begin()
    yield made
    made.house.close()


def assert_sound(pair: Pair) -> None:
    for name in ("alice", "bob"):
        pair.kill(name)
        verification = verify_log(pair.log(name), name)
        fatal = [finding for finding in verification.findings() if finding.severity.value not in ("note", "warning")]
        assert not fatal, fatal


def test_a_wiped_peer_is_an_error_on_both_sides_and_a_reset_lets_traffic_go_on(pair: Pair) -> None:
    pair.wipe("bob")
    pair.forward("alice", 4)  # bob never gets it: not acknowledged, it goes to his new log
    pair.start("bob")
    pair.forward("bob", 21, 22)
    alice, bob = pair.processes["alice"], pair.processes["bob"]
    remedy = "run 'immortal peers reset alice bob'"
    line = alice.line("stream stopped: 'bob'")
    assert remedy in line
    line = bob.line("stream refused: 'bob' has 0 messages of 'alice', it once had 3: its log was wiped or replaced")
    assert remedy in line
    line = alice.line("stream refused: 'bob' was committer")
    assert "2 of its messages are here" in line
    assert remedy in line
    line = bob.line("stream stopped: 'alice' refuses this instance's messages: 'bob' was committer")
    assert remedy in line
    error = pair.shown("alice")["bob"]
    assert error["state"] in ("failed", "greeting")  # it is tried again
    assert remedy in error["error"]

    said = immortal(pair.folder, "peers", "reset", "alice", "bob", given="n\n", status=1)
    assert "the first 3 calls, which bob acknowledged, are not sent again" in said
    assert "calls not acknowledged (1 of 4) are sent to the new log of bob" in said
    assert "Reset the streams with bob? [y/N]" in said
    assert not pair.shown("alice")["bob"]["reset_pending"]

    said = immortal(pair.folder, "peers", "reset", "alice", "bob", "--yes")
    assert "reset: alice accepts the log that bob has at their next connection" in said
    pair.told("bob", 4)
    pair.told("alice", 11, 12, 21, 22)
    pair.forward("alice", 5, 6)
    pair.forward("bob", 23)
    pair.told("bob", 4, 5, 6)
    pair.told("alice", 11, 12, 21, 22, 23)
    pair.acknowledged("alice", 6)
    shown = pair.shown("alice")["bob"]
    assert (shown["made"], shown["acknowledged"], shown["received"], shown["offset"]) == (6, 6, 3, 3)
    assert (shown["state"], shown["error"], shown["reset_pending"]) == ("open", None, False)

    # Both survive kill -9 with their new numbers.
    for name in ("alice", "bob"):
        pair.kill(name)
        pair.start(name)
    pair.forward("alice", 7)
    pair.forward("bob", 24)
    pair.told("bob", 4, 5, 6, 7)
    pair.told("alice", 11, 12, 21, 22, 23, 24)
    assert_sound(pair)


def test_a_reset_of_a_stopped_instance(pair: Pair) -> None:
    pair.forward("alice", 4)
    pair.told("bob", 1, 2, 3, 4)
    pair.acknowledged("alice", 4)
    pair.stop("alice")
    shown = pair.shown("alice")["bob"]
    assert (shown["acknowledged"], shown["received"], shown["state"], shown["reset_pending"]) == (4, 2, None, False)
    assert (shown["endpoint"], shown["origin"]) == (pair.house.settings("bob").peer, "registry")
    pair.wipe("bob")
    answer = json.loads(immortal(pair.folder, "peers", "reset", "alice", "bob", "--yes", "--json"))
    assert (answer["name"], answer["peer"], answer["reset"]) == ("alice", "bob", True)
    assert pair.shown("alice")["bob"]["reset_pending"]
    pair.start("bob")
    pair.start("alice")
    pair.forward("alice", 5)
    pair.forward("bob", 21)
    pair.told("bob", 5)
    pair.told("alice", 11, 12, 21)
    assert pair.processes["alice"].count(" error ") == 0
    assert_sound(pair)


def test_an_older_copy_of_a_log_needs_a_reset_on_both_sides_and_nothing_else_is_lost(pair: Pair) -> None:
    pair.stop("bob")
    older = pair.folder / "older"
    shutil.copytree(pair.log("bob"), older)
    pair.start("bob")
    pair.go_on()
    pair.wipe("bob")
    shutil.copytree(older, pair.log("bob"))
    pair.start("bob")
    pair.forward("alice", 6)
    pair.forward("bob", 14)
    alice, bob = pair.processes["alice"], pair.processes["bob"]
    line = bob.line("stream refused: 'bob' has 3 messages of 'alice', it once had 5: its log was wiped or replaced by")
    assert "'immortal peers reset alice bob'" in line
    assert "'immortal peers reset alice bob'" in alice.line("stream stopped: 'bob' refuses this instance's messages")
    remedy = "run 'immortal peers reclaim bob'"
    assert remedy in alice.line("stream refused: epoch 2 of 'bob' has begun twice")
    assert remedy in bob.line("stream stopped: 'alice' refuses this instance's messages: epoch 2 of 'bob' has begun")
    for name, peer in (("alice", "bob"), ("bob", "alice")):
        immortal(pair.folder, "peers", "reset", name, peer, "--yes")
    # 4 and 5 are lost to bob's log, which had acknowledged them; 13 is lost to bob, and stays with alice.
    pair.told("bob", 1, 2, 3, 6)
    pair.told("alice", 11, 12, 13, 14)
    pair.forward("alice", 7)
    pair.forward("bob", 15)
    pair.told("bob", 1, 2, 3, 6, 7)
    pair.told("alice", 11, 12, 13, 14, 15)
    assert_sound(pair)


def test_a_reset_of_a_healthy_peer_loses_and_doubles_nothing(pair: Pair) -> None:
    for _ in range(2):
        immortal(pair.folder, "peers", "reset", "alice", "bob", "--yes")
    pair.forward("alice", 4)
    pair.forward("bob", 13)
    pair.told("bob", 1, 2, 3, 4)
    pair.told("alice", 11, 12, 13)
    assert pair.shown("alice")["bob"]["offset"] == 0


@pytest.mark.parametrize("point", [FaultPoint.BEFORE_RESET, FaultPoint.AFTER_RESET])
def test_a_kill_around_the_commit_of_a_reset(
    pair: Pair, point: FaultPoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = tmp_path / "plan"
    monkeypatch.setenv(VARIABLE, str(plan))
    pair.kill("alice")
    pair.start("alice")
    plan.write_text(f"1 kill {point.value}")
    immortal(pair.folder, "peers", "reset", "alice", "bob", "--yes", status=1)
    assert pair.processes["alice"].ended()[0] == -9
    pair.apps["alice"].until_closed()
    pair.start("alice")
    immortal(pair.folder, "peers", "reset", "alice", "bob", "--yes")
    pair.forward("alice", 4)
    pair.forward("bob", 13)
    pair.told("bob", 1, 2, 3, 4)
    pair.told("alice", 11, 12, 13)


def test_what_show_shows(pair: Pair) -> None:
    shown = pair.shown("alice")["bob"]
    assert (shown["made"], shown["sent"], shown["acknowledged"], shown["received"]) == (3, 3, 3, 2)
    assert (shown["waiting_bytes"], shown["in_flight_bytes"], shown["window_bytes"]) == (
        0,
        0,
        Limits().peer_window_bytes,
    )
    assert shown["granted_bytes"] == Limits().peer_window_bytes
    assert shown["connected_s"] >= 0
    table = immortal(pair.folder, "peers", "show", "alice")
    assert "peer" in table
    assert pair.house.settings("bob").peer in table
    assert "registry" in table
    pair.kill("bob")
    pair.forward("alice", 4)
    waiting = pair.shown("alice")["bob"]
    assert (waiting["made"], waiting["acknowledged"]) == (4, 3)
    assert waiting["waiting_bytes"] == waiting["memory_bytes"] > 0
    assert (waiting["spilled_bytes"], waiting["held_up"]) == (0, False)


class StaleCopy:
    """A copy of bob's log, made while he was stopped, that runs in his place for a while."""

    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        self._log, self._copy, self._original = pair.log("bob"), pair.folder / "copy", pair.folder / "original"
        pair.stop("bob")
        shutil.copytree(self._log, self._copy)

    def start(self) -> None:
        """Bob is not running."""
        self._log.rename(self._original)
        self._copy.rename(self._log)
        self._pair.start("bob")

    def give_way(self) -> None:
        self._pair.stop("bob")
        shutil.rmtree(self._log)
        self._original.rename(self._log)


def all_flows(pair: Pair, alice: list[int], bob: list[int]) -> None:
    pair.forward("alice", 91, 92)
    pair.forward("bob", 81, 82)
    pair.told("bob", *bob, 91, 92)
    pair.told("alice", *alice, 81, 82)
    for name in ("alice", "bob"):
        pair.kill(name)
        pair.start(name)
    pair.forward("alice", 93)
    pair.forward("bob", 83)
    pair.told("bob", *bob, 91, 92, 93)
    pair.told("alice", *alice, 81, 82, 83)
    assert_sound(pair)


@pytest.mark.parametrize("running", [True, False])
def test_a_copy_that_only_greeted_is_undone_by_one_command_without_loss(modern_pair: Pair, running: bool) -> None:
    pair = modern_pair
    copy = StaleCopy(pair)
    pair.start("bob")
    pair.go_on()
    pair.stop("bob")
    copy.start()
    for _ in range(2):  # each start is an epoch: the last one is later than any of the original
        pair.kill("bob")
        pair.start("bob")
    pair.forward("alice", 6)
    pair.processes["alice"].line("stream stopped: 'bob' refuses this instance's messages: 'bob' has 3 messages of")
    pair.processes["bob"].line("stream stopped: 'alice' has 3 messages of this instance, which has sent only 2")
    copy.give_way()
    if running:
        pair.start("bob")
        pair.processes["bob"].line("stream stopped: 'alice' refuses this instance's messages: a frame of epoch")
    said = immortal(pair.folder, "peers", "reclaim", "bob")
    assert said == "reclaimed: the log of bob is valid, and its streams with alice continue\n"
    if not running:
        pair.start("bob")
    all_flows(pair, [11, 12, 13], [1, 2, 3, 4, 5, 6])


@pytest.mark.parametrize("running", [True, False])
def test_a_copy_that_was_heard_is_undone_once_the_loss_is_accepted(modern_pair: Pair, running: bool) -> None:
    pair = modern_pair
    copy = StaleCopy(pair)
    copy.start()
    pair.forward("bob", 21, 22)
    pair.told("alice", 11, 12, 21, 22)
    pair.forward("alice", 4)
    pair.told("bob", 1, 2, 3, 4)
    pair.acknowledged("alice", 4)
    pair.acknowledged("bob", 4)
    copy.give_way()
    if running:
        pair.start("bob")
        pair.forward("bob", 13)  # it is alice's third call of bob, where she has the copy's
        assert "has begun twice" in pair.processes["bob"].line("stream stopped: 'alice' refuses this instance's")
    said = immortal(pair.folder, "peers", "reclaim", "bob", status=1)
    assert "nothing was done: with --accept-loss 'bob' continues, and" in said
    assert "alice: has executed 2 calls that the log of bob does not have as received" in said
    assert "alice: 1 of its calls went to the copy, and are lost to bob" in said
    answer = json.loads(immortal(pair.folder, "peers", "reclaim", "bob", "--accept-loss", "--json"))
    assert answer["peers"] == {"alice": {"unknown_at_peer": 2, "lost_of_peer": 1}}
    if not running:
        pair.start("bob")
        pair.forward("bob", 13)
    all_flows(pair, [11, 12, 21, 22, 13], [1, 2, 3])


def test_what_a_copy_did_at_a_peer_that_cannot_be_asked_is_not_known(pair: Pair) -> None:
    pair.stop("alice")
    shutil.rmtree(pair.log("alice"))
    said = immortal(pair.folder, "peers", "reclaim", "bob", status=1)
    assert "alice: the losses are not known" in said
    assert not pair.shown("bob")["alice"]["reset_pending"]


def test_wrong_calls_are_one_line_each(tmp_path: Path) -> None:
    immortal(tmp_path, "register", "alice", "--peer", "tcp://127.0.0.1:*")
    assert immortal(tmp_path, "peers", "show", "alice") == "alice has no peers yet\n"
    said = immortal(tmp_path, "peers", "reset", "alice", "bob", "--yes", status=1)
    assert said == "error: 'alice' has had no contact with 'bob' yet: there is nothing to reset\n"
    said = immortal(tmp_path, "peers", "reclaim", "alice", status=1)
    assert said == "error: 'alice' has had no contact with any peer yet: there is nothing to reclaim\n"
    assert "'alice' is not a peer of itself" in immortal(tmp_path, "peers", "reset", "alice", "alice", status=2)
    assert "there is no instance 'carol'" in immortal(tmp_path, "peers", "show", "carol", status=1)
    assert "there is no command 'shoe': did you mean 'show'?" in immortal(tmp_path, "peers", "shoe", status=2)
