"""The socket to the app: what is to be sent waits here, and nothing here blocks."""

from __future__ import annotations

import socket
from collections import deque

from protocol.errors import ImmortalError

RECEIVE_SIZE_BYTES = 256 << 10
SOCKET_BUFFER_SIZE_BYTES = 1 << 20
BUFFERS_PER_SEND = 64


class AppListenError(ImmortalError):
    """The address for the app can't be had."""


def listen(host: str, port: int, instance: str) -> socket.socket:
    """A non-blocking listening socket. Raises AppListenError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(8)
    except OSError as error:
        listener.close()
        raise AppListenError(
            f"can't listen for the app of {instance!r} at {host}:{port}: {error.strerror}; stop what uses this port, "
            f"or choose another one (app_port in the instance's settings)"
        ) from None
    listener.setblocking(False)
    return listener


class AppConnection:
    """One accepted connection."""

    def __init__(self, accepted: socket.socket) -> None:
        accepted.setblocking(False)
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            accepted.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER_SIZE_BYTES)
        self._socket = accepted
        self._waiting: deque[bytes | memoryview] = deque()
        self.closing = False  # close when all is sent

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def has_waiting(self) -> bool:
        return bool(self._waiting)

    def receive(self) -> bytes | None:
        """What has come in; b"" at the end of the connection, None if there is nothing now."""
        try:
            return self._socket.recv(RECEIVE_SIZE_BYTES)
        except BlockingIOError:
            return None
        except OSError:
            return b""

    def send(self, data: bytes | memoryview) -> None:
        self._waiting.append(data)

    def flush(self) -> int:
        """Hand to the socket what it takes now; how many bytes that were. A lost connection shows in receive()."""
        waiting = self._waiting
        total = 0
        while waiting:
            buffers = [waiting[index] for index in range(min(len(waiting), BUFFERS_PER_SEND))]
            try:
                sent = self._socket.sendmsg(buffers)
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

    def close(self) -> None:
        self._socket.close()
