"""`immortal what-if`: a log handled by other code, from the command line, with real app processes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from immortal.cli import main
from immortal.coordinator.instances.registry import Registry
from immortal.coordinator.operator import control
from immortal.replay import host
from tests.helpers.processes import DEADLINE_S, House, SocketApp
from tests.helpers.recorded import Instances, load_module, write_module

WORDCOUNT = Path(__file__).parents[2] / "examples" / "wordcount" / "wordcount.py"

TALK = """
from immortal import Immortal, Impulses, impulse, on_primary, peer, rpc


class Feeder(Immortal):
    counter = peer(lambda: Counter, "counter")
    last: str

    def __init__(self) -> None:
        self.last = ""

    @impulse
    def line(self, text: str) -> None:
        self.counter.count.fork(text)

    @rpc
    def reply(self, word: str, count: int) -> None:
        self.last = word

    @rpc
    def long(self, word: str) -> None:
        self.last = word


class Counter(Immortal):
    feeder = peer(Feeder, "feeder")
    words: dict[str, int]

    def __init__(self) -> None:
        self.words = {}

    @rpc
    def count(self, line: str) -> None:
        for word in line.split():
            self.words[word] = self.words.get(word, 0) + 1
            self.feeder.reply.fork(word, self.words[word])
"""

UPGRADE = """
from immortal import Immortal, peer, rpc, upgrades
from {old} import Counter as CounterV1, Feeder


@upgrades(CounterV1)
class Counter(Immortal):
    feeder = peer(Feeder, "feeder")
    counts: dict[str, int]
    total: int

    def __init__(self) -> None:
        self.counts, self.total = {{}}, 0

    @classmethod
    def upgrade(cls, old: CounterV1) -> "Counter":
        new = cls()
        new.counts, new.total = old.words, sum(old.words.values())
        return new

    @rpc
    def count(self, line: str) -> None:
        for word in line.split():
            self.counts[word] = self.counts.get(word, 0) + 1
            self.total += 1
            self.feeder.reply.fork(word, self.counts[word])
"""

LINES = ["The quick brown fox", "jumps over", "the lazy Dog", "", "The end"] * 30


class Log:
    """What the instance ``counter`` has done, in a registry of its own; ``folder`` is where its app lives."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.talk = write_module(folder, TALK)
        module = load_module(folder, self.talk)
        instances = Instances(folder / "logs")
        counter = instances.start("counter", module.Counter)
        feeder = instances.start("feeder", module.Feeder)
        for index in range(0, len(LINES), 5):
            feeder.impulses([("line", (line,)) for line in LINES[index : index + 5]])
            if index == 50:
                counter.checkpoint()
        instances.close()
        registry = Registry(folder / "home")
        registry.register("counter", "tcp://127.0.0.1:*", log=folder / "logs" / "counter" / "log")
        registry.remember_app("counter", f"{self.talk}:Counter")

    def variant(self, *changes: tuple[str, str]) -> str:
        """The name of a module with other code."""
        source = TALK
        for before, after in changes:
            assert before in source
            source = source.replace(before, after)
        return write_module(self.folder, source)

    def what_if(self, *arguments: object, status: int) -> tuple[str, str]:
        return what_if(self.folder, "counter", *arguments, status=status)

    def values(self, *arguments: object, status: int) -> dict[str, Any]:
        values: dict[str, Any] = json.loads(self.what_if(*arguments, "--json", status=status)[0])
        assert values["same"] == (status == 0)
        return values


def what_if(folder: Path, name: str, *arguments: object, status: int) -> tuple[str, str]:
    """(stdout, stderr). The command runs in this process, which spares most of the time; the apps have their own."""
    with contextlib.chdir(folder):
        result = CliRunner().invoke(main, ["--home", "home", "what-if", name, *map(str, arguments)])
    assert result.exit_code == status, (result.output, result.exception)
    return result.stdout, result.stderr


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Log:
    return Log(tmp_path_factory.mktemp("talk"))


def model(lines: list[str]) -> list[list[tuple[str, int]]]:
    """For each line the replies."""
    counts: Counter[str] = Counter()
    replies = []
    for line in lines:
        replies.append([])
        for word in line.split():
            counts[word] += 1
            replies[-1].append((word, counts[word]))
    return replies


# --- outputs and states ----------------------------------------------------------------------------------------------


