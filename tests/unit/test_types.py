"""Types of values by the places where they are carried: each type through each place comes out as what went in."""

import dataclasses
import enum
import importlib
import re
import struct
import subprocess
import sys
import typing
import uuid
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from functools import partial
from ipaddress import IPv4Address, IPv4Interface, IPv4Network, IPv6Address, IPv6Interface, IPv6Network
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypedDict, TypeVar
from zoneinfo import ZoneInfo

import attrs
import msgspec
import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pydantic
import pytest

import immortal
from immortal import CalleeFailed, CallRefused, Immortal, peer, register_type, rpc, upgrades
from immortal.appsdk.calls.codec import ValueDecoder, encode_value, encoder
from immortal.appsdk.client.methods import NamedMethod, TypedMethod
from immortal.appsdk.handlers.definition import definition_of
from immortal.appsdk.state.schema import copied_envelope
from immortal.appsdk.state.tree import differences, to_json, tree
from immortal.errors import DefinitionError, StateError
from immortal.pipeline.arguments import ArgumentDecoder
from immortal.protocol.client_frames import Reply, ReplyKind
from immortal.protocol.messages import RpcKind, RpcType
from immortal.testing import Environment, Instance

T = TypeVar("T")


@dataclasses.dataclass
class Point:
    x: int
    y: float = 0.0


class Circle(msgspec.Struct, tag=True):
    radius: float


class Square(msgspec.Struct, tag=True):
    side: float


class Box(msgspec.Struct, Generic[T]):
    content: T


@attrs.define
class Tree:
    name: str
    parts: list["Tree"] = attrs.field(factory=list)


class Pair(NamedTuple):
    left: int
    right: str = ""


class Options(TypedDict):
    depth: int


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Right(enum.Flag):
    READ = 1
    WRITE = 2


class Line(pydantic.BaseModel):
    count: int = pydantic.Field(gt=0, alias="howMany")
    price: Decimal = Decimal("1.10")


class Order(pydantic.BaseModel):
    number: uuid.UUID
    when: datetime
    lines: list[Line]
    color: Color
    file: Path
    site: pydantic.HttpUrl
    blob: bytes
    tags: frozenset[str]
    took: timedelta
    by_number: dict[int, tuple[int, str]]

    @pydantic.computed_field  # type: ignore[prop-decorator]
    @property
    def lines_count(self) -> int:
        return len(self.lines)


class Strict(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(strict=True, extra="forbid", frozen=True)

    when: datetime
    number: uuid.UUID
    members: frozenset[int]


class Cat(pydantic.BaseModel):
    kind: Literal["cat"] = "cat"
    lives: int


class Dog(pydantic.BaseModel):
    kind: Literal["dog"] = "dog"
    name: str


class Page(pydantic.BaseModel, Generic[T]):
    items: list[T]


class ShopError(Exception):
    def __init__(self, item: str, count: int) -> None:
        super().__init__(f"{count} {item}")
        self.item, self.count = item, count


class Money:
    """A plain class with a codec."""

    def __init__(self, cents: int, currency: str) -> None:
        self.cents, self.currency = cents, currency

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Money) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((self.cents, self.currency))


def read_money(parts: tuple[int, str]) -> Money:
    if len(parts[1]) != 3:
        raise ValueError(f"a currency of three letters was expected, not {parts[1]!r}")
    return Money(*parts)


register_type(Money, encode=lambda money: (money.cents, money.currency), decode=read_money, form=tuple[int, str])


def order(count: int) -> Order:
    return Order(
        number=uuid.UUID(int=count),
        when=datetime(2030, 1, 2, tzinfo=UTC),
        lines=[Line(howMany=count)],
        color=Color.BLUE,
        file=Path("/a/b"),
        site=pydantic.HttpUrl("https://example.org/a?b=c"),
        blob=b"\xff\x00",
        tags=frozenset({"new"}),
        took=timedelta(hours=1.5),
        by_number={1: (2, "c")},
    )


def frame(number: int) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "number": [number, 2],
            "text": ["a", None],
            "category": pd.Categorical(["u", "v"]),
            "when": pd.to_datetime(["2030-01-02", "2031-01-02"]).tz_localize("Europe/Berlin"),
            "maybe": pd.array([1, None], dtype="Int64"),
            "day": [date(2030, 1, 2), None],
        },
        index=pd.Index(["i", "j"], name="key"),
    )


def table(number: int) -> pa.Table:
    columns = {"number": [number, None], "text": ["a", None], "when": [datetime(2030, 1, 2), None], "list": [[1], []]}
    return pa.table(columns | {"category": pa.array(["u", "v"]).dictionary_encode()})


Floats = npt.NDArray[np.float64]

