"""The log of one instance as its coordinator opens it: to write it, or to read what another process writes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from immortal.coordinator.config import InstanceSettings
from immortal.coordinator.instances import own_logs
from immortal.coordinator.log import RowLogStore
from immortal.coordinator.log.backend import Options, StandbyRegistration
from immortal.coordinator.log.open import place_of
from immortal.coordinator.notices import Notices

if TYPE_CHECKING:
    from immortal.coordinator.log.reader import LogReader

HOLDER_REFRESH_S = 1.0  # between lookups of the holder's name, which read a list of all locks


class InstanceLog:
    """Access to the log of ``settings``.

    ``trust_pickle``: it may come from another home, with states written by pickle.
    """

    def __init__(self, settings: InstanceSettings, log: Notices, *, trust_pickle: bool) -> None:
        self._settings = settings
        self._log = log
        self._trust_pickle = trust_pickle
        self._place = place_of(settings.log)
        self._reader: LogReader | None = None  # the last one
        self._holder = "another process"  # last known name
        self._named_s: float | None = None  # time of the last lookup

    @property
    def is_shared(self) -> bool:
        """True if other machines reach the log."""
        return self._place.is_shared

    def open_store(self) -> RowLogStore:
        """Open the log for writing, or make a new one.

        Raises LogLockedError where another process has it, LogError, PickleRefusedError.
        """
        settings, log = self._settings, self._log
        if self._reader is not None:
            self._place.sequence_id_required_min = max(
                self._place.sequence_id_required_min, self._reader.sequence_id_read_max
            )
        store = own_logs.open_log(settings, self._place)
        try:
            own_logs.adopt_log(settings, store, trust_pickle=self._trust_pickle)
            if store.macs is not None:
                marker = store.macs.marker
                log.info("the log is authenticated", key=marker.key_id, from_record=marker.first_sequence_id or None)
            if (opened := self._place.make_private()) is not None:
                log.warning(opened)
            for line in store.repairs:
                log.warning(line)
        except BaseException:
            store.close()
            raise
        return store

    def open_reader(self) -> LogReader | None:
        """Open the log for reading beside its writer; None where there is none yet. Raises LogError."""
        if not self._place.exists():
            return None
        self._reader = own_logs.open_reader(self._settings, trust_pickle=self._trust_pickle)
        return self._reader

    def follow(self, nudge: Callable[[], None]) -> StandbyRegistration | None:
        """Register as a standby, as :meth:`Place.follow` specifies."""
        settings = self._settings
        options = Options(
            lease_s=settings.lease_s, endpoint=settings.peer, checkpoints_to=settings.checkpoints_to or ""
        )
        return self._place.follow(options, nudge)

    def holder(self) -> str | None:
        """Return a description of the process that writes the log; None: none does."""
        if not self._place.is_live():
            self._named_s = None
            return None
        if self._named_s is None or time.monotonic() - self._named_s >= HOLDER_REFRESH_S:
            self._named_s = time.monotonic()
            self._holder = self._place.holder() or self._holder
        return self._holder
