"""ZeroMQ sockets: endpoints, options, monitors, the wake-up descriptor, listeners at inproc endpoints."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import socket as unix_socket
import struct
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence

import zmq
from msgspec import Struct, field

from immortal.coordinator.messenger import limits
from immortal.coordinator.messenger.envelope import EndpointError, EndpointInUseError, MessageTooLargeError
from immortal.coordinator.messenger.inbox import DelayedReplies
from immortal.protocol.safe_output import RateLimit
from immortal.protocol.unfinished_messages import UnfinishedMessages

logger = logging.getLogger("immortal.coordinator.messenger")

Socket = zmq.Socket[bytes]
Context = zmq.Context[Socket]

# As plain integers: pyzmq's flags are enums, whose | makes a new enum each time.
NOBLOCK = int(zmq.NOBLOCK)
NOBLOCK_MORE = int(zmq.NOBLOCK) | int(zmq.SNDMORE)
EVENTS = int(zmq.EVENTS)
POLLIN = int(zmq.POLLIN)
POLLOUT = int(zmq.POLLOUT)

_TCP = re.compile(r"tcp://(?P<host>[^/]+):(?P<port>\d{1,5}|\*)")
_MONITOR_EVENT = struct.Struct("=HI")  # in the machine's own byte order
IPC_PATH_SIZE_BYTES_MAX = 107  # of sockaddr_un, less the final zero


class Counters(Struct):
    """Counters of the messenger's events since it was created."""

    sent: int = 0  # messages given to ZeroMQ, each time
    retried: int = 0  # of them, those that had been given before
    acknowledged: int = 0  # replies that were the first to their message
    received: int = 0  # messages given to a server loop
    duplicates_dropped: int = 0  # messages and replies that had arrived before
    early_kept: int = 0  # messages that arrived before an earlier one, and wait for it
    early_dropped: int = 0  # of such messages, those without room; their sender sends them again
    replies_resent: int = 0  # to duplicates
    replies_unsent: int = 0  # the sender's connection is gone or full; it will ask again
    replies_awaited: int = 0  # answers to retransmissions: the message has arrived, its reply will follow
    silences: int = 0  # connections made anew, since nothing was received on them any more
    replies_expired: int = 0  # acknowledgements without their reply, since it was no longer kept
    callbacks_unknown: int = 0  # messages for callbacks that were not given to their sender, or not kept
    callbacks_forgotten: int = 0  # callbacks given with replies, and dropped for newer ones
    sends_waited: int = 0  # sends that had to wait, as too much was pending
    sends_refused: int = 0  # sends refused with PendingFullError
    refused: int = 0  # IDs further ahead than a sender may go
    malformed: int = 0  # received messages that are not of this protocol
    strangers_refused: int = 0  # connections of callers that are not admitted, or show no key
    strangers_dropped: int = 0  # messages with a key that may no longer call
    roles_refused: int = 0  # messages of a kind that the role of their key does not send
    refused_by: Counter[str] = field(default_factory=Counter)  # ... by the name that the key stands for
    last_refused: str = ""  # key and origin of the last connection that was refused by its key
    let_in_by: Counter[str] = field(default_factory=Counter)  # connections admitted, by key


class Warnings:
    """Log of warnings about peers: at most one per interval, with the number of those left out."""

    def __init__(self, clock_ns: Callable[[], int]) -> None:
        self._clock_ns = clock_ns
        self._limit = RateLimit(burst=1, interval_ns=limits.WARNING_INTERVAL_NS)

    def warn(self, problem: str, outcome: str = "dropped") -> None:
        left_out = self._limit.admit(None, self._clock_ns())
        if left_out is not None:
            logger.warning("%s; %s (%d more since the last warning)", problem, outcome, left_out)


class Shared:
    """State shared by the links and listeners of one messenger. ``incarnation``: a random u64, unique to it."""

    def __init__(self, context: Context, incarnation: int, clock_ns: Callable[[], int]) -> None:
        self.context = context
        self.incarnation = incarnation
        self.clock_ns = clock_ns
        self.counters = Counters()
        self.warnings = Warnings(clock_ns)
        self.stranger_warnings = Warnings(clock_ns)  # apart, so that they hide no others
        self.delayed_replies = DelayedReplies()
        self.piggybacked_replies: deque[tuple[bytes, str | None]] = deque()  # that came, with their sender's key


def keep_alive(socket: Socket) -> None:
    """Turn on TCP keep-alive, by which the kernel finds out that a peer's machine is gone.

    ZeroMQ's own heartbeats stay off: one that is due on a broken connection with unread data can end the process (an
    assertion in stream_engine_base.cpp, out_event).
    """
    socket.setsockopt(zmq.HEARTBEAT_IVL, 0)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, limits.KEEPALIVE_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, limits.KEEPALIVE_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, limits.KEEPALIVE_COUNT)
    # The same while data is on its way:
    socket.setsockopt(zmq.TCP_MAXRT, limits.KEEPALIVE_S * (limits.KEEPALIVE_COUNT + 1) * 1000)


