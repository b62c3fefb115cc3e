"""The receiving end of one stream: from one instance to this one.

A batch is taken when it continues where the log ends; what is there already is dropped, a gap is asked for again. What
has been taken is acknowledged once it is durable. A sender is known by its committer ID and its epoch: another
committer ID means another log, and frames of an epoch before the newest are from a past life.
"""

from __future__ import annotations

from coordinator.core.interfaces import SourcePosition
from protocol.batch import offset_after
from protocol.errors import RemoteProtocolError
from protocol.peer import PeerFrame, RefusedCode


class InputStream:
    """``received``: the last position taken; ``durable``: the last position in the log on disk."""

    def __init__(self, source: str, known: SourcePosition | None) -> None:
        self.source = source
        self.committer_id = known.committer_id if known else 0
        self.epoch = known.epoch if known else 0
        self.received = self.durable = known.position if known else 0
        self._waiting: list[tuple[int, object]] = []  # (last position, token) of frames to be acknowledged

    def refusal(self, frame: PeerFrame) -> tuple[RefusedCode, str] | None:
        """Why ``frame`` can't be from the sender that this stream knows; None if it can. Notes a newer epoch."""
        if self.committer_id and frame.committer_id != self.committer_id:
            return RefusedCode.COMMITTER_CHANGED, (
                f"{self.source!r} was committer {self.committer_id} here and is {frame.committer_id} now: "
                f"its log was wiped or swapped"
            )
        if frame.epoch < self.epoch:
            return RefusedCode.STALE_EPOCH, (
                f"a frame of epoch {frame.epoch} of {self.source!r}, which has since started epoch {self.epoch}"
            )
        self.epoch = frame.epoch
        return None

    def new_part(self, frame: PeerFrame) -> tuple[int, int, bytes] | None:
        """What of a Batch is new: (first position, count, payload); None if nothing, or if there is a gap.

        Taking it is up to :meth:`take`. Raises RemoteProtocolError for a payload that can't be cut.
        """
        known = self.received - frame.position + 1  # messages of it that are here already
        if known < 0 or known >= frame.count:
            return None
        if known == 0:
            return frame.position, frame.count, frame.payload
        offset = offset_after(frame.payload, known, frame.count)
        if offset >= len(frame.payload):
            raise RemoteProtocolError(f"a batch of {frame.count} messages from {self.source!r} has fewer")
        return self.received + 1, frame.count - known, frame.payload[offset:]

    def take(self, frame: PeerFrame, last_position: int) -> SourcePosition:
        """The messages up to ``last_position`` go into the log; what the log is to know of it."""
        self.committer_id = frame.committer_id
        self.received = last_position
        return SourcePosition(frame.committer_id, frame.epoch, last_position)

    def wait_for(self, last_position: int, token: object) -> None:
        """The frame behind ``token`` is to be acknowledged once ``last_position`` is durable."""
        self._waiting.append((last_position, token))

    def became_durable(self, position: int) -> list[object]:
        """The log is durable up to ``position``; the tokens of the frames to acknowledge now."""
        self.durable = position
        done = [token for last_position, token in self._waiting if last_position <= position]
        if done:
            self._waiting = [entry for entry in self._waiting if entry[0] > position]
        return done
