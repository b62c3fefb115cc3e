"""Findings about the machine: its clock, the limits of a process, and its memory."""

from __future__ import annotations

import ctypes
import resource
import time
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path

from immortal.coordinator.doctor.finding import Area, Finding, note, ok, problem
from immortal.protocol.command_line import counted, size_text

CLOCK, LIMITS, MEMORY = Area.CLOCK, Area.LIMITS, Area.MEMORY
AHEAD_S_MAX = 5.0  # file times and the clock are of one machine; other machines' files may be a little ahead
_UNSYNCHRONISED, _TIME_ERROR = 0x0040, 5
_SOURCE = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
_SLOW_SOURCES = ("hpet", "acpi_pm", "jiffies", "pit")
_NTP = "run chrony, systemd-timesyncd or another NTP client; in a container, on its host"
DESCRIPTORS_BASE = 64  # a coordinator with one peer and its app has 45
DESCRIPTORS_PER_PEER = 8  # sockets out and in, and what ZeroMQ has for each: about 4, and twice that while they change
DESCRIPTORS_COMFORTABLE = 4096  # beside its peers: strangers that are in their handshake, clients, operators
INSTANCE_SIZE_BYTES = 64 << 20  # a coordinator and a small app, at rest, with room to work
_CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
_UNLIMITED_SIZE_BYTES = 1 << 60  # what an older kernel says where there is no limit


class _Timex(ctypes.Structure):
    """Beginning of the kernel's struct timex, and room for the rest of it."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("frequency", ctypes.c_long),
        ("max_error_us", ctypes.c_long),
        ("estimated_error_us", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_byte * 256),
    )


def clock_findings(files: Iterable[Path]) -> Iterator[Finding]:
    """Check whether the clock is synchronised and has not gone back. ``files``: of the home."""
    yield _synchronised()
    yield from _gone_back(files)
    try:
        source = _SOURCE.read_text().strip()
    except OSError:
        return
    if source in _SLOW_SOURCES:
        yield note(
            CLOCK,
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
        return note(CLOCK, what, "times of records are only as right as the clock", _NTP)
    if state == _TIME_ERROR or timex.status & _UNSYNCHRONISED:
        return note(
            CLOCK,
            "the clock is not synchronised (adjtimex says so)",
            "it drifts, and jumps when it is set: an instance holds a jump back for a while, and its schedules with it "
            "(nothing is lost or done twice)",
            _NTP,
        )
    return ok(CLOCK, f"the clock is synchronised, right to {timex.max_error_us / 1000:.1f} ms at worst")


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
            CLOCK,
            f"{newest} was written at {datetime.fromtimestamp(newest_s, UTC):%Y-%m-%d %H:%M:%S} UTC, "
            f"{ahead_s:,.0f} s from now: the clock has gone back, or was wrong then",
            "an instance's time never goes back: it stands, or runs slowly, until the clock is there",
            f"set the clock; {_NTP}",
        )


def limit_findings(instances_count: int) -> Iterator[Finding]:
    """Compare limits and memory with what the instances of the home need."""
    yield from _descriptors(instances_count)
    for limit, name, why in (
        (resource.RLIMIT_FSIZE, "the size of a file (ulimit -f)", "a log that grows to it ends its coordinator"),
        (resource.RLIMIT_AS, "address space (ulimit -v)", "a log is mapped whole: one that grows to it stops"),
    ):
        soft, _ = resource.getrlimit(limit)
        if soft != resource.RLIM_INFINITY:
            remedy = "take the limit away where the instances are started ('unlimited'; systemd: LimitFSIZE=, LimitAS=)"
            yield problem(LIMITS, f"{name} is limited to {size_text(soft)}", why, remedy)
    yield from _memory(instances_count)


def _descriptors(instances_count: int) -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = DESCRIPTORS_BASE + DESCRIPTORS_PER_PEER * max(0, instances_count - 1)
    shown = "unlimited" if hard == resource.RLIM_INFINITY else f"{hard:,}"
    what = f"descriptors: {soft:,}, and up to {shown}, which a coordinator takes by itself; "
    what += f"{counted(instances_count, 'instance')} here may need {needed:,} each"
    remedy = (
        "raise the hard limit to 65536: LimitNOFILE= of systemd, nofile in /etc/security/limits.conf, --ulimit nofile"
    )
    if hard != resource.RLIM_INFINITY and hard < needed:
        why = "without descriptors left, peers that come wait for others to go"
        yield problem(LIMITS, what, why, remedy)
    elif hard != resource.RLIM_INFINITY and hard < DESCRIPTORS_COMFORTABLE:
        yield note(LIMITS, what, "connections that say nothing take one each until their time is up", remedy)
    else:
        yield ok(LIMITS, what)


def _memory(instances_count: int) -> Iterator[Finding]:
    available = _available_size_bytes()
    if available is None:
        yield note(MEMORY, "how much memory is free can't be told", "instances end where there is none", "mount /proc")
    else:
        needed = max(1, instances_count) * INSTANCE_SIZE_BYTES
        what = f"{size_text(available)} of memory are free; {counted(instances_count, 'instance')} here take about "
        what += f"{size_text(needed)}, and their states"
        if available < needed:
            why = "the kernel ends processes where there is none: they come back, and are ended again"
            yield note(MEMORY, what, why, "run fewer of them here, or give the machine or the container more")
        else:
            yield ok(MEMORY, what)
    if _first_word("/proc/sys/vm/overcommit_memory") == "2":
        yield note(
            MEMORY,
            "vm.overcommit_memory is 2: memory is promised only once",
            'a checkpoint with checkpoint="fork" needs room for a second copy of the app, and fails without',
            "sysctl -w vm.overcommit_memory=0",
        )
    if "[always]" in _text("/sys/kernel/mm/transparent_hugepage/enabled"):
        yield note(
            MEMORY,
            "transparent huge pages are on for all memory",
            'during a checkpoint with checkpoint="fork" each byte that is changed copies 2 MiB',
            "echo madvise >/sys/kernel/mm/transparent_hugepage/enabled",
        )


def _available_size_bytes() -> int | None:
    """Return the memory that is free, of the machine or of the container's limit, whichever is less; None: unknown."""
    fields = dict(line.partition(":")[::2] for line in _text("/proc/meminfo").splitlines())
    try:
        available = int(fields["MemAvailable"].split()[0]) * 1024
    except (KeyError, ValueError, IndexError):
        return None
    for path in _CGROUP_LIMITS:
        text = _first_word(str(path))
        used = _first_word(
            str(path.with_name("memory.current" if path.name == "memory.max" else "memory.usage_in_bytes"))
        )
        if text.isdecimal() and used.isdecimal() and int(text) < _UNLIMITED_SIZE_BYTES:
            available = min(available, max(0, int(text) - int(used)))
    return available


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _first_word(path: str) -> str:
    words = _text(path).split()
    return words[0] if words else ""
