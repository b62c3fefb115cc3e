"""Connecting to an app that listens: again and again until it is up, and never blocking."""

from __future__ import annotations

import errno
import select
import socket
import time
from collections.abc import Mapping, Sequence

from immortal.coordinator.config.app_hosts import family_of, host_port
from immortal.coordinator.notices import Notices

ATTEMPT_TIMEOUT_S = 5.0  # a loopback answers at once; another address may never
RETRY_PAUSE_S_MIN, RETRY_PAUSE_S_MAX = 0.01, 0.25


class AppDialer:
    """One connection to be made, to the first of ``hosts`` where somebody listens at ``port``."""

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
        """When :meth:`process` is to be called again, on the monotonic clock."""
        return self._due_ns

    def process(self, ready: Mapping[int, int]) -> socket.socket | None:
        """Go on with what is ``ready`` or due; the connected socket, once there is one."""
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
        if not error and not _met_itself(attempt):
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


def _met_itself(connected: socket.socket) -> bool:
    # Without a listener, a connection to a port that the system picks for outgoing ones may meet itself.
    try:
        return bool(connected.getsockname() == connected.getpeername())
    except OSError:
        return True  # it is gone again
