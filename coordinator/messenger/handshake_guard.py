"""Connections that have not shown yet who they are: few bytes for each, a short time, and only so many at once.

ZeroMQ has one limit for what comes in, which must let the largest message through, and it holds for the commands of a
handshake as well. So a thread asks the kernel how much each such connection has brought, and ends those that have
brought more than a handshake has. It holds a descriptor of its own of each: a number could be another's by then.

Who is known by now cannot be asked of ZeroMQ either, which tells of a success without saying whose. With CURVE the
kernel knows: a peer has acknowledged more than the greeting and the Welcome only if it was sent the Ready that follows,
and it sends nothing else before. Without CURVE nobody is known anyway. There as many may send much as have succeeded,
of those that are watched: nobody honest is ended, and of a flood all but as many as have come honestly in that time.
"""

from __future__ import annotations

import contextlib
import os
import socket as tcp_socket
import threading
import time
from struct import Struct

import zmq

from immortal.coordinator.messenger.limits import (
    HANDSHAKE_PLAIN_GRACE_MS,
    HANDSHAKE_POLL_MS,
    HANDSHAKE_SIZE_BYTES_MAX,
    HANDSHAKE_TIMEOUT_MS,
    HANDSHAKES_MAX,
)
from immortal.coordinator.messenger.sockets import (
    Context,
    Socket,
    WakeupEvent,
    Warnings,
    monitored_events,
    open_monitor,
)

_ACCEPTED = int(zmq.EVENT_ACCEPTED)
_SUCCEEDED = int(zmq.EVENT_HANDSHAKE_SUCCEEDED)
_OTHER_MECHANISM = int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
_SILENT = int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
_DISCONNECTED = int(zmq.EVENT_DISCONNECTED)
_MONITORED = _ACCEPTED | _SUCCEEDED | _OTHER_MECHANISM | _SILENT | _DISCONNECTED

_TCP_INFO = Struct("=120xQQ")  # bytes acknowledged, bytes received: since Linux 4.1
_BEFORE_READY_BYTES = 64 + 2 + 168  # what a CURVE server sends before its Ready: greeting, Welcome


