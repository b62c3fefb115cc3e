"""The tool that changes the code: which changes there are, and whether it sees what the tests notice."""

from __future__ import annotations

import ast
import textwrap
from pathlib import Path

import pytest

from tests.mutants import rooms, run
from tests.mutants.operators import mutants
from tests.mutants.rooms import ROOMS, Reach, Room

MODULE = """\
def is_full(size, limit):
    return size >= limit


def larger(one, other):
    if one > other:
        return one
    return other
"""
TESTS = """\
from project.small.sizes import is_full, larger

def test_full():
    assert [is_full(size, 2) for size in (1, 2, 3)] == [False, True, True]

def test_larger():
    assert [larger(1, 2), larger(2, 1), larger(2, 2)] == [2, 2, 2]
"""
CONFTEST = """\
def pytest_addoption(parser):
    parser.addoption("--medium", action="store_true")
"""


def changes(body: str) -> set[str]:
    source = "def f():\n" + textwrap.indent(body, "    ")
    found = mutants("x.py", source.encode())
    assert all(one.is_sound for one in found)
    assert all(one.within == "f" for one in found)
    return {one.change.partition("\n+ ")[2] for one in found}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("g = a < b", {"g = (a <= b)"}),
        ("g = a is None", {"g = (a is not None)"}),
        ("g = a and b()", {"g = (a or b())", "g = (not a) and b()", "g = a and (not b())"}),
        ("g = not a", {"g = (a)"}),
        ("g = a - 1", {"g = (a + 1)", "g = a - (2)"}),
        ("g = a + 'x'", set()),
        ("g = True", {"g = (False)"}),
        ("g = h(a, b, c=d)", {"g = (h(b, a, c=d))"}),
        ("g = max(a, b)", set()),
        ("g = a if b else c", {"g = (c if b else a)", "g = a if (not b) else c"}),
        ("g(a)", {"pass"}),
        ("g.h = a", {"pass"}),
        ("g += a", {"pass"}),
        ("raise E(f'{a + b}')", {"pass"}),
        ("return a", {"return None"}),
        ("return None", set()),
        ("if a:\n    return", {"if (not a):", "pass"}),
        ("g: int = h['é'][a < b]", {"g: int = h['é'][(a <= b)]"}),
        ("'''text'''", set()),
    ],
)
def test_the_changes_of_a_line(body: str, expected: set[str]) -> None:
    assert changes(body) == expected


