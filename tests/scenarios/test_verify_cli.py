"""`immortal verify`: what is deterministic is proved to be, and what is not is found, with its place."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from immortal.cli import main
from immortal.coordinator.instances.registry import Registry
from immortal.log import open_reader
from tests.helpers.recorded import Instances, RecordedInstance, load_module, write_module

DEADLINE_S = 30.0
SOURCE = """
import os
import random
import time
import immortal
from immortal import Immortal, impulse, peer, query, rpc


class Store(Immortal):
    kept: list[str]

    def __init__(self) -> None:
        self.kept = []

    @rpc
    def keep(self, key: str, number: float) -> None:
        self.kept.append(key)


class Sound(Immortal):
    store = peer(Store, "store")
    count: int
    sizes: dict[str, int]

    def __init__(self) -> None:
        self.count = 0
        self.sizes = {}

    @impulse
    def put(self, key: str) -> None:
        self.count += 1
        self.sizes[key] = len(key)
        self.store.keep.fork(key, immortal.random.random())
        self.noted.fork(key, immortal.now().timestamp())

    @rpc
    def noted(self, key: str, at: float) -> None:
        self.count += 1


class Clocked(Sound):
    last: float

    def __init__(self) -> None:
        super().__init__()
        self.last = 0.0

    @impulse
    def put(self, key: str) -> None:
        self.last = time.time()


class Ending(Sound):
    @impulse
    def put(self, key: str) -> None:
        self.sizes[key] = len(key)
        self.store.keep.fork(key, 0.5)
        if key == os.environ.get("ENDS_AT"):
            os._exit(int(os.environ.get("ENDS_WITH", "0")))


class Twin(Sound, formerly=("Ending",)):
    @impulse
    def put(self, key: str) -> None:
        self.sizes[key] = len(key)
        self.store.keep.fork(key, 0.5)


class Dice(Sound):
    @impulse
    def put(self, key: str) -> None:
        self.count += 1
        self.store.keep.fork(key, 0.5)
        if key.startswith("x"):
            self.store.keep.fork(key, random.random())


class OwnDice(Sound):
    @impulse
    def put(self, key: str) -> None:
        self.noted.fork(key, random.random())


class Sets(Sound):
    tags: set[int]

    def __init__(self) -> None:
        super().__init__()
        self.tags = set()

    @impulse
    def put(self, key: str) -> None:
        if key == "many":  # leaves a large table behind, in which 15 comes before 16; in a small one it does not
            self.tags = set(range(100))
            for number in range(100):
                if number not in (15, 16):
                    self.tags.discard(number)
        if key == "tell":
            for tag in self.tags:
                self.store.keep.fork(str(tag), 0.0)


class Peeking(Sound):
    @query
    def look(self, key: str) -> int:
        if key:
            self.sizes[key] = 0
        return len(self.sizes)
"""


class Home:
    """A registry for instances that have run in this process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.module_name = write_module(folder, SOURCE)
        self.module = load_module(folder, self.module_name)

    def record(self, app: str, run: Callable[[RecordedInstance], None]) -> None:
        """Let an instance "app", and the store that it calls, do what ``run`` does."""
        instances = Instances(self.folder)
        instances.start("store", self.module.Store)
        run(instances.start("app", getattr(self.module, app)))
        instances.close()
        registry = Registry(self.folder)
        for name, cls in (("store", "Store"), ("app", app)):
            if name not in registry.names():
                registry.register(name, "tcp://127.0.0.1:*", keep_checkpoints=None)
                registry.remember_app(name, f"{self.module_name}:{cls}")

    def verify(self, *arguments: str, status: int, name: str = "app") -> Result:
        result = CliRunner().invoke(main, ["--home", str(self.folder), "verify", name, *arguments])
        assert result.exit_code == status, (result.output, result.exception)
        return result

    def json(self, *arguments: str, status: int) -> dict[str, Any]:
        described: dict[str, Any] = json.loads(self.verify(*arguments, "--json", status=status).stdout)
        return described


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    return Home(tmp_path)


def puts(*keys: str) -> Callable[[RecordedInstance], None]:
    """One record for each key; a checkpoint wherever it says so."""

    def run(app: RecordedInstance) -> None:
        for key in keys:
            if key == "checkpoint":
                app.checkpoint()
            else:
                app.impulse("put", key)

    return run


