"""Commits that were begun and are not finished, of a log that has several under way at a time.

The loop begins them and looks for what is done when their answers arrive; a thread that is to write something else
waits for them first. Whoever does either has the writer's lock of the store.
"""

from __future__ import annotations

import contextlib
import select
import time
from collections import deque
from typing import NamedTuple

from immortal.coordinator.core.effects import Commit
from immortal.coordinator.core.interfaces import LogStore


class Finished(NamedTuple):
    commit: Commit
    took_s: float


class BegunCommits:
    """``ready``: readable when an answer may be there. It is not watched while a thread waits for that itself."""

    def __init__(self, store: LogStore, ready: select.epoll) -> None:
        self._store, self._ready = store, ready
        self._under_way: deque[tuple[Commit, float]] = deque()
        self._watched: tuple[int, int] | None = None  # a file descriptor, and events

    def __bool__(self) -> bool:
        return bool(self._under_way)

    @property
    def oldest(self) -> Commit:
        return self._under_way[0][0]

    def begin(self, commit: Commit) -> bool:
        """False: it can't be begun. Raises as LogStore.begin; then it is under way."""
        self._under_way.append((commit, time.perf_counter()))
        is_begun = self._store.begin(commit.transaction, commit.ticket)
        if is_begun:
            self.watch()
        else:
            self._under_way.pop()
        return is_begun

    def finish(self, *, wait: bool) -> Finished | None:
        """The oldest, if it is durable. Raises as LogStore.finish."""
        if not self._store.finish(wait=wait):
            return None
        commit, begun_s = self._under_way.popleft()
        return Finished(commit, time.perf_counter() - begun_s)

    def clear(self) -> None:
        """All that are under way are as unknown as the oldest."""
        self._under_way.clear()
        self.unwatch()

    def watch(self) -> None:
        """What the oldest waits for, if there is one."""
        wanted = self._store.waits_for() if self._under_way else None
        if wanted != self._watched:
            self.unwatch()
            if wanted is not None:
                self._ready.register(*wanted)  # select.poll and epoll have the same events
                self._watched = wanted

    def unwatch(self) -> None:
        if self._watched is not None:
            with contextlib.suppress(OSError):  # one that was closed has gone by itself
                self._ready.unregister(self._watched[0])
            self._watched = None
