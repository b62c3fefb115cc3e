"""States as tables: which rows, and columns of the types that the values have."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from immortal.appsdk.state.tree import STATE, Fields, state_rows, to_json, tree
from immortal.pipeline.sql.states import read_tables


@dataclass
class Place:
    street: str
    number: int


@dataclass
class Word:
    text: str
    times: int


@dataclass
class Keyed:
    key: int
    index: int


def tables(state: dict[str, Any], folder: Path) -> dict[str, pa.Table]:
    """As the inspection of an app writes them."""
    file = folder / "rows"
    with file.open("w") as lines:
        for table, row in state_rows(Fields({name: tree(value) for name, value in state.items()})):
            shown = row if isinstance(row, str) else {name: to_json(value) for name, value in row.items()}
            lines.write(json.dumps([table, shown]) + "\n")
    return read_tables(file)


def test_attributes_are_columns_and_containers_are_tables(tmp_path: Path) -> None:
    found = tables(
        {
            "total": 3,
            "rate": 0.5,
            "name": "käse",
            "key": b"\x00\xff",
            "limit": None,
            "place": Place("A", 1),
            "words": {"the": Word("the", 2), "cat": Word("cat", 1)},
            "seen": ["a", "b"],
            "open": {1, 2},
            "empty": {},
            "none": [],
            "$waiting": ["left out"],
        },
        tmp_path,
    )
    assert found.pop(STATE).to_pylist() == [
        {"total": 3, "rate": 0.5, "name": "käse", "key": b"\x00\xff", "limit": None,
         "place": '{"street": "A", "number": 1}'}
    ]  # fmt: skip
    assert {name: table.to_pylist() for name, table in found.items()} == {
        "words": [{"key": "the", "text": "the", "times": 2}, {"key": "cat", "text": "cat", "times": 1}],
        "seen": [{"index": 0, "value": "a"}, {"index": 1, "value": "b"}],
        "open": [{"index": 0, "value": 1}, {"index": 1, "value": 2}],
        "empty": [],
        "none": [],
    }
    assert found["empty"].schema.names == ["key", "value"]
    assert found["none"].schema.names == ["index", "value"]
    assert found["words"].schema.field("times").type == pa.int64()


def test_a_struct_with_a_field_of_that_name(tmp_path: Path) -> None:
    found = tables({"words": {"a": Keyed(1, 2)}, "seen": [Keyed(1, 2)]}, tmp_path)
    assert found["words"].to_pylist() == [{"key": "a", "key_": 1, "index": 2}]
    assert found["seen"].to_pylist() == [{"index": 0, "key": 1, "index_": 2}]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1, 2.5], [1.0, 2.5]),
        ([1, None], [1, None]),
        ([None, None], [None, None]),
        ([True, 1], ["true", "1"]),
        ([1, "1"], ["1", '"1"']),
        ([1 << 63, 1], ["9223372036854775808", "1"]),
        ([(1 << 53) + 1, 1, None], [(1 << 53) + 1, 1, None]),
        ([(1 << 53) + 1, 0.5], ["9007199254740993", "0.5"]),
        ([-(1 << 53), 0.5], [-float(1 << 53), 0.5]),
        ([-(1 << 63)], [-(1 << 63)]),
        ([[1], {}], ["[1]", "{}"]),
        ([{1}], ['{"$set": [1]}']),
        ([b"a", b""], [b"a", b""]),
        ([b"a", 1], ['{"$bytes": "61"}', "1"]),
        ([math.inf, 1], [math.inf, 1.0]),
        (["\ud800", "a"], ['"\\ud800"', '"a"']),
        ([{"$bytes": "zz"}], ['{"$map": [["$bytes", "zz"]]}']),
    ],
)
def test_types(values: list[Any], expected: list[Any], tmp_path: Path) -> None:
    assert tables({"some": dict(enumerate(values))}, tmp_path)["some"].column("value").to_pylist() == expected


plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()


@given(st.lists(plain, max_size=6))
def test_each_value_is_there_or_is_there_as_json(tmp_path_factory: pytest.TempPathFactory, values: list[Any]) -> None:
    found = tables({"some": values}, tmp_path_factory.mktemp("rows"))["some"].column("value").to_pylist()
    assert len(found) == len(values)
    for value, shown in zip(values, found, strict=True):
        as_json = isinstance(shown, str) and not isinstance(value, str)
        if as_json or shown != value:
            assert json.loads(shown) == to_json(tree(value))


def test_rows_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("immortal.pipeline.sql.states.ROWS_AT_ONCE", 7)
    values = [None if number % 5 == 0 else number for number in range(50)]
    found = tables({"some": values}, tmp_path)["some"]
    assert found.to_pylist() == [{"index": index, "value": value} for index, value in enumerate(values)]
