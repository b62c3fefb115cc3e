"""Which of the project's files have changed, by a look at them now and then: it works on every file system, and a few
dozen files take less than a millisecond."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

LOOK_INTERVAL_S = 0.3
_SKIPPED = {"__pycache__", "node_modules", "site-packages", "venv"}

Stamp = tuple[int, int, int]


class SourceFiles:
    """A change counts once it has stood for one look: an editor may be writing still."""

    def __init__(self, files: Iterable[str | Path]) -> None:
        self._stamps: dict[str, Stamp | None] = {}
        self._moving: set[str] = set()
        self.watch(files)

    def watch(self, files: Iterable[str | Path]) -> None:
        """These, from now on; what has changed in one that is watched already is still to come."""
        wanted = {str(file) for file in files}
        self._stamps = {file: self._stamps.get(file, None) or _stamp(file) for file in wanted}
        self._moving &= wanted

    def look(self) -> set[str]:
        """Those that have changed, or come, or gone, since they were last named here."""
        settled = set()
        for file, before in self._stamps.items():
            now = _stamp(file)
            if now != before:
                self._stamps[file] = now
                self._moving.add(file)
            elif file in self._moving:
                self._moving.remove(file)
                settled.add(file)
        return settled


def _stamp(file: str) -> Stamp | None:
    try:
        status = os.stat(file)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def python_files(folder: Path) -> list[str]:
    """All of ``folder``, but for environments and hidden folders: what a module that can't be imported may need."""
    found = []
    for place, folders, files in os.walk(folder):
        folders[:] = [
            one
            for one in folders
            if one not in _SKIPPED and one[0] != "." and not Path(place, one, "pyvenv.cfg").exists()
        ]
        found += [os.path.join(place, file) for file in files if file.endswith(".py")]
    return found
