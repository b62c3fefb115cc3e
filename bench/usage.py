"""What a process uses: memory and time of processors, as the kernel counts them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Memory:
    """In bytes. ``resident`` counts a page that several processes share in each of them, ``proportional`` gives each
    its share, ``own`` leaves such pages out: it is what the process's end would give back."""

    resident: int
    proportional: int
    own: int


def memory_of(pid: int) -> Memory:
    """Raises OSError."""
    sizes = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, _, value = line.partition(":")
        sizes[name] = int(value.split()[0]) << 10
    return Memory(sizes["Rss"], sizes["Pss"], sizes["Private_Clean"] + sizes["Private_Dirty"])


def processor_s(pid: int) -> float:
    """Seconds of processors that the process has used, with all its threads. Raises OSError."""
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
