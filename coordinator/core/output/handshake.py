"""Handshake with the receiver of an output stream: Hello, Welcome, and its other answers.

A stream greets its receiver before anything is sent, and again whenever it is unknown what has arrived. If the receiver
refuses it, or has another log, only this stream stops: its messages are kept, and it greets again after a while.
"""

from __future__ import annotations

from collections.abc import Mapping

from immortal.coordinator.core import formatting
from immortal.coordinator.core.effects import Report, ResetPeer, SendToPeer
from immortal.coordinator.core.group_commit import Group
from immortal.coordinator.core.interfaces import StreamStart
from immortal.coordinator.core.notices import StreamReset, StreamStopped, StreamWaits
from immortal.coordinator.core.output.output_stream import OutputStream, StreamState
from immortal.coordinator.core.state import CoreState
from immortal.protocol.peer_frames import FrameType, PeerFrame, RefusedCode


class Handshake:
    """Handshakes of all output streams. ``has_failures``: a stream has stopped since the process started."""

    def __init__(self, state: CoreState, receivers: Receivers) -> None:
        self.has_failures = False
        self._state = state
        self._receivers = receivers

    def greet(self, stream: OutputStream) -> None:
        """Send Hello, which asks how much the receiver has."""
        state = self._state
        stream.state = StreamState.GREETING
        pending = self._receivers.start(stream.destination).pending
        stream.greeted_position = 0 if pending else stream.acknowledged - stream.offset
        frame = state.frame(
            FrameType.HELLO, stream.destination, position=stream.greeted_position, time_ns=state.frame_epoch_began_ns
        )
        state.effects.append(SendToPeer(stream.destination, stream.attempt, frame))

    def replied(self, stream: OutputStream, tag: int, frame: PeerFrame) -> None:
        """Handle the receiver's answer to the attempt ``tag``."""
        if stream.state in (StreamState.CLOSED, StreamState.FAILED) or tag < stream.first_tag:
            return
        destination = stream.destination
        pending = self._receivers.start(destination).pending
        if frame.frame_type is FrameType.REFUSED:
            if tag == stream.attempt and (
                pending or frame.code == RefusedCode.NOT_ME or self._is_same_receiver(stream, frame)
            ):
                self._refused(stream, frame)
            return
        if pending:
            if tag == stream.attempt and frame.frame_type is FrameType.WELCOME:
                self._note_window(stream, frame)
                self._start_over(stream, frame)
            return
        if not self._is_same_receiver(stream, frame):
            return
        position = frame.position + stream.offset
        if position > stream.sent_through and not self._state.catching_up:
            self.fail_forked(stream, frame.position)
            return
        if frame.frame_type in (FrameType.TRIM_TO, FrameType.WELCOME):
            self._note_window(stream, frame)
        if frame.frame_type is FrameType.TRIM_TO:
            self._receivers.acknowledge(stream, position)
        elif tag != stream.attempt:
            return
        elif frame.frame_type is FrameType.RESEND:
            stream.requeue_in_flight()
            # Late, or from an older copy of the receiver's log, or from one without this stream: a new Hello finds out.
            if position < stream.acknowledged or frame.position == 0:
                self.greet(stream)
        elif frame.frame_type is FrameType.WELCOME and stream.state is StreamState.GREETING:
            self._welcomed(stream, frame, position)

    def _welcomed(self, stream: OutputStream, frame: PeerFrame, position: int) -> None:
        # Compare with the position in our Hello: an acknowledgement may have arrived between Hello and Welcome.
        greeted = stream.greeted_position
        if frame.position < greeted and frame.code == RefusedCode.ROLLED_BACK:
            stream.reset()  # its operator has reset it and accepts that the rest is lost there
            self._start_over(stream, frame)
        elif frame.position < greeted:
            name, receiver = self._state.name, stream.destination
            self._fail(stream, formatting.describe_older_receiver(name, receiver, frame.position, greeted))
        else:
            stream.open()
            self._receivers.acknowledge(stream, position)

    def _note_window(self, stream: OutputStream, frame: PeerFrame) -> None:
        limits = self._state.limits
        stream.window_bytes = frame.count or min(limits.peer_window_bytes, limits.assumed_window_bytes)

    def _start_over(self, stream: OutputStream, frame: PeerFrame) -> None:
        """Continue a reset stream after the receiver's last message; send it all unacknowledged messages.

        If the receiver's log and this one are unchanged and complete, nothing changes. If this log is an older copy,
        the receiver's messages after the acknowledged ones can be different ones: all unacknowledged ones are sent.
        """
        state, receivers, destination = self._state, self._receivers, stream.destination
        position = frame.position + stream.offset
        # If the receiver acknowledged nothing since the stream's reset, its new log has only messages of late frames.
        is_known = receivers.committer_ids.get(destination) == frame.committer_id
        same = stream.acknowledged == stream.offset or is_known
        forked = receivers.start(destination).forked or frame.code == RefusedCode.STALE_EPOCH
        all_sent = position <= stream.sent_through or state.catching_up
        group = state.log.append_outside_record(0)
        if forked or not same or position < stream.acknowledged or not all_sent:
            position = stream.acknowledged
            stream.offset = position - frame.position
            receivers.acknowledged[destination] = group.transaction.acknowledged[destination] = position
        stream.forked = False
        receivers.set_start(destination, StreamStart(stream.offset), group)
        receivers.set_committer(destination, frame.committer_id, group)
        stream.open(group.ticket)
        receivers.acknowledge(stream, position)
        state.effects.append(Report(StreamReset(destination, stream.acknowledged, frame.position)))

    # --- failures of a stream ----------------------------------------------------------------------------------------

    def _is_same_receiver(self, stream: OutputStream, frame: PeerFrame) -> bool:
        destination = stream.destination
        known = self._receivers.committer_ids.get(destination)
        if known is None:
            group = self._state.log.append_outside_record(0)
            self._receivers.set_committer(destination, frame.committer_id, group)
        elif known != frame.committer_id:
            reason = formatting.describe_swapped_receiver(
                self._state.name, destination, known, frame.committer_id, stream.acknowledged, stream.position
            )
            self._fail(stream, reason, failure=f"committer {frame.committer_id}")
            return False
        return True

    def _refused(self, stream: OutputStream, frame: PeerFrame) -> None:
        stream.forked = stream.forked or frame.code == RefusedCode.STALE_EPOCH
        full = frame.code == RefusedCode.LOG_FULL
        reason = formatting.describe_refusal(self._state.name, stream.destination, frame)
        self._fail(stream, reason, failure="log full" if full else "", notice=StreamWaits if full else StreamStopped)

    def fail_forked(self, stream: OutputStream, received: int) -> None:
        """Stop a stream whose receiver has ``received`` messages, by its numbers: more than this log ever sent."""
        sent = stream.sent_through - stream.offset
        stream.forked = True
        reason = formatting.describe_older_own_log(self._state.name, stream.destination, received, sent)
        self._fail(stream, reason, failure="own log older")

    def _fail(
        self, stream: OutputStream, reason: str, *, failure: str = "", notice: type[StreamStopped] = StreamStopped
    ) -> None:
        """Stop a stream and report it once per failure. ``failure``: kind of the failure, if the reason has changing
        figures."""
        told = stream.failure == (failure or reason)
        stream.failure = failure or reason
        stream.fail(reason)
        self.has_failures = True
        self._state.effects.append(ResetPeer(stream.destination))
        if not told:
            self._state.effects.append(Report(notice(stream.destination, reason)))

    def receiver_moved(self, stream: OutputStream) -> None:
        """Send Hello to a receiver with a new address: messages in flight are lost. A stopped stream greets later."""
        if stream.state in (StreamState.OPEN, StreamState.GREETING):
            stream.requeue_in_flight()
            self.greet(stream)


