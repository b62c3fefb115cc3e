"""The durable log of one instance, over a backend. docs/LOG_FORMAT.md specifies its rows.

create_log, open_log    open for writing: a RowLogStore, which is the core's LogStore
open_reader             open for reading beside a live writer: a LogReader

rows.py turns the core's types into rows, view_queries.py turns rows back; backend.py is the interface to backends, and
open.py knows which backends exist. A running coordinator does not import these modules:

verify.verify_log       walks over a whole log; reports what is damaged, and what that means
cut.LogCutter           cuts the end of a log off, and keeps what it cuts
backup.back_up          makes a copy, or updates an earlier one
memory.MemoryLogStore   a store in memory that crashes, fails and rots when a test says so
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
