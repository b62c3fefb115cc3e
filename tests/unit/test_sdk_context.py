"""Deterministic randomness: the same at each replay, one stream per place in the code."""

from __future__ import annotations

import linecache
import threading
import uuid
from types import FunctionType
from typing import Any

import pytest

from appsdk import Immortal, rpc
from appsdk.context import Context
from appsdk.errors import UsageError
from appsdk.immortal import attach

SEED = bytes(range(16))


class Dice(Immortal):
    @rpc
    def roll(self) -> None: ...

    def two_places(self) -> tuple[float, float]:
        first = self.random.random()
        second = self.random.random()
        return first, second

    def one_place(self, count: int) -> list[float]:
        return [self.random.random() for _ in range(count)]

    def kept(self) -> list[int]:
        source = self.random
        return [source.randrange(1000), source.randrange(1000)]

    def name(self) -> uuid.UUID:
        return self.uuid4()


def dice(sequence_id: int = 3, message_index: int = 0, committer_id: int = 7, seed: bytes = SEED) -> Dice:
    made = Dice()
    context = Context(seed)
    context.committer_id, context.sequence_id, context.message_index = committer_id, sequence_id, message_index
    attach(made, context)
    return made


def test_the_same_moment_gives_the_same_values() -> None:
    assert dice().two_places() == dice().two_places()
    assert dice().one_place(5) == dice().one_place(5)
    assert dice().kept() == dice().kept()
    assert dice().name() == dice().name()


def test_golden_values() -> None:
    # A change of these would make every log that is replayed diverge.
    assert dice().kept() == KEPT
    assert str(dice().name()) == NAME


def test_every_part_of_the_moment_matters() -> None:
    names = [dice(), dice(4), dice(message_index=1), dice(committer_id=8), dice(seed=bytes(16))]
    assert len({one.name() for one in names}) == len(names)


def test_places_are_independent_and_one_place_goes_on() -> None:
    first, second = dice().two_places()
    assert first != second
    values = dice().one_place(4)
    assert len(set(values)) == 4
    assert dice().one_place(2) == values[:2]
    both = dice()
    assert both.one_place(2) + both.one_place(2) == values


def test_a_new_message_starts_the_streams_anew() -> None:
    one = dice()
    before = one.one_place(2)
    one._immortal_context.message_index = 1
    other = one.one_place(2)
    assert other != before
    one._immortal_context.message_index = 0
    assert one.one_place(2) == before


def compiled(source: str) -> Any:
    """The function ``draw`` of a program with this source, known to linecache under a name of its own."""
    name = f"<program {len(linecache.cache)}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    namespace: dict[str, Any] = {}
    exec(compile(source, name, "exec"), namespace)
    draw: FunctionType = namespace["draw"]
    return draw


def test_adding_a_call_elsewhere_shifts_no_other_stream() -> None:
    before = compiled("def draw(self):\n    return self.random.random()\n")
    after = compiled("import math\n\ndef draw(self):\n    self.random.choice('abc')\n    return self.random.random()\n")
    assert before(dice()) == after(dice())


def test_without_source_the_line_offset_counts() -> None:
    namespace: dict[str, Any] = {}
    exec(compile("def draw(self):\n    return self.random.random()\n", "<nowhere>", "exec"), namespace)
    moved: dict[str, Any] = {}
    exec(compile("\n\ndef draw(self):\n    return self.random.random()\n", "<nowhere else>", "exec"), moved)
    assert namespace["draw"](dice()) == moved["draw"](dice())


def test_other_threads_are_sent_to_the_real_thing() -> None:
    one = dice()
    problems = []

    def hook() -> None:
        for attempt in (lambda: one.random, one.uuid4, one.now, one.now_ns):
            try:
                attempt()
            except UsageError as error:
                problems.append(str(error))

    thread = threading.Thread(target=hook)
    thread.start()
    thread.join()
    assert len(problems) == 4
    assert all("impulse" in problem for problem in problems)


def test_time_is_the_records() -> None:
    one = dice()
    one._immortal_context.record_time_ns = 1_700_000_000_123_456_789
    assert one.now_ns() == 1_700_000_000_123_456_789
    assert one.now().isoformat() == "2023-11-14T22:13:20.123456+00:00"
    one._immortal_context.record_time_ns = None
    one._immortal_context.handling_thread_id = threading.get_ident()
    with pytest.raises(UsageError, match="record 3 has no time"):
        one.now()


KEPT = [252, 324]
NAME = "9a72526c-6c47-4b1b-b4dd-4686ca5f3f34"
