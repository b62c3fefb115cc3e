"""Who runs a project: one process at a time, `immortal dev` or the one behind `immortal up`.

<home>/.project.json    what it says about itself, while it lives
<home>/.project.lock    held by it
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from immortal.coordinator.config import write_atomically
from immortal.protocol import files
from immortal.protocol.errors import ImmortalError
from immortal.protocol.files import ProcessFile, make_folder, open_lock, take

FILE_NAME = ".project.json"
_LOCK_FILE_NAME = ".project.lock"
_LOCK_TIMEOUT_S = 0.0


class ProjectRunningError(ImmortalError):
    """Another process runs the project."""


class RunLockHolder(ProcessFile, frozen=True, kw_only=True):
    """``what``: the command. ``states``: of its services, as the fleet has them; "failed: status 70" of one that did.
    ``looks``: how often it has looked at the project, and started what was to run."""

    what: str
    states: Mapping[str, str] = {}
    looks: int = 0


def holder(home: Path) -> RunLockHolder | None:
    """Who runs the project of ``home``; None: nobody."""
    return files.read_living(home / FILE_NAME, RunLockHolder)


def publish(home: Path, what: str, states: Mapping[str, str], looks: int = 0) -> None:
    """Of this process. Raises OSError."""
    said = RunLockHolder(what=what, states=states, looks=looks, **files.own_fields())
    write_atomically(home / FILE_NAME, msgspec.json.encode(said))


@contextlib.contextmanager
def hold(home: Path, what: str) -> Iterator[None]:
    """This process runs the project. Raises ProjectRunningError, OSError."""
    make_folder(home)
    descriptor = open_lock(home / _LOCK_FILE_NAME)
    try:
        try:
            take(descriptor, _LOCK_TIMEOUT_S)
        except BlockingIOError:
            found = holder(home)
            who = "another process" if found is None else f"'{found.what}', process {found.pid}"
            end = (
                "'immortal down' stops it" if found is None or found.what == "immortal up" else "Ctrl-C there stops it"
            )
            raise ProjectRunningError(f"the project runs already, by {who}: {end}") from None
        publish(home, what, {})
        yield
    finally:
        found = holder(home)
        if found is not None and found.pid == os.getpid():
            (home / FILE_NAME).unlink(missing_ok=True)
        os.close(descriptor)
