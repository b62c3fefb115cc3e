"""Sockets of the app: its connection, the listener that accepts it, the dialer for an app that listens itself."""

from __future__ import annotations

import contextlib
import enum
import errno
import os
import select
import socket
import stat
import time
from collections import deque
from collections.abc import Mapping, Sequence, Set
from pathlib import Path

from immortal.coordinator.config import AppSendMode, InstanceSettings
from immortal.coordinator.config.socket_addresses import UNIX, family_of, host_port, hosts_of, secure_folder
from immortal.coordinator.notices import Notices
from immortal.protocol.app_handshake import channel_of
from immortal.protocol.errors import ImmortalError

RECEIVE_SIZE_BYTES = 256 << 10
BUFFERS_PER_SEND = 64
GONE = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR


class AppConnection:
    """Connection to the app: a socket for each direction, or one for both."""

    def __init__(self, receiver: socket.socket, sender: socket.socket | None = None) -> None:
        """Own non-blocking sockets: ``receiver``, to read from, and ``sender`` (None: ``receiver``), to write to."""
        self._receiver = receiver
        self._sender = sender or receiver
        self.receiver_fileno = self._receiver.fileno()
        self.sender_fileno = self._sender.fileno()
        self.has_two_sockets = self._sender is not self._receiver
        self._waiting: deque[bytes | memoryview] = deque()
        self.closing = False  # close when all is sent

    @property
    def is_unix(self) -> bool:
        """True for a Unix socket, to which only its owner can connect."""
        return self._receiver.family == socket.AF_UNIX

    @property
    def has_waiting(self) -> bool:
        return bool(self._waiting)

    @property
    def channel(self) -> str:
        """Channel name, see :func:`immortal.protocol.app_handshake.channel_of`. Raises OSError if the app is gone."""
        return channel_of(self._receiver.getpeername(), self._receiver.getsockname())

    def receive(self, size_bytes_max: int = RECEIVE_SIZE_BYTES) -> bytes | None:
        """Read received bytes; return b"" at the end of the connection, None if there are no bytes now."""
        return _received(self._receiver, size_bytes_max)

    def peek_sender(self) -> bytes | None:
        """Peek at the sending socket, on which the app must not send; the result is as of :meth:`receive`."""
        return _received(self._sender, 1, socket.MSG_PEEK)

    def send(self, data: bytes | memoryview) -> None:
        self._waiting.append(data)

    def flush(self) -> int:
        """Write as much as the socket takes now; return the number of bytes. receive() notices a lost connection."""
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
        """Return the epoll masks by descriptor. ``reading``: True if there is room for data from the app."""
        # RDHUP always: an app that dies while nobody reads from it must make room for the next one.
        receive = select.EPOLLRDHUP | (select.EPOLLIN if reading and not self.closing else 0)
        send = select.EPOLLOUT if self._waiting else 0
        if not self.has_two_sockets:
            return {self._receiver.fileno(): receive | send}
        return {
            self._receiver.fileno(): receive,
            self._sender.fileno(): select.EPOLLRDHUP | select.EPOLLIN | send,
        }

    def end_sending(self) -> None:
        """Close the sending direction: the app reads all sent bytes, then the end, and can still send."""
        with contextlib.suppress(OSError):
            self._sender.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._receiver.close()
        self._sender.close()


def _received(connected: socket.socket, size_bytes_max: int, flags: int = 0) -> bytes | None:
    try:
        return connected.recv(size_bytes_max, flags)
    except BlockingIOError:
        return None
    except OSError:
        return b""


ATTEMPT_TIMEOUT_S = 5.0  # a loopback answers at once; another address may never answer
RETRY_PAUSE_S_MIN, RETRY_PAUSE_S_MAX = 0.01, 0.25


