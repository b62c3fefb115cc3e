"""The pipeline on a real standalone cluster: the command line as its driver, workers in processes of their own."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from immortal.pipeline import packing
from immortal.protocol.trailer import BatchKind
from tests.helpers.fleet import Found, damage, duplicate, lose, plan_fleet, streams_for_faults
from tests.helpers.flow import STATUSES, app_options, record_flow
from tests.helpers.pipeline_app import SELL, arguments
from tests.helpers.pipeline_logs import START_NS, Batch, Call, RecordSpec, make_log
from tests.helpers.spark_cluster import BRIEF_JVM, REPOSITORY, standalone_cluster
from tests.helpers.talk_fleet import record_talk, write_changed_code

CONF = {"spark.executor.memory": "512m", "spark.executor.extraJavaOptions": BRIEF_JVM}
DRIVER = """
import contextlib, json, sys
from click.testing import CliRunner
from immortal.cli import main
from immortal.pipeline import session

session._NICENESS = 0  # with a lower priority it would be last of all tests
master, conf, commands = json.loads(sys.argv[1])
session.session(master, **conf)  # which all commands go on with: its executors are started once
found = []
for folder, arguments in commands:
    with contextlib.chdir(folder):
        result = CliRunner().invoke(main, arguments)
    found.append([result.exit_code, result.stdout, result.stderr])
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the cluster's processes leave behind."""
    return tmp_path_factory.mktemp("cluster")


@pytest.fixture(scope="module")
def cluster(work: Path) -> Iterator[str]:
    with standalone_cluster(work) as url:
        yield url


def ended(command: list[str], cwd: Path, **variables: str) -> str:
    """What it printed, without an environment for Spark that this process may have."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("SPARK", "PYSPARK"))}
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment | variables, cwd=cwd, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


KILL_ONCE = """
import contextlib, os, signal
from pathlib import Path


