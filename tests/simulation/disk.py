"""Disk with one log: it answers late, loses unanswered writes, fills up, fails a sync, and has bit rot.

The log is `MemoryLogStore`, the store of real service over rows in memory: its appends are complete or absent, and in
order. That is a backend's contract, which LMDB's keeps. So neither a torn write nor a subset of commits can occur here;
those are below LMDB, and are tested there, with real files. A crash still decides how many unanswered writes are done,
if several commits were joined in one, and what a failed sync has written.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

from immortal.coordinator.core import effects as ef
from immortal.coordinator.core import events as ev
from immortal.coordinator.core.errors import LogError, LogFullError, LogSyncError, LogUnavailableError
from immortal.coordinator.core.interfaces import CheckpointHeader, LogSummary, Transaction
from immortal.coordinator.log.backend import Span
from immortal.coordinator.log.format import CHUNK_KEY, SEQUENCE_KEY
from immortal.coordinator.log.memory import MemoryLogStore
from tests.helpers.memory_logs import damage_chunk, damage_record
from tests.simulation.clock import US
from tests.simulation.shared_log import SharedLog
from tests.simulation.trace import Violation

Job = ef.Commit | ef.WriteCheckpointChunk


class Disk:
    """Disk of one process. ``written``: called with each transaction when it becomes durable."""

    def __init__(
        self, shared: SharedLog, rng: random.Random, keep_checkpoints: int, written: Callable[[Transaction], None]
    ) -> None:
        self.shared = shared
        self.fence = 0  # the term of this process
        self.silent = 0  # number of requests for which the log is unavailable
        self.holds = False  # a write has failed: later ones are done only after a read of the log's end
        self.jobs: deque[Job] = deque()
        self.trimming = False
        self.slow = 1  # times as slow as usual
        self.fails_next: str | None = None  # "disk full" or "sync fails"
        self.crashes_at_verdict = False  # while the next verdict is on its way
        self.failed = False  # accepts no more writes in this life
        self.joined = 0  # commits that had no sync of their own
        self._rng = rng
        self._keep_checkpoints = keep_checkpoints
        self._written = written
        self._table_damaged = False
        self._sound: list[Callable[[], None]] = []  # functions that restore damaged values from a good copy

    @property
    def store(self) -> MemoryLogStore:
        return self.shared.store

    @property
    def is_writer(self) -> bool:
        return self.fence == self.shared.term

    # --- writes ------------------------------------------------------------------------------------------------------

    def latency_ns(self) -> float:
        spread = self._rng.random()
        return (20 + 200 * spread + (2000 if spread > 0.97 else 0)) * US * self.slow

    def work(self) -> list[ev.Event]:
        """Do the first job, or a step of trimming; return the answers."""
        if self.failed:
            return []
        jobs = self._take_joined() if self.jobs else []
        if not jobs and not self.is_writer:
            self.trimming = False
            return []
        if not jobs:
            self.trimming = self.store.trim(keep_checkpoints=self._keep_checkpoints)
            return []
        return self._try(jobs)

    def write_at_once(self, job: Job) -> list[ev.Event]:
        """Write ``job`` before anything else; return the answers."""
        return [] if self.failed else self._try([job])

    def _try(self, jobs: list[Job]) -> list[ev.Event]:
        if not self.is_writer:
            self.failed = True
            self.jobs.clear()
            writer = self.shared.writer
            ticket = jobs[0].ticket if isinstance(jobs[0], ef.Commit) else 0
            return [ev.Fenced(ticket, f"node {writer.number}" if writer is not None else "somebody")]
        if self.fails_next is not None:
            return [ev.LogFailed(self._fail(jobs))]
        if self.silent:
            return [self._stay_silent(jobs)]
        return self._write(jobs)

    def _stay_silent(self, jobs: list[Job]) -> ev.Event:
        """Give no answer about ``jobs``; they are done or not, and later ones are done only if they are."""
        self.silent -= 1
        if self._rng.random() < 0.5:
            self._write(jobs)
            for _ in range(self._rng.randrange(len(self.jobs) + 1)):
                self._write([self.jobs.popleft()])
        self.jobs.clear()
        self.holds = True
        return ev.LogFailed(LogUnavailableError("the log is out of reach (simulated)"), True, jobs[0])

    def answers_nothing(self, request: ev.Asked) -> ev.Event | None:
        """Return a failure in place of a read's answer, or None."""
        if not self.silent or self._rng.random() < 0.3:
            return None
        self.silent -= 1
        return ev.LogFailed(LogUnavailableError("the log is out of reach (simulated)"), True, request)

    def _take_joined(self) -> list[Job]:
        """Return one job, or several consecutive commits, which get one sync."""
        jobs = [self.jobs.popleft()]
        while isinstance(jobs[0], ef.Commit) and self.jobs and isinstance(self.jobs[0], ef.Commit):
            if self._rng.random() < 0.5:
                break
            jobs.append(self.jobs.popleft())
        return jobs

    def _write(self, jobs: list[Job]) -> list[ev.Event]:
        job = jobs[0]
        if isinstance(job, ef.WriteCheckpointChunk):
            pending = self.store._checkpoint_writer._pending
            is_there = pending is not None and pending.checkpoint_id == job.checkpoint_id
            if not is_there or pending is None or job.index >= pending.chunk_count:
                self.store.write_checkpoint_chunk(job.checkpoint_id, job.index, job.data)
            return [ev.ChunkWritten(len(job.data))]
        for one in jobs:
            assert isinstance(one, ef.Commit)
            if one.fence != self.fence or one.ticket != self.shared.ticket + 1:
                raise Violation(f"append {one.ticket} of term {one.fence} behind {self.shared.ticket} of {self.fence}")
            self.shared.ticket = one.ticket
        last = self.store.last_sequence_id
        if job.expected_last_sequence_id != last:
            raise Violation(f"an append expects record {job.expected_last_sequence_id}, the log ends with {last}")
        transaction = job.transaction
        if len(jobs) > 1:
            self.joined += len(jobs) - 1
            transaction = Transaction()
            for one in jobs:
                assert isinstance(one, ef.Commit)
                transaction.absorb(one.transaction)
        if transaction.checkpoint is not None and transaction.adopts:
            self._look_at_adopted(transaction.checkpoint)
        self.store.commit(transaction)
        self._written(transaction)
        return [ev.Committed(one.ticket) for one in jobs if isinstance(one, ef.Commit)]

    def _look_at_adopted(self, header: CheckpointHeader) -> None:
        """Check a standby's checkpoint: its record must be in the log, and it was taken for this writer."""
        if header.sequence_id > self.store.last_sequence_id:
            raise Violation(f"a checkpoint of record {header.sequence_id} is adopted, which the log has not")
        term = self.shared.offers[header.checkpoint_id]
        if term != self.fence:
            raise Violation(f"the writer of term {self.fence} adopts a checkpoint taken for that of term {term}")

    def _fail(self, jobs: list[Job]) -> LogError:
        kind, self.fails_next = self.fails_next, None
        self.failed = True
        if kind == "sync fails":
            if self._rng.random() < 0.5:
                self._write(jobs)  # it is written all the same
            return LogSyncError("a sync failed (simulated)")
        return LogFullError("the disk is full (simulated)")

    # --- crashes -----------------------------------------------------------------------------------------------------

    def crash(self) -> int:
        """End the process: the first few unanswered writes are done. Return how many were lost."""
        is_writer = self.is_writer
        survive = self._rng.randrange(len(self.jobs) + 1) if self.jobs and not self.failed and is_writer else 0
        for _ in range(survive):
            self._write([self.jobs.popleft()])
        lost = len(self.jobs)
        self.jobs.clear()
        self.trimming = self.failed = False
        self.fails_next = None
        self.silent = self.fence = 0
        self.holds = False
        if is_writer:
            self.shared.reopen()
        return lost

    def copy(self) -> MemoryLogStore:
        """Return a copy of the current log, for another disk."""
        return self.store.copy()

    def open(self) -> LogSummary:
        """Return the log's summary for the next process. Raises LogError."""
        if self._table_damaged:
            raise LogError("a value in the table of positions is damaged (simulated)")
        return self.store.summary()

    # --- damage ------------------------------------------------------------------------------------------------------

    @property
    def damaged(self) -> bool:
        return bool(self._sound)

    def flip(self, kind: str, share: float) -> bool:
        """Damage one value, at ``share`` of all; return False if there is none of that kind."""
        if kind in ("flip record", "flip trailer"):
            sequence_ids = [SEQUENCE_KEY.unpack(key)[0] for key in self._keys("records")]
            if not sequence_ids:
                return False
            sequence_id = _at(sequence_ids, share)
            value = self._rows("records")[SEQUENCE_KEY.pack(sequence_id)]
            size_bytes = min(int.from_bytes(value[4:8], "little"), len(value) - 1)  # the size can be damaged already
            within = int(share * 7919) % size_bytes
            trailer_offset = size_bytes + int(share * 7919) % (len(value) - size_bytes)
            put_back = self._put_back("records", SEQUENCE_KEY.pack(sequence_id))
            damage_record(self.store, sequence_id, within if kind == "flip record" else trailer_offset)
        elif kind == "flip chunk":
            headers = self._keys("checkpoints")
            newest = SEQUENCE_KEY.unpack(headers[-1])[0] if headers else -1
            keys = [key for key in self._keys("chunks") if CHUNK_KEY.unpack(key)[0] == newest]
            if not keys:
                return False
            key = _at(keys, share)
            put_back = self._put_back("chunks", key)
            damage_chunk(self.store, *CHUNK_KEY.unpack(key))
        elif kind == "flip header":
            headers = self._keys("checkpoints")
            if len(headers) < 2:
                return False
            self.store.backend.durable.delete(Span.of_key("checkpoints", headers[-1]))  # left out, with a notice

            def put_back() -> None:
                """Restore nothing: its place can be taken, so it stays lost."""

        else:
            self._table_damaged = True

            def put_back() -> None:
                self._table_damaged = False

        self._sound.append(put_back)
        return True

    def _rows(self, table: str) -> dict[bytes, bytes]:
        found = self.store.backend.durable.tables.get(table)
        return {} if found is None else found.rows

    def _keys(self, table: str) -> list[bytes]:
        return sorted(self._rows(table))

    def _put_back(self, table: str, key: bytes) -> Callable[[], None]:
        """Return a function that restores the row's current value, if the row still exists then."""
        value = self._rows(table)[key]

        def put_back() -> None:
            if key in self._rows(table):
                self._rows(table)[key] = value

        return put_back

    def repair(self) -> None:
        """Restore all damaged values, as an operator does from a good copy."""
        for put_back in reversed(self._sound):
            put_back()
        self._sound.clear()
        self.store._damaged_checkpoint_ids.clear()


def _at(values: list, share: float):  # type: ignore[no-untyped-def, type-arg]
    return values[int(share * len(values))]
