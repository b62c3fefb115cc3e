"""A log that several processes may have open: one writes it, by a term of its own, others follow it.

Who has the right to write keeps it until its process ends, or until another is given it all the same: then the first
one does not know, and goes on until the log takes nothing more of it.
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
    """A checkpoint that the writer of ``term`` wants of ``node``."""

    term: int
    node: Node
    checkpoint_id: int
    epoch: int


class SharedLog:
    """``ticket``: of the last append of the writer that is there."""

    def __init__(self, store: MemoryLogStore) -> None:
        self.store = store
        self.term = 0
        self.ticket = 0
        self.writer: Node | None = None
        self.waiting: list[Node] = []  # for the right to write
        self.asked: Asked | None = None
        self.offers: dict[int, int] = {}  # by checkpoint ID: the term of the writer for whom it was taken
        self._has_standby = False  # as the writer was told

    def grant(self, node: Node) -> int:
        """To ``node``, whoever has it; its term. What the last writer has begun is no part of the log."""
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
        """As the next writer finds it. Whoever lives still reads what it has loaded; without anyone nothing may."""
        is_read = self.writer is not None or self.waiting
        self.store = self.store.copy() if is_read else self.store.crash()

    def release(self, node: Node) -> bool:
        """The process of ``node`` has ended; whether it had the right."""
        if node in self.waiting:
            self.waiting.remove(node)
        if self.writer is not node:
            return False
        self.writer = None
        return True

    def tell_of_standbys(self) -> None:
        """The writer, where that has changed."""
        has_standby = any(node.phase is Phase.FOLLOWING for node in self.waiting)
        if self.writer is not None and has_standby != self._has_standby:
            self._has_standby = has_standby
            self.writer.post(ev.StandbysChanged(has_standby))
