"""`immortal what-if --fleet`: changed code over the logs of a home, and what can't be done, in words."""

from __future__ import annotations

import contextlib
import html
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import duckdb
import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from immortal import testing
from immortal.cli import main
from immortal.coordinator.core.interfaces import LogSummary
from immortal.coordinator.instances.registry import Registry
from immortal.log import LogReader
from immortal.replay.fleet import opening, player
from immortal.replay.plan import ReplayError
from tests.helpers.at_terminal import AtTerminal
from tests.helpers.fleet import flip_byte
from tests.helpers.recorded import Instances, load_module, write_module

SHOP = """
import socket
from immortal import Immortal, impulse, peer, rpc


class Till(Immortal):
    sold: dict[str, int]

    def __init__(self) -> None:
        self.sold = {}

    @rpc
    def sell(self, item: str, count: int) -> int:
        self.sold[item] = self.sold.get(item, 0) + count
        return self.sold[item]


class Stock(Immortal):
    left: dict[str, int]

    def __init__(self) -> None:
        self.left = {"tea": 20}

    @rpc
    def take(self, item: str, count: int) -> bool:
        if self.left.get(item, 0) < count:
            return False
        self.left[item] -= count
        print(f"{count} taken")  # in no report
        return True


class Shop(Immortal):
    stock = peer(Stock, "stock")
    till = peer(Till, "till")
    totals: list[int]

    def __init__(self) -> None:
        self.totals = []

    @rpc
    def note(self, total: int) -> None:
        self.totals.append(total)

    @impulse
    async def order(self, item: str, count: int) -> None:
        if await self.stock.take(item, count):
            self.note.fork(await self.till.sell(item, count))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Six orders of 1 to 6, and the registry of the three services."""
    name = write_module(tmp_path, SHOP)
    module = load_module(tmp_path, name)
    instances = Instances(tmp_path / "logs", fails_alone=True)
    classes = {"till": module.Till, "stock": module.Stock, "shop": module.Shop}
    made = {instance: instances.start(instance, cls) for instance, cls in classes.items()}
    for count in range(1, 7):
        made["shop"].impulse("order", "tea", count)
    assert made["till"].app.sold == {"tea": 15}
    instances.close()
    registry = Registry(tmp_path / "home")
    for instance, cls in classes.items():
        registry.register(instance, "tcp://127.0.0.1:*", log=tmp_path / "logs" / instance / "log")
        registry.remember_app(instance, f"{name}:{cls.__name__}")
    return tmp_path


def variant(folder: Path, before: str = "", after: str = "", cls: str = "Shop") -> str:
    assert before in SHOP
    return f"{write_module(folder, SHOP.replace(before, after))}:{cls}"


def what_if(folder: Path, *arguments: str, status: int) -> str:
    with contextlib.chdir(folder):
        result = CliRunner().invoke(main, ["--home", "home", "what-if", "--fleet", *arguments])
    assert result.exit_code == status, (result.output, result.stderr, result.exception)
    return result.stdout if status in (0, 3) else result.stderr


