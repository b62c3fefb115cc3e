"""Where apps come in: a connection of one socket, or of a pair.

    one port, a Unix socket     the app connects
    two ports, mode "connect"   the app connects to both, in any order
    two ports, mode "listen"    the app connects to the first; to the second, where it listens, we connect

A socket that still lacks its other half is watched: an app that dies then makes room for the next one.
"""

from __future__ import annotations

import enum
import errno
import os
import select
import socket
import stat
from collections import deque
from collections.abc import Mapping, Set
from pathlib import Path

from immortal.coordinator.app.connection import AppConnection
from immortal.coordinator.app.dialer import AppDialer
from immortal.coordinator.config import AppSendMode, InstanceSettings
from immortal.coordinator.config.app_hosts import UNIX, family_of, host_port, hosts_of
from immortal.coordinator.config.socket_paths import secure_folder
from immortal.coordinator.notices import Notices
from immortal.protocol.errors import ImmortalError

SOCKET_BUFFER_SIZE_BYTES = 1 << 20
BACKLOG_MAX = 128  # connections that the kernel holds for us: strangers must not fill it while a commit is waited for


class AppListenError(ImmortalError):
    """The address for the app can't be had."""


class Half(enum.Enum):
    """What a socket is for, as the coordinator sees it; the value is the setting of its port."""

    RECEIVE = "app_port"
    SEND = "app_send_port"


class AppListener:
    """Listens for the apps of one instance. Its sockets are registered with ``epoll``."""

    def __init__(self, settings: InstanceSettings, log: Notices, epoll: select.epoll) -> None:
        self._settings = settings
        self._dials = settings.app_send_port is not None and settings.app_send_mode is AppSendMode.LISTEN
        self._log = log
        self._epoll = epoll
        self._listening: deque[tuple[Half, socket.socket]] = deque()
        self._unix_file: tuple[Path, int] | None = None  # its path and inode
        self._halves: dict[Half, socket.socket] = {}  # of an app that has not come in whole
        self._dialer: AppDialer | None = None

    def listen(self) -> None:
        """Raises AppListenError."""
        settings = self._settings
        ports = {} if settings.app_port is None else {Half.RECEIVE: settings.app_port}
        if settings.app_send_port is not None and not self._dials:
            ports[Half.SEND] = settings.app_send_port
        for half, port in ports.items():
            for host in hosts_of(settings.app_host):
                self._add(half, listen(host, port, settings.name, half.value))
        if settings.app_unix_address is not None:
            path = Path(settings.app_unix_address.removeprefix(UNIX))
            own = settings.app_socket is None  # a folder that somebody has chosen is their own matter
            self._add(Half.RECEIVE, listen_unix(path, settings.name, secure=own))
            self._unix_file = path, path.stat().st_ino

    def _add(self, half: Half, listening: socket.socket) -> None:
        self._listening.append((half, listening))
        self._epoll.register(listening.fileno(), select.EPOLLIN)

    def next_deadline_ns(self) -> int | None:
        """When :meth:`process` is to be called although nothing is ready, on the monotonic clock."""
        return None if self._dialer is None else self._dialer.next_deadline_ns()

    def process(self, ready: Mapping[int, int], *, taken: bool) -> AppConnection | None:
        """Go on with what is ``ready`` (masks by descriptor) or due; the connection of an app that has come in whole.

        ``taken``: there is an app; others are turned away.
        """
        self._drop({half for half, one in self._halves.items() if one.fileno() in ready})
        for half, listening in list(self._listening):
            if listening.fileno() in ready:
                self._accept(half, listening, taken)
                if self._settings.app_send_port is None and self._halves:
                    # One at a time, from the sockets in turn: who comes in elsewhere is the next turn's.
                    self._listening.rotate(-1 - self._listening.index((half, listening)))
                    break
        if self._dialer is not None and (dialed := self._dialer.process(ready)) is not None:
            self._dialer = None
            self._keep(Half.SEND, dialed)
        return self._complete()

    def close(self) -> None:
        self._drop(set(self._halves))
        for _, listening in self._listening:
            listening.close()
        self._listening.clear()
        if self._unix_file is not None:
            path, inode = self._unix_file
            if path.exists() and path.stat().st_ino == inode:
                path.unlink()
            self._unix_file = None

    def _accept(self, half: Half, listening: socket.socket, taken: bool) -> None:
        try:
            accepted, address = listening.accept()
        except OSError:
            return
        if taken or half in self._halves:
            self._log.warning("a second app was turned away: one is connected", kind="second app")
            accepted.close()
            return
        self._keep(half, accepted)
        port = self._settings.app_send_port
        if self._dials and port is not None:
            # Most likely it listens where it comes from; if not, at the other loopback.
            hosts = dict.fromkeys((address[0], *hosts_of(self._settings.app_host)))
            self._dialer = AppDialer(list(hosts), port, self._log, self._epoll)

    def _keep(self, half: Half, accepted: socket.socket) -> None:
        prepare(accepted)
        self._halves[half] = accepted
        self._epoll.register(accepted.fileno(), select.EPOLLRDHUP)

    def _complete(self) -> AppConnection | None:
        if self._settings.app_send_port is not None and len(self._halves) == len(Half):
            # What dead apps left in the backlog must not be paired with what a living one brings.
            self._drop({half for half, one in self._halves.items() if _is_gone(one)})
        receiver, sender = self._halves.get(Half.RECEIVE), self._halves.get(Half.SEND)
        if receiver is None or (sender is None and self._settings.app_send_port is not None):
            return None
        for one in self._halves.values():
            self._epoll.unregister(one.fileno())
        self._halves.clear()
        return AppConnection(receiver, sender)

    def _drop(self, halves: Set[Half]) -> None:
        if not halves:
            return
        for half in set(self._halves) if self._dials else halves:  # where we connect, both are known to be one app's
            dropped = self._halves.pop(half)
            self._epoll.unregister(dropped.fileno())
            dropped.close()
        if self._dialer is not None:
            self._dialer.close()
            self._dialer = None


def prepare(accepted: socket.socket) -> None:
    """It does not block, waits for no more to send, and has room for a batch."""
    accepted.setblocking(False)
    if accepted.family != socket.AF_UNIX:
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        accepted.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER_SIZE_BYTES)


def _is_gone(one: socket.socket) -> bool:
    poller = select.poll()
    poller.register(one, select.POLLRDHUP)
    return bool(poller.poll(0))


def listen(host: str, port: int, instance: str, setting: str) -> socket.socket:
    """A non-blocking listening socket. ``setting``: where its port can be changed. Raises AppListenError."""
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
    """A non-blocking listening Unix socket that only its owner can connect to. Raises AppListenError.

    The file that a dead coordinator has left is replaced. ``secure``: see to its folder as well.
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
    """Remove the socket that nobody listens at any more. Raises OSError where something else is in the way."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise OSError(errno.EEXIST, "")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        reached = probe.connect_ex(str(path))
    if reached != errno.ECONNREFUSED:  # a full backlog is somebody's as well
        raise OSError(errno.EADDRINUSE, "")
    path.unlink()
