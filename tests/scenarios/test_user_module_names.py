"""A folder of the user's may have modules named like rooms of ours: each is the user's, and all of ours work."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.cli import HOME, Run, immortal

ROOMS = ("appsdk", "bench", "cli", "coordinator", "pipeline", "presenters", "protocol", "replay", "web")
APP = f"""
import {", ".join(ROOMS)}
from immortal import Immortal, rpc

class Counter(Immortal):
    count: int = 0

    @rpc
    def add(self) -> int:
        self.count += sum(one.OWN for one in ({", ".join(ROOMS)}))
        return self.count
"""
IN_A_TEST = f"""
from counter import Counter
from immortal.testing import Environment

def test_it():
    with Environment() as env:
        counter = env.start(Counter, "counter")
        assert counter.call(Counter.add) == {len(ROOMS)}
"""
IN_A_PROGRAM = """
import protocol, replay, pipeline
import immortal.client, immortal.log, immortal.patterns.queue, immortal.pipeline
print(protocol.OWN, replay.OWN, pipeline.OWN)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ROOMS:
        if name in ("bench", "pipeline"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "__init__.py").write_text("OWN = 1\n")
        else:
            (tmp_path / f"{name}.py").write_text("OWN = 1\n")
    (tmp_path / "counter.py").write_text(APP)
    return tmp_path


def run(folder: Path, *command: str) -> str:
    done = subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_program_has_both(folder: Path) -> None:
    (folder / "program.py").write_text(IN_A_PROGRAM)
    assert run(folder, "program.py") == "1 1 1\n"


def test_the_services_of_a_module_are_listed(folder: Path) -> None:
    assert "Counter" in run(folder, "-P", "-m", "immortal.appsdk.running.listing", "counter")


def test_the_users_tests_run(folder: Path) -> None:
    (folder / "test_counter.py").write_text(IN_A_TEST)
    assert "1 passed" in run(folder, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_counter.py")


def lived(folder: Path) -> None:
    """One call is in the log of `counter`, and `new` has other code for it, with all modules that it imports."""
    immortal(folder, "register", "counter", "--peer", "tcp://127.0.0.1:*")
    running = Run(folder, "counter", "counter:Counter")
    try:
        running.line(" ready")
        assert immortal(folder, "call", "counter", "add").strip() == str(len(ROOMS))
    finally:
        running.stop()
    new = folder / "new"
    shutil.copytree(folder, new, ignore=shutil.ignore_patterns("new", HOME))
    (new / "counter.py").write_text(APP.replace("self.count +=", "self.count += 1 +"))


def test_each_command_that_loads_the_app_works_there(folder: Path) -> None:
    lived(folder)
    assert "counter: from checkpoint" in immortal(folder, "replay", "counter")
    assert "the same" in immortal(folder, "verify", "counter")
    compared = immortal(folder, "what-if", "counter", "--app", "counter:Counter", "--code", "new", status=3)
    assert f"count: was {len(ROOMS)}; would be {len(ROOMS) + 1}" in compared
    developed = Run(folder, "counter.py", command="dev")
    try:
        developed.line(" ready")
    finally:
        developed.stop()


@pytest.mark.cluster
def test_spark_workers_import_ours(folder: Path) -> None:
    lived(folder)
    compared = immortal(folder, "pipeline", "what-if", "--app", "counter:Counter", "--code", "new", status=3)
    assert "counter" in compared
