"""The driver's log port, on the log of one instance.

Writes go to the writer, small reads are answered at once, large ones beside the loop.

To read a record or two is faster than to wake a thread; to read a chunk of a checkpoint is not. The log's free room is
measured from time to time, also beside the loop. A log that another process writes is followed (`follower.py`).
"""

from __future__ import annotations

import select
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from immortal.coordinator.clock import InstanceClock
from immortal.coordinator.core import effects as ef
from immortal.coordinator.core import events as ev
from immortal.coordinator.core.effects import Read, StoreRead, Write
from immortal.coordinator.core.errors import LogError, LogUnavailableError, fail
from immortal.coordinator.core.interfaces import Standby
from immortal.coordinator.driver.ports import Offered, answer, checkpoint_problem, failed
from immortal.coordinator.fault_points import FaultPoint, reach
from immortal.coordinator.log.store import RowLogStore
from immortal.coordinator.log_port.writer import LogWriter, ReadThread
from immortal.coordinator.notices import Notices

if TYPE_CHECKING:
    from immortal.coordinator.log_port.follower import LogFollower

CHECKED_AT_ONCE_SIZE_BYTES_MAX = 256 << 10
"""Size of a checkpoint that takes about 0.3 ms to read and check, as long as it takes to wake a thread."""

MEASURE_INTERVAL_NS = 500_000_000  # between measurements of the log's room
MEASURE_SIZE_BYTES = 4 << 20  # also measured after writing this much
ONLY_TERM = 1  # the core's lease needs no terms: the store fences

_READS = {
    ef.LoadLog: FaultPoint.LOG_LOADED,
    ef.ReadCheckpointChunk: FaultPoint.CHECKPOINT_READ,
    ef.ReadRecords: FaultPoint.RECORDS_READ,
    ef.ReadSpilled: FaultPoint.SPILL_READ,
}


