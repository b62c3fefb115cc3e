"""The lease of a log's writer: for as long as it is renewed, no follower takes over. Safety is the fence's part.

A thread renews it over a connection of its own. One that can't be renewed in time only lets others take over; who holds
the log hears of that by its next append.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any

from coordinator.core.errors import LogError
from coordinator.log.backends.postgres.connecting import Database, translated

LEASE_S = 1.0
RENEW_S = 0.25

_RENEW = (
    "UPDATE immortal.leases SET until = clock_timestamp() + make_interval(secs => %s) WHERE log = %s AND epoch = %s"
)
_GIVE_UP = "UPDATE immortal.leases SET until = '-infinity' WHERE log = %s AND epoch = %s"


class Lease:
    """Of the term ``epoch``, from now on until :meth:`close`."""

    def __init__(self, database: Database, log_id: int, epoch: int) -> None:
        self._database = database
        self._log_id = log_id
        self._epoch = epoch
        self._ended = threading.Event()
        self._connection: Any = None
        self._thread = threading.Thread(target=self._run, name="log-lease", daemon=True)
        self._thread.start()

    def close(self, *, give_up: bool) -> None:
        """``give_up``: who waits for the log need not wait for the lease's end."""
        if self._ended.is_set():
            return
        self._ended.set()
        self._thread.join()
        with contextlib.suppress(LogError):
            if give_up:
                self._execute(_GIVE_UP, self._log_id, self._epoch)
        self._drop()

    def _run(self) -> None:
        while not self._ended.wait(RENEW_S):
            try:
                self._execute(_RENEW, LEASE_S, self._log_id, self._epoch)
            except LogError:  # the next try finds another server, or the same one again
                self._drop()

    def _execute(self, statement: str, *parameters: object) -> None:
        if self._connection is None:
            self._connection = self._database.connect()
        with translated(self._database.where):
            self._connection.execute(statement, parameters)

    def _drop(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(Exception):
                self._connection.close()
            self._connection = None
