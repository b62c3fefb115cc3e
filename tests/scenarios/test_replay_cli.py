"""`immortal replay`: real apps over real logs, at the command line."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from immortal.cli import main
from immortal.coordinator.instances.registry import Registry
from immortal.protocol.extensions import ALL_EXTENSIONS, Hello, encode_hello
from tests.helpers.recorded import Instances, load_module, write_module
from tests.helpers.strangers import mode

DEADLINE_S = 30.0
SOURCE = """
from immortal import Immortal, impulse, peer, rpc


class Counter(Immortal):
    words: dict[str, int]

    def __init__(self) -> None:
        self.words = {}

    @rpc
    def count(self, line: str) -> None:
        for word in line.split():
            self.words[word] = self.words.get(word, 0) + 1


class Reader(Immortal):
    counter = peer(Counter, "counter")
    lines: int

    def __init__(self) -> None:
        self.lines = 0

    @impulse
    def line(self, text: str) -> None:
        self.lines += 1
        self.counter.count.fork(text)
"""


class Home:
    """A registry with a counter and a reader that have run; `immortal`, with their module on the path."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.module_name = write_module(folder, SOURCE)
        self.module = load_module(folder, self.module_name)
        instances = Instances(folder)
        counter = instances.start("counter", self.module.Counter)
        reader = instances.start("reader", self.module.Reader)
        for text in ("to be", "or not"):
            reader.impulse("line", text)
        counter.checkpoint()
        reader.checkpoint()
        reader.impulses([("line", [text]) for text in ("that", "is", "the question")])
        instances.close()
        registry = Registry(folder)
        for name, app in (("counter", "Counter"), ("reader", "Reader")):
            registry.register(name, "tcp://127.0.0.1:*")
            registry.remember_app(name, f"{self.module_name}:{app}")

    def run(self, *arguments: str, status: int = 0) -> Result:
        result = CliRunner().invoke(main, ["--home", str(self.folder), *arguments])
        assert result.exit_code == status, (result.output, result.exception)
        return result

    def json(self, *arguments: str, status: int = 0) -> dict[str, Any]:
        described: dict[str, Any] = json.loads(self.run(*arguments, "--json", status=status).stdout)
        return described

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "immortal", "--home", str(self.folder), *arguments]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)

    def variant(self, old: str, new: str) -> str:
        """The module with other code."""
        assert old in SOURCE
        return write_module(self.folder, SOURCE.replace(old, new))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Home:
    return Home(tmp_path_factory.mktemp("home"))


@pytest.fixture
def home(made: Home, monkeypatch: pytest.MonkeyPatch) -> Iterator[Home]:
    monkeypatch.setenv("PYTHONPATH", str(made.folder), prepend=os.pathsep)
    return made


def test_the_summary_says_what_was_replayed_and_made(home: Home) -> None:
    lines = home.run("replay", "reader").stdout.splitlines()
    assert re.fullmatch(
        r"reader: from checkpoint 2 \(after record 2\) to record 3: 1 records, 3 messages in .* s \(.* a second\)",
        lines[0],
    )
    assert lines[1:] == ["  to counter: Counter.count 3"]


def test_the_summary_as_json(home: Home) -> None:
    described = home.json("replay", "reader", "--checkpoint", "1", "--to", "2")
    assert described["outputs"] == [{"destination": "counter", "method": "Counter.count", "count": 2}]
    assert (described["from_checkpoint"], described["after_record"], described["last_record"]) == (1, -1, 2)
    assert (described["records"], described["messages"], described["failure"]) == (3, 3, None)


def test_a_time_is_the_last_record_up_to_then(home: Home) -> None:
    shown = [json.loads(line) for line in home.run("log", "show", "reader", "--json").stdout.splitlines()]
    assert home.json("replay", "reader", "--to", shown[1]["time"])["last_record"] == 1
    assert home.json("replay", "reader", "--to", "0s")["last_record"] == 3
    result = home.run("replay", "reader", "--to", "1999-01-01", status=1)
    assert "has no record of that time or before" in result.stderr


