"""Runs: tasks, or their results, whose numbers follow each other, as one MessagePack array.

A cluster never looks at a task. It cuts an array where it has to, and passes the bytes on.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from immortal.protocol import decoding

_encode = msgspec.msgpack.encode
_items = decoding.Decoder(list[msgspec.Raw])


class Life(msgspec.Struct, frozen=True):
    """Tells a batch from others that had its name: the cluster, and how many batches that had begun by then.

    ``again``: there was one before.
    """

    cluster: str
    number: int
    again: bool = False

    def __str__(self) -> str:
        return f"batch {self.number} of cluster {self.cluster!r}"


class Run(msgspec.Struct, frozen=True, omit_defaults=True):
    """``tasks`` of ``function``, numbered from ``first``: what a worker is given. ``life``: of the batch; None where an
    earlier version has begun it, whose log has no such field.
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
        """The results from number ``start`` up to, not including, ``stop``."""
        if (start, stop) == (self.first, self.first + self.count):
            return self
        values = cut(self.values, start - self.first, stop - self.first)
        failures = {number: reason for number, reason in self.failures.items() if start <= number < stop}
        return Response(self.batch, start, stop - start, values, failures)


class Result(msgspec.Struct, frozen=True):
    """Of one task. ``error``: why there is no ``value``, None where there is one."""

    number: int
    value: object
    error: str | None = None


def array(items: Sequence[bytes]) -> bytes:
    """One array of values that are encoded already."""
    return _encode([msgspec.Raw(item) for item in items])


def split(values: bytes) -> list[msgspec.Raw]:
    """Raises ValueError for what is no array."""
    try:
        return _items.decode(values)
    except decoding.DecodeError as error:
        raise ValueError(f"a MessagePack array was expected: {error}") from None


def cut(values: bytes, start: int, stop: int) -> bytes:
    """Its items from ``start`` up to, not including, ``stop``, as an array."""
    return _encode(split(values)[start:stop])


def joined(first: bytes, second: bytes) -> bytes:
    return _encode(split(first) + split(second))


def results(response: Response) -> list[Result]:
    """One for each task."""
    failures = response.failures
    values: list[object] = decoding.decode(response.values)
    numbered = enumerate(values, response.first)
    if not failures:
        return [Result(number, value) for number, value in numbered]
    return [Result(number, value, failures.get(number)) for number, value in numbered]
