"""Connections to the database of a log, translation of its errors, and the lease that a writer renews over one.

The lease tells other processes when to try a takeover; only the log's head decides who can write (writer.py).

A lease ends when it runs out by the database's clock, when it is released, or when its process is known to be gone; the
holder's own machine notices that at once. A holder that releases it can name a standby: for a moment only that standby
can take it. Changes are announced on the channel CHANNEL.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import psycopg
from msgspec import Struct
from psycopg import conninfo, errors, pq

from immortal.coordinator.core.errors import LogError, LogFormatError, LogFullError, LogUnavailableError
from immortal.coordinator.core.interfaces import Standby
from immortal.protocol import decoding
from immortal.protocol.files import ProcessFile, current_process_fields, is_living
from immortal.protocol.shared_registry import error_line, writer_parameters

Connection = psycopg.Connection[tuple[Any, ...]]

VERSION_MIN = 150000  # 15.0 in libpq's form

# No timeout may end an append: its changes can already be visible without being on a standby.
_NO_LIMITS = "SET statement_timeout = 0; SET lock_timeout = 0; SET idle_in_transaction_session_timeout = 0"
_DURABLE = (
    "; SELECT set_config('synchronous_commit', CASE current_setting('synchronous_commit') WHEN 'remote_apply'"
    " THEN 'remote_apply' ELSE 'on' END, false)"
)
"""Session settings, which override those of the server, its database and its role."""


class Address(Struct, frozen=True):
    """Address of a log: the database in libpq's form, and the instance (None: not given)."""

    database: str
    instance: str | None
    label: str

    @classmethod
    def parse(cls, location: str) -> Address:
        """Parse ``location``, the part of a URL after "postgresql:". Raises LogError."""
        database, _, instance = f"postgresql:{location}".partition("#")
        try:
            given = conninfo.conninfo_to_dict(database)
        except psycopg.ProgrammingError as error:
            raise LogError(f"{database!r} is no URL of a database: {error_line(error)}") from None
        if given.get("password"):
            raise LogError(
                "a password in the URL of a log would be seen by whoever sees the settings or the processes: write it"
                " into ~/.pgpass (or the file that PGPASSFILE names), and the URL without it"
            )
        return cls(database, instance or None, database if not instance else f"{database}#{instance}")

    @property
    def named(self) -> str:
        """The instance. Raises LogFormatError if the URL has none."""
        if self.instance is None:
            raise LogFormatError(
                f"{self.label} is a database, which may hold the logs of many instances: write {self.label}#NAME"
            )
        return self.instance


def connect(address: Address) -> Connection:
    """Connect to the server that accepts writes, whichever of several hosts that is now.

    Raises LogUnavailableError, LogError.
    """
    given = writer_parameters(conninfo.conninfo_to_dict(address.database), f"immortal {address.instance or ''}".strip())
    with translated_errors(address):
        connection: Connection = psycopg.connect(**given)
        try:
            if connection.info.server_version < VERSION_MIN:
                found = connection.info.parameter_status("server_version")
                raise LogError(f"{address.label} is PostgreSQL {found}: version 15 or newer is needed")
            # A setting in the URL is not overridden: the durability check refuses it.
            is_set_in_url = "synchronous_commit" in connection.info.options
            connection.execute((_NO_LIMITS if is_set_in_url else _NO_LIMITS + _DURABLE).encode())
        except BaseException:
            connection.close()
            raise
    return connection


def is_broken(connection: Connection) -> bool:
    return connection.closed or connection.pgconn.status != pq.ConnStatus.OK


@contextlib.contextmanager
def translated_errors(address: Address) -> Iterator[None]:
    """Translate the database's errors: temporary ones into LogUnavailableError, others into LogFullError, LogError."""
    try:
        yield
    except (errors.DiskFull, errors.OutOfMemory) as error:
        raise LogFullError(f"the database {address.label} has no room: {error_line(error)}") from None
    except (psycopg.OperationalError, psycopg.InterfaceError) as error:
        raise LogUnavailableError(f"the database {address.label} does not answer: {error_line(error)}") from None
    except errors.ReadOnlySqlTransaction as error:  # the server was a primary until now
        raise LogUnavailableError(f"the database {address.label} takes no writes: {error_line(error)}") from None
    except errors.InsufficientPrivilege as error:
        raise LogError(
            f"the database {address.label} refuses it: {error_line(error)}; the role needs what immortal_writer has"
            " ('GRANT immortal_writer TO ...', as the schema's owner), or 'immortal registry role', or SELECT on its"
            " tables where it only reads"
        ) from None
    except psycopg.Error as error:
        raise LogError(f"the database {address.label} refuses it: {error_line(error)}") from None


