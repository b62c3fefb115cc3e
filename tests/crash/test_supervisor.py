"""The supervisor over stand-in children: real processes, really killed."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from immortal.coordinator.service.children import (
    Outcome,
    ProcessExit,
    RestartBackoff,
    Role,
    classify_exit,
    first_to_die,
)
from immortal.coordinator.service.supervisor import APP_DEATHS_AT_ONCE, RESTART_SIGNAL

DRIVER = """
import json, sys
from immortal.coordinator.service.children import Command, Role
from immortal.coordinator.service.supervisor import Supervisor
from immortal.coordinator.notices import configure
given = json.loads(sys.argv[1])
commands = {Role.COORDINATOR: Command(given["coordinator"]), Role.APP: Command(given["app"], {"TEST_ROLE": "app"})}
if given["options"].pop("broken", None):
    commands[Role.APP] = Command(["/nonexistent/program"])
supervisor = Supervisor(lambda: commands, configure("x", log_format="json"), **given["options"])
sys.exit(supervisor.run())
"""

# Children say "up" on stdout once they are as they are meant to be.
UP = "import os, signal, sys; up = lambda: os.write(1, b'up\\n');"
LIVES = UP + "up(); signal.pause()"  # dies of SIGTERM
STUBBORN = UP + "signal.signal(signal.SIGTERM, signal.SIG_IGN); up(); signal.pause(); signal.pause()"
ENDS = UP + "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); up(); signal.pause()"
LEAVES = UP + "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143)); up(); signal.pause()"  # as an app does
FOLLOWS = UP + "file = open(sys.argv[1]); up(); file.read()"  # until the coordinator has ended, then status 0
LEADS = "import sys; file = open(sys.argv[1], 'w');" + ENDS
FAST_S = 10.0


class Supervised:
    """A supervisor in a process of its own, and its events."""

    def __init__(self, coordinator: list[str], app: list[str], **options: object) -> None:
        given = {"coordinator": coordinator, "app": app, "options": options}
        self.process = subprocess.Popen(
            [sys.executable, "-c", DRIVER, json.dumps(given)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.events: list[dict[str, Any]] = []

    def event(self, start: str) -> dict[str, Any]:
        """The next event whose message starts so."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if line.startswith("{"):
                self.events.append(json.loads(line))
                if self.events[-1]["message"].startswith(start):
                    return self.events[-1]
        raise AssertionError(f"no event {start!r} came, only {self.events}")

    def started(self) -> dict[Role, int]:
        """The pids, once both children run as they are meant to."""
        event = self.event("started")
        assert self.process.stdout is not None
        for _ in Role:
            assert self.process.stdout.readline() == "up\n"
        return {Role.COORDINATOR: event["coordinator_pid"], Role.APP: event["app_pid"]}

    def end(self) -> tuple[int, list[str]]:
        """The exit status, and all messages."""
        assert self.process.stderr is not None
        self.events += [json.loads(line) for line in self.process.stderr if line.startswith("{")]
        return self.process.wait(), [event["message"] for event in self.events]


Start = Callable[..., Supervised]


@pytest.fixture
def start() -> Iterator[Start]:
    with contextlib.ExitStack() as stack:

        def start_one(coordinator: list[str] | str, app: list[str] | str, **options: object) -> Supervised:
            def argv(child: list[str] | str) -> list[str]:
                return [sys.executable, "-c", *([child] if isinstance(child, str) else child)]

            supervised = stack.enter_context(
                contextlib.closing(_Closing(Supervised(argv(coordinator), argv(app), **options)))
            )
            return supervised.supervised

        yield start_one


class _Closing:
    def __init__(self, supervised: Supervised) -> None:
        self.supervised = supervised

    def close(self) -> None:
        process = self.supervised.process
        process.kill()  # its children die with it
        process.wait()
        for pipe in (process.stdout, process.stderr):
            assert pipe is not None
            pipe.close()


def wait_for_death(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        assert select.select([descriptor], [], [], FAST_S)[0], "the process still lives"
        os.close(descriptor)


@pytest.mark.parametrize("victim", list(Role))
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS])
def test_when_one_dies_the_other_is_stopped(start: Start, victim: Role, number: signal.Signals) -> None:
    supervised = start(LIVES, LIVES)
    pids = supervised.started()
    other = os.pidfd_open(pids[victim.other])
    os.kill(pids[victim], number)
    status, messages = supervised.end()
    wait_for_death([other])
    assert status == 1
    hint = ""
    if victim is Role.COORDINATOR and number is not signal.SIGKILL:  # as one dies that can't read a page of its log
        hint = "; the file of its log may be damaged: 'immortal log verify x' says"
    death = f"the {victim.value} died: {number.name}; the {victim.other.value} was stopped{hint}"
    assert messages == ["started", death]
    assert supervised.events[-1]["pid"] == pids[victim]
    assert supervised.events[-1]["level"] == "error"