class Receivers:
    """Receivers of output streams: the log has these facts about each, by its name.

    ``committer_ids``: the ID of the receiver's log. ``starts``: where a stream that was reset begins. ``acknowledged``:
    the last acknowledged position; in a replay, only of messages that the replay has made again.
    """

    def __init__(self, state: CoreState) -> None:
        self.committer_ids: dict[str, int] = {}
        self.starts: dict[str, StreamStart] = {}
        self.acknowledged: dict[str, int] = {}
        self._state = state
        self._freed_bytes = 0  # spilled and acknowledged since trim_ticket was set

    def load(self, acknowledged: Mapping[str, int]) -> None:
        """Load the acknowledged positions of the log."""
        for receiver, position in acknowledged.items():
            self.note_durable_acknowledgement(receiver, position)

    def note_durable_acknowledgement(self, receiver: str, position: int) -> None:
        """Note that the log has the acknowledgement of ``position``."""
        self.acknowledged[receiver] = max(position, self.acknowledged.get(receiver, 0))

    def start(self, receiver: str) -> StreamStart:
        return self.starts.get(receiver, StreamStart())

    def set_start(self, receiver: str, start: StreamStart, group: Group) -> None:
        """Set the start of the receiver's stream from the commit of ``group`` on."""
        self.starts[receiver] = group.transaction.stream_starts[receiver] = start

    def set_committer(self, receiver: str, committer_id: int, group: Group) -> None:
        """Set the receiver's committer ID from the commit of ``group`` on."""
        self.committer_ids[receiver] = group.transaction.peers[receiver] = committer_id

    def acknowledge(self, stream: OutputStream, position: int) -> None:
        """Note that the receiver of ``stream`` has everything up to ``position`` on disk."""
        freed_bytes = stream.acknowledge(position)
        if position <= stream.position:  # otherwise it is unknown whether the replay will reach it
            self.note_acknowledged(stream)
        if freed_bytes:
            # Acknowledged spilled messages are removed from the log, many at a time.
            state = self._state
            self._freed_bytes += freed_bytes
            if self._freed_bytes >= state.limits.spill_trim_bytes or not stream.spill.kept_bytes:
                self._freed_bytes = 0
                state.trim_ticket = state.log.append_outside_record(0).ticket

    def note_acknowledged(self, stream: OutputStream) -> None:
        receiver, position = stream.destination, stream.acknowledged
        if position > self.acknowledged.get(receiver, -1):
            self.acknowledged[receiver] = position
            self._state.log.open.transaction.acknowledged[receiver] = position
