"""The guide to integrations: its programs, as processes, and its sessions, as they stand there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.cli import HOME, Run, immortal
from tests.helpers.web import Web

GUIDE = (Path(__file__).parents[2] / "docs" / "how-to" / "integrations.md").read_text()
PROGRAMS = dict(re.findall(r"```python\n# (\w+)\.py\n(.*?)```", GUIDE, re.DOTALL))
SESSIONS = re.findall(r"```\n(\$ .*?)```", GUIDE, re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, source in PROGRAMS.items():
        (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.setenv("IMMORTAL_HOME", str(tmp_path / HOME))
    return tmp_path


@pytest.fixture
def running(folder: Path) -> Iterator[list[Run]]:
    """Those that the test starts."""
    runs: list[Run] = []
    yield runs
    for run in runs:
        run.kill()


def turns(session: str) -> list[tuple[str, str]]:
    """Commands and what they print."""
    found = re.split(r"^\$ (.*)\n", session, flags=re.MULTILINE)[1:]
    return list(zip(found[::2], found[1::2], strict=True))


def start(folder: Path, running: list[Run], name: str, app: str) -> None:
    immortal(folder, "register", name, "--peer", "tcp://127.0.0.1:*")
    run = Run(folder, name, app, "--restart")
    running.append(run)
    run.line("ready")


def test_the_web_server_answers_as_the_guide_says(folder: Path, running: list[Run]) -> None:
    assert sorted(PROGRAMS) == ["helper", "jobs", "test_helper", "web"]
    start(folder, running, "jobs", "jobs:Jobs")
    with Web(folder, "web:app") as web:
        commands = [turn for session in SESSIONS for turn in turns(session) if turn[0].startswith("curl ")]
        assert len(commands) == 6
        for command, printed in commands:
            adapted = command.replace("http://127.0.0.1:8000", web.url)
            done = subprocess.run(["bash", "-c", adapted], capture_output=True, text=True, timeout=60, check=False)
            got, expected = (re.sub(r"(record|jobs) \d+:", r"\1 N:", text) for text in (done.stdout, printed))
            assert got.replace("\r\n", "\n").strip() == expected.strip(), command


def test_the_agent_answers_as_the_guide_says(folder: Path, running: list[Run]) -> None:
    (session,) = (turns(one) for one in SESSIONS if "get me a book" in one)
    start(folder, running, "bank", "helper:Bank")
    start(folder, running, "helper", "helper:Helper")
    assert session[-1] == (
        'immortal call helper ask "get me a book"',
        immortal(folder, "call", "helper", "ask", "get me a book"),
    )
    immortal(folder, "verify", "helper")


def test_the_test_of_the_guide_passes(folder: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_helper.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=110, check=False, env=os.environ)
    assert "1 passed" in done.stdout, done.stdout + done.stderr