class AppDialer:
    """Dialer for an app that listens at ``port``: tries ``hosts`` in turn until one accepts. Never blocks."""

    def __init__(self, hosts: Sequence[str], port: int, log: Notices, epoll: select.epoll) -> None:
        self._hosts = hosts
        self._port = port
        self._log = log
        self._epoll = epoll
        self._attempts = 0
        self._attempt: socket.socket | None = None
        self._pause_s = RETRY_PAUSE_S_MIN
        self._due_ns = 0  # the next attempt, or the end of the current one

    def next_deadline_ns(self) -> int:
        """Return the time (monotonic clock, ns) at which :meth:`process` must run again."""
        return self._due_ns

    def process(self, ready: Mapping[int, int]) -> socket.socket | None:
        """Begin an attempt, or check the current one; return the socket when it is connected, else None."""
        attempt = self._attempt
        if attempt is not None and attempt.fileno() in ready:
            self._forget_attempt()
            return self._outcome(attempt, attempt.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
        if time.monotonic_ns() < self._due_ns:
            return None
        if attempt is not None:
            self._forget_attempt()
            return self._outcome(attempt, errno.ETIMEDOUT)
        try:
            attempt = socket.socket(family_of(self._host), socket.SOCK_STREAM)
        except OSError:  # no descriptor is left; there may be one later
            self._wait(RETRY_PAUSE_S_MAX)
            return None
        attempt.setblocking(False)
        try:
            error = attempt.connect_ex((self._host, self._port))
        except OSError:  # a host name that can't be resolved
            error = errno.EHOSTUNREACH
        if error != errno.EINPROGRESS:
            return self._outcome(attempt, error)
        self._attempt = attempt
        self._epoll.register(attempt.fileno(), select.EPOLLOUT)
        self._wait(ATTEMPT_TIMEOUT_S)
        return None

    def close(self) -> None:
        attempt = self._attempt
        if attempt is not None:
            self._forget_attempt()
            attempt.close()

    @property
    def _host(self) -> str:
        return self._hosts[self._attempts % len(self._hosts)]

    def _outcome(self, attempt: socket.socket, error: int) -> socket.socket | None:
        if not error and not _is_self_connection(attempt):
            return attempt
        attempt.close()
        if not self._attempts:
            where = host_port(self._host, self._port)
            self._log.info("the app is not listening yet; connecting until it is", at=where)
        self._attempts += 1
        self._wait(self._pause_s)
        self._pause_s = min(2 * self._pause_s, RETRY_PAUSE_S_MAX)
        return None

    def _forget_attempt(self) -> None:
        if self._attempt is not None:
            self._epoll.unregister(self._attempt.fileno())
            self._attempt = None

    def _wait(self, pause_s: float) -> None:
        self._due_ns = time.monotonic_ns() + int(pause_s * 1e9)


def _is_self_connection(connected: socket.socket) -> bool:
    # Without a listener, a connection to a port that the system picks for outgoing ones may meet itself.
    try:
        return bool(connected.getsockname() == connected.getpeername())
    except OSError:
        return True  # it is gone again


# An app connects by one socket, or by a pair:
#
#     one port, a Unix socket     the app connects
#     two ports, mode "connect"   the app connects to both, in any order
#     two ports, mode "listen"    the app connects to the first, and listens at the second, to which we connect
#
# A socket that lacks its counterpart is watched: an app that dies at that stage makes room for the next one.


SOCKET_BUFFER_SIZE_BYTES = 1 << 20
BACKLOG_MAX = 128  # connections in the kernel's queue: strangers must not fill it while we wait for a commit


class AppListenError(ImmortalError):
    """Raised if the coordinator can't listen at the app's address."""


class SocketRole(enum.Enum):
    """Direction of a socket, as the coordinator sees it; the value is the name of its port's setting."""

    RECEIVE = "app_port"
    SEND = "app_send_port"


class AppListener:
    """Listener for the apps of one instance. Its sockets are registered with ``epoll``."""

    def __init__(self, settings: InstanceSettings, log: Notices, epoll: select.epoll) -> None:
        self._settings = settings
        self._dials = settings.app_send_port is not None and settings.app_send_mode is AppSendMode.LISTEN
        self._log = log
        self._epoll = epoll
        self._listening: deque[tuple[SocketRole, socket.socket]] = deque()
        self._unix_file: tuple[Path, int] | None = None  # its path and inode
        self._accepted: dict[SocketRole, socket.socket] = {}  # of an app whose other socket is missing
        self._dialer: AppDialer | None = None

    def listen(self) -> None:
        """Listen at all addresses of the settings. Raises AppListenError."""
        settings = self._settings
        ports = {} if settings.app_port is None else {SocketRole.RECEIVE: settings.app_port}
        if settings.app_send_port is not None and not self._dials:
            ports[SocketRole.SEND] = settings.app_send_port
        for role, port in ports.items():
            for host in hosts_of(settings.app_host):
                self._add_listening(role, listen(host, port, settings.name, role.value))
        if settings.app_unix_address is not None:
            path = Path(settings.app_unix_address.removeprefix(UNIX))
            own = settings.app_socket is None  # a folder that the operator chose is not created or secured here
            self._add_listening(SocketRole.RECEIVE, listen_unix(path, settings.name, secure=own))
            self._unix_file = path, path.stat().st_ino

    def _add_listening(self, role: SocketRole, listening: socket.socket) -> None:
        self._listening.append((role, listening))
        self._epoll.register(listening.fileno(), select.EPOLLIN)

    def next_deadline_ns(self) -> int | None:
        """Return the time (monotonic clock, ns) at which :meth:`process` must run even if no socket is ready."""
        return None if self._dialer is None else self._dialer.next_deadline_ns()

    def process(self, ready: Mapping[int, int], *, has_app: bool) -> AppConnection | None:
        """Accept sockets of apps; return the connection of an app when it is complete, else None.

        ``ready``: epoll masks by descriptor. ``has_app``: True if an app is connected, so that others are refused.
        """
        self._drop_accepted({role for role, one in self._accepted.items() if one.fileno() in ready})
        for role, listening in list(self._listening):
            if listening.fileno() in ready:
                self._accept(role, listening, has_app)
                if self._settings.app_send_port is None and self._accepted:
                    # Accept one app at a time, taking the sockets in turn: other connections wait for the next call.
                    self._listening.rotate(-1 - self._listening.index((role, listening)))
                    break
        if self._dialer is not None and (dialed := self._dialer.process(ready)) is not None:
            self._dialer = None
            self._add_accepted(SocketRole.SEND, dialed)
        return self._complete()

    def close(self) -> None:
        self._drop_accepted(set(self._accepted))
        for _, listening in self._listening:
            listening.close()
        self._listening.clear()
        if self._unix_file is not None:
            path, inode = self._unix_file
            if path.exists() and path.stat().st_ino == inode:
                path.unlink()
            self._unix_file = None

    def _accept(self, role: SocketRole, listening: socket.socket, has_app: bool) -> None:
        try:
            accepted, address = listening.accept()
        except OSError:
            return
        if has_app or role in self._accepted:
            self._log.warning("a second app was turned away: one is connected", kind="second app")
            accepted.close()
            return
        self._add_accepted(role, accepted)
        port = self._settings.app_send_port
        if self._dials and port is not None:
            # Most likely the app listens at the address that it connects from; if not, at the other loopback.
            hosts = dict.fromkeys((address[0], *hosts_of(self._settings.app_host)))
            self._dialer = AppDialer(list(hosts), port, self._log, self._epoll)

    def _add_accepted(self, role: SocketRole, accepted: socket.socket) -> None:
        prepare(accepted)
        self._accepted[role] = accepted
        self._epoll.register(accepted.fileno(), select.EPOLLRDHUP)

    def _complete(self) -> AppConnection | None:
        if self._settings.app_send_port is not None and len(self._accepted) == len(SocketRole):
            # Sockets of dead apps from the backlog must not be paired with those of a living one.
            self._drop_accepted({role for role, one in self._accepted.items() if _is_disconnected(one)})
        receiver, sender = self._accepted.get(SocketRole.RECEIVE), self._accepted.get(SocketRole.SEND)
        if receiver is None or (sender is None and self._settings.app_send_port is not None):
            return None
        for one in self._accepted.values():
            self._epoll.unregister(one.fileno())
        self._accepted.clear()
        return AppConnection(receiver, sender)

    def _drop_accepted(self, roles: Set[SocketRole]) -> None:
        if not roles:
            return
        for role in set(self._accepted) if self._dials else roles:  # if we dial the second one, both belong to one app
            dropped = self._accepted.pop(role)
            self._epoll.unregister(dropped.fileno())
            dropped.close()
        if self._dialer is not None:
            self._dialer.close()
            self._dialer = None


def prepare(accepted: socket.socket) -> None:
    """Set the options of an accepted socket: non-blocking, no Nagle delay, buffers for a batch."""
    accepted.setblocking(False)
    if accepted.family != socket.AF_UNIX:
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        accepted.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER_SIZE_BYTES)