def check(fleet):
    with contextlib.suppress(FileExistsError):
        os.close(os.open("killed", os.O_CREAT | os.O_EXCL))
        pid = os.getpid()
        while b"ExecutorBackend" not in Path(f"/proc/{pid}/cmdline").read_bytes():
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(pid, signal.SIGKILL)
"""


@dataclass
class Runs:
    """What commands on the cluster gave: their exit status, and what they printed."""

    folder: Path
    audit: tuple[int, str, str]
    what_if: tuple[int, str, str]
    propagating: tuple[int, str, str]
    planted: Found
    orders: list[str]
    executors: list[str]
    """The worker of each executor that was started."""


@pytest.fixture(scope="module")
def runs(cluster: str, work: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("runs")
    rng = random.Random(3)
    plan = plan_fleet(6, messages=3_000, seed=3)
    damaged = plan.names[-1]
    streams = [pair for pair in streams_for_faults(plan) if damaged not in pair]
    planted = [lose(plan, *streams[0], rng), duplicate(plan, *streams[1], rng), damage(plan, damaged, rng)]
    plan.write(folder / "logs")
    audit = ["audit", str(folder / "logs"), "--tolerance-ms", "1000000"]
    (folder / "flow").mkdir()
    record_flow(folder / "flow")
    what_if = ["what-if", str(folder / "flow" / "home"), *app_options(), "--code", "../new"]
    (folder / "talk").mkdir()
    home = record_talk(folder / "talk")
    (folder / "talk" / "checks.py").write_text(KILL_ONCE)
    orders = ["--change", f"helper={write_changed_code(folder / 'talk' / 'new')}:Helper"]
    orders += ["--code", str(folder / "talk" / "new"), "--check", "checks:check", "--seeds", "5"]
    commands = [
        (str(REPOSITORY), ["pipeline", *audit, "--json"]),
        (str(folder / "flow" / "old"), ["pipeline", *what_if, "--json"]),
        (str(folder / "talk"), ["pipeline", "what-if", "--propagate", str(home), *orders, "--json"]),
    ]
    conf = {**CONF, "spark.executorEnv.PYTHONPATH": str(REPOSITORY)}
    before = len(executors(work))
    driver = [sys.executable, "-c", DRIVER, json.dumps([cluster, conf, commands])]
    found = map(tuple, json.loads(ended(driver, REPOSITORY).splitlines()[-1]))
    return Runs(folder, *found, set().union(*planted), orders, executors(work)[before:])


def executors(work: Path) -> list[str]:
    """Return the worker of each executor that was started, in the order of their start."""
    folders = sorted(work.glob("work-*/app-*/*"), key=lambda path: path.stat().st_ctime_ns)
    return [path.parent.parent.name for path in folders]


def values(run: tuple[int, str, str], status: int) -> dict[str, Any]:
    assert run[0] == status, run
    found: dict[str, Any] = json.loads(run[1])
    return found


def test_executors_import_from_a_packed_environment(cluster: str, tmp_path: Path) -> None:
    """Their Python has no package at all, and the code that the driver finds in its folder is nowhere on theirs."""
    code = tmp_path / "code"
    code.mkdir()
    (code / "packed_shop.py").write_text("from tests.helpers.pipeline_app import Shop as Shop\n")
    calls = [Call(SELL, 1, arguments("tea", 3))]
    log = make_log(
        tmp_path / "log", "shop", [RecordSpec(0, START_NS, [Batch(BatchKind.STREAM, "alice", 1, START_NS, calls)])]
    )
    shutil.copytree(REPOSITORY / "tests" / "helpers", code / "tests" / "helpers")
    archive = tmp_path / "env.tar.gz"
    with patch.object(packing, "_EXTRAS", "spark"):  # no more than the job needs
        packing.pack(archive, code)
    venv.create(tmp_path / "bare")
    command = [sys.executable, "-m", "immortal", "pipeline", "stats", str(log), "--decode", "packed_shop:Shop"]
    command += ["--json", "--master", cluster, "--env", str(archive), "--conf", "spark.cores.max=1"]
    command += [part for name, value in CONF.items() for part in ("--conf", f"{name}={value}")]
    found = json.loads(ended(command, code, PYSPARK_PYTHON=str(tmp_path / "bare" / "bin" / "python")))
    assert [each["method"] for each in found["methods"]] == ["sell"]


def test_an_audit_on_a_cluster_finds_what_is_wrong(runs: Runs) -> None:
    report = values(runs.audit, 3)
    found = {
        (each["kind"], each["sender"], each["receiver"], position)
        for each in report["violations"]
        for position in range(each["first"], each["last"] + 1)
    }
    assert found == runs.planted
    assert sorted(runs.executors[:2]) == ["work-0", "work-1"], "both workers took part"


def test_a_what_if_on_a_cluster_finds_what_does_other_things(runs: Runs) -> None:
    """Each side of each instance in a fresh process on the workers, with code of equal module names."""
    changed = values(runs.what_if, 3)
    assert {each["instance"]: each["status"] for each in changed["instances"]} == STATUSES
    for each in changed["instances"]:
        files = [each["values"][f"{side}_code"]["file"] for side in ("old", "new")]
        flow = runs.folder / "flow"
        assert files == [str(flow / side / "flow" / f"{each['instance']}.py") for side in ("old", "new")]


def test_a_what_if_that_propagates_on_a_cluster_is_that_of_one_process(runs: Runs) -> None:
    """Orders are tried on two workers; the executor of one is killed in the middle."""
    found, talk = values(runs.propagating, 3), runs.folder / "talk"
    assert (talk / "killed").exists()
    assert len(runs.executors) == 3
    command = [sys.executable, "-m", "immortal", "--home", str(talk / "home"), "what-if", "--fleet", *runs.orders]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    alone = subprocess.run([*command, "--json"], capture_output=True, text=True, env=environment, cwd=talk, check=False)
    assert json.dumps(found) == json.dumps(json.loads(alone.stdout)), alone.stderr
