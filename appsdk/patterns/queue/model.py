"""Data model of a queue: its state, what handlers take and return, and its errors. Times in nanoseconds of the
instance.

A task is ``waiting``, ``delayed`` until ``due_ns``, or ``running``: it is open. It ends as ``done``, ``dead`` (a dead
letter) or ``dropped``.
"""

from __future__ import annotations

import hashlib
import heapq
from typing import Any, Generic, Literal, TypeVar

import msgspec

from immortal.protocol.errors import ImmortalError
from immortal.protocol.identity import IdentityConflict
from immortal.protocol.safe_output import is_encodable

# Limits that several modules need. Sizes are in bytes.

SECOND_NS = 1_000_000_000
NAME_LENGTH_MAX = 200  # of functions, keys, deduplication keys and workers: all are in each checkpoint
NAMES_MAX = 100  # functions of one worker
PRIORITY_MAX = 1000  # and -PRIORITY_MAX
ARGUMENTS_SIZE_BYTES_MAX = 1 << 20  # of one task; larger things belong in a store, and their name in the task
RESULT_SIZE_BYTES_MAX = 1 << 20
REASON_LENGTH_MAX = 1000  # characters
TRIES_DEFAULT = 3
TRIES_MAX = 1000
TIMEOUT_DEFAULT_S = 60.0  # of one try
TIMEOUT_S_MAX = 7 * 24 * 3600.0
DELAY_S_MAX = 366 * 24 * 3600.0
RETRY_DELAY_DEFAULT_S = 1.0  # behind the first exception; doubled behind each further one
RETRY_DELAY_NS_MAX = 3600 * SECOND_NS
HEARTBEAT_S_MIN, HEARTBEAT_S_MAX = 0.01, 3600.0
WAIT_S_MAX = 20.0  # of one question for a result: a client that died is waited with no longer

State = Literal["waiting", "delayed", "running", "done", "dead", "dropped"]
Key = tuple[str, str]
"""A lane: (function, key). Limits of a function hold for each of its lanes by itself."""
Timer = tuple[str, str | int, str]
"""Key of a timer: ("delay" or "timeout", task, ""), ("worker", ID, ""), ("start", function, key), ("age", 0, "")."""


def check_name(what: str, name: str, *, empty: bool = False) -> None:
    """Check a name. Raises ValueError."""
    if not (name or empty) or len(name) > NAME_LENGTH_MAX or "\0" in name or not is_encodable(name):
        least = 0 if empty else 1
        raise ValueError(
            f"{what} {name[:50]!r}: {least} to {NAME_LENGTH_MAX} characters without zero bytes and lone "
            f"surrogates were expected"
        )


def _check_number(what: str, value: float, least: float, most: float, unit: str = "") -> None:
    if not least <= value <= most:
        raise ValueError(f"{what} {value:g}{unit}: {least:g} to {most:g}{unit} were expected")


class Submission(msgspec.Struct, frozen=True):
    """Task as it is submitted. ``arguments``: a MessagePack array. ``again``: also where a task with the same
    deduplication key has ended. Raises ValueError.
    """

    name: str
    arguments: bytes
    key: str = ""
    priority: int = 0
    delay_s: float = 0.0
    dedup: str = ""
    tries: int = TRIES_DEFAULT
    timeout_s: float = TIMEOUT_DEFAULT_S
    retry_delay_s: float = RETRY_DELAY_DEFAULT_S
    again: bool = False

    def __post_init__(self) -> None:
        check_name("function", self.name)
        check_name("key", self.key, empty=True)
        check_name("dedup", self.dedup, empty=True)
        _check_number("priority", self.priority, -PRIORITY_MAX, PRIORITY_MAX)
        _check_number("delay", self.delay_s, 0, DELAY_S_MAX, " s")
        _check_number("tries", self.tries, 1, TRIES_MAX)
        _check_number("timeout", self.timeout_s, 0.001, TIMEOUT_S_MAX, " s")
        _check_number("retry_delay", self.retry_delay_s, 0, RETRY_DELAY_NS_MAX / SECOND_NS, " s")
        if len(self.arguments) > ARGUMENTS_SIZE_BYTES_MAX:
            raise ValueError(
                f"the arguments of {self.name!r} take {len(self.arguments)} bytes, at most "
                f"{ARGUMENTS_SIZE_BYTES_MAX} are possible: keep them elsewhere, and submit where they are"
            )

    def digest(self) -> bytes:
        """Digest of what makes two submissions the same."""
        return hashlib.blake2b(self.name.encode() + b"\0" + self.arguments, digest_size=16).digest()


