"""Writer of rows to a log: each task writes its rows, sorted, to an LMDB file of its own; the commit joins them.

Rows of the table ``raw`` give the records byte for byte. Rows of ``messages`` give new records with the same messages,
without output marks and record times. Checkpoints are not written: such a log is only read and verified.
"""

from __future__ import annotations

import heapq
import itertools
import os
import shutil
import struct
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import lmdb
import msgspec
import pyarrow as pa
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from immortal.coordinator.core.interfaces import IMPULSES, ClientPosition, SourcePosition, Transaction
from immortal.coordinator.log.format import SEQUENCE_KEY
from immortal.coordinator.log.identity import verify_value
from immortal.coordinator.log.open import create_log, log_exists
from immortal.coordinator.log.record_contents import KIND_NAMES, RPC_KIND_NAMES, RPC_TYPE_NAMES
from immortal.coordinator.log.store import RowLogStore
from immortal.pipeline.errors import SourceError
from immortal.pipeline.reading import folder_of, paths_of
from immortal.pipeline.source import number
from immortal.pipeline.tables import RAW
from immortal.protocol import decoding
from immortal.protocol.batch import encode_batch
from immortal.protocol.client_frames import CLIENTS
from immortal.protocol.errors import LocalProtocolError, RemoteProtocolError
from immortal.protocol.files import FILE_MODE, make_folder, sync_folder
from immortal.protocol.messages import MessageType, encode_incoming_rpc, encode_message
from immortal.protocol.record import COMMITTER_ID_MAX, decode_header, encode_record
from immortal.protocol.trailer import BatchKind, BatchSource, Trailer, encode_trailer

_PART_MAP_SIZE_BYTES = 1 << 40  # sparse
_COMMIT_SIZE_BYTES = 8 << 20
_COMMIT_ROWS_MAX = 10_000

Rows = Iterator[tuple[bytes, bytes]]
Value = TypeVar("Value", str, int)


class PartWritten(WriterCommitMessage):
    """Output of one task. ``folder`` is None if it had no rows."""

    def __init__(self, folder: str | None, instances: set[str], committer_ids: set[int]) -> None:
        self.folder = folder
        self.instances = instances
        self.committer_ids = committer_ids


