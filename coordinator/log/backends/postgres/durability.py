"""Checks of a writer before an append counts as durable: no crash of the server can lose it, it is on as many standbys
as before, and the server has all acknowledged data.

Settings that a session can't set can change at any time. They are checked on each new connection, at each renewal of
the lease and, if commits wait for standbys, after each commit in the same round trip. While they are wrong nothing is
acknowledged, and the writer retries. A server that lacks acknowledged data was promoted too early: the log records this
loss, and no later writer ignores it.
"""

from __future__ import annotations

import contextlib
import re
import secrets
from collections.abc import Iterator
from typing import LiteralString

from msgspec import Struct
from msgspec.structs import replace

from immortal.coordinator.core.errors import LogError, LogLostError, LogUnavailableError
from immortal.coordinator.log.backends.postgres.connections import (
    Address,
    Connection,
    forget_rows,
    head_count,
    translated_errors,
)

REQUESTS_TABLE = "durability"
"""Table for rows that no copy of the log has: the number of standbys that commits wait for, the head at the last
takeover, and known losses."""
_STANDBYS, _TAKEN, _LOST = b"standbys", b"taken", b"lost"


class DurabilityGuard:
    """Durability checks of one writer.

    ``doubt``: why the next append must not be acknowledged, as noticed between appends; "": nothing.
    ``allow_data_loss``: nothing is checked, and earlier notes are removed.
    """

    def __init__(self, address: Address, *, allow_data_loss: bool) -> None:
        self.doubt = ""
        self._address, self._label, self._instance = address, address.label, address.named
        self._allow_data_loss = allow_data_loss
        self._standbys_count = 0  # number of standbys that a commit must wait for
        self._right = ""  # the settings that were last found to be right
        self._takeover = ""  # this writer's takeover, as recorded in the log
        self._synchronous_commit = "on"  # setting of the connection that appends

    @property
    def waits_for_standbys(self) -> bool:
        return self._standbys_count > 0

    def check_connection(self, connection: Connection) -> None:
        """Check the settings of the connection for appends. Raises LogError."""
        durability = Durability.read(connection)
        self._synchronous_commit = durability.synchronous_commit
        if not self._allow_data_loss:
            durability.check(self._label)
            self._standbys_count = durability.standbys_count

    def check_takeover(
        self, connection: Connection, head: tuple[int, int], last_sequence_id: int, sequence_id_required_min: int
    ) -> None:
        """Check a log in the transaction that takes it over. ``sequence_id_required_min``: a record that it once had.

        ``head``: the earlier epoch, and its number of appends. Raises LogLostError, LogUnavailableError.
        """
        noted = _Noted.read(connection, self._instance)
        if not self._allow_data_loss:
            if noted.lost:
                raise LogLostError(noted.lost)
            if last_sequence_id < sequence_id_required_min:
                raise self.lost(f"it ends with record {last_sequence_id}, and had record {sequence_id_required_min}")
            Durability.read(connection).check_again(self._label, noted.standbys_count)
        forget_rows(connection, self._instance, REQUESTS_TABLE)
        _note(connection, self._instance, _STANDBYS, str(self._standbys_count))
        self._takeover = f"{head[0]} {head[1]} {secrets.token_hex(8)}"
        _note(connection, self._instance, _TAKEN, self._takeover)

    def require_whole(self, connection: Connection, done: tuple[int, int]) -> None:
        """Check that the server lacks no acknowledged append.

        ``done``: the writer's epoch, and its number of acknowledged appends. Raises LogLostError.
        """
        if self._allow_data_loss:
            return
        noted = _Noted.read(connection, self._instance)
        if noted.lost:
            raise LogLostError(noted.lost)
        if done[1] and noted.takeover != self._takeover and noted.head < done:
            had = f"it was taken over with {noted.head[1]} appends of epoch {noted.head[0]}"
            raise self.lost(f"{had}, and {done[1]} of epoch {done[0]} were acknowledged")

    def recheck(self, connection: Connection) -> None:
        """Check the settings again on the connection for appends. Raises LogUnavailableError."""
        if not self._allow_data_loss:
            with translated_errors(self._address):
                Durability.read(connection).check_again(self._label, self._standbys_count)

    def check_after_commit(self, settings: str) -> None:
        """Check the settings that were read after a commit, before it is acknowledged. Raises LogUnavailableError."""
        if settings != self._right:
            Durability.parse(settings).check_again(self._label, self._standbys_count)
            self._right = settings

    def check_in_background(self, connection: Connection, done: tuple[int, int] | None) -> None:
        """Check in any thread; set ``doubt``. ``done``: the epoch, and its number of acknowledged appends."""
        if self._allow_data_loss:
            return
        if done is not None and head_count(connection, self._instance) < done:
            self.doubt = (
                f"the database {self._label} may have lost acknowledged input: an older copy has taken its place"
            )
            return
        if lost := _Noted.read(connection, self._instance).lost:  # recorded by another process
            self.doubt = lost
            return
        durability = replace(Durability.read(connection), synchronous_commit=self._synchronous_commit)
        try:
            durability.check_again(self._label, self._standbys_count)
            self.doubt = ""
        except LogUnavailableError as error:
            self.doubt = str(error)

    def lost(self, how: str) -> LogLostError:
        return LogLostError(
            f"the database {self._label} has lost acknowledged input: {how}; a server was promoted that had not all of"
            " it. Promote one that has it, or bring back the one of before; to go on without what is gone, start the"
            " instance once with --allow-data-loss: streams of its peers stop where they know more, and say so"
        )

    @contextlib.contextmanager
    def record_data_loss(self, connection: Connection) -> Iterator[None]:
        """Record a LogLostError in the log, for all processes that open it later."""
        try:
            yield
        except LogLostError as error:
            with contextlib.suppress(LogError), translated_errors(self._address), connection.transaction():
                connection.execute("SET LOCAL synchronous_commit = local")  # such a server may have no standby
                _note(connection, self._instance, _LOST, str(error))
            raise