def plain_send(socket: Socket) -> Callable[..., object]:
    """Return the socket's send() without pyzmq's Python wrapper, which costs as much as the send itself."""
    return super(zmq.Socket, socket).send


def plain_get(socket: Socket) -> Callable[[int], object]:
    """Return the socket's get() without pyzmq's Python wrapper."""
    return super(zmq.Socket, socket).get


def send_parts(send: Callable[..., object], parts: tuple[bytes, ...]) -> None:
    """Send the rest of a message whose first part ZeroMQ has accepted. ZeroMQ accepts the whole message, or drops all
    of it if its connection ends meanwhile."""
    last = len(parts) - 1
    for index, part in enumerate(parts):
        flags = NOBLOCK_MORE if index < last else NOBLOCK
        try:
            send(part, flags, copy=len(part) < limits.LARGE_PART_SIZE_BYTES)
        except zmq.Again:
            continue  # the remaining parts must be given too, so that all are dropped


def receive_parts(
    socket: Socket, parts_max: int = limits.RECEIVED_PARTS_MAX, watch: UnfinishedMessages | None = None
) -> list[bytes] | None:
    """Receive one whole message; None if there is none. After None, ZeroMQ's descriptor reports the next one.

    A message from a DEALER is surely whole only if it has one part: see envelope.py. Parts beyond ``parts_max`` are
    dropped without a copy.
    """
    try:
        frame = socket.recv(NOBLOCK, copy=False)
        if watch is not None and watch.suspects:
            watch.note(frame)
        return _all_parts(socket, frame, parts_max)
    except zmq.Again:
        return None


def _all_parts(socket: Socket, frame: zmq.Frame, parts_max: int) -> list[bytes]:
    parts = [frame.bytes]
    while frame.more:  # three times as fast as recv_multipart, which asks the socket each time
        frame = socket.recv(NOBLOCK, copy=False)
        if len(parts) < parts_max:
            parts.append(frame.bytes)
    return parts


def receive_identified(
    socket: Socket, parts_max: int, watch: UnfinishedMessages | None = None
) -> tuple[str, list[bytes]] | None:
    """Receive one whole message with the public key that the ZAP authenticator admitted; None if there is none."""
    try:
        frame = socket.recv(NOBLOCK, copy=False)
    except zmq.Again:
        return None
    if watch is not None and watch.suspects:
        watch.note(frame)
    key = frame.get("User-Id")
    assert isinstance(key, str)
    return key, _all_parts(socket, frame, parts_max)


def descriptor_of(socket: Socket) -> int:
    """Return the socket's edge-triggered descriptor."""
    descriptor = socket.getsockopt(zmq.FD)
    assert isinstance(descriptor, int)
    return descriptor


def open_monitor(context: Context, socket: Socket, address: str, events: int) -> Socket:
    """Return a socket that reports ``events`` of ``socket``, which has no monitor; ``address`` is unique."""
    socket.monitor(f"inproc://{address}", events)
    monitor: Socket = context.socket(zmq.PAIR)
    monitor.setsockopt(zmq.LINGER, 0)
    monitor.setsockopt(zmq.RCVHWM, 0)  # an event lost would be a connection missed
    monitor.connect(f"inproc://{address}")
    receive_parts(monitor)  # empty, but ZeroMQ's descriptor works only after a receive that found nothing
    return monitor


def monitored_events(monitor: Socket) -> Iterator[tuple[int, int]]:
    """Yield (event, value) for each event that the monitor has."""
    while (event := receive_parts(monitor)) is not None:
        yield _MONITOR_EVENT.unpack(event[0])


def message_parts(message: bytes | Sequence[bytes]) -> tuple[bytes, ...]:
    """Return ``message`` as immutable parts. Raises MessageTooLargeError."""
    if isinstance(message, bytes):
        parts: tuple[bytes, ...] = (message,)
    else:
        parts = tuple([part if type(part) is bytes else bytes(memoryview(part)) for part in message])
    if len(parts) >= limits.PARTS_MAX:
        raise MessageTooLargeError("a message's number of parts", len(parts), limits.PARTS_MAX - 1)
    for part in parts:
        if len(part) > limits.PART_SIZE_BYTES_MAX:
            raise MessageTooLargeError("a part of a message", len(part), limits.PART_SIZE_BYTES_MAX)
    return parts


