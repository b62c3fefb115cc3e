"""What the app of a follower makes, until it is known which positions it has.

An impulse of the writer takes its position when the writer's app sends it; in the log it may stand behind the record
whose calls come after it. So a follower's message takes its place only once a mark of the log covers it: behind a
mark's position, all impulses that are before it are known. The rest waits here, in the order in which it was made.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from coordinator.core.streams.local_end import LocalEnd
from coordinator.core.streams.output_stream import OutputStream
from protocol.batch import offset_after


class Followed:
    """Of all output streams, by destination."""

    def __init__(self, end: LocalEnd) -> None:
        self._end = end
        self._made: dict[str, deque[tuple[int, bytes]]] = {}  # (count, payload)
        self._marked: dict[str, int] = {}  # the last position that a mark of the log has

    def forget(self) -> None:
        self._made.clear()
        self._marked.clear()

    def made(self, stream: OutputStream, count: int, payload: bytes) -> None:
        """The app's next ``count`` messages, packed. Raises DivergenceError."""
        self._made.setdefault(stream.destination, deque()).append((count, payload))
        self._place(stream)

    def reached(self, stream: OutputStream, position: int) -> None:
        """The log says that ``stream`` had this position, and all impulses up to it are known. Raises
        DivergenceError."""
        self._marked[stream.destination] = max(position, self._marked.get(stream.destination, 0))
        self._place(stream)

    def _place(self, stream: OutputStream) -> None:
        made, marked = self._made.get(stream.destination), self._marked.get(stream.destination, 0)
        while made and (room := stream.room_up_to(marked)):
            count, payload = made.popleft()
            if count > room:
                offset = offset_after(payload, room, count)
                made.appendleft((count - room, payload[offset:]))
                count, payload = room, payload[:offset]
            stream.append(count, payload)

    def place_all(self, streams: Mapping[str, OutputStream]) -> None:
        """All that was made takes its place, and no mark is waited for. Raises DivergenceError."""
        waiting, self._made = self._made, {}
        self._marked.clear()
        for destination, made in waiting.items():
            for count, payload in made:
                streams[destination].append(count, payload, self._end.held_ticket)