@pytest.mark.parametrize(("to", "lines"), [("0", 0), ("1", 1), ("2", 2), ("3:0", 3), ("3:1", 4), ("3", 5)])
def test_the_state_at_any_message(home: Home, to: str, lines: int) -> None:
    result = home.run("replay", "reader", "--to", to, "--state")
    state = json.loads(result.stdout)
    assert state["state"] == {"lines": lines}
    assert state["sequence_id"] == int(to.partition(":")[0])
    assert "from checkpoint" in result.stderr


def test_the_state_of_another_app_of_the_log(home: Home) -> None:
    state = home.json("replay", "counter", "--state")["state"]
    words = dict.fromkeys(["to", "be", "or", "not", "that", "is", "the", "question"], 1)
    assert state["state"] == {"words": words}


def test_the_state_in_a_file(home: Home, tmp_path: Path) -> None:
    file = tmp_path / "state"
    home.run("replay", "reader", "--state-file", str(file))
    assert file.read_bytes().startswith(b"IMMAPP")
    assert mode(file) == "0600"


def test_other_code_in_place_of_the_apps_own(home: Home) -> None:
    app = home.variant("self.lines += 1", "self.lines += 10")
    state = home.json("replay", "reader", "--checkpoint", "1", "--app", f"{app}:Reader", "--state")["state"]
    assert state["state"] == {"lines": 50}


def test_the_lines_of_a_replay_are_shown_where_asked_for(home: Home, capfd: pytest.CaptureFixture[str]) -> None:
    line = "import immortal; immortal.logger.info('read', text=text); print('printed')"
    app = home.variant("self.lines += 1", f"self.lines += 1; {line}")
    home.run("replay", "reader", "--checkpoint", "1", "--app", f"{app}:Reader")
    assert capfd.readouterr() == ("", "")
    home.run("replay", "reader", "--checkpoint", "1", "--to", "2", "--app", f"{app}:Reader", "--lines")
    out, err = capfd.readouterr()
    assert out.split() == ["printed"] * 2
    assert [line.partition("> read  ")[2] for line in err.splitlines()] == [
        'text="to be" handler=Reader.line record=1:0 replayed=True',
        'text="or not" handler=Reader.line record=2:0 replayed=True',
    ]


def test_a_call_that_fails_now_is_reported_with_its_place_and_traceback(home: Home) -> None:
    app = home.variant("self.lines += 1", "self.lines += 1 if text != 'is' else 1 // 0")
    result = home.run("replay", "reader", "--app", f"{app}:Reader", status=1)
    lines = result.stdout.splitlines()
    assert (
        "Reader.line at record 3, message 1 did not fail when it was handled, and fails now: "
        "ZeroDivisionError: integer division or modulo by zero" in lines
    )
    assert f"{app}.py" in result.stdout
    assert "  to counter: Counter.count 2" in lines  # of the other two in that record
    described = home.json("replay", "reader", "--app", f"{app}:Reader", "--state", status=1)
    assert described["failure"] is None
    (failed,) = described["failed_now"]
    assert (failed["record"], failed["message"], failed["method"]) == (3, 1, "Reader.line")
    assert "1 // 0" in failed["trace"]
    assert described["state"]["state"] == {"lines": 4}


def test_a_handler_that_stops_its_app_is_reported_with_its_place_and_traceback(home: Home) -> None:
    app = home.variant(
        "@impulse\n    def line(self, text: str) -> None:\n        self.lines += 1",
        '@impulse(on_error="stop")\n    def line(self, text: str) -> None:\n'
        "        self.lines += 1 if text != 'is' else 1 // 0",
    )
    result = home.run("replay", "reader", "--app", f"{app}:Reader", status=1)
    assert "up to record 3, message 1, which failed" in result.stdout
    assert "ZeroDivisionError" in result.stdout
    assert f"{app}.py" in result.stdout
    described = home.json("replay", "reader", "--app", f"{app}:Reader", status=1)
    assert (described["failure"]["record"], described["failure"]["message"]) == (3, 1)


