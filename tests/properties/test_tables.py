"""Tables against dicts: rows in order, indexes, undo and restores, whenever rows move into the file."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta, timezone
from enum import Enum
from itertools import pairwise
from random import Random
from typing import Any, NewType
from uuid import UUID

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec import Struct

from immortal import Immortal, Table, table
from immortal.appsdk.calls.codec import encoder
from immortal.appsdk.handlers.definition import definition_of
from immortal.appsdk.state import incoming, table_rows
from immortal.appsdk.state.schema import copied_envelope
from immortal.appsdk.state.table_rows import key_form
from immortal.errors import StateError
from immortal.protocol.nesting import whole_values
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


def restore_in_pieces(shop: Immortal, state: bytes, piece_size_bytes: int, taken_size_bytes: int = 1) -> None:
    """Restore a state that arrives slowly, in pieces. ``taken_size_bytes``: of rows at once."""

    def pieces() -> Iterator[bytes | None]:
        for at in range(0, len(state), piece_size_bytes):
            yield None
            yield state[at : at + piece_size_bytes]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(incoming, "PIECE_SIZE_BYTES", taken_size_bytes)
        schema = definition_of(type(shop)).state()
        incoming.finish(schema.restoring(shop, copied_envelope("Shop", "msgspec"), incoming.Incoming(pieces())))


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
        self.orders.track_undo(enabled=True)

    @precondition(lambda self: self.copy is not None)
    @rule()
    def undo_changes(self) -> None:
        self.orders.undo_changes()
        self.model = dict(self.copy or {})

    @rule(piece_size_bytes=st.integers(1, 200))
    def restore(self, piece_size_bytes: int) -> None:
        schema = definition_of(Shop).state()
        fresh = Shop()
        fresh.orders._store.limit_bytes = self.orders._store.limit_bytes
        restore_in_pieces(fresh, schema.encode(self.shop), piece_size_bytes)
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


SIZES = st.sampled_from([0, 1, 15, 16, 31, 32, 255, 256, 65_535, 65_536])
VALUES = (
    st.none() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text(max_size=3) | SIZES.map(bytes)
    | st.builds(msgspec.msgpack.Ext, st.integers(-128, 127), st.sampled_from([1, 2, 3, 4, 8, 16, 256]).map(bytes))
    | SIZES.map("x".__mul__) | SIZES.map([None].__mul__) | SIZES.map(lambda count: {key: [1] for key in range(count)})
)  # fmt: skip


@given(st.lists(VALUES | st.lists(VALUES, max_size=3), max_size=4), st.integers(1, 2), st.integers(0, 4), st.data())
@settings(max_examples=30, deadline=None)
def test_whole_values_end_where_a_decoder_says(values: list[Any], parts: int, start: int, drawn: st.DataObject) -> None:
    data = b"x" * start
    ends = [start]
    for value in values:
        data += encoder.encode(value)
        ends.append(len(data))
    some = drawn.draw(st.sets(st.integers(start, len(data)), max_size=9))
    for cut in {*some, *ends, *(end - 1 for end in ends[1:]), *range(start, min(start + 9, len(data)))}:
        whole = [end for end in ends[::parts] if end <= cut]
        assert whole_values(data[:cut], start, 9, parts) == (len(whole) - 1, whole[-1])
    assert whole_values(data, start, 1, 1) == ((1, ends[1]) if values else (0, start))


@given(
    orders=st.dictionaries(KEY, ORDER, max_size=12),
    is_sorted=st.booleans(),
    limit_bytes=st.sampled_from([0, 300, 1 << 20]),
    taken_size_bytes=st.integers(1, 100),
)
@settings(max_examples=15, deadline=None)
def test_a_state_is_read_in_pieces_of_any_size(
    orders: dict[str, Order], is_sorted: bool, limit_bytes: int, taken_size_bytes: int
) -> None:
    """Also one that a dict has written, and one whose attributes come behind the table."""
    state = encoder.encode({"orders": dict(sorted(orders.items())) if is_sorted else orders, "total": 7})
    for piece_size_bytes in (1, 2, 3, 7, 20, len(state) - 1, len(state)):
        shop = Shop()
        shop.orders._store.limit_bytes = limit_bytes
        restore_in_pieces(shop, state, piece_size_bytes, taken_size_bytes)
        assert (shop.orders, shop.total, len(shop.orders)) == (orders, 7, len(orders))
        for start in ("", "a", "b", *orders):
            assert list(shop.orders.keys(start)) == sorted(key for key in orders if key >= start)
        mine = [(key, order) for key, order in sorted(orders.items()) if order.customer == "ann"]
        assert list(shop.orders.by("customer", "ann")) == mine
        size_bytes, pieces = shop.orders.pieces()
        assert size_bytes == sum(map(len, pieces)) == len(encoder.encode(orders))
    for cut in range(len(state)):
        with pytest.raises(StateError, match="can't be read"):
            restore_in_pieces(Shop(), state[:cut], len(state), taken_size_bytes)
    with pytest.raises(StateError, match="can't be read: bytes follow it"):
        restore_in_pieces(Shop(), state + b"\0", len(state), taken_size_bytes)


@given(st.data(), st.binary(min_size=1, max_size=3))
@settings(max_examples=40, deadline=None)
def test_damaged_rows_are_found_at_the_restore_or_read_as_the_decoder_reads_them(data: Any, damage: bytes) -> None:
    orders = data.draw(st.dictionaries(KEY, ORDER, min_size=1, max_size=4))
    state = encoder.encode({"total": 7, "orders": orders})
    at = data.draw(st.integers(0, len(state) - 1))
    state = state[:at] + damage + state[at + len(damage) :]
    try:
        expected = msgspec.msgpack.decode(state, type=dict[str, msgspec.Raw])
        rows = msgspec.msgpack.decode(expected["orders"], type=dict[str, Order])
        known = expected.keys() <= {"total", "orders"} and type(msgspec.msgpack.decode(expected["total"])) is int
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError):
        known = False
    shop = Shop()
    if known:
        restore_in_pieces(shop, state, 7)
        assert shop.orders == rows
    else:
        try:
            restore_in_pieces(shop, state, 7)
        except StateError:
            return
        assert "orders" not in state.decode("latin-1") or "total" not in state.decode("latin-1")  # a default


@pytest.mark.parametrize("annotation", KEYS, ids=str)
@given(data=st.data())
@settings(max_examples=6, deadline=None)
def test_keys_of_each_type_come_back_from_a_checkpoint(annotation: Any, data: st.DataObject) -> None:
    cls: Any = type("Shop", (Immortal,), {"__annotations__": {"rows": Table[annotation, int]}})
    shop, again = cls(), cls()
    for number, key in enumerate(data.draw(st.lists(KEYS[annotation], max_size=6))):
        shop.rows[key] = number
    state = definition_of(cls).state().encode(shop)
    restore_in_pieces(again, state, 5)
    assert list(again.rows.items()) == list(shop.rows.items())
    assert definition_of(cls).state().encode(again) == state


@pytest.mark.parametrize("annotation", [float, tuple[float, int], datetime], ids=str)
def test_keys_that_a_dict_wrote_in_another_form_count_as_the_table_writes_them(annotation: Any) -> None:
    zone = timezone(timedelta(hours=2))
    keys = {float: [1, 2.5], datetime: [datetime(2026, 1, 1, tzinfo=zone)]}.get(annotation, [(1, 1), (2.5, 1)])
    cls: Any = type("Shop", (Immortal,), {"__annotations__": {"rows": Table[annotation, int]}})
    shop = cls()
    restore_in_pieces(shop, encoder.encode({"rows": dict.fromkeys(keys, 7)}), 100, 100)
    assert list(shop.rows) == keys
    size_bytes, pieces = shop.rows.pieces()
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