class Writer(DataSourceArrowWriter):
    """Writer of ``df.write.format("immortal").mode("append").save(folder)``; ``folder`` must hold no log yet."""

    def __init__(self, options: Mapping[str, str], schema: StructType, *, overwrite: bool) -> None:
        paths = paths_of(options)
        if len(paths) != 1:
            raise SourceError(f"a log is written to one folder, {len(paths)} were given")
        self._folder = Path(folder_of(paths[0])).absolute()
        if overwrite:
            raise SourceError('a log is never overwritten: write with mode("append"), to a folder that holds no log')
        self._require_no_log()
        self._table = _table_of(schema)
        committer_id = number(options, "committerId", 0)
        if committer_id > COMMITTER_ID_MAX:
            raise SourceError(f"option committerId: {committer_id}: at most {COMMITTER_ID_MAX}")
        self._committer_id = committer_id or None
        self._staging = self._folder.parent / f".{self._folder.name}.{uuid.uuid4().hex}"

    def write(self, iterator: Iterator[pa.RecordBatch]) -> PartWritten:
        """Write the rows of one task, in a worker. Raises SourceError for rows that make no log."""
        part = self._staging / f"part-{uuid.uuid4().hex}"
        instances: set[str] = set()
        committer_ids: set[int] = set()
        environment: lmdb.Environment | None = None
        try:
            for batch in iterator:
                if environment is None and batch.num_rows:
                    make_folder(part)
                    environment = _open_part(part)
                if environment is not None:
                    self._put(environment, batch)
                    instances |= set(batch.column("instance").unique().to_pylist())
                    if "committer_id" in batch.schema.names:
                        committer_ids |= set(batch.column("committer_id").unique().to_pylist())
        finally:
            if environment is not None:
                environment.close()
        return PartWritten(None if environment is None else str(part), instances, committer_ids)

    def _put(self, environment: lmdb.Environment, batch: pa.RecordBatch) -> None:
        with environment.begin(write=True) as transaction:
            for key, value in _raw_rows(batch) if self._table == "raw" else _message_rows(batch):
                if not transaction.put(key, value, overwrite=False):
                    raise _twice(key)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Build the log beside its place when all tasks are done, then move it there; on the driver."""
        written = [message for message in messages if isinstance(message, PartWritten) and message.folder is not None]
        try:
            self._require_no_log()
            instance = _only("instances", {name for part in written for name in part.instances})
            committer_ids = {committer_id for part in written for committer_id in part.committer_ids}
            if self._committer_id is not None:
                committer_ids.add(self._committer_id)
            with ExitStack() as stack:
                parts = [_rows_of(stack, Path(part.folder or "")) for part in written]
                rows = _merged(parts)
                self._make_log(instance, committer_ids, rows)
            make_folder(self._folder.parent)
            os.rename(self._staging / "log", self._folder)
            sync_folder(self._folder.parent)
        finally:
            shutil.rmtree(self._staging, ignore_errors=True)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        shutil.rmtree(self._staging, ignore_errors=True)

    def _require_no_log(self) -> None:
        if log_exists(self._folder) or (self._folder.exists() and any(self._folder.iterdir())):
            raise SourceError(f"{self._folder} is not empty: a log is written to a folder of its own")

    def _make_log(self, instance: str, committer_ids: set[int], rows: Rows) -> None:
        first = next(rows, None)
        if first is None:
            raise SourceError("there are no rows, so there is no log to write")
        first_sequence_id = SEQUENCE_KEY.unpack_from(first[0])[0]
        if self._table == "raw":
            try:
                committer_ids = committer_ids | {decode_header(first[1]).committer_id}
            except RemoteProtocolError as error:
                raise SourceError(f"the value of record {first_sequence_id} is no record: {error}") from None
        committer_id = _only("committers", committer_ids) if committer_ids else None
        rows = itertools.chain([first], rows)
        # Records before the first one were trimmed from the log that the rows are from: this log says so too.
        store = create_log(
            self._staging / "log", instance, committer_id=committer_id, first_sequence_id=first_sequence_id
        )
        try:
            own_id = store.identity.committer_id
            values = rows if self._table == "raw" else _records(rows, instance, own_id)
            _fill(store, values, first_sequence_id, own_id)
        finally:
            store.close()


def _table_of(schema: StructType) -> str:
    for table, needed in (("raw", RAW.names), ("messages", _MESSAGE_COLUMNS)):
        if set(needed) <= set(schema.names):
            return table
    raise SourceError(
        f"rows with the columns {', '.join(schema.names)} make no log: those of the table raw"
        f" ({', '.join(RAW.names)}) or messages ({', '.join(_MESSAGE_COLUMNS)}) were expected"
    )


_MESSAGE_COLUMNS = [
    *("instance", "sequence_id", "index", "time_ns", "kind", "source", "position", "sent_ns"),
    *("rpc_kind", "rpc_type", "method_id", "arguments"),
]


def _raw_rows(batch: pa.RecordBatch) -> Rows:
    for sequence_id, value in zip(batch.column("sequence_id"), batch.column("value"), strict=True):
        key = row_key(sequence_id.as_py(), whole=True)
        if not value.is_valid:
            raise SourceError(f"the row of record {sequence_id} has no value")
        yield key, value.as_buffer()


def _message_rows(batch: pa.RecordBatch) -> Rows:
    names = [name for name in (*_MESSAGE_COLUMNS, "ok") if name in batch.schema.names]
    for row in batch.select(names).to_pylist():
        yield row_key(row["sequence_id"], row["index"]), encode_row(row)


def _open_part(folder: Path, *, readonly: bool = False) -> lmdb.Environment:
    """Open one task's output: sorted rows, and no log. It is read once and removed, so nothing is synced."""
    if readonly:
        return lmdb.open(str(folder), readonly=True, lock=False)
    return lmdb.open(str(folder), map_size=_PART_MAP_SIZE_BYTES, sync=False, mode=FILE_MODE)


def _rows_of(stack: ExitStack, part: Path) -> Rows:
    if not part.is_dir():
        raise SourceError(f"{part} is not here: tasks and driver need one file system where the log is written")
    environment = stack.enter_context(_open_part(part, readonly=True))
    transaction = stack.enter_context(environment.begin())
    return iter(stack.enter_context(transaction.cursor()).iternext())


def _merged(parts: Iterable[Rows]) -> Rows:
    previous = None
    for key, value in heapq.merge(*parts):
        if key == previous:
            raise _twice(key)
        previous = key
        yield key, value


def _twice(key: bytes) -> SourceError:
    return SourceError(f"there are two rows for the same place, in record {SEQUENCE_KEY.unpack_from(key)[0]}")


def _records(rows: Rows, instance: str, committer_id: int) -> Rows:
    """Convert rows of messages, sorted by sequence ID and index, to records."""
    group: list[dict[str, object]] = []
    current = None
    for key, value in rows:
        if key[: SEQUENCE_KEY.size] != current:
            if current is not None:
                yield current, encode_record_of(group, instance, committer_id)
            current, group = key[: SEQUENCE_KEY.size], []
        group.append(decode_row(value))
    if current is not None:
        yield current, encode_record_of(group, instance, committer_id)