def test_strict_refuses_an_app_that_a_replay_could_not_repeat(home: Home) -> None:
    app = home.variant("self.lines += 1", "import time; self.lines += bool(time.time())")
    home.run("replay", "reader", "--app", f"{app}:Reader")
    result = home.run("replay", "reader", "--app", f"{app}:Reader", "--strict", status=1)
    assert "Reader.line calls time.time()" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--to", "99"], "record 99 is not in the log: its last one is 3 (--follow waits for it)"),
        (["--to", "3:9"], "record 3 has no message 9: its 3 messages are counted from 0 to 2"),
        (["--checkpoint", "9"], "there is no checkpoint 9 in the log to begin at; it holds 1 (before record 0), 2"),
        (["--checkpoint", "2", "--to", "1"], "checkpoint 2 was taken after record 2"),
    ],
)
def test_what_cannot_be_done_is_one_line(home: Home, arguments: list[str], said: str) -> None:
    result = home.run("replay", "reader", *arguments, status=1)
    assert result.stdout == ""
    assert result.stderr.startswith(f"error: {said}")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--to", "soon"], "'soon': a record's number, or a time such as"),
        (["--to", "3:"], "12 or 12:3"),
        (["--break"], "--break needs --to SEQ[:MESSAGE]"),
        (["--break", "--to", "3", "--app", "-"], "can't be combined with --app -"),
        (["--app", "nocolon"], 'expected "module:Class"'),
    ],
)
def test_wrong_usage(home: Home, arguments: list[str], said: str) -> None:
    assert said in home.run("replay", "reader", *arguments, status=2).stderr


def test_an_instance_that_never_ran(home: Home) -> None:
    if "idle" not in Registry(home.folder).names():
        Registry(home.folder).register("idle", "tcp://127.0.0.1:*")
    for command in ("replay", "verify"):
        assert "'idle' has not been started yet" in home.run(command, "idle", status=1).stderr


def test_the_debugger_stops_before_the_message(home: Home) -> None:
    process = home.start("replay", "reader", "--to", "3:1", "--break")
    stdout, stderr = process.communicate("p text, self.lines\nc\n", DEADLINE_S)
    assert process.returncode == 0, stderr
    assert "record 3, message 1: Reader.line('is')" in stdout
    assert "('is', 3)" in stdout
    assert "to record 3: 1 records, 2 messages" in stdout


def test_the_debugger_stops_before_a_record_that_a_checkpoint_follows(home: Home) -> None:
    process = home.start("replay", "reader", "--to", "2", "--break")
    stdout, stderr = process.communicate("p text, self.lines\nc\n", DEADLINE_S)
    assert process.returncode == 0, stderr
    assert "('or not', 1)" in stdout


