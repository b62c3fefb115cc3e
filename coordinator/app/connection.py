"""The connection with the app: what is to be sent waits here, and nothing here blocks."""

from __future__ import annotations

import contextlib
import select
import socket
from collections import deque

from immortal.protocol.app_proof import channel_of

RECEIVE_SIZE_BYTES = 256 << 10
BUFFERS_PER_SEND = 64
GONE = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR


class AppConnection:
    """A socket for each direction, or one for both."""

    def __init__(self, receiver: socket.socket, sender: socket.socket | None = None) -> None:
        """``receiver`` brings what the app sends. ``sender`` takes what is for it; without one, ``receiver`` does.

        Both do not block.
        """
        self._receiver = receiver
        self._sender = sender or receiver
        self.receiver_fileno = self._receiver.fileno()
        self.sender_fileno = self._sender.fileno()
        self.has_two_sockets = self._sender is not self._receiver
        self._waiting: deque[bytes | memoryview] = deque()
        self.closing = False  # close when all is sent

    @property
    def is_owners(self) -> bool:
        """It came by a Unix socket: only who owns that can connect to it."""
        return self._receiver.family == socket.AF_UNIX

    @property
    def has_waiting(self) -> bool:
        return bool(self._waiting)

    @property
    def channel(self) -> str:
        """As :func:`immortal.protocol.app_proof.channel_of`. Raises OSError where the app is gone."""
        return channel_of(self._receiver.getpeername(), self._receiver.getsockname())

    def receive(self, size_bytes_max: int = RECEIVE_SIZE_BYTES) -> bytes | None:
        """What has come in; b"" at the end of the connection, None if there is nothing now."""
        try:
            return self._receiver.recv(size_bytes_max)
        except BlockingIOError:
            return None
        except OSError:
            return b""

    def peek_sender(self) -> bytes | None:
        """As :meth:`receive`, of what should never come: something that the app sends where it is only sent to."""
        try:
            return self._sender.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return None
        except OSError:
            return b""

    def send(self, data: bytes | memoryview) -> None:
        self._waiting.append(data)

    def flush(self) -> int:
        """Hand to the socket what it takes now; how many bytes that were. A lost connection shows elsewhere."""
        waiting = self._waiting
        total = 0
        while waiting:
            try:
                if len(waiting) == 1:
                    sent = self._sender.send(waiting[0])
                else:
                    sent = self._sender.sendmsg(
                        [waiting[index] for index in range(min(len(waiting), BUFFERS_PER_SEND))]
                    )
            except BlockingIOError:
                break
            except OSError:
                waiting.clear()
                break
            total += sent
            while waiting and sent >= len(waiting[0]):
                sent -= len(waiting.popleft())
            if sent:
                waiting[0] = memoryview(waiting[0])[sent:]
                break
        return total

    def interest(self, *, reading: bool) -> dict[int, int]:
        """What to poll for, by descriptor. ``reading``: there is room for what the app sends."""
        # RDHUP always: an app that dies while it is not read must make room for the next one.
        receive = select.EPOLLRDHUP | (select.EPOLLIN if reading and not self.closing else 0)
        send = select.EPOLLOUT if self._waiting else 0
        if not self.has_two_sockets:
            return {self._receiver.fileno(): receive | send}
        return {
            self._receiver.fileno(): receive,
            self._sender.fileno(): select.EPOLLRDHUP | select.EPOLLIN | send,
        }

    def end_sending(self) -> None:
        """The app finds the end behind what was sent; what it sends itself can still be read."""
        with contextlib.suppress(OSError):
            self._sender.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._receiver.close()
        self._sender.close()
