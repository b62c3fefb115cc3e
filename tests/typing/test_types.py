"""What type checkers say of programs: nothing of right uses, and of wrong ones something of each marked line."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from immortal.coordinator.project.project import TEMPLATES, make_project

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
NAMES = ["right.py", "wrong.py", "steps.py", "service.py"]
CHECK_S = 110

Said = dict[str, dict[int, str]]
"""The errors, by file and line."""


def marked(name: str, mark: str) -> dict[int, str]:
    """The lines of a file that say ``# mark: why``."""
    lines = enumerate((FOLDER / name).read_text().splitlines(), 1)
    return {number: line.partition(f"# {mark}: ")[2] for number, line in lines if f"# {mark}: " in line}


@pytest.fixture(scope="module")
def by_mypy() -> Said:
    said = run_mypy(NAMES)
    assert any(said.values())
    return said


def run_mypy(names: list[str]) -> Said:
    """Check files with the project's own settings, so that its cache serves this test and scripts/check alike."""
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", *(str(FOLDER / name) for name in names)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=CHECK_S,
        check=False,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    said: Said = {name: {} for name in names}
    for path, line, text in re.findall(r"^([^:\n]+):(\d+): error: (.*)$", done.stdout, re.MULTILINE):
        said[Path(path).name][int(line)] = text
    return said


@pytest.fixture(scope="module")
def by_pyright(tmp_path_factory: pytest.TempPathFactory) -> Said:
    command = shutil.which("basedpyright", path=str(Path(sys.executable).parent)) or shutil.which("basedpyright")
    if command is None:
        pytest.skip("basedpyright, which is pyright from the package index, is not installed: pip install -e '.[dev]'")
    project = tmp_path_factory.mktemp("pyright") / "pyrightconfig.json"
    settings = {
        "include": [str(FOLDER / name) for name in NAMES],
        "typeCheckingMode": "standard",
        "extraPaths": [str(ROOT)],
    }
    project.write_text(json.dumps(settings))
    options = ["--outputjson", "--pythonpath", sys.executable, "-p", str(project)]
    done = subprocess.run([command, *options], capture_output=True, text=True, timeout=CHECK_S, check=False)
    assert done.stdout.lstrip().startswith("{"), done.stdout + done.stderr
    said: Said = {name: {} for name in NAMES}
    for found in json.loads(done.stdout)["generalDiagnostics"]:
        if found["severity"] == "error":
            errors = said[Path(found["file"]).name]
            line = found["range"]["start"]["line"] + 1
            errors[line] = errors.get(line, "") + found["message"]
    return said


@pytest.mark.parametrize("checker", ["by_mypy", "by_pyright"])
def test_right_uses_are_right_and_each_wrong_use_is_found(checker: str, request: pytest.FixtureRequest) -> None:
    said: Said = request.getfixturevalue(checker)
    wrong = marked("wrong.py", "wrong")
    assert len(wrong) > 40
    assert said["right.py"] == said["service.py"] == {}
    assert said["wrong.py"].keys() == wrong.keys(), said["wrong.py"]


@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_steps_have_the_types_of_what_they_run(checker: str, request: pytest.FixtureRequest) -> None:
    said: Said = request.getfixturevalue(f"by_{checker}")
    expected = marked("steps.py", checker)
    assert said["steps.py"].keys() == expected.keys(), said["steps.py"]
    for line, text in expected.items():
        assert checker == "mypy" or text in said["steps.py"][line]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_new_project_is_right(template: str, cache: Path, tmp_path: Path) -> None:
    """It sees the package where the environment has it, as an editable installation or a wheel does."""
    make_project(tmp_path, "shop", template)
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(cache), "."]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=CHECK_S, check=False)
    assert done.stdout == "Success: no issues found in 2 source files\n"