TYPES: dict[str, tuple[Any, Any, Any]] = {
    "int": (int, 1, 2**63),
    "optional": (int | None, 1, None),
    "list": (list[dict[str, set[int]]], [{"a": {1}}], []),
    "tuple": (tuple[int, str], (1, "a"), (2, "b")),
    "datetime": (datetime, datetime(2030, 1, 2, 3, tzinfo=UTC), datetime(2031, 1, 2, 3, 4, 5, 6, tzinfo=UTC)),
    "naive datetime": (datetime, datetime(2030, 1, 2, 3), datetime(2031, 1, 2, 3, 4, 5, 6)),
    "date": (date, date(2030, 1, 2), date(2031, 1, 2)),
    "time": (time, time(1, 2), time(3, 4, 5, 6)),
    "timedelta": (timedelta, timedelta(1), timedelta(microseconds=-1)),
    "decimal": (Decimal, Decimal("1.10"), Decimal("1E+5")),
    "uuid": (uuid.UUID, uuid.UUID(int=1), uuid.UUID(int=2)),
    "enum": (Color, Color.RED, Color.BLUE),
    "flag": (Right, Right.READ, Right.READ | Right.WRITE),
    "path": (Path, Path("/a"), Path("b/c")),
    "pure path": (PurePosixPath, PurePosixPath("/a"), PurePosixPath("b")),
    "keys that are paths": (dict[Path, int], {Path("a"): 1}, {}),
    "dataclass": (Point, Point(1), Point(2, 0.5)),
    "struct": (Circle, Circle(1.0), Circle(2.0)),
    "union of tagged structs": (Circle | Square, Circle(1.0), Square(2.0)),
    "generic struct": (Box[list[int]], Box([1]), Box([])),
    "attrs": (Tree, Tree("a", [Tree("b")]), Tree("c")),
    "named tuple": (Pair, Pair(1), Pair(2, "b")),
    "typed dict": (Options, {"depth": 1}, {"depth": 2}),
    "model": (Order, order(1), order(2)),
    "strict model": (
        Strict,
        Strict(when=datetime(2030, 1, 2), number=uuid.UUID(int=1), members=frozenset({1})),
        Strict(when=datetime(2031, 1, 2, tzinfo=UTC), number=uuid.UUID(int=2), members=frozenset()),
    ),
    "models in a struct": (Box[list[Line]], Box([Line(howMany=1)]), Box([])),
    "generic model": (Page[int], Page[int](items=[1]), Page[int](items=[])),
    "union of models": (Cat | Dog, Cat(lives=9), Dog(name="a")),
    "discriminated union": (
        Annotated[Cat | Dog | None, pydantic.Field(discriminator="kind")],
        Cat(lives=9),
        Dog(name="a"),
    ),
    "deque": (deque[int], deque([1, 2**70]), deque([1], 3)),
    "deque of others": (deque[Point], deque([Point(1)]), deque()),
    "defaultdict": (defaultdict[str, int], defaultdict(int, {"b": 2**70, "a": 1}), defaultdict(int)),
    "defaultdict of lists": (defaultdict[int, list[str]], defaultdict(list, {1: ["a"]}), defaultdict(list)),
    "defaultdict of defaultdicts": (
        defaultdict[str, defaultdict[str, float]],
        defaultdict(partial(defaultdict, float), {"a": defaultdict(float, {"b": 1.5})}),
        defaultdict(partial(defaultdict, float)),
    ),
    "OrderedDict": (OrderedDict[str, int], OrderedDict(b=1, a=2), OrderedDict(a=2, b=2**70)),
    "Counter": (Counter[str], Counter("abca"), Counter({"a": -(2**70)})),
    "complex": (complex, 1 + 2j, complex("-infj")),
    "range": (range, range(3), range(2**70, 0, -1)),
    "fraction": (Fraction, Fraction(-1, 3), Fraction(1, 2**70)),
    "zone": (ZoneInfo, ZoneInfo("Europe/Paris"), ZoneInfo("UTC")),
    "pattern": (re.Pattern[str], re.compile("a+", re.I), re.compile("(?x) a # b")),
    "pattern of bytes": (re.Pattern[bytes], re.compile(b"a"), re.compile(b"b", re.S)),
    "address": (IPv4Address, IPv4Address("10.0.0.1"), IPv4Address("10.0.0.2")),
    "address, version 6": (IPv6Address, IPv6Address("::1"), IPv6Address("fe80::1%eth0")),
    "network": (IPv4Network, IPv4Network("10.0.0.0/8"), IPv4Network("10.0.0.1/32")),
    "network, version 6": (IPv6Network | None, IPv6Network("2001:db8::/32"), None),
    "interface": (IPv4Interface, IPv4Interface("10.0.0.1/8"), IPv4Interface("10.0.0.1/9")),
    "interface, version 6": (IPv6Interface, IPv6Interface("::1/64"), IPv6Interface("::2/64")),
    "keys that are addresses": (
        dict[IPv4Address, deque[int]],
        {IPv4Address("10.0.0.1"): deque([2**70])},
        {IPv4Address("10.0.0.1"): deque([1])},
    ),
    "keys of a Counter": (Counter[IPv4Address], Counter([IPv4Address("10.0.0.1")]), Counter()),
    "exception": (ShopError, ShopError("tea", 1), ShopError("rice", 2)),
    "any of Python's exceptions": (Exception | None, FileNotFoundError(2, "none such", "a"), KeyError("a")),
    "array": (Floats, np.array([[1.0, np.nan], [3.0, 4.0]]), np.zeros((0, 3))),
    "column-major array": (Floats, np.arange(6.0).reshape(2, 3).T, np.arange(4.0).reshape(2, 2, order="F")),
    "array with gaps": (Floats, np.arange(6.0)[::2], np.arange(6.0).reshape(2, 3)[:, 1:]),
    "array of no dimensions": (np.ndarray, np.array(1.5), np.array(2)),
    "array of times": (np.ndarray, np.array(["2030-01-02", "NaT"], "M8[ns]"), np.array([5], "m8[s]")),
    "array of texts": (np.ndarray, np.array(["a", "bcd"]), np.array([b"x", b"yz"])),
    "array of complex": (np.ndarray, np.array([1 + 2j]), np.array([], complex)),
    "array, big endian": (np.ndarray, np.array([1, 2], ">i4"), np.array([3], ">f8")),
    "array of truths": (npt.NDArray[np.bool_], np.array([True, False]), np.array([False])),
    "arrays in a dataclass": (dict[str, Floats], {"a": np.array([1.0])}, {}),
    "scalar": (np.float32, np.float32(0.1), np.float32(np.inf)),
    "whole scalar": (np.uint8, np.uint8(255), np.uint8(0)),
    "table": (pa.Table, table(1), table(2)),
    "empty table": (pa.Table, pa.table({"a": pa.array([], pa.int8())}), table(1).slice(1, 1)),
    "record batch": (pa.RecordBatch, table(1).to_batches()[0], table(2).to_batches()[0].slice(0, 0)),
    "frame": (pd.DataFrame, frame(1), frame(2)),
    "plain frame": (pd.DataFrame, pd.DataFrame({"x": [1.0, 2.0]}), pd.DataFrame({7: [1]}, index=pd.RangeIndex(4, 5))),
    "registered": (Money, Money(1, "EUR"), Money(2, "CHF")),
    "registered, inside": (list[Money], [Money(1, "EUR")], []),
}


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        equal_nan = one.dtype.kind in "fc"
        layout = (one.dtype, one.shape, one.flags.f_contiguous)
        return layout == (other.dtype, other.shape, other.flags.f_contiguous) or np.array_equal(
            one, other, equal_nan=equal_nan
        )
    if isinstance(one, pa.Table | pa.RecordBatch):
        return bool(one.equals(other, check_metadata=True))
    if isinstance(one, pd.DataFrame):
        pd.testing.assert_frame_equal(one, other)
        return True
    if isinstance(one, BaseException):
        return one.args == other.args and vars(one) == vars(other) and str(one) == str(other)
    if isinstance(one, deque):
        return one == other and one.maxlen == other.maxlen
    if isinstance(one, defaultdict | OrderedDict):
        factories = [str(getattr(each, "default_factory", None)) for each in (one, other)]
        return list(one.items()) == list(other.items()) and factories[0] == factories[1]
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return bool(one == other)


