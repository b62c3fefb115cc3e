"""A table with real clients and forwarders: keys, slow readers, kills; the programs of its guide."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from immortal.appsdk.patterns.clone import model, publication, table
from immortal.client import CallRefused
from immortal.client import connect as connect_client
from immortal.patterns.clone import CloneError, Ended, NotEntitled, Place, Table, connect
from tests.helpers.cli import HOME, Run, immortal

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "patterns" / "clone.md").read_text()
REQUIREMENTS = (ROOT / "tests" / "requirements" / "clone.md").read_text()
PROGRAMS = dict(re.findall(r"```python\n# (\w+)\.py\n(.*?)```", GUIDE, re.DOTALL))
OUTPUTS = dict(re.findall(r"```output (\w+)\n(.*?)```", GUIDE, re.DOTALL))
WAIT_S = 40.0
SMALL = {"window_bytes": publication.WINDOW_BYTES_MIN, "mark_bytes": publication.MARK_BYTES_MIN}


def environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "IMMORTAL_HOME": str(folder / HOME), "PYTHONPATH": str(ROOT)}


@contextmanager
def running_table(folder: Path, *, registered: bool = False) -> Iterator[Run]:
    if not registered:
        immortal(folder, "register", "prices", "--peer", "tcp://127.0.0.1:*")
    run = Run(folder, "prices", "immortal.patterns.clone:Table", "--restart")
    try:
        run.line("ready")
        yield run
    finally:
        run.kill()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where a table runs, for all tests that kill nothing."""
    folder = tmp_path_factory.mktemp("clone")
    with running_table(folder):
        yield folder


