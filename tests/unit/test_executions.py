"""The list of executions: its keys and queries, labels, secrets, children, restarts, what is too old, a full disk."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import immortal
from immortal import CalleeFailed, Immortal, impulse, peer, rpc
from immortal.appsdk.running import executions
from immortal.appsdk.running.executions import ExecutionWriter
from immortal.appsdk.state.journal import TIMER, Entry, SavedTask, decode_journal
from immortal.appsdk.waiting.tasks import describe_step
from immortal.coordinator.config import InstanceSettings
from immortal.coordinator.core import events as ev
from immortal.errors import DefinitionError
from immortal.presenters.operations import step_end
from immortal.protocol.executions import (
    FILE_NAME,
    INDEX_BITS,
    ExecutionsError,
    Query,
    find_in,
    id_of,
    key_of_call,
    key_of_id,
    label_of,
    merge,
    open_index,
    open_to_write,
)
from immortal.protocol.system_methods import Order
from immortal.testing import Environment
from tests.helpers.listed import Listed


class Bank(Immortal):
    sums: dict[int, int]

    def __init__(self) -> None:
        self.sums = {}

    @rpc(labels=("order",))
    def charge(self, order: int, token: str) -> int:
        self.sums[order] = len(token)
        return order

    @rpc
    async def hold(self, order: int) -> int:
        immortal.label(order=order)
        return order


class Shop(Immortal):
    bank = peer(Bank, "bank")
    labelled: int

    def __init__(self) -> None:
        self.labelled = 0

    @impulse(labels=("order",))
    async def ship(self, order: int, item: str) -> None:
        immortal.label(item=item)
        await self.bank.charge(order, "a secret")
        await self.bank.hold(order)
        await immortal.step(self.mark, order)
        await immortal.event(f"go {order}", bool)

    @rpc
    def mark(self, order: int) -> None:
        immortal.label(marked=order)  # in a step: of the handler that awaits it

    @impulse(labels=())
    def look(self) -> None:
        immortal.label(looked="yes")

    @impulse
    def wrong(self) -> None:
        immortal.label(order=1)

    @impulse
    def go(self, order: int) -> None:
        immortal.signal(f"go {order}", True)


class Stubborn(Immortal):
    told: list[str]

    def __init__(self) -> None:
        self.told = []

    @rpc
    async def stay(self) -> None:
        try:
            while True:
                try:
                    await immortal.event("never")
                except BaseException as error:
                    if isinstance(error, asyncio.CancelledError):
                        await immortal.step(self.tell, "stays")
        finally:
            await immortal.step(self.tell, "cleans up")

    @rpc
    def tell(self, text: str) -> None:
        self.told.append(text)

    @impulse
    async def call(self) -> None:
        try:
            await self.stay()
        except CalleeFailed as error:
            await immortal.step(self.tell, f"{type(error).__name__}: {error}")


class Wrong(Immortal):
    value: ClassVar[Any]

    @rpc(labels=())
    def give(self) -> None:
        immortal.label(order=self.value)


@pytest.fixture
def shops(tmp_path: Path) -> Iterator[Listed]:
    instances = Listed(tmp_path, {"bank": Bank, "shop": Shop})
    yield instances
    instances.close()


def test_an_execution_has_its_labels_its_arguments_and_its_children(shops: Listed) -> None:
    shops["shop"].impulse("ship", 17, "tea")
    shops["shop"].impulse("ship", 18, "rice")
    (ship,) = shops.find("shop", Query(where=[("order", "17"), ("item", "tea")]))
    assert (ship.call, ship.state, ship.caller) == ("Shop.ship(17, 'tea')", "waiting", None)
    assert ship.labels == {"order": "17", "item": "tea", "marked": "17"}
    charge, hold = sorted(shops.find("bank", Query(where=[("order", "17")])), key=lambda one: one.key)
    assert (charge.call, charge.state, charge.result, charge.caller) == ("Bank.charge(17, ***)", "ended", "17", "shop")
    assert (hold.call, hold.state, hold.result) == ("Bank.hold(17)", "ended", "17")
    with open_index(shops.folder / "shop", "shop") as index:
        calls = index.calls(ship.key)
        assert index.caller_of(hold.call_number) == ship.key
    assert [(step, number, to) for step, number, to in calls] == [
        (1, charge.call_number, "bank"),
        (2, hold.call_number, "bank"),
    ]
    assert not shops.find("shop", Query(where=[("order", "17"), ("item", "rice")]))
    assert {one.labels["order"] for one in shops.find("shop", Query(text="rice"))} == {"18"}
    assert len(shops.find("shop", Query(handler="ship", state="waiting"))) == 2
    with pytest.raises(ExecutionsError, match="of a handler 'sell' is known: there are Shop"):
        shops.find("shop", Query(handler="sell"))


def test_pages_of_a_list_go_on_where_the_last_one_ended(shops: Listed) -> None:
    for order in range(5):
        shops["shop"].impulse("ship", order, "tea")
    every = shops.find("shop")
    first = shops.find("shop", Query(limit=2))
    rest = shops.find("shop", Query(before=(first[-1].began_ns, first[-1].key)))
    assert [*first, *rest] == every
    assert [one.labels["order"] for one in every] == ["4", "3", "2", "1", "0"]


def test_the_steps_of_one_that_has_ended_are_kept(shops: Listed) -> None:
    shops["shop"].impulse("ship", 17, "tea")
    shops["shop"].impulse("go", 17)
    (ship,) = shops.find("shop", Query(where=[("order", "17")]))
    assert ship.state == "ended"
    with open_index(shops.folder / "shop", "shop") as index:
        steps = [describe_step(entry) for entry in decode_journal(index.journal(ship.key) or b"")]
    assert [step["what"] for step in steps] == ["call bank.charge", "call bank.hold", "step mark", "event go 17"]
    assert [step["value"] for step in steps] == ["17", "17", "None", "True"]


def test_a_timer_of_a_timeline_says_for_when_it_was_set() -> None:
    step = describe_step(Entry(3, TIMER, 1_700_000_000 * 10**9, False, b"\xc0", 0))
    assert f"{step['what']} {step_end(step)}" == "timer for 2023-11-14T22:13:20+00:00 is over"


def test_a_restart_is_a_new_execution_that_names_its_origin(shops: Listed) -> None:
    shops["shop"].impulse("ship", 17, "tea")
    (ship,) = shops.find("shop")

    def restart(*arguments: Any) -> Any:
        value = msgspec.Raw(msgspec.msgpack.encode((ship.method_id, list(arguments), [])))
        return shops.ask("shop", ev.HandlerOrdered, Order("restart", ship.key, ship.id, "ann", value))

    said = restart(18, "rice")
    shops.crash("shop")
    (again,) = shops.find("shop", Query(where=[("order", "18")]))
    assert said["text"] == f"Shop.ship has begun again, as {again.id}"
    assert (again.origin, again.caller, again.call) == (ship.key, None, "Shop.ship(18, 'rice')")
    assert "not what it takes" in restart("x", "rice")["text"]


def test_a_restart_from_a_step_does_what_is_left(shops: Listed) -> None:
    shops["shop"].impulse("ship", 17, "tea")
    shops["shop"].impulse("go", 17)
    (ship,) = shops.find("shop")
    with open_index(shops.folder / "shop", "shop") as index:
        given = [entry for entry in decode_journal(index.journal(ship.key) or b"") if entry.step < 4]
    value = msgspec.Raw(msgspec.msgpack.encode((ship.method_id, [18, "tea"], given)))
    shops.ask("shop", ev.HandlerOrdered, Order("restart", ship.key, ship.id, "ann", value))
    assert len(shops.find("bank")) == 2  # none of the first one's calls is made again
    for crash in (False, True, True):
        if crash:
            shops["shop"].checkpoint()
            shops.crash("shop")
        (again,) = shops.find("shop", Query(state="waiting"))
        assert (again.call, again.origin) == ("Shop.ship(18, 'tea')", ship.key)
        assert shops["shop"].dispatcher.tasks.waiting(again.key).save().entries[0].what == "call bank.charge"
    shops["shop"].impulse("go", 18)
    assert not shops.find("shop", Query(state="waiting"))


def test_a_handler_that_stays_through_its_cancellation_is_terminated(tmp_path: Path) -> None:
    instances = Listed(tmp_path, {"desk": Stubborn})
    try:
        instances["desk"].impulse("call")
        (stay,) = instances.find("desk", Query(handler="stay"))
        instances.ask("desk", ev.HandlerOrdered, Order("cancel", stay.key, "enough", "ann"))
        assert instances.waiting_count("desk") == 2
        said = instances.ask("desk", ev.HandlerOrdered, Order("terminate", stay.key, "enough", "ann"))
        assert said["text"] == "Stubborn.stay was terminated"
        for _ in range(2):  # a replay does the same
            assert instances.waiting_count("desk") == 0
            assert instances.app("desk").told[0] == "stays"
            assert instances.app("desk").told[1].startswith("CallCancelled: ")
            assert "terminated: enough" in instances.app("desk").told[1]
            (ended,) = instances.find("desk", Query(state="terminated"))
            assert (ended.handler, ended.result) == ("Stubborn.stay", "enough")
            instances.crash("desk")
        said = instances.ask("desk", ev.HandlerOrdered, Order("terminate", stay.key, "enough", "ann"))
        assert "it has ended" in said["text"]
    finally:
        instances.close()


def test_lists_are_searched_together(shops: Listed) -> None:
    shops["shop"].impulse("ship", 17, "tea")
    shops.find("bank")
    shops.find("shop")
    folders = {name: shops.folder / name for name in ("bank", "shop", "new")}
    found = find_in(folders, Query(where=[("order", "17")]), is_named=False)
    assert sorted((name, one.handler) for name, one in found) == [
        ("bank", "Bank.charge"),
        ("bank", "Bank.hold"),
        ("shop", "Shop.ship"),
    ]
    assert len(find_in(folders, Query(limit=2), is_named=False)) == 2
    assert [name for name, _ in find_in(folders, Query(where=[("item", "tea")]), is_named=False)] == ["shop"]
    with pytest.raises(ExecutionsError, match="no execution has a label 'ordr': there are item, marked, order"):
        find_in(folders, Query(where=[("ordr", "17")]), is_named=False)
    with pytest.raises(ExecutionsError, match=r"handler 'sell' is known: there are Bank.charge, Bank.hold, Shop.ship"):
        find_in(folders, Query(handler="sell"), is_named=False)
    with pytest.raises(ExecutionsError, match="no execution of 'new' is listed"):
        find_in(folders, Query())


def test_a_def_handler_is_labelled_where_it_is_listed(shops: Listed) -> None:
    shops["shop"].impulse("look")
    shops["shop"].impulse("wrong")
    (look,) = shops.find("shop")
    assert (look.handler, look.labels, look.state) == ("Shop.look", {"looked": "yes"}, "ended")
    assert key_of_id(look.id) == look.key == key_of_call(look.record, look.message)
    (verdict,) = shops["shop"].dispatcher._failures.known.values()
    assert "with @rpc(labels=())" in verdict.text


@pytest.mark.parametrize("value", [1.5, None, "x" * 257, "\ud800"])
def test_values_that_are_no_labels(value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Wrong, "value", value, raising=False)
    with Environment(fail_alone=True) as env:
        wrong = env.start(Wrong, "wrong")
        with pytest.raises(CalleeFailed, match="a str, int or UUID was expected"):
            wrong.call(Wrong.give)


def test_what_is_no_parameter_is_no_label() -> None:
    with pytest.raises(DefinitionError, match="a tuple of its parameters was expected, of 'order'"):

        @rpc(labels=("number",))
        def ship(self: Any, order: int) -> None: ...


@given(record=st.integers(0, 1 << 40), message=st.integers(0, (1 << INDEX_BITS) - 1))
def test_ids(record: int, message: int) -> None:
    key = key_of_call(record, message)
    assert key < 0
    assert id_of(key) == f"{record}:{message}"
    assert key_of_id(id_of(key)) == key


@pytest.mark.parametrize("text", ["", "x", "1:", "-1", "1:2:3", "9" * 30])
def test_what_is_no_id(text: str) -> None:
    with pytest.raises(ExecutionsError, match="such as 17, or 312:0"):
        key_of_id(text)


def test_what_is_no_label() -> None:
    assert label_of("order=1=2") == ("order", "1=2")
    with pytest.raises(ExecutionsError, match="such as order=17"):
        label_of("order")


def _row(number: int, time_ns: int) -> tuple[SavedTask, Any]:
    handler: Any = Shop.__dict__["ship"]
    arguments = msgspec.msgpack.encode([number, "tea"])
    return SavedTask(number, 0, handler.method_id, arguments, None, 0, time_ns, [], []), handler


def test_what_is_too_old_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executions, "PRUNE_EACH_S", 0.0)  # the writer commits in as many steps as it has time for
    now_ns, old_ns = time.time_ns(), time.time_ns() - 31 * 86_400 * 10**9
    writer = ExecutionWriter(tmp_path / FILE_NAME, 30, pytest.fail)
    for number in range(1, executions.PRUNE_ROWS + 5):
        writer.note_start(*_row(number, old_ns))
        writer.note_end(number, "ended", None, (), old_ns, (1, 0))
    writer.note_start(*_row(900_000, old_ns))  # it waits
    writer.note_start(*_row(900_001, now_ns))
    writer.note_end(900_001, "ended", None, (), now_ns, (1, 0))
    writer.close()
    with open_index(tmp_path, "shop") as index:
        assert {one.key for one in index.find(Query())} == {900_000, 900_001}
        assert {one.key for one in index.find(Query(where=[("order", "1")]))} == set()


def test_a_list_that_can_not_be_written_is_told_once_and_holds_nobody_up(tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / FILE_NAME).mkdir()
    writer = ExecutionWriter(tmp_path / FILE_NAME, 30, said.append)
    for number in range(3):
        writer.note_start(*_row(number, 1))
        writer.flush(is_primary=True)
        writer.note_call(number, 1, number + 100, "bank")
    assert not writer._parts  # nobody would take them
    writer.close()
    (warning,) = said
    assert "the list of executions is not written any more" in warning


def test_calls_are_listed_however_many_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executions, "WAITING_MAX", 10)
    writer = ExecutionWriter(tmp_path / FILE_NAME, 30, pytest.fail)
    writer.note_start(*_row(1, time.time_ns()))
    for step in range(1, 101):
        writer.note_call(1, step, step + 1000, "bank")
        assert len(writer._parts) <= 10
    writer.close()
    with open_index(tmp_path, "shop") as index:
        assert [tuple(one) for one in index.calls(1)] == [(step, step + 1000, "bank") for step in range(1, 101)]
        assert index.caller_of(1100) == 1


@pytest.mark.parametrize(
    ("given", "days"),
    [
        ({}, 30),
        ({"keep_log_days": 90}, 90),
        ({"keep_executions_days": 1}, 7),
        ({"keep_executions_days": 0}, None),
        ({"keep_checkpoints": None}, 0),
    ],
)
def test_how_long_they_are_kept(tmp_path: Path, given: dict[str, Any], days: int | None) -> None:
    settings = InstanceSettings(name="a", peer="tcp://127.0.0.1:1", folder=tmp_path, log=str(tmp_path), **given)
    assert settings.executions_days == days


def test_a_search_that_takes_too_long_is_given_up(tmp_path: Path) -> None:
    writer = ExecutionWriter(tmp_path / FILE_NAME, 0, pytest.fail)
    for number in range(1, 20_000):
        writer.note_start(*_row(number, number))
    writer.close()
    with open_index(tmp_path, "shop", 0) as index, pytest.raises(ExecutionsError, match="takes too long; narrow it"):
        index.find(Query(text="coffee"))


def test_lists_are_merged_by_what_is_new(tmp_path: Path) -> None:
    for folder, numbers in (("old", range(1, 4)), ("new", range(3, 12_000))):
        (tmp_path / folder).mkdir()
        writer = ExecutionWriter(tmp_path / folder / FILE_NAME, 0, pytest.fail)
        for number in numbers:
            writer.note_start(*_row(number, 1 if folder == "old" else 2))
        writer.close()
    assert merge(tmp_path / "old", tmp_path / "new" / FILE_NAME) == 11_996
    assert {path.stat().st_mode & 0o777 for path in tmp_path.glob(f"*/{FILE_NAME}*")} == {0o600}
    with open_index(tmp_path / "old", "shop") as index:
        assert sorted(one.began_ns for one in index.find(Query(limit=20_000))) == [1] * 3 + [2] * 11_996
        assert len(index.find(Query(where=[("order", "11999")]))) == 1


def test_where_nothing_is_listed(tmp_path: Path) -> None:
    writer = ExecutionWriter(tmp_path / FILE_NAME, 30, pytest.fail)
    writer.note_restore(1, -1, [])
    writer.flush(is_primary=True)
    writer.close()
    assert not (tmp_path / FILE_NAME).exists()
    with pytest.raises(ExecutionsError, match="'immortal executions shop rebuild'"), open_index(tmp_path, "shop"):
        pass


def test_a_reader_sees_a_new_list_with_all_its_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was empty for a moment, and 'immortal executions' said that there is no such table."""
    linked, path = [], tmp_path / FILE_NAME

    def link(made: Path, there: Path) -> None:
        assert not path.exists()
        os.rename(made, there)
        with open_index(tmp_path, "shop") as index:
            linked.append(index.find(Query()))

    monkeypatch.setattr(os, "link", link)
    open_to_write(path).close()
    open_to_write(path).close()
    assert linked == [[]]
    assert [one.name for one in tmp_path.iterdir() if one.name.startswith(f"{FILE_NAME}.")] == []
