"""`immortal sql`: what a query sees, as of now and of a moment, and in which forms it comes."""

from __future__ import annotations

import csv
import io
import json
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from immortal.coordinator.instances.registry import Registry
from tests.helpers.cli import HOME, Run, immortal
from tests.helpers.recorded import Instances, load_module, write_module
from tests.helpers.sight_fleet import make_fleet

WORDS = ["the", "cat", "the"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sql")
    make_fleet(folder, WORDS)
    return folder


def rows(folder: Path, query: str, *options: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in immortal(folder, "sql", query, "--json", *options).splitlines()]


def test_messages_are_those_of_the_log(folder: Path) -> None:
    found = rows(folder, "select * from messages where instance = 'counter' order by sequence_id, index")
    shown = [json.loads(line) for line in immortal(folder, "log", "show", "counter", "--json").splitlines()]
    logged = [(one["sequence_id"], m["method"]) for one in shown for m in one["messages"] if m["type"] == "RPC"]
    calls = [row for row in found if row["kind"] != "initial"]
    assert [(row["sequence_id"], f"Counter.{row['method']}") for row in calls] == logged
    assert json.loads(calls[0]["arguments_json"])["word"] == "the"
    assert {row["source"] for row in calls} == {"reader"}
    by_method = "select method, count(*) as n from messages where kind <> 'initial' group by method order by method"
    assert {row["method"]: row["n"] for row in rows(folder, by_method)} == {
        "count": 2 * len(WORDS), "note": len(WORDS), "line": len(WORDS), "rated": 1, "later": 1,
    }  # fmt: skip


def test_show_tables_names_all_that_a_query_may_ask_for(folder: Path) -> None:
    found = [row["name"] for row in rows(folder, "SHOW TABLES;")]
    assert {"messages", "waiting", "counter", "counter.words", "reader.seen"} <= set(found)
    for name in found:
        rows(folder, f"select * from {name} limit 1")


def test_states_are_tables(folder: Path) -> None:
    query = "select w.key, w.times, c.total from counter.words w, counter c order by 1"
    assert rows(folder, query) == [{"key": "cat", "times": 1, "total": 3}, {"key": "the", "times": 2, "total": 3}]
    assert [row["value"] for row in rows(folder, "select * from reader.seen order by index")] == WORDS


def test_what_waits(folder: Path) -> None:
    joined = "select w.handler, w.kind, w.sequence_id, w.arguments, t.due, e.effect from waiting w"
    joined += " left join timers t using (instance, id) left join effects e using (instance, id) order by w.id"
    slow, sleepy = rows(folder, joined)
    assert (slow["handler"], slow["kind"], slow["effect"], slow["due"]) == ("rated", "effect", "rate", None)
    assert (sleepy["handler"], sleepy["kind"], sleepy["effect"]) == ("later", "timer", None)
    assert json.loads(sleepy["arguments"]) == ["sleepy"]
    assert sleepy["due"].startswith("2023-11-15T22:13:20")
    (instance,) = rows(folder, "select * from instances", "--instance", "reader")
    assert instance["last_sequence_id"] == sleepy["sequence_id"] == slow["sequence_id"] + 1


def test_as_of_a_record_and_of_a_time(folder: Path) -> None:
    words = "select key, times from counter.words"
    assert rows(folder, "select key from counter.words", "--instance", "counter", "--at", "0") == []
    assert rows(folder, words, "--instance", "counter", "--at", "2") == [{"key": "the", "times": 1}]
    whole = rows(folder, "select instance, time_ns, time from records order by time_ns")
    for share in (len(whole) // 2, len(whole) - 1):
        at = whole[share]
        counted = rows(folder, "select count(*) as n from counter.words", "--at", at["time"])
        calls = "select instance, method, rpc_kind from messages where kind <> 'initial'"
        found = rows(folder, calls, "--at", at["time"])
        done = [row for row in found if (row["instance"], row["method"]) == ("counter", "count")]
        assert counted[0]["n"] == len({"the", "cat"} if len(done) > 1 else done)
        answers = [row for row in found if row["rpc_kind"] == "returned_value"]
        assert len(answers) <= len(done)


def test_forms(folder: Path) -> None:
    query = "select key, times, 'a\"b,c' as text, 'x'::blob as bytes, null as nothing from counter.words order by key"
    table = immortal(folder, "sql", query)
    assert [line.split()[:2] for line in table.splitlines()] == [["key", "times"], ["cat", "1"], ["the", "2"]]
    read = list(csv.reader(io.StringIO(immortal(folder, "sql", query, "--csv"))))
    assert read == [
        ["key", "times", "text", "bytes", "nothing"],
        ["cat", "1", 'a"b,c', "78", ""],
        ["the", "2", 'a"b,c', "78", ""],
    ]
    assert rows(folder, query)[0] == {
        "key": "cat", "times": 1, "text": 'a"b,c', "bytes": {"$bytes": "78"}, "nothing": None,
    }  # fmt: skip
    assert "2 rows in" in immortal(folder, "sql", query, "--parquet", "words.parquet")
    assert pq.read_table(folder / "words.parquet").column("times").to_pylist() == [1, 2]
    assert "there already" in immortal(folder, "sql", query, "--parquet", "words.parquet", status=1)


def test_nothing_is_shown_that_a_terminal_obeys(folder: Path) -> None:
    assert "\x1b" not in immortal(folder, "sql", "select chr(27) || '[2J' as \"a\x1b\"")
    assert "\x1b" not in immortal(folder, "sql", "select chr(27) || '[2J' as \"a\x1b\"", "--json")


def test_wrong_queries_are_said(folder: Path) -> None:
    assert "syntax error" in immortal(folder, "sql", "selec", status=1)
    assert "there are messages" in immortal(folder, "sql", "select * from nowhere", status=1)
    assert "words" in immortal(folder, "sql", "select * from counter.word", status=1)
    assert "returns no rows" in immortal(folder, "sql", "create table a (b integer)", status=1)
    assert "single statement" in immortal(folder, "sql", "select 1; select 2", status=1)
    assert "one of --csv" in immortal(folder, "sql", "select 1", "--csv", "--json", status=2)
    assert "each log's own" in immortal(folder, "sql", "select 1", "--at", "3", status=2)
    said = immortal(folder, "sql", "select 1", "--at", "300", "--instance", "counter", status=2)
    assert "ends with record 6" in said
    assert "nobody" in immortal(folder, "sql", "select 1", "--instance", "nobody", status=1)


SOLO = """
from dataclasses import dataclass

from immortal import Immortal, impulse


@dataclass
class Word:
    times: int


class Solo(Immortal):
    words: dict[str, Word]
    total: int

    def __init__(self) -> None:
        self.words = {}
        self.total = 0

    @impulse
    def count(self, word: str) -> None:
        self.words.setdefault(word, Word(0)).times += 1
        self.total += 1
"""


def test_instances_that_are_called_as_tables_or_schemas(tmp_path: Path) -> None:
    module_name = write_module(tmp_path, SOLO)
    instances = Instances(tmp_path / "logs")
    registry = Registry(tmp_path / HOME)
    for name in ("messages", "main", "service-0", "methods", "select"):
        instance = instances.start(name, load_module(tmp_path, module_name).Solo)
        for word in WORDS:
            instance.impulse("count", word)
        instances.stop(name)
        registry.register(name, "tcp://127.0.0.1:*", log=tmp_path / "logs" / name / "log")
        registry.remember_app(name, f"{module_name}:Solo")
    query = """select (select total from messages.state) as a, (select total from main_.state) as b,
        (select total from "service-0") as c, (select sum(times) from "service-0".words) as d,
        (select total from methods) as e, (select total from "select") as f,
        (select count(*) from messages where instance = 'methods' and method = 'count') as g"""
    assert rows(tmp_path, query) == [dict.fromkeys("abcdefg", 3)]


@pytest.mark.parametrize("missing", ["duckdb", "immortal.pipeline.sql.database"])  # the latter as without Arrow
def test_without_the_extra_it_is_said(folder: Path, missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    assert "pip install 'immortal-services[sql]'" in immortal(folder, "sql", "select 1", status=1)


def test_unregistering_removes_what_was_made_of_the_log(tmp_path: Path) -> None:
    make_fleet(tmp_path, WORDS)
    assert rows(tmp_path, "select count(*) as n from messages", "--instance", "counter")[0]["n"] == 7
    assert list((tmp_path / HOME / "counter" / "columns").rglob("*.parquet"))
    immortal(tmp_path, "unregister", "counter")
    assert not (tmp_path / HOME / "counter").exists()


LIVE = """
import time

from immortal import Immortal, Impulses, impulse, on_primary, peer, rpc


class Stock(Immortal):
    till = peer(lambda: Till, "till")
    sold: int

    def __init__(self) -> None:
        self.sold = 0

    @rpc
    def order(self) -> None:
        self.sold += 1
        self.till.done.fork()


class Till(Immortal):
    stock = peer(Stock, "stock")
    asked: int
    paid: int

    def __init__(self) -> None:
        self.asked = self.paid = 0

    @impulse
    def customer(self) -> None:
        self.asked += 1
        self.stock.order.fork()

    @rpc
    def done(self) -> None:
        self.paid += 1

    @on_primary
    def serve(self, impulses: Impulses) -> None:
        while True:
            impulses.customer()
            impulses.flush()
            time.sleep(0.002)
"""


@pytest.mark.kills
def test_a_fleet_that_works_is_seen_at_one_moment(tmp_path: Path) -> None:
    (tmp_path / "live.py").write_text(LIVE)
    for name in ("stock", "till"):
        immortal(tmp_path, "register", name, "--peer", "tcp://127.0.0.1:*", "--keep-checkpoints", "all")
    runs = [Run(tmp_path, "stock", "live:Stock"), Run(tmp_path, "till", "live:Till")]
    try:
        for run in runs:
            run.line("checkpoint taken")
        seen = [{"paid": 0}]
        while len(seen) < 4:  # each time later ones are paid
            (row,) = rows(tmp_path, "select asked, sold, paid from stock, till")
            seen += [row] if row["paid"] > seen[-1]["paid"] else []
    finally:
        for run in runs:
            run.kill()
    for row in seen[1:]:
        assert row["asked"] >= row["sold"] >= row["paid"]


@pytest.mark.parametrize(
    "query",
    [
        "copy (select 1 as one) to 'stolen.csv'",
        "select * from read_csv('secret.csv')",
        "attach 'other.db' as other",
        "export database 'everything'",
        "install httpfs",
        "set enable_external_access = true",
    ],
)
def test_a_query_reaches_no_file(folder: Path, query: str) -> None:
    (folder / "secret.csv").write_text("a\n1\n")
    before = sorted(folder.iterdir())
    said = immortal(folder, "sql", query, status=1)
    assert "--unsealed lets it" in said
    assert sorted(folder.iterdir()) == before


def test_unsealed_it_does(folder: Path) -> None:
    (folder / "rates.csv").write_text("word,rate\nred,7\n")
    assert "7" in immortal(folder, "sql", "--unsealed", "select rate from read_csv('rates.csv')")
