"""Replays of a log with calls that failed: the same code does the same again, mended code is said to be mended."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from immortal import Immortal, rpc
from immortal.cli import main
from immortal.coordinator.instances.registry import Registry
from immortal.log import open_reader
from immortal.protocol.verdicts import VerdictKind
from immortal.testing import Environment, ReplayDiffers, assert_replays
from tests.helpers.recorded import Instances, load_module, write_module

DEADLINE_S = 30.0
SOURCE = """
import immortal
from immortal import CalleeFailed, Immortal, impulse, peer, rpc


class Shop(Immortal):
    sold: int
    price: int

    def __init__(self) -> None:
        self.sold = 0
        self.price = 100

    @rpc
    def sell(self, count: int) -> int:
        self.sold += count
        self.till.noted.fork(count)
        return self.price // count

    @rpc(on_error="keep")
    def refund(self, count: int) -> None:
        self.sold -= count
        if count > 5:
            raise ValueError(f"{count} are too many")

    till = peer(lambda: Till, "till")


class Till(Immortal):
    shop = peer(Shop, "shop")
    log: list[str]

    def __init__(self) -> None:
        self.log = []

    @impulse
    async def buy(self, count: int) -> None:
        try:
            await immortal.step(self.note, f"paid {await self.shop.sell(count)}")
        except CalleeFailed as error:
            await immortal.step(self.note, f"not sold: {error.type_name}")

    @impulse
    def back(self, count: int) -> None:
        self.shop.refund.fork(count)

    @impulse
    def send(self, count: int) -> None:
        self.shop.sell.fork(count)

    @impulse
    def log_at(self, count: int) -> None:
        self.log.append(str(1 // count))

    @rpc
    def note(self, text: str) -> None:
        self.log.append(text)

    @rpc
    def noted(self, count: int) -> None:
        self.log.append(f"noted {count}")
"""
UNTRUE = ("return self.price // count", "return self.price // (count or 1)")


class Home:
    """A registry with a shop and a till that have run; calls failed before and behind the shop's second checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.name = write_module(folder, SOURCE)
        module = load_module(folder, self.name)
        instances = Instances(folder, fails_alone=True)
        shop = instances.start("shop", module.Shop)
        till = instances.start("till", module.Till)
        for _ in range(2):
            till.impulses([("buy", (2,)), ("buy", (0,)), ("buy", (4,)), ("back", (1,)), ("back", (6,))])
            till.impulses([("send", (0,)), ("send", (0,)), ("send", (5,))])
            shop.checkpoint()
            till.checkpoint()
        till.impulses([("buy", (0,)), ("back", (7,)), ("buy", (10,))])
        self.sold = shop.app.sold
        self.log = list(till.app.log)
        instances.close()
        registry = Registry(folder)
        for name, app in (("shop", "Shop"), ("till", "Till")):
            registry.register(name, "tcp://127.0.0.1:*")
            registry.remember_app(name, f"{self.name}:{app}")
        with open_reader(folder / "shop" / "log", "shop") as reader:
            self.verdicts = list(reader.summary().verdicts)

    def run(self, *arguments: object, status: int = 0) -> str:
        with contextlib.chdir(self.folder):
            result = CliRunner().invoke(main, ["--home", str(self.folder), *map(str, arguments)])
        assert result.exit_code == status, (result.output, result.exception)
        assert "warning" not in result.stderr
        return result.stdout

    def json(self, *arguments: object, status: int = 0) -> dict[str, Any]:
        values: dict[str, Any] = json.loads(self.run(*arguments, "--json", status=status))
        return values

    def variant(self, *changes: tuple[str, str], cls: str = "Shop") -> str:
        source = SOURCE
        for before, after in changes:
            assert before in source
            source = source.replace(before, after)
        return f"{write_module(self.folder, source)}:{cls}"

    def sold_at(self, place: str) -> int:
        state = self.json("replay", "shop", "--checkpoint", 1, "--to", place, "--state")["state"]
        sold: int = state["state"]["sold"]
        return sold


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    return Home(tmp_path_factory.mktemp("home"))


def test_the_log_has_calls_that_failed(home: Home) -> None:
    kinds = [verdict.kind for verdict in home.verdicts]
    assert (kinds.count(VerdictKind.UNDONE), kinds.count(VerdictKind.KEPT)) == (7, 3)
    assert home.log.count("not sold: ZeroDivisionError") == 3
    assert home.sold == 2 * (2 + 4 + 5 - 1 - 6) + 10 - 7


# --- the same code ---------------------------------------------------------------------------------------------------


def test_verify_proves_it(home: Home) -> None:
    for name in ("shop", "till"):
        described = home.json("verify", name, "--all")
        assert described["same"]
        assert [section["failed_now"] for section in described["sections"]] == [[]] * 3
        assert sum(section["messages"] for section in described["sections"]) >= 20
    assert home.run("verify", "shop", "--peer-log", "till").splitlines()[-1].startswith("shop: the same, in ")


def test_replay_comes_to_the_same_state(home: Home) -> None:
    described = home.json("replay", "shop", "--checkpoint", 1, "--state")
    assert described["state"]["state"]["sold"] == home.sold
    assert (described["failed_now"], described["failure"]) == ([], None)
    assert home.run("replay", "shop").count("\n") == 4  # where it went, and what it made for whom


def test_the_state_before_and_behind_each_call_that_failed(home: Home) -> None:
    for verdict in home.verdicts:
        if verdict.message_index == 0:
            continue
        at, before = (f"{verdict.sequence_id}:{verdict.message_index - back}" for back in (0, 1))
        took = int(verdict.text.split()[0]) if verdict.kind is VerdictKind.KEPT else 0
        assert home.sold_at(at) == home.sold_at(before) - took


def test_the_debugger_stops_at_the_call_that_failed(home: Home) -> None:
    verdict = next(each for each in home.verdicts if each.kind is VerdictKind.UNDONE)
    place = f"{verdict.sequence_id}:{verdict.message_index}"
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "immortal",
            "--home",
            str(home.folder),
            "replay",
            "shop",
            "--to",
            place,
            "--break",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=home.folder,
    )
    stdout, stderr = process.communicate("p 'count is', count\nc\n", DEADLINE_S)
    assert process.returncode == 0, stderr
    assert "('count is', 0)" in stdout
    assert "did not fail when it was handled" not in stdout


def test_a_recorded_log_replays_in_a_test(home: Home, tmp_path: Path) -> None:
    home.run("log", "export", "shop", tmp_path / "shop.log")
    module = sys.modules[home.name]
    assert_replays(tmp_path / "shop.log", module.Shop)
    assert_replays(home.folder / "till" / "log", module.Till)


def test_a_call_that_fails_now_alone_is_found(home: Home, tmp_path: Path) -> None:
    failing = home.variant(("self.sold += count", "assert count != 4, 'no four'; self.sold += count"))
    described = home.json("verify", "shop", "--app", failing, "--all", status=3)
    news = [each for section in described["sections"] for each in section["failed_now"]]
    assert [(each["method"], each["type"], each["text"]) for each in news] == [
        ("Shop.sell", "AssertionError", "no four")
    ] * 2
    text = home.run("verify", "shop", "--app", failing, "--all", status=3)
    place = f"record {news[0]['record']}, message {news[0]['message']}"
    assert (
        f"  DIVERGED: Shop.sell at {place} did not fail when it was handled, and fails now: AssertionError: no four"
        in text.splitlines()
    )
    home.run("log", "export", "shop", tmp_path / "shop.log")
    module, _, _ = failing.partition(":")
    with pytest.raises(ReplayDiffers, match=f"Shop.sell at {place} did not fail when it was handled"):
        assert_replays(tmp_path / "shop.log", load_module(home.folder, module).Shop)


def test_what_fails_in_a_running_instance_is_no_news_to_who_follows_it(tmp_path: Path) -> None:
    home = Home(tmp_path)
    with open_reader(tmp_path / "till" / "log", "till") as reader:
        last = reader.summary().last_sequence_id
    command = ["replay", "till", "--to", str(last + 8), "--follow", "--json"]
    process = subprocess.Popen(
        [sys.executable, "-m", "immortal", "--home", str(tmp_path), *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )
    try:
        module = sys.modules[home.name]
        instances = Instances(tmp_path, fails_alone=True)
        instances.start("shop", module.Shop)
        till = instances.start("till", module.Till)
        for count in (0, 1, 0, 2):
            till.impulse("log_at", count)
        for _ in range(4):
            till.impulse("log_at", 1)
        instances.close()
        out, error = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, error
    described = json.loads(out)
    assert (described["last_record"], described["failed_now"]) == (last + 8, [])


# --- other code ------------------------------------------------------------------------------------------------------


def test_the_same_code_fails_in_the_same_way(home: Home) -> None:
    for name, cls in (("shop", "Shop"), ("till", "Till")):
        values = home.json("what-if", name, "--app", f"{home.name}:{cls}")
        assert (values["same"], values["fates"], values["exception"]) == (True, [], None)
        assert values["equal"] > 10


def test_mended_code_is_said_to_be_mended(home: Home) -> None:
    mended = home.variant(UNTRUE)
    values = home.json("what-if", "shop", "--app", mended, "--limit", 100, status=3)
    (fates,) = values["fates"]
    assert (fates["method"], fates["fate"], fates["count"]) == ("Shop.sell", "works now", 7)
    assert (fates["first"]["old"]["type"], fates["first"]["new"]) == ("ZeroDivisionError", None)
    assert fates["first"]["input"].startswith("Shop.sell(0) as call ")
    # Who waited gets another answer; what the call makes is made.
    assert values["differences"] == {"added": 7, "missing": 0, "changed": 3}
    changed = [each for each in values["first"] if each["kind"] == "changed"]
    assert all("~failed" in each["old"] and "100" in each["new"] for each in changed)
    text = home.run("what-if", "shop", "--app", mended, status=3)
    first = next(each for each in home.verdicts if each.kind is VerdictKind.UNDONE)
    place = f"record {first.sequence_id}, message {first.message_index}"
    line = next(each for each in text.splitlines() if "would not fail: " in each)
    assert line.startswith(f"7 calls of Shop.sell would not fail: the first is {place}: Shop.sell(0) as call ")
    assert line.endswith("; was ZeroDivisionError: integer division or modulo by zero")
    assert text.splitlines()[-1].endswith("; of the calls that came in 7 would not fail")


def test_what_fails_in_another_way_and_what_fails_too(home: Home) -> None:
    other = home.variant(("self.sold += count", "self.sold += {0: 'none'}.get(count, count); assert count != 10"))
    values = home.json("what-if", "shop", "--app", other, status=3)
    by_fate = {each["fate"]: each for each in values["fates"]}
    assert {fate: each["count"] for fate, each in by_fate.items()} == {"fails in another way": 7, "fails now": 1}
    assert "TypeError: unsupported operand" in by_fate["fails in another way"]["first"]["new"]["trace"]
    assert values["state"] == [{"path": "sold", "old": home.sold, "new": home.sold - 10}]
    text = home.run("what-if", "shop", "--app", other, status=3)
    assert "a call of Shop.sell would fail that did not: record " in text
    assert "7 calls of Shop.sell would fail in another way: the first is record " in text


def test_a_step_that_fails_now_is_undone_and_what_waits_goes_on(home: Home) -> None:
    failing = home.variant(("self.log.append(text)", "self.log.append(text); assert text != 'paid 50'"), cls="Till")
    values = home.json("what-if", "till", "--app", failing, status=3)
    (fates,) = values["fates"]
    assert (fates["method"], fates["fate"], fates["count"]) == ("Till.note", "fails now", 2)
    assert (values["differences"], values["unanswered"]) == ({"added": 0, "missing": 0, "changed": 0}, [])
    changed = [each["new"] for each in values["state"]]
    assert changed == ["not sold: AssertionError"] * 2


def test_nothing_but_what_fails_is_different(tmp_path: Path) -> None:
    home = Home(tmp_path)
    other = home.variant(('raise ValueError(f"{count} are too many")', 'raise KeyError("too many")'))
    values = home.json("what-if", "shop", "--app", other, status=3)
    assert (values["differences"], values["state"]) == ({"added": 0, "missing": 0, "changed": 0}, [])
    text = home.run("what-if", "shop", "--app", other, status=3)
    assert text.splitlines()[-1] == (
        f"different: what fails; all {values['equal']} calls made are the same, so is the state; "
        "of the calls that came in 3 would fail in another way"
    )


def test_a_part_of_the_log_counts_only_its_own(home: Home) -> None:
    mended = home.variant(UNTRUE)
    (whole,) = home.json("what-if", "shop", "--app", mended, status=3)["fates"]
    last = next(each.sequence_id for each in home.verdicts if each.kind is VerdictKind.UNDONE)
    (first,) = home.json("what-if", "shop", "--app", mended, "--to", last, status=3)["fates"]
    (behind,) = home.json("what-if", "shop", "--app", mended, "--from", 3, status=3)["fates"]
    assert 0 < first["count"] < whole["count"]
    assert behind["count"] == 1


def test_old_code_that_fails_where_it_did_not_is_none_to_compare_with(home: Home) -> None:
    failing = home.variant(("self.sold += count", "assert count != 4, 'no four'; self.sold += count"))
    values = home.json("what-if", "shop", "--app", f"{home.name}:Shop", "--old-app", failing, status=1)
    assert values["old_exception"]["input"].startswith("Shop.sell(4) as call ")
    assert "AssertionError: no four" in values["old_exception"]["text"]
    assert values["first"] == []


# --- in tests --------------------------------------------------------------------------------------------------------


class Counter(Immortal):
    count: int

    def __init__(self) -> None:
        self.count = 0

    @rpc
    def add(self, number: int) -> None:
        self.count += number
        if number < 0:
            raise ValueError(f"no {number}")


def test_an_environment_whose_calls_fail_is_replayed_with_them(tmp_path: Path) -> None:
    with Environment(fail_alone=True) as env:
        counter = env.start(Counter, "counter")
        for number in (3, -1, 4, -2):
            counter.send(Counter.add, number)
        env.run()
        assert counter.state.count == 7
        assert len(counter.dead_letters) == 2
        env.check_replays()
        counter.export_log(tmp_path / "counter.log")
    assert_replays(tmp_path / "counter.log", Counter)
