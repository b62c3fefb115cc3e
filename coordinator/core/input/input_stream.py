"""Receiving end of one stream, from another instance to this one; the windows and identities of senders.

A batch is accepted if it continues the log; messages that the log already has are dropped, and a gap is requested
again. Accepted messages are acknowledged once they are durable. The committer ID and the epoch identify a sender:
another committer ID means another log, and frames of an older epoch are from an earlier session.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass

from immortal.coordinator.core import formatting
from immortal.coordinator.core.effects import Report
from immortal.coordinator.core.formatting import describe_swapped_sender
from immortal.coordinator.core.interfaces import IMPULSES, LogSummary, SourcePosition
from immortal.coordinator.core.limits import Limits
from immortal.coordinator.core.notices import OldPeerRefused, PeerRefused
from immortal.coordinator.core.state import CoreState
from immortal.protocol.batch import CallRules, offset_after
from immortal.protocol.call_permissions import from_peer
from immortal.protocol.client_frames import CLIENTS
from immortal.protocol.peer_frames import KNOWN_TO_RECEIVERS, FrameType, PeerFrame, RefusedCode


class InputStream:
    """Receiving end of one stream. ``received``: the last position accepted; ``durable``: the last position in the log
    on disk."""

    def __init__(self, source: str, known: SourcePosition | None) -> None:
        self.source = source
        self.rules = from_peer(source)
        self.committer_id = known.committer_id if known else 0
        self.epoch = abs(known.epoch) if known else 0
        self.durable_epoch = self._logged_epoch = known.epoch if known else 0  # as in the log's row; negative: reset
        self.epoch_began_ns = 0  # by the sender's clock, from its Hello; two different values are two epochs' starts
        self.received = self.durable = known.position if known else 0
        self.reset_pending = known is not None and known.epoch < 0  # a sender with another log is accepted
        self.forked = False  # accepted by a reset, from an older copy of its log; nothing was taken from it yet
        self.error = ""  # why the last frame was refused
        self.pending_bytes = 0  # accepted and not durable
        self.reported_beyond_window = False  # it was reported that the sender exceeds its window
        self._pending_parts: deque[tuple[int, int]] = deque()  # (last position, bytes) of the parts of pending_bytes
        self._greeted_committer_id = 0  # of a sender from which nothing is logged yet
        self._waiting: list[tuple[int, object]] = []  # (last position, token) of frames to acknowledge

    def refusal(self, frame: PeerFrame) -> tuple[RefusedCode, str] | None:
        """Return why ``frame`` can't be from this stream's sender; None if it can. Note a newer epoch."""
        if self.committer_id and frame.committer_id != self.committer_id:
            if not (self.reset_pending and frame.frame_type is FrameType.HELLO):
                return RefusedCode.COMMITTER_CHANGED, describe_swapped_sender(
                    frame.receiver, self.source, self.committer_id, frame.committer_id, self.received
                )
            self._start_over(frame.committer_id)
        is_hello = frame.frame_type is FrameType.HELLO
        if is_hello and not self.has_greeted(frame.committer_id):
            self._greeted_committer_id = frame.committer_id  # nothing is stored of a sender that greeted earlier
            self.epoch = self.epoch_began_ns = 0
        # A sender whose own stream was reset greets with position 0, too: it asks for the position before it numbers
        # anything.
        begins_anew = self.reset_pending and is_hello and frame.position == 0
        if frame.epoch < self.epoch and not begins_anew:
            return RefusedCode.STALE_EPOCH, (
                f"a frame of epoch {frame.epoch} of {self.source!r}, which has since started epoch {self.epoch}"
            )
        if (
            is_hello
            and frame.epoch == self.epoch
            and not begins_anew
            and self.epoch_began_ns != 0
            and frame.time_ns not in (0, self.epoch_began_ns)
        ):
            return RefusedCode.STALE_EPOCH, (
                f"epoch {frame.epoch} of {self.source!r} has begun twice: its log was replaced by an older copy"
            )
        if begins_anew:
            self.forked = self.committer_id != 0 and self.received > 0 and frame.epoch <= self.epoch
        if frame.epoch != self.epoch:
            self.epoch_began_ns = 0  # unknown if a Batch has overtaken its Hello
        self.epoch = frame.epoch
        if is_hello:
            self.epoch_began_ns = frame.time_ns
            self.reset_pending = False
        return None

    def has_greeted(self, committer_id: int) -> bool:
        """Return True if this sender's batches can be taken. Before its Hello they may be meant for an earlier log."""
        return committer_id in (self.committer_id, self._greeted_committer_id)

    def reset(self) -> SourcePosition:
        """Accept a sender with another log, or with an older copy of its log. Return the position to log."""
        self.reset_pending = True
        self.error = ""
        return self._position_to_log(self.epoch)

    def _position_to_log(self, epoch: int) -> SourcePosition:
        """Return the position to log, and note that it will be logged."""
        self._logged_epoch = -max(epoch, 1) if self.reset_pending else epoch
        return SourcePosition(self.committer_id, self._logged_epoch, self.received)

    def new_epoch(self) -> SourcePosition | None:
        """Return the position to log before a Hello is answered; None if the log has it, or will have it.

        If a crash lost it, frames of an older epoch would be accepted again, after those of the current sender.
        """
        return self._position_to_log(self.epoch) if self.received and 0 <= self._logged_epoch < self.epoch else None

    @property
    def was_reset(self) -> bool:
        """True if an operator has reset the stream and nothing was taken since. Then a sender with more acknowledged
        messages is accepted."""
        return self._logged_epoch < 0

    @property
    def settled(self) -> bool:
        """True if the log on disk has the stream's last position and epoch."""
        return self.received <= self.durable and self.durable_epoch >= self._logged_epoch

    def _start_over(self, committer_id: int) -> None:
        self.committer_id = committer_id
        self.epoch = self.epoch_began_ns = self.received = self.durable = 0
        self.durable_epoch = self._logged_epoch  # no frame waits for commits of the earlier log that are in flight
        self._waiting.clear()
        self._pending_parts.clear()
        self.pending_bytes = 0

    def new_part(self, frame: PeerFrame, rules: CallRules) -> tuple[int, int, bytes, list[int]] | None:
        """Return the new part of a Batch: (first position, count, payload, indices of calls of methods that are
        reserved for the app itself). None if nothing is new, or there is a gap.

        :meth:`accept` then counts it. Raises RemoteProtocolError if the payload is not ``count`` calls that this sender
        is allowed to send: a wrong one in the log could stop the app, or act in another's name.
        """
        known = self.received - frame.position + 1  # number of its messages that were already received
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
        """True if the stream never took anything and no frame waits for it, so it can be forgotten."""
        return not (self.committer_id or self._waiting or self.reset_pending)

    @property
    def waiting_count(self) -> int:
        """Number of frames that wait for acknowledgement."""
        return len(self._waiting)

    def accept(self, frame: PeerFrame, last_position: int, size_bytes: int) -> SourcePosition:
        """Count the messages up to ``last_position`` as accepted; return the position to log."""
        self._pending_parts.append((last_position, size_bytes))
        self.pending_bytes += size_bytes
        self.committer_id = frame.committer_id
        self.received = last_position
        self.forked = False
        return self._position_to_log(frame.epoch)

    def wait_for(self, last_position: int, token: object) -> None:
        """Remember to acknowledge the frame of ``token`` once ``last_position`` is durable."""
        self._waiting.append((last_position, token))

    def became_durable(self, position: int, epoch: int) -> list[object]:
        """Note that the log is durable up to ``position``, with ``epoch``; return the tokens to acknowledge."""
        self.durable, self.durable_epoch = position, epoch
        while self._pending_parts and self._pending_parts[0][0] <= position:
            self.pending_bytes -= self._pending_parts.popleft()[1]
        done = [token for last_position, token in self._waiting if last_position <= position]
        if done:
            self._waiting = [entry for entry in self._waiting if entry[0] > position]
        return done


