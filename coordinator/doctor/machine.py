"""Findings about the machine: clock, memory, limits of a process, and the disk of a log.

Of a disk: its filesystem, free space, the time of a sync, and if that time can be true.
"""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import time
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from immortal.coordinator.doctor.finding import Area, Finding, note, ok, problem
from immortal.protocol.command_line import counted, size_text
from immortal.protocol.files import opened

CLOCK, LIMITS, MEMORY = Area.CLOCK, Area.LIMITS, Area.MEMORY
AHEAD_S_MAX = 5.0  # most files have the times of this clock; those of other machines can be a little ahead
_UNSYNCHRONISED, _TIME_ERROR = 0x0040, 5
_SOURCE = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
_SLOW_SOURCES = ("hpet", "acpi_pm", "jiffies", "pit")
_NTP = "run chrony, systemd-timesyncd or another NTP client; in a container, on its host"
DESCRIPTORS_BASE = 64  # a coordinator with one peer and its app has 45
DESCRIPTORS_PER_PEER = 8  # sockets out and in, and what ZeroMQ has for each: about 4, and twice that while they change
DESCRIPTORS_COMFORTABLE = 4096  # beside its peers: strangers that are in their handshake, clients, operators
INSTANCE_SIZE_BYTES = 64 << 20  # a coordinator and a small app, at rest, with room to work
_CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
_UNLIMITED_SIZE_BYTES = 1 << 60  # an older kernel reports more if there is no limit


class _Timex(ctypes.Structure):
    """Beginning of the kernel's struct timex, with room for its other fields."""

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
    """Check that the clock is synchronised, is fast to read, and has not gone back. ``files``: those of the home."""
    yield _check_synchronised()
    yield from _check_clock_steps(files)
    source = _text(_SOURCE).strip()
    if source in _SLOW_SOURCES:
        yield note(
            CLOCK,
            f"the kernel's clock source is {source!r}",
            "each look at the clock is a call of the kernel, and each call between services takes some",
            "see why it is not tsc or the hypervisor's: 'dmesg | grep -i clocksource' says",
        )


def _check_synchronised() -> Finding:
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


def _check_clock_steps(files: Iterable[Path]) -> Iterator[Finding]:
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
    yield from _check_descriptors(instances_count)
    for limit, name, why in (
        (resource.RLIMIT_FSIZE, "the size of a file (ulimit -f)", "a log that grows to it ends its coordinator"),
        (resource.RLIMIT_AS, "address space (ulimit -v)", "a log is mapped whole: one that grows to it stops"),
    ):
        soft, _ = resource.getrlimit(limit)
        if soft != resource.RLIM_INFINITY:
            remedy = "take the limit away where the instances are started ('unlimited'; systemd: LimitFSIZE=, LimitAS=)"
            yield problem(LIMITS, f"{name} is limited to {size_text(soft)}", why, remedy)
    yield from _check_memory(instances_count)


def _check_descriptors(instances_count: int) -> Iterator[Finding]:
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


def _check_memory(instances_count: int) -> Iterator[Finding]:
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
    """Return the free memory of the machine or of the container, the lower one, in bytes; None if it is unknown."""
    fields = dict(line.partition(":")[::2] for line in _text("/proc/meminfo").splitlines())
    try:
        available = int(fields["MemAvailable"].split()[0]) * 1024
    except (KeyError, ValueError, IndexError):
        return None
    for path in _CGROUP_LIMITS:
        text = _first_word(path)
        used = _first_word(path.with_name("memory.current" if path.name == "memory.max" else "memory.usage_in_bytes"))
        if text.isdecimal() and used.isdecimal() and int(text) < _UNLIMITED_SIZE_BYTES:
            available = min(available, max(0, int(text) - int(used)))
    return available


def _text(path: str | Path) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _first_word(path: str | Path) -> str:
    words = _text(path).split()
    return words[0] if words else ""


