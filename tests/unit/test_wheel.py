"""The wheel: what runs in service, the licence, and nothing that only developers need."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email.message import Message
from email.parser import BytesParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("appsdk", "cli", "coordinator", "pipeline", "presenters", "protocol", "replay", "web")
SUFFIXES = (".py", ".pxd", ".typed", ".html", ".css", ".js", ".svg", ".txt")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of these sources, unpacked; in pure Python, as compiling takes long and is tested elsewhere."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("LICENSE", "README.md", "pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, source)
    for name in (*ROOMS, "bench", "immortal", "src", "examples", "scripts", "tests"):  # all that might be taken along
        ignored = shutil.ignore_patterns("__pycache__", "_compiled", "corpus")
        shutil.copytree(ROOT / name, source / name, symlinks=name in ("immortal", "src"), ignore=ignored)
    missing = folder / "missing"
    for compiler in ("Cython", "mypyc"):
        (missing / compiler).mkdir(parents=True)
        (missing / compiler / "__init__.py").write_text(f"raise ImportError('there is no {compiler}')\n")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run(
        [*command, "--no-build-isolation", "--wheel-dir", str(folder), str(source)],
        env={**os.environ, "PYTHONPATH": str(missing)},
        check=True,
        timeout=100,
    )
    (built,) = folder.glob("immortal_services-*.whl")
    unpacked = folder / "unpacked"
    with zipfile.ZipFile(built) as archive:
        archive.extractall(unpacked)
    return unpacked


def metadata(wheel: Path) -> Message:
    (found,) = wheel.glob("*.dist-info")
    return BytesParser().parsebytes((found / "METADATA").read_bytes())


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.suffix in SUFFIXES}


def test_it_has_the_templates_of_projects(wheel: Path) -> None:
    place = Path("immortal", "coordinator", "project", "templates")
    made = {str(path.relative_to(ROOT)) for path in (ROOT / place).rglob("*") if path.is_file()}
    assert len(made) > 10
    assert made == {str(path.relative_to(wheel)) for path in (wheel / place).rglob("*") if path.is_file()}


def test_it_has_the_packages_and_nothing_else(wheel: Path) -> None:
    """One root for programs to import, so that a user's own `protocol.py` or `pipeline/` stays the user's."""
    assert {path.name for path in wheel.iterdir() if path.suffix != ".dist-info"} == {"immortal"}
    rooms = {path.name for path in (ROOT / "immortal").iterdir() if path.is_symlink()}
    assert rooms == {*ROOMS, "bench"}
    for room in ROOMS:
        assert files(wheel / "immortal" / room) == files(ROOT / room)
    assert not (wheel / "immortal" / "bench").exists()


def test_it_has_no_rivals(wheel: Path) -> None:
    for path in wheel.rglob("*.py"):
        text = path.read_text()
        assert not any(f"import {rival}" in text for rival in ("dbos", "grpc", "restate")), path


def test_it_says_who_made_it_and_what_one_may_do_with_it(wheel: Path) -> None:
    found = metadata(wheel)
    assert found["License-Expression"] == "MIT"
    assert found["Author"] == "The Immortal authors"
    (text,) = wheel.glob("*.dist-info/licenses/LICENSE")
    assert text.read_text() == (ROOT / "LICENSE").read_text()


def test_cython_is_needed_to_build_it_only(wheel: Path) -> None:
    required = metadata(wheel).get_all("Requires-Dist", [])
    assert all('extra == "dev"' in one for one in required if one.lower().startswith(("cython", "setuptools")))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed = project["build-system"]["requires"]
    for name in ("Cython", "mypy", "msgspec"):  # mypyc takes no core whose Structs it can't see
        assert any(one.startswith(name) for one in needed)


@pytest.mark.parametrize("command", ["run", "pipeline"])
def test_its_commands_run_without_the_sources(wheel: Path, command: str, tmp_path: Path) -> None:
    checked = f"import immortal; assert immortal.__file__.startswith({str(wheel)!r})"
    help_of = f"{checked}; from immortal.cli import main; main([{command!r}, '--help'])"
    environment = {**os.environ, "PYTHONPATH": str(wheel)}
    done = subprocess.run(
        [sys.executable, "-c", help_of], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Usage:")
