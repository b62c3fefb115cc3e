"""The instance's epoch: it rises with each app that connects, so that receivers tell frames of a past one apart."""

from __future__ import annotations

from immortal.coordinator.core.group_commit import GroupCommit
from immortal.coordinator.core.turn import Turn


class Epoch:
    """``number``: the last one of the log. ``began_ns``: in this process; 0 until then."""

    __slots__ = ("_log", "_turn", "began_ns", "number")

    def __init__(self, log: GroupCommit, turn: Turn) -> None:
        self.number = 0
        self.began_ns = 0
        self._log = log
        self._turn = turn

    def begin(self, *, ahead: int = 1) -> int:
        """A new one begins, ``ahead`` of the last. The commit to wait for: it is behind all that the last app sent."""
        group = self._log.append_outside_record(0)
        self.number += ahead
        self.began_ns = self._turn.now_ns
        group.transaction.epoch = self.number
        return group.ticket