def values(folder: Path, *arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(what_if(folder, *arguments, "--json", status=3))
    return found


TWICE = "self.stock.take(item, count)", "self.stock.take(item, count := 2 * count)"


def state_of(found: dict[str, Any], name: str) -> dict[str, tuple[Any, Any]]:
    (one,) = [one for one in found["services"] if one["name"] == name]
    return {each["path"]: (each.get("old"), each.get("new")) for each in one["state"]}


def test_a_shop_that_orders_twice_as_much_is_worked_out_to_the_till(folder: Path) -> None:
    found = values(folder, "--change", f"shop={variant(folder, *TWICE)}")
    assert state_of(found, "stock") == {"left['tea']": (5, 0)}
    assert state_of(found, "till") == {"sold['tea']": (15, 20)}
    assert state_of(found, "shop")["totals[0]"] == (1, 2)
    text = what_if(folder, "--change", f"shop={variant(folder, *TWICE)}", status=3)
    assert "sold['tea']: was 15; would be 20" in text
    assert "waits" not in text
    assert text.endswith("\ndifferent\n")


def test_a_change_without_consequences_runs_one_service(folder: Path) -> None:
    text = what_if(folder, "--change", f"shop={variant(folder)}", status=0)
    assert "proved equal, and not run: stock, till" in text
    assert text.endswith("no difference\n")


def test_code_of_another_folder_may_have_the_name_of_the_old(folder: Path) -> None:
    name = Registry(folder / "home").load("shop").app or ""
    (folder / "next").mkdir()
    source = SHOP.replace(*TWICE).replace("self.sold.get(item, 0) + count", "0")  # which the old till does not have
    (folder / "next" / f"{name.partition(':')[0]}.py").write_text(source)
    found = values(folder, "--change", f"shop={name}", "--code", "next")
    assert state_of(found, "till") == {"sold['tea']": (15, 20)}
    assert "nothing of it is in home" in what_if(folder, "--change", f"shop={name}", "--code", "home", status=1)
    shutil.copytree(folder / "next", folder / "next2")
    said = what_if(folder, "--change", f"shop=next2.{name}", "--code", "next", status=1)
    assert "nothing of it is in next" in said


def test_a_new_call_to_a_service_without_a_log_is_listed_and_answered_or_fails(folder: Path) -> None:
    shutil.rmtree(folder / "logs" / "till")
    app = variant(folder, *TWICE)
    found = values(folder, "--change", f"shop={app}")
    assert [one["call"] for one in found["unanswered"]] == [f"Till.sell('tea', {count})" for count in (2, 4, 6, 8)]
    (shop,) = [one for one in found["services"] if one["name"] == "shop"]
    assert [(one["fate"], one["count"]) for one in shop["fates"]] == [("would fail", 4)]
    assert "till has no log here" in shop["fates"][0]["example"]
    (folder / "answers.py").write_text("def answer(call):\n    return call.arguments[1] * 100\n")
    found = values(folder, "--change", f"shop={app}", "--answer", "answers:answer")
    assert state_of(found, "shop")["totals[1]"] == (3, 400)


def test_an_app_of_another_kind_counts_as_one_without_a_log(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = LogReader.summary

    def summary(reader: LogReader) -> LogSummary:
        found = whole(reader)
        return replace(found, extensions=frozenset()) if reader.identity.instance_name == "till" else found

    monkeypatch.setattr(LogReader, "summary", summary)
    monkeypatch.syspath_prepend(folder)
    outcome = testing.what_if(folder / "home", {"shop": variant(folder, *TWICE)})
    assert outcome.notes == ["till counts as a service without a log: its app does not use this SDK, or never started"]
    assert len(outcome.unanswered) == 4


def test_a_check_says_where_it_breaks_first(folder: Path) -> None:
    (folder / "checks.py").write_text(
        "print('in no report')\n\n\n"
        "def check(fleet):\n    assert fleet['till'].sold.get('tea', 0) <= 15, 'sold too much'\n"
    )
    found = values(folder, "--change", f"shop={variant(folder, *TWICE)}", "--check", "checks:check", "--seeds", "3")
    assert found["broken_in_record"] is None
    assert (found["broken"]["service"], found["broken"]["text"]) == ("till", "sold too much")
    (end,) = found["seeds"]["ends"]
    assert (end["seed"], end["count"], end["broken"], end["example"]) == (0, 3, 3, "")
    assert found["seeds"] == {"runs": 3, "different": 0, "broken": 3, "ends": [end]}


def test_a_check_says_the_smallest_prefix_that_breaks_it_under_the_change_alone(folder: Path) -> None:
    (folder / "checks.py").write_text(
        "def check(fleet):\n    assert fleet['till'].sold.get('tea', 0) not in (3, 6, 20), 'a bad number'\n"
        "def typo(fleet):\n    return fleet['tll'].sold\n"
    )
    told = "--change", f"shop={variant(folder, *TWICE)}", "--check"
    found = values(folder, *told, "checks:check")  # the record: 1, 3, 6, 10, 15; the change: 2, 6, 12, 20
    assert found["broken"]["input"].startswith("Till.sell('tea', 4)")
    assert found["broken_in_record"]["input"].startswith("Till.sell('tea', 2)")
    prefix = found["prefix"]
    assert (prefix["service"], prefix["text"], prefix["inputs"]) == ("till", "a bad number", 4)
    assert prefix["input"].startswith("Till.sell('tea', 8)")
    assert prefix["cut"]["till"] == prefix["record"] == 4
    text = what_if(folder, *told, "checks:check", status=3)
    assert "only with the change has 4 inputs from outside, and ends with Till.sell('tea', 8)" in text
    same = variant(folder, "return self.sold[item]", "return 0", "Till")
    found = values(folder, "--change", f"till={same}", *told[2:], "checks:check")
    assert (found["broken"]["record"], found["prefix"]) == (2, None)
    assert "the check can't be made after 'till' at 2023-11-" in what_if(folder, *told, "checks:typo", status=1)


ASKING = SHOP.replace(
    "import socket", "import immortal\n\n\ndef price(count: int) -> int:\n    return count\n\n"
).replace("sell(item, count))", "sell(item, await immortal.effect(price, count)))")


def test_at_a_terminal_results_of_effects_are_asked_for(folder: Path) -> None:
    command = [sys.executable, "-m", "immortal", "--home", "home", "what-if", "--fleet", "--effects", "ask"]
    terminal = AtTerminal([*command, "--change", f"shop={write_module(folder, ASKING)}:Shop", "--seeds", "2"], folder)
    try:
        for count, answers in enumerate((["oh", '"two"', "20"], ["fail"], ["skip"], ["4"], ["5"]), 1):
            for number, answer in enumerate(answers):
                terminal.see(f"shop: price({count}): its result as JSON, or fail, or skip: ")
                terminal.type(f"{answer}\n")
                if number < len(answers) - 1:
                    terminal.see("is not a result: ")
        assert terminal.ended() == 3
    finally:
        terminal.close()
    assert "sold['tea']: was 15; would be 29" in terminal.screen
    assert "price(count=1): returned 20" in terminal.screen
    assert "price(count=2): raised RuntimeError: failed, as you answered" in terminal.screen
    assert "price(count=3): has no result: its handler waits" in terminal.screen
    assert "in 0 of 2 orders" in terminal.screen  # which ask no more


def test_without_a_terminal_nothing_can_be_asked(folder: Path) -> None:
    told = "--change", f"shop={variant(folder)}", "--effects", "ask"
    assert "there is no terminal to ask at: give fail, by-key or MODULE" in what_if(folder, *told, status=1)
    assert "--bisect can't be combined with" in what_if(folder, *told, "--bisect", "a..b", status=2)
    assert "'asl': fail or by-key or ask or a function" in what_if(folder, *told[:3], "asl", status=2)


def test_nothing_leaves(folder: Path) -> None:
    before = "if await self.stock.take(item, count):"
    after = f"socket.create_connection(('127.0.0.1', 9))\n        {before}"
    found = values(folder, "--change", f"shop={variant(folder, before, after)}")
    (shop,) = [one for one in found["services"] if one["name"] == "shop"]
    assert "a what-if refuses" in shop["fates"][0]["example"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("shop=nowhere:Shop", "there is no module 'nowhere'"),
        ("shop=broken:Shop", "'broken:Shop' can't be imported: ZeroDivisionError: division by zero"),
        ("desk=shop:Shop", "'desk' has no log here: shop, stock, till has one"),
    ],
)
def test_what_can_not_be_tried_is_said(folder: Path, change: str, said: str) -> None:
    (folder / "broken.py").write_text("1 / 0\n")
    shutil.copy(
        folder / f"{(Registry(folder / 'home').load('shop').app or '').partition(':')[0]}.py", folder / "shop.py"
    )
    assert said in what_if(folder, "--change", change, status=1)


def test_a_module_that_ends_or_hangs_as_it_is_imported_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "leaves.py").write_text("import sys\nsys.exit(3)\n")
    (folder / "hangs.py").write_text("while True:\n    pass\n")
    told = "--change", f"shop={variant(folder)}"
    assert "'leaves:f' can't be loaded: SystemExit: 3" in what_if(folder, *told, "--effects", "leaves:f", status=1)
    assert "'leaves:Shop' can't be imported: SystemExit: 3" in what_if(folder, "--change", "shop=leaves:Shop", status=1)
    monkeypatch.setattr(player, "_limit_s", 0.1)
    monkeypatch.setattr(opening, "IMPORT_S", 0.2)
    monkeypatch.syspath_prepend(folder)
    before = signal.signal(signal.SIGALRM, player.stop)
    try:
        with pytest.raises(ReplayError, match=r"'hangs:Shop' can't be imported: TimeoutError: ended after 0.2 s"):
            opening.load_definition("hangs:Shop")
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_thread_that_never_ends_does_not_keep_the_command(folder: Path) -> None:
    before = "class Shop(Immortal):"
    app = variant(
        folder, before, f"import threading\nthreading.Thread(target=threading.Event().wait).start()\n{before}"
    )
    assert "proved equal, and not run: stock, till" in what_if(folder, "--change", f"shop={app}", status=0)


