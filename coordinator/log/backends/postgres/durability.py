"""What a server does with what it has acknowledged when a machine crashes, as its settings on one connection say.

Settings differ by role, database and session: they are read on the very connection that appends.
"""

from __future__ import annotations

from typing import Any

import psycopg
from msgspec import Struct

from coordinator.core.errors import LogError

_NAMES = ("fsync", "full_page_writes", "synchronous_commit", "synchronous_standby_names")


class Durability(Struct, frozen=True):
    """The values in force, as the server gives them."""

    fsync: str
    full_page_writes: str
    synchronous_commit: str
    synchronous_standby_names: str

    @classmethod
    def of(cls, connection: psycopg.Connection[tuple[Any, ...]]) -> Durability:
        query = "SELECT " + ", ".join(f"current_setting('{name}')" for name in _NAMES)
        row = connection.execute(query.encode()).fetchone()
        assert row is not None
        return cls(*row)

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

    def check(self, where: str, *, allow_data_loss: bool) -> None:
        """Raises LogError where acknowledged input could be lost."""
        if self.losses and not allow_data_loss:
            raise LogError(
                f"acknowledged input could be lost in {where}: {'; '.join(self.losses)}; set it right for this role"
                " and database, or start with --allow-data-loss"
            )
