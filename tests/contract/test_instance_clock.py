"""The clock of an instance from one process to the next: what its file keeps, and what a missing one costs."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from immortal.coordinator import clock as module
from immortal.coordinator.clock import FILE_NAME, InstanceClock
from immortal.coordinator.core.interfaces import CheckpointHeader
from immortal.coordinator.log.memory import MemoryLogStore
from immortal.coordinator.notices import Notices
from tests.helpers.notices import Told

S = 1_000_000_000
HOUR, DAY = 3600 * S, 86_400 * S
NOW = 1_700_000_000 * S


class Machine:
    """Its clocks, and what an instance on it has logged."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.wall_ns, self.steady_ns = NOW, 1000 * S
        self.told = Told()
        self._boot = folder / "boot"
        monkeypatch.setattr(module, "_BOOT_ID", self._boot)
        self.boot("first")

    def boot(self, name: str, steady_ns: int = 1000 * S) -> None:
        self._boot.write_text(name)
        self.steady_ns = steady_ns

    @property
    def lines(self) -> list[str]:
        return [notice.text for notice in self.told.notices]

    def passes(self, duration_ns: int) -> None:
        self.wall_ns += duration_ns
        self.steady_ns += duration_ns

    def start(self, *checkpoints_ns: int, last_ns: int = 0) -> InstanceClock:
        headers = [CheckpointHeader(number, number, 0, 0, at) for number, at in enumerate(checkpoints_ns, 1)]
        summary = replace(MemoryLogStore(77).summary(), checkpoints=headers, last_time_ns=last_ns)
        clocks = {"wall_ns": lambda: self.wall_ns, "steady_ns": lambda: self.steady_ns}
        return InstanceClock(self.folder, summary, 600 * S, Notices("alice", self.told), **clocks)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


@pytest.mark.parametrize("jump", [3 * DAY, -3 * DAY])
def test_a_start_while_the_clock_is_wrong_goes_on_as_the_process_before(machine: Machine, jump: int) -> None:
    machine.start()
    machine.passes(S)
    machine.wall_ns += jump
    again = machine.start(last_ns=NOW)
    assert again.now_ns() == NOW + S
    assert again.status()["ahead_s"] == jump / S
    assert len(machine.lines) == 1
    machine.wall_ns -= jump
    assert again.now_ns() == NOW + S
    assert again.status()["ahead_s"] == 0


def test_how_long_a_jump_has_stood_is_kept_too(machine: Machine) -> None:
    machine.start()
    machine.wall_ns += HOUR
    for _ in range(6):
        one = machine.start()
        for _ in range(110):
            machine.passes(S)
            one.tick()
    assert one.now_ns() == machine.wall_ns
    assert [line for line in machine.lines if "believed now" in line] == machine.lines[1:]


def test_another_start_of_the_machine_has_to_believe_the_clock_but_not_that_it_ran(machine: Machine) -> None:
    first = machine.start(NOW - 20 * DAY, last_ns=NOW)
    assert first.running.time_of_age(20 * DAY) == NOW - 20 * DAY
    first.close()
    machine.boot("second", 5 * S)
    machine.wall_ns += 60 * DAY
    second = machine.start(NOW - 20 * DAY, last_ns=NOW)
    assert second.now_ns() == NOW + 60 * DAY
    assert "60 days ahead of the log's last record" in machine.lines[0]
    assert second.running.time_of_age(30 * DAY) == 0, "nothing is thirty days old"
    assert second.running.time_of_age(10 * DAY) == NOW - 10 * DAY


def test_a_log_that_is_ahead_of_the_clock_goes_on_from_its_last_record(machine: Machine) -> None:
    one = machine.start(NOW - DAY, last_ns=NOW + HOUR)
    assert one.now_ns() == NOW + HOUR
    assert "1 hour behind the instance's time" in machine.lines[0]
    machine.passes(S)
    assert one.now_ns() == NOW + HOUR + S, "it does not stand still"


def test_without_its_file_the_log_says_how_long_it_has_run(machine: Machine) -> None:
    machine.start(NOW - 40 * DAY, last_ns=NOW)
    (machine.folder / FILE_NAME).unlink()
    machine.boot("second")
    machine.wall_ns += 60 * DAY
    again = machine.start(NOW - 40 * DAY, last_ns=NOW)
    assert again.running.time_of_age(30 * DAY) == NOW - 30 * DAY
    assert again.running.time_of_age(41 * DAY) == 0


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"boot": 7}'])
def test_a_broken_file_is_said_and_made_anew(machine: Machine, content: bytes) -> None:
    (machine.folder / FILE_NAME).write_bytes(content)
    assert machine.start().now_ns() == NOW
    assert "can't be read" in machine.lines[0]
    machine.told.notices.clear()
    machine.start()
    assert machine.lines == []


def test_a_file_that_cannot_be_written_is_said_once(machine: Machine) -> None:
    (machine.folder / f".{FILE_NAME}.new").mkdir()
    one = machine.start()
    machine.wall_ns += HOUR
    one.now_ns()
    assert [line for line in machine.lines if "can't be written" in line] == machine.lines[:1]


def test_the_folder_is_made_where_the_log_is_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(tmp_path, monkeypatch)
    machine.folder = tmp_path / "home" / "alice"
    machine.start()
    assert (machine.folder / FILE_NAME).exists()
    assert machine.lines == []


def test_what_was_stepped_is_told_to_the_next_process(machine: Machine) -> None:
    one = machine.start()
    one.pop_events()
    machine.wall_ns += HOUR
    one.now_ns()
    one.now_ns(accept=True)
    (step,) = one.pop_events()
    machine.passes(S)
    events = machine.start().pop_events()
    assert events[0] == step
    assert (events[1].time_ns, events[1].jumped_ns) == (machine.wall_ns, 0)
