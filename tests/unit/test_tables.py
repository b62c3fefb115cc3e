"""Tables in services: failed calls, restores, upgrades, queries, async handlers, full disks, refused classes."""

from __future__ import annotations

import copy
import errno
import os
import pickle
import re
import sys
import threading
from collections import ChainMap
from contextlib import suppress
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from types import ModuleType
from typing import Any, TypedDict

import lmdb
import pytest
from msgspec import Struct

from immortal import Handle, Immortal, Node, Table, create_node, initial, query, rpc, step, table, upgrades
from immortal.appsdk.dispatch.events import OutputReady
from immortal.appsdk.handlers.definition import definition_of
from immortal.appsdk.running import app_loop
from immortal.appsdk.running.inspection import inspect_state, rows
from immortal.appsdk.state import incoming, snapshots, table_rows
from immortal.appsdk.state import table as table_module
from immortal.appsdk.state.schema import copied_envelope, encode_envelope
from immortal.errors import CalleeFailed, DefinitionError, StateError, UsageError
from immortal.protocol.messages import MessageType, encode_message
from immortal.testing import Environment, ReplayDiffers, assert_replays, crash_everywhere
from tests.helpers.effort import effort
from tests.helpers.sdk import TAKE, TAKE_FIRST, Life, first_start
from tests.helpers.wire import AppOutput, call, checkpoint_record, logged


class Order(Struct):
    customer: str
    count: int = 0
    tags: set[str] = set()


class Wide(Struct):
    name: str


class Named(TypedDict):
    name: str


class Empty(Node):
    pass


class Shop(Immortal):
    orders: Table[int, Order] = table(index=["customer"])
    stock: Table[str, int]
    total: int = 0

    def __init__(self) -> None:
        self.stock["bread"] = 3

    @rpc
    def buy(self, number: int, order: Order, *, fails: bool = False) -> int:
        self.total += 1
        self.orders[number] = order
        self.stock["bread"] -= 1
        self.stock.pop("cake", None)
        if fails:
            raise ValueError("no")
        return len(self.orders)

    @rpc
    def forget_to_store(self, number: int) -> None:
        self.orders[number].count += 1

    @rpc
    def change_after_it_was_stored(self, number: int) -> None:
        self.orders[number] = order = Order("eve")
        order.count = 5

    @rpc
    def change_one_of_many(self) -> None:
        orders = sorted(self.orders.values(), key=lambda order: order.customer)
        orders[-1].count += 1

    @rpc
    def fill(self, count: int) -> None:
        for number in range(count):
            self.orders[number] = Order(f"c{number:05}", number, {"a", "b", str(number)})

    @rpc
    def fill_and_catch(self, count: int) -> None:
        with suppress(StateError):
            self.fill(count)

    @rpc
    def store(self, number: int) -> None:
        order = self.orders[number]
        order.count += 1
        order.tags |= {"x", "y", "z"}
        self.orders[number] = order

    @rpc
    async def wait(self, number: int) -> int:
        await step(lambda: self.orders.__setitem__(number, Order("async")))
        return len(await step(lambda: self.orders[number].customer))

    @rpc
    async def look(self) -> int:
        return len(self.orders)

    @query
    def of(self, customer: str) -> list[int]:
        return [number for number, _ in self.orders.by("customer", customer)]

    @query
    def all_stock(self) -> dict[str, int]:
        return self.stock  # type: ignore[return-value]

    @query
    def set(self) -> int:
        self.stock["x"] = 1
        return 1

    @query
    def change_a_copy(self, number: int) -> int:
        order = self.orders[number]
        order.count = 99
        return order.count


class Joined(Immortal):
    rows: Table[str, int]

    @rpc
    def join(self) -> list[dict[str, int]]:
        self.rows |= {"b": 1}
        joined = [self.rows | {"c": 2}, {"b": 5, "c": 2} | self.rows]
        self.rows |= [("b", 3), ("a", 4)]
        return joined


