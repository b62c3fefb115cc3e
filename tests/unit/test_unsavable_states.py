"""A call that leaves a state which can't be kept as it is fails alone, and leaves no trace; what is kept comes back."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, IntEnum
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypedDict
from uuid import UUID
from zoneinfo import ZoneInfo

import attrs
import msgspec
import pytest

import immortal
from immortal import CalleeFailed, Immortal, initial, peer, rpc
from immortal.errors import StateError
from immortal.testing import Environment


@dataclass
class Item:
    name: str
    price: float = 0.0
    count: int = 0

    @cached_property
    def label(self) -> str:
        return self.name.upper()


@dataclass
class Gift(Item):
    wrapping: str = "red"


class Size(IntEnum):
    SMALL = 1


class Colour(Enum):
    RED = "red"


class Place(NamedTuple):
    row: int
    what: Any = None


class Row(TypedDict):
    number: int


class Word(str):
    __slots__ = ()


class Part(msgspec.Struct):
    number: int
    more: list[Part] = []
    what: Any = None


@attrs.define
class Hidden:
    shown: int
    _hidden: int = 0


@dataclass
class Counts:
    """It counts how often it is made."""

    number: int = 0

    def __post_init__(self) -> None:
        self.number += 1


def nested(depth: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


def circle() -> list[Any]:
    found: list[Any] = []
    found += [found, found]
    return found


def with_extra() -> Item:
    found = Item("book")
    found.extra = 1  # type: ignore[attr-defined]
    return found


def with_label() -> Item:
    found = Item("book")
    assert found.label == "BOOK"
    return found


class Shop(Immortal):
    number: int
    ratio: float
    text: str
    maybe: int | str | None
    kind: Literal["a", "b"]
    at_least_one: msgspec.Raw | int
    facts: dict[str, Any]
    numbers: list[int]
    ratios: list[float]
    by_size: dict[int, str]
    orders: dict[str, list[Item]]
    moments: list[datetime]
    place: Place
    row: Row
    part: Part
    hidden: list[Hidden]
    counts: list[Counts]
    pair: tuple[int, str]
    unique: set[int]
    label: str = "of the class"

    def __init__(self) -> None:
        self.number, self.ratio, self.text, self.maybe, self.kind = 0, 0.0, "", None, "a"
        self.at_least_one = 1
        self.facts, self.numbers, self.ratios, self.by_size = {}, [], [], {}
        self.orders, self.moments, self.place, self.row = {"eu": [Item("a"), Item("b")]}, [], Place(1), {"number": 1}
        self.part, self.hidden, self.counts, self.pair, self.unique = Part(1), [], [], (1, "a"), set()
        self.label = "its own"

    @rpc
    def change(self, case: str) -> None:
        self.number += 1000
        CASES[case](self)

    @rpc
    def show(self) -> str:
        return repr({name: value for name, value in vars(self).items() if not name.startswith("_")})

    @rpc
    def begin_again(self) -> None:
        fresh = Shop.__new__(Shop)
        fresh.__init__()  # type: ignore[misc]
        vars(self).update(vars(fresh))


def put(what: Any) -> Callable[[Any], None]:
    def change(shop: Any) -> None:
        shop.facts["it"] = what() if callable(what) and not isinstance(what, type) else what

    return change


def sets(name: str, value: Any) -> Callable[[Any], None]:
    return lambda shop: setattr(shop, name, value() if callable(value) else value)


def price_of_second(shop: Any) -> None:
    shop.orders["eu"][1].price = Colour.RED


def swaps_fields(shop: Any) -> None:
    item = shop.orders["eu"][1]
    del item.count
    item.extra = 1


def spoils_beside_what_is_tagged(shop: Any) -> None:
    shop.facts["a"] = (1, 2)
    shop.facts["it"] = ["\udfff"]


def swaps(shop: Any) -> None:
    del shop.label
    shop.other = 1


def removes(shop: Any) -> None:
    del shop.number


KEPT: dict[str, Callable[[Any], Any]] = {
    "large int": sets("number", 2**70),
    "very large int": sets("number", -(10**4000)),
    "large int, nested": lambda shop: shop.numbers.extend([1, 2**64, -(2**63) - 1, 2**64 - 1]),
    "large int, key": lambda shop: shop.by_size.update({2**80: "a"}),
    "large int, field": lambda shop: shop.orders["eu"].append(Item("c", count=2**100)),
    "large int, Struct": lambda shop: shop.part.more.append(Part(2**64)),
    "large int, Any": put({"deep": [2**99, {2**98: (2**97,)}]}),
    "large int, union": sets("maybe", 2**64),
    "int for float": sets("ratio", 1),
    "ints among floats": lambda shop: shop.ratios.extend([1, 2.5, -0.0, float("inf")]),
    "nan": lambda shop: shop.ratios.append(float("nan")),
    "Decimal": put(Decimal("1.10")),
    "date": put(date(2024, 2, 29)),
    "time": put(time(1, 2, 3, 4, fold=1)),
    "timedelta": put(timedelta(-1, 2, 3)),
    "UUID": put(UUID(int=7)),
    "naive datetime": put(datetime(2024, 1, 1, fold=1)),
    "UTC": put(datetime(2024, 1, 1, tzinfo=UTC)),
    "zone": put(datetime(2024, 10, 27, 2, 30, tzinfo=ZoneInfo("Europe/Berlin"), fold=1)),
    "offset": put(datetime(2024, 1, 1, tzinfo=timezone(timedelta(hours=2), "EET"))),
    "tuple": put((1, (2, [3]))),
    "set": put({1, (2, 3)}),
    "frozenset": put(frozenset({"a"})),
    "bytes": put(b"\xff"),
    "keys": put({(1, 2): "a", 3: "b", None: "c", UUID(int=1): "d", frozenset({1}): "e"}),
    "typed moments": lambda shop: shop.moments.extend(
        [datetime(2024, 1, 1, fold=1), datetime(2024, 1, 1, tzinfo=ZoneInfo("Asia/Tokyo")), datetime(2024, 1, 1)]
    ),
    "named tuple": sets("place", Place(1, (2, Decimal(3)))),
    "Struct": sets("part", lambda: Part(1, [Part(2, what={3})], (4,))),
    "cached property": lambda shop: shop.orders["eu"].append(with_label()),
    "200 deep": put(lambda: nested(200)),
}

REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "lone surrogate": (sets("text", "\ud800"), "'text' can't be saved: .*surrogate"),
    "lone surrogate, nested": (put(lambda: ["a", "\udfff"]), r"'facts' \['it'\]\[1\]"),
    "lone surrogate, key": (lambda shop: shop.facts.update({"\ud800": 1}), r"'facts' key '\\ud800'"),
    "lone surrogate, field": (lambda shop: shop.orders["eu"].append(Item("\ud800")), r"'orders' \['eu'\]\[2\]\.name"),
    "a dict as a str": (sets("text", dict), "'text' can't be saved: a value of type dict where str"),
    "a str as an int": (sets("number", "1"), "'number' can't be saved: a value of type str where int"),
    "a bool as an int": (sets("number", True), "'number' can't be saved: a value of type bool"),
    "a literal": (sets("kind", "c"), "'kind' can't be saved: 'c' where Literal"),
    "20,000 deep": (put(lambda: nested(20_000)), r"'facts' \['it'\]\[0\].* more than 256 deep"),
    "a circle": (put(circle), "'facts' .*holds itself"),
    "no codec": (put(lambda: object()), r"'facts' \['it'\] can't be saved: a value of type object"),
    "a lambda": (put(lambda: lambda: 1), r"'facts' \['it'\] can't be saved: a value of type function"),
    "a lock": (put(threading.Lock), r"'facts' \['it'\] can't be saved: a value of type lock"),
    "a dataclass in Any": (put(lambda: Item("a")), r"'facts' \['it'\] can't be saved: a value of type Item"),
    "an enum in Any": (put(lambda: Colour.RED), r"'facts' \['it'\] can't be saved: a value of type Colour"),
    "a path in Any": (put(lambda: Path("/tmp")), r"'facts' \['it'\] can't be saved: a value of type PosixPath"),
    "a subclass": (lambda shop: shop.orders["eu"].append(Gift("a")), r"'orders' \['eu'\]\[2\].*Gift where Item"),
    "a field": (price_of_second, r"'orders' \['eu'\]\[1\]\.price can't be saved: a value of type Colour where float"),
    "an int in a float field": (lambda shop: shop.orders["eu"].append(Item("a", 1)), r"\[2\]\.price"),
    "an IntEnum": (lambda shop: shop.numbers.append(Size.SMALL), r"'numbers' \[0\].*Size where int"),
    "a bool among ints": (lambda shop: shop.numbers.append(True), r"'numbers' \[0\].*bool where int"),
    "an extra attribute": (lambda shop: shop.orders["eu"].append(with_extra()), "attribute 'extra'"),
    "a str subclass": (sets("text", Word("a")), "'text' .*Word where str"),
    "a str subclass in Any": (put(lambda: Word("a")), "'facts' .*Word"),
    "a plain tuple": (sets("place", (1, 2)), "'place' .*tuple where Place"),
    "another length": (sets("pair", (1, "a", 2)), "'pair' .*3 items where 2"),
    "another key": (lambda shop: shop.row.update({"other": 1}), "'row' .*'other'"),
    "defaultdict": (lambda shop: setattr(shop, "facts", defaultdict(list)), "'facts' .*defaultdict where dict"),
    "a private field": (lambda shop: shop.hidden.append(Hidden(1, 2)), "'_hidden'"),
    "a constructor that changes": (
        lambda shop: shop.counts.append(Counts()),
        r"'counts' \[0\]\.number would come back",
    ),
    "a deleted field": (lambda shop: delattr(shop.orders["eu"][0], "name"), r"'orders' \['eu'\]\[0\]"),
    "a key of no type": (lambda shop: shop.facts.update({Item: 1}), "'facts' key <class"),
    "not annotated": (sets("other", 1), "'other' is set but not annotated"),
    "not annotated, in another's place": (swaps, "'other' is set but not annotated"),
    "a field in another's place": (swaps_fields, r"'orders' \['eu'\]\[1\].*attribute 'extra'"),
    "beside what is tagged": (spoils_beside_what_is_tagged, r"'facts' \['it'\]\[0\] can't be saved: .*surrogate"),
    "removed": (removes, "'number' is annotated but not set"),
}

CASES: dict[str, Callable[[Any], Any]] = {**KEPT, **{name: change for name, (change, _) in REFUSED.items()}}


@pytest.fixture(scope="module", name="shop")
def _shop() -> Any:
    with Environment(fail_alone=True) as env:
        yield env.start(Shop, "shop")


@pytest.mark.parametrize("case", KEPT)
def test_what_is_kept_comes_back_as_it_was(case: str, shop: Any) -> None:
    shop.call(Shop.begin_again)
    shop.call(Shop.change, case)
    before = shop.call(Shop.show)
    shop.checkpoint()
    shop.crash()
    shop.recover()
    assert shop.call(Shop.show) == before


@pytest.mark.parametrize("case", REFUSED)
def test_a_call_that_leaves_what_can_not_be_kept_fails_alone(case: str, shop: Any) -> None:
    shop.call(Shop.begin_again)
    before = shop.call(Shop.show)
    with pytest.raises(CalleeFailed, match=f"(?s)StateError: .*{REFUSED[case][1]}"):
        shop.call(Shop.change, case)
    assert shop.call(Shop.show) == before
    shop.checkpoint()
    shop.crash()
    shop.recover()
    assert shop.call(Shop.show) == before


# --- many messages at once --------------------------------------------------------------------------------------------


class Sender(Immortal):
    shop = peer(Shop, "shop")

    @rpc
    def send(self, cases: list[str]) -> None:
        for case in cases:
            self.shop.change.fork(case)


GOOD, BAD = "large int, nested", "a subclass"


@pytest.mark.parametrize(
    "cases", [[BAD], [GOOD, BAD, GOOD], [BAD, BAD, GOOD], [GOOD] * 40 + [BAD] + [GOOD] * 40 + [BAD, "no codec"]]
)
def test_of_many_messages_at_once_only_those_fail_that_did_it(cases: list[str]) -> None:
    with Environment(fail_alone=True) as env:
        shop, sender = env.start(Shop, "shop"), env.start(Sender, "sender")
        sender.call(Sender.send, cases)
        good = cases.count(GOOD)
        assert len(shop.state.numbers) == 4 * good
        assert shop.state.number == 1000 * good
        assert [letter.type_name for letter in shop.dead_letters] == ["StateError"] * (len(cases) - good)
        assert len(shop.state.orders["eu"]) == 2
        shop.checkpoint()
        shop.crash()
        shop.recover()
        sender.call(Sender.send, [GOOD])
        assert shop.state.number == 1000 * (good + 1)


class OopsError(Exception):
    pass


class Awkward(Immortal):
    items: list[Item]
    done: int
    sender = peer(Sender, "sender")

    def __init__(self) -> None:
        self.items, self.done = [], 0

    @rpc(on_error="keep")
    def keeps(self) -> None:
        self.items.append(Gift("book"))
        raise ValueError("kept")

    @rpc(raises=[OopsError])
    def declares(self) -> None:
        self.items.append(Gift("book"))
        raise OopsError("declared")

    @rpc
    def spoils(self) -> int:
        self.items.append(Gift("book"))
        self.done += 100
        return 1

    @rpc
    def does(self) -> int:
        self.done += 1
        return self.done

    @rpc
    async def steps(self) -> str:
        await immortal.step(self.does)
        try:
            await immortal.step(self.spoils)
        except CalleeFailed as error:
            said = error.type_name
        await immortal.step(self.does)
        return said

    @rpc
    def forks(self) -> None:
        self.spoils.fork()  # type: ignore[attr-defined]
        self.keeps.fork()  # type: ignore[attr-defined]
        self.does.fork()  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["keeps", "declares", "spoils"])
def test_whatever_its_policy_the_call_is_undone(name: str) -> None:
    with Environment(fail_alone=True) as env:
        awkward = env.start(Awkward, "awkward")
        with pytest.raises(CalleeFailed, match="StateError"):
            awkward.call(getattr(Awkward, name))
        awkward.call(Awkward.does)
        awkward.checkpoint()
        assert (awkward.state.items, awkward.state.done) == ([], 1)


def test_of_several_steps_only_that_one_fails() -> None:
    with Environment(fail_alone=True) as env:
        awkward = env.start(Awkward, "awkward")
        assert awkward.call(Awkward.steps) == "StateError"
        awkward.call(Awkward.forks)
        assert (awkward.state.items, awkward.state.done) == ([], 3)
        assert len(awkward.dead_letters) == 2  # of the forks; the step has told its caller


class Large(Immortal):
    items: list[Item]
    by_name: dict[str, Any]
    small: list[int]

    def __init__(self) -> None:
        self.items, self.by_name, self.small = [Item(f"item {n}") for n in range(2000)], {}, []
        self.by_name = {str(n): "x" * 20 for n in range(2000)}

    @rpc
    def append(self, good: bool) -> None:
        self.items.append(Item("new") if good else Gift("new"))

    @rpc
    def add(self, name: str, good: bool) -> None:
        self.by_name[name] = [1] if good else [1, Item("a")]

    @rpc
    def assign(self, good: bool) -> None:
        self.items = [*self.items[1:], Item("new") if good else Gift("new")]

    @rpc
    def count(self, good: bool) -> None:
        self.small.append(1 if good else True)


@pytest.mark.parametrize(
    ("name", "front", "path"),
    [
        ("append", (), r"'items' \[2001\]"),
        ("add", ("new",), r"'by_name' \['new'\]\[1\]"),
        ("assign", (), r"'items' \[2000\]"),
        ("count", (), r"'small' \[1\]"),
    ],
)
def test_what_is_new_in_a_large_state_is_looked_at(name: str, front: tuple[str, ...], path: str) -> None:
    with Environment(fail_alone=True) as env:
        large = env.start(Large, "large")
        handler = getattr(Large, name)
        large.call(handler, *front, True)
        if name == "assign":
            large.call(Large.append, True)
        front = ("other",) if front else ()
        with pytest.raises(CalleeFailed, match=path.replace("new", "other")):
            large.call(handler, *front, False)
        large.call(handler, *front, True)
        large.checkpoint()


class Pickled(Immortal, serializer="pickle"):
    what: Any

    def __init__(self) -> None:
        self.what = None

    @rpc
    def put(self, case: str) -> None:
        self.what = {"lambda": lambda: 1, "raises": Raising(), "good": {Size.SMALL: Gift("a")}, "deep": nested(20_000)}[
            case
        ]

    @rpc
    def show(self) -> str:
        return repr(self.what)


class Raising:
    def __getstate__(self) -> Any:
        raise RuntimeError("not now")


@pytest.mark.parametrize("case", ["lambda", "raises", "deep"])
def test_what_can_not_be_pickled(case: str) -> None:
    with Environment(fail_alone=True) as env:
        pickled = env.start(Pickled, "pickled")
        pickled.call(Pickled.put, "good")
        before = pickled.call(Pickled.show)
        with pytest.raises(CalleeFailed, match=r"attribute 'what' .*can't be pickled"):
            pickled.call(Pickled.put, case)
        pickled.checkpoint()
        pickled.crash()
        pickled.recover()
        assert pickled.call(Pickled.show) == before


def test_an_initial_message_that_leaves_what_can_not_be_saved_stops_the_first_start() -> None:
    class Beginning(Immortal):
        what: list[int]

        def __init__(self) -> None:
            self.what = []

        @initial
        def begin(self) -> None:
            self.what.append(Size.SMALL)

    env = Environment(fail_alone=True)
    with pytest.raises(StateError, match=r"'what' \[0\] can't be saved"):
        env.start(Beginning, "beginning")


def test_the_case_of_a_till() -> None:
    class Till(Immortal):
        total: int

        def __init__(self) -> None:
            self.total = 1

        @rpc
        def multiply(self, by: int) -> int:
            self.total *= by
            return self.total

    with Environment(fail_alone=True) as env:
        till = env.start(Till, "till")
        for _ in range(4):
            till.call(Till.multiply, 2**40)
        till.checkpoint()
        till.crash()
        till.recover()
        assert till.call(Till.multiply, 2**64) == 2**224
