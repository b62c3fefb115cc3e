"""Streams of a publisher and their shared views: a part is encoded once for all streams of one view. No I/O, no
clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from immortal.appsdk.patterns.clone.frames import Activate, Dropped, Part, StreamReport, encode
from immortal.appsdk.patterns.clone.model import ALL, Entries, Row, covers, size_bytes, subtrees_of

PART_SIZE_BYTES_MAX = 64 << 10  # of one frame to a client, except for a single larger value
PART_CHANGES_MAX = 1000
HISTORY_BYTES = 1 << 20  # kept of each view, so that a nearly up-to-date stream needs no walk

EVERYTHING = -1
"""Value of ``after`` for a stream that needs everything."""


class Chunk(NamedTuple):
    """Encoded part of a view. ``end_bytes``, ``end_changes``: totals of the view up to the end of this part."""

    data: bytes
    number: int
    end_bytes: int
    end_changes: int


class Walk:
    """Catch-up of a stream from ``after`` to ``number``, each key once. Parts are encoded on demand.

    ``then``: the index of the view's next part; ``then_changes``: number of the view's changes before that part.
    """

    def __init__(self, rows: Sequence[Row], after: int, view: View, *, shared: bool) -> None:
        self.after = after
        self.number = view.number
        self.then = view.end
        self.then_changes = view.end_changes
        self._groups: list[Sequence[Row] | None] = list(_groups(rows)) or [()]
        self.is_shared = shared
        self._encoded: list[bytes] = []

    @property
    def parts(self) -> int:
        return len(self._groups)

    def part(self, index: int) -> bytes:
        """Return a part. Request parts in order, since a walk that is not shared keeps none."""
        if index < len(self._encoded):
            return self._encoded[index]
        rows = self._groups[index]
        assert rows is not None
        changes = [(row.key, row.number, row.value) for row in rows]
        data = encode(Part(self.after, self.number, index + 1 < self.parts, True, changes))
        self._groups[index] = None
        if self.is_shared:
            self._encoded.append(data)
        return data


def _groups(rows: Sequence[Row]) -> Iterator[Sequence[Row]]:
    """Yield the rows in groups, each for one frame."""
    begin, bytes_in = 0, 0
    for index, row in enumerate(rows):
        bytes_of = size_bytes(row)
        if index > begin and (bytes_in + bytes_of > PART_SIZE_BYTES_MAX or index - begin >= PART_CHANGES_MAX):
            yield rows[begin:index]
            begin, bytes_in = index, 0
        bytes_in += bytes_of
    if begin < len(rows):
        yield rows[begin:]


class View:
    """Part of the table that streams share. ``number``: the update that its last part ends with. ``users``: number of
    its streams.
    """

    def __init__(self, visible: tuple[str, ...], number: int) -> None:
        self.visible = visible
        self.number = number
        self.users = 0
        self.first = 0  # index of the oldest kept part
        self.end_bytes = 0
        self.end_changes = 0
        self._dropped_bytes = 0  # total before the oldest part
        self._chunks: deque[Chunk] = deque()
        self.pending: list[Row] = []
        self._is_conflated = False
        self.snapshot: Walk | None = None  # walk over everything, shared while streams walk

    @property
    def end(self) -> int:
        """Index of the next part."""
        return self.first + len(self._chunks)

    def __getitem__(self, index: int) -> Chunk:
        return self._chunks[index - self.first]

    def bytes_before(self, index: int) -> int:
        """Return the bytes of all parts before ``index``."""
        return self._dropped_bytes if index <= self.first else self[index - 1].end_bytes

    def add(self, row: Row, *, is_conflated: bool) -> None:
        self.pending.append(row)
        self._is_conflated |= is_conflated

    def includes(self, key: str) -> bool:
        return any(covers(one, key) for one in self.visible)

    def encode_pending(self, number: int) -> None:
        """Encode all pending rows as parts, up to ``number``; an empty part if none is pending."""
        if number <= self.number and not self.pending:
            return
        groups = list(_groups(self.pending)) or [()]
        for index, rows in enumerate(groups):
            to = number if index + 1 == len(groups) else rows[-1].number
            changes = [(row.key, row.number, row.value) for row in rows]
            data = encode(Part(self.number, to, False, self._is_conflated, changes))
            self.end_bytes += len(data)
            self.end_changes += len(changes)
            self._chunks.append(Chunk(data, to, self.end_bytes, self.end_changes))
            self.number = to
        self.pending = []
        self._is_conflated = False

    def trim(self, first_needed: int) -> None:
        """Drop parts before index ``first_needed``, except the last HISTORY_BYTES."""
        while self.first < first_needed and self._chunks and self.end_bytes - self._dropped_bytes > HISTORY_BYTES:
            self._dropped_bytes = self._chunks.popleft().end_bytes
            self.first += 1
        if self.snapshot is not None and self.snapshot.then < self.first:
            self.snapshot = None

    def walk(self, entries: Entries, after: int) -> Walk:
        """Return the walk from ``after`` to now; nothing may be pending. If ``after`` is too old, it has everything."""
        rows = None if after == EVERYTHING else entries.since(after)
        if rows is not None:
            return Walk([row for row in rows if self.includes(row.key)], after, self, shared=False)
        if self.snapshot is None:
            if self.visible == ALL:
                seen = entries.everything()
            else:
                seen = [row for row in entries.rows.values() if self.includes(row.key)]
            self.snapshot = Walk(seen, EVERYTHING, self, shared=True)
        return self.snapshot


class Views:
    """Views that have streams."""

    def __init__(self) -> None:
        self._views: dict[tuple[str, ...], View] = {}
        self._by_subtree: dict[str, list[View]] = {}

    def __iter__(self) -> Iterator[View]:
        return iter(self._views.values())

    def acquire(self, visible: tuple[str, ...], number: int) -> View:
        """Return the view for one more stream. ``number``: the table's present update; a new view must lack no pending
        row.
        """
        view = self._views.get(visible)
        if view is None:
            view = self._views[visible] = View(visible, number)
            for subtree in visible:
                self._by_subtree.setdefault(subtree, []).append(view)
        view.users += 1
        return view

    def release(self, view: View) -> None:
        view.users -= 1
        if view.users:
            return
        del self._views[view.visible]
        for subtree in view.visible:
            views = self._by_subtree[subtree]
            views.remove(view)
            if not views:
                del self._by_subtree[subtree]

    def add(self, rows: Iterable[Row], *, is_conflated: bool) -> None:
        by_subtree = self._by_subtree
        for row in rows:
            for subtree in subtrees_of(row.key):
                for view in by_subtree.get(subtree, ()):
                    view.add(row, is_conflated=is_conflated)


# One stream: its client's progress, its window, its policy if it is slow. No I/O, no clock.


Send = Callable[[bytes], None]


class Stream:
    """Stream of one client: it is in step with its view, or walks, or waits for a walk from ``after`` on.

    ``id``: its name in the whole tree of publishers. ``route``: of its client's connection.
    """

    def __init__(
        self, key: str, route: bytes, name: str, request: Activate, view: View, after: int, now_ns: int
    ) -> None:
        self.id = key
        self.route = route
        self.name = name
        self.request = request
        self.view = view
        self.after = after
        self.last_seen_ns = now_ns
        self.over_since_ns: int | None = None  # time at which it exceeded its high-water mark
        self._dropped = 0
        self._sent_changes: int | None = None  # count of its view's changes up to its place; None: nothing of this view
        self.walk: Walk | None = None
        self._next: int | None = None  # index of the view's part to send next
        self._part = 0  # index in the walk
        self.sent_bytes = 0
        self._received_bytes = 0
        self._reported_dropped = 0

    @property
    def is_waiting(self) -> bool:
        """True if the stream waits for a walk."""
        return self.walk is None and self._next is None

    @property
    def has_room(self) -> bool:
        return self.sent_bytes - self._received_bytes < self.request.window_bytes

    @property
    def waiting_bytes(self) -> int:
        """Bytes of the view that this stream has not been sent yet."""
        return 0 if self._next is None else self.view.end_bytes - self.view.bytes_before(self._next)

    @property
    def first_needed(self) -> int:
        """Index of the view's first part that the stream still needs. A walking stream needs none."""
        return self.view.end if self._next is None else self._next

    def received(self, total_bytes: int) -> None:
        """Process an acknowledgement. A total above the sent bytes counts as all sent bytes."""
        self._received_bytes = max(self._received_bytes, min(total_bytes, self.sent_bytes))

    @property
    def dropped(self) -> int:
        """Number of changes that the stream does not get singly."""
        told, waits = self._sent_changes, self.is_waiting
        return self._dropped + (self.view.end_changes - told if waits and told is not None else 0)

    def start(self, walk: Walk) -> None:
        if self._sent_changes is not None:
            self._dropped += walk.then_changes - self._sent_changes
        self._sent_changes = walk.then_changes
        self.walk, self._part = walk, 0

    def restart(self, view: View) -> None:
        """Restart the stream with another view."""
        self.view, self.after = view, EVERYTHING
        self._sent_changes = None
        self.walk = self._next = None
        self.over_since_ns = None

    def drop(self) -> None:
        """Drop all waiting parts. Their keys are sent later, with their values of then."""
        self._next = None
        self.over_since_ns = None

    def pump(self, send: Send) -> None:
        """Send as many parts as there is room for."""
        if self._dropped > self._reported_dropped and self.has_room:
            self._reported_dropped = self._dropped
            send(encode(Dropped(self.request.stream, self._dropped)))
        view = self.view
        while self.has_room:
            if self.walk is not None:
                data = self.walk.part(self._part)
                self._part += 1
                if self._part == self.walk.parts:
                    self._next, self.after, self.walk = self.walk.then, self.walk.number, None
            elif self._next is not None and view.first <= self._next < view.end:
                chunk = view[self._next]
                self._next += 1
                self.after, self._sent_changes = chunk.number, chunk.end_changes
                data = chunk.data
            else:
                if self._next is not None and self._next < view.first:
                    self._next = None  # its walk took so long that the next part is no longer kept
                return
            self.sent_bytes += len(data)
            send(data)

    def report(self) -> StreamReport:
        if self.over_since_ns is not None:
            state = "holds up writers"
        elif self.walk is not None or self.is_waiting:
            state = "is brought up to date"
        else:
            state = "in step" if not self.waiting_bytes else "behind"
        return StreamReport(
            self.id,
            self.name,
            self.request.label,
            self.view.visible,
            self.request.policy,
            self.sent_bytes - self._received_bytes,
            self.waiting_bytes,
            self.request.mark_bytes,
            self.dropped,
            state,
        )
