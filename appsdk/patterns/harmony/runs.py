"""Runs of tasks or results as one MessagePack array, sets of task numbers, limits and errors of the pattern.

A cluster never looks at a task. It cuts an array where it has to, and passes the bytes on.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence

import msgspec

from immortal.protocol import decoding
from immortal.protocol.identity import IdentityConflict

_encode = msgspec.msgpack.encode
_items = decoding.Decoder(list[msgspec.Raw])


class Life(msgspec.Struct, frozen=True):
    """Identity of a batch among others that had its name: the cluster, and how many batches that had begun by then.

    ``again``: there was one before.
    """

    cluster: str
    number: int
    again: bool = False

    def __str__(self) -> str:
        return f"batch {self.number} of cluster {self.cluster!r}"


class Run(msgspec.Struct, frozen=True, omit_defaults=True):
    """Run of tasks that a worker is given: ``tasks`` of ``function``, numbered from ``first``. ``life``: of the batch;
    None where an earlier version has begun it, whose log has no such field.
    """

    batch: str
    function: str
    first: int
    count: int
    tasks: bytes
    life: Life | None = None


class Response(msgspec.Struct, frozen=True):
    """Results of the tasks from ``first`` on: ``values``, an array, with nil where ``failures`` has the reason.

    ``count``: how many there are.
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
    """Result of one task. ``error``: why there is no ``value``, None where there is one."""

    number: int
    value: object
    error: str | None = None


def array(items: Sequence[bytes]) -> bytes:
    """Return one MessagePack array of values that are encoded already."""
    return _encode([msgspec.Raw(item) for item in items])


def split(values: bytes) -> list[msgspec.Raw]:
    """Split a MessagePack array. Raises ValueError for what is no array."""
    try:
        return _items.decode(values)
    except decoding.DecodeError as error:
        raise ValueError(f"a MessagePack array was expected: {error}") from None


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


# A set of task numbers that takes as much memory as it has gaps.


class Ranges(msgspec.Struct):
    """Set of numbers as intervals: ``starts[i]`` up to, not including, ``stops[i]``; sorted, none touches the next."""

    starts: list[int] = msgspec.field(default_factory=list)
    stops: list[int] = msgspec.field(default_factory=list)

    def add(self, start: int, stop: int) -> None:
        """Add all numbers from ``start`` up to, not including, ``stop``."""
        if start >= stop:
            return
        low = bisect_left(self.stops, start)  # the first that touches or lies behind
        high = bisect_right(self.starts, stop)  # the first that lies wholly behind
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

    def covers(self, start: int, stop: int) -> bool:
        return next(self.missing(start, stop), None) is None

    def __len__(self) -> int:
        return sum(self.stops) - sum(self.starts)


# All limits of the pipeline, with their reasons.


RUN_TASKS_MAX = 4096  # of one message: what a message costs vanishes beside so many tasks
RUN_SIZE_BYTES_MAX = 512 << 10  # of one message, so that none holds up the others; one larger task goes alone
TASK_SIZE_BYTES_MAX = 15 << 20  # a client's call takes 16 MiB; of a task, and of a result
FLUSH_S = 0.1  # a task that was put leaves with the next one after so long, however few there are

WAITING_TASKS_MAX = 16 * RUN_TASKS_MAX  # of one batch, given to nobody yet: then its ventilator waits
JOINED_TASKS_MAX = (
    256  # what waits is joined up to so many: a ventilator that puts one now and then makes no small runs
)
JOINED_SIZE_BYTES_MAX = 16 << 10  # ... of so few bytes that nobody feels it
WAITING_SIZE_BYTES_MAX = 8 << 20
BATCHES_OPEN_MAX = 1000  # of one cluster
BATCHES_ENDED_MAX = 10_000  # whose last progress a cluster keeps; the oldest go
NAME_SIZE_BYTES_MAX = 128  # of a batch, a function, a worker
REASON_SIZE_CHARS_MAX = 500  # of what a failed task says

RUN_S = 0.5  # of work that a worker takes at a time: what its death can cost, and how often it speaks
BEAT_S = 1.0  # a worker says a word so often while it works
IDLE_S = 5.0  # one without work asks again so often, unless it is called
SILENCE_S = 5.0  # a worker without a word for so long is lost
DEATHS_MAX = 3  # so many workers were lost with this one task in hand: it is set aside
LOST_PARTS = 16  # what was lost goes on in so many parts, so that a task that kills is found among the others


# What a ventilator can get wrong.


class BatchError(Exception):
    """The cluster or the collector can't do that with this batch: what came, and what was expected."""


class BatchConflict(IdentityConflict, BatchError):  # noqa: N818 (what happened, not what is wrong)
    """The name belongs to a batch of another function, collector, or with other tasks. See ``known``, ``given``."""
