"""Synthetic logs of a fleet, to try and measure the pipeline: services call one another, but none has to run.

Records, trailers, positions, marks and checksums are consistent as those of real coordinators: a service's calls for a
record have positions after that record's marks, a message is logged after it was sent, impulses take positions and are
left out of checksums. At the end some messages are still in flight.

    scripts/make_fleet FOLDER --services 20 --messages 100000
"""

from __future__ import annotations

import random
import struct
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import click

from immortal.coordinator.core.interfaces import (
    IMPULSES,
    ONESELF,
    CheckpointHeader,
    ImpulseBatch,
    OutputMark,
    SourcePosition,
    Transaction,
)
from immortal.coordinator.log.open import create_log
from immortal.coordinator.log.store import RowLogStore
from immortal.protocol.batch import encode_batch, offset_after
from immortal.protocol.checksum import crc64
from immortal.protocol.errors import ImmortalError
from immortal.protocol.extensions import encode_record_time
from immortal.protocol.messages import MessageType, RpcType, encode_incoming_data, encode_incoming_rpc, encode_message
from immortal.protocol.record import encode_header
from immortal.protocol.trailer import BatchKind, BatchSource, OutputMarkEntry, Trailer, encode_trailer
from immortal.protocol.varint import encode_zigzag

START_NS = 1_767_225_600_000_000_000  # 2026-01-01
STEP_NS = 1_000_000  # between two records of the fleet
_HANDLING_NS_MIN, _HANDLING_NS_MAX = 20_000, 200_000  # from the record to the calls it causes
_WIRE_NS_MIN, _WIRE_NS_MAX = 50_000, 3_000_000  # time of a batch in flight
_COMMIT_SIZE_BYTES = 4 << 20  # records are written in transactions of about this size
METHOD_IDS = (1, 2, 3, 200)  # the last one has two bytes
_NUMBER = struct.Struct(">Q")
_EPOCH = 1


@dataclass(slots=True)
class Input:
    """Batch of a record: its source, and its messages, packed."""

    kind: int
    name: str  # of the sender; "" is oneself
    first_position: int
    count: int
    send_time_ns: int
    payload: bytes

    @property
    def last_position(self) -> int:
        return self.first_position + self.count - 1


@dataclass(slots=True)
class PlannedRecord:
    """Record before it has a sequence ID: its writer gives it the next one."""

    time_ns: int
    inputs: list[Input]
    marks: list[OutputMarkEntry] = field(default_factory=list)


@dataclass(slots=True)
class Ending:
    """Contents of a log's tables after its last record."""

    acknowledged: dict[str, int] = field(default_factory=dict)
    impulses: list[ImpulseBatch] = field(default_factory=list)
    outputs: dict[str, OutputMark] = field(default_factory=dict)  # all that was made, marked or not


def encode_planned(record: PlannedRecord, committer_id: int, sequence_id: int) -> bytes:
    """Return the record and its trailer, as a coordinator stores them."""
    chunks = [encode_record_time(record.time_ns)]
    for batch in record.inputs:
        if batch.kind == BatchKind.INITIAL:
            chunks.append(encode_message(MessageType.INITIAL_MESSAGE, batch.payload))
        else:
            chunks += (encode_batch(batch.payload, batch.count), batch.payload)
    header = encode_header(committer_id, sequence_id, chunks)
    sources = [
        BatchSource(batch.kind, batch.name, batch.first_position, batch.count, batch.send_time_ns)
        for batch in record.inputs
    ]
    check = int.from_bytes(header[8:16], "little")
    return b"".join((header, *chunks, encode_trailer(Trailer(record.time_ns, sources, record.marks), check)))


class PlannedLog:
    """Writer of one service's records to a new log in ``folder``."""

    def __init__(self, folder: Path, name: str, committer_id: int) -> None:
        self._committer_id = committer_id
        self._store: RowLogStore = create_log(folder, name, committer_id=committer_id)
        self._next_sequence_id = 0
        self._transaction = Transaction(epoch=_EPOCH, extensions=frozenset({int(MessageType.RECORD_TIME)}))
        self._pending_bytes = 0
        self._time_ns = 0

    def append(self, record: PlannedRecord, committer_ids: dict[str, int]) -> None:
        """Write ``record`` as the next one; ``committer_ids`` are those of its senders."""
        value = encode_planned(record, self._committer_id, self._next_sequence_id)
        self._transaction.records.append((self._next_sequence_id, value))
        for batch in record.inputs:
            if batch.kind == BatchKind.INITIAL:
                continue
            source = IMPULSES if batch.kind == BatchKind.IMPULSES else batch.name
            committer_id = committer_ids.get(batch.name, self._committer_id)
            self._transaction.sources[source] = SourcePosition(committer_id, _EPOCH, batch.last_position)
        self._time_ns = record.time_ns
        self._next_sequence_id += 1
        self._pending_bytes += len(value)
        if self._pending_bytes >= _COMMIT_SIZE_BYTES:
            self._commit()

    def finish(self, ending: Ending, committer_ids: dict[str, int]) -> None:
        """Write the tables after the last record, with a checkpoint, and close the log."""
        transaction = self._transaction
        transaction.acknowledged.update(ending.acknowledged)
        transaction.impulses += ending.impulses
        for destination in ending.acknowledged:
            transaction.peers[destination] = committer_ids[destination]
        blob = b"the state of a service that never ran"
        self._store.write_checkpoint_chunk(1, 0, blob)
        transaction.checkpoint = CheckpointHeader(
            1, self._next_sequence_id - 1, len(blob), crc64(blob), self._time_ns, ending.outputs
        )
        self._commit()
        self._store.close()

    def _commit(self) -> None:
        self._store.commit(self._transaction)
        self._transaction = Transaction()
        self._pending_bytes = 0


