"""From a table's handlers to the publisher in the same process. A replay has no publisher: then this does nothing.

Handlers of a table that is being undone or recovered feed once more what they fed before; its numbers are known.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from immortal.appsdk.patterns.clone.entries import Entries
from immortal.appsdk.patterns.clone.records import Row


class Feed:
    """``begun``: the table as it was when the publisher began, once its handler has said so."""

    def __init__(self) -> None:
        self.begun: tuple[str, Entries] | None = None
        self.has_forwarders = False
        self._rows: deque[Sequence[Row]] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._wake

    def begin(self, table: str, entries: Entries) -> None:
        if self.begun is None:
            self.begun = (table, entries.copy())
            self._rows.clear()
        os.eventfd_write(self._wake, 1)

    def put(self, rows: Sequence[Row]) -> None:
        self._rows.append(rows)
        os.eventfd_write(self._wake, 1)

    def take(self) -> list[Row]:
        """All that has come. Some of it may be known."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        rows: list[Row] = []
        while self._rows:
            rows.extend(self._rows.popleft())
        return rows

    def close(self) -> None:
        os.close(self._wake)


_feeds: dict[int, Feed] = {}  # by the log of an instance: an undo makes another object of the class


def open_feed(table: Any) -> Feed:
    """Of the instance ``table``, which has one publisher in its life."""
    feed = _feeds[table._immortal_context.committer_id] = Feed()
    return feed


def close_feed(table: Any) -> None:
    feed = _feeds.pop(table._immortal_context.committer_id, None)
    if feed is not None:
        feed.close()


def feed_of(table: Any) -> Feed | None:
    return _feeds.get(table._immortal_context.committer_id)