class _Noted(Struct, frozen=True):
    """State that earlier writers left.

    ``takeover``: the last takeover: the epoch, its number of appends, a nonce. ``lost``: message about data known to be
    lost; "": none.
    """

    standbys_count: int
    takeover: str
    lost: str

    @property
    def head(self) -> tuple[int, int]:
        epoch, count = self.takeover.split()[:2]
        return int(epoch), int(count)

    @classmethod
    def read(cls, connection: Connection, instance: str) -> _Noted:
        rows = connection.execute(
            "SELECT key, value FROM immortal.rows WHERE instance = %s AND table_name = %s", [instance, REQUESTS_TABLE]
        )
        found = {bytes(key): bytes(value).decode() for key, value in rows}
        return cls(int(found.get(_STANDBYS, "0")), found.get(_TAKEN, "0 0"), found.get(_LOST, ""))


def _note(connection: Connection, instance: str, key: bytes, value: str) -> None:
    connection.execute(
        "INSERT INTO immortal.rows (instance, table_name, key, value) VALUES (%s, %s, %s, %s)"
        " ON CONFLICT (instance, table_name, key) DO UPDATE SET value = excluded.value",
        [instance, REQUESTS_TABLE, key, value.encode()],
    )


# Durability settings of a server, as read on one connection: what a crash of a machine can lose.
#
# Settings differ by role, database and session, so they are read on the connection that appends. All except
# synchronous_commit, which each session sets (connections.py), can change while it is open: a writer reads them again
# after each reconnect, at each renewal of its lease and, if commits wait for standbys, after each commit.


SETTINGS: LiteralString = (
    "SELECT concat_ws('|', current_setting('fsync'), current_setting('full_page_writes'),"
    " current_setting('synchronous_commit'), current_setting('synchronous_standby_names'))"
)
_COUNTED = re.compile(r"\s*(?:(?:FIRST|ANY)\s+)?(\d+)\s*\(", re.IGNORECASE)


class Durability(Struct, frozen=True):
    """Effective values of the settings, as the server reports them."""

    fsync: str
    full_page_writes: str
    synchronous_commit: str
    synchronous_standby_names: str

    @classmethod
    def read(cls, connection: Connection) -> Durability:
        row = connection.execute(SETTINGS).fetchone()
        assert row is not None
        return cls.parse(row[0])

    @classmethod
    def parse(cls, text: str) -> Durability:
        """Parse the result of SETTINGS."""
        return cls(*text.split("|", 3))

    @property
    def standbys_count(self) -> int:
        """Number of standbys that a commit waits for."""
        if not self.synchronous_standby_names.strip():
            return 0
        counted = _COUNTED.match(self.synchronous_standby_names)
        return int(counted[1]) if counted else 1  # a plain list: the first standby that answers

    @property
    def losses(self) -> list[str]:
        """Settings by which a crash of the server's machine can lose acknowledged input, one sentence each."""
        found = []
        if self.fsync != "on":
            found.append(f"fsync is {self.fsync}: what was acknowledged may never have reached the disk")
        if self.full_page_writes != "on":
            found.append(f"full_page_writes is {self.full_page_writes}: half-written pages stay as they are")
        if self.synchronous_commit == "off":
            found.append("synchronous_commit is off: commits are acknowledged before they are on a disk")
        elif self.synchronous_commit == "local" and self.synchronous_standby_names:
            found.append(
                "synchronous_commit is local: commits do not wait for the standbys that synchronous_standby_names has"
            )
        return found

    @property
    def risks(self) -> list[str]:
        """Losses that failures of one machine would cause, one sentence each."""
        if losses := self.losses:
            return [f"acknowledged input can be lost: {loss}" for loss in losses]
        lines = ["the server's process or machine crashes: nothing is lost, it goes on when the server is back"]
        if not self.synchronous_standby_names:
            lines.append(
                "the server's disk is lost: everything is lost since the last backup, since commits wait for no"
                " standby (synchronous_standby_names is empty)"
            )
        else:
            lines.append(
                "the server's disk is lost: nothing is lost if a standby is promoted that had acknowledged; commits"
                f" wait for {self.synchronous_standby_names}"
            )
            lines.append("while too few of these standbys answer, every append waits, and with it the instance")
        return lines

    def check(self, label: str) -> None:
        """Check the settings. Raises LogError if acknowledged input could be lost."""
        if self.losses:
            raise LogError(
                f"acknowledged input could be lost in {label}: {'; '.join(self.losses)}; set it right for this role"
                " and database, or start with --allow-data-loss"
            )

    def check_again(self, label: str, standbys_count: int) -> None:
        """Check settings of a log whose commits waited for ``standbys_count`` standbys.

        Raises LogUnavailableError, as an operator can change the settings back.
        """
        found = self.losses
        if self.standbys_count < standbys_count:
            found.append(
                f"synchronous_standby_names is {self.synchronous_standby_names!r}: commits wait for"
                f" {self.standbys_count} standbys, and had to wait for {standbys_count} when this log was opened before"
            )
        if found:
            raise LogUnavailableError(
                f"acknowledged input could be lost in {label}: {'; '.join(found)}; input waits until that is set right;"
                " to go on with less, stop the instance and start it once with --allow-data-loss"
            )
