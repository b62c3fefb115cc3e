"""Who listens at an inproc endpoint: ZeroMQ makes no inproc connection anew, and tells nobody that one has ended.

Links watch their endpoint, listeners tell of it. Telling is one step with binding and letting go, so a link that is
connected after it was told that its listener went is connected to the next one.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from immortal.coordinator.messenger.sockets import Context

Watcher = Callable[[bool], None]
"""Told True when there is a listener, False when it goes; in the listener's thread, so it only takes note."""

_lock = threading.Lock()
_watchers: dict[tuple[int, str], list[Watcher]] = {}


def is_inproc(endpoint: str) -> bool:
    return endpoint.startswith("inproc://")


def watch(context: Context, endpoint: str, watcher: Watcher) -> None:
    """Tell ``watcher`` of the listeners at ``endpoint`` from now on."""
    with _lock:
        _watchers.setdefault((context.underlying, endpoint), []).append(watcher)


def unwatch(context: Context, endpoint: str, watcher: Watcher) -> None:
    key = (context.underlying, endpoint)
    with _lock:
        watchers = _watchers.get(key, [])
        if watcher in watchers:
            watchers.remove(watcher)
        if not watchers:
            _watchers.pop(key, None)


@contextlib.contextmanager
def telling(context: Context, endpoint: str, listening: bool) -> Iterator[None]:
    """Around binding to ``endpoint`` and letting go of it. Nobody is told if that fails, or of other endpoints."""
    if not is_inproc(endpoint):
        yield
        return
    with _lock:
        yield
        for watcher in _watchers.get((context.underlying, endpoint), ()):
            watcher(listening)
