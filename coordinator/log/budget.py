"""How much one step of removing may take: a commit waits for it."""

from __future__ import annotations

from msgspec import Struct

from immortal.coordinator.log.backend import Span, View
from immortal.coordinator.log.format import SEQUENCE_KEY

STEP_ROWS_MAX = 1024  # a millisecond or two
STEP_SIZE_BYTES_MAX = 16 << 20


class Budget(Struct):
    """How much one step may still remove; the row that uses it up is removed too."""

    rows_left: int
    bytes_left: int

    @classmethod
    def step(cls) -> Budget:
        return cls(STEP_ROWS_MAX, STEP_SIZE_BYTES_MAX)

    @property
    def exhausted(self) -> bool:
        return self.rows_left <= 0 or self.bytes_left <= 0

    def take(self, size_bytes: int) -> None:
        self.rows_left -= 1
        self.bytes_left -= size_bytes

    def take_span(self, view: View, table: str, end: bytes, first: bytes = b"") -> list[Span]:
        """The rows of ``table`` before the key ``end``, as far as the budget lasts: one span, or none."""
        last_key = None
        for key_view, size_bytes in view.sizes(table, first):
            key = bytes(key_view)
            if self.exhausted or key >= end:
                break
            self.take(size_bytes)
            last_key = key
        if last_key is None:
            return []
        # Records end at an ID, for what has to know which was the last that went.
        stop = SEQUENCE_KEY.pack(SEQUENCE_KEY.unpack(last_key)[0] + 1) if table == "records" else last_key + b"\0"
        return [Span(table, first, stop)]
