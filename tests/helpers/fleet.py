"""Fleets with faults planted in their logs, and a plain oracle that tells what an audit of such logs must find."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import lmdb
import pyarrow as pa

from immortal.coordinator.core.interfaces import CheckpointHeader, Transaction
from immortal.coordinator.log.format import SEQUENCE_KEY
from immortal.log import open_log, open_reader, verify_value
from immortal.pipeline.jobs.audit import AuditReport, audit_rows, judge
from immortal.pipeline.jobs.evidence import Row, evidence_of_values, gap_rows
from immortal.pipeline.jobs.sources import LogFleet, LogState
from immortal.pipeline.reading import Gap, close_shared, read_range, whole_range
from immortal.protocol.batch import decode_batch
from immortal.protocol.checksum import crc64
from immortal.protocol.errors import ImmortalError
from immortal.protocol.messages import MessageType, RpcType, decode_incoming_rpc, decode_messages
from immortal.protocol.record import HEADER_SIZE_BYTES
from immortal.protocol.trailer import BatchKind
from tests.helpers.synthetic_logs import Ending, Fleet, Input, PlannedLog, PlannedRecord

Found = set[tuple[str, str, str, int]]
"""Faults: (kind, sender, receiver, position); for damage ("damage", "", instance, record)."""


@dataclass
class Plan:
    """Fleet in memory, whose records can be altered before they are written."""

    committer_ids: dict[str, int]
    records: dict[str, list[PlannedRecord]]
    endings: dict[str, Ending]
    damaged: dict[str, set[int]] = field(default_factory=dict)  # records with a flipped byte, by log

    @property
    def names(self) -> list[str]:
        return list(self.records)

    def write(self, folder: Path) -> list[str]:
        """Write all logs; return their folders."""
        folders = []
        for name, records in self.records.items():
            path = write_planned(folder, name, self.committer_ids, records, self.endings[name])
            for sequence_id in self.damaged.get(name, ()):
                flip_byte(path, sequence_id)
            folders.append(str(path))
        return folders

    def batches(self, sender: str, receiver: str) -> list[tuple[int, int, Input]]:
        """Return (record, index in it, batch) of each batch of a stream, in the receiver's order."""
        name = "" if sender == receiver else sender
        return [
            (sequence_id, index, batch)
            for sequence_id, record in enumerate(self.records[receiver])
            for index, batch in enumerate(record.inputs)
            if batch.kind == BatchKind.STREAM and batch.name == name
        ]

    def marks(self, sender: str, receiver: str) -> list[int]:
        """Return the positions in the sender's marks, without those of damaged records."""
        name = "" if sender == receiver else receiver
        damaged = self.damaged.get(sender, set())
        return [
            mark.position
            for sequence_id, record in enumerate(self.records[sender])
            for mark in record.marks
            if mark.destination == name and sequence_id not in damaged
        ]


def plan_fleet(services: int = 4, messages: int = 600, seed: int = 1, batch_messages_max: int = 8) -> Plan:
    fleet = Fleet(services, messages, seed, batch_messages_max)
    records: dict[str, list[PlannedRecord]] = {name: [] for name in fleet.names}
    for name, record in fleet.records():
        records[name].append(record)
    return Plan(fleet.committer_ids, records, {name: fleet.ending(name) for name in fleet.names})


def flip_byte(folder: Path, sequence_id: int, at: int = 30) -> None:
    """Damage a record where no check of LMDB sees it."""
    environment = lmdb.open(str(folder), max_dbs=32, map_size=1 << 30, lib_version=0)
    try:
        table = environment.open_db(b"records", create=False)
        with environment.begin(write=True) as transaction:
            key = SEQUENCE_KEY.pack(sequence_id)
            value = bytearray(transaction.get(key, db=table))
            value[at % len(value)] ^= 0x40
            transaction.put(key, bytes(value), db=table)
    finally:
        environment.close()


def remove_record(folder: Path, sequence_id: int) -> None:
    environment = lmdb.open(str(folder), max_dbs=32, map_size=1 << 30, lib_version=0)
    try:
        table = environment.open_db(b"records", create=False)
        with environment.begin(write=True) as transaction:
            transaction.delete(SEQUENCE_KEY.pack(sequence_id), db=table)
    finally:
        environment.close()


def cut(plan: Plan, share: float) -> Plan:
    """Return the fleet as it was earlier."""
    return Plan(
        plan.committer_ids,
        {name: records[: 1 + int(len(records) * share)] for name, records in plan.records.items()},
        {name: Ending() for name in plan.records},
    )


def trim(folder: Path, plan: Plan, name: str, last_sequence_id: int) -> None:
    """Take a checkpoint after that record, and trim the records that it makes unnecessary."""
    store = open_log(folder, name)
    try:
        store.write_checkpoint_chunk(2, 0, b"newer")
        time_ns = plan.records[name][last_sequence_id].time_ns
        header = CheckpointHeader(2, last_sequence_id, 5, crc64(b"newer"), time_ns)
        store.commit(Transaction(checkpoint=header))
        while store.trim(keep_checkpoints=1):
            pass
    finally:
        store.close()