@contextmanager
def forwarding(folder: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process, and where it publishes."""
    command = [sys.executable, "-m", "immortal.patterns.clone", "forward", "prices", *options]
    process = subprocess.Popen(command, cwd=folder, env=environment(folder), stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline().split()[-1]
    finally:
        process.kill()
        process.communicate()


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment(folder), capture_output=True, text=True, timeout=60, check=False
    )


def test_the_programs_of_the_guide(tmp_path: Path) -> None:
    for name, source in PROGRAMS.items():
        (tmp_path / f"{name}.py").write_text(source)
    with running_table(tmp_path):
        for name, output in OUTPUTS.items():
            done = run(tmp_path, f"{name}.py")
            assert done.stdout == output, done.stderr
    assert run(tmp_path, "edge.py").returncode == 0


@pytest.mark.kills
def test_copies_of_a_table_and_a_forwarder_that_are_killed() -> None:
    storm = str(ROOT / "examples" / "clone" / "storm.py")
    command = [sys.executable, storm, "--updates", "400", "--readers", "2", "--kills", "1", "--freeze", "0.5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 copies, 0 wrong" in done.stdout


def test_a_tree_of_forwarders(folder: Path) -> None:
    home = folder / HOME
    with forwarding(folder) as (_, first), forwarding(folder, "--upstream", first) as (second, place):
        with (
            connect("prices", int, home=home, publishers=[place], label="leaf") as leaf,
            connect("prices", home=home, subtrees=["@present"]) as present,
            connect("prices", int, home=home, subtrees=["a"], policy="block") as root,
        ):
            number = root.put("a/b", 17)
            leaf.wait(number)
            assert (leaf["a/b"], leaf.endpoint) == (17, place)
            changes = present.changes(timeout=WAIT_S)
            labels = {one["label"] for one in present.values()}
            while "leaf" not in labels:
                change = next(changes)
                labels.add(change.value["label"] if change.value else "")
            shown = run(folder, "-m", "immortal.patterns.clone", "show", "prices", "--all").stdout
            assert re.search(rf"forwarder at {place}: update \d+, [12] clients", shown), shown
            assert "leaf: in step, " in shown
        second.terminate()
        assert second.wait(WAIT_S) == 0
        with connect_client(Table, "prices", home=home) as table:
            assert place not in [one.endpoint for one in table.places()]


def test_a_slow_reader_harms_nobody(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("immortal.appsdk.patterns.clone.copies.CHANGES_WAITING_MAX", 10)
    home = folder / HOME
    with (
        connect("prices", str, home=home, subtrees=["s"], **SMALL) as slow,
        connect("prices", str, home=home, subtrees=["s"], policy="disconnect", **SMALL) as proud,
        connect("prices", str, home=home, subtrees=["s"]) as quick,
    ):
        changes, proud_changes = slow.changes(timeout=WAIT_S), proud.changes(timeout=WAIT_S)
        for index in range(200):
            quick.put(f"s/{index % 20}", f"{index} " + "x" * 500)
        number, expected = quick.snapshot()
        told = [next(changes)]
        while told[-1].number < number:
            told.append(next(changes))
        assert slow.snapshot()[1] == expected
        assert slow.counts.dropped > 0
        assert len(told) < 200
        assert [one.number for one in told] == sorted(one.number for one in told)
        with pytest.raises(Ended, match=r"too slow: .* high-water mark is 4 KiB"):
            list(proud_changes)
        with pytest.raises(Ended, match="too slow"):
            proud.wait(number)
        shown = run(folder, "-m", "immortal.patterns.clone", "show", "prices").stdout
        assert re.search(r"drop, [1-9]\d* changes dropped", shown), shown
        assert "1 ended for being slow" in shown


def test_writers_wait_for_one_that_blocks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("immortal.appsdk.patterns.clone.copies.CHANGES_WAITING_MAX", 10)
    home = folder / HOME
    with (
        connect("prices", str, home=home, subtrees=["w"], policy="block", label="ledger", **SMALL) as ledger,
        connect("prices", str, home=home, subtrees=["w"]) as writer,
    ):
        changes = ledger.changes(timeout=WAIT_S)

        def write() -> None:
            for index in range(300):
                writer.put(f"w/{index % 7}", f"{index} " + "x" * 500, wait=False)

        writing = threading.Thread(target=write)
        writing.start()
        with connect_client(Table, "prices", home=home) as table:
            while not any("ledger" in one for one in table.status().held_by):
                assert writing.is_alive()
        told = [next(changes).value for _ in range(300)]
        writing.join(WAIT_S)
        assert [int((value or "").split()[0]) for value in told] == list(range(300)), "nothing was dropped"
        assert ledger.counts.dropped == 0


def test_with_keys_each_sees_what_it_is_entitled_to(tmp_path: Path) -> None:
    home = tmp_path / HOME
    with running_table(tmp_path):
        for name in ("alice", "bob"):
            immortal(tmp_path, "keys", name, "--make", "--client")
        with (
            connect_client(Table, "prices", home=home) as table,
            connect("prices", int, home=home) as owner,
            connect("prices", int, home=home, identity="alice") as alice,
        ):
            owner.update({"a/1": 1, "b/1": 2})
            alice.wait(owner.number)
            assert sorted(alice) == ["a/1", "b/1"], "nobody is entitled: all see all"
            changes = alice.changes(timeout=WAIT_S)
            table.entitle("alice", ["a"])
            change = next(changes)
            assert (change.key, change.is_gone) == ("b/1", True), "at once"
            assert (sorted(alice), alice.subtrees) == (["a/1"], ("a",))
            assert sorted(owner) == ["a/1", "b/1"]
            with (
                pytest.raises(NotEntitled, match="'bob' may see nothing of ''"),
                connect("prices", home=home, identity="bob"),
            ):
                pass
            table.entitle("alice", [])
            with pytest.raises(NotEntitled, match="'alice' may see nothing"):
                next(changes)
            forwarded = run(tmp_path, "-m", "immortal.patterns.clone", "forward", "prices", "--identity", "bob")
            assert forwarded.returncode == 1
            assert "error: 'prices' is not forwarded here: 'bob' is no forwarder here" in forwarded.stderr
            table.entitle("bob", [], relay=True)
            table.entitle("alice", ["b"])
            with (
                forwarding(tmp_path, "--identity", "bob") as (_, place),
                connect("prices", int, home=home, identity="alice", publishers=[f"bob@{place}"]) as far,
            ):
                assert dict(far) == {"b/1": 2}, "filtered at the forwarder as well"


def test_a_reader_may_call_what_finds_publishers_and_nothing_else(tmp_path: Path) -> None:
    home = tmp_path / HOME
    immortal(tmp_path, "register", "prices", "--peer", "tcp://127.0.0.1:*")
    immortal(tmp_path, "keys", "prices", "--make")
    for name in ("alice", "bob"):
        immortal(tmp_path, "keys", name, "--make", "--client")
    allowed = re.findall(r"```toml\n(.*?)```", GUIDE, re.DOTALL)[0]
    settings = home / "prices.toml"
    settings.write_text(settings.read_text() + allowed)
    with (
        running_table(tmp_path, registered=True),
        connect("prices", int, home=home, identity="alice") as alice,
        connect("prices", int, home=home, identity="bob") as bob,
        connect_client(Table, "prices", home=home, identity="alice") as table,
    ):
        number = bob.put("a", 17)
        alice.wait(number)
        assert alice["a"] == 17
        with pytest.raises(CallRefused):
            alice.put("a", 18)
        with pytest.raises(CallRefused):
            table.entitle("alice", [""])
        with pytest.raises(CallRefused):
            table.forwarder_says("f", Place("tcp://127.0.0.1:1"), [], [], ["writers, wait"], True)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"subtrees": "a"}, ValueError, "a list was expected"),
        ({"subtrees": ["a//b"]}, ValueError, "printable parts"),
        ({"writes": "a//b"}, ValueError, "printable parts"),
        ({"policy": "never"}, ValueError, "'drop', 'block', 'disconnect' were expected"),
        ({"publishers": "tcp://127.0.0.1:1"}, ValueError, "a list was expected"),
        ({"publishers": ["tcp://127.0.0.1:1"], "timeout": 0.5}, CloneError, "there is no copy after 0.5 s: .*nobody"),
        ({"mark_bytes": 1}, CloneError, "a high-water mark of 1 bytes: 4096 to"),
    ],
)
def test_what_a_client_gets_wrong(folder: Path, options: dict[str, object], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text), connect("prices", home=folder / HOME, **options):  # type: ignore[call-overload]
        pass


def test_what_a_value_is_not(folder: Path) -> None:
    with connect("prices", int, home=folder / HOME, subtrees=["v"]) as clone:
        with pytest.raises(TypeError, match="'v/1': the value can't be encoded"):
            clone.put("v/1", object())  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="the table's own"):
            clone.put("@present/x", 1)
        clone.put("v/1", "text")  # type: ignore[arg-type]
        with pytest.raises(Exception, match="Expected `int`, got `str`"):
            clone["v/1"]
        assert "v/1" in clone
        changes = clone.changes(timeout=WAIT_S)
        clone.put("v/1", "more text")  # type: ignore[arg-type]
        clone.put("v/1", 5)
        with pytest.raises(msgspec.ValidationError):
            next(changes)
        assert next(changes).value == 5, "what one writer got wrong stops no reader"
        with pytest.raises(KeyError):
            clone["v/2"]


def test_who_only_reads_needs_no_table(tmp_path: Path) -> None:
    """A forwarder goes on while the table is away, and with it who joins."""
    home = tmp_path / HOME
    with running_table(tmp_path) as table, forwarding(tmp_path) as (_, place):
        with connect("prices", int, home=home) as prices:
            prices.put("a", 1)
        with connect("prices", int, home=home, publishers=[place]) as far:
            far.wait(prices.number)
            table.kill()
            with connect("prices", int, home=home, publishers=[place], timeout=10) as later:
                assert dict(later) == dict(far) == {"a": 1}


def test_the_end_of_a_clone_is_heard_at_once(folder: Path) -> None:
    home = folder / HOME
    with connect("prices", home=home, subtrees=["@present"], timeout=WAIT_S) as present:
        changes = present.changes(timeout=WAIT_S)
        with connect("prices", home=home, label="short"):
            key = next(one.key for one in changes if one.value and one.value["label"] == "short")
        assert next(one for one in changes if one.key == key).is_gone


def test_each_test_that_the_requirements_name_is_there() -> None:
    files = [
        "scenarios/test_clone",
        "properties/test_clone_rules",
        "unit/test_clone_table",
        "unit/test_clone_publishing",
    ]
    sources = "".join((ROOT / "tests" / f"{name}.py").read_text() for name in files)
    named = set(re.findall(r"`(test_\w+)`", REQUIREMENTS))
    assert len(named) > 12
    assert not {name for name in named if f"def {name}(" not in sources}
    assert f"- rows: {table.ROWS_MAX:,}, {table.SIZE_BYTES_MAX >> 20} MiB" in GUIDE
    assert f"away for more than the last {model.GONE_MAX:,} keys" in GUIDE
