"""Rules of one batch: runs of tasks and results as MessagePack arrays, sets of task numbers, limits, errors. No I/O.

A cluster never decodes a task. It cuts arrays where needed, and passes the bytes on. Tasks arrive in order, are given
to workers, and end once each:

put -> waiting -> given to a worker -> done
          ^             | the worker is lost
          +-------------+ ... with this task alone, and not for the first time: done, as a failure
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Sequence

import msgspec

from immortal.protocol import decoding
from immortal.protocol.errors import ImmortalError
from immortal.protocol.identity import IdentityConflict, chained_digest, digest_prefix

# Limits of the pipeline, with their reasons.

RUN_TASKS_MAX = 4096  # of one message: its fixed cost is negligible beside so many tasks
RUN_SIZE_BYTES_MAX = 512 << 10  # of one message, so that none delays the others; one larger task is sent alone
TASK_SIZE_BYTES_MAX = 15 << 20  # of a task, and of a result: a client's call takes 16 MiB
FLUSH_S = 0.1  # a waiting task is sent with the next one after this time, however few there are

WAITING_TASKS_MAX = 16 * RUN_TASKS_MAX  # of one batch, not given to a worker yet: then its ventilator waits
JOINED_TASKS_MAX = 256  # waiting tasks are joined up to this number, so that a slow ventilator makes no small runs
JOINED_SIZE_BYTES_MAX = 16 << 10  # ... and below this size, so that joining costs little
WAITING_SIZE_BYTES_MAX = 8 << 20
BATCHES_OPEN_MAX = 1000  # of one cluster
BATCHES_ENDED_MAX = 10_000  # whose last progress a cluster keeps; the oldest are removed
NAME_SIZE_BYTES_MAX = 128  # of a batch, a function, a worker
REASON_SIZE_CHARS_MAX = 500  # of a failed task's reason

RUN_S = 0.5  # of work that a worker takes at once: the cost of its death, and the interval of its messages
BEAT_S = 1.0  # between two messages of a worker at work
IDLE_S = 5.0  # between two requests of a worker without work, unless it is woken
SILENCE_S = 5.0  # a worker without a message for so long is lost
DEATHS_MAX = 3  # a task is set aside after so many workers were lost with it alone
LOST_PARTS = 16  # lost tasks are split into so many parts, so that a task that kills workers is found


class BatchError(ImmortalError):
    """Raised if the cluster or the collector can't do that with this batch: what came, and what was expected."""


class BatchConflict(IdentityConflict, BatchError):  # noqa: N818 (what happened, not what is wrong)
    """Raised if the name belongs to a batch with another function, collector or tasks. See ``known``, ``given``."""


_encode = msgspec.msgpack.encode
_items = decoding.Decoder(list[msgspec.Raw])


class Life(msgspec.Struct, frozen=True):
    """Identity of a batch among others of its name: the cluster, and the cluster's number of batches begun by then.

    ``again``: there was a batch of this name before.
    """

    cluster: str
    number: int
    again: bool = False

    def __str__(self) -> str:
        return f"batch {self.number} of cluster {self.cluster!r}"


class Run(msgspec.Struct, frozen=True, omit_defaults=True):
    """Run of tasks for a worker, numbered from ``first``. ``life``: of the batch."""

    batch: str
    function: str
    first: int
    count: int
    tasks: bytes
    life: Life | None = None


class Response(msgspec.Struct, frozen=True):
    """Results of ``count`` tasks from ``first`` on: ``values``, an array, with nil for each task in ``failures``.

    ``failures``: the reasons, by task number.
    """

    batch: str
    first: int
    count: int
    values: bytes
    failures: dict[int, str] = {}

    def part(self, start: int, stop: int) -> Response:
        """Return the results from number ``start`` up to, not including, ``stop``."""
        if (start, stop) == (self.first, self.first + self.count):
            return self
        values = cut(self.values, start - self.first, stop - self.first)
        failures = {number: reason for number, reason in self.failures.items() if start <= number < stop}
        return Response(self.batch, start, stop - start, values, failures)


