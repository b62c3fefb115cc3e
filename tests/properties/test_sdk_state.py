"""Any state of annotated types comes back as it was; any bytes as a checkpoint give only documented errors."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any, Literal
from uuid import UUID

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from immortal import Immortal
from immortal.appsdk.handlers.definition import definition_of
from immortal.appsdk.state.schema import Envelope, decode_envelope
from immortal.errors import StateError


@dataclass
class Point:
    x: int
    label: str | None = None


class Tree(msgspec.Struct):
    value: int
    children: list[Tree] = []


class Everything(Immortal):
    number: int
    ratio: float
    text: str
    raw: bytes
    yes: bool
    nothing: int | None
    words: dict[str, int]
    by_number: dict[int, list[str]]
    by_pair: dict[tuple[int, str], float]
    pair: tuple[int, str]
    many: tuple[int, ...]
    unique: set[str]
    frozen: frozenset[int]
    point: Point
    points: list[Point]
    tree: Tree
    when: datetime
    while_: timedelta
    name: UUID
    price: Decimal
    kind: Literal["a", "b"]


int64 = st.integers(-(2**63), 2**63 - 1)
text = st.text(max_size=8)
points = st.builds(Point, int64, st.none() | text)
trees: st.SearchStrategy[Tree] = st.recursive(
    st.builds(Tree, int64), lambda inner: st.builds(Tree, int64, st.lists(inner, max_size=3)), max_leaves=5
)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "number": int64,
    "ratio": st.floats(allow_nan=False),
    "text": text,
    "raw": st.binary(max_size=9),
    "yes": st.booleans(),
    "nothing": st.none() | int64,
    "words": st.dictionaries(text, int64, max_size=4),
    "by_number": st.dictionaries(int64, st.lists(text, max_size=3), max_size=4),
    "by_pair": st.dictionaries(st.tuples(int64, text), st.floats(allow_nan=False), max_size=4),
    "pair": st.tuples(int64, text),
    "many": st.lists(int64, max_size=4).map(tuple),
    "unique": st.sets(text, max_size=4),
    "frozen": st.frozensets(int64, max_size=4),
    "point": points,
    "points": st.lists(points, max_size=3),
    "tree": trees,
    "when": st.datetimes(min_value=datetime(1980, 1, 1), timezones=st.just(UTC)),
    "while_": st.timedeltas(timedelta(days=-9999), timedelta(days=9999)),
    "name": st.uuids(),
    "price": st.decimals(allow_nan=False, allow_infinity=False),
    "kind": st.sampled_from("ab"),
}


@given(st.fixed_dictionaries(VALUES))
def test_any_state_comes_back(values: dict[str, Any]) -> None:
    definition = definition_of(Everything)
    written, read = Everything(), Everything()
    for name, value in values.items():
        setattr(written, name, value)
    blob = definition.state().encode(written)
    envelope = Envelope(class_name="Everything", serializer="msgspec", seed=b"", sequence_id=0)
    definition.state().restore(read, envelope, memoryview(blob))
    assert vars(read) == values
    assert all(type(value) is type(values[name]) for name, value in vars(read).items())
    assert list(read.words) == list(values["words"])  # a handler may go through it in its order
    assert list(read.by_number) == list(values["by_number"])


@given(st.binary(max_size=60) | st.binary(max_size=60).map(lambda rest: b"IMMAPP\x01\x00\x05\x00\x00\x00" + rest))
def test_any_bytes_give_only_documented_errors(blob: bytes) -> None:
    try:
        envelope, state = decode_envelope(blob)
        definition_of(Everything).state().restore(Everything(), envelope, state)
    except StateError:
        return
    pytest.fail("random bytes were a checkpoint")


@given(st.binary(max_size=80))
def test_any_bytes_as_state_give_only_documented_errors(state: bytes) -> None:
    envelope = Envelope(class_name="Everything", serializer="msgspec", seed=b"", sequence_id=0)
    with pytest.raises(StateError):
        definition_of(Everything).state().restore(Everything(), envelope, memoryview(state))
