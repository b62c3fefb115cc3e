"""Every named point, with two real services under `immortal run`: killed there, each line is still counted once."""

from __future__ import annotations

import contextlib
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from immortal.coordinator.fault_points import FaultPoint
from immortal.coordinator.instances.registry import Registry
from immortal.coordinator.operator import control
from immortal.protocol.errors import ImmortalError
from tests.helpers.spilling import limit_memory
from tests.soak.havoc import AT_A_CHECKPOINT, AT_RECOVERY, AT_START, IN_TRAFFIC
from tests.soak.service import APP, COORDINATOR, Service, SoakError, wait_for
from tests.soak.workloads import WordCount

# Points that the traffic of this workload does not pass, and the tests that kill there.
ELSEWHERE = {
    FaultPoint.BEFORE_VERSION: "crash/test_upgrade_kills.py",
    FaultPoint.AFTER_VERSION: "crash/test_upgrade_kills.py",
    FaultPoint.BEFORE_RESET: "scenarios/test_peers_cli.py",
    FaultPoint.AFTER_RESET: "scenarios/test_peers_cli.py",
    FaultPoint.LOG_CREATED: "crash/test_first_start_kills.py",
    FaultPoint.STOPPING: "crash/test_fault_points.py",
}
# What a sender passes with its receiver away for a while, and once it is back.
TO_DISK = (FaultPoint.BEFORE_SPILL, FaultPoint.AFTER_SPILL)
FROM_DISK = (FaultPoint.SPILL_READ, FaultPoint.DURING_SPILL_TRIM, FaultPoint.AFTER_SPILL_TRIM)
TESTS = Path(__file__).parents[1]
POINT_S = 5.0
ATTEMPTS = 4


@pytest.fixture
def workload(tmp_path: Path) -> Iterator[WordCount]:
    made = WordCount(tmp_path, random.Random(1))
    yield made
    for service in made.services:
        service.end()


def test_every_point_is_killed_at_somewhere() -> None:
    passed = {*AT_A_CHECKPOINT, *AT_RECOVERY, *AT_START, *IN_TRAFFIC, *TO_DISK, *FROM_DISK}
    assert passed | set(ELSEWHERE) == set(FaultPoint)
    assert not passed & set(ELSEWHERE)
    for point, file in ELSEWHERE.items():
        assert f"FaultPoint.{point.name}" in (TESTS / file).read_text()


def is_ready(service: Service) -> None:
    wait_for(lambda: service.ready, lambda: f"{service.name} is ready\n{service.tail()}")


def is_reached(service: Service) -> bool:
    with contextlib.suppress(SoakError):
        wait_for(lambda: not service.armed, lambda: "", POINT_S)
    return not service.armed


def provoke(point: FaultPoint, service: Service, reader: Service) -> None:
    """Make the service pass that point."""
    if point in AT_A_CHECKPOINT:
        with contextlib.suppress(ImmortalError):  # it may be killed at that question
            control.query(service.settings.folder, "checkpoint", 2.0)
    elif point in AT_START:
        service.kill(COORDINATOR)
    elif point in AT_RECOVERY:
        service.kill(APP)
    else:
        is_ready(reader)
        reader.kill(APP)  # it comes back with more input


def test_killed_at_every_point_each_line_is_counted_once(workload: WordCount) -> None:
    counter, reader = workload.services
    for service in workload.services:
        service.start()
    for service in workload.services:
        is_ready(service)
    points = [point for point in FaultPoint if point not in (*ELSEWHERE, *TO_DISK, *FROM_DISK)]
    for number, point in enumerate(points):
        # The reader sends and is answered, the counter answers: each passes the points of its side.
        sends = point in (FaultPoint.BEFORE_SEND, FaultPoint.RECORDS_READ)
        service = reader if sends or (number % 2 and point is not FaultPoint.BEFORE_ANSWER) else counter
        if point is FaultPoint.FRAME_RECEIVED:
            service = counter
        is_ready(service)
        workload.feed()
        service.arm(point)
        for _ in range(ATTEMPTS):
            provoke(point, service, reader)
            if is_reached(service):
                break
        assert not service.armed, f"{point} of {service.name} is not reached\n{service.tail()}"
    workload.settle()
    for service in workload.services:
        service.stop()
    assert "equal" in workload.check()


class LongWords(WordCount):
    """What the reader says at once is more than its memory may hold."""

    VOCABULARY = tuple(f"{number}" + "x" * 5_000 for number in range(20))


def test_killed_while_lines_wait_on_disk_each_is_counted_once(tmp_path: Path) -> None:
    workload = LongWords(tmp_path, random.Random(1))
    limit_memory(Registry(tmp_path / "registry"), "reader")
    counter, reader = workload.services
    try:
        for service in workload.services:
            service.start()
            is_ready(service)
        for point in (*TO_DISK, *FROM_DISK):
            is_ready(reader)
            counter.end()
            workload.feed()
            if point in TO_DISK:
                reader.arm(point)
            reader.kill(APP)  # it comes back with more input
            if point in FROM_DISK:
                wait_for(lambda: has_spilled(reader), lambda: f"it spills\n{reader.tail()}")
                reader.arm(point)
                counter.start()
            wait_for(lambda: not reader.armed, lambda: f"the point is reached\n{reader.tail()}\n{reader.status()}")
            wait_for(lambda: not reader.ready, lambda: f"the kill is noticed\n{reader.tail()}")
        for service in workload.services:
            is_ready(service)
        workload.settle()
        for service in workload.services:
            service.stop()
        assert "equal" in workload.check()
    finally:
        for service in workload.services:
            service.end()


def has_spilled(reader: Service) -> bool:
    outputs = reader.status().get("outputs", {})
    return bool(outputs.get("counter", {}).get("spilled_bytes"))


@pytest.mark.parametrize("action", ["stop", "delay=0.3"])
def test_stopped_or_held_up_at_a_point_each_line_is_counted_once(workload: WordCount, action: str) -> None:
    counter, reader = workload.services
    for service in workload.services:
        service.start()
        is_ready(service)
    counter.arm(FaultPoint.AFTER_COMMIT, action=action)
    workload.feed()
    reader.kill(APP)
    assert is_reached(counter)
    if action == "stop":
        pid = counter.pid(COORDINATOR)
        wait_for(lambda: _state(pid) == "T", lambda: f"it is stopped, but its state is {_state(pid)}")
        reader.kill(COORDINATOR)
        workload.feed()
        assert counter.signal(COORDINATOR, signal.SIGCONT)
    workload.settle()
    for service in workload.services:
        service.stop()
    assert "equal" in workload.check()


def _state(pid: int | None) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_stop_is_killed_there_too(workload: WordCount) -> None:
    """Its last checkpoint is durable by then; the next start has all."""
    counter = workload.services[0]
    for service in workload.services:
        service.start()
        is_ready(service)
    counter.arm(FaultPoint.STOPPING)
    with pytest.raises(SoakError, match="ended with status 1"):
        counter.stop()
    assert not counter.armed
    counter.start()
    workload.settle()
    for service in workload.services:
        service.stop()
    assert "equal" in workload.check()
