"""The durable log of one instance, in LMDB: docs/LOG_FORMAT.md says what is on disk.

create_log, open_log    open for writing: an LmdbLogStore, the core's LogStore
open_reader             open for reading beside a live writer: a LogReader
verify_log              a walk over all that a log holds; says what is damaged and what that means
LogCutter               cuts the end of a log off by hand, and keeps what it cuts
MemoryLogStore          the same interface in memory, for tests and the simulator
"""

from coordinator.log.cut import LogCutter
from coordinator.log.cut_plan import CutPlan, CutRefusedError, LostMessages
from coordinator.log.environment import LogIdentity, log_exists
from coordinator.log.findings import Finding, Severity
from coordinator.log.folder import create_log, open_log, open_reader
from coordinator.log.lock import is_locked
from coordinator.log.memory import MemoryLogStore
from coordinator.log.reader import LoggedValue, LogReader, TrimmedError
from coordinator.log.store import LmdbLogStore
from coordinator.log.values import check_value, verify_value
from coordinator.log.verify import LogVerification, verify_log

__all__ = [
    "CutPlan",
    "CutRefusedError",
    "Finding",
    "LmdbLogStore",
    "LogCutter",
    "LogIdentity",
    "LogReader",
    "LogVerification",
    "LoggedValue",
    "LostMessages",
    "MemoryLogStore",
    "Severity",
    "TrimmedError",
    "check_value",
    "create_log",
    "is_locked",
    "log_exists",
    "open_log",
    "open_reader",
    "verify_log",
    "verify_value",
]
