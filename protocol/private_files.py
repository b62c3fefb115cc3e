"""Files and folders for their owner alone, whatever the umask."""

from __future__ import annotations

import os
import stat
from pathlib import Path

FILE_MODE = 0o600
FOLDER_MODE = 0o700
PUBLIC_FILE_MODE = 0o644  # what peers and clients of other users may read, where they can search the folder
_OTHERS_WRITE = 0o022


def make_folder(folder: Path) -> None:
    """Make ``folder`` where it is missing, and those above it; what is there stays as it is. Raises OSError."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    try:
        folder.mkdir(mode=FOLDER_MODE)
    except FileExistsError:
        if not folder.is_dir():  # made by somebody else just now, else
            raise


def opener(path: str, flags: int) -> int:
    """For ``open(..., opener=opener)``: a file that is written, new or not, is its owner's alone. Raises OSError."""
    descriptor = os.open(path, flags, FILE_MODE)
    try:
        tighten(descriptor, FILE_MODE)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def open_beside(path: Path) -> tuple[int, Path]:
    """A new file in the folder of ``path``, open for writing, that is to take its place. Raises OSError.

    (tempfile, with all that it imports, is a MiB of each coordinator.)
    """
    temporary = path.with_name(f".{path.name}.{os.urandom(8).hex()}")
    return os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE), temporary


def openness(folder: Path) -> str | None:
    """What is wrong with a folder in which others can make and replace files, in words; None where nothing is."""
    try:
        mode = folder.stat().st_mode & 0o777
    except OSError:
        return None  # whoever reads in it says so
    if not mode & _OTHERS_WRITE:
        return None
    return (
        f"{folder} has mode {mode:04o}: others could put their own keys, addresses and settings there; "
        f"'chmod go-w {folder}' ends that, once you have looked at what is in it"
    )


def tighten(place: Path | int, mode: int) -> str | None:
    """Take from an own file or folder what ``mode`` does not have; its mode before, as in "0644", where that was more.

    Devices, links, what belongs to another user, and folders that are open to all on purpose (the sticky bit) stay as
    they are. Raises OSError.
    """
    status = os.fstat(place) if isinstance(place, int) else os.lstat(place)
    is_ours = stat.S_ISREG(status.st_mode) or (stat.S_ISDIR(status.st_mode) and not status.st_mode & stat.S_ISVTX)
    if not is_ours or status.st_uid != os.geteuid() or not status.st_mode & 0o777 & ~mode:
        return None
    os.chmod(place, status.st_mode & 0o7777 & ~(0o777 & ~mode))
    return f"{status.st_mode & 0o777:04o}"
