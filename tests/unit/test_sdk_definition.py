"""What a class may be: each rule is an error where the class is made, and says the way out."""

from __future__ import annotations

import collections
import sys
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import pytest

import immortal
import immortal.appsdk.handlers.decorators
from immortal import Immortal, Impulses, Transient, every, impulse, initial, on_primary, peer, rpc
from immortal.appsdk.handlers.decorators import method_id_of_name
from immortal.appsdk.handlers.definition import definition_of
from immortal.errors import DefinitionError, UsageError
from tests.helpers.programs import Program


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    return Program(tmp_path, monkeypatch)


class Counter(Immortal):
    words: dict[str, int]

    def __init__(self) -> None:
        self.words = {}

    @rpc
    def count(self, line: str, times: int = 1) -> None:
        for word in line.split():
            self.words[word] = self.words.get(word, 0) + times

    @rpc(id=7)
    def reset(self) -> None:
        self.words.clear()


class Louder(Counter):
    @rpc
    def count(self, line: str, times: int = 1) -> None:
        super().count(line.upper(), times)


class Reader(Immortal):
    counter = peer(Counter, "counter")
    back = peer(lambda: Writer, "writer")
    by_path = peer("collections:OrderedDict", "nobody")

    @impulse
    def line(self, text: str) -> None:
        self.counter.count.fork(text)


class Writer(Immortal):
    reader = peer(Reader, "reader")


def test_method_ids_follow_from_the_name_alone() -> None:
    # Golden: a change of these would send the calls of yesterday's logs elsewhere.
    assert method_id_of_name("count") == 343311
    assert method_id_of_name("line") == 534838
    handlers = definition_of(Counter).handlers
    assert handlers["count"].method_id == 343311
    assert handlers["reset"].method_id == 7


def test_a_plain_instance_works_without_a_coordinator() -> None:
    counter = Counter()
    counter.count("a b a")
    Counter.count(counter, "b")
    assert counter.words == {"a": 2, "b": 2}
    with pytest.raises(UsageError, match="does not run beside a coordinator"):
        counter.count.fork("a")
    assert immortal.now().tzinfo is not None
    assert 0 <= immortal.random.random() < 1
    assert immortal.uuid4().version == 4


def test_an_overriding_handler_reaches_the_overridden_one() -> None:
    louder = Louder()
    louder.count("a")
    assert louder.words == {"A": 1}
    assert definition_of(Louder).handlers["count"].method_id == definition_of(Counter).handlers["count"].method_id


def test_immortal_itself_is_no_app() -> None:
    with pytest.raises(DefinitionError, match="below it"):
        Immortal()


def test_an_attribute_for_state_can_not_replace_a_handler_or_peer() -> None:
    counter = Counter()
    with pytest.raises(AttributeError):
        counter.count = 1


def _no_annotation() -> None:
    class App(Immortal):
        @rpc
        def count(self, line) -> None:  # type: ignore[no-untyped-def]
            pass


def _no_return_annotation() -> None:
    class App(Immortal):
        @rpc
        def count(self, line: str):  # type: ignore[no-untyped-def]
            pass


def _star_arguments() -> None:
    class App(Immortal):
        @rpc
        def count(self, *lines: str) -> None:
            pass


def _star_keywords() -> None:
    class App(Immortal):
        @rpc  # type: ignore[arg-type]
        def count(self, **lines: str) -> None:
            pass


def _async_initial() -> None:
    class App(Immortal):
        @initial  # type: ignore[arg-type]
        async def begin(self) -> None:
            pass


def _async_generator() -> None:
    class App(Immortal):
        @rpc
        async def count(self, line: str) -> AsyncIterator[int]:
            yield 1


def _no_exception() -> None:
    class App(Immortal):
        @rpc(raises=[int])  # type: ignore[list-item]
        def count(self) -> None:
            pass


def count(self) -> None:
    pass


def _no_period() -> None:
    class App(Immortal):
        @every("10 minutes")
        def count(self) -> None:
            pass


def _period_of_nothing() -> None:
    class App(Immortal):
        @every(timedelta())
        def count(self) -> None:
            pass


def _schedule_with_parameters() -> None:
    class App(Immortal):
        @every("10m")
        def count(self, line: str) -> None:
            pass


def _async_hook() -> None:
    class App(Immortal):
        @on_primary  # type: ignore[arg-type]
        async def feed(self, impulses: Impulses) -> None:
            pass


def _generator() -> None:
    class App(Immortal):
        @rpc
        def count(self) -> Any:
            yield 1


def _static_method() -> None:
    class App(Immortal):
        @rpc
        @staticmethod
        def count(line: str) -> None:
            pass


def _no_self() -> None:
    class App(Immortal):
        @rpc  # type: ignore[arg-type]
        def count() -> None:
            pass


def _unsupported_parameter() -> None:
    class App(Immortal):
        @rpc
        def count(self, function: Callable[[], int]) -> None:
            pass


def _custom_parameter() -> None:
    class App(Immortal):
        @rpc
        def count(self, words: list[collections.ChainMap[str, int]]) -> None:
            pass


def _unsupported_attribute() -> None:
    class App(Immortal):
        words: dict[str, collections.ChainMap[str, int]]


def _hook_without_impulses() -> None:
    class App(Immortal):
        @on_primary  # type: ignore[arg-type]
        def feed(self) -> None:
            pass


def _two_initials() -> None:
    class App(Immortal):
        @initial
        def begin(self) -> None:
            pass

        @initial
        def start(self) -> None:
            pass


def _initial_with_argument() -> None:
    class App(Immortal):
        @initial  # type: ignore[arg-type]
        def begin(self, line: str) -> None:
            pass