def test_a_status_is_named(start: Start) -> None:
    status, messages = start(LIVES, "import sys; sys.exit(3)").end()
    assert status == 1
    assert messages[-1] == "the app died: status 3; the coordinator was stopped"


def test_who_does_not_stop_is_killed(start: Start) -> None:
    supervised = start(LIVES, STUBBORN, stop_grace_s=0.2)
    pids = supervised.started()
    os.kill(pids[Role.COORDINATOR], signal.SIGKILL)
    status, messages = supervised.end()
    assert status == 1
    assert messages[1:] == [
        "the app did not stop within 0.2 s and is killed",
        "the coordinator died: SIGKILL; the app was stopped",
    ]


def test_restart(start: Start) -> None:
    supervised = start(ENDS, ENDS, restart=True)
    seen: set[int] = set()
    for _ in range(3):
        pids = supervised.started()
        assert not seen & set(pids.values())
        seen |= set(pids.values())
        os.kill(pids[Role.COORDINATOR], signal.SIGKILL)
        supervised.event("the coordinator died: SIGKILL; the app was stopped")
        supervised.event("restarting")
    supervised.started()
    pauses = [event["pause_s"] for event in supervised.events if event["message"] == "restarting"]
    assert pauses == [0.1, 0.2, 0.4]


def app_started(supervised: Supervised) -> int:
    """The pid of an app that was started alone."""
    before = supervised.events[0]["coordinator_pid"]
    event = supervised.event("started")
    assert event["coordinator_pid"] == before, "the coordinator was started again, too"
    assert supervised.process.stdout is not None
    assert supervised.process.stdout.readline() == "up\n"
    return int(event["app_pid"])


def test_an_app_that_dies_alone_is_started_again_alone(start: Start) -> None:
    supervised = start(ENDS, ENDS, restart=True, clean_stop_s=0.2)  # this app waits for no goodbye
    app = supervised.started()[Role.APP]
    for number in (signal.SIGKILL, signal.SIGSEGV) * 3:
        os.kill(app, number)
        supervised.event(f"the app died: {number.name}; its coordinator goes on")
        supervised.event("restarting")
        app = app_started(supervised)
    pauses = [event["pause_s"] for event in supervised.events if event["message"] == "restarting"]
    assert pauses == [0, 0, 0, 0.1, 0.2, 0.4], "three deaths may be those of one message; it never got anywhere"
    supervised.process.terminate()
    status, messages = supervised.end()
    assert (status, messages[-1]) == (0, "both stopped")


# A coordinator that tells that it is ready for each line that it is given.
TELLS = """
import os, signal, sys
from immortal.coordinator.operator.control import notify_ready
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
os.write(1, b"up\\n")
for line in open(sys.argv[1]):
    notify_ready()
signal.pause()
"""


def test_one_that_had_recovered_comes_back_at_once(start: Start, tmp_path: Path) -> None:
    pipe = str(tmp_path / "recovered")
    os.mkfifo(pipe)
    supervised = start([TELLS, pipe], ENDS, restart=True)
    app = supervised.started()[Role.APP]
    with open(pipe, "w", buffering=1) as recovered:
        for _ in range(APP_DEATHS_AT_ONCE + 1):
            recovered.write("now\n")
            supervised.event("ready")
            os.kill(app, signal.SIGKILL)
            assert supervised.event("restarting")["pause_s"] == 0
            app = app_started(supervised)


