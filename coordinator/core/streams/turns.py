"""Turns at the log: no peer holds up the others for long.

The log is written one commit after the other, so whoever comes behind another's bytes waits for them. While others have
sent of late, a sender has at most ``turn_bytes`` on their way to the disk, or one batch. The rest waits here, and goes
on in rounds of one batch for each sender.

A batch larger than that holds the others up whatever its place. So where one did, the next such batch of anybody is
taken only after ``PAUSE_TIMES`` as long as it took: meanwhile the log is for those that it does not keep busy.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from immortal.coordinator.core.interfaces import Token
from immortal.coordinator.core.limits import Limits
from immortal.protocol.peer import PeerFrame

PAUSE_TIMES = 4


@dataclass(slots=True, eq=False, repr=False)
class Waiting:
    """A Batch, and the token by which it is answered."""

    token: Token
    frame: PeerFrame


@dataclass(slots=True, eq=False, repr=False)
class _Long:
    """A batch of more than a turn, on its way to the disk."""

    sender: str
    ticket: int  # of its commit
    began_ns: int


@dataclass(slots=True, eq=False, repr=False)
class Turns:
    """Times are the instance's, in ns. ``pending``, where it is asked for: what a sender has on its way to the disk, in
    bytes."""

    limits: Limits
    waiting_bytes: int = 0
    _waiting: OrderedDict[str, deque[Waiting]] = field(default_factory=OrderedDict)  # the next sender first
    _waiting_bytes: dict[str, int] = field(default_factory=dict)  # by sender
    _last: tuple[str, int] = ("", 0)  # who has sent, and when
    _last_other: tuple[str, int] = ("", 0)  # the last before it that was somebody else
    _long: _Long | None = None
    _pause_until_ns: int = 0

    def heard(self, sender: str, now_ns: int) -> None:
        """``sender`` has something for the log."""
        if sender != self._last[0]:
            self._last_other = self._last
        self._last = sender, now_ns

    def _other_ns(self, sender: str) -> int:
        """When anybody else was heard last."""
        return (self._last_other if sender == self._last[0] else self._last)[1]

    def is_shared(self, sender: str, now_ns: int) -> bool:
        """Somebody else than ``sender`` sends, too."""
        return 0 <= now_ns - self._other_ns(sender) < self.limits.recent_ns

    def must_wait(self, sender: str, size_bytes: int, pending: int, now_ns: int) -> bool:
        """Whether a batch that has come just now is for :meth:`wait`."""
        return sender in self._waiting or not self._has_turn(sender, size_bytes, pending, now_ns)

    def _has_turn(self, sender: str, size_bytes: int, pending: int, now_ns: int) -> bool:
        turn_bytes = self.limits.turn_bytes
        if pending + size_bytes <= turn_bytes or not self.is_shared(sender, now_ns):
            return True
        if pending:
            return False
        return self._long is None and not self.pauses(now_ns)

    def pauses(self, now_ns: int) -> bool:
        """No batch of more than a turn is taken now."""
        return 0 < self._pause_until_ns - now_ns <= self.limits.turn_pause_ns_max  # else the clock has jumped

    def wait(self, token: Token, frame: PeerFrame) -> None:
        sender, size_bytes = frame.sender, len(frame.payload)
        self._waiting.setdefault(sender, deque()).append(Waiting(token, frame))
        self._waiting_bytes[sender] = self._waiting_bytes.get(sender, 0) + size_bytes
        self.waiting_bytes += size_bytes

    def waiting_of(self, sender: str) -> tuple[int, int]:
        """(batches, bytes)"""
        return len(self._waiting.get(sender, ())), self._waiting_bytes.get(sender, 0)

    def goes_on(self, frame: PeerFrame, received: int) -> bool:
        """Whether what waits of its sender, and ``frame`` behind it, go on behind ``received`` without a gap or
        anything twice."""
        position = received + 1
        for one in self._waiting.get(frame.sender, ()):
            if one.frame.position != position:
                return False
            position += one.frame.count
        return frame.position == position

    def take_all(self, sender: str) -> list[Waiting]:
        """What waits of ``sender`` waits no more."""
        self.waiting_bytes -= self._waiting_bytes.pop(sender, 0)
        return list(self._waiting.pop(sender, ()))

    def next(self, pending: Callable[[str], int], allowed: Callable[[str], int], now_ns: int) -> Waiting | None:
        """The next batch that has its turn. ``allowed``: what a sender may have pending, apart from others."""
        for sender, waiting in self._waiting.items():
            size_bytes, pending_bytes = len(waiting[0].frame.payload), pending(sender)
            fits = not pending_bytes or pending_bytes + size_bytes <= allowed(sender)
            if fits and self._has_turn(sender, size_bytes, pending_bytes, now_ns):
                return self._take_first(sender, waiting)
        return None

    def _take_first(self, sender: str, waiting: deque[Waiting]) -> Waiting:
        first = waiting.popleft()
        size_bytes = len(first.frame.payload)
        self.waiting_bytes -= size_bytes
        self._waiting_bytes[sender] -= size_bytes
        if waiting:
            self._waiting.move_to_end(sender)
        else:
            del self._waiting[sender], self._waiting_bytes[sender]
        return first

    def took(self, sender: str, size_bytes: int, ticket: int, now_ns: int) -> None:
        """A batch goes into the log, with the commit ``ticket``."""
        if size_bytes > self.limits.turn_bytes:
            self._long = _Long(sender, ticket, now_ns)

    def committed(self, ticket: int, now_ns: int) -> None:
        """All commits up to ``ticket`` are durable."""
        long = self._long
        if long is None or ticket < long.ticket:
            return
        self._long = None
        if self._other_ns(long.sender) >= long.began_ns:
            took_ns = max(0, now_ns - long.began_ns)
            self._pause_until_ns = now_ns + min(PAUSE_TIMES * took_ns, self.limits.turn_pause_ns_max)

    def due_ns(self, now_ns: int) -> int | None:
        """When to look again although nothing happens."""
        return self._pause_until_ns if self._waiting and self.pauses(now_ns) else None
