"""Input streams: takes frames of peers, delivers the new messages in them, and answers them.

A frame is checked in this order: its sender (Senders), its turn (FairTurns), what of it is new (InputStream), the
window granted (WindowGrants), and the delivery policy (Delivery).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import chain

from immortal.coordinator.core.effects import ReplyToPeer, Report
from immortal.coordinator.core.events import PeerFrameReceived
from immortal.coordinator.core.input.admission import Delivered, Delivery
from immortal.coordinator.core.input.input_stream import InputStream, Senders, WindowGrants
from immortal.coordinator.core.interfaces import IMPULSES, ONESELF, OutputBatch, SourcePosition, Token
from immortal.coordinator.core.limits import Limits
from immortal.coordinator.core.notices import FrameRefused
from immortal.coordinator.core.state import CoreState
from immortal.protocol.call_permissions import from_base_app_peer
from immortal.protocol.errors import RemoteProtocolError
from immortal.protocol.peer_frames import FrameType, PeerFrame, RefusedCode
from immortal.protocol.trailer import BatchKind, BatchSource


@dataclass(slots=True, eq=False, repr=False)
class _Reply:
    frame_type: FrameType
    position: int = 0
    code: RefusedCode = RefusedCode.NONE
    reason: str = ""


class Inbound:
    """Input side of all streams. ``streams``: by sender, including the own stream."""

    def __init__(self, state: CoreState, delivery: Delivery) -> None:
        self.grants = WindowGrants(state.limits)
        self.turns = FairTurns(state.limits)
        self.senders = Senders(state, self.grants)
        self.streams = self.senders.streams
        self._state = state
        self._delivery = delivery
        self._admission = delivery.admission
        self._parked: dict[str, deque[PeerFrameReceived]] = {}  # by sender

    def received(self, event: PeerFrameReceived) -> None:
        """Handle a frame from a peer. While stopping, ignore it: its sender keeps it."""
        if not self._state.accepting:
            return
        token, frame = event.token, event.frame
        self.grants.now_ns = self._state.now_ns
        if frame.frame_type is FrameType.HELLO:
            admission = self._admission
            must_wait = bool(admission.peer_wait_reason(frame.sender)) or admission.must_wait(frame.sender)
            if must_wait or not self._state.ready:
                self._park(event)
                return
        if frame.frame_type is FrameType.BATCH and self._waits_for_turn(event):
            return
        self._respond(token, frame)

    def _respond(self, token: Token, frame: PeerFrame) -> None:
        refused = self.senders.refusal(frame)
        reply = self._answer(token, frame) if refused is None else _refuse(*refused)
        if reply is not None:
            self._reply(token, frame.sender, reply)

    # --- a Hello that can't be answered yet --------------------------------------------------------------------------

    @property
    def has_held_back_hellos(self) -> bool:
        """True if a Hello waits for its sender's rate, or for the end of a hold-off."""
        return bool(self._parked) and self._state.ready and self._admission.can_hold_back

    def _park(self, hello: PeerFrameReceived) -> None:
        """Keep a Hello until it can be answered. Only the newest few of each sender are kept."""
        sender, limits = hello.frame.sender, self._state.limits
        if sender not in self._parked and len(self._parked) >= limits.parked_senders_max:
            self._reply(hello.token, sender, self._not_ready(self._admission.peer_wait_reason(sender)))
            return
        parked = self._parked.setdefault(sender, deque(maxlen=limits.parked_hellos_max))
        parked.append(hello)

    def answer_parked(self) -> None:
        """Answer the parked Hellos that no longer need to wait."""
        if not self._state.ready:
            return
        parked, self._parked = self._parked, {}
        for hello in chain.from_iterable(parked.values()):
            self.received(hello)

    def _waits_for_turn(self, event: PeerFrameReceived) -> bool:
        """Delay or refuse a Batch whose sender must wait for others; return False if it can be taken now."""
        now_ns, token, frame = self._state.now_ns, event.token, event.frame
        sender, size_bytes = frame.sender, len(frame.payload)
        stream = self.streams.get(sender)
        if stream is None or frame.position + frame.count - 1 <= stream.received:
            return False  # nothing new
        self.turns.note_sender(sender, now_ns)
        if not self.turns.must_wait(sender, size_bytes, stream.pending_bytes, now_ns):
            return False
        count, waiting_bytes = self.turns.count_waiting(sender)
        pending_bytes, allowed_bytes = stream.pending_bytes + waiting_bytes, self.grants.allowed_bytes(sender)
        too_many = stream.waiting_count + count >= self._state.limits.waiting_frames_max
        if not too_many and not (pending_bytes and pending_bytes + size_bytes > allowed_bytes):
            self.turns.wait(event)
        elif not self.turns.continues(frame, stream.received):
            # Sent again, or cut into other pieces: the sender is within its window. It must resend what was not taken.
            for waiting in (*self.turns.remove_waiting(sender), event):
                self._reply(waiting.token, sender, _Reply(FrameType.RESEND, stream.received))
        elif too_many:
            self._reply(token, sender, self._too_many(stream, stream.waiting_count + count))
        else:
            self._reply(token, sender, self._too_much(stream, pending_bytes, size_bytes, allowed_bytes))
        return True

    def process_waiting_batches(self) -> None:
        """Take the batches whose turn has come; none while stopping."""
        now_ns = self._state.now_ns
        self.grants.now_ns = now_ns
        allowed = self.grants.allowed_bytes
        while self._state.accepting and (waiting := self.turns.next(self._pending_bytes, allowed, now_ns)):
            self._respond(waiting.token, waiting.frame)

    def _pending_bytes(self, sender: str) -> int:
        stream = self.streams.get(sender)
        return 0 if stream is None else stream.pending_bytes

    # --- the new part of a frame -------------------------------------------------------------------------------------

    def _answer(self, token: Token, frame: PeerFrame) -> _Reply | None:
        """Handle an accepted frame; return the answer, or None if it follows once the log is durable."""
        state, now_ns = self._state, self._state.now_ns
        stream = self.streams.get(frame.sender) or InputStream(frame.sender, None)
        if stream.waiting_count >= state.limits.waiting_frames_max:
            return self._too_many(stream, stream.waiting_count)
        if frame.frame_type is FrameType.HELLO:
            return self._answer_hello(token, frame, stream)
        if not state.ready:
            return self._not_ready()
        if frame.frame_type is not FrameType.BATCH:
            return _refuse(RefusedCode.MALFORMED, f"unexpected frame {frame.frame_type.name}")
        if self._admission.peer_wait_reason(frame.sender):
            return _Reply(FrameType.RESEND, 0)  # it greets again, and gets its answer once its calls can be checked
        if self._admission.is_full(frame.sender):
            name = state.name
            return self._not_ready(f"{name!r} takes a checkpoint: too many calls that were refused are behind it")
        if frame.position > stream.received + 1 or not stream.has_greeted(frame.committer_id):
            return _Reply(FrameType.RESEND, stream.received)
        last_position = frame.position + frame.count - 1
        if last_position <= stream.durable:
            return _Reply(FrameType.TRIM_TO, stream.durable)
        try:
            part = stream.new_part(frame, stream.rules if state.app_knows_extensions else from_base_app_peer)
        except RemoteProtocolError as error:
            return _refuse(RefusedCode.MALFORMED, str(error))
        if part is not None:
            first_position, count, payload, reserved = part
            if reserved and not state.app_accepts_verdicts:
                reason = f"message {reserved[0]} of a batch has a negative method: only an app itself may call those"
                return _refuse(RefusedCode.MALFORMED, reason)
            allowed_bytes = self.grants.allowed_bytes(frame.sender)
            if stream.pending_bytes and stream.pending_bytes + len(payload) > allowed_bytes:
                return self._too_much(stream, stream.pending_bytes, len(payload), allowed_bytes)
            source = BatchSource(BatchKind.STREAM, frame.sender, first_position, count, frame.time_ns)
            delivered = self._delivery.deliver(source, payload, frame.sender, reserved=reserved)
            if delivered is not None:
                self._log_position(stream, frame, first_position, delivered)
                self.turns.note_logged_batch(frame.sender, len(delivered.calls), delivered.group.ticket, now_ns)
            if delivered is None or delivered.count < count:
                return _Reply(FrameType.RESEND, 0)  # it greets again, and gets its answer once it can call again
        stream.wait_for(last_position, token)
        self.grants.sent(frame.sender, now_ns)
        return None

    def _answer_hello(self, token: Token, frame: PeerFrame, stream: InputStream) -> _Reply | None:
        if (known := stream.new_epoch()) is not None:
            self._state.log.append_outside_record(0).transaction.sources[frame.sender] = known
        if not stream.settled:  # all accepted messages must be in the answer, and no older epoch accepted after it
            stream.wait_for(stream.received, PeerFrameReceived(token, frame))
            return None
        code = RefusedCode.STALE_EPOCH if stream.forked else RefusedCode.NONE
        if frame.position > stream.durable:
            code = RefusedCode.ROLLED_BACK
        return _Reply(FrameType.WELCOME, stream.durable, code)

    def accept_own_batch(self, batch: OutputBatch) -> None:
        """Take the next batch of the stream to oneself."""
        now_ns = self._state.now_ns
        frame = self._state.frame(FrameType.BATCH, ONESELF, batch.first_position, count=batch.count, time_ns=now_ns)
        source = BatchSource(BatchKind.STREAM, ONESELF, batch.first_position, batch.count, now_ns)
        delivered = self._delivery.deliver_own(source, batch.payload)
        self._log_position(self.senders.stream(ONESELF), frame, batch.first_position, delivered)

    def _log_position(self, stream: InputStream, frame: PeerFrame, first_position: int, delivered: Delivered) -> None:
        """Note the stream's new position in the record's transaction."""
        position = stream.accept(frame, first_position + delivered.count - 1, len(delivered.calls))
        delivered.group.transaction.sources[stream.source] = position

    def became_durable(self, sources: Iterable[tuple[str, SourcePosition]]) -> None:
        """Acknowledge batches up to these positions, which are durable."""
        self.grants.now_ns = self._state.now_ns
        for source, known in sources:
            stream = self.senders.stream(source) if source != IMPULSES else None
            if stream is None or known.committer_id != stream.committer_id:
                continue  # impulses; or a position in a log that the sender had before a reset
            position = known.position
            tokens = stream.became_durable(position, known.epoch)
            if self._state.accepting:
                for token in tokens:
                    if isinstance(token, PeerFrameReceived):
                        self._respond(token.token, token.frame)
                    else:
                        self._reply(token, source, _Reply(FrameType.TRIM_TO, position))

    # --- answers -----------------------------------------------------------------------------------------------------

    def _not_ready(self, reason: str = "") -> _Reply:
        return _refuse(RefusedCode.NOT_READY, reason or f"{self._state.name!r} has not completed its first start")

    def _too_many(self, stream: InputStream, count: int) -> _Reply:
        return self._beyond_window(stream, f"{count} frames wait to be acknowledged")

    def _too_much(self, stream: InputStream, pending_bytes: int, size_bytes: int, allowed_bytes: int) -> _Reply:
        on_its_way = f"{pending_bytes} bytes wait for the disk and {size_bytes} more came"
        return self._beyond_window(stream, f"{on_its_way}; {allowed_bytes} were granted")

    def _beyond_window(self, stream: InputStream, reason: str) -> _Reply:
        if not stream.reported_beyond_window:
            stream.reported_beyond_window = True
            self._state.effects.append(Report(FrameRefused(stream.source, reason)))
        return _refuse(RefusedCode.BEYOND_WINDOW, reason)

    def _reply(self, token: Token, receiver: str, reply: _Reply) -> None:
        window_bytes = 0
        if reply.frame_type in (FrameType.WELCOME, FrameType.TRIM_TO):
            pending_bytes = self._state.log.pending_bytes + self.turns.waiting_bytes
            window_bytes = self.grants.window_bytes(receiver, pending_bytes)
        frame = self._state.frame(
            reply.frame_type,
            receiver,
            reply.position,
            count=window_bytes,
            code=reply.code,
            reason=reply.reason,
        )
        self._state.effects.append(ReplyToPeer(token, frame))


