"""When the supervisor hears that its coordinator is ready: an app, or the next one, is recovered and takes input."""

from __future__ import annotations

from collections.abc import Callable

from immortal.coordinator.core.notices import CheckpointTaken, Notice, Recovered


class Readiness:
    """A sink: ``tell`` is called at each recovery, and at the first checkpoint of an app that is begun."""

    def __init__(self, tell: Callable[[], None]) -> None:
        self._tell = tell
        self._was_ready = False

    def take(self, notice: Notice) -> None:
        if isinstance(notice, Recovered) or (isinstance(notice, CheckpointTaken) and not self._was_ready):
            self._was_ready = True
            self._tell()