@pytest.mark.parametrize("restart", [False, True])
def test_who_leaves_to_be_recovered_is_started_again(start: Start, tmp_path: Path, restart: bool) -> None:
    left = tmp_path / "left"
    app = f"import pathlib, sys; left = pathlib.Path({str(left)!r});" + (
        "sys.exit(75 if not left.exists() and not left.write_text('') else 70)"
    )
    status, messages = start(LIVES, app, restart=restart).end()
    assert status == 70
    assert messages[:3] == ["started", "the app left to be recovered, and is started again", "started"]


def test_a_coordinator_that_dies_while_the_app_is_waited_for(start: Start) -> None:
    supervised = start(ENDS, UP + "up(); sys.exit(3)", restart=True)
    first = supervised.event("started")
    while supervised.event("restarting")["pause_s"] < 0.4:
        pass
    os.kill(first["coordinator_pid"], signal.SIGKILL)
    supervised.event("the coordinator died: SIGKILL")
    assert supervised.event("started")["coordinator_pid"] != first["coordinator_pid"]


def test_a_failed_handler_is_not_restarted(start: Start) -> None:
    status, messages = start(LIVES, "import sys; sys.exit(70)", restart=True).end()
    assert status == 70
    assert len(messages) == 2
    assert messages[1].startswith("the app died: status 70: its code stopped it, and a replay would only repeat it")


