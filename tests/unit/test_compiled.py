"""The compiled codec: found for the very source it is made of, left out otherwise, and no need of it to install."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from protocol import compiled

ROOT = Path(__file__).parents[2]
SHOW = """
import importlib
from protocol import compiled
print(compiled.describe())
for name in compiled.MODULES:
    print(importlib.import_module(name).__file__)
"""
needs_compiled = pytest.mark.skipif(
    not all(path.exists() for path in compiled.compiled_paths().values()), reason="nothing is compiled here"
)


def run(*command: str, root: Path = ROOT, **environment: str) -> list[str]:
    inherited = {key: value for key, value in os.environ.items() if key != compiled.PURE_VARIABLE}
    result = subprocess.run(
        [sys.executable, *command],
        env={**inherited, "PYTHONPATH": str(root), **environment},
        cwd=root,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    return (result.stdout + result.stderr).splitlines()


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    for package in ("protocol", "appsdk"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


@needs_compiled
def test_what_is_compiled_of_this_source_runs() -> None:
    first, *files = run("-c", SHOW)
    assert first == "compiled codec"
    assert files == [str(path) for path in compiled.compiled_paths().values()]


def test_pure_python_can_be_asked_for() -> None:
    first, *files = run("-c", SHOW, **{compiled.PURE_VARIABLE: "1"})
    assert first == "pure Python codec (IMMORTAL_PURE_PYTHON is set)"
    assert all(file.endswith(".py") for file in files)


@needs_compiled
@pytest.mark.parametrize("changed", [path.relative_to(ROOT) for path in compiled.source_paths()], ids=str)
def test_a_changed_source_is_never_hidden_by_what_was_compiled_before(copied: Path, changed: Path) -> None:
    shutil.copytree(ROOT / "protocol" / "_compiled", copied / "protocol" / "_compiled", dirs_exist_ok=True)
    assert run("-c", SHOW, root=copied)[0] == "compiled codec"
    with (copied / changed).open("a") as source:
        source.write("# one more line\n")
    first, *files = run("-c", SHOW, root=copied)
    assert first == "pure Python codec (the compiled one is of another source)"
    assert all(file.endswith(".py") for file in files)


def test_one_module_alone_is_not_run_compiled(copied: Path) -> None:
    shutil.rmtree(copied / "protocol" / "_compiled", ignore_errors=True)
    first, *_ = compiled.compiled_paths(copied).values()
    first.parent.mkdir()
    first.write_bytes(b"")
    assert run("-c", SHOW, root=copied)[0].startswith("pure Python codec")


def test_without_cython_the_installation_goes_on_in_pure_python(copied: Path) -> None:
    shutil.rmtree(copied / "protocol" / "_compiled", ignore_errors=True)
    for name in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, copied)
    missing = copied / "missing" / "Cython"
    missing.mkdir(parents=True)
    (missing / "__init__.py").write_text("raise ImportError('there is no Cython')\n")
    lines = run("setup.py", "-q", "build_ext", "--inplace", root=copied, PYTHONPATH=str(missing.parent))
    assert "setup: pure Python codec: it could not be compiled: there is no Cython" in lines
    assert run("-c", SHOW, root=copied)[0] == "pure Python codec (none is compiled)"
