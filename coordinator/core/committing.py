"""Between the machine and its log: what is handed over to become durable, and what follows from the log's answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from immortal.coordinator.core import events as ev
from immortal.coordinator.core import notices
from immortal.coordinator.core.effects import Commit, ReadCheckpointChunk, Trim
from immortal.coordinator.core.errors import FencedError
from immortal.coordinator.core.parts import Parts
from immortal.coordinator.core.session import WORKS, Phase
from immortal.protocol.client import CLIENTS


class Committing:
    """Of the machine that has these parts. What there is no way on from is raised, an ImmortalError."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._turn, self._session, self._peers = parts.turn, parts.session, parts.peers
        self._log, self._access, self._checkpoints = parts.log, parts.access, parts.checkpoints

    def commit(self, now_ns: int) -> None:
        """What is to become durable next, if there is anything."""
        parts = self._parts
        log = self._log
        # Marks are new once only: they are taken when there is a record to hold them.
        marked = self._session.phase in WORKS and log.seals_next
        group = log.next_commit(now_ns, self._peers.new_marks(log.next_ticket) if marked else {})
        if group is not None:
            expected_last, fence = group.expected_last_sequence_id, parts.right.fence
            self._access.write(Commit(group.ticket, group.transaction, group.size_bytes, expected_last, fence))

    def committed(self, event: ev.Committed) -> None:
        parts = self._parts
        self._access.written()
        ticket, now_ns, peers = event.ticket, self._turn.now_ns, self._peers
        group = self._log.committed(ticket)
        peers.turns.committed(ticket, now_ns)
        transaction = group.transaction
        if group.impulses_accepted:
            self._session.note_accepted(group.impulses_accepted, self._log.durable_sequence_id)
        parts.feeding.committed(group)
        if transaction.sources:
            peers.became_durable(transaction.sources.items(), now_ns)
        if CLIENTS in transaction.acknowledged:
            peers.answers_durable(transaction.acknowledged[CLIENTS])
        parts.resets.committed(ticket)
        parts.operator.committed(ticket)
        if transaction.epoch is not None:
            self._turn.report(notices.NewEpoch(transaction.epoch))
        if peers.trim_ticket and ticket >= peers.trim_ticket:
            peers.trim_ticket = 0
            self._turn.effects.append(Trim())
        if transaction.cut_healed:
            parts.lifecycle.cut_healed()
        if transaction.version is not None:
            parts.upgrades.began(transaction.version)
        if transaction.checkpoint is not None:
            parts.taking.durable(transaction.checkpoint, adopted=transaction.adopts)

    def chunk_written(self, event: ev.ChunkWritten) -> None:
        self._access.written()
        self._checkpoints.chunks_pending_bytes -= event.size_bytes

    def checkpoint_requested(self, event: ev.CheckpointRequested) -> None:
        self._checkpoints.wanted = True

    def tail_read(self, event: ev.TailRead) -> None:
        for write in self._access.settle(event):
            if isinstance(write, Commit):
                self.committed(ev.Committed(write.ticket))
            else:
                self.chunk_written(ev.ChunkWritten(len(write.data)))

    def log_failed(self, event: ev.LogFailed) -> None:
        parts = self._parts
        if event.retryable:
            self._access.failed(event)
            parts.wakes.log_at(self._access.due_ns)
        elif isinstance(event.request, ReadCheckpointChunk) and parts.right.follows:
            if self._session.phase is Phase.RESTORING:  # its writer may have removed it; the next look says
                self._session.reading = False
                parts.lifecycle.begin_anew(f"the checkpoint can't be restored ({event.error})")
        else:
            raise event.error

    def fenced(self, event: ev.Fenced) -> None:
        """Another has the right to write by now: what is not durable is nobody's, and nothing more may leave.

        Raises FencedError.
        """
        parts = self._parts
        epoch = parts.epoch.number
        raise FencedError(
            event.holder,
            f"fenced by {event.holder} at epoch {epoch}: it writes the log of {parts.name!r} now; nothing that was "
            f"acknowledged is lost, and nothing more of this coordinator counts",
        )

    def was_read(self, then: Callable[[Any], None]) -> Callable[[Any], None]:
        """``then``, behind a look whether that ends a silence of the log."""
        access = self._access

        def read(event: Any) -> None:
            access.read()
            then(event)

        return read

    def log_measured(self, event: ev.LogMeasured) -> None:
        """A log that is full takes no input but what the app makes of it: that is the way to a checkpoint, and room."""
        parts = self._parts
        room, session, turn = parts.log_room, self._session, self._turn
        if room.measured(event.space):
            self._peers.log_full = room.full
            parts.clients.log_full = bool(room.full)
            if room.full:
                turn.report(notices.LogFull(room.full))
            else:
                turn.report(notices.LogHasRoom())
        last = self._checkpoints.last
        if session.phase is Phase.NORMAL and room.wants_checkpoint(
            session.fed_sequence_id, self._log.durable_sequence_id, last
        ):
            self._checkpoints.wanted = True
