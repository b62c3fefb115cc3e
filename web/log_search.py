"""Search of logs for the timeline: a lane per instance, with single messages if they are few, else with counts.

So the size of the answer does not depend on the size of the logs. A count needs only the edges of its range, each of
which costs some 20 reads of a record; messages are read only if there are at most MESSAGES_MAX.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from immortal.coordinator.config import InstanceSettings
from immortal.coordinator.core.formatting import Methods
from immortal.coordinator.instances.registry import Registry
from immortal.coordinator.log.reader import LogReader
from immortal.presenters.records import describe_record
from immortal.protocol import decoding
from immortal.protocol.errors import ImmortalError
from immortal.web import WebError
from immortal.web.log_messages import (
    At,
    Filter,
    Logs,
    Message,
    Page,
    Times,
    Wanted,
    messages_of,
    page_before,
    page_from,
)

BUCKETS = 160
MESSAGES_MAX = 4000  # limit on the messages of all lanes in one answer
RECORDS_MAX = 2000  # limit on the messages read for one lane
WORDS_CHARACTERS = 120


class Lane:
    """Lane of one instance: its records in a range of times."""

    def __init__(self, name: str, reader: LogReader, from_ns: int, to_ns: int) -> None:
        self.name = name
        self._reader = reader
        self._times = Times(reader)
        self._from_ns, self._to_ns = from_ns, to_ns
        self._first = self._times.first_from(from_ns)
        self._end = self._times.first_from(to_ns, self._first)

    @property
    def records(self) -> int:
        return self._end - self._first

    @property
    def has_records(self) -> bool:
        """True if the log has any record, in this range or not."""
        return self._times.first <= self._times.last

    def counts(self, buckets: int = BUCKETS) -> list[int]:
        """Count the records in each of ``buckets`` equal parts of the range."""
        edges = [self._first]
        for number in range(1, buckets):
            time_ns = self._from_ns + (self._to_ns - self._from_ns) * number // buckets
            low = edges[-1]
            edges.append(low if low == self._end else self._edge(time_ns, low))
        edges.append(self._end)
        return [after - before for before, after in itertools.pairwise(edges)]

    def _edge(self, time_ns: int, low: int) -> int:
        """Find the first record from a time on, as Times.first_from, but near ``low`` first: most edges are there."""
        step = 1
        while low + step < self._end and self._times.time_ns(low + step) < time_ns:
            step *= 4
        return self._times.first_from(time_ns, low, min(self._end, low + step))

    def messages(self, methods: Methods, wanted: Filter, limit: int) -> list[Message] | None:
        """Read the wanted messages; None if there are more than ``limit``, or more than RECORDS_MAX records to read."""
        if self.records > RECORDS_MAX:
            return None
        found = []
        for logged in self._reader.records(self._first, self._end - 1) if self.records else ():
            for message in messages_of(describe_record(logged, self._reader.identity.committer_id, methods)):
                if wanted.matches(message) and not message.problem:
                    found.append(message)
                    if len(found) > limit:
                        return None
        return found


def ends(reader: LogReader) -> tuple[int, int] | None:
    """Return the times of the first and the last record; None if there is no record."""
    times = Times(reader)
    first, last = times.first, times.last
    if first > last:
        return None
    return times.time_ns(first), times.time_ns(last)


def packed(messages: Sequence[Message], origin_ns: int, lanes: dict[str, int]) -> list[list[Any]]:
    """Pack each message: [record, index, time (µs), sent (µs or null), sender's lane or null, method, words, bytes]."""
    return [
        [
            one.sequence_id,
            one.index,
            (one.time_ns - origin_ns) / 1000,
            (one.sent_ns - origin_ns) / 1000 if one.sent_ns > 0 else None,
            None if not one.source else lanes.get(one.source),
            one.method[:WORDS_CHARACTERS],
            one.words[:WORDS_CHARACTERS],
            one.size_bytes,
        ]
        for one in messages
    ]


class Range(Struct, frozen=True):
    """Requested range of a timeline: ``lanes`` by name, times in ns."""

    lanes: list[str]
    origin_ns: int
    from_ns: int
    to_ns: int
    wanted: Wanted


def timeline_lanes(logs: Logs, load: Callable[[str], InstanceSettings], asked: Range) -> list[dict[str, Any]]:
    """Return each lane: {"name", "records", "all", "counts", "messages"}, without messages if they are too many, or
    {"name", "problem"}. ``all``: True if the log has any record at all."""
    numbers = {name: number for number, name in enumerate(asked.lanes)}
    wanted = Filter(asked.wanted)
    left: int | None = MESSAGES_MAX  # None: too many, and then no lane shows single ones
    answer: list[dict[str, Any]] = []
    for name in asked.lanes:
        lane: dict[str, Any] = {"name": name}
        try:
            settings = load(name)
            methods, _ = logs.methods(settings)
            with logs.reader(settings) as reader:
                part = Lane(name, reader, asked.from_ns, asked.to_ns)
                lane["records"], lane["all"] = part.records, part.has_records
                lane["counts"] = part.counts()
                found = None if left is None else part.messages(methods, wanted, left)
            left = None if left is None or found is None else left - len(found)
            lane["messages"] = packed(found or (), asked.origin_ns, numbers)
        except ImmortalError as error:
            lane["problem"] = str(error)[:300]
        answer.append(lane)
    if left is None:
        for lane in answer:
            lane.pop("messages", None)
    return answer


# ``python -m immortal.web.log_search``: messages that match a regular expression, found in a process of its own.
#
# A slow expression blocks its whole process, so that process is killed when the search takes too long.


SCAN_S_MAX = 4.0


class Request(msgspec.Struct, tag="page"):
    home: str
    name: str
    wanted: Wanted
    limit: int
    at: At | None
    back: bool


class Lanes(msgspec.Struct, tag="lanes"):
    home: str
    asked: Range


def scan(request: Request) -> Page:
    """Search for messages in a process of its own. Raises WebError if it takes too long."""
    return decoding.decode_json(_searched(request, request.wanted.pattern), type=Page)


def lanes(home: str, asked: Range) -> list[dict[str, Any]]:
    """Return lanes as :func:`timeline_lanes` does, in a process of its own. Raises WebError if it takes too long."""
    return decoding.decode_json(_searched(Lanes(home, asked), asked.wanted.pattern), type=list[dict[str, Any]])


def _searched(request: Request | Lanes, pattern: str) -> bytes:
    command = [sys.executable, "-P", "-m", "immortal.web.log_search"]
    try:
        done = subprocess.run(
            command, input=msgspec.json.encode(request), capture_output=True, timeout=SCAN_S_MAX, check=False
        )
    except subprocess.TimeoutExpired:
        raise WebError(
            f"the expression {pattern[:100]!r} takes too long: give a simpler one, or also a method", 422
        ) from None
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().rsplit("\n", 1)[-1]
        raise WebError(f"the log can't be searched: {said}", 500)
    return done.stdout


def page_of(logs: Logs, settings: InstanceSettings, wanted: Wanted, at: At | None, limit: int, *, back: bool) -> Page:
    methods, _ = logs.methods(settings)
    with logs.reader(settings) as reader:
        if back or at is None:
            return page_before(reader, methods, wanted, at, limit)
        return page_from(reader, methods, wanted, at, limit)


def main() -> None:
    request = decoding.decode_json(sys.stdin.buffer.read(), type=Request | Lanes)
    registry = Registry(request.home)
    found: Any
    if isinstance(request, Lanes):
        found = timeline_lanes(Logs(), registry.load, request.asked)
    else:
        settings = registry.load(request.name)
        found = page_of(Logs(), settings, request.wanted, request.at, request.limit, back=request.back)
    sys.stdout.buffer.write(msgspec.json.encode(found))


if __name__ == "__main__":
    main()
