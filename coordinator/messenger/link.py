"""A link: one DEALER, its monitor, and the outbox of one destination."""

from __future__ import annotations

from struct import Struct

import zmq

from coordinator.messenger.envelope import MESSAGE, REPLY_EXPIRED, decode_envelope, encode_message
from coordinator.messenger.errors import EndpointError, EnvelopeError
from coordinator.messenger.limits import (
    HEARTBEAT_INTERVAL_MS,
    HEARTBEAT_TIMEOUT_MS,
    IN_FLIGHT_MAX,
    LARGE_PART_SIZE_BYTES,
    PART_SIZE_BYTES_MAX,
    RECEIVED_PER_TURN_MAX,
    RECONNECT_MS_MAX,
    RECONNECT_MS_MIN,
    SENT_PER_LOOK,
)
from coordinator.messenger.outbox import Outbox, PendingMessage, ReplyCallback
from coordinator.messenger.sockets import (
    EVENTS,
    NOBLOCK,
    NOBLOCK_MORE,
    POLLIN,
    POLLOUT,
    Context,
    Counters,
    Socket,
    Warnings,
    plain_send,
    receive_parts,
    send_parts,
)

_ROUTING_ID = Struct(">cQI")
_MONITOR_EVENT = Struct("=HI")  # in the machine's own byte order
_MONITORED = int(zmq.EVENT_HANDSHAKE_SUCCEEDED) | int(zmq.EVENT_DISCONNECTED)