def test_the_same_code_makes_no_difference(log: Log) -> None:
    copy = log.variant()
    values = log.values("--app", f"{copy}:Counter", status=0)
    made = sum(map(len, model(LINES)))
    assert (values["from_checkpoint"], values["messages"]) == (1, len(LINES) + 1)  # and the initial message
    assert values["equal"] == made
    assert values["differences"] == {"added": 0, "missing": 0, "changed": 0}
    assert (values["first"], values["state"], values["exception"]) == ([], [], None)
    text, _ = log.what_if("--app", f"{copy}:Counter", status=0)
    compared = f"{len(LINES) + 1} messages"
    assert text.splitlines()[-1] == f"no difference in {compared}: {made} calls are the same, and so is the state"
    few, _ = log.what_if("--app", f"{copy}:Counter", "--at-least", "10000", status=1)
    assert f"can't be told: {compared} compared, no difference, at least 10,000 asked for" in few


def test_changed_calls_are_shown_with_what_made_them(log: Log) -> None:
    lower = log.variant(("line.split()", "line.lower().split()"))
    values = log.values("--app", f"{lower}:Counter", "--limit", 1000, status=3)
    was, would_be = model(LINES), model([line.lower() for line in LINES])
    expected = [
        (f"Counter.count({line!r})", f"Feeder.reply{old}", f"Feeder.reply{new}")
        for line, olds, news in zip(LINES, was, would_be, strict=True)
        for old, new in zip(olds, news, strict=True)
        if old != new
    ]
    assert values["differences"] == {"added": 0, "missing": 0, "changed": len(expected)}
    assert [(each["input"], each["old"], each["new"]) for each in values["first"]] == expected
    assert {each["kind"] for each in values["first"]} == {"changed"}
    places = [(each["record"], each["message"]) for each in values["first"]]
    assert places == sorted(places)
    assert values["by_method"] == [
        {"destination": "feeder", "method": "Feeder.reply", "added": 0, "missing": 0, "changed": len(expected)}
    ]
    assert {"path": "words['The']", "old": 60} in values["state"]
    assert {"path": "words['the']", "old": 30, "new": 90} in values["state"]

    text, _ = log.what_if("--app", f"{lower}:Counter", "--limit", 2, status=3)
    record, message = places[0]
    assert (
        f"record {record}, message {message}: Counter.count('The quick brown fox') -> to 'feeder':"
        " was Feeder.reply('The', 1); would be Feeder.reply('the', 1)" in text.splitlines()
    )
    assert f"and {len(expected) - 2} more" in text.splitlines()
    assert "  words['The']: was 60; would be absent" in text.splitlines()


@pytest.mark.parametrize("place", ["folder", "version.whl"])
def test_code_of_the_same_name_from_another_place(log: Log, place: str, tmp_path: Path) -> None:
    changed = TALK.replace("line.split()", "line.lower().split()")
    code = tmp_path / place
    if place == "folder":
        code.mkdir()
        (code / f"{log.talk}.py").write_text(changed)
    else:
        with zipfile.ZipFile(code, "w") as wheel:
            wheel.writestr(f"{log.talk}.py", changed)
    values = log.values("--app", f"{log.talk}:Counter", "--code", code, "--limit", 1000, status=3)
    assert values["differences"]["changed"] > 0
    assert {"path": "words['The']", "old": 60} in values["state"]
    assert {"path": "words['the']", "old": 30, "new": 90} in values["state"]
    wrong = log.talk
    _, said = log.what_if("--app", f"{wrong}:Counter", "--code", log.folder / f"{wrong}.py", status=1)
    assert "is neither a folder nor a wheel" in said


