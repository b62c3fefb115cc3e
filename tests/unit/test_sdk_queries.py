"""@query: methods that only read. What one does beyond that fails, names what it did, and leaves nothing behind."""

from __future__ import annotations

from collections import OrderedDict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import immortal
from immortal import CalleeFailed, Immortal, Transient, peer, query, rpc, upgrades
from immortal.appsdk.dispatch.dispatcher import Dispatcher
from immortal.appsdk.handlers import queries as module
from immortal.appsdk.handlers.definition import definition_of
from immortal.appsdk.handlers.proxy import all_method_names
from immortal.errors import DefinitionError, HandlerError, QueryError
from immortal.protocol.extensions import QUERIES
from immortal.protocol.messages import RpcType
from immortal.protocol.verdicts import VerdictKind
from immortal.testing import Environment, ReplayDiffers, assert_replays
from tests.helpers.sdk import Life, first_start, first_start_with_verdicts, recover
from tests.helpers.wire import call, initial_record, logged


class MissingError(Exception):
    pass


class Shop(Immortal):
    items: dict[str, list[int]]
    count: int
    kind: str = "shop"
    recent: OrderedDict[str, int]
    cache: Transient[dict[str, int]]

    def __init__(self) -> None:
        self.items = {"pen": [1, 2]}
        self.count = 2
        self.recent = OrderedDict(pen=1, ink=2)

    def prepare(self) -> None:
        self.cache = {}

    other = peer(lambda: Shop, "other")

    @rpc(id=1)
    def put(self, name: str, price: int) -> int:
        self.items.setdefault(name, []).append(price)
        self.count += 1
        return self.total()

    @query(id=2)
    def total(self) -> int:
        return sum(map(sum, self.items.values()))

    @query(id=3, raises=[MissingError])
    def find(self, name: str) -> list[int]:
        if name not in self.items:
            raise MissingError(name)
        return self.items[name]

    @query(id=4)
    def asked_at(self) -> datetime:
        return immortal.now()

    @query(id=5)
    def cached(self) -> int:
        self.cache = {"total": self.total()}
        self.cache["again"] = 1
        return self.cache["total"]

    @query(id=6)
    def does(self, what: str) -> str:
        match what:
            case "set":
                self.count += 1
            case "set the same":
                self.items = dict(self.items)
            case "set a default":
                self.kind = "bookshop"
            case "delete":
                del self.count
            case "append":
                self.items["pen"].append(3)
            case "move":
                self.recent.move_to_end("pen")
            case "another handler":
                self.put("pen", 3)
            case "append and raise":
                self.items["pen"].append(3)
                raise KeyError("raised")
            case "append and raise what is declared":
                self.items["pen"].append(3)
                raise MissingError("pen")
            case "call":
                self.other.put.fork("pen", 3)
            case "call itself":
                self.put.fork("pen", 3)
            case "signal":
                immortal.signal("sold", 3)
            case "random":
                return str(immortal.random.random())
            case "uuid4":
                return str(immortal.uuid4())
            case "sleep":
                immortal.sleep(timedelta(seconds=1))
            case "effect":
                immortal.effect(str, 5)
            case "raise":
                raise KeyError("raised")
            case "raise in silence":
                try:
                    self.other.put.fork("pen", 3)
                except QueryError:
                    return "in silence"
        return "nothing"

    @rpc(id=7)
    def after(self) -> str:
        self.other.put.fork("pen", 4)
        immortal.signal("sold", 4)
        return str(immortal.random.random())

    @rpc(id=8)
    async def later(self, what: str) -> str:
        return f"{await immortal.step(self.does, what)} of {await immortal.step(self.total)}"


CHANGES = {
    "set": "self.count",
    "set the same": "self.items",
    "set a default": "self.kind",
    "delete": "self.count",
    "append": "self.items",
    "move": "self.recent",
    "another handler": "self.count",
    "append and raise": "self.items",
    "append and raise what is declared": "self.items",
}
REFUSED = {
    "call": "Shop.put.fork: a query only reads, and calls nobody: make the method an @rpc, or leave this out",
    "call itself": "Shop.put.fork: a query only reads, and calls nobody",
    "signal": "immortal.signal: a query only reads, and signals nobody",
    "random": "immortal.random: a query only reads, and draws nothing",
    "uuid4": "immortal.uuid4: a query only reads, and draws nothing",
    "sleep": "immortal.sleep: only an 'async def' handler waits",
    "effect": "immortal.effect: only an 'async def' handler waits",
}


def ask(method_id: int, *arguments: Any, number: int = 1) -> bytes:
    return call(method_id, "peer", number, *arguments, rpc_type=RpcType.ASYNC)


