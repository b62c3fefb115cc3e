"""The durable log of one instance, in LMDB: docs/LOG_FORMAT.md says what is on disk.

create_log, open_log    open for writing: an LmdbLogStore, the core's LogStore
open_reader             open for reading beside a live writer: a LogReader

What no running coordinator needs is in modules of its own, which it does not import:

verify.verify_log       a walk over all that a log holds; says what is damaged and what that means (findings)
cut.LogCutter           cuts the end of a log off by hand, and keeps what it cuts (cut_plan)
memory.MemoryLogStore   the same interface in memory, for tests and the simulator
"""

from coordinator.log.environment import LogIdentity, log_exists
from coordinator.log.folder import create_log, open_log, open_reader
from coordinator.log.lock import is_locked
from coordinator.log.reader import LoggedValue, LogReader, TrimmedError
from coordinator.log.store import LmdbLogStore
from coordinator.log.values import check_value, verify_value

__all__ = [
    "LmdbLogStore",
    "LogIdentity",
    "LogReader",
    "LoggedValue",
    "TrimmedError",
    "check_value",
    "create_log",
    "is_locked",
    "log_exists",
    "open_log",
    "open_reader",
    "verify_value",
]
