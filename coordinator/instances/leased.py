"""Where instances are whose logs other machines reach: as the leases of their logs say, at once when that changes."""

from __future__ import annotations

from immortal.coordinator.config.values import is_endpoint
from immortal.coordinator.log.backend import Watching
from immortal.coordinator.log.open import place_of
from immortal.coordinator.log_url import is_in_folder
from immortal.protocol.errors import ImmortalError


class LeasedPlaces:
    """One watch, with a thread and a connection of its own, for each log that was asked about."""

    def __init__(self) -> None:
        self._watches: dict[str, Watching | None] = {}

    def endpoint(self, log: str) -> str | None:
        """None where it is not known: yet, or at all. It waits for nothing."""
        if is_in_folder(log):
            return None
        if log not in self._watches:
            try:
                self._watches[log] = place_of(log).watch()
            except ImmortalError:  # no driver here for it: the settings say where its instance is
                self._watches[log] = None
        watch = self._watches[log]
        found = None if watch is None else watch.endpoint
        return found if found is not None and is_endpoint(found) else None  # whoever wrote it

    @property
    def is_used(self) -> bool:
        return any(watch is not None for watch in self._watches.values())

    def close(self) -> None:
        for watch in self._watches.values():
            if watch is not None:
                watch.close(0)
