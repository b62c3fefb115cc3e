"""The output streams: what the app sends goes in, frames to the receivers come out.

A stream to oneself is one of them, whose receiver is the own log. The answers to clients are another, which goes to the
log as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from immortal.coordinator.core.effects import OpenPeer, ResetPeer, SendToPeer
from immortal.coordinator.core.interfaces import ONESELF, OutputBatch, OutputMark
from immortal.coordinator.core.streams.barriers import Barriers
from immortal.coordinator.core.streams.expected import Expected
from immortal.coordinator.core.streams.followed import Followed
from immortal.coordinator.core.streams.handshake import Handshake
from immortal.coordinator.core.streams.inbound import Inbound
from immortal.coordinator.core.streams.intake import Intake
from immortal.coordinator.core.streams.local_end import LocalEnd
from immortal.coordinator.core.streams.output_stream import OutputStream, StreamState
from immortal.coordinator.core.streams.receivers import Receivers
from immortal.coordinator.core.streams.spilling import Spilling
from immortal.protocol.client import CLIENTS
from immortal.protocol.peer import FrameType, PeerFrame
from immortal.protocol.trailer import OutputMarkEntry


@dataclass(slots=True, eq=False, repr=False)
class Outbound:
    """``streams``: all of them, by destination; ``busy``: those that are not idle, and perhaps others."""

    end: LocalEnd
    receivers: Receivers
    handshake: Handshake
    expected: Expected
    inbound: Inbound
    intake: Intake
    followed: Followed
    streams: dict[str, OutputStream] = field(default_factory=dict)
    busy: dict[str, OutputStream] = field(default_factory=dict)
    spilling: Spilling = field(init=False)
    barriers: Barriers = field(init=False)
    _moved: set[str] = field(default_factory=set)  # those that may have a new mark

    def __post_init__(self) -> None:
        self.spilling = Spilling(self.end, self.streams, self.busy)
        self.barriers = Barriers(self.end.limits.barrier_ns)

    # --- which there are ---------------------------------------------------------------------------------------------

    def stream(self, destination: str) -> OutputStream:
        """The stream to ``destination``, opened if it is new; the next :meth:`send` looks at it."""
        stream = self.touched(destination)
        if stream is not None:
            return stream
        return self.add(
            OutputStream(
                destination,
                self.end.limits,
                acknowledged=self.acknowledged(destination),
                attempt=self.end.epoch << 32,
                check=self.expected.check(destination),
                spilled=self.expected.take_spilled(destination),
                begins_now=not self.end.catching_up,
            ),
        )

    def touched(self, destination: str) -> OutputStream | None:
        """The stream to ``destination``, if there is one, of which something is about to change."""
        stream = self.streams.get(destination)
        if stream is not None:
            self.busy[destination] = stream
        return stream

    def acknowledged(self, destination: str) -> int:
        """The position up to which the receiver is known to have the stream."""
        if destination == ONESELF:
            return self.inbound.stream(ONESELF).durable
        return self.receivers.acknowledged.get(destination, 0)

    def add(self, stream: OutputStream) -> OutputStream:
        destination = stream.destination
        self.streams[destination] = self.busy[destination] = stream
        if destination in (ONESELF, CLIENTS):
            stream.state = StreamState.OPEN
        elif not self.end.following:
            self.begin(stream)
        return stream

    def begin(self, stream: OutputStream) -> None:
        """Reach for the receiver: the stream is one of an app that works, or is to."""
        stream.offset = self.receivers.start(stream.destination).offset
        self.end.effects.append(OpenPeer(stream.destination))
        self.handshake.greet(stream)

    def forget(self) -> None:
        """The app is gone: its outputs will come again, by replay."""
        for destination, stream in self.streams.items():
            if destination not in (ONESELF, CLIENTS) and stream.state is not StreamState.CLOSED:
                self.end.effects.append(ResetPeer(destination))
        self.forget_streams()

    def forget_streams(self) -> None:
        for known in (self.streams, self.busy, self._moved):
            known.clear()
        self.barriers.forget()
        self.followed.forget()

    # --- from the app ------------------------------------------------------------------------------------------------

    def append(self, destination: str, count: int, payload: bytes) -> None:
        """The app's next ``count`` messages to ``destination``."""
        self.intake.open_calls.answered(destination, payload)
        self._moved.add(destination)
        stream = self.stream(destination)
        if self.end.following:
            self.followed.made(stream, count, payload)
        else:
            if self.barriers.is_open:
                self.barriers.stop(stream)
            stream.append(count, payload, self.end.held_ticket)

    def put_barrier(self, destination: str, now_ns: int) -> None:
        """What the app sends behind this to others leaves once ``destination`` has what was sent there so far."""
        stream = self.streams.get(destination)
        if stream is not None and destination not in (ONESELF, CLIENTS) and not self.end.following:
            self.barriers.add(stream, now_ns)

    def place(self, marks: Iterable[OutputMarkEntry]) -> None:
        """The log that is followed has these ``marks``: what the app has made up to them takes its place."""
        for mark in marks:
            self.followed.reached(self.stream(mark.destination), mark.position)

    def place_all(self) -> None:
        """There is nobody any more whose marks are to be waited for."""
        self.followed.place_all(self.streams)

    def new_marks(self, ticket: int) -> dict[str, OutputMark]:
        """The marks of the streams that have moved since this was last asked, for the commit ``ticket``.

        None from behind a verdict that only a later commit holds: without it a replay would make something else. Nor of
        what is held for a checkpoint that changes what a replay makes.
        """
        marks: dict[str, OutputMark] = {}
        if self.end.held_ticket > ticket or self.end.held:
            return marks
        for destination in sorted(self._moved):
            mark = self.streams[destination].take_new_mark(ticket)
            if mark is not None:
                marks[destination] = mark
                self._moved.discard(destination)
        return marks

    @property
    def any_unmarked(self) -> bool:
        """The app has made something of which no record has a mark."""
        return any(self.streams[destination].is_unmarked for destination in self._moved)

    # --- to the receivers --------------------------------------------------------------------------------------------

    def send(self, now_ns: int) -> None:
        """Put on their way all batches that may go now; none before the first checkpoint is durable: they follow it."""
        end, busy, spilling = self.end, self.busy, self.spilling
        if not end.ready or end.held or end.following:
            return
        durable_ticket = end.log.durable_ticket
        end.wants_replies = spilling.waits_for_receiver = False
        if self.barriers.is_open:
            self.barriers.look(self.streams, now_ns)
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
                spilling.look(stream, now_ns)
            last_position = stream.open_up_to(self.barriers.passed)
            while (batch := stream.next_batch(durable_ticket, last_position)) is not None:
                if destination == ONESELF:
                    self.inbound.take_own(batch, now_ns)
                    continue
                frame = end.frame(
                    FrameType.BATCH,
                    destination,
                    batch.first_position - stream.offset,
                    count=batch.count,
                    time_ns=now_ns,
                    payload=batch.payload,
                )
                end.effects.append(SendToPeer(destination, stream.attempt, frame))
            if destination != ONESELF and stream.wants_reply:
                end.wants_replies = True
        for destination in [destination for destination, stream in busy.items() if stream.is_idle]:
            del busy[destination]

    def take_answers(self) -> list[OutputBatch]:
        """The app's new answers to clients; under the same conditions as :meth:`send`."""
        stream = self.streams.get(CLIENTS)
        if stream is None or not self.end.ready or self.end.held or self.end.following:
            return []
        return stream.buffer.take_all(self.end.log.durable_ticket, stream.open_up_to(self.barriers.passed))

    def spilled_read(self, destination: str, first_position: int, batches: Sequence[OutputBatch]) -> None:
        """What was asked for by ReadSpilled."""
        stream = self.touched(destination)
        if stream is not None:
            stream.spilled_read(first_position, batches)

    # --- from the receivers ------------------------------------------------------------------------------------------

    def replied(self, destination: str, tag: int, frame: PeerFrame) -> None:
        """A receiver has answered."""
        stream = self.touched(destination)
        if stream is not None:
            self.handshake.replied(stream, tag, frame)

    def moved(self, destination: str) -> None:
        """Nothing of what is on its way there will arrive."""
        stream = self.touched(destination)
        if stream is not None:
            self.handshake.moved(stream)

    def own_became_durable(self) -> None:
        """Of the stream to oneself, perhaps: its receiver is the own log."""
        source, stream = self.inbound.streams.get(ONESELF), self.streams.get(ONESELF)
        if source is not None and stream is not None and source.durable > stream.acknowledged:
            self.busy[ONESELF] = stream
            stream.acknowledge(source.durable)

    def answers_durable(self, position: int) -> None:
        """The replies up to this position of the stream to CLIENTS are in the log."""
        self.receivers.heard_of(CLIENTS, position)
        if (stream := self.touched(CLIENTS)) is not None:
            stream.acknowledge(position)

    @property
    def any_failed(self) -> bool:
        return self.handshake.some_failed and any(stream.state is StreamState.FAILED for stream in self.busy.values())

    def retry_failed(self) -> None:
        """What stopped them may have been mended at the other end: ask again."""
        for stream in self.busy.values():
            if stream.state is StreamState.FAILED:
                self.handshake.greet(stream)
