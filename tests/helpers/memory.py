"""Folders in memory, where a sync takes no time, for tests of what a log does, not of what a disk does."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

MEMORY = Path("/dev/shm")
ROOM_BYTES_MIN = 1 << 30  # for all parallel tests; the largest log of a test has some 100 MB


def in_memory() -> str | None:
    """Return ``dir`` for ``tempfile``: memory, or None (the default, on the disk) if it has no room."""
    if os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free >= ROOM_BYTES_MIN:
        return str(MEMORY)
    return None
