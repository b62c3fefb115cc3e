"""Standbys of a log in PostgreSQL: their registration, and checkpoints that the writer requests from them.

A request is a row, with the writer's fence and the standby's name in its key. The standby writes chunks under their own
keys, each only while that row exists, and then its answer into the row. A takeover of the log removes the row, so the
standby can write no more chunks. Chunks that were not adopted have no header: they are removed like incomplete
checkpoints.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable

from immortal.coordinator.core.errors import LogError
from immortal.coordinator.log.backend import Append, EndpointWatch, Row, StandbyCheckpointRequest, StandbyRegistration
from immortal.coordinator.log.backends.postgres import connections as leases
from immortal.coordinator.log.backends.postgres.chunks import CHUNKS, ChunkUploads
from immortal.coordinator.log.backends.postgres.connections import (
    Address,
    Connection,
    Connections,
    connect,
    translated_errors,
)
from immortal.coordinator.log.format import CHUNK_KEY, SEQUENCE_KEY

REQUESTS_TABLE = "standby_checkpoints"
_KEY = struct.Struct(">QQQ")
_HEADER = "checkpoints"
_CANCELLED = "who asked for it does not want it any more"

_PUT = (
    "WITH asked AS (SELECT FROM immortal.rows WHERE instance = %(instance)s AND table_name = %(asked_table)s"
    " AND key = %(asked)s AND value = '' FOR SHARE)"
    " INSERT INTO immortal.rows (instance, table_name, key, value)"
    " SELECT %(instance)s, %(table)s, %(key)s, %(value)s FROM asked ON CONFLICT DO NOTHING"
)


def key_of(request: StandbyCheckpointRequest, standby: str) -> bytes:
    return _KEY.pack(request.fence, request.checkpoint_id, request.epoch) + standby.encode()


# --- the writer -------------------------------------------------------------------------------------------------------


def request_checkpoint(connection: Connection, instance: str, request: StandbyCheckpointRequest, standby: str) -> None:
    """Request a checkpoint from a standby, replacing earlier requests. A fenced writer's request has no effect."""
    with connection.transaction():
        forget(connection, instance)
        connection.execute(
            "INSERT INTO immortal.rows (instance, table_name, key, value) SELECT instance, %s, %s, ''"
            " FROM immortal.heads WHERE instance = %s AND is_there AND epoch = %s",
            [REQUESTS_TABLE, key_of(request, standby), instance, request.fence],
        )
        leases.notify(connection, instance)


def forget(connection: Connection, instance: str) -> None:
    """Remove all open requests."""
    leases.forget_rows(connection, instance, REQUESTS_TABLE)


def answer_of(connection: Connection, instance: str, key: bytes) -> bytes | None:
    row = connection.execute(
        "SELECT value FROM immortal.rows WHERE instance = %s AND table_name = %s AND key = %s AND value <> ''",
        [instance, REQUESTS_TABLE, key],
        binary=True,
    ).fetchone()
    return None if row is None else bytes(row[0])


# --- the standby ------------------------------------------------------------------------------------------------------


def request_to(connection: Connection, instance: str, standby: str) -> StandbyCheckpointRequest | None:
    """Return the open request to this standby, if there is one."""
    rows = connection.execute(
        "SELECT key FROM immortal.rows WHERE instance = %s AND table_name = %s AND value = ''",
        [instance, REQUESTS_TABLE],
        binary=True,
    ).fetchall()
    for (key,) in rows:
        if bytes(key[_KEY.size :]) == standby.encode():
            return StandbyCheckpointRequest(*_KEY.unpack_from(key))
    return None


# Listeners for changes of a lease: followers of the log, and callers of its instance.
#
# Each has its own thread and connection. Notifications only save time: a listener polls as well.


POLL_INTERVAL_S = 1.0  # without notifications; a standby counts as present for three intervals
RETRY_INTERVAL_S = 0.5  # before another attempt to reach a silent database


class LeaseListener:
    """Listener that calls :meth:`on_news` at the start, at news, every POLL_INTERVAL_S, and after :meth:`wake`."""

    def __init__(self, address: Address) -> None:
        self._address, self._instance = address, address.named
        self._is_closed = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="log-news", daemon=True)
        self._thread.start()

    def __del__(self) -> None:
        os.close(self._wake)

    def on_news(self, connection: Connection, *, is_news: bool) -> None:
        raise NotImplementedError

    def unregister(self, connection: Connection) -> None:
        """Remove what this listener has written; called at its end."""

    def wake(self) -> None:
        os.eventfd_write(self._wake, 1)

    def close(self, wait_s: float) -> None:
        """End the thread, and wait for it at most ``wait_s``."""
        self._is_closed = True
        self.wake()
        self._thread.join(wait_s)

    def _run(self) -> None:
        while not self._is_closed:
            with contextlib.suppress(LogError), translated_errors(self._address), connect(self._address) as connection:
                self._listen(connection)
            if not self._is_closed and select.select([self._wake], [], [], RETRY_INTERVAL_S)[0]:
                os.eventfd_read(self._wake)  # else each later attempt would follow at once

    def _listen(self, connection: Connection) -> None:
        connection.execute("SET synchronous_commit = off")  # no important data can be lost
        connection.execute(f"LISTEN {leases.CHANNEL}")
        is_news = True  # earlier notifications were missed
        while not self._is_closed:
            self.on_news(connection, is_news=is_news)
            is_news = self._wait(connection)
        self.unregister(connection)

    def _wait(self, connection: Connection) -> bool:
        """Wait for a notification, at most for the poll interval; return True if one arrived."""
        due_s = time.monotonic() + POLL_INTERVAL_S
        while (rest_s := due_s - time.monotonic()) > 0:
            if any(news.payload == self._instance for news in list(connection.notifies(timeout=0))):
                return True
            if self._wake in select.select([connection.fileno(), self._wake], [], [], rest_s)[0]:
                os.eventfd_read(self._wake)
                return False
        return False


