"""Files and folders for their owner alone, whatever the umask; file locks; files that describe running processes."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from immortal.protocol import decoding

FILE_MODE = 0o600
FOLDER_MODE = 0o700
PUBLIC_FILE_MODE = 0o644  # readable by peers and clients of other users, if they can search the folder
_OTHERS_WRITE = 0o022


def make_folder(folder: Path) -> None:
    """Create ``folder`` and its parents if they are missing; existing folders stay unchanged. Raises OSError."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    try:
        folder.mkdir(mode=FOLDER_MODE)
    except FileExistsError:
        if not folder.is_dir():  # else another process has just created it
            raise


@contextlib.contextmanager
def opened(path: Path, flags: int, mode: int = FILE_MODE) -> Iterator[int]:
    """Open a file or folder during the block, as :func:`os.open` does; yield its descriptor. Raises OSError."""
    descriptor = os.open(path, flags | os.O_CLOEXEC, mode)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def opener(path: str, flags: int) -> int:
    """Open a file that only its owner can read, new or not. For ``open(..., opener=opener)``. Raises OSError."""
    descriptor = os.open(path, flags, FILE_MODE)
    try:
        restrict_mode(descriptor, FILE_MODE)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def open_beside(path: Path) -> tuple[int, Path]:
    """Create a temporary file beside ``path``, open for writing, to replace ``path`` later. Raises OSError.

    (The import of tempfile would cost each coordinator a MiB.)
    """
    temporary = path.with_name(f".{path.name}.{os.urandom(8).hex()}")
    return os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE), temporary


def replace_file(path: Path, content: bytes, *, mode: int = FILE_MODE, is_synced: bool = False) -> None:
    """Write a file anew, wholly or not at all. ``is_synced``: its content survives a crash of the machine.

    Raises OSError.
    """
    descriptor, temporary = open_beside(path)
    try:
        with open(descriptor, "wb") as file:
            if mode != FILE_MODE:  # it is made with that one; some file systems have no modes
                os.fchmod(descriptor, mode)
            file.write(content)
            if is_synced:
                file.flush()
                os.fsync(descriptor)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_whole(path: Path, text: str, *, is_new: bool = False) -> None:
    """Write all of a text file or nothing. ``is_new``: replace no file. Raises OSError with ``path``."""
    try:
        if is_new and path.is_symlink() and not path.exists():
            raise FileExistsError(errno.EEXIST, "a link to a file that is missing")
        if path.is_symlink() or (path.exists() and not path.is_file()):  # such as /dev/stdout: never replaced
            path.write_text(text, encoding="utf-8")
            return
        if is_new and path.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        replace_file(path, text.encode())
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


@contextlib.contextmanager
def removed_on_error(path: Path) -> Iterator[None]:
    """Remove the new file ``path`` if it can't be written to its end: nobody shall take it for whole."""
    try:
        yield
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def sync_folder(path: Path) -> None:
    """Sync the folder ``path``: the names of its files. Raises OSError."""
    with opened(path, os.O_RDONLY | os.O_DIRECTORY) as descriptor:
        os.fsync(descriptor)


def describe_open_access(folder: Path) -> str | None:
    """Describe the risk of a folder in which others can create and replace files; None if there is none."""
    try:
        mode = folder.stat().st_mode & 0o777
    except OSError:
        return None  # reading it reports the error
    if not mode & _OTHERS_WRITE:
        return None
    return (
        f"{folder} has mode {mode:04o}: others could put their own keys, addresses and settings there; "
        f"'chmod go-w {folder}' ends that, once you have looked at what is in it"
    )


def restrict_mode(place: Path | int, mode: int) -> str | None:
    """Remove the permissions that ``mode`` lacks from an own file or folder; return the old mode ("0644") if changed.

    Devices, links, other users' files, and folders that are open to all on purpose (the sticky bit) stay unchanged.
    Raises OSError.
    """
    status = os.fstat(place) if isinstance(place, int) else os.lstat(place)
    is_ours = stat.S_ISREG(status.st_mode) or (stat.S_ISDIR(status.st_mode) and not status.st_mode & stat.S_ISVTX)
    if not is_ours or status.st_uid != os.geteuid() or not status.st_mode & 0o777 & ~mode:
        return None
    os.chmod(place, status.st_mode & 0o7777 & ~(0o777 & ~mode))
    return f"{status.st_mode & 0o777:04o}"


