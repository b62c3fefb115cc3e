"""A listener: one ROUTER, the inbox behind it, and the server loop that gets what is new."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import zmq

from coordinator.messenger.duplicates import Sighting
from coordinator.messenger.envelope import MESSAGE, REPLY, REPLY_EXPIRED, Envelope, decode_envelope, encode_reply
from coordinator.messenger.errors import AlreadyRepliedError, EnvelopeError
from coordinator.messenger.inbox import Conversation, Inbox
from coordinator.messenger.limits import (
    HEARTBEAT_INTERVAL_MS,
    HEARTBEAT_TIMEOUT_MS,
    LARGE_PART_SIZE_BYTES,
    PART_SIZE_BYTES_MAX,
    PARTS_MAX,
    RECEIVED_PER_TURN_MAX,
    REPLIES_QUEUED_MAX,
    SPAN_MAX,
)
from coordinator.messenger.sockets import (
    EVENTS,
    NOBLOCK,
    NOBLOCK_MORE,
    POLLIN,
    Context,
    Counters,
    Socket,
    Warnings,
    bind,
    message_parts,
    plain_send,
    receive_parts,
    send_parts,
)

FIRST, REFUSED = Sighting.FIRST, Sighting.REFUSED


class Reply(NamedTuple):
    """A reply on its way from reply() to the socket; it does not hold the message, which may be large."""

    listener: Listener
    conversation: Conversation
    message_id: int
    callback_id: int
    parts: tuple[bytes, ...]


class Received:
    """A message, given to a server loop once.

    ``parts`` are its bytes, ``endpoint`` where it came in, ``sender`` the random incarnation (u64) of the
    messenger it came from.
    """

    __slots__ = ("_callback_id", "_conversation", "_listener", "_message_id", "_replied", "parts")

    def __init__(
        self,
        listener: Listener,
        conversation: Conversation,
        message_id: int,
        callback_id: int,
        parts: list[bytes],
    ) -> None:
        self.parts = parts
        self._listener = listener
        self._conversation = conversation
        self._message_id = message_id
        self._callback_id = callback_id
        self._replied = False

    @property
    def endpoint(self) -> str:
        return self._listener.endpoint

    @property
    def sender(self) -> int:
        return self._conversation.incarnation

    def reply(self, *parts: bytes) -> None:
        """Acknowledge the message: its sender keeps and resends it until then.

        From any thread, at once or much later, once: AlreadyRepliedError otherwise. MessageTooLargeError if
        a part is too large. Does nothing once the messenger is closed.
        """
        if self._replied:
            raise AlreadyRepliedError(
                f"message {self._message_id} of {self.sender:016x} was replied to before; "
                f"a reply is the acknowledgement and there is one"
            )
        checked = message_parts(parts)
        self._replied = True
        listener = self._listener
        listener.accept_reply(Reply(listener, self._conversation, self._message_id, self._callback_id, checked))


ServerLoop = Callable[[Received], None]


class Listener:
    """Takes messages at one endpoint and sends the replies. Used by one thread, but for accept_reply()."""

    def __init__(
        self,
        context: Context,
        endpoint: str,
        server_loop: ServerLoop,
        incarnation: int,
        accept_reply: Callable[[Reply], None],
        counters: Counters,
        warnings: Warnings,
    ) -> None:
        self.closed = False
        self.accept_reply = accept_reply
        self._server_loop = server_loop
        self._incarnation = incarnation
        self._counters = counters
        self._warnings = warnings
        self._inbox = Inbox()
        self._socket: Socket = context.socket(zmq.ROUTER)
        try:
            self._configure()
            self.endpoint = bind(self._socket, endpoint)
        except BaseException:
            self._socket.close()
            raise
        self._plain_send = plain_send(self._socket)
        descriptor = self._socket.getsockopt(zmq.FD)
        assert isinstance(descriptor, int)
        self.descriptor = descriptor

    def _configure(self) -> None:
        socket = self._socket
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a reconnect keeps its routing ID, the old connection goes
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # an error instead of dropping silently
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, REPLIES_QUEUED_MAX)
        socket.setsockopt(zmq.RCVHWM, SPAN_MAX)  # full, it makes the sender wait; nothing is dropped
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_INTERVAL_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        socket.setsockopt(zmq.MAXMSGSIZE, PART_SIZE_BYTES_MAX)
        socket.copy_threshold = LARGE_PART_SIZE_BYTES

    def receive(self) -> bool:
        """Take messages and run the server loop for new ones; False if some were left for another turn."""
        for _ in range(RECEIVED_PER_TURN_MAX):
            if self.closed:
                return True
            parts = receive_parts(self._socket)
            if parts is None:
                return True
            received = self._accept(parts)
            if received is not None:
                self._server_loop(received)
            del parts, received  # the next one can use its memory
        return False

    def _accept(self, frames: list[bytes]) -> Received | None:
        """The message in ``frames``, if it is one and new."""
        try:
            envelope = decode_envelope(frames[1] if len(frames) > 1 else b"")
            if envelope.kind != MESSAGE:
                raise EnvelopeError(f"kind {envelope.kind} came in, expected messages")
            if len(frames) > PARTS_MAX + 1:
                raise EnvelopeError(f"a message of {len(frames)} parts came in, at most {PARTS_MAX + 1}")
        except EnvelopeError as error:
            self._counters.malformed += 1
            self._warnings.warn(f"at {self.endpoint}: {error}")
            return None
        conversation = self._inbox.conversation(envelope.incarnation, envelope.link_id)
        conversation.route = frames[0]
        sighting = conversation.see(envelope.message_id, envelope.lowest_pending_id)
        if sighting == FIRST:
            self._counters.received += 1
            del frames[:2]
            return Received(self, conversation, envelope.message_id, envelope.source_callback_id, frames)
        if sighting == REFUSED:
            self._counters.refused += 1
            self._warnings.warn(
                f"at {self.endpoint}: message {envelope.message_id} came in while {envelope.lowest_pending_id} "
                f"is unacknowledged; a sender may be {SPAN_MAX - 1} ahead"
            )
        else:
            self._counters.duplicates_dropped += 1
            self._reply_again(conversation, envelope)
        return None

    def _reply_again(self, conversation: Conversation, envelope: Envelope) -> None:
        stored = conversation.replies.get(envelope.message_id)
        if stored is None:
            return  # not replied to yet, or acknowledged as received
        self._counters.replies_resent += 1
        if stored.parts is None:
            self._send(conversation, REPLY_EXPIRED, envelope.message_id, stored.destination_callback_id, ())
        else:
            self._send(conversation, REPLY, envelope.message_id, stored.destination_callback_id, stored.parts)

    def reply(self, reply: Reply) -> None:
        """Send a reply and keep it for duplicates of its message."""
        _, conversation, message_id, callback_id, parts = reply
        conversation.keep_reply(message_id, callback_id, parts)
        self._send(conversation, REPLY, message_id, callback_id, parts)

    def _send(
        self,
        conversation: Conversation,
        kind: int,
        message_id: int,
        callback_id: int,
        parts: tuple[bytes, ...],
    ) -> None:
        send = self._plain_send
        envelope = encode_reply(kind, conversation.link_id, self._incarnation, message_id, callback_id)
        try:
            send(conversation.route, NOBLOCK_MORE)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            self._counters.replies_unsent += 1
            return
        send(envelope, NOBLOCK_MORE if parts else NOBLOCK)
        send_parts(send, parts)

    def has_unread(self) -> bool:
        """Whether messages may have come in unnoticed while replies were sent."""
        return bool(self._socket.getsockopt(EVENTS) & POLLIN)  # type: ignore[operator]

    def close(self) -> None:
        """Let go of the endpoint. Replies that are still to be given do nothing."""
        self.closed = True
        self._socket.close()
