"""Events that handlers wait for, and signals: each is for one waiter, the one that has waited longest for its name."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from immortal.appsdk.errors import UsageError
from immortal.appsdk.waiting.operations import Event

KEPT_SIGNALS_MAX = 100_000  # that wait for nobody: they are part of each checkpoint, and some 100 bytes each in memory
KEPT_SIGNALS_BYTES_MAX = 64 << 20  # ... and their values together


class Events:
    """Waits for events, the oldest first, and signals that nobody has waited for yet."""

    def __init__(self, later: Callable[[Callable[[], None]], None], resolve: Callable[[Event, bytes], None]) -> None:
        self.kept: dict[str, deque[bytes]] = {}
        self._waiting: dict[str, dict[int, Event]] = {}  # by name and number
        self._given: Counter[str] = Counter()  # signals that find their waiters once the handler has come to a stop
        self._count = self._size_bytes = 0  # of those and of what is kept
        self._later = later
        self._resolve = resolve

    def add(self, event: Event) -> None:
        self._waiting.setdefault(event.name, {})[event.number] = event

    def remove(self, event: Event) -> None:
        waiting = self._waiting.get(event.name, {})
        waiting.pop(event.number, None)
        if not waiting:
            self._waiting.pop(event.name, None)

    def restore(self, signals: Mapping[str, Sequence[bytes]]) -> None:
        """Nobody waits, and these are kept."""
        self._waiting.clear()
        self._given.clear()
        self.kept = {name: deque(values) for name, values in signals.items()}
        self._count = sum(map(len, self.kept.values()))
        self._size_bytes = sum(len(value) for values in self.kept.values() for value in values)

    def sort(self) -> None:
        """After a rebuild: those that waited first come first again."""
        self._waiting = {name: dict(sorted(waiting.items())) for name, waiting in self._waiting.items()}

    def require_room(self, name: str, value: bytes) -> None:
        """For one more signal, unless somebody waits for it. Raises UsageError."""
        if len(self._waiting.get(name, ())) > self._given[name]:
            return
        if self._count >= KEPT_SIGNALS_MAX or self._size_bytes + len(value) > KEPT_SIGNALS_BYTES_MAX:
            raise UsageError(
                f"self.signal({name!r}, ...): {self._count} signals of {self._size_bytes} bytes wait for nobody, and "
                f"with this one there would be more than {KEPT_SIGNALS_MAX}, or {KEPT_SIGNALS_BYTES_MAX} bytes: let "
                f"handlers wait for each of them (await self.event(...)), or signal only what somebody will wait for"
            )

    def signal(self, name: str, value: bytes) -> None:
        self._given[name] += 1
        self._count += 1
        self._size_bytes += len(value)
        self._later(partial(self._give, name, value))

    def offer(self, name: str) -> None:
        """Somebody waits: the oldest signal that was kept is for it."""
        if kept := self.kept.get(name):
            value = kept.popleft()
            self._count -= 1
            self._size_bytes -= len(value)
            if not kept:
                del self.kept[name]
            self.signal(name, value)

    def _give(self, name: str, value: bytes) -> None:
        self._given[name] -= 1
        if not self._given[name]:
            del self._given[name]
        for event in self._waiting.get(name, {}).values():
            self._count -= 1
            self._size_bytes -= len(value)
            self._resolve(event, value)
            return
        self.kept.setdefault(name, deque()).append(value)
