"""`immortal what-if --cone`: what followed, in all services, from the calls that would be others."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from immortal.cli import main
from immortal.coordinator.instances.registry import Registry
from tests.helpers.recorded import Instances, load_module, write_module

CHAIN = """
from immortal import Immortal, impulse, peer, rpc


class Desk(Immortal):
    stock = peer(lambda: Stock, "stock")
    mail = peer(lambda: Mail, "mail")
    done_count: int

    def __init__(self) -> None:
        self.done_count = 0

    @impulse
    def order(self, number: int) -> None:
        self.stock.take.fork(number)

    @rpc
    def done(self, number: int) -> None:
        self.done_count += 1
        self.mail.send.fork(-number)


class Stock(Immortal):
    desk = peer(Desk, "desk")
    mail = peer(lambda: Mail, "mail")

    @rpc
    def take(self, number: int) -> None:
        if number % 2:
            self.mail.send.fork(number)
        self.desk.done.fork(number)


class Mail(Immortal):
    sent: list[int]

    def __init__(self) -> None:
        self.sent = []

    @rpc
    def send(self, number: int) -> None:
        self.sent.append(number)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Ten orders, each with all that came of it."""
    name = write_module(tmp_path, CHAIN)
    module = load_module(tmp_path, name)
    instances = Instances(tmp_path / "logs")
    classes = {"desk": module.Desk, "stock": module.Stock, "mail": module.Mail}
    made = {instance: instances.start(instance, cls) for instance, cls in classes.items()}
    for number in range(1, 11):
        made["desk"].impulse("order", number)
    assert len(made["mail"].app.sent) == 15
    instances.close()
    registry = Registry(tmp_path / "home")
    for instance, cls in classes.items():
        registry.register(instance, "tcp://127.0.0.1:*", log=tmp_path / "logs" / instance / "log")
        registry.remember_app(instance, f"{name}:{cls.__name__}")
    return tmp_path


def variant(folder: Path, before: str, after: str) -> str:
    assert before in CHAIN
    return f"{write_module(folder, CHAIN.replace(before, after))}:Desk"


def what_if(folder: Path, *arguments: str, status: int = 3) -> str:
    with contextlib.chdir(folder):
        result = CliRunner().invoke(main, ["--home", "home", "what-if", "desk", *arguments])
    assert result.exit_code == status, (result.output, result.exception)
    return result.stdout


def cone(folder: Path, *arguments: str, status: int = 3) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(what_if(folder, *arguments, "--cone", "--json", status=status))["cone"]
    return found


def counts(found: dict[str, Any]) -> dict[str, dict[str, int]]:
    return {one["name"]: {each["method"]: each["count"] for each in one["by_method"]} for one in found["services"]}


def test_what_followed_is_found_in_all_services_and_nothing_else(folder: Path) -> None:
    app = variant(folder, "take.fork(number)", "take.fork(min(number, 5))")
    found = cone(folder, "--app", app)
    # orders 6 to 10; the odd ones of them made two mails each
    assert counts(found) == {"stock": {"Stock.take": 5}, "mail": {"Mail.send": 7}, "desk": {"Desk.done": 5}}
    assert found["services"][0]["name"] == "stock"
    callers = {one["name"]: one["callers"] for one in found["services"]}
    assert callers == {"stock": ["desk"], "mail": ["desk", "stock"], "desk": ["stock"]}
    assert (found["client_answers"], found["notes"]) == (0, [])
    text = what_if(folder, "--app", app, "--cone")
    first = found["services"][0]["first"]
    place = f"record {first['record']}, message {first['message']}"
    assert f"  stock: 5 messages, from {place} on, of desk: Stock.take 5\n" in text
    shown = json.loads(what_if_shown(folder, "stock", first["record"]))
    assert "take" in json.dumps(shown)
    assert "(6)" in json.dumps(shown) or "[6]" in json.dumps(shown)


def what_if_shown(folder: Path, name: str, record: int) -> str:
    with contextlib.chdir(folder):
        arguments = ["log", "show", name, "--from", str(record), "--to", str(record), "--json"]
        result = CliRunner().invoke(main, ["--home", "home", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_call_that_would_not_be_made_takes_what_followed_with_it(folder: Path) -> None:
    app = variant(folder, "self.stock.take.fork(number)", "self.stock.take.fork(number) if number != 10 else None")
    assert counts(cone(folder, "--app", app)) == {
        "stock": {"Stock.take": 1}, "mail": {"Mail.send": 1}, "desk": {"Desk.done": 1},
    }  # fmt: skip


def test_one_that_would_come_in_addition_is_said_to_be_unknown(folder: Path) -> None:
    app = variant(folder, "self.done_count += 1", "self.done_count += 1\n        self.mail.send.fork(0)")
    found = cone(folder, "--app", app)
    assert found["services"] == []
    assert found["notes"] == ["10 calls would come in addition: no log says what would follow from that"]
    assert "  nothing\n" in what_if(folder, "--app", app, "--cone")


def test_no_difference_and_no_question(folder: Path) -> None:
    same = variant(folder, "done_count += 1", "done_count += 2 - 1")
    assert cone(folder, "--app", same, status=0)["services"] == []
    assert json.loads(what_if(folder, "--app", same, "--json", status=0))["cone"] is None


def test_a_service_that_is_not_here_is_said(folder: Path) -> None:
    with contextlib.chdir(folder):
        result = CliRunner().invoke(main, ["--home", "home", "unregister", "mail"])
    assert result.exit_code == 0, result.output
    found = cone(folder, "--app", variant(folder, "take.fork(number)", "take.fork(min(number, 5))"))
    assert counts(found) == {"stock": {"Stock.take": 5}, "desk": {"Desk.done": 5}}
    assert any(note.startswith("mail can't be looked into: ") for note in found["notes"])


def test_code_that_does_not_do_what_it_did_leaves_the_rest_unknown(folder: Path) -> None:
    """The new code may have taken the place of the old one: what a service is replayed with is its own app."""
    registry = Registry(folder / "home")
    registry.remember_app("stock", "nowhere:Stock")
    found = cone(folder, "--app", variant(folder, "take.fork(number)", "take.fork(min(number, 5))"))
    assert [one["name"] for one in found["services"]] == ["stock"]
    assert any(note.startswith("what followed from them in stock is not known: ") for note in found["notes"])