@pytest.fixture(params=[False, True], ids=["in memory", "in a file"])
def small_limit(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param:
        monkeypatch.setattr(table_rows, "RECENT_SIZE_BYTES_MAX", 0)


@pytest.mark.usefixtures("small_limit")
def test_a_failed_call_leaves_no_row() -> None:
    with Environment(fail_alone=True) as env:
        shop = env.start(Shop, "shop")
        assert shop.call(Shop.buy, 1, Order("ann")) == 1
        with pytest.raises(CalleeFailed, match="no"):
            shop.call(Shop.buy, 2, Order("bob"), fails=True)
        with pytest.raises(CalleeFailed, match="no"):
            shop.call(Shop.buy, 1, Order("bob"), fails=True)
        assert shop.state.orders == {1: Order("ann")}
        assert shop.state.stock == {"bread": 2}
        assert shop.call(Shop.of, "bob") == []
        assert shop.call(Shop.all_stock) == {"bread": 2}
        assert shop.call(Shop.of, "ann") == [1]
        shop.checkpoint()
        shop.call(Shop.buy, 3, Order("ann"))
        shop.crash()
        shop.recover()
        assert shop.state.orders == {1: Order("ann"), 3: Order("ann")}
        assert shop.call(Shop.of, "ann") == [1, 3]


def test_a_new_copy_is_due_when_old_rows_take_much_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "TAIL_SIZE_BYTES_MAX", 5000)
    with Environment(fail_alone=True) as env:
        shop = env.start(Shop, "shop")
        copies = shop._app().dispatcher._rewinds.copies
        tails = []
        for count in (1, 100, 1):
            shop.call(Shop.fill, count)
            assert copies.current is not None
            tails.append(len(copies.current.tail))
        assert tails[1:] == [0, 1]
        with pytest.raises(CalleeFailed, match="no"):
            shop.call(Shop.buy, 2, Order("bob"), fails=True)
        assert len(shop.state.orders) == 100


@pytest.mark.slow
@pytest.mark.usefixtures("small_limit")
def test_no_crash_changes_a_row() -> None:
    for env in crash_everywhere(fail_alone=True, runs_max=effort(15)):
        with env:
            shop = env.start(Shop, "shop")
            shop.send(Shop.buy, 1, Order("ann"))
            shop.send(Shop.buy, 2, Order("ann"), fails=True)
            shop.send(Shop.store, 1)
            shop.send(Shop.forget_to_store, 1)
            env.run()
            shop.checkpoint()
            assert shop.call(Shop.wait, 3) == len("async")
            assert shop.call(Shop.of, "ann") == [1]
            assert shop.state.orders == {1: Order("ann", 1, {"x", "y", "z"}), 3: Order("async")}


@pytest.mark.parametrize(
    ("handler", "arguments", "key"),
    [(Shop.forget_to_store, (7,), 7), (Shop.change_after_it_was_stored, (8,), 8), (Shop.change_one_of_many, (), 1999)],
)
def test_a_changed_value_that_is_not_stored_fails_its_call(handler: Any, arguments: tuple[int, ...], key: int) -> None:
    with Environment(fail_alone=True) as env:
        shop = env.start(Shop, "shop")
        shop.call(Shop.fill, 2000)
        before = dict(shop.state.orders)
        with pytest.raises(CalleeFailed, match=f"table 'orders': row {key} was changed but not stored"):
            shop.call(handler, *arguments)
        assert shop.state.orders == before
        shop.call(Shop.store, 7)
        assert shop.state.orders[7].count == 8
        assert shop.call(Shop.change_a_copy, 7) == 99  # a query's own copy


def test_a_query_can_not_write() -> None:
    with Environment(fail_alone=True) as env:
        shop = env.start(Shop, "shop")
        with pytest.raises(CalleeFailed, match=r"self\.stock is changed: a query only reads"):
            shop.call(Shop.set)
        assert shop.state.stock == {"bread": 3}


def test_an_async_handler_uses_tables_in_steps() -> None:
    with Environment(fail_alone=True) as env:
        shop = env.start(Shop, "shop")
        assert shop.call(Shop.wait, 4) == len("async")
        with pytest.raises(CalleeFailed, match=r"reads self\.orders: others change it .* immortal\.step"):
            shop.call(Shop.look)


# --- forms of a state -------------------------------------------------------------------------------------------------