# Receive windows: how many unacknowledged bytes each peer can have in flight to this instance.
#
# All active peers share one budget, less what waits for the disk. So a slow disk or more peers make the windows
# smaller, and no peer can fill the memory that others need. A peer that sends more is refused. A smaller window does
# not revoke a larger one, so the largest window that the peer can still know counts.


@dataclass(slots=True, eq=False, repr=False)
class _Granted:
    """Window granted to one peer. A window sent in one period counts until the end of the next."""

    began_ns: int  # of this period
    peak_bytes: int  # largest of this period, or the last one before it
    before_bytes: int = 0  # largest of the period before


class WindowGrants:
    """Windows granted to peers. ``now_ns``: the time of the current turn."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._sent_ns: dict[str, int] = {}  # by active sender: when it last sent
        self._checked_ns = 0
        self._granted: dict[str, _Granted] = {}
        self._began_ns: int | None = None  # when this process first heard a peer
        self.now_ns = 0
        self.granted_bytes: dict[str, int] = {}  # as last sent

    def sent(self, peer: str, now_ns: int) -> None:
        """Note that ``peer`` has sent a Batch."""
        self._sent_ns[peer] = now_ns
        active_ns = self._limits.active_ns
        if now_ns - self._checked_ns >= active_ns // 10:
            self._checked_ns = now_ns
            self._sent_ns = {name: at_ns for name, at_ns in self._sent_ns.items() if now_ns - at_ns < active_ns}

    def window_bytes(self, peer: str, pending_bytes: int) -> int:
        """Return the window to grant ``peer`` while ``pending_bytes`` wait for the disk, in bytes."""
        limits = self._limits
        sharing = len(self._sent_ns) + (peer not in self._sent_ns)
        share_bytes = (limits.receive_budget_bytes - pending_bytes) // sharing
        granted_bytes = min(max(share_bytes, limits.grant_bytes_min), limits.peer_window_bytes)
        self.granted_bytes[peer] = granted_bytes
        known = self._granted.get(peer)
        if known is None:
            self._granted[peer] = _Granted(self.now_ns, granted_bytes)
        elif self._is_over(known):
            self._granted[peer] = _Granted(self.now_ns, granted_bytes, known.peak_bytes)
        else:
            known.peak_bytes = max(known.peak_bytes, granted_bytes)
        return granted_bytes

    def allowed_bytes(self, peer: str) -> int:
        """Return how many bytes ``peer`` can have in flight by the largest window it may know, perhaps from this
        instance's earlier process."""
        if self._began_ns is None:
            self._began_ns = self.now_ns
        known = self._granted.get(peer)
        if known is None:
            return max(self._limits.peer_window_bytes, self._limits.assumed_window_bytes)
        if self.now_ns - self._began_ns < self._limits.active_ns:
            # A window from an earlier process can have reached the peer after one that this process granted.
            return max(self._limits.peer_window_bytes, known.peak_bytes)
        return known.peak_bytes if self._is_over(known) else max(known.peak_bytes, known.before_bytes)

    def _is_over(self, known: _Granted) -> bool:
        return self.now_ns - known.began_ns >= self._limits.active_ns

    def forget(self, peer: str) -> None:
        for known in (self._sent_ns, self._granted, self.granted_bytes):
            known.pop(peer, None)


