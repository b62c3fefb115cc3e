"""A LogStore in memory with the same rules, and a notion of what is durable: for tests and the simulator."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from coordinator.core.errors import DamagedCheckpointError, DamagedLogError, LogError, require
from coordinator.core.interfaces import (
    NO_SUSPECT,
    AuditEntry,
    CheckpointHeader,
    ClientPosition,
    ImpulseBatch,
    Letter,
    LogSpace,
    LogSummary,
    OutputBatch,
    SourcePosition,
    SpilledBatch,
    SpilledExtent,
    StoredClients,
    StreamStart,
    Suspect,
    Transaction,
    VersionStart,
)
from coordinator.core.pieces import cut
from coordinator.log.checkpoint_store import PendingBlob
from coordinator.log.reading import IMPULSES_LOADED_SIZE_BYTES_MAX
from coordinator.log.spilled import add_extent, missing
from coordinator.log.store import check_records
from coordinator.log.trim import STEP_ROWS_MAX, Retention
from coordinator.log.values import check_value, logged_time_ns
from coordinator.log.verdicts import letter_size
from protocol.checksum import crc64
from protocol.varint import Readable
from protocol.verdicts import MessageKey, Verdict

Key = TypeVar("Key")
Value = TypeVar("Value")


@dataclass(slots=True)
class _Durable:
    """What survives a crash."""

    committer_id: int
    epoch: int = 0
    extensions: frozenset[int] | None = None
    trimmed_sequence_id: int = -1
    records: dict[int, bytes] = field(default_factory=dict)
    checkpoints: dict[int, CheckpointHeader] = field(default_factory=dict)
    chunks: dict[tuple[int, int], tuple[bytes, int]] = field(default_factory=dict)  # data, CRC
    sources: dict[str, SourcePosition] = field(default_factory=dict)
    acknowledged: dict[str, int] = field(default_factory=dict)
    peers: dict[str, int] = field(default_factory=dict)
    impulses: dict[tuple[str, int], ImpulseBatch] = field(default_factory=dict)
    clients: dict[str, ClientPosition] = field(default_factory=dict)
    replies: dict[tuple[str, int], bytes] = field(default_factory=dict)
    clients_forgotten_ns: int = 0
    versions: list[VersionStart] = field(default_factory=list)
    cut_sequence_id: int | None = None
    stream_starts: dict[str, StreamStart] = field(default_factory=dict)
    spilled: dict[tuple[str, int], SpilledBatch] = field(default_factory=dict)
    verdicts: dict[MessageKey, Verdict] = field(default_factory=dict)
    letters: dict[MessageKey, Letter] = field(default_factory=dict)
    suspect: Suspect = NO_SUSPECT
    audit: list[AuditEntry] = field(default_factory=list)


class MemoryLogStore:
    """Everything that was committed is durable; :meth:`crash` gives what the next start would find."""

    def __init__(self, committer_id: int = 1) -> None:
        self.problems: list[str] = []
        self.impulses_loaded_size_bytes_max = IMPULSES_LOADED_SIZE_BYTES_MAX
        self.free_bytes = 1 << 40  # of the disk
        self.clock_ns: Callable[[], int] = time.time_ns  # says when a dead letter's verdict was given
        self._durable = _Durable(committer_id)
        self._pending: PendingBlob | None = None
        self._failure: LogError | None = None
        self._fail_next: LogError | None = None
        self._damaged_checkpoint_ids: set[int] = set()

    def crash(self) -> MemoryLogStore:
        """A fresh store with what was durable; this one accepts nothing more."""
        store = MemoryLogStore(self._durable.committer_id)
        store.impulses_loaded_size_bytes_max = self.impulses_loaded_size_bytes_max
        store.free_bytes = self.free_bytes
        store.clock_ns = self.clock_ns
        store._durable = copy.copy(self._durable)
        for name in _Durable.__dataclass_fields__:
            value = getattr(self._durable, name)
            if isinstance(value, dict | list):
                setattr(store._durable, name, value.copy())
        known = store._durable.checkpoints
        store._durable.chunks = {key: chunk for key, chunk in store._durable.chunks.items() if key[0] in known}
        self._failure = LogError("this log is closed: its process crashed")
        return store

    def fail_next_commit(self, error: LogError) -> None:
        """Let the next write raise ``error`` (LogFullError, LogSyncError) and refuse everything after it."""
        self._fail_next = error

    def damage_record(self, sequence_id: int, offset_bytes: int) -> None:
        """Flip one bit of a value."""
        value = bytearray(self._durable.records[sequence_id])
        value[offset_bytes] ^= 1
        self._durable.records[sequence_id] = bytes(value)

    def damage_chunk(self, checkpoint_id: int, index: int) -> None:
        """Flip one bit of a chunk."""
        data, check = self._durable.chunks[checkpoint_id, index]
        self._durable.chunks[checkpoint_id, index] = (bytes((data[0] ^ 1,)) + data[1:], check)

    def summary(self) -> LogSummary:
        """As LmdbLogStore.summary."""
        self._refuse_after_failure()
        durable = self._durable
        first, last = self._first_and_last()
        return LogSummary(
            committer_id=durable.committer_id,
            epoch=durable.epoch,
            first_sequence_id=first,
            last_sequence_id=last,
            checkpoints=[header for _, header in sorted(durable.checkpoints.items())],
            sources=dict(durable.sources),
            acknowledged=dict(durable.acknowledged),
            peers=dict(durable.peers),
            impulses=self._loaded_impulses(),
            extensions=durable.extensions,
            last_time_ns=logged_time_ns(durable.records[last], last, durable.committer_id) if last >= first else 0,
            versions=list(durable.versions),
            cut_sequence_id=durable.cut_sequence_id,
            stream_starts=dict(durable.stream_starts),
            spilled=self._extents(),
            verdicts=[verdict for key, verdict in sorted(durable.verdicts.items()) if key[0] >= first],
            letters={key: letter_size(letter) for key, letter in sorted(durable.letters.items())},
            suspect=durable.suspect,
        )

    def clients(self) -> StoredClients:
        """As LmdbLogStore.clients."""
        self._refuse_after_failure()
        durable = self._durable
        return StoredClients(dict(durable.clients), dict(durable.replies), durable.clients_forgotten_ns)

    def _loaded_impulses(self) -> list[ImpulseBatch]:
        durable = self._durable
        loaded: dict[str, int] = {}
        batches = []
        for _, batch in sorted(durable.impulses.items()):
            destination, size_bytes = batch.destination, len(batch.payload)
            if batch.last_position <= durable.acknowledged.get(destination, 0):
                batches.append(replace(batch, payload=b""))
                continue
            loaded[destination] = loaded.get(destination, 0) + size_bytes
            enough = loaded[destination] > self.impulses_loaded_size_bytes_max and durable.cut_sequence_id is None
            batches.append(replace(batch, payload=b"", left_size_bytes=size_bytes) if enough else batch)
        return batches

    def _extents(self) -> dict[str, list[SpilledExtent]]:
        found: dict[str, list[SpilledExtent]] = {}
        for (destination, _), batch in sorted(self._durable.spilled.items()):
            if batch.last_position > self._durable.acknowledged.get(destination, 0):
                extent = SpilledExtent(batch.first_position, batch.last_position, len(batch.payload))
                add_extent(found.setdefault(destination, []), extent)
        return found

    def commit(self, transaction: Transaction) -> None:
        """As LmdbLogStore.commit."""
        self._refuse_after_failure()
        durable = self._durable
        check_records(transaction.records, self._first_and_last()[1], durable.committer_id)
        checkpoint = transaction.checkpoint
        if checkpoint is not None:
            pending = self._pending or PendingBlob(checkpoint.checkpoint_id)
            if pending.checkpoint_id != checkpoint.checkpoint_id:
                pending = PendingBlob(checkpoint.checkpoint_id)
            pending.require_complete(checkpoint)
        self._fail_if_asked()
        durable.records.update((sequence_id, bytes(value)) for sequence_id, value in transaction.records)
        durable.sources.update(transaction.sources)
        durable.acknowledged.update(transaction.acknowledged)
        durable.peers.update(transaction.peers)
        durable.stream_starts.update(transaction.stream_starts)
        for removed in transaction.impulses_removed:
            durable.impulses.pop(removed, None)
        durable.impulses.update(((batch.destination, batch.first_position), batch) for batch in transaction.impulses)
        _update(durable.clients, transaction.clients)
        _update(durable.replies, transaction.replies)
        if transaction.clients_forgotten_ns is not None:
            durable.clients_forgotten_ns = transaction.clients_forgotten_ns
        for destination, position in transaction.spilled_ends.items():
            self._end_spilled(destination, position)
        durable.spilled.update(((batch.destination, batch.first_position), batch) for batch in transaction.spilled)
        if checkpoint is not None:
            unacknowledged = {name: list(batches) for name, batches in checkpoint.unacknowledged.items()}
            durable.checkpoints[checkpoint.checkpoint_id] = replace(
                checkpoint, outputs=dict(checkpoint.outputs), unacknowledged=unacknowledged
            )
            self._pending = None
        if transaction.version is not None:
            durable.versions.append(transaction.version)
        for verdict in transaction.verdicts:
            durable.verdicts[verdict.key] = verdict.without_letter()
            if verdict.is_letter:
                durable.letters[verdict.key] = Letter(verdict, self.clock_ns())
        for key in transaction.letters_removed:
            durable.letters.pop(key, None)
        durable.suspect = transaction.suspect or durable.suspect
        durable.audit += transaction.audit
        if transaction.cut_healed:
            durable.cut_sequence_id = None
        if transaction.epoch is not None:
            durable.epoch = transaction.epoch
        if transaction.extensions is not None:
            durable.extensions = transaction.extensions

    def read(self, first_sequence_id: int, size_bytes_max: int) -> list[bytes]:
        """As LmdbLogStore.read."""
        self._refuse_after_failure()
        records = self._durable.records
        values: list[bytes] = []
        size_bytes = 0
        sequence_id = first_sequence_id
        while (value := records.get(sequence_id)) is not None:
            size_bytes += len(value)
            if values and size_bytes > size_bytes_max:
                break
            try:
                check_value(value, sequence_id, self._durable.committer_id)
            except DamagedLogError:
                if not values:
                    raise
                break
            values.append(value)
            sequence_id += 1
        first, last = self._first_and_last()
        if not values and first_sequence_id <= last:
            raise DamagedLogError(
                f"record {first_sequence_id} is missing: the log has {first} to {last}", first_sequence_id
            )
        return values

    def _end_spilled(self, destination: str, position: int) -> None:
        for key, batch in list(self._durable.spilled.items()):
            if key[0] != destination or batch.last_position <= position:
                continue
            del self._durable.spilled[key]
            if batch.first_position <= position:
                whole = OutputBatch(batch.first_position, batch.count, batch.payload)
                rest, _ = cut(whole, position - batch.first_position + 1)
                self._durable.spilled[key] = replace(batch, count=rest.count, payload=rest.payload)

    def read_spilled(
        self, destination: str, first_position: int, last_position: int, size_bytes_max: int
    ) -> list[OutputBatch]:
        """As LmdbLogStore.read_spilled."""
        self._refuse_after_failure()
        rows: list[SpilledBatch | ImpulseBatch] = [*self._durable.spilled.values(), *self._durable.impulses.values()]
        batches: list[OutputBatch] = []
        size_bytes, position = 0, first_position
        while position <= last_position:
            found = [
                row
                for row in rows
                if row.destination == destination and row.first_position <= position <= row.last_position
            ]
            if not found and not batches:
                raise missing(destination, position)
            if not found:
                break
            row = found[0]
            size_bytes += len(row.payload)
            if batches and size_bytes > size_bytes_max:
                break
            batches.append(OutputBatch(row.first_position, row.count, row.payload))
            position = row.last_position + 1
        return batches

    def letter(self, key: MessageKey) -> Letter | None:
        """As LmdbLogStore.letter."""
        self._refuse_after_failure()
        return self._durable.letters.get(key)

    def audit(self) -> list[AuditEntry]:
        """As LogReader.audit."""
        return list(self._durable.audit)

    def space(self) -> LogSpace:
        """As LmdbLogStore.space; the bytes of records, chunks and spilled outputs."""
        self._refuse_after_failure()
        durable = self._durable
        sizes = [
            *map(len, durable.records.values()),
            *(len(data) for data, _ in durable.chunks.values()),
            *(len(batch.payload) for batch in durable.spilled.values()),
        ]
        return LogSpace(sum(sizes), self.free_bytes)

    def write_checkpoint_chunk(self, checkpoint_id: int, index: int, data: Readable) -> None:
        """As LmdbLogStore.write_checkpoint_chunk."""
        self._refuse_after_failure()
        if not data:
            return
        if index == 0:
            require(checkpoint_id not in self._durable.checkpoints, f"checkpoint {checkpoint_id} is complete already")
            self._drop_chunks(checkpoint_id, checkpoint_id + 1)
            self._pending = PendingBlob(checkpoint_id)
        pending = self._pending
        require(
            pending is not None and (pending.checkpoint_id, pending.chunk_count) == (checkpoint_id, index),
            f"chunk {index} of checkpoint {checkpoint_id} does not follow the chunk before it: {pending}",
        )
        self._fail_if_asked()
        self._durable.chunks[checkpoint_id, index] = (bytes(data), crc64(data))
        if pending is not None:
            pending.add(data)

    def read_checkpoint_chunk(self, checkpoint_id: int, index: int) -> bytes:
        """As LmdbLogStore.read_checkpoint_chunk."""
        self._refuse_after_failure()
        data, check = self._durable.chunks.get((checkpoint_id, index), (b"", 0))
        if not data and checkpoint_id not in self._durable.checkpoints:
            raise DamagedCheckpointError(f"checkpoint {checkpoint_id} is not in the log", checkpoint_id)
        if data and crc64(data) != check:
            self._damaged_checkpoint_ids.add(checkpoint_id)
            raise DamagedCheckpointError(f"chunk {index} of checkpoint {checkpoint_id} is damaged", checkpoint_id)
        return data

    def cut(self, sequence_id: int) -> None:
        """Remove the records from ``sequence_id`` on and the checkpoints that have seen them, as `immortal recover`."""
        self._refuse_after_failure()
        durable = self._durable
        for removed in [number for number in durable.records if number >= sequence_id]:
            del durable.records[removed]
        for header in [header for header in durable.checkpoints.values() if header.sequence_id >= sequence_id]:
            del durable.checkpoints[header.checkpoint_id]
            self._drop_chunks(header.checkpoint_id, header.checkpoint_id + 1)
        durable.versions = [start for start in durable.versions if start.sequence_id < sequence_id]
        durable.verdicts = {key: verdict for key, verdict in durable.verdicts.items() if key[0] < sequence_id}
        durable.letters = {key: letter for key, letter in durable.letters.items() if key[0] < sequence_id}
        durable.suspect = NO_SUSPECT
        if durable.cut_sequence_id is None or sequence_id < durable.cut_sequence_id:
            durable.cut_sequence_id = sequence_id

    def trim(self, *, keep_checkpoints: int | None, keep_since_ns: int | None = None) -> bool:
        """As LmdbLogStore.trim; a step is bounded in records only."""
        self._refuse_after_failure()
        durable = self._durable
        for key, spilled in list(durable.spilled.items()):
            if spilled.last_position <= durable.acknowledged.get(spilled.destination, 0):
                del durable.spilled[key]
        if keep_checkpoints is None and keep_since_ns is None:
            return False
        oldest = Retention(keep_checkpoints, keep_since_ns).oldest_kept(
            header
            for checkpoint_id, header in sorted(durable.checkpoints.items(), reverse=True)
            if checkpoint_id not in self._damaged_checkpoint_ids
        )
        if oldest is None:
            return False
        for checkpoint_id in [key for key in durable.checkpoints if key < oldest.checkpoint_id]:
            del durable.checkpoints[checkpoint_id]
        self._drop_chunks(0, oldest.checkpoint_id)
        first, _ = self._first_and_last()
        removed_end = min(first + STEP_ROWS_MAX, oldest.sequence_id + 1)
        for sequence_id in range(first, removed_end):
            del durable.records[sequence_id]
            durable.trimmed_sequence_id = sequence_id
        durable.verdicts = {key: verdict for key, verdict in durable.verdicts.items() if key[0] >= removed_end}
        for key, batch in list(durable.impulses.items()):
            mark = oldest.outputs.get(batch.destination)
            position = min(mark.position, durable.acknowledged.get(batch.destination, 0)) if mark is not None else 0
            if batch.last_position <= position:
                del durable.impulses[key]
        return removed_end <= oldest.sequence_id

    def close(self) -> None:
        self._failure = self._failure or LogError("this log is closed")

    def _first_and_last(self) -> tuple[int, int]:
        first = self._durable.trimmed_sequence_id + 1
        return first, first + len(self._durable.records) - 1

    def _drop_chunks(self, first_checkpoint_id: int, end_checkpoint_id: int) -> None:
        for key in [key for key in self._durable.chunks if first_checkpoint_id <= key[0] < end_checkpoint_id]:
            del self._durable.chunks[key]

    def _fail_if_asked(self) -> None:
        if self._fail_next is not None:
            self._failure, self._fail_next = self._fail_next, None
            raise self._failure

    def _refuse_after_failure(self) -> None:
        if self._failure is not None:
            raise type(self._failure)(*self._failure.args)


def _update(table: dict[Key, Value], changed: Mapping[Key, Value | None]) -> None:
    """None removes."""
    for key, value in changed.items():
        if value is None:
            table.pop(key, None)
        else:
            table[key] = value