class Connections:
    """Pool of connections for reading: one for each open view."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._idle: list[Connection] = []
        self._is_closed = False

    @contextlib.contextmanager
    def borrowed(self) -> Iterator[Connection]:
        """Borrow a connection from the pool. Raises like :func:`connect`."""
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = connect(self._address)
        try:
            with translated_errors(self._address):
                yield connection
        except BaseException:
            connection.close()
            self._close_idle()  # a restart of the server has broken all of them
            raise
        if self._is_closed:
            connection.close()
        else:
            self._idle.append(connection)

    def close(self) -> None:
        self._is_closed = True
        self._close_idle()

    def _close_idle(self) -> None:
        with contextlib.suppress(IndexError):  # several threads can do this at once
            while True:
                self._idle.pop().close()


CHANNEL = "immortal"
RENEWALS = 2.5  # per lease time, so that one can fail. Fewer are better: a dead holder's lease then ends sooner
HANDOVER_TIMEOUT_S = 2.0  # time for which a released log is reserved for one standby
RELEASED = "left"  # stored in place of a process: the holder is then the standby that can take it
STANDBY_TIMEOUT_S = 3.0  # time for which a silent standby still counts
_OURS: set[str] = set()  # nonces of the leases that this process holds


class Process(ProcessFile, frozen=True, kw_only=True):
    """Process that holds a lease.

    ``space``: scope in which its process ID is valid: its machine's boot, and its PID namespace.
    """

    space: str
    nonce: str


def current_process() -> Process:
    return Process(space=_space(), nonce=secrets.token_hex(8), **current_process_fields())


def process_name() -> str:
    """Return the name of this process for messages."""
    return f"{socket.gethostname()} (process {os.getpid()})"


def _space() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return secrets.token_hex(8)  # matches no process: the lease has to run out


def has_process_ended(text: str) -> bool:
    """Return True if the process in a lease is known to have ended."""
    try:
        process = decoding.decode_json(text, type=Process)
    except decoding.DecodeError:
        return False
    if process.space != _space():
        return False
    if process.pid == os.getpid() and is_living(process):
        return process.nonce not in _OURS
    return not is_living(process)


class Holder(NamedTuple):
    """Holder of the currently valid lease."""

    name: str  # for messages
    endpoint: str  # where peers reach it
    remaining_s: float  # until the lease runs out


def holder(connection: Connection, instance: str, *, lock: bool = False) -> Holder | None:
    """Return the holder of the valid lease; None: this process can take the log. ``lock``: lock its row meanwhile."""
    row = connection.execute(
        "SELECT process, holder, endpoint, extract(epoch FROM until - clock_timestamp())::float8"
        " FROM immortal.leases WHERE instance = %s AND until > clock_timestamp()" + (" FOR UPDATE" if lock else ""),
        [instance],
    ).fetchone()
    if row is None or (row[1] == process_name() if row[0] == RELEASED else has_process_ended(row[0])):
        return None
    return Holder(*row[1:])


def standbys(connection: Connection, instance: str) -> list[Standby]:
    """Return the other processes that follow the log."""
    rows = connection.execute(
        "SELECT name, host, endpoint, is_ready FROM immortal.standbys"
        " WHERE instance = %s AND name <> %s AND seen > clock_timestamp() - make_interval(secs => %s) ORDER BY name",
        [instance, process_name(), STANDBY_TIMEOUT_S],
    ).fetchall()
    return [Standby(*row) for row in rows]


def notify(connection: Connection, instance: str) -> None:
    """Notify listeners of a changed lease, once the transaction is committed."""
    connection.execute("SELECT pg_notify(%s, %s)", [CHANNEL, instance])


def head(connection: Connection, instance: str) -> tuple[int, str]:
    """Read the epoch of a log and its writer's name."""
    row = connection.execute(
        "SELECT epoch, holder FROM immortal.heads WHERE instance = %s AND is_there", [instance]
    ).fetchone()
    return (0, "whoever has removed it") if row is None else (row[0], row[1])


