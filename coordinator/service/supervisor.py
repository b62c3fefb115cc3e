"""Supervisor of `immortal run`: a coordinator and its app as two processes that live and die together.

    both run --- one dies ---> the other is stopped --- both are gone ---> with restart: a pause, then both run again
       |                                                           '-----> without: the end, status 1
       '--- the app alone dies, with restart ---> the app is started again, its coordinator continues meanwhile
       '--- SIGTERM, SIGINT ---> the coordinator is asked to stop; it takes a checkpoint and says goodbye to the app
       '--- SIGUSR1 ---> the same, then both run again, with the code as it is by then

children.py defines the meaning of a death. The children die with the supervisor, even if it is killed with SIGKILL
(PR_SET_PDEATHSIG). The app can have the supervisor's terminal, the coordinator never has it.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from types import FrameType

from immortal.coordinator.notices import Notices
from immortal.coordinator.operator.control import READY_VARIABLE
from immortal.coordinator.service.children import (
    APP_FAULT_STATUSES,
    STATUS_HANDLER_FAILED,
    STATUS_RECOVER_ME,
    STATUS_TERMINATED,
    ChildStdin,
    Command,
    Outcome,
    ProcessExit,
    RestartBackoff,
    Role,
    classify_exit,
    first_to_die,
)
from immortal.coordinator.service.process import STATUS_FENCED, StopRequests

STOP_GRACE_S = 5.0  # between SIGTERM and SIGKILL
LEAVE_S = 1.0  # for one process to end by itself after a clean end of the other
CLEAN_STOP_S = 30.0  # for a last checkpoint, which may have GiB
# Deaths by a page of the log that the disk can't read, or that is damaged.
_PAGE_DEATHS = (-signal.SIGBUS, -signal.SIGSEGV, -signal.SIGABRT)
# By default a message that kills its process is skipped after the third death
# (coordinator/core/failures/poison_guard.py). No pauses before that, so that later callers wait less.
APP_DEATHS_AT_ONCE = 3
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
RESTART_SIGNAL = signal.SIGUSR1


class _Child:
    """Running child process, with a descriptor that becomes readable when it dies."""

    def __init__(
        self, role: Role, command: Command, ready_descriptor: int | None, place: ChildStdin | None = None
    ) -> None:
        self.role = role
        environment = {**os.environ, **command.environment}
        environment.pop(READY_VARIABLE, None)
        if ready_descriptor is not None:
            environment[READY_VARIABLE] = str(ready_descriptor)
        self.process = subprocess.Popen(
            list(command.argv),
            env=environment,
            pass_fds=() if ready_descriptor is None else (ready_descriptor,),
            **(place or ChildStdin()).spawn_options(),
        )
        self.descriptor = os.pidfd_open(self.process.pid)

    def collect(self) -> ProcessExit:
        """Return the exit of a process whose descriptor is readable."""
        returncode = self.process.wait()
        os.close(self.descriptor)
        return ProcessExit(self.role, self.process.pid, returncode)


class Supervisor:
    """Supervisor that runs the coordinator and its app until they are stopped. For the main thread of a process that
    ends with it: it handles SIGTERM, SIGINT and RESTART_SIGNAL.

    ``commands`` is called before each start. ``on_upgrade_failed`` is called if the app gave an upgrade up; it returns
    True if the version before can continue. ``announced`` is entered when signals are handled; with ``follows``, when
    the coordinator is ready, which it is after it has taken over. ``follows_next``: with ``restart``, the caller
    follows after another process got the log. ``app_stdin``: what the app reads. ``on_started`` is called when the
    first start is over, successful or not.
    """

    def __init__(
        self,
        commands: Callable[[], Mapping[Role, Command]],
        log: Notices,
        *,
        restart: bool = False,
        on_upgrade_failed: Callable[[], bool] = lambda: False,
        announced: AbstractContextManager[None] | None = None,
        on_started: Callable[[], None] = lambda: None,
        follows: bool = False,
        follows_next: bool = False,
        app_stdin: ChildStdin | None = None,
        stop_grace_s: float = STOP_GRACE_S,
        clean_stop_s: float = CLEAN_STOP_S,
    ) -> None:
        self._commands = commands
        self._log = log
        self._restart = restart
        self._on_upgrade_failed = on_upgrade_failed
        self._on_started = on_started
        self._announced = announced or contextlib.nullcontext()
        self._follows = follows
        self._follows_next = follows or follows_next
        self._app_stdin = app_stdin or ChildStdin()
        self._exit_stack = contextlib.ExitStack()  # announced
        self._stop_grace_s = stop_grace_s
        self._clean_stop_s = clean_stop_s
        self._children: dict[Role, _Child] = {}  # running
        self._exits: dict[Role, ProcessExit] = {}  # exits of the processes started last
        self._ready_descriptor: int | None = None
        self._was_ready = self._app_was_ready = False  # since both were started; since the app was started
        self._stop_requests = StopRequests()
        self._restart_asked = False
        self._wake_read, self._wake_write = socket.socketpair()

    def run(self) -> int:
        """Run both processes; return the exit status."""
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        for number in (*_STOP_SIGNALS, RESTART_SIGNAL):
            signal.signal(number, self._on_signal)
        old_wake = signal.set_wakeup_fd(self._wake_write.fileno(), warn_on_full_buffer=False)
        try:
            with self._exit_stack:
                if not self._follows:
                    self._announce()
                return self._run()
        finally:
            for child in self._children.values():  # only after an error
                child.process.kill()
                child.collect()
            self._app_stdin.restore_terminal()
            signal.set_wakeup_fd(old_wake)
            for number in (*_STOP_SIGNALS, RESTART_SIGNAL):
                signal.signal(number, signal.SIG_IGN)  # one more signal must not change the exit status
            self._close_ready_pipe()
            self._wake_read.close()
            self._wake_write.close()

    def _announce(self) -> None:
        """Announce this process as the one that starts and stops the instance."""
        announced, self._announced = self._announced, contextlib.nullcontext()
        self._exit_stack.enter_context(announced)

    def _run(self) -> int:
        pause = RestartBackoff()
        while True:
            started_s = time.monotonic()
            self._restart_asked = False
            self._start()
            self._restart_apps()
            if not self._exits:
                status = self._stop_cleanly()
                self._close_ready_pipe()
                if self._stop_requests.count:
                    return status
                self._log.info("starting both again, as asked")
                continue
            self._on_started()
            first = first_to_die(list(self._exits.values()))
            uptime_s = time.monotonic() - started_s
            second, terminated = self._stop_other(first)
            self._close_ready_pipe()
            outcome = classify_exit(first, second, terminated)
            self._log_outcome(outcome, first)
            if outcome is Outcome.HANDLER_FAILED:
                return STATUS_HANDLER_FAILED
            if outcome in (Outcome.USAGE_ERROR, Outcome.NO_RECOVERY):
                return 1
            if outcome is Outcome.FENCED and not (self._follows and self._restart):
                return STATUS_FENCED
            if outcome is Outcome.UPGRADE_FAILED and self._on_upgrade_failed() and not self._stop_requests.count:
                self._log.info("starting the version before again")
                continue
            if self._stop_requests.count or not (self._restart or self._restart_asked):
                return 0 if outcome is Outcome.STOPPED else 1
            pause_s = pause.next_pause_s(uptime_s, recovered=self._was_ready)
            self._log.info("restarting", pause_s=pause_s)
            self._wait_for(lambda: self._is_interrupted, pause_s)
            if self._stop_requests.count:
                self._log.info("both stopped")
                return 0

    @property
    def _is_interrupted(self) -> bool:
        return self._restart_asked or self._stop_requests.count > 0

    def _restart_apps(self) -> None:
        """Restart the app whenever it dies alone, until a stop is requested or a death ends both."""
        pause = RestartBackoff(APP_DEATHS_AT_ONCE)
        while True:
            started_s = time.monotonic()
            self._wait_for(lambda: bool(self._exits or self._is_interrupted))
            dead = self._restartable_app_exit()
            if dead is None:
                return
            if dead.returncode == STATUS_RECOVER_ME:
                self._log.info("the app left to be recovered, and is started again", pid=dead.pid)
                pause_s = 0.0
            else:
                self._log.error(f"the app died: {dead}; its coordinator goes on", pid=dead.pid)
                if self._app_was_ready:  # after a recovery it is restarted at once, however often
                    pause = RestartBackoff(APP_DEATHS_AT_ONCE)
                pause_s = pause.next_pause_s(time.monotonic() - started_s, recovered=False)
                self._log.info("restarting", pause_s=pause_s)
            interrupted = self._wait_for(lambda: self._is_interrupted or Role.COORDINATOR in self._exits, pause_s)
            if Role.COORDINATOR in self._exits:
                return
            del self._exits[Role.APP]
            if interrupted:
                return
            self._start_app(self._commands())
            self._log_started()

    def _restartable_app_exit(self) -> ProcessExit | None:
        """Return the exit of an app that died alone and must be restarted; None in all other cases."""
        dead = self._exits.get(Role.APP)
        if dead is None or dead.returncode in APP_FAULT_STATUSES:
            return None
        if dead.returncode != STATUS_RECOVER_ME and not self._restart:
            return None
        if dead.returncode in (0, 1):  # its coordinator may be ending, too: its exit status decides
            self._wait_for(lambda: Role.COORDINATOR in self._exits, LEAVE_S)
        return None if Role.COORDINATOR in self._exits or self._is_interrupted else dead

    def _start(self) -> None:
        self._exits.clear()
        self._was_ready = False
        read, write = os.pipe()
        commands = self._commands()
        try:
            self._children[Role.COORDINATOR] = _Child(Role.COORDINATOR, commands[Role.COORDINATOR], write)
            self._start_app(commands)
        finally:
            os.close(write)
            self._ready_descriptor = read
        self._log_started()

    def _log_started(self) -> None:
        self._log.info("started", **{f"{role.value}_pid": self._children[role].process.pid for role in Role})

    def _start_app(self, commands: Mapping[Role, Command]) -> None:
        self._app_was_ready = False
        self._children[Role.APP] = _Child(Role.APP, commands[Role.APP], None, self._app_stdin)

    def _stop_other(self, first: ProcessExit) -> tuple[ProcessExit, bool]:
        """Wait for the end of the other process; return its exit, and True if it had to be terminated."""
        other = first.role.other
        # Status 1 of the app means that it lost its coordinator, whose own status says why.
        if first.returncode == 0 or (first.role is Role.APP and first.returncode == 1):
            self._wait_for(lambda: other in self._exits, LEAVE_S)
        terminated = other not in self._exits
        return self._terminate(other), terminated

    def _terminate(self, role: Role) -> ProcessExit:
        """End a process by SIGTERM, then SIGKILL, unless it is gone already; return its exit."""
        if role in self._exits:
            return self._exits[role]
        child = self._children[role]
        child.process.terminate()
        if not self._wait_for(lambda: role in self._exits, self._stop_grace_s):
            grace = f"{self._stop_grace_s:g} s"
            self._log.warning(f"the {role.value} did not stop within {grace} and is killed", pid=child.process.pid)
            child.process.kill()
            self._wait_for(lambda: role in self._exits)
        return self._exits[role]

    def _stop_cleanly(self) -> int:
        """Stop the coordinator, which says goodbye to the app; return the exit status when both have ended."""
        self._log.info("stopping")
        requests = self._stop_requests.count
        self._children[Role.COORDINATOR].process.terminate()

        def is_over() -> bool:
            # A failed process can't end the other one; a second request means: stop at once.
            failed = any(one.returncode != 0 for one in self._exits.values())
            return not self._children or failed or self._stop_requests.count > requests

        if not self._wait_for(is_over, self._clean_stop_s):
            waited = f"{self._clean_stop_s:g} s"
            for role, child in self._children.items():
                self._log.warning(f"the {role.value} has not ended within {waited}", pid=child.process.pid)
        exits = [self._terminate(role) for role in Role if role in self._children or role in self._exits]
        failed = [one for one in exits if one.returncode != 0 and not self._died_during_start(one)]
        for one in failed:
            self._log.error(f"the {one.role.value} ended with {one}, not with status 0", pid=one.pid)
        if not failed:
            self._log.info("both stopped")
        return 1 if failed else 0

    def _died_during_start(self, one: ProcessExit) -> bool:
        """Return True if SIGTERM ended a process that was still starting, and so had not begun any work."""
        was_ready = self._app_was_ready if one.role is Role.APP else self._was_ready
        return not was_ready and one.returncode in (-signal.SIGTERM, STATUS_TERMINATED)

    def _log_outcome(self, outcome: Outcome, first: ProcessExit) -> None:
        name, other, what = first.role.value, first.role.other.value, f"the {first.role.value} died: {first}"
        if outcome is Outcome.STOPPED:
            self._log.info(f"the {name} was stopped, and the {other} with it", pid=first.pid)
        elif outcome is Outcome.FENCED:
            then = "it follows from now on" if self._follows_next and self._restart else "nothing is started again here"
            self._log.warning(f"another process writes its log by now; {then}", pid=first.pid)
        elif outcome is Outcome.DIED:
            hint = ""
            if first.role is Role.COORDINATOR and first.returncode in _PAGE_DEATHS:
                hint = f"; the file of its log may be damaged: 'immortal log verify {self._log.instance}' says"
            self._log.error(f"{what}; the {other} was stopped{hint}", pid=first.pid)
        else:
            self._log.error(f"{what}: {outcome.value}", pid=first.pid)

    # --- waiting ----------------------------------------------------------------------------------------------------

    def _wait_for(self, condition: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Handle deaths and signals until ``condition`` holds; return False if the time was over first."""
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while not condition():
            rest_s = None if deadline_s is None else deadline_s - time.monotonic()
            if rest_s is not None and rest_s <= 0:
                return False
            self._poll(rest_s)
        return True

    def _poll(self, timeout_s: float | None) -> None:
        poller = select.poll()
        poller.register(self._wake_read, select.POLLIN)
        for child in self._children.values():
            poller.register(child.descriptor, select.POLLIN)
        if self._ready_descriptor is not None:
            poller.register(self._ready_descriptor, select.POLLIN)
        readable = {descriptor for descriptor, _ in poller.poll(None if timeout_s is None else timeout_s * 1000 + 1)}
        if self._wake_read.fileno() in readable:
            self._wake_read.recv(1024)
        if self._ready_descriptor is not None and self._ready_descriptor in readable:
            if os.read(self._ready_descriptor, 64):
                self._was_ready = self._app_was_ready = True
                self._on_started()
                self._announce()
                self._log.info("ready")
            else:
                self._close_ready_pipe()
        for role, child in list(self._children.items()):
            if child.descriptor in readable:
                del self._children[role]
                self._exits[role] = child.collect()
                if role is Role.APP:
                    self._app_stdin.restore_terminal()

    def _close_ready_pipe(self) -> None:
        if self._ready_descriptor is not None:
            os.close(self._ready_descriptor)
            self._ready_descriptor = None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == RESTART_SIGNAL:
            self._restart_asked = True
        else:
            self._stop_requests.signalled()
        # the wake-up descriptor ends the wait