def test_a_damaged_record_is_named_with_its_service(folder: Path) -> None:
    flip_byte(folder / "logs" / "stock" / "log", 3)
    said = what_if(folder, "--change", f"shop={variant(folder, *TWICE)}", status=1)
    assert said.startswith("error: stock: record 3 is damaged")


def test_code_that_ends_its_process_is_said(folder: Path) -> None:
    before = "if await self.stock.take(item, count):"
    app = variant(folder, before, f"import os; os._exit(7)\n        {before}")
    assert "the code ended the process of what-if --fleet (status 7)" in what_if(
        folder, "--change", f"shop={app}", status=1
    )


def test_code_that_does_not_return_is_stopped(folder: Path) -> None:
    before = "if await self.stock.take(item, count):"
    app = variant(folder, before, f"while count == 3: pass\n        {before}")
    found = values(folder, "--change", f"shop={app}", "--handler-limit", "0.5")
    (fate,) = next(one for one in found["services"] if one["name"] == "shop")["fates"]
    assert (fate["fate"], fate["count"]) == ("would fail", 1)
    assert "TimeoutError: ended after 0.5 s, the limit in a what-if (--handler-limit)" in fate["example"]
    assert state_of(found, "till") == {"sold['tea']": (15, 18)}  # so that there is tea for six


