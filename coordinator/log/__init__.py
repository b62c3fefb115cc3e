"""Durable log of one instance, over a backend. docs/LOG_FORMAT.md specifies its rows.

create_log, open_log    open for writing: a RowLogStore, which is the core's LogStore
open_reader             open for reading beside a live writer: a LogReader

rows.py turns the core's types into rows, view_queries.py turns rows back; backend.py is the interface to backends, and
open.py knows which backends exist. A running coordinator does not import these modules:

verify.verify_log       checks a whole log; reports what is damaged, and the consequences
cut.LogCutter           cuts off the end of a log, and keeps the removed part
verify.back_up          makes a backup, or updates an earlier one
memory.MemoryLogStore   a store in memory that crashes, fails and corrupts data on a test's order
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from immortal.coordinator.log.identity import LogIdentity, check_value, verify_value
from immortal.coordinator.log.open import create_log, is_locked, log_exists, open_log, open_reader
from immortal.coordinator.log.store import RowLogStore

if TYPE_CHECKING:
    from immortal.coordinator.log.reader import LoggedValue, LogReader, TrimmedError

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


def __getattr__(name: str) -> Any:
    """Import the reader on first use: a running coordinator reads through its store, and needs no reader."""
    if name in ("LogReader", "LoggedValue", "TrimmedError"):
        from immortal.coordinator.log import reader

        return getattr(reader, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
