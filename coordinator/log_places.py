"""The log of one instance as its coordinator opens it: to write it, or to read what another process writes."""

from __future__ import annotations

import contextlib
import os
import time

from coordinator import own_logs
from coordinator.config import InstanceSettings
from coordinator.log import LmdbLogStore, LogReader, log_exists
from coordinator.log.lock import LOCK_FILE_NAME, is_locked
from coordinator.log.modes import tighten_log
from coordinator.logs import Events
from protocol.file_lock import holder_of

NAMED_S = 1.0  # who holds a lock is read from a list of all locks: not at each look whether it is free


class LogPlaces:
    """That of ``settings``. ``trust_pickle``: it may be of another home, with states that pickle wrote."""

    def __init__(self, settings: InstanceSettings, log: Events, *, trust_pickle: bool) -> None:
        self._settings = settings
        self._log = log
        self._trust_pickle = trust_pickle
        self._holder = "another process"  # as it could be named last
        self._named_s: float | None = None  # when that was looked up

    def open_store(self) -> LmdbLogStore:
        """The log, which is ours to write for as long as it is open; a new one where there is none.

        Raises LogLockedError where another process has it, LogError, PickleRefusedError.
        """
        settings, log = self._settings, self._log
        store = own_logs.open_log(settings)
        try:
            own_logs.take_for_own(settings, store, trust_pickle=self._trust_pickle)
            if store.macs is not None:
                marker = store.macs.marker
                log.info("the log is authenticated", key=marker.key_id, from_record=marker.first_sequence_id or None)
            if (opened := tighten_log(settings.log)) is not None:
                log.warning(opened)
            for line in store.rebuilt:
                log.warning(line)
        except BaseException:
            store.close()
            raise
        return store

    def open_reader(self) -> LogReader | None:
        """The log, beside its writer; None where there is none yet. Raises LogError."""
        if not log_exists(self._settings.log):
            return None
        return own_logs.open_reader(self._settings, trust_pickle=self._trust_pickle)

    def holder(self) -> str | None:
        """Who writes the log, in words; None: nobody does."""
        folder = self._settings.log
        if not is_locked(folder):
            self._named_s = None
            return None
        if self._named_s is not None and time.monotonic() - self._named_s < NAMED_S:
            return self._holder
        self._named_s = time.monotonic()
        with contextlib.suppress(OSError):
            descriptor = os.open(folder / LOCK_FILE_NAME, os.O_RDONLY | os.O_CLOEXEC)
            try:
                found = holder_of(descriptor)
            finally:
                os.close(descriptor)
            self._holder = found if found.startswith("process") else self._holder
        return self._holder
