"""Comparison of two logs record by record: where they first differ, and what only one holds. Both are only read.

Copies of one log have the same committer; their records are compared byte by byte. The records of two logs that were
written independently never have the same bytes; of these the messages and the trailers are compared.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from itertools import groupby, repeat, zip_longest
from typing import Any

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
DAMAGE, MESSAGES, TIME, SOURCES, OUTPUTS = "damage", "messages", "time", "sources", "outputs"
_IDENTITY_IN_WORDS = {
    "instance_name": "instance",
    "committer_id": "committer",
    "created_ns": "made at",
    "format_version": "format",
}
_HEADER_IN_WORDS = {
    "sequence_id": "record",
    "size_bytes": "size",
    "check": "CRC",
    "outputs": "outputs",
    "version": "version",
}


class _Log(Struct):
    """One of the two logs, as the user named it: its totals in the compared range, and what only this log has."""

    name: str
    reader: LogReader
    summary: LogSummary
    records: int = 0
    messages: int = 0
    size_bytes: int = 0
    damaged: int = 0
    only_records: int = 0
    only: list[tuple[int, int]] = field(default_factory=list)  # the first spans

    def rows(self) -> Iterator[LoggedValue]:
        """Return the records that exist, damaged or not, up to the last one of the summary."""
        return (row for row in self.reader.records(last_sequence_id=self.summary.last_sequence_id) if row.value)

    def row(self, sequence_id: int) -> LoggedValue | None:
        return next(self.reader.records(sequence_id, sequence_id), None)

    def trailer(self, row: LoggedValue) -> Trailer | None:
        """Return the trailer of a record; None if the record is damaged."""
        if row.problem is not None:
            return None
        return verify_value(row.value, row.sequence_id, self.reader.identity.committer_id)[1]

    def count(self, row: LoggedValue, trailer: Trailer | None) -> None:
        self.records += 1
        self.size_bytes += len(row.value)
        if trailer is None:
            self.damaged += 1
        else:
            self.messages += sum(batch.count for batch in trailer.batches)

    def count_only(self, row: LoggedValue, limit: int) -> None:
        self.only_records += 1
        if self.only and self.only[-1][1] == row.sequence_id - 1:
            self.only[-1] = (self.only[-1][0], row.sequence_id)
        elif len(self.only) < limit:
            self.only.append((row.sequence_id, row.sequence_id))
        self.count(row, self.trailer(row))

    def values(self) -> dict[str, Any]:
        identity = self.reader.identity
        return {
            "instance": identity.instance_name,
            "committer_id": identity.committer_id,
            "folder": str(self.reader.where),
            "first_sequence_id": self.summary.first_sequence_id,
            "last_sequence_id": self.summary.last_sequence_id,
            "records": self.records,
            "messages": self.messages,
            "size_bytes": self.size_bytes,
            "damaged": self.damaged,
            "checkpoints": [header.checkpoint_id for header in self.summary.checkpoints],
        }

    def text(self) -> str:
        summary = self.summary
        records = f"records {summary.first_sequence_id} to {summary.last_sequence_id}" if self.records else "no records"
        damaged = f", {self.damaged} DAMAGED" if self.damaged else ""
        return (
            f"instance {self.reader.identity.instance_name}, {records}: {self.records:,} with {self.messages:,}"
            f" messages, {self.size_bytes:,} bytes{damaged}; {counted(len(summary.checkpoints), 'checkpoint')}"
        )

    def only_text(self) -> str:
        spans = [f"record {first}" if first == last else f"records {first} to {last}" for first, last in self.only]
        shown = sum(last + 1 - first for first, last in self.only)
        if shown < self.only_records:
            spans.append(f"{self.only_records - shown} more")
        return ", ".join(spans)


class _Difference(Struct, frozen=True):
    """Difference of a record that both logs have.

    ``what``: the parts that differ, of DAMAGE, MESSAGES, TIME, SOURCES and OUTPUTS. ``message_index``: the first
    different message, counted from 0; None if the messages are the same.
    """

    sequence_id: int
    what: list[str]
    message_index: int | None = None

    def values_in(self, log: _Log) -> dict[str, Any] | None:
        """Describe the record in a log, or its one message that differs; None if the log has trimmed it."""
        row = log.row(self.sequence_id)
        record = None if row is None else describe_record(row, log.reader.identity.committer_id)
        if record is None or self.message_index is None or "problem" in record:
            return record
        messages = [message for message in record["messages"] if message["type"] != "RECORD_TIME"]
        return messages[self.message_index] if self.message_index < len(messages) else None

    def text_in(self, log: _Log) -> str:
        """Return the message that differs as text, or the line of the record if no one message does."""
        row = log.row(self.sequence_id)
        if row is None:
            return "trimmed meanwhile"
        own, *messages = record_lines(describe_record(row, log.reader.identity.committer_id))
        if self.message_index is None:
            return own
        messages = [line.strip() for line in messages if not line.strip().startswith("RECORD_TIME")]
        return messages[self.message_index] if self.message_index < len(messages) else "no such message"

    def heading(self) -> str:
        what = [word for word in self.what if word != MESSAGES]
        if DAMAGE in what:
            return f"record {self.sequence_id} is damaged:"
        if self.message_index is not None:
            also = f" ({', '.join(what)} too)" if what else ""
            return f"record {self.sequence_id}, message {self.message_index} differs{also}:"
        return f"record {self.sequence_id}: the messages are the same, but not its {' and '.join(what)}:"


class _CheckpointDifference(Struct, frozen=True):
    """Difference of a checkpoint; None stands for a log that does not have it. ``what``: the fields that differ."""

    checkpoint_id: int
    headers: tuple[CheckpointHeader | None, CheckpointHeader | None]
    what: list[str]

    def text(self, logs: tuple[_Log, _Log]) -> str:
        for header, other in zip(self.headers, reversed(logs), strict=True):
            if header is None:
                (had,) = filter(None, self.headers)
                after = f"taken after record {had.sequence_id}"
                return f"checkpoint {self.checkpoint_id}, {after}, is only in {other.name}"
        return f"checkpoint {self.checkpoint_id} differs: {', '.join(self.what)}"


class LogDiff:
    """Differences of two logs, each with the name that the user gave it, in the contents that they have at the start.

    The lists hold the first ``limit`` of each kind; the counts include all. ``progress(records, total)`` is called now
    and then. Raises DamagedLogError if a log can't be read at all; a damaged record is a difference.
    """

    def __init__(
        self,
        first: tuple[str, LogReader],
        second: tuple[str, LogReader],
        *,
        limit: int,
        progress: Callable[[int, int], None],
    ) -> None:
        self._limit = limit
        self._logs = _Log(*first, first[1].summary()), _Log(*second, second[1].summary())
        self._identity = {
            name: values
            for name in _IDENTITY_IN_WORDS
            if (values := tuple(getattr(one.reader.identity, name) for one in self._logs))[0] != values[1]
        }
        self._checkpoints = list(_checkpoint_differences(self._logs))
        self._same_records = self._different_records = 0
        self._differences: list[_Difference] = []
        begins = min(one.summary.first_sequence_id for one in self._logs)
        total = max(one.summary.last_sequence_id for one in self._logs) + 1 - begins
        rows = (zip(one.rows(), repeat(index)) for index, one in enumerate(self._logs))
        merged = heapq.merge(*rows, key=lambda one: one[0].sequence_id)
        for sequence_id, some in groupby(merged, key=lambda one: one[0].sequence_id):
            if (sequence_id - begins) % PROGRESS_RECORDS == 0:
                progress(sequence_id - begins, total)
            match list(some):
                case [(row, index)]:
                    self._logs[index].count_only(row, limit)
                case [(one, _), (other, _)]:
                    self._compare(one, other)

    def _compare(self, one: LoggedValue, other: LoggedValue) -> None:
        is_copy = one.value == other.value and one.problem is None and other.problem is None
        first, second = self._logs
        trailer = first.trailer(one)
        other_trailer = trailer if is_copy else second.trailer(other)
        first.count(one, trailer)
        second.count(other, other_trailer)
        difference = None if is_copy else _difference(one, other, trailer, other_trailer)
        if difference is None:
            self._same_records += 1
            return
        self._different_records += 1
        if len(self._differences) < self._limit:
            self._differences.append(difference)

    @property
    def is_same(self) -> bool:
        only = any(one.only_records for one in self._logs)
        return not (self._identity or self._different_records or only or self._checkpoints)

    def values(self) -> dict[str, Any]:
        """Return plain values for JSON. "a" and "b" are the two logs, in the order in which they were given."""
        a, b = self._logs
        return {
            "same": self.is_same,
            "a": a.values(),
            "b": b.values(),
            "identity": {name: dict(zip("ab", values, strict=True)) for name, values in self._identity.items()},
            "records": {
                "same": self._same_records,
                "different": self._different_records,
                "only_a": a.only_records,
                "only_b": b.only_records,
            },
            "first": [
                {
                    "record": one.sequence_id,
                    "what": one.what,
                    "message": one.message_index,
                    "a": one.values_in(a),
                    "b": one.values_in(b),
                }
                for one in self._differences
            ],
            "only_a": [list(span) for span in a.only],
            "only_b": [list(span) for span in b.only],
            "checkpoints": [
                {
                    "checkpoint": one.checkpoint_id,
                    "what": one.what,
                    **dict(zip("ab", map(_checkpoint_values, one.headers), strict=True)),
                }
                for one in self._checkpoints
            ],
        }

    def lines(self) -> Iterator[str]:
        """Yield lines for people."""
        width = max(len(one.name) for one in self._logs)
        for log in self._logs:
            yield f"{log.name:{width}}  {log.text()}"
        for name, values in self._identity.items():
            shown = map(time_text, values) if name == "created_ns" else map(str, values)
            yield f"{_IDENTITY_IN_WORDS[name]} differs: {', '.join(shown)}"
        for difference in self._differences:
            yield difference.heading()
            for log in self._logs:
                yield f"    {log.name:{width}}  {difference.text_in(log)}"
        if self._different_records > len(self._differences):
            yield f"and {self._different_records - len(self._differences)} more records that differ"
        for log in self._logs:
            if log.only_records:
                yield f"only in {log.name}: {log.only_text()}"
        for checkpoint in self._checkpoints[: self._limit]:
            yield checkpoint.text(self._logs)
        if len(self._checkpoints) > self._limit:
            yield f"and {len(self._checkpoints) - self._limit} more checkpoints that differ"
        records = f"{counted(self._same_records, 'record')} the same"
        if self.is_same:
            yield f"same: {records}, {counted(len(self._logs[0].summary.checkpoints), 'checkpoint')}"
        else:
            only = "".join(f", {one.only_records:,} only in {one.name}" for one in self._logs)
            yield f"different: {records}, {self._different_records:,} different{only}"


def _checkpoint_differences(logs: tuple[_Log, _Log]) -> Iterator[_CheckpointDifference]:
    ours, theirs = ({header.checkpoint_id: header for header in one.summary.checkpoints} for one in logs)
    for checkpoint_id in sorted(ours.keys() | theirs.keys()):
        one, other = ours.get(checkpoint_id), theirs.get(checkpoint_id)
        what = []
        if one is not None and other is not None:
            what = [word for name, word in _HEADER_IN_WORDS.items() if getattr(one, name) != getattr(other, name)]
        if what or one is None or other is None:
            yield _CheckpointDifference(checkpoint_id, (one, other), what)


def _difference(
    first: LoggedValue, second: LoggedValue, trailer: Trailer | None, second_trailer: Trailer | None
) -> _Difference | None:
    if trailer is None or second_trailer is None:
        return _Difference(first.sequence_id, [DAMAGE])
    messages = zip_longest(_messages_of(first.value), _messages_of(second.value))
    index = next((index for index, (ours, theirs) in enumerate(messages) if ours != theirs), None)
    differs = {
        MESSAGES: index is not None,
        TIME: trailer.time_ns != second_trailer.time_ns,
        SOURCES: trailer.batches != second_trailer.batches,
        OUTPUTS: trailer.outputs != second_trailer.outputs,
    }
    what = [word for word, is_other in differs.items() if is_other]
    return _Difference(first.sequence_id, what, index) if what else None


def _messages_of(value: bytes) -> Iterator[bytes]:
    """Yield all messages of a record except its time; how they are batched does not matter."""
    for batch in batches(record_of(value).content):
        offset = 0
        for _, _, end in decode_messages(batch.payload):
            yield batch.payload[offset:end]
            offset = end


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
