"""Records from rows of the table of messages."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from immortal.pipeline.errors import SourceError
from immortal.pipeline.plain import KIND_NAMES, RPC_KIND_NAMES, RPC_TYPE_NAMES
from immortal.protocol import decoding
from immortal.protocol.batch import encode_batch
from immortal.protocol.errors import LocalProtocolError
from immortal.protocol.messages import MessageType, encode_incoming_rpc, encode_message
from immortal.protocol.record import encode_record
from immortal.protocol.trailer import BatchKind, BatchSource, Trailer, encode_trailer

Row = Mapping[str, Any]

_RECORD_KEY = struct.Struct(">Q")
_MESSAGE_KEY = struct.Struct(">QI")
encode_row = msgspec.msgpack.Encoder().encode
decode_row = decoding.Decoder(dict[str, Any]).decode


def row_key(sequence_id: int | None, index: int | None = 0, *, whole: bool = False) -> bytes:
    """Where a row stands in its log, in an order that is that of bytes. Raises SourceError."""
    try:
        return _RECORD_KEY.pack(sequence_id) if whole else _MESSAGE_KEY.pack(sequence_id, index)
    except struct.error:
        what = f"sequence_id {sequence_id}" if whole else f"sequence_id {sequence_id}, index {index}"
        raise SourceError(f"a row with {what} has no place in a log; leave the rows of damaged records out") from None


def encode_record_of(rows: Sequence[Row], instance: str, committer_id: int) -> bytes:
    """The record and trailer of its messages' ``rows``, in order. Raises SourceError."""
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
    """Neighbours that continue one stream, sent at one time, make a batch."""

    def origin(numbered: tuple[int, Row]) -> tuple[object, ...]:
        number, row = numbered
        return row["kind"], row["source"], row["sent_ns"], row["position"] - number

    for (kind, source, _, _), group in itertools.groupby(enumerate(rows), origin):
        members = [row for _, row in group]
        batch_kind = BatchKind(KIND_NAMES.index(str(kind)))
        named = batch_kind in (BatchKind.STREAM, BatchKind.CLIENT) and source != instance
        name = str(source) if named else ""
        if batch_kind == BatchKind.INITIAL:
            if len(members) != 1:
                raise SourceError(f"record {members[0]['sequence_id']} has {len(members)} initial messages")
            payload = encode_message(MessageType.INITIAL_MESSAGE, _initial(members[0]))
            front = b""
        else:
            payload = b"".join(map(_rpc, members))
            front = encode_batch(payload, len(members))
        first = members[0]
        yield BatchSource(batch_kind, name, first["position"], len(members), first["sent_ns"]), front + payload


def _rpc(row: Row) -> bytes:
    rpc_type, kind = RPC_TYPE_NAMES.index(row["rpc_type"]), RPC_KIND_NAMES.index(row["rpc_kind"])
    return encode_incoming_rpc(row["method_id"], rpc_type, row["arguments"], kind)


def _initial(row: Row) -> bytes:
    return bytes(row["arguments"]) if row["method_id"] is None else _rpc(row)