def check_destination(endpoint: str) -> None:
    """Raise EndpointError unless messages can be sent to ``endpoint``."""
    tcp = _TCP.fullmatch(endpoint)
    if tcp is not None:
        if tcp["port"] != "*" and 1 <= int(tcp["port"]) <= 65535 and tcp["host"] != "*":
            return
    elif endpoint.startswith("ipc://"):
        if 1 <= len(endpoint[len("ipc://") :].encode()) <= IPC_PATH_SIZE_BYTES_MAX and endpoint != "ipc://*":
            return
    elif endpoint.startswith("inproc://") and endpoint != "inproc://":
        return
    raise EndpointError(
        f"{endpoint!r} can't be sent to: expected tcp://host:port, ipc://path "
        f"(at most {IPC_PATH_SIZE_BYTES_MAX} bytes) or inproc://name"
    )


def bind(socket: Socket, endpoint: str) -> str:
    """Bind ``socket`` to ``endpoint``; return the real endpoint. Raises EndpointInUseError, EndpointError."""
    tcp = _TCP.fullmatch(endpoint)
    if tcp is not None and tcp["port"] != "*" and int(tcp["port"]) > 65535:
        raise EndpointError(f"can't listen at {endpoint!r}: ports end at 65535")  # ZeroMQ would take another
    if _answers(endpoint):
        raise EndpointInUseError(endpoint)  # ZeroMQ would take a Unix socket's path from its owner
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        if error.errno == errno.EADDRINUSE:
            raise EndpointInUseError(endpoint) from error
        raise EndpointError(
            f"can't listen at {endpoint!r}: {error.strerror}; expected tcp://address:port of this machine "
            f"(port * for any), ipc://path or inproc://name"
        ) from error
    real = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(real, bytes)
    return real.rstrip(b"\0").decode()


def _answers(endpoint: str) -> bool:
    """Return True if somebody listens at this Unix socket; False for other endpoints."""
    path = endpoint.removeprefix("ipc://")
    if path in (endpoint, "*", ""):
        return False
    address = "\0" + path[1:] if path.startswith("@") else path
    with unix_socket.socket(unix_socket.AF_UNIX, unix_socket.SOCK_STREAM) as probe:
        probe.settimeout(0.0)
        try:
            probe.connect(address)
        except BlockingIOError:
            return True  # its backlog is full
        except OSError:
            return False
        return True


class WakeupEvent:
    """Event with a descriptor that any thread can make readable, with as few system calls as possible.

    A thread that adds work calls signal() afterwards; the worker calls clear(), or hold() and release(), before it
    checks for work.
    """

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.signalled = False  # the worker is certain to check for work, nothing needs to be written
        self._closed = False
        self._closing = threading.Lock()  # a closed descriptor's number may be another's by now

    def signal(self) -> None:
        if not self.signalled:
            self.signalled = True
            with self._closing:
                if not self._closed:
                    os.eventfd_write(self.descriptor, 1)

    def clear(self) -> None:
        """Make the descriptor unreadable, and the next signal() readable again."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.descriptor)
        self.signalled = False

    def hold(self) -> None:
        """Make signals cost nothing: the caller is going to check for work, also after release()."""
        self.signalled = True

    def release(self) -> None:
        self.signalled = False

    def close(self) -> None:
        with self._closing:
            if not self._closed:
                self._closed = True
                os.close(self.descriptor)


# ZeroMQ neither reconnects an inproc connection nor reports its end. So links watch their inproc endpoint, and
# listeners announce when they bind and unbind. Both happen under one lock: a link that connects after its listener was
# unbound is connected to the next one.


Watcher = Callable[[bool], None]
"""Callback with True when a listener is bound, False when unbound; in the listener's thread, so it must not block."""

_lock = threading.Lock()
_watchers: dict[tuple[int, str], list[Watcher]] = {}


def is_inproc(endpoint: str) -> bool:
    return endpoint.startswith("inproc://")


def watch(context: Context, endpoint: str, watcher: Watcher) -> None:
    """Call ``watcher`` each time that a listener at ``endpoint`` is bound or unbound from now on."""
    with _lock:
        _watchers.setdefault((context.underlying, endpoint), []).append(watcher)


def unwatch(context: Context, endpoint: str, watcher: Watcher) -> None:
    key = (context.underlying, endpoint)
    with _lock:
        watchers = _watchers.get(key, [])
        if watcher in watchers:
            watchers.remove(watcher)
        if not watchers:
            _watchers.pop(key, None)


@contextlib.contextmanager
def announced(context: Context, endpoint: str, listening: bool) -> Iterator[None]:
    """Announce the binding (or unbinding) of ``endpoint`` done in the block to its watchers.

    Nothing is announced if the block raises, or for endpoints other than inproc.
    """
    if not is_inproc(endpoint):
        yield
        return
    with _lock:
        yield
        for watcher in _watchers.get((context.underlying, endpoint), ()):
            watcher(listening)