def _fill(store: RowLogStore, values: Rows, first_sequence_id: int, committer_id: int) -> None:
    """Write ``values`` to ``store``. Raises SourceError for a gap, DamagedLogError for a damaged record."""
    expected = first_sequence_id
    transaction = Transaction()
    size_bytes = 0
    for key, value in values:
        sequence_id = SEQUENCE_KEY.unpack(key)[0]
        if sequence_id != expected:
            raise SourceError(f"record {expected} is missing: the next row is of record {sequence_id}")
        expected += 1
        _, trailer = verify_value(value, sequence_id, committer_id)
        for batch in trailer.batches:
            if batch.kind == BatchKind.CLIENT:  # its replies are not in the records
                client_id = batch.name.removeprefix(CLIENTS)
                known = ClientPosition(batch.last_position, batch.last_position, trailer.time_ns)
                transaction.clients[client_id] = known
            elif batch.kind != BatchKind.INITIAL:  # the record does not name the sender's log: 0 is "not known"
                name = batch.name if batch.kind == BatchKind.STREAM else IMPULSES
                transaction.sources[name] = SourcePosition(0, 0, batch.last_position)
        transaction.records.append((sequence_id, value))
        size_bytes += len(value)
        if size_bytes >= _COMMIT_SIZE_BYTES or len(transaction.records) >= _COMMIT_ROWS_MAX:
            store.commit(transaction)
            transaction, size_bytes = Transaction(), 0
    store.commit(transaction)


def _only(what: str, values: set[Value]) -> Value:
    if len(values) != 1:
        shown = ", ".join(sorted(map(str, values))[:5]) or "none"
        raise SourceError(f"a log has one name and one committer; the rows are of several {what}: {shown}")
    return next(iter(values))


# Records from rows of the table of messages.


Row = Mapping[str, Any]

_MESSAGE_KEY = struct.Struct(">QI")
encode_row = msgspec.msgpack.Encoder().encode
decode_row = decoding.Decoder(dict[str, Any]).decode


def row_key(sequence_id: int | None, index: int | None = 0, *, whole: bool = False) -> bytes:
    """Return the key of a row in its log; keys sort by their bytes. Raises SourceError."""
    try:
        return SEQUENCE_KEY.pack(sequence_id) if whole else _MESSAGE_KEY.pack(sequence_id, index)
    except struct.error:
        what = f"sequence_id {sequence_id}" if whole else f"sequence_id {sequence_id}, index {index}"
        raise SourceError(f"a row with {what} has no place in a log; leave the rows of damaged records out") from None


def encode_record_of(rows: Sequence[Row], instance: str, committer_id: int) -> bytes:
    """Return the record and trailer of the messages in ``rows``, in order. Raises SourceError."""
    sequence_id, time_ns = rows[0]["sequence_id"], rows[0]["time_ns"]
    for index, row in enumerate(rows):
        if row.get("ok") is False:
            raise SourceError(f"record {sequence_id} is damaged: leave the rows out that are not ok")
        if row["index"] != index or row["time_ns"] != time_ns:
            raise SourceError(f"record {sequence_id}: message {index} is missing, or of another time")
    try:
        parts = list(_batches(rows, instance))
        record = encode_record(committer_id, sequence_id, b"".join(chunk for _, chunk in parts))
        trailer = Trailer(time_ns, [source for source, _ in parts])
        return record + encode_trailer(trailer, int.from_bytes(record[8:16], "little"))
    except (LocalProtocolError, TypeError, ValueError) as error:
        raise SourceError(f"record {sequence_id} cannot be made of its rows: {error}") from None


def _batches(rows: Sequence[Row], instance: str) -> Iterator[tuple[BatchSource, bytes]]:
    """Yield batches of neighbours that continue one stream and were sent at one time."""

    def origin(numbered: tuple[int, Row]) -> tuple[object, ...]:
        number, row = numbered
        return row["kind"], row["source"], row["sent_ns"], row["position"] - number

    for (kind, source, _, _), group in itertools.groupby(enumerate(rows), origin):
        members = [row for _, row in group]
        first = members[0]
        batch_kind = BatchKind(KIND_NAMES.index(str(kind)))
        named = batch_kind in (BatchKind.STREAM, BatchKind.CLIENT) and source != instance
        name = str(source) if named else ""
        if batch_kind == BatchKind.INITIAL:
            if len(members) != 1:
                raise SourceError(f"record {members[0]['sequence_id']} has {len(members)} initial messages")
            content = bytes(first["arguments"]) if first["method_id"] is None else _rpc(first)
            payload = encode_message(MessageType.INITIAL_MESSAGE, content)
            front = b""
        else:
            payload = b"".join(map(_rpc, members))
            front = encode_batch(payload, len(members))
        yield BatchSource(batch_kind, name, first["position"], len(members), first["sent_ns"]), front + payload


def _rpc(row: Row) -> bytes:
    rpc_type, kind = RPC_TYPE_NAMES.index(row["rpc_type"]), RPC_KIND_NAMES.index(row["rpc_kind"])
    return encode_incoming_rpc(row["method_id"], rpc_type, row["arguments"], kind)
