"""Logs that version 0.1 has written: today's code opens them, does again what was done, and goes on with what waits.

`tests/vectors/golden_0_1/README.txt` says what they are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from immortal.appsdk.running.runner import load
from tests.helpers import golden
from tests.helpers.cli import Run, immortal, wait_until

NOTED: dict[str, Any] = json.loads((golden.FOLDER / "noted.json").read_text())
NAMES = sorted(NOTED["states"])


@pytest.fixture(scope="module", autouse=True)
def apps() -> Iterator[None]:
    with golden.apps_found():
        yield


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = golden.unpack(tmp_path)
    monkeypatch.setenv("IMMORTAL_HOME", str(home))
    return home


@pytest.fixture(scope="module")
def unchanged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tests that only read share this home."""
    return golden.unpack(tmp_path_factory.mktemp("golden"))


@pytest.mark.parametrize("name", NAMES)
def test_a_log_is_replayed_as_it_was_made(unchanged: Path, name: str) -> None:
    """The replay goes from each checkpoint to the next, and to the end: calls, states and failures are the same."""
    cls = golden.classes(unchanged)[name]
    assert golden.problems(unchanged, name, cls) == []
    noted = re.sub(r" \(arguments [0-9a-f]{8}\)", "", json.dumps(NOTED["states"][name]))  # which 0.1 showed
    assert golden.state_at_end(unchanged, name, cls) == json.loads(noted)


def test_what_waits_in_the_logs_goes_on_to_its_end(home: Path) -> None:
    with golden.Fleet(home) as fleet:
        found = golden.finish(fleet, NOTED["states"])
    for what, noted in NOTED["finished"].items():
        assert found[what] == noted, what
    assert set(found) == set(NOTED["finished"])
    for name in NAMES:
        assert golden.problems(home, name, golden.classes(home)[name]) == [], "what was added is replayed as well"


def test_processes_run_what_the_files_of_the_home_name(home: Path) -> None:
    """One log has a key, the other is of an app of the SDK, whose module the settings name."""
    for name in ("store", "jobs"):
        assert json.loads(immortal(home.parent, "verify", name, "--all", "--json"))["same"], name
    jobs = Run(home.parent, "jobs")
    try:
        jobs.line("recovered")  # then the time has come for the task that is delayed
        wait_until(lambda: "4 waiting, 0 delayed, 0 running, " in immortal(home.parent, "queue", "show", "jobs"))
    finally:
        jobs.kill()


def test_the_dead_letters_are_there(unchanged: Path) -> None:
    assert golden.dead_letters(unchanged) == NOTED["dead letters"]


def test_the_project_names_its_apps(unchanged: Path) -> None:
    rows = json.loads(immortal(unchanged.parent, "ps", "--json"))["services"]
    assert {row["name"] for row in rows} == set(NAMES)
    assert all(load(row["app"]) for row in rows)