def test_calls_that_are_added_or_missing(log: Log) -> None:
    changed = log.variant(
        ("            self.feeder.reply.fork(word, self.words[word])", "            self.tell(word)"),
        (
            "    @rpc\n    def count(",
            "    def tell(self, word: str) -> None:\n"
            "        if word != 'end':\n"
            "            self.feeder.reply.fork(word, self.words[word])\n"
            "        if word == 'quick':\n"
            "            self.feeder.long.fork(word)\n\n"
            "    @rpc\n    def count(",
        ),
    )
    values = log.values("--app", f"{changed}:Counter", "--limit", 2, status=3)
    assert values["differences"] == {"added": 30, "missing": 30, "changed": 0}
    assert [(row["method"], row["added"], row["missing"]) for row in values["by_method"]] == [
        ("Feeder.long", 30, 0),
        ("Feeder.reply", 0, 30),
    ]
    assert [(each["kind"], each["old"], each["new"]) for each in values["first"]] == [
        ("added", None, "Feeder.long('quick')"),
        ("missing", "Feeder.reply('end', 1)", None),
    ]
    assert values["state"] == []
    text, _ = log.what_if("--app", f"{changed}:Counter", "--limit", 2, status=3)
    assert "would be Feeder.long('quick') in addition" in text
    assert "was Feeder.reply('end', 1); would not be" in text


def test_calls_to_another_destination(log: Log) -> None:
    moved = log.variant(('peer(Feeder, "feeder")', 'peer(Feeder, "other")'))
    values = log.values("--app", f"{moved}:Counter", status=3)
    made = sum(map(len, model(LINES)))
    assert values["differences"] == {"added": made, "missing": made, "changed": 0}
    assert [row["destination"] for row in values["by_method"]] == ["feeder", "other"]


def test_a_part_of_the_log(log: Log) -> None:
    lower = log.variant(("line.split()", "line.lower().split()"))
    whole = log.values("--app", f"{lower}:Counter", "--limit", 1000, status=3)
    from_second = log.values("--app", f"{lower}:Counter", "--from", 2, "--limit", 1000, status=3)
    assert from_second["from_checkpoint"] == 2
    assert 0 < from_second["records"] < whole["records"]
    last = whole["first"][0]["record"] - 1
    values = log.values("--app", f"{lower}:Counter", "--to", last, status=0)
    assert (values["to"], values["records"]) == (last, last + 1)


def test_impulses_between_the_calls_are_no_outputs_of_either_side(tmp_path: Path) -> None:
    talk = write_module(tmp_path, TALK)
    module = load_module(tmp_path, talk)
    instances = Instances(tmp_path / "logs")
    instances.start("counter", module.Counter)
    feeder = instances.start("feeder", module.Feeder)
    for line in ("one", "two", "three"):
        feeder.impulse("line", line)
        feeder.impulse("count", "from outside", to="counter")  # it takes a place in the same stream
    instances.close()
    registry = Registry(tmp_path / "home")
    registry.register("feeder", "tcp://127.0.0.1:*", log=tmp_path / "logs" / "feeder" / "log")
    registry.remember_app("feeder", f"{talk}:Feeder")
    text, _ = what_if(tmp_path, "feeder", "--app", f"{talk}:Feeder", status=0)
    assert "no difference in 13 messages: 3 calls are the same" in text
    other = write_module(
        tmp_path, TALK.replace("self.counter.count.fork(text)", "text == 'two' or self.counter.count.fork(text)")
    )
    values = json.loads(what_if(tmp_path, "feeder", "--app", f"{other}:Feeder", "--json", status=3)[0])
    assert [(each["kind"], each["input"], each["old"]) for each in values["first"]] == [
        ("missing", "Feeder.line('two')", "Counter.count('two')")
    ]


# --- exceptions ------------------------------------------------------------------------------------------------------


def test_calls_that_fail_now_are_findings_and_the_rest_is_compared(log: Log) -> None:
    failing = log.variant(
        ("        for word in", "        assert not line.startswith('jumps'), 'jumpy'\n        for word in")
    )
    values = log.values("--app", f"{failing}:Counter", "--limit", 1000, status=3)
    assert values["exception"] is None
    assert values["differences"] == {"added": 0, "missing": 60, "changed": 0}
    (fates,) = values["fates"]
    assert (fates["method"], fates["fate"], fates["count"]) == ("Counter.count", "fails now", 30)
    assert (fates["first"]["input"], fates["first"]["old"]) == ("Counter.count('jumps over')", None)
    assert (fates["first"]["new"]["kind"], fates["first"]["new"]["text"]) == ("undone", "jumpy")
    assert {"path": "words['over']", "old": 30} in values["state"]
    text, _ = log.what_if("--app", f"{failing}:Counter", "--limit", 1, status=3)
    lines = text.splitlines()
    place = f"record {fates['first']['record']}, message {fates['first']['message']}"
    assert (
        f"30 calls of Counter.count would fail that did not: the first is {place}: Counter.count('jumps over'); "
        "would be AssertionError: jumpy" in lines
    )
    assert "    AssertionError: jumpy" in lines
    equal = sum(map(len, model(LINES))) - 60
    assert lines[-1] == (
        f"different: 60 calls and the state; {equal} calls are the same; of the calls that came in 30 would fail"
    )