# Locks on files, by flock, with a timeout. The kernel knows the holder.
#
# Any process that can open a file can hold its lock for ever, so lock files are for their owner alone.


_PAUSE_S = 0.01


def open_lock(path: Path) -> int:
    """Open the lock file, create it if it is missing, and return its descriptor. Raises OSError."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
    try:
        restrict_mode(descriptor, FILE_MODE)
    except PermissionError:
        pass  # some file systems have no modes
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def acquire_lock(descriptor: int, timeout_s: float) -> None:
    """Lock a file. Raises BlockingIOError if another process holds the lock for ``timeout_s``; raises OSError."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(_PAUSE_S)


def describe_lock_holder(descriptor: int) -> str:
    """Describe the process that holds the lock: "process 1815", with its user if that is another one.

    The text in a lock file can be outdated, or of a process that did not get the lock, so it is not used.
    """
    status = os.fstat(descriptor)
    place = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    try:
        locks = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
        # 1: FLOCK  ADVISORY  WRITE 1815 fe:00:5424377 0 EOF
        found = next(int(lock[4]) for lock in locks if lock[1] == "FLOCK" and lock[5] == place)
        uid = Path(f"/proc/{found}").stat().st_uid
    except (OSError, StopIteration, ValueError, IndexError):
        return "a process that can't be named here"  # in another container; or on btrfs, whose numbers differ
    return f"process {found}" if uid == os.geteuid() else f"process {found} of user {uid}"


# Process files: a running process describes itself (its ID, its start time) in its instance's folder.
#
# It writes the file when it is up, and removes it at an orderly end. After a crash the file stays, so it
# counts only while the process that wrote it is alive.


COORDINATOR_FILE_NAME = "coordinator.json"
SUPERVISOR_FILE_NAME = "supervisor.json"


class ProcessFile(msgspec.Struct, frozen=True, kw_only=True):
    """Description of a running process.

    ``process_start_ticks``: the kernel's start time, which differs for a later process with the same ID.
    ``pid_namespace``: the namespace of ``pid``; 0 if unknown. ``control``: the socket of a coordinator, or "".
    """

    pid: int
    started_ns: int
    process_start_ticks: int = 0
    pid_namespace: int = 0
    control: str = ""


P = TypeVar("P", bound=ProcessFile)


def current_process_fields() -> dict[str, Any]:
    """Return the fields that describe this process."""
    pid = os.getpid()
    return {
        "pid": pid,
        "started_ns": time.time_ns(),
        "process_start_ticks": _start_ticks(pid) or 0,
        "pid_namespace": _pid_namespace(),
    }


def read(path: Path, kind: type[P]) -> P | None:
    """Read a process file; return None if it is missing or invalid."""
    try:
        return decoding.decode_json(path.read_bytes(), type=kind)
    except (decoding.DecodeError, OSError):
        return None


def withdraw(path: Path) -> None:
    """Remove a process file, unless it is another process's by now. Raises OSError."""
    found = read(path, ProcessFile)
    if found is not None and found.pid == os.getpid() and shares_pid_namespace(found):
        path.unlink(missing_ok=True)


def read_living(path: Path, kind: type[P]) -> P | None:
    """Read a process file if the process that wrote it is alive; else return None."""
    found = read(path, kind)
    return found if found is not None and is_living(found) else None


def shares_pid_namespace(process: ProcessFile) -> bool:
    """Return False for a process of another PID namespace, such as another container's: its ID has no meaning here."""
    return process.pid_namespace in (0, _pid_namespace())


def is_living(process: ProcessFile) -> bool:
    if process.control and not shares_pid_namespace(process):
        return _is_listened_at(process.control)
    ticks = _start_ticks(process.pid)
    return ticks is not None and process.process_start_ticks in (0, ticks)


def _pid_namespace() -> int:
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def _is_listened_at(path: str) -> bool:
    import socket

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(path)
        except BlockingIOError:
            return True  # the queue of waiting connections is full, so somebody listens
        except OSError:
            return False
    return True


def _start_ticks(pid: int) -> int | None:
    """Return the process's start time in the kernel's ticks since boot; None if it has ended, or is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])
