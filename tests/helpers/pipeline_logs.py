"""Logs with known content: records from specifications, and the rows that each table must show for them.

The rows are derived from the specifications, not from the bytes: no decoder takes part.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from immortal.coordinator.core.interfaces import IMPULSES, SourcePosition, Transaction
from immortal.log import RowLogStore, create_log
from immortal.protocol.batch import encode_batch, encode_replayable_batch
from immortal.protocol.extensions import encode_record_time
from immortal.protocol.messages import MessageType, RpcKind, RpcType, encode_incoming_rpc, encode_message
from immortal.protocol.record import encode_record
from immortal.protocol.trailer import BatchKind, BatchSource, OutputMarkEntry, Trailer, encode_trailer
from tests.helpers.synthetic_logs import Input, PlannedRecord, encode_planned

COMMITTER_ID = 77
COMMIT_SIZE_BYTES = 8 << 20
START_NS = 1_700_000_000_000_000_000
KINDS = {
    BatchKind.STREAM: "stream",
    BatchKind.IMPULSES: "impulse",
    BatchKind.INITIAL: "initial",
    BatchKind.CLIENT: "client",
}

Row = dict[str, Any]


@dataclass
class Call:
    method_id: int
    rpc_type: int
    arguments: bytes
    kind: RpcKind = RpcKind.CALL

    def encode(self) -> bytes:
        return encode_incoming_rpc(self.method_id, self.rpc_type, self.arguments, self.kind)


@dataclass
class Batch:
    kind: BatchKind
    source: str
    first_position: int
    sent_ns: int
    calls: list[Call]
    replayable: bool = False  # as a CountReplayableRPCBatch

    def encode(self) -> bytes:
        payload = b"".join(call.encode() for call in self.calls)
        if self.kind is BatchKind.INITIAL:
            return encode_message(MessageType.INITIAL_MESSAGE, payload)
        if self.replayable:
            return encode_replayable_batch(payload, len(self.calls), 0)
        return encode_batch(payload, len(self.calls)) + payload


@dataclass
class RecordSpec:
    sequence_id: int
    time_ns: int
    batches: list[Batch]
    marks: list[tuple[str, int, int]] = field(default_factory=list)
    with_time: bool = True
    committer_id: int = COMMITTER_ID

    def record(self) -> bytes:
        time = encode_record_time(self.time_ns) if self.with_time else b""
        content = time + b"".join(batch.encode() for batch in self.batches)
        return encode_record(self.committer_id, self.sequence_id, content)

    def value(self) -> bytes:
        record = self.record()
        sources = [
            BatchSource(batch.kind, batch.source, batch.first_position, len(batch.calls), batch.sent_ns)
            for batch in self.batches
        ]
        trailer = Trailer(self.time_ns, sources, [OutputMarkEntry(*mark) for mark in self.marks])
        return record + encode_trailer(trailer, int.from_bytes(record[8:16], "little"))


def record_value(sequence_id: int, time_ns: int, first_position: int, payloads: list[bytes]) -> bytes:
    """Return a record of one batch, as a coordinator writes it."""
    batch = Input(BatchKind.STREAM, "sender", first_position, len(payloads), time_ns - 1000, b"".join(payloads))
    record = PlannedRecord(time_ns, [batch], [OutputMarkEntry("receiver", sequence_id + 1, sequence_id)])
    return encode_planned(record, COMMITTER_ID, sequence_id)


def fill_new(folder: Path, records: Iterable[bytes]) -> None:
    """Write a new log of ``records``."""
    store = create_log(folder, "made-up", committer_id=COMMITTER_ID)
    transaction, size_bytes = Transaction(), 0
    for sequence_id, value in enumerate(records):
        transaction.records.append((sequence_id, value))
        size_bytes += len(value)
        if size_bytes >= COMMIT_SIZE_BYTES:
            store.commit(transaction)
            transaction, size_bytes = Transaction(), 0
    store.commit(transaction)
    store.close()


def record_rows(instance: str, specs: Sequence[RecordSpec]) -> list[Row]:
    return [
        {
            "instance": instance,
            "committer_id": spec.committer_id,
            "sequence_id": spec.sequence_id,
            "time_ns": spec.time_ns,
            "size_bytes": len(spec.record()),
            "message_count": sum(len(batch.calls) for batch in spec.batches),
            "ok": True,
            "reason": None,
        }
        for spec in specs
    ]


def message_rows(instance: str, specs: Sequence[RecordSpec]) -> list[Row]:
    found = []
    for spec in specs:
        numbered = [(batch, number) for batch in spec.batches for number in range(len(batch.calls))]
        for index, (batch, number) in enumerate(numbered):
            call = batch.calls[number]
            found.append(
                {
                    "instance": instance,
                    "sequence_id": spec.sequence_id,
                    "index": index,
                    "time_ns": spec.time_ns,
                    "kind": KINDS[batch.kind],
                    "source": batch.source or instance,
                    "position": batch.first_position + number,
                    "sent_ns": batch.sent_ns,
                    "rpc_kind": RpcKind(call.kind).name.lower(),
                    "rpc_type": RpcType(call.rpc_type).name.lower(),
                    "method_id": call.method_id,
                    "method": None,
                    "arguments": call.arguments,
                    "arguments_json": None,
                    "ok": True,
                    "reason": None,
                }
            )
    return found


def output_rows(instance: str, specs: Sequence[RecordSpec]) -> list[Row]:
    return [
        {
            "instance": instance,
            "sequence_id": spec.sequence_id,
            "destination": destination or instance,
            "position": position,
            "checksum": int.from_bytes(checksum.to_bytes(8, "little"), "little", signed=True),
        }
        for spec in specs
        for destination, position, checksum in spec.marks
    ]


def random_specs(seed: int, count: int, *, first_sequence_id: int = 0, messages_max: int = 6) -> list[RecordSpec]:
    """Return records as a coordinator would log them: positions of a stream are consecutive, times never go back."""
    draw = random.Random(seed)
    positions: dict[tuple[BatchKind, str], int] = {}
    time_ns = START_NS + first_sequence_id * 1_000_000
    specs = []
    for sequence_id in range(first_sequence_id, first_sequence_id + count):
        time_ns += draw.randrange(2_000_000)
        batches = []
        if sequence_id == 0:
            batches.append(Batch(BatchKind.INITIAL, "", 1, time_ns - 1, [Call(-1, 1, b"\x90")]))
        for _ in range(draw.randint(0 if sequence_id == 0 else 1, 3)):
            kind, source = draw.choice(
                [
                    (BatchKind.STREAM, "xenia"),
                    (BatchKind.STREAM, "yves"),
                    (BatchKind.STREAM, ""),
                    (BatchKind.IMPULSES, ""),
                ]
            )
            calls = [
                Call(
                    draw.choice([1, 64, 343_311, 1_048_575]),
                    draw.choice([0, 1, 1, 2]),
                    draw.randbytes(draw.randrange(40)),
                    draw.choice([RpcKind.CALL, RpcKind.CALL, RpcKind.CALL, *RpcKind]),
                )
                for _ in range(draw.randint(1, messages_max))
            ]
            first = positions.get((kind, source), 1)
            positions[kind, source] = first + len(calls)
            batches.append(Batch(kind, source, first, time_ns - draw.randrange(1, 1_000_000), calls))
        marks = [(name, sequence_id + 1, draw.getrandbits(64)) for name in draw.sample(["carol", "dave", ""], 2)]
        specs.append(RecordSpec(sequence_id, time_ns, batches, marks))
    return specs


def transaction_of(specs: Sequence[RecordSpec]) -> Transaction:
    sources = {
        batch.source if batch.kind is BatchKind.STREAM else IMPULSES: SourcePosition(
            5, 1, batch.first_position + len(batch.calls) - 1
        )
        for spec in specs
        for batch in spec.batches
        if batch.kind is not BatchKind.INITIAL
    }
    return Transaction(records=[(spec.sequence_id, spec.value()) for spec in specs], sources=sources)


def make_log(folder: Path, instance: str, specs: Sequence[RecordSpec]) -> Path:
    store = open_for_writing(folder, instance)
    if specs:
        store.commit(transaction_of(specs))
    store.close()
    return folder


def open_for_writing(folder: Path, instance: str, committer_id: int = COMMITTER_ID) -> RowLogStore:
    return create_log(folder, instance, committer_id=committer_id, map_size_bytes=1 << 22)


def flip(folder: Path, needle: bytes, offset_bytes: int = 0) -> None:
    """Flip one bit of the log's file, ``offset_bytes`` after ``needle``, in every copy of its page."""
    path = folder / "data.mdb"
    data = bytearray(path.read_bytes())
    position = data.find(needle)
    assert position >= 0, "what is to be damaged is not in the file"
    while position >= 0:
        data[position + offset_bytes] ^= 4
        position = data.find(needle, position + len(needle))
    path.write_bytes(data)