def test_code_that_stops_is_a_finding(log: Log) -> None:
    failing = log.variant(
        ("class Counter(Immortal)", 'class Counter(Immortal, on_error="stop")'),
        ("line.split()", "line.split('lazy')[0].split()"),
        ("        for word in", "        assert self.words.get('over', 0) < 7, 'too much'\n        for word in"),
    )
    values = log.values("--app", f"{failing}:Counter", "--limit", 1000, status=3)
    # The line behind the seventh 'over' raises; of each of the six such lines before, two words are missing.
    exception = values["exception"]
    assert exception["input"] == "Counter.count('the lazy Dog')"
    assert "AssertionError: too much" in exception["text"]
    assert values["differences"] == {"added": 0, "missing": 2 * 6, "changed": 0}
    assert all(
        (each["record"], each["message"]) < (exception["record"], exception["message"]) for each in values["first"]
    )
    assert values["state"] == []
    text, _ = log.what_if("--app", f"{failing}:Counter", status=3)
    assert f"the new code fails at record {exception['record']}, message {exception['message']}: Counter.count(" in text
    assert "    AssertionError: too much" in text.splitlines()
    assert "nothing after it was compared" in text.splitlines()


def test_old_code_that_raises_leaves_nothing_to_compare_with(log: Log) -> None:
    failing = log.variant(("        for word in", "        assert line != 'The end'\n        for word in"))
    values = log.values("--app", f"{log.talk}:Counter", "--old-app", f"{failing}:Counter", status=1)
    assert values["old_exception"]["input"] == "Counter.count('The end')"
    assert (values["exception"], values["first"]) == (None, [])
    text, _ = log.what_if("--app", f"{log.talk}:Counter", "--old-app", f"{failing}:Counter", status=1)
    assert text.splitlines()[-1].startswith("can't be told: the old code itself fails; the new code goes on to record")


def test_old_code_that_is_not_what_made_the_log(log: Log) -> None:
    lower = log.variant(("line.split()", "line.lower().split()"))
    out, error = log.what_if("--app", f"{log.talk}:Counter", "--old-app", f"{lower}:Counter", status=1)
    assert out == ""
    assert error.startswith(f"error: {lower}:Counter does not repeat what the log of 'counter' has")
    assert error.count("\n") == 1


def test_code_that_dies(log: Log) -> None:
    dying = log.variant(("        for word in", "        __import__('os')._exit(9)\n        for word in"))
    said, _ = log.what_if("--app", f"{dying}:Counter", status=3)
    assert re.search(
        rf"\nthe app {dying}:Counter ended with status 9 .* \(at record \d+; --to \d+ ends before it\)", said
    )


def test_a_handler_that_hangs_ends_at_its_limit_and_is_named(log: Log) -> None:
    hanging = log.variant(("        for word in", "        while line == 'The end': pass\n        for word in"))
    said, _ = log.what_if("--app", f"{hanging}:Counter", "--handler-limit", 2, status=3)
    end = re.search(r"\(at record (\d+); --to (\d+) ends before it\); it said:\n", said)
    assert end is not None, said
    assert f"message 4 of record {end[1]} has not come back for" in said
    assert f'{hanging}.py", line' in said  # where it hangs
    assert "\\n" not in said


