"""Tables against dicts: rows in order, indexes, undo and restores, whenever rows move into the file."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from enum import Enum
from itertools import pairwise
from random import Random
from typing import Any, NewType
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec import Struct

from immortal import Immortal, Table, table
from immortal.appsdk.handlers.definition import definition_of
from immortal.appsdk.state import table_rows
from immortal.appsdk.state.schema import copied_envelope
from immortal.appsdk.state.table_rows import key_form
from tests.helpers.effort import effort

Number = NewType("Number", int)


class Color(Enum):
    RED = "red"
    BLUE = "blue"


TEXT = st.text(st.sampled_from("ab\0\1é\U0001f600"), max_size=4) | st.text(max_size=6)
BYTES = st.binary(max_size=4) | st.lists(st.sampled_from(b"\0\1\xfe\xff"), max_size=4).map(bytes)
INTEGERS = st.integers() | st.integers(-300, 300) | st.integers(-(1 << 400), 1 << 400)
KEYS: dict[Any, st.SearchStrategy[Any]] = {
    int: INTEGERS,
    Number: INTEGERS,
    str: TEXT,
    bytes: BYTES,
    bool: st.booleans(),
    float: st.floats(allow_nan=False),
    date: st.dates(),
    datetime: st.datetimes(),
    timedelta: st.timedeltas(),
    UUID: st.uuids(),
    tuple[str, int]: st.tuples(TEXT, INTEGERS),
    tuple[bytes, float, str]: st.tuples(BYTES, st.floats(allow_nan=False), TEXT),
    tuple[tuple[str, str], bytes]: st.tuples(st.tuples(TEXT, TEXT), BYTES),
}


@pytest.mark.parametrize("annotation", KEYS, ids=str)
@given(data=st.data())
@settings(max_examples=effort(25))
def test_keys_sort_as_their_values_and_come_back(annotation: Any, data: st.DataObject) -> None:
    form = key_form(annotation)
    values = data.draw(st.lists(KEYS[annotation], min_size=2, max_size=8))
    for value in values:
        packed = form.pack(value)
        assert form.unpack(packed, 0) == (value, len(packed))
    for one, other in pairwise(sorted(values)):
        assert (form.pack(one) < form.pack(other)) == (one < other)
        assert (form.pack(one) == form.pack(other)) == (one == other)


@given(one=st.datetimes(timezones=st.timezones()), other=st.datetimes(timezones=st.timezones()))
@settings(max_examples=effort(15))
def test_aware_datetimes_sort_by_the_moment(one: datetime, other: datetime) -> None:
    form = key_form(datetime)
    try:
        moments = [value.astimezone(UTC) for value in (one, other)]
    except OverflowError:
        return
    packed = [form.pack(value) for value in (one, other)]
    assert [form.unpack(value, 0)[0] for value in packed] == moments
    assert (packed[0] < packed[1]) == (moments[0] < moments[1])


def test_enums_and_none_are_keys_too() -> None:
    form = key_form(Color | None)
    packed = [form.pack(value) for value in (None, Color.BLUE, Color.RED)]
    assert packed == sorted(packed)  # by their values
    assert [form.unpack(value, 0)[0] for value in packed] == [None, Color.BLUE, Color.RED]


# --- a table against a dict ------------------------------------------------------------------------------------------


class Order(Struct):
    customer: str
    parts: list[int]


class Shop(Immortal):
    orders: Table[str, Order] = table(index=["customer"])
    total: int = 0


KEY = st.text(st.sampled_from("ab\0"), max_size=3)
ORDER = st.builds(Order, st.sampled_from(["", "ann", "ann\0", "bob"]), st.lists(st.integers(0, 9), max_size=3))
BOUND = st.none() | KEY


class TableMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.limit_bytes = table_rows.RECENT_SIZE_BYTES_MAX
        self.shop = Shop()
        self.model: dict[str, Order] = {}
        self.copy: dict[str, Order] | None = None

    def teardown(self) -> None:
        table_rows.RECENT_SIZE_BYTES_MAX = self.limit_bytes

    @property
    def orders(self) -> Table[str, Order]:
        return self.shop.orders

    @rule(limit_bytes=st.sampled_from([0, 300, 1000]))
    def flushes_at(self, limit_bytes: int) -> None:
        table_rows.RECENT_SIZE_BYTES_MAX = self.orders._store.limit_bytes = limit_bytes

    @rule(key=KEY, order=ORDER)
    def put(self, key: str, order: Order) -> None:
        self.orders[key] = order
        self.model[key] = order

    @rule(key=KEY, order=ORDER)
    def set_default(self, key: str, order: Order) -> None:
        assert self.orders.setdefault(key, order) == self.model.setdefault(key, order)

    @rule(key=KEY)
    def delete(self, key: str) -> None:
        assert self.orders.pop(key, None) == self.model.pop(key, None)

    @rule()
    def clear(self) -> None:
        self.orders.clear()
        self.model.clear()

    @rule(start=BOUND, stop=BOUND, reverse=st.booleans())
    def delete_while_it_iterates(self, start: str | None, stop: str | None, reverse: bool) -> None:
        for key in self.orders.keys(start, stop, reverse=reverse):
            del self.orders[key]
            del self.model[key]

    @rule(start=BOUND, stop=BOUND, reverse=st.booleans())
    def look_at_a_range(self, start: str | None, stop: str | None, reverse: bool) -> None:
        rows = [
            (key, self.model[key])
            for key in sorted(self.model, reverse=reverse)
            if (start is None or key >= start) and (stop is None or key < stop)
        ]
        assert list(self.orders.items(start, stop, reverse=reverse)) == rows
        part = self.orders.keys(start, stop, reverse=reverse)
        assert list(part) == [key for key, _ in rows]
        assert len(part) == len(rows)

    @rule(prefix=KEY)
    def look_at_a_prefix(self, prefix: str) -> None:
        assert list(self.orders.keys(prefix=prefix)) == [key for key in sorted(self.model) if key.startswith(prefix)]

    @rule(start=BOUND, stop=BOUND, reverse=st.booleans())
    def look_at_a_range_of_the_index(self, start: str | None, stop: str | None, reverse: bool) -> None:
        found = [
            (order.customer, key)
            for key, order in self.model.items()
            if (start is None or order.customer >= start) and (stop is None or order.customer < stop)
        ]
        entries = self.orders.by("customer", start=start, stop=stop, reverse=reverse)
        assert [(order.customer, key) for key, order in entries] == sorted(found, reverse=reverse)

    @rule()
    def copy_the_state(self) -> None:
        self.copy = dict(self.model)
        self.orders.keep_undo(keeps=True)

    @precondition(lambda self: self.copy is not None)
    @rule()
    def go_back(self) -> None:
        self.orders.go_back()
        self.model = dict(self.copy or {})

    @rule()
    def restore(self) -> None:
        schema = definition_of(Shop).state()
        fresh = Shop()
        fresh.orders._store.limit_bytes = self.orders._store.limit_bytes
        schema.restore(fresh, copied_envelope("Shop", "msgspec"), memoryview(schema.encode(self.shop)))
        assert schema.encode(fresh) == schema.encode(self.shop)
        self.shop, self.copy = fresh, None

    @invariant()
    def has_the_same_rows(self) -> None:
        assert len(self.orders) == len(self.model)
        assert list(self.orders.items()) == sorted(self.model.items())
        for customer in ("", "ann", "ann\0", "bob"):
            mine = [(key, order) for key, order in sorted(self.model.items()) if order.customer == customer]
            assert list(self.orders.by("customer", customer)) == mine
        size_bytes, pieces = self.orders.pieces()
        assert size_bytes == sum(map(len, pieces))


TableMachine.TestCase.settings = settings(max_examples=effort(25), stateful_step_count=30)
TestTable = TableMachine.TestCase


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_rows_in_many_pieces_and_in_both_places(seed: int, reverse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Counts(Immortal):
        counts: Table[int, int]

    rng = Random(seed)
    monkeypatch.setattr(table_rows, "RECENT_SIZE_BYTES_MAX", 20 * table_rows._DELETED_SIZE_BYTES)
    counts = Counts().counts
    counts._store.limit_bytes = rng.randrange(1000, 50_000)
    rows = {key: key % 7 for key in rng.sample(range(-3000, 3000), 900)}
    counts.update(rows)
    for key in rng.sample(sorted(rows), 300):
        del counts[key], rows[key]
    assert list(counts.items(reverse=reverse)) == sorted(rows.items(), reverse=reverse)
    assert list(counts.keys(-500, 500, reverse=reverse)) == sorted(
        (key for key in rows if -500 <= key < 500), reverse=reverse
    )