def effect_of(annotation: Any) -> Callable[..., Any]:
    def passed_on(value: annotation) -> annotation:  # type: ignore[valid-type]
        return value

    passed_on.__qualname__ = "passed_on"  # as a function of a module is called
    return passed_on


class Services:
    """A class that keeps a value of one type, and one that asks it."""

    def __init__(self, name: str) -> None:
        annotation, self.first, self.second = TYPES[name]
        first, passed_on = self.first, effect_of(annotation)

        class Keeper(Immortal):
            kept: annotation  # type: ignore[valid-type]

            def __init__(self) -> None:
                self.kept = first

            @rpc
            def keep(self, value: annotation) -> None:  # type: ignore[valid-type]
                self.kept = value

            @rpc
            def give(self) -> annotation:  # type: ignore[valid-type]
                return self.kept

            @rpc
            def fail(self, value: annotation) -> None:  # type: ignore[valid-type]
                self.kept = value
                raise ValueError("after all")

        @upgrades(Keeper)
        class NewKeeper(Immortal):
            kept: annotation  # type: ignore[valid-type]

            def upgrade(cls, old: Keeper) -> "NewKeeper":  # noqa: N805 (the decorator makes it a class method)
                new: NewKeeper = NewKeeper.__new__(NewKeeper)
                new.kept = old.kept
                return new

            @rpc
            def give(self) -> annotation:  # type: ignore[valid-type]
                return self.kept

        class Asker(Immortal):
            keeper = peer(lambda: Keeper, "keeper")
            heard: annotation  # type: ignore[valid-type]

            def __init__(self) -> None:
                self.heard = first

            @rpc
            async def ask(self, value: annotation) -> annotation:  # type: ignore[valid-type]
                await self.keeper.keep(value)
                heard = await self.keeper.give()
                done = await immortal.effect(passed_on, heard)
                await immortal.sleep(timedelta(hours=1))
                event = await immortal.event("value", annotation)
                await immortal.step(self.note, event)
                return done

            @rpc
            def note(self, value: annotation) -> None:  # type: ignore[valid-type]
                self.heard = value

            @rpc
            def signal_value(self, value: annotation) -> None:  # type: ignore[valid-type]
                immortal.signal("value", value)

            @rpc
            def pass_on(self, value: annotation) -> None:  # type: ignore[valid-type]
                self.keeper.keep.fork(value)

        self.keeper, self.new_keeper, self.asker = Keeper, NewKeeper, Asker
        self.effects = {passed_on: passed_on}