def blob_of(instance: Immortal) -> bytes:
    definition = definition_of(type(instance))
    envelope = encode_envelope(copied_envelope(definition.name, "msgspec"))
    return envelope + definition.state().encode(instance)


def test_a_checkpoint_has_a_table_as_it_has_a_dict() -> None:
    class Plain(Immortal, formerly=("Shop",)):
        total: int = 0
        orders: dict[int, Order]
        stock: dict[str, int]

    shop = Shop()
    shop.orders.update({2: Order("bob"), 1: Order("ann", 1, {"x"}), 1 << 70: Order("big")})
    as_dict = Plain()
    schema = definition_of(Plain).state()
    schema.restore(as_dict, copied_envelope("Shop", "msgspec"), memoryview(definition_of(Shop).state().encode(shop)))
    assert as_dict.orders == dict(shop.orders) == {1: Order("ann", 1, {"x"}), 2: Order("bob"), 1 << 70: Order("big")}

    class Again(Immortal, formerly=("Plain",)):
        orders: Table[int, Order] = table(index=["customer"])
        stock: Table[str, int]
        total: int = 0

    again = Again()
    as_dict.orders = dict(reversed(as_dict.orders.items()))
    definition_of(Again).state().restore(again, copied_envelope("Plain", "msgspec"), memoryview(schema.encode(as_dict)))
    assert list(again.orders.items()) == sorted(as_dict.orders.items())
    assert [number for number, _ in again.orders.by("customer", prefix="b")] == [1 << 70, 2]


def test_readers_of_states_see_a_mapping() -> None:
    shop = Shop()
    shop.orders[1] = Order("ann")
    shown = inspect_state(definition_of(Shop), blob_of(shop)).state
    assert shown["orders"] == {1: {"customer": "ann", "count": 0, "tags": []}}
    assert ("stock", {"key": "bread", "value": 3}) in list(rows(definition_of(Shop), blob_of(shop)))


def test_rows_that_do_not_fit_the_class_are_named_at_the_restore() -> None:
    class Later(Immortal, formerly=("Shop",)):
        orders: Table[str, Order]
        stock: Table[str, str]
        total: int = 0

    shop = Shop()
    for name in ("stock", "orders"):
        with pytest.raises(StateError, match=f"'{name}'"):
            definition_of(Later).state().restore(
                Later(), copied_envelope("Shop", "msgspec"), memoryview(definition_of(Shop).state().encode(shop))
            )
        shop.stock.clear()
        shop.orders[1] = Order("ann")


def test_copies_of_an_instance_have_the_rows() -> None:
    shop = Shop()
    shop.orders[1] = Order("ann")
    copied = copy.deepcopy(shop.orders), pickle.loads(pickle.dumps(shop.orders))
    assert copied == ({1: Order("ann")}, {1: Order("ann")})
    assert repr(shop.orders) == "<Table 'orders' of 1 rows>"
    shop.orders = {5: Order("zed"), 4: Order("yan")}  # type: ignore[assignment]
    assert list(shop.orders) == [4, 5]
    assert list(reversed(shop.orders)) == [5, 4]
    assert shop.orders.first() == (4, Order("yan"))
    assert shop.orders.last() == (5, Order("zed"))
    shop.orders.clear()
    assert shop.orders.first() is None
    assert shop.orders.last() is None


def test_upgrades_carry_tables_over() -> None:
    @upgrades(Shop)
    class More(Shop):
        ratings: Table[int, float]

    @upgrades(More)
    class Other(Immortal):
        orders: Table[int, Wide] = table(index=["name"])
        stock: dict[str, int]

        @classmethod
        def upgrade(cls, old: More) -> Other:
            new = cls()
            for number, order in old.orders.items():
                new.orders[number] = Wide(order.customer)
            new.stock = dict(old.stock)
            return new

        @rpc
        def add(self) -> None:
            self.orders[9] = Wide("new")

    with Environment() as env:
        shop = env.start(Shop, "shop")
        shop.call(Shop.buy, 1, Order("ann"))
        more = shop.upgrade(More)
        assert (more.state.orders, more.state.stock, more.state.ratings) == ({1: Order("ann")}, {"bread": 2}, {})
        more.call(More.buy, 2, Order("bob"))
        other = more.upgrade(Other)
        other.call(Other.add)
        assert (other.state.orders, other.state.stock) == (
            {1: Wide("ann"), 2: Wide("bob"), 9: Wide("new")},
            {"bread": 1},
        )
        other.crash()
        other.recover()
        assert list(other.state.orders) == [1, 2, 9]


