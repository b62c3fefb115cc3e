"""Audit of one stream: what the receiver executed, against the marks of the sender.

The receiver's log shows which positions were executed, in which order. The sender's log has a *mark* now and then: the
stream's position and the checksum of all its messages. The bytes executed between two marks must lead from one checksum
to the other. Impulses take positions but are left out of the checksum.

Positions find lost, doubled and reordered messages; checksums find swapped and altered ones; the marks' records find
messages that were executed before they can have been made. No I/O, no clock; memory does not grow with the stream.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from immortal.coordinator.core.errors import InvariantError
from immortal.coordinator.core.interfaces import IMPULSES
from immortal.protocol.batch import offset_after
from immortal.protocol.checksum import crc64
from immortal.protocol.messages import RpcType, decode_message
from immortal.protocol.varint import decode_zigzag_int

KINDS = ("lost", "duplicate", "order", "content", "invented", "causality", "identity", "damage")
"""Kinds of faults, in the order of reports."""

FINDINGS_PER_STREAM_MAX = 10_000
"""Maximum of findings of a stream that are kept in full; further ones are only counted."""

SEGMENT_SIZE_BYTES_MAX = 64 << 20
"""Maximum of bytes between two marks that are kept, to look for a mark that a crash has moved."""

UNMARKED_MAX = 1_000
"""Maximum of batches after the last mark that are kept."""

FIRST_BATCHES_MAX = 1_000
"""Number of first batches whose contents are kept, to tell a duplicate of them from a stream that began anew."""

UNKNOWN = -1

Result = tuple[str, str, str, int, int, str]
"""Result on a stream: kind ("log", "finding", "needs", "ordered", "stream"), sender, receiver, first, last,
JSON. (For "ordered" the numbers are the record and the batch.)"""


class Mark(NamedTuple):
    """Mark about the stream, in record ``sequence_id`` of the sender."""

    position: int
    checksum: int  # unsigned
    sequence_id: int
    time_ns: int


_BEGINNING = Mark(0, 0, UNKNOWN, 0)


class Part(NamedTuple):
    """Messages of a stream that were sent and executed together: ``size`` from position ``first`` on, packed."""

    first: int
    size: int
    impulses: int  # how many of them are
    sent_ns: int
    payload: bytes

    @property
    def last(self) -> int:
        return self.first + self.size - 1

    def cut(self, position: int) -> tuple[Part, Part | None]:
        """Split after ``position``, which is within: (the part up to it, the rest)."""
        count = position - self.first + 1
        if count == self.size:
            return self, None
        offset = offset_after(self.payload, count, self.size)
        front, back = self.payload[:offset], self.payload[offset:]
        if not self.impulses or self.impulses == self.size:
            impulses = min(self.impulses, count)
        else:
            impulses = count_impulses(front)
        return (
            Part(self.first, count, impulses, self.sent_ns, front),
            Part(position + 1, self.size - count, self.impulses - impulses, self.sent_ns, back),
        )

    def after(self, position: int) -> Part:
        """Return the part after ``position``, which is within and not the last."""
        back = self.cut(position)[1]
        if back is None:
            raise InvariantError(f"nothing of {self.first} to {self.last} lies behind {position}")
        return back


@dataclass(frozen=True, slots=True)
class Finding:
    """Fault of the messages ``first`` to ``last`` of a stream.

    ``record``: record of the receiver's log that shows it; ``behind_record``: the record before it, in the same log.
    """

    kind: str
    first: int
    last: int
    record: int
    text: str
    behind_record: int = UNKNOWN


@dataclass(frozen=True, slots=True)
class Violation:
    """Fault in a fleet. ``first`` and ``last`` are positions in the stream (for damage: records of the log)."""

    kind: str
    sender: str
    receiver: str
    first: int
    last: int
    record: int  # of the receiver's log, -1 if no record shows it
    text: str


class Needs(NamedTuple):
    """The receiver's ``record`` holds a message that was made after the sender's record ``sender_record``."""

    record: int
    sender_record: int


@dataclass(slots=True)
class StreamFigures:
    """Figures of a stream that was read to its end."""

    messages: int = 0  # executed, without duplicates
    impulses: int = 0
    size_bytes: int = 0
    first: int = 0  # positions; 0: none
    last: int = 0
    last_record: int = UNKNOWN  # of the receiver
    made: int = 0  # as far as the sender's last mark says; 0: it has none
    marks: int = 0
    last_mark_ns: int = 0
    compared: int = 0  # messages whose bytes the sender's checksums confirm or refute
    restarts: int = 0  # the sender continued with another log; the positions are those of the last one
    shifted_marks: int = 0  # they counted impulses that a crash took away before they were accepted
    counts: dict[str, int] = field(default_factory=dict)  # by kind
    unmarked: list[tuple[int, int, int, int]] = field(default_factory=list)
    """First batches with calls after the last mark: (first position, last, send time, record)."""


class StreamAudit:
    """Check of one stream: it takes all marks of the sender, in the order of its log, then all batches of the receiver.

    Batches are in the order of the receiver's log. ``tolerance_ns``: by how much clocks can differ.
    """

    def __init__(self, sender: str, receiver: str, tolerance_ns: int = 0) -> None:
        self.figures = StreamFigures()
        self.findings: list[Finding] = []
        self.needs: list[Needs] = []
        self._from = in_words(sender)
        self._receiver = receiver
        self._tolerance_ns = tolerance_ns
        self._marks: list[Mark] = []
        self._positions: list[int] | None = None  # of the marks, once all are there
        self._last_marked = 0
        self._next_mark = 0
        self._expected = 1
        self._record_before = UNKNOWN
        self._missing: list[tuple[int, int, int, int]] = []  # first, last, record before, and after; sorted, disjoint
        self._deferred: tuple[int, int, Part] | None = None  # a batch that is a duplicate, or begins the stream anew
        self._check = 0  # of all messages, impulses included, while none is missing
        self._check_at: dict[int, int] = {}  # the same after each of the first batches, by position
        # The checksum up to the last position; None: not known. Impulses to oneself are in no checksum.
        self._running: int | None = None if sender == IMPULSES else 0
        self._compared_from = 1  # the first message that no mark has confirmed
        self._segment: list[bytes] = []  # those messages, while they are few enough
        self._segment_size_bytes = 0
        self._segment_start = 0  # the checksum in front of them

    def add_mark(self, mark: Mark) -> None:
        self._marks.append(mark)
        self.figures.made = mark.position
        self.figures.marks += 1
        self.figures.last_mark_ns = max(self.figures.last_mark_ns, mark.time_ns)

    def add_batch(self, record: int, time_ns: int, part: Part) -> None:
        """Take ``part``, which record ``record`` of the receiver executed, logged at ``time_ns``."""
        if self._positions is None:
            self._sort_marks()
        if not part.size:
            return
        if self._deferred is not None:
            deferred, self._deferred = self._deferred, None
            if part.first == deferred[2].last + 1 != self._expected:
                self._restart_stream()
            self._execute(*deferred)
        is_late = bool(self._missing) and self._missing[0][0] == 1
        if part.first == 1 < self._expected and not is_late and self._check_at.get(part.last) != crc64(part.payload):
            self._deferred = (record, time_ns, part)  # the next batch shows if the stream began anew
            return
        self._execute(record, time_ns, part)

    def _execute(self, record: int, time_ns: int, part: Part) -> None:
        figures = self.figures
        figures.last_record = max(figures.last_record, record)
        figures.size_bytes += len(part.payload)
        self._check_times(record, time_ns, part)
        expected = self._expected
        if part.first < expected:
            self._executed_again(record, part.first, min(part.last, expected - 1))
            if part.last < expected:
                return
            part = part.after(expected - 1)
        elif part.first > expected:
            self._missing.append((expected, part.first - 1, self._record_before, record))
            self._running = None
        figures.first = figures.first or part.first
        figures.last = part.last
        figures.messages += part.size
        figures.impulses += part.impulses
        self._expected = part.last + 1
        self._record_before = record
        if not self._missing and len(self._check_at) < FIRST_BATCHES_MAX:
            self._check = self._check_at[part.last] = crc64(part.payload, self._check)
        if part.last > self._last_marked and part.impulses < part.size and len(figures.unmarked) < UNMARKED_MAX:
            self._note_unmarked(record, part)
        self._compare(record, part)

    def _restart_stream(self) -> None:
        """Begin again at position 1: the sender has another log, with its own numbers and marks."""
        self._report_missing()
        kept = [finding for finding in self.findings if finding.kind not in ("content", "causality")]
        for kind in ("content", "causality"):
            self.figures.counts.pop(kind, None)
        self.findings = kept
        self.needs.clear()
        figures = self.figures
        figures.restarts += 1
        figures.compared = figures.shifted_marks = figures.first = figures.last = 0
        figures.unmarked.clear()
        self._expected, self._next_mark, self._check = 1, 0, 0
        self._check_at.clear()
        self._continue_from(_BEGINNING)

    def _note_unmarked(self, record: int, part: Part) -> None:
        if part.first <= self._last_marked:
            part = part.after(self._last_marked)
        if part.impulses < part.size:
            self.figures.unmarked.append((part.first, part.last, part.sent_ns, record))

    def finish(self) -> None:
        """End the check after the last batch: messages that are missing now are lost."""
        if self._positions is None:
            self._sort_marks()
        if self._deferred is not None:
            self._execute(*self._deferred)
        self._report_missing()

    def _report_missing(self) -> None:
        for first, last, behind, record in self._missing:
            text = f"{_messages(first, last)} of {self._from}: never executed by {self._receiver!r}"
            self._add_finding("lost", first, last, record, text, behind)
        self._missing.clear()

    # --- positions -------------------------------------------------------------------------------------------------

    def _executed_again(self, record: int, first: int, last: int) -> None:
        """Handle positions that the log was past already: late messages, or duplicates."""
        missing = self._missing
        start = first
        index = max(0, bisect_right(missing, (first, 1 << 63, 0, 0)) - 1)
        while start <= last:
            while index < len(missing) and missing[index][1] < start:
                index += 1
            if index == len(missing) or missing[index][0] > last:
                self._duplicate(record, start, last)
                return
            gap_first, gap_last, behind, at = missing[index]
            if start < gap_first:
                self._duplicate(record, start, gap_first - 1)
                start = gap_first
            end = min(last, gap_last)
            text = f"{_messages(start, end)} of {self._from}: executed behind message {self._expected - 1}"
            self._add_finding("order", start, end, record, text)
            self.figures.messages += end - start + 1
            rest = [(gap_first, start - 1, behind, at)] if gap_first < start else []
            rest += [(end + 1, gap_last, behind, at)] if end < gap_last else []
            missing[index : index + 1] = rest
            start = end + 1

    def _duplicate(self, record: int, first: int, last: int) -> None:
        text = f"{_messages(first, last)} of {self._from}: executed again"
        self._add_finding("duplicate", first, last, record, text)

    # --- causality -------------------------------------------------------------------------------------------------

    def _check_times(self, record: int, time_ns: int, part: Part) -> None:
        first, last, sent_ns = part.first, part.last, part.sent_ns
        if sent_ns > time_ns + self._tolerance_ns:
            text = f"{_messages(first, last)} of {self._from}: logged {_ms(sent_ns - time_ns)} before being sent"
            self._add_finding("causality", first, last, record, text)
        positions = self._positions or ()
        index = bisect_left(positions, last) - 1
        if index < 0:
            return
        mark_before = self._marks[index]
        if sent_ns < mark_before.time_ns - self._tolerance_ns:
            text = (
                f"message {last} of {self._from} was sent {_ms(mark_before.time_ns - sent_ns)} before record"
                f" {mark_before.sequence_id} of {self._from}, which says that it was not made yet"
            )
            self._add_finding("causality", last, last, record, text)
        if not self.needs or mark_before.sequence_id > self.needs[-1].sender_record:
            self.needs.append(Needs(record, mark_before.sequence_id))

    # --- contents --------------------------------------------------------------------------------------------------

    def _sort_marks(self) -> None:
        self._marks.sort(key=lambda mark: (mark.position, mark.sequence_id))  # a crash can set positions back a little
        self._positions = [mark.position for mark in self._marks]
        self._last_marked = self._positions[-1] if self._positions else 0

    def _compare(self, record: int, part: Part | None) -> None:
        """Add a part that continues the stream to the checksum, and compare at each mark on the way."""
        positions = self._positions or []
        while part is not None:
            if self._running is None:  # continue from the checksum of the next mark
                self._next_mark = bisect_left(positions, part.first - 1, self._next_mark)
            if self._next_mark == len(positions):
                return  # nothing will ever be compared with it
            if positions[self._next_mark] > part.last:
                self._add_to_checksum(part)
                return
            mark = self._marks[self._next_mark]
            self._next_mark += 1
            if mark.position >= part.first:
                front, part = part.cut(mark.position)
                self._add_to_checksum(front)
            if self._running is None:
                self._continue_from(mark)
            else:
                self._compare_with_mark(mark, record)

    def _add_to_checksum(self, part: Part) -> None:
        if self._running is None or part.impulses == part.size:
            return
        replayed = without_impulses(part.payload) if part.impulses else part.payload
        self._running = crc64(replayed, self._running)
        self._segment_size_bytes += len(replayed)
        if self._segment_size_bytes <= SEGMENT_SIZE_BYTES_MAX:
            self._segment.append(replayed)
        else:
            self._segment.clear()

    def _compare_with_mark(self, mark: Mark, record: int) -> None:
        first, last = self._compared_from, mark.position
        if self._running != mark.checksum:
            if self._is_shifted(mark):
                self.figures.shifted_marks += 1
                return
            if first <= last:
                text = (
                    f"{_messages(first, last)} of {self._from}: what {self._receiver!r} executed is not what"
                    f" {self._from} made: its record {mark.sequence_id} has checksum {mark.checksum:016x},"
                    f" the executed bytes give {self._running or 0:016x}"
                )
            else:
                text = f"the marks of {self._from} at position {last} contradict each other"
            self._add_finding("content", min(first, last), last, record, text)
        self.figures.compared += max(0, last - first + 1)
        self._continue_from(mark)

    def _continue_from(self, mark: Mark) -> None:
        self._running = self._segment_start = mark.checksum
        self._segment.clear()
        self._segment_size_bytes = 0
        self._compared_from = mark.position + 1

    def _is_shifted(self, mark: Mark) -> bool:
        """Return True if the mark fits a position some messages earlier.

        A mark can count impulses that were not durable yet. If a crash removes these, the messages after them get their
        positions, and the mark stands after the message for which it was made.
        """
        running = self._segment_start
        if running == mark.checksum:
            return True
        for payload in self._segment:
            offset = 0
            while offset < len(payload):
                end = decode_message(payload, offset)[2]
                running = crc64(payload[offset:end], running)
                if running == mark.checksum:
                    return True
                offset = end
        return False

    def _add_finding(
        self, kind: str, first: int, last: int, record: int, text: str, record_before: int = UNKNOWN
    ) -> None:
        self.figures.counts[kind] = self.figures.counts.get(kind, 0) + 1
        if len(self.findings) < FINDINGS_PER_STREAM_MAX:
            self.findings.append(Finding(kind, first, last, record, text, record_before))


def without_impulses(payload: bytes) -> bytes:
    """Return the messages of ``payload`` that a replay makes again. Raises RemoteProtocolError."""
    return b"".join([payload[start:end] for start, end, is_impulse in walk(payload) if not is_impulse])


def count_impulses(payload: bytes) -> int:
    """Return the number of impulses in ``payload``. Raises RemoteProtocolError."""
    return sum([is_impulse for _, _, is_impulse in walk(payload)])


def walk(payload: bytes) -> Iterator[tuple[int, int, bool]]:
    """Yield (start, end, is an impulse) of each message. Raises RemoteProtocolError."""
    offset = 0
    while offset < len(payload):
        _, start, end = decode_message(payload, offset)
        behind_method = decode_zigzag_int(payload, start + 1)[1]
        yield offset, end, payload[behind_method] == RpcType.IMPULSE
        offset = end


def in_words(sender: str) -> str:
    return "outside" if sender == IMPULSES else repr(sender)


def _messages(first: int, last: int) -> str:
    return f"message {first}" if first == last else f"messages {first} to {last}"


def _ms(duration_ns: int) -> str:
    return f"{duration_ns / 1e6:,.3f} ms"
