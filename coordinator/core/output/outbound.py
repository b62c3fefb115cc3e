"""Output streams of an instance: the app adds messages, and frames to the receivers leave.

The stream to oneself is one of them; its receiver is the own log. The answers to clients are another; they go to the
log as well.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from immortal.coordinator.core import events as ev
from immortal.coordinator.core.effects import OpenPeer, ReadSpilled, ResetPeer, SendToPeer
from immortal.coordinator.core.input.admission import OpenCalls
from immortal.coordinator.core.input.inbound import Inbound
from immortal.coordinator.core.interfaces import ONESELF, OutputBatch, OutputMark, SpilledBatch
from immortal.coordinator.core.output.handshake import Handshake, Receivers
from immortal.coordinator.core.output.output_stream import OutputStream, StreamState
from immortal.coordinator.core.output.replay_check import ExpectedOutputs, FollowerOutputs, ReplayPolicy
from immortal.coordinator.core.state import CoreState
from immortal.protocol.client_frames import CLIENTS
from immortal.protocol.peer_frames import FrameType
from immortal.protocol.trailer import OutputMarkEntry


@dataclass(slots=True, eq=False, repr=False)
class Outbound:
    """Output side of all streams. ``streams``: by destination; ``busy``: all that are not idle, and perhaps others."""

    state: CoreState
    inbound: Inbound
    policy: ReplayPolicy
    open_calls: OpenCalls
    receivers: Receivers = field(init=False)
    handshake: Handshake = field(init=False)
    expected: ExpectedOutputs = field(init=False)
    followed: FollowerOutputs = field(init=False)
    streams: dict[str, OutputStream] = field(default_factory=dict)
    busy: dict[str, OutputStream] = field(default_factory=dict)
    spilling: SpillPolicy = field(init=False)
    barriers: Barriers = field(init=False)
    _moved: set[str] = field(default_factory=set)  # destinations that can have a new mark

    def __post_init__(self) -> None:
        self.receivers = Receivers(self.state)
        self.handshake = Handshake(self.state, self.receivers)
        self.expected = ExpectedOutputs(self.state, self.policy)
        self.followed = FollowerOutputs(self.state)
        self.spilling = SpillPolicy(self.state, self.streams, self.busy)
        self.barriers = Barriers(self.state.limits.barrier_ns)

    # --- the streams -------------------------------------------------------------------------------------------------

    def stream(self, destination: str) -> OutputStream:
        """Return the stream to ``destination``; create it if it is new. The next :meth:`send` handles it."""
        stream = self.touch(destination)
        if stream is not None:
            return stream
        return self.add(
            OutputStream(
                destination,
                self.state.limits,
                acknowledged=self.acknowledged(destination),
                attempt=self.state.frame_epoch << 32,
                check=self.expected.check(destination),
                spilled=self.expected.pop_spilled(destination),
                begins_now=not self.state.catching_up,
            ),
        )

    def touch(self, destination: str) -> OutputStream | None:
        """Return the stream to ``destination``, if there is one, and count it as busy."""
        stream = self.streams.get(destination)
        if stream is not None:
            self.busy[destination] = stream
        return stream

    def acknowledged(self, destination: str) -> int:
        """Return the position up to which the receiver is known to have the stream."""
        if destination == ONESELF:
            return self.inbound.senders.stream(ONESELF).durable
        return self.receivers.acknowledged.get(destination, 0)

    def add(self, stream: OutputStream) -> OutputStream:
        destination = stream.destination
        self.streams[destination] = self.busy[destination] = stream
        if destination in (ONESELF, CLIENTS):
            stream.state = StreamState.OPEN
        elif not self.state.following:
            self.connect(stream)
        return stream

    def connect(self, stream: OutputStream) -> None:
        """Greet the receiver: the app of the stream works, or will work."""
        stream.offset = self.receivers.start(stream.destination).offset
        self.state.effects.append(OpenPeer(stream.destination))
        self.handshake.greet(stream)

    def forget(self) -> None:
        """Forget the streams of an app that is gone: the replay makes its outputs again."""
        for destination, stream in self.streams.items():
            if destination not in (ONESELF, CLIENTS) and stream.state is not StreamState.CLOSED:
                self.state.effects.append(ResetPeer(destination))
        self.forget_streams()

    def forget_streams(self) -> None:
        for known in (self.streams, self.busy, self._moved):
            known.clear()
        self.barriers.forget()
        self.followed.forget()

    # --- from the app ------------------------------------------------------------------------------------------------

    def append(self, destination: str, count: int, payload: bytes) -> None:
        """Add the app's next ``count`` messages to ``destination``."""
        self.open_calls.answered(destination, payload)
        self._moved.add(destination)
        stream = self.stream(destination)
        if self.state.following:
            self.followed.append(stream, count, payload)
        else:
            if self.barriers.is_open:
                self.barriers.stop(stream)
            stream.append(count, payload, self.state.last_verdict_ticket)

    def add_barrier(self, destination: str) -> None:
        """Hold back later messages to other instances until ``destination`` has everything sent so far."""
        stream = self.streams.get(destination)
        if stream is not None and destination not in (ONESELF, CLIENTS) and not self.state.following:
            self.barriers.add(stream, self.state.now_ns)

    def place(self, marks: Iterable[OutputMarkEntry]) -> None:
        """Give positions to the app's outputs, up to these ``marks`` of the followed log."""
        for mark in marks:
            self.followed.mark_reached(self.stream(mark.destination), mark.position)

    def new_marks(self, ticket: int) -> dict[str, OutputMark]:
        """Return the marks of the streams that moved since the last call, for the commit ``ticket``.

        No marks if a verdict becomes durable only in a later commit: without it a replay would make something else. No
        marks while outputs are held for a checkpoint that changes what a replay makes.
        """
        marks: dict[str, OutputMark] = {}
        if self.state.last_verdict_ticket > ticket or self.state.outputs_held:
            return marks
        for destination in sorted(self._moved):
            mark = self.streams[destination].pop_new_mark(ticket)
            if mark is not None:
                marks[destination] = mark
                self._moved.discard(destination)
        return marks

    @property
    def any_unmarked(self) -> bool:
        """True if the app has outputs that no mark covers."""
        return any(self.streams[destination].is_unmarked for destination in self._moved)

    def send(self) -> None:
        """Send all batches that can be sent now; none before the first checkpoint is durable."""
        now_ns = self.state.now_ns
        state, busy, spilling = self.state, self.busy, self.spilling
        if not state.ready or state.outputs_held or state.following:
            return
        durable_ticket = state.log.durable_ticket
        state.awaits_replies = spilling.waits_for_receiver = False
        if self.barriers.is_open:
            self.barriers.update(self.streams, now_ns)
        if not busy:
            return
        for stream in busy.values():
            if stream.called:
                stream.called, stream.called_ns = False, now_ns
            if stream.moved_on:
                stream.moved_on, stream.moved_on_ns = False, now_ns
        for destination, stream in busy.items():
            if destination == CLIENTS:
                continue
            if stream.spill.active:
                spilling.update(stream)
            last_position = stream.last_sendable_position(self.barriers.passed)
            while (batch := stream.next_batch(durable_ticket, last_position)) is not None:
                if destination == ONESELF:
                    self.inbound.accept_own_batch(batch)
                    continue
                frame = state.frame(
                    FrameType.BATCH,
                    destination,
                    batch.first_position - stream.offset,
                    count=batch.count,
                    time_ns=now_ns,
                    payload=batch.payload,
                )
                state.effects.append(SendToPeer(destination, stream.attempt, frame))
            if destination != ONESELF and stream.awaits_reply:
                state.awaits_replies = True
        for destination in [destination for destination, stream in busy.items() if stream.is_idle]:
            del busy[destination]

    def pop_answers(self) -> list[OutputBatch]:
        """Return the app's new answers to clients, under the same conditions as :meth:`send`."""
        state = self.state
        stream = self.streams.get(CLIENTS)
        if stream is None or not state.ready or state.outputs_held or state.following:
            return []
        return stream.buffer.pop_all(state.log.durable_ticket, stream.last_sendable_position(self.barriers.passed))

    def spilled_read(self, event: ev.SpilledRead) -> None:
        """Handle the result of a ReadSpilled."""
        stream = self.touch(event.destination)
        if stream is not None:
            stream.spilled_read(event.first_position, event.batches)

    # --- from the receivers ------------------------------------------------------------------------------------------

    def replied(self, event: ev.PeerReplied) -> None:
        """Handle a receiver's answer."""
        stream = self.touch(event.destination)
        if stream is not None:
            self.handshake.replied(stream, event.tag, event.frame)

    def moved(self, event: ev.PeerMoved) -> None:
        """Handle PeerMoved: nothing in flight to the receiver will arrive."""
        stream = self.touch(event.destination)
        if stream is not None:
            self.handshake.receiver_moved(stream)

    def acknowledge_own_stream(self) -> None:
        """Acknowledge the stream to oneself, whose receiver is the own log."""
        source, stream = self.inbound.streams.get(ONESELF), self.streams.get(ONESELF)
        if source is not None and stream is not None and source.durable > stream.acknowledged:
            self.busy[ONESELF] = stream
            stream.acknowledge(source.durable)

    def acknowledge_answers(self, position: int) -> None:
        """Acknowledge the stream to CLIENTS up to this position: the replies are in the log."""
        self.receivers.note_durable_acknowledgement(CLIENTS, position)
        if (stream := self.touch(CLIENTS)) is not None:
            stream.acknowledge(position)

    @property
    def any_failed(self) -> bool:
        return self.handshake.has_failures and any(stream.state is StreamState.FAILED for stream in self.busy.values())

    def retry_failed(self) -> None:
        """Greet the receivers of stopped streams again: the cause may be fixed there."""
        for stream in self.busy.values():
            if stream.state is StreamState.FAILED:
                self.handshake.greet(stream)