def test_a_subclass_that_has_a_dict_takes_over_a_table() -> None:
    @upgrades(Shop)
    class Back(Shop):
        stock: dict[str, int] = {}  # type: ignore[assignment]  # noqa: RUF012

        def __init__(self) -> None:
            self.stock = {}  # type: ignore[assignment]

    with Environment() as env:
        shop = env.start(Shop, "shop")
        assert shop.upgrade(Back).state.stock == {"bread": 3}


class Large(Immortal):
    rows: Table[int, Wide] = table(index=["name"])
    count: int = 0

    @initial
    def fill(self) -> None:
        for number in range(20_000):
            self.rows[number] = Wide(f"{number:100}")

    @rpc
    def add(self) -> None:
        self.rows[-1] = Wide("later")


def test_a_large_table_passes_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the bytes of 20,000 rows, about 2 MB, few are in memory at once, in a checkpoint and in its restore."""
    held_max = 200_000
    monkeypatch.setattr(table_rows, "RECENT_SIZE_BYTES_MAX", 100_000)
    monkeypatch.setattr(table_module, "PIECE_SIZE_BYTES", 10_000)
    monkeypatch.setattr(incoming, "PIECE_SIZE_BYTES", 10_000)
    monkeypatch.setattr(app_loop, "OUTPUT_PENDING_BYTES_MAX", 30_000)
    life = first_start(Large)
    whole = len(definition_of(Large).state().encode(life.dispatcher.instance))
    assert whole > 10 * held_max
    loop = app_loop.AppLoop(life.dispatcher, "", lambda: None)
    life.dispatcher.streams = True
    output = AppOutput()

    def take(size_bytes: int) -> None:
        held = sum(map(len, loop.pending))
        assert held <= 50_000
        data = b"".join(loop.pending)[:size_bytes]
        with loop.lock:
            loop.remove_sent(len(data))
        output.receive_data(data)

    life.dispatcher.receive_data(TAKE)
    assert isinstance(loop.step(), OutputReady)
    assert loop.pending_size_bytes > whole
    loop.dispatcher.outbox.report(encode_message(MessageType.LEAVING, b"in order"))
    loop.take_output()
    while loop.pending_size_bytes > 15_000:
        take(7_000)
    assert not loop._deferred  # so a message that changes rows can be handled
    take(15_000)
    (blob,) = output.blobs
    assert output.messages[-1].message_type == MessageType.LEAVING

    fresh = Life.of(Large)
    data = checkpoint_record(blob) + TAKE_FIRST
    rows: list[Table[int, Wide]] = []
    real = Table.load

    def load(table: Table[int, Wide], count: int, data: bytes) -> None:
        rows[:] = [table]
        real(table, count, data)

    monkeypatch.setattr(Table, "load", load)
    for at in range(0, len(data), 1000):
        fresh.give(data[at : at + 1000])
        if rows and fresh.dispatcher.instance is None:
            store = rows[0]._store
            assert store.recent_size_bytes + fresh.dispatcher.buffered_bytes <= held_max
    assert fresh.output.blobs == [blob]
    assert len(list(fresh.dispatcher.instance.rows.by("name"))) == 20_000


def test_rows_are_read_before_a_message_changes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by an owner that takes more input before it sends what is there."""
    monkeypatch.setattr(app_loop, "OUTPUT_PENDING_BYTES_MAX", 0)
    life = first_start(Shop)
    loop = app_loop.AppLoop(life.dispatcher, "", lambda: None)
    life.dispatcher.streams = True
    blob = definition_of(Shop).state().encode(life.dispatcher.instance)
    life.dispatcher.receive_data(TAKE + logged(1, [call(Shop.buy.method_id, 1, Order("ann"))]))
    while loop.step() is not None:
        pass
    assert life.dispatcher.instance.orders == {1: Order("ann")}
    output = AppOutput()
    output.receive_data(b"".join(loop.pending))
    assert output.blobs[-1].endswith(blob)


