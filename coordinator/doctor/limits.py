"""What the system allows a process, and which memory there is, against what the instances of a home need."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

from immortal.coordinator.doctor.finding import Area, Finding, note, ok, problem
from immortal.protocol.command_line import counted, size_text

LIMITS, MEMORY = Area.LIMITS, Area.MEMORY
DESCRIPTORS_BASE = 64  # a coordinator with one peer and its app has 45
DESCRIPTORS_PER_PEER = 8  # sockets out and in, and what ZeroMQ has for each: about 4, and twice that while they change
DESCRIPTORS_COMFORTABLE = 4096  # beside its peers: strangers that are in their handshake, clients, operators
INSTANCE_SIZE_BYTES = 64 << 20  # a coordinator and a small app, at rest, with room to work
_CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
_UNLIMITED_SIZE_BYTES = 1 << 60  # what an older kernel says where there is no limit


def findings(instances_count: int) -> Iterator[Finding]:
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
    if _word("/proc/sys/vm/overcommit_memory") == "2":
        yield note(
            MEMORY,
            "vm.overcommit_memory is 2: memory is promised only once",
            'a checkpoint with checkpoint="fork" needs room for a second copy of the app, and fails without',
            "sysctl vm.overcommit_memory=0, or swap of the size of the largest app",
        )
    if "[always]" in _line("/sys/kernel/mm/transparent_hugepage/enabled"):
        yield note(
            MEMORY,
            "transparent huge pages are on for all memory",
            'during a checkpoint with checkpoint="fork" each byte that is changed copies 2 MiB',
            "echo madvise >/sys/kernel/mm/transparent_hugepage/enabled",
        )


def _available_size_bytes() -> int | None:
    """Of the machine, or of the container's limit where that is less."""
    fields = dict(line.partition(":")[::2] for line in _text("/proc/meminfo").splitlines())
    try:
        available = int(fields["MemAvailable"].split()[0]) * 1024
    except (KeyError, ValueError, IndexError):
        return None
    for path in _CGROUP_LIMITS:
        text = _word(str(path))
        used = _word(str(path.with_name("memory.current" if path.name == "memory.max" else "memory.usage_in_bytes")))
        if text.isdecimal() and used.isdecimal() and int(text) < _UNLIMITED_SIZE_BYTES:
            available = min(available, max(0, int(text) - int(used)))
    return available


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _line(path: str) -> str:
    return _text(path).strip()


def _word(path: str) -> str:
    words = _text(path).split()
    return words[0] if words else ""
