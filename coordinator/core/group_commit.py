"""Group commit: while the log works on its maximum of transactions, further input gathers in the next group.

A group becomes one log record (if it has input) and one transaction. If the log is idle, a message commits at once; if
it is busy, groups grow up to a size. Nothing waits for a timer. Groups become durable in the order of their tickets.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from immortal.coordinator.core.errors import fail
from immortal.coordinator.core.interfaces import LogSummary, OutputMark, Transaction
from immortal.protocol.extensions import encode_record_time
from immortal.protocol.messages import MessageType
from immortal.protocol.record import encode_header
from immortal.protocol.trailer import BatchSource, OutputMarkEntry, Trailer, encode_trailer

COMMITS_ON_THEIR_WAY_MAX = 16
"""Limit of full groups in flight: enough to keep a slow disk busy, few enough to bound what waits behind it. The
writer joins waiting groups: this many go to the disk in two turns."""


@dataclass(slots=True, eq=False, repr=False)
class Group:
    """Input and state changes that one commit makes durable."""

    ticket: int
    chunks: list[bytes] = field(default_factory=list)  # the record's messages
    batches: list[BatchSource] = field(default_factory=list)
    size_bytes: int = 0  # of the chunks and impulses
    transaction: Transaction = field(default_factory=Transaction)
    impulses_accepted: int = 0  # number of the current app's impulses in this group
    from_app_bytes: int = 0
    required: bool = False  # it has more than acknowledgements, which alone are not worth a sync
    sequence_id: int | None = None  # of its record, once sealed
    expected_last_sequence_id: int = -1  # of the record before it
    record: memoryview | None = None  # as the app gets it; set once sealed

    @property
    def empty(self) -> bool:
        return not self.chunks and not self.required


class GroupCommit:
    """Groups that take input, wait for the disk, or are on their way to it.

    ``with_record_time``: records begin with their time (the app has asked for it). ``appends_max``: how many groups can
    be in flight without being full. ``held``: no group is handed over for now.
    """

    def __init__(self, group_size_bytes: int) -> None:
        self._committer_id = 0
        self._group_size_bytes = group_size_bytes
        self._last_time_ns = 0
        self._next_sequence_id = 0
        self._waiting: deque[Group] = deque([Group(1)])
        self._committing: deque[Group] = deque()
        self.with_record_time = False
        self.appends_max = 1
        self.is_held = True  # until this process has the write lease
        self.durable_ticket = 0
        self.durable_sequence_id = -1
        self.from_app_bytes = 0  # waiting or in flight, from the app
        self.pending_bytes = 0  # waiting or in flight, in all
        self.logged_bytes = 0  # committed since the start

    def load(self, summary: LogSummary) -> None:
        """Continue the log that ``summary`` describes. Call it while nothing is on its way to the disk."""
        self._committer_id = summary.committer_id
        self._next_sequence_id = summary.last_sequence_id + 1
        self._last_time_ns = max(summary.last_time_ns, *(header.time_ns for header in summary.checkpoints), 0)
        self.durable_sequence_id = summary.last_sequence_id
        self.with_record_time = MessageType.RECORD_TIME in (summary.extensions or ())

    @property
    def open(self) -> Group:
        """The group that accepts input now."""
        return self._waiting[-1]

    @property
    def commits_next(self) -> bool:
        """True if a group is ready: :meth:`next_commit` would return it now."""
        waiting = self._waiting
        if self.is_held:
            return False
        if len(waiting) > 1:  # a full one
            return len(self._committing) < COMMITS_ON_THEIR_WAY_MAX
        first = waiting[0]
        return bool(first.required or first.chunks) and len(self._committing) < self.appends_max

    @property
    def is_idle(self) -> bool:
        """True if all groups are durable, except for acknowledgements that are not worth a sync."""
        return not self._committing and all(group.empty for group in self._waiting)

    @property
    def seals_next(self) -> bool:
        """True if the next group to commit holds input, so it becomes a record."""
        return bool(self._waiting[0].chunks)

    @property
    def next_ticket(self) -> int:
        """Ticket of the group that :meth:`next_commit` would return."""
        return self._waiting[0].ticket

    def append(self, chunks: Iterable[bytes], size_bytes: int, source: BatchSource, *, from_app: bool = False) -> Group:
        """Add one top-level message, given as ``chunks`` of ``size_bytes`` in all, from ``source``."""
        group = self._with_room(size_bytes)
        group.chunks.extend(chunks)
        group.batches.append(source)
        self.count(group, size_bytes, from_app)
        return group

    def append_no_message(self) -> None:
        """Ask for a record without messages, for the marks that it carries."""
        group = self._waiting[-1]
        group.chunks.append(b"")
        group.required = True

    @property
    def open_sequence_id(self) -> int:
        """Sequence ID of the record that the open group becomes, if it has input."""
        return self._next_sequence_id + sum(1 for group in self._waiting if group.chunks and group is not self.open)

    def append_outside_record(self, size_bytes: int, *, from_app: bool = False) -> Group:
        """Return the group to whose transaction the caller adds ``size_bytes`` itself."""
        group = self._with_room(size_bytes)
        group.required = True
        self.count(group, size_bytes, from_app)
        return group

    def _with_room(self, size_bytes: int) -> Group:
        group = self._waiting[-1]
        if group.size_bytes and group.size_bytes + size_bytes > self._group_size_bytes:
            return self.close_group()
        return group

    def close_group(self) -> Group:
        """Close the open group to more input, and return the next one."""
        self._waiting.append(Group(self._waiting[-1].ticket + 1))
        return self._waiting[-1]

    def count(self, group: Group, size_bytes: int, from_app: bool = False) -> None:
        """Count ``size_bytes`` of input that was added to ``group``."""
        group.size_bytes += size_bytes
        self.pending_bytes += size_bytes
        if from_app:
            group.from_app_bytes += size_bytes
            self.from_app_bytes += size_bytes

    def next_commit(self, now_ns: int, marks: Mapping[str, OutputMark]) -> Group | None:
        """Seal the next group and return it; None if there is nothing to do now.

        A full group does not wait until the one before is durable: the writer may join several into one sync.
        ``marks``: the output streams that have moved since the last record.
        """
        if not self.commits_next:
            return None
        if len(self._waiting) == 1:
            self.close_group()
        group = self._waiting.popleft()
        self._committing.append(group)
        group.expected_last_sequence_id = self._next_sequence_id - 1
        if group.chunks:
            self._seal(group, now_ns, marks)
        return group

    def _seal(self, group: Group, now_ns: int, marks: Mapping[str, OutputMark]) -> None:
        # The record's time is the only clock of handlers: it never goes back, whatever the machine's clock does.
        time_ns = self._last_time_ns = self.time_ns(now_ns)
        if self.with_record_time:
            group.chunks.insert(0, encode_record_time(time_ns))
        sequence_id = self._next_sequence_id
        self._next_sequence_id += 1
        header = encode_header(self._committer_id, sequence_id, group.chunks)
        outputs = [OutputMarkEntry(name, mark.position, mark.checksum) for name, mark in marks.items()]
        trailer = encode_trailer(Trailer(time_ns, group.batches, outputs), int.from_bytes(header[8:16], "little"))
        value = b"".join((header, *group.chunks, trailer))
        group.sequence_id = sequence_id
        group.record = memoryview(value)[: len(value) - len(trailer)]
        group.transaction.records.append((sequence_id, value))
        group.chunks = []
        self.logged_bytes += len(value)

    def committed(self, ticket: int) -> Group:
        """Note that the group with this ticket is durable now, and return it."""
        first = self._committing[0].ticket if self._committing else None
        if ticket != first:
            fail(f"commit {ticket} is done, but was not on its way")
        group = self._committing.popleft()
        self.durable_ticket = ticket
        self.from_app_bytes -= group.from_app_bytes
        self.pending_bytes -= group.size_bytes
        if group.sequence_id is not None:
            self.durable_sequence_id = group.sequence_id
        return group

    def forget_app(self) -> None:
        """Forget an app that is gone: what it sent still becomes durable, but nobody waits for it."""
        for group in (*self._waiting, *self._committing):
            group.impulses_accepted = 0

    def time_ns(self, now_ns: int) -> int:
        """Return ``now_ns``, or the last record's time if the clock is behind it."""
        return max(now_ns, self._last_time_ns)
