"""What a page knows of all instances: it waits for none that takes long, and learns of it later."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from immortal.cli import status as status_command
from immortal.coordinator.instances.registry import Registry
from immortal.coordinator.operator import control
from immortal.coordinator.operator.control_server import ControlServer
from immortal.coordinator.project import run_lock
from immortal.presenters.fleet import TIMES_FRESH_S, Fleet
from immortal.presenters.status import instance_status
from immortal.web.log_messages import Logs
from tests.helpers.logged_fleet import LATENCY_NS, write_fleet

DEADLINE_S = 30.0
ANSWER = {"name": "slow", "phase": "normal", "outputs": {}, "checkpoint": None, "sequence_id": 4}


def until(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline_s


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    made = Registry(tmp_path)
    for name in ("slow", "stopped"):
        made.register(name, peer="tcp://127.0.0.1:*")
    return made


@contextmanager
def slow(registry: Registry) -> Iterator[threading.Event]:
    """An instance that runs, and answers once it is told to."""
    folder = registry.load("slow").folder
    server, answers, ended = ControlServer(folder), threading.Event(), threading.Event()
    control.announce(folder, server.listen())

    def serve() -> None:
        answers.wait()
        while not ended.is_set():
            for asked in server.process():
                asked.answer(ANSWER if asked.verb == "status" else {})

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield answers
    finally:
        answers.set()
        ended.set()
        thread.join()
        server.close()


def test_the_first_page_waits_for_no_instance_that_takes_long(registry: Registry) -> None:
    fleet = Fleet(registry, Logs().locked)
    with slow(registry) as answers:
        assert fleet.rows()[0].state == "asked just now", "it has not answered, and will not before this has come"
        until(lambda: fleet.rows()[1].state == "not started yet")
        assert fleet.rows()[0].state == "asked just now"
        answers.set()
        until(lambda: fleet.rows()[0].state == "running")
        fleet.refresh(30.0)
        assert [row.name for row in fleet.rows()] == ["slow", "stopped"]
    fleet.close()


def test_all_agree_on_the_state(registry: Registry) -> None:
    fleet = Fleet(registry, Logs().locked)
    for state in ("failed: status 70", "restarting: 'immortal run' died: SIGKILL"):
        run_lock.publish(registry.home, "immortal up", {"stopped": state})
        row = fleet.row("stopped")
        assert (row.state, instance_status(registry, "stopped")["state"]) == (state, state)
        assert status_command._service_row(registry, "stopped")["state"] == state
    assert fleet.row("slow").state == "not started yet"
    fleet.close()


def test_the_times_of_streams_outlive_a_log_that_is_read_or_lost(tmp_path: Path) -> None:
    write_fleet(tmp_path, {"callee": ["caller"]}, {})
    registry, logs = Registry(tmp_path), Logs()
    fleet = Fleet(registry, logs.locked)
    with logs.locked(registry.load("callee")):
        assert fleet._current_times("callee", {"sequence_id": 0}) == {}, "it waits for no other request"
    fleet._times.clear()
    times = fleet.row("callee").times
    assert (times["caller"].p50_ns, times["caller"].p99_ns, times["caller"].has_calls) == (LATENCY_NS, LATENCY_NS, True)
    (tmp_path / "callee.toml").write_text("peer = 5")
    fleet._times["callee"] = -TIMES_FRESH_S, 0, times  # so long ago
    assert fleet._row("callee").times == times
    fleet.close()


def test_who_comes_and_who_goes(registry: Registry) -> None:
    fleet = Fleet(registry, Logs().locked)
    fleet.refresh(30.0)
    registry.register("added", peer="tcp://127.0.0.1:*")
    assert [row.name for row in fleet.rows()] == ["added", "slow", "stopped"]
    (registry.home / "stopped.toml").unlink()
    assert [row.name for row in fleet.rows()] == ["added", "slow"]
    fleet.close()