def replies(life: Life) -> list[list[Any]]:
    return [list(arguments[1:]) for to, _, arguments in life.output.calls if to == "peer"]


def state(life: Life) -> tuple[Any, ...]:
    instance = life.dispatcher.instance
    return instance.items, instance.count, instance.kind


UNCHANGED = ({"pen": [1, 2]}, 2, "shop")


# --- what it is -------------------------------------------------------------------------------------------------------


def test_a_query_is_called_as_any_other_method() -> None:
    life = first_start_with_verdicts(Shop, "shop")
    life.give(logged(1, [ask(2), ask(3, "pen"), ask(3, "ink"), ask(5), call(2), call(1, "ink", 9), ask(2)]))
    assert replies(life) == [[3], [[1, 2]], ["MissingError", ["ink"], {}], [3], [12]]
    assert life.verdicts == []


def test_it_may_know_what_time_it_is() -> None:
    life = first_start_with_verdicts(Shop)
    life.give(logged(1, [ask(4)]))
    assert replies(life) == [[datetime(2023, 11, 14, 22, 13, 21, tzinfo=UTC)]]


def test_a_plain_call_of_a_query_is_a_plain_call() -> None:
    assert Shop().total() == 3
    life = first_start_with_verdicts(Shop, "shop")
    life.give(logged(1, [ask(1, "ink", 5)]))
    assert replies(life) == [[8]]


def test_the_app_says_which_of_its_methods_are_queries() -> None:
    names = all_method_names(definition_of(Shop))
    assert {key[1]: name for key, name in names.items() if key[0] == QUERIES} == {
        2: "Shop.total",
        3: "Shop.find",
        4: "Shop.asked_at",
        5: "Shop.cached",
        6: "Shop.does",
    }
    assert names["", 2] == "Shop.total"


def test_what_is_no_query_in_one_of_the_classes_is_none() -> None:
    """Which of them runs follows from the state; who may call queries must not change it under either."""

    class Old(Immortal):
        @rpc(id=1)
        def one(self) -> int:
            return 1

        @query(id=2)
        def two(self) -> int:
            return 2

        @query(id=3)
        def three(self) -> int:
            return 3

    @upgrades(Old)
    class New(Immortal):
        @query(id=1)
        def one(self) -> int:
            return 1

        @rpc(id=2)
        def two(self) -> int:
            return 2

        @query(id=4)
        def four(self) -> int:
            return 4

        @classmethod
        def upgrade(cls, old: Old) -> New:
            return cls()

    assert {key[1] for key in all_method_names(definition_of(New)) if key[0] == QUERIES} == {3, 4}


def test_a_query_does_not_wait() -> None:
    with pytest.raises(DefinitionError, match=r"wait_long: @query belongs on a plain 'def', which answers at once"):

        class Waits(Immortal):
            @query
            async def wait_long(self) -> int:
                return 1


def test_a_base_class_may_promise_what_a_subclass_does_not() -> None:
    class Counting(Shop):
        @rpc(id=2)
        def total(self) -> int:
            self.count += 1
            return self.count

    assert ("", 2) in all_method_names(definition_of(Counting))
    assert (QUERIES, 2) not in all_method_names(definition_of(Counting))
    with pytest.raises(DefinitionError, match=r"write @query above it"):

        class Plain(Shop):
            def total(self) -> int:  # type: ignore[override]
                return 1


# --- what it must not do ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.parametrize("awaited", [True, False])
def test_a_query_that_changes_the_state_fails_and_the_state_is_as_before(what: str, *, awaited: bool) -> None:
    life = first_start_with_verdicts(Shop, "shop")
    record = logged(1, [ask(6, what) if awaited else call(6, what), ask(2, number=2)])
    life.give(record)
    assert state(life) == UNCHANGED
    (verdict,) = life.verdicts
    assert (verdict.message_index, verdict.kind, verdict.type_name) == (0, VerdictKind.UNDONE, "QueryError")
    assert verdict.text == (
        f"Shop.does is a query, which only reads, and has changed {CHANGES[what]}: make it an @rpc method, or let it "
        f"work on a copy"
    )
    told, total = replies(life) if awaited else (None, *replies(life))
    assert told is None or told[:2] == ["~failed", ["QueryError", verdict.text, "shop record 1:0"]]
    assert total == [3]
    again = recover(
        Shop,
        life.output.blobs[0],
        initial_record(life.output.initial_message, "shop"),
        record,
        verdicts=life.verdicts,
    )
    assert state(again) == UNCHANGED
    assert (again.verdicts, again.output.calls) == ([], life.output.calls)


