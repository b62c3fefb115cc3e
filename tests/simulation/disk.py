"""A disk with one log: it answers late, loses what it has not answered, fills up, fails a sync, and rots.

The log is `MemoryLogStore`, the store that runs in service over rows in memory: its appends are whole or not at all, in
order. That is the contract of a backend, which LMDB's keeps. So a torn write cannot show here, and neither can a subset
of the commits: those belong under LMDB, and are tested there, with real files. What is left for a crash to choose is
how many of the writes that were asked for and not answered have got through, whether several commits were joined in
one, and what a failed sync has written.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

from coordinator.core import effects as ef
from coordinator.core import events as ev
from coordinator.core.errors import LogError, LogFullError, LogSyncError
from coordinator.core.interfaces import LogSummary, Transaction
from coordinator.log.backend import Span
from coordinator.log.format import CHUNK_KEY, SEQUENCE_KEY
from coordinator.log.memory import MemoryLogStore
from tests.simulation.clock import US

Job = ef.Commit | ef.WriteCheckpointChunk


class Disk:
    """``written``: called with each transaction as it becomes durable."""

    def __init__(
        self, store: MemoryLogStore, rng: random.Random, keep_checkpoints: int, written: Callable[[Transaction], None]
    ) -> None:
        self.store = store
        self.jobs: deque[Job] = deque()
        self.trimming = False
        self.slow = 1  # times as slow as usual
        self.fails_next: str | None = None  # "disk full" or "sync fails"
        self.failed = False  # accepts nothing more in this life
        self.joined = 0  # commits that had no sync of their own
        self._rng = rng
        self._keep_checkpoints = keep_checkpoints
        self._written = written
        self._table_damaged = False
        self._sound: list[Callable[[], None]] = []  # puts back what was damaged, from a good copy

    # --- writes ------------------------------------------------------------------------------------------------------

    def latency_ns(self) -> float:
        spread = self._rng.random()
        return (20 + 200 * spread + (2000 if spread > 0.97 else 0)) * US * self.slow

    def work(self) -> list[ev.Event]:
        """Do what has been asked for first, or a step of trimming; the answers."""
        if self.failed:
            return []
        jobs = self._take_joined() if self.jobs else []
        if not jobs:
            self.trimming = self.store.trim(keep_checkpoints=self._keep_checkpoints)
            return []
        if self.fails_next is not None:
            return [ev.LogFailed(self._fail(jobs))]
        return self._write(jobs)

    def write_at_once(self, job: Job) -> list[ev.Event]:
        """Nothing else waits; the answers."""
        if self.failed:
            return []
        if self.fails_next is not None:
            return [ev.LogFailed(self._fail([job]))]
        return self._write([job])

    def _take_joined(self) -> list[Job]:
        """One job; or several commits in a row, which get one sync."""
        jobs = [self.jobs.popleft()]
        while isinstance(jobs[0], ef.Commit) and self.jobs and isinstance(self.jobs[0], ef.Commit):
            if self._rng.random() < 0.5:
                break
            jobs.append(self.jobs.popleft())
        return jobs

    def _write(self, jobs: list[Job]) -> list[ev.Event]:
        job = jobs[0]
        if isinstance(job, ef.WriteCheckpointChunk):
            self.store.write_checkpoint_chunk(job.checkpoint_id, job.index, job.data)
            return [ev.ChunkWritten(len(job.data))]
        transaction = job.transaction
        if len(jobs) > 1:
            self.joined += len(jobs) - 1
            transaction = Transaction()
            for one in jobs:
                assert isinstance(one, ef.Commit)
                transaction.absorb(one.transaction)
        self.store.commit(transaction)
        self._written(transaction)
        return [ev.Committed(one.ticket) for one in jobs if isinstance(one, ef.Commit)]

    def _fail(self, jobs: list[Job]) -> LogError:
        kind, self.fails_next = self.fails_next, None
        self.failed = True
        if kind == "sync fails":
            if self._rng.random() < 0.5:
                self._write(jobs)  # it is there all the same
            return LogSyncError("a sync failed (simulated)")
        return LogFullError("the disk is full (simulated)")

    # --- crashes -----------------------------------------------------------------------------------------------------

    def crash(self) -> int:
        """The process ends: of what was not answered, the first few got through. How many were lost."""
        survive = self._rng.randrange(len(self.jobs) + 1) if self.jobs and not self.failed else 0
        for _ in range(survive):
            self._write([self.jobs.popleft()])
        lost = len(self.jobs)
        self.jobs.clear()
        self.trimming = self.failed = False
        self.fails_next = None
        self.store = self.store.crash()
        return lost

    def copy(self) -> MemoryLogStore:
        """The log as it is now, for another disk."""
        return self.store.copy()

    def open(self) -> LogSummary:
        """The log as the next process finds it. Raises LogError."""
        if self._table_damaged:
            raise LogError("a value in the table of positions is damaged (simulated)")
        return self.store.summary()

    # --- damage ------------------------------------------------------------------------------------------------------

    @property
    def damaged(self) -> bool:
        return bool(self._sound)

    def flip(self, kind: str, share: float) -> bool:
        """Damage one value, at ``share`` of all; False if there is none of that kind."""
        if kind in ("flip record", "flip trailer"):
            sequence_ids = [SEQUENCE_KEY.unpack(key)[0] for key in self._keys("records")]
            if not sequence_ids:
                return False
            sequence_id = _at(sequence_ids, share)
            value = self._rows("records")[SEQUENCE_KEY.pack(sequence_id)]
            size_bytes = min(int.from_bytes(value[4:8], "little"), len(value) - 1)  # that may be damaged already
            within = int(share * 7919) % size_bytes
            trailer_offset = size_bytes + int(share * 7919) % (len(value) - size_bytes)
            put_back = self._put_back("records", SEQUENCE_KEY.pack(sequence_id))
            self.store.damage_record(sequence_id, within if kind == "flip record" else trailer_offset)
        elif kind == "flip chunk":
            headers = self._keys("checkpoints")
            newest = SEQUENCE_KEY.unpack(headers[-1])[0] if headers else -1
            keys = [key for key in self._keys("chunks") if CHUNK_KEY.unpack(key)[0] == newest]
            if not keys:
                return False
            key = _at(keys, share)
            put_back = self._put_back("chunks", key)
            self.store.damage_chunk(*CHUNK_KEY.unpack(key))
        elif kind == "flip header":
            headers = self._keys("checkpoints")
            if len(headers) < 2:
                return False
            self.store.backend.durable.delete(Span.of_one("checkpoints", headers[-1]))  # left out, and said so

            def put_back() -> None:
                """Its place may have been given away: it stays lost."""

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
        """What puts the row back as it is now, if it is still there then."""
        value = self._rows(table)[key]

        def put_back() -> None:
            if key in self._rows(table):
                self._rows(table)[key] = value

        return put_back

    def repair(self) -> None:
        """An operator puts a good copy in place."""
        for put_back in reversed(self._sound):
            put_back()
        self._sound.clear()
        self.store._damaged_checkpoint_ids.clear()


def _at(values: list, share: float):  # type: ignore[no-untyped-def, type-arg]
    return values[int(share * len(values))]
