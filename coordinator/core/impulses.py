"""Impulses: the app's input from outside the deterministic world, on its way to the log.

To oneself they are logged input like any; to others they take their place in the stream, and are kept in a table.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from immortal.coordinator.core.epoch import Epoch
from immortal.coordinator.core.errors import AppProtocolError
from immortal.coordinator.core.group_commit import Group, GroupCommit
from immortal.coordinator.core.interfaces import IMPULSES, ONESELF, LogSummary, SourcePosition
from immortal.coordinator.core.limits import Limits
from immortal.coordinator.core.streams.peers import Peers
from immortal.coordinator.core.turn import Turn
from immortal.protocol.trailer import BatchKind, BatchSource

if TYPE_CHECKING:  # it imports the parts that hold impulses
    from immortal.coordinator.core.app_messages import Calls

HELD_OVERHEAD_BYTES = 300  # of Python's objects around a batch that is held


class Impulses:
    """Those of one instance. ``count``: that it has sent to itself, in all its life."""

    def __init__(self, limits: Limits, log: GroupCommit, peers: Peers, epoch: Epoch, turn: Turn) -> None:
        self.count = 0
        self.held_bytes = 0
        self._held: list[Calls] = []  # that must not be taken yet
        self._held_bytes_max = limits.held_impulses_bytes + limits.arguments_bytes_max
        self._committer_id = 0
        self._log = log
        self._peers = peers
        self._epoch = epoch
        self._turn = turn

    @property
    def open_sequence_id(self) -> int:
        """Of the record that has what was logged last."""
        return self._log.open_sequence_id

    def load(self, summary: LogSummary) -> None:
        """What the log has."""
        known = summary.sources.get(IMPULSES)
        self.count = known.position if known else 0
        self._committer_id = summary.committer_id

    def hold(self, calls: Calls) -> None:
        """Keep them until there is room in the log, or the app's upgrade is confirmed. Raises AppProtocolError."""
        if self.held_bytes > self._held_bytes_max:
            raise AppProtocolError(
                f"the app's impulses that wait take {self.held_bytes} bytes, {self._held_bytes_max} is the most: "
                f"before it sends more it is to wait for ImpulsesAccepted, which comes once the log has room or the "
                f"upgrade is confirmed"
            )
        self._held.append(calls)
        self.held_bytes += len(calls.payload) + HELD_OVERHEAD_BYTES

    def let_in(self) -> None:
        """Take what was held."""
        held = self._held
        self.forget()
        for calls in held:
            self.take(calls)

    def forget(self) -> None:
        """The app is gone: nobody was told that what is held here was accepted."""
        self._held, self.held_bytes = [], 0

    def take(self, calls: Calls) -> None:
        """The app's next ones."""
        if calls.destination == ONESELF:
            group = self.log_own(calls.count, calls.payload)
        else:
            stream = self._peers.output(calls.destination)
            group = self._log.append_outside_record(len(calls.payload), from_app=True)
            group.transaction.impulses.append(stream.append_impulses(calls.count, calls.payload, group.ticket))
        group.impulses_accepted += calls.count

    def log_own(self, count: int, payload: bytes) -> Group:
        """Into the log, for the own app; the group that makes them durable."""
        source = BatchSource(BatchKind.IMPULSES, ONESELF, self.count + 1, count, self._turn.now_ns)
        group = self._peers.delivery.deliver_own(source, payload).group
        self.count += count
        group.transaction.sources[IMPULSES] = SourcePosition(self._committer_id, self._epoch.number, self.count)
        return group