def test_a_check_that_does_not_return_ends_the_command(folder: Path) -> None:
    (folder / "checks.py").write_text("def check(fleet):\n    while fleet['till'].sold.get('tea', 0) == 3: pass\n")
    told = "--change", f"shop={variant(folder, *TWICE)}", "--check", "checks:check", "--handler-limit", "0.5"
    said = what_if(folder, *told, status=1)
    assert "the check can't be made after 'till' at 2023-11-" in said
    assert "TimeoutError: ended after 0.5 s, the limit in a what-if (--handler-limit)" in said


def test_changed_code_that_raises_is_a_difference(folder: Path) -> None:
    found = values(folder, "--change", f"stock={variant(folder, 'return False', 'raise KeyError(item)', 'Stock')}")
    stock, shop = found["services"]
    assert (stock["name"], stock["fates"][0]["fate"], stock["fates"][0]["count"]) == ("stock", "would fail", 1)
    assert (shop["name"], shop["fates"][0]["fate"]) == ("shop", "would fail")


def test_wrong_options_are_said(folder: Path) -> None:
    assert "such as shop=shop_v2:Shop" in what_if(folder, "--change", "shop", status=2)
    said = what_if(folder, "--change", f"shop={variant(folder)}", "--seeds", "2", "--delays", "longest", status=2)
    assert "--delays longest leaves one order, and --seeds tries many" in said
    assert "a time was expected" in what_if(folder, "--change", f"shop={variant(folder)}", "--from", "3", status=1)
    said = what_if(folder, "--change", f"shop={variant(folder)}", "--without", "nobody", status=1)
    assert "'nobody' is not here: --without can name shop, stock, till" in said
    assert "such as 1-20" in what_if(folder, "--change", f"shop={variant(folder)}", "--orders", "1-many", status=2)


