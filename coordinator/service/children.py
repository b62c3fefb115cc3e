"""Child processes of `immortal run`: the commands of a coordinator and its app, and the meaning of their exits."""

from __future__ import annotations

import contextlib
import enum
import os
import signal
import subprocess
import sys
import termios
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from msgspec import Struct, field

from immortal.coordinator.app import secret as app_secret
from immortal.coordinator.config import AppAuth, InstanceSettings, override
from immortal.coordinator.service.process import STATUS_FENCED, STATUS_NO_RECOVERY, die_with_parent
from immortal.protocol import kept_code, personal_keys, redaction
from immortal.protocol.executions import FILE_NAME
from immortal.protocol.limits import NESTING_MAX_DEFAULT
from immortal.protocol.timings import FOLDER_NAME

NESTING_VARIABLE = "IMMORTAL_NESTING_MAX"  # deepest nesting allowed in the values that handlers send
APP_ADDRESS_VARIABLE = "IMMORTAL_APP_ADDRESS"
APP_LOG_FORMAT_VARIABLE = "IMMORTAL_LOG_FORMAT"
APP_LOG_LEVEL_VARIABLE = "IMMORTAL_LOG_LEVEL"
APP_TIMINGS_VARIABLE = "IMMORTAL_TIMINGS"
APP_EXECUTIONS_VARIABLE = "IMMORTAL_EXECUTIONS"
APP_FILE_STORE_VARIABLE = "IMMORTAL_FILE_STORE"
PYTHON = (sys.executable, "-P")  # files in the current folder must not hide modules of Python or ours


class Role(enum.Enum):
    COORDINATOR = "coordinator"
    APP = "app"

    @property
    def other(self) -> Role:
        return Role.APP if self is Role.COORDINATOR else Role.COORDINATOR


class Command(Struct, frozen=True):
    """Command that starts a coordinator or an app. ``environment`` is set in addition to the supervisor's own."""

    argv: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)


def supervised_settings(settings: InstanceSettings) -> InstanceSettings:
    """Return ``settings`` for `immortal run`, under which the app knows the secret. Raises ConfigError."""
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
    """Return the command of the coordinator. ``place``: the folder of a follower; None: it does not follow."""
    home = str(settings.folder.parent)
    argv = [*PYTHON, "-m", "immortal", "--home", home, "coordinator", settings.name]
    argv += ["--peer", settings.peer, "--app-auth", settings.app_auth.value]
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


def app_command(
    settings: InstanceSettings,
    app: str,
    *,
    strict: bool = False,
    log_format: str | None = None,
    log_level: str = "",
    folder: Path | None = None,
) -> Command:
    """Return the command of the app. ``log_format``, ``log_level``: for the log lines of its handlers; None, "": as the
    environment says. ``folder``: for a follower, the folder of the instance that it follows."""
    # The SDK wants a fixed hash seed, and would start itself over to get one.
    hash_seed = os.environ.get("PYTHONHASHSEED", "0")
    environment = {APP_ADDRESS_VARIABLE: settings.app_addresses[0], "PYTHONHASHSEED": hash_seed}
    environment[APP_FILE_STORE_VARIABLE] = settings.files_place
    environment |= personal_keys.environment() | redaction.environment()
    if settings.nesting_max != NESTING_MAX_DEFAULT:
        environment[NESTING_VARIABLE] = str(settings.nesting_max)
    if log_format is not None:
        environment[APP_LOG_FORMAT_VARIABLE] = log_format
    if log_level:
        environment[APP_LOG_LEVEL_VARIABLE] = log_level
    if settings.timings_limit_mb:
        environment[APP_TIMINGS_VARIABLE] = f"{settings.timings_limit_mb << 19}:{settings.folder / FOLDER_NAME}"
    if (days := settings.executions_days) is not None:
        environment[APP_EXECUTIONS_VARIABLE] = f"{days}:{(folder or settings.folder) / FILE_NAME}"
    if settings.keep_code:
        environment[kept_code.FOLDER_VARIABLE] = str(settings.folder / kept_code.FOLDER_NAME)
    if settings.app_auth is not AppAuth.NONE:
        environment[app_secret.SECRET_FILE_VARIABLE] = str(app_secret.path(settings.folder))
    return Command([*PYTHON, "-m", "immortal.appsdk", app, *(["--strict"] if strict else [])], environment)


