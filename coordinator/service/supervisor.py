"""`immortal run`: a coordinator and its app as two processes that live and die together.

    both run --- one dies ---> the other is stopped --- both are gone ---> with restart: a pause, then both run again
       |                                                           '-----> without: the end, status 1
       '--- the app alone dies, with restart ---> the app is started again, its coordinator goes on meanwhile
       '--- SIGTERM, SIGINT ---> the coordinator is asked to stop; it takes a checkpoint and says goodbye to the app
       '--- SIGUSR1 ---> the same, then both run again, with the code as it is by then

What a death means (`Verdict`):

- status 70 of the app: a handler failed. A replay would run it again, so nothing is started again.
- status 71 of the app: an upgrade failed. Both are started again, with the version before.
- status 75 of the app: it left to be recovered. It is started again at once, with restart or without.
- status 2 of either: it was called wrongly; the next start would be, too.
- status 3 of the coordinator: its log can't be replayed as it is, and could not be the next time.
- status 4 of the coordinator: another process writes its log by now. One that is to follow is started again, and does;
  any other is not.
- status 0 of the coordinator: somebody else asked it to stop. It is a clean end once the app has ended with 0 as well;
  with restart both come back, since it was not the supervisor that was asked.
- status 0 of the app: it was said goodbye to, if the coordinator ends by itself with 0 as well; else a death like any.
- anything else: a death. When both are found dead at once it is the coordinator that died, unless a signal killed the
  app and not the coordinator: an app that loses its coordinator leaves by itself.

The children die with the supervisor, even when that is killed with SIGKILL (PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import contextlib
import enum
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from coordinator.app import secret as app_secret
from coordinator.config import AppAuth, InstanceSettings, override
from coordinator.notices import Notices
from coordinator.operator.control import READY_VARIABLE
from coordinator.service.parent_death import die_with_parent
from coordinator.service.stop_requests import StopRequests

APP_ADDRESS_VARIABLE = "IMMORTAL_APP_ADDRESS"
STATUS_HANDLER_FAILED = 70
STATUS_UPGRADE_FAILED = 71
STATUS_RECOVER_ME = 75
STATUS_TERMINATED = 128 + signal.SIGTERM  # of an app
STATUS_CALLED_WRONGLY = 2
STATUS_NO_RECOVERY = 3
STATUS_FENCED = 4
# What ends a process that reads a page of its log which the disk does not give, or that follows a damaged one.
_PAGE_DEATHS = (-signal.SIGBUS, -signal.SIGSEGV, -signal.SIGABRT)
_OWN_DEATHS = (STATUS_HANDLER_FAILED, STATUS_UPGRADE_FAILED, STATUS_CALLED_WRONGLY)
STOP_GRACE_S = 5.0  # between SIGTERM and SIGKILL
LEAVE_S = 1.0  # for one to end by itself after the other has ended well
CLEAN_STOP_S = 30.0  # for a last checkpoint, which may be GiB
PYTHON = (sys.executable, "-P")  # no file in the current folder takes the place of a module of Python's or ours
RESTART_PAUSE_S_MIN = 0.1
RESTART_PAUSE_S_MAX = 5.0
RESTART_PAUSE_RESET_S = 10.0  # who lived this long did not die of how it was started
# A message that ends its process is passed over after the third death, by default (coordinator/core/careful.py): those
# who wait for the service behind it need not wait for pauses, too.
APP_DEATHS_AT_ONCE = 3

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
RESTART_SIGNAL = signal.SIGUSR1


class Role(enum.Enum):
    COORDINATOR = "coordinator"
    APP = "app"

    @property
    def other(self) -> Role:
        return Role.APP if self is Role.COORDINATOR else Role.COORDINATOR


@dataclass(frozen=True)
class Command:
    """How to start one of the two: ``environment`` is set in addition to the supervisor's own."""

    argv: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)


def supervised(settings: InstanceSettings) -> InstanceSettings:
    """``settings`` as they are under `immortal run`: its app knows the secret.

    Raises ConfigError.
    """
    return override(settings, app_auth=AppAuth.CHALLENGE)