def test_a_page_shows_all_of_it_and_needs_nothing_from_elsewhere(folder: Path) -> None:
    (folder / "checks.py").write_text("def few(fleet):\n    return fleet['till'].sold.get('tea', 0) <= 15\n")
    told = "--change", f"shop={variant(folder, *TWICE)}", "--check", "checks:few", "--seeds", "2"
    what_if(folder, *told, "--html", "page.html", status=3)
    page = html.unescape((folder / "page.html").read_text())
    assert page.count("<svg") == 2
    assert "<script" not in page
    assert "sold['tea']" in page
    assert "the check fails after till, record 4" in page
    assert "in 0 of 2 orders" in page
    assert "shop -> till: Till.sell" in page  # in a chart
    what_if(folder, "--change", f"shop={variant(folder)}", "--html", "page.html", status=0)
    assert "No difference" in (folder / "page.html").read_text()  # a page of ours is replaced
    (folder / "mine.html").write_text("<!doctype html>")
    said = what_if(folder, *told, "--html", "mine.html", status=1)
    assert "mine.html exists and was not written by immortal: give another name, or remove it first" in said
    said = what_if(folder, *told, "--html", "page.html", "--bisect", "a..b", status=2)
    assert "can't be combined with --html, --parquet or --effects ask" in said


