"""glibc's malloc, told what an app and its coordinator do with it.

Both hold many buffers of up to a few MiB for milliseconds. By default glibc gives such memory back to the kernel at
once and asks for it again, zeroed, page by page: without this, the coordinators take a seventh more for calls of
64 KiB, and an app takes 32 µs to send one in place of 5. The limits are those that glibc comes to by itself, later.

What the start freed goes back, first when the modules are loaded, then when all is up: it would lie idle for good.
"""

from __future__ import annotations

import contextlib
import ctypes

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3

KEPT_SIZE_BYTES = 64 << 20  # free memory at the top of the heap that is not given back
MAPPED_SIZE_BYTES = 32 << 20  # from this size on a buffer is a mapping of its own, given back when freed
GROWTH_SIZE_BYTES = 4 << 20


def keep_freed_memory() -> None:
    """Set this process's malloc up, once, when its modules are loaded. Does nothing where malloc is not glibc's."""
    give_back_freed_memory()
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        for parameter, value in (
            (_M_TRIM_THRESHOLD, KEPT_SIZE_BYTES),
            (_M_TOP_PAD, GROWTH_SIZE_BYTES),
            (_M_MMAP_THRESHOLD, MAPPED_SIZE_BYTES),
        ):
            mallopt(parameter, value)


def give_back_freed_memory() -> None:
    """To the kernel, once: a millisecond. Does nothing where malloc is not glibc's."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