def test_an_app_that_is_started_by_hand(home: Home) -> None:
    process = home.start("replay", "reader", "--app", "-", "--state")
    try:
        assert process.stderr is not None
        said = process.stderr.readline()
        variables = r"\((IMMORTAL_APP_ADDRESS)=(\S+) (IMMORTAL_APP_SECRET_FILE)=(\S+)\)"
        match = re.fullmatch(rf"waiting for an app of reader at unix:(\S+) {variables}\n", said)
        assert match is not None, said
        assert not Path(match[1]).parent.stat().st_mode & 0o077
        with socket.socket(socket.AF_UNIX) as stranger:  # who comes first and proves nothing is not the app
            stranger.connect(match[1])
            stranger.sendall(encode_hello(Hello(ALL_EXTENSIONS, "stranger")))
            assert b"must prove that it knows its secret" in stranger.recv(4096)
        app = [sys.executable, "-m", "immortal.appsdk", f"{home.module_name}:Reader"]
        environment = {**os.environ, match[2]: match[3], match[4]: match[5]}
        done = subprocess.run(app, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
        assert done.returncode == 0, done.stderr
        stdout, _ = process.communicate(timeout=DEADLINE_S)
        assert json.loads(stdout)["state"] == {"lines": 5}
        assert process.returncode == 0
    finally:
        process.kill()
        process.wait()


def test_following_a_live_log_until_ctrl_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = Home(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    marker = tmp_path / "seen"
    app = home.variant("self.lines += 1", f"self.lines += 1; open({str(marker)!r}, 'a').write(text + '\\n')")
    os.mkfifo(marker)
    process = home.start("replay", "reader", "--follow", "--state", "--app", f"{app}:Reader")
    try:
        with marker.open() as seen:  # each handler opens and closes it: read on until all three have
            read = ""
            while read.count("\n") < 3:
                read += seen.read()
        instances = Instances(tmp_path)
        reader = instances.start("reader", home.module.Reader)
        reader.impulse("line", "late")
        with marker.open() as seen:
            assert seen.read() == "late\n"
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0, stderr
        assert json.loads(stdout)["state"] == {"lines": 6}
        assert "to record 4: 2 records, 4 messages" in stderr
        instances.close()
    finally:
        process.kill()
        process.wait()


def test_upgrades_of_the_past_are_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = Home(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    second = (
        SOURCE.replace("import Immortal", "import upgrades, Immortal")
        + """

@upgrades(Reader)
class Reader2(Immortal):
    counter = peer(Counter, "counter")
    total: int

    def __init__(self) -> None:
        self.total = 0

    @classmethod
    def upgrade(cls, old: Reader) -> "Reader2":
        new = cls()
        new.total = 100 * old.lines
        return new

    @impulse
    def line(self, text: str) -> None:
        self.total += 1
        self.counter.count.fork(text.upper())
"""
    )
    name = write_module(tmp_path, second)
    instances = Instances(tmp_path)
    reader = instances.start("reader", load_module(tmp_path, name).Reader2, upgrade_to=2)
    reader.impulse("line", "new")
    instances.close()
    Registry(tmp_path).remember_app("reader", f"{name}:Reader2")

    def state(*arguments: str) -> dict[str, Any]:
        shown: dict[str, Any] = home.json("replay", "reader", "--state", *arguments)["state"]
        return shown

    across = state("--checkpoint", "1")
    assert (across["version"], across["state"]) == (2, {"total": 501})
    assert state()["state"] == {"total": 501}
    instances = Instances(tmp_path)
    instances.start("reader", sys.modules[name].Reader2)  # a recovery takes a checkpoint, now at the log's end
    instances.close()
    assert state()["state"] == {"total": 501}
    old = state("--to", "3")  # by the old code, which the log names: the upgrade lies behind that record
    assert (old["version"], old["state"]) == (1, {"lines": 5})
    assert home.json("replay", "reader", "--checkpoint", "1")["outputs"][0]["count"] == 6


def test_code_that_was_changed_shows_no_state_that_never_was(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = home.variant("fork(text)", "fork(text.upper())")
    shown = home.json("replay", "reader", "--to", "1", "--app", f"{changed}:Reader", "--state", status=3)
    assert "'reader' does not do again what it did before" in shown["diverged"]
    assert shown["state"]["state"] == {"lines": 1}
    Registry(home.folder).remember_app("reader", f"{changed}:Reader")
    try:
        for arguments in (["replay", "reader", "--to", "1", "--state"], ["sql", "select * from reader", "--at", "1"]):
            refused = home.run(*arguments, *(["-i", "reader"] if arguments[0] == "sql" else []), status=1)
            assert "reader never had the state that this replay gives: 'reader' does not do again" in refused.stderr
            assert not refused.stdout
        assert "  DIVERGED: 'reader' does not" in home.run("replay", "reader", "--to", "1", status=3).stdout
        silent = home.variant("self.lines += 1", "self.lines += 9")  # shows in no call
        Registry(home.folder).remember_app("reader", f"{silent}:Reader")
        for moment in (["--to", "1"], []):  # proved by the checkpoint behind it, and by the one before
            refused = home.run("replay", "reader", *moment, "--state", status=1)
            assert "at checkpoint 2 (after record 2) its state differs, such as lines" in refused.stderr
    finally:
        Registry(home.folder).remember_app("reader", f"{home.module_name}:Reader")
