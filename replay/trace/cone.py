"""Consequences of calls in all services: the messages that these were, what their handlers sent, and so on.

A log has who sent a message and its position in that stream; which message made what is asked of a replay
(:class:`immortal.replay.trace.causes.ReplayedCauses`). A service's log is replayed only if something has come there.
"""

from __future__ import annotations

import tempfile
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from msgspec import Struct, field

from immortal.coordinator.core.formatting import Methods
from immortal.coordinator.instances import own_logs
from immortal.coordinator.instances.registry import Registry
from immortal.coordinator.log import LogReader, log_exists
from immortal.protocol.client_frames import CLIENTS
from immortal.protocol.command_line import counted
from immortal.protocol.errors import ImmortalError
from immortal.protocol.trailer import BatchKind
from immortal.replay import ReplayError
from immortal.replay.app_process import method_names
from immortal.replay.trace.causes import ReplayedCauses
from immortal.replay.trace.messages import Executed, Source, messages_of

MESSAGES_MAX = 1_000_000  # of all services together
METHODS_SHOWN_MAX = 5
Range = tuple[int, int]
"""The first and the last of consecutive positions."""


class AffectedService(Struct):
    """The messages of one service. ``first``: the first of them in its log. ``callers``: who sent them."""

    places: set[tuple[int, int]] = field(default_factory=set)
    by_method: Counter[str] = field(default_factory=Counter)
    callers: set[str] = field(default_factory=set)
    first: Executed | None = None

    def add(self, message: Executed) -> None:
        self.places.add(message.place)
        self.by_method[message.method] += 1
        self.callers.add(message.caller)
        if self.first is None or message.place < self.first.place:
            self.first = message


class Cone(Struct):
    """``client_answers``: those of them that went to clients. ``notes``: what is not known, in words."""

    services: dict[str, AffectedService] = field(default_factory=dict)
    client_answers: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def by_time(self) -> list[tuple[str, AffectedService]]:
        found = [(name, touched) for name, touched in self.services.items() if touched.first is not None]
        return sorted(found, key=lambda one: (one[1].first.time_ns if one[1].first else 0, one[0]))


def follow(registry: Registry, name: str, positions: Mapping[str, Iterable[int]], reader: LogReader) -> Cone:
    """Follow the calls of instance ``name`` at ``positions``, by destination ("": itself), to their consequences.

    ``reader``: of its log. Raises LogError, OSError.
    """
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="immortal-cone-"))
        following = _Following(registry, Path(folder), stack, {name: reader})
        for destination, some in positions.items():
            following.send(name, destination or name, _ranges(some))
        following.run()
    return following.cone


def _ranges(positions: Iterable[int]) -> list[Range]:
    found: list[Range] = []
    for position in sorted(positions):
        if found and found[-1][1] == position - 1:
            found[-1] = found[-1][0], position
        else:
            found.append((position, position))
    return found


def _has(ranges: list[Range], position: int) -> bool:
    at = bisect_right(ranges, position, key=lambda one: one[0]) - 1
    return at >= 0 and position <= ranges[at][1]