# --- faults ----------------------------------------------------------------------------------------------------------


def split_messages(payload: bytes) -> list[bytes]:
    ends = [0, *(end for _, _, end in decode_messages(payload))]
    return [payload[start:end] for start, end in itertools.pairwise(ends)]


def is_impulse(message: bytes) -> bool:
    _, start, end = next(decode_messages(message))
    return decode_incoming_rpc(message, start, end).rpc_type == RpcType.IMPULSE


def lose(plan: Plan, sender: str, receiver: str, rng: random.Random) -> Found:
    """Remove a batch of the stream, with messages after it."""
    record, index, batch = rng.choice(plan.batches(sender, receiver)[:-1])
    del plan.records[receiver][record].inputs[index]
    return {("lost", sender, receiver, position) for position in _positions(batch)}


def duplicate(plan: Plan, sender: str, receiver: str, rng: random.Random) -> Found:
    """Execute a batch once more, after the first time."""
    record, _, batch = rng.choice(plan.batches(sender, receiver)[:-1])
    later = rng.randrange(record, len(plan.records[receiver]))
    plan.records[receiver][later].inputs.append(replace(batch))
    return {("duplicate", sender, receiver, position) for position in _positions(batch)}


def swap_batches(plan: Plan, sender: str, receiver: str, rng: random.Random) -> Found:
    """Swap two consecutive batches; one can then be executed before it was made."""
    batches = plan.batches(sender, receiver)
    at = rng.randrange(len(batches) - 1)
    (record, index, first), (next_record, next_index, second) = batches[at], batches[at + 1]
    inputs, next_inputs = plan.records[receiver][record].inputs, plan.records[receiver][next_record].inputs
    # The times stay with the places: this fault is about the order alone.
    inputs[index] = replace(second, send_time_ns=first.send_time_ns)
    next_inputs[next_index] = replace(first, send_time_ns=second.send_time_ns)
    return {("order", sender, receiver, position) for position in _positions(first)}


def swap_messages(plan: Plan, sender: str, receiver: str, rng: random.Random) -> Found:
    """Swap two calls within a batch; positions stay unchanged."""
    last = plan.batches(sender, receiver)[-1][2].last_position
    mark = max(position for position in plan.marks(sender, receiver) if position <= last)
    candidates = []
    for _, _, batch in plan.batches(sender, receiver):
        messages = split_messages(batch.payload)
        for index in range(len(messages) - 1):
            pair = messages[index : index + 2]
            if batch.first_position + index + 1 <= mark and not any(map(is_impulse, pair)):
                candidates.append((batch, index))
    batch, index = rng.choice(candidates)
    messages = split_messages(batch.payload)
    messages[index : index + 2] = reversed(messages[index : index + 2])
    batch.payload = b"".join(messages)
    return {("content", sender, receiver, batch.first_position + index + offset) for offset in (0, 1)}


def damage(plan: Plan, receiver: str, rng: random.Random) -> Found:
    """Flip a byte of a record."""
    free = sorted(set(range(1, len(plan.records[receiver]))) - plan.damaged.get(receiver, set()))
    sequence_id = rng.choice(free)
    plan.damaged.setdefault(receiver, set()).add(sequence_id)
    return {("damage", "", receiver, sequence_id)}


def _positions(batch: Input) -> range:
    return range(batch.first_position, batch.last_position + 1)


STREAM_FAULTS: list[Callable[[Plan, str, str, random.Random], Found]] = [
    lose,
    duplicate,
    swap_batches,
    swap_messages,
]


def streams_for_faults(plan: Plan) -> list[tuple[str, str]]:
    """Return the streams in which each fault can be planted."""
    found = []
    for sender, receiver in itertools.product(plan.names, plan.names):
        batches = plan.batches(sender, receiver)
        marks = plan.marks(sender, receiver)
        if len(batches) < 4 or not marks:
            continue
        mark = max((position for position in marks if position <= batches[-1][2].last_position), default=0)
        calls = sum(
            1
            for _, _, batch in batches
            if batch.count > 1 and batch.last_position <= mark
            for message in [split_messages(batch.payload)]
            if not is_impulse(message[0]) and not is_impulse(message[1])
        )
        if calls:
            found.append((sender, receiver))
    return found


# --- the audit, with and without Spark -------------------------------------------------------------------------------


def audit_here(folders: list[str], tolerance_ns: int = 0, states: Mapping[str, LogState] | None = None) -> AuditReport:
    """The audit of Spark's workers and driver, in this process. ``states``: as they were seen a while ago."""
    states = LogFleet(folders, strict=True).states if states is None else states
    return judge(audit_rows(evidence_here(folders), tolerance_ns), states)


