"""Where a value is within a state: what the differences call it is found again."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import date
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from immortal.appsdk.state.tree import Fields, differences, tree
from immortal.replay.plan import ReplayError
from immortal.replay.travel.values import (
    MISSING,
    NODES_MAX,
    part_of,
    same,
    shown,
    step_text,
    steps_of,
    text_of,
    value_at,
)

KEYS = st.one_of(st.text(max_size=8), st.integers(), st.booleans(), st.binary(max_size=4))


@dataclass
class Order:
    price: int
    parts: list[dict[Any, Any]] = field(default_factory=list)


class App:
    def __init__(self, **values: Any) -> None:
        vars(self).update(values)


@given(st.dictionaries(KEYS, st.dictionaries(KEYS, st.integers(), max_size=3), max_size=4), st.integers(0, 9))
def test_each_part_is_found_by_the_path_that_it_is_shown_with(orders: dict[Any, Any], number: int) -> None:
    app = App(orders=orders, book=[Order(3, [orders])], number=number)
    whole = Fields({name: tree(value) for name, value in vars(app).items()})
    for name, part in whole.items():
        for path, value in _parts(part, name):
            steps = steps_of(path)
            assert same(part_of(whole, steps), value)
            assert same(value_at(app, steps), value)


def _parts(value: Any, path: str) -> list[tuple[str, Any]]:
    below = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [(path, value), *(one for key, part in below for one in _parts(part, step_text(value, key, path)))]


def test_what_differences_say_is_a_path() -> None:
    old, new = ({"orders": {"a]b'": Order(price)}, 3: [1, price]} for price in (1, 2))
    app = App(state=new)
    found = list(differences(Fields(state=tree(old)), Fields(state=tree(new))))
    assert len(found) == 2
    for one in found:
        assert value_at(app, steps_of(one.path)) == one.new == 2


def test_keys_that_are_shown_as_something_else() -> None:
    app = App(days={date(2026, 1, 2): 5})
    assert value_at(app, steps_of("days['2026-01-02']")) == 5


@pytest.mark.parametrize("path", ["a[", "a[x]", "a[__import__('os')]", "[1]x", "a..b", ".", "a{'b'}", "a[1", "a]"])
def test_what_is_no_path(path: str) -> None:
    with pytest.raises(ReplayError, match="names no value"):
        steps_of(path)


@pytest.mark.parametrize("path", ["b", "a.b", "a[7]", "a['x']", "a[0][0]", "a[[]]"])
def test_what_is_not_there(path: str) -> None:
    assert value_at(App(a=[1]), steps_of(path)) is MISSING
    assert part_of(Fields(a=[1]), steps_of(path)) is MISSING


def test_a_large_state_is_shown_in_part() -> None:
    whole = Fields(rows={str(number): [number] * 50 for number in range(10_000)}, text="x" * 1_000_000)
    node = shown(whole)
    count, todo = 0, [node]
    while todo:
        one = todo.pop()
        count += 1
        todo += one.get("items", [])
    assert count <= NODES_MAX + 1
    rows, text = node["items"]
    assert (rows["count"], len(rows["items"]), rows["more"]) == (10_000, 100, 9_900)
    assert len(text["text"]) < 400
    assert text_of(b"\xff") == '{"$bytes": "ff"}'
    assert text_of(MISSING) == "absent"