class Result(msgspec.Struct, frozen=True):
    """Result of one task. ``error``: the reason for a missing ``value``; None if there is one."""

    number: int
    value: object
    error: str | None = None


def array(items: Sequence[bytes]) -> bytes:
    """Return one MessagePack array of encoded values."""
    return _encode([msgspec.Raw(item) for item in items])


def split(values: bytes, name: str = "tasks") -> list[msgspec.Raw]:
    """Split a MessagePack array. Raises BatchError if it is none; ``name`` should be one."""
    try:
        return _items.decode(values)
    except decoding.DecodeError as error:
        raise BatchError(f"{name}: a MessagePack array was expected: {error}") from None


def cut(values: bytes, start: int, stop: int) -> bytes:
    """Return the items from ``start`` up to, not including, ``stop``, as an array."""
    return _encode(split(values)[start:stop])


def joined(first: bytes, second: bytes) -> bytes:
    return _encode(split(first) + split(second))


def results(response: Response) -> list[Result]:
    """Return one result for each task."""
    failures = response.failures
    values: list[object] = decoding.decode(response.values)
    numbered = enumerate(values, response.first)
    if not failures:
        return [Result(number, value) for number, value in numbered]
    return [Result(number, value, failures.get(number)) for number, value in numbered]


# A set of task numbers; its memory grows with the number of its gaps.


