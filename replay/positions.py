"""The positions of what a replay makes, in one stream: kept impulses, which no replay makes, take theirs in between.

The same idea as the output stream's own replay, but nothing is kept to be sent, and what does not fit is no error: what
other code would have made has other positions, and that is what is asked for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from msgspec import Struct

from immortal.coordinator.core.interfaces import ImpulseBatch, OutputMark
from immortal.protocol.batch import offset_after
from immortal.protocol.extensions import Origin


class Outputs(Struct, frozen=True):
    """Messages that the app has made; ``origins`` None: it does not tell what made them."""

    destination: str
    first_position: int
    count: int
    payload: bytes
    origins: Sequence[Origin] | None


class KeptImpulses(Struct, frozen=True):
    """Impulses of the past at their place; ``payload`` is empty where only the place is known."""

    destination: str
    first_position: int
    count: int
    payload: bytes


class StreamPositions:
    """One stream, from ``mark`` (where the replay begins) on."""

    def __init__(self, destination: str, mark: OutputMark | None, impulses: Iterable[ImpulseBatch]) -> None:
        self.destination = destination
        self.position = mark.position if mark else 0
        self._impulses = deque(batch for batch in impulses if batch.first_position > self.position)

    def append(self, count: int, payload: bytes, origins: Sequence[Origin] | None) -> Iterator[Outputs | KeptImpulses]:
        """The app's next ``count`` messages, cut where impulses lie between them."""
        while count:
            yield from self.add_kept_impulses()
            taken = count
            if self._impulses:
                taken = min(count, max(1, self._impulses[0].first_position - self.position - 1))
            if taken == count:
                part, part_origins, payload = payload, origins, b""
            else:
                offset = offset_after(payload, taken, count)
                part, payload = payload[:offset], payload[offset:]
                part_origins, origins = (None, None) if origins is None else cut_origins(origins, taken)
            yield Outputs(self.destination, self.position + 1, taken, part, part_origins)
            self.position += taken
            count -= taken
        yield from self.add_kept_impulses()

    def add_kept_impulses(self) -> Iterator[KeptImpulses]:
        """Impulses that come right behind what there is."""
        while self._impulses and self._impulses[0].first_position <= self.position + 1:
            batch = self._impulses.popleft()
            if batch.first_position == self.position + 1:  # else other code made another number of messages
                self.position = batch.last_position
                yield KeptImpulses(self.destination, batch.first_position, batch.count, batch.payload)


def cut_origins(origins: Sequence[Origin], count: int) -> tuple[list[Origin], list[Origin]]:
    """Split origins into those of the first ``count`` messages and the rest."""
    front: list[Origin] = []
    rest: list[Origin] = []
    for origin in origins:
        taken = min(count, origin.count)
        count -= taken
        if taken:
            front.append(Origin(origin.sequence_id, origin.message_index, taken))
        if taken < origin.count:
            rest.append(Origin(origin.sequence_id, origin.message_index, origin.count - taken))
    return front, rest
