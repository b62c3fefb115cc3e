"""Giving pages of the map back.

LMDB reads through a shared mapping of its file. A page that was touched once stays mapped and counts as this process's
memory, although the kernel could drop it at any time: a coordinator would seem to grow with its log. So every now and
then the mapping's pages are unmapped. They stay in the page cache, and a later read maps them again: nothing is lost.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

RELEASE_INTERVAL_BYTES = 32 << 20  # read or written since the last release

_MADV_DONTNEED = 4  # on a shared file mapping: unmap the pages, keep the data


def _madvise() -> ctypes._NamedFuncPointer | None:
    try:
        function = ctypes.CDLL(None, use_errno=True).madvise
    except (OSError, AttributeError):
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function


class MappedPages:
    """The mapping of one file in this process. Does nothing where there is no /proc or no madvise."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._touched_bytes = 0
        self._madvise = _madvise()

    def have_touched(self, size_bytes: int) -> None:
        """Count what was read or written; release now and then. The caller keeps the map from moving meanwhile."""
        self._touched_bytes += size_bytes
        if self._touched_bytes >= RELEASE_INTERVAL_BYTES:
            self._touched_bytes = 0
            self.release()

    def release(self) -> None:
        if self._madvise is None:
            return
        for start, end in self._mappings():
            self._madvise(start, end - start, _MADV_DONTNEED)

    def _mappings(self) -> list[tuple[int, int]]:
        """Start and end of each shared mapping of the file."""
        try:
            inode = os.stat(self._path).st_ino
            lines = Path("/proc/self/maps").read_text().splitlines()
        except OSError:
            return []
        found = []
        for line in lines:
            addresses, permissions, _, _, mapped_inode, *_ = line.split(maxsplit=5)
            if int(mapped_inode) == inode and permissions.endswith("s"):
                start, _, end = addresses.partition("-")
                found.append((int(start, 16), int(end, 16)))
        return found
