"""The durable log of one instance, in LMDB: docs/LOG_FORMAT.md says what is on disk.

create_log, open_log    open for writing: an LmdbLogStore, the core's LogStore
open_reader             open for reading beside a live writer: a LogReader
verify_log              a walk over all that a log holds; says what is damaged and what that means
MemoryLogStore          the same interface in memory, for tests and the simulator
"""

from coordinator.log.environment import LogIdentity, log_exists
from coordinator.log.folder import create_log, open_log, open_reader
from coordinator.log.lock import is_locked
from coordinator.log.memory import MemoryLogStore
from coordinator.log.reader import LoggedValue, LogReader
from coordinator.log.store import LmdbLogStore
from coordinator.log.values import check_value, verify_value
from coordinator.log.verify import Finding, LogVerification, Severity, verify_log

__all__ = [
    "Finding",
    "LmdbLogStore",
    "LogIdentity",
    "LogReader",
    "LogVerification",
    "LoggedValue",
    "MemoryLogStore",
    "Severity",
    "check_value",
    "create_log",
    "is_locked",
    "log_exists",
    "open_log",
    "open_reader",
    "verify_log",
    "verify_value",
]
