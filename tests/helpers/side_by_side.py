"""Parallel tests, in processes of pytest-xdist."""

from __future__ import annotations

import fcntl
from pathlib import Path

from xdist.scheduler import LoadScopeScheduling

from tests.helpers.kinds import group_of

PORTS = range(15000, 32768)  # below those of outgoing connections


def ports_of(worker: str, workers: int) -> str:
    """Return IMMORTAL_PORTS for a process "gw0", "gw1" and so on: no other one binds a port that it registers."""
    size = len(PORTS) // workers
    lowest = PORTS.start + size * int(worker.removeprefix("gw"))
    return f"{lowest}-{lowest + size - 1}"


class Groups(LoadScopeScheduling):
    """Scheduling of one group after the other, in the order of the tests."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)


class Room:
    """Lock that many tests share, or one test has alone, across all processes with the same ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._door = (folder / "door").open("w")
        self._inside = (folder / "inside").open("w")

    def enter(self, *, alone: bool) -> None:
        fcntl.flock(self._door, fcntl.LOCK_EX)  # a test that waits to be alone holds the door, so that nobody passes
        fcntl.flock(self._inside, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(self._door, fcntl.LOCK_UN)

    def leave(self) -> None:
        fcntl.flock(self._inside, fcntl.LOCK_UN)

    def close(self) -> None:
        self._door.close()
        self._inside.close()
