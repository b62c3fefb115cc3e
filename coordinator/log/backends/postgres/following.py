"""A process that follows a log: known to who writes it, and told at once when the lease has changed.

One thread, on a connection of its own. News are a shortcut: who follows looks by itself as well, only not as soon.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import psycopg

from coordinator.core.errors import LogError
from coordinator.log.backend import Following
from coordinator.log.backends.postgres import lease as leases
from coordinator.log.backends.postgres.connecting import Address, connect, reaching

SAY_S = 1.0  # between two words that it is there
AGAIN_S = 0.5  # until a database that does not answer is tried again


class PostgresFollowing(Following):
    """``endpoint``: where peers would reach it. ``nudge``: called by the thread when the lease has changed."""

    def __init__(self, address: Address, endpoint: str, nudge: Callable[[], None]) -> None:
        self._address, self._endpoint, self._nudge = address, endpoint, nudge
        self._is_ready = self._is_closed = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="log-following", daemon=True)
        self._thread.start()

    def __del__(self) -> None:
        os.close(self._wake)

    def say(self, *, is_ready: bool) -> None:
        if is_ready != self._is_ready:
            self._is_ready = is_ready
            os.eventfd_write(self._wake, 1)

    def close(self, wait_s: float) -> None:
        """The thread ends by itself, and takes the standby's row along."""
        self._is_closed = True
        os.eventfd_write(self._wake, 1)
        self._thread.join(wait_s)

    # --- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_closed:
            with contextlib.suppress(LogError), reaching(self._address), connect(self._address) as connection:
                self._follow(connection)
            if not self._is_closed:
                select.select([self._wake], [], [], AGAIN_S)

    def _follow(self, connection: psycopg.Connection[tuple[Any, ...]]) -> None:
        instance = self._address.named
        connection.execute("SET synchronous_commit = off")  # nothing is lost with it
        connection.execute(f"LISTEN {leases.CHANNEL}")
        self._nudge()  # what was told before is not heard
        while not self._is_closed:
            self._say(connection, instance)
            say_s = time.monotonic() + SAY_S
            said = self._is_ready
            while said == self._is_ready and not self._is_closed and time.monotonic() < say_s:
                for news in connection.notifies(timeout=0):
                    if news.payload == instance:
                        self._nudge()
                rest_s = max(0.0, say_s - time.monotonic())
                if self._wake in select.select([connection.fileno(), self._wake], [], [], rest_s)[0]:
                    os.eventfd_read(self._wake)
        connection.execute(
            "DELETE FROM immortal.standbys WHERE instance = %s AND name = %s", [instance, leases.own_name()]
        )

    def _say(self, connection: psycopg.Connection[tuple[Any, ...]], instance: str) -> None:
        connection.execute(
            "INSERT INTO immortal.standbys VALUES (%s, %s, %s, %s, %s, clock_timestamp())"
            " ON CONFLICT (instance, name) DO UPDATE SET host = excluded.host, endpoint = excluded.endpoint,"
            " is_ready = excluded.is_ready, seen = excluded.seen",
            [instance, leases.own_name(), socket.gethostname(), self._endpoint, self._is_ready],
        )
