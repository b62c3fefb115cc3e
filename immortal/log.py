"""Readers of logs. `docs/LOG_FORMAT.md`."""

from immortal.coordinator.log import (
    LoggedValue,
    LogIdentity,
    LogReader,
    RowLogStore,
    TrimmedError,
    check_value,
    create_log,
    is_locked,
    log_exists,
    open_log,
    open_reader,
    verify_value,
)

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
