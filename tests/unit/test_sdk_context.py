"""Deterministic randomness: the same at each replay, one stream per place in the code."""

from __future__ import annotations

import linecache
import threading
import uuid
from datetime import timedelta
from types import FunctionType
from typing import Any, ClassVar

import msgspec
import pytest

import immortal
from immortal import Immortal, rpc
from immortal.appsdk.calls.context import Context
from immortal.appsdk.calls.replay_rules import NEWEST, Rules
from immortal.appsdk.calls.user_code import running
from immortal.appsdk.handlers.proxy import attach
from immortal.appsdk.state.schema import FRONT, Envelope, decode_envelope, encode_envelope
from immortal.errors import StateError, UsageError
from tests.helpers.sdk import first_start, recover
from tests.helpers.wire import call, logged

SEED = bytes(range(16))


class Dice(Immortal):
    @rpc
    def roll(self) -> None: ...

    def two_places(self) -> tuple[float, float]:
        first = immortal.random.random()
        second = immortal.random.random()
        return first, second

    def one_place(self, count: int) -> list[float]:
        return [immortal.random.random() for _ in range(count)]

    def kept(self) -> list[int]:
        source = immortal.random
        return [source.randrange(1000), source.randrange(1000)]

    def drawn(self) -> tuple[float, str]:
        return immortal.random.random(), immortal.uuid4().hex

    def name(self) -> uuid.UUID:
        return immortal.uuid4()


def dice(
    sequence_id: int = 3,
    message_index: int = 0,
    committer_id: int = 7,
    seed: bytes = SEED,
) -> Dice:
    made = Dice()
    context = Context(seed)
    context.committer_id, context.sequence_id, context.message_index = committer_id, sequence_id, message_index
    attach(made, context)
    running.set(context)
    return made


def test_the_same_moment_gives_the_same_values() -> None:
    assert dice().two_places() == dice().two_places()
    assert dice().one_place(5) == dice().one_place(5)
    assert dice().kept() == dice().kept()
    assert dice().name() == dice().name()


def test_before_the_first_record_the_moment_is_that_of_no_log() -> None:
    made = Dice()
    attach(made, context := Context(SEED))
    running.set(context)
    assert made.two_places() == dice(sequence_id=-1, committer_id=0).two_places()


def test_golden_values() -> None:
    # A change of these would make every log that is replayed diverge.
    assert dice().drawn() == DRAWN
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
    namespace: dict[str, Any] = {"immortal": immortal}
    exec(compile(source, name, "exec"), namespace)
    draw: FunctionType = namespace["draw"]
    return draw


def test_adding_a_call_elsewhere_shifts_no_other_stream() -> None:
    before = compiled("def draw(self):\n    return immortal.random.random()\n")
    after = compiled(
        "import math\n\ndef draw(self):\n    immortal.random.choice('abc')\n    return immortal.random.random()\n"
    )
    assert before(dice()) == after(dice())


