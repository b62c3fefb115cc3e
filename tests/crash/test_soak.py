"""Short soaks: `scripts/soak` with kills of each example, with faults of all kinds, and with seven takeovers."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from scripts.docs_site.tables import with_tables
from tests.helpers.effort import EFFORT, effort
from tests.helpers.postgres import VERSION_MIN, binaries
from tests.soak.outcomes import CELLS, Fault, document
from tests.soak.service import processes_with, wait_for
from tests.soak.workloads import WORKLOADS

REPOSITORY = Path(__file__).parents[2]


def soak(*arguments: str) -> str:
    command = [sys.executable, "-m", "tests.soak", "--seed", "20", *arguments]
    result = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, timeout=280 * max(1, EFFORT), check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.startswith("seed 20\n")
    assert " in 1 rounds, " in result.stdout
    return result.stdout


@pytest.mark.timeout(300)
@pytest.mark.parametrize("workload", sorted(WORKLOADS))
def test_kills(workload: str) -> None:
    soak("--kills", str(effort(8)), "--workload", workload)


@pytest.mark.timeout(300)
def test_faults() -> None:
    """Of all kinds: tests/soak/faults.py. Three banks and a teller that call each other."""
    count = effort(10)
    assert f"{count} faults in 1 rounds" in soak("--faults", str(count), "--workload", "bank")


TAKEOVERS = ("KILL", "STOP", "CUT", "BACKENDS", "PROMOTE", "PROMOTE_BEHIND", "DISK")


@pytest.mark.timeout(600)  # a minute and a quarter where nothing else runs
def test_seven_takeovers(tmp_path: Path) -> None:
    """Of logs in a PostgreSQL of three servers. Kill -9, SIGSTOP, a cut cable, killed backends, a full disk; a standby
    is promoted that has all, and one that has not.

    Without root there are no cables to be cut and no full disks: then two of the others come twice.
    """
    pytest.importorskip("psycopg", reason="psycopg is not installed: 'scripts/setup dev' does it")
    if binaries() is None:
        pytest.skip(f"there is no PostgreSQL {VERSION_MIN} or newer: 'apt-get install postgresql'")
    command = [sys.executable, "-m", "tests.soak", "--ha", "--small", "--takeovers", "7", "--seed", "1562"]
    command += [f"--only={name}" for name in TAKEOVERS]
    folder = Path(tempfile.mkdtemp(prefix="ha-"))  # sockets are in it: their paths have 107 bytes at most
    folder.chmod(0o755)
    environment = {**os.environ, "TMPDIR": str(folder)}
    try:
        done = subprocess.run(
            command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=580, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "7 faults, " in done.stdout
        assert ": the books are right; " in done.stdout
        assert ": linearizable" in done.stdout
        assert not processes_with(str(folder).encode()), "nothing of it runs any more"
        assert not list(folder.iterdir()), "nor is anything left of it"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_what_stops_a_soak_stops_its_instances(number: signal.Signals, tmp_path: Path) -> None:
    """Its process group alone is told: its instances have groups of their own."""
    command = [sys.executable, "-m", "tests.soak", "--seed", "20", "--workload", "shop"]
    mark = str(tmp_path).encode()
    with (tmp_path / "said").open("wb") as said:
        soak = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env={**os.environ, "TMPDIR": str(tmp_path)},
            stdout=said,
            stderr=said,
            start_new_session=True,
        )
    try:
        wait_for(lambda: len(processes_with(mark)) >= 4, lambda: "an instance runs, of three processes")
        os.killpg(soak.pid, number)
        assert soak.wait(60) == (128 + number if number == signal.SIGTERM else -number)
        wait_for(lambda: not processes_with(mark), lambda: f"they have ended: {processes_with(mark)}")
    finally:
        for pid in processes_with(mark):
            os.kill(pid, signal.SIGKILL)
    if number == signal.SIGTERM:
        assert [path.name for path in tmp_path.iterdir()] == ["said"], "nor is a folder left"


def test_the_document_shows_what_becomes_of_each_fault() -> None:
    text = (REPOSITORY / "docs" / "guarantees.md").read_text()
    assert document().strip() in with_tables(text), "docs/guarantees.md has no marker of the table"
    assert set(CELLS) == set(Fault)


def test_the_soak_brings_about_each_of_them() -> None:
    pytest.importorskip("psycopg", reason="psycopg is not installed: 'scripts/setup dev' does it")
    from tests.soak.takeovers import Faults

    fleet = SimpleNamespace(network="one whose cables can be cut")
    assert set(Faults(fleet, random.Random()).kinds) == set(Fault)  # type: ignore[arg-type]
