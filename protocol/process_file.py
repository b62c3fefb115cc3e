"""What a running process says about itself, in a file of its instance's folder: its ID, and since when it runs.

It writes the file when it is up, and removes it when it ends in an orderly way. After a crash the file stays: it counts
only while the process that wrote it lives.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from immortal.protocol import decoding

COORDINATOR_FILE_NAME = "coordinator.json"
SUPERVISOR_FILE_NAME = "supervisor.json"


class ProcessFile(msgspec.Struct, frozen=True, kw_only=True):
    """``process_start_ticks``: the kernel's start time of the process, which tells it from a later one with its ID."""

    pid: int
    started_ns: int
    process_start_ticks: int = 0


P = TypeVar("P", bound=ProcessFile)


def own_fields() -> dict[str, Any]:
    """Of this process."""
    pid = os.getpid()
    return {"pid": pid, "started_ns": time.time_ns(), "process_start_ticks": _start_ticks(pid) or 0}


def read(path: Path, kind: type[P]) -> P | None:
    """What the file says; None if there is none, or none that makes sense."""
    try:
        return decoding.decode_json(path.read_bytes(), type=kind)
    except (decoding.DecodeError, OSError):
        return None


def read_living(path: Path, kind: type[P]) -> P | None:
    """As :func:`read`, if the process that wrote it lives."""
    found = read(path, kind)
    return found if found is not None and is_living(found) else None


def is_living(process: ProcessFile) -> bool:
    ticks = _start_ticks(process.pid)
    return ticks is not None and process.process_start_ticks in (0, ticks)


def _start_ticks(pid: int) -> int | None:
    """When the process started, in the kernel's ticks since boot; None if there is none, or only its remains."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])
