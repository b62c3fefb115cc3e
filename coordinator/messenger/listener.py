"""Listener at one endpoint: a ROUTER socket, its inbox, and the server loop that gets new messages."""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import NamedTuple

import zmq
from msgspec import Struct

from immortal.coordinator.messenger import limits, sockets
from immortal.coordinator.messenger.backpressure import ClientSendQueues
from immortal.coordinator.messenger.envelope import (
    CALLBACK_UNKNOWN,
    ENVELOPE_SIZE_BYTES,
    KNOWN,
    MESSAGES,
    NOOP,
    NOT_KNOWN,
    PATIENT,
    PIGGYBACKED,
    REPLY,
    REPLY_PENDING,
    TURN,
    AlreadyRepliedError,
    EndpointInUseError,
    Envelope,
    EnvelopeError,
    MessageTooLargeError,
    UnknownEnvelopeError,
    decode_envelope,
    decode_parts,
    encode_missing,
    encode_parts,
    encode_reply,
)
from immortal.coordinator.messenger.inbox import Arrival, Inbox, LinkState
from immortal.coordinator.messenger.security import HandshakeGuard, Role, Security, serve_with
from immortal.protocol.client_frames import is_client_frame
from immortal.protocol.unfinished_messages import UnfinishedMessages

FIRST, REFUSED, EARLY = Arrival.FIRST, Arrival.REFUSED, Arrival.EARLY
_NEW = (FIRST, EARLY)
_monitor_numbers = itertools.count()


class Reply(NamedTuple):
    """Reply on its way from reply() to the socket. It does not hold the message, which can be large."""

    listener: Listener
    link: LinkState
    envelope: Envelope  # of the message
    parts: tuple[bytes, ...]
    callback: ServerLoop | None


class Received(Struct, eq=False):
    """Received message, delivered to a server loop once, and before that to the callback that it addresses, if any.

    ``parts`` are its bytes, ``endpoint`` is where it arrived, ``sender`` the random incarnation (u64) of the sending
    messenger, ``peer`` the name that its key stands for, None without keys. ``replied``: True after a reply.
    """

    _listener: Listener
    _link: LinkState
    _envelope: Envelope
    parts: list[bytes]
    replied: bool = False

    @property
    def endpoint(self) -> str:
        return self._listener.endpoint

    @property
    def sender(self) -> int:
        return self._link.incarnation

    @property
    def peer(self) -> str | None:
        return self._link.peer

    @property
    def takes_callback(self) -> bool:
        """True if its reply can have a callback."""
        return self._envelope.kind == TURN

    @property
    def for_callback(self) -> bool:
        """True if it addresses a callback that was given with a reply."""
        return self._envelope.destination_callback_id != NOOP

    def reply(self, *parts: bytes, callback: ServerLoop | None = None) -> None:
        """Reply to the message and so acknowledge it: its sender keeps and resends it until then.

        ``callback`` gets the message that the sender addresses to it, once, in the owner's thread, before the server
        loop gets the same message. It has no effect unless ``takes_callback``.

        Any thread can call this, at once or much later. A second call raises AlreadyRepliedError. Raises
        MessageTooLargeError above limits.REPLY_SIZE_BYTES_MAX. Does nothing after the messenger was closed.
        """
        if self.replied:
            raise AlreadyRepliedError(
                f"message {self._envelope.message_id} of {self.sender:016x} was replied to before; "
                f"a reply is the acknowledgement and there is one"
            )
        checked = sockets.message_parts(parts)
        size_bytes = sum(map(len, checked))
        if size_bytes > limits.REPLY_SIZE_BYTES_MAX:
            raise MessageTooLargeError("a reply", size_bytes, limits.REPLY_SIZE_BYTES_MAX)
        self.replied = True
        listener = self._listener
        if callback is not None and not self.takes_callback:
            callback = None
        listener.accept_reply(Reply(listener, self._link, self._envelope, checked, callback))


