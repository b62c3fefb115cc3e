"""Backend for a log in PostgreSQL: ``postgresql://USER@HOST/DATABASE#INSTANCE`` (docs/how-to/postgresql.md,
docs/LOG_FORMAT.md).

One database has the logs of many instances, in its schema ``immortal`` (schema.py). Other machines can reach it, so an
instance can have a follower on another machine.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

from immortal.coordinator.core.errors import LogError, LogFormatError, LogLockedError
from immortal.protocol import distribution

try:
    from psycopg import errors
except ImportError as error:  # checked first, since the modules below need psycopg too
    raise LogError(f"a log in PostgreSQL needs psycopg ({error}): {distribution.add_extra('postgres')}") from None

from immortal.coordinator.log.backend import Append, Mac, Options, Place, ReadBackend, Row, View
from immortal.coordinator.log.backends.postgres import connections as leases
from immortal.coordinator.log.backends.postgres import schema
from immortal.coordinator.log.backends.postgres.chunks import remove_objects
from immortal.coordinator.log.backends.postgres.connections import (
    Address,
    Connection,
    Connections,
    connect,
    translated_errors,
)
from immortal.coordinator.log.backends.postgres.durability import Durability
from immortal.coordinator.log.backends.postgres.standby import PostgresStandby, PostgresWatching
from immortal.coordinator.log.backends.postgres.statements import change, write_copy
from immortal.coordinator.log.backends.postgres.view import PostgresView, viewing
from immortal.coordinator.log.backends.postgres.writer import PostgresBackend
from immortal.coordinator.log.identity import LogIdentity, first_and_last_sequence_id, read_identity
from immortal.coordinator.objects import StoreError

POLL_INTERVAL_S = 0.1  # between two reads of the lease's holder, unless the lease runs out earlier


class PostgresReader(ReadBackend):
    """Reader of a log in PostgreSQL, beside its writer."""

    def __init__(self, address: Address, instance_name: str | None) -> None:
        self.label = address.label
        self._address = address
        self._connections = Connections(address)
        try:
            with self.view() as view:
                self.identity = read_identity(view, self.label, instance_name)
        except BaseException:
            self.close()
            raise

    def view(self, *, copies: bool = False) -> AbstractContextManager[PostgresView]:
        return viewing(self._connections, self._address.named)

    def is_live(self) -> bool:
        with self._connections.borrowed() as connection:
            return leases.holder(connection, self._address.named) is not None

    def close(self) -> None:
        self._connections.close()


class PostgresPlace(Place):
    """Place of a log in PostgreSQL. It keeps a connection for a follower's frequent checks of the lease."""

    scheme = "postgresql"
    is_shared = True

    def __init__(self, location: str) -> None:
        super().__init__(location)
        self._address = Address.parse(location)
        self._connections = Connections(self._address)
        self._next_read_s = 0.0  # time of the next read of the lease's holder
        self._holder: leases.Holder | None = None

    def exists(self) -> bool:
        address = self._address
        with self._connections.borrowed() as connection:
            if not schema.check(connection, address.label):
                return False
            found = connection.execute(
                "SELECT FROM immortal.heads WHERE instance = %s AND is_there", [address.named]
            ).fetchone()
            return found is not None

    def instances(self) -> list[str] | None:
        if self._address.instance is not None:
            return None
        with self._connections.borrowed() as connection:
            if not schema.check(connection, self._address.label):
                return []
            found = connection.execute("SELECT instance FROM immortal.heads WHERE is_there ORDER BY instance")
            return [instance for (instance,) in found.fetchall()]

    def create(self, identity: LogIdentity, rows: Sequence[Row], options: Options) -> PostgresBackend:
        with self._making(options) as connection:
            change(connection, self._address.named, Append(-1, puts=rows))
        return self.open(identity.instance_name, options)

    def copy(self, source: View, identity: LogIdentity, mac: Mac | None) -> int:
        """Copy ``source`` in one transaction, so that an interrupted copy leaves nothing."""
        if self.exists():
            raise ValueError(f"there is a log {self.label} already, and a copy is a new one: choose another name")
        with self._making(Options()) as connection:
            return write_copy(connection, self._address.named, source)

    @contextlib.contextmanager
    def _making(self, options: Options) -> Iterator[Connection]:
        """Create a log, which exists once the body has filled it. Raises LogFormatError, LogError."""
        address, instance = self._address, self._address.named
        with translated_errors(address), connect(address) as connection:
            if schema.version_of(connection) != schema.VERSION:
                schema.migrate(connection, address.label)
            if not options.allow_data_loss:
                Durability.read(connection).check(self.label)
            with connection.transaction():
                connection.execute(
                    "INSERT INTO immortal.heads VALUES (%s, false, 0, 0, -1, '') ON CONFLICT DO NOTHING", [instance]
                )
                made = connection.execute(
                    "UPDATE immortal.heads SET is_there = true, epoch = epoch + 1 WHERE instance = %s AND NOT is_there",
                    [instance],
                )
                if not made.rowcount:
                    raise LogFormatError(f"there is a log {self.label} already: open it, or choose another name")
                yield connection
                last = first_and_last_sequence_id(PostgresView(connection, instance))[1]
                connection.execute(
                    "UPDATE immortal.heads SET last_sequence_id = %s WHERE instance = %s", [last, instance]
                )

    def open(self, instance_name: str, options: Options) -> PostgresBackend:
        self._require()
        return PostgresBackend(self._address, instance_name, options, self.sequence_id_required_min)

    def open_reader(self, instance_name: str | None) -> PostgresReader:
        self._require()
        return PostgresReader(self._address, instance_name)

    def is_live(self) -> bool:
        return self._lease_holder() is not None

    def holder(self) -> str | None:
        holder = self._lease_holder()
        return None if holder is None else holder.name

    def endpoint(self) -> str | None:
        holder = self._lease_holder()
        return None if holder is None else holder.endpoint or None

    def watch(self) -> PostgresWatching:
        return PostgresWatching(self._address)

    def is_followed(self) -> bool:
        with self._connections.borrowed() as connection:
            return any(standby.is_ready for standby in leases.standbys(connection, self._address.named))

    def _lease_holder(self) -> leases.Holder | None:
        """Return the holder of the lease, cached for the poll interval, since followers ask all the time."""
        now_s = time.monotonic()
        if now_s >= self._next_read_s:
            self._next_read_s = now_s + POLL_INTERVAL_S  # set before reading: a nudge meanwhile causes another read
            with self._connections.borrowed() as connection:
                try:
                    self._holder = leases.holder(connection, self._address.named)
                except (errors.UndefinedTable, errors.UndefinedColumn, errors.InvalidSchemaName):
                    self._holder = None
            if self._holder is not None:
                self._next_read_s = min(self._next_read_s, now_s + self._holder.remaining_s)
        return self._holder

    def follow(self, options: Options, nudge: Callable[[], None]) -> PostgresStandby:
        def expire() -> None:
            self._next_read_s = 0.0
            nudge()

        return PostgresStandby(self._address, options.endpoint, expire, options.checkpoints_to)

    def remove(self) -> None:
        if not self.exists():
            return
        instance = self._address.named
        with self._connections.borrowed() as connection, connection.transaction():
            if (holder := leases.holder(connection, instance, lock=True)) is not None:
                raise LogLockedError(f"the log {self.label} is in use by {holder.name}")
            connection.execute(
                "UPDATE immortal.heads SET is_there = false, epoch = epoch + 1, appends_count = 0,"
                " last_sequence_id = -1 WHERE instance = %s",
                [instance],
            )
            objects = PostgresView(connection, instance).pointers()
            connection.execute("DELETE FROM immortal.records WHERE instance = %s", [instance])
            connection.execute("DELETE FROM immortal.rows WHERE instance = %s", [instance])
            connection.execute("DELETE FROM immortal.leases WHERE instance = %s", [instance])
            connection.execute("DELETE FROM immortal.standbys WHERE instance = %s", [instance])
        try:
            remove_objects(objects)
        except StoreError as error:
            raise LogError(f"the log is gone; of its checkpoints some are still in {objects[0].url}: {error}") from None

    def migrate(self) -> str:
        with self._connections.borrowed() as connection:
            before = schema.migrate(connection, self.label)
        if before == schema.VERSION:
            return f"the schema of {self.label} has version {before} already"
        return f"the schema of {self.label} had version {before}, and has version {schema.VERSION} now"

    def restrict(self, role: str, instances: Sequence[str], *, allowed: bool) -> None:
        with self._connections.borrowed() as connection:
            if not schema.check(connection, self._address.label):
                schema.migrate(connection, self._address.label)
            schema.restrict(connection, role, instances, allowed=allowed)

    def durability(self) -> list[str]:
        with self._connections.borrowed() as connection:
            return Durability.read(connection).risks

    def _require(self) -> None:
        if not self.exists():
            raise LogFormatError(f"there is no log {self.label}: 'immortal register NAME --log {self.label}' makes one")
