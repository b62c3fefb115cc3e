"""What leaves only once calls to another instance are durable there: for apps that take part in ordered traffic.

Such an app says, between two batches, what it has called: whatever it sends behind that, to others, waits. So nothing
that follows from a call, by whatever way, is anywhere before the call is in its receiver's log. A receiver that does
not answer is waited for no longer than ``barrier_ns``, and not again before it answers.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from immortal.coordinator.core.interfaces import ONESELF
from immortal.coordinator.core.streams.output_stream import OutputStream

BARRIERS_MAX = 4096  # with so many on their way there is nothing to be told apart


@dataclass(slots=True, eq=False, repr=False)
class _Barrier:
    number: int
    destination: str
    position: int
    since_ns: int


@dataclass(slots=True, eq=False, repr=False)
class Barriers:
    """Of all streams of one connection. ``passed``: the number of the last one behind which all may leave."""

    barrier_ns: int
    passed: int = 0
    _last: int = 0
    _open: deque[_Barrier] = field(default_factory=deque)
    _waived: dict[str, int] = field(default_factory=dict)  # what was acknowledged, where nobody waits for more

    @property
    def is_open(self) -> bool:
        """Something may have to wait."""
        return bool(self._open)

    @property
    def due_ns(self) -> int | None:
        """When it is waited for no longer."""
        return self._open[0].since_ns + self.barrier_ns if self._open else None

    def add(self, stream: OutputStream, now_ns: int) -> None:
        """What is sent from here on waits for what ``stream`` has by now."""
        destination = stream.destination
        if stream.acknowledged >= stream.position or len(self._open) >= BARRIERS_MAX:
            return
        if destination in self._waived:
            if stream.acknowledged <= self._waived[destination]:
                return
            del self._waived[destination]
        self._last += 1
        self._open.append(_Barrier(self._last, destination, stream.position, now_ns))

    def stop(self, stream: OutputStream) -> None:
        """Messages are about to be added to ``stream``: they wait for all that is open, but for what it has itself."""
        if stream.destination == ONESELF:
            return
        for barrier in reversed(self._open):
            if barrier.destination != stream.destination:
                stream.wait_for(barrier.number)
                return

    def look(self, streams: dict[str, OutputStream], now_ns: int) -> None:
        """Receivers may have answered, or time has gone by."""
        waiting = self._open
        while waiting:
            first = waiting[0]
            stream = streams.get(first.destination)
            if stream is not None and stream.acknowledged < first.position and first.destination not in self._waived:
                if now_ns < first.since_ns + self.barrier_ns:
                    return
                self._waived[first.destination] = stream.acknowledged
            self.passed = first.number
            waiting.popleft()

    def forget(self) -> None:
        self.passed = self._last
        self._open.clear()
        self._waived.clear()
