"""What may be asked for again and again: so many bytes at once, and so many a second."""

from __future__ import annotations

S_NS = 1_000_000_000


class Allowance:
    """``bytes_max``: at once, and a second. What is larger is given where anything is left, and made up for later."""

    __slots__ = ("_at_ns", "_bytes_max", "_left_bytes")

    def __init__(self, bytes_max: int, now_ns: int) -> None:
        self._bytes_max = self._left_bytes = bytes_max
        self._at_ns = now_ns

    def take(self, size_bytes: int) -> None:
        """Note what is given."""
        self._left_bytes -= size_bytes

    def is_left(self, now_ns: int) -> bool:
        """Whether anything may be given now."""
        elapsed_ns = min(max(0, now_ns - self._at_ns), 3600 * S_NS)  # the clock may jump
        self._left_bytes = min(self._bytes_max, self._left_bytes + self._bytes_max * elapsed_ns // S_NS)
        self._at_ns = now_ns
        return self._left_bytes > 0