@pytest.mark.parametrize("what", REFUSED)
def test_what_reaches_beyond_a_query_is_refused(what: str) -> None:
    life = first_start_with_verdicts(Shop, "shop")
    life.give(logged(1, [ask(6, what), call(7)]))
    (verdict,) = life.verdicts
    assert REFUSED[what] in verdict.text
    assert replies(life)[0][:1] == ["~failed"]
    assert [tuple(arguments) for to, _, arguments in life.output.calls if to == "other"] == [("pen", 4)]
    assert list(life.dispatcher.tasks.events.kept) == ["sold"]
    assert len(life.dispatcher.tasks.events.kept["sold"]) == 1, "after() may signal, the query may not"


def test_what_is_refused_is_not_done_even_if_nobody_hears_of_it() -> None:
    life = first_start_with_verdicts(Shop, "shop")
    life.give(logged(1, [ask(6, "raise in silence")]))
    assert replies(life) == [["in silence"]]
    assert [to for to, _, _ in life.output.calls] == ["peer"]


def test_an_async_handler_awaits_queries_and_they_only_read_there_too() -> None:
    life = first_start_with_verdicts(Shop, "shop")
    life.give(logged(1, [ask(8, "nothing"), ask(8, "append", number=2), ask(8, "call", number=3)]))
    assert state(life) == UNCHANGED
    assert replies(life)[0] == ["nothing of 3"]
    assert [one[:1] for one in replies(life)[1:]] == [["~failed"], ["~failed"]]


def test_a_class_that_keeps_what_failed_keeps_nothing_of_a_query() -> None:
    class Keeps(Immortal, on_error="keep"):
        items: list[int]

        def __init__(self) -> None:
            self.items = []

        @query(id=1)
        def look(self) -> int:
            self.items.append(1)
            raise KeyError("no")

        @rpc(id=2)
        def push(self) -> int:
            self.items.append(2)
            raise KeyError("no")

    life = first_start_with_verdicts(Keeps)
    life.give(logged(1, [call(1), call(2), call(1)]))
    assert life.dispatcher.instance.items == [2]
    assert [one.kind for one in life.verdicts] == [VerdictKind.UNDONE, VerdictKind.KEPT, VerdictKind.UNDONE]


def test_a_class_that_stops_where_something_fails_stops() -> None:
    class Stops(Immortal, on_error="stop"):
        items: list[int]

        def __init__(self) -> None:
            self.items = []

        @query(id=1)
        def look(self) -> int:
            self.items.append(1)
            return 1

    with pytest.raises(HandlerError, match=r"has changed self\.items"):
        first_start_with_verdicts(Stops).give(logged(1, [call(1)]))


def test_beside_a_coordinator_without_verdicts_it_stops_the_app() -> None:
    with pytest.raises(HandlerError, match="a query only reads, and calls nobody"):
        first_start(Shop).give(logged(1, [call(6, "call")]))


# --- states of other forms --------------------------------------------------------------------------------------------


class Pickled(Immortal, serializer="pickle"):
    points: set[complex]

    def __init__(self) -> None:
        self.points = {1j}

    @query(id=1)
    def look(self, changes: bool) -> int:
        if changes:
            self.points.add(2j)
        return len(self.points)


class Own(Immortal):
    def __init__(self) -> None:
        self.seen = 0
        self.total = 0

    def checkpoint(self) -> bytes:
        return str(self.total).encode()

    def restore(self, blob: bytes) -> None:
        self.total, self.seen = int(blob), 0

    @query(id=1)
    def look(self, changes: bool) -> int:
        self.seen += 1  # no part of what it saves
        self.total += changes
        return self.total


@pytest.mark.parametrize(("cls", "words"), [(Pickled, "has changed self.points"), (Own, "has changed its state")])
def test_a_state_in_another_form_is_compared_as_it_is_saved(cls: type, words: str) -> None:
    life = first_start_with_verdicts(cls)
    life.give(logged(1, [call(1, False), call(1, True), call(1, False)]))
    (verdict,) = life.verdicts
    assert verdict.message_index == 1
    assert words in verdict.text


# --- what is compared when --------------------------------------------------------------------------------------------


class Large(Immortal):
    items: list[str]

    def __init__(self) -> None:
        self.items = []

    @rpc(id=1)
    def fill(self, size_bytes: int) -> None:
        self.items = ["x" * size_bytes]

    @query(id=2)
    def look(self, changes: bool) -> int:
        if changes:
            self.items.append("y")
        return len(self.items)

    @query(id=3)
    def sees(self, changes: bool) -> int:
        return self.look(changes)


