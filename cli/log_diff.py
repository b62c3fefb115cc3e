"""Differences between two logs, as text and as plain values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from immortal.coordinator.core.interfaces import CheckpointHeader
from immortal.coordinator.log import LoggedValue, LogReader
from immortal.presenters.records import describe_record, record_lines, time_text
from immortal.protocol.command_line import counted
from immortal.replay.log_diff import DAMAGE, LogDiff, RecordDifference

Pair = tuple[str, str]

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
    """Describe the record in each log, or its one message that differs; None where a log has trimmed it."""
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