def _same_id_by_hand() -> None:
    class App(Immortal):
        @rpc(id=3)
        def first(self) -> None:
            pass

        @impulse(id=3)
        def second(self) -> None:
            pass


def _id_out_of_range() -> None:
    class App(Immortal):
        @rpc(id=0)
        def count(self) -> None:
            pass


def _checkpoint_alone() -> None:
    class App(Immortal):
        def checkpoint(self) -> bytes:
            return b""


def _handler_overridden_by_plain_method() -> None:
    class App(Counter):
        def count(self, line: str, times: int = 1) -> None:  # type: ignore[override]
            pass


def _second_name() -> None:
    class App(Immortal):
        @rpc
        def count(self) -> None:
            pass

        total = count


def _bad_serializer() -> None:
    class App(Immortal, serializer="json"):  # type: ignore[arg-type]
        pass


def _bad_formerly() -> None:
    class App(Immortal, formerly="Old"):
        pass


def _peer_without_name() -> None:
    class App(Immortal):
        counter = peer(Counter, "")


def _peer_of_another_class() -> None:
    class App(Immortal):
        counter = peer(dict, "counter")


def _peer_path() -> None:
    class App(Immortal):
        counter = peer("Counter", "counter")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (_no_annotation, ["count", "'line'", "annotation"]),
        (_no_return_annotation, ["count", "return", "-> None"]),
        (_star_arguments, ["count", "'*lines'"]),
        (_star_keywords, ["count", "'**lines'"]),
        (_async_hook, ["feed", "plain 'def'", "impulses."]),
        (_async_initial, ["begin", "plain 'def'", ".fork"]),
        (_async_generator, ["count", "generator"]),
        (_no_exception, ["count", "int", "below Exception"]),
        (_no_period, ["'10 minutes'", '"10m"']),
        (_period_of_nothing, ["timedelta", "10m"]),
        (_schedule_with_parameters, ["count", "@every", "without arguments"]),
        (_generator, ["count", "generator"]),
        (_static_method, ["plain method", "staticmethod"]),
        (_no_self, ["count", "self"]),
        (_unsupported_parameter, ["count", "'function'"]),
        (_custom_parameter, ["count", "'words'", "ChainMap"]),
        (_unsupported_attribute, ["App", "'words'", "ChainMap", "checkpoint", "pickle"]),
        (_hook_without_impulses, ["feed", "impulses: Impulses"]),
        (_two_initials, ["begin", "start"]),
        (_initial_with_argument, ["begin", "@initial"]),
        (_same_id_by_hand, ["first", "second", "3", "id="]),
        (_id_out_of_range, ["count", "id=0", "1048575"]),
        (_checkpoint_alone, ["checkpoint", "restore"]),
        (_handler_overridden_by_plain_method, ["App.count", "@rpc"]),
        (_second_name, ["total", "'count'"]),
        (_bad_serializer, ["'json'", "pickle"]),
        (_bad_formerly, ["('Old',)"]),
        (_peer_without_name, ["name"]),
        (_peer_of_another_class, ["dict", "Immortal"]),
        (_peer_path, ["'Counter'", "module:Class"]),
    ],
)
def test_what_can_not_be_run_is_an_error_at_class_creation(make: Callable[[], None], words: list[str]) -> None:
    with pytest.raises(DefinitionError) as caught:
        make()
    for word in words:
        assert word in str(caught.value)


def test_ids_that_collide_name_both_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(immortal.appsdk.handlers.decorators, "method_id_of_name", lambda name: 9000)
    with pytest.raises(DefinitionError, match=r"one and two have the same method ID.*@rpc\(id=1\)"):

        class App(Immortal):
            @rpc
            def one(self) -> None: ...

            @rpc
            def two(self) -> None: ...


def test_what_is_no_state_is_left_out() -> None:
    class App(Immortal):
        counter = peer(Counter, "counter")
        limit: ClassVar[int] = 3
        cache: Transient[dict[str, int]]
        _private: int
        __mangled: int = 0

    schema = definition_of(App).state()
    assert sorted(schema.fields) == ["_App__mangled", "_private"]
    assert schema.transient == {"cache"}


def test_peers_that_refer_to_each_other() -> None:
    reader = Reader()
    assert repr(reader.counter) == "<peer 'counter'>"
    with pytest.raises(AttributeError, match=r"Counter has no handler 'counted' \(its handlers: count, reset\)"):
        reader.counter.counted  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(UsageError, match=r"\.fork"):
        reader.counter.count("a")
    with pytest.raises(AttributeError, match="Writer has no handler"):
        reader.back.anything  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(DefinitionError, match="OrderedDict"):
        reader.by_path.anything  # noqa: B018


def test_annotations_that_name_what_comes_later_in_the_module(program: Program) -> None:
    """From Python 3.14 on no "from __future__ import annotations" is needed for that."""
    head = "" if sys.version_info >= (3, 14) else "from __future__ import annotations\n"
    made = program.module_of(
        head
        + """
from datetime import timedelta
from immortal import Immortal, Impulses, every, on_primary, rpc
import msgspec

class Store(Immortal):
    left: dict[str, Item]

    @rpc
    def take(self, item: Item) -> list[Item]:
        return [item]

    @every(timedelta(days=1))
    def count(self) -> None: ...

    @on_primary
    def feed(self, impulses: Impulses) -> None: ...

class Item(msgspec.Struct):
    number: int
""",
        "later",
    )
    definition = definition_of(made.Store)
    definition.resolve(names_may_be_missing=False)
    assert definition.state().fields == {"left": dict[str, made.Item]}
    with pytest.raises(DefinitionError, match="'main' is one of Immortal's own names"):
        program.module_of(head + "from immortal import Immortal\nclass App(Immortal):\n    main: Unknown\n", "reserved")
