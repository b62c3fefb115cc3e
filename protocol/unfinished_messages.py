"""Limit on the bytes of an unfinished ZeroMQ message, so that no sender can fill the memory.

ZeroMQ gathers all parts of a message until the last has arrived, and tells nobody. The kernel counts the bytes that
each TCP connection has received. Bytes since the last message read are one unfinished message, once it is certain that
no whole message waits: the socket was read to its end since, or all connections had their turn (ZeroMQ delivers one
message of each in turn). So a late or stopped reader ends no connection.

Messages cost nothing while no connection has received more than SUSPICIOUS_SIZE_BYTES since its last noted message.
"""

from __future__ import annotations

import errno
import fcntl
import os
import select
import socket
import struct
import sys
import termios
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

import zmq

SUSPICIOUS_SIZE_BYTES = 2 << 20
MARGIN_SIZE_BYTES = 4 << 20  # above the largest message, for its envelope
TOGETHER = 3  # all unfinished messages together: so many of the largest messages
CHECK_MS = 5  # between two checks of a suspicious connection
PAUSE_MS = 20  # between two checks of another connection that receives bytes
STALLED_S = 1.0  # without a byte
LIMIT_READ_S = 1.0  # between two calls of ``most_bytes``

_TCP_INFO = struct.Struct("=128xQ")  # bytes received: since Linux 4.1
_MORE = select.EPOLLIN | select.EPOLLONESHOT


class _Connection:
    __slots__ = ("descriptor", "is_paused", "is_quiet", "mark", "over", "received_s", "size_bytes", "socket")

    def __init__(self, descriptor: int, duplicate: socket.socket) -> None:
        self.descriptor = descriptor  # ZeroMQ's
        self.socket = duplicate
        self.size_bytes = 0  # received so far
        self.received_s = 0.0  # time at which the last of them was seen
        self.mark = 0  # bytes received when a message was read last, or suspicion began
        self.is_paused = False  # the kernel reports the next bytes
        self.over: tuple[int, int] | None = None  # counts of drains and reads when it was first too large
        self.is_quiet = False  # True if nothing waited for the reader at the last check either

    def count_bytes(self, now_s: float) -> None:
        """Count the bytes that ZeroMQ has taken from the kernel."""
        with suppress(OSError):
            info = self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
            waiting = fcntl.ioctl(self.socket, termios.FIONREAD, bytes(4))
            size_bytes = _TCP_INFO.unpack(info)[0] - int.from_bytes(waiting, sys.byteorder)
            if size_bytes > self.size_bytes:
                self.size_bytes, self.received_s = size_bytes, now_s

    @property
    def unfinished_bytes(self) -> int:
        return self.size_bytes - self.mark


