"""A queue with real workers that are killed and stall; the programs of its guide, and its commands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from immortal.appsdk.patterns.queue import model, scheduler, tasks
from immortal.client import connect as connect_client
from immortal.patterns.queue import Queue, TaskFailed, Worker, connect
from tests.helpers.cli import HOME, Run, immortal

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "patterns" / "queue.md").read_text()
REQUIREMENTS = (ROOT / "tests" / "requirements" / "queue.md").read_text()
PROGRAMS = dict(re.findall(r"```python\n# (\w+)\.py\n(.*?)```", GUIDE, re.DOTALL))
OUTPUTS = dict(re.findall(r"```output (\w+)\n(.*?)```", GUIDE, re.DOTALL))
WORKER = """
from immortal.patterns.queue import Reject, work

def square(number: int) -> int:
    if number < 0:
        raise Reject("a negative one")
    return number * number

work("jobs", {"square": square}, heartbeat=0.1)
"""


@contextmanager
def running(folder: Path, *command: str) -> Iterator[subprocess.Popen[bytes]]:
    environment = {**os.environ, "IMMORTAL_HOME": str(folder / HOME), "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, *command], cwd=folder, env=environment)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@contextmanager
def queue(folder: Path) -> Iterator[Run]:
    immortal(folder, "register", "jobs", "--peer", "tcp://127.0.0.1:*")
    run = Run(folder, "jobs", "immortal.patterns.queue:Queue", "--restart")
    try:
        run.line("ready")
        yield run
    finally:
        run.kill()


@pytest.mark.kills
def test_tasks_of_workers_that_crash_and_stall_through_a_queue_that_is_killed() -> None:
    """The two failures at random by seed, kill -9 of app, coordinator and supervisor, a task that kills its workers."""
    storm = str(ROOT / "examples" / "queue" / "storm.py")
    command = [
        sys.executable,
        storm,
        "--tasks",
        "60",
        "--workers",
        "3",
        "--kills",
        "2",
        "--pause",
        "0.5",
        "--seed",
        "3",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "60 results are right, 0 wrong" in done.stdout
    found = re.search(r"(\d+) workers died, (\d+) stalled", done.stdout)
    assert found is not None
    assert int(found[1]) >= 2, "the poison alone kills two"


def test_the_programs_of_the_guide(tmp_path: Path) -> None:
    assert sorted(PROGRAMS) == ["client", "worker"]
    for name, source in PROGRAMS.items():
        (tmp_path / f"{name}.py").write_text(source)
    environment = {**os.environ, "IMMORTAL_HOME": str(tmp_path / HOME), "PYTHONPATH": str(ROOT)}
    with queue(tmp_path), running(tmp_path, "worker.py"):
        command = [sys.executable, "client.py"]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == OUTPUTS["client"], done.stderr


def test_dead_letters_in_the_operators_hand(tmp_path: Path) -> None:
    with queue(tmp_path) as run, running(tmp_path, "-c", WORKER) as worker:
        with connect("jobs", home=tmp_path / HOME) as jobs:
            right = jobs.submit("square", [3], returns=int, dedup="a")
            assert right.result(30) == 9
            assert jobs.submit("square", [3], dedup="a").id == right.id, "who died, and asks again"
            for arguments in ([-1], ["three"], [1, 2]):
                job = jobs.submit("square", arguments)
                with pytest.raises(TaskFailed, match="not tried again"):
                    job.result(30)
            with connect_client(Queue, "jobs", home=tmp_path / HOME) as queue_itself:
                (known,) = queue_itself.overview("dead").workers
            assert (known.state, known.done) == ("idle", 1)
        shown = immortal(tmp_path, "queue", "show", "jobs")
        assert "jobs: 0 waiting, 0 delayed, 0 running, 1 done, 3 dead, 0 dropped" in shown
        assert "not tried again: a negative one" in immortal(tmp_path, "queue", "show", "jobs", "2")
        assert '"result": 9' in immortal(tmp_path, "queue", "show", "jobs", "1", "--json")
        assert "jobs: 1 task dropped" in immortal(tmp_path, "queue", "drop", "jobs", "2", "--yes")
        assert "jobs: 2 tasks retried" in immortal(tmp_path, "queue", "retry", "jobs", "--all")
        worker.terminate()
        assert worker.wait(30) == 0, "it ends by itself"
        assert run.process.poll() is None


def test_a_worker_that_is_stopped_while_the_queue_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends, whatever it waits for."""
    monkeypatch.setattr("immortal.appsdk.patterns.queue.worker.STOP_S", 0.3)
    worker = Worker("jobs", {"square": abs}, home=tmp_path / HOME, heartbeat=0.1)
    with queue(tmp_path) as run, connect("jobs", home=tmp_path / HOME) as jobs:
        working = threading.Thread(target=worker.run)
        working.start()
        assert jobs.submit("square", [-3], returns=int).result(30) == 3
        run.kill()
        client: Any = worker._connector._clients[0]
        deadline_s = time.monotonic() + 30
        while len(client._shell.machine.connection._main.outstanding) < 2:  # a heartbeat waits as well
            assert time.monotonic() < deadline_s
        worker.stop()
        working.join(30)
        assert not working.is_alive()


def test_each_test_that_the_requirements_name_is_there() -> None:
    sources = Path(__file__).read_text() + (ROOT / "tests" / "unit" / "test_queue_scheduler.py").read_text()
    named = set(re.findall(r"`(test_\w+)`", REQUIREMENTS))
    assert len(named) > 8
    assert not {name for name in named if f"def {name}(" not in sources}
    assert f"- open tasks: {tasks.OPEN_TASKS_MAX:,}, with" in GUIDE
    assert f"- workers: {scheduler.WORKERS_MAX:,}, each with up to {model.NAMES_MAX} functions" in GUIDE
