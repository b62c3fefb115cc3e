"""Readers of logs. `docs/LOG_FORMAT.md`."""

from immortal.coordinator.log.identity import LogIdentity, check_value, verify_value
from immortal.coordinator.log.open import create_log, is_locked, log_exists, open_log, open_reader
from immortal.coordinator.log.reader import LoggedValue, LogReader, TrimmedError
from immortal.coordinator.log.store import RowLogStore

__all__ = [
    "LogIdentity",
    "LogReader",
    "LoggedValue",
    "RowLogStore",
    "TrimmedError",
    "check_value",
    "create_log",
    "is_locked",
    "log_exists",
    "open_log",
    "open_reader",
    "verify_value",
]