def coordinator_command(
    settings: InstanceSettings,
    *,
    log_format: str,
    log_level: str,
    promote: bool = False,
    trust_pickle: bool = False,
    place: Path | None = None,
) -> Command:
    """``place``: the folder of a follower; None: it is none."""
    home = str(settings.folder.parent)
    argv = [*PYTHON, "-m", "coordinator", "--home", home, "coordinator", settings.name]
    argv += ["--app-auth", settings.app_auth.value]
    if settings.insecure:
        argv.append("--insecure")
    if settings.allow_data_loss:
        argv.append("--allow-data-loss")
    if settings.app_socket is not None:
        argv += ["--app-socket", settings.app_socket]
    if settings.replay_check is not None:
        argv += ["--replay-check", settings.replay_check.value]
    if settings.metrics is not None:
        argv += ["--metrics", settings.metrics]
    if trust_pickle:
        argv.append("--trust-pickle")
    if place is not None:
        argv += ["--follow", "--place", str(place)]
    options = ["--log-format", log_format, "--log-level", log_level, *(["--promote"] if promote else [])]
    return Command([*argv, *options])


def app_command(settings: InstanceSettings, app: str, *, strict: bool = False) -> Command:
    # The SDK wants a fixed hash seed, and would start itself over to get one.
    hash_seed = os.environ.get("PYTHONHASHSEED", "0")
    environment = {APP_ADDRESS_VARIABLE: settings.app_addresses[0], "PYTHONHASHSEED": hash_seed}
    if settings.app_auth is not AppAuth.NONE:
        environment[app_secret.SECRET_FILE_VARIABLE] = str(app_secret.path(settings.folder))
    return Command([*PYTHON, "-m", "appsdk", app, *(["--strict"] if strict else [])], environment)


@dataclass(frozen=True)
class Exit:
    """How a process ended: ``returncode`` as subprocess gives it, negative for a signal."""

    role: Role
    pid: int
    returncode: int

    def __str__(self) -> str:
        if self.returncode >= 0:
            return f"status {self.returncode}"
        try:
            return signal.Signals(-self.returncode).name
        except ValueError:
            return f"signal {-self.returncode}"


class Verdict(enum.Enum):
    """What follows from the death of the two."""

    DIED = "died"
    STOPPED = "stopped"
    HANDLER_FAILED = "handler failed"
    UPGRADE_FAILED = "an upgrade failed"
    CALLED_WRONGLY = "called wrongly"
    NO_RECOVERY = "the log can't be replayed"
    FENCED = "another process writes the log"


def judge(first: Exit, second: Exit, second_was_told: bool) -> Verdict:
    """What it means that ``first`` died by itself, and ``second`` then, by itself or because it was told to."""
    if first.role is Role.APP and first.returncode == STATUS_HANDLER_FAILED:
        return Verdict.HANDLER_FAILED
    if first.role is Role.APP and first.returncode == STATUS_UPGRADE_FAILED:
        return Verdict.UPGRADE_FAILED
    coordinator = first if first.role is Role.COORDINATOR else second
    if coordinator.returncode == STATUS_NO_RECOVERY:  # the app may be found dead first: it leaves when it hears of it
        return Verdict.NO_RECOVERY
    if coordinator.returncode == STATUS_FENCED:
        return Verdict.FENCED
    if first.returncode == STATUS_CALLED_WRONGLY:
        return Verdict.CALLED_WRONGLY
    if first.returncode == 0 and second.returncode == 0 and not second_was_told:
        return Verdict.STOPPED
    return Verdict.DIED


def who_died_first(exits: Sequence[Exit]) -> Exit:
    """Of those that were found dead at once, the one that the other died of."""
    by_role = {one.role: one for one in exits}
    app, coordinator = by_role.get(Role.APP), by_role.get(Role.COORDINATOR)
    if app is None or coordinator is None:
        return exits[0]
    own_death = app.returncode < 0 or app.returncode in _OWN_DEATHS
    return app if own_death and coordinator.returncode >= 0 else coordinator


