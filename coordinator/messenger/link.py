"""Link to one destination: a DEALER socket, its monitor, and the outbox."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import zmq

from immortal.coordinator.messenger import limits, sockets
from immortal.coordinator.messenger.backpressure import PendingRoom
from immortal.coordinator.messenger.envelope import (
    CALLBACK_UNKNOWN,
    ENVELOPE_SIZE_BYTES,
    MESSAGE,
    MESSAGES,
    NOT_KNOWN,
    PATIENT,
    PIGGYBACKED,
    REPLY,
    REPLY_EXPIRED,
    REPLY_PENDING,
    EndpointError,
    Envelope,
    EnvelopeError,
    as_conversation_message,
    decode_envelope,
    decode_missing,
    decode_parts,
    encode_message,
    encode_parts,
)
from immortal.coordinator.messenger.inbox import Receiver
from immortal.coordinator.messenger.outbox import (
    Answer,
    ConversationMessage,
    Outbox,
    Outcome,
    PendingMessage,
    ReplyCallback,
)
from immortal.coordinator.messenger.security import KeyPair, connect_with

_OUTCOMES = {
    REPLY: Outcome.REPLIED,
    REPLY_EXPIRED: Outcome.REPLY_EXPIRED,
    CALLBACK_UNKNOWN: Outcome.CALLBACK_UNKNOWN,
}
_WITH_PARTS = frozenset((REPLY, REPLY_PENDING, PIGGYBACKED))
_CONNECTED = int(zmq.EVENT_HANDSHAKE_SUCCEEDED)
_REFUSED = int(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
_OTHER_MECHANISM = int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
_BROKEN_OFF = int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
_FAILED = (_REFUSED, _OTHER_MECHANISM, _BROKEN_OFF)
_MONITORED = _CONNECTED | _REFUSED | _OTHER_MECHANISM | _BROKEN_OFF | int(zmq.EVENT_DISCONNECTED)


class Link:
    """Link to one destination: sends its messages and receives the replies. One thread uses it.

    Nothing is sent before the monitor reports a connection. Then the messages in flight on the last connection are sent
    first. Messages can be lost with a connection whose end was not reported yet, while later ones arrive; the receiver
    notices that. The receiver's ROUTER gives each connection its own routing ID: to take over the ID of the last
    connection would cut off the messages that are still unread there.

    ``inproc`` has neither monitor nor reconnects: such a link counts as connected from the start. ``listener_changed``
    is called when its listener is unbound or bound again; the owner then replaces the link.

    ``pair`` and ``server_key``: for CURVE, both or neither. After a failed handshake ZeroMQ may never try again:
    ``reopen_due_ns`` is the time when the owner replaces the link by one with the same ID and outbox.
    """

    def __init__(
        self,
        shared: sockets.Shared,
        endpoint: str,
        link_id: int,
        outbox: Outbox,
        pair: KeyPair | None = None,
        server_key: str | None = None,
        listener_changed: Callable[[Link, bool], None] | None = None,
        room: PendingRoom | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.outbox = outbox
        self._room = room
        self._supports_all_kinds = True  # False once the receiver has said on this connection that it does not
        self.pair = pair
        self.server_key = server_key
        self.link_id = link_id
        self.peer: str | None = None  # name that the receiver's key stands for
        self._receiver: Receiver = (0, None)  # who replied last; 0: nobody yet
        self.closed = False
        self.reopen_due_ns: int | None = None
        self.connected_since_ns: int | None = None  # of the last connection, by the messenger's clock
        self._incarnation = shared.incarnation
        self._counters = shared.counters
        self._warnings = shared.warnings
        self._delayed = shared.delayed_replies
        self._monitor: sockets.Socket | None = None
        self._watcher: sockets.Watcher | None = None
        self._context = context = shared.context
        self._socket: sockets.Socket = context.socket(zmq.DEALER)
        try:
            self._configure()
            self.connected = sockets.is_inproc(endpoint)
            if self.connected and listener_changed is not None:
                self._watcher = partial(listener_changed, self)
                sockets.watch(context, endpoint, self._watcher)
            if not self.connected:
                address = f"monitor-{self._incarnation:x}-{link_id}-{sockets.descriptor_of(self._socket)}"
                self._monitor = sockets.open_monitor(context, self._socket, address, _MONITORED)
            self._socket.connect(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise EndpointError(f"can't connect to {endpoint!r}: {error.strerror}") from error
        self._plain_send = sockets.plain_send(self._socket)
        self._plain_get = sockets.plain_get(self._socket)
        if self._monitor is not None:
            self._plain_get_monitor = sockets.plain_get(self._monitor)
        self.descriptor = sockets.descriptor_of(self._socket)
        self.monitor_descriptor = None if self._monitor is None else sockets.descriptor_of(self._monitor)

    def _configure(self) -> None:
        socket = self._socket
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, limits.IN_FLIGHT_MAX)  # a full pipe says EAGAIN, it drops nothing
        socket.setsockopt(zmq.RCVHWM, 0)  # replies are bounded by what is in flight
        socket.setsockopt(zmq.RECONNECT_IVL, limits.RECONNECT_MS_MIN)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, limits.RECONNECT_MS_MAX)
        socket.setsockopt(zmq.CONNECT_TIMEOUT, limits.CONNECT_TIMEOUT_MS)
        socket.setsockopt(zmq.HANDSHAKE_IVL, limits.CONNECT_HANDSHAKE_TIMEOUT_MS)
        sockets.keep_alive(socket)
        socket.setsockopt(zmq.MAXMSGSIZE, limits.PART_SIZE_BYTES_MAX)
        socket.copy_threshold = limits.LARGE_PART_SIZE_BYTES
        if self.pair is not None and self.server_key is not None:
            connect_with(socket, self.pair, self.server_key)

    def read_monitor(self, now_ns: int) -> None:
        """Read the monitor's events: connections made, lost and refused."""
        if self._monitor is None:
            return
        for kind, _ in sockets.monitored_events(self._monitor):
            self.connected = kind == _CONNECTED
            if self.connected:
                self.connected_since_ns = now_ns
                self.reopen_due_ns = None
                self._supports_all_kinds = True
                self.outbox.retransmit_all()
            elif kind in _FAILED:
                self._handshake_failed(kind, now_ns)

    def _handshake_failed(self, kind: int, now_ns: int) -> None:
        if self.reopen_due_ns is None:
            self.reopen_due_ns = now_ns + limits.RECONNECT_REFUSED_NS
        if kind == _REFUSED:
            reason = "it does not let this instance's key in"
        elif kind == _OTHER_MECHANISM and self.server_key is None:
            reason = "it takes only callers with keys, and this link has none for it"
        elif kind == _OTHER_MECHANISM:
            reason = "it has no keys, and a key is expected of it"
        elif self.server_key is None:
            return  # it ended just then
        else:
            reason = "it has another key than expected, or ended just then"
        self._warnings.warn(f"no connection to {self.endpoint}: {reason}", "it is tried again, nothing is lost")

    @property
    def silence_deadline_ns(self) -> int | None:
        """Time when the connection is replaced unless something is received before; None for never."""
        return None if self._monitor is None or not self.connected else self.outbox.silence_deadline_ns

    def abandon_connection(self) -> None:
        """Report that the connection is silent; the owner replaces the link by one with the same ID and outbox."""
        self._counters.silences += 1
        self._warnings.warn(
            f"{self.endpoint} has not answered for {self.outbox.silence_ns / 1e9:g} s",
            "its connection is made anew, nothing is lost",
        )
        self.outbox.connection_lost()

    def next_deadline_ns(self) -> int | None:
        """Return the time when the link has work to do even if nothing is received; None for never."""
        if not self.connected:
            return self.reopen_due_ns
        retry_ns, silence_deadline_ns = self.outbox.retry_check_ns, self.silence_deadline_ns
        if retry_ns is None or silence_deadline_ns is None:
            return retry_ns if silence_deadline_ns is None else silence_deadline_ns
        return min(retry_ns, silence_deadline_ns)

    def receive(self, now_ns: int) -> bool:
        """Receive replies and run their callbacks; return False if some are left for another turn."""
        for _ in range(limits.RECEIVED_PER_TURN_MAX):
            if self.closed:
                return True
            parts = sockets.receive_parts(self._socket)
            if parts is None:
                return True
            self.handle_reply(parts, now_ns)
            if not self.closed and not self._plain_get(sockets.EVENTS) & sockets.POLLIN:  # type: ignore[operator]
                return True
        return False

    def handle_reply(self, parts: list[bytes], now_ns: int) -> None:
        """Handle a reply and run its callback."""
        callback = self._acknowledge(parts, now_ns)
        if callback is not None:
            callback(parts)

    def _acknowledge(self, parts: list[bytes], now_ns: int) -> ReplyCallback | None:
        """Handle a received reply: replace ``parts`` by its own parts; return the callback for them, if any."""
        try:
            if len(parts) != 1:
                raise EnvelopeError(f"{len(parts)} parts came in, a reply is one")
            reply = parts.pop()
            envelope = decode_envelope(reply[:ENVELOPE_SIZE_BYTES])
            if envelope.kind == NOT_KNOWN:
                self._log_unknown_kind(b" ".join(decode_parts(reply, ENVELOPE_SIZE_BYTES)).decode(errors="replace"))
                return None
            if envelope.kind in MESSAGES or envelope.link_id != self.link_id:
                raise EnvelopeError(
                    f"kind {envelope.kind} on link {envelope.link_id} came in, expected replies on link {self.link_id}"
                )
            if envelope.kind != PIGGYBACKED and self._receiver != (receiver := (envelope.incarnation, self.peer)):
                self._delayed.reachable.discard(self._receiver)
                self._delayed.reachable.add(receiver)
                self._receiver = receiver
            if envelope.kind in _WITH_PARTS:
                parts += decode_parts(reply, ENVELOPE_SIZE_BYTES)
            _, kind, _, _, _, message_id, arrived_id, given_callback_id, callback_id = envelope
            self.outbox.record_reply(message_id, arrived_id, now_ns, awaited=kind == REPLY_PENDING)
            if kind == REPLY_PENDING:
                self._counters.replies_awaited += 1
                if parts:  # a receiver of an earlier build does not say what is missing
                    self.outbox.record_missing(decode_missing(parts[0]))
                return None
            message = self.outbox.pending(message_id)
            if message is None:
                self._counters.duplicates_dropped += 1
                return None
            if message.callback_id != callback_id:
                raise EnvelopeError(
                    f"a reply to message {message_id} for callback {callback_id}, expected {message.callback_id}"
                )
            conversation = message.conversation
            if conversation is None and (given_callback_id or kind == CALLBACK_UNKNOWN):
                raise EnvelopeError(
                    f"a reply of kind {kind} with callback {given_callback_id} came in to message {message_id}, "
                    f"which is of no conversation"
                )
        except EnvelopeError as error:
            self._counters.malformed += 1
            self._warnings.warn(f"from {self.endpoint}: {error}")
            return None
        self.outbox.acknowledge(message_id)
        self._counters.acknowledged += 1
        if kind == REPLY_EXPIRED:
            self._counters.replies_expired += 1
        if self._room is not None:
            self._room.release(self.endpoint, message.size_bytes)
        return message.callback if conversation is None else self._answer(conversation, envelope)

    def _answer(self, conversation: ConversationMessage, envelope: Envelope) -> ReplyCallback | None:
        callback = conversation.callback
        if callback is None:
            return None
        return lambda parts: callback(Answer(parts, envelope.source_callback_id, _OUTCOMES[envelope.kind]))

    def _log_unknown_kind(self, known: str) -> None:
        """Warn that the receiver, of another build, dropped an envelope unknown there; it tells once per connection."""
        self._counters.malformed += 1
        outcome = "dropped"
        if self._supports_all_kinds:
            self._supports_all_kinds = False
            self.outbox.retransmit_all()
            if self.outbox.has_conversations:
                outcome = "conversations end there with the first reply, what is for a callback waits"
        self._warnings.warn(
            f"from {self.endpoint}: what was sent is not known there, which is of another build: it knows {known!r}",
            outcome,
        )

    def transmit(self, now_ns: int, *, patient: bool) -> bool:
        """Send as many messages as the limits allow; return True if unread replies are there. ``patient``: True if
        nobody waits for the replies to what is sent.

        Sending and reading EVENTS make ZeroMQ notice new room and new replies, and reset its descriptor. So EVENTS is
        read last, and its value decides.
        """
        while True:
            blocked = self._send_queued(now_ns, patient)
            events = self._plain_get(sockets.EVENTS)
            assert isinstance(events, int)
            if not (blocked and events & sockets.POLLOUT):
                return bool(events & sockets.POLLIN)

    def _send_queued(self, now_ns: int, patient: bool) -> bool:
        """Send as many messages as the limits allow; return True if ZeroMQ had no room for all of them."""
        outbox = self.outbox
        count = 0
        blocked = False
        while (message := outbox.next_to_send()) is not None:
            if count % limits.SENT_PER_MONITOR_CHECK == 0:
                self._check_connection(now_ns)
                message = outbox.next_to_send()
                if not self.connected or message is None:
                    break
            if not self._send(message, patient):
                blocked = True
                break
            outbox.mark_sent(message, now_ns)
            count += 1
        self._counters.sent += count
        return blocked

    def _check_connection(self, now_ns: int) -> None:
        monitor = self._monitor
        if monitor is not None:
            events = self._plain_get_monitor(sockets.EVENTS)  # cheaper than a receive that finds nothing
            assert isinstance(events, int)
            if events & sockets.POLLIN:
                self.read_monitor(now_ns)

    def _send(self, message: PendingMessage, patient: bool) -> bool:
        """Send one whole message, with the replies that wait for it; return False if ZeroMQ has no room for it."""
        parts, conversation = message.parts, message.conversation
        is_last = self.outbox.queued_count == 1  # others may wait for the room that its reply makes
        is_small = message.size_bytes < limits.LARGE_PART_SIZE_BYTES
        can_wait = patient and is_last and is_small and not message.sent_before and self._supports_all_kinds
        envelope = encode_message(
            self.link_id,
            self._incarnation,
            message.message_id,
            self.outbox.lowest_pending_id,
            message.callback_id,
            self.outbox.skipped_count(message),
            PATIENT if can_wait else MESSAGE,
        )
        if conversation is not None and (self._supports_all_kinds or conversation.destination_callback_id):
            envelope = as_conversation_message(envelope, conversation.destination_callback_id)
        send = self._plain_send
        replies = self._delayed.waiting(self._receiver) if self._supports_all_kinds else ()
        try:
            send(envelope + encode_parts(replies), sockets.NOBLOCK_MORE if parts else sockets.NOBLOCK)
        except zmq.Again:
            return False
        sockets.send_parts(send, parts)
        if replies:
            self._delayed.pop(self._receiver)
        if message.sent_before:
            self._counters.retried += 1
        return True

    def close(self) -> None:
        """Close the sockets; pending messages stay in the outbox."""
        self.closed = True
        self.connected = False
        self._delayed.reachable.discard(self._receiver)
        if self._watcher is not None:
            sockets.unwatch(self._context, self.endpoint, self._watcher)
        if self._monitor is not None:
            self._socket.disable_monitor()
            self._monitor.close()
        self._socket.close(limits.CLOSE_LINGER_MS)