def head_count(connection: Connection, instance: str, *, lock: bool = False) -> tuple[int, int]:
    """Return the epoch of a log, and its number of appends in that epoch. ``lock``: as for :func:`holder`."""
    row = connection.execute(
        "SELECT epoch, appends_count FROM immortal.heads WHERE instance = %s" + (" FOR UPDATE" if lock else ""),
        [instance],
    ).fetchone()
    return (0, 0) if row is None else (row[0], row[1])


def forget_rows(connection: Connection, instance: str, table: str) -> None:
    connection.execute("DELETE FROM immortal.rows WHERE instance = %s AND table_name = %s", [instance, table])


class Lease:
    """Lease of a writer, held from :meth:`take_over` on. A thread renews it on a separate connection, since appends can
    wait for a standby.

    ``lost_to``: epoch and name of a later writer. ``standbys``: as of the last renewal.
    """

    def __init__(
        self,
        address: Address,
        length_s: float,
        endpoint: str,
        on_renewal: Callable[[Connection], None] = lambda connection: None,
    ) -> None:
        """``on_renewal``: the thread calls it with its connection at each renewal."""
        self.lost_to: tuple[int, str] | None = None
        self.standbys: Sequence[Standby] = ()
        self._address, self._length_s, self._endpoint = address, length_s, endpoint
        self._on_renewal = on_renewal
        self._process = current_process()
        self._text = msgspec.json.encode(self._process).decode()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="log-lease", daemon=True)

    def take_over(self, connection: Connection) -> None:
        """Take the lease, in the transaction that takes the log over."""
        connection.execute(
            "INSERT INTO immortal.leases (instance, process, holder, endpoint, until)"
            " VALUES (%s, %s, %s, %s, clock_timestamp() + make_interval(secs => %s))"
            " ON CONFLICT (instance) DO UPDATE SET process = excluded.process, holder = excluded.holder,"
            " endpoint = excluded.endpoint, until = excluded.until",
            [self._address.named, self._text, process_name(), self._endpoint, self._length_s],
        )
        notify(connection, self._address.named)

    def start_renewing(self) -> None:
        """Renew the lease from now on; the transaction of :meth:`take_over` is committed."""
        _OURS.add(self._process.nonce)
        self._thread.start()

    def release(self, connection: Connection, successor: str) -> None:
        """Release the lease before it runs out. For HANDOVER_TIMEOUT_S only ``successor`` can take it, unless it is "".

        A renewal in flight finds that this process no longer has the lease. Raises like the connection.
        """
        with connection.transaction():
            connection.execute("SET LOCAL synchronous_commit = off")  # if it is lost, the lease runs out instead
            connection.execute(
                "UPDATE immortal.leases SET process = %s, holder = %s, endpoint = '', until = CASE WHEN %s"
                " THEN clock_timestamp() + make_interval(secs => %s) ELSE '-infinity' END"
                " WHERE instance = %s AND process = %s",
                [RELEASED, successor, bool(successor), HANDOVER_TIMEOUT_S, self._address.named, self._text],
            )
            notify(connection, self._address.named)

    def end(self) -> None:
        """Stop renewing the lease."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        _OURS.discard(self._process.nonce)

    def _run(self) -> None:
        connection: Connection | None = None
        while not self._ended.wait(self._length_s / RENEWALS):
            # A failed renewal is repeated next time, or the lease runs out: no append depends on it.
            with contextlib.suppress(LogError), translated_errors(self._address):
                if connection is None or is_broken(connection):
                    connection = connect(self._address)
                    connection.execute("SET synchronous_commit = off")  # nothing of value can be lost
                renewed = connection.execute(
                    "UPDATE immortal.leases SET until = clock_timestamp() + make_interval(secs => %s)"
                    " WHERE instance = %s AND process = %s",
                    [self._length_s, self._address.named, self._text],
                )
                if not renewed.rowcount:
                    self.lost_to = head(connection, self._address.named)
                self.standbys = standbys(connection, self._address.named)
                self._on_renewal(connection)
        if connection is not None:
            connection.close()
