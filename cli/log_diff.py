"""Comparison of two logs record by record: where they first differ, and what only one holds. Both are only read.

Copies of one log have the same committer; their records are compared byte by byte. The records of two logs that were
written independently never have the same bytes; of these the messages and the trailers are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import zip_longest
from typing import Any, TypeVar

from msgspec import Struct, field

from immortal.coordinator.core.formatting import time_text
from immortal.coordinator.core.interfaces import CheckpointHeader, LogSummary
from immortal.coordinator.log.identity import verify_value
from immortal.coordinator.log.reader import LoggedValue, LogReader
from immortal.coordinator.log.record_contents import batches, record_of
from immortal.presenters.records import describe_record, record_lines
from immortal.protocol.command_line import counted
from immortal.protocol.messages import decode_messages
from immortal.protocol.trailer import Trailer

PROGRESS_RECORDS = 4096  # between two calls of progress

Item = TypeVar("Item")


Pair = tuple[str, str]


class LogTotals(Struct):
    """Totals of one log in the compared range."""

    records: int = 0
    messages: int = 0
    size_bytes: int = 0
    damaged: int = 0


class RecordDifference(Struct, frozen=True):
    """Difference of a record that both logs have.

    ``what``: the parts that differ, of DAMAGE, MESSAGES, TIME, SOURCES and OUTPUTS. ``message_index``: the first
    different message, counted from 0; None if the messages are the same.
    """

    sequence_id: int
    what: tuple[str, ...]
    message_index: int | None = None


DAMAGE, MESSAGES, TIME, SOURCES, OUTPUTS = "damage", "messages", "time", "sources", "outputs"


class CheckpointDifference(Struct, frozen=True):
    """Difference of a checkpoint; None stands for a log that does not have it. ``what``: the fields that differ."""

    checkpoint_id: int
    first: CheckpointHeader | None
    second: CheckpointHeader | None
    what: tuple[str, ...] = ()


class LogDiff(Struct):
    """Differences of two logs. The lists hold the first ``limit`` of each kind; the counts include all."""

    summaries: tuple[LogSummary, LogSummary]
    limit: int
    identity: dict[str, tuple[object, object]] = field(default_factory=dict)
    totals: tuple[LogTotals, LogTotals] = field(default_factory=lambda: (LogTotals(), LogTotals()))
    same_records: int = 0
    different_records: int = 0
    only_records: list[int] = field(default_factory=lambda: [0, 0])
    differences: list[RecordDifference] = field(default_factory=list)
    only: tuple[list[tuple[int, int]], list[tuple[int, int]]] = field(default_factory=lambda: ([], []))
    checkpoints: list[CheckpointDifference] = field(default_factory=list)

    @property
    def is_same(self) -> bool:
        return not (self.identity or self.different_records or any(self.only_records) or self.checkpoints)


def diff_logs(
    first: LogReader, second: LogReader, *, limit: int = 20, progress: Callable[[int, int], None] | None = None
) -> LogDiff:
    """Compare the contents that two logs have at the start. ``progress(records, total)`` is called now and then.

    Raises DamagedLogError if a log can't be read at all; a damaged record is a difference.
    """
    summaries = first.summary(), second.summary()
    diff = LogDiff(summaries, limit)
    diff.identity = _identity(first, second)
    diff.checkpoints = list(_checkpoints(*summaries))
    begins = min(summary.first_sequence_id for summary in summaries)
    total = max(summary.last_sequence_id for summary in summaries) + 1 - begins
    readers = (first, second)
    for one, other in _merged(*(_rows(reader, summary) for reader, summary in zip(readers, summaries, strict=True))):
        found = one or other
        if progress is not None and found is not None and (found.sequence_id - begins) % PROGRESS_RECORDS == 0:
            progress(found.sequence_id - begins, total)
        if one is None:
            _count_only(diff, 1, second, other)
        elif other is None:
            _count_only(diff, 0, first, one)
        else:
            _compare(diff, readers, one, other)
    return diff


def _identity(first: LogReader, second: LogReader) -> dict[str, tuple[object, object]]:
    """Return the fields of identity in which the two logs differ."""
    return {
        name: values
        for name in ("instance_name", "committer_id", "created_ns", "format_version")
        if (values := (getattr(first.identity, name), getattr(second.identity, name)))[0] != values[1]
    }


def _checkpoints(first: LogSummary, second: LogSummary) -> Iterator[CheckpointDifference]:
    ours, theirs = ({header.checkpoint_id: header for header in each.checkpoints} for each in (first, second))
    for checkpoint_id in sorted(ours.keys() | theirs.keys()):
        one, other = ours.get(checkpoint_id), theirs.get(checkpoint_id)
        if one is None or other is None:
            yield CheckpointDifference(checkpoint_id, one, other)
        elif what := tuple(name for name, values in _header_fields(one, other).items() if values[0] != values[1]):
            yield CheckpointDifference(checkpoint_id, one, other, what)


def _header_fields(one: CheckpointHeader, other: CheckpointHeader) -> Mapping[str, tuple[object, object]]:
    names = {"sequence_id": "record", "size_bytes": "size", "check": "CRC", "outputs": "outputs", "version": "version"}
    return {word: (getattr(one, name), getattr(other, name)) for name, word in names.items()}


# --- records ---------------------------------------------------------------------------------------------------------


def _rows(reader: LogReader, summary: LogSummary) -> Iterator[LoggedValue]:
    """Return the records that exist, damaged or not, up to the last one of ``summary``."""
    return (row for row in reader.records(last_sequence_id=summary.last_sequence_id) if row.value)


def _merged(
    first: Iterator[LoggedValue], second: Iterator[LoggedValue]
) -> Iterator[tuple[LoggedValue | None, LoggedValue | None]]:
    """Yield the records of two logs in pairs, by sequence ID; None if a log has no such record."""
    one, other = next(first, None), next(second, None)
    while one is not None or other is not None:
        if other is None or (one is not None and one.sequence_id < other.sequence_id):
            yield one, None
            one = next(first, None)
        elif one is None or other.sequence_id < one.sequence_id:
            yield None, other
            other = next(second, None)
        else:
            yield one, other
            one, other = next(first, None), next(second, None)


def _count_only(diff: LogDiff, index: int, reader: LogReader, row: LoggedValue | None) -> None:
    if row is None:
        return
    diff.only_records[index] += 1
    spans = diff.only[index]
    if spans and spans[-1][1] == row.sequence_id - 1:
        spans[-1] = (spans[-1][0], row.sequence_id)
    elif len(spans) < diff.limit:
        spans.append((row.sequence_id, row.sequence_id))
    _add(diff.totals[index], row, _trailer(reader, row))


def _compare(diff: LogDiff, readers: tuple[LogReader, LogReader], one: LoggedValue, other: LoggedValue) -> None:
    is_copy = one.value == other.value and one.problem is None and other.problem is None
    trailer = _trailer(readers[0], one)
    other_trailer = trailer if is_copy else _trailer(readers[1], other)
    _add(diff.totals[0], one, trailer)
    _add(diff.totals[1], other, other_trailer)
    difference = None if is_copy else _difference(one, other, trailer, other_trailer)
    if difference is None:
        diff.same_records += 1
        return
    diff.different_records += 1
    if len(diff.differences) < diff.limit:
        diff.differences.append(difference)


def _trailer(reader: LogReader, row: LoggedValue) -> Trailer | None:
    """Return the trailer of a record; None if the record is damaged."""
    if row.problem is not None:
        return None
    return verify_value(row.value, row.sequence_id, reader.identity.committer_id)[1]


def _add(totals: LogTotals, row: LoggedValue, trailer: Trailer | None) -> None:
    totals.records += 1
    totals.size_bytes += len(row.value)
    if trailer is None:
        totals.damaged += 1
    else:
        totals.messages += sum(batch.count for batch in trailer.batches)


def _difference(
    one: LoggedValue, other: LoggedValue, trailer: Trailer | None, other_trailer: Trailer | None
) -> RecordDifference | None:
    if trailer is None or other_trailer is None:
        return RecordDifference(one.sequence_id, (DAMAGE,))
    what = []
    index = _first_different(_messages_of(one.value), _messages_of(other.value))
    if index is not None:
        what.append(MESSAGES)
    if trailer.time_ns != other_trailer.time_ns:
        what.append(TIME)
    if trailer.batches != other_trailer.batches:
        what.append(SOURCES)
    if trailer.outputs != other_trailer.outputs:
        what.append(OUTPUTS)
    return RecordDifference(one.sequence_id, tuple(what), index) if what else None


def _first_different(first: Iterator[Item], second: Iterator[Item]) -> int | None:
    for index, (one, other) in enumerate(zip_longest(first, second)):
        if one != other:
            return index
    return None


def _messages_of(value: bytes) -> Iterator[bytes]:
    """Yield all messages of a record except its time; how they are batched does not matter."""
    for batch in batches(record_of(value).content):
        offset = 0
        for _, _, end in decode_messages(batch.payload):
            yield batch.payload[offset:end]
            offset = end


# Differences as plain values, and as text.


_IDENTITY_IN_WORDS = {
    "instance_name": "instance",
    "committer_id": "committer",
    "created_ns": "made at",
    "format_version": "format",
}


def diff_values(diff: LogDiff, readers: tuple[LogReader, LogReader]) -> dict[str, Any]:
    """Return plain values for JSON. "a" and "b" are the two logs, in the order in which they were given."""
    return {
        "same": diff.is_same,
        "a": _log_values(diff, readers, 0),
        "b": _log_values(diff, readers, 1),
        "identity": {name: {"a": ours, "b": theirs} for name, (ours, theirs) in diff.identity.items()},
        "records": {
            "same": diff.same_records,
            "different": diff.different_records,
            "only_a": diff.only_records[0],
            "only_b": diff.only_records[1],
        },
        "first": [
            {
                "record": difference.sequence_id,
                "what": list(difference.what),
                "message": difference.message_index,
                **dict(zip("ab", _described(readers, difference), strict=True)),
            }
            for difference in diff.differences
        ],
        "only_a": [list(span) for span in diff.only[0]],
        "only_b": [list(span) for span in diff.only[1]],
        "checkpoints": [
            {
                "checkpoint": found.checkpoint_id,
                "what": list(found.what),
                "a": _checkpoint_values(found.first),
                "b": _checkpoint_values(found.second),
            }
            for found in diff.checkpoints
        ],
    }


def _log_values(diff: LogDiff, readers: tuple[LogReader, LogReader], index: int) -> dict[str, Any]:
    summary, totals, identity = diff.summaries[index], diff.totals[index], readers[index].identity
    return {
        "instance": identity.instance_name,
        "committer_id": identity.committer_id,
        "folder": str(readers[index].where),
        "first_sequence_id": summary.first_sequence_id,
        "last_sequence_id": summary.last_sequence_id,
        "records": totals.records,
        "messages": totals.messages,
        "size_bytes": totals.size_bytes,
        "damaged": totals.damaged,
        "checkpoints": [header.checkpoint_id for header in summary.checkpoints],
    }


def _checkpoint_values(header: CheckpointHeader | None) -> dict[str, Any] | None:
    if header is None:
        return None
    return {
        "sequence_id": header.sequence_id,
        "size_bytes": header.size_bytes,
        "check": f"{header.check:016x}",
        "version": header.version,
        "outputs": {name: mark.position for name, mark in header.outputs.items()},
    }


def _described(readers: tuple[LogReader, LogReader], difference: RecordDifference) -> list[dict[str, Any] | None]:
    """Describe the record in each log, or its one message that differs; None if a log has trimmed it."""
    described: list[dict[str, Any] | None] = []
    for reader in readers:
        row = _row(reader, difference.sequence_id)
        record = None if row is None else describe_record(row, reader.identity.committer_id)
        if record is not None and difference.message_index is not None and "problem" not in record:
            messages = [message for message in record["messages"] if message["type"] != "RECORD_TIME"]
            record = messages[difference.message_index] if difference.message_index < len(messages) else None
        described.append(record)
    return described


def _row(reader: LogReader, sequence_id: int) -> LoggedValue | None:
    return next(reader.records(sequence_id, sequence_id), None)


# --- for people ------------------------------------------------------------------------------------------------------


def diff_lines(diff: LogDiff, readers: tuple[LogReader, LogReader], names: Pair) -> Iterator[str]:
    """Yield lines for people. ``names``: the two logs as the user named them."""
    width = max(map(len, names))
    labels = f"{names[0]:{width}}", f"{names[1]:{width}}"
    for index, label in enumerate(labels):
        yield f"{label}  {_log_text(diff, readers, index)}"
    for name, values in diff.identity.items():
        ours, theirs = (
            time_text(value) if isinstance(value, int) and name == "created_ns" else value for value in values
        )
        yield f"{_IDENTITY_IN_WORDS[name]} differs: {ours}, {theirs}"
    for difference in diff.differences:
        yield from _difference_lines(readers, difference, labels)
    if diff.different_records > len(diff.differences):
        yield f"and {diff.different_records - len(diff.differences)} more records that differ"
    for index, name in enumerate(names):
        if diff.only_records[index]:
            yield f"only in {name}: {_spans_text(diff, index)}"
    yield from _checkpoint_lines(diff, names)
    yield _verdict(diff, names)


def _log_text(diff: LogDiff, readers: tuple[LogReader, LogReader], index: int) -> str:
    summary, totals, identity = diff.summaries[index], diff.totals[index], readers[index].identity
    records = f"records {summary.first_sequence_id} to {summary.last_sequence_id}" if totals.records else "no records"
    damaged = f", {totals.damaged} DAMAGED" if totals.damaged else ""
    return (
        f"instance {identity.instance_name}, {records}: {totals.records:,} with {totals.messages:,} messages,"
        f" {totals.size_bytes:,} bytes{damaged}; {counted(len(summary.checkpoints), 'checkpoint')}"
    )


def _difference_lines(
    readers: tuple[LogReader, LogReader], difference: RecordDifference, labels: Pair
) -> Iterator[str]:
    what = [word for word in difference.what if word != "messages"]
    if DAMAGE in what:
        yield f"record {difference.sequence_id} is damaged:"
    elif difference.message_index is not None:
        also = f" ({', '.join(what)} too)" if what else ""
        yield f"record {difference.sequence_id}, message {difference.message_index} differs{also}:"
    else:
        yield f"record {difference.sequence_id}: the messages are the same, not so its {' and '.join(what)}:"
    for reader, label in zip(readers, labels, strict=True):
        yield f"    {label}  {_shown(reader, difference)}"


def _shown(reader: LogReader, difference: RecordDifference) -> str:
    """Return the message that differs as text, or the line of the record if no one message does."""
    row = _row(reader, difference.sequence_id)
    if row is None:
        return "trimmed meanwhile"
    own, *messages = record_lines(describe_record(row, reader.identity.committer_id))
    if difference.message_index is None:
        return own
    messages = [line.strip() for line in messages if not line.strip().startswith("RECORD_TIME")]
    return messages[difference.message_index] if difference.message_index < len(messages) else "no such message"


def _spans_text(diff: LogDiff, index: int) -> str:
    spans = [f"record {first}" if first == last else f"records {first} to {last}" for first, last in diff.only[index]]
    shown = sum(last + 1 - first for first, last in diff.only[index])
    if shown < diff.only_records[index]:
        spans.append(f"{diff.only_records[index] - shown} more")
    return ", ".join(spans)


def _checkpoint_lines(diff: LogDiff, names: Pair) -> Iterator[str]:
    for found in diff.checkpoints[: diff.limit]:
        header, name = (found.first, names[0]) if found.second is None else (found.second, names[1])
        if found.first is not None and found.second is not None:
            yield f"checkpoint {found.checkpoint_id} differs: {', '.join(found.what)}"
        elif header is not None:
            yield f"checkpoint {found.checkpoint_id}, taken after record {header.sequence_id}, is only in {name}"
    if len(diff.checkpoints) > diff.limit:
        yield f"and {len(diff.checkpoints) - diff.limit} more checkpoints that differ"


def _verdict(diff: LogDiff, names: Pair) -> str:
    records = f"{counted(diff.same_records, 'record')} the same"
    if diff.is_same:
        return f"same: {records}, {counted(len(diff.summaries[0].checkpoints), 'checkpoint')}"
    counts = [f"{diff.different_records:,} different"]
    counts += [f"{count:,} only in {name}" for count, name in zip(diff.only_records, names, strict=True)]
    return f"different: {records}, {', '.join(counts)}"