class RestartPause:
    """None after a long life; else 0.1 s, doubling up to 5 s while the two die young and before they have recovered.

    ``at_once``: the first deaths in a row that no pause follows.
    """

    def __init__(self, at_once: int = 0) -> None:
        self._next_s = RESTART_PAUSE_S_MIN
        self._at_once = at_once

    def after(self, life_s: float, *, recovered: bool) -> float:
        """The pause after a life of ``life_s``; who had recovered did not die of how it was started."""
        if life_s >= RESTART_PAUSE_RESET_S:
            self._next_s = RESTART_PAUSE_S_MIN
            return 0.0
        if self._at_once:
            self._at_once -= 1
            return 0.0
        if recovered:
            self._next_s = RESTART_PAUSE_S_MIN
        pause_s = self._next_s
        self._next_s = min(2 * pause_s, RESTART_PAUSE_S_MAX)
        return pause_s


class _Child:
    """One running process, with a descriptor that becomes readable when it dies."""

    def __init__(self, role: Role, command: Command, ready_descriptor: int | None) -> None:
        self.role = role
        environment = {**os.environ, **command.environment}
        environment.pop(READY_VARIABLE, None)
        if ready_descriptor is not None:
            environment[READY_VARIABLE] = str(ready_descriptor)
        # preexec_fn is unsafe in a process with threads (a lock held by another thread stays locked in the child): the
        # supervisor has none, and die_with_parent calls nothing but two system calls.
        self.process = subprocess.Popen(
            list(command.argv),
            stdin=subprocess.DEVNULL,
            env=environment,
            pass_fds=() if ready_descriptor is None else (ready_descriptor,),
            process_group=0,  # Ctrl-C in a terminal reaches the supervisor alone
            preexec_fn=die_with_parent(os.getpid()),
        )
        self.descriptor = os.pidfd_open(self.process.pid)

    def collect(self) -> Exit:
        """The exit of a process whose descriptor is readable."""
        returncode = self.process.wait()
        os.close(self.descriptor)
        return Exit(self.role, self.process.pid, returncode)

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)


