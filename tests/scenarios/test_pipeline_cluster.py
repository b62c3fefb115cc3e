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
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from immortal.pipeline import packing
from immortal.protocol.trailer import BatchKind
from tests.helpers.fleet import damage, duplicate, lose, plan_fleet, streams_for_faults
from tests.helpers.flow import STATUSES, app_options, record_flow
from tests.helpers.pipeline_app import SELL, arguments
from tests.helpers.pipeline_logs import START_NS, Batch, Call, RecordSpec, make_log
from tests.helpers.spark_cluster import BRIEF_JVM, REPOSITORY, standalone_cluster
from tests.helpers.talk_fleet import record_talk, write_changed_code


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the cluster's processes leave behind."""
    return tmp_path_factory.mktemp("cluster")


@pytest.fixture(scope="module")
def cluster(work: Path) -> Iterator[str]:
    with standalone_cluster(work) as url:
        yield url


def run(master: str, *arguments: object, status: int, cwd: Path = REPOSITORY) -> dict[str, Any]:
    """What `immortal pipeline` on the cluster printed."""
    command = [sys.executable, "-m", "immortal", "pipeline", *map(str, arguments), "--json"]
    command += ["--master", master, "--conf", "spark.executor.memory=512m"]
    command += ["--conf", f"spark.executor.extraJavaOptions={BRIEF_JVM}"]
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("SPARK", "PYSPARK"))}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=cwd, timeout=500)
    assert done.returncode == status, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_executors_import_from_a_packed_environment(tmp_path: Path) -> None:
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
    command = [
        sys.executable,
        "-m",
        "immortal",
        "pipeline",
        "stats",
        str(log),
        "--decode",
        "packed_shop:Shop",
        "--json",
    ]
    command += ["--conf", "spark.executor.memory=512m", "--conf", f"spark.executor.extraJavaOptions={BRIEF_JVM}"]
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("SPARK", "PYSPARK"))}
    environment["PYSPARK_PYTHON"] = str(tmp_path / "bare" / "bin" / "python")
    with standalone_cluster(tmp_path, 1, bare=True) as url:
        command += ["--master", url, "--env", str(archive)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=code, timeout=500)
    assert done.returncode == 0, done.stderr
    assert [each["method"] for each in json.loads(done.stdout)["methods"]] == ["sell"]


def executors(work: Path) -> list[str]:
    """The worker of each executor that was started."""
    return sorted(path.parent.parent.name for path in work.glob("work-*/app-*/*"))


def test_an_audit_on_a_cluster_finds_what_is_wrong(cluster: str, work: Path, tmp_path: Path) -> None:
    rng = random.Random(3)
    plan = plan_fleet(6, messages=3_000, seed=3)
    damaged = plan.names[-1]
    streams = [pair for pair in streams_for_faults(plan) if damaged not in pair]
    planted = [lose(plan, *streams[0], rng), duplicate(plan, *streams[1], rng), damage(plan, damaged, rng)]
    plan.write(tmp_path / "logs")
    before = executors(work)
    report = run(cluster, "audit", tmp_path / "logs", "--tolerance-ms", 1_000_000, status=3)
    found = {
        (each["kind"], each["sender"], each["receiver"], position)
        for each in report["violations"]
        for position in range(each["first"], each["last"] + 1)
    }
    assert found == set().union(*planted)
    assert executors(work) == sorted([*before, "work-0", "work-1"]), "both workers took part"


def test_a_what_if_on_a_cluster_finds_what_does_other_things(cluster: str, work: Path, tmp_path: Path) -> None:
    """Each side of each instance in a fresh process on the workers, with code of equal module names."""
    record_flow(tmp_path)
    before = executors(work)
    options = [*app_options(), "--code", "../new"]
    changed = run(cluster, "what-if", tmp_path / "home", *options, status=3, cwd=tmp_path / "old")
    assert {each["instance"]: each["status"] for each in changed["instances"]} == STATUSES
    for each in changed["instances"]:
        files = [each["values"][f"{side}_code"]["file"] for side in ("old", "new")]
        assert files == [str(tmp_path / side / "flow" / f"{each['instance']}.py") for side in ("old", "new")]
    assert executors(work) == sorted([*before, "work-0", "work-1"]), "both workers took part"


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


def test_a_what_if_that_propagates_on_a_cluster_is_that_of_one_process(cluster: str, tmp_path: Path) -> None:
    """Orders are tried on two workers; the executor of one is killed in the middle."""
    home = record_talk(tmp_path)
    told = ["--change", f"helper={write_changed_code(tmp_path / 'new')}:Helper", "--code", str(tmp_path / "new")]
    told += ["--check", "checks:check", "--seeds", "5"]
    (tmp_path / "checks.py").write_text(KILL_ONCE)
    found = run(cluster, "what-if", "--propagate", home, *told, status=3, cwd=tmp_path)
    assert (tmp_path / "killed").exists()
    command = [sys.executable, "-m", "immortal", "--home", str(home), "what-if", "--fleet", *told, "--json"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    alone = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, check=False)
    assert json.dumps(found) == json.dumps(json.loads(alone.stdout)), alone.stderr
