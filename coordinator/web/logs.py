"""The readers of logs: one at a time for each, since a process can't open one twice; gone when the answer is made."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from immortal.coordinator.config import InstanceSettings
from immortal.coordinator.core.words import Methods
from immortal.coordinator.instances import own_logs
from immortal.coordinator.log import log_exists
from immortal.coordinator.web.errors import WebError
from immortal.replay import ReplayError
from immortal.replay.inspection import method_names

if TYPE_CHECKING:
    from immortal.coordinator.log import LogReader

WAIT_S = 20.0
"""For another request that reads the same log. Each reads a bounded part of it."""


class Logs:
    """For all threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        self._methods: dict[str, Methods | str] = {}

    @contextmanager
    def locked(self, settings: InstanceSettings) -> Iterator[None]:
        """Nobody else of this process reads this log meanwhile. Raises WebError."""
        with self._lock:
            lock = self._locks[str(settings.log)]
        if not lock.acquire(timeout=WAIT_S):
            raise WebError(f"the log of {settings.name!r} is being read by other requests: try again", 503)
        try:
            yield
        finally:
            lock.release()

    @contextmanager
    def reader(self, settings: InstanceSettings) -> Iterator[LogReader]:
        """Raises WebError where there is no log yet, LogError."""
        if not log_exists(settings.log):
            raise WebError(f"{settings.name!r} has not been started yet: it has no log", 404)
        with self.locked(settings), own_logs.open_reader(settings, check=False) as reader:
            yield reader

    def methods(self, settings: InstanceSettings) -> tuple[Methods, str]:
        """What the instance's class names; and why it names nothing, "" where it does."""
        app = settings.app
        if app is None:
            return {}, 'its settings name no class (app = "module:Class"), so methods are shown by their numbers'
        found = self._methods.get(app)
        if found is None:
            try:
                found = method_names(app)
            except ReplayError as error:
                found = str(error).rstrip("\n").split("\n")[-1]
            self._methods[app] = found
        if isinstance(found, str):
            return {}, f"methods are shown by their numbers: {found}"
        return found, ""