class UnfinishedMessages:
    """Watch over the connections of the ROUTER ``reader``; it ends those that bring too much of one message.

    ``usual_bytes``: size of the largest message of an honest sender. ``most_bytes``: returns that size if it can be
    larger; called only if it matters. ``warn``: receives what was ended, and why.

    The owner of the socket calls :meth:`reading` before it receives, :meth:`note` for each first part while there are
    ``suspects``, and :meth:`drained` when no message is left. One other thread calls the other methods: it waits for
    ``descriptor``, at most :meth:`wait_ms`, and calls :meth:`check`.
    """

    def __init__(
        self,
        reader: zmq.Socket[bytes],
        usual_bytes: int,
        warn: Callable[[str], None],
        most_bytes: Callable[[], int] | None = None,
    ) -> None:
        self.endpoint = ""  # of the reader, once it is known
        self.suspects: dict[int, _Connection] = {}  # by ZeroMQ's descriptor, the oldest suspicion first
        self._usual_bytes = usual_bytes
        self._most_bytes = most_bytes
        self._largest_bytes = 0  # last result of most_bytes
        self._limit_read_s = float("-inf")
        self._warn = warn
        self._is_reading = False
        self._drains = self._reads = 0
        self._noted: deque[int] = deque()  # ZeroMQ's descriptor of each message read
        self._reader = select.poll()
        self._reader.register(reader.getsockopt(zmq.FD), select.POLLIN)  # type: ignore[arg-type]
        self._connections: dict[int, _Connection] = {}  # by ZeroMQ's descriptor
        self._by_duplicate: dict[int, _Connection] = {}  # by our own
        self._calm: list[_Connection] = []  # to pause at _due_s
        self._due_s = 0.0
        self._epoll = select.epoll()
        self.descriptor = self._epoll.fileno()

    # --- the reader's ------------------------------------------------------------------------------------------------

    def reading(self) -> None:
        """Note that the owner is about to read messages."""
        self._is_reading = True

    def note(self, frame: zmq.Frame) -> None:
        """Note that a message was read, with ``frame`` as its first part."""
        self._reads += 1
        with suppress(zmq.ZMQError):  # the message came by no connection
            source = frame.get(zmq.SRCFD)
            assert isinstance(source, int)
            self._noted.append(source)

    def drained(self) -> None:
        """Note that no message is left to read."""
        self._is_reading = False
        self._drains += 1

    # --- the watching thread's ---------------------------------------------------------------------------------------

    def add(self, descriptor: int) -> None:
        """Watch an accepted connection, except a Unix socket, whose bytes the kernel does not count."""
        self.remove(descriptor)
        number = -1
        try:
            number = os.dup(descriptor)
            duplicate = socket.socket(fileno=number)
        except OSError as error:
            if number >= 0:
                os.close(number)
            elif error.errno != errno.EBADF:  # EBADF: the connection has ended
                self._refuse(descriptor, error)
            return
        with suppress(OSError):
            port = 0 if duplicate.family == socket.AF_UNIX else duplicate.getsockname()[1]
            if not port or (
                self.endpoint and not self.endpoint.endswith(f":{port}")
            ):  # or the descriptor is another connection's by now
                duplicate.close()
                return
            connection = _Connection(descriptor, duplicate)
            self._connections[descriptor] = self._by_duplicate[duplicate.fileno()] = connection
            self._epoll.register(duplicate, 0)
            self._pause(connection)

    def _refuse(self, descriptor: int, error: OSError) -> None:
        """End a connection that can't be watched."""
        with suppress(OSError):
            its = socket.socket(fileno=descriptor)
            try:
                its.shutdown(socket.SHUT_RDWR)
            finally:
                its.detach()  # ZeroMQ owns the descriptor
        self._warn(f"a connection can't be watched ({error.strerror}: 'ulimit -n' is their number)")

    def remove(self, descriptor: int) -> None:
        """Stop watching a connection; ignore an unknown one."""
        connection = self._connections.pop(descriptor, None)
        if connection is not None:
            self.suspects.pop(descriptor, None)
            del self._by_duplicate[connection.socket.fileno()]
            self._epoll.unregister(connection.socket)
            connection.socket.close()

    def _pause(self, connection: _Connection) -> None:
        if connection.socket.fileno() >= 0:
            connection.is_paused = True
            self._epoll.modify(connection.socket, _MORE)

    def wait_ms(self) -> int | None:
        """Return the time until the next check, even if nothing arrives; None: no check is due."""
        if not all(connection.is_paused for connection in self.suspects.values()):
            return CHECK_MS
        return PAUSE_MS if self._calm else None

    def check(self) -> None:
        """Check the bytes received, and end connections that have brought too much of one message."""
        drains, reads = self._drains, self._reads  # before the notes: each counted message has its note by then
        is_quiet = bool(self.suspects) and not self._is_reading and not self._reader.poll(0)
        now_s = time.monotonic()
        for _ in range(len(self._noted)):
            if (connection := self.suspects.pop(self._noted.popleft(), None)) is not None:
                connection.count_bytes(now_s)
                connection.mark, connection.over = connection.size_bytes, None
                self._calm.append(connection)
        if now_s >= self._due_s:
            self._due_s = now_s + PAUSE_MS / 1000
            calm, self._calm = self._calm, []
            for connection in calm:
                self._pause(connection)
        woken = self._epoll.poll(0)
        for descriptor, _ in woken:
            connection = self._by_duplicate[descriptor]
            connection.is_paused = False
            connection.count_bytes(now_s)
            if connection.descriptor in self.suspects:
                continue
            if connection.unfinished_bytes > SUSPICIOUS_SIZE_BYTES:
                self.suspects[connection.descriptor] = connection
                connection.count_bytes(now_s)
                connection.mark = connection.size_bytes  # nobody noted the messages that were read before
            else:
                self._calm.append(connection)
        for connection in list(self.suspects.values()):
            if not connection.is_paused:
                connection.count_bytes(now_s)
                if now_s > connection.received_s + STALLED_S:
                    self._pause(connection)
                    if not connection.unfinished_bytes:  # later bytes count from here
                        del self.suspects[connection.descriptor]
        for connection in self._too_large(now_s) if self.suspects else ():
            if connection.over is None:
                connection.over, connection.is_quiet = (self._drains, self._reads), False
            elif (
                drains >= connection.over[0] + 2  # the second began after the bytes were counted
                or reads > connection.over[1] + 2 * len(self._connections)
                or (is_quiet and connection.is_quiet)
            ):
                self._end(connection)
            else:
                connection.is_quiet = is_quiet
        if woken:
            time.sleep(CHECK_MS / 1000)  # gathers bytes of other connections for one check

    def _too_large(self, now_s: float) -> list[_Connection]:
        """Return the suspects with too large an unfinished message, alone or with all others together."""
        suspects = list(reversed(self.suspects.values()))
        limit_bytes = self._usual_bytes + MARGIN_SIZE_BYTES
        left_bytes = sum(connection.unfinished_bytes for connection in suspects)
        if self._most_bytes is not None and left_bytes > limit_bytes:
            if now_s >= self._limit_read_s + LIMIT_READ_S:
                self._limit_read_s, self._largest_bytes = now_s, self._most_bytes()
            limit_bytes = max(self._usual_bytes, self._largest_bytes) + MARGIN_SIZE_BYTES
        found = []
        for connection in sorted(suspects, key=lambda each: not each.is_paused):  # stalled ones, then the newest
            if connection.unfinished_bytes > limit_bytes or left_bytes > TOGETHER * limit_bytes:
                found.append(connection)
                left_bytes -= connection.unfinished_bytes
            else:
                connection.over = None
        return found

    def _end(self, connection: _Connection) -> None:
        del self.suspects[connection.descriptor]
        origin = "a connection"
        with suppress(OSError):
            origin = f"{connection.socket.getpeername()[0]}:{connection.socket.getpeername()[1]}"
            connection.socket.shutdown(socket.SHUT_RDWR)
        self._warn(
            f"{origin} has brought {connection.unfinished_bytes >> 20} MiB of a message without an end, "
            f"more than one may have"
        )

    def close(self) -> None:
        """Stop watching all connections."""
        for descriptor in list(self._connections):
            self.remove(descriptor)
        self._epoll.close()
