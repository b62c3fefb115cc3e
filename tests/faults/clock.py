"""Clock that jumps on demand: the library of clock_shim.c, preloaded before libc."""

from __future__ import annotations

import struct
from datetime import timedelta
from pathlib import Path

from tests.faults.shims import library

HOUR, YEAR = timedelta(hours=1), timedelta(days=365.25)
JUMPS = (HOUR, -HOUR, timedelta(days=3), timedelta(days=-3), 10 * YEAR, -10 * YEAR)


class ShiftedClock:
    """Wall clock of processes that are started with :attr:`environment`; at first it is right."""

    def __init__(self, folder: Path) -> None:
        self._control = folder / "clock-shift"
        self.environment = {"LD_PRELOAD": library("clock_shim"), "CLOCK_SHIM_CONTROL": str(self._control)}
        self._control.write_bytes(struct.pack("=q", 0))

    def jump(self, ahead: timedelta) -> None:
        """Set the clock to ``ahead`` of the right time; negative: behind it."""
        with self._control.open("r+b", buffering=0) as control:  # in place, since it is mapped
            control.write(struct.pack("=q", ahead // timedelta(microseconds=1) * 1000))
