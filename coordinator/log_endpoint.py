"""The log as the driver has it: writes go to the writer, reads are answered at once, its room is measured.

Only a large checkpoint that is read whole is read beside the loop: with gigabytes of state that takes seconds, in which
peers and operators want their answers.
"""

from __future__ import annotations

import os
import threading
from collections import deque

from coordinator.clock import InstanceClock
from coordinator.core import effects as ef
from coordinator.core import events as ev
from coordinator.core.errors import LogError
from coordinator.core.interfaces import LogStore
from coordinator.driver.ports import Read, Write
from coordinator.driver.reads import answer, problem_of
from coordinator.fault_points import FaultPoint, reach
from coordinator.log_writer import LogWriter
from coordinator.notices import Notices

CHECKED_AT_ONCE_SIZE_BYTES_MAX = 4 << 20
"""A checkpoint of this size takes some ms to read whole; beside the loop an app would wait longer for it."""
MEASURE_INTERVAL_NS = 500_000_000  # of the log's room: it takes some 20 µs
MEASURE_SIZE_BYTES = 4 << 20  # ... and after so much was written

_READS = {
    ef.LoadLog: FaultPoint.LOG_LOADED,
    ef.ReadCheckpointChunk: FaultPoint.CHECKPOINT_READ,
    ef.ReadRecords: FaultPoint.RECORDS_READ,
    ef.ReadSpilled: FaultPoint.SPILL_READ,
}


class LogEndpoint:
    """``keep_ns``: how long history is kept, counted in the time in which the instance ran; None: no matter how old."""

    def __init__(
        self,
        store: LogStore,
        writer: LogWriter,
        clock: InstanceClock,
        log: Notices,
        keep_ns: int | None,
        inbox: list[ev.Event],
    ) -> None:
        self._store, self._writer, self._clock, self._log, self._inbox = store, writer, clock, log, inbox
        self._keep_ns = keep_ns
        self._checks: list[threading.Thread] = []
        self._answers: deque[ev.Event] = deque()  # appended to by the threads
        self._closing = False
        self._unmeasured_bytes = 0  # handed to the disk since it was measured
        self.measure_at_ns = 0  # on the monotonic clock

    def submit(self, request: Write | Read) -> None:
        if isinstance(request, ef.Commit):
            self._unmeasured_bytes += request.size_bytes
            self._writer.submit(request)
        elif isinstance(request, ef.WriteCheckpointChunk):
            self._writer.submit(request)
        elif isinstance(request, ef.CheckCheckpoint) and request.header.size_bytes > CHECKED_AT_ONCE_SIZE_BYTES_MAX:
            thread = threading.Thread(target=self._check, args=(request,), name="checkpoint-check", daemon=True)
            self._checks.append(thread)
            thread.start()
        else:
            if (point := _READS.get(type(request))) is not None:
                reach(point)
            self._inbox.append(answer(self._store, request))
            if isinstance(request, ef.LoadLog):
                for problem in self._store.problems:
                    self._log.error(problem)

    def trim(self, effect: ef.Trim) -> None:
        self._writer.trim(None if self._keep_ns is None else self._clock.running.before(self._keep_ns))

    @property
    def has_inline(self) -> bool:
        return self._writer.has_inline

    def run_inline(self) -> None:
        self._inbox += self._writer.run_inline()

    def fileno(self) -> int:
        """Readable when there is something to :meth:`collect`."""
        return self._writer.fileno()

    def collect(self) -> None:
        self._inbox += self._writer.take_done()
        while self._answers:
            self._inbox.append(self._answers.popleft())
        self._checks = [thread for thread in self._checks if thread.is_alive()]

    def _check(self, request: ef.CheckCheckpoint) -> None:
        header = request.header
        try:
            problem = problem_of(self._store, header, lambda: self._closing)
        except Exception as error:  # it must be answered: the machine would wait for ever
            problem = repr(error)
        self._answers.append(ev.CheckpointChecked(header.checkpoint_id, problem))
        if not self._closing:
            os.eventfd_write(self.fileno(), 1)

    def close(self) -> None:
        """Finish what was to be written; what is read is not wanted any more."""
        self._closing = True
        for thread in self._checks:
            thread.join()
        self._writer.close()

    def measure(self, now_ns: int) -> None:
        """Now and then while the log changes, and while it has too little room: a trim makes some."""
        if now_ns < self.measure_at_ns and self._unmeasured_bytes < MEASURE_SIZE_BYTES:
            return
        self._unmeasured_bytes = 0
        self.measure_at_ns = now_ns + MEASURE_INTERVAL_NS
        try:
            self._inbox.append(ev.LogMeasured(self._store.space()))
        except LogError as error:
            self._inbox.append(ev.LogFailed(error))
