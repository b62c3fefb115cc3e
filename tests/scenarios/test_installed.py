"""Wheels, pure and compiled, in fresh environments outside of the checkout: a project's tests pass, a counter survives.

By itself it tries one wheel on the Python of the tests; scripts/wheels tries both on all that it finds. The packages
that Immortal needs come from the package index that pip is set up for.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from immortal.protocol import compiled
from tests.helpers.cli import Run, immortal
from tests.helpers.interpreters import VARIABLE, interpreters
from tests.unit.test_wheel import ROOMS

ROOT = Path(__file__).parents[2]
PYTHONS = interpreters()
IS_THOROUGH = os.environ.get(VARIABLE) == "all"
CAN_COMPILE = shutil.which("cc") is not None
KINDS = ["pure", "compiled"] if IS_THOROUGH else ["compiled"] if CAN_COMPILE else ["pure"]
BUILD_TIMEOUT_S = 1200  # mypyc and a C compiler, on a slow and busy machine
COUNTER = """
from immortal import Immortal, rpc


class Counter(Immortal):
    count: int

    def __init__(self) -> None:
        self.count = 0

    @rpc
    def add(self, number: int) -> int:
        self.count += number
        return self.count
"""


def run(*command: str, cwd: Path, **variables: str) -> str:
    """What it prints. It sees nothing of the checkout."""
    left_out = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", compiled.PURE_VARIABLE)
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**environment, "PIP_DISABLE_PIP_VERSION_CHECK": "1", **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=BUILD_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"{' '.join(command)}: {done.stdout[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy, in which pip may build. Where the tests' own Python is the only one, what is compiled for it comes along,
    and is not made again."""
    folder = tmp_path_factory.mktemp("sources") / "immortal"
    folder.mkdir()
    for name in ("LICENSE", "README.md", "pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, folder)
    left_out = ("__pycache__", "_compiled") if IS_THOROUGH else ("__pycache__",)
    for name in ("src", "immortal", *ROOMS, "bench"):  # in the first two are links
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns(*left_out))
    return folder


@functools.cache
def pure_wheel(sources: Path) -> Path:
    """One for all Pythons."""
    folder = sources.parent / "pure"
    options = ("--no-deps", "--no-build-isolation", "--wheel-dir", str(folder))
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", *options)
    run(*pip, str(sources), cwd=sources.parent, **{compiled.PURE_VARIABLE: "1"})
    (wheel,) = folder.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    return wheel


@functools.cache
def compiled_wheel(sources: Path, version: str) -> Path:
    """One for each Python. Thoroughly: with compilers from the index, and no package that is installed here."""
    folder = sources.parent / f"compiled-{version}"
    options = ("--no-deps", "--wheel-dir", str(folder), str(sources))
    if not IS_THOROUGH:
        run(sys.executable, "-m", "pip", "wheel", "--no-build-isolation", *options, cwd=sources.parent)
        (wheel,) = folder.glob("*.whl")
        return wheel
    environment = sources.parent / f"build-{version}"
    run(PYTHONS[version], "-m", "venv", str(environment), cwd=sources.parent)
    run(str(environment / "bin" / "python"), "-m", "pip", "wheel", *options, cwd=sources.parent)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(params=PYTHONS)
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def python(version: str, tmp_path: Path) -> Iterator[Path]:
    """A fresh environment."""
    environment = tmp_path / "environment"
    run(PYTHONS[version], "-m", "venv", str(environment), cwd=tmp_path)
    yield environment / "bin" / "python"
    shutil.rmtree(environment)


@pytest.mark.timeout(BUILD_TIMEOUT_S)
@pytest.mark.parametrize("kind", KINDS)
def test_a_wheel(kind: str, version: str, sources: Path, python: Path, tmp_path: Path) -> None:
    if kind == "compiled" and not CAN_COMPILE:
        pytest.skip("there is no C compiler here")
    wheel = pure_wheel(sources) if kind == "pure" else compiled_wheel(sources, version)
    run(str(python), "-m", "pip", "install", "--quiet", str(wheel), "pytest", cwd=tmp_path)
    project = tmp_path / "project"
    project.mkdir()
    command = str(python.with_name("immortal"))
    said = run(command, "--version", cwd=project)
    assert said.strip().endswith("compiled codec and core" if kind == "compiled" else "(none is compiled)")
    place = run(str(python), "-c", "import immortal; print(immortal.__file__)", cwd=project)
    assert place.startswith(str(python.parents[1]))

    run(command, "init", "shop", cwd=project)
    assert " passed" in run(str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=project / "shop")
    assert json.loads(run(command, "doctor", "--json", cwd=project))["findings"][0]["level"] == "ok"
    count_through_kills(project, str(python))


def count_through_kills(folder: Path, python: str) -> None:
    """A counter whose coordinator, app and supervisor are killed one after the other goes on where it was."""
    (folder / "counter.py").write_text(COUNTER)
    immortal_ = functools.partial(immortal, folder, python=(python,))
    immortal_("register", "counter", "--peer", "tcp://127.0.0.1:*")
    supervised = Run(folder, "counter", "counter:Counter", "--restart", "--log-format", "json", python=(python,))
    try:
        for turn, killed in enumerate(("coordinator_pid", "app_pid"), 1):
            started = json.loads(supervised.line('"started"', turn))
            assert immortal_("call", "counter", "add", "1") == f"{turn}\n"
            os.kill(started[killed], signal.SIGKILL)
        supervised.line('"started"', 3)
        assert immortal_("call", "counter", "add", "1") == "3\n"
    finally:
        supervised.kill()
    again = Run(folder, "counter", "counter:Counter", python=(python,))
    try:
        assert immortal_("call", "counter", "add", "1") == "4\n"
        assert again.stop() == 0
    finally:
        again.kill()