class Failure(msgspec.Struct, frozen=True):
    """Try that did not succeed."""

    attempt: int
    worker: str
    ended_ns: int
    reason: str


class Task(msgspec.Struct):
    """Task of a queue. ``attempt``: how often it was given to a worker. ``tries_left``: without the one that runs."""

    id: int
    name: str
    arguments: bytes
    key: str
    priority: int
    dedup: str
    digest: bytes
    tries: int
    timeout_ns: int
    retry_delay_ns: int
    submitted_ns: int
    state: State
    due_ns: int
    tries_left: int
    attempt: int = 0
    worker: str = ""
    began_ns: int = 0
    deadline_ns: int = 0
    ended: int = 0  # its place among those that have ended
    ended_ns: int = 0
    result: bytes = b""
    reason: str = ""
    failures: list[Failure] = []
    waits: list[int] = []  # who waits for its end


class Worker(msgspec.Struct):
    """Worker that the queue knows. ``call``: its call that waits for a task; 0: none. ``task``: the task that it works
    at; 0: none.

    Enabled, it waits or works. ``check_ns``: when it is looked whether it is silent or, disabled, to be forgotten.
    """

    id: str
    session: str
    names: list[str]
    heartbeat_ns: int
    heard_ns: int
    check_ns: int
    call: int = 0
    task: int = 0
    idle_order: int = 0
    disabled: str = ""  # why
    disabled_count: int = 0
    done: int = 0


class Limit(msgspec.Struct, frozen=True):
    """Limit for each key of a function: how many tasks run at once, how many start in any ``period_ns``. 0: without
    limit.
    """

    running_max: int = 0
    starts_max: int = 0
    period_ns: int = 0


class QueueState(msgspec.Struct):
    """Whole state of a queue."""

    tasks: dict[int, Task] = {}
    workers: dict[str, Worker] = {}
    limits: dict[str, Limit] = {}
    starts: dict[str, dict[str, list[int]]] = {}  # of functions with a rate, by key: the times in the last period
    offers: dict[int, tuple[int, int]] = {}  # by a worker's call that was ended: (task, attempt), NOTHING, SUPERSEDED
    task_id: int = 0  # the last one given
    call: int = 0
    idle_order: int = 0
    ended: int = 0
    late_replies: int = 0  # dropped
    dead_forgotten: int = 0
    describes: bool = True  # always; a log of 0.1 has it


NOTHING, SUPERSEDED = (0, 0), (-1, 0)


def nanoseconds(seconds: float) -> int:
    return round(seconds * SECOND_NS)


class Report(msgspec.Struct, frozen=True):
    """Reply of a worker. ``error``: why there is no result; ``again``: whether another try may help."""

    task: int
    attempt: int
    result: bytes = b""
    error: str = ""
    again: bool = True


class Given(msgspec.Struct, frozen=True):
    """Task as a worker gets it."""

    task: int
    attempt: int
    name: str
    arguments: bytes


class Offer(msgspec.Struct, frozen=True):
    """Outcome of a worker's call: it waits, gets a task, or neither: then the worker is to say ready again."""

    call: int
    waits: bool = False
    given: Given | None = None
    superseded: bool = False


class Outcome(msgspec.Struct, frozen=True):
    """State of a task. ``wait``: the number under which its end is told; 0: it has ended."""

    state: State
    wait: int = 0
    result: bytes = b""
    reason: str = ""
    tries: int = 0