@pytest.mark.parametrize(("coordinator", "app"), [(LIVES, "exit(2)"), ("exit(2)", LIVES)])
def test_who_was_called_wrongly_is_not_restarted(start: Start, coordinator: str, app: str) -> None:
    status, messages = start(coordinator, app, restart=True).end()
    assert status == 1
    assert "it was called wrongly" in messages[-1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_clean_stop(start: Start, tmp_path: Path, number: signal.Signals) -> None:
    goodbye = str(tmp_path / "goodbye")
    os.mkfifo(goodbye)
    supervised = start([LEADS, goodbye], [FOLLOWS, goodbye], restart=True)
    supervised.started()
    supervised.process.send_signal(number)
    assert supervised.end() == (0, ["started", "stopping", "both stopped"])


def test_a_stop_that_takes_too_long(start: Start) -> None:
    supervised = start(ENDS, ENDS, clean_stop_s=0.2)  # this app waits for no goodbye
    supervised.started()
    supervised.process.terminate()
    status, messages = supervised.end()
    assert status == 0
    assert messages[1:] == ["stopping", "the app has not ended within 0.2 s", "both stopped"]


@pytest.mark.parametrize("app", [LIVES, LEAVES])
def test_a_stop_while_both_still_start(start: Start, app: str) -> None:
    """SIGTERM ends who has not yet set up what it does then, and an app that has; nothing was begun, nothing failed."""
    supervised = start(LIVES, app, restart=True)
    supervised.started()
    supervised.process.terminate()
    assert supervised.end() == (0, ["started", "stopping", "both stopped"])


def test_a_stop_that_fails(start: Start) -> None:
    coordinator = UP + "signal.signal(signal.SIGTERM, lambda *_: sys.exit(1)); up(); signal.pause()"
    supervised = start(coordinator, ENDS, restart=True)
    supervised.started()
    supervised.process.terminate()
    assert supervised.end() == (1, ["started", "stopping", "the coordinator ended with status 1, not with status 0"])


def test_a_restart(start: Start) -> None:
    """Also of one that does not start again what dies."""
    supervised = start(ENDS, ENDS, clean_stop_s=0.2)
    first = supervised.started()
    supervised.process.send_signal(RESTART_SIGNAL)
    supervised.event("starting both again")
    assert set(supervised.started().values()).isdisjoint(first.values())
    supervised.process.terminate()
    status, messages = supervised.end()
    assert status == 0
    assert messages.count("started") == 2
    assert messages[-1] == "both stopped"


def test_a_stop_in_the_middle_of_a_restart(start: Start) -> None:
    supervised = start(STUBBORN, ENDS, stop_grace_s=0.1)
    supervised.started()
    supervised.process.send_signal(RESTART_SIGNAL)
    supervised.event("stopping")
    supervised.process.terminate()
    _, messages = supervised.end()
    assert messages.count("started") == 1
    assert "starting both again, as asked" not in messages


def test_a_restart_during_the_pause(start: Start) -> None:
    supervised = start(LIVES, "import sys; sys.exit(3)", restart=True)
    while (pause_s := supervised.event("restarting")["pause_s"]) < 3.2:
        pass
    began_s = time.monotonic()
    supervised.process.send_signal(RESTART_SIGNAL)
    supervised.event("started")
    assert time.monotonic() - began_s < pause_s / 2
    supervised.process.terminate()
    supervised.end()


def test_asked_twice_to_stop(start: Start) -> None:
    supervised = start(STUBBORN, ENDS, stop_grace_s=1.0)  # the app ends within it, on a busy machine as well
    supervised.started()
    supervised.process.terminate()
    supervised.event("stopping")
    asked_again_s = time.monotonic()
    while supervised.process.poll() is None:  # only a later signal is a second wish
        supervised.process.terminate()
        assert time.monotonic() < asked_again_s + 20
        select.select([], [], [], 0.05)
    status, messages = supervised.end()
    assert status == 1
    assert messages[-1] == "the coordinator ended with SIGKILL, not with status 0"


def test_a_coordinator_that_others_stop(start: Start, tmp_path: Path) -> None:
    goodbye = str(tmp_path / "goodbye")
    os.mkfifo(goodbye)
    supervised = start([LEADS, goodbye], [FOLLOWS, goodbye])
    os.kill(supervised.started()[Role.COORDINATOR], signal.SIGTERM)
    status, messages = supervised.end()
    assert status == 0
    assert messages[-1].endswith("was stopped, and the app with it") or "and the coordinator with it" in messages[-1]


def test_an_app_that_ends_by_itself_has_died(start: Start) -> None:
    status, messages = start(ENDS, UP + "up()").end()
    assert status == 1
    assert messages[-1] == "the app died: status 0; the coordinator was stopped"


def test_both_die_with_the_supervisor(start: Start) -> None:
    supervised = start(STUBBORN, STUBBORN, restart=True)
    descriptors = [os.pidfd_open(pid) for pid in supervised.started().values()]
    supervised.process.kill()
    wait_for_death(descriptors)


def test_stop_during_the_pause(start: Start) -> None:
    supervised = start(LIVES, "import sys; sys.exit(3)", restart=True)
    while supervised.event("restarting")["pause_s"] < 0.8:
        pass
    supervised.process.terminate()
    status, messages = supervised.end()
    assert status == 0
    assert messages[-3:] == ["restarting", "stopping", "both stopped"]


def test_ready_is_told(start: Start) -> None:
    coordinator = (
        "from immortal.coordinator.operator.control import notify_ready; notify_ready(); notify_ready();" + LIVES
    )
    supervised = start(coordinator, LIVES)
    supervised.event("ready")


def test_a_coordinator_that_only_dies(start: Start) -> None:
    coordinator = "from immortal.coordinator.operator.control import notify_ready; notify_ready();" + LIVES
    supervised = start(coordinator, LIVES)
    supervised.event("ready")
    supervised.process.terminate()
    status, messages = supervised.end()
    assert status == 1  # LIVES dies of SIGTERM: no clean stop
    assert "the coordinator ended with SIGTERM, not with status 0" in messages


def test_an_app_that_cannot_be_started(start: Start) -> None:
    supervised = start([STUBBORN], [LIVES], broken="app")
    assert supervised.process.wait() == 1  # and with it its coordinator ends, or the next line would wait for ever
    assert supervised.process.stdout is not None
    supervised.process.stdout.read()


# --- what a death means ----------------------------------------------------------------------------------------------


def test_pauses_grow_and_begin_again() -> None:
    pause = RestartBackoff()
    grown = [pause.next_pause_s(1, recovered=False) for _ in range(8)]
    assert grown == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0])
    assert pause.next_pause_s(10, recovered=False) == 0
    assert pause.next_pause_s(9.9, recovered=False) == pytest.approx(0.1)
    assert pause.next_pause_s(9.9, recovered=False) == pytest.approx(0.2)
    assert pause.next_pause_s(0.5, recovered=True) == pytest.approx(0.1)
    pause = RestartBackoff(immediate_count=2)
    assert [pause.next_pause_s(1, recovered=False) for _ in range(4)] == pytest.approx([0, 0, 0.1, 0.2])