# The app's input under `immortal run`: none, the supervisor's pipe, or the terminal, for a debugger.
#
# At a terminal the app stays in the supervisor's process group, so that it can read there as a shell's job: Ctrl-Z
# stops both, `fg` continues both, and an app that reads in the background stops the job until `fg`. The coordinator
# has a group of its own and continues meanwhile. Ctrl-C signals the whole group; the signal is blocked in the app, even
# if a debugger handles it, so that only the supervisor stops both.


class SpawnOptions(TypedDict):
    """Arguments of Popen that decide a child's stdin and process group."""

    stdin: int | None
    process_group: int
    preexec_fn: Callable[[], None]


class ChildStdin:
    """Stdin of a child in a process group of its own, which Ctrl-C does not reach. ``stdin``: as for Popen: DEVNULL, or
    None for the supervisor's stdin, which is then a pipe."""

    def __init__(self, stdin: int | None = subprocess.DEVNULL) -> None:
        self._stdin = stdin

    def spawn_options(self) -> SpawnOptions:
        # preexec_fn is unsafe in a process with threads: a lock held by another thread stays locked in the child. The
        # supervisor has no threads, and the function makes only system calls.
        return SpawnOptions(stdin=self._stdin, process_group=0, preexec_fn=die_with_parent(os.getpid()))

    def restore_terminal(self) -> None:
        """Restore the terminal after the child has ended; do nothing if there is no terminal."""


class TerminalStdin(ChildStdin):
    """Stdin of a child that reads the supervisor's terminal, in the supervisor's process group."""

    def __init__(self) -> None:
        self._descriptor = sys.stdin.fileno()
        self._mode: list[Any] = termios.tcgetattr(self._descriptor)

    def spawn_options(self) -> SpawnOptions:
        with_parent = die_with_parent(os.getpid())

        def arrange() -> None:
            with_parent()
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])

        return SpawnOptions(stdin=None, process_group=-1, preexec_fn=arrange)

    def restore_terminal(self) -> None:
        """Restore the terminal's mode: an app that was ended at a prompt leaves it without echo."""
        before = signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # also in the background
        try:
            with contextlib.suppress(termios.error):  # it may be gone
                if termios.tcgetattr(self._descriptor) != self._mode:
                    termios.tcsetattr(self._descriptor, termios.TCSANOW, self._mode)
        finally:
            signal.signal(signal.SIGTTOU, before)


def app_stdin(interactive: bool | None) -> ChildStdin:
    """Return the app's stdin. ``interactive``: it gets this process's stdin; None: only if that is a terminal."""
    is_terminal = sys.stdin is not None and sys.stdin.isatty()
    if interactive is False or (interactive is None and not is_terminal):
        return ChildStdin()
    return TerminalStdin() if is_terminal else ChildStdin(None)


# Deaths of a coordinator and its app, by exit status:
#
# - status 70 of the app: a handler failed. A replay would run it again, so nothing is started again.
# - status 71 of the app: an upgrade failed. Both are started again, with the version before the upgrade.
# - status 75 of the app: it ended in order to be recovered. It is started again at once, with and without --restart.
# - status 2 of either: its command line is wrong, and would be at a next start.
# - status 3 of the coordinator: its log can't be replayed, nor could it be at a next start.
# - status 4 of the coordinator: another process writes its log now. Only a follower is started again, to follow.
# - status 0 of the coordinator: somebody asked it to stop. This is a clean end if the app ends with 0 as well; with
#   restart both are started again, since the supervisor was not asked.
# - status 0 of the app: a clean end, if the coordinator ends by itself with 0 as well; else a death like any other.
# - anything else: a death. If both are found dead at once, the coordinator died first, unless a signal killed the app
#   and not the coordinator: an app that loses its coordinator ends by itself.