LAID_OUT = {
    "a line that is broken": (
        "def draw(self):\n    return immortal.random.choice('abcdefghijklmnop'), immortal.random.randrange(10**9)\n",
        "def draw(self):\n    return (\n        immortal.random.choice(\n            'abcdefghijklmnop',\n        ),\n"
        "        immortal.random.randrange(10**9),\n    )\n",
    ),
    "a comment and other quotes": (
        "def draw(self):\n    return immortal.random.choice('abc'), immortal.uuid4()\n",
        '# what\ndef draw(self):\n    # of three\n    return immortal.random.choice("abc"), immortal.uuid4()  # !\n',
    ),
    "two statements on one line": (
        "def draw(self):\n    a = immortal.random.random(); b = immortal.random.random()\n    return a, b\n",
        "def draw(self):\n    a = immortal.random.random()\n    b = immortal.random.random()\n    return a, b\n",
    ),
    "a loop": (
        "def draw(self):\n    found = []\n    while immortal.random.random() < 0.9: found.append(immortal.uuid4())\n"
        "    return found\n",
        "def draw(self):\n    found = []\n    while (\n        immortal.random.random() < 0.9\n    ):\n"
        "        found.append(immortal.uuid4())\n    return found\n",
    ),
    "a finally, which is compiled twice": (
        "def draw(self):\n    found = []\n    for one in range(3):\n        try:\n            if one == 1: 1 / 0\n"
        "        except ZeroDivisionError: pass\n        finally: found += [immortal.random.random()]\n"
        "    return found\n",
        "def draw(self):\n    found = []\n    for one in range(3):\n        try:\n            if one == 1:\n"
        "                1 / 0\n        except ZeroDivisionError:\n            pass\n        finally:\n"
        "            found += [\n                immortal.random.random()\n            ]\n    return found\n",
    ),
    "lambdas and comprehensions": (
        "def draw(self):\n    return [(lambda: immortal.random.random())() for _ in 'ab'], "
        "{immortal.uuid4() for _ in 'ab'}, (lambda: immortal.random.random())(), "
        "list(immortal.random.random() for _ in 'ab')\n",
        "def draw(self):\n    return (\n        [(lambda: immortal.random.random())() for _ in 'ab'],\n"
        "        {\n            immortal.uuid4()\n            for _ in 'ab'\n        },\n"
        "        (lambda: immortal.random.random())(),\n        list(immortal.random.random() for _ in 'ab'),\n    )\n",
    ),
    "functions in functions, and decorated ones": (
        "def twice(function):\n    def run(self): return immortal.random.random(), function(self), function(self)\n"
        "    return run\n\n@twice\ndef draw(self):\n    def inner(): return immortal.random.random()\n"
        "    return inner(), immortal.random.random()\n",
        "def twice(function):\n    def run(self):\n        return (\n            immortal.random.random(),\n"
        "            function(self),\n            function(self),\n        )\n\n    return run\n\n\n@twice\n"
        "def draw(self):\n    def inner():\n        return immortal.random.random()\n\n"
        "    return (\n        inner(),\n        immortal.random.random(),\n    )\n",
    ),
}


@pytest.mark.parametrize("what", LAID_OUT)
def test_how_a_function_is_laid_out_changes_no_number(what: str) -> None:
    one, other = LAID_OUT[what]
    assert compiled(one)(dice()) == compiled(other)(dice())


def without_source(source: str) -> Any:
    namespace: dict[str, Any] = {"immortal": immortal}
    exec(compile(source, "<nowhere>", "exec"), namespace)
    return namespace["draw"]


@pytest.mark.parametrize("what", LAID_OUT)
def test_code_without_its_source_draws_the_same(what: str) -> None:
    for source in LAID_OUT[what]:
        assert without_source(source)(dice()) == compiled(source)(dice())


def test_a_hot_place_is_the_place_that_it_was() -> None:
    # Python rewrites code that has run often, and then says another position of the same instruction.
    draw, one = compiled(LAID_OUT["a line that is broken"][0]), dice()
    first = draw(one)
    for index in range(1, 100):
        one._immortal_context.message_index = index
        draw(one)
    one._immortal_context.message_index = 0
    assert draw(one) == first


def test_a_comprehension_is_part_of_its_function() -> None:
    # Python 3.12 makes no function of it any more.
    loop = "def draw(self):\n    a = []\n    for _ in 'abc': a.append(immortal.random.random())\n    return a\n"
    draw = compiled("def draw(self):\n    return [immortal.random.random() for _ in 'abc']\n")
    assert draw(dice()) == compiled(loop)(dice())


def test_another_function_or_method_is_another_place() -> None:
    draws = "lambda self: immortal.random.getrandbits(64)", "lambda self: immortal.random.randbytes(8)"
    classes = f"class A:\n    a = {draws[0]}\n    b = {draws[1]}\nclass B:\n    a = {draws[0]}\n"
    source = f"{classes}draw = lambda self: (A.a(self), B.a(self))"
    one, other = compiled(source)(dice())
    assert one != other
    draw = compiled("def draw(self):\n    return immortal.random.getrandbits(64), immortal.random.randbytes(8)\n")
    first, second = draw(dice())
    assert first.to_bytes(8, "little") != second


