"""A handler that does not come back: what the watchdog says, and when it ends the process."""

from __future__ import annotations

import bdb
import sys
from datetime import timedelta

import pytest

from immortal.appsdk.calls.user_code import in_debugger
from immortal.appsdk.running import time_limits
from immortal.appsdk.running.time_limits import Watchdog
from immortal.errors import EXIT_FAILED
from immortal.protocol.messages import decode_message
from immortal.protocol.verdicts import Handling, decode_handling


class Watched:
    """A process that is handling something, on a clock of the test's own."""

    def __init__(self, limit: timedelta | None = None) -> None:
        self.handling: Handling | None = None
        self.now_s = 0.0
        self.can_say = True
        self.is_disconnected = self.is_debugged = False
        self.said: list[Handling] = []
        self.ended: list[int] = []
        self.warnings: list[str] = []
        self.watchdog = Watchdog(
            lambda: self.handling,
            self._say,
            limit,
            self.warnings.append,
            lambda: self.is_disconnected,
            self.ended.append,
            lambda: self.now_s,
            lambda: self.is_debugged,
        )

    def _say(self, message: bytes) -> bool:
        if self.can_say:
            _, start, end = decode_message(message, 0)
            self.said.append(decode_handling(message[start:end]))
        return self.can_say

    def pass_time(self, seconds: float) -> None:
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self.now_s += time_limits.CHECK_INTERVAL_S
            self.watchdog.check()


def test_handlers_that_come_back_are_not_told_of() -> None:
    watched = Watched()
    for index in range(100):
        watched.handling = Handling(1, index)
        watched.pass_time(0.5)
        watched.handling = None
        watched.pass_time(0.5)
    assert watched.said == []


def test_one_that_does_not_come_back_is_told_of_now_and_then() -> None:
    watched = Watched()
    watched.handling = Handling(312, 4, 0.0, "Orders.place", "shop")
    watched.pass_time(100)
    assert [round(one.for_s) for one in watched.said] == [1, 10, 40, 70]
    assert {(one.sequence_id, one.message_index, one.method, one.caller) for one in watched.said} == {
        (312, 4, "Orders.place", "shop")
    }
    assert watched.ended == []


def test_that_it_has_come_back_is_told_too() -> None:
    watched = Watched()
    watched.handling = Handling(1, 0)
    watched.pass_time(2)
    watched.handling = None
    watched.can_say = False
    watched.pass_time(1)
    watched.can_say = True
    watched.pass_time(2)
    assert [(one.sequence_id, one.for_s > 0) for one in watched.said] == [(1, True), (-1, True)]


def test_what_can_not_be_said_now_is_said_as_soon_as_it_can() -> None:
    watched = Watched()
    watched.handling = Handling(1, 0)
    watched.can_say = False
    watched.pass_time(20)
    watched.can_say = True
    watched.pass_time(1)
    assert [round(one.for_s) for one in watched.said] == [20]


def test_the_next_message_is_watched_anew() -> None:
    watched = Watched(timedelta(seconds=5))
    for index in range(10):
        watched.handling = Handling(1, index)
        watched.pass_time(4)
    assert watched.ended == []


def test_beyond_its_limit_the_process_ends(capfd: pytest.CaptureFixture[str]) -> None:
    watched = Watched(timedelta(seconds=5))
    watched.handling = Handling(7, 2)
    watched.pass_time(5)
    assert watched.ended == []
    watched.pass_time(1)
    assert watched.ended[:1] == [EXIT_FAILED]
    assert "message 2 of record 7 has not come back" in watched.warnings[0]
    assert "its limit is 5 s" in watched.warnings[0]
    assert "test_beyond_its_limit" in capfd.readouterr().err  # where it was


def test_one_whose_coordinator_has_left_is_not_waited_for() -> None:
    watched = Watched()
    watched.is_disconnected = True
    watched.pass_time(5)
    assert watched.ended == [], "between two handlers the app sees it itself"
    watched.handling = Handling(2, 0)
    watched.pass_time(1.5)
    assert watched.ended == []
    watched.pass_time(0.5)
    assert watched.ended == [EXIT_FAILED]
    assert "and the coordinator has ended the connection: the process ends" in watched.warnings[0]


def test_a_handler_that_comes_back_as_the_coordinator_leaves_ends_nothing() -> None:
    """The process ended at times with status 1 where it had been said goodbye to."""
    watched = Watched()
    watched.handling = Handling(2, 0)
    watched.pass_time(5)
    watched.is_disconnected = True
    watched.pass_time(1)
    watched.handling = None
    watched.pass_time(5)
    assert watched.ended == []


def test_time_in_the_debugger_does_not_count() -> None:
    watched = Watched(timedelta(seconds=5))
    watched.handling = Handling(1, 0)
    watched.pass_time(3)
    watched.is_debugged = True
    watched.pass_time(1000)
    assert [round(one.for_s) for one in watched.said] == [1]
    assert watched.ended == []
    watched.is_debugged = False
    watched.pass_time(1.5)
    assert watched.ended == []
    watched.pass_time(1)
    assert watched.ended == [EXIT_FAILED]


def test_whether_a_thread_is_in_the_debugger() -> None:
    seen = []

    class Prompt(bdb.Bdb):
        def user_line(self, frame: object) -> None:
            seen.append(in_debugger(sys._getframe()))

    def debugged() -> None:
        seen.append(in_debugger(sys._getframe()))

    Prompt().runcall(debugged)
    assert seen[0] is True  # it stopped in front of the line ...
    assert False in seen  # ... which then ran
    assert in_debugger(sys._getframe()) is False
