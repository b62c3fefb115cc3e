"""Making durable which files and folders there are, and under which names."""

from __future__ import annotations

import os
from pathlib import Path


def sync_folder(path: Path) -> None:
    """Which files ``path`` holds, and under which names. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_names(path: Path) -> None:
    """LMDB syncs its files, but not the folders that name them; some of those may have been made just now."""
    path = path.absolute()
    device = path.stat().st_dev
    for folder in (path, *path.parents):
        if folder.stat().st_dev != device:
            return
        try:
            sync_folder(folder)
        except PermissionError:
            return  # who may not look into it has made nothing in it
