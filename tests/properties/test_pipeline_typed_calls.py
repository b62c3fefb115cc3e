"""Types of columns: any value of a type has a place in a type that is wider, and keeps what it is in its own."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from immortal.pipeline.typed_calls import JSON, arrow_type, fitter, wider

SCALARS: dict[pa.DataType, st.SearchStrategy[Any]] = {
    pa.bool_(): st.booleans(),
    pa.int64(): st.integers(-(2**63), 2**63 - 1),
    pa.float64(): st.floats(allow_nan=False),
    pa.string(): st.text(st.characters(codec="utf-8")),
    pa.binary(): st.binary(),
    pa.date32(): st.dates(),
    pa.timestamp("us", "UTC"): st.datetimes(),
    pa.decimal128(38, 18): st.decimals(-(10**9), 10**9, places=6),
    JSON: st.lists(st.integers(-9, 9)),
}
types = st.recursive(
    st.sampled_from(list(SCALARS)),
    lambda inner: st.one_of(
        inner.map(pa.list_),
        inner.map(lambda kind: pa.map_(pa.string(), kind)),
        st.dictionaries(st.sampled_from("abc"), inner, min_size=1).map(lambda fields: pa.struct(list(fields.items()))),
    ),
    max_leaves=5,
)


def values(kind: pa.DataType) -> st.SearchStrategy[Any]:
    if (scalars := SCALARS.get(kind)) is not None:
        found = scalars
    elif pa.types.is_list(kind):
        found = st.lists(values(kind.value_type), max_size=3)
    elif pa.types.is_map(kind):
        found = st.dictionaries(st.text("xy"), values(kind.item_type), max_size=3)
    else:
        found = st.fixed_dictionaries({field.name: values(field.type) for field in kind})
    return st.none() | found


def plain(value: Any, kind: pa.DataType) -> Any:
    """What Arrow gives back for a value of a type, as ``values`` makes them."""
    if value is None or kind in SCALARS:
        return json.loads(value) if value is not None and kind == JSON else value
    if pa.types.is_list(kind):
        return [plain(item, kind.value_type) for item in value]
    if pa.types.is_map(kind):
        return {key: plain(item, kind.item_type) for key, item in value}
    return {field.name: plain(value[field.name], field.type) for field in kind}


@given(one=types, other=types, data=st.data())
def test_a_value_of_each_of_two_types_has_a_place_in_the_wider(
    one: pa.DataType, other: pa.DataType, data: st.DataObject
) -> None:
    wide = wider(one, other)
    assert wider(wide, one) == wider(wide, other) == wide
    for own in (one, other):
        value = data.draw(values(own))
        (found,) = pa.array([fitter(own, wide)(value)], wide).to_pylist()
        assert (found is None) == (value is None)


@given(kind=types, data=st.data())
def test_a_value_stays_what_it_is_in_its_own_type(kind: pa.DataType, data: st.DataObject) -> None:
    value = data.draw(values(kind))
    (found,) = pa.array([fitter(kind, kind)(value)], kind).to_pylist()
    if not pa.types.is_timestamp(kind) and "timestamp" not in str(kind):  # Arrow's are aware
        assert plain(found, kind) == value


class Tea(msgspec.Struct, tag=True):
    n: int


class Ink(msgspec.Struct, tag=True):
    n: int


class Row(msgspec.Struct, tag=True, array_like=True):
    n: int


@pytest.mark.parametrize(
    ("annotation", "value", "expected"),
    [
        (Tea | Ink, Ink(3), '{"type":"Ink","n":3}'),
        (Row, Row(3), '["Row",3]'),
        (dict[str | None, int], {None: 3, "a": 4}, None),  # JSON has no such key
        (dict[Any, int], {"a": 4}, '{"a":4}'),
        (dict[Row, int], {}, "{}"),
    ],
)
def test_what_has_no_type_is_json(annotation: Any, value: Any, expected: str | None) -> None:
    assert arrow_type(msgspec.inspect.type_info(annotation)) == JSON
    plain = msgspec.to_builtins([value])[0]
    if expected is None:
        with pytest.raises(TypeError):
            fitter(JSON, JSON)(plain)
    else:
        assert fitter(JSON, JSON)(plain) == expected


def test_wider_types_in_order() -> None:
    number, real, text = pa.int64(), pa.float64(), pa.string()
    assert wider(number, real) == real
    assert wider(real, text) == wider(number, pa.bool_()) == text
    assert wider(text, JSON) == wider(pa.list_(text), text) == JSON
    assert wider(pa.struct([("a", number)]), pa.struct([("b", text), ("a", real)])) == pa.struct(
        [("a", real), ("b", text)]
    )
    assert [fitter(pa.bool_(), text)(value) for value in (True, None)] == ["true", None]
    assert pa.array([fitter(number, real)(2**62 + 1)], real).to_pylist() == [2.0**62]
    assert fitter(text, JSON)("tea") == '"tea"'
