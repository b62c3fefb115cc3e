"""Findings about a home: permissions, wrong settings, instances without logs, logs without instances, stale sockets."""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

from immortal.coordinator.app.secret import FILE_NAME as APP_SECRET_FILE_NAME
from immortal.coordinator.config import ConfigError, InstanceSettings
from immortal.coordinator.config.socket_addresses import SHORT_FOLDERS, socket_path
from immortal.coordinator.config.socket_addresses import SOCKET_FILE_NAME as APP_SOCKET_FILE_NAME
from immortal.coordinator.core.errors import LogError
from immortal.coordinator.doctor import installation
from immortal.coordinator.doctor.finding import Area, Finding, note, ok, problem
from immortal.coordinator.instances.own_logs import FOLDER_NAME as KEYS_FOLDER_NAME
from immortal.coordinator.instances.own_logs import had_log
from immortal.coordinator.instances.registry import HOME_DEFAULT, HOME_VARIABLE, Registry, RegistryError
from immortal.coordinator.log.open import place_of
from immortal.coordinator.log_url import is_in_folder, split_url
from immortal.coordinator.operator import control
from immortal.coordinator.operator.control import SOCKET_FILE_NAME as CONTROL_SOCKET_FILE_NAME
from immortal.protocol import distribution
from immortal.protocol.command_line import counted
from immortal.protocol.files import COORDINATOR_FILE_NAME, ProcessFile, describe_open_access, read_living

AREA = Area.HOME
LOG_FOLDER_NAME = "log"
SHOWN_MAX = 10
SOCKETS_NAMED_MAX = 3
ANSWER_TIMEOUT_S = 5.0
_SECRETS = (APP_SECRET_FILE_NAME, f"{KEYS_FOLDER_NAME}/pairs", f"{KEYS_FOLDER_NAME}/log_key")


def findings(registry: Registry) -> Iterator[Finding]:
    home = registry.home
    if not home.is_dir():
        there = f"{home} is not there" if not home.exists() else f"{home} is no folder"
        how = "'immortal init NAME' makes a project, 'immortal register NAME --peer tcp://127.0.0.1:*' an instance; "
        yield note(AREA, there, "nothing is registered", f"{how}--home or IMMORTAL_HOME names another folder")
        return
    yield from _check_folder(home)
    try:
        names = registry.names()
    except RegistryError:
        return  # the findings about the folder report it
    yield ok(AREA, f"{counted(len(names), 'instance')} in {home}")
    for name in names:
        yield from findings_of(registry, name)
    yield from _check_unregistered_logs(home, names)
    yield from _check_short_sockets()


def findings_of(registry: Registry, name: str) -> Iterator[Finding]:
    """Check one registered instance."""
    try:
        settings = registry.load(name)
    except (ConfigError, RegistryError) as error:
        yield problem(AREA, str(error), f"{name!r} can't be started, and its peers don't find it", "mend the file")
        return
    yield from _check_folder(settings.folder)
    yield from _check_secrets(settings)
    yield from _check_log(settings)
    yield from _check_extras(settings)
    yield from _check_sockets(settings)
    yield from _check_running(settings)


def _command(settings: InstanceSettings, verb: str, *options: str) -> str:
    """Return an `immortal` command line for an instance, to paste; it has --home unless the home is the default."""
    home, usual = settings.folder.parent, os.environ.get(HOME_VARIABLE) or HOME_DEFAULT
    is_usual = "://" in usual or home.absolute() == Path(usual).absolute()
    return shlex.join(["immortal", *([] if is_usual else ["--home", str(home)]), verb, settings.name, *options])


def _check_folder(folder: Path) -> Iterator[Finding]:
    try:
        status = folder.stat()
    except FileNotFoundError:
        return  # the instance was never started
    except OSError as error:
        yield problem(
            AREA, f"{folder} can't be looked at: {error.strerror}", "nothing in it can be used", "see its modes"
        )
        return
    if describe_open_access(folder) is not None:
        mode = f"{folder} has mode {stat.S_IMODE(status.st_mode):04o}: others can write in it"
        why = "they could put their own keys, addresses and settings there: it is refused"
        yield problem(AREA, mode, why, f"look at what is in it, then: chmod go-w {shlex.quote(str(folder))}")
    if status.st_uid != os.geteuid():
        what = f"{folder} belongs to user {status.st_uid}, this is user {os.geteuid()}"
        why = "what runs here makes files that the other can't read, or fails"
        yield problem(AREA, what, why, "run all commands as the user who owns it")
    elif not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        yield problem(
            AREA,
            f"{folder} can't be written to",
            "no instance in it can run",
            f"chmod u+rwx {shlex.quote(str(folder))}",
        )


def _check_secrets(settings: InstanceSettings) -> Iterator[Finding]:
    for file in _SECRETS:
        path = settings.folder / file
        with contextlib.suppress(OSError):
            mode = stat.S_IMODE(path.stat().st_mode)
            if mode & 0o077:
                why = "who reads it can speak as this instance, or as its app"
                yield problem(
                    AREA, f"{path} has mode {mode:04o}: others can use it", why, f"chmod 600 {shlex.quote(str(path))}"
                )