# --- the services ----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Stream:
    """Output stream whose messages wait from the handler's call until they are sent."""

    position: int = 0
    checksum: int = 0
    marked_position: int = 0
    waiting: list[tuple[int, bytes]] = field(default_factory=list)  # (count, payload)

    def append(self, count: int, payload: bytes, *, impulses: bool = False) -> None:
        self.position += count
        if not impulses:
            self.checksum = crc64(payload, self.checksum)
        self.waiting.append((count, payload))


@dataclass(slots=True)
class _Service:
    name: str
    streams: dict[str, _Stream] = field(default_factory=dict)
    inbox: deque[tuple[int, Input]] = field(default_factory=deque)  # (arrival, batch), by sender in order
    received: dict[str, int] = field(default_factory=dict)  # by sender, as far as it is logged
    impulses: list[ImpulseBatch] = field(default_factory=list)
    impulse_count: int = 0

    def stream(self, destination: str) -> _Stream:
        return self.streams.setdefault(destination, _Stream())


class Fleet:
    """Simulated fleet, the same for the same arguments. Iterate :meth:`records`, then get the endings."""

    def __init__(self, services: int = 20, messages: int = 10_000, seed: int = 1, batch_messages_max: int = 24) -> None:
        self.names = [f"service-{index:0{len(str(services - 1))}}" for index in range(services)]
        self.committer_ids = {name: 1000 + index for index, name in enumerate(self.names)}
        self._services = {name: _Service(name) for name in self.names}
        self._messages = messages
        self._batch_messages_max = batch_messages_max
        self._random = random.Random(seed)
        self._number = 0

    def records(self) -> Iterator[tuple[str, PlannedRecord]]:
        """Yield (service, its next record), in the order of their times."""
        now_ns = START_NS
        for name in self.names:
            now_ns += STEP_NS
            initial = Input(BatchKind.INITIAL, ONESELF, 1, 1, now_ns, encode_incoming_rpc(1, RpcType.FORK, b""))
            yield name, PlannedRecord(now_ns, [initial])
        logged = 0
        while logged < self._messages:
            for name in self._random.sample(self.names, len(self.names)):
                now_ns += STEP_NS
                service = self._services[name]
                inputs = self._inputs(service, now_ns)
                if not inputs:
                    continue
                yield name, PlannedRecord(now_ns, inputs, self._marks(service))
                for batch in inputs:
                    logged += batch.count
                    self._handle(service, batch)
                if self._random.random() < 0.05:
                    self._impulses_to_a_peer(service)
                self._send(service, now_ns)

    def ending(self, name: str) -> Ending:
        """Return the tables at the end of the log of ``name``; acknowledgements can be late."""
        service = self._services[name]
        acknowledged = {}
        for destination in service.streams:
            if destination != ONESELF:
                position = self._services[destination].received.get(name, 0)
                if position:
                    acknowledged[destination] = max(1, position - self._random.choice((0, 0, 3)))
        outputs = {to: OutputMark(stream.position, stream.checksum) for to, stream in service.streams.items()}
        return Ending(acknowledged, service.impulses, outputs)

    def _inputs(self, service: _Service, now_ns: int) -> list[Input]:
        """Return the input of one record: impulses from outside, calls to oneself, batches that have arrived."""
        inputs = []
        if self._random.random() < 0.3:
            count = self._count()
            payload = self._calls(count, RpcType.IMPULSE)
            first = service.impulse_count + 1
            inputs.append(Input(BatchKind.IMPULSES, ONESELF, first, count, now_ns, payload))
            service.impulse_count += count
        kept: deque[tuple[int, Input]] = deque()
        blocked: set[str] = set()  # a batch never overtakes one of its stream
        for arrival_ns, batch in service.inbox:
            if arrival_ns > now_ns or batch.name in blocked:
                blocked.add(batch.name)
                kept.append((arrival_ns, batch))
                continue
            inputs.append(batch)
            service.received[batch.name] = batch.last_position
        service.inbox = kept
        return inputs

    def _marks(self, service: _Service) -> list[OutputMarkEntry]:
        marks = []
        for destination, stream in sorted(service.streams.items()):
            if stream.position != stream.marked_position:
                stream.marked_position = stream.position
                marks.append(OutputMarkEntry(destination, stream.position, stream.checksum))
        return marks

    def _handle(self, service: _Service, batch: Input) -> None:
        """Draw the calls that ``batch`` causes, to peers and sometimes itself: 0.9 for each call, on average."""
        if self._random.random() < (0.9 if batch.kind == BatchKind.STREAM else 1.0):
            destination = self._random.choice(self.names)
            destination = ONESELF if destination == service.name else destination
            service.stream(destination).append(batch.count, self._calls(batch.count, RpcType.FORK))

    def _impulses_to_a_peer(self, service: _Service) -> None:
        peers = [name for name in self.names if name != service.name]
        if peers:
            destination = self._random.choice(peers)
            stream = service.stream(destination)
            count = self._random.randint(1, 3)
            payload = self._calls(count, RpcType.IMPULSE)
            service.impulses.append(ImpulseBatch(stream.position + 1, count, payload, destination))
            stream.append(count, payload, impulses=True)

    def _send(self, service: _Service, now_ns: int) -> None:
        for destination, stream in service.streams.items():
            if not stream.waiting or self._random.random() < 0.3:
                continue
            first = stream.position - sum(count for count, _ in stream.waiting) + 1
            payload = b"".join(payload for _, payload in stream.waiting)
            rest = sum(count for count, _ in stream.waiting)
            stream.waiting.clear()
            receiver = service if destination == ONESELF else self._services[destination]
            sender = ONESELF if destination == ONESELF else service.name
            sent_ns = now_ns + self._random.randint(_HANDLING_NS_MIN, _HANDLING_NS_MAX)
            arrival_ns = sent_ns + self._random.randint(_WIRE_NS_MIN, _WIRE_NS_MAX)
            while rest:
                count = min(rest, self._count() if self._random.random() < 0.5 else rest)
                end = offset_after(payload, count, rest)
                batch = Input(BatchKind.STREAM, sender, first, count, sent_ns, payload[:end])
                receiver.inbox.append((arrival_ns, batch))
                payload, first, rest = payload[end:], first + count, rest - count

    def _count(self) -> int:
        return self._random.randint(1, self._batch_messages_max)

    def _calls(self, count: int, rpc_type: int) -> bytes:
        """Return ``count`` calls of one method with numbers as arguments, each number once: no messages are equal."""
        front = encode_incoming_data(self._random.choice(METHOD_IDS), rpc_type, b"")
        padding = b"\xc0" * self._random.choice((0, 0, 0, 40, 120))
        size = 1 + len(front) + 2 + _NUMBER.size + len(padding)
        array = bytes((0x91 + len(padding),)) if len(padding) < 15 else b"\xdc" + struct.pack(">H", len(padding) + 1)
        size += len(array) - 1
        front = encode_zigzag(size) + bytes((MessageType.RPC,)) + front + array + b"\xcf"
        first = self._number
        self._number += count
        pack = _NUMBER.pack
        return b"".join([front + pack(number) + padding for number in range(first, first + count)])