@pytest.mark.parametrize(("limit_bytes", "is_bounded"), [(0, True), (1 << 40, False)])
def test_pages_of_the_file_are_unmapped_when_many_are_read(
    limit_bytes: int, is_bounded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_rows, "RECENT_SIZE_BYTES_MAX", 1 << 20)
    monkeypatch.setattr(table_rows, "_READ_SIZE_BYTES_MAX", 1 << 20)
    monkeypatch.setattr(table_rows, "_MAPPED_SIZE_BYTES_MAX", limit_bytes)
    shop = Shop()
    shop.orders.update({number: Order("ann", 0, {"x" * 10_000}) for number in range(1000)})
    assert all(order.tags == {"x" * 10_000} for order in shop.orders.values())
    unmap: Any = shop.orders._store._unmap_pages
    front = f"\n{unmap.args[0].value:x}-"
    _, _, of_file = Path("/proc/self/smaps").read_text().partition(front)
    found = re.search(r"\nRss: +(\d+) kB", of_file)
    assert found is not None
    assert (int(found[1]) < 3000) == is_bounded


# --- what is refused --------------------------------------------------------------------------------------------------


def test_classes_that_can_not_have_a_table_are_refused() -> None:
    with pytest.raises(DefinitionError, match=r"without serializer=\"pickle\""):

        class Pickled(Immortal, serializer="pickle"):
            rows: Table[int, int]

    with pytest.raises(DefinitionError, match="without a checkpoint method"):

        class Own(Immortal):
            rows: Table[int, int]

            def checkpoint(self) -> bytes:
                return b""

            def restore(self, blob: bytes) -> None: ...

    class Part(Node):
        rows: Table[int, int]

    with pytest.raises(DefinitionError, match="a node can't have one"):

        class Owner(Immortal, nodes=(Part,)):
            pass

    with pytest.raises(DefinitionError, match=r"a Table has no default but a table\(...\)"):

        class Default(Immortal):
            rows: Table[int, int] = {}  # type: ignore[assignment]  # noqa: RUF012

    with pytest.raises(DefinitionError, match=r"'one': a Table has no default but a table\(...\) of its own"):

        class Shared(Immortal):
            one: Table[int, int]
            other: Table[int, int]
            one = other = table()

    for hint in (Table, dict[str, Table[int, int]], Table[int, int] | None, Table[int, Table[int, int]]):
        with pytest.raises(DefinitionError, match=r"a table is a whole attribute: rows: Table\[int, str\]$"):
            type("Wrong", (Immortal,), {"__annotations__": {"rows": hint}})

    with pytest.raises(DefinitionError, match="not annotated as one"):

        class Untyped(Immortal):
            rows = table()

    with pytest.raises(DefinitionError, match="only as the whole annotation of an attribute"):

        class Inside(Immortal):
            rows: list[Table[int, int]]

    with pytest.raises(DefinitionError, match="a keyed class has no tables"):

        class Keyed(Immortal, keyed=str):
            rows: Table[int, int]

    with pytest.raises(DefinitionError, match="keys of type list came"):

        class Unordered(Immortal):
            rows: Table[list, int]  # type: ignore[type-arg]

    with pytest.raises(DefinitionError, match="index='name': its values have no such attribute"):

        class Unindexed(Immortal):
            rows: Table[int, Order] = table(index=["name"])

    with pytest.raises(DefinitionError, match="index='name': its values have no such attribute"):

        class Keyless(Immortal):
            rows: Table[int, Named] = table(index=["name"])

    with pytest.raises(DefinitionError, match="a list of names was expected"):
        table(index="name")
    with pytest.raises(UsageError, match="annotate it"):
        Table()