@pytest.fixture(scope="module", params=TYPES)
def services(request: pytest.FixtureRequest) -> Services:
    return Services(request.param)


@pytest.fixture
def env() -> Iterator[Environment]:
    with Environment(fail_alone=True) as made:
        yield made  # at its end each log is replayed, and the states and outputs are compared


def test_an_argument_a_result_and_the_state(services: Services, env: Environment) -> None:
    keeper = env.start(services.keeper, "keeper")
    keeper.call(services.keeper.keep, services.second)
    assert same(keeper.call(services.keeper.give), services.second)
    assert same(keeper.state.kept, services.second)


def test_a_forked_call_and_an_impulse(services: Services, env: Environment) -> None:
    keeper, asker = env.start(services.keeper, "keeper"), env.start(services.asker, "asker")
    asker.send(services.asker.pass_on, services.second)
    env.run()
    assert same(keeper.state.kept, services.second)


def test_a_recovery_from_a_checkpoint_and_the_log_behind_it(services: Services, env: Environment) -> None:
    keeper = env.start(services.keeper, "keeper")
    keeper.checkpoint()
    keeper.crash()
    keeper.recover()
    assert same(keeper.state.kept, services.first)
    keeper.call(services.keeper.keep, services.second)
    keeper.crash()
    keeper.recover()
    assert same(keeper.call(services.keeper.give), services.second)


def test_a_call_that_fails_leaves_the_state_as_it_was(services: Services, env: Environment) -> None:
    keeper = env.start(services.keeper, "keeper")
    with pytest.raises(CalleeFailed, match="after all"):
        keeper.call(services.keeper.fail, services.second)
    assert same(keeper.state.kept, services.first)
    assert same(keeper.call(services.keeper.give), services.first)


def test_awaited_results_effects_events_and_a_journal(services: Services, env: Environment) -> None:
    env.start(services.keeper, "keeper")
    asker = env.start(services.asker, "asker", effects=services.effects)
    asking = asker.begin(services.asker.ask, services.second)
    env.run()
    asker.checkpoint()  # the handler sleeps: its results so far are in the journal
    asker.crash()
    asker.recover()
    env.advance(hours=1)
    asker.send(services.asker.signal_value, services.second)
    assert same(asking.result(), services.second)
    assert same(asker.state.heard, services.second)


def test_an_upgrade_takes_the_state_over(services: Services, env: Environment) -> None:
    keeper: Instance[Any] = env.start(services.keeper, "keeper")
    keeper.call(services.keeper.keep, services.second)
    keeper = keeper.upgrade(services.new_keeper)
    assert same(keeper.call(services.new_keeper.give), services.second)


def test_a_difference_of_states_in_words_and_as_json(services: Services) -> None:
    definition = definition_of(services.keeper)
    trees = []
    for value in (services.first, services.second):
        instance = definition.new_instance()
        instance.kept = value
        schema = definition.state()
        restored = definition.new_instance()
        envelope = copied_envelope(definition.name, schema.serializer)
        schema.restore(restored, envelope, memoryview(schema.encode(instance)))
        assert list(differences(tree(value), tree(restored.kept))) == []
        trees.append(tree(value))
    found = list(differences(*trees, "kept"))
    assert found
    for difference in found:
        msgspec.json.encode(difference.to_json())
    assert "$type" not in str(to_json(trees[0])) or isinstance(services.first, Exception)
    assert "$opaque" not in str(to_json(trees[0]))


