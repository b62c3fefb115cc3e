"""A clock that jumps on demand: the library of clock_shim.c in front of libc."""

from __future__ import annotations

import functools
import shutil
import struct
import subprocess
import tempfile
from datetime import timedelta
from pathlib import Path

import pytest

HOUR, YEAR = timedelta(hours=1), timedelta(days=365.25)
JUMPS = (HOUR, -HOUR, timedelta(days=3), timedelta(days=-3), 10 * YEAR, -10 * YEAR)
SOURCE = Path(__file__).with_name("clock_shim.c")


@functools.cache
def library() -> Path:
    """The compiled shim; the test is skipped where there is no compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler to make the jumping clock with")
    path = Path(tempfile.mkdtemp(prefix="immortal-clock-")) / "clock_shim.so"
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", path, SOURCE, "-ldl"], check=True)
    return path


class ShiftedClock:
    """Processes that are started with :attr:`environment` have this wall clock; at first it is right."""

    def __init__(self, folder: Path) -> None:
        self._control = folder / "clock-shift"
        self.environment = {"LD_PRELOAD": str(library()), "CLOCK_SHIM_CONTROL": str(self._control)}
        self._control.write_bytes(struct.pack("=q", 0))

    def jump(self, ahead: timedelta) -> None:
        """From now on it is ``ahead`` of the right time; behind it if that is negative."""
        with self._control.open("r+b", buffering=0) as control:  # in place: it is mapped
            control.write(struct.pack("=q", ahead // timedelta(microseconds=1) * 1000))