def test_rows_that_can_not_be_kept_are_refused_where_they_are_set() -> None:
    class Things(Immortal):
        texts: Table[str, Any]
        pairs: Table[tuple[str, int], bytes] = table()

    things = Things()
    with pytest.raises(StateError, match=r"attribute 'texts'.* can't be saved: .*object"):
        things.texts["a"] = object()
    with pytest.raises(StateError, match="a value of type Table can't be kept"):
        things.texts["a"] = things.pairs
    with pytest.raises(StateError, match="its key has 602 bytes, at most 510"):
        things.texts["a" * 600] = 1
    with pytest.raises(TypeError, match="a key of type int came, str was expected"):
        things.texts[1] = 1  # type: ignore[index]
    with pytest.raises(TypeError, match="a tuple of 2 items was expected"):
        things.pairs["a",] = b""  # type: ignore[index]
    with pytest.raises(TypeError, match="give only one of the two"):
        things.texts.keys("a", prefix="b")
    with pytest.raises(UsageError, match="has no index 'x'"):
        next(things.texts.by("x", 1))
    with pytest.raises(TypeError, match="by\\('customer', <a value>\\): it can't be together with"):
        next(Shop().orders.by("customer", "ann", start="bob"))
    assert len(things.texts) == len(things.pairs) == 0
    things.pairs["a", 2] = b"2"
    things.pairs["a", 1] = b"1"
    things.pairs["b", 0] = b"0"
    assert list(things.pairs.values(prefix=("a",))) == [b"1", b"2"]
    assert list(things.pairs.values(("a", 2))) == [b"2", b"0"]


def test_equal_keys_are_one_row_of_the_annotated_type() -> None:
    class Measured(Immortal):
        by_size: Table[float, int]
        by_moment: Table[datetime, int]

    measured, moment = Measured(), datetime(2026, 1, 1, 12, tzinfo=timezone(timedelta(hours=2)))
    for key in (1, 1.0, -0.0, 0.0):
        measured.by_size[key] = len(measured.by_size)
    measured.by_moment[moment] = 1
    measured.by_moment[moment.astimezone(UTC)] = 2
    again, schema = Measured(), definition_of(Measured).state()
    state = schema.encode(measured)
    assert len(state) == schema.with_tables(measured, schema.encode_attributes(measured))[0]
    schema.restore(again, copied_envelope(definition_of(Measured).name, "msgspec"), memoryview(state))
    assert again.by_size == {0.0: 2, 1.0: 1}
    assert again.by_moment == {moment: 2}
    del again.by_size[1], again.by_moment[moment]
    assert len(schema.encode(again)) == schema.with_tables(again, schema.encode_attributes(again))[0]


def test_a_key_counts_as_it_is_in_a_checkpoint() -> None:
    class Prices(Immortal):
        rows: Table[float, str]

        @rpc
        def put(self) -> None:
            self.rows[1] = "1 byte as an int, 9 as a float"
            self.rows[2] = self.rows[3.0] = ""
            del self.rows[2.0], self.rows[3]

    with Environment() as env:
        prices = env.start(Prices, "prices")
        prices.call(Prices.put)
        prices.checkpoint()
        prices.crash()
        prices.recover()
        assert list(prices.state.rows) == [1.0]


def test_a_table_takes_rows_from_a_view_of_itself() -> None:
    shop = Shop()
    shop.stock = ChainMap({"cake": 1}, shop.stock)  # type: ignore[assignment]
    assert shop.stock == {"bread": 3, "cake": 1}


def test_tables_and_other_mappings_are_joined() -> None:
    with Environment() as env:
        shop = env.start(Joined, "shop")
        assert shop.call(Joined.join) == [{"b": 1, "c": 2}, {"b": 1, "c": 2}]
        shop.crash()
        shop.recover()
        assert shop.state.rows == {"a": 4, "b": 3}


def test_a_handle_is_no_row() -> None:
    class Owner(Immortal, nodes=(Empty,)):
        handles: Table[int, Handle[Empty]]

        @rpc
        def make(self) -> None:
            self.handles[1] = create_node(Empty)

    with Environment(fail_alone=True) as env, pytest.raises(CalleeFailed, match="row 1 has a handle"):
        env.start(Owner, "owner").call(Owner.make)