def test_a_caller_from_outside_with_the_class(services: Services) -> None:
    definition = definition_of(services.keeper)
    keep = TypedMethod(definition, definition.handlers["keep"])
    give = TypedMethod(definition, definition.handlers["give"])
    data = keep.encode((services.second,), {})
    assert same(definition.codec(definition.handlers["keep"]).decode(data)[0], services.second)
    reply = Reply(1, ReplyKind.VALUE, encode_value(services.second))
    assert same(give.value(reply), services.second)


def test_a_caller_from_outside_with_plain_values(services: Services, request: pytest.FixtureRequest) -> None:
    """What a caller without the class hears, it can send again: also as JSON."""
    plain = NamedMethod("give").value(Reply(1, ReplyKind.VALUE, encode_value(services.second)))
    codec = definition_of(services.keeper).codec(definition_of(services.keeper).handlers["keep"])
    assert same(codec.decode(NamedMethod("keep").encode((plain,), {}))[0], services.second)
    name = request.node.callspec.params["services"]
    if name not in ("model", "scalar", "pattern of bytes"):  # JSON lacks infinities, and bytes in a model
        from_json = msgspec.json.decode(msgspec.json.encode(plain))
        assert same(codec.decode(NamedMethod("keep").encode((from_json,), {}))[0], services.second)


def test_what_the_pipeline_and_log_show_say(services: Services) -> None:
    definition = definition_of(services.keeper)
    handler = definition.handlers["keep"]
    decoder = ArgumentDecoder(definition)
    shown = decoder.decode(RpcKind.CALL, RpcType.FORK, handler.method_id, encode_value((services.second,)))
    assert shown.problem is None
    assert shown.arguments_json is not None
    assert shown.arguments_json.startswith('{"value":')


def test_the_bytes_are_the_same_after_a_round_trip(services: Services, request: pytest.FixtureRequest) -> None:
    annotation = TYPES[request.node.callspec.params["services"]][0]
    for value in (services.first, services.second):
        data = encode_value(value)
        assert encode_value(ValueDecoder(annotation).decode(data)) == data


# --- bytes that are in logs -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (Path("/a/b"), "a42f612f62"),
        (np.float32(0.5), "cb3fe0000000000000"),
        (np.array([1, 2], "<i2"), "83a56474797065a33c6932a573686170659102a464617461c40401000200"),
        (
            np.array([[1, 2]], "<i2").T.copy("F").reshape(2, 1),
            "83a56474797065a33c6932a57368617065920201a464617461c40401000200",
        ),
        (
            np.array([[1, 2], [3, 4]], "<i1").T,
            "84a56474797065a37c6931a573686170659202 02a464617461c40401020304a56f72646572a146".replace(" ", ""),
        ),
        (Line(howMany=3), "82a5636f756e7403a57072696365a4312e3130"),
        (Money(1, "EUR"), "9201a3455552"),
    ],
)
def test_golden_bytes(value: Any, expected: str) -> None:
    assert encoder.encode(value).hex() == expected


