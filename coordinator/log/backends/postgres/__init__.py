"""Logs in PostgreSQL: one database holds those of many instances. docs/decisions/0029 has the reasons."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from coordinator.core.errors import (
    FencedError,
    LogError,
    LogFormatError,
    LogLockedError,
    LogUnavailableError,
    require,
)
from coordinator.fault_points import reach
from coordinator.log.backend import Append, Backend, Options, Place, Row, Space
from coordinator.log.backends.postgres import schema
from coordinator.log.backends.postgres.connecting import Database, error_of, load_driver, translated
from coordinator.log.backends.postgres.lease import LEASE_S, Lease
from coordinator.log.backends.postgres.view import RECORDS, PostgresView
from coordinator.log.format import INT, META_TRIMMED, SEQUENCE_KEY, unseal
from coordinator.log.meta import LogIdentity, read_identity

if TYPE_CHECKING:
    import psycopg

    Connection = psycopg.Connection[tuple[Any, ...]]

LOOK_S = 0.05  # between two looks at somebody's lease
_SPARE_CONNECTIONS_MAX = 2  # of readers
_FREE_BYTES_UNKNOWN = 1 << 62  # what a database's disk has left no query tells: it refuses when that is full
_APPEND = (
    "SELECT immortal.append(%s, %s, %s, %s, %s, %s, %s::int[], %s, %s, %s::text[], %s::bytea[], %s::bytea[], "
    "%s::text[], %s::bytea[], %s::bytea[])"
)
_SETTLE = "UPDATE immortal.logs SET appends = appends + 1 WHERE id = %s AND epoch = %s RETURNING appends, token"
_HEAD = "SELECT id, epoch, appends, holder FROM immortal.logs WHERE name = %s"
_TAKE_OVER = "SELECT immortal.take_over(%s, %s, make_interval(secs => %s))"
_UNTIL = "SELECT until FROM immortal.leases WHERE log = %s"
_HOLDER = (
    "SELECT holder FROM immortal.logs JOIN immortal.leases ON log = id AND leases.epoch = logs.epoch "
    "WHERE name = %s AND until > clock_timestamp()"
)
_UNSAFE = {  # setting: the values with which a crash of the server loses what was acknowledged
    "fsync": ("off",),
    "full_page_writes": ("off",),
    "synchronous_commit": ("off",),
}


class PostgresBackend(Backend):
    """``fence``: the epoch of this writer; a reader has none and no lease.

    After a LogUnavailableError of an append nobody knows whether it was done: :meth:`was_done` finds out, before
    anything else is appended.
    """

    is_remote = True

    def __init__(self, database: Database, log_id: int, instance_name: str | None, *, epoch: int, appends: int) -> None:
        self.where = database.where
        self.mended: list[str] = []
        self.fence = epoch
        self._database = database
        self._log_id = log_id
        self._appends = appends
        self._token: int | None = None  # of the append that was not answered
        self._lock = threading.RLock()  # around the connection that writes
        self._connection: Connection | None = None
        self._spare: list[Connection] = []  # for views
        self._lease: Lease | None = None
        try:
            with self.view() as view:
                self.identity = read_identity(view, self.where, instance_name)
        except BaseException:
            self.close()
            raise
        if epoch:
            self._lease = Lease(database, log_id, epoch)

    # --- reading ------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def view(self, *, copies: bool = False) -> Iterator[PostgresView]:
        self.refuse_after_failure()
        try:
            connection = self._spare.pop()
        except IndexError:
            connection = self._database.connect()
        try:
            connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            yield PostgresView(connection, self._log_id)
            connection.execute("COMMIT")
        except BaseException as error:
            with contextlib.suppress(Exception):
                connection.close()
            if isinstance(error, load_driver().Error):
                raise error_of(error, self.where) from error
            raise
        if len(self._spare) < _SPARE_CONNECTIONS_MAX and self.failure is None:
            self._spare.append(connection)
        else:
            connection.close()

    def is_live(self) -> bool:
        with self.view() as view:
            return view.has_holder()

    def space(self) -> Space:
        self.refuse_after_failure()
        with self.view() as view:
            return Space(view.used_bytes(), _FREE_BYTES_UNKNOWN)

    # --- writing ------------------------------------------------------------------------------------------------------

    def append(self, append: Append) -> None:
        parameters, token = self._parameters(append), secrets.randbits(62) + 1
        with self._lock:
            self.refuse_after_failure()
            require(self._token is None, "an append follows one of which nobody knows whether it was done")
            for point in append.points:
                reach(point)
            began_s = time.perf_counter()
            self._token = token
            counted = (self._log_id, append.fence, self._appends, token, append.expected_last_sequence_id)
            problem = self._ask(_APPEND, *counted, *parameters)[0]
            self._token = None
            if problem is not None:
                self._refuse(problem)
            self._appends += 1
            if self.synced is not None:
                self.synced(time.perf_counter() - began_s)

    def was_done(self) -> bool:
        """Of the append that was not answered, as it is from now on. Raises LogUnavailableError, FencedError."""
        with self._lock:
            self.refuse_after_failure()
            if self._token is None:
                return False
            row = self._ask(_SETTLE, self._log_id, self.fence)
            if not row:
                head = self._ask(_HEAD, self._database.log_name)
                self._refuse(f"fenced by {head[3]} at epoch {head[1]}" if head else "the log is gone")
            token, self._token = self._token, None
            self._appends = int(row[0])
            return bool(row[1] == token)

    def close(self) -> None:
        self._close(give_up=True)

    def abandon(self) -> None:
        self._close(give_up=False)

    def _close(self, *, give_up: bool) -> None:
        if self._lease is not None:
            self._lease.close(give_up=give_up)
        with self._lock:
            self.failure = self.failure or LogError(f"{self.where} is closed")
            self._drop()
        while self._spare:
            with contextlib.suppress(Exception):
                self._spare.pop().close()

    def _parameters(self, append: Append) -> tuple[object, ...]:
        values = [bytes(value) for _, value in append.records]
        last = append.records[-1][0] if append.records else append.expected_last_sequence_id
        records_end = None
        gone: list[tuple[str, bytes, bytes | None]] = []
        for span in append.deletes:
            if span.table != RECORDS:
                gone.append((span.table, bytes(span.first), span.end and bytes(span.end)))
                continue
            require(not span.first.strip(b"\0"), "records are removed at the log's beginning alone")
            end = last + 1 if span.end is None else SEQUENCE_KEY.unpack(span.end)[0]
            records_end = end if records_end is None else max(records_end, end)
        puts = {(table, bytes(key)): bytes(value) for table, key, value in append.puts}
        return (
            last,
            [len(value) for value in values],
            b"".join(values),
            records_end,
            [table for table, _, _ in gone],
            [first for _, first, _ in gone],
            [end for _, _, end in gone],
            [table for table, _ in puts],
            [key for _, key in puts],
            [*puts.values()],
        )

    def _ask(self, statement: str, *parameters: object) -> tuple[Any, ...]:
        """The row that comes back, () for none. Raises LogUnavailableError; after another error nothing is taken."""
        try:
            if self._connection is None:
                self._connection = self._database.connect()
            with translated(self.where):
                return self._connection.execute(statement.encode(), parameters).fetchone() or ()
        except LogUnavailableError:
            self._drop()
            raise
        except LogError as error:
            self.failure = error
            raise

    def _refuse(self, problem: str) -> None:
        if problem.startswith("fenced by "):
            holder = problem.removeprefix("fenced by ").partition(" at epoch ")[0]
            self.failure = FencedError(holder, problem)
            raise self.failure
        if problem == "the log is gone":
            self.failure = FencedError("nobody", f"{self.where} was removed")
            raise self.failure
        require(False, problem)

    def _drop(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(Exception):
                self._connection.close()
            self._connection = None


class PostgresPlace(Place):
    """A location is the URL behind ``postgresql:``, and the log's name behind a #."""

    scheme = "postgresql"

    def __init__(self, location: str) -> None:
        super().__init__(location)
        self._database = Database(self.scheme, location)
        self._asking: Connection | None = None  # for who asks again and again

    @property
    def where(self) -> str:
        return self._database.where

    def of_instance(self, instance_name: str) -> str:
        if self._database.log_name:
            return f"{self.scheme}:{self.location}"
        return f"{self.scheme}:{self.location}#{quote(instance_name)}"

    def exists(self) -> bool:
        with self._connected() as connection:
            return schema.version_of(connection) > 0 and bool(connection.execute(_HEAD, (self._name,)).fetchone())

    def create(self, identity: LogIdentity, rows: Sequence[Row], options: Options) -> PostgresBackend:
        first_sequence_id = 0
        for table, key, value in rows:
            if (table, key) == ("meta", META_TRIMMED):
                first_sequence_id = unseal(b"meta", key, bytes(value), INT) + 1
        with self._connected() as connection, connection.transaction():
            schema.migrate(connection, self.where)
            made = connection.execute(
                "INSERT INTO immortal.logs (name, first_sequence_id, last_sequence_id) VALUES (%s, %s, %s) "
                "ON CONFLICT DO NOTHING RETURNING id",
                (self._name, first_sequence_id, first_sequence_id - 1),
            ).fetchone()
            if made is None:
                raise LogFormatError(f"there is a log {self.where} already: open it, or choose another name")
            connection.cursor().executemany(
                "INSERT INTO immortal.rows VALUES (%s, %s, %s, %s)",
                [(made[0], table, bytes(key), bytes(value)) for table, key, value in rows],
            )
        return self.open(identity.instance_name, options)

    def open(self, instance_name: str, options: Options) -> PostgresBackend:
        with self._connected() as connection:
            log_id, _, appends, _ = self._head(connection)
            PostgresBackend(self._database, log_id, instance_name, epoch=0, appends=0).close()  # whose log it is
            lost = losses(connection)
            if lost and not _takes_losses():
                raise LogError(f"{self.where} would lose acknowledged input: {'; '.join(lost)}")
            self._take_over(connection, log_id)
            log_id, epoch, appends, _ = self._head(connection)
        return PostgresBackend(self._database, log_id, instance_name, epoch=epoch, appends=appends)

    def _take_over(self, connection: Connection, log_id: int) -> None:
        """Begin a term. A lease that nobody renews is waited for. Raises LogLockedError for one that is."""
        own = f"{socket.gethostname()}, process {os.getpid()}"
        seen: object = None
        while True:
            taken = connection.execute(_TAKE_OVER, (log_id, own, LEASE_S)).fetchone()
            holder = None if taken is None else taken[0]
            if holder is None:
                return
            until = connection.execute(_UNTIL, (log_id,)).fetchone()
            if seen is not None and until != seen:
                raise LogLockedError(f"the log {self.where} is written by {holder}")
            seen = until
            time.sleep(LOOK_S)

    def open_reader(self, instance_name: str | None) -> PostgresBackend:
        with self._connected() as connection:
            log_id = self._head(connection)[0]
        return PostgresBackend(self._database, log_id, instance_name, epoch=0, appends=0)

    def is_live(self) -> bool:
        return self.holder() is not None

    def holder(self) -> str | None:
        for last in (False, True):
            try:
                if self._asking is None:
                    self._asking = self._database.connect()
                with translated(self.where):
                    if not schema.version_of(self._asking):
                        return None
                    row = self._asking.execute(_HOLDER, (self._name,)).fetchone()
                return None if row is None else str(row[0])
            except LogUnavailableError:
                self._asking = None
                if last:
                    raise
        return None

    def version(self) -> object:
        with self._connected() as connection:
            return self._head(connection)[0]

    def remove(self) -> None:
        with self._connected() as connection:
            if schema.version_of(connection):
                connection.execute("DELETE FROM immortal.logs WHERE name = %s", (self._name,))

    @property
    def _name(self) -> str:
        if not self._database.log_name:
            raise LogFormatError(f"{self.where} names a database, no log in it: the log's name comes behind a #")
        return self._database.log_name

    def _head(self, connection: Connection) -> tuple[Any, ...]:
        name = self._name
        schema.check_version(schema.version_of(connection), self.where)
        row = connection.execute(_HEAD, (name,)).fetchone()
        if row is None:
            raise LogFormatError(f"there is no log {self.where}")
        return row

    @contextlib.contextmanager
    def _connected(self) -> Iterator[Connection]:
        with self._database.connect() as connection, translated(self.where):
            yield connection


def losses(connection: Connection) -> list[str]:
    """What a crash of the server would lose with the settings that are in force on ``connection``, in words."""
    found = []
    for name, values in _UNSAFE.items():
        row = connection.execute("SELECT current_setting(%s)", (name,)).fetchone()
        if row is not None and row[0] in values:
            found.append(f"{name} is {row[0]}")
    return found


def _takes_losses() -> bool:
    return os.environ.get("IMMORTAL_ALLOW_DATA_LOSS") == "1"
