"""What the app of a follower makes, until it is known which positions it has.

An impulse of the writer takes its position when the writer's app sends it; in the log it may stand behind the record
whose calls come after it. So a follower's message takes its place only once a mark of the log covers it: behind a
mark's position, all impulses that are before it are known. The rest waits here, in the order in which it was made.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from immortal.coordinator.core.interfaces import OutputBatch, OutputMark
from immortal.coordinator.core.streams.local_end import LocalEnd
from immortal.coordinator.core.streams.output_stream import OutputStream
from immortal.protocol.batch import offset_after


@dataclass(slots=True)
class Cut:
    """The output streams between two messages of the app, by destination: each is known once what the app has made
    before it has its place.

    ``waits_for``: so many of these messages have none yet. ``outputs``, ``unacknowledged``: as a checkpoint's header
    has them.
    """

    waits_for: dict[str, int] = field(default_factory=dict)
    outputs: dict[str, OutputMark] = field(default_factory=dict)
    unacknowledged: dict[str, list[OutputBatch]] = field(default_factory=dict)

    def reach(self, stream: OutputStream) -> None:
        self.waits_for.pop(stream.destination, None)
        self.outputs[stream.destination] = stream.mark
        if stream.memory_bytes:
            self.unacknowledged[stream.destination] = stream.unacknowledged


class Followed:
    """Of all output streams, by destination."""

    def __init__(self, end: LocalEnd) -> None:
        self._end = end
        self._cut: Cut | None = None
        self._made: dict[str, deque[tuple[int, bytes]]] = {}  # (count, payload)
        self._marked: dict[str, int] = {}  # the last position that a mark of the log has

    def forget(self) -> None:
        self._made.clear()
        self._marked.clear()
        self._cut = None

    def cut(self, streams: Mapping[str, OutputStream]) -> Cut:
        """What the app has made so far, and nothing that it makes from now on. One at a time."""
        cut = self._cut = Cut()
        for destination, stream in streams.items():
            if waiting := sum([count for count, _ in self._made.get(destination, ())]):
                cut.waits_for[destination] = waiting
            else:
                cut.reach(stream)
        return cut

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
            if self._cut is not None and stream.destination in self._cut.waits_for:
                self._cut.waits_for[stream.destination] -= count
                if not self._cut.waits_for[stream.destination]:
                    self._cut.reach(stream)

    def place_all(self, streams: Mapping[str, OutputStream]) -> None:
        """All that was made takes its place, and no mark is waited for. Raises DivergenceError."""
        waiting, self._made = self._made, {}
        self._marked.clear()
        self._cut = None
        for destination, made in waiting.items():
            for count, payload in made:
                streams[destination].append(count, payload, self._end.held_ticket)
