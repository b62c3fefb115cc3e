"""Writes to the log in order, and threads beside the loop, which leave their results in mailboxes.

Small writes are done inline, larger ones on a thread, which trims when it is idle.

A small commit takes 150 µs; to hand it to a thread and back costs more, and much more beside a busy Python thread. A
large commit would block the loop for milliseconds, and so would a small one to a log on another machine. There several
small commits are in flight at a time: the loop begins them and finishes each when its answer arrives. The thread waits
for them before it writes.

If the log does not answer a write, its outcome is unknown. Later submitted writes are then not done: they could be
stored before that write, or twice. The submitter reads the log's tail (ReadTail) and submits again from there.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

from msgspec.structs import replace

from immortal.coordinator.core.effects import Commit, ReadTail, WriteCheckpointChunk
from immortal.coordinator.core.errors import FencedError, LogError, LogUnavailableError
from immortal.coordinator.core.events import ChunkWritten, Committed, Event, Fenced, LogFailed, TailRead
from immortal.coordinator.core.interfaces import Transaction
from immortal.coordinator.fault_points import FaultPoint, armed, reach
from immortal.coordinator.log.store import RowLogStore
from immortal.coordinator.notices import Sink
from immortal.coordinator.notices.sinks import CommitTimed

T = TypeVar("T")


class Mailbox(Generic[T]):
    """Results of a thread for the loop. ``fileno()`` is readable if :meth:`pop_all` has something."""

    def __init__(self) -> None:
        self._results: deque[T] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._wake

    def put(self, results: Iterable[T]) -> None:
        """Add results and wake the loop, even without results. Called by the thread."""
        self._results.extend(results)
        os.eventfd_write(self._wake, 1)

    def pop_all(self) -> list[T]:
        """Remove and return the results added since the last call, in order. Called by the loop."""
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            return []
        taken = []
        while self._results:
            taken.append(self._results.popleft())
        return taken

    def close(self) -> None:
        """Close the mailbox once its thread has ended."""
        os.close(self._wake)


# Reads beside the loop: on one thread, in the order of the requests.
#
# To read and check a checkpoint with gigabytes of state takes seconds, and peers and operators need their answers
# meanwhile. So requests that arrive during that time are done before each of its chunks.


Work = Callable[[], Event | None]


class ReadThread(Mailbox[Event]):
    """Thread for slow reads, with a mailbox for their events."""

    def __init__(self) -> None:
        super().__init__()
        self.closing = False
        self._works: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, work: Work) -> None:
        """Run ``work`` on the thread. It must not raise; the event that it returns arrives in :meth:`take`."""
        self._works.put(work)
        if self._thread is None:  # most instances have small checkpoints, and seldom recover
            self._thread = threading.Thread(target=self._run, name="log-reads", daemon=True)
            self._thread.start()

    def run_pending(self) -> None:
        """Run the waiting works. A long work calls this from time to time."""
        while not self.closing:
            try:
                work = self._works.get_nowait()
            except queue.Empty:
                return
            if work is None:
                self._works.put(None)
                return
            self._do(work)

    def close(self) -> None:
        """End the thread. A long work stops where it checks ``closing``; waiting works are dropped."""
        self.closing = True
        self._works.put(None)
        if self._thread is not None:
            self._thread.join()
        super().close()

    def _run(self) -> None:
        while (work := self._works.get()) is not None and not self.closing:
            self._do(work)

    def _do(self, work: Work) -> None:
        event = work()
        if event is not None and not self.closing:
            self.put([event])


JOINED_SIZE_BYTES_MAX = 8 << 20
"""Limit up to which waiting commits are joined: a sync costs the same for one and for many. With 4 MiB, one-way traffic
that fills a disk of 250 MB/s loses a third to syncs of 5 ms."""

COMMIT_MEAN_WEIGHT = 0.2  # weight of the latest commit
TRIM_PAUSE_S = 0.002  # between two steps, so that the loop's commits get their turn

_Write = Commit | WriteCheckpointChunk
_Job = _Write | ReadTail


class LogWriter(Mailbox[tuple[int, list[Event]]]):  # number of jobs done, and their events
    """Writer through ``store``. Events of finished jobs arrive in :meth:`pop_finished`.

    ``fileno()`` is readable if something is finished. ``keep_checkpoints``, ``keep_bytes``: see
    :meth:`LogStore.trim`. ``times``: gets the duration of each commit, ``on_committed`` its ticket, on either thread.
    """

    def __init__(
        self,
        store: RowLogStore,
        *,
        keep_checkpoints: int | None,
        keep_bytes: int | None = None,
        inline_size_bytes_max: int,
        times: Sink | None = None,
        on_committed: Callable[[int], None] | None = None,
    ) -> None:
        super().__init__()
        self._store = store
        self._times = times
        self._on_committed = on_committed
        self._keep_checkpoints, self._keep_bytes = keep_checkpoints, keep_bytes
        self._keep_since_ns: int | None = None
        self._pipelines = store.appends_max > 1 and not armed  # fault points need one commit at a time
        self._inline_size_bytes_max = -1 if store.backend.is_remote and not self._pipelines else inline_size_bytes_max
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._on_thread = 0  # jobs handed over and not yet collected
        self._inline: deque[Commit] = deque()
        self._blocked_until_tail_read = False  # after a write without an answer
        self._store_lock = threading.RLock()
        self._ready = select.epoll()
        self._ready.register(super().fileno(), select.EPOLLIN)
        self._in_flight = InFlightCommits(store, self._ready)
        self._trim = threading.Event()
        self._trims_count = 0  # requested trims
        self._trim_lock = threading.Lock()  # between requesting a trim and clearing the last one
        self._closing = False
        self._pushed_back: _Job | None = None  # taken in the search for a commit to join
        self.commit_s = 0.0  # duration of a commit with its sync: a running mean
        self._thread = threading.Thread(target=self._run, name="log-writer", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        return self._ready.fileno()

    def submit(self, job: _Job) -> None:
        if isinstance(job, Commit) and job.size_bytes <= self._inline_size_bytes_max and not self._on_thread:
            self._inline.append(job)
        else:
            self._hand_over(*self._inline, job)  # this keeps the order

    def _hand_over(self, *jobs: _Job) -> None:
        """Hand ``jobs``, which are all waiting ones, to the thread."""
        self._inline.clear()
        for job in jobs:
            self._on_thread += 1
            self._jobs.put(job)

    @property
    def has_inline(self) -> bool:
        """True if :meth:`run_inline` has something to do."""
        return bool(self._inline)

    def run_inline(self) -> list[Event]:
        """Do the small writes submitted since the last call, and return their events; in a pipeline only begin
        them, and return no events."""
        if self._pipelines:
            self._start_inline()
            return []
        events = []
        while self._inline and not self._blocked_until_tail_read:
            events.append(self._write(self._inline.popleft()))
        self._inline.clear()
        return events

    def _start_inline(self) -> None:
        with self._unless_writing() as is_free:
            while is_free and self._inline and not self._blocked_until_tail_read:
                try:
                    if not self._in_flight.begin_commit(self._inline[0]):
                        break
                except Exception as error:  # as in _write; put after events that wait for the loop
                    self.put([(0, [self._in_flight_failed(error)])])
                self._inline.popleft()
        if self._blocked_until_tail_read:
            self._inline.clear()
        else:
            self._hand_over(*self._inline)

    def pop_finished(self) -> list[Event]:
        """Take the events of finished jobs."""
        events = []
        for jobs_count, came in self.pop_all():
            self._on_thread -= jobs_count
            events += came
        if self._in_flight:
            with self._unless_writing() as is_free:
                if is_free:
                    events += self._finish_commits(wait=False)
                    self._in_flight.watch()
        return events

    @contextlib.contextmanager
    def _unless_writing(self) -> Iterator[bool]:
        """Acquire the store's lock without waiting; yield False while the thread writes."""
        if not self._store_lock.acquire(blocking=False):
            yield False
            return
        try:
            yield True
        finally:
            self._store_lock.release()

    def _finish_commits(self, *, wait: bool) -> list[Event]:
        """Finish commits in flight and return their events. The caller holds the store's lock."""
        events: list[Event] = []
        while self._in_flight:
            try:
                done = self._in_flight.finish_oldest(wait=wait)
            except Exception as error:  # as in _write
                events.append(self._in_flight_failed(error))
                break
            if done is None:
                break
            commit, took_s = done
            self._note_committed(commit.ticket, took_s)
            events.append(Committed(commit.ticket))
        return events

    def _in_flight_failed(self, error: Exception) -> Event:
        event = self._answer_to(self._in_flight.oldest, error)
        self._in_flight.clear()
        return event

    def _finish_in_flight(self) -> None:
        """Wait for all commits in flight, before the thread writes."""
        with self._store_lock:
            if self._in_flight:
                self._in_flight.unwatch()
                self.put([(0, self._finish_commits(wait=True))])

    def trim(self, keep_since_ns: int | None = None) -> None:
        """Start to remove data that is no longer needed, step by step while idle.

        Kept is what a replay from ``keep_since_ns`` on needs (ns since the Unix epoch; None: no such limit).
        """
        with self._trim_lock:
            self._keep_since_ns = keep_since_ns
            self._trims_count += 1
            if not self._trim.is_set():
                self._trim.set()
                self._jobs.put(None)

    @property
    def trimming(self) -> bool:
        """True while a requested trim is not complete."""
        return self._trim.is_set()

    def close(self) -> None:
        """Finish submitted jobs, then end the thread."""
        self._trim.clear()
        self._closing = True
        self._jobs.put(None)
        self._thread.join()
        self._ready.close()
        super().close()

    def _write(self, job: _Write) -> Event:
        try:
            with self._store_lock:
                if isinstance(job, Commit):
                    if armed:
                        _reach_commit(job.transaction, is_done=False)
                    started_s = time.perf_counter()
                    self._store.commit(job.transaction, job.ticket)
                    self._note_committed(job.ticket, time.perf_counter() - started_s)
                    if armed:
                        _reach_commit(job.transaction, is_done=True)
                    return Committed(job.ticket)
                self._store.write_checkpoint_chunk(job.checkpoint_id, job.index, job.data)
                reach(FaultPoint.AFTER_CHUNK)
                return ChunkWritten(len(job.data))
        except Exception as error:  # it must not end the thread: the core would wait forever
            return self._answer_to(job, error)

    def _note_committed(self, ticket: int, took_s: float) -> None:
        self.commit_s += (took_s - self.commit_s) * COMMIT_MEAN_WEIGHT
        if self._times is not None:
            self._times.emit(CommitTimed(took_s))
        if self._on_committed is not None:
            self._on_committed(ticket)

    def _answer_to(self, job: _Write, error: Exception) -> Event:
        """Return the event for a failed write."""
        if isinstance(error, FencedError):
            return Fenced(job.ticket if isinstance(job, Commit) else 0, error.holder)
        failed = _failed(error, job)
        self._blocked_until_tail_read = failed.retryable
        return failed

    def _read_tail(self) -> Event:
        try:
            with self._store_lock:
                tail = TailRead(*self._store.tail())
        except FencedError as error:
            return Fenced(0, error.holder)
        except Exception as error:  # as in _write
            return _failed(error, ReadTail())
        self._blocked_until_tail_read = False
        return tail

    def _run(self) -> None:
        while True:
            job = self._next_job()
            if job is not None:
                self.put([self._do(job)])
            elif self._closing and self._jobs.empty():
                self._finish_in_flight()
                return
            elif self._trim.is_set():
                self._trim_step()

    def _do(self, job: _Job) -> tuple[int, list[Event]]:
        """Do ``job``, and commits that can join it; return the number of jobs done and their events."""
        self._finish_in_flight()
        if isinstance(job, ReadTail):
            return 1, [self._read_tail()]
        if self._blocked_until_tail_read:
            return 1, []
        if isinstance(job, Commit):
            return self._write_joined(job)
        return 1, [self._write(job)]

    def _write_joined(self, job: Commit) -> tuple[int, list[Event]]:
        """Write ``job`` together with the commits that wait after it, in one sync."""
        commits = [job]
        size_bytes = job.size_bytes
        while size_bytes < JOINED_SIZE_BYTES_MAX and (following := self._pop_if_commit()) is not None:
            commits.append(following)
            size_bytes += following.size_bytes
        joined = job
        if len(commits) > 1:
            joined = Commit(commits[-1].ticket, Transaction(), size_bytes, job.expected_last_sequence_id, job.fence)
            try:
                for commit in commits:
                    joined.transaction.absorb(commit.transaction)
            except Exception as error:  # as in _write
                return len(commits), [_failed(error, job)]
        event = self._write(joined)
        if isinstance(event, Committed):
            return len(commits), [Committed(commit.ticket) for commit in commits]
        return len(commits), [replace(event, request=job) if isinstance(event, LogFailed) else event]

    def _pop_if_commit(self) -> Commit | None:
        """Take the next job if it is a commit; keep a job of another kind for the next turn."""
        if self._pushed_back is not None:
            return None
        try:
            job = self._jobs.get_nowait()
        except queue.Empty:
            return None
        if isinstance(job, Commit):
            return job
        if job is None:
            self._jobs.put(None)  # a wake-up, for _next_job
        else:
            self._pushed_back = job
        return None

    def _next_job(self) -> _Job | None:
        """Take the next job; None at the end, or for a step of trimming."""
        if self._pushed_back is not None:
            job, self._pushed_back = self._pushed_back, None
            return job
        try:
            return self._jobs.get(timeout=TRIM_PAUSE_S if self._trim.is_set() else None)
        except queue.Empty:
            return None

    def _trim_step(self) -> None:
        trims_count = self._trims_count  # read before the step
        try:
            with self._store_lock:
                self._finish_in_flight()
                more = self._store.trim(
                    keep_checkpoints=self._keep_checkpoints,
                    keep_since_ns=self._keep_since_ns,
                    keep_bytes=self._keep_bytes,
                )
                reach(FaultPoint.AFTER_TRIM)
        except Exception:
            more = False  # the next commit has the same failure, and reports it
        with self._trim_lock:
            if not more and trims_count == self._trims_count:
                self._trim.clear()