def test_another_thread_is_refused() -> None:
    class Threads(Immortal):
        rows: Table[int, int]
        said: str = ""

        @rpc
        def ask(self) -> None:
            def look() -> None:
                try:
                    self.rows.get(1)
                except UsageError as error:
                    self.said = str(error)

            thread = threading.Thread(target=look)
            thread.start()
            thread.join()

    with Environment() as env:
        threads = env.start(Threads, "threads")
        threads.call(Threads.ask)
        assert threads.state.said.startswith("self.rows is used in another thread than the handlers'")


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), lmdb.DiskError("disk full")])
def test_a_full_disk_fails_calls_and_the_service_goes_on(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    flush, full = table_rows.Store.flush, []

    def flush_unless_full(store: table_rows.Store) -> None:
        if full:
            raise error
        flush(store)

    monkeypatch.setattr(table_rows.Store, "flush", flush_unless_full)
    monkeypatch.setattr(table_rows, "RECENT_SIZE_BYTES_MAX", 20_000)
    with Environment(fail_alone=True) as env:
        shop = env.start(Shop, "shop")
        shop.call(Shop.fill, 50)
        full.append(True)
        with pytest.raises(CalleeFailed, match=r"table 'orders': the row can't be kept, .*TMPDIR"):
            shop.call(Shop.fill, 500)
        with pytest.raises(CalleeFailed, match="the row can't be kept"):
            shop.call(Shop.fill_and_catch, 500)  # a replay would not go the same way
        assert len(shop.state.orders) == 50
        shop.call(Shop.store, 3)
        full.clear()
        shop.call(Shop.fill, 500)
        assert len(shop.state.orders) == 500
        shop.crash()
        full.append(True)
        shop.recover()  # in memory, since no call failed before
        assert len(shop.state.orders) == 500


def test_the_file_has_no_name(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_rows, "RECENT_SIZE_BYTES_MAX", 0)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    shop = Shop()
    for number in range(10):
        shop.orders[number] = Order("ann")
    assert shop.orders._store.snapshot is not None
    assert os.listdir(tmp_path) == []
    assert len(list(shop.orders.items())) == 10


def test_a_replay_with_other_code_finds_a_row_that_it_does_not_store(tmp_path: Path) -> None:
    class Forgetful(Shop, formerly=("Shop",)):
        @rpc
        def store(self, number: int) -> None:
            self.orders[number].count += 1

    log = tmp_path / "shop.log"
    with Environment(fail_alone=True) as env:
        shop = env.start(Shop, "shop")
        shop.call(Shop.fill, 20)
        with pytest.raises(CalleeFailed):
            shop.call(Shop.forget_to_store, 7)
        shop.call(Shop.store, 7)
        shop.export_log(log)
    assert_replays(log, Shop)
    with pytest.raises(ReplayDiffers, match="row 7 was changed but not stored"):
        assert_replays(log, Forgetful)


def test_the_guides_program(monkeypatch: pytest.MonkeyPatch, immortal_env: Environment) -> None:
    module: Any = ModuleType("shop")
    monkeypatch.setitem(sys.modules, "shop", module)
    guide = Path(__file__).parents[2] / "docs" / "how-to" / "tables.md"
    exec(re.findall(r"```python\n(.*?)```", guide.read_text(), re.DOTALL)[0], module.__dict__)
    shop = immortal_env.start(module.Shop, "shop")
    for number, customer in enumerate(["ann", "bob", "ann"]):
        shop.call(module.Shop.buy, number, module.Order(customer, 100 + number), "bread")
    shop.call(module.Shop.pay, 0)
    assert shop.call(module.Shop.owes, "ann") == 102
    assert shop.call(module.Shop.numbers, 1, 9) == [1, 2]
    assert shop.state.stock == {"bread": -3}


def test_initial_rows_and_a_prepared_cache() -> None:
    class Cached(Immortal):
        rows: Table[int, int]

        @initial
        def begin(self) -> None:
            self.rows[1] = 1

        def prepare(self) -> None:
            self.seen = list(self.rows)

        seen: list[int]

        @rpc
        def fail(self) -> None:
            self.rows[2] = 2
            raise ValueError("no")

    with Environment(fail_alone=True) as env:
        cached = env.start(Cached, "cached")
        with pytest.raises(CalleeFailed):
            cached.call(Cached.fail)
        assert cached.state.rows == {1: 1}
