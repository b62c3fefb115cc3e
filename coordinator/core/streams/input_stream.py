"""The receiving end of one stream: from one instance to this one.

A batch is taken when it continues where the log ends; what is there already is dropped, a gap is asked for again. What
has been taken is acknowledged once it is durable. A sender is known by its committer ID and its epoch: another
committer ID means another log, and frames of an epoch before the newest are from a past life.
"""

from __future__ import annotations

from collections import deque

from immortal.coordinator.core.interfaces import SourcePosition
from immortal.coordinator.core.streams.problems import sender_swapped
from immortal.protocol.batch import CallRules, offset_after
from immortal.protocol.peer import FrameType, PeerFrame, RefusedCode
from immortal.protocol.senders import from_peer


class InputStream:
    """``received``: the last position taken; ``durable``: the last position in the log on disk."""

    def __init__(self, source: str, known: SourcePosition | None) -> None:
        self.source = source
        self.rules = from_peer(source)
        self.committer_id = known.committer_id if known else 0
        self.epoch = abs(known.epoch) if known else 0
        self.durable_epoch = self._logged_epoch = known.epoch if known else 0  # as in the log's row; negative: reset
        self.epoch_began_ns = 0  # by the sender's clock, from its Hello; two that differ are two lives
        self.received = self.durable = known.position if known else 0
        self.reset_pending = known is not None and known.epoch < 0  # the sender may come with another log
        self.forked = False  # let in by a reset, from an older copy of its log; nothing of it taken yet
        self.error = ""  # why the last frame was refused
        self.pending_bytes = 0  # taken, and not durable
        self.told_beyond = False  # it was said that its sender does not keep within its window
        self._taken: deque[tuple[int, int]] = deque()  # (last position, bytes) of what makes these up
        self._greeted_committer_id = 0  # of a sender of which nothing is logged yet
        self._waiting: list[tuple[int, object]] = []  # (last position, token) of frames to be acknowledged

    def refusal(self, frame: PeerFrame) -> tuple[RefusedCode, str] | None:
        """Why ``frame`` can't be from the sender that this stream knows; None if it can. Notes a newer epoch."""
        if self.committer_id and frame.committer_id != self.committer_id:
            if not (self.reset_pending and frame.frame_type is FrameType.HELLO):
                return RefusedCode.COMMITTER_CHANGED, sender_swapped(
                    frame.receiver, self.source, self.committer_id, frame.committer_id, self.received
                )
            self._begin_anew(frame.committer_id)
        is_hello = frame.frame_type is FrameType.HELLO
        if is_hello and not self.has_greeted(frame.committer_id):
            self._greeted_committer_id = frame.committer_id  # nothing of the one that was heard before is here
            self.epoch = self.epoch_began_ns = 0
        # From a sender that was reset too: it asks what is here before it numbers anything.
        begins_anew = self.reset_pending and is_hello and frame.position == 0
        if frame.epoch < self.epoch and not begins_anew:
            return RefusedCode.STALE_EPOCH, (
                f"a frame of epoch {frame.epoch} of {self.source!r}, which has since started epoch {self.epoch}"
            )
        if is_hello and frame.epoch == self.epoch and not begins_anew and self._is_another_life(frame):
            return RefusedCode.STALE_EPOCH, (
                f"epoch {frame.epoch} of {self.source!r} has begun twice: its log was replaced by an older copy"
            )
        if begins_anew:
            self.forked = self.committer_id != 0 and self.received > 0 and frame.epoch <= self.epoch
        if frame.epoch != self.epoch:
            self.epoch_began_ns = 0  # a Batch that has overtaken its Hello does not say it
        self.epoch = frame.epoch
        if is_hello:
            self.epoch_began_ns = frame.time_ns
            self.reset_pending = False
        return None

    def has_greeted(self, committer_id: int) -> bool:
        """Whether its batches may be taken: without a Hello they may be meant for a log that was here before."""
        return committer_id in (self.committer_id, self._greeted_committer_id)

    def _is_another_life(self, hello: PeerFrame) -> bool:
        return self.epoch_began_ns != 0 and hello.time_ns != 0 and hello.time_ns != self.epoch_began_ns

    def reset(self) -> SourcePosition:
        """Let in a sender with another log, or with an older copy of the one that it had; what the log is to know."""
        self.reset_pending = True
        self.error = ""
        return self._known(self.epoch)

    def _known(self, epoch: int) -> SourcePosition:
        """What the log is to know; taken as on its way there."""
        self._logged_epoch = -max(epoch, 1) if self.reset_pending else epoch
        return SourcePosition(self.committer_id, self._logged_epoch, self.received)

    def new_epoch(self) -> SourcePosition | None:
        """What the log is to know before a Hello is answered; None if it does, or will.

        Forgotten in a crash, an older epoch would be taken again, behind what its sender believes is its own.
        """
        return self._known(self.epoch) if self.received and 0 <= self._logged_epoch < self.epoch else None

    @property
    def was_reset(self) -> bool:
        """By an operator, and nothing was taken since: a sender that had more acknowledged is let in as well."""
        return self._logged_epoch < 0

    @property
    def settled(self) -> bool:
        """All that is taken, and the epoch, are durable."""
        return self.received <= self.durable and self.durable_epoch >= self._logged_epoch

    def _begin_anew(self, committer_id: int) -> None:
        self.committer_id = committer_id
        self.epoch = self.epoch_began_ns = self.received = self.durable = 0
        self.durable_epoch = self._logged_epoch  # nobody waits for what is on its way of the log before
        self._waiting.clear()
        self._taken.clear()
        self.pending_bytes = 0

    def new_part(self, frame: PeerFrame, rules: CallRules) -> tuple[int, int, bytes, list[int]] | None:
        """What of a Batch is new: (first position, count, payload, indices of calls of methods that are reserved for
        the app itself); None if nothing, or if there is a gap.

        Taking it is up to :meth:`take`. Raises RemoteProtocolError for a payload that is not ``count`` calls that this
        sender may send: logged, one of them could stop the app or speak for somebody else.
        """
        known = self.received - frame.position + 1  # messages of it that are here already
        if known < 0 or known >= frame.count:
            return None
        reserved = rules.check(frame.payload, frame.count)
        if known == 0:
            return frame.position, frame.count, frame.payload, reserved
        offset = offset_after(frame.payload, known, frame.count)
        reserved = [index - known for index in reserved if index >= known]
        return self.received + 1, frame.count - known, frame.payload[offset:], reserved

    @property
    def is_empty(self) -> bool:
        """Nothing was ever taken, and nobody waits: it can be forgotten."""
        return not (self.committer_id or self._waiting or self.reset_pending)

    @property
    def waiting_count(self) -> int:
        """Frames that will be acknowledged."""
        return len(self._waiting)

    def take(self, frame: PeerFrame, last_position: int, size_bytes: int) -> SourcePosition:
        """The messages up to ``last_position`` go into the log; what the log is to know of it."""
        self._taken.append((last_position, size_bytes))
        self.pending_bytes += size_bytes
        self.committer_id = frame.committer_id
        self.received = last_position
        self.forked = False
        return self._known(frame.epoch)

    def wait_for(self, last_position: int, token: object) -> None:
        """The frame behind ``token`` is to be acknowledged once ``last_position`` is durable."""
        self._waiting.append((last_position, token))

    def became_durable(self, position: int, epoch: int) -> list[object]:
        """The log is durable up to ``position``, with ``epoch``; the tokens of the frames to acknowledge now."""
        self.durable, self.durable_epoch = position, epoch
        while self._taken and self._taken[0][0] <= position:
            self.pending_bytes -= self._taken.popleft()[1]
        done = [token for last_position, token in self._waiting if last_position <= position]
        if done:
            self._waiting = [entry for entry in self._waiting if entry[0] > position]
        return done
