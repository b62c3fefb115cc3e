"""Lock of a project, so that one process at a time runs it: `immortal dev`, or the daemon of `immortal up`.

<home>/.project.json    describes the running process, which writes it
<home>/.project.lock    locked by that process
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
from immortal.protocol.files import ProcessFile, acquire_lock, make_folder, open_lock

FILE_NAME = ".project.json"
_LOCK_FILE_NAME = ".project.lock"
_LOCK_TIMEOUT_S = 0.0


class ProjectRunningError(ImmortalError):
    """Raised if a project can't be run, since another process runs it."""


class RunLockHolder(ProcessFile, frozen=True, kw_only=True):
    """Process that runs a project. ``what``: its command. ``states``: of the services, such as "ready" or "failed:
    status 70". ``looks``: number of times that it has read the project and started its services."""

    what: str
    states: Mapping[str, str] = {}
    looks: int = 0


def holder(home: Path) -> RunLockHolder | None:
    """Return the process that runs the project of ``home``; None if there is none."""
    return files.read_living(home / FILE_NAME, RunLockHolder)


def publish(home: Path, what: str, states: Mapping[str, str], looks: int = 0) -> None:
    """Publish the states of the services that this process runs. Raises OSError."""
    holder_data = RunLockHolder(what=what, states=states, looks=looks, **files.current_process_fields())
    write_atomically(home / FILE_NAME, msgspec.json.encode(holder_data))


@contextlib.contextmanager
def hold(home: Path, what: str) -> Iterator[None]:
    """Hold the lock of the project during the block. Raises ProjectRunningError, OSError."""
    make_folder(home)
    descriptor = open_lock(home / _LOCK_FILE_NAME)
    try:
        try:
            acquire_lock(descriptor, _LOCK_TIMEOUT_S)
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
        files.withdraw(home / FILE_NAME)
        os.close(descriptor)