class HandshakeGuard:
    """Watches the connections that come in at ``socket``, which is not bound yet. ``refused``: those that were ended,
    and with ``secured`` those that failed by themselves."""

    def __init__(self, context: Context, socket: Socket, address: str, secured: bool, warnings: Warnings) -> None:
        self.refused = 0
        self.endpoint = ""
        self._secured = secured
        self._warnings = warnings
        self._socket = socket
        self._monitor = open_monitor(context, socket, address, _MONITORED)
        self._unknown: dict[int, tcp_socket.socket] = {}  # by ZeroMQ's descriptor, the oldest first
        self._accepted_s: dict[int, float] = {}  # when each of these came
        self._too_much_s: dict[int, float] = {}  # when each of them was first seen to have sent too much
        self._succeeded_count = 0  # of these; without CURVE
        self._one_failed = False  # the next that ends had not succeeded
        self._ended: dict[int, tcp_socket.socket] = {}  # until ZeroMQ has noticed
        self._wake = WakeupEvent()
        self._thread = threading.Thread(target=self._run, name="handshakes", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._monitor, zmq.POLLIN)
        poller.register(self._wake.descriptor, zmq.POLLIN)
        look_due_s = 0.0
        while self._wake.descriptor not in dict(poller.poll(HANDSHAKE_POLL_MS if self._unknown else None)):
            self._take_news()
            now_s = time.monotonic()
            if self._unknown and now_s >= look_due_s:
                look_due_s = now_s + HANDSHAKE_POLL_MS / 1000
                self._look()

    def _take_news(self) -> None:
        for event, value in monitored_events(self._monitor):
            if event == _ACCEPTED:
                self._accepted(value)
            elif event == _DISCONNECTED:
                self._forget(value, succeeded=not self._one_failed)
                self._one_failed = False
            elif event == _SUCCEEDED:
                self._succeeded_count += 1
            else:
                self._one_failed = True
                if self._secured:
                    self._count("a connection was refused that has no key, or expects another one here")

    def _accepted(self, descriptor: int) -> None:
        self._forget(descriptor)
        connection = self._own(descriptor)
        if connection is not None:
            self._unknown[descriptor] = connection
            self._accepted_s[descriptor] = time.monotonic()
        if len(self._unknown) > HANDSHAKES_MAX:  # a handshake takes milliseconds: the oldest is the likeliest to idle
            self._end(next(iter(self._unknown)), f"more than {HANDSHAKES_MAX} connections have not shown who they are")

    def _own(self, descriptor: int) -> tcp_socket.socket | None:
        """The same connection under a descriptor of its own; None if it has ended by now, and the number may be of
        something else."""
        own = -1
        try:
            own = os.dup(descriptor)
            connection = tcp_socket.socket(fileno=own)
        except OSError:
            if own >= 0:
                os.close(own)
            return None
        if connection.family != tcp_socket.AF_UNIX and self.endpoint:
            with contextlib.suppress(OSError):
                if self.endpoint.endswith(f":{connection.getsockname()[1]}"):
                    return connection
        elif self.endpoint.startswith("ipc:") == (connection.family == tcp_socket.AF_UNIX):
            return connection
        connection.close()
        return None

    def _look(self) -> None:
        too_much = []
        now_s = time.monotonic()
        succeeded_s = now_s - HANDSHAKE_TIMEOUT_MS / 1000 - 1  # by then ZeroMQ has ended all others
        for descriptor, connection in list(self._unknown.items()):
            acknowledged_bytes, received_bytes = _counts(connection)
            is_known = self._secured and acknowledged_bytes > _BEFORE_READY_BYTES
            if is_known or self._accepted_s[descriptor] < succeeded_s:
                self._forget(descriptor, succeeded=True)
            elif received_bytes > HANDSHAKE_SIZE_BYTES_MAX:
                # Without CURVE a message may follow right behind, and ZeroMQ be busy with others before it.
                too_much_s = self._too_much_s.setdefault(descriptor, now_s)
                if self._secured or now_s - too_much_s >= HANDSHAKE_PLAIN_GRACE_MS / 1000:
                    too_much.append((received_bytes, descriptor))
        if too_much and not self._secured:
            self._take_news()  # of a success before they were counted
            too_much = sorted(one for one in too_much if one[1] in self._unknown)[self._succeeded_count :]
        for received_bytes, descriptor in too_much:
            self._end(
                descriptor,
                f"a connection has sent {received_bytes} bytes and not shown who it is, "
                f"{HANDSHAKE_SIZE_BYTES_MAX} are enough",
            )

    def _end(self, descriptor: int, reason: str) -> None:
        connection = self._ended[descriptor] = self._unknown.pop(descriptor)
        with contextlib.suppress(OSError):
            connection.shutdown(tcp_socket.SHUT_RDWR)
        if not self._secured:  # else ZeroMQ tells that it has failed
            self.refused += 1
        self._warnings.warn(f"at {self.endpoint}: {reason}", "ended")

    def _count(self, reason: str) -> None:
        self.refused += 1
        self._warnings.warn(f"at {self.endpoint}: {reason}")

    def _forget(self, descriptor: int, *, succeeded: bool = False) -> None:
        self._accepted_s.pop(descriptor, None)
        self._too_much_s.pop(descriptor, None)
        if (connection := self._unknown.pop(descriptor, None)) is not None:
            connection.close()
            if succeeded:
                self._succeeded_count = max(0, self._succeeded_count - 1)
        if (connection := self._ended.pop(descriptor, None)) is not None:
            connection.close()

    def close(self) -> None:
        """Watch no more. By the owner of the socket, before that is closed."""
        self._wake.signal()
        self._thread.join()
        self._wake.close()
        self._socket.disable_monitor()
        self._monitor.close()
        for descriptor in (*self._unknown, *self._ended):
            self._forget(descriptor)


def _counts(connection: tcp_socket.socket) -> tuple[int, int]:
    """(acknowledged by the other end, received from it), in bytes; (0, 0) where the kernel does not count."""
    try:
        info = connection.getsockopt(tcp_socket.IPPROTO_TCP, tcp_socket.TCP_INFO, _TCP_INFO.size)
    except OSError:  # a Unix socket: who may use it is for the file system to say
        return 0, 0
    acknowledged_bytes, received_bytes = _TCP_INFO.unpack(info)
    return acknowledged_bytes, received_bytes