STATUS_HANDLER_FAILED = 70
STATUS_UPGRADE_FAILED = 71
STATUS_RECOVER_ME = 75
STATUS_TERMINATED = 128 + signal.SIGTERM  # of an app
STATUS_USAGE_ERROR = 2
APP_FAULT_STATUSES = (STATUS_HANDLER_FAILED, STATUS_UPGRADE_FAILED, STATUS_USAGE_ERROR)
RESTART_BACKOFF_S_MIN = 0.1
RESTART_BACKOFF_S_MAX = 5.0
RESTART_BACKOFF_RESET_S = 10.0  # a process that lived this long did not fail at its start


class ProcessExit(Struct, frozen=True):
    """End of a process. ``returncode``: as of subprocess.Popen, negative for a signal."""

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


class Outcome(enum.Enum):
    """Meaning of the end of coordinator and app. Each value is the text of the log line."""

    DIED = "died"
    STOPPED = "stopped"
    HANDLER_FAILED = (
        "its code stopped it, and a replay would only repeat it; nothing is lost: its own lines say what to mend, then"
        " start 'immortal run' again"
    )
    UPGRADE_FAILED = "the upgrade failed; the old version is whole"
    USAGE_ERROR = "it was called wrongly, a restart would not help; its own line says why"
    NO_RECOVERY = "its log can't be replayed as it is, a restart would not help; its own line says why"
    FENCED = "another process writes the log"


def classify_exit(first: ProcessExit, second: ProcessExit, second_was_signalled: bool) -> Outcome:
    """Return the meaning of both ends. ``first`` died by itself, then ``second`` died, perhaps by our signal."""
    if first.role is Role.APP and first.returncode == STATUS_HANDLER_FAILED:
        return Outcome.HANDLER_FAILED
    if first.role is Role.APP and first.returncode == STATUS_UPGRADE_FAILED:
        return Outcome.UPGRADE_FAILED
    coordinator = first if first.role is Role.COORDINATOR else second
    if coordinator.returncode == STATUS_NO_RECOVERY:  # the app may be found dead first: it ends when it hears of this
        return Outcome.NO_RECOVERY
    if coordinator.returncode == STATUS_FENCED:
        return Outcome.FENCED
    if first.returncode == STATUS_USAGE_ERROR:
        return Outcome.USAGE_ERROR
    if first.returncode == 0 and second.returncode == 0 and not second_was_signalled:
        return Outcome.STOPPED
    return Outcome.DIED


def first_to_die(exits: Sequence[ProcessExit]) -> ProcessExit:
    """Return the process that died first, if coordinator and app were found dead at once."""
    by_role = {one.role: one for one in exits}
    app, coordinator = by_role.get(Role.APP), by_role.get(Role.COORDINATOR)
    if app is None or coordinator is None:
        return exits[0]
    own_death = app.returncode < 0 or app.returncode in APP_FAULT_STATUSES
    return app if own_death and coordinator.returncode >= 0 else coordinator


class RestartBackoff:
    """Backoff before restarts: no pause after a long run; else 0.1 s, doubled up to 5 s while each run is short and
    ends before the recovery is complete.

    ``immediate_count``: number of first restarts without a pause.
    """

    def __init__(self, immediate_count: int = 0) -> None:
        self._next_s = RESTART_BACKOFF_S_MIN
        self._immediate_count = immediate_count

    def next_pause_s(self, uptime_s: float, *, recovered: bool) -> float:
        """Return the pause after a run of ``uptime_s``, in seconds. ``recovered``: its recovery was complete."""
        if uptime_s >= RESTART_BACKOFF_RESET_S:
            self._next_s = RESTART_BACKOFF_S_MIN
            return 0.0
        if self._immediate_count:
            self._immediate_count -= 1
            return 0.0
        if recovered:
            self._next_s = RESTART_BACKOFF_S_MIN
        pause_s = self._next_s
        self._next_s = min(2 * pause_s, RESTART_BACKOFF_S_MAX)
        return pause_s