def write_fleet(folder: Path, fleet: Fleet) -> list[Path]:
    """Run ``fleet`` and write its logs to folder/NAME/log; return the logs' folders."""
    paths = {name: folder / name / "log" for name in fleet.names}
    logs = {name: PlannedLog(paths[name], name, fleet.committer_ids[name]) for name in fleet.names}
    for name, record in fleet.records():
        logs[name].append(record, fleet.committer_ids)
    for name, log in logs.items():
        log.finish(fleet.ending(name), fleet.committer_ids)
    return list(paths.values())


@click.command()
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--services", type=click.IntRange(1, 10_000), default=20, show_default=True, help="How many.")
@click.option("--messages", type=click.IntRange(1), default=100_000, show_default=True, help="In all logs together.")
@click.option(
    "--batch", type=click.IntRange(1, 10_000), default=24, show_default=True, help="Messages of one, at most."
)
@click.option("--seed", type=int, default=1, show_default=True, help="The same seed makes the same fleet.")
def main(folder: Path, services: int, messages: int, batch: int, seed: int) -> None:
    """Write the logs of a made-up fleet to FOLDER/NAME/log."""
    try:
        write_fleet(folder, Fleet(services, messages, seed, batch))
    except (ImmortalError, OSError) as error:
        raise click.ClickException(str(error)) from None
    click.echo(f"{services} logs in {folder}")


if __name__ == "__main__":
    main()
