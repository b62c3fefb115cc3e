"""The machine's turn under way: when it is, and what it has asked for so far. All parts of the machine share it."""

from __future__ import annotations

from collections.abc import Sequence

from immortal.coordinator.core.effects import Effect, Report
from immortal.coordinator.core.notices import Notice


class Turn:
    """``now_ns``: the instance's time (core/clock.py), ns since the Unix epoch. ``effects``: in the order in which they
    are to be carried out; the same list for as long as the machine lives."""

    __slots__ = ("effects", "now_ns")

    def __init__(self) -> None:
        self.now_ns = 0
        self.effects: list[Effect] = []

    def report(self, notice: Notice) -> None:
        self.effects.append(Report(notice))

    def take_effects(self) -> Sequence[Effect]:
        """What was asked for since this was last called; it is the caller's."""
        effects = self.effects
        if not effects:
            return ()
        taken = effects[:]
        effects.clear()
        return taken
