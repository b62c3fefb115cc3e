"""Checks from outside the core, made while it runs. A Violation tells what did not hold.

One :class:`Checker` watches one instance through all its lives: what it has logged, its answers to peers, its messages
to the app, and the state after each record.
"""

from __future__ import annotations

from immortal.coordinator.core import effects as ef
from immortal.coordinator.core.interfaces import LogSummary, SourcePosition, Transaction
from immortal.protocol.peer_frames import FrameType
from immortal.protocol.record import decode_header
from immortal.protocol.trailer import BatchKind, decode_trailer
from tests.simulation.failing import DoomOf, Failures
from tests.simulation.trace import Violation


class Checker:
    """Checker of one instance. ``acknowledged``: by sender, the position that its peers know to be durable here."""

    def __init__(self, name: str, doom_of: DoomOf = lambda rpc: None) -> None:
        self.name = name
        self.failures = Failures(name, doom_of)
        self.ledger: dict[int, bytes] = {}  # by sequence ID: values as they became durable
        self.acknowledged: dict[str, int] = {}
        self.positions: dict[tuple[int, str], int] = {}  # by kind and source: the last one in the ledger
        self.durable: dict[str, int] = {}  # by source: as in the log's own table
        self.epochs: dict[str, int] = {}  # by source: of the last batch taken
        self.committers: dict[str, int] = {}  # by source: the committer of its log
        self.impulse_positions: dict[str, int] = {}  # by destination: the last position of a durable impulse
        self.sent: dict[str, int] = {}  # by destination: the last position ever sent
        self.states: dict[int, int] = {}  # by sequence ID: a check of the app's state after that record
        self.checkpointed = False
        self.is_reset = False  # its streams are reset: positions in frames are not those of the log
        self.wiped = ""  # an instance that has lost its log
        self.last_time_ns = 0
        self.epoch = 0  # of the log
        self.speakers: dict[int, int] = {}  # by epoch: the node that has sent frames in it

    def copy(self) -> Checker:
        """Return a checker for a second copy of the log."""
        other = Checker(self.name)
        for name, value in vars(self).items():
            setattr(other, name, value.copy() if isinstance(value, dict | Failures) else value)
        return other

    def require(self, condition: bool, problem: str) -> None:
        if not condition:
            raise Violation(f"{self.name}: {problem}")

    # --- the log ---------------------------------------------------------------------------------------------------

    def became_durable(self, transaction: Transaction) -> None:
        for sequence_id, value in transaction.records:
            self.require(sequence_id not in self.ledger, f"record {sequence_id} was written twice")
            self.ledger[sequence_id] = bytes(value)
            self._check_trailer(sequence_id, value)
        for source, known in transaction.sources.items():
            self._begin_anew_if_reset(source, known)
            self.durable[source] = known.position
            last_epoch = self.epochs.get(source, 0)
            epoch = abs(known.epoch)
            self.require(epoch >= last_epoch, f"took something of {source} of epoch {epoch} behind {last_epoch}")
            self.epochs[source] = epoch
        for batch in transaction.impulses:
            # Impulses after the last frame can't have been sent before they are durable.
            self.require(
                batch.first_position > self.sent.get(batch.destination, 0) or self.is_reset,
                f"an impulse to {batch.destination} at {batch.first_position} was sent before it was durable",
            )
            self.impulse_positions[batch.destination] = batch.last_position
        for verdict in transaction.verdicts:
            self.require(verdict.sequence_id in self.ledger, f"a verdict on record {verdict.sequence_id}, of none")
            self.failures.became_durable(verdict, self.ledger[verdict.sequence_id])
        if transaction.checkpoint is not None:
            self.checkpointed = True
        if transaction.epoch is not None:
            self.require(transaction.epoch > self.epoch, f"epoch {transaction.epoch} begins behind {self.epoch}")
            self.epoch = transaction.epoch

    def _begin_anew_if_reset(self, source: str, known: SourcePosition) -> None:
        """Begin anew if an operator has let in another log of a peer that has lost its own."""
        if source == self.wiped and known.committer_id != self.committers.get(source, known.committer_id):
            self.epochs.pop(source, None)
            self.acknowledged.pop(source, None)
        self.committers[source] = known.committer_id

    def _check_trailer(self, sequence_id: int, value: bytes) -> None:
        header = decode_header(value)
        trailer = decode_trailer(memoryview(value)[header.size_bytes :], header.check)
        self.require(trailer.time_ns >= self.last_time_ns, f"the time of record {sequence_id} goes back")
        self.last_time_ns = trailer.time_ns
        for batch in trailer.batches:
            if batch.kind == BatchKind.INITIAL:
                continue
            last = self.positions.get((batch.kind, batch.name), 0)
            if batch.name == self.wiped and batch.name and batch.first_position == 1:
                last = 0
            self.require(
                batch.first_position == last + 1,
                f"record {sequence_id} has messages of {batch.name or 'itself'!r} from {batch.first_position} on, "
                f"the log has them up to {last}",
            )
            self.positions[batch.kind, batch.name] = batch.last_position

    def opened(self, summary: LogSummary) -> None:
        """Check, in a new life of the coordinator, that all acknowledged messages are there."""
        for source, position in self.acknowledged.items():
            known = summary.sources.get(source)
            has = known.position if known else 0
            self.require(
                has >= position,
                f"{source} was told that {position} messages are durable, after a crash there are {has}",
            )
        last = max(self.ledger, default=-1)
        self.require(
            summary.last_sequence_id == last, f"the log ends at record {summary.last_sequence_id}, it had {last}"
        )

    # --- output of the core ----------------------------------------------------------------------------------------

    def given_to_app(self, data: bytes | memoryview) -> None:
        """Check each SendToApp's bytes: a logged record must be durable, and equal to what was written."""
        if len(data) < 24:
            return
        sequence_id = int.from_bytes(data[16:24], "little", signed=True)
        if sequence_id < 0 or int.from_bytes(data[4:8], "little") != len(data):
            return  # a control record, or a part of a blob
        written = self.ledger.get(sequence_id)
        self.require(written is not None, f"the app got record {sequence_id} before it was durable")
        if written is not None:
            self.require(written[: len(data)] == data, f"the app got record {sequence_id} other than it was written")

    def answered(self, effect: ef.ReplyToPeer) -> None:
        frame = effect.frame
        if frame.frame_type not in (FrameType.TRIM_TO, FrameType.WELCOME):
            return
        durable = self.durable.get(frame.receiver, 0)
        self.require(
            frame.position <= durable,
            f"{frame.frame_type.name} {frame.position} to {frame.receiver}, {durable} of its messages are durable",
        )
        self.acknowledged[frame.receiver] = max(frame.position, self.acknowledged.get(frame.receiver, 0))

    def sent_to_peer(self, effect: ef.SendToPeer, node: int) -> None:
        """Check a frame of this node, one of several with the same log."""
        frame = effect.frame
        speaker = self.speakers.setdefault(frame.epoch, node)
        self.require(speaker == node, f"node {node} sends in epoch {frame.epoch}, which is that of node {speaker}")
        if frame.frame_type is FrameType.BATCH:
            self.require(self.checkpointed, "a Batch left before the first checkpoint was durable")
            last = frame.position + frame.count - 1
            self.sent[frame.receiver] = max(last, self.sent.get(frame.receiver, 0))

    # --- the app -----------------------------------------------------------------------------------------------------

    def app_begins(self) -> None:
        """Forget states that the next app can change: failures that were reported to nobody can end otherwise."""
        first = self.failures.forget_unheard()
        if first is not None:
            self.states = {sequence_id: check for sequence_id, check in self.states.items() if sequence_id < first}

    def reached_state(self, sequence_id: int, check: int) -> None:
        """Check that the state after this record, live or replayed, equals that of the first time."""
        known = self.states.setdefault(sequence_id, check)
        self.require(known == check, f"a replay of record {sequence_id} leads to another state than it did live")