class _Following:
    def __init__(self, registry: Registry, folder: Path, stack: ExitStack, readers: Mapping[str, LogReader]) -> None:
        self.cone = Cone()
        self._registry = registry
        self._stack = stack
        self._readers = readers
        self._causes = ReplayedCauses(folder)
        stack.callback(self._causes.close)
        self._sources: dict[str, Source | None] = {}
        self._is_learned: dict[str, bool] = {}
        self._sent: dict[str, dict[str, list[Range]]] = defaultdict(dict)  # by receiver and sender, to be looked for
        self._count = 0

    def send(self, caller: str, receiver: str, ranges: list[Range]) -> None:
        if receiver == CLIENTS:
            self.cone.client_answers += sum(last - first + 1 for first, last in ranges)
        elif ranges:
            known = self._sent[receiver].get(caller, [])
            self._sent[receiver][caller] = sorted([*known, *ranges])

    def run(self) -> None:
        while self._sent and self._count < MESSAGES_MAX:
            receiver = next(iter(self._sent))
            sent = self._sent.pop(receiver)
            source = self._source(receiver)
            if source is None:
                continue
            new = self._find(source, sent)
            if new and self._learn(source):
                for destination, ranges in self._causes.made_by(receiver, new).items():
                    self.send(receiver, destination, ranges)
        if self._sent:
            self.cone.notes.append(f"more than {MESSAGES_MAX:,} messages: what followed from the rest is left out")

    def _find(self, source: Source, sent: Mapping[str, list[Range]]) -> set[tuple[int, int]]:
        touched = self.cone.services.setdefault(source.instance, AffectedService())
        missing = sum(last - first + 1 for ranges in sent.values() for first, last in ranges)
        new: set[tuple[int, int]] = set()
        for message in messages_of(source):
            ranges = sent.get(message.caller) if message.kind == BatchKind.STREAM else None
            if ranges is None or not _has(ranges, message.position):
                continue
            missing -= 1
            if message.place not in touched.places and self._count < MESSAGES_MAX:
                touched.add(message)
                new.add(message.place)
                self._count += 1
        self.cone.notes += source.problems
        source.problems.clear()
        if missing:
            some = "one of the calls is" if missing == 1 else f"{missing:,} of the calls are"
            self.cone.notes.append(f"{some} not in the log of {source.instance}: trimmed, or not there yet")
        return new

    def _learn(self, source: Source) -> bool:
        """Learn which message of a source made what, by replay; return False if that is not possible."""
        name = source.instance
        if name not in self._is_learned:
            try:
                self.cone.notes += self._causes.learn(source, self._registry.load(name))
                self._is_learned[name] = True
            except ImmortalError as error:
                self.cone.notes.append(f"what followed from them in {name} is not known: {error}")
                self._is_learned[name] = False
        return self._is_learned[name]

    def _source(self, name: str) -> Source | None:
        if name not in self._sources:
            try:
                self._sources[name] = self._open(name)
            except ImmortalError as error:
                self._sources[name] = None
                self.cone.notes.append(f"{name} can't be looked into: {error}")
        return self._sources[name]

    def _open(self, name: str) -> Source:
        settings = self._registry.load(name)
        if not log_exists(settings.log):
            raise ReplayError("it has no log here")
        methods: Methods = {}
        if settings.app is not None:
            try:
                methods = method_names(settings.app)
            except ReplayError as error:
                self.cone.notes.append(f"methods of {name} are shown by their numbers: {error}")
        reader = self._readers.get(name)
        return Source(reader or self._stack.enter_context(own_logs.open_reader(settings, check=False)), methods)


def values(cone: Cone) -> dict[str, Any]:
    """Plain values, for JSON and the page."""
    return {
        "services": [
            {
                "name": name,
                "messages": len(touched.places),
                "first": None
                if touched.first is None
                else {
                    "record": touched.first.sequence_id,
                    "message": touched.first.index,
                    "method": touched.first.method,
                    "time_ns": touched.first.time_ns,
                },
                "by_method": [{"method": method, "count": count} for method, count in touched.by_method.most_common()],
                "callers": sorted(touched.callers),
            }
            for name, touched in cone.by_time
        ],
        "client_answers": cone.client_answers,
        "notes": cone.notes,
    }


def lines(cone: dict[str, Any]) -> Iterator[str]:
    """The same for people."""
    yield "what followed from the calls that would be others:"
    for one in cone["services"]:
        first = one["first"]
        methods = ", ".join(f"{each['method']} {each['count']:,}" for each in one["by_method"][:METHODS_SHOWN_MAX])
        more = ", ..." if len(one["by_method"]) > METHODS_SHOWN_MAX else ""
        yield (
            f"  {one['name']}: {counted(one['messages'], 'message')}, from record {first['record']}, message"
            f" {first['message']} on, of {', '.join(one['callers'])}: {methods}{more}"
        )
    if cone["client_answers"]:
        yield f"  clients: {counted(cone['client_answers'], 'answer')}"
    if not cone["services"] and not cone["client_answers"]:
        yield "  nothing"
    yield from (f"  note: {note}" for note in cone["notes"])