class ClientRoute(Struct, eq=False):
    """Route to a client, which is no messenger: nothing is kept or sent again for it.

    ``peer``: the name that its key stands for, None without keys.
    """

    _listener: Listener
    _route: bytes
    peer: str | None = None

    def send(self, data: bytes) -> None:
        """Send ``data`` to the client, at most once. It can be called any number of times."""
        self._listener.accept_reply(ClientReply(self._listener, self._route, data))


class ClientReply(NamedTuple):
    """Message to a client on its way to the socket."""

    listener: Listener
    route: bytes
    data: bytes


ServerLoop = Callable[[Received], None]
ClientLoop = Callable[[ClientRoute, bytes], None]
"""Callback with the route to a client and the one part of its message."""


class Listener:
    """Listener at one endpoint: receives messages and sends the replies. One thread uses it, except accept_reply().

    ``ordered``: deliver the messages of a link in the order of sending. ``new_callback_id``: returns an ID that no
    messenger has given before.

    With ``security``, only its callers can connect. New own keys need a new socket: secure() makes one, which takes
    the endpoint over when ZeroMQ has released it, at ``reopen_due_ns`` or soon after. Senders send again what the old
    socket held.
    """

    def __init__(
        self,
        shared: sockets.Shared,
        endpoint: str,
        server_loop: ServerLoop,
        accept_reply: Callable[[Reply | ClientReply], None],
        security: Security | None = None,
        secured: bool = False,
        client_loop: ClientLoop | None = None,
        *,
        ordered: bool = False,
        parts_max: int = limits.PARTS_MAX - 1,
        most_bytes: Callable[[], int] | None = None,
        new_callback_id: Callable[[], int],
    ) -> None:
        self.closed = False
        self.endpoint = ""
        self.secured = secured  # uses the messenger's security, if there is any
        self.reopen_due_ns: int | None = None
        self._context = shared.context
        self._security = security
        self._handshakes: HandshakeGuard | None = None
        self._refused_before = 0  # by the sockets before
        self.accept_reply = accept_reply
        self._piggybacked = shared.piggybacked_replies
        self._delayed = shared.delayed_replies
        self._server_loop = server_loop
        self._client_loop = client_loop
        self._incarnation = shared.incarnation
        self._counters = shared.counters
        self._warnings = shared.warnings
        self._stranger_warnings = shared.stranger_warnings
        self._new_callback_id = new_callback_id
        self._most_bytes = most_bytes
        self._frames_max = parts_max + 3  # with routing ID, envelope, and one too many
        self._inbox = Inbox(ordered=ordered)
        self._in_order: deque[Received] = deque()  # arrived early, and can be delivered now
        self._client_queues = ClientSendQueues()
        self._notified_routes: OrderedDict[bytes, None] = OrderedDict()  # told which envelopes are known here
        self._is_inproc = sockets.is_inproc(endpoint)
        self._open()
        try:
            with sockets.announced(self._context, endpoint, True):
                self.endpoint = sockets.bind(self._socket, endpoint)
            if self._handshakes is not None:
                self._handshakes.endpoint = self.endpoint
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        """Create the socket, without binding it yet."""
        self._socket: sockets.Socket = self._context.socket(zmq.ROUTER)
        self._configure()
        self._plain_send = sockets.plain_send(self._socket)
        self._plain_get = sockets.plain_get(self._socket)
        self.descriptor = sockets.descriptor_of(self._socket)
        self._watch: UnfinishedMessages | None = None
        if not self._is_inproc:
            if self._most_bytes is not None:
                self._watch = UnfinishedMessages(
                    self._socket, limits.USUAL_SIZE_BYTES, self._warn_unfinished, self._most_bytes
                )
            address = f"listener-{self._incarnation:x}-{next(_monitor_numbers)}"
            secured = self._security is not None
            self._handshakes = HandshakeGuard(
                self._context, self._socket, address, secured, self._stranger_warnings, self._watch
            )
            self._handshakes.endpoint = self.endpoint

    def _warn_unfinished(self, problem: str) -> None:
        self._stranger_warnings.warn(
            f"at {self.endpoint}: {problem} (if that is an honest call, give this instance the rpc_limit_mb "
            f"of its sender; if not, remove the sender's key)",
            "ended",
        )

    def secure(self, security: Security, now_ns: int) -> None:
        """Use ``security`` from now on. If its own keys have changed, the socket and its descriptor are new."""
        known, self._security = self._security, security
        if known is None or known.own != security.own:
            self._close_sockets()
            self._open()
            self.reopen_due_ns = now_ns

    def reopen(self, now_ns: int) -> None:
        """Bind the new socket to the endpoint; retry later if ZeroMQ has not released the old socket yet."""
        try:
            sockets.bind(self._socket, self.endpoint)
        except EndpointInUseError:
            self.reopen_due_ns = now_ns + limits.REBIND_NS
        else:
            self.reopen_due_ns = None

    def _configure(self) -> None:
        socket = self._socket
        if self._security is not None:
            serve_with(socket, self._security.own)
        socket.setsockopt(zmq.HANDSHAKE_IVL, limits.HANDSHAKE_TIMEOUT_MS)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 0)  # a routing ID in use can't be taken over
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # an error instead of dropping silently
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, limits.REPLIES_QUEUED_MAX)
        # The senders' limits on what is in flight bound this queue. With a limit of ZeroMQ's, a peer's heartbeat that
        # waits behind it while the connection breaks would end the process: see keep_alive().
        socket.setsockopt(zmq.RCVHWM, 0)
        sockets.keep_alive(socket)
        socket.setsockopt(zmq.MAXMSGSIZE, limits.PART_SIZE_BYTES_MAX)
        socket.copy_threshold = limits.LARGE_PART_SIZE_BYTES

    def receive(self) -> bool:
        """Receive messages and run callbacks and the server loop for new ones; return False if some are left for
        another turn."""
        watch = self._watch
        if watch is None:
            return self._receive(None)
        watch.reading()
        if is_drained := self._receive(watch):
            watch.drained()
        return is_drained

    def _receive(self, watch: UnfinishedMessages | None) -> bool:
        for _ in range(limits.RECEIVED_PER_TURN_MAX):
            while self._in_order and not self.closed:
                self._dispatch(self._in_order.popleft())
            if self.closed:
                return True
            received = None
            if self._security is None:
                parts = sockets.receive_parts(self._socket, self._frames_max, watch)
                if parts is None:
                    return True
                received = self._accept(parts, None)
            else:
                identified = sockets.receive_identified(self._socket, self._frames_max, watch)
                if identified is None:
                    return True
                key, parts = identified
                peer = self._security.callers.get(key)
                if peer is None:  # was admitted, but no longer is
                    self._counters.strangers_dropped += 1
                    self._stranger_warnings.warn(
                        f"at {self.endpoint}: a message came with the key {key}, which may not call"
                    )
                elif self._fits_role(key, peer, parts):
                    received = self._accept(parts, peer, key)
                del identified
            if received is not None:
                self._dispatch(received)
            del parts, received  # the next one can use its memory
            if not self._in_order and not self.has_unread():  # cheaper than a receive that finds nothing
                return True
        return False

    @property
    def refused(self) -> int:
        """Count of connections that failed before the ZAP authenticator was asked."""
        return self._refused_before + (0 if self._handshakes is None else self._handshakes.refused)

    def _fits_role(self, key: str, peer: str, frames: list[bytes]) -> bool:
        """Return True if the role of ``key`` may send such a message. Only the first byte is read."""
        assert self._security is not None
        role = self._security.roles.get(key, Role.INSTANCE)
        clients_frame = len(frames) == 2 and is_client_frame(frames[1])
        if role.may_send(clients_frame):
            return True
        self._counters.roles_refused += 1
        self._counters.refused_by[peer] += 1
        kind = "a client's frame" if clients_frame else "a peer's message"
        self._stranger_warnings.warn(f"at {self.endpoint}: {kind} came with the key of {peer!r}, whose role is {role}")
        return False

    def _accept(self, frames: list[bytes], peer: str | None, key: str | None = None) -> Received | None:
        """Return the message in ``frames`` if it is valid and new and, with ``ordered``, none is missing before it.
        Give a client's frame to the client loop, and keep the replies that come with a message for their links."""
        if self._client_loop is not None and len(frames) == 2 and is_client_frame(frames[1]):
            self._counters.received += 1
            self._client_loop(ClientRoute(self, frames[0], peer), frames[1])
            return None
        first = frames[1] if len(frames) > 1 else b""
        try:
            envelope = decode_envelope(first[:ENVELOPE_SIZE_BYTES])
            if envelope.kind not in MESSAGES:
                raise EnvelopeError(f"kind {envelope.kind} came in, expected messages")
            if len(frames) > limits.PARTS_MAX + 1:
                raise EnvelopeError(f"a message of {len(frames)} parts came in, at most {limits.PARTS_MAX + 1}")
            if len(first) > ENVELOPE_SIZE_BYTES:
                self._piggybacked += [
                    (reply, key) for reply in decode_parts(first, ENVELOPE_SIZE_BYTES, limits.PIGGYBACKED_MAX)
                ]
        except EnvelopeError as error:
            self._counters.malformed += 1
            self._warnings.warn(f"at {self.endpoint}: {error}")
            if isinstance(error, UnknownEnvelopeError):
                self._send_supported_kinds(frames[0])
            return None
        _, _, skipped_count, link_id, incarnation, message_id, lowest_pending_id, callback_id, _ = envelope
        link = self._inbox.link(incarnation, link_id, peer)
        if frames[0] != link.routes[0]:
            link.note_route(frames[0])
        arrival = link.mark_received(message_id, lowest_pending_id, skipped_count)
        received = None
        if arrival in _NEW:
            del frames[:2]
            received = Received(self, link, envelope, frames)
            if link.window.missing and link.window.is_missing(message_id - skipped_count - 1):
                self._send(link, REPLY_PENDING, message_id, callback_id, ())
            if arrival == FIRST and not link.early:
                return received
            if arrival == FIRST:
                link.early[message_id] = received, 0  # others may be before it
            elif link.store_early(message_id, received, frames):
                self._counters.early_kept += 1
            else:
                self._counters.early_dropped += 1
        elif arrival == REFUSED:
            self._counters.refused += 1
            self._warnings.warn(
                f"at {self.endpoint}: message {message_id} came in while {lowest_pending_id} "
                f"is unacknowledged; a sender may be {limits.SPAN_MAX - 1} ahead"
            )
        else:
            self._counters.duplicates_dropped += 1
            self._reply_again(link, envelope)
        if link.early:
            self._in_order += link.pop_early()
        return None

    def _dispatch(self, received: Received) -> None:
        """Run the callback that a message addresses, then the server loop."""
        if not received.for_callback or self._run_callback(received._link, received._envelope, received):
            self._counters.received += 1
            self._server_loop(received)

    def _run_callback(self, link: LinkState, envelope: Envelope, received: Received) -> bool:
        """Call the callback that a message addresses; return False if it is unknown, or has closed this listener."""
        callback = link.pop_callback(envelope.destination_callback_id)
        if callback is not None:
            callback(received)
            return not self.closed
        self._counters.callbacks_unknown += 1
        link.store_reply(envelope.message_id, envelope.source_callback_id, (), kind=CALLBACK_UNKNOWN)
        self._send(link, CALLBACK_UNKNOWN, envelope.message_id, envelope.source_callback_id, ())
        return False

    def _send_supported_kinds(self, route: bytes) -> None:
        """Tell a sender of another build which kinds are known here. This is done once per route, so that two builds
        never answer each other forever."""
        if route in self._notified_routes:
            return
        self._notified_routes[route] = None
        if len(self._notified_routes) > limits.NOTIFIED_ROUTES_MAX:
            self._notified_routes.popitem(last=False)
        self._send_parts(route, encode_reply(NOT_KNOWN, 1, self._incarnation, 1, 1, NOOP) + encode_parts((KNOWN,)))

    def _reply_again(self, link: LinkState, envelope: Envelope) -> None:
        stored = link.replies.get(envelope.message_id)
        if stored is None:
            if envelope.message_id >= link.window.lowest_pending_id:  # else its sender has the reply
                self._send(link, REPLY_PENDING, envelope.message_id, envelope.source_callback_id, ())
            return
        self._counters.replies_resent += 1
        self._send(
            link,
            stored.kind,
            envelope.message_id,
            stored.destination_callback_id,
            stored.parts,
            stored.source_callback_id,
        )

    def reply(self, reply: Reply | ClientReply, now_ns: int) -> bool:
        """Send a reply and keep it for duplicates of its message; a reply to a client is only sent. Return False if it
        waits for a message to its receiver."""
        if isinstance(reply, ClientReply):
            self._reply_to_client(reply.route, reply.data)
            return True
        _, link, envelope, parts, callback = reply
        _, _, _, _, _, message_id, _, callback_id, _ = envelope
        source_callback_id = NOOP
        if callback is not None:
            source_callback_id = self._new_callback_id()
            if not link.store_callback(source_callback_id, callback):
                self._counters.callbacks_forgotten += 1
        link.store_reply(message_id, callback_id, parts, source_callback_id)
        receiver = link.incarnation, link.peer
        if envelope.kind == PATIENT and self._delayed.has_room(receiver):
            arrived_id = link.arrived_id(message_id)
            head = encode_reply(PIGGYBACKED, link.link_id, link.incarnation, message_id, arrived_id, callback_id)
            self._delayed.add(receiver, reply, head + encode_parts(parts), now_ns)
            return False
        for earlier in self._delayed.pop(receiver):
            self.send_delayed(earlier)
        self._send(link, REPLY, message_id, callback_id, parts, source_callback_id)
        return True

    def send_delayed(self, reply: Reply) -> None:
        """Send a reply that has waited."""
        envelope = reply.envelope
        self._send(reply.link, REPLY, envelope.message_id, envelope.source_callback_id, reply.parts)

    def _reply_to_client(self, route: bytes, data: bytes) -> None:
        queues, send = self._client_queues, self._plain_send
        if queues.has_room(route, len(data)) and self._send_route(route):
            queues.send(send, route, data)
        else:
            self._counters.replies_unsent += 1

    def _send(
        self,
        link: LinkState,
        kind: int,
        message_id: int,
        callback_id: int,
        parts: tuple[bytes, ...],
        source_callback_id: int = NOOP,
    ) -> None:
        arrived_id = link.arrived_id(message_id)
        envelope = encode_reply(
            kind, link.link_id, self._incarnation, message_id, arrived_id, callback_id, source_callback_id
        )
        if kind == REPLY_PENDING:
            parts = (encode_missing(link.window.lowest_pending_id, link.window.missing),)
        data = envelope + encode_parts(parts)
        for route in link.routes:
            if self._send_parts(route, data):
                return
        self._counters.replies_unsent += 1

    def _send_parts(self, route: bytes, data: bytes) -> bool:
        """Send ``data`` to ``route``; return False if there is no such connection, or it has no room."""
        if not self._send_route(route):
            return False
        self._plain_send(data, sockets.NOBLOCK, copy=len(data) < limits.LARGE_PART_SIZE_BYTES)
        return True

    def _send_route(self, route: bytes) -> bool:
        """Send the routing ID, a message's first part; return False if the connection is gone or has no room."""
        try:
            self._plain_send(route, sockets.NOBLOCK_MORE)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            return False
        return True

    def has_unread(self) -> bool:
        """Return True if unread messages are there, perhaps unnoticed while replies were sent."""
        unread = bool(self._plain_get(sockets.EVENTS) & sockets.POLLIN)  # type: ignore[operator]
        if unread and self._watch is not None:
            self._watch.reading()  # the descriptor tells nobody of them any more
        return unread

    def close(self) -> None:
        """Close the socket and release the endpoint. Later replies do nothing."""
        self.closed = True
        with sockets.announced(self._context, self.endpoint, False):
            if sockets.is_inproc(self.endpoint):
                self._socket.unbind(self.endpoint)  # closing alone lets go later, in ZeroMQ's own time
            self._close_sockets()

    def _close_sockets(self) -> None:
        if self._handshakes is not None:
            self._handshakes.close()
            self._refused_before += self._handshakes.refused
            self._handshakes = None
        self._socket.close()
