"""A copy of the state in memory and the records since: what an app is rewound from when a call fails.

A checkpoint's blob is a copy that costs nothing. Where more and more log follows it, a new copy takes its place: of a
small state always, of a large one as long as calls have failed lately. Without a copy the app is recovered from its
checkpoint, by another start.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from immortal.protocol.readers import Record

SMALL_SIZE_BYTES_MAX = 1 << 20  # of a state: a new copy each TAIL_SIZE_BYTES_MAX of log costs next to nothing
TAIL_SIZE_BYTES_MAX = 16 << 20  # of the records since: what a rewind goes over again
KEPT_TAIL_SIZE_BYTES_MAX = 256 << 20  # ... where the state of later can't be copied: to find out since when
LATELY_SIZE_BYTES = 256 << 20  # of log: how long a large state's copies are kept for the next failure


@dataclass(slots=True)
class Copy:
    """``blob``: as of a checkpoint, behind the record ``sequence_id``; ``tail``: the records since."""

    blob: bytes
    sequence_id: int
    tail: list[Record] = field(default_factory=list)
    tail_size_bytes: int = 0
    retry_size_bytes: int = 0  # of the tail: before, no other copy could be taken


class Copies:
    """``enabled``: there are any. ``keeps_large``: copies of large states too, from the beginning. ``current``: None
    where there is none. ``keeps_all``: they are kept for good, also where no call has failed for long. ``pinned``: the
    one that there is stays, as a message behind it is to be taken back later.
    """

    def __init__(self, *, enabled: bool, keeps_large: bool) -> None:
        self.current: Copy | None = None
        self.keeps_all = self.pinned = False
        self.enabled = enabled
        self._large_left_bytes = LATELY_SIZE_BYTES if keeps_large else 0

    def failed(self) -> None:
        """A call has failed: keep copies for the next one."""
        self._large_left_bytes = LATELY_SIZE_BYTES

    def take(self, pieces: Sequence[bytes], sequence_id: int) -> None:
        """The state behind the record ``sequence_id`` is that of the blob that ``pieces`` make."""
        if self.pinned and self.current is not None:
            return
        self.current = None
        if self.enabled and self._may_keep(sum(map(len, pieces))):
            self.current = Copy(b"".join(pieces), sequence_id)

    def sequence_id(self, default: int) -> int:
        """Behind which record a rewind would begin."""
        return default if self.current is None else self.current.sequence_id

    def forget(self) -> None:
        """The code changes, or the state in another way than by records."""
        self.current = None

    def add(self, record: Record, *, rewound: bool) -> bool:
        """It was handled; whether a new copy is to be taken. ``rewound``: one of its messages has failed."""
        copy = self.current
        if copy is None:
            return False
        size_bytes = len(record.content)
        self._large_left_bytes = max(0, self._large_left_bytes - size_bytes)
        copy.tail.append(record)
        copy.tail_size_bytes += size_bytes
        if self.pinned or copy.tail_size_bytes < copy.retry_size_bytes:
            return False
        if rewound and copy.tail_size_bytes > len(copy.blob):
            return True  # the next rewind is to cost no more than a copy does
        if copy.tail_size_bytes <= max(TAIL_SIZE_BYTES_MAX, len(copy.blob) // 4):
            return False
        if not self._may_keep(len(copy.blob)):
            self.current = None
        return self.current is not None

    def could_not(self) -> None:
        """The state can't be copied now."""
        copy = self.current
        if copy is not None and copy.tail_size_bytes < KEPT_TAIL_SIZE_BYTES_MAX:
            copy.retry_size_bytes = 2 * copy.tail_size_bytes
        else:
            self.current = None

    def _may_keep(self, size_bytes: int) -> bool:
        return self.keeps_all or size_bytes <= SMALL_SIZE_BYTES_MAX or self._large_left_bytes > 0