def _refuse(code: RefusedCode, reason: str) -> _Reply:
    return _Reply(FrameType.REFUSED, code=code, reason=reason)


# Fair turns at the log: no peer delays the others for long.
#
# The log writes one commit after the other, so a sender waits for the bytes of those before it. While several senders
# are active, each has at most ``turn_bytes`` on their way to the disk, or one batch. The rest waits here, and is taken
# in rounds of one batch for each sender.
#
# A batch larger than ``turn_bytes`` always delays the others. After it did, the next large batch of any sender must
# wait ``PAUSE_TIMES`` as long as it took; meanwhile the log is free for small ones.


PAUSE_TIMES = 4


@dataclass(slots=True, eq=False, repr=False)
class _LargeBatch:
    """Batch of more than ``turn_bytes`` that is on its way to the disk."""

    sender: str
    ticket: int  # of its commit
    began_ns: int


@dataclass(slots=True, eq=False, repr=False)
class FairTurns:
    """Turns of senders at the log. Times are the instance's, in ns. ``pending``, where a method takes it: the bytes of
    a sender that are on their way to the disk."""

    limits: Limits
    waiting_bytes: int = 0
    _waiting: OrderedDict[str, deque[PeerFrameReceived]] = field(default_factory=OrderedDict)  # the next sender first
    _waiting_bytes: dict[str, int] = field(default_factory=dict)  # by sender
    _last: tuple[str, int] = ("", 0)  # the last sender, and when it sent
    _last_other: tuple[str, int] = ("", 0)  # the last different sender before it
    _large_batch: _LargeBatch | None = None
    _pause_until_ns: int = 0

    def note_sender(self, sender: str, now_ns: int) -> None:
        """Note that ``sender`` has input for the log."""
        if sender != self._last[0]:
            self._last_other = self._last
        self._last = sender, now_ns

    def _other_ns(self, sender: str) -> int:
        return (self._last_other if sender == self._last[0] else self._last)[1]

    def is_shared(self, sender: str, now_ns: int) -> bool:
        """Return True if senders other than ``sender`` are active."""
        return 0 <= now_ns - self._other_ns(sender) < self.limits.recent_ns

    def must_wait(self, sender: str, size_bytes: int, pending: int, now_ns: int) -> bool:
        """Return True if a new batch must :meth:`wait`."""
        return sender in self._waiting or not self._has_turn(sender, size_bytes, pending, now_ns)

    def _has_turn(self, sender: str, size_bytes: int, pending: int, now_ns: int) -> bool:
        turn_bytes = self.limits.turn_bytes
        if pending + size_bytes <= turn_bytes or not self.is_shared(sender, now_ns):
            return True
        if pending:
            return False
        return self._large_batch is None and not self.is_paused(now_ns)

    def is_paused(self, now_ns: int) -> bool:
        """Return True while batches larger than a turn must wait."""
        return 0 < self._pause_until_ns - now_ns <= self.limits.turn_pause_ns_max  # otherwise the clock has jumped

    def wait(self, event: PeerFrameReceived) -> None:
        sender, size_bytes = event.frame.sender, len(event.frame.payload)
        self._waiting.setdefault(sender, deque()).append(event)
        self._waiting_bytes[sender] = self._waiting_bytes.get(sender, 0) + size_bytes
        self.waiting_bytes += size_bytes

    def count_waiting(self, sender: str) -> tuple[int, int]:
        """Return how many batches and bytes of ``sender`` wait."""
        return len(self._waiting.get(sender, ())), self._waiting_bytes.get(sender, 0)

    def continues(self, frame: PeerFrame, received: int) -> bool:
        """Return True if the sender's waiting batches and ``frame`` continue ``received`` without gap or repetition."""
        position = received + 1
        for one in self._waiting.get(frame.sender, ()):
            if one.frame.position != position:
                return False
            position += one.frame.count
        return frame.position == position

    def remove_waiting(self, sender: str) -> list[PeerFrameReceived]:
        """Return and remove the waiting batches of ``sender``."""
        self.waiting_bytes -= self._waiting_bytes.pop(sender, 0)
        return list(self._waiting.pop(sender, ()))

    def next(
        self, pending: Callable[[str], int], allowed: Callable[[str], int], now_ns: int
    ) -> PeerFrameReceived | None:
        """Return the next batch that has its turn. ``allowed``: how many pending bytes a sender can have."""
        for sender, waiting in self._waiting.items():
            size_bytes, pending_bytes = len(waiting[0].frame.payload), pending(sender)
            fits = not pending_bytes or pending_bytes + size_bytes <= allowed(sender)
            if fits and self._has_turn(sender, size_bytes, pending_bytes, now_ns):
                return self._pop_first(sender, waiting)
        return None

    def _pop_first(self, sender: str, waiting: deque[PeerFrameReceived]) -> PeerFrameReceived:
        first = waiting.popleft()
        size_bytes = len(first.frame.payload)
        self.waiting_bytes -= size_bytes
        self._waiting_bytes[sender] -= size_bytes
        if waiting:
            self._waiting.move_to_end(sender)
        else:
            del self._waiting[sender], self._waiting_bytes[sender]
        return first

    def note_logged_batch(self, sender: str, size_bytes: int, ticket: int, now_ns: int) -> None:
        """Note that a batch goes into the log with the commit ``ticket``."""
        if size_bytes > self.limits.turn_bytes:
            self._large_batch = _LargeBatch(sender, ticket, now_ns)

    def committed(self, ticket: int, now_ns: int) -> None:
        """Note that all commits up to ``ticket`` are durable."""
        long = self._large_batch
        if long is None or ticket < long.ticket:
            return
        self._large_batch = None
        if self._other_ns(long.sender) >= long.began_ns:
            took_ns = max(0, now_ns - long.began_ns)
            self._pause_until_ns = now_ns + min(PAUSE_TIMES * took_ns, self.limits.turn_pause_ns_max)

    def due_ns(self, now_ns: int) -> int | None:
        """Return when the turns must be checked again even if nothing happens."""
        return self._pause_until_ns if self._waiting and self.is_paused(now_ns) else None
