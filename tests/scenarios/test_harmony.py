"""Pipelines of real processes that are killed; the guide's programs and the example as they stand."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from immortal.appsdk.patterns.harmony import batch as harmony_limits
from immortal.patterns.harmony import BatchConflict, connect
from tests.helpers.cli import HOME, Run, immortal

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "patterns" / "harmony.md").read_text()
REQUIREMENTS = (ROOT / "tests" / "requirements" / "harmony.md").read_text()
PROGRAMS = dict(re.findall(r"```python\n# (\w+)\.py\n(.*?)```", GUIDE, re.DOTALL))
OUTPUTS = dict(re.findall(r"```output (\w+)\n(.*?)```", GUIDE, re.DOTALL))
TIMEOUT_S = 40.0
DEADLY = """

def deadly(number: int) -> int:
    import os
    if number == 7:
        os._exit(9)
    return number
"""
HANGING = """

def hanging(number: int) -> int:
    import os, signal, time
    if number == 3 and not os.path.exists("frozen"):
        open("frozen", "w").close()
        os.kill(os.getpid(), signal.SIGSTOP)
    if number == 12 and not os.path.exists("stuck"):
        open("stuck", "w").close()
        time.sleep(600)
    return number
"""


@contextmanager
def pipeline(folder: Path, *work: str) -> Iterator[subprocess.Popen[bytes]]:
    """Cluster, collector and a crew of two."""
    with ExitStack() as stack:
        runs = []
        for name, cls in (("cluster", "Cluster"), ("results", "Collector")):
            immortal(folder, "register", name, "--peer", "tcp://127.0.0.1:*")
            runs.append(Run(folder, name, f"immortal.patterns.harmony:{cls}", "--restart"))
            stack.callback(runs[-1].kill)
        for run in runs:
            run.line("ready")
        command = [sys.executable, "-m", "immortal.patterns.harmony", "work", "cluster", *work]
        crew = subprocess.Popen(command, cwd=folder, env=environment(folder))
        try:
            yield crew
            crew.terminate()
            assert crew.wait(TIMEOUT_S) == 0
        finally:
            crew.kill()


def environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "IMMORTAL_HOME": str(folder / HOME), "PYTHONPATH": str(ROOT)}


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=environment(folder),
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done


def test_a_batch_whose_workers_and_instances_are_killed() -> None:
    """The example: coordinators and apps of the cluster and the collector are killed as well."""
    script = str(ROOT / "examples" / "harmony" / "killed_batch.py")
    command = [sys.executable, script, "--tasks", "30000", "--kills", "2", "--instances", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "30000 of 30000 results, 0 wrong: right" in done.stdout


def test_the_programs_of_the_guide(tmp_path: Path) -> None:
    assert sorted(PROGRAMS) == ["own_worker", "send", "sums", "tasks"]
    for name, source in PROGRAMS.items():
        (tmp_path / f"{name}.py").write_text(source)
    with pipeline(tmp_path, "tasks:square", "--processes", "2"):
        for _ in range(2):  # the second time nothing is done again
            lines = run(tmp_path, "send.py").stdout
            assert re.sub(r"\d workers", "2 workers", lines) == OUTPUTS["send"]
        with connect("cluster", home=tmp_path / HOME) as cluster:
            with pytest.raises(BatchConflict, match="is for 'square' and collector 'results' with 100000 tasks"):
                cluster.batch("squares", "cube", collector="results")
            again = cluster.batch("few", "square", collector="results")
            again.send([1, 2])
            again.wait(timeout=TIMEOUT_S)
            with pytest.raises(BatchConflict):
                cluster.batch("few", "square", collector="results").send([1, 3])
            again = cluster.batch("few", "square", collector="results", again=True)
            again.send([3, 4])
            assert [result.value for result in again.results(timeout=TIMEOUT_S)] == [9, 16]
        with subprocess.Popen(
            [sys.executable, "own_worker.py"], cwd=tmp_path, env=environment(tmp_path)
        ) as own:  # finds its cluster, and leaves when it is told
            done = run(tmp_path, "-m", "immortal.patterns.harmony", "progress", "cluster", "--follow")
            assert "squares: 100000 of 100000 done" in done.stdout
            own.terminate()
        sums = run(tmp_path, "-c", "from sums import Sums; s = Sums(); print(s.sum())")
        assert sums.stdout == "0\n"


def test_a_task_that_kills_real_workers(tmp_path: Path) -> None:
    (tmp_path / "tasks.py").write_text(PROGRAMS["tasks"] + DEADLY)
    with pipeline(tmp_path, "tasks:deadly", "--processes", "2"):
        with connect("cluster", home=tmp_path / HOME) as cluster:
            batch = cluster.batch("deadly", "deadly", collector="results")
            batch.send(range(20))
            found = list(batch.results(timeout=TIMEOUT_S))
        assert [result.number for result in found if result.error] == [7]
        assert [result.value for result in found if not result.error] == [n for n in range(20) if n != 7]


@pytest.mark.usefixtures("started_anew")  # it counts children, and a server of forks is one
def test_workers_that_freeze_or_take_too_long(tmp_path: Path) -> None:
    (tmp_path / "tasks.py").write_text(PROGRAMS["tasks"] + HANGING)
    with pipeline(tmp_path, "tasks:hanging", "--processes", "2", "--task-timeout", "1") as crew:
        with connect("cluster", home=tmp_path / HOME) as cluster:
            batch = cluster.batch("hanging", "hanging", collector="results")
            batch.send(range(20))
            assert [result.value for result in batch.results(timeout=TIMEOUT_S)] == list(range(20))
            assert batch.progress().resent
        assert (tmp_path / "frozen").exists()
        assert (tmp_path / "stuck").exists()
        crew.terminate()
        deadline_s = time.monotonic() + TIMEOUT_S
        while len(children_of(crew.pid)) > 1:
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        crew.terminate()  # asked a second time, it kills the one that is frozen
        crew.wait(TIMEOUT_S)


@pytest.mark.usefixtures("started_anew")  # it counts children, and a server of forks is one
def test_ctrl_c_ends_workers_but_no_batch(tmp_path: Path) -> None:
    (tmp_path / "tasks.py").write_text(PROGRAMS["tasks"])
    with pipeline(tmp_path, "tasks:square", "--processes", "2") as crew:
        with connect("cluster", home=tmp_path / HOME) as cluster:
            cluster.batch("open", "square", collector="results").put(1)
        command = [sys.executable, "-m", "immortal.patterns.harmony", "progress", "cluster", "--follow"]
        follows = subprocess.Popen(command, cwd=tmp_path, env=environment(tmp_path), stdout=subprocess.PIPE)
        assert follows.stdout is not None
        assert follows.stdout.readline().startswith(b"open")
        deadline_s = time.monotonic() + TIMEOUT_S
        while len(children_of(crew.pid)) < 2:
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        for process, status in ((follows, 130), (crew, 0)):
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=TIMEOUT_S)
            assert process.returncode == status


def children_of(pid: int) -> list[str]:
    threads = Path(f"/proc/{pid}/task").iterdir()
    return [child for thread in threads for child in (thread / "children").read_text().split()]


def test_mistakes_are_said(tmp_path: Path) -> None:
    (tmp_path / "tasks.py").write_text(PROGRAMS["tasks"])
    command = ("-m", "immortal.patterns.harmony")
    for arguments, status, text in (
        (("work", "cluster", "tasks:cube"), 2, "module 'tasks' has no 'cube'"),
        (("work", "cluster", "nothing:cube", "--processes", "2"), 2, "No module named 'nothing'"),
        (("work", "cluster", "cube"), 2, "MODULE:FUNCTION or NAME=MODULE:FUNCTION was expected"),
        (("work", "cluster", "tasks:square", "--processes", "0"), 2, "0 is not in the range x>=1"),
        (("progress", "cluster"), 1, "there is no instance 'cluster'"),
    ):
        done = run(tmp_path, *command, *arguments)
        assert (done.returncode, text in done.stderr) == (status, True), done.stderr


def test_the_guide_names_what_there_is() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_harmony*.py"))
    named = set(re.findall(r"`(test_\w+)`", REQUIREMENTS))
    assert len(named) > 10
    assert not {name for name in named if f"def {name}(" not in sources}
    for said in (
        f": {harmony_limits.RUN_TASKS_MAX} and {harmony_limits.RUN_SIZE_BYTES_MAX >> 10} KiB; a larger task",
        f": {harmony_limits.WAITING_TASKS_MAX:,} and {harmony_limits.WAITING_SIZE_BYTES_MAX >> 20} MiB;",
        f"cluster: {harmony_limits.BATCHES_OPEN_MAX}",
        f": {harmony_limits.BATCHES_ENDED_MAX:,}, the last ones",
        f"lost after {harmony_limits.SILENCE_S:g} s without a word",
        f"which {harmony_limits.DEATHS_MAX} workers were lost alone",
    ):
        assert said in " ".join(GUIDE.split()), said
