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
LOOK_MS = 5  # between two checks of a suspicious connection
PAUSE_MS = 20  # between two checks of another connection that receives bytes
STALLED_S = 1.0  # without a byte
ASK_S = 1.0  # between two calls of ``most_bytes``

_TCP_INFO = struct.Struct("=128xQ")  # bytes received: since Linux 4.1
_MORE = select.EPOLLIN | select.EPOLLONESHOT


class _Connection:
    __slots__ = ("came_s", "descriptor", "is_paused", "is_quiet", "mark", "over", "size_bytes", "socket")

    def __init__(self, descriptor: int, own: socket.socket) -> None:
        self.descriptor = descriptor  # ZeroMQ's
        self.socket = own
        self.size_bytes = 0  # received so far
        self.came_s = 0.0  # time at which the last of them was seen
        self.mark = 0  # bytes received when a message was read last, or suspicion began
        self.is_paused = False  # the kernel reports the next bytes
        self.over: tuple[int, int] | None = None  # counts of drains and reads when it was first too large
        self.is_quiet = False  # True if nothing waited for the reader at the last check either

    def look(self, now_s: float) -> None:
        """Count the bytes that ZeroMQ has taken from the kernel."""
        with suppress(OSError):
            info = self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
            waiting = fcntl.ioctl(self.socket, termios.FIONREAD, bytes(4))
            size_bytes = _TCP_INFO.unpack(info)[0] - int.from_bytes(waiting, sys.byteorder)
            if size_bytes > self.size_bytes:
                self.size_bytes, self.came_s = size_bytes, now_s

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
        self._most = 0  # last result of most_bytes
        self._asked_s = float("-inf")
        self._warn = warn
        self._is_reading = False
        self._drains = self._reads = 0
        self._noted: deque[int] = deque()  # ZeroMQ's descriptor of each message read
        self._reader = select.poll()
        self._reader.register(reader.getsockopt(zmq.FD), select.POLLIN)  # type: ignore[arg-type]
        self._connections: dict[int, _Connection] = {}  # by ZeroMQ's descriptor
        self._own: dict[int, _Connection] = {}  # by our own
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
            own = socket.socket(fileno=number)
        except OSError as error:
            if number >= 0:
                os.close(number)
            elif error.errno != errno.EBADF:  # EBADF: the connection has ended
                self._refuse(descriptor, error)
            return
        with suppress(OSError):
            port = 0 if own.family == socket.AF_UNIX else own.getsockname()[1]
            if not port or (
                self.endpoint and not self.endpoint.endswith(f":{port}")
            ):  # or the descriptor is another connection's by now
                own.close()
                return
            self._connections[descriptor] = self._own[own.fileno()] = one = _Connection(descriptor, own)
            self._epoll.register(own, 0)
            self._pause(one)

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
        one = self._connections.pop(descriptor, None)
        if one is not None:
            self.suspects.pop(descriptor, None)
            del self._own[one.socket.fileno()]
            self._epoll.unregister(one.socket)
            one.socket.close()

    def _pause(self, one: _Connection) -> None:
        if one.socket.fileno() >= 0:
            one.is_paused = True
            self._epoll.modify(one.socket, _MORE)

    def wait_ms(self) -> int | None:
        """Return the time until the next check, even if nothing arrives; None: no check is due."""
        if not all(one.is_paused for one in self.suspects.values()):
            return LOOK_MS
        return PAUSE_MS if self._calm else None

    def check(self) -> None:
        """Check the bytes received, and end connections that have brought too much of one message."""
        drains, reads = self._drains, self._reads  # before the notes: each counted message has its note by then
        is_quiet = bool(self.suspects) and not self._is_reading and not self._reader.poll(0)
        now_s = time.monotonic()
        for _ in range(len(self._noted)):
            if (one := self.suspects.pop(self._noted.popleft(), None)) is not None:
                one.look(now_s)
                one.mark, one.over = one.size_bytes, None
                self._calm.append(one)
        if now_s >= self._due_s:
            self._due_s = now_s + PAUSE_MS / 1000
            calm, self._calm = self._calm, []
            for one in calm:
                self._pause(one)
        woken = self._epoll.poll(0)
        for descriptor, _ in woken:
            one = self._own[descriptor]
            one.is_paused = False
            one.look(now_s)
            if one.descriptor in self.suspects:
                continue
            if one.unfinished_bytes > SUSPICIOUS_SIZE_BYTES:
                self.suspects[one.descriptor] = one
                one.look(now_s)
                one.mark = one.size_bytes  # nobody noted the messages that were read before
            else:
                self._calm.append(one)
        for one in list(self.suspects.values()):
            if not one.is_paused:
                one.look(now_s)
                if now_s > one.came_s + STALLED_S:
                    self._pause(one)
                    if not one.unfinished_bytes:  # later bytes count from here
                        del self.suspects[one.descriptor]
        for one in self._too_large(now_s) if self.suspects else ():
            if one.over is None:
                one.over, one.is_quiet = (self._drains, self._reads), False
            elif (
                drains >= one.over[0] + 2  # the second began after the bytes were counted
                or reads > one.over[1] + 2 * len(self._connections)
                or (is_quiet and one.is_quiet)
            ):
                self._end(one)
            else:
                one.is_quiet = is_quiet
        if woken:
            time.sleep(LOOK_MS / 1000)  # gathers bytes of other connections for one check

    def _too_large(self, now_s: float) -> list[_Connection]:
        """Return the suspects with too large an unfinished message, alone or with all others together."""
        suspects = list(reversed(self.suspects.values()))
        limit_bytes = self._usual_bytes + MARGIN_SIZE_BYTES
        left_bytes = sum(one.unfinished_bytes for one in suspects)
        if self._most_bytes is not None and left_bytes > limit_bytes:
            if now_s >= self._asked_s + ASK_S:
                self._asked_s, self._most = now_s, self._most_bytes()
            limit_bytes = max(self._usual_bytes, self._most) + MARGIN_SIZE_BYTES
        found = []
        for one in sorted(suspects, key=lambda one: not one.is_paused):  # stalled ones, then the newest
            if one.unfinished_bytes > limit_bytes or left_bytes > TOGETHER * limit_bytes:
                found.append(one)
                left_bytes -= one.unfinished_bytes
            else:
                one.over = None
        return found

    def _end(self, one: _Connection) -> None:
        del self.suspects[one.descriptor]
        origin = "a connection"
        with suppress(OSError):
            origin = f"{one.socket.getpeername()[0]}:{one.socket.getpeername()[1]}"
            one.socket.shutdown(socket.SHUT_RDWR)
        self._warn(
            f"{origin} has brought {one.unfinished_bytes >> 20} MiB of a message without an end, more than one may have"
        )

    def close(self) -> None:
        """Stop watching all connections."""
        for descriptor in list(self._connections):
            self.remove(descriptor)
        self._epoll.close()
