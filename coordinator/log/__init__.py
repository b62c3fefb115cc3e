"""The durable log of one instance, over a backend: docs/LOG_FORMAT.md says what its rows are.

create_log, open_log    open for writing: a RowLogStore, the core's LogStore
open_reader             open for reading beside a live writer: a LogReader

rows.py and reading.py turn the core's words into rows and back; backend.py says what a backend does with them, and
open.py which backends there are. What no running coordinator needs is in modules of its own, which it does not import:

verify.verify_log       a walk over all that a log holds; says what is damaged and what that means (findings)
cut.LogCutter           cuts the end of a log off by hand, and keeps what it cuts (cut_plan)
backup.back_up          a copy that the next one brings up to date
memory.MemoryLogStore   a log in memory that crashes, fails and rots when a test says so
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
    """A running coordinator reads its log through its store: the reader is not in its memory."""
    if name in ("LogReader", "LoggedValue", "TrimmedError"):
        from immortal.coordinator.log import reader

        return getattr(reader, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
