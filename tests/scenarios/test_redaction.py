"""A marker is in an argument, a result, an effect, a state and a field: no reader of the logs shows it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import chdir, closing
from pathlib import Path
from urllib.parse import urlencode

import pytest
from click.testing import CliRunner

pytest.importorskip("duckdb")
pytest.importorskip("pyspark")

from immortal.cli import main
from immortal.cli.doctor import _redaction
from immortal.coordinator.instances.registry import Registry
from immortal.protocol import redaction
from immortal.protocol.redaction import REDACTED
from immortal.replay.why import Explainer
from immortal.testing import Environment
from tests.helpers.browser import WebServer, csrf_of
from tests.helpers.cli import HOME
from tests.helpers.homes import write_home
from tests.helpers.planted import InProcess
from tests.helpers.recorded import load_module
from tests.helpers.spark import rows_here

MARK = "xyzzy"
APP = """
import asyncio
from dataclasses import dataclass

import immortal
from immortal import Immortal, peer, rpc


@dataclass
class Address:
    city: str
    street: str


@dataclass
class Order:
    item: str
    note: str


def charge(card: str) -> str:
    return f"receipt of {card}"


class Till(Immortal):
    last: str = ""

    @rpc
    def pay(self, item: str, card: str, address: Address) -> None:
        self.last = card

    @rpc
    def receipt(self, item: str) -> str:
        return f"receipt for {self.last}"

    @rpc(on_error="keep")
    def fail(self, item: str, card: str) -> None:
        raise ValueError("no")


class Shop(Immortal):
    till = peer(Till, "till")
    orders: dict[str, Order]
    token: str = ""
    count: int = 0

    def __init__(self) -> None:
        self.orders = {}

    @rpc
    async def buy(self, item: str, card: str, note: str) -> str:
        await immortal.step(self.keep, item, card, note)
        self.till.pay.fork(item, card, Address("Bern", card))
        self.till.fail.fork(item, card)
        found = await self.till.receipt(item)
        await immortal.effect(charge, card)
        return found

    def keep(self, item: str, card: str, note: str) -> None:
        self.orders[item] = Order(item, note)
        self.token = card
        self.count += 1

    @rpc
    async def wait(self, card: str) -> None:
        await asyncio.sleep(1e6)
