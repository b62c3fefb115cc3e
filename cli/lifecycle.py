"""Commands stop, restart and migrate: end an instance, whoever started it, or hand it over.

A supervisor (`immortal run`) gets the request, since it would take a signal to its coordinator for a crash. A
coordinator that was started by hand gets it itself. Both take a last checkpoint and end the app's session.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable
from typing import Any

import click

from immortal.cli.options import ask_coordinator, name_argument, pass_registry, timeout_option
from immortal.coordinator.config import InstanceSettings
from immortal.coordinator.core.errors import LogError
from immortal.coordinator.instances import own_logs, upgrade_mark
from immortal.coordinator.instances.registry import Registry
from immortal.coordinator.log.backend import Place
from immortal.coordinator.log.open import is_locked, place_of
from immortal.coordinator.operator import control
from immortal.coordinator.service.supervisor import RESTART_SIGNAL
from immortal.presenters.status import operator_name
from immortal.protocol.command_line import FailedError, echo, echo_json, json_option
from immortal.protocol.files import ProcessFile, is_living, shares_pid_namespace

STOP_TIMEOUT_S = 60.0  # more than a supervisor waits for a checkpoint, and for processes that do not end
PATIENCE_S = 2.0  # before the command prints what it waits for
ASK_TIMEOUT_S = 1.0  # a coordinator that is busy or is ending
STOP_POLL_S = 0.05
HEIR_S = 2.0  # for a follower to take over
_WORKS = ("normal", "taking a checkpoint")


@click.command()
@name_argument
@timeout_option(STOP_TIMEOUT_S)
@pass_registry
def stop(registry: Registry, name: str, timeout_s: float) -> None:
    """Stop an instance cleanly and wait until it has ended.

    The instance takes a last checkpoint. If another process follows its log, that process takes over at once instead.

    Exit status: 0 if the instance is stopped, also if it did not run; 1 if not.
    """
    settings = registry.load(name)
    found = control.supervisor(settings.folder) or control.running(settings.folder)
    if found is None:
        refuse_unreachable_holder(settings)
        echo(f"{name} does not run")
        return
    place = place_of(settings.log)
    is_followed = False
    with contextlib.suppress(LogError):  # a database that is away keeps nobody from stopping
        is_followed = place.is_shared and place.is_followed()  # a follower that takes over does not follow any more
    with _Process(found) if shares_pid_namespace(found) else _Elsewhere(settings, found) as process:
        process.send(signal.SIGTERM)
        waiting = _Waiting(settings, "stopped", timeout_s)
        while not process.has_ended(STOP_POLL_S):
            waiting.check_limit()
    if is_followed and (successor := _successor(place)) is not None:
        echo(f"{name} is stopped here, and now runs on {successor}")
    else:
        echo(f"{name} is stopped{checkpoint_at_stop(settings)}")


@click.command()
@name_argument
@timeout_option(STOP_TIMEOUT_S)
@pass_registry
def restart(registry: Registry, name: str, timeout_s: float) -> None:
    """Restart an instance cleanly with its present code, and wait until it works.

    The instance must run under 'immortal run', which starts it again. A requested upgrade is done at the same time.
    """
    echo(restart_instance(registry.load(name), timeout_s))


def restart_instance(settings: InstanceSettings, timeout_s: float) -> str:
    """Restart an instance as :func:`restart` does; return what is said of it. Raises FailedError."""
    name = settings.name
    found, before = control.supervisor(settings.folder), control.running(settings.folder)
    if found is None:
        raise FailedError(cannot_restart_text(settings, before))
    mark = upgrade_mark.read(settings.folder)
    with _Process(found) as process:
        process.send(RESTART_SIGNAL)
        waiting = _Waiting(settings, "up again", timeout_s)
        while (status := _working_status(settings, before)) is None:
            if process.has_ended(STOP_POLL_S):
                raise FailedError(f"{name} stopped and did not start again: see the output of its 'immortal run'")
            waiting.check_limit()
    if mark is not None and mark.pending and (now := upgrade_mark.read(settings.folder)) is not None and now.problem:
        failed = f"the upgrade to version {now.to} failed: {now.problem}"
        raise FailedError(f"{name} is up again with version {status['version']}; {failed}")
    return f"{name} is up again: version {status['version']}, process {status['pid']}"


class _Process:
    """Process that this one did not start, held by a descriptor: a later process with its ID can't be meant."""

    def __init__(self, known: ProcessFile) -> None:
        self._pid = known.pid
        try:
            self._descriptor = os.pidfd_open(known.pid)
        except ProcessLookupError:
            self._descriptor = -1  # it ended just now
            return
        if not is_living(known):
            self.__exit__()

    def __enter__(self) -> _Process:
        return self

    def __exit__(self, *_: object) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def send(self, number: signal.Signals) -> None:
        if self._descriptor < 0:
            return
        try:
            signal.pidfd_send_signal(self._descriptor, number)
        except ProcessLookupError:
            pass
        except PermissionError:
            raise FailedError(f"process {self._pid} belongs to another user: run the command as that user") from None

    def has_ended(self, timeout_s: float) -> bool:
        return self._descriptor < 0 or bool(select.select([self._descriptor], [], [], timeout_s)[0])


