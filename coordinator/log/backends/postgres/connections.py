"""Connects to the database of a log, and translates its failures."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import psycopg
from msgspec import Struct
from psycopg import conninfo, errors, pq

from immortal.coordinator.core.errors import LogError, LogFormatError, LogFullError, LogUnavailableError
from immortal.protocol.shared_registry import error_line, secured

VERSION_MIN = 150000  # 15.0 in libpq's form
CONNECT_TIMEOUT_S = 5
DEAD_MS = 10_000
"""Silence on the wire after which a connection counts as broken.

A live server that waits for its standbys is not silent: TCP answers.
"""
# No timeout may end an append: its changes may already be visible, and be on no standby.
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
    where: str

    @classmethod
    def of(cls, location: str) -> Address:
        """Parse ``location``, the part of a URL behind "postgresql:". Raises LogError."""
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
        """The instance. Raises LogFormatError where the URL says none."""
        if self.instance is None:
            raise LogFormatError(
                f"{self.where} is a database, which may hold the logs of many instances: write {self.where}#NAME"
            )
        return self.instance


def connect(address: Address) -> psycopg.Connection[tuple[Any, ...]]:
    """Connect to the server that accepts writes, of several hosts whichever it is now.

    Raises LogUnavailableError, LogError.
    """
    given: dict[str, Any] = {
        "connect_timeout": CONNECT_TIMEOUT_S,
        **secured(conninfo.conninfo_to_dict(address.database)),
    }
    given |= {
        "application_name": f"immortal {address.instance or ''}".strip(),
        "target_session_attrs": "read-write",
        "keepalives_idle": 5,
        "keepalives_interval": 2,
        "keepalives_count": 3,
        "tcp_user_timeout": DEAD_MS,
        "client_encoding": "UTF8",
    }
    with reaching(address):
        connection: psycopg.Connection[tuple[Any, ...]] = psycopg.connect(**given, autocommit=True)
        try:
            if connection.info.server_version < VERSION_MIN:
                found = connection.info.parameter_status("server_version")
                raise LogError(f"{address.where} is PostgreSQL {found}: version 15 or newer is needed")
            # A setting in the URL is not overridden: the durability check refuses it.
            is_set_in_url = "synchronous_commit" in connection.info.options
            connection.execute((_NO_LIMITS if is_set_in_url else _NO_LIMITS + _DURABLE).encode())
        except BaseException:
            connection.close()
            raise
    return connection


def is_broken(connection: psycopg.Connection[Any]) -> bool:
    return connection.closed or connection.pgconn.status != pq.ConnStatus.OK


@contextlib.contextmanager
def reaching(address: Address) -> Iterator[None]:
    """Translate failures of the database: LogUnavailableError for temporary ones, LogFullError, LogError."""
    try:
        yield
    except (errors.DiskFull, errors.OutOfMemory) as error:
        raise LogFullError(f"the database {address.where} has no room: {error_line(error)}") from None
    except (psycopg.OperationalError, psycopg.InterfaceError) as error:
        raise LogUnavailableError(f"the database {address.where} does not answer: {error_line(error)}") from None
    except errors.ReadOnlySqlTransaction as error:  # the server was a primary until now
        raise LogUnavailableError(f"the database {address.where} takes no writes: {error_line(error)}") from None
    except errors.InsufficientPrivilege as error:
        raise LogError(
            f"the database {address.where} refuses it: {error_line(error)}; the role needs what immortal_writer has"
            " ('GRANT immortal_writer TO ...', as the schema's owner), or 'immortal registry role', or SELECT on its"
            " tables where it only reads"
        ) from None
    except psycopg.Error as error:
        raise LogError(f"the database {address.where} refuses it: {error_line(error)}") from None


class Connections:
    """Pool of connections for reading: one for each open view."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._idle: list[psycopg.Connection[tuple[Any, ...]]] = []
        self._is_closed = False

    @contextlib.contextmanager
    def borrowed(self) -> Iterator[psycopg.Connection[tuple[Any, ...]]]:
        """Borrow a connection from the pool. Raises as :func:`connect`."""
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = connect(self._address)
        try:
            with reaching(self._address):
                yield connection
        except BaseException:
            connection.close()
            self._close_idle()  # a server that has restarted has broken all of them
            raise
        if self._is_closed:
            connection.close()
        else:
            self._idle.append(connection)

    def close(self) -> None:
        self._is_closed = True
        self._close_idle()

    def _close_idle(self) -> None:
        with contextlib.suppress(IndexError):  # threads may do it at once
            while True:
                self._idle.pop().close()
