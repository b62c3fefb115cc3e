"""An agent whose processes are killed in the middle of its runs: what is in the log is not made again."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.effort import effort

EXAMPLE = Path(__file__).parents[2] / "examples" / "agent"


@pytest.mark.kills
def test_each_trip_is_planned_and_booked_once() -> None:
    # Each start imports for seconds; two kills are one of each role.
    command = [sys.executable, str(EXAMPLE / "kills.py"), "--trips", "6", "--kills", str(effort(2))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    killed = re.fullmatch(r"6 trips, with 30 requests and tool calls; kill -9 of (.*)", lines[0])
    assert killed is not None, lines
    assert {"app", "coordinator"} <= set(killed[1].split(", "))
    assert lines[-1] == "each trip is planned, and booked once"


def test_a_step_that_is_made_behind_its_result_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    spec = importlib.util.spec_from_file_location("agent_kills", EXAMPLE / "kills.py")
    assert spec is not None
    assert spec.loader is not None
    kills = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(kills)
    lines = [
        "a model X 0",
        "b flight X",
        "kill",
        "b flight X",
        "c model X 2",
        "kill",
        "b flight X",
        "c model X 2",
        "c model X 2",
    ]
    assert kills.repeats(lines) == (
        4,
        ["flight for X was made again, behind 'c model X 2'", "model for X was made again without a kill"],
    )