def _failed(error: Exception, job: _Job) -> LogFailed:
    if not isinstance(error, LogError):
        error = LogError(f"a write to the log failed: {error!r}")
    return LogFailed(error, isinstance(error, LogUnavailableError), job)


# Fault points before and after a commit: of any commit, or of one with such a part.
_POINTS: tuple[tuple[FaultPoint, FaultPoint, Callable[[Transaction], object]], ...] = (
    (FaultPoint.BEFORE_COMMIT, FaultPoint.AFTER_COMMIT, lambda transaction: True),
    (FaultPoint.BEFORE_EPOCH, FaultPoint.AFTER_EPOCH, lambda transaction: transaction.epoch is not None),
    (FaultPoint.BEFORE_HEADER, FaultPoint.AFTER_HEADER, lambda transaction: transaction.checkpoint is not None),
    (FaultPoint.BEFORE_VERSION, FaultPoint.AFTER_VERSION, lambda transaction: transaction.version is not None),
    (FaultPoint.BEFORE_RESET, FaultPoint.AFTER_RESET, lambda transaction: transaction.stream_starts),
    (FaultPoint.BEFORE_SPILL, FaultPoint.AFTER_SPILL, lambda transaction: transaction.spilled),
)


def _reach_commit(transaction: Transaction, *, is_done: bool) -> None:
    for before, after, has in _POINTS:
        if has(transaction):
            reach(after if is_done else before)