class Ranges(msgspec.Struct):
    """Set of numbers as intervals: ``starts[i]`` up to, not including, ``stops[i]``; sorted, none touches the next."""

    starts: list[int] = msgspec.field(default_factory=list)
    stops: list[int] = msgspec.field(default_factory=list)

    def add(self, start: int, stop: int) -> None:
        """Add all numbers from ``start`` up to, not including, ``stop``."""
        if start >= stop:
            return
        low = bisect_left(self.stops, start)  # the first that touches the range or is after its start
        high = bisect_right(self.starts, stop)  # the first that is completely after it
        if low < high:
            start, stop = min(start, self.starts[low]), max(stop, self.stops[high - 1])
        self.starts[low:high] = [start]
        self.stops[low:high] = [stop]

    def missing(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield the intervals of ``start`` up to ``stop`` that are not in the set, in order."""
        for index in range(bisect_right(self.stops, start), len(self.starts)):
            if self.starts[index] >= stop:
                break
            if start < self.starts[index]:
                yield start, self.starts[index]
            start = self.stops[index]
        if start < stop:
            yield start, stop

    def add_results(self, response: Response) -> list[Response]:
        """Add the numbers of results, and return the new results."""
        stop = response.first + response.count
        new = [response.part(*gap) for gap in self.missing(response.first, stop)]
        self.add(response.first, stop)
        return new

    def covers(self, start: int, stop: int) -> bool:
        return next(self.missing(start, stop), None) is None

    def __len__(self) -> int:
        return sum(self.stops) - sum(self.starts)


# Tasks of a batch, from put to done.


_NIL = b"\x91\xc0"  # an array of one nil


class TaskSlice(msgspec.Struct, frozen=True):
    """Tasks with consecutive numbers.

    ``run_tasks_max``: largest number in one run. ``deaths``: number of workers that were lost with this task alone.
    """

    first: int
    count: int
    tasks: bytes
    run_tasks_max: int = RUN_TASKS_MAX
    deaths: int = 0

    @property
    def stop(self) -> int:
        return self.first + self.count

    def part(self, start: int, stop: int) -> TaskSlice:
        if (start, stop) == (self.first, self.stop):
            return self
        tasks = cut(self.tasks, start - self.first, stop - self.first)
        return msgspec.structs.replace(self, first=start, count=stop - start, tasks=tasks)


class Progress(msgspec.Struct, frozen=True):
    """Progress of one batch, in tasks. ``size``: None until its end has arrived. ``failed`` tasks also count as done.

    ``given``: workers have them. ``resent``: given again because a worker was lost. ``workers``: workers that the
    cluster has heard recently, for any batch.
    """

    batch: str
    put: int
    size: int | None
    given: int
    done: int
    failed: int
    resent: int
    workers: int

    @property
    def is_complete(self) -> bool:
        return self.done == self.size

    def __str__(self) -> str:
        of = "?" if self.size is None else str(self.size)
        return (
            f"{self.batch}: {self.done} of {of} done, {self.failed} of them failed; {self.put} put, "
            f"{self.given} given, {self.resent} resent; {self.workers} workers"
        )


class Contents(msgspec.Struct, frozen=True):
    """Identity of a batch beside its name. ``digest``: of its first ``count`` tasks. ``ended``: all tasks are known."""

    function: str
    collector: str
    count: int = 0
    digest: bytes = b""
    ended: bool = False
    life: Life | None = None

    def __str__(self) -> str:
        digest = digest_prefix(self.digest) or "not known"
        tasks = f"{self.count} tasks (digest {digest})" if self.count or self.ended else ""
        has = f" with {'' if self.ended else 'so far '}{tasks}" if tasks else ""
        return f"for {self.function!r} and collector {self.collector!r}{has}"

    def check_target(self, name: str, function: str, collector: str) -> None:
        """Check that a batch has this function and collector. Raises BatchConflict."""
        if (self.function, self.collector) != (function, collector):
            raise self.conflict(name, Contents(function, collector))

    def check_tasks(self, name: str, digest: bytes) -> None:
        """Compare ``digest`` with that of as many tasks; empty: unknown to the sender. Raises BatchConflict."""
        if digest and self.digest and digest != self.digest:
            raise self.conflict(name, msgspec.structs.replace(self, digest=digest))

    def check_life(self, name: str, life: Life | None) -> None:
        """Check that a message is for this batch, not an earlier one of its name. Raises BatchConflict."""
        if life is not None and life != self.life:
            raise self.conflict(name, f"{life}, which had the name before and has ended")

    def conflict(self, name: str, given: Contents | str) -> BatchConflict:
        advice = (
            "give another batch another name, or begin it with again=True"
            if self.ended
            else "give another batch another name"
        )
        return BatchConflict(f"batch {name!r}", str(self), str(given), advice)


def tasks_of(name: str, first: int, tasks: bytes) -> list[msgspec.Raw]:
    """Split an array of tasks. Raises BatchError."""
    return split(tasks, f"batch {name!r}, tasks from {first} on")


class Batch(msgspec.Struct):
    function: str
    collector: str
    put_count: int = 0
    size: int | None = None
    fresh: list[TaskSlice] = []  # not given to a worker yet, in order
    lost: list[TaskSlice] = []  # to give again, before the fresh ones
    done: Ranges = msgspec.field(default_factory=Ranges)
    failed: int = 0
    resent: int = 0
    ventilator_waits: bool = False
    digest: bytes = b""
    life: Life | None = None

    @property
    def contents(self) -> Contents:
        ended = self.size is not None
        return Contents(self.function, self.collector, self.put_count, self.digest, ended, self.life)

    def put(self, name: str, first: int, tasks: bytes, before: bytes = b"", behind: bytes = b"") -> None:
        """Add tasks numbered from ``first``; tasks that were added before are skipped.

        ``before``, ``behind``: digests of all tasks before these, and including these; empty: unknown to the sender.
        Raises BatchError, BatchConflict.
        """
        parts = tasks_of(name, first, tasks)
        count = len(parts)
        if not 0 <= first <= self.put_count:
            raise BatchError(
                f"batch {name!r}: tasks from {first} on came, {self.put_count} was expected: send from there"
            )
        stop = first + count
        if before:  # compare the tasks that were added before
            known = max(0, min(count, self.put_count - first))
            there = before if not known else behind if known == count else chained_digest(before, parts[:known])
            if first + known == self.put_count:
                self.contents.check_tasks(name, there)
        if stop <= self.put_count:
            return
        if self.size is not None:
            raise BatchError(f"batch {name!r} has ended with {self.size} tasks, and task {stop - 1} came")
        if len(tasks) > TASK_SIZE_BYTES_MAX or count > RUN_TASKS_MAX:
            raise BatchError(
                f"batch {name!r}: {count} tasks of {len(tasks)} bytes came at once, at most {RUN_TASKS_MAX} of "
                f"{TASK_SIZE_BYTES_MAX} bytes were expected"
            )
        piece = TaskSlice(first, count, tasks).part(self.put_count, stop)
        self.digest = behind or chained_digest(self.digest, parts[self.put_count - first :])
        self.put_count = stop
        if self.fresh and self.fresh[-1].count < JOINED_TASKS_MAX and len(tasks) < JOINED_SIZE_BYTES_MAX:
            last = self.fresh.pop()
            piece = TaskSlice(last.first, last.count + piece.count, joined(last.tasks, piece.tasks))
        self.fresh.append(piece)

    def end(self, name: str, size: int, digest: bytes = b"") -> None:
        """End the batch with ``size`` tasks. Raises BatchError, BatchConflict."""
        if size != self.put_count:
            raise BatchError(
                f"batch {name!r} can't end with {size} tasks: {self.put_count} came; send from {self.put_count} on"
            )
        self.contents.check_tasks(name, digest)
        self.size = size

    @property
    def _load(self) -> float:
        """Share of the limits used by tasks that wait for workers; 1 is all."""
        count = sum(piece.count for piece in self.fresh)
        size_bytes = sum(len(piece.tasks) for piece in self.fresh)
        return max(count / WAITING_TASKS_MAX, size_bytes / WAITING_SIZE_BYTES_MAX)

    @property
    def is_full(self) -> bool:
        """True if the ventilator must wait."""
        return self._load >= 1

    @property
    def has_room(self) -> bool:
        """True if a waiting ventilator can continue; it turns True later than ``is_full`` turns False, so that the
        ventilator does not wait for each run.
        """
        return self._load < 1 / 2

    @property
    def has_waiting(self) -> bool:
        return bool(self.fresh or self.lost)

    @property
    def is_complete(self) -> bool:
        return self.size is not None and self.done.covers(0, self.size)

    def next_slice(self, limit: int) -> TaskSlice | None:
        """Take up to ``limit`` tasks that are not done; lost ones first."""
        for pieces in (self.lost, self.fresh):
            while pieces:
                piece = pieces.pop(0)
                gap = next(self.done.missing(piece.first, piece.stop), None)
                if gap is None:
                    continue  # a worker that seemed lost has done it
                start, stop = gap[0], min(gap[1], gap[0] + min(limit, piece.run_tasks_max))
                if stop < piece.stop:
                    pieces.insert(0, piece.part(stop, piece.stop))
                return piece.part(start, stop)
        return None

    def apply_results(self, response: Response) -> list[Response]:
        """Process results and return the new ones. Raises BatchError."""
        stop = response.first + response.count
        count = len(split(response.values, f"results from {response.first} on"))
        if count != response.count or not 0 <= response.first <= stop <= self.put_count:
            raise BatchError(
                f"{count} results from {response.first} on came as {response.count}; of batch {response.batch!r} "
                f"{self.put_count} tasks are known"
            )
        new = self.done.add_results(response)
        self.failed += sum(len(part.failures) for part in new)
        return new

    def requeue_lost(self, batch: str, piece: TaskSlice, deaths_max: int) -> list[Response]:
        """Requeue a lost worker's tasks in smaller runs, or set them aside. Returns the results of
        the tasks set aside.
        """
        if piece.count > 1:
            run_tasks_max = max(1, piece.count // LOST_PARTS)
            self.requeue(msgspec.structs.replace(piece, run_tasks_max=run_tasks_max))
        elif piece.deaths + 1 < deaths_max:
            self.requeue(msgspec.structs.replace(piece, deaths=piece.deaths + 1))
        else:
            reason = f"set aside: {deaths_max} workers ended or fell silent while they had this task alone"
            return self.apply_results(Response(batch, piece.first, 1, _NIL, {piece.first: reason}))
        self.resent += sum(stop - start for start, stop in self.done.missing(piece.first, piece.stop))
        return []

    def requeue(self, piece: TaskSlice) -> None:
        """Requeue tasks that no worker has any more. The lowest numbers are first: readers in order wait for them."""
        insort(self.lost, piece, key=lambda one: one.first)

    def run(self, name: str, piece: TaskSlice) -> Run:
        return Run(name, self.function, piece.first, piece.count, piece.tasks, self.life)
