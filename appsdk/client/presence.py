"""Whether an instance of this machine's registry folder runs, as its processes say there."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct

from immortal.protocol.process_file import COORDINATOR_FILE_NAME, SUPERVISOR_FILE_NAME, ProcessFile, read_living


class Presence(Struct, frozen=True):
    """``stopped``: by somebody's will, or never started. ``problem``: why it does not answer; "" while it runs."""

    stopped: bool
    problem: str


_UNKNOWN = Presence(False, "")


def presence(folder: Path) -> Presence:
    """Of the instance of ``folder``. A process that is killed leaves its file: it may be started again any moment."""
    name = folder.name
    files = [folder / SUPERVISOR_FILE_NAME, folder / COORDINATOR_FILE_NAME]
    try:
        if not any(map(_is_there, files)):
            return Presence(True, f"{name!r} does not run: 'immortal run {name}' starts it")
    except OSError:
        return _UNKNOWN  # the folder is not ours to read
    supervisor, coordinator = (read_living(file, ProcessFile) for file in files)
    if coordinator is not None:
        return _UNKNOWN
    if supervisor is not None:
        return Presence(False, f"{name!r} is starting ('immortal status {name}')")
    return Presence(False, f"{name!r} was killed, and nobody has started it again: 'immortal run {name}'")


def _is_there(file: Path) -> bool:
    """Raises OSError where it can't be told: from Python 3.14 on ``exists()`` says False there."""
    try:
        file.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True