def evidence_here(folders: list[str]) -> Iterator[Row]:
    """Yield the evidence in the order of the audit."""
    batches = []
    for wanted in map(whole_range, folders):
        for values in read_range(wanted):
            if isinstance(values, Gap):
                batches.append(gap_rows(wanted.instance, values))
            else:
                batches += evidence_of_values(values, wanted.instance, wanted.committer_id)
    close_shared()
    table = pa.Table.from_batches(batches)
    order = [(name, "ascending") for name in ("sender", "receiver", "what", "sequence_id", "batch")]
    return (Row(**row) for row in table.sort_by(order).to_pylist())


def found_in(report: AuditReport) -> Found:
    """Return the faults of a report, without causality, which is about more than one stream."""
    return {
        (violation.kind, violation.sender, violation.receiver, position)
        for violation in report.violations
        if violation.kind != "causality"
        for position in range(violation.first, violation.last + 1)
    }


# --- the oracle ------------------------------------------------------------------------------------------------------


@dataclass
class _Executed:
    position: int
    record: int
    data: bytes


def oracle(folders: list[str]) -> Found:
    """Return the faults of the logs, by the plainest means: message by message, all in memory."""
    executed: dict[tuple[str, str], list[_Executed]] = {}
    marks: dict[tuple[str, str], list[tuple[int, int]]] = {}
    damaged: dict[str, set[int]] = {}
    acknowledged: dict[tuple[str, str], int] = {}
    found: Found = set()
    for folder in folders:
        with open_reader(folder) as reader:
            own, committer_id = reader.identity.instance_name, reader.identity.committer_id
            damaged[own] = set()
            for receiver, position in reader.summary().acknowledged.items():
                acknowledged[own, receiver] = position
            for logged in reader.records():
                try:
                    header, trailer = verify_value(logged.value, logged.sequence_id, committer_id)
                except ImmortalError:
                    damaged[own].add(logged.sequence_id)
                    found.add(("damage", "", own, logged.sequence_id))
                    continue
                content = logged.value[HEADER_SIZE_BYTES : header.size_bytes]
                for source, messages in zip(trailer.batches, _batches(content), strict=True):
                    if source.kind == BatchKind.STREAM:
                        stream = executed.setdefault((source.name or own, own), [])
                        for index, data in enumerate(messages):
                            stream.append(_Executed(source.first_position + index, logged.sequence_id, data))
                for mark in trailer.outputs:
                    marks.setdefault((own, mark.destination or own), []).append((mark.position, mark.checksum))
    for key in executed.keys() | acknowledged.keys():
        sender, receiver = key
        here = damaged.get(receiver, set())
        problems = _stream_problems(executed.get(key, []), marks.get(key, []), here, acknowledged.get(key, 0))
        found |= {(kind, sender, receiver, position) for kind, position in problems}
    return found


def _batches(content: bytes) -> Iterator[list[bytes]]:
    start = 0
    for message_type, data_start, end in decode_messages(content):
        whole, data, start = content[start:end], content[data_start:end], end
        if message_type == MessageType.RPC:
            yield [whole]
        elif message_type == MessageType.RPC_BATCH:
            yield split_messages(data[decode_batch(data)[1] :])
        elif message_type == MessageType.INITIAL_MESSAGE:
            yield []


def _stream_problems(
    stream: list[_Executed], marks: list[tuple[int, int]], damaged: set[int], acknowledged: int
) -> Iterator[tuple[str, int]]:
    times = Counter(each.position for each in stream)
    highest, record = 0, -1
    in_order: dict[int, bytes] = {}
    for each in stream:
        if each.position > highest:
            skipped = [position for position in range(highest + 1, each.position) if not times[position]]
            if not any(record < sequence_id < each.record for sequence_id in damaged):
                yield from (("lost", position) for position in skipped)
            highest, record = each.position, each.record
            in_order[each.position] = each.data
    seen: set[int] = set()
    highest = 0
    for each in stream:
        if each.position in seen:
            yield "duplicate", each.position
        elif each.position < highest:
            yield "order", each.position
        seen.add(each.position)
        highest = max(highest, each.position)
    last_record = max((each.record for each in stream), default=-1)
    if not any(sequence_id > last_record for sequence_id in damaged):
        yield from (("lost", position) for position in range(highest + 1, acknowledged + 1))
    before = (0, 0)
    for mark in sorted(marks):
        positions = range(before[0] + 1, mark[0] + 1)
        if all(position in in_order for position in positions):
            calls = [in_order[position] for position in positions if not is_impulse(in_order[position])]
            if crc64(b"".join(calls), before[1]) != mark[1]:
                yield from (("content", position) for position in positions)
        before = mark


def write_planned(
    folder: Path, name: str, committer_ids: dict[str, int], records: Iterable[PlannedRecord], ending: Ending
) -> Path:
    """Write one log of records that were kept in memory, perhaps altered; return its folder."""
    path = folder / name / "log"
    log = PlannedLog(path, name, committer_ids[name])
    for record in records:
        log.append(record, committer_ids)
    log.finish(ending, committer_ids)
    return path
