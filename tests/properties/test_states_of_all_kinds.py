"""Whatever handlers put into the state, in whichever way, and wherever it crashes: the service is there, as a model.

The model is told by an oracle of a few lines what is kept: a call that puts anything else somewhere changes nothing.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, IntEnum
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from immortal import CalleeFailed, Immortal, peer, rpc
from immortal.testing import Environment
from tests.helpers.effort import effort


class Colour(Enum):
    RED = "red"


class Size(IntEnum):
    SMALL = 1


class Word(str):
    __slots__ = ()


@dataclass
class Item:
    what: Any = None
    count: int = 0


@dataclass
class Gift(Item):
    wrapping: str = "red"


VALUES: list[Any] = []
"""Of the example that runs: handlers are called with numbers of these, as no call can carry all of them."""

KINDS = (
    "anything",
    "facts",
    "things",
    "nested",
    "field",
    "count",
    "number",
    "text",
    "ratios",
    "texts",
    "maybe",
    "items",
)


def put(state: Any, kind: str, value: Any) -> None:
    """Each way to change something: assigned, added, deep inside, or shared by two places."""
    if kind == "anything":
        state.anything = value
    elif kind == "facts":
        state.facts[len(state.facts) % 3] = value
    elif kind == "things":
        state.things.append(value)
        del state.things[:-3]
    elif kind == "nested":
        inner = state.nested.setdefault("a", {}).setdefault("b", [])
        inner[:] = [inner[-1:], value]
        state.nested["shared"] = {"b": [value, value]}
    elif kind == "field":
        state.items[0].what = value
    elif kind == "count":
        state.items[-1].count = value
    elif kind == "ratios":
        state.ratios[:] = [*state.ratios[-2:], value]
    elif kind == "texts":
        state.texts[:] = [*state.texts[-2:], value]
    elif kind == "items":
        state.items = [*state.items[:1], value]
    else:
        setattr(state, kind, value)


def is_kept(kind: str, value: Any) -> bool:
    if kind in ("count", "number"):
        return type(value) is int
    if kind == "maybe":
        return value is None or type(value) is bytes
    if kind in ("text", "texts"):
        return type(value) is str and is_text(value)
    if kind == "ratios":
        return type(value) in (int, float)
    if kind == "items":
        return type(value) is Item and type(value.count) is int and is_any(value.what)
    return is_any(value)


def is_text(value: str) -> bool:
    return not any("\ud800" <= one <= "\udfff" for one in value)


def is_any(value: Any) -> bool:
    if type(value) is str:
        return is_text(value)
    if type(value) in (list, tuple, set, frozenset):
        return all(map(is_any, value))
    if type(value) in (dict, OrderedDict):
        return all(map(is_any, value)) and all(map(is_any, value.values()))
    plain = (type(None), bool, int, float, complex, range, bytes, Decimal, date, datetime, time, timedelta, UUID)
    return type(value) in plain


class Keeper(Immortal):
    anything: Any
    facts: dict[int, Any]
    things: list[Any]
    nested: dict[str, dict[str, list[Any]]]
    items: list[Item]
    number: int
    text: str
    maybe: bytes | None
    ratios: list[float]
    texts: list[str]

    def __init__(self) -> None:
        begin(self)

    @rpc
    def put(self, kind: int, index: int) -> None:
        put(self, KINDS[kind], copy.deepcopy(VALUES[index]))


def begin(state: Any) -> None:
    state.anything, state.facts, state.things, state.nested = None, {}, [], {}
    state.items, state.number, state.text, state.maybe = [Item(), Item()], 0, "", None
    state.ratios, state.texts = [], []


class Model:
    def __init__(self) -> None:
        begin(self)


class Many(Immortal):
    keeper = peer(Keeper, "keeper")

    @rpc
    def put(self, calls: list[tuple[int, int]]) -> None:
        for kind, index in calls:
            self.keeper.put.fork(kind, index)


def canonical(value: Any) -> Any:
    """Equal for what is the same, types included."""
    if isinstance(value, set | frozenset):
        return type(value).__name__, sorted(map(repr, map(canonical, value)))
    if isinstance(value, list | tuple):
        return type(value).__name__, [canonical(one) for one in value]
    if isinstance(value, dict):
        return type(value).__name__, [(canonical(key), canonical(one)) for key, one in value.items()]
    if isinstance(value, Item):
        return type(value).__name__, canonical(vars(value))
    return type(value).__name__, repr(value)


def parts(state: Any) -> dict[str, Any]:
    return {name: canonical(getattr(state, name)) for name in vars(Model())}


# --- what there is to be put ------------------------------------------------------------------------------------------

zones = st.sampled_from(
    [None, UTC, ZoneInfo("Europe/Berlin"), timezone(timedelta(hours=5, minutes=30)), timezone(timedelta(), "X")]
)
keys: st.SearchStrategy[Any] = st.one_of(
    st.none(), st.integers(), st.text(max_size=3), st.binary(max_size=3), st.uuids(), st.dates(), st.booleans()
)
leaves: st.SearchStrategy[Any] = st.one_of(
    keys,
    st.integers(-(2**80), 2**80),
    st.floats(),
    st.decimals(),
    st.times(timezones=st.none()),
    st.timedeltas(),
    st.builds(lambda moment, fold: moment.replace(fold=fold), st.datetimes(timezones=zones), st.integers(0, 1)),
)
others: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from([Colour.RED, Size.SMALL, Word("a"), object, "\ud800", range(3), 1j, bytearray(b"a")]),
    st.builds(lambda: OrderedDict(a=1)),
    st.builds(lambda: defaultdict(list)),
    st.builds(Gift, leaves),
)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(keys | st.tuples(keys), inner, max_size=3),
        st.sets(keys | st.frozensets(keys, max_size=2), max_size=3),
        st.frozensets(keys, max_size=3),
    )


values = st.recursive(leaves, containers, max_leaves=6)
all_values = values | st.builds(Item, values, st.integers()) | others | st.lists(values | others, max_size=2)

steps = st.one_of(
    st.tuples(st.just("call"), st.sampled_from(KINDS), all_values),
    st.tuples(st.just("many"), st.lists(st.tuples(st.sampled_from(KINDS), all_values), min_size=2, max_size=5)),
    st.sampled_from([("checkpoint",), ("crash",), ("crash",)]),
)


@settings(deadline=None, max_examples=effort(25))
@given(script=st.lists(steps, min_size=1, max_size=8))
def test_the_service_is_there_and_as_the_model(script: list[Any]) -> None:
    VALUES.clear()
    model = Model()

    def change(kind: str, value: Any) -> bool:
        if is_kept(kind, value):
            put(model, kind, copy.deepcopy(value))
            return True
        return False

    def given_as(kind: str, value: Any) -> tuple[int, int]:
        VALUES.append(value)
        return KINDS.index(kind), len(VALUES) - 1

    with Environment(fail_alone=True) as env:
        keeper, many = env.start(Keeper, "keeper"), env.start(Many, "many")
        for step in script:
            if step[0] == "call":
                arguments = given_as(*step[1:])
                if change(*step[1:]):
                    keeper.call(Keeper.put, *arguments)
                else:
                    with pytest.raises(CalleeFailed, match="StateError"):
                        keeper.call(Keeper.put, *arguments)
            elif step[0] == "many":
                many.call(Many.put, [given_as(kind, value) for kind, value in step[1]])
                for kind, value in step[1]:
                    change(kind, value)
            elif step[0] == "checkpoint":
                keeper.checkpoint()
            else:
                keeper.crash()
                keeper.recover()
            assert parts(keeper._node.local_app.instance) == parts(model)  # type: ignore[union-attr]
        keeper.checkpoint()
        keeper.crash()
        keeper.recover()
        assert parts(keeper.state) == parts(model)
