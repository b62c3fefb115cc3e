"""`immortal init`: each template makes a project that runs at once, whose tests pass, and that is typed and tidy."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from immortal.coordinator.project.project import TEMPLATES
from tests.helpers.projects import Development, immortal

ROOT = Path(__file__).parents[2]
SUM = hashlib.sha256(b"hello").hexdigest()
CALLS = {
    "shop": (("stock", "shop"), ("shop", "order", "tea", "2"), '"2 tea: sold"\n'),
    "agent": (("agent",), ("agent", "ask", "what is 6 * 7?"), '"6 * 7 = 42"\n'),
    "worker": (("jobs", "worker-1", "worker-2"), ("jobs", "submit", "hello.txt"), f'"{SUM}"\n'),
}


@pytest.fixture(params=TEMPLATES)
def template(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def tool(folder: Path, *arguments: str) -> None:
    done = subprocess.run([sys.executable, "-m", *arguments], cwd=folder, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What mypy knows of the SDK by now."""
    return tmp_path_factory.mktemp("mypy")


def mypy(folder: Path, cache: Path) -> list[str]:
    """What it finds in the project, with an SDK that it takes for installed: of that it tells nothing then."""
    argv = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(cache)]
    argv += sorted(file.name for file in folder.glob("*.py"))
    environment = {**os.environ, "MYPYPATH": str(ROOT)}  # it finds no editable package
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, env=environment, timeout=110)
    assert "source files" in done.stdout, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines()[:-1] if not line.startswith(str(ROOT))]


def test_it_is_tidy_and_its_tests_pass(tmp_path: Path, checked: Path, template: str) -> None:
    made = immortal(tmp_path, "init", "My-Project", "--template", template).splitlines()
    assert made[-1] == "run it with: cd My-Project && immortal dev"
    folder = tmp_path / "My-Project"
    assert sorted(f"My-Project/{file.name}" for file in folder.iterdir()) == sorted(made[:-1])
    text = "".join(file.read_text() for file in folder.iterdir())
    assert "@name@" not in text
    assert "@package@" not in text
    assert 'name = "my-project"' in text
    tool(folder, "pytest", "-q", "-p", "no:cacheprovider")
    tool(folder, "ruff", "check", "--no-cache", "--select", "B,E,F,I,UP", ".")
    tool(folder, "ruff", "format", "--no-cache", "--check", ".")
    assert mypy(folder, checked) == []


def test_it_runs(tmp_path: Path, template: str) -> None:
    names, call, answer = CALLS[template]
    immortal(tmp_path, "init", "--template", template)
    (tmp_path / "hello.txt").write_text("hello")
    dev = Development(tmp_path)
    try:
        dev.ready(*names)
        assert immortal(tmp_path, "call", *call) == answer
        assert dev.stop() == 0
    finally:
        dev.close()
    assert "warning" not in "\n".join(dev.lines)


def test_nothing_is_written_over(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text("mine")
    assert "shop.py is there already, nothing was written" in immortal(tmp_path, "init", status=1)
    assert [file.name for file in tmp_path.iterdir()] == ["shop.py"]
    assert "is not a project name" in immortal(tmp_path, "init", "a b", status=1)
