"""Measures the disk alone (append and fdatasync), and what processes use."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

SECONDS = 1.0
SIZE_BYTES_MAX = 2 << 30
LATENCY_SAMPLES = 200


def append_rate(folder: Path, block_size_bytes: int, seconds: float = SECONDS) -> float:
    """Measure the bytes/s of appending blocks to a new file in ``folder``, with an fdatasync after each."""
    path = folder / "disk-rate"
    block = os.urandom(block_size_bytes)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        written_bytes = 0
        begun = time.perf_counter()
        while (spent := time.perf_counter() - begun) < seconds and written_bytes < SIZE_BYTES_MAX:
            written_bytes += os.write(descriptor, block)
            os.fdatasync(descriptor)
        return written_bytes / spent
    finally:
        os.close(descriptor)
        path.unlink()


def append_latencies(folder: Path, block_size_bytes: int, samples: int = LATENCY_SAMPLES) -> list[float]:
    """Time in s of appending one block to a new file in ``folder`` with an fdatasync, ``samples`` times, ascending."""
    path = folder / "disk-latency"
    block = os.urandom(block_size_bytes)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        latencies_s = []
        for _ in range(samples):
            begun = time.perf_counter()
            os.write(descriptor, block)
            os.fdatasync(descriptor)
            latencies_s.append(time.perf_counter() - begun)
        return sorted(latencies_s)
    finally:
        os.close(descriptor)
        path.unlink()


# Memory and CPU time of a process, as the kernel counts them.


MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Memory:
    """In bytes. ``resident`` counts a page that several processes share in each of them, ``proportional`` gives each
    its share, ``own`` leaves such pages out: it is what the process's end would give back."""

    resident: int
    proportional: int
    own: int


def memory_of(pid: int) -> Memory:
    """Read the memory of a process. Raises OSError."""
    sizes = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, _, value = line.partition(":")
        sizes[name] = int(value.split()[0]) << 10
    return Memory(sizes["Rss"], sizes["Pss"], sizes["Private_Clean"] + sizes["Private_Dirty"])


def processor_s(pid: int) -> float:
    """Return the CPU seconds that a process has used, with all its threads. Raises OSError."""
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