# Barriers: messages that wait until earlier calls to another instance are durable there, for ordered traffic.
#
# Between two batches the app names an instance that it has called; its later messages to others wait. So no message
# that follows from a call arrives anywhere before the call is in its receiver's log. Messages wait for a silent
# receiver no longer than ``barrier_ns``, and not again before it answers.


BARRIERS_MAX = 4096  # beyond this many open ones, further barriers are ignored


@dataclass(slots=True, eq=False, repr=False)
class _Barrier:
    number: int
    destination: str
    position: int
    since_ns: int


@dataclass(slots=True, eq=False, repr=False)
class Barriers:
    """Barriers of one connection. ``passed``: the last barrier whose later messages can be sent."""

    barrier_ns: int
    passed: int = 0
    _last: int = 0
    _open: deque[_Barrier] = field(default_factory=deque)
    _waived: dict[str, int] = field(default_factory=dict)  # acknowledged position, by silent receiver without barriers

    @property
    def is_open(self) -> bool:
        """True if a barrier is not passed yet, so new messages may have to wait."""
        return bool(self._open)

    @property
    def due_ns(self) -> int | None:
        """Time at which the oldest barrier is given up."""
        return self._open[0].since_ns + self.barrier_ns if self._open else None

    def add(self, stream: OutputStream, now_ns: int) -> None:
        """Hold back later messages until the receiver of ``stream`` has everything sent to it."""
        destination = stream.destination
        if stream.acknowledged >= stream.position or len(self._open) >= BARRIERS_MAX:
            return
        if destination in self._waived:
            if stream.acknowledged <= self._waived[destination]:
                return
            del self._waived[destination]
        self._last += 1
        self._open.append(_Barrier(self._last, destination, stream.position, now_ns))

    def stop(self, stream: OutputStream) -> None:
        """Make messages that are about to be added to ``stream`` wait for all open barriers except its own."""
        if stream.destination == ONESELF:
            return
        for barrier in reversed(self._open):
            if barrier.destination != stream.destination:
                stream.wait_for(barrier.number)
                return

    def update(self, streams: dict[str, OutputStream], now_ns: int) -> None:
        """Pass barriers whose receivers have answered, or whose time is over."""
        waiting = self._open
        while waiting:
            first = waiting[0]
            stream = streams.get(first.destination)
            if stream is not None and stream.acknowledged < first.position and first.destination not in self._waived:
                if now_ns < first.since_ns + self.barrier_ns:
                    return
                self._waived[first.destination] = stream.acknowledged
            self.passed = first.number
            waiting.popleft()

    def forget(self) -> None:
        self.passed = self._last
        self._open.clear()
        self._waived.clear()


