"""What a server does with what it has acknowledged when a machine crashes, as its settings on one connection say.

Settings differ by role, database and session: they are read on the very connection that appends. They change while it
is open, all but synchronous_commit, which each session sets (connecting.py): a writer looks again after each reconnect
and with each renewal of its lease, and where commits wait for standbys behind each commit.
"""

from __future__ import annotations

import re
from typing import Any, LiteralString

import psycopg
from msgspec import Struct

from immortal.coordinator.core.errors import LogError, LogUnavailableError

SETTINGS: LiteralString = (
    "SELECT concat_ws('|', current_setting('fsync'), current_setting('full_page_writes'),"
    " current_setting('synchronous_commit'), current_setting('synchronous_standby_names'))"
)
_COUNTED = re.compile(r"\s*(?:(?:FIRST|ANY)\s+)?(\d+)\s*\(", re.IGNORECASE)


class Durability(Struct, frozen=True):
    """The values in force, as the server gives them."""

    fsync: str
    full_page_writes: str
    synchronous_commit: str
    synchronous_standby_names: str

    @classmethod
    def of(cls, connection: psycopg.Connection[tuple[Any, ...]]) -> Durability:
        row = connection.execute(SETTINGS).fetchone()
        assert row is not None
        return cls.read(row[0])

    @classmethod
    def read(cls, text: str) -> Durability:
        """What SETTINGS says."""
        return cls(*text.split("|", 3))

    @property
    def standbys_count(self) -> int:
        """How many standbys a commit waits for."""
        if not self.synchronous_standby_names.strip():
            return 0
        counted = _COUNTED.match(self.synchronous_standby_names)
        return int(counted[1]) if counted else 1  # a list alone: the first that answers

    @property
    def losses(self) -> list[str]:
        """By which settings acknowledged input can be lost when the server's machine crashes, each in words."""
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
    def words(self) -> list[str]:
        """What the crash of one machine would lose."""
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

    def check(self, where: str) -> None:
        """Raises LogError where acknowledged input could be lost."""
        if self.losses:
            raise LogError(
                f"acknowledged input could be lost in {where}: {'; '.join(self.losses)}; set it right for this role"
                " and database, or start with --allow-data-loss"
            )

    def check_again(self, where: str, standbys_count: int) -> None:
        """Of a log whose commits wait for so many standbys. Raises LogUnavailableError: settings may be set back."""
        found = self.losses
        if self.standbys_count < standbys_count:
            found.append(
                f"synchronous_standby_names is {self.synchronous_standby_names!r}: commits wait for"
                f" {self.standbys_count} standbys, and had to wait for {standbys_count} when this log was opened before"
            )
        if found:
            raise LogUnavailableError(
                f"acknowledged input could be lost in {where}: {'; '.join(found)}; input waits until that is set right;"
                " to go on with less, stop the instance and start it once with --allow-data-loss"
            )