class PostgresStandby(LeaseListener, StandbyRegistration):
    """Registration of this process as a standby.

    ``endpoint``: where peers would reach it. ``nudge``: the thread calls it when the lease has changed.
    """

    def __init__(self, address: Address, endpoint: str, nudge: Callable[[], None], checkpoints_to: str = "") -> None:
        """``checkpoints_to``: as for a writer, for the checkpoints that the writer requests."""
        self.request: StandbyCheckpointRequest | None = None
        self._endpoint, self._nudge, self._checkpoints_to = endpoint, nudge, checkpoints_to
        self._is_ready = False
        self._connections = Connections(address)
        self._uploads: ChunkUploads | None = None
        super().__init__(address)

    def report_ready(self, *, is_ready: bool) -> None:
        if is_ready != self._is_ready:
            self._is_ready = is_ready
            self.wake()

    def on_news(self, connection: Connection, *, is_news: bool) -> None:
        if is_news:
            self._nudge()
        request = request_to(connection, self._instance, leases.process_name())
        if request != self.request:
            self.request = request
            self._nudge()
        connection.execute(
            "INSERT INTO immortal.standbys VALUES (%s, %s, %s, %s, %s, clock_timestamp())"
            " ON CONFLICT (instance, name) DO UPDATE SET host = excluded.host, endpoint = excluded.endpoint,"
            " is_ready = excluded.is_ready, seen = excluded.seen",
            [self._instance, leases.process_name(), socket.gethostname(), self._endpoint, self._is_ready],
        )

    def put_chunk(self, request: StandbyCheckpointRequest, index: int, value: bytes) -> None:
        with self._connections.borrowed() as connection:
            self._insert(connection, request, (CHUNKS, CHUNK_KEY.pack(request.checkpoint_id, index), value))

    def offer(self, request: StandbyCheckpointRequest, offer: bytes) -> None:
        # For a header, the store has accepted all objects, or redirect_chunks returns their chunks as rows.
        header = (_HEADER, SEQUENCE_KEY.pack(request.checkpoint_id), b"")
        with self._connections.borrowed() as connection, connection.transaction():
            self._insert(connection, request, header)
            done = connection.execute(
                "UPDATE immortal.rows SET value = %s"
                " WHERE instance = %s AND table_name = %s AND key = %s AND value = ''",
                [offer, self._instance, REQUESTS_TABLE, key_of(request, leases.process_name())],
            )
            if not done.rowcount:
                raise LogError(_CANCELLED)

    def _insert(self, connection: Connection, request: StandbyCheckpointRequest, row: Row) -> None:
        """Insert a row while the request is open. Raises LogError if it is not, or the URL names no store."""
        if self._uploads is None:
            self._uploads = ChunkUploads(self._checkpoints_to, self._instance)
        append = self._uploads.redirect_chunks(Append(-1, puts=[row]), request.fence)
        for span in append.deletes:  # objects that the store rejected: their chunks follow as rows
            connection.execute(
                "DELETE FROM immortal.rows WHERE instance = %s AND table_name = %s AND key >= %s AND key < %s",
                [self._instance, span.table, span.first, span.end],
            )
        parameters = {"asked_table": REQUESTS_TABLE, "asked": key_of(request, leases.process_name())}
        for table, key, value in append.puts:
            if table != _HEADER:
                values = {"instance": self._instance, "table": table, "key": bytes(key), "value": bytes(value)}
                if not connection.execute(_PUT, parameters | values).rowcount:
                    raise LogError(_CANCELLED)

    def close(self, wait_s: float) -> None:
        super().close(wait_s)
        self._connections.close()
        if self._uploads is not None:
            self._uploads.close()

    def unregister(self, connection: Connection) -> None:
        connection.execute(
            "DELETE FROM immortal.standbys WHERE instance = %s AND name = %s", [self._instance, leases.process_name()]
        )


class PostgresWatching(LeaseListener, EndpointWatch):
    """Watch on the endpoint where peers reach the writer. ``endpoint``: that of the latest known writer."""

    def __init__(self, address: Address) -> None:
        self.endpoint: str | None = None
        super().__init__(address)

    def on_news(self, connection: Connection, *, is_news: bool) -> None:
        row = connection.execute(
            "SELECT endpoint FROM immortal.leases WHERE instance = %s", [self._instance]
        ).fetchone()
        if row is not None and row[0]:
            self.endpoint = row[0]