"""
RULES = [
    *("Till.pay.card", "Till.pay.address.street", "Till.receipt.return", "Till.fail.card", "Till.last"),
    *("Shop.buy.card", "Shop.buy.note", "Shop.buy.return", "Shop.wait.card", "Shop.keep"),
    *("Shop.orders.*.note", "Shop.token", "Shop.charge"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("redaction")
    (folder / "redacted_app.py").write_text(APP)
    changed = APP.replace("= Order(item, note)", "= Order(item, note + '!')").replace(
        "fork(item, card,", "fork('x', '?',"
    )
    (folder / "redacted_app2.py").write_text(changed)
    others = dict(redaction.parameters)
    redaction.parameters.clear()  # other tests have classes of these names
    app = load_module(folder, "redacted_app")
    with chdir(folder), Environment(fail_alone=True) as env:
        env.start(app.Till, "till")
        shop = env.start(app.Shop, "shop", effects={app.charge: app.charge})
        shop.call(app.Shop.buy, "tea", f"{MARK}-card", f"{MARK}-note")
        shop.begin(app.Shop.wait, f"{MARK}-wait")
        env.run()
        write_home(env, folder / HOME, {"till": "redacted_app:Till", "shop": "redacted_app:Shop"})
    (folder / redaction.FILE_NAME).write_text(f"hide = {json.dumps(RULES)}\n")
    with pytest.MonkeyPatch.context() as patch, chdir(folder):
        patch.setenv("PYTHONPATH", os.pathsep.join([str(folder), str(Path(__file__).parents[2])]))
        patch.setattr(redaction.shared_registry, "chosen_home", folder / HOME)
        redaction.set_rules(None)
        yield folder
    redaction.parameters.update(others)
    redaction.set_rules(None)


def immortal(*arguments: str, status: int = 0) -> str:
    """Run a command; its output must hide something, and have no marker."""
    done = CliRunner().invoke(main, ["--home", HOME, *arguments])
    assert done.exit_code == status, (done.output, done.exception)
    assert MARK not in done.output
    assert MARK.encode().hex() not in done.output.replace(" ", "")
    return done.output


def rows(query: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in immortal("sql", query, "--json").splitlines()]


def test_records(folder: Path) -> None:
    shown = immortal("log", "show", "shop")
    assert "Shop.buy('tea', [redacted], [redacted])" in shown
    assert "the answer [redacted] of Till.receipt" in shown
    assert "charge([redacted]) returned [redacted]" in shown
    shown = immortal("log", "show", "till", "--json")
    assert json.dumps(["tea", REDACTED, {"city": "Bern", "street": REDACTED}]) in shown


def test_sql(folder: Path) -> None:
    assert rows("select 1 from messages where contains(hex(arguments), '78797A7A79')") == []
    messages = rows("select method, arguments, arguments_json from messages")
    assert {"item": "tea", "card": REDACTED} in [json.loads(str(row["arguments_json"] or "{}")) for row in messages]
    assert rows("select o.item, o.note, s.count, s.token from shop.orders o, shop s") == [
        {"item": "tea", "note": REDACTED, "count": 1, "token": REDACTED}
    ]
    assert [row["arguments"] for row in rows("select * from waiting")] == [json.dumps([REDACTED])]


def test_dead_letters(folder: Path) -> None:
    (letter,) = json.loads(immortal("dead-letters", "till", "--json"))
    assert REDACTED in immortal("dead-letters", "till", "show", letter["id"])
    (line,) = map(json.loads, immortal("dead-letters", "till", "export").splitlines())
    assert line["message"]["arguments"] == {"item": "tea", "card": REDACTED}
    assert line["message_hex"] == REDACTED


def test_traces(folder: Path) -> None:
    for form in ("perfetto", "otlp"):
        immortal("trace", "export", "shop", "till", f"--{form}", f"{form}.json")
        assert MARK not in (folder / f"{form}.json").read_text()
    assert "charge([redacted])" in (folder / "otlp.json").read_text()


def test_a_replay_and_other_code(folder: Path) -> None:
    state = json.loads(immortal("replay", "shop", "--state", "--json").splitlines()[-1])
    assert REDACTED in json.dumps(state)
    compared = json.loads(immortal("what-if", "shop", "--app", "redacted_app2:Shop", "--json", status=3))
    assert {"path": "orders['tea'].note", "old": REDACTED, "new": REDACTED} in compared["state"]
    (first,) = compared["first"]
    assert first["old"] == f"Till.pay({', '.join([REDACTED] * 3)})"
    assert {one["old"] for one in first["arguments"]} == {REDACTED}


def test_questions_about_moments(folder: Path) -> None:
    with closing(InProcess(Registry(folder / HOME))) as sessions:
        last = sessions.ask("shop", "overview")["last"]
        told = [sessions.ask("shop", "moment", record=one, index=None) for one in range(1, last + 1)]
        for path in ("token", "orders['tea'].note"):
            told.append(sessions.ask("shop", "watch", path=path, first=1, last=last))
        told += [sessions.ask("shop", "last_change", record=last, index=0, path="token")]
        told += [sessions.ask("shop", "evaluate", record=last, index=0, expression="self.token")]
        told += [sessions.ask("shop", "minimal", record=last, index=0, path="token")]
        told.append(repr(Explainer(Registry(folder / HOME), sessions).explain("shop", "token")))
        assert MARK not in json.dumps(told, default=repr)
        assert json.dumps(told, default=repr).count(REDACTED) > 10
        found = sessions.ask("shop", "evaluate", record=last, index=0, expression="bool(self.token)")
        assert found["value"]["text"] == "true"


def test_a_rule_for_nothing_and_a_wrong_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (finding,) = _redaction(Registry(folder / HOME))  # the effect is in no class
    assert "'Shop.charge'" in finding.what
    (folder / "wrong.toml").write_text("hide = 3")
    monkeypatch.setenv(redaction.FILE_VARIABLE, str(folder / "wrong.toml"))
    shown = immortal("log", "show", "till")
    assert "hide = 3 came, a list was expected: all values are hidden" in shown
    assert "'tea'" not in shown


def test_the_page(folder: Path) -> None:
    pytest.importorskip("jinja2")
    server = WebServer(folder)
    try:
        paths = ["messages", "travel", "timeline.json?from=0&to=9999999999999999&re=tea", "executions"]
        shown = [
            server.ask(f"/i/shop/{path}")
            for path in (*paths, "m/3/0", "travel/watch?at=3:0&path=token", "m/2/0/followed")
        ]
        shown += [server.ask("/i/till/dead-letters"), server.ask("/i/till/m/1/0/arguments.json")]
        form = {"csrf": csrf_of(server.ask("/sql")[1]), "query": "select * from shop, till, shop.orders"}
        shown.append(server.ask("/sql", "POST", urlencode(form)))
    finally:
        server.stop()
    assert [text for status, text, _ in shown if status != 200] == []
    assert all(REDACTED in text for _, text, _ in (shown[0], shown[1], shown[-1]))
    assert MARK not in repr(shown)


def test_spark(folder: Path) -> None:
    logs = [folder / HOME]
    found = rows_here("messages", *logs, decode="till=redacted_app:Till,shop=redacted_app:Shop")
    assert MARK not in repr(found)
    assert REDACTED in repr([row["arguments"] for row in found])
    (typed,) = rows_here("messages", *logs, method="Till.pay")
    assert (typed["item"], typed["card"], typed["address"]) == ("tea", None, {"city": "Bern", "street": None})
    assert MARK in repr(rows_here("messages", *logs, method="Till.pay", plain="true"))
    redaction.set_rules(None)