AREA = Area.DISK
BLOCK_SIZE_BYTES = 4096  # as one of the log's journal
SAMPLES_MIN, SAMPLES_MAX, MEASURED_S_MAX = 5, 200, 1.0
FREE_SIZE_BYTES_MIN = 128 << 20  # room for a checkpoint and the input that arrives meanwhile
FREE_SIZE_BYTES_LOW = 1 << 30
SLOW_S = 0.020  # a call that waits for its answer syncs at both ends
UNTRUE_S = 8e-6  # a flush takes the fastest devices about 10 µs: a shorter one has reached none
ROTATION_S = 1e-3  # below what a rotating disk needs: half a turn at 15,000 a minute takes 2 ms
_IN_MEMORY = ("tmpfs", "ramfs", "rootfs")
_OF_CONTAINERS = ("overlay", "aufs")
_OF_OTHER_MACHINES = ("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "glusterfs", "lustre", "fuse.sshfs")
_WITHOUT_MODES = ("vfat", "exfat", "msdos", "ntfs", "fuseblk")
_NO_BARRIERS = ("nobarrier", "barrier=0")
_MOVE = "move the home to a disk of this machine: --home, or --log of 'immortal register'"


class Mount(NamedTuple):
    """Mounted filesystem. ``options``: those of the mount and of the filesystem."""

    point: Path
    kind: str
    device: str  # "major:minor"
    options: frozenset[str]


class SyncTimes(NamedTuple):
    """Times of writing one block, in seconds: all synced ones, ascending, and the median of unsynced ones."""

    synced_s: list[float]
    unsynced_s: float

    @property
    def median_s(self) -> float:
        return self.synced_s[len(self.synced_s) // 2]

    @property
    def most_s(self) -> float:
        """Time that 99 of 100 synced writes do not exceed."""
        return self.synced_s[min(len(self.synced_s) - 1, len(self.synced_s) * 99 // 100)]


def findings(folder: Path) -> Iterator[Finding]:
    """Check the disk of ``folder``, where a log is or will be."""
    place = nearest_existing(folder)
    mount = mount_of(place)
    yield _check_filesystem(place, mount)
    for option in _NO_BARRIERS:
        if mount is not None and option in mount.options:
            why = "a sync does not wait for the disk: a loss of power takes what was acknowledged"
            yield problem(AREA, f"{mount.point} is mounted with {option!r}", why, f"mount it without {option!r}")
    yield _check_free_space(place)
    if not os.access(place, os.W_OK | os.X_OK):
        return  # the home's own findings say so
    try:
        times = measure(place)
    except OSError as error:
        why = "no log can be written there"
        yield problem(AREA, f"{place}: writing a block and syncing it fails: {error.strerror}", why, _MOVE)
        return
    yield judge_sync_times(place, times, mount)


def nearest_existing(folder: Path) -> Path:
    """Return ``folder``, or the first folder above it that exists."""
    return next((one for one in (folder, *folder.parents) if os.path.isdir(one)), Path("/"))


def mount_of(folder: Path, mountinfo: Path = Path("/proc/self/mountinfo")) -> Mount | None:
    """Return the filesystem that ``folder`` is on; None if the kernel does not tell."""
    real = Path(os.path.realpath(folder))
    found = None
    for line in _text(mountinfo).splitlines():  # a later one at the same place lies over the earlier one
        before, _, behind = line.partition(" - ")
        fields, kind_fields = before.split(), behind.split()
        if len(fields) < 6 or len(kind_fields) < 3:
            continue
        point = Path(fields[4].encode().decode("unicode_escape"))  # \040 is a space
        if real.is_relative_to(point) and (found is None or len(point.parts) >= len(found.point.parts)):
            options = frozenset([*fields[5].split(","), *kind_fields[2].split(",")])
            found = Mount(point, kind_fields[0], fields[2], options)
    return found


def _check_filesystem(place: Path, mount: Mount | None) -> Finding:
    if mount is None:
        what = f"{place}: which filesystem it is on can't be told"
        return note(AREA, what, "one in memory, say, would lose all logs", "mount /proc")
    what = f"{place} is on {mount.kind}, mounted at {mount.point}"
    if "ro" in mount.options:
        return problem(AREA, f"{what}, read-only", "no log can be written there", _MOVE)
    if mount.kind in _IN_MEMORY:
        why = "that is memory: all logs are gone when the machine, or its container, stops"
        return problem(AREA, what, why, _MOVE)
    if mount.kind in _OF_OTHER_MACHINES:
        why = "LMDB maps its file and locks it, which takes a filesystem of one machine: a log there can be damaged"
        remedy = f"{_MOVE}; for a log that several machines reach: postgresql:// ('immortal register --log')"
        return problem(AREA, what, why, remedy)
    if mount.kind in _WITHOUT_MODES:
        why = "it has no owners and modes: keys and logs can't be kept from others"
        return problem(AREA, what, why, _MOVE)
    if mount.kind in _OF_CONTAINERS:
        why = "that is a layer of the container, and goes with it"
        return note(AREA, what, why, "put the home on a volume")
    return ok(AREA, what)


def _check_free_space(place: Path) -> Finding:
    free = shutil.disk_usage(place).free
    nodes = os.statvfs(place)
    what = f"{size_text(free)} are free at {place}"
    why = "a full disk stops the instances there, until there is room"
    if free < FREE_SIZE_BYTES_MIN or (nodes.f_files and not nodes.f_favail):
        out_of = what if free < FREE_SIZE_BYTES_MIN else f"no file can be made at {place}: it is out of inodes"
        return problem(AREA, out_of, why, "make room, or move the home")
    if free < FREE_SIZE_BYTES_LOW:
        return note(AREA, what, why, "make room, or limit the logs (log_limit_mb)")
    return ok(AREA, what)


def measure(folder: Path) -> SyncTimes:
    """Measure the times of synced and unsynced overwrites of blocks, as in the log's journal. Raises OSError."""
    path = folder / f".doctor-{os.getpid()}"
    block = os.urandom(BLOCK_SIZE_BYTES)
    blocks_count = 64
    with opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as descriptor:
        try:
            os.pwrite(descriptor, bytes(BLOCK_SIZE_BYTES * blocks_count), 0)
            os.fsync(descriptor)
            unsynced_s = _times(descriptor, block, blocks_count)
            os.fsync(descriptor)
            with opened(path, os.O_WRONLY | os.O_DSYNC) as synced:
                synced_s = _times(synced, block, blocks_count)
        finally:
            path.unlink()
    return SyncTimes(synced_s, unsynced_s[len(unsynced_s) // 2])


def _times(descriptor: int, block: bytes, blocks_count: int) -> list[float]:
    times_s: list[float] = []
    began_s = time.perf_counter()
    for number in range(SAMPLES_MAX):
        before_s = time.perf_counter()
        os.pwrite(descriptor, block, BLOCK_SIZE_BYTES * (number % blocks_count))
        after_s = time.perf_counter()
        times_s.append(after_s - before_s)
        if after_s - began_s > MEASURED_S_MAX and len(times_s) >= SAMPLES_MIN:
            break
    return sorted(times_s)


def judge_sync_times(place: Path, times: SyncTimes, mount: Mount | None) -> Finding:
    """Judge the disk under ``place`` by the times of its syncs."""
    what = (
        f"{place}: a synced write of 4 KiB takes {_disk_text(times.median_s)} (median of {len(times.synced_s)}), "
        f"99 of 100 at most {_disk_text(times.most_s)}; an unsynced one {_disk_text(times.unsynced_s)}"
    )
    power = 'a loss of power may take what was acknowledged (docs/guarantees.md, "What is assumed")'
    test = "ask who runs the disk whether a sync reaches it; diskchecker.pl and a pulled plug prove it"
    if times.median_s < UNTRUE_S:
        reached = (
            f"no flush of a device is that fast: syncs end in memory, of the system or of what lies below it; {power}"
        )
        return problem(AREA, what, reached, f"{_MOVE}; or {test}")
    if times.median_s < ROTATION_S and mount is not None and _rotates(mount.device):
        turning = (
            f"the disk says that it rotates, and is faster than that: its cache, or a hypervisor's, answers; {power}"
        )
        return note(AREA, what, turning, test)
    if times.median_s > SLOW_S:
        each = "a call that waits for its answer waits for a sync at each end, one after the other"
        return note(
            AREA, what, each, "take a disk with a cache that survives a loss of power, or batch calls with fork"
        )
    return ok(AREA, f"{what}; whether the disk keeps what it has synced, no program can see")


def _rotates(device: str) -> bool:
    """Return True if a disk reports that it rotates. For a partition, the folder of its disk has the report.

    A virtual disk reports it, too, whatever is below it.
    """
    for folder in (Path("/sys/dev/block", device), Path("/sys/dev/block", device).resolve().parent):
        is_virtual = folder.resolve().name.startswith(("vd", "xvd", "nbd", "loop", "zram"))
        try:
            return (folder / "queue" / "rotational").read_text().strip() == "1" and not is_virtual
        except OSError:
            continue
    return False


def _disk_text(time_s: float) -> str:
    return f"{time_s * 1e6:.0f} µs" if time_s < 1e-3 else f"{time_s * 1e3:.1f} ms"
