"""A table as an instance in one process: a real coordinator and handlers, a clock of the test's."""

from __future__ import annotations

import msgspec
import pytest

from immortal.appsdk.patterns.clone.model import LEASE_S
from immortal.appsdk.patterns.clone.table import ROOM_S
from immortal.appsdk.testing.instance import Instance
from immortal.patterns.clone import Change, Entitlement, Place, Presence, Table, TableFull, Written
from immortal.testing import Environment

PLACE = Place("tcp://127.0.0.1:1", "", 0)


def value(of: object) -> bytes:
    return msgspec.msgpack.encode(of)


@pytest.fixture
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for the replay at the end of the test: it is asked for before the environment."""
    monkeypatch.setattr("immortal.appsdk.patterns.clone.table.ROWS_MAX", 2)
    monkeypatch.setattr("immortal.appsdk.patterns.clone.table.SIZE_BYTES_MAX", 50)


@pytest.fixture
def table(immortal_env: Environment) -> Instance[Table]:
    return immortal_env.start(Table, "prices")


def put(table: Instance[Table], *changes: Change) -> Written:
    return table.call(Table.update, list(changes))


def keys(table: Instance[Table]) -> list[str]:
    return list(table.state.entries.rows)


def says(
    table: Instance[Table],
    forwarder: str = "f",
    joined: list[Presence] | None = None,
    left: list[str] | None = None,
    held: list[str] | None = None,
    begins: bool = False,
) -> None:
    table.call(Table.forwarder_says, forwarder, PLACE, joined or [], left or [], held or [], begins)


def test_each_change_has_its_number(table: Instance[Table]) -> None:
    assert put(table, Change("a", value(1)), Change("a/b", value(2))) == Written(2, True)
    assert put(table, Change("a", None), Change("never/there", None)).number == 4
    assert keys(table) == ["a/b"]
    assert table.state.entries.rows["a/b"].value == value(2)
    assert table.state.entries.gone == {"a": 3, "never/there": 4}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (Change("", value(1)), "1 to 256 bytes"),
        (Change("x" * 257, value(1)), "1 to 256 bytes"),
        (Change("a//b", value(1)), "printable parts"),
        (Change("/a", value(1)), "printable parts"),
        (Change("a\nb", value(1)), "printable parts"),
        (Change("/".join("a" * 17), value(1)), "up to 16"),
        (Change("@present/x", value(1)), "the table's own"),
        (Change("a", b"x" * ((1 << 20) + 1)), "at most 1048576"),
        (Change("a", value(1), -1.0), "seconds were expected"),
        (Change("a", value(1), float("nan")), "seconds were expected"),
    ],
)
def test_what_a_writer_gets_wrong_changes_nothing(table: Instance[Table], change: Change, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        put(table, Change("good", value(1)), change)
    with pytest.raises(ValueError, match="0 changes"):
        put(table)
    assert table.state.entries.number == 0


def test_a_row_goes_when_its_time_is_over_and_not_before(immortal_env: Environment, table: Instance[Table]) -> None:
    put(table, Change("short", value(1), 5.0), Change("long", value(1), 60.0), Change("for ever", value(1)))
    immortal_env.advance(seconds=4)
    put(table, Change("short", value(2), 5.0))
    immortal_env.advance(seconds=4)
    assert keys(table) == ["long", "for ever", "short"], "it was set anew"
    immortal_env.advance(seconds=2)
    assert keys(table) == ["long", "for ever"]
    put(table, Change("long", value(2)))
    immortal_env.advance(seconds=100)
    assert keys(table) == ["for ever", "long"], "the last change says that it stays"


def test_what_is_due_while_the_table_is_down_goes_when_it_is_back(
    immortal_env: Environment, table: Instance[Table]
) -> None:
    put(table, Change("short", value(1), 5.0), Change("a", value(1)))
    table.crash()
    immortal_env.advance(seconds=60)
    table.recover()
    immortal_env.advance(seconds=1)
    assert keys(table) == ["a"]


@pytest.mark.usefixtures("few_rows")
def test_a_table_has_its_limits(table: Instance[Table]) -> None:
    put(table, Change("a", value(1)), Change("b", value(1)))
    put(table, Change("a", value(2)), Change("b", value(2)))
    with pytest.raises(TableFull, match="2 rows"):
        put(table, Change("c", value(1)))
    put(table, Change("a", None))
    put(table, Change("c", value(1)))
    with pytest.raises(TableFull, match="delete some"):
        put(table, Change("c", value("x" * 50)))
    assert sorted(keys(table)) == ["b", "c"]


def test_who_is_there_are_rows_as_well(table: Instance[Table]) -> None:
    one, two = (Presence(f"f.{index}", "ann", f"label {index}", "f") for index in (1, 2))
    says(table, joined=[one, two], begins=True)
    assert msgspec.msgpack.decode(table.state.entries.rows["@present/f.1"].value or b"", type=Presence) == one
    says(table, left=["f.1", "f.9"])
    assert keys(table) == ["@present/f.2"]
    assert table.call(Table.places) == [PLACE]
    says(table, joined=[one], begins=True)
    assert keys(table) == ["@present/f.1"], "it began anew"
    table.call(Table.forwarder_ends, "f")
    assert keys(table) == []
    assert table.call(Table.places) == []


def test_only_who_is_entitled_to_is_named_as_a_place(table: Instance[Table]) -> None:
    """Clients believe the keys of a place."""
    place = Place("tcp://127.0.0.1:2", "mallory", 0)
    arguments = ("m", place, [], [], [], True)
    table.call(Table.entitle, "mallory", ["a"])
    with pytest.raises(ValueError, match="'mallory' is no forwarder here: entitle it with relay=True"):
        table.call(Table.forwarder_says, *arguments)
    assert table.call(Table.places) == []
    table.call(Table.entitle, "mallory", [], True)
    table.call(Table.forwarder_says, *arguments)
    assert table.call(Table.places) == [place]


def test_a_silent_forwarder_is_gone_with_its_clients(immortal_env: Environment, table: Instance[Table]) -> None:
    says(table, "dead", [Presence("dead.1", "", "", "dead")], begins=True)
    says(table, "alive", [Presence("alive.1", "", "", "alive")], begins=True)
    for _ in range(int(LEASE_S) + 1):
        immortal_env.advance(seconds=1)
        says(table, "alive")
    assert keys(table) == ["@present/alive.1"]
    assert not table.call(Table.forwarder_known, "dead")
    table.crash()
    immortal_env.advance(seconds=100)
    table.recover()
    says(table, "third", begins=True)
    assert table.call(Table.forwarder_known, "alive"), "a table that was down takes nobody for silent"


def test_writers_wait_while_a_client_holds_them_up(immortal_env: Environment, table: Instance[Table]) -> None:
    says(table, held=["slow one"], begins=True)
    assert not put(table, Change("a", value(1))).has_room
    assert table.call(Table.status).held_by == ["slow one"]
    waits = [table.begin(Table.room) for _ in range(2)]
    immortal_env.advance(seconds=1)
    assert not any(wait.done for wait in waits)
    says(table, held=[])
    assert [wait.result() for wait in waits] == [True, True]
    assert put(table, Change("a", value(1))).has_room
    assert table.call(Table.room)


def test_a_writer_asks_again_after_a_while(immortal_env: Environment, table: Instance[Table]) -> None:
    says(table, held=["slow one"], begins=True)
    wait = table.begin(Table.room)
    immortal_env.advance(seconds=ROOM_S + 1)
    assert wait.result() is False
    assert table.state.waiting == []


def test_who_is_entitled(table: Instance[Table]) -> None:
    table.call(Table.entitle, "ann", ["a", "a/b", "@present"])
    table.call(Table.entitle, "*", [])
    assert table.call(Table.entitled) == {"ann": Entitlement(("@present", "a")), "*": Entitlement(())}
    assert table.call(Table.disentitle, "*")
    assert not table.call(Table.disentitle, "*")
    for name, subtrees, text in (
        ("a/b", [""], "without '/'"),
        ("", [""], "1 to 256"),
        ("ann", ["@"], "only '@present'"),
        ("ann", ["@entitled/bob"], "only '@present'"),
        ("ann", ["a//b"], "printable parts"),
        ("ann", [f"{number}" for number in range(101)], "at most 100"),
    ):
        with pytest.raises(ValueError, match=text):
            table.call(Table.entitle, name, subtrees)


def test_a_recovery_has_all_of_it(immortal_env: Environment, table: Instance[Table]) -> None:
    put(table, *(Change(f"k/{index}", value(index), 60.0 * (index % 2)) for index in range(10)))
    put(table, Change("k/3", None))
    table.checkpoint()
    put(table, Change("k/4", value("after")))
    table.crash()
    before = table
    table.recover()
    assert before.state.entries.number == 12
    assert list(before.state.entries.rows)[-1] == "k/4"
    immortal_env.advance(seconds=61)
    assert [key for key in keys(table) if int(key[2:]) % 2] == []