# --- what does not fit ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("annotation", "plain", "words"),
    [
        (int, "a", "Expected `int`, got `str`"),
        (list[Point], [{"x": 1}, {"x": "a"}], r"Expected `int`, got `str` (in it: [1].x)"),
        (Path, 5, "Expected `Path` (a text), got `int`"),
        (Line, {"count": 0}, "Expected `Line`: count: Input should be greater than 0, got `int`"),
        (Line, 5, "Expected `Line`: it: Input should be a valid dictionary or instance of Line, got `int`"),
        (Strict, {"when": "x", "other": 1}, "Expected `Strict`: when: Input should be a valid datetime"),
        (Cat | Dog, {"kind": "cow"}, "Cat.kind: Input should be 'cat'"),
        (Tree, {"name": 5}, "Expected `str`, got `int`"),
        (Floats, 5, "Expected `ndarray` (dtype, shape and data, or a list), got `int`"),
        (Floats, np.array([1]), "Expected `ndarray` of float64, got one of int64"),
        (Floats, ["a"], "Expected `ndarray` of float64, got one of <U1"),
        (Floats, [[1.0], [1.0, 2.0]], "inhomogeneous shape"),
        (Floats, {"dtype": "|O", "shape": [1], "data": b"12345678"}, "an array of dtype object can't be sent"),
        (Floats, {"dtype": "<f8", "shape": [1], "data": b"1234567"}, "has 8 bytes, 7 came"),
        (Floats, {"dtype": "<f8", "shape": [-1, -1], "data": b"12345678"}, "none that numpy writes"),
        (Floats, {"dtype": "<f8", "shape": [1]}, "missing required field `data`"),
        (Floats, {"dtype": "nonsense", "shape": [1], "data": b""}, "'nonsense' is no dtype that numpy knows"),
        (np.ndarray[tuple[int, int], np.dtype[np.float64]], np.zeros(3), "with 2 dimensions, got one with 1"),
        (npt.NDArray[np.uint8], [300], "out of bounds for uint8"),
        (npt.NDArray[np.integer[Any]], [0.5], "Expected `ndarray` of integer, got one of float64"),
        (np.int8, 300, "Expected `int8`"),
        (np.int8, True, "Expected `int8`, got `bool`"),
        (np.float32, "a", "Expected `float32`, got `str`"),
        (pa.Table, b"no stream", "parameter 'value'"),
        (pa.Table, 5, "Expected `Table` (an Arrow stream, columns or rows), got `int`"),
        (pd.DataFrame, "a", "Expected `DataFrame`"),
        (Money, [1, "Euro"], "a currency of three letters was expected, not 'Euro'"),
        (Money, "a", "Expected `array`, got `str`"),
    ],
)
def test_a_wrong_value_is_refused_alone(annotation: Any, plain: Any, words: str, env: Environment) -> None:
    class Keeper(Immortal):
        count: int

        def __init__(self) -> None:
            self.count = 0

        @rpc
        def keep(self, value: annotation) -> None:  # type: ignore[valid-type]
            self.count += 1

        @rpc
        def counted(self) -> int:
            return self.count

    keeper = env.start(Keeper, "keeper")
    with pytest.raises(Exception, match=r"Keeper\.keep: ") as caught:
        keeper.call(Keeper.keep, plain)
    assert "parameter 'value': " in str(caught.value)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value).strip()
    assert keeper.call(Keeper.counted) == 0


def test_a_damaged_table_is_refused_before_it_is_read() -> None:
    """Its offsets point beyond its texts: to read them would end the process."""
    data = encoder.encode(pa.table({"text": ["abcdefgh"]}))
    offsets = struct.pack("<2i", 0, 8)
    at = data.rindex(offsets, 0, data.index(b"abcdefgh"))
    damaged = data[:at] + struct.pack("<2i", 0, 1 << 20) + data[at + len(offsets) :]
    with pytest.raises(msgspec.ValidationError):
        ValueDecoder(pa.Table).decode(damaged)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (object(), "parameter 'value' (a object) can't be encoded: Encoding objects of type builtins.object"),
        (np.array([None]), "an array of dtype object can't be sent"),
        (np.zeros(1, "f8,i4"), "for columns of several types a pyarrow.Table"),
        (np.zeros(1, np.longdouble), "can't be sent"),
        (np.ma.array([1]), "numpy.ma.MaskedArray is unsupported"),
        (pd.DataFrame({"x": [1, "a"]}), "column 'x' of a DataFrame holds objects (mixed-integer)"),
        (pd.DataFrame([[1, 2]], columns=["a", "a"]), "Duplicate column names"),
        (pd.DataFrame([[1, 2]], columns=["a", 1]), "names of several types"),
        (pd.Series([1]), "Series is unsupported"),
        (Line.model_construct(count="a"), "can't be encoded: Pydantic serializer warnings:"),
    ],
)
@pytest.mark.parametrize("way", ["fork", "await", "effect", "client", "unknown class"])
def test_what_cannot_be_encoded_is_an_error_at_the_call(value: Any, words: str, way: str, env: Environment) -> None:
    if way in ("client", "unknown class"):
        method = TypedMethod(definition_of(Anything), definition_of(Anything).handlers["take"])
        named = NamedMethod("take")
        with pytest.raises(TypeError) as caught:
            (method if way == "client" else named).encode((value,), {})
        assert words.replace("'value'", "'argument 1'" if way == "unknown class" else "'value'") in str(caught.value)
        return

    class Caller(Immortal):
        anything = peer(Anything, "anything")

        @rpc
        def forks(self) -> None:
            self.anything.take.fork(value)

        @rpc
        async def awaits(self) -> None:
            await self.anything.take(value)

        @rpc
        async def works(self) -> None:
            await immortal.effect(take_anything, value)

    handler: Any = {"fork": Caller.forks, "await": Caller.awaits, "effect": Caller.works}[way]
    with pytest.raises(CalleeFailed) as caught:
        env.start(Caller, "caller").call(handler)
    assert words in str(caught.value)
    assert "take" in str(caught.value)
    assert "parameter 'value' (a " in str(caught.value)


def take_anything(value: Any) -> None: ...


class Anything(Immortal):
    @rpc
    def take(self, value: Any, name: str = "") -> None: ...

    @rpc
    def grow(self, size: int) -> bytes:
        return bytes(size)


