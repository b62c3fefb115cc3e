"""The rows of a table, by their numbers, and the keys that are gone. No I/O, no clock.

A table has them in its state, each publisher and client has its own.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from immortal.appsdk.patterns.clone import limits
from immortal.appsdk.patterns.clone.records import Row


class Entries(msgspec.Struct):
    """Both dicts are in the order of the numbers. Of what was deleted up to ``forgotten``, not all is known."""

    rows: dict[str, Row] = {}
    gone: dict[str, int] = {}
    number: int = 0
    forgotten: int = 0
    size_bytes: int = 0

    def apply(self, row: Row) -> None:
        """``row`` is newer than all. A deleted key that was not there is noted as well."""
        key = row.key
        before = self.rows.pop(key, None)
        if before is not None:
            self.size_bytes -= size_bytes(before)
        if row.value is not None:
            self.gone.pop(key, None)
            self.rows[key] = row
            self.size_bytes += size_bytes(row)
        else:
            self.gone.pop(key, None)
            self.gone[key] = row.number
            if len(self.gone) > limits.GONE_MAX:
                oldest = next(iter(self.gone))
                self.forgotten = self.gone.pop(oldest)
        self.number = row.number

    def since(self, number: int) -> list[Row] | None:
        """All keys that have changed behind ``number``, as they are now; None: that is not known any more."""
        if number < self.forgotten or number > self.number:
            return None
        found = [*self._rows_since(number), *self._gone_since(number)]
        found.sort(key=lambda row: row.number)
        return found

    def everything(self) -> list[Row]:
        """All keys, and those that are known to be gone."""
        found = [*self.rows.values(), *(Row(key, at, None) for key, at in self.gone.items())]
        found.sort(key=lambda row: row.number)
        return found

    def _rows_since(self, number: int) -> Iterator[Row]:
        for row in reversed(self.rows.values()):
            if row.number <= number:
                return
            yield row

    def _gone_since(self, number: int) -> Iterator[Row]:
        for key, at in reversed(self.gone.items()):
            if at <= number:
                return
            yield Row(key, at, None)

    def copy(self) -> Entries:
        """Rows are shared: they never change."""
        return Entries(dict(self.rows), dict(self.gone), self.number, self.forgotten, self.size_bytes)


def size_bytes(row: Row) -> int:
    return len(row.key) + (len(row.value) if row.value is not None else 0)
