"""Processes that are told at once when the lease of a log has changed: who follows it, and who calls its instance.

One thread, on a connection of its own. News are a shortcut: it looks by itself as well, only not as soon.
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

from immortal.coordinator.core.errors import LogError
from immortal.coordinator.log.backend import Asked, Following, Watching
from immortal.coordinator.log.backends.postgres import lease as leases
from immortal.coordinator.log.backends.postgres.connecting import Address, Connections, connect, reaching
from immortal.coordinator.log.backends.postgres.standby_checkpoints import StandbyChunks, asked_of

LOOK_S = 1.0  # without news; a standby counts for three of them
AGAIN_S = 0.5  # until a database that does not answer is tried again

_Connection = psycopg.Connection[tuple[Any, ...]]


class Listening:
    """Calls :meth:`look` at the beginning, at all news, each LOOK_S, and when :meth:`wake` is called."""

    def __init__(self, address: Address) -> None:
        self._address, self._instance = address, address.named
        self._is_closed = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="log-news", daemon=True)
        self._thread.start()

    def __del__(self) -> None:
        os.close(self._wake)

    def look(self, connection: _Connection, *, is_news: bool) -> None:
        raise NotImplementedError

    def leave(self, connection: _Connection) -> None:
        """The last that is done."""

    def wake(self) -> None:
        os.eventfd_write(self._wake, 1)

    def close(self, wait_s: float) -> None:
        """The thread ends by itself; it is waited for as long as is said."""
        self._is_closed = True
        self.wake()
        self._thread.join(wait_s)

    def _run(self) -> None:
        while not self._is_closed:
            with contextlib.suppress(LogError), reaching(self._address), connect(self._address) as connection:
                self._listen(connection)
            if not self._is_closed:
                select.select([self._wake], [], [], AGAIN_S)

    def _listen(self, connection: _Connection) -> None:
        connection.execute("SET synchronous_commit = off")  # nothing is lost with it
        connection.execute(f"LISTEN {leases.CHANNEL}")
        is_news = True  # what was told before is not heard
        while not self._is_closed:
            self.look(connection, is_news=is_news)
            is_news = self._wait(connection)
        self.leave(connection)

    def _wait(self, connection: _Connection) -> bool:
        """Until it is time to look; whether there are news."""
        due_s = time.monotonic() + LOOK_S
        while (rest_s := due_s - time.monotonic()) > 0:
            if any(news.payload == self._instance for news in list(connection.notifies(timeout=0))):
                return True
            if self._wake in select.select([connection.fileno(), self._wake], [], [], rest_s)[0]:
                os.eventfd_read(self._wake)
                return False
        return False


class PostgresFollowing(Listening, Following):
    """Known to who writes the log. ``endpoint``: where peers would reach it. ``nudge``: called by the thread when the
    lease has changed."""

    def __init__(self, address: Address, endpoint: str, nudge: Callable[[], None], checkpoints_to: str = "") -> None:
        """``checkpoints_to``: as of a writer, for the checkpoints that it asks for."""
        self.asked: Asked | None = None
        self._endpoint, self._nudge, self._checkpoints_to = endpoint, nudge, checkpoints_to
        self._is_ready = False
        self._connections = Connections(address)
        self._chunks: StandbyChunks | None = None
        super().__init__(address)

    def say(self, *, is_ready: bool) -> None:
        if is_ready != self._is_ready:
            self._is_ready = is_ready
            self.wake()

    def look(self, connection: _Connection, *, is_news: bool) -> None:
        if is_news:
            self._nudge()
        asked = asked_of(connection, self._instance, leases.own_name())
        if asked != self.asked:
            self.asked = asked
            self._nudge()
        connection.execute(
            "INSERT INTO immortal.standbys VALUES (%s, %s, %s, %s, %s, clock_timestamp())"
            " ON CONFLICT (instance, name) DO UPDATE SET host = excluded.host, endpoint = excluded.endpoint,"
            " is_ready = excluded.is_ready, seen = excluded.seen",
            [self._instance, leases.own_name(), socket.gethostname(), self._endpoint, self._is_ready],
        )

    def put_chunk(self, asked: Asked, index: int, value: bytes) -> None:
        """As Following.put_chunk."""
        with self._connections.borrowed() as connection:
            self._own_chunks().put(connection, asked, index, value)

    def offer(self, asked: Asked, offer: bytes) -> None:
        """As Following.offer."""
        with self._connections.borrowed() as connection:
            self._own_chunks().offer(connection, asked, offer)

    def _own_chunks(self) -> StandbyChunks:
        if self._chunks is None:
            self._chunks = StandbyChunks(self._instance, leases.own_name(), self._checkpoints_to)
        return self._chunks

    def close(self, wait_s: float) -> None:
        super().close(wait_s)
        self._connections.close()
        if self._chunks is not None:
            self._chunks.close()

    def leave(self, connection: _Connection) -> None:
        connection.execute(
            "DELETE FROM immortal.standbys WHERE instance = %s AND name = %s", [self._instance, leases.own_name()]
        )


class PostgresWatching(Listening, Watching):
    """``endpoint``: where peers reached the one who had the log when there was one last."""

    def __init__(self, address: Address) -> None:
        self.endpoint: str | None = None
        super().__init__(address)

    def look(self, connection: _Connection, *, is_news: bool) -> None:
        row = connection.execute(
            "SELECT endpoint FROM immortal.leases WHERE instance = %s", [self._instance]
        ).fetchone()
        if row is not None and row[0]:
            self.endpoint = row[0]