def found(life: Life) -> list[int]:
    return [verdict.message_index for verdict in life.verdicts]


def test_in_service_comparing_has_a_budget() -> None:
    """Of 80 KB, made twice, 8 KiB for each query: each 20th or so is compared, and the first of each method."""
    life = first_start_with_verdicts(Large)
    life.give(logged(1, [call(1, 80_000)]))
    life.give(logged(2, [call(2, True)]) + logged(3, [call(2, True)]) + logged(4, [call(3, True)]))
    assert [verdict.sequence_id for verdict in life.verdicts] == [2, 4]
    assert life.dispatcher.instance.items[1:] == ["y"], "it was not compared, and is done"
    life.give(b"".join(logged(5 + number, [call(2, True)]) for number in range(100)))
    assert 4 <= len(found(life)) - 2 <= 5
    assert module.COMPARED_BYTES_PER_QUERY == 8192


def test_a_state_that_is_large_to_encode_is_not_compared_in_service() -> None:
    life = first_start_with_verdicts(Large)
    life.dispatcher.tasks.queries.state_size_bytes = module.COMPARED_SIZE_BYTES_MAX + 1
    life.give(logged(1, [call(2, True)]))
    assert found(life) == []


def test_a_replay_lets_pass_what_once_passed() -> None:
    """In service the 2nd was not compared. Whoever recovers from this log must come to the same state."""
    life = first_start_with_verdicts(Large)
    records = [logged(1, [call(1, 80_000)]), logged(2, [call(2, False), call(2, True), call(3, False)])]
    life.give(b"".join(records))
    assert found(life) == []
    again = recover(
        Large, life.output.blobs[0], initial_record(life.output.initial_message), *records, verdicts=life.verdicts
    )
    assert again.verdicts == []
    assert again.dispatcher.instance.items == life.dispatcher.instance.items
    looked_at = recover(
        Large,
        life.output.blobs[0],
        initial_record(life.output.initial_message),
        *records,
        verdicts=life.verdicts,
        compares_queries=True,
    )
    assert found(looked_at) == [1]


def test_a_rewind_lets_pass_what_once_passed() -> None:
    life = first_start_with_verdicts(Large, keeps_large_copies=True)
    life.give(logged(1, [call(1, 80_000), call(2, False), call(2, True), call(3, True)]))
    assert found(life) == [3]
    assert life.dispatcher.instance.items[1:] == ["y"]


def test_a_state_that_can_not_be_saved_is_not_the_querys_fault() -> None:
    life = first_start_with_verdicts(Shop)
    life.dispatcher.instance.items["pen"].append(object())
    life.give(logged(1, [call(6, "nothing")]))
    assert life.verdicts == []


# --- for tests --------------------------------------------------------------------------------------------------------


def test_an_environment_compares_around_each_query() -> None:
    with Environment(fail_alone=True) as env:
        large = env.start(Large, "large")
        large.call(Large.fill, 3 << 20)
        for _ in range(2):
            assert large.call(Large.look, False) == 1
            with pytest.raises(CalleeFailed, match=r"Large\.look is a query, .* has changed self\.items"):
                large.call(Large.look, True)
        large.crash()
        large.recover()
        assert large.call(Large.look, False) == 1


def test_a_recorded_log_shows_a_query_that_changed_the_state(tmp_path: Path) -> None:
    """It was no query then, or its change was not looked for."""

    class Log(Immortal, formerly=("Then",)):
        items: list[str]

        def __init__(self) -> None:
            self.items = []

        @rpc
        def look(self, text: str) -> None:
            self.items.append(text)

    path = tmp_path / "log.log"
    with Environment() as env:
        log = env.start(Log, "log")
        log.call(Log.look, "a")
        log.export_log(path)
    assert_replays(path, Log)

    class Now(Immortal, formerly=("Log", Log.__qualname__)):
        items: list[str]

        @query
        def look(self, text: str) -> None:
            self.items.append(text)

    with pytest.raises(ReplayDiffers, match=r"Now\.look is a query, which only reads, and has changed self\.items"):
        assert_replays(path, Now)


def test_a_handler_that_takes_long_is_seen_while_it_is_a_query() -> None:
    seen: list[Any] = []

    class Slow(Immortal):
        @query(id=1)
        def look(self) -> int:
            seen.append(dispatchers[0].records.current_handling)
            return 1

    dispatchers: list[Dispatcher] = []
    life = first_start_with_verdicts(Slow)
    dispatchers.append(life.dispatcher)
    life.give(logged(1, [call(1)]))
    assert [one and one.method for one in seen] == [f"{Slow.__qualname__}.look"]