# Commits in flight, for a log that can have several at a time.
#
# The loop begins them, and finishes each when its answer arrives. The thread finishes all before it writes anything
# else. Both hold the store's lock meanwhile.


class InFlightCommits:
    """Commits that were begun and are not finished.

    ``ready`` is readable if an answer may have arrived, unless a thread waits for it.
    """

    def __init__(self, store: RowLogStore, ready: select.epoll) -> None:
        self._store, self._ready = store, ready
        self._commits: deque[tuple[Commit, float]] = deque()
        self._watched: tuple[int, int] | None = None  # file descriptor, events

    def __bool__(self) -> bool:
        return bool(self._commits)

    @property
    def oldest(self) -> Commit:
        return self._commits[0][0]

    def begin_commit(self, commit: Commit) -> bool:
        """Begin a commit; False: it can't be begun. Raises like the store's ``begin_commit``; then it is in flight."""
        self._commits.append((commit, time.perf_counter()))
        is_begun = self._store.begin_commit(commit.transaction, commit.ticket)
        if is_begun:
            self.watch()
        else:
            self._commits.pop()
        return is_begun

    def finish_oldest(self, *, wait: bool) -> tuple[Commit, float] | None:
        """Finish the oldest commit; return it with its duration in s, None if it is not durable yet.

        Raises like the store's ``finish_oldest``.
        """
        if not self._store.finish_oldest(wait=wait):
            return None
        commit, begun_s = self._commits.popleft()
        return commit, time.perf_counter() - begun_s

    def clear(self) -> None:
        """Forget all commits in flight: their outcome is unknown."""
        self._commits.clear()
        self.unwatch()

    def watch(self) -> None:
        """Watch for the answer to the oldest commit, if there is one."""
        wanted = self._store.backend.poll_target() if self._commits else None
        if wanted != self._watched:
            self.unwatch()
            if wanted is not None:
                self._ready.register(*wanted)  # select.poll and epoll have the same events
                self._watched = wanted

    def unwatch(self) -> None:
        if self._watched is not None:
            with contextlib.suppress(OSError):  # a closed descriptor is already unregistered
                self._ready.unregister(self._watched[0])
            self._watched = None