def test_what_is_deterministic_is_the_same(home: Home) -> None:
    home.record("Sound", puts("a", "b", "checkpoint", "c", "checkpoint", "d"))
    lines = home.verify("--all", status=0).stdout.splitlines()
    headings = [line for line in lines if line.startswith("app: checkpoint")]
    assert [heading.partition(": ")[2].partition(": ")[0] for heading in headings] == [
        "checkpoint 1 (before record 0) to checkpoint 2 (after record 4)",
        "checkpoint 2 (after record 4) to checkpoint 3 (after record 6)",
        "checkpoint 3 (after record 6) to the end of the log (record 8)",
    ]
    assert lines.count("  state: the same") == 2
    assert "  outputs: the same (2 to itself, 2 to store)" in lines
    assert lines[-1].startswith("app: the same, in ")
    few = home.verify("--at-least", "10000", status=1)
    assert "compared, no difference, at least 10,000 asked for" in few.stderr
    assert home.verify(status=0, name="store").stdout.splitlines()[-1].startswith("store: the same, in ")


def last_record(home: Home) -> int:
    with open_reader(home.folder / "app" / "log") as reader:
        return reader.last_sequence_id()


def test_where_the_last_record_makes_the_app_end_that_is_a_result(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    home.record("Ending", puts("a", "checkpoint", "b", "c", "end"))
    last = last_record(home)

    def what_if(*arguments: str, status: int) -> Result:
        words = ["--home", str(home.folder), "what-if", "app", "--app", f"{home.module_name}:Ending", *arguments]
        result = CliRunner().invoke(main, words)
        assert result.exit_code == status, (result.output, result.exception)
        return result

    monkeypatch.setenv("ENDS_AT", "end")
    section = home.json(status=0)["sections"][-1]
    assert (section["app_ended_at"], section["last_record"]) == (last, last - 1)
    ended = f"the app ended here, as before: at record {last}, the last in the log"
    assert ended in what_if(status=0).stdout
    assert ended in home.verify(status=0).stdout
    before = home.verify("--to", str(last - 1), status=0).stdout
    assert f"to record {last - 1}: " in before
    assert "ended here" not in before
    assert f"record {last + 5} is not in the log" in home.verify("--to", str(last + 5), status=1).stderr

    monkeypatch.setenv("ENDS_WITH", "7")
    named = f"ended with status 7 before the replay was complete (at record {last}; --to {last - 1} ends"
    assert named in home.verify(status=1).stderr
    monkeypatch.setenv("ENDS_AT", "b")
    monkeypatch.setenv("ENDS_WITH", "0")
    assert f"(at record {last - 2}; " in what_if(status=1).stderr


def test_new_code_that_ends_earlier_or_goes_on_is_a_difference(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    home.record("Ending", puts("a", "checkpoint", "b", "c", "end"))
    last = last_record(home)

    def what_if(old: str, new: str) -> str:
        words = ["--old-app", f"{home.module_name}:{old}", "--app", f"{home.module_name}:{new}"]
        result = CliRunner().invoke(main, ["--home", str(home.folder), "what-if", "app", *words])
        assert result.exit_code == 3, (result.output, result.exception)
        return result.stdout

    monkeypatch.setenv("ENDS_AT", "b")
    said = what_if("Twin", "Ending")
    assert f"(at record {last - 2}; --to {last - 3} ends before it)" in said
    assert "Twin continues there" in said
    monkeypatch.setenv("ENDS_AT", "end")
    said = what_if("Ending", "Twin")
    assert f"(at record {last}; " in said
    assert "different: where the app ends; before that all" in said


def test_crashes_and_impulses_to_others_change_nothing(home: Home) -> None:
    """What the outside world sent through the stream takes its place, and is no call of a handler."""

    def run(app: RecordedInstance) -> None:
        puts("a", "b")(app)
        app.impulse("keep", "from outside", 0.0, to="store")
        puts("c")(app)
        app.instances.stop("app")  # without a checkpoint: the next life recovers, and takes one
        again = app.instances.start("app", type(app.app))
        again.impulse("keep", "from outside again", 0.0, to="store")
        puts("d", "checkpoint", "e")(again)

    home.record("Sound", run)
    sections = home.json("--all", "--peer-log", "store", status=0)["sections"]
    assert [section["outputs"]["store"] for section in sections] == [3, 1, 1]
    assert [section["state_is_same"] for section in sections] == [True, True, None]


def test_by_default_the_last_two_stretches_and_each_on_its_own(home: Home) -> None:
    home.record("Sound", puts("a", "checkpoint", "b", "checkpoint", "c"))

    def verified(*arguments: str) -> list[tuple[int, int | None]]:
        sections = home.json(*arguments, status=0)["sections"]
        return [(section["from_checkpoint"], section["to_checkpoint"]) for section in sections]

    assert verified() == [(2, 3), (3, None)]
    assert verified("--checkpoint", "1") == [(1, 2)]
    assert verified("--all") == [(1, 2), (2, 3), (3, None)]


def test_checkpoints_of_restarts_at_one_place_do_not_hide_the_messages_before(home: Home) -> None:
    home.record("Sound", puts("a", "checkpoint", "b", *["checkpoint"] * 4, "c"))
    found = home.json("--at-least", "2", status=0)
    sections = [(section["from_checkpoint"], section["to_checkpoint"]) for section in found["sections"]]
    assert sections == [(2, 5), (5, 6), (6, None)]


def test_calls_that_no_mark_covers_yet_are_not_called_proved(home: Home) -> None:
    home.record("Dice", puts("a", "checkpoint", "b"))
    (_, last) = home.json(status=0)["sections"]
    assert last["outputs"] == {"store": 1}
    assert last["unproved"] == {"store": 1}
    assert "1 to store, of which the last 1 can't be told" in home.verify(status=0).stdout
    (_, last) = home.json("--peer-log", "store", status=0)["sections"]
    assert last["unproved"] == {}


def test_the_time_in_the_state_is_found_and_the_attribute_named(home: Home) -> None:
    home.record("Clocked", puts("a", "checkpoint"))
    lines = home.verify(status=3).stdout.splitlines()
    assert "  DIVERGED: the state of checkpoint 2 differs:" in lines
    (named,) = [line for line in lines if line.startswith("    ")]
    assert re.fullmatch(r"    last: then \d+\.\d+, now \d+\.\d+", named)
    assert lines[-3].startswith("app: NOT the same")
    assert f"{home.module_name}.py" in lines[-1]
    assert "Clocked.put calls time.time()" in lines[-1]
    (section,) = home.json(status=3)["sections"]
    assert [difference["path"] for difference in section["state"]] == ["last"]
    assert not section["state_is_same"]
    assert section["output_divergences"] == []


def test_a_query_that_changed_the_state_unseen_is_found_and_named(home: Home) -> None:
    """In service a state of this size is not compared around each query; a time travel shows it as it was."""

    def run(app: RecordedInstance) -> None:
        puts(*(f"{number:0100}" for number in range(90)))(app)
        for key in ("", "x", ""):
            app.impulse("look", key)
        app.checkpoint()

    home.record("Peeking", run)
    lines = home.verify(status=3).stdout.splitlines()
    assert any(
        "Peeking.look is a query, which only reads, and has changed self.sizes: make it an @rpc method" in line
        for line in lines
    ), lines
    (section,) = home.json(status=3)["sections"]
    assert [failed["method"] for failed in section["failed_now"]] == ["Peeking.look"]
    arguments = ["replay", "app", "--checkpoint", "1", "--state", "--json"]
    shown = CliRunner().invoke(main, ["--home", str(home.folder), *arguments])
    assert shown.exit_code == 0, shown.output
    assert json.loads(shown.stdout)["state"]["state"]["sizes"]["x"] == 0


def test_queries_that_only_read_are_the_same(home: Home) -> None:
    def run(app: RecordedInstance) -> None:
        puts("a", "checkpoint", "b")(app)
        app.impulse("look", "")
        puts("checkpoint", "c")(app)

    home.record("Peeking", run)
    assert home.verify("--all", status=0).stdout.splitlines()[-1].startswith("app: the same, in ")


def test_random_arguments_are_found_with_their_record_and_what_made_them(home: Home) -> None:
    home.record("Dice", puts("a", "b", "x", "c", "checkpoint"))
    lines = home.verify(status=3).stdout.splitlines()
    (said,) = [line for line in lines if "DIVERGED" in line]
    assert "by record 4, the calls to 'store' had reached number 4; numbers 3 to 4 are others now" in said
    now = [line for line in lines if line.startswith("    now")]
    assert now[0] == "    now 3: Store.keep('x', 0.5)  <- record 3, message 0: Dice.put('x')"
    assert re.fullmatch(r"    now 4: Store.keep\('x', 0\.\d+\)  <- record 3, message 0: Dice.put\('x'\)", now[1])
    assert "Dice.put calls random.random()" in lines[-1]


def test_with_the_receivers_log_the_first_difference_is_shown_with_both_values(home: Home) -> None:
    home.record("Dice", puts("a", "b", "x", "c", "checkpoint"))
    lines = home.verify("--peer-log", "store", status=3).stdout.splitlines()
    place = lines.index("    the first that differs is number 4:")
    then = re.fullmatch(r"      then: Store.keep\('x', (0\.\d+)\)", lines[place + 1])
    now = re.fullmatch(r"      now:  Store.keep\('x', (0\.\d+)\)  <- record 3, message 0: .*", lines[place + 2])
    assert then is not None
    assert now is not None
    assert then[1] != now[1]
    by_folder = home.json("--peer-log", str(home.folder / "store" / "log"), status=3)["sections"][0]
    (divergence,) = by_folder["output_divergences"]
    assert (divergence["destination"], divergence["record"], divergence["position"]) == ("store", 4, 4)
    assert divergence["difference"]["position"] == 4
    assert divergence["difference"]["then"] == f"Store.keep('x', {then[1]})"
    assert divergence["difference"]["made_by"] == {"record": 3, "message": 0, "handler": "Dice.put('x')"}


def test_of_large_calls_the_part_that_differs_is_shown(home: Home) -> None:
    home.record("Dice", puts("a" * 5000, "checkpoint"))
    other = write_module(
        home.folder, SOURCE.replace("self.store.keep.fork(key, 0.5)", "self.store.keep.fork(key, 0.75)")
    )
    result = home.json("--app", f"{other}:Dice", "--peer-log", "store", status=3)
    difference = result["sections"][0]["output_divergences"][0]["difference"]
    assert re.fullmatch(r"\.\.\.a{900,}', 0\.5\)", difference["then"])
    assert re.fullmatch(r"\.\.\.a{900,}', 0\.75\)", difference["now"])


def test_calls_to_oneself_are_compared_with_the_own_log(home: Home) -> None:
    home.record("OwnDice", puts("a", "checkpoint"))
    (divergence,) = home.json(status=3)["sections"][0]["output_divergences"]
    assert divergence["destination"] == "app"
    assert divergence["difference"]["position"] == 1
    assert divergence["difference"]["then"] != divergence["difference"]["now"]


def test_the_order_of_a_set_is_found(home: Home) -> None:
    home.record("Sets", puts("many", "checkpoint", "tell", "checkpoint"))
    first, second = home.json("--all", "--peer-log", "store", status=3)["sections"]
    assert first["same"]
    (divergence,) = second["output_divergences"]
    assert (divergence["difference"]["then"], divergence["difference"]["now"]) == (
        "Store.keep('15', 0.0)",
        "Store.keep('16', 0.0)",
    )
    assert second["state_is_same"]
    assert any("tags" in warning for warning in second["warnings"])


def test_a_set_in_another_order_is_the_same_state(home: Home) -> None:
    home.record("Sets", puts("many", "checkpoint", "nothing", "checkpoint"))
    sections = home.json("--all", status=0)["sections"]
    assert [section["state_is_same"] for section in sections[:2]] == [True, True]


def test_changed_code_is_found_too(home: Home) -> None:
    home.record("Sound", puts("a", "b", "c", "checkpoint"))
    fewer = write_module(
        home.folder, SOURCE.replace("self.noted.fork(key, immortal", "key == 'b' or self.noted.fork(key, immortal")
    )
    (section,) = home.json("--app", f"{fewer}:Sound", status=3)["sections"]
    assert [divergence["destination"] for divergence in section["output_divergences"]] == ["app"]
    raising = write_module(
        home.folder, SOURCE.replace("self.sizes[key] = len(key)", "self.sizes[key] = 1 // (key != 'b')")
    )
    lines = home.verify("--app", f"{raising}:Sound", status=3).stdout.splitlines()
    assert lines[1] == (
        "  DIVERGED: Sound.put at record 3, message 0 did not fail when it was handled, and fails now: "
        "ZeroDivisionError: integer division or modulo by zero"
    )
    stopping = (home.folder / f"{raising}.py").read_text().replace("(Immortal)", '(Immortal, on_error="stop")')
    lines = home.verify("--app", f"{write_module(home.folder, stopping)}:Sound", status=3).stdout.splitlines()
    assert "  DIVERGED: the handler of record 3, message 0 raised:" in lines
    assert any("ZeroDivisionError" in line for line in lines)


def test_a_replay_that_makes_too_few_calls(home: Home) -> None:
    home.record("Sound", puts("a", "b", "checkpoint"))
    silent = write_module(home.folder, SOURCE.replace("self.store.keep.fork(key, immortal.random.random())", "pass"))
    (section,) = home.json("--app", f"{silent}:Sound", status=3)["sections"]
    (divergence,) = section["output_divergences"]
    assert (divergence["destination"], divergence["made_position"], divergence["made"]) == ("store", 0, [])


def test_a_replay_that_makes_calls_behind_the_last_ones(home: Home) -> None:
    home.record("Dice", puts("a", "b", "checkpoint"))
    more = write_module(home.folder, SOURCE.replace('if key.startswith("x"):', 'if key == "b":'))
    lines = home.verify("--app", f"{more}:Dice", status=3).stdout.splitlines()
    (said,) = [line for line in lines if "DIVERGED: 'app'" in line]
    assert "by a checkpoint, the calls to 'store' had reached number 2; the replay makes 3" in said
    assert any(line.startswith("    now 3: Store.keep('b', 0.") for line in lines)


def test_calls_to_somebody_that_was_never_called(home: Home) -> None:
    home.record("Clocked", puts("a", "checkpoint"))
    more = write_module(home.folder, SOURCE.replace("self.last = time.time()", "self.noted.fork(key, 0.0)"))
    (divergence,) = home.json("--app", f"{more}:Clocked", status=3)["sections"][0]["output_divergences"]
    assert (divergence["destination"], divergence["after_position"], divergence["is_surplus"]) == ("app", 0, True)


def test_a_damaged_checkpoint_is_passed_over(home: Home) -> None:
    home.record("Sound", puts("a", "checkpoint", "b", "checkpoint", "c"))
    log = home.folder / "app" / "log"
    with open_reader(log) as reader:
        blob = b"".join(reader.checkpoint_chunks(2))
    data = (log / "data.mdb").read_bytes()
    (log / "data.mdb").write_bytes(data.replace(blob, bytes(len(blob))))  # old pages may hold a copy
    verified = home.json(status=0)
    assert [(one["from_checkpoint"], one["to_checkpoint"]) for one in verified["sections"]] == [(1, 3), (3, None)]
    assert "checkpoint 2 is left out" in verified["notes"][0]
    assert "note: checkpoint 2 is left out" in home.verify(status=0).stdout
    assert "checkpoint 2 can't be used" in home.verify("--checkpoint", "2", status=1).stderr


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["--checkpoint", "9"], 1, "there is no checkpoint 9 to begin at: the log holds 1, 2"),
        (["--checkpoint", "1", "--all"], 2, "give one of --checkpoint and --all"),
        (["--peer-log", "nobody"], 1, "'nobody' is neither a registered instance with a log nor the folder of one"),
        (["--peer-log", "app"], 2, "this is the log of 'app' itself"),
        (["--app", "nowhere:Sound"], 1, "there is no module 'nowhere'"),
    ],
)
def test_what_cannot_be_found_out(home: Home, arguments: list[str], status: int, said: str) -> None:
    home.record("Sound", puts("a", "checkpoint"))
    assert said in home.verify(*arguments, status=status).stderr