@pytest.mark.parametrize("command", ["replay", "verify"])
def test_a_module_that_hangs_when_it_is_imported(log: Log, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setattr(host, "CONNECT_TIMEOUT_S", 0.3)
    hanging = write_module(log.folder, "import threading\nthreading.Event().wait()\n")
    with contextlib.chdir(log.folder):
        arguments = ["--home", "home", command, "counter", "--app", f"{hanging}:Counter", "--handler-limit", "0.5"]
        result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 1
    assert f"the app {hanging}:Counter did not connect within 0.5 s: its module hangs" in result.stderr


def test_a_command_that_is_terminated_leaves_no_temporary_files(log: Log, tmp_path: Path) -> None:
    hanging = write_module(log.folder, "import threading\nprint('here')\nthreading.Event().wait()\n")
    command = [sys.executable, "-m", "immortal", "--home", "home", "replay", "counter", "--app", f"{hanging}:Counter"]
    process = subprocess.Popen(
        [*command, "--lines"],
        cwd=log.folder,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"here\n"
        assert list(tmp_path.iterdir())
        process.terminate()
        assert process.wait(DEADLINE_S) == -signal.SIGTERM
    assert list(tmp_path.iterdir()) == []


def test_what_the_new_code_would_not_repeat_is_warned_of(log: Log) -> None:
    clock = log.variant(("        for word in", "        import time\n        time.time()\n        for word in"))
    _, error = log.what_if("--app", f"{clock}:Counter", status=0)
    assert "warning" in error
    assert "time.time()" in error


# --- upgrades --------------------------------------------------------------------------------------------------------


def test_an_upgrade_with_another_state(log: Log) -> None:
    second = write_module(log.folder, UPGRADE.format(old=log.talk))
    values = log.values("--app", f"{second}:Counter", "--upgrade", status=3)
    made = sum(map(len, model(LINES)))
    assert (values["equal"], values["first"]) == (made, [])
    by_path = {each["path"]: each for each in values["state"]}
    assert by_path["total"] == {"path": "total", "new": made}
    assert by_path["counts"]["new"]["The"] == by_path["words"]["old"]["The"] == 60
    assert log.values("--app", f"{second}:Counter", "--upgrade", 2, status=3)["state"] == values["state"]

    as_before = log.values("--app", f"{second}:Counter", status=0)  # its old code runs, and that is said
    assert "--upgrade tries version 2" in as_before["notes"][0]


def test_an_upgrade_that_fails(log: Log) -> None:
    source = UPGRADE.format(old=log.talk).replace("        return new\n", "        raise RuntimeError('no way')\n")
    values = log.values("--app", f"{write_module(log.folder, source)}:Counter", "--upgrade", status=3)
    assert "Counter.upgrade raised RuntimeError: no way" in values["exception"]["text"]
    text, _ = log.what_if("--app", f"{log.talk}:Counter", "--upgrade", 7, status=3)
    assert "the new code can't take over the state" in text


# --- wrong usage -----------------------------------------------------------------------------------------------------


def test_what_a_user_can_get_wrong(log: Log) -> None:
    app = ("--app", f"{log.talk}:Counter")
    assert "Missing option '--app'" in log.what_if(status=2)[1]
    assert "names no app" in log.what_if("--app", "counter", status=2)[1]
    assert "--upgrade" in log.what_if(*app, "--upgrade", "next", status=2)[1]
    assert "there is no module 'nowhere'" in log.what_if("--app", "nowhere:Counter", status=1)[1]
    assert "there is no checkpoint 9" in log.what_if(*app, "--from", 9, status=1)[1]
    assert "record 99999 is not in the log" in log.what_if(*app, "--to", 99999, status=1)[1]
    assert "there is no instance 'contour'" in what_if(log.folder, "contour", *app, status=1)[1]
    Registry(log.folder / "home").register("idle", "tcp://127.0.0.1:*")
    assert "'idle' has not been started yet" in what_if(log.folder, "idle", *app, status=1)[1]


# --- apps of the base protocol ---------------------------------------------------------------------------------------


class OffByOne(SocketApp):
    """It tells its peer another number at the fourth call."""

    def _forward(self, number: int) -> None:
        super()._forward(number + 100 if number == 3 else number)


def test_apps_that_do_not_tell_what_made_a_call_are_compared_place_by_place(tmp_path: Path) -> None:
    house = House(tmp_path / "home")
    neighbours: list[SocketApp] = []
    try:
        house.register("a", "b")
        process, app = house.both("a", peer="b")
        for number in range(6):
            app.impulse(number)
        app.until(lambda: len(app.state["forwarded"]) == 6)
        process.terminate()
        app.until_closed()
        assert process.ended()[0] == 0
        command = [
            sys.executable,
            "-m",
            "immortal",
            "--home",
            "home",
            "what-if",
            "a",
            "--app",
            "-",
            "--old-app",
            "-",
        ]
        running = subprocess.Popen(
            [*command, "--json"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert running.stderr is not None
        try:
            for _ in range(2):
                line = running.stderr.readline()
                found = re.fullmatch(r"waiting for the (old|new) app at 127\.0\.0\.1:(\d+)\n", line)
                assert found is not None, line
                at: Any = SimpleNamespace(app_host="127.0.0.1", app_port=int(found[2]))
                (SocketApp if found[1] == "old" else OffByOne)(at, neighbours, peer="b")
            while not all(each.closed for each in neighbours):
                neighbours[0].turn()
            out, error = running.communicate(timeout=DEADLINE_S)
        finally:
            running.kill()
            running.wait()
        values = json.loads(out)
        assert (running.returncode, error) == (3, "")
        assert values["by_position"] is True
        assert values["first"] == [
            {
                "kind": "changed",
                "place": 4,
                "destination": "b",
                "old": "method 2(03 00 00 00)",
                "new": "method 2(67 00 00 00)",
            }
        ]
    finally:
        for each in neighbours:
            each.close()
        house.close()


# --- the demo --------------------------------------------------------------------------------------------------------


class Supervised:
    """`immortal run NAME APP`."""

    def __init__(self, folder: Path, name: str, app: str, environment: dict[str, str]) -> None:
        command = [sys.executable, "-m", "immortal", "--home", "home", "run", name, app]
        self.folder = Registry(folder / "home").load(name).folder
        self.process = subprocess.Popen(
            command, cwd=folder, env={**os.environ, **environment}, stderr=subprocess.PIPE, text=True
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.lines.extend(self.process.stderr)

    def status(self) -> dict[str, Any]:
        try:
            return control.query(self.folder, "status", 1.0)
        except Exception:
            assert self.process.poll() is None, self.lines
            return {"phase": "starting", "inputs": {}, "backlog_records": 1}

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(DEADLINE_S) == 0, self.lines

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join(DEADLINE_S)
        assert self.process.stderr is not None
        self.process.stderr.close()


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the demo's log of 2,000 lines, and with its code."""
    folder = tmp_path_factory.mktemp("demo")
    source = WORDCOUNT.read_text()
    (folder / "wordcount.py").write_text(source)
    (folder / "lower.py").write_text(source.replace("line.split()", "line.lower().split()"))
    raising = source.replace(
        "    def count(self, line: str) -> None:\n",
        "    def count(self, line: str) -> None:\n        int(line[-1:] != '!' or 'no number')\n",
    )
    (folder / "raising.py").write_text(raising)
    lines = [f"Line {number} of the input{'!' if number == 1000 else ''}" for number in range(2000)]
    (folder / "input.txt").write_text("\n".join(lines))
    (folder / "files.txt").write_text(f"{folder / 'input.txt'}\n")
    registry = Registry(folder / "home")
    running = []
    try:
        for name, app in (("counter", "wordcount:Counter"), ("reader", "wordcount:Reader")):
            registry.register(name, "tcp://127.0.0.1:*")
            running.append(Supervised(folder, name, app, {"WORDCOUNT_FILES": str(folder / "files.txt")}))
        deadline_s = time.monotonic() + DEADLINE_S
        while True:
            status = running[0].status()
            if status["inputs"].get("reader", {}).get("position") == len(lines) and not status["backlog_records"]:
                break
            assert time.monotonic() < deadline_s, status
        for each in running:
            each.stop()
        yield folder
    finally:
        for each in running:
            each.close()


def test_the_demo_with_the_same_code(demo: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "immortal",
        "--home",
        "home",
        "what-if",
        "counter",
        "--app",
        "wordcount:Counter",
    ]
    result = subprocess.run(command, cwd=demo, capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    assert "with 2,001 messages" in result.stdout
    text, _ = what_if(demo, "reader", "--app", "wordcount:Reader", status=0)
    assert text.splitlines()[-1] == "no difference in 2,001 messages: 2,000 calls are the same, and so is the state"


def test_the_demo_with_a_counter_that_folds_case(demo: Path) -> None:
    values = json.loads(what_if(demo, "counter", "--app", "lower:Counter", "--json", status=3)[0])
    assert values["state"] == [{"path": "words['Line']", "old": 2000}, {"path": "words['line']", "new": 2000}]
    assert values["differences"] == {"added": 0, "missing": 0, "changed": 0}


def test_the_demo_with_a_counter_that_raises_on_line_1000(demo: Path) -> None:
    values = json.loads(what_if(demo, "counter", "--app", "raising:Counter", "--json", status=3)[0])
    (fates,) = values["fates"]
    assert (fates["method"], fates["fate"], fates["count"]) == ("Counter.count", "fails now", 1)
    assert fates["first"]["input"] == "Counter.count('Line 1000 of the input!')"
    assert "ValueError: invalid literal for int()" in fates["first"]["new"]["trace"]


# --- what is not worked out ------------------------------------------------------------------------------------------

CHAIN = """
from immortal import Immortal, impulse, peer, rpc


class Mail(Immortal):
    @rpc
    def send(self, number: int) -> None:
        pass


class Desk(Immortal):
    desk = peer(lambda: Desk, "desk")
    mail = peer(Mail, "mail")
    total: int

    def __init__(self) -> None:
        self.total = 0

    @impulse
    def order(self, number: int) -> None:
        self.desk.add.fork(number)
        self.mail.send.fork(number)

    @rpc
    def add(self, number: int) -> None:
        self.total += number

    @rpc
    def ask(self) -> int:
        return self.total
"""


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("desk")
    name = write_module(folder, CHAIN)
    instances = Instances(folder / "logs")
    running = instances.start("desk", load_module(folder, name).Desk)
    for number in range(1, 6):
        running.impulse("order", number)
    assert running.app.total == 15
    instances.close()
    registry = Registry(folder / "home")
    registry.register("desk", "tcp://127.0.0.1:*", log=folder / "logs" / "desk" / "log")
    registry.remember_app("desk", f"{name}:Desk")
    return folder


OTHER_SELF_CALLS = ("self.desk.add.fork(number)", "self.desk.add.fork(number * 2)")
NO_SELF_CALLS = ("self.desk.add.fork(number)", "number")
OTHER_STATE = ("self.total += number", "self.total += number * 2")
OTHER_MAIL = ("self.mail.send.fork(number)", "self.mail.send.fork(-number)")


@pytest.mark.parametrize(
    ("changes", "verdict", "unknown"),
    [
        (
            [OTHER_SELF_CALLS],
            "different: 5 calls; the state is not known; 5 calls are the same",
            ["5 other calls to it"],
        ),
        ([NO_SELF_CALLS], "different: 5 calls; the state is not known; 5 calls are the same", ["5 other calls to it"]),
        ([OTHER_SELF_CALLS, OTHER_STATE], "different: 5 calls and the state; 5 calls are the same", ["5 other calls"]),
        (
            [OTHER_MAIL],
            "different: 5 calls; with the log's inputs the state is the same; 5 calls are",
            ["mail would do"],
        ),
        (
            [OTHER_MAIL, OTHER_SELF_CALLS],
            "different: 10 calls; the state is not known; 0 calls are",
            ["itself", "mail"],
        ),
    ],
)
def test_what_was_not_worked_out_is_said_and_not_denied(
    desk: Path, changes: list[tuple[str, str]], verdict: str, unknown: list[str]
) -> None:
    source = CHAIN
    for before, after in changes:
        assert before in source
        source = source.replace(before, after)
    app = f"{write_module(desk, source)}:Desk"
    lines = what_if(desk, "desk", "--app", app, status=3)[0].splitlines()
    assert lines[-1].startswith(verdict)
    said = [line for line in lines if line.startswith("not worked out: ")]
    assert len(said) == len(unknown)
    assert all(part in line for part, line in zip(unknown, said, strict=True))
    found = json.loads(what_if(desk, "desk", "--app", app, "--json", status=3)[0])
    assert [f"not worked out: {one['text']}" for one in found["not_worked_out"]] == said
    assert found["state_known"] == all("to itself" not in line for line in said)


def test_what_comes_behind_a_failure_is_not_denied(desk: Path) -> None:
    failing = ("self.total += number", "assert number != 3\n        self.total += number")
    source = CHAIN.replace(*failing).replace("class Desk(Immortal)", 'class Desk(Immortal, on_error="stop")')
    app = f"{write_module(desk, source)}:Desk"
    found = json.loads(what_if(desk, "desk", "--app", app, "--json", status=3)[0])
    assert not found["state_known"]
    record = found["exception"]["record"]
    assert [one["text"] for one in found["not_worked_out"]] == [
        f"what differs after record {record}, where the new code fails"
    ]
