"""What streams with the same rights to the same subtrees get: made once, for all of them. No I/O, no clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from immortal.appsdk.patterns.clone import limits
from immortal.appsdk.patterns.clone.entries import Entries, size_bytes
from immortal.appsdk.patterns.clone.frames import Part, encode
from immortal.appsdk.patterns.clone.records import Row
from immortal.appsdk.patterns.clone.subtrees import ALL, covers, subtrees_of

EVERYTHING = -1
"""In place of the number behind which changes are wanted."""


class Chunk:
    """One part of a view. ``end_bytes``, ``end_changes``: of all parts of the view up to and with this one."""

    __slots__ = ("data", "end_bytes", "end_changes", "number")

    def __init__(self, data: bytes, number: int, end_bytes: int, end_changes: int) -> None:
        self.data = data
        self.number = number
        self.end_bytes = end_bytes
        self.end_changes = end_changes


class Walk:
    """Brings a stream up to date: from ``after`` to ``number``, each key once. Parts are encoded as they are asked for.

    ``then``: the index of the view's part that follows; ``then_changes``: all changes of the view in front of that.
    """

    def __init__(self, rows: Sequence[Row], after: int, view: View, *, shared: bool) -> None:
        self.after = after
        self.number = view.number
        self.then = view.end
        self.then_changes = view.end_changes
        self.count = len(rows)
        self._groups: list[Sequence[Row] | None] = list(_groups(rows)) or [()]
        self.is_shared = shared
        self._encoded: list[bytes] = []

    @property
    def parts(self) -> int:
        return len(self._groups)

    def part(self, index: int) -> bytes:
        """In order: those of a walk that is not shared are there once."""
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
    """Each as much as one frame should have."""
    begin, bytes_in = 0, 0
    for index, row in enumerate(rows):
        bytes_of = size_bytes(row)
        if index > begin and (
            bytes_in + bytes_of > limits.PART_SIZE_BYTES_MAX or index - begin >= limits.PART_CHANGES_MAX
        ):
            yield rows[begin:index]
            begin, bytes_in = index, 0
        bytes_in += bytes_of
    if begin < len(rows):
        yield rows[begin:]


class View:
    """``number``: what its last part came to. ``users``: how many streams have it."""

    def __init__(self, visible: tuple[str, ...], number: int) -> None:
        self.visible = visible
        self.number = number
        self.users = 0
        self.first = 0  # index of the oldest part that is kept
        self.end_bytes = 0
        self.end_changes = 0
        self._begin_bytes = 0  # of the oldest part
        self._chunks: deque[Chunk] = deque()
        self._pending: list[Row] = []
        self._is_conflated = False
        self._snapshot: Walk | None = None

    @property
    def end(self) -> int:
        """The index of the part that comes next."""
        return self.first + len(self._chunks)

    @property
    def has_pending(self) -> bool:
        return bool(self._pending)

    def __getitem__(self, index: int) -> Chunk:
        return self._chunks[index - self.first]

    def begin_bytes(self, index: int) -> int:
        """All bytes in front of that part."""
        return self._begin_bytes if index <= self.first else self[index - 1].end_bytes

    def add(self, row: Row, *, is_conflated: bool) -> None:
        self._pending.append(row)
        self._is_conflated |= is_conflated

    def sees(self, key: str) -> bool:
        return any(covers(one, key) for one in self.visible)

    def cut(self, number: int) -> None:
        """All that has come up to ``number`` becomes parts; if nothing has, one that only says so."""
        if number <= self.number and not self._pending:
            return
        groups = list(_groups(self._pending)) or [()]
        for index, rows in enumerate(groups):
            to = number if index + 1 == len(groups) else rows[-1].number
            changes = [(row.key, row.number, row.value) for row in rows]
            data = encode(Part(self.number, to, False, self._is_conflated, changes))
            self.end_bytes += len(data)
            self.end_changes += len(changes)
            self._chunks.append(Chunk(data, to, self.end_bytes, self.end_changes))
            self.number = to
        self._pending = []
        self._is_conflated = False

    def trim(self, needed: int) -> None:
        """Parts in front of index ``needed`` may go."""
        while self.first < needed and self._chunks and self.end_bytes - self._begin_bytes > limits.HISTORY_BYTES:
            self._begin_bytes = self._chunks.popleft().end_bytes
            self.first += 1
        if self._snapshot is not None and self._snapshot.then < self.first:
            self._snapshot = None

    def walk(self, entries: Entries, after: int) -> Walk:
        """From ``after`` to what it is now: nothing is pending. From too far back it is everything."""
        rows = None if after == EVERYTHING else entries.since(after)
        if rows is not None:
            return Walk([row for row in rows if self.sees(row.key)], after, self, shared=False)
        if self._snapshot is None:
            if self.visible == ALL:
                seen = entries.everything()
            else:
                seen = [row for row in entries.rows.values() if self.sees(row.key)]
            self._snapshot = Walk(seen, EVERYTHING, self, shared=True)
        return self._snapshot

    def forget_snapshot(self) -> None:
        """Nobody walks through it."""
        self._snapshot = None


class Views:
    """All that have streams."""

    def __init__(self) -> None:
        self._views: dict[tuple[str, ...], View] = {}
        self._by_subtree: dict[str, list[View]] = {}

    def __iter__(self) -> Iterator[View]:
        return iter(self._views.values())

    def use(self, visible: tuple[str, ...], number: int) -> View:
        """For one stream more. ``number``: where the table is, with nothing pending that a new view would lack."""
        view = self._views.get(visible)
        if view is None:
            view = self._views[visible] = View(visible, number)
            for subtree in visible:
                self._by_subtree.setdefault(subtree, []).append(view)
        view.users += 1
        return view

    def leave(self, view: View) -> None:
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