def _check_log(settings: InstanceSettings) -> Iterator[Finding]:
    """Check that a log in a folder exists. Other logs are not checked here, since that can take long."""
    if not is_in_folder(settings.log):
        return
    try:
        exists = place_of(settings.log).exists()
    except (LogError, OSError) as error:
        yield problem(AREA, f"{settings.name}: {error}", "it can't be started", "see the folder of its log")
        return
    if exists:
        return
    if had_log(settings):
        yield problem(
            AREA,
            f"{settings.name} had a log, and there is none in {settings.log}",
            "its next start begins anew, with an empty state, and its peers stop their streams with it",
            f"bring the log back from a copy; or begin anew: {_command(settings, 'unregister', '--delete-log')}",
        )
    else:
        what = f"{settings.name} was never started: it has no log yet"
        yield note(
            AREA,
            what,
            "what peers send it waits with them",
            _command(settings, "run", *([] if settings.app else ["MODULE:CLASS"])),
        )


def _check_unregistered_logs(home: Path, names: list[str]) -> Iterator[Finding]:
    """Find logs of instances that are not registered: unregistered ones, or with a settings file removed by hand."""
    found = []
    with contextlib.suppress(OSError):
        for folder in sorted(home.iterdir()):
            with contextlib.suppress(LogError, OSError):
                log = folder / LOG_FOLDER_NAME
                if folder.name not in names and not folder.name.startswith(".") and place_of(log).exists():
                    found.append(folder.name)
    if found:
        shown = ", ".join(found[:SHOWN_MAX]) + (", ..." if len(found) > SHOWN_MAX else "")
        yield note(
            AREA,
            f"{counted(len(found), 'log')} of instances that are not registered: {shown}",
            "they take room, and 'immortal register' of such a name goes on with its log",
            f"register them again, or remove their folders in {home}",
        )


def _check_extras(settings: InstanceSettings) -> Iterator[Finding]:
    needed = {
        "encryption": settings.encryption_key is not None,
        "postgres": split_url(settings.log)[0] == "postgresql",
        "metrics": settings.metrics is not None,
    }
    for extra, is_needed in needed.items():
        if is_needed and not installation.is_installed(extra):
            what = f"{settings.name} needs the extra {extra!r}, which is not installed"
            yield problem(AREA, what, "its start fails", distribution.add_extra(extra))


def _check_sockets(settings: InstanceSettings) -> Iterator[Finding]:
    """Find sockets without a process: their process was killed, and the next start replaces them."""
    if read_living(settings.folder / COORDINATOR_FILE_NAME, ProcessFile) is not None:
        return
    stale = [
        path
        for file_name in (CONTROL_SOCKET_FILE_NAME, APP_SOCKET_FILE_NAME)
        if is_stale(path := socket_path(settings.folder, file_name))
    ]
    if stale:
        yield note(
            AREA,
            f"{settings.name} does not run, and has sockets: {', '.join(map(str, stale))}",
            "its coordinator was killed, or its machine went down; nothing is lost by that",
            f"none is needed: the next start takes their place, and replays: {_command(settings, 'run')}",
        )


def _check_running(settings: InstanceSettings) -> Iterator[Finding]:
    """Ask a running coordinator about its clock; no answer is a finding as well."""
    name = settings.name
    try:
        answer = control.query(settings.folder, "clock", ANSWER_TIMEOUT_S)
    except control.NotRunningError:
        return
    except control.ControlError as error:
        why = "its app and its peers may get no answer, either"
        yield problem(
            AREA, str(error), why, f"kill -9 of its process loses nothing; {_command(settings, 'status')} shows it"
        )
        return
    ahead_s = answer.get("ahead_s")
    if isinstance(ahead_s, int | float) and ahead_s:
        way = f"{abs(ahead_s):,.1f} s {'ahead of' if ahead_s > 0 else 'behind'} the time of {name}"
        yield note(
            Area.CLOCK,
            f"the machine's clock is {way}: it has jumped, and is not believed yet",
            "times of records and schedules go by the instance's time until then",
            f"see whether the clock is right; if it is, take it at once: {_command(settings, 'clock', '--accept')}",
        )


def is_stale(path: Path) -> bool:
    """Return True if ``path`` is a Unix socket at which nobody listens.

    If the kernel lists the socket, somebody listens; no connection is tried, since the listener would report it as a
    stranger's. Else a connection is tried, as a process of another network namespace can listen.
    """
    if f" {path}\n".encode() in _bound_sockets():
        return False
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            return False
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.connect(os.fspath(path))
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False


@functools.cache
def _bound_sockets() -> bytes:
    """Return the kernel's list of the sockets of this network namespace, a line each, with its path at the end."""
    try:
        return Path("/proc/net/unix").read_bytes()
    except OSError:
        return b""


def _check_short_sockets() -> Iterator[Finding]:
    """Check the folder that all homes of this user share, for sockets whose path would be too long elsewhere."""
    folder = SHORT_FOLDERS / f"immortal-{os.geteuid()}"
    try:
        status = folder.lstat()
    except OSError:
        return
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        what = f"{folder} is no folder that only user {os.geteuid()} can use"
        why = "sockets of instances whose own folder has a long path go there: their start is refused"
        yield problem(AREA, what, why, "remove it, or see who did that")
        return
    with contextlib.suppress(OSError):
        stale = [path.name for path in folder.iterdir() if is_stale(path)]
        if stale:
            what = f"{counted(len(stale), 'socket')} in {folder} without a process"
            why = "of instances that were killed, or whose home is gone"
            remove = shlex.join(["rm", *(f"{folder}/{one}" for one in stale)])
            few = len(stale) <= SOCKETS_NAMED_MAX
            yield note(AREA, what, why, f"none is needed: {remove if few else 'they take no room'}")