# Known senders: a frame is refused if it is not from the known sender of that name.


class Senders:
    """Known senders. ``streams``: input streams by sender. Names that only say Hello, or are refused, use little
    memory, and only for a limited time."""

    def __init__(self, state: CoreState, grants: WindowGrants) -> None:
        self.streams: dict[str, InputStream] = {}
        self.refused: OrderedDict[str, str] = OrderedDict()  # reason, by sender without a stream
        self._greeted: OrderedDict[str, None] = OrderedDict()  # senders from which nothing was taken yet
        self._state = state
        self._grants = grants

    def load(self, summary: LogSummary) -> None:
        """Load the positions of all senders in the log."""
        for source, known in summary.sources.items():
            if source != IMPULSES:
                self.streams[source] = InputStream(source, known)

    def stream(self, source: str) -> InputStream:
        """Return the stream from ``source``; create it if it is new."""
        stream = self.streams.get(source)
        if stream is None:
            stream = self.streams[source] = InputStream(source, None)
        return stream

    def refusal(self, frame: PeerFrame) -> tuple[RefusedCode, str] | None:
        """Return why ``frame`` is refused; None if it is accepted. A Hello makes its sender known."""
        name, sender, is_hello = self._state.name, frame.sender, frame.frame_type is FrameType.HELLO
        if frame.frame_type is FrameType.UNKNOWN:
            return RefusedCode.UNKNOWN, f"{frame.reason} is not known here: {KNOWN_TO_RECEIVERS}"
        if frame.receiver != name:
            return RefusedCode.NOT_ME, f"this is {name!r}, the message is for {frame.receiver!r}"
        if sender in ("", IMPULSES, name) or sender.startswith(CLIENTS):
            return RefusedCode.MALFORMED, f"no peer can be called {sender!r}"
        known = self.streams.get(sender)
        stream = known or InputStream(sender, None)  # kept if it is accepted
        refused = stream.refusal(frame)
        if refused is None and is_hello and frame.position > stream.durable and not stream.was_reset:
            reason = formatting.describe_lost_messages(name, sender, stream.durable, frame.position)
            refused = RefusedCode.ROLLED_BACK, reason
        if refused is None and self._state.log_capacity.full_reason:
            refused = RefusedCode.LOG_FULL, self._state.log_capacity.full_reason
        if refused is not None:
            self._note_refused(frame, stream, *refused, is_known=known is not None)
            return refused
        stream.error = ""
        if known is None and is_hello:
            self._add(stream)
        return None

    def _note_refused(
        self, frame: PeerFrame, stream: InputStream, code: RefusedCode, reason: str, *, is_known: bool
    ) -> None:
        sender, effects = frame.sender, self._state.effects
        told, stream.error = stream.error == reason, reason
        if not is_known:
            told = self.refused.pop(sender, "") == reason
            self.refused[sender] = reason
            if len(self.refused) > self._state.limits.refused_senders_max:
                self.refused.popitem(last=False)
        if code is RefusedCode.LOG_FULL or told:
            return  # a full log is reported once, for all peers
        if code is not RefusedCode.STALE_EPOCH:
            effects.append(Report(PeerRefused(sender, reason)))
        elif frame.frame_type is FrameType.HELLO:  # a late frame of another type is no error: its sender knows
            text = formatting.describe_older_sender(self._state.name, sender, reason)
            effects.append(Report(OldPeerRefused(sender, text)))

    def _add(self, stream: InputStream) -> None:
        self.streams[stream.source] = stream
        self.refused.pop(stream.source, None)
        self._greeted[stream.source] = None
        while len(self._greeted) > self._state.limits.greeted_senders_max:
            name, _ = self._greeted.popitem(last=False)
            if self.streams[name].is_empty:
                del self.streams[name]
                self._grants.forget(name)