class _Elsewhere(_Process):
    """Coordinator in another container that shares the folder with this one: requests go to its socket."""

    def __init__(self, settings: InstanceSettings, known: ProcessFile) -> None:
        self._folder, self._known, self._descriptor = settings.folder, known, -1

    def send(self, number: signal.Signals) -> None:
        control.query(self._folder, "stop")

    def has_ended(self, timeout_s: float) -> bool:
        time.sleep(timeout_s)
        return control.running(self._folder) != self._known


class _Waiting:
    """Wait that reports its reason if it takes long, and ends at a limit. ``state``: the awaited one."""

    def __init__(
        self, settings: InstanceSettings, state: str, timeout_s: float, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._settings = settings
        self._state = state
        self._timeout_s = timeout_s
        self._clock_s = clock_s
        self._started_s = self._reported_s = clock_s()

    def check_limit(self) -> None:
        """Check the time, and report what is waited for. Raises FailedError at the limit."""
        now_s, name = self._clock_s(), self._settings.name
        if now_s - self._started_s >= self._timeout_s:
            raise FailedError(
                f"{name} is not {self._state} within {self._timeout_s:g} s, but still tries: it waits for "
                f"{_awaited_text(self._settings)} ('immortal status {name}')"
            )
        if now_s - self._reported_s >= PATIENCE_S:
            self._reported_s = now_s
            echo(f"{name}: waits for {_awaited_text(self._settings)}", err=True)


def _awaited_text(settings: InstanceSettings) -> str:
    status = _status(settings)
    if status is None:
        return "its processes"
    if not status["app_connected"]:
        return "its app to connect"
    text = f"its app, in the phase {status['phase']!r}"
    if status["backlog_records"]:
        text += f", with {status['backlog_records']} records to handle"
    if status["app_silent_s"]:
        text += f"; the app has accepted no input for {status['app_silent_s']:.0f} s"
    return text


def _status(settings: InstanceSettings) -> dict[str, Any] | None:
    with contextlib.suppress(control.ControlError):
        return control.query(settings.folder, "status", ASK_TIMEOUT_S)
    return None


def _working_status(settings: InstanceSettings, before: control.ControlFile | None) -> dict[str, Any] | None:
    """Return the status of a coordinator that started after ``before``, once its app works; otherwise None."""
    now = control.running(settings.folder)
    if now is None or now == before:
        return None
    status = _status(settings)
    return status if status is not None and status["phase"] in _WORKS else None


def cannot_restart_text(settings: InstanceSettings, coordinator: ProcessFile | None) -> str:
    name = settings.name
    if coordinator is None:
        refuse_unreachable_holder(settings)
        return f"{name} does not run: 'immortal run {name}' starts it"
    return (
        f"the coordinator of {name!r}, process {coordinator.pid}, was started without 'immortal run', so nothing would "
        f"start it again: run 'immortal stop {name}', then start the coordinator and the app as before"
    )


def refuse_unreachable_holder(settings: InstanceSettings) -> None:
    """Raise FailedError if a process that can't be asked holds the log, such as one that is just starting by hand."""
    place = place_of(settings.log)
    if place.is_shared and (holder := place.holder()) is not None:
        raise FailedError(f"{settings.name!r} does not run on this machine; {holder} has it: run the command there")
    if is_locked(settings.log):
        raise FailedError(f"the log of {settings.name!r} is in use by a process that does not answer yet: try again")


def _successor(place: Place) -> str | None:
    """Return the host that has the instance now, if any, after a moment for a follower to take over."""
    deadline_s = time.monotonic() + HEIR_S
    while (successor := place.holder()) is None and time.monotonic() < deadline_s:
        time.sleep(STOP_POLL_S)
    return successor


def checkpoint_at_stop(settings: InstanceSettings) -> str:
    """Describe the checkpoint that the next start begins with, as the log says; "" if there is none."""
    summary = own_logs.summary_of(settings)
    if summary is None:
        return ""
    if not summary.checkpoints:
        return ", without a checkpoint"
    newest = summary.checkpoints[-1]
    behind = summary.last_sequence_id - newest.sequence_id
    if not behind:
        return f", with checkpoint {newest.checkpoint_id} after record {newest.sequence_id}"
    return f", without a checkpoint of its last {behind} records: nothing is lost, the next start replays them"


# migrate: another machine, which follows the log, takes the instance over.


TIMEOUT_S = 10.0
POLL_S = 0.02


@click.command()
@name_argument
@click.option("--to", default="", metavar="HOST", help="Machine that takes over.  [default: any that has caught up]")
@click.option("--wait", is_flag=True, help=f"Wait until the move is done, not only {TIMEOUT_S:g} s.")
@json_option
@pass_registry
def migrate(registry: Registry, name: str, to: str, wait: bool, as_json: bool) -> None:
    """Move an instance to another machine that follows its log.

    The command waits until the instance works there. The log must be in PostgreSQL. The process that ran the instance
    exits with status 4; with 'immortal run --restart' it follows the log from then on. HOST is a host name, or a
    standby as 'immortal status' shows it: "HOST (process PID)".
    """
    settings = registry.load(name)
    place = place_of(settings.log)
    if not place.is_shared:
        raise FailedError(
            f"the log of {name!r} is in a folder, which no other machine reaches: stop {name}, and move its log into a "
            f"database with 'immortal log copy {name} --to postgresql://... --switch'"
        )
    try:
        answer = ask_coordinator(settings, "hand-over", {"to": to, "who": operator_name()})
    except control.NotRunningError:
        holder = place.holder()
        where = "it runs nowhere" if holder is None else f"{holder} has it: run the command there"
        raise FailedError(f"{name!r} does not run here, so nothing can be handed over; {where}") from None
    successor, deadline_s = str(answer["to"]), time.monotonic() + TIMEOUT_S
    while place.holder() != successor or place.endpoint() is None:
        if not wait and time.monotonic() > deadline_s:
            raise FailedError(
                f"{successor} has not taken over {name!r} within {TIMEOUT_S:g} s, and the move continues; so far"
                f" {place.holder() or 'no process'} has it ('immortal status {name}'); --wait waits longer"
            )
        time.sleep(POLL_S)
    if as_json:
        echo_json({"name": name, "to": successor, "peer": place.endpoint()})
    else:
        echo(f"{name} now runs on {successor}, at {place.endpoint()}")
