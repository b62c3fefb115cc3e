"""A query that is not logged has its time: Python code is ended where it is, other code with the process."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from immortal.appsdk.running.time_limits import GRACE_S, QueryLimit, Watchdog
from immortal.errors import EXIT_RECOVER, QueryTooLong
from immortal.protocol.messages import MessageType


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def looking(limit: QueryLimit, ended: threading.Event) -> threading.Thread:
    def check() -> None:
        while not ended.is_set():
            limit.check()

    thread = threading.Thread(target=check)
    thread.start()
    return thread


def held_by(other: threading.Thread) -> None:
    """Until the other thread is over, wherever in here it raises something: that goes on from here then."""
    try:
        other.start()
        other.join()
    except QueryTooLong:
        other.join()
        raise


def test_one_that_runs_for_ever_is_ended() -> None:
    limit, ended = QueryLimit(limit_s=0.05), threading.Event()
    thread = looking(limit, ended)

    def for_ever() -> None:
        while True:
            try:
                sum(range(100))
            except Exception:
                continue

    try:
        with pytest.raises(QueryTooLong, match=r"for 0.05 s"):
            limit.run(for_ever)
        assert limit.run(lambda: 5) == 5, "the next one has its own time"
    finally:
        ended.set()
        thread.join()


def test_one_that_ends_at_the_same_moment_is_over() -> None:
    """Whichever comes first: the exception is raised in the query or nowhere."""
    clock = Clock()
    limit = QueryLimit(limit_s=1.0, clock_s=clock)
    limit_passed: list[bool] = []

    def told_at_its_end() -> int:
        clock.now_s += 2.0
        held_by(threading.Thread(target=lambda: limit_passed.append(limit.check())))
        return 5

    for _ in range(200):
        with pytest.raises(QueryTooLong):
            limit.run(told_at_its_end)
        assert sum(range(1000)) == 499500, "nothing comes behind it"
    assert limit_passed == [False] * 200


DEBUGGED = """
import bdb
from immortal.errors import QueryTooLong
from immortal.appsdk.running.time_limits import QueryLimit

limit = QueryLimit(limit_s=0.0)
try:
    limit.run(limit.check)
except QueryTooLong:
    print("ended", end=" ")
print(bdb.Bdb().runcall(lambda: 4))
"""


def test_the_thread_can_be_debugged_afterwards() -> None:
    """It hung for ever, at the first function that was traced."""
    run = subprocess.run([sys.executable, "-c", DEBUGGED], capture_output=True, text=True, timeout=60, check=False)
    assert (run.stdout, run.stderr) == ("ended 4\n", "")


def test_one_that_can_not_be_reached_ends_the_process_which_says_so() -> None:
    clock, said, ended = Clock(), list[bytes](), list[int]()
    limit = QueryLimit(limit_s=1.0, clock_s=clock)
    warned: list[str] = []
    can_say = [False]

    def say(message: bytes) -> bool:
        said.extend([message] if can_say[0] else [])
        return can_say[0]

    debugged = [False]
    watchdog = Watchdog(
        lambda: None,
        say,
        None,
        warned.append,
        end=ended.append,
        clock_s=clock,
        is_debugged=lambda: debugged[0],
        query_limit=limit,
    )

    found: list[list[int]] = []

    def check() -> None:
        """As the watchdog's thread: what it raises in the query comes once that goes on."""
        debugged[0] = True
        clock.now_s += 100.0
        watchdog.check()
        found.append(ended.copy())
        debugged[0] = False
        clock.now_s += 1.0 + GRACE_S
        watchdog.check()
        found.append(ended.copy())
        can_say[0] = True
        watchdog.check()

    with pytest.raises(QueryTooLong):
        limit.run(lambda: held_by(threading.Thread(target=check)))
    assert found == [[], []], "somebody looks at it; nobody would know what it was"
    assert ended == [EXIT_RECOVER]
    assert said[0][1] == MessageType.LEAVING or MessageType.LEAVING in said[0][:3]
    assert "does not come back" in warned[0]