class WorkerView(msgspec.Struct, frozen=True):
    id: str
    state: str  # idle, busy, disabled
    why: str
    functions: list[str]
    task: int
    done: int
    disabled_count: int
    heard_ns: int


class FunctionView(msgspec.Struct, frozen=True):
    name: str
    waiting: int
    delayed: int
    running: int
    workers: int
    limit: Limit | None


class TaskView(msgspec.Struct, frozen=True):
    id: int
    function: str
    state: State
    key: str
    priority: int
    dedup: str
    attempts: int
    worker: str
    reason: str
    submitted_ns: int
    due_ns: int
    ended_ns: int


class TaskDetail(msgspec.Struct, frozen=True):
    task: TaskView
    arguments: bytes
    result: bytes
    failures: list[Failure]
    tries: int
    tries_left: int
    timeout_ns: int


class Overview(msgspec.Struct, frozen=True):
    now_ns: int
    counts: dict[str, int]
    functions: list[FunctionView]
    workers: list[WorkerView]
    tasks: list[TaskView]
    late_replies: int
    dead_forgotten: int


# A priority queue whose entries can be moved and taken out.


E = TypeVar("E")

_STALE_MAX = 64  # beside as many as there are live ones


class IndexedPriorityQueue(Generic[E]):
    """Entries by rank, lowest first; of one rank by the entries themselves, so that the order never depends on
    history.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[Any, E]] = []
        self.ranks: dict[E, Any] = {}

    def __len__(self) -> int:
        return len(self.ranks)

    def put(self, entry: E, rank: Any) -> None:
        """Add an entry, or move it."""
        if self.ranks.get(entry) == rank:
            return
        self.ranks[entry] = rank
        heapq.heappush(self._heap, (rank, entry))
        if len(self._heap) > 2 * len(self.ranks) + _STALE_MAX:
            self._heap = [(rank, entry) for entry, rank in self.ranks.items()]
            heapq.heapify(self._heap)

    def remove(self, entry: E) -> None:
        self.ranks.pop(entry, None)

    def first(self) -> tuple[Any, E] | None:
        """Return (rank, entry) of the first entry; None: there is none."""
        heap = self._heap
        while heap:
            rank, entry = heap[0]
            if self.ranks.get(entry) == rank:
                return rank, entry
            heapq.heappop(heap)
        return None

    def pop(self) -> tuple[Any, E] | None:
        found = self.first()
        if found is not None:
            del self.ranks[found[1]]
        return found


# What can go wrong with a task.


class QueueError(ImmortalError):
    """Root of a queue's errors."""


class QueueFull(QueueError):  # noqa: N818 (what happened, not what is wrong)
    """Too many tasks wait, or too large ones. Nothing was submitted: try again later."""


class DedupConflict(IdentityConflict, QueueError):  # noqa: N818
    """The key ``dedup`` belongs to a task of another function, or with other arguments. See ``known``, ``given``."""


class UnknownTask(QueueError):  # noqa: N818
    """No such task exists; or it has ended, and is not kept any more."""


class Superseded(QueueError):  # noqa: N818
    """Raised when another process has said ready under this worker's ID since."""


class NotPossible(QueueError):  # noqa: N818
    """The task can't be retried, or dropped, in its present state."""


class TaskFailed(QueueError):  # noqa: N818
    """The task has no result: it is a dead letter, or was dropped. ``tries``: how often it was begun."""

    def __init__(self, task: int, reason: str, tries: int) -> None:
        super().__init__(f"task {task} failed: {reason}")
        self.task = task
        self.reason = reason
        self.tries = tries


class NotDone(QueueError, TimeoutError):  # noqa: N818
    """The task has not ended within the time given. It is still open."""


class Reject(Exception):  # noqa: N818
    """The task can't succeed: raised by a worker's function to make it a dead letter at once."""
