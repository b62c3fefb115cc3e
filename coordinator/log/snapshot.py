"""One moment of a log, as whoever reads beside its writer sees it: a snapshot of LMDB, and the journal behind it."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import lmdb

from coordinator.core.errors import DamagedLogError
from coordinator.log import reading
from coordinator.log.environment import LogIdentity, Tables, last_transaction_id
from coordinator.log.journal import JournalReader, Rows
from coordinator.log.lock import is_locked
from coordinator.log.overlay import ReadTransaction, laid_over

Result = TypeVar("Result")


class Snapshots:
    """Read transactions of a log that another process may write. None stays open between calls."""

    def __init__(self, folder: Path, environment: lmdb.Environment, tables: Tables, identity: LogIdentity) -> None:
        self._folder = folder
        self._environment = environment
        self._tables = tables
        self._journal = JournalReader(folder, identity)
        self._journal_lock = threading.Lock()

    def transact(self, operation: Callable[[ReadTransaction, Tables], Result], *, buffers: bool = True) -> Result:
        """Run ``operation`` in a read transaction of its own, which gives memory of LMDB's, or copies of it.

        Raises DamagedLogError where LMDB cannot read, or the journal is damaged.
        """
        abandoned_id = None
        while True:
            try:
                with self._environment.begin(buffers=buffers) as transaction:  # type: ignore[call-overload]
                    transaction_id = transaction.id()
                    rows = self._journaled(transaction_id, partial(reading.journal_nonce, transaction, self._tables))
                    if transaction_id in (last_transaction_id(self._environment), abandoned_id):
                        if isinstance(rows, DamagedLogError):
                            raise rows
                        return operation(laid_over(transaction, self._tables, rows), self._tables)
                # A writer has gone on, and its journal may have begun anew. Or it died before it told LMDB's readers of
                # its last commit: then they stay where they are, and nobody has touched the journal since.
                abandoned_id = None if is_locked(self._folder) else transaction_id
            except lmdb.MapResizedError:
                self._environment.set_mapsize(0)  # the writer's new size
            except (lmdb.Error, struct.error) as error:
                raise DamagedLogError(f"the log in {self._folder} cannot be read: {error}", -1) from error

    def journal_problems(self) -> tuple[list[str], list[str]]:
        """What the next start puts right in the journal, and what it leaves out, in words. Raises DamagedLogError."""
        self.transact(lambda transaction, tables: None)
        return self._journal.mended, self._journal.left_out

    def _journaled(self, transaction_id: int, nonce: Callable[[], int | None]) -> Rows | DamagedLogError:
        try:
            with self._journal_lock:
                return self._journal.rows(transaction_id, nonce=nonce, may_mend=lambda: not is_locked(self._folder))
        except DamagedLogError as error:
            return error