FEEDING = """
import os
import immortal
from immortal import Immortal, Impulses, impulse, on_primary


class Feeder(Immortal):
    lines: dict[str, int]

    def __init__(self) -> None:
        self.lines = {}

    @impulse
    def line(self, text: str) -> None:
        self.lines[text] = immortal.random.randrange(1000)

    @on_primary
    def feed(self, impulses: Impulses) -> None:
        for number in range(len(self.lines), 3000):
            impulses.line(f"line {number}")
        impulses.flush()
        with open(os.environ["FED"], "w") as file:
            file.write("fed")
"""


def test_an_instance_that_really_runs_can_be_looked_at_and_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = write_module(tmp_path, FEEDING)
    home = tmp_path / "home"
    fed = tmp_path / "fed"
    os.mkfifo(fed)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("FED", str(fed))
    Registry(home).register("feeder", "tcp://127.0.0.1:*")
    immortal = [sys.executable, "-m", "immortal", "--home", str(home)]
    running = subprocess.Popen([*immortal, "run", "feeder", f"{name}:Feeder"], stderr=subprocess.DEVNULL)
    try:
        assert fed.read_text() == "fed"  # once all is on disk
        beside = CliRunner().invoke(main, ["--home", str(home), "replay", "feeder", "--state", "--json"])
        assert beside.exit_code == 0, beside.output
        assert len(json.loads(beside.stdout)["state"]["state"]["lines"]) == 3000
        running.send_signal(signal.SIGTERM)
        assert running.wait(DEADLINE_S) == 0
    finally:
        running.kill()
        running.wait()
    result = CliRunner().invoke(main, ["--home", str(home), "verify", "feeder"])
    assert result.exit_code == 0, result.output
    assert "checkpoint 1 (before record 0) to checkpoint 2" in result.output
    assert "state: the same" in result.output
