"""A what-if for a fleet: what it is about, by which rules, and what it finds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec import Struct

from immortal.appsdk.handlers.definition import Definition
from immortal.coordinator.log.reader import RecordSource
from immortal.replay.fleet.player import Place


class Call(Struct, frozen=True):
    """A call, or an effect, that the logs have no answer to. ``method``: as ``Till.sold``, or an effect's name."""

    service: str
    to: str
    method: str
    arguments: Sequence[Any]
    named: Mapping[str, Any] = {}


Answer = Callable[[Call], Any]
Check = Callable[[Mapping[str, Any]], object]


class Logs(Struct):
    """Logs and changes of a what-if.

    ``code``: the class that made each log; ``changes``: what is tried in its place.
    """

    sources: Mapping[str, RecordSource]
    code: Callable[[str], Definition]
    changes: Mapping[str, Definition]
    begin_ns: int | None = None
    to_ns: int | None = None
    outsiders: frozenset[str] = frozenset()


class Rules(Struct):
    """``effects``: "fail", "by-key" or a function; ``answer``: None fails calls that no log answers."""

    effects: str | Answer = "fail"
    answer: Answer | None = None
    check: Check | None = None


class Difference(Struct):
    """A call that differs. ``kind``: "changed", "added", "missing" or "moved". ``place``: of the message that made it.

    ``cause``: the difference that it follows from, by its number; None: the changed code itself. ``began``: the message
    that began the execution which makes it; None: not known.
    """

    service: str
    kind: str
    destination: str
    place: Place
    old: bytes | None
    new: bytes | None
    cause: int | None
    time_ns: int
    began: Place | None = None


class AskedEffect(Struct):
    service: str
    words: str
    outcome: str
    time_ns: int


class UnansweredCall(Struct):
    call: Call
    outcome: str
    time_ns: int


class Broken(Struct):
    """A check that does not hold behind a record."""

    service: str
    place: Place
    time_ns: int
    text: str
