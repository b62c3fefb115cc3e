"""The order of a turn's duties."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from immortal.coordinator.core import effects as ef
from immortal.coordinator.core import events as ev
from immortal.coordinator.core.components import Components
from immortal.coordinator.core.life_cycle.session import Phase
from immortal.coordinator.core.limits import Limits
from immortal.coordinator.core.machine import Machine
from immortal.coordinator.driver.ports import PlainApp, PlainHost, PlainLog, PlainPeers
from immortal.coordinator.driver.turn import Driver
from immortal.coordinator.log.memory import MemoryLogStore
from immortal.protocol.peer_frames import FrameType, PeerFrame
from tests.helpers.core import HELLO, NOW_NS, attach, call, first_start, rpc


class _App(PlainApp):
    def __init__(self, done: list[str]) -> None:
        self._done = done
        self.sent: list[ev.Event] = []
        self.takes_at_once = False
        self.found_out: list[ev.Event] = []  # by the next flush

    def send(self, effect: ef.SendToApp) -> None:
        self._done.append("app")
        if self.takes_at_once:
            self.sent.append(ev.AppSent(len(effect.data)))

    def flush(self) -> Sequence[ev.Event]:
        found_out, self.found_out = self.found_out, []
        return found_out

    def pop_sent_events(self) -> Sequence[ev.Event]:
        sent, self.sent = self.sent, []
        return sent


class _Peers(PlainPeers):
    def __init__(self, done: list[str], inbox: list[ev.Event]) -> None:
        self._done, self._inbox = done, inbox
        self.patience: list[bool] = []
        self.flushed_after: list[str] = []
        self.has_new = False
        self.waiting: list[ev.Event] = []
        self.is_held = False

    def begin_turn(self) -> None:
        self.is_held = True

    def send(self, effect: ef.SendToPeer) -> None:
        assert self.is_held, "it would leave before the turn's other duties"
        self._done.append(f"to peer: {effect.frame.frame_type.name}")
        self.has_new = True

    def reply(self, effect: ef.ReplyToPeer) -> None:
        self._done.append(f"reply: {effect.frame.frame_type.name}")
        self.has_new = True

    def flush(self, *, patient: bool) -> None:
        if self.has_new:
            self._done.append("flush")
        self.has_new = self.is_held = False
        self.patience.append(patient)
        self.flushed_after.append(self._done[-1] if self._done else "")

    @property
    def replies_wait(self) -> bool:  # type: ignore[override]
        return bool(self.waiting)

    def receive(self) -> None:
        self._done.append("answers taken")
        self._inbox += self.waiting
        self.waiting.clear()


class _Log(PlainLog):
    """Small commits are written inside the turn."""

    def __init__(self, done: list[str], inbox: list[ev.Event]) -> None:
        super().__init__(MemoryLogStore(1), inbox)
        self._done = done

    @property
    def has_inline(self) -> bool:  # type: ignore[override]
        return bool(self.jobs)

    def run_inline(self) -> None:
        while self.jobs:
            self._done.append("written")
            self.inbox.append(self.work())


class _Clock:
    def __init__(self) -> None:
        self.events: list[ev.Event] = []

    def now_ns(self) -> int:
        return NOW_NS

    def pop_events(self) -> Sequence[ev.Event]:
        events, self.events = self.events, []
        return events

    def wake_at(self, effect: ef.WakeAt) -> None:
        pass


class Turns:
    def __init__(self) -> None:
        self.done: list[str] = []
        inbox: list[ev.Event] = []
        self.app, self.peers, self.log = _App(self.done), _Peers(self.done, inbox), _Log(self.done, inbox)
        self.clock = _Clock()
        self.machine = Machine(Components("a"))
        self.driver = Driver(self.machine, inbox, self.app, self.peers, self.log, self.clock, PlainHost())
        self.driver.start()
        self.turn(ev.AppConnected())
        self.turn(ev.AppData(HELLO + first_start()))

    def turn(self, *events: ev.Event) -> list[str]:
        self.done.clear()
        self.driver.inbox += events
        self.driver.turn()
        return self.done

    def frame(self, frame_type: FrameType, position: int, **fields: object) -> PeerFrame:
        return PeerFrame(frame_type, "b", "a", 77, 1, position, **fields)  # type: ignore[arg-type]


def test_a_call_is_answered_behind_its_record_and_within_the_turn_that_wrote_it() -> None:
    turns = Turns()
    turns.turn(ev.PeerFrameReceived("hello", turns.frame(FrameType.HELLO, 0)))
    batch = turns.frame(FrameType.BATCH, 1, count=1, payload=rpc(7), time_ns=5)
    assert turns.turn(ev.PeerFrameReceived("token", batch)) == ["written", "app", "reply: TRIM_TO", "flush"]


def test_what_goes_to_a_peer_leaves_before_the_disk_is_waited_for() -> None:
    turns = Turns()
    turns.turn(ev.AppData(attach("b")))
    assert turns.turn(ev.AppData(call("b", 1) + call("", 2))) == ["to peer: HELLO", "flush", "written", "app"]


def test_answers_that_nobody_is_in_a_hurry_for_are_taken_when_all_else_is_done() -> None:
    turns = Turns()
    turns.turn(ev.AppData(attach("b") + call("b", 1)))
    tag = turns.machine.components.peers.outbound.streams["b"].attempt
    welcome = PeerFrame(FrameType.WELCOME, "b", "a", 77, 1, 0)
    turns.peers.waiting = [ev.PeerReplied("b", tag, welcome)]
    done = turns.turn(ev.AppData(call("", 2)))
    assert done == ["written", "app", "answers taken", "to peer: BATCH", "flush", "written"]
    assert turns.peers.patience[-1] is not turns.machine.waits_for_peers


def test_what_the_app_has_taken_is_told_with_what_comes_next() -> None:
    turns = Turns()
    turns.app.sent = [ev.AppSent(turns.machine.state.session.unsent_bytes)]
    turns.turn()
    assert turns.machine.state.session.unsent_bytes > 0, "nobody waits for it"
    turns.turn(ev.Tick())
    assert turns.machine.state.session.unsent_bytes == 0


@pytest.mark.parametrize("window_bytes", [1, 1 << 20])
def test_what_the_app_takes_within_a_turn_is_told_in_it_only_where_it_is_waited_for(window_bytes: int) -> None:
    turns = Turns()
    turns.app.sent = [ev.AppSent(turns.machine.state.session.unsent_bytes)]
    turns.turn(ev.Tick())
    turns.machine.state.limits = Limits(app_window_bytes=window_bytes)
    turns.app.takes_at_once = True
    assert "app" in turns.turn(ev.AppData(call("", 1)))
    assert (turns.machine.state.session.unsent_bytes == 0) is (window_bytes == 1)


def test_what_comes_of_sending_to_the_app_is_handled_in_the_same_turn() -> None:
    turns = Turns()
    turns.app.found_out = [ev.AppClosed()]
    turns.turn(ev.AppData(call("", 1)))
    assert turns.app.found_out == []
    assert turns.machine.state.session.phase is Phase.WAITING


def test_what_the_clock_has_found_out_comes_before_what_came_in() -> None:
    turns = Turns()
    turns.clock.events = [ev.StopRequested()]
    turns.turn(ev.AppClosed())
    assert turns.clock.events == []
    assert turns.machine.stopped


def test_a_commit_waits_for_no_frame_where_there_is_none() -> None:
    turns = Turns()
    turns.peers.flushed_after.clear()
    assert turns.turn(ev.AppData(call("", 1))) == ["written", "app"]
    assert turns.peers.flushed_after == ["app", "app"], "when the machine has nothing more to say, and at the end"


def test_after_a_stop_no_answers_are_taken() -> None:
    turns = Turns()
    turns.peers.waiting = [ev.Tick()]
    done = turns.turn(ev.StopRequested(), ev.AppClosed())
    assert turns.machine.stopped
    assert "answers taken" not in done


def test_after_a_stop_nothing_is_handled() -> None:
    turns = Turns()
    turns.turn(ev.StopRequested(), ev.AppClosed())
    assert turns.machine.stopped
    assert turns.turn(ev.AppConnected()) == []
    assert turns.driver.inbox == [ev.AppConnected()]
