"""Follower of a log that another process writes: reads it as it grows, and takes it over when its writer is gone.

One thread does all of this, so that the loop never waits. Every POLL_INTERVAL_S it checks for new records and for a
free lock; a backend that can notify wakes it earlier.
"""

from __future__ import annotations

import queue
import threading
import time

from immortal.coordinator.core import effects as ef
from immortal.coordinator.core import events as ev
from immortal.coordinator.core.effects import StoreRead
from immortal.coordinator.core.errors import DamagedLogError, LogError, LogLockedError, LogUnavailableError
from immortal.coordinator.driver.ports import Offered, checkpoint_problem, failed
from immortal.coordinator.instances.own_logs import InstanceLog
from immortal.coordinator.log.backend import StandbyCheckpointRequest, StandbyRegistration
from immortal.coordinator.log.checkpoints import encode_offer, sealed_chunk
from immortal.coordinator.log.reader import LogReader
from immortal.coordinator.log.store import RowLogStore
from immortal.coordinator.log_port.writer import Mailbox
from immortal.protocol.errors import ImmortalError

POLL_INTERVAL_S = 0.01
IDLE_POLL_INTERVAL_S = 0.05  # after a second without news: 0.5 % of a processor; POLL_INTERVAL_S takes 2 %
IDLE_S = 1.0
CAUGHT_UP_S = 1.0  # an app that has all records at least this often keeps up, however fast the log grows
STANDBY_CLOSE_TIMEOUT_S = 1.0  # for unregistering with the writer