class Link:
    """Sends to one destination and takes its replies. Used by one thread.

    Nothing is sent before the monitor has told of a connection, and what was in flight before goes first: so
    the first delivery of each message is in ID order even to a receiver that starts anew. ``inproc`` has
    neither monitor nor reconnects: such a link counts as connected from the start and ends with its
    receiver.
    """

    def __init__(
        self,
        context: Context,
        endpoint: str,
        link_id: int,
        incarnation: int,
        outbox: Outbox,
        counters: Counters,
        warnings: Warnings,
    ) -> None:
        self.endpoint = endpoint
        self.outbox = outbox
        self.closed = False
        self._link_id = link_id
        self._incarnation = incarnation
        self._counters = counters
        self._warnings = warnings
        self._monitor: Socket | None = None
        self._socket: Socket = context.socket(zmq.DEALER)
        try:
            self._configure()
            self.connected = endpoint.startswith("inproc://")
            if not self.connected:
                self._monitor = self._open_monitor(context)
            self._socket.connect(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise EndpointError(f"can't connect to {endpoint!r}: {error.strerror}") from error
        self._plain_send = plain_send(self._socket)
        self.descriptor = _descriptor(self._socket)
        self.monitor_descriptor = None if self._monitor is None else _descriptor(self._monitor)

    def _configure(self) -> None:
        socket = self._socket
        socket.setsockopt(zmq.ROUTING_ID, _ROUTING_ID.pack(b"I", self._incarnation, self._link_id))
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, IN_FLIGHT_MAX)  # a full pipe says EAGAIN, it drops nothing
        socket.setsockopt(zmq.RCVHWM, 0)  # replies are bounded by what is in flight
        socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS_MIN)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MS_MAX)
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_INTERVAL_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        socket.setsockopt(zmq.MAXMSGSIZE, PART_SIZE_BYTES_MAX)
        socket.copy_threshold = LARGE_PART_SIZE_BYTES

    def _open_monitor(self, context: Context) -> Socket:
        address = f"inproc://monitor-{self._incarnation:x}-{self._link_id}-{_descriptor(self._socket)}"
        self._socket.monitor(address, _MONITORED)
        monitor: Socket = context.socket(zmq.PAIR)
        monitor.setsockopt(zmq.LINGER, 0)
        monitor.setsockopt(zmq.RCVHWM, 0)  # an event lost would be a connection missed
        monitor.connect(address)
        return monitor

    def read_monitor(self) -> None:
        """Take note of connections lost and made."""
        if self._monitor is None:
            return
        while (event := receive_parts(self._monitor)) is not None:
            kind, _ = _MONITOR_EVENT.unpack(event[0])
            self.connected = kind == zmq.EVENT_HANDSHAKE_SUCCEEDED
            if self.connected:
                self.outbox.requeue_all()

    def receive(self) -> bool:
        """Take replies and run their callbacks; False if some were left for another turn."""
        for _ in range(RECEIVED_PER_TURN_MAX):
            if self.closed:
                return True
            parts = receive_parts(self._socket)
            if parts is None:
                return True
            callback = self._acknowledge(parts)
            if callback is not None:
                callback(parts)
        return False

    def _acknowledge(self, parts: list[bytes]) -> ReplyCallback | None:
        """Take the envelope from ``parts``; what to call with the rest, if anything."""
        try:
            envelope = decode_envelope(parts.pop(0))
            if envelope.kind == MESSAGE or envelope.link_id != self._link_id:
                raise EnvelopeError(
                    f"kind {envelope.kind} on link {envelope.link_id} came in, expected replies on link {self._link_id}"
                )
        except EnvelopeError as error:
            self._counters.malformed += 1
            self._warnings.warn(f"from {self.endpoint}: {error}")
            return None
        message = self.outbox.pending(envelope.message_id)
        if message is None:
            self._counters.duplicates_dropped += 1
            return None
        if message.callback_id != envelope.destination_callback_id:
            self._counters.malformed += 1
            self._warnings.warn(
                f"from {self.endpoint}: a reply to message {envelope.message_id} for callback "
                f"{envelope.destination_callback_id}, expected {message.callback_id}"
            )
            return None
        self.outbox.acknowledge(envelope.message_id)
        self._counters.acknowledged += 1
        if envelope.kind == REPLY_EXPIRED:
            self._counters.replies_expired += 1
            parts.clear()
        return message.callback

    def transmit(self, now_ns: int) -> bool:
        """Send what may be sent; True if replies may have come in unnoticed meanwhile.

        Sending, and asking for the events, take in ZeroMQ's news, that there is room again and that replies have
        come, and with it reset the descriptor. So the last thing is to ask, and to act on the answer.
        """
        while True:
            blocked = self._send_queued(now_ns)
            events = self._socket.getsockopt(EVENTS)
            assert isinstance(events, int)
            if not (blocked and events & POLLOUT):
                return bool(events & POLLIN)

    def _send_queued(self, now_ns: int) -> bool:
        """Send what may be sent; True if ZeroMQ had no room for all of it."""
        outbox = self.outbox
        count = 0
        blocked = False
        while (message := outbox.next_to_send()) is not None:
            if count % SENT_PER_LOOK == 0:
                self._look_at_connection()
                message = outbox.next_to_send()
                if not self.connected or message is None:
                    break
            if not self._send(message):
                blocked = True
                break
            outbox.mark_sent(message, now_ns)
            count += 1
        self._counters.sent += count
        return blocked

    def _look_at_connection(self) -> None:
        monitor = self._monitor
        if monitor is not None:
            events = monitor.getsockopt(EVENTS)  # cheaper than a receive that finds nothing
            assert isinstance(events, int)
            if events & POLLIN:
                self.read_monitor()

    def _send(self, message: PendingMessage) -> bool:
        """Send one message whole; False if ZeroMQ has no room for it."""
        parts = message.parts
        envelope = encode_message(
            self._link_id,
            self._incarnation,
            message.message_id,
            self.outbox.lowest_pending_id,
            message.callback_id,
        )
        send = self._plain_send
        try:
            send(envelope, NOBLOCK_MORE if parts else NOBLOCK)
        except zmq.Again:
            return False
        send_parts(send, parts)
        if message.sent_before:
            self._counters.retried += 1
        return True

    def close(self) -> None:
        """Close the sockets; what is pending stays in the outbox."""
        self.closed = True
        self.connected = False
        if self._monitor is not None:
            self._socket.disable_monitor()
            self._monitor.close()
        self._socket.close()


def _descriptor(socket: Socket) -> int:
    descriptor = socket.getsockopt(zmq.FD)
    assert isinstance(descriptor, int)
    return descriptor