def _is_disconnected(one: socket.socket) -> bool:
    poller = select.poll()
    poller.register(one, select.POLLRDHUP)
    return bool(poller.poll(0))


def listen(host: str, port: int, instance: str, setting: str) -> socket.socket:
    """Return a non-blocking listening socket. ``setting``: the name of its port's setting. Raises AppListenError."""
    listening = socket.socket(family_of(host), socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(BACKLOG_MAX)
    except OSError as error:
        listening.close()
        raise AppListenError(
            f"can't listen for the app of {instance!r} at {host_port(host, port)}: {error.strerror}; stop what uses "
            f"this port, or choose another one ({setting} in the instance's settings)"
        ) from None
    listening.setblocking(False)
    return listening


def listen_unix(path: Path, instance: str, *, secure: bool = False) -> socket.socket:
    """Return a non-blocking listening Unix socket that only its owner can connect to. Raises AppListenError.

    Replace the socket file of a dead coordinator. ``secure``: create the file's folder, and secure it.
    """
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if secure:
            secure_folder(path)
        _remove_stale(path)
        listening.bind(str(path))
        path.chmod(0o600)  # nobody can connect before it listens
        listening.listen(BACKLOG_MAX)
    except OSError as error:
        listening.close()
        reason = error.strerror or (os.strerror(error.errno) if error.errno else str(error))
        raise AppListenError(
            f"can't listen for the app of {instance!r} at {UNIX}{path}: {reason}; make room for it there, or choose "
            f"another path (app_socket in the instance's settings)"
        ) from None
    listening.setblocking(False)
    return listening


def _remove_stale(path: Path) -> None:
    """Remove a socket file where nobody listens any more. Raises OSError if the path holds anything else."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise OSError(errno.EEXIST, "")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        reached = probe.connect_ex(str(path))
    if reached != errno.ECONNREFUSED:  # a full backlog proves that somebody listens
        raise OSError(errno.EADDRINUSE, "")
    path.unlink()
