"""Log that several processes can have open: one writes it, by a term of its own, others follow it.

A writer keeps the right to write until its process ends, or until another one gets it all the same. In that case the
first does not know, and continues until the log refuses its writes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from immortal.coordinator.core import events as ev
from immortal.coordinator.core.life_cycle.session import Phase
from immortal.coordinator.log.memory import MemoryLogStore

if TYPE_CHECKING:
    from tests.simulation.node import Node


@dataclass(frozen=True, slots=True)
class Asked:
    """Request of the writer of ``term`` for a checkpoint of ``node``."""

    term: int
    node: Node
    checkpoint_id: int
    epoch: int


class SharedLog:
    """Log with its writer and followers. ``ticket``: of the current writer's last append."""

    def __init__(self, store: MemoryLogStore) -> None:
        self.store = store
        self.term = 0
        self.ticket = 0
        self.writer: Node | None = None
        self.waiting: list[Node] = []  # for the right to write
        self.asked: Asked | None = None
        self.offers: dict[int, int] = {}  # by checkpoint ID: the term of the writer for whom it was taken
        self._has_standby = False  # as the writer knows

    def grant(self, node: Node) -> int:
        """Give ``node`` the right to write, whoever has it; return its term. The last one's pending writes are lost."""
        self.term += 1
        self.ticket = 0
        self.asked = None
        self._has_standby = False
        self.reopen()
        self.writer = node
        if node in self.waiting:
            self.waiting.remove(node)
        return self.term

    def reopen(self) -> None:
        """Reopen the log for the next writer. Living processes can still read rows that they have loaded."""
        is_read = self.writer is not None or self.waiting
        self.store = self.store.copy() if is_read else self.store.crash()

    def release(self, node: Node) -> bool:
        """End the process of ``node``; return True if it had the right to write."""
        if node in self.waiting:
            self.waiting.remove(node)
        if self.writer is not node:
            return False
        self.writer = None
        return True

    def tell_of_standbys(self) -> None:
        """Tell the writer if there are standbys, if that has changed."""
        has_standby = any(node.phase is Phase.FOLLOWING for node in self.waiting)
        if self.writer is not None and has_standby != self._has_standby:
            self._has_standby = has_standby
            self.writer.post(ev.StandbysChanged(has_standby))
