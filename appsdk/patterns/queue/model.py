"""Data model of a queue: its state, the values of its handlers, and its errors. Times are nanoseconds of the
instance.

An open task is ``waiting``, ``delayed`` until ``due_ns``, or ``running``. An ended task is ``done``, ``dead`` (a dead
letter) or ``dropped``.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Collection
from typing import Any, Generic, Literal, TypeVar

import msgspec

from immortal.protocol.errors import ImmortalError
from immortal.protocol.identity import IdentityConflict
from immortal.protocol.safe_output import is_encodable

# Limits that several modules use. Sizes are in bytes.

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
RETRY_DELAY_DEFAULT_S = 1.0  # after the first exception; doubled after each further one
RETRY_DELAY_NS_MAX = 3600 * SECOND_NS
HEARTBEAT_S_MIN, HEARTBEAT_S_MAX = 0.01, 3600.0
WAIT_S_MAX = 20.0  # of one request for a result: the queue stops waiting for a client that died

State = Literal["waiting", "delayed", "running", "done", "dead", "dropped"]
Key = tuple[str, str]
"""Lane of a queue: (function, key). A limit of a function applies to each of its lanes separately."""
Timer = tuple[str, str | int, str]
"""Key of a timer: ("delay" or "timeout", task, ""), ("worker", ID, ""), ("start", function, key), ("age", 0, "")."""


def check_name(role: str, name: str, *, empty: bool = False) -> None:
    """Check a name. Raises ValueError."""
    if not (name or empty) or len(name) > NAME_LENGTH_MAX or "\0" in name or not is_encodable(name):
        least = 0 if empty else 1
        raise ValueError(
            f"{role} {name[:50]!r}: {least} to {NAME_LENGTH_MAX} characters without zero bytes and lone "
            f"surrogates were expected"
        )


def check_number(name: str, value: float, least: float, most: float, unit: str = "") -> None:
    if not least <= value <= most:
        raise ValueError(f"{name} {value:g}{unit}: {least:g} to {most:g}{unit} were expected")


def check_worker(worker_id: str, names: Collection[str], heartbeat_s: float) -> None:
    """Check the ID, functions and heartbeat of a worker, which checks them too before it asks. Raises ValueError."""
    check_name("worker", worker_id)
    check_number("number of a worker's functions", len(names), 1, NAMES_MAX)
    for name in names:
        check_name("function", name)
    check_number("heartbeat", heartbeat_s, HEARTBEAT_S_MIN, HEARTBEAT_S_MAX, " s")


class Submission(msgspec.Struct, frozen=True):
    """Task to submit. ``arguments``: a MessagePack array. ``again``: create a new task if the one with the same
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
        check_number("priority", self.priority, -PRIORITY_MAX, PRIORITY_MAX)
        check_number("delay", self.delay_s, 0, DELAY_S_MAX, " s")
        check_number("tries", self.tries, 1, TRIES_MAX)
        check_number("timeout", self.timeout_s, 0.001, TIMEOUT_S_MAX, " s")
        check_number("retry_delay", self.retry_delay_s, 0, RETRY_DELAY_NS_MAX / SECOND_NS, " s")
        if len(self.arguments) > ARGUMENTS_SIZE_BYTES_MAX:
            raise ValueError(
                f"the arguments of {self.name!r} take {len(self.arguments)} bytes, at most "
                f"{ARGUMENTS_SIZE_BYTES_MAX} are possible: keep them elsewhere, and submit where they are"
            )

    def digest(self) -> bytes:
        """Return the digest by which two submissions are the same: of function and arguments."""
        return hashlib.blake2b(self.name.encode() + b"\0" + self.arguments, digest_size=16).digest()


class Failure(msgspec.Struct, frozen=True):
    """Failed try of a task."""

    attempt: int
    worker: str
    ended_ns: int
    reason: str


class Task(msgspec.Struct):
    """Task of a queue. ``attempt``: number of tries so far. ``tries_left``: without the one that runs."""

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
    ended: int = 0  # its place among the ended tasks
    ended_ns: int = 0
    result: bytes = b""
    reason: str = ""
    failures: list[Failure] = []
    waits: list[int] = []  # numbers of the callers that wait for its end