# Spilling: when messages go to the log because memory is full, and how many.


class SpillPolicy:
    """Decides when output ``streams`` are spilled; ``busy``: the streams that are not idle.

    ``waits_for_receiver``: a stream waits instead of spilling, and is checked again after a while.
    """

    def __init__(self, state: CoreState, streams: Mapping[str, OutputStream], busy: Mapping[str, OutputStream]) -> None:
        self.waits_for_receiver = False
        self._state = state
        self._streams = streams
        self._busy = busy

    def update(self, stream: OutputStream) -> None:
        """Spill gathered messages of ``stream``, and read messages back if memory has room again."""
        log, limits, spill = self._state.log, self._state.limits, stream.spill
        read = stream.next_read(log.durable_ticket)
        if read is not None:
            self._state.effects.append(ReadSpilled(stream.destination, *read))
        size_bytes = spill.gathered_bytes
        if size_bytes < limits.spill_row_bytes or self.kept_bytes + size_bytes > limits.spill_limit_bytes:
            return
        if self._app_can_wait(stream) and stream.spill_credit_bytes < size_bytes:
            self.waits_for_receiver = True
            return
        stream.spill_credit_bytes = 0
        group = log.append_outside_record(size_bytes, from_app=True)
        group.transaction.spilled += [
            SpilledBatch(row.first_position, row.count, row.payload, stream.destination)
            for row in spill.store(group.ticket)
        ]

    def _app_can_wait(self, stream: OutputStream) -> bool:
        """Return True if the app can wait for that receiver: it takes what it can, and no other instance is called.

        Spilling would only make the disk slower, for both. Earlier spilled messages continue to shrink: new ones can be
        spilled only for half of the bytes that were sent.
        """
        now_ns = self._state.now_ns
        recent_ns = self._state.limits.recent_ns
        if stream.state is not StreamState.OPEN or now_ns - stream.moved_on_ns >= recent_ns:
            return False
        if stream.spill.stored_bytes == 0:
            stream.spill_credit_bytes = 0
        return not any(
            other.destination not in (ONESELF, CLIENTS, stream.destination)
            and now_ns - other.called_ns < recent_ns
            and not other.spill.active
            for other in self._streams.values()
        )

    @property
    def kept_bytes(self) -> int:
        """Unacknowledged bytes spilled to the log, of all streams."""
        return sum([stream.spill.kept_bytes for stream in self._busy.values()])

    @property
    def full(self) -> list[str]:
        """Destinations whose messages exceed the memory limit, because the spill limit is reached too."""
        return [destination for destination, stream in self._busy.items() if stream.memory_is_full]

    @property
    def is_full(self) -> bool:
        limits = self._state.limits
        return self.kept_bytes + limits.spill_row_bytes > limits.spill_limit_bytes
