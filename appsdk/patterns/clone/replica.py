"""Copy of a part of a table, fed by a publisher; always equal to the table at one number. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from immortal.appsdk.patterns.clone import limits
from immortal.appsdk.patterns.clone.frames import Activate, Activated, Answer, Dropped, Finished, Part, Policy, Refused
from immortal.appsdk.patterns.clone.streams import EVERYTHING

Told = tuple[str, int, bytes | None]  # key, number, value; None: the key is gone


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a client's stream."""

    subtrees: tuple[str, ...] = ("",)
    window_bytes: int = limits.WINDOW_BYTES_DEFAULT
    mark_bytes: int = limits.MARK_BYTES_DEFAULT
    policy: Policy = "drop"
    label: str = ""
    relay: bool = False
    writes: str = ""


@dataclass(slots=True)
class Counts:
    """Counters of a copy. ``holes``: parts that did not follow the copy. ``whole``: copies from the beginning.
    ``resumed``: streams that continued from the copy. ``dropped``: changes that were not told one by one.
    """

    holes: int = 0
    whole: int = 0
    resumed: int = 0
    dropped: int = 0


@dataclass(frozen=True, slots=True)
class News:
    """Changes of a whole part. ``whole``: the part replaced the copy."""

    changes: Sequence[Told]
    number: int
    whole: Sequence[Told] | None = None
    is_conflated: bool = False


class Replica:
    """Copy of a table. ``values``: by key, MessagePack. ``number``: of the last update in it; ``table``: "" while there
    is no copy.

    ``subtrees``: what it is given; None while it has no stream. ``ended``: why it will get no more.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self.values: dict[str, bytes] = {}
        self.table = ""
        self.forgotten = 0  # see Activated
        self.number = 0
        self.subtrees: tuple[str, ...] | None = None
        self.counts = Counts()
        self.ended = ""
        self.problem = ""
        self.is_whole = False  # since the stream has begun
        self.is_ahead = False  # of the publisher, which refused it for that
        self._stream = 0
        self._had: tuple[str, ...] = ()  # the subtrees of the copy
        self._told_table = ""
        self._staged: list[Told] = []
        self._staged_after: int | None = None
        self.received_bytes = 0
        self._acknowledged_bytes = 0
        self._dropped = 0  # of this stream

    @property
    def stream(self) -> int:
        return self._stream

    def activate(self, *, anew: bool = False) -> Activate:
        """Make the request for a stream. ``anew``: from the beginning, as if there were no copy."""
        self._stream += 1
        self.subtrees = None
        self.is_whole = False
        self._staged, self._staged_after = [], None
        self.received_bytes = self._acknowledged_bytes = self._dropped = 0
        options = self.options
        table, number = ("", 0) if anew else (self.table, self.number)
        return Activate(
            self._stream,
            list(options.subtrees),
            table,
            number,
            list(self._had),
            options.window_bytes,
            options.mark_bytes,
            options.policy,
            options.label,
            options.relay,
        )

    def take(self, answer: Answer, size_bytes: int) -> News | bool:
        """Process a publisher's answer of ``size_bytes``. Returns its changes, or whether to ask for a stream again."""
        if isinstance(answer, Part):
            return self.subtrees is not None and self._part(answer, size_bytes)
        if isinstance(answer, Activated):
            if answer.stream == self._stream:
                self.subtrees, self._told_table, self.problem = tuple(answer.subtrees), answer.table, ""
                self.forgotten = answer.forgotten
                self._staged, self._staged_after = [], None
        elif isinstance(answer, (Refused, Finished)) and answer.stream == self._stream:
            self.subtrees = None
            self.problem = answer.reason
            self.is_ahead = isinstance(answer, Refused) and answer.is_behind
            if not answer.again:
                self.ended = answer.reason
            return answer.again
        elif isinstance(answer, Dropped) and answer.stream == self._stream:
            self.counts.dropped += answer.count - self._dropped
            self._dropped = answer.count
        return False

    def _part(self, part: Part, size_bytes: int) -> News | bool:
        self.received_bytes += size_bytes
        if self._staged_after is not None:
            follows = part.after == self._staged_after
        else:
            follows = part.after == EVERYTHING or (part.after == self.number and self.table == self._told_table)
        if not follows:
            self.counts.holes += 1
            self.subtrees = None  # what is on its way follows this one, which is not taken
            return True
        if part.more:
            self._staged += part.changes
            self._staged_after = part.after
            return False
        changes: Sequence[Told] = [*self._staged, *part.changes] if self._staged else part.changes
        self._staged, self._staged_after = [], None
        whole = None
        if part.after == EVERYTHING:
            whole = changes
            changes = self._replace(changes, part.number)
        else:
            self._apply(changes)
            if not self.is_whole:
                self.counts.resumed += 1
        self.is_whole = True
        self._had = self.subtrees or ()
        self.number = part.number
        return News(changes, part.number, whole, part.is_conflated)

    def _apply(self, changes: Sequence[Told]) -> None:
        values = self.values
        for key, _, value in changes:
            if value is not None:
                values[key] = value
            else:
                values.pop(key, None)

    def _replace(self, changes: Sequence[Told], number: int) -> list[Told]:
        """Replace the copy and return the differences as changes."""
        self.counts.whole += 1
        before = self.values
        self.table = self._told_table
        self.values = {key: value for key, _, value in changes if value is not None}
        gone: list[Told] = [(key, number, None) for key in before if key not in self.values]
        return [change for change in changes if before.get(change[0]) != change[2]] + gone

    def acknowledgement(self) -> int | None:
        """Return how many bytes of the stream have come, where that is to be acknowledged now."""
        if self.received_bytes - self._acknowledged_bytes < self.options.window_bytes // 4:
            return None
        self._acknowledged_bytes = self.received_bytes
        return self.received_bytes
