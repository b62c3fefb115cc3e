"""Time of one awaited call, hop by hop: four processes stamp when they send, receive and write.

``python -m immortal.bench.hops MODULE ...`` runs a module in a process whose sockets, messages and log writes are
stamped; a stamp takes about 1 µs. Processes of one machine share the clock of the stamps.
"""

from __future__ import annotations

import mmap
import os
import runpy
import socket
import statistics
import struct
import sys
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import zmq

from immortal.bench.processes import BenchError
from immortal.coordinator.messenger import sockets

FOLDER_VARIABLE = "IMMORTAL_BENCH_STAMPS"
STAMPS_MAX = 1 << 20
_STAMP = struct.Struct("<Qq")
SENT, RECEIVED, MESSAGE_SENT, MESSAGE_RECEIVED, WRITE_BEGUN, WRITTEN = range(1, 7)

CALLER, CALLEE = "caller", "callee"
APP, COORDINATOR = "app", "coordinator"
STEPS: Sequence[tuple[str, str, int, str]] = (
    (CALLER, APP, SENT, ""),
    (CALLER, COORDINATOR, RECEIVED, "caller's app to its coordinator"),
    (CALLER, COORDINATOR, MESSAGE_SENT, "caller's coordinator sends the call"),
    (CALLEE, COORDINATOR, MESSAGE_RECEIVED, "ZeroMQ, to the callee's coordinator"),
    (CALLEE, COORDINATOR, WRITE_BEGUN, "callee's coordinator until its write"),
    (CALLEE, COORDINATOR, WRITTEN, "callee's log write with sync"),
    (CALLEE, COORDINATOR, SENT, "callee's coordinator until the app's record leaves"),
    (CALLEE, APP, RECEIVED, "to the callee's app"),
    (CALLEE, APP, SENT, "callee's app, with the handler"),
    (CALLEE, COORDINATOR, RECEIVED, "callee's app to its coordinator"),
    (CALLEE, COORDINATOR, MESSAGE_SENT, "callee's coordinator sends the answer"),
    (CALLER, COORDINATOR, MESSAGE_RECEIVED, "ZeroMQ, to the caller's coordinator"),
    (CALLER, COORDINATOR, WRITE_BEGUN, "caller's coordinator until its write"),
    (CALLER, COORDINATOR, WRITTEN, "caller's log write with sync"),
    (CALLER, COORDINATOR, SENT, "caller's coordinator until the app's record leaves"),
    (CALLER, APP, RECEIVED, "to the caller's app"),
    (CALLER, APP, SENT, "caller's app, to its next call"),
)
"""Steps of one call: service, process, kind of stamp, and the hop that ends there. The last begins the next call."""


def hops(folder: Path, pids: dict[tuple[str, str], int], last: int) -> dict[str, float]:
    """Return the median time in µs of each hop over the ``last`` calls. Raises BenchError if no call has all stamps."""
    stamps = {who: _read(folder / str(pid)) for who, pid in pids.items()}
    found: dict[str, list[float]] = {name: [] for *_, name in STEPS[1:]}
    for begun_ns in stamps[CALLER, APP].get(SENT, [])[-last:]:
        times_ns = [begun_ns]
        for service, process, kind, _ in STEPS[1:]:
            later = stamps[service, process].get(kind, [])
            at = bisect_right(later, times_ns[-1])
            if at == len(later):
                break
            times_ns.append(later[at])
        else:
            for (*_, name), (before_ns, after_ns) in zip(STEPS[1:], pairwise(times_ns), strict=True):
                found[name].append((after_ns - before_ns) / 1e3)
    if not all(found.values()):
        raise BenchError("no call could be followed through its four processes")
    return {name: statistics.median(times_us) for name, times_us in found.items()}


def _read(file: Path) -> dict[int, list[int]]:
    """Return the times of a process's stamps in ascending order, by kind."""
    times_ns: dict[int, list[int]] = {}
    for kind, time_ns in _STAMP.iter_unpack(file.read_bytes()):
        if not kind:
            break
        times_ns.setdefault(kind, []).append(time_ns)
    return {kind: sorted(some) for kind, some in times_ns.items()}


# In the stamped process.


Stamp = Callable[[int], None]


def _stamped(function: Callable[..., Any], stamp: Stamp, begin_kind: int = 0, end_kind: int = 0) -> Callable[..., Any]:
    """Wrap ``function`` so that its begin and end are stamped with these kinds; 0: no stamp. An empty result has none.

    A send is stamped at its begin, since the message can arrive before its end.
    """

    def stamped(*arguments: Any, **named: Any) -> Any:
        if begin_kind:
            stamp(begin_kind)
        result = function(*arguments, **named)
        if end_kind and result:
            stamp(end_kind)
        return result

    return stamped


def _stamp_all(stamp: Stamp) -> None:
    plain_send = sockets.plain_send

    def stamped_send(socket: zmq.Socket[bytes]) -> Callable[..., object]:
        return _stamped(plain_send(socket), stamp, begin_kind=MESSAGE_SENT)

    sockets.plain_send = stamped_send
    for cls, name, kinds in (
        (socket.socket, "send", {"begin_kind": SENT}),
        (socket.socket, "sendmsg", {"begin_kind": SENT}),
        (socket.socket, "recv", {"end_kind": RECEIVED}),
        (zmq.Socket, "recv", {"end_kind": MESSAGE_RECEIVED}),
    ):
        setattr(cls, name, _stamped(getattr(cls, name), stamp, **kinds))
    os.pwrite = _stamped(os.pwrite, stamp, WRITE_BEGUN, WRITTEN)


def main() -> None:
    """Stamp this process, then run the module of the arguments in it."""
    path = Path(os.environ[FOLDER_VARIABLE]) / str(os.getpid())
    with open(path, "w+b") as file:
        file.truncate(STAMPS_MAX * _STAMP.size)
        stamps = mmap.mmap(file.fileno(), 0)
    numbers, clock_ns = count(), time.monotonic_ns

    def stamp(kind: int) -> None:
        if (number := next(numbers)) < STAMPS_MAX:
            _STAMP.pack_into(stamps, number * _STAMP.size, kind, clock_ns())

    _stamp_all(stamp)
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