def test_what_has_no_frame_draws_as_part_of_its_caller() -> None:
    # As a helper does that Cython has compiled.
    by_attribute = (
        "from operator import attrgetter\ndef draw(self):\n    return attrgetter('random.random')(immortal)()\n"
    )
    assert compiled(by_attribute)(dice()) == compiled("def draw(self):\n    return immortal.random.random()\n")(dice())


class Drawing(Immortal):
    numbers: list[int]

    def __init__(self) -> None:
        self.numbers = []

    @rpc(id=1)
    def draw(self) -> None:
        self.numbers.append(immortal.random.randrange(10**9))


class Waiting(Immortal):
    drawn: ClassVar[list[tuple[float, str, str]]] = []

    def __init__(self) -> None: ...

    @rpc(id=1)
    async def draw(self) -> None:
        self.drawn.append((immortal.random.random(), immortal.uuid4().hex, str(immortal.uuid4())))
        await immortal.sleep(timedelta(seconds=1))


def test_golden_values_of_a_handler_that_waits() -> None:
    first_start(Waiting).give(logged(1, [call(1)]) + logged(2, [call(1)]))
    assert Waiting.drawn == DRAWN_WAITING


def test_a_log_keeps_the_rules_that_it_began_with() -> None:
    blob = first_start(Drawing).output.blobs[-1]
    assert decode_envelope(blob)[0].rules == NEWEST
    again = recover(Drawing, blob, logged(decode_envelope(blob)[0].sequence_id + 1, [call(1)]))
    assert decode_envelope(again.output.blobs[-1])[0].rules == NEWEST


def test_a_checkpoint_from_before_0_1_is_refused() -> None:
    header = msgspec.msgpack.encode({"class_name": "Drawing", "serializer": "msgspec", "seed": SEED, "sequence_id": 3})
    blob = FRONT.pack(b"IMMAPP", 1, 0, len(header)) + header
    with pytest.raises(StateError, match="has version 1, this SDK reads versions 3 to 5"):
        decode_envelope(blob)


def test_a_rule_that_is_not_known_is_refused() -> None:
    blob = encode_envelope(Envelope(class_name="D", serializer="msgspec", seed=SEED, sequence_id=3, rules=9))
    with pytest.raises(
        StateError, match=rf"follows rules 9, this SDK knows {min(Rules)} to {NEWEST}: start the app with the version"
    ):
        decode_envelope(blob)
    blob = encode_envelope(Envelope(class_name="D", serializer="msgspec", seed=SEED, sequence_id=3, order_rules=9))
    with pytest.raises(StateError, match=r"follows rules of order 9, this SDK knows 2 to 2: start the app"):
        decode_envelope(blob)


def test_other_threads_are_sent_to_the_real_thing() -> None:
    one = dice()
    problems = []

    def hook() -> None:
        for attempt in (lambda: immortal.random.random(), immortal.uuid4, immortal.now, immortal.now_ns):
            try:
                attempt()
            except UsageError as error:
                problems.append(str(error))

    thread = threading.Thread(target=one._immortal_context.run_contexts.run, args=(hook,))
    thread.start()
    thread.join()
    assert len(problems) == 4
    assert all("impulse" in problem for problem in problems)


def test_time_is_the_records() -> None:
    one = dice()
    one._immortal_context.record_time_ns = 1_700_000_000_123_456_789
    assert immortal.now_ns() == 1_700_000_000_123_456_789
    assert immortal.now().isoformat() == "2023-11-14T22:13:20.123456+00:00"
    one._immortal_context.record_time_ns = None
    one._immortal_context.handling_thread_id = threading.get_ident()
    with pytest.raises(UsageError, match="record 3 has no time"):
        immortal.now()


DRAWN = (0.7114506626781469, "34d8405debbb4d35a6ecfca725aa80d4")
NAME = "86962863-a9b6-42d4-8925-c3e8c679a0c3"
DRAWN_WAITING = [
    (0.8930373312140789, "62a9815775504c70a4ac4c97131459cb", "27974e97-1873-472b-b584-a1b36cd09b60"),
    (0.030387042251314278, "e5f3e4bcd0c949efa4bed7283f40ead8", "5b72e13b-9f3e-4d36-8a67-4813d8b3680d"),
]
