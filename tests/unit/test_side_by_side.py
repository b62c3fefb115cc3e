"""How tests are run side by side: what is alone, what stays together, and what the quick run leaves out."""

from __future__ import annotations

import fcntl
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from tests.helpers.kinds import DISK_MODULES, KINDS, NOT_MEDIUM, NOT_QUICK, group_of, is_left_out, kinds_of, place_of
from tests.helpers.memory import MEMORY, in_memory

ROOT = Path(__file__).parents[2]
WAIT_S = 20.0  # no test waits this long unless it fails
pytest.importorskip("xdist")
from tests.helpers.side_by_side import Room  # noqa: E402


@pytest.fixture
def rooms(tmp_path: Path) -> Iterator[list[Room]]:
    """The same room, as three processes see it: each has opened the files itself."""
    with ExitStack() as stack:
        yield [stack.enter_context(closing(Room(tmp_path))) for _ in range(3)]


class Visit(threading.Thread):
    def __init__(self, room: Room, *, alone: bool) -> None:
        super().__init__(daemon=True)
        self.room, self.alone, self.is_inside = room, alone, threading.Event()
        self.start()

    def run(self) -> None:
        self.room.enter(alone=self.alone)
        self.is_inside.set()


def until_somebody_waits_in_the_door(folder: Path) -> None:
    deadline_s = time.monotonic() + WAIT_S
    with (folder / "door").open() as door:
        while True:
            try:
                fcntl.flock(door, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return
            fcntl.flock(door, fcntl.LOCK_UN)
            assert time.monotonic() < deadline_s


def test_who_wants_to_be_alone_waits_for_all_others_and_then_all_others_wait(rooms: list[Room], tmp_path: Path) -> None:
    first, second, third = rooms
    first.enter(alone=False)
    second.enter(alone=False)
    alone = Visit(third, alone=True)
    until_somebody_waits_in_the_door(tmp_path)
    first.leave()
    late = Visit(first, alone=False)  # it does not pass by the one that waits
    assert not alone.is_inside.wait(0.05)
    assert not late.is_inside.is_set()
    second.leave()
    assert alone.is_inside.wait(WAIT_S)
    assert not late.is_inside.wait(0.05)
    third.leave()
    assert late.is_inside.wait(WAIT_S)
    second.enter(alone=False)


def test_each_kind_has_tests() -> None:
    """A file that was renamed would be of no kind, without a word."""
    for beginning in (*KINDS, *DISK_MODULES):
        path, _, test = beginning.partition("::")
        found = list(ROOT.glob(f"{path}*"))
        assert found, beginning
        assert not test or f"def {test}(" in found[0].read_text(), beginning


@pytest.mark.parametrize(
    ("test_id", "kinds", "group"),
    [
        ("tests/unit/test_cli.py::test_x[a::b]", set(), "tests/unit/test_cli.py"),
        ("tests/crash/test_bank.py::test_x", {"kills"}, "tests/crash/test_bank.py"),
        ("tests/crash/test_soak.py::test_x", {"kills"}, "tests/crash/test_soak.py::test_x"),
        ("tests/faults/test_matrix.py::test_x", {"kills"}, "faults"),
        ("tests/scenarios/test_pipeline_cli.py::test_x", {"kills", "cluster"}, "cluster"),
        ("tests/scenarios/test_pipeline_demo.py::test_x", {"kills", "cluster"}, "cluster"),
        ("tests/simulation/test_world.py::test_x[1]", {"long"}, "tests/simulation/test_world.py::test_x[1]"),
    ],
)
def test_kinds_and_groups(test_id: str, kinds: set[str], group: str) -> None:
    assert kinds_of(test_id) == kinds
    assert group_of(test_id) == group
    assert is_left_out(test_id.partition("::")[0], NOT_QUICK) is bool(kinds)
    assert is_left_out(test_id.partition("::")[0], NOT_MEDIUM) is bool(kinds - {"long"})


@pytest.mark.skipif(in_memory() is None, reason="this machine has no room in memory for the files of tests")
def test_files_are_in_memory_but_those_that_are_of_a_disk(tmp_path: Path) -> None:
    assert tmp_path.is_relative_to(MEMORY)


@pytest.mark.kills
def test_files_of_what_kills_are_on_the_disk(tmp_path: Path) -> None:
    assert not tmp_path.is_relative_to(MEMORY)


def test_what_takes_longest_is_begun_first() -> None:
    folders = (
        "scenarios/test_pipeline_cli.py",
        "crash/test_soak.py",
        "faults/test_matrix.py",
        "contract/test_log_cut.py",
    )
    places = [place_of(f"tests/{folder}::test_x") for folder in (*folders, "unit/test_cli.py")]
    assert places == sorted(set(places))