class Supervisor:
    """Runs the two until they are to run no more. For the main thread of a process that ends with it: it takes
    SIGTERM, SIGINT and RESTART_SIGNAL.

    ``commands`` is asked before each start. ``gave_up_upgrade`` is told that the app gave an upgrade up, and says
    whether there is a version before it that can go on. ``announced`` is entered once signals are understood; with
    ``follows``, once the coordinator is ready, which it is when it has taken over.
    """

    def __init__(
        self,
        commands: Callable[[], Mapping[Role, Command]],
        log: Notices,
        *,
        restart: bool = False,
        gave_up_upgrade: Callable[[], bool] = lambda: False,
        announced: AbstractContextManager[None] | None = None,
        follows: bool = False,
        stop_grace_s: float = STOP_GRACE_S,
        clean_stop_s: float = CLEAN_STOP_S,
    ) -> None:
        self._commands = commands
        self._log = log
        self._restart = restart
        self._gave_up_upgrade = gave_up_upgrade
        self._announced = announced or contextlib.nullcontext()
        self._follows = follows
        self._entered = contextlib.ExitStack()  # announced
        self._stop_grace_s = stop_grace_s
        self._clean_stop_s = clean_stop_s
        self._children: dict[Role, _Child] = {}  # those that run
        self._exits: dict[Role, Exit] = {}  # of those that were started last
        self._ready_descriptor: int | None = None
        self._was_ready = self._app_was_ready = False  # since both were started, since the app was
        self._stop_requests = StopRequests()
        self._restart_asked = False
        self._wake_read, self._wake_write = socket.socketpair()

    def run(self) -> int:
        """Returns the exit status."""
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        for number in (*_STOP_SIGNALS, RESTART_SIGNAL):
            signal.signal(number, self._take_signal)
        old_wake = signal.set_wakeup_fd(self._wake_write.fileno(), warn_on_full_buffer=False)
        try:
            with self._entered:
                if not self._follows:
                    self._announce()
                return self._run()
        finally:
            for child in self._children.values():  # only where something raised
                child.send(signal.SIGKILL)
                child.collect()
            signal.set_wakeup_fd(old_wake)
            for number in (*_STOP_SIGNALS, RESTART_SIGNAL):
                signal.signal(number, signal.SIG_IGN)  # one more wish must not spoil the exit status
            self._close_ready()
            self._wake_read.close()
            self._wake_write.close()

    def _announce(self) -> None:
        """From now on this is who starts and stops the instance."""
        announced, self._announced = self._announced, contextlib.nullcontext()
        self._entered.enter_context(announced)

    def _run(self) -> int:
        pause = RestartPause()
        while True:
            started_s = time.monotonic()
            self._restart_asked = False
            self._start()
            self._outlive_apps()
            if not self._exits:
                status = self._stop_cleanly()
                self._close_ready()
                if self._stop_requests.count:
                    return status
                self._log.info("starting both again, as asked")
                continue
            first = who_died_first(list(self._exits.values()))
            life_s = time.monotonic() - started_s
            second, told = self._stop_other(first)
            self._close_ready()
            verdict = judge(first, second, told)
            self._tell(verdict, first)
            if verdict is Verdict.HANDLER_FAILED:
                return STATUS_HANDLER_FAILED
            if verdict in (Verdict.CALLED_WRONGLY, Verdict.NO_RECOVERY):
                return 1
            if verdict is Verdict.FENCED and not (self._follows and self._restart):
                return STATUS_FENCED
            if verdict is Verdict.UPGRADE_FAILED and self._gave_up_upgrade() and not self._stop_requests.count:
                self._log.info("starting the version before again")
                continue
            if self._stop_requests.count or not (self._restart or self._restart_asked):
                return 0 if verdict is Verdict.STOPPED else 1
            pause_s = pause.after(life_s, recovered=self._was_ready)
            self._log.info("restarting", pause_s=pause_s)
            self._wait_for(lambda: self._is_asked, pause_s)
            if self._stop_requests.count:
                self._log.info("both stopped")
                return 0

    @property
    def _is_asked(self) -> bool:
        return self._restart_asked or self._stop_requests.count > 0

    def _outlive_apps(self) -> None:
        """Until there is a wish to stop, or a death that ends both: an app that dies alone is started again."""
        pause = RestartPause(APP_DEATHS_AT_ONCE)
        while True:
            started_s = time.monotonic()
            self._wait_for(lambda: bool(self._exits or self._is_asked))
            dead = self._app_to_start_again()
            if dead is None:
                return
            if dead.returncode == STATUS_RECOVER_ME:
                self._log.info("the app left to be recovered, and is started again", pid=dead.pid)
                pause_s = 0.0
            else:
                self._log.error(f"the app died: {dead}; its coordinator goes on", pid=dead.pid)
                if self._app_was_ready:  # it got somewhere: it comes back at once, however often
                    pause = RestartPause(APP_DEATHS_AT_ONCE)
                pause_s = pause.after(time.monotonic() - started_s, recovered=False)
                self._log.info("restarting", pause_s=pause_s)
            interrupted = self._wait_for(lambda: self._is_asked or Role.COORDINATOR in self._exits, pause_s)
            if Role.COORDINATOR in self._exits:
                return
            del self._exits[Role.APP]
            if interrupted:
                return
            self._start_app(self._commands())
            self._tell_started()

    def _app_to_start_again(self) -> Exit | None:
        """How the app died, if it did alone and by itself; None where that is no reason to start it again."""
        dead = self._exits.get(Role.APP)
        if dead is None or dead.returncode in _OWN_DEATHS:
            return None
        if dead.returncode != STATUS_RECOVER_ME and not self._restart:
            return None
        if dead.returncode in (0, 1):  # its coordinator may have said goodbye, or be gone: its own end says
            self._wait_for(lambda: Role.COORDINATOR in self._exits, LEAVE_S)
        return None if Role.COORDINATOR in self._exits or self._is_asked else dead

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
        self._tell_started()

    def _tell_started(self) -> None:
        self._log.info("started", **{f"{role.value}_pid": self._children[role].process.pid for role in Role})

    def _start_app(self, commands: Mapping[Role, Command]) -> None:
        self._app_was_ready = False
        self._children[Role.APP] = _Child(Role.APP, commands[Role.APP], None)

    def _stop_other(self, first: Exit) -> tuple[Exit, bool]:
        """Wait for the other one's end; True if it had to be told to."""
        other = first.role.other
        # Status 1 of the app says that its coordinator leaves it: that one's own status says why.
        if first.returncode == 0 or (first.role is Role.APP and first.returncode == 1):
            self._wait_for(lambda: other in self._exits, LEAVE_S)
        told = other not in self._exits
        return self._terminate(other), told

    def _terminate(self, role: Role) -> Exit:
        """SIGTERM, then SIGKILL, unless it is gone already."""
        if role in self._exits:
            return self._exits[role]
        child = self._children[role]
        child.send(signal.SIGTERM)
        if not self._wait_for(lambda: role in self._exits, self._stop_grace_s):
            grace = f"{self._stop_grace_s:g} s"
            self._log.warning(f"the {role.value} did not stop within {grace} and is killed", pid=child.process.pid)
            child.send(signal.SIGKILL)
            self._wait_for(lambda: role in self._exits)
        return self._exits[role]

    def _stop_cleanly(self) -> int:
        """The coordinator says goodbye to the app; both end by themselves."""
        self._log.info("stopping")
        requests = self._stop_requests.count
        self._children[Role.COORDINATOR].send(signal.SIGTERM)

        def is_over() -> bool:
            # One that ended badly leaves nobody who would end the other; asked twice: at once.
            failed = any(one.returncode != 0 for one in self._exits.values())
            return not self._children or failed or self._stop_requests.count > requests

        if not self._wait_for(is_over, self._clean_stop_s):
            waited = f"{self._clean_stop_s:g} s"
            for role, child in self._children.items():
                self._log.warning(f"the {role.value} has not ended within {waited}", pid=child.process.pid)
        exits = [self._terminate(role) for role in Role if role in self._children or role in self._exits]
        failed = [one for one in exits if one.returncode != 0 and not self._was_starting(one)]
        for one in failed:
            self._log.error(f"the {one.role.value} ended with {one}, not with status 0", pid=one.pid)
        if not failed:
            self._log.info("both stopped")
        return 1 if failed else 0

    def _was_starting(self, one: Exit) -> bool:
        """Whether our SIGTERM met it before it could hear of it: then it had not begun anything."""
        was_ready = self._app_was_ready if one.role is Role.APP else self._was_ready
        return not was_ready and one.returncode in (-signal.SIGTERM, STATUS_TERMINATED)

    def _tell(self, verdict: Verdict, first: Exit) -> None:
        """The one line about who died, and how."""
        what = f"the {first.role.value} died: {first}"
        if verdict is Verdict.STOPPED:
            self._log.info(
                f"the {first.role.value} was stopped, and the {first.role.other.value} with it", pid=first.pid
            )
        elif verdict is Verdict.HANDLER_FAILED:
            self._log.error(
                f"{what}: a handler failed, and a replay would only repeat it; nothing is lost: mend the handler,"
                " then start 'immortal run' again",
                pid=first.pid,
            )
        elif verdict is Verdict.UPGRADE_FAILED:
            self._log.error(f"{what}: the upgrade failed; the old version is whole", pid=first.pid)
        elif verdict is Verdict.NO_RECOVERY:
            self._log.error(
                f"{what}: its log can't be replayed as it is, a restart would not help; its own line says why",
                pid=first.pid,
            )
        elif verdict is Verdict.FENCED:
            then = "it follows from now on" if self._follows and self._restart else "nothing is started again here"
            self._log.warning(f"{what}: another process writes its log by now; {then}", pid=first.pid)
        elif verdict is Verdict.CALLED_WRONGLY:
            self._log.error(
                f"{what}: it was called wrongly, a restart would not help; its own line says why", pid=first.pid
            )
        else:
            hint = ""
            if first.role is Role.COORDINATOR and first.returncode in _PAGE_DEATHS:
                hint = f"; the file of its log may be damaged: 'immortal log verify {self._log.instance}' says"
            self._log.error(f"{what}; the {first.role.other.value} was stopped{hint}", pid=first.pid)

    # --- waiting ----------------------------------------------------------------------------------------------------

    def _wait_for(self, condition: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Take in deaths and signals until ``condition`` holds; False when the time was over first."""
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
                self._announce()
                self._log.info("ready")
            else:
                self._close_ready()
        for role, child in list(self._children.items()):
            if child.descriptor in readable:
                del self._children[role]
                self._exits[role] = child.collect()

    def _close_ready(self) -> None:
        if self._ready_descriptor is not None:
            os.close(self._ready_descriptor)
            self._ready_descriptor = None

    def _take_signal(self, number: int, frame: FrameType | None) -> None:
        if number == RESTART_SIGNAL:
            self._restart_asked = True
        else:
            self._stop_requests.signalled()
        # the wake-up descriptor ends the wait