@pytest.mark.parametrize("way", ["fork", "await"])
def test_what_is_too_large_says_which_argument_and_how_large(way: str, env: Environment) -> None:
    class Caller(Immortal):
        anything = peer(Anything, "anything")

        @rpc
        def forks(self) -> None:
            self.anything.take.fork(bytes(64 << 20), "b")

        @rpc
        async def awaits(self) -> None:
            await self.anything.take(bytes(64 << 20), "b")

    env.start(Anything, "anything")
    handler: Any = {"fork": Caller.forks, "await": Caller.awaits}[way]
    words = r"Anything\.take: .* bytes, at most \d+ are possible: .*'value', a bytes of 671088\d\d bytes"
    with pytest.raises(CalleeFailed, match=words):
        env.start(Caller, "caller").call(handler)


def test_a_result_that_is_too_large_says_whose_and_how_large(env: Environment) -> None:
    anything = env.start(Anything, "anything")
    with pytest.raises(
        CalleeFailed, match=r"Anything\.grow: what it returned or raised takes 671088\d\d bytes, at most"
    ):
        anything.call(Anything.grow, 64 << 20)


def test_a_client_hears_which_argument_is_too_large() -> None:
    definition = definition_of(Anything)
    method = TypedMethod(definition, definition.handlers["take"])
    with pytest.raises(TypeError, match=r"Anything.take: the arguments take .*'value', a bytes of 167772\d\d bytes"):
        method.encode((bytes(16 << 20),), {})


# --- annotations ------------------------------------------------------------------------------------------------------


class Plain:
    pass


class HoldsFunction(pydantic.BaseModel):
    function: Callable[[], int]


class HoldsArray(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(arbitrary_types_allowed=True)

    array: np.ndarray[Any, Any]


WRONG: list[tuple[Any, str]] = [
    (Plain, "Plain is no type that can be encoded"),
    (list[Plain], "Plain is no type that can be encoded"),
    (typing.TextIO, "TextIO is no type that can be encoded"),
    (Callable[[int], int], "Callable is no type that can be encoded"),
    (type(lambda: 0), "function is no type that can be encoded"),
    (npt.NDArray[np.object_], "an array of dtype object can't be sent"),
    (list[npt.NDArray[np.object_]], "an array of dtype object can't be sent"),
    (np.ma.MaskedArray, "MaskedArray is no type that can be encoded"),
    (pd.Series, "Series is no type that can be encoded"),
    (HoldsFunction, "HoldsFunction: Cannot generate a JsonSchema for core_schema.CallableSchema"),
    (HoldsArray | None, "HoldsArray: Cannot generate a JsonSchema for core_schema.IsInstanceSchema"),
    (Cat | HoldsFunction, "HoldsFunction: Cannot generate"),
    (np.ndarray | int, "Type unions containing a custom type may not contain any additional types"),
]


def define_argument(annotation: Any) -> None:
    class Argument(Immortal):
        @rpc
        def take(self, number: int, thing: annotation) -> None: ...  # type: ignore[valid-type]

    definition_of(Argument).resolve(names_may_be_missing=False)


def define_state(annotation: Any) -> None:
    class State(Immortal):
        thing: annotation  # type: ignore[valid-type]

    definition_of(State).state()


@pytest.mark.parametrize(("annotation", "words"), WRONG)
def test_an_annotation_that_cannot_be_carried_is_an_error_at_the_start(annotation: Any, words: str) -> None:
    with pytest.raises(DefinitionError) as argument:
        define_argument(annotation)
    with pytest.raises(DefinitionError) as state:
        define_state(annotation)
    for caught, where in (argument, "Argument.take: parameter 'thing': "), (state, "State: attribute 'thing': "):
        assert where in str(caught.value)
        assert words in str(caught.value)
        assert "register_type" in str(caught.value)


# --- codecs of one's own ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cls", "form", "words"),
    [
        (Money, Any, "Money): it is registered already"),
        (int, Any, "int): its values are carried already"),
        (Point, Any, "Point): its values are carried already"),
        (Path, Any, "Path): its values are carried already"),
        (Line, Any, "Line): its values are carried already"),
        (Plain, Plain, "Plain, form=...): Plain is no type that can be encoded"),
        (list[int], Any, "a class was expected"),
    ],
)
def test_what_cannot_be_registered(cls: Any, form: Any, words: str) -> None:
    with pytest.raises(DefinitionError) as caught:
        register_type(cls, encode=str, decode=lambda text: text, form=form)
    assert words in str(caught.value)


def test_a_subclass_needs_a_codec_of_its_own() -> None:
    class Coins(Money):
        pass

    with pytest.raises(TypeError, match=r"Coins is unsupported"):
        encoder.encode(Coins(1, "EUR"))


