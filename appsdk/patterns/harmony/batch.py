"""Rules of one batch: tasks come in order, are given to workers, and end once each. No I/O, no clock.

put -> waiting -> given to a worker -> done
          ^             | the worker is lost
          +-------------+ ... with this task alone, and not for the first time: done, as a failure
"""

from __future__ import annotations

from bisect import insort

import msgspec

from immortal.appsdk.patterns.harmony.runs import (
    JOINED_SIZE_BYTES_MAX,
    JOINED_TASKS_MAX,
    LOST_PARTS,
    RUN_TASKS_MAX,
    TASK_SIZE_BYTES_MAX,
    WAITING_SIZE_BYTES_MAX,
    WAITING_TASKS_MAX,
    BatchConflict,
    BatchError,
    Life,
    Ranges,
    Response,
    Run,
    cut,
    joined,
    split,
)
from immortal.protocol.identity import chained_digest, digest_prefix

_NIL = b"\x91\xc0"  # an array of one nil


class TaskSlice(msgspec.Struct, frozen=True):
    """Tasks with consecutive numbers.

    ``run_tasks_max``: so many of them go together. ``deaths``: workers that were lost with it alone in hand.
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
    """Progress of one batch, in tasks. ``size``: None until its end has come. ``failed`` ones count as done as well.

    ``given``: workers have them. ``resent``: were given again, because a worker was lost. ``workers``: that the cluster
    has heard of lately, for whatever batch.
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
    """Identity of a batch beside its name. ``digest``: of its first ``count`` tasks; empty where an earlier version has
    not noted it. ``ended``: there are no more.

    ``life``: None where an earlier version has begun it.
    """

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
        """Compare the ``digest`` of as many tasks; empty: the sender does not know it. Raises BatchConflict."""
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
    try:
        return split(tasks)
    except ValueError as error:
        raise BatchError(f"batch {name!r}, tasks from {first} on: {error}") from None


class Batch(msgspec.Struct):
    function: str
    collector: str
    put_count: int = 0
    size: int | None = None
    fresh: list[TaskSlice] = []  # given to nobody yet, in order
    lost: list[TaskSlice] = []  # to be given again, before the fresh ones
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
        """Add tasks numbered from ``first``; those that were put before are skipped.

        ``before``, ``behind``: digests of all tasks in front of these, and with them; empty: who puts them says none.
        Raises BatchError, BatchConflict.
        """
        parts = tasks_of(name, first, tasks)
        count = len(parts)
        if not 0 <= first <= self.put_count:
            raise BatchError(
                f"batch {name!r}: tasks from {first} on came, {self.put_count} was expected: send from there"
            )
        stop = first + count
        if before:  # of what was put: as others put it
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
        if self.digest:
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
        """Share of the limits that tasks waiting for workers use; 1 is all."""
        count = sum(piece.count for piece in self.fresh)
        size_bytes = sum(len(piece.tasks) for piece in self.fresh)
        return max(count / WAITING_TASKS_MAX, size_bytes / WAITING_SIZE_BYTES_MAX)

    @property
    def is_full(self) -> bool:
        """Tell whether the ventilator is to wait."""
        return self._load >= 1

    @property
    def has_room(self) -> bool:
        """Tell whether a waiting ventilator may continue; later than ``is_full`` ends, so that it does not wait for
        each run.
        """
        return self._load < 1 / 2

    @property
    def has_waiting(self) -> bool:
        return bool(self.fresh or self.lost)

    @property
    def is_complete(self) -> bool:
        return self.size is not None and self.done.covers(0, self.size)

    def take(self, limit: int) -> TaskSlice | None:
        """Take up to ``limit`` tasks that are not done; lost ones first."""
        for pieces in (self.lost, self.fresh):
            while pieces:
                piece = pieces.pop(0)
                gap = next(self.done.missing(piece.first, piece.stop), None)
                if gap is None:
                    continue  # who was thought lost has done it
                start, stop = gap[0], min(gap[1], gap[0] + min(limit, piece.run_tasks_max))
                if stop < piece.stop:
                    pieces.insert(0, piece.part(stop, piece.stop))
                return piece.part(start, stop)
        return None

    def respond(self, response: Response) -> list[Response]:
        """Take in results and return the new ones. Raises BatchError."""
        stop = response.first + response.count
        try:
            count = len(split(response.values))
        except ValueError as error:
            raise BatchError(f"results from {response.first} on: {error}") from None
        if count != response.count or not 0 <= response.first <= stop <= self.put_count:
            raise BatchError(
                f"{count} results from {response.first} on came as {response.count}; of batch {response.batch!r} "
                f"{self.put_count} tasks are known"
            )
        new = [response.part(*gap) for gap in self.done.missing(response.first, stop)]
        self.done.add(response.first, stop)
        self.failed += sum(len(part.failures) for part in new)
        return new

    def lose(self, batch: str, piece: TaskSlice, deaths_max: int) -> list[Response]:
        """Requeue, in smaller runs, the tasks of a worker that was lost, or set them aside. Returns the results of
        those set aside.
        """
        if piece.count > 1:
            run_tasks_max = max(1, piece.count // LOST_PARTS)
            self.give_back(msgspec.structs.replace(piece, run_tasks_max=run_tasks_max))
        elif piece.deaths + 1 < deaths_max:
            self.give_back(msgspec.structs.replace(piece, deaths=piece.deaths + 1))
        else:
            reason = f"set aside: {deaths_max} workers ended or fell silent while they had this task alone"
            return self.respond(Response(batch, piece.first, 1, _NIL, {piece.first: reason}))
        self.resent += sum(stop - start for start, stop in self.done.missing(piece.first, piece.stop))
        return []

    def give_back(self, piece: TaskSlice) -> None:
        """Requeue tasks that no worker has any more. The lowest numbers go first: readers in order wait for them."""
        insort(self.lost, piece, key=lambda one: one.first)

    def run(self, name: str, piece: TaskSlice) -> Run:
        return Run(name, self.function, piece.first, piece.count, piece.tasks, self.life)
