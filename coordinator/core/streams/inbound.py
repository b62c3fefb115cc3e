"""The input streams: frames of peers come in, what is new in them is delivered, and they are answered.

A frame passes in this order: who sends it (``senders.py``), whether its sender has to wait for others (``turns.py``),
what of it is new (``input_stream.py``), whether it is within what was granted (``grants.py``), and the delivery policy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

from immortal.coordinator.core.effects import ReplyToPeer, Report
from immortal.coordinator.core.interfaces import IMPULSES, ONESELF, OutputBatch, SourcePosition, Token
from immortal.coordinator.core.notices import FrameRefused
from immortal.coordinator.core.streams.delivery import Delivered, Delivery
from immortal.coordinator.core.streams.grants import Grants
from immortal.coordinator.core.streams.input_stream import InputStream
from immortal.coordinator.core.streams.local_end import LocalEnd
from immortal.coordinator.core.streams.senders import Senders
from immortal.coordinator.core.streams.turns import Turns, Waiting
from immortal.protocol.errors import RemoteProtocolError
from immortal.protocol.peer import FrameType, PeerFrame, RefusedCode
from immortal.protocol.senders import from_peer_of_base_app
from immortal.protocol.trailer import BatchKind, BatchSource


@dataclass(slots=True, eq=False, repr=False)
class _ParkedHello:
    token: Token
    frame: PeerFrame


@dataclass(slots=True, eq=False, repr=False)
class _Reply:
    """What to answer a frame."""

    frame_type: FrameType
    position: int = 0
    code: RefusedCode = RefusedCode.NONE
    reason: str = ""


class Inbound:
    """``streams``: all of them, by sender; that of oneself is among them."""

    def __init__(self, end: LocalEnd, delivery: Delivery) -> None:
        self.grants = Grants(end.limits)
        self.turns = Turns(end.limits)
        self.senders = Senders(end, self.grants)
        self.streams = self.senders.streams
        self._end = end
        self._delivery = delivery
        self._intake = delivery.intake
        self._parked: dict[str, deque[_ParkedHello]] = {}  # by sender

    def stream(self, source: str) -> InputStream:
        """Of ``source``, new if there is none."""
        return self.senders.stream(source)

    def received(self, token: Token, frame: PeerFrame, now_ns: int) -> None:
        """A frame from a peer. While stopping, none is taken or answered: their senders keep them."""
        if not self._end.accepting:
            return
        self.grants.now_ns = now_ns
        if frame.frame_type is FrameType.HELLO and self._must_wait(frame.sender, now_ns):
            self._park(_ParkedHello(token, frame))
            return
        if frame.frame_type is FrameType.BATCH and self._waits_for_turn(token, frame, now_ns):
            return
        self._respond(token, frame, now_ns)

    def _respond(self, token: Token, frame: PeerFrame, now_ns: int) -> None:
        refused = self.senders.refusal(frame)
        reply = self._answer(token, frame, now_ns) if refused is None else _refuse(*refused)
        if reply is not None:
            self._reply(token, frame.sender, reply)

    # --- a Hello that can't be answered yet --------------------------------------------------------------------------

    def _must_wait(self, sender: str, now_ns: int) -> bool:
        intake = self._intake
        return not self._end.ready or bool(intake.why_peer_waits(sender)) or intake.must_wait(sender, now_ns)

    @property
    def holds_back(self) -> bool:
        """Somebody may have to wait for its rate, or is held off."""
        return bool(self._parked) and self._end.ready and self._intake.holds_back

    def _park(self, hello: _ParkedHello) -> None:
        """Answer it once the first start is complete, and calls can be judged. What a sender said long before its
        newest needs no answer."""
        sender, limits = hello.frame.sender, self._end.limits
        if sender not in self._parked and len(self._parked) >= limits.parked_senders_max:
            self._reply(hello.token, sender, self._not_ready(self._intake.why_peer_waits(sender)))
            return
        parked = self._parked.setdefault(sender, deque(maxlen=limits.parked_hellos_max))
        parked.append(hello)

    def became_ready(self, now_ns: int) -> None:
        """The first start is complete: answer who has asked meanwhile."""
        self._end.ready = True
        self.answer_parked(now_ns)

    def answer_parked(self, now_ns: int) -> None:
        """Those that need not wait any more."""
        parked, self._parked = self._parked, {}
        for hello in chain.from_iterable(parked.values()):
            self.received(hello.token, hello.frame, now_ns)

    # --- a Batch that comes before its turn --------------------------------------------------------------------------

    def _waits_for_turn(self, token: Token, frame: PeerFrame, now_ns: int) -> bool:
        """Whether a Batch is held back for others, or refused since its sender has too much here."""
        sender, size_bytes = frame.sender, len(frame.payload)
        stream = self.streams.get(sender)
        if stream is None or frame.position + frame.count - 1 <= stream.received:
            return False  # nothing new
        self.turns.heard(sender, now_ns)
        if not self.turns.must_wait(sender, size_bytes, stream.pending_bytes, now_ns):
            return False
        count, waiting_bytes = self.turns.waiting_of(sender)
        here_bytes, allowed_bytes = stream.pending_bytes + waiting_bytes, self.grants.allowed_bytes(sender)
        too_many = stream.waiting_count + count >= self._end.limits.waiting_frames_max
        if not too_many and not (here_bytes and here_bytes + size_bytes > allowed_bytes):
            self.turns.wait(token, frame)
        elif not self.turns.goes_on(frame, stream.received):
            # Sent again, or cut in other pieces: that is no more than it may send. It begins behind what was taken.
            for waiting in (*self.turns.take_all(sender), Waiting(token, frame)):
                self._reply(waiting.token, sender, _Reply(FrameType.RESEND, stream.received))
        elif too_many:
            self._reply(token, sender, self._too_many(stream, stream.waiting_count + count))
        else:
            self._reply(token, sender, self._too_much(stream, here_bytes, size_bytes, allowed_bytes))
        return True

    def take_turns(self, now_ns: int) -> None:
        """Take the batches that have their turn now. While stopping, none."""
        self.grants.now_ns = now_ns
        allowed = self.grants.allowed_bytes
        while self._end.accepting and (waiting := self.turns.next(self._pending_bytes, allowed, now_ns)):
            self._respond(waiting.token, waiting.frame, now_ns)

    def _pending_bytes(self, sender: str) -> int:
        stream = self.streams.get(sender)
        return 0 if stream is None else stream.pending_bytes

    # --- what is new -------------------------------------------------------------------------------------------------

    def _answer(self, token: Token, frame: PeerFrame, now_ns: int) -> _Reply | None:
        """To a frame of its sender; None: once what it waits for is durable."""
        stream = self.streams.get(frame.sender) or InputStream(frame.sender, None)
        if stream.waiting_count >= self._end.limits.waiting_frames_max:
            return self._too_many(stream, stream.waiting_count)
        if frame.frame_type is FrameType.HELLO:
            return self._answer_hello(token, frame, stream)
        if not self._end.ready:
            return self._not_ready()
        if frame.frame_type is not FrameType.BATCH:
            return _refuse(RefusedCode.MALFORMED, f"unexpected frame {frame.frame_type.name}")
        if self._intake.why_peer_waits(frame.sender):
            return _Reply(FrameType.RESEND, 0)  # it greets again, and is answered once its calls can be judged
        if self._intake.is_full(frame.sender):
            name = self._end.name
            return self._not_ready(f"{name!r} takes a checkpoint: too many calls that were refused are behind it")
        if frame.position > stream.received + 1 or not stream.has_greeted(frame.committer_id):
            return _Reply(FrameType.RESEND, stream.received)
        last_position = frame.position + frame.count - 1
        if last_position <= stream.durable:
            return _Reply(FrameType.TRIM_TO, stream.durable)
        try:
            part = stream.new_part(frame, stream.rules if self._end.app_speaks else from_peer_of_base_app)
        except RemoteProtocolError as error:
            return _refuse(RefusedCode.MALFORMED, str(error))
        if part is not None:
            first_position, count, payload, reserved = part
            if reserved and not self._end.app_takes_verdicts:
                reason = f"message {reserved[0]} of a batch has a negative method: only an app itself may call those"
                return _refuse(RefusedCode.MALFORMED, reason)
            allowed_bytes = self.grants.allowed_bytes(frame.sender)
            if stream.pending_bytes and stream.pending_bytes + len(payload) > allowed_bytes:
                return self._too_much(stream, stream.pending_bytes, len(payload), allowed_bytes)
            source = BatchSource(BatchKind.STREAM, frame.sender, first_position, count, frame.time_ns)
            delivered = self._delivery.deliver(source, payload, frame.sender, now_ns, reserved=reserved)
            if delivered is not None:
                self._took(stream, frame, first_position, delivered)
                self.turns.took(frame.sender, len(delivered.calls), delivered.group.ticket, now_ns)
            if delivered is None or delivered.count < count:
                return _Reply(FrameType.RESEND, 0)  # it greets again, and is answered once it may call again
        stream.wait_for(last_position, token)
        self.grants.sent(frame.sender, now_ns)
        return None

    def _answer_hello(self, token: Token, frame: PeerFrame, stream: InputStream) -> _Reply | None:
        if (known := stream.new_epoch()) is not None:
            self._end.log.append_outside_record(0).transaction.sources[frame.sender] = known
        if not stream.settled:  # the sender must hear of all that is taken, and nothing older be taken from now on
            stream.wait_for(stream.received, _ParkedHello(token, frame))
            return None
        code = RefusedCode.STALE_EPOCH if stream.forked else RefusedCode.NONE
        if frame.position > stream.durable:
            code = RefusedCode.ROLLED_BACK
        return _Reply(FrameType.WELCOME, stream.durable, code)

    def take_own(self, batch: OutputBatch, now_ns: int) -> None:
        """The next of the stream to oneself."""
        frame = self._end.frame(FrameType.BATCH, ONESELF, batch.first_position, count=batch.count, time_ns=now_ns)
        source = BatchSource(BatchKind.STREAM, ONESELF, batch.first_position, batch.count, now_ns)
        delivered = self._delivery.deliver_own(source, batch.payload)
        self._took(self.stream(ONESELF), frame, batch.first_position, delivered)

    def _took(self, stream: InputStream, frame: PeerFrame, first_position: int, delivered: Delivered) -> None:
        """The log is to know how far the stream has got as soon as it has the calls."""
        position = stream.take(frame, first_position + delivered.count - 1, len(delivered.calls))
        delivered.group.transaction.sources[stream.source] = position

    def became_durable(self, sources: Iterable[tuple[str, SourcePosition]], now_ns: int) -> None:
        """Records up to these positions are on disk: acknowledge them."""
        self.grants.now_ns = now_ns
        for source, known in sources:
            stream = self.stream(source) if source != IMPULSES else None
            if stream is None or known.committer_id != stream.committer_id:
                continue  # impulses; or of the log that its sender had before a reset
            position = known.position
            tokens = stream.became_durable(position, known.epoch)
            if self._end.accepting:
                for token in tokens:
                    if isinstance(token, _ParkedHello):
                        self._respond(token.token, token.frame, now_ns)
                    else:
                        self._reply(token, source, _Reply(FrameType.TRIM_TO, position))

    # --- what is answered --------------------------------------------------------------------------------------------

    def _not_ready(self, why: str = "") -> _Reply:
        return _refuse(RefusedCode.NOT_READY, why or f"{self._end.name!r} has not completed its first start")

    def _too_many(self, stream: InputStream, count: int) -> _Reply:
        return self._beyond_window(stream, f"{count} frames wait to be acknowledged")

    def _too_much(self, stream: InputStream, here_bytes: int, more_bytes: int, allowed_bytes: int) -> _Reply:
        on_its_way = f"{here_bytes} bytes wait for the disk and {more_bytes} more came"
        return self._beyond_window(stream, f"{on_its_way}; {allowed_bytes} were granted")

    def _beyond_window(self, stream: InputStream, reason: str) -> _Reply:
        if not stream.told_beyond:
            stream.told_beyond = True
            self._end.effects.append(Report(FrameRefused(stream.source, reason)))
        return _refuse(RefusedCode.BEYOND_WINDOW, reason)

    def _reply(self, token: Token, receiver: str, reply: _Reply) -> None:
        window_bytes = 0
        if reply.frame_type in (FrameType.WELCOME, FrameType.TRIM_TO):
            pending_bytes = self._end.log.pending_bytes + self.turns.waiting_bytes
            window_bytes = self.grants.window_bytes(receiver, pending_bytes)
        frame = self._end.frame(
            reply.frame_type,
            receiver,
            reply.position,
            count=window_bytes,
            code=reply.code,
            reason=reply.reason,
        )
        self._end.effects.append(ReplyToPeer(token, frame))


def _refuse(code: RefusedCode, reason: str) -> _Reply:
    return _Reply(FrameType.REFUSED, code=code, reason=reason)