def test_what_a_codec_raises_or_makes_is_in_the_words_of_its_type() -> None:
    class Odd:
        pass

    def broken(value: Any) -> Any:
        raise KeyError("gone")

    register_type(Odd, encode=broken, decode=broken)
    with pytest.raises(TypeError, match=r"the codec of Odd raised KeyError: 'gone'|the codec of .*Odd raised KeyError"):
        encoder.encode(Odd())
    with pytest.raises(msgspec.ValidationError, match=r"the codec of .*Odd raised KeyError"):
        ValueDecoder(Odd).decode(encoder.encode(1))

    class Other:
        pass

    register_type(Other, encode=lambda other: 1, decode=lambda number: number)
    with pytest.raises(msgspec.ValidationError, match=r"its codec made a int of it, not a .*Other"):
        ValueDecoder(Other).decode(encoder.encode(1))


GUIDE = (Path(__file__).parents[2] / "docs" / "reference" / "types.md").read_text()


def test_the_guides_program_runs(env: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    ((name, source),) = re.findall(r"```python\n# (\w+)\.py\n(.*?)```", GUIDE, re.DOTALL)
    module: Any = ModuleType(name)
    monkeypatch.setitem(sys.modules, name, module)
    exec(compile(source, f"{name}.py", "exec"), module.__dict__)
    till = env.start(module.Till, "till")
    assert till.call(module.Till.take, module.Money(5, "EUR")) == 1
    till.checkpoint()
    till.crash()
    till.recover()
    assert vars(till.call(module.Till.last)) == {"cents": 5, "currency": "EUR"}
    with pytest.raises(CallRefused, match="parameter 'price': a currency of three letters"):
        till.call(module.Till.take, (5, "Euro"))


# --- what is written into ---------------------------------------------------------------------------------------------


def test_a_handler_may_write_into_what_it_gets_before_and_after_a_recovery(env: Environment) -> None:
    class Sums(Immortal):
        sums: Floats
        frame: pd.DataFrame

        def __init__(self) -> None:
            self.sums, self.frame = np.zeros(2), pd.DataFrame({"x": [0.0]})

        @rpc
        def replace(self, sums: Floats, frame: pd.DataFrame) -> None:
            self.sums, self.frame = sums, frame

        @rpc
        def add(self, numbers: Floats) -> Floats:
            numbers *= 2
            self.sums += numbers
            self.frame.iloc[0, 0] += 1
            self.frame.iloc[0, 1] = "v"  # whose codes pyarrow would share with what came
            return self.sums

    sums = env.start(Sums, "sums")
    sums.call(Sums.replace, np.array([1.0, 2.0]), pd.DataFrame({"x": [1.0, 2.0], "y": pd.Categorical(["u", "v"])}))
    sums.call(Sums.add, np.array([1.0, 1.0]))
    sums.checkpoint()
    sums.crash()
    sums.recover()
    assert sums.call(Sums.add, np.array([1.0, 1.0])).tolist() == [5.0, 6.0]
    assert sums.state.frame.iloc[0, 0] == 3


def test_what_is_read_is_aligned_wherever_it_stands() -> None:
    decoder = ValueDecoder(tuple[bytes, Floats])
    for size in range(16):
        _, array = decoder.decode(encoder.encode((bytes(size), np.arange(3.0))))
        assert array.flags.aligned
        assert array.flags.owndata


def test_an_attribute_of_another_type_is_refused_as_it_is_saved(env: Environment) -> None:
    class Total(Immortal):
        total: float

        def __init__(self) -> None:
            self.total = np.float64(1.5)

    with pytest.raises(StateError, match=r"'total' can't be saved: a value of type float64 where float \| int"):
        env.start(Total, "total")


# --- what is imported -------------------------------------------------------------------------------------------------

PROGRAM = """
import sys
from pathlib import Path
from immortal import Immortal, rpc
from immortal.appsdk.calls.codec import encoder
from immortal.appsdk.handlers.definition import definition_of

class Greeter(Immortal):
    names: list[str]
    @rpc
    def greet(self, name: str, path: Path) -> None: ...

definition_of(Greeter).resolve(names_may_be_missing=False)
try:
    encoder.encode(object())
except TypeError:
    pass
print(*sorted({"numpy", "pandas", "pyarrow", "pydantic", "attr", "attrs", "fractions"} & set(sys.modules)))
"""


def test_an_app_that_names_no_library_imports_none() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == []


def test_a_frame_without_pyarrow_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("immortal.appsdk.types.pandas_frames")
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    assert module.codec_of(pd.DataFrame).problem(pd.DataFrame) == (
        "a DataFrame is sent as an Arrow table: install pyarrow"
    )
