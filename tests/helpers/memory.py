"""Folders in memory, where a sync takes no time: for tests of what a log does, not of what a disk does."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

MEMORY = Path("/dev/shm")
ROOM_BYTES_MIN = 1 << 30  # for all that run side by side; the largest log that a test makes has some 100 MB


def in_memory() -> str | None:
    """As ``dir`` for ``tempfile``: None, where the machine has no room for it, is its own default, on the disk."""
    if os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free >= ROOM_BYTES_MIN:
        return str(MEMORY)
    return None