class Worker(msgspec.Struct):
    """Worker that the queue knows. ``call``: its call that waits for a task; 0: none. ``task``: the task that it works
    on; 0: none.

    An enabled worker waits or works. ``check_ns``: when to check whether it is silent; for a disabled one, to drop it.
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
    disabled: str = ""  # the reason; "": enabled
    disabled_count: int = 0
    done: int = 0


class Limit(msgspec.Struct, frozen=True):
    """Limit for each key of a function: running tasks, and starts in any ``period_ns``. 0: no limit."""

    running_max: int = 0
    starts_max: int = 0
    period_ns: int = 0


class QueueState(msgspec.Struct):
    """Whole state of a queue."""

    tasks: dict[int, Task] = {}
    workers: dict[str, Worker] = {}
    limits: dict[str, Limit] = {}
    starts: dict[str, dict[str, list[int]]] = {}  # of functions with a rate, by key: the times in the last period
    offers: dict[int, tuple[int, int]] = {}  # by a worker's ended call: (task, attempt), NOTHING, SUPERSEDED
    task_id: int = 0  # the last one used
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
    """Reply of a worker. ``error``: why there is no result; ``again``: another try can help."""

    task: int
    attempt: int
    result: bytes = b""
    error: str = ""
    again: bool = True


class Given(msgspec.Struct, frozen=True):
    """Task in the form that a worker gets."""

    task: int
    attempt: int
    name: str
    arguments: bytes


class Offer(msgspec.Struct, frozen=True):
    """Outcome of a worker's call: it waits, gets a task, or neither (then the worker must say ready again)."""

    call: int
    waits: bool = False
    given: Given | None = None
    superseded: bool = False


class Outcome(msgspec.Struct, frozen=True):
    """State of a task. ``wait``: the number under which its end is reported; 0: it has ended."""

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


# A priority queue whose entries can be moved and removed.


E = TypeVar("E")

_STALE_MAX = 64  # stale heap entries allowed, beside as many as there are live ones


class IndexedPriorityQueue(Generic[E]):
    """Priority queue of entries by rank, lowest first; entries of one rank by themselves, so that the order does not
    depend on history.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[Any, E]] = []
        self.ranks: dict[E, Any] = {}

    def __len__(self) -> int:
        return len(self.ranks)

    def put(self, entry: E, rank: Any) -> None:
        """Add an entry, or change its rank."""
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
        """Return (rank, entry) of the first entry; None if there is none."""
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


# Errors of tasks.


class QueueError(ImmortalError):
    """Root of a queue's errors."""


class QueueFull(QueueError):  # noqa: N818 (what happened, not what is wrong)
    """Raised if too many or too large tasks wait. Nothing was submitted: try again later."""


class DedupConflict(IdentityConflict, QueueError):  # noqa: N818
    """Raised if ``dedup`` belongs to a task with another function or other arguments. See ``known``, ``given``."""


class UnknownTask(QueueError):  # noqa: N818
    """Raised if no such task exists, or it has ended and is no longer kept."""


class Superseded(QueueError):  # noqa: N818
    """Raised if another process has said ready under this worker's ID since."""


class NotPossible(QueueError):  # noqa: N818
    """Raised if the task can't be retried or dropped in its present state."""


class TaskFailed(QueueError):  # noqa: N818
    """Raised if the task has no result: it is a dead letter, or was dropped. ``tries``: number of its tries."""

    def __init__(self, task: int, reason: str, tries: int) -> None:
        super().__init__(f"task {task} failed: {reason}")
        self.task = task
        self.reason = reason
        self.tries = tries


class NotDone(QueueError, TimeoutError):  # noqa: N818
    """Raised if the task has not ended within the given time. It is still open."""


class Reject(Exception):  # noqa: N818
    """Raised by a worker's function if the task can't succeed: the task becomes a dead letter at once."""
