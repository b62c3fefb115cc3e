"""Control server of a running coordinator: a Unix socket for its own user and root. Its format: operator/control.py.

connected --a complete question--> asked --the answer--> answered --all of it sent--> closed
          --anything else, or too slow----------------> closed

The kernel decides who may ask: the socket's file has mode 0600, and each connection has credentials (SO_PEERCRED). A
secret in a file beside it would only prove that its bearer can read that file, which is the same user. Nothing here
blocks: all sockets share one descriptor, and each connection has limits on time and size.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct, field

from immortal.coordinator.config.socket_addresses import secure_folder, short_path
from immortal.coordinator.operator.control import (
    ANSWER_SIZE_BYTES_MAX,
    LENGTH_PREFIX_SIZE_BYTES,
    QUESTION_SIZE_BYTES_MAX,
    SOCKET_FILE_NAME,
    ControlError,
    Question,
    add_length_prefix,
    socket_path,
)
from immortal.protocol import decoding
from immortal.protocol.files import make_folder

CONNECTIONS_MAX = 16  # at once: commands of one operator, and the metrics
QUESTION_TIMEOUT_S = 5.0  # for a whole question
ANSWER_TIMEOUT_S = 60.0  # from then on, until the answer is read: the change must reach the disk first
_BACKLOG_MAX = 32  # connections that the kernel queues while we wait for a commit
_CREDENTIALS = struct.Struct("3i")  # struct ucred: process, user, group
_NO_SOCKETS_ERRORS = (errno.EPERM, errno.EOPNOTSUPP)  # errors of file systems that can't have sockets

_decode = decoding.JsonDecoder(Question).decode


class ControlRequest(Struct, eq=False):
    """Request of an operator, to be answered once. ``uid``, ``pid``: of the process that asks, as the kernel says."""

    verb: str
    argument: bytes  # JSON
    uid: int
    pid: int
    _queue_answer: Callable[[bytes], None]

    def answer(self, answer: object) -> None:
        """Send ``answer`` as JSON, unless the asking process is gone."""
        data = json.dumps(answer).encode()
        if len(data) > ANSWER_SIZE_BYTES_MAX:
            problem = f"the answer has {len(data)} bytes, more than {ANSWER_SIZE_BYTES_MAX}"
            data = json.dumps({"denied": problem}).encode()
        self._queue_answer(data)


class _Connection(Struct, eq=False):
    socket: socket.socket
    uid: int
    pid: int
    closes_ns: int
    received: bytearray = field(default_factory=bytearray)
    has_question: bool = False
    unsent: memoryview | None = None


class ControlServer:
    """Server of the control socket. Call :meth:`process` when :meth:`fileno` is readable, and at its deadline."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._epoll = select.epoll()
        self._listening: socket.socket | None = None
        self._path = socket_path(folder)
        self._inode = 0
        self._connections: dict[int, _Connection] = {}  # by descriptor, the oldest first

    def fileno(self) -> int:
        return self._epoll.fileno()

    def listen(self) -> Path:
        """Begin to listen; return the socket's path. The caller holds the lock of the log: an older file is replaced.

        If the folder can't have a socket, or its path is too long for one, the socket is in a folder with a short path
        (immortal.coordinator.config.socket_addresses). Raises ControlError.
        """
        try:
            make_folder(self._folder)
            try:
                self._listening = _listen(self._path)
            except OSError as error:
                if error.errno not in _NO_SOCKETS_ERRORS:
                    raise
                self._path = short_path(self._folder, SOCKET_FILE_NAME)
                self._listening = _listen(self._path)
            self._inode = self._path.stat().st_ino
        except OSError as error:
            reason = error.strerror or str(error)
            raise ControlError(f"can't be asked at {self._path}: {reason}; make room for it there") from None
        self._epoll.register(self._listening.fileno(), select.EPOLLIN)
        return self._path

    def next_deadline_ns(self) -> int | None:
        """Return the time (monotonic clock, ns) at which :meth:`process` must run even if no socket is ready."""
        if not self._connections:
            return None
        return min(connection.closes_ns for connection in self._connections.values())

    def process(self) -> list[ControlRequest]:
        """Serve the ready connections and close those whose time is up; return the complete requests."""
        questions: list[ControlRequest] = []
        for descriptor, mask in self._epoll.poll(0):
            if self._listening is not None and descriptor == self._listening.fileno():
                self._accept(self._listening)
            elif (connection := self._connections.get(descriptor)) is not None:
                if connection.unsent is not None:
                    self._send(connection)
                elif not connection.has_question:
                    questions += self._receive(connection)
                elif mask & (select.EPOLLHUP | select.EPOLLERR):
                    self._close(connection)
        now_ns = time.monotonic_ns()
        for connection in [one for one in self._connections.values() if now_ns >= one.closes_ns]:
            self._close(connection)
        return questions

    def close(self) -> None:
        for connection in list(self._connections.values()):
            self._close(connection)
        if self._listening is not None:
            self._listening.close()
            self._remove()
        self._epoll.close()

    def _accept(self, listening: socket.socket) -> None:
        try:
            accepted, _ = listening.accept()
        except OSError:
            return
        credentials = accepted.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, uid, _ = _CREDENTIALS.unpack(credentials)
        if uid not in (os.geteuid(), 0):  # the modes of file and folder were changed by hand
            accepted.close()
            return
        accepted.setblocking(False)
        connection = _Connection(accepted, uid, pid, _deadline_ns(QUESTION_TIMEOUT_S))
        if len(self._connections) >= CONNECTIONS_MAX:
            silent = next((one for one in self._connections.values() if not one.has_question), None)
            if silent is None:
                accepted.close()
                return
            self._close(silent)  # an honest question arrives at once: a connection without one is dropped first
        self._connections[accepted.fileno()] = connection
        self._epoll.register(accepted.fileno(), select.EPOLLIN)

    def _receive(self, connection: _Connection) -> list[ControlRequest]:
        received = connection.received
        try:
            data = connection.socket.recv(LENGTH_PREFIX_SIZE_BYTES + QUESTION_SIZE_BYTES_MAX + 1 - len(received))
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        received += data
        size_bytes = int.from_bytes(received[:LENGTH_PREFIX_SIZE_BYTES], "little")
        if not data:
            self._close(connection)
        elif len(received) < LENGTH_PREFIX_SIZE_BYTES:
            pass
        elif size_bytes > QUESTION_SIZE_BYTES_MAX:
            problem = f"a question has at most {QUESTION_SIZE_BYTES_MAX} bytes, this one has {size_bytes}"
            self._deny(connection, f"{problem}; an 'immortal' of another version may ask in another way")
        elif len(received) > LENGTH_PREFIX_SIZE_BYTES + size_bytes:
            self._deny(connection, "there is one question in a connection, and something came behind it")
        elif len(received) == LENGTH_PREFIX_SIZE_BYTES + size_bytes:
            try:
                question = _decode(bytes(received[LENGTH_PREFIX_SIZE_BYTES:]))
            except decoding.DecodeError as error:
                self._deny(connection, f"the question can't be read: {error}")
            else:
                return [self._create_request(connection, question)]
        return []

    def _create_request(self, connection: _Connection, question: Question) -> ControlRequest:
        connection.has_question = True
        connection.received = bytearray()
        connection.closes_ns = _deadline_ns(ANSWER_TIMEOUT_S)
        self._epoll.modify(connection.socket.fileno(), 0)  # wait only for its end

        def send_answer(data: bytes) -> None:
            if self._connections.get(connection.socket.fileno()) is connection:
                self._queue_answer(connection, data)

        return ControlRequest(question.verb, bytes(question.argument), connection.uid, connection.pid, send_answer)

    def _deny(self, connection: _Connection, reason: str) -> None:
        connection.has_question = True
        self._queue_answer(connection, json.dumps({"denied": reason}).encode())

    def _queue_answer(self, connection: _Connection, data: bytes) -> None:
        connection.unsent = memoryview(add_length_prefix(data))
        self._epoll.modify(connection.socket.fileno(), select.EPOLLOUT)
        self._send(connection)

    def _send(self, connection: _Connection) -> None:
        if connection.unsent is None:
            return
        try:
            connection.unsent = connection.unsent[connection.socket.send(connection.unsent) :]
        except BlockingIOError:
            return
        except OSError:
            self._close(connection)
            return
        if not connection.unsent:
            self._close(connection)

    def _close(self, connection: _Connection) -> None:
        descriptor = connection.socket.fileno()
        del self._connections[descriptor]
        self._epoll.unregister(descriptor)
        connection.socket.close()

    def _remove(self) -> None:
        """Remove the socket's file, unless it is another process's by now."""
        with contextlib.suppress(OSError):
            if self._path.stat().st_ino == self._inode:
                self._path.unlink()


def _listen(path: Path) -> socket.socket:
    """Return a non-blocking listening socket that only its owner can connect to. Raises OSError.

    The socket's file gets its final name only after its mode was set.
    """
    secure_folder(path)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    partial = path.with_name(f".{path.name}")
    try:
        partial.unlink(missing_ok=True)
        listening.bind(str(partial))
        partial.chmod(0o600)  # nobody can connect before it listens
        listening.listen(_BACKLOG_MAX)
        partial.replace(path)
    except BaseException:
        listening.close()
        partial.unlink(missing_ok=True)
        raise
    listening.setblocking(False)
    return listening


def _deadline_ns(delay_s: float) -> int:
    return time.monotonic_ns() + int(delay_s * 1e9)
