"""How often lines of one kind are written, where somebody else decides how often there is something to write."""

from __future__ import annotations

from collections.abc import Hashable

from msgspec import Struct

INTERVAL_NS = 5_000_000_000  # between two lines of one kind
BURST = 5  # lines of one kind that come at once before that: enough to see what is going on
KINDS_MAX = 256  # that are told apart: who makes up names must not fill the memory, nor the log

OTHERS = "others"  # what is not told apart: one kind


class _Kind(Struct):
    due_ns: int = 0  # when all that it was let is paid for, at one line per interval
    left_out: int = 0  # since the last line


class RateLimit:
    """Lets ``burst`` lines of each kind pass, then one per interval, and counts what it leaves out.

    Beyond ``KINDS_MAX`` kinds that are in use, all new ones are OTHERS. ``now_ns`` is on the monotonic clock.
    """

    def __init__(self, burst: int = BURST, interval_ns: int = INTERVAL_NS) -> None:
        self._interval_ns = interval_ns
        self._credit_ns = (burst - 1) * interval_ns
        self._kinds: dict[Hashable, _Kind] = {OTHERS: _Kind()}

    def admit(self, kind: Hashable, now_ns: int) -> int | None:
        """How many of this ``kind`` were left out since the last line; None: leave this one out, too."""
        known = self._known(kind, now_ns)
        if known.due_ns - self._credit_ns > now_ns:
            known.left_out += 1
            return None
        known.due_ns = max(known.due_ns, now_ns) + self._interval_ns
        left_out, known.left_out = known.left_out, 0
        return left_out

    def next_ns(self, kind: Hashable) -> int:
        """When a line of this kind passes."""
        return self._kinds[self.counted_as(kind)].due_ns - self._credit_ns

    def counted_as(self, kind: Hashable) -> Hashable:
        """``kind`` itself, or OTHERS."""
        return kind if kind in self._kinds else OTHERS

    def _known(self, kind: Hashable, now_ns: int) -> _Kind:
        known = self._kinds.get(kind)
        if known is None:
            if len(self._kinds) > KINDS_MAX:
                self._forget(now_ns)
            if len(self._kinds) > KINDS_MAX:
                return self._kinds[OTHERS]
            known = self._kinds[kind] = _Kind()
        return known

    def _forget(self, now_ns: int) -> None:
        """Those that might never have been; what was left out of them is told with the others."""
        for kind in [kind for kind, known in self._kinds.items() if known.due_ns <= now_ns and kind != OTHERS]:
            self._kinds[OTHERS].left_out += self._kinds.pop(kind).left_out
