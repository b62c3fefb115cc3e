"""The machine's clock: whether something keeps it right, and whether it has gone back."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path

from immortal.coordinator.doctor.finding import Area, Finding, note, ok, problem

AREA = Area.CLOCK
AHEAD_S_MAX = 5.0  # file times and the clock are of one machine; other machines' files may be a little ahead
_UNSYNCHRONISED, _TIME_ERROR = 0x0040, 5
_SOURCE = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
_SLOW_SOURCES = ("hpet", "acpi_pm", "jiffies", "pit")
_NTP = "run chrony, systemd-timesyncd or another NTP client; in a container, on its host"


class _Timex(ctypes.Structure):
    """The beginning of the kernel's struct timex, and room for the rest of it."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("frequency", ctypes.c_long),
        ("max_error_us", ctypes.c_long),
        ("estimated_error_us", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_byte * 256),
    )


def findings(files: Iterable[Path]) -> Iterator[Finding]:
    """``files``: of the home, written at the times that the clock said then."""
    yield _synchronised()
    yield from _gone_back(files)
    try:
        source = _SOURCE.read_text().strip()
    except OSError:
        return
    if source in _SLOW_SOURCES:
        yield note(
            AREA,
            f"the kernel's clock source is {source!r}",
            "each look at the clock is a call of the kernel, and each call between services takes some",
            "see why it is not tsc or the hypervisor's: 'dmesg | grep -i clocksource' says",
        )


def _synchronised() -> Finding:
    timex = _Timex(modes=0)  # 0: it is read only
    try:
        state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(timex))
    except (OSError, AttributeError):
        state = -1
    if state < 0:
        what = "whether the clock is synchronised can't be told: the kernel does not answer adjtimex"
        return note(AREA, what, "times of records are only as right as the clock", _NTP)
    if state == _TIME_ERROR or timex.status & _UNSYNCHRONISED:
        return note(
            AREA,
            "the clock is not synchronised (adjtimex says so)",
            "it drifts, and jumps when it is set: an instance holds a jump back for a while, and its schedules with it "
            "(nothing is lost or done twice)",
            _NTP,
        )
    return ok(AREA, f"the clock is synchronised, right to {timex.max_error_us / 1000:.1f} ms at worst")


def _gone_back(files: Iterable[Path]) -> Iterator[Finding]:
    newest_s, newest = 0.0, None
    for path in files:
        try:
            changed_s = path.stat().st_mtime
        except OSError:
            continue
        if changed_s > newest_s:
            newest_s, newest = changed_s, path
    ahead_s = newest_s - time.time()
    if newest is not None and ahead_s > AHEAD_S_MAX:
        yield problem(
            AREA,
            f"{newest} was written at {datetime.fromtimestamp(newest_s, UTC):%Y-%m-%d %H:%M:%S} UTC, "
            f"{ahead_s:,.0f} s from now: the clock has gone back, or was wrong then",
            "an instance's time never goes back: it stands, or runs slowly, until the clock is there",
            f"set the clock; {_NTP}",
        )
