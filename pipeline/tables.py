"""Tables of a log: the columns' names, Arrow types and order, and the rows that the log's values give.

Rows are Arrow batches with only the requested columns. Spark's form of the columns is in `source`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from immortal.appsdk.handlers.decorators import DERIVED_METHOD_ID_MIN, METHOD_ID_MAX, method_id_of_name
from immortal.coordinator.core.errors import DamagedCheckpointError, DamagedLogError
from immortal.coordinator.log import format as log_format
from immortal.coordinator.log import view_queries as log_reading
from immortal.coordinator.log.format import StoredHeader
from immortal.coordinator.log.reader import LogReader
from immortal.coordinator.log.record_contents import (
    KIND_NAMES,
    RPC_KIND_NAMES,
    RPC_TYPE_NAMES,
    DecodedRecord,
    read_record,
)
from immortal.pipeline.arguments import ArgumentDecoder
from immortal.pipeline.decode import (
    Headers,
    Longs,
    Messages,
    Values,
    binaries,
    decode_headers,
    decode_messages,
    decode_names,
    decode_trailers,
    select_rows,
    usual_rows,
    verify_checks,
)
from immortal.pipeline.reading import LogRange
from immortal.pipeline.typed_calls import CallReader
from immortal.protocol import redaction
from immortal.protocol.checksum import crc64
from immortal.protocol.messages import RpcKind
from immortal.protocol.trailer import BatchKind

RECORDS = pa.schema(
    [
        ("instance", pa.string()),
        ("committer_id", pa.int64()),
        ("sequence_id", pa.int64()),
        ("time", pa.timestamp("us", "UTC")),  # when the record was committed, to the microsecond
        ("time_ns", pa.int64()),  # the same since 1970, UTC
        ("size_bytes", pa.int32()),  # header and content, as in the header
        ("message_count", pa.int32()),
        ("ok", pa.bool_()),
        ("reason", pa.string()),  # the damage; null if ok
    ]
)

MESSAGES = pa.schema(
    [
        ("instance", pa.string()),
        ("sequence_id", pa.int64()),
        ("index", pa.int32()),  # in its record, from 0; -1: the whole record is damaged
        ("time_ns", pa.int64()),  # the record's
        ("kind", pa.string()),  # "stream", "impulse", "initial" or "client"
        ("source", pa.string()),  # the sender; the own name for oneself, impulses and the initial message
        ("position", pa.int64()),  # in the stream source -> instance; impulses have a count of their own
        ("sent_ns", pa.int64()),
        ("rpc_kind", pa.string()),  # "call"; an answer is "returned_value", "returned_nothing" or "raised"
        ("rpc_type", pa.string()),  # "async", "fork" or "impulse"
        ("method_id", pa.int32()),
        ("method", pa.string()),  # its name, with the option decode
        ("arguments", pa.binary()),
        ("arguments_json", pa.string()),  # with the option decode
        ("ok", pa.bool_()),
        ("reason", pa.string()),
    ]
)

OUTPUTS = pa.schema(
    [
        ("instance", pa.string()),
        ("sequence_id", pa.int64()),
        ("destination", pa.string()),  # the own name for oneself
        ("position", pa.int64()),  # the last one that this stream had assigned
        ("checksum", pa.int64()),  # CRC-64/XZ up to there, as a signed 64-bit number
    ]
)

CHECKPOINTS = pa.schema(
    [
        ("instance", pa.string()),
        ("checkpoint_id", pa.int64()),
        ("sequence_id", pa.int64()),  # of the last record that it holds
        ("time_ns", pa.int64()),
        ("size_bytes", pa.int64()),
        ("check", pa.int64()),  # CRC-64/XZ of the blob, as a signed 64-bit number
        ("ok", pa.bool_()),
        ("reason", pa.string()),
    ]
)

RAW = pa.schema(
    [
        ("instance", pa.string()),
        ("sequence_id", pa.int64()),
        ("value", pa.binary()),  # record and trailer, byte for byte as stored
    ]
)

TABLES = {"records": RECORDS, "messages": MESSAGES, "outputs": OUTPUTS, "checkpoints": CHECKPOINTS, "raw": RAW}

Columns = dict[str, Callable[[], pa.Array]]
Row = dict[str, Any]

_OF_CALLS = ("instance", "sequence_id", "index", "time_ns", "kind", "source", "position", "sent_ns", "ok", "reason")
CALLS = pa.schema([MESSAGES.field(name) for name in _OF_CALLS])
"""Columns of the messages that are calls of one method, beside those of its arguments."""

WHOLE_RECORD = -1  # index of the only row of a damaged record in the table of messages


@dataclass(frozen=True, slots=True)
class TableReader:
    """Converter of one log's values to the rows of one table."""

    table: str
    schema: pa.Schema
    instance: str
    committer_id: int
    check: bool
    arguments: ArgumentDecoder | None
    calls: CallReader | None = None  # only these messages, with a column for each argument
    plain: bool = False  # no encoded arguments are redacted

    def batches(self, values: Values) -> Iterator[pa.RecordBatch]:
        """Yield the rows of ``values``, in order. Raises DamagedLogError for damage that the table cannot show."""
        headers = decode_headers(values, self.committer_id)
        if self.check:
            verify_checks(values, headers)
        build = {"records": self._records, "messages": self._messages, "outputs": self._outputs, "raw": self._raw}
        columns, record = build[self.table](values, headers)
        usual = pa.RecordBatch.from_arrays([columns[name]() for name in self.schema.names], schema=self.schema)
        unusual = np.flatnonzero(~headers.usual).tolist() if self.table != "raw" else []
        if not unusual:
            yield usual
            return
        plain_rows: list[Row] = []
        plain_record: list[int] = []
        for index in unusual:
            rows = self._plain_rows(values.value(index), int(values.sequence_ids[index]))
            plain_rows += rows
            plain_record += [index] * len(rows)
        order = np.argsort(np.concatenate([record, np.array(plain_record, np.int64)]), kind="stable")
        both = pa.Table.from_batches([usual, self._from_rows(plain_rows)])
        yield from both.take(pa.array(order)).combine_chunks().to_batches()

    def damaged(self, sequence_id: int, reason: str) -> Iterator[pa.RecordBatch]:
        """Yield the row that says that a record, or several from it on, cannot be read. Raises as :meth:`batches`."""
        if rows := self._damaged_rows(sequence_id, reason):
            yield self._from_rows(rows)

    def _from_rows(self, rows: Iterable[Row]) -> pa.RecordBatch:
        names = self.schema.names
        return pa.RecordBatch.from_pylist([{name: row.get(name) for name in names} for row in rows], schema=self.schema)

    def _repeated(self, value: object, name: str, count: int) -> pa.Array:
        return pa.repeat(pa.scalar(value, self.schema.field(name).type), count)

    def _constants(self, count: int, **values: object) -> Columns:
        return {name: lambda n=name, v=value: self._repeated(v, n, count) for name, value in values.items()}  # type: ignore[misc]

    # --- the usual ones ----------------------------------------------------------------------------------------------

    def _raw(self, values: Values, headers: Headers) -> tuple[Columns, Longs]:
        unusual = np.flatnonzero(~headers.usual)
        if self.check and unusual.size:
            index = int(unusual[0])
            sequence_id = int(values.sequence_ids[index])
            record = read_record(values.value(index), sequence_id, self.committer_id, whole=False)
            if isinstance(record, str):
                self._damaged_rows(sequence_id, record)
        columns = self._constants(len(values.start), instance=self.instance)
        columns["sequence_id"] = lambda: pa.array(values.sequence_ids)
        columns["value"] = lambda: binaries(values.raw, values.start, values.end)
        return columns, np.arange(len(values.start))

    def _records(self, values: Values, headers: Headers) -> tuple[Columns, Longs]:
        trailers = decode_trailers(values, headers, with_marks=True)
        batches, usual = trailers.batches, headers.usual
        for rows in (batches, trailers.marks):
            decode_names(values, headers, rows)  # a name that is no UTF-8 makes its record unusual
        record = np.flatnonzero(usual)
        time_ns = trailers.time_ns[record]
        columns = self._constants(
            len(record), instance=self.instance, committer_id=self.committer_id, ok=True, reason=None
        )
        columns |= {
            "sequence_id": lambda: pa.array(values.sequence_ids[record]),
            "time": lambda: pa.array(time_ns // 1000).cast(self.schema.field("time").type),
            "time_ns": lambda: pa.array(time_ns),
            "size_bytes": lambda: pa.array(headers.size_bytes[record].astype(np.int32)),
            "message_count": lambda: pa.array(
                np.bincount(batches.record, batches.count, len(usual))[record].astype(np.int64).astype(np.int32)
            ),
        }
        return columns, record

    def _outputs(self, values: Values, headers: Headers) -> tuple[Columns, Longs]:
        trailers = decode_trailers(values, headers, with_marks=True)
        marks = trailers.marks
        decode_names(values, headers, trailers.batches)
        number, names = decode_names(values, headers, marks)
        number = number.to_numpy()[headers.usual[marks.record]]
        marks = usual_rows(marks, headers.usual)
        columns = self._constants(len(marks.record), instance=self.instance)
        columns |= {
            "sequence_id": lambda: pa.array(values.sequence_ids[marks.record]),
            "destination": lambda: self._named(names, number),
            "position": lambda: pa.array(marks.position),
            "checksum": lambda: pa.array(marks.checksum),
        }
        return columns, marks.record

    def _messages(self, values: Values, headers: Headers) -> tuple[Columns, Longs]:
        trailers = decode_trailers(values, headers, with_marks=False)
        batches = trailers.batches
        number, names = decode_names(values, headers, batches)
        messages = decode_messages(values, headers, batches)
        if self.calls is not None:
            are_calls = messages.rpc_kind == RpcKind.CALL
            messages = select_rows(messages, are_calls & np.isin(messages.method_id, self.calls.method_ids))
        record = messages.record
        columns = self._constants(len(record), instance=self.instance, ok=True, reason=None)
        columns |= {
            "sequence_id": lambda: pa.array(values.sequence_ids[record]),
            "index": lambda: pa.array(messages.index.astype(np.int32)),
            "time_ns": lambda: pa.array(trailers.time_ns[record]),
            "kind": lambda: pa.array(KIND_NAMES).take(pa.array(batches.kind[messages.batch])),
            "source": lambda: self._named(names, number.to_numpy()[messages.batch]),
            "position": lambda: pa.array(messages.position),
            "sent_ns": lambda: pa.array(batches.sent_ns[messages.batch]),
            "rpc_kind": lambda: pa.array(RPC_KIND_NAMES).take(pa.array(messages.rpc_kind)),
            "rpc_type": lambda: pa.array(RPC_TYPE_NAMES).take(pa.array(messages.rpc_type)),
            "method_id": lambda: pa.array(messages.method_id.astype(np.int32)),
            "arguments": lambda: self._redacted(
                binaries(values.raw, messages.arguments_start, messages.arguments_end), messages.method_id
            ),
        }
        columns |= self._decoded(values, messages) if self.calls is None else self._typed(values, messages, self.calls)
        return columns, record

    def _typed(self, values: Values, messages: Messages, calls: CallReader) -> Columns:
        names = calls.names & set(self.schema.names)
        rows = [calls.row(*each) or {} for each in _parts(values, messages)] if names else []
        return {
            name: lambda n=name: pa.array([row.get(n) for row in rows], self.schema.field(n).type)  # type: ignore[misc]
            for name in names
        }

    def _decoded(self, values: Values, messages: Messages) -> Columns:
        decoder = self.arguments
        names = {"method", "arguments_json", "reason"} if decoder is not None else {"method", "arguments_json"}
        if decoder is None or not names & set(self.schema.names):
            return self._constants(len(messages.record), method=None, arguments_json=None)
        calls = [decoder.decode(*each) for each in _parts(values, messages)]
        return {
            "method": lambda: pa.array([call.method for call in calls], pa.string()),
            "arguments_json": lambda: pa.array([call.arguments_json for call in calls], pa.string()),
            "reason": lambda: pa.array([call.problem for call in calls], pa.string()),
        }

    def _redacted(self, arguments: pa.Array, method_ids: Longs) -> pa.Array:
        if self.plain or not redaction.rules():
            return arguments
        hidden = {one: is_redacted(one) for one in set(method_ids.tolist())}
        pairs = zip(arguments.to_pylist(), method_ids.tolist(), strict=True)
        return pa.array([redaction.placeholder(one) if hidden[each] else one for one, each in pairs], pa.binary())

    def _named(self, names: Sequence[str], number: npt.NDArray[Any]) -> pa.Array:
        return pa.array([name or self.instance for name in names], pa.string()).take(pa.array(number))

    # --- the others --------------------------------------------------------------------------------------------------

    def _plain_rows(self, value: memoryview, sequence_id: int) -> list[Row]:
        record = read_record(value, sequence_id, self.committer_id, whole=self.table == "messages")
        if isinstance(record, str):
            return self._damaged_rows(sequence_id, record)
        rows = {"records": self._record_row, "messages": self._message_rows, "outputs": self._output_rows}[self.table]
        return list(rows(record))

    def _damaged_rows(self, sequence_id: int, reason: str) -> list[Row]:
        row: Row = {"instance": self.instance, "sequence_id": sequence_id, "ok": False, "reason": reason}
        if self.table == "messages":
            return [{**row, "index": WHOLE_RECORD}]
        if self.table == "records":
            return [{**row, "committer_id": self.committer_id}]
        if self.table == "raw" and self.check:
            raise DamagedLogError(
                f"the log of {self.instance!r}: {reason}; option check=false reads what is there as it is", sequence_id
            )
        return []

    def _record_row(self, record: DecodedRecord) -> Iterator[Row]:
        time_ns = record.trailer.time_ns
        yield {
            "instance": self.instance,
            "committer_id": self.committer_id,
            "sequence_id": record.header.sequence_id,
            "time": time_ns // 1000,
            "time_ns": time_ns,
            "size_bytes": record.header.size_bytes,
            "message_count": sum(batch.count for batch in record.trailer.batches),
            "ok": True,
        }

    def _output_rows(self, record: DecodedRecord) -> Iterator[Row]:
        for mark in record.trailer.outputs:
            yield {
                "instance": self.instance,
                "sequence_id": record.header.sequence_id,
                "destination": mark.destination or self.instance,
                "position": mark.position,
                "checksum": signed(mark.checksum),
            }

    def _message_rows(self, record: DecodedRecord) -> Iterator[Row]:
        for index, message in enumerate(record.messages):
            row = {
                "instance": self.instance,
                "sequence_id": record.header.sequence_id,
                "index": index,
                "time_ns": record.trailer.time_ns,
                "kind": KIND_NAMES[message.source.kind],
                "source": message.source.name or self.instance,
                "position": message.position,
                "sent_ns": message.source.send_time_ns,
                "arguments": message.arguments,
                "ok": True,
            }
            rpc, is_initial = message.rpc, message.source.kind == BatchKind.INITIAL
            if not self.plain and is_redacted(None if rpc is None else rpc.method_id):
                row["arguments"] = redaction.placeholder(message.arguments)
            if self.calls is not None:
                if rpc is None or is_initial:
                    continue
                columns = self.calls.row(rpc.kind, rpc.rpc_type, rpc.method_id, message.arguments)
                if columns is None:
                    continue
                row |= columns
            elif rpc is not None:
                row |= {"rpc_kind": RPC_KIND_NAMES[rpc.kind], "rpc_type": RPC_TYPE_NAMES[rpc.rpc_type]}
                row["method_id"] = rpc.method_id
                if self.arguments is not None and not is_initial:
                    call = self.arguments.decode(rpc.kind, rpc.rpc_type, rpc.method_id, message.arguments)
                    row |= {"method": call.method, "arguments_json": call.arguments_json, "reason": call.problem}
            yield row


def is_redacted(method_id: int | None) -> bool:
    """Return True if a rule of redaction may be for the method, of which only the ID is known."""
    named = {rule[1] for rule in redaction.rules().rules}
    named |= {"immortal_receive"} if named else set()  # its arguments are rows of a state
    is_derived = method_id is not None and DERIVED_METHOD_ID_MIN <= method_id <= METHOD_ID_MAX
    is_other = is_derived and "*" not in named and method_id not in {method_id_of_name(name) for name in named}
    return bool(redaction.rules().anywhere) or (bool(named) and not is_other)


def _parts(values: Values, messages: Messages) -> Iterator[tuple[int, int, int, memoryview]]:
    """Yield the kind, the type, the method's ID and the arguments of each message."""
    view = memoryview(values.raw)
    columns = (messages.rpc_kind, messages.rpc_type, messages.method_id)
    bounds = zip(messages.arguments_start.tolist(), messages.arguments_end.tolist(), strict=True)
    for kind, rpc_type, method_id, (start, end) in zip(*(column.tolist() for column in columns), bounds, strict=True):
        yield kind, rpc_type, method_id, view[start:end]


def signed(checksum: int) -> int:
    """Return a CRC as Spark's long holds it."""
    return checksum - (1 << 64) if checksum >= 1 << 63 else checksum


# The table of checkpoints: each header, and if its blob agrees with it.


def read(log: LogReader, wanted: LogRange, check: bool, columns: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield a row for each checkpoint, oldest first. Raises DamagedLogError if their table cannot be read."""
    with log.view() as view:
        headers = list(log_reading.stored_headers(view))
    for checkpoint_id, stored in headers:
        row: dict[str, Any] = {"instance": wanted.instance, "checkpoint_id": checkpoint_id}
        if isinstance(stored, DamagedLogError):
            row |= {"ok": False, "reason": str(stored)}
        else:
            header = stored.header
            reason = _problem(log, stored) if check else None
            if reason is not None and not _is_there(log, checkpoint_id):
                continue  # its live writer has trimmed it
            row |= {
                "sequence_id": header.sequence_id,
                "time_ns": header.time_ns,
                "size_bytes": header.size_bytes,
                "check": signed(header.check),
                "ok": reason is None,
                "reason": reason,
            }
        yield pa.RecordBatch.from_pylist([{name: row.get(name) for name in columns.names}], schema=columns)


def _problem(log: LogReader, stored: StoredHeader) -> str | None:
    header = stored.header
    size_bytes = check = 0
    try:
        for index in itertools.count():
            with log.view() as view:
                chunk = log_reading.read_chunk(view, header.checkpoint_id, index)
            if not chunk:
                break
            log.count_bytes_touched(len(chunk))
            size_bytes += len(chunk)
            check = crc64(chunk, check)
        with log.view() as view:
            log_reading.check_outputs(view, stored)
    except (DamagedCheckpointError, DamagedLogError) as error:
        return str(error)
    if (size_bytes, check) != (header.size_bytes, header.check):
        return (
            f"its blob has {size_bytes} bytes with CRC {check:016x},"
            f" its header says {header.size_bytes} with {header.check:016x}"
        )
    return None


def _is_there(log: LogReader, checkpoint_id: int) -> bool:
    key = log_format.SEQUENCE_KEY.pack(checkpoint_id)
    with log.view() as view:
        return view.get("checkpoints", key) is not None