class LogEndpoint:
    """Log port of one instance, which writes its log or follows it.

    ``store`` is open for writing; None: ``follower`` follows a log that another process writes. ``make_writer``:
    creates the writer of a store. ``on_granted``: called with a store that the follower has opened, before the core
    learns of it. ``keep_ns``: how long history is kept, in running time of the instance; None: without a limit.
    """

    def __init__(
        self,
        store: RowLogStore | None,
        make_writer: Callable[[RowLogStore], LogWriter],
        clock: InstanceClock,
        log: Notices,
        keep_ns: int | None,
        inbox: list[ev.Event],
        follower: LogFollower | None = None,
        on_granted: Callable[[RowLogStore], None] = lambda store: None,
    ) -> None:
        self.store = store  # None while another process writes the log
        self._make_writer, self._clock, self._log, self._inbox = make_writer, clock, log, inbox
        self._keep_ns = keep_ns
        self._follower, self._on_granted = follower, on_granted
        self._writer: LogWriter | None = None
        self._reads = ReadThread()
        self._ready = select.epoll()
        self._ready.register(self._reads.fileno(), select.EPOLLIN)
        if follower is not None:
            self._ready.register(follower.fileno(), select.EPOLLIN)
        self._large_checkpoints: set[int] = set()  # checkpoints whose chunks are read beside the loop
        self._measuring = False
        self._unmeasured_bytes = 0  # handed to the disk since the last measurement
        self.measure_at_ns = 0  # on the monotonic clock
        self.successor = ""  # standby that must get the log next
        self._standbys: Sequence[Standby] = ()  # as last reported
        self._has_standby = self._is_asked = self._is_polling_offer = False

    def acquire(self, effect: ef.AcquireWriteLease) -> None:
        if self.store is not None:
            self._inbox.append(self._grant(self.store))
        elif self._follower is not None:
            self._follower.acquire()

    def _grant(self, store: RowLogStore) -> ev.WriteLeaseGranted:
        self.store = store
        self._on_granted(store)
        self._writer = self._make_writer(store)
        self._ready.register(self._writer.fileno(), select.EPOLLIN)
        return ev.WriteLeaseGranted(ONLY_TERM, store.appends_max)

    @property
    def problem(self) -> str:
        """Message about a current limitation of the store; "" while another process writes the log."""
        return "" if self.store is None else self.store.backend.problem

    @property
    def standbys(self) -> Sequence[Standby]:
        """Processes that follow the log, updated from time to time; empty while another process writes it."""
        return () if self.store is None else self.store.backend.standbys

    def hand_over_to(self, successor: str) -> None:
        """Choose the standby that must take the log over after this process."""
        if self.store is None:
            fail("a log is left to another one that is not ours")
        self.successor = successor
        self.store.backend.successor = successor

    @property
    def commit_s(self) -> float:
        """Running mean of a commit's duration in seconds; 0 while another process writes the log."""
        return 0.0 if self._writer is None else self._writer.commit_s

    # --- the driver's port -------------------------------------------------------------------------------------------

    def submit(self, request: Write | Read) -> None:
        store, writer = self.store, self._writer
        if store is None or writer is None:
            if self._follower is None or isinstance(request, Write | ef.ReadTail):
                fail(f"{type(request).__name__} of a log that is not open for writing")
            self._follower.submit(request)
        elif isinstance(request, ef.Commit):
            self._unmeasured_bytes += request.size_bytes
            writer.submit(request)
        elif isinstance(request, ef.WriteCheckpointChunk | ef.ReadTail):
            writer.submit(request)
        else:
            self._read(store, request)

    def _read(self, store: RowLogStore, request: StoreRead) -> None:
        if (point := _READS.get(type(request))) is not None:
            reach(point)
        large = self._large_checkpoints
        if isinstance(request, ef.CheckCheckpoint) and request.header.size_bytes > CHECKED_AT_ONCE_SIZE_BYTES_MAX:
            large.add(request.header.checkpoint_id)
            self._reads.submit(lambda: self._check(store, request))
        elif store.backend.is_remote or (
            isinstance(request, ef.ReadCheckpointChunk) and request.checkpoint_id in large
        ):
            self._reads.submit(lambda: _answer_read(store, request))
        else:
            self._append_event(answer(store, request))

    def _append_event(self, event: ev.Event) -> None:
        self._inbox.append(event)
        if isinstance(event, ev.LogLoaded) and self.store is not None:
            for problem in self.store.problems:
                self._log.error(problem)

    def _hand_over(self, store: RowLogStore, request: StoreRead) -> None:
        """Answer a read that was requested while another process wrote the log."""
        if isinstance(request, ef.ReadRecords):  # all records were read before the takeover
            self._inbox.append(ev.RecordsRead([], None, request.session))
        else:
            self._read(store, request)

    def _check(self, store: RowLogStore, request: ef.CheckCheckpoint) -> ev.Event:
        reads = self._reads

        def is_cancelled() -> bool:
            reads.run_pending()
            return reads.closing

        try:
            problem = checkpoint_problem(store, request.header, is_cancelled)
        except LogUnavailableError as error:
            return failed(error, request)
        except Exception as error:  # without an answer the core would wait forever
            problem = repr(error)
        return ev.CheckpointChecked(request.header.checkpoint_id, problem)

    def trim(self, effect: ef.Trim) -> None:
        if self._writer is not None:
            self._writer.trim(self._keep_since_ns)

    @property
    def _keep_since_ns(self) -> int | None:
        return None if self._keep_ns is None else self._clock.running.time_of_age(self._keep_ns)

    def renew_key(self) -> None:
        """Encrypt with a new data key from here on, and wrap all by the operator's present key, once it is read."""
        store, writer, since_ns = self.store, self._writer, self._keep_since_ns
        if store is not None and writer is not None:

            def renew() -> None:
                store.backend.renew_key()
                writer.trim(since_ns)  # the writer's next step, also of an idle instance

            self._do(renew, "the key of the log was not renewed", "renew key")

    @property
    def has_inline(self) -> bool:
        return self._writer is not None and self._writer.has_inline

    def run_inline(self) -> None:
        if self._writer is not None:
            self._inbox += self._writer.run_inline()

    def request_standby_checkpoint(self, effect: ef.RequestStandbyCheckpoint) -> None:
        store, names = self.store, [standby.name for standby in self.standbys if standby.is_ready]
        if store is not None and names:
            self._is_asked = True
            self._do(lambda: store.backend.request_standby_checkpoint(names[0], effect.checkpoint_id, effect.epoch))

    def cancel_standby_request(self, effect: ef.CancelStandbyRequest) -> None:
        if (store := self.store) is not None:
            self._is_asked = False
            self._do(store.backend.cancel_standby_request)

    def _do(
        self, work: Callable[[], None], failed: str = "a standby could not be asked for a checkpoint", kind: str = "ask"
    ) -> None:
        """Do ``work`` beside the loop; report that it ``failed``.

        Then a standby gives no answer: the core waits only for a limited time.
        """

        def done() -> ev.Event | None:
            try:
                work()
            except LogError as error:
                self._log.warning(f"{failed}: {error}", kind=kind)
            return None

        self._reads.submit(done)

    def _poll_offer(self, store: RowLogStore) -> None:
        def read_offer() -> ev.Event | None:
            self._is_polling_offer = False
            try:
                offer = store.poll_standby_offer()
            except LogError as error:
                what = f"whether a standby has taken the checkpoint is not known: {error}"
                self._log.warning(what, kind="take offer")
                return None
            return None if offer is None else ev.CheckpointOffered(offer)

        if not self._is_polling_offer:
            self._is_polling_offer = True
            self._reads.submit(read_offer)

    def offer(self, request: Offered) -> None:
        if self.store is None and self._follower is not None:
            self._follower.submit(request)
        else:
            self._refuse_offered(request)

    def _refuse_offered(self, request: Offered) -> None:
        if isinstance(request, ef.OfferChunk):
            problem = "this one writes the log by now"
            self._inbox.append(ev.ChunkOffered(request.checkpoint_id, len(request.data), problem))

    # --- for the loop ------------------------------------------------------------------------------------------------

    def fileno(self) -> int:
        """Return a descriptor that is readable if :meth:`collect` has something to do."""
        return self._ready.fileno()

    def collect(self) -> None:
        inbox = self._inbox
        if self._writer is not None:
            inbox += self._writer.pop_finished()
        for event in self._reads.pop_all():
            if isinstance(event, ev.LogMeasured) or (isinstance(event, ev.LogFailed) and event.request is None):
                self._measuring = False
            self._append_event(event)
        if self._follower is not None and self._writer is None:
            inbox += self._follower.pop_all()
            if (store := self._follower.release_store()) is not None:
                self._ready.unregister(self._follower.fileno())
                inbox.append(self._grant(store))
                for request in self._follower.pop_unanswered():
                    if isinstance(request, Offered):
                        self._refuse_offered(request)
                    else:
                        self._hand_over(store, request)

    def close(self) -> None:
        """Finish writes, release the write lease, and drop open reads."""
        if self._follower is not None:
            self._follower.close()
        if self._writer is not None:
            self._writer.close()
        if self.store is not None:
            self.store.backend.release_lease()
        self._reads.close()
        self._ready.close()

    def poll(self) -> None:
        """Report, from time to time, that another process has taken the log: a coordinator that only answers queries
        appends nothing and would not notice.
        """
        store = self.store
        if store is None:
            return
        if (error := store.backend.fenced_by) is not None:
            self._inbox.append(ev.LogFailed(error))
        if self._is_asked:
            self._poll_offer(store)

    def measure(self, now_ns: int) -> None:
        """Measure the log's room, from time to time while the log changes or lacks room: a trim frees some.

        Each call also reports changes of the standbys.
        """
        if (standbys := self.standbys) is not self._standbys:
            self._standbys = standbys
            has_standby = any(standby.is_ready for standby in standbys)
            if has_standby != self._has_standby:
                self._has_standby = has_standby
                self._inbox.append(ev.StandbysChanged(has_standby))
        if now_ns < self.measure_at_ns and self._unmeasured_bytes < MEASURE_SIZE_BYTES:
            return
        self._unmeasured_bytes = 0
        self.measure_at_ns = now_ns + MEASURE_INTERVAL_NS
        store = self.store
        if store is not None and not self._measuring:
            self._measuring = True
            self._reads.submit(lambda: _measure_space(store))


def _answer_read(store: RowLogStore, request: StoreRead) -> ev.Event:
    try:
        return answer(store, request)
    except Exception as error:  # as in _check
        return failed(LogError(f"the log could not be read: {error!r}"), request)


def _measure_space(store: RowLogStore) -> ev.Event:
    try:
        return ev.LogMeasured(store.space())
    except LogError as error:
        return failed(error, None)
    except Exception as error:
        return ev.LogFailed(LogError(f"the log could not be measured: {error!r}"))
