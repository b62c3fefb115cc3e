"""A log is for its owner alone. One that an earlier version made, or a copy, may be open to others."""

from __future__ import annotations

import contextlib
from pathlib import Path

from immortal.coordinator.log.backends.lmdb.data_file import DATA_FILE_NAME, FILES_BESIDE
from immortal.coordinator.log.backends.lmdb.environment import READERS_FILE_NAME
from immortal.coordinator.log.backends.lmdb.journal import PARTIAL_FILE_NAME
from immortal.coordinator.log.backends.lmdb.lock import LOCK_FILE_NAME
from immortal.protocol.private_files import FILE_MODE, FOLDER_MODE, tighten

FILE_NAMES = (DATA_FILE_NAME, READERS_FILE_NAME, LOCK_FILE_NAME, PARTIAL_FILE_NAME, *FILES_BESIDE)


def tighten_log(folder: Path) -> str | None:
    """Take from others what they may do with the log in ``folder``; in words what that was, None where it was nothing.

    Only its own files, those that were cut off it, and their folders are changed.
    """
    found = []
    try:
        for place in (folder, *folder.glob("cut-*")):
            modes = {place / name: FILE_MODE for name in FILE_NAMES if (place / name).is_file()}
            for path, mode in (modes | {place: FOLDER_MODE}).items():
                before = tighten(path, mode)
                if before is not None:
                    found.append(f"{path.name} {before}")
    except OSError as error:
        return f"the log in {folder} is open to others, and that can't be changed: {error}"
    if not found:
        return None
    return f"the log in {folder} was open to others ({', '.join(found)}): now only its owner can read it"


def remove_log(folder: Path) -> None:
    """Remove the log's own files; its folder too, where it holds nothing else: it may have been given by hand."""
    for name in FILE_NAMES:
        (folder / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.rmdir()
