"""Impulses of one output stream that the log has, and whose places the replay has not reached.

No replay makes them: they go back between the messages that it makes, at the positions that they had.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from immortal.coordinator.core.errors import DivergenceError
from immortal.coordinator.core.interfaces import ImpulseBatch


class KeptImpulses:
    """In the order of their positions. ``position``: that which the stream has when it is asked."""

    def __init__(self, destination: str) -> None:
        self._destination = destination
        self._batches: deque[ImpulseBatch] = deque()

    def __len__(self) -> int:
        return len(self._batches)

    def keep(self, impulses: Iterable[ImpulseBatch], position: int) -> None:
        """The log has these: the new ones among them wait for their places."""
        last = self._batches[-1].last_position if self._batches else position
        self._batches.extend(batch for batch in impulses if batch.first_position > last)

    def room(self, position: int, count: int) -> int:
        """How many of the app's next ``count`` messages come before the next impulse. Raises DivergenceError."""
        if not self._batches:
            return count
        room = self._batches[0].first_position - position - 1
        if room < 0:
            raise self.misplaced(position)
        return min(room, count)

    def take_following(self, position: int) -> ImpulseBatch | None:
        """The next ones, if their place is right behind ``position``."""
        if self._batches and self._batches[0].first_position == position + 1:
            return self._batches.popleft()
        return None

    def take_all(self) -> list[ImpulseBatch]:
        taken, self._batches = self._batches, deque()
        return list(taken)

    def end_behind(self, position: int) -> int:
        """The position that the stream has once those took their places which follow without a gap."""
        for impulses in self._batches:
            if impulses.first_position != position + 1:
                break
            position = impulses.last_position
        return position

    def count_up_to(self, position: int) -> int:
        return sum([batch.count for batch in self._batches if batch.first_position <= position])

    def misplaced(self, position: int) -> DivergenceError:
        """What to raise: the next one should have its place by now, or has one that the replay does not reach."""
        return DivergenceError(
            f"an impulse to {self._destination!r} has position {self._batches[0].first_position}, the replay has "
            f"made {position} messages where it belongs: the handlers did not do what they did before"
        )