@pytest.mark.parametrize(
    ("app", "coordinator", "first"),
    [
        (-9, -9, Role.COORDINATOR),
        (-9, 0, Role.APP),
        (-11, 1, Role.APP),
        (70, 1, Role.APP),
        (2, 1, Role.APP),
        (1, -9, Role.COORDINATOR),
        (1, 1, Role.COORDINATOR),
        (0, 0, Role.COORDINATOR),
    ],
)
def test_found_dead_at_once(app: int, coordinator: int, first: Role) -> None:
    exits = [ProcessExit(Role.APP, 1, app), ProcessExit(Role.COORDINATOR, 2, coordinator)]
    assert first_to_die(exits).role is first
    assert first_to_die(exits[::-1]).role is first
    assert first_to_die(exits[:1]).role is Role.APP


@pytest.mark.parametrize(
    ("first", "second", "told", "verdict"),
    [
        (ProcessExit(Role.APP, 1, 70), ProcessExit(Role.COORDINATOR, 2, 0), True, Outcome.HANDLER_FAILED),
        (ProcessExit(Role.COORDINATOR, 2, 70), ProcessExit(Role.APP, 1, 0), True, Outcome.DIED),
        (ProcessExit(Role.COORDINATOR, 2, 2), ProcessExit(Role.APP, 1, 1), False, Outcome.USAGE_ERROR),
        (ProcessExit(Role.COORDINATOR, 2, 0), ProcessExit(Role.APP, 1, 0), False, Outcome.STOPPED),
        (ProcessExit(Role.COORDINATOR, 2, 0), ProcessExit(Role.APP, 1, -15), True, Outcome.DIED),
        (ProcessExit(Role.APP, 1, 0), ProcessExit(Role.COORDINATOR, 2, 0), True, Outcome.DIED),
        (ProcessExit(Role.APP, 1, 0), ProcessExit(Role.COORDINATOR, 2, 0), False, Outcome.STOPPED),
        (ProcessExit(Role.APP, 1, 1), ProcessExit(Role.COORDINATOR, 2, -9), False, Outcome.DIED),
    ],
)
def test_verdicts(first: ProcessExit, second: ProcessExit, told: bool, verdict: Outcome) -> None:
    assert classify_exit(first, second, told) is verdict


def test_an_app_that_leaves_because_its_coordinator_gives_up_is_not_started_again() -> None:
    # The app may be found dead first; the status that counts is its coordinator's, which is still leaving.
    app = ProcessExit(Role.APP, 1, 1)
    gives_up = ProcessExit(Role.COORDINATOR, 2, 3)
    for first, second in ((app, gives_up), (gives_up, app)):
        assert classify_exit(first, second, second_was_signalled=False) is Outcome.NO_RECOVERY


def test_one_whose_log_another_writes_is_started_again_only_to_follow() -> None:
    fenced = ProcessExit(Role.COORDINATOR, 1, 4)
    app = ProcessExit(Role.APP, 2, 1)
    assert classify_exit(fenced, app, second_was_signalled=True) is Outcome.FENCED
    assert classify_exit(app, fenced, second_was_signalled=False) is Outcome.FENCED


@pytest.mark.parametrize("options", [{"restart": True}, {"follows": True}])
def test_status_4_of_the_coordinator_ends_who_is_not_to_follow(start: Start, options: dict[str, bool]) -> None:
    supervised = start(UP + "up(); sys.exit(4)", LIVES, **options)
    assert supervised.process.wait(FAST_S) == 4