class LogFollower(Mailbox[ev.Event]):
    """Follower on a thread. ``fileno()`` is readable if :meth:`take` or :meth:`release_store` has something."""

    def __init__(self, access: InstanceLog) -> None:
        super().__init__()
        self._access = access
        self._requests: queue.SimpleQueue[StoreRead | Offered | None] = queue.SimpleQueue()
        self._waiting: list[ef.LoadLog | ef.ReadRecords] = []  # answered when the log grows
        self._store: RowLogStore | None = None
        self._reader: LogReader | None = None
        self._holder: str | None = None  # as last reported to the core
        self._closing = False
        self._last_event_s = 0.0  # monotonic time of the last event
        self._following: StandbyRegistration | None = None
        self._checkpoint: StandbyCheckpointRequest | None = None  # the writer's request, as last reported to the core
        self._caught_up_s = -CAUGHT_UP_S  # last time that the app had all records
        self._thread = threading.Thread(target=self._run, name="log-follower", daemon=True)

    def acquire(self) -> None:
        """Begin to wait for the write lease."""
        self._thread.start()

    def submit(self, request: StoreRead | Offered) -> None:
        """Submit a read, or a part of the checkpoint that the writer has requested."""
        self._requests.put(request)

    def release_store(self) -> RowLogStore | None:
        """Return the store, once this process writes the log. The follower answers nothing from then on."""
        store, self._store = self._store, None
        return store

    def pop_unanswered(self) -> list[StoreRead | Offered]:
        """Return the unanswered requests, which the store must answer once this process writes the log."""
        requests: list[StoreRead | Offered] = [*self._waiting]
        while not self._requests.empty():
            request = self._requests.get()
            if request is not None:
                requests.append(request)
        return requests

    def close(self) -> None:
        self._closing = True
        self._requests.put(None)
        if self._thread.is_alive():
            self._thread.join()
        if self._store is not None:  # not taken by the endpoint
            self._store.close()
        super().close()

    # --- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._following = self._access.follow(lambda: self._requests.put(None))
            while not self._closing:
                try:
                    if self._take_over():
                        return
                    self._poll()
                except LogUnavailableError as error:  # a takeover is impossible now
                    waiting, self._waiting = self._waiting, []
                    for request in waiting:
                        self._emit(failed(error, request))
                self._answer_next()
        except Exception as error:  # without an event the core would wait forever
            known = error if isinstance(error, ImmortalError) else LogError(f"the log can't be followed: {error!r}")
            self._emit(ev.LogFailed(known))  # type: ignore[arg-type]  # also for a log that must not be opened
        finally:
            if self._reader is not None:
                self._reader.close()
            if self._following is not None:
                self._following.close(STANDBY_CLOSE_TIMEOUT_S if self._closing else 0.0)

    def _emit(self, event: ev.Event) -> None:
        self._last_event_s = time.monotonic()
        self.put([event])

    def _take_over(self) -> bool:
        """Open the log for writing if no other process has it; return True if it is open."""
        access = self._access
        holder = access.holder()
        if holder is None:
            if self._reader is not None:  # a process can open a log only once
                self._reader.close()
                self._reader = None
            try:
                self._store = access.open_store()
            except LogLockedError:
                holder = access.holder() or "another process"  # another follower was faster
            else:
                self.put([])
                return True
        if holder != self._holder:
            self._holder = holder
            self._emit(ev.WriteLeaseHeld(holder))
        return False

    def _answer_next(self) -> None:
        """Answer requests that arrive before the next poll."""
        is_idle = time.monotonic() - self._last_event_s > IDLE_S
        try:
            request = self._requests.get(timeout=IDLE_POLL_INTERVAL_S if is_idle else POLL_INTERVAL_S)
        except queue.Empty:
            return
        if isinstance(request, ef.LoadLog | ef.ReadRecords):
            self._waiting.append(request)
        elif isinstance(request, Offered):
            self._offer(request)
        elif request is not None:
            self._emit(self._answer(request))

    def _offer(self, request: Offered) -> None:
        following, asked = self._following, self._checkpoint
        checkpoint_id = (
            request.checkpoint_id if isinstance(request, ef.OfferChunk) else request.offer.header.checkpoint_id
        )
        problem = ""
        try:
            if following is None or asked is None or asked.checkpoint_id != checkpoint_id:
                problem = "who asked for it does not want it any more"
            elif isinstance(request, ef.OfferChunk):
                following.put_chunk(asked, request.index, sealed_chunk(checkpoint_id, request.index, request.data))
            else:
                following.offer(asked, encode_offer(request.offer))
        except LogError as error:
            problem = str(error)
        if isinstance(request, ef.OfferChunk):
            self._emit(ev.ChunkOffered(checkpoint_id, len(request.data), problem))

    def _answer(self, request: StoreRead) -> ev.Event:
        reader = self._reader
        if reader is None:
            return ev.LogFailed(LogError("the log that is followed is not there any more"))
        try:
            match request:
                case ef.CheckCheckpoint(header):
                    return ev.CheckpointChecked(
                        header.checkpoint_id, checkpoint_problem(reader, header, lambda: self._closing)
                    )
                case ef.ReadCheckpointChunk(checkpoint_id, index):
                    return ev.CheckpointChunkRead(reader.read_checkpoint_chunk(checkpoint_id, index))
        except LogError as error:
            return failed(error, request)
        return ev.LogFailed(LogError(f"a follower has no use for {type(request).__name__}"))

    def _poll(self) -> None:
        """Answer waiting reads if the log has grown."""
        if not self._waiting:
            return
        if self._reader is None:
            self._reader = self._access.open_reader()
            if self._reader is None:
                return
        reader, waiting = self._reader, self._waiting
        self._waiting = []
        for request in waiting:
            try:
                event = _loaded(reader) if isinstance(request, ef.LoadLog) else self._grown(reader, request)
            except LogError as error:
                event = failed(error, request)
            if event is None:
                self._waiting.append(request)
            else:
                self._emit(event)
        if self._following is not None:
            asked = self._following.request
            if asked != self._checkpoint:
                self._checkpoint = asked
                if asked is not None:
                    self._emit(ev.StandbyCheckpointRequested(asked.checkpoint_id, asked.epoch))
            self._following.report_ready(is_ready=time.monotonic() - self._caught_up_s < CAUGHT_UP_S)

    def _grown(self, reader: LogReader, request: ef.ReadRecords) -> ev.Event | None:
        """Read the records after those that the follower has, then the log's state."""
        first = request.first_sequence_id
        last = reader.last_sequence_id()
        if last == first - 1:
            self._caught_up_s = time.monotonic()
            return None
        values: list[bytes] = []
        if last >= first:
            try:
                values = reader.read(first, request.size_bytes_max)
            except DamagedLogError:
                if reader.summary().first_sequence_id <= first:  # otherwise it was trimmed, as the summary shows
                    raise
        if values and first + len(values) > last:
            self._caught_up_s = time.monotonic()
        return ev.RecordsRead(values, reader.summary(), request.session)


def _loaded(reader: LogReader) -> ev.Event | None:
    summary = reader.summary()
    return ev.LogLoaded(summary) if summary.checkpoints else None