@pytest.mark.parametrize(
    ("option", "module", "extra"),
    [("--html", "jinja2", "spark"), ("--parquet", "pyarrow", "sql")],
)
def test_a_file_without_its_extra_names_that(
    folder: Path, monkeypatch: pytest.MonkeyPatch, option: str, module: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    said = what_if(folder, "--change", f"shop={variant(folder)}", option, "there", status=1)
    assert f"{option} needs {module}: " in said
    assert f"immortal-services[{extra}]" in said


def test_an_end_before_the_first_message_is_refused(folder: Path) -> None:
    said = what_if(folder, "--change", f"shop={variant(folder, *TWICE)}", "--to", "1999-01-01", status=1)
    assert "--to: the changed services have no message up to that time: give a later one" in said


def test_code_that_hangs_ends_with_its_command(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    lines = "file = open('pipe', 'w')", "os.kill(os.getppid(), 9)", "time.sleep(10)", "file.write('still here')"
    Path(folder, "hangs.py").write_text("import os, time\ndef check(fleet):\n  " + "\n  ".join(lines))
    told = "--change", f"shop={variant(folder, *TWICE)}", "--check", "hangs:check"
    command = [sys.executable, "-m", "immortal", "--home", "home", "what-if", "--fleet", *told]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    with subprocess.Popen(command, cwd=folder, env=env):
        assert not Path(folder, "pipe").read_text()


@pytest.mark.parametrize("option", ["--html", "--parquet"])
def test_output_into_a_folder_that_is_missing_is_refused_first(folder: Path, option: str) -> None:
    said = what_if(folder, "--change", f"shop={variant(folder)}", option, "missing/page", status=1)
    assert said.splitlines()[-1].endswith("the folder missing does not exist: create it, or give another path")


def test_parquet_tables_have_each_difference_and_are_read_by_duckdb(folder: Path) -> None:
    told = "--change", f"shop={variant(folder, *TWICE)}", "--parquet", "found"
    found = values(folder, *told)
    connection = duckdb.connect()

    def rows(query: str) -> list[tuple[Any, ...]]:
        files = {name: f"'{folder}/found/{name}.parquet'" for name in ("differences", "states", "outcomes")}
        return connection.execute(query.format(**files)).fetchall()

    made = rows("select kind, old, new from {differences} where handler = 'Till.sell' order by number")
    assert made[0][0] == "changed"
    assert made[0][1].startswith("Till.sell('tea', 1) as call")
    assert made[0][2] == "Till.sell('tea', 2) as a new call of shop"
    counts = rows(
        "select kind, count(*) from {differences} where service = 'shop' and handler = 'Till.sell' group by 1"
    )
    assert dict(counts) == {"changed": 4, "missing": 1}
    causes = "select c.service, c.handler from {differences} d join {differences} c on d.cause = c.number"
    assert ("shop", "Stock.take") in rows(f"{causes} where d.service = 'stock'")
    assert rows("select old, new from {states} where service = 'till'") == [("15", "20")]
    assert rows("select sum(recorded), sum(changed), sum(missing) from {outcomes} where handler = 'Till.sell'") == [
        (5, 4, 1)
    ]
    assert rows("select distinct typeof(hour) from {outcomes}") == [("TIMESTAMP WITH TIME ZONE",)]
    assert len(found["differences"]) == rows("select count(*) from {differences}")[0][0]
    assert "found is there already" in what_if(folder, *told, status=1)


# --- which commit --------------------------------------------------------------------------------------------------


def git(folder: Path, *arguments: str) -> str:
    own = ["-c", "user.name=Ada", "-c", "user.email=ada@example.org", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", "-C", str(folder), *own, *arguments], capture_output=True, text=True, check=True)
    return done.stdout


def commits(folder: Path, *changes: tuple[str, str]) -> list[str]:
    """A repository in ``folder``/code with the app, and a commit for each change of its text, which stays."""
    name = (Registry(folder / "home").load("shop").app or "").partition(":")[0]
    (folder / "code" / "src").mkdir(parents=True)
    git(folder / "code", "init", "--quiet")
    source, made = SHOP, []
    for number, change in enumerate([("", ""), *changes]):
        source = source.replace(*change) if change[0] else source + f"\n# {number}\n"
        (folder / "code" / "src" / f"{name}.py").write_text(source)
        git(folder / "code", "add", ".")
        git(folder / "code", "commit", "--quiet", "-m", f"Change {number}")
        made.append(git(folder / "code", "rev-parse", "HEAD").strip())
    return made


NO_CHANGE = "", ""
MISTAKE = "def note(self, total: int)", "def note(self, total: int"


def test_bisect_finds_the_first_commit_that_makes_a_difference(folder: Path) -> None:
    made = commits(folder, NO_CHANGE, NO_CHANGE, TWICE, NO_CHANGE, NO_CHANGE)
    app = f"shop={Registry(folder / 'home').load('shop').app}"
    told = "--change", app, "--code", "code/src", "--bisect"
    found = values(folder, *told, f"{made[0]}..{made[-1]}")
    assert (found["first"]["id"], found["first"]["author"], found["commits"]) == (made[3], "Ada", 5)
    assert state_of(found["outcome"], "till") == {"sold['tea']": (15, 20)}
    assert len(found["tried"]) <= 5
    text = what_if(folder, *told, f"{made[0]}..{made[-1]}", status=3)
    assert text.startswith(f"the first of 5 commits that makes a difference: {made[3][:10]} Change 3\nby Ada, ")
    assert "sold['tea']: was 15; would be 20" in text
    assert what_if(folder, *told, f"{made[0]}..{made[2]}", status=0) == "none of 2 commits makes a difference\n"
    assert f"{made[4][:10]} Change 4, before the range, is bad: begin with an earlier commit" in what_if(
        folder, *told, f"{made[4]}..{made[5]}", status=1
    )
    assert git(folder / "code", "worktree", "list").count("\n") == 1


def test_bisect_names_commits_that_can_not_be_tried(folder: Path) -> None:
    made = commits(folder, NO_CHANGE, MISTAKE, TWICE, MISTAKE[::-1], NO_CHANGE)
    app = f"shop={Registry(folder / 'home').load('shop').app}"
    found = values(folder, "--change", app, "--code=code/src", f"--bisect={made[0]}..{made[-1]}")
    assert found["first"]["id"] == made[4]
    assert [one["id"] for one in found["unknown"]] == made[2:4]
    assert all("can't be imported" in one["problem"] for one in found["unknown"])


def test_bisect_finds_the_commit_that_breaks_a_check(folder: Path) -> None:
    free = "self.left[item] -= count", "self.left[item] -= count // 4"
    made = commits(folder, free, TWICE, NO_CHANGE)
    (folder / "checks.py").write_text("def few(fleet):\n    return fleet['till'].sold.get('tea', 0) <= 25\n")
    names = [f"{one}={Registry(folder / 'home').load(one).app}" for one in ("shop", "stock")]
    told = "--change", names[0], "--change", names[1], "--code", "code/src", "--check", "checks:few"
    found = values(folder, *told, "--bisect", f"{made[0]}..{made[3]}")
    assert found["first"]["id"] == made[2]
    assert found["outcome"]["broken"] is not None


def test_bisect_goes_on_behind_code_that_ends_its_process(folder: Path) -> None:
    end = "if await self.stock.take(item, count):", "if __import__('os')._exit(0):"
    made = commits(folder, end, end[::-1], TWICE)
    told = "--change", f"shop={Registry(folder / 'home').load('shop').app}", "--code", "code/src"
    found = values(folder, *told, "--bisect", f"{made[0]}..{made[3]}")
    assert found["first"]["id"] == made[3]
    assert {one["problem"] for one in found["tried"] if one["id"] == made[1]} == {
        "its process ended with status 0, and printed nothing"
    }


@pytest.mark.parametrize(
    ("git_range", "said"),
    [
        ("main", "a range of commits was expected, such as v1.0..HEAD"),
        ("nowhere..HEAD", "git rev-parse failed: fatal: "),
        ("HEAD..HEAD", "there is no commit in it"),
    ],
)
def test_a_range_that_is_none_is_said(folder: Path, git_range: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    commits(folder)
    (folder / "home.whl").touch()
    told = "--change", f"shop={variant(folder)}", "--code", "code"
    assert said in what_if(folder, *told, "--bisect", git_range, status=1)
    monkeypatch.setenv("GIT_DIR", str(folder / "code" / ".git"))  # as in a hook
    assert "a folder of a git repository was expected" in what_if(
        folder, *told[:3], "home.whl", "--bisect", "a..b", status=1
    )
    assert "git rev-parse failed" in what_if(
        folder, "--change", f"shop={variant(folder)}", "--bisect", "a..b", status=1
    )


# --- as a test ------------------------------------------------------------------------------------------------------


def test_a_fleet_is_asserted_to_be_unchanged(folder: Path) -> None:
    with contextlib.chdir(folder):
        outcome = testing.assert_fleet_unchanged("home", at_least=20)
        assert {one.name for one in outcome.services} == {"shop", "stock", "till"}
        with pytest.raises(AssertionError, match=r"sold\['tea'\]: was 15; would be 20"):
            testing.assert_fleet_unchanged("home", {"shop": variant(folder, *TWICE)})
        with pytest.raises(AssertionError, match="messages were compared, and at least 1,000 were expected"):
            testing.assert_fleet_unchanged("home", at_least=1000)
        Registry(Path("home")).register("idle", "tcp://127.0.0.1:*")
        Registry(Path("home")).remember_app("idle", "nowhere:Idle")  # which never ran
        testing.assert_fleet_unchanged("home")
        with pytest.raises(ReplayError, match="a registry folder was expected"):
            testing.assert_fleet_unchanged("elsewhere")