def test_only_functions_are_changed_and_each_change_is_one_place() -> None:
    source = b"LIMIT = 3 + 4\nclass A:\n    size = 3\n    def g(self, n: int = 3) -> int:\n        return n * 2\n"
    found = mutants("x.py", source)
    assert {(one.line, one.within) for one in found} == {(4, "A.g"), (5, "A.g")}
    for one in found:
        assert one.is_sound
        before, after = source.splitlines(), one.source.splitlines()
        assert [index + 1 for index, lines in enumerate(zip(before, after, strict=True)) if lines[0] != lines[1]] == [
            one.line
        ]
        ast.parse(one.source)


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project of one module; its tests notice each change but one, which changes nothing."""
    for path, text in {"small/sizes.py": MODULE, "tests/test_sizes.py": TESTS, "conftest.py": CONFTEST}.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    (tmp_path / "accepted.toml").write_text("")
    package = tmp_path / "project"
    package.mkdir()
    (package / "small").symlink_to("../small")
    for module in (rooms, run):
        monkeypatch.setattr(module, "ROOT", tmp_path)
        monkeypatch.setattr(module, "PACKAGE", package)
    monkeypatch.setattr(run, "ROOMS", (Room("small", "small", ("test_*.py",)),))
    monkeypatch.setattr(run, "reach_of", lambda room: Reach({"tests/test_sizes.py": 1.0}, {}))
    return tmp_path


@pytest.mark.slow
def test_a_change_that_matters_is_found_and_one_that_changes_nothing_survives(
    small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    accepted = ["--survivors", str(small / "accepted.toml")]
    status = run.main([*accepted, "--jobs", "1", "--only", "small/sizes.py", "--line", "6"])
    shown = capsys.readouterr().out
    assert status == run.STATUS_SURVIVED
    assert "1 mutants: 0 killed" in shown
    survivor = shown.partition("[[survivor]]")[2]
    assert "- if one > other:\n+ if (one >= other):" in survivor
    (small / "accepted.toml").write_text("[[survivor]]" + survivor.replace("reason = ''", "reason = 'the same number'"))
    assert run.main([*accepted, "--jobs", "1", "--number", "2"]) == 0, "it is accepted, and all others are killed"
    shown = capsys.readouterr().out
    assert "2 mutants: 2 killed by the tests of their room" in shown
    assert "killed by unit tests: FAILED tests/test_sizes.py::test_" in shown
    assert (small / "small/sizes.py").read_text() == MODULE
    (small / "small/sizes.py").write_text(MODULE.replace("one > other", "one - other > 0"))
    assert run.main([*accepted, "--jobs", "1", "--number", "1"]) == run.STATUS_SURVIVED
    assert "accepted, but there is no such change any more: small/sizes.py larger" in capsys.readouterr().out


@pytest.mark.slow
def test_what_does_not_end_is_killed(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "PROCESSOR_MIN_S", 2)
    monkeypatch.setattr(run, "PROCESSOR_FACTOR", 0)
    (small / "small/sizes.py").write_text(MODULE.replace("    if", "    while not one:\n        one += 1\n    if"))
    (small / "tests/test_sizes.py").write_text(TESTS + "    assert larger(0, 0) == 1\n")
    endless = next(one for one in run.all_of(Room("small", "small", ()), None) if one.operator == "statement removed")
    outcome = run.try_out(endless, Reach({"tests/test_sizes.py": 1.0}, {}))
    assert (outcome.killed_by, outcome.why) == ("unit tests", "time limit: 2 s of a processor")


def test_a_seed_draws_the_same_changes_again_spread_over_the_rooms() -> None:
    of_rooms = {room.name: [one for path in room.modules()[2:5] for one in run.all_of(room, path)] for room in ROOMS}
    drawn = run.draw(3, 12, of_rooms, {})
    assert drawn == run.draw(3, 12, of_rooms, {})
    assert drawn != run.draw(4, 12, of_rooms, {})
    of_room = [sum(one.path.startswith(room.folder) for one in drawn) for room in ROOMS]
    assert of_room == [3, 3, 2, 2, 2]
    accepted = {run.key_of(drawn[0]): "a reason"}
    assert drawn[0] not in run.draw(3, 12, of_rooms, accepted)


def test_tests_that_run_the_function_are_tried_the_quickest_first_or_all() -> None:
    reach = Reach({"slow": 9.0, "quick": 1.0, "other": 0.1}, {("m.py", "f"): frozenset({"slow", "quick"})})
    assert reach.tests_of(("m.py", "f")) == ["quick", "slow"]
    assert reach.tests_of(("m.py", "g")) == ["other", "quick", "slow"]
    assert not reach.is_simulated("m.py")


def test_each_room_has_modules_and_tests() -> None:
    """A folder that was renamed would have none, without a word."""
    for room in ROOMS:
        assert room.modules()
        assert room.test_files()
        for pattern in room.tests:
            assert list((rooms.ROOT / "tests").glob(pattern)), pattern


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--number", "0"], "a positive number was expected"),
        (["--only", "coordinator/cor"], "--only coordinator/cor: nothing to change is there"),
        (["--survivors", "none.toml"], "--survivors: "),
    ],
)
def test_what_is_called_wrongly_is_said(arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        run.main(arguments)
    assert stop.value.code == 2
    assert problem in capsys.readouterr().err
