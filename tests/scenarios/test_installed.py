"""A release's files, or a wheel of these sources, in fresh environments outside of the checkout.

A project's tests and type checks pass, a counter survives. By itself it builds one wheel, for the Python of the tests;
scripts/release gives it all files of a release, for each Python that is found. The packages that Immortal needs come
from the package index that pip is set up for.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import signal
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from immortal.coordinator.project.project import make_project
from scripts import release
from scripts.release import run
from tests.helpers.cli import Run, immortal
from tests.unit.test_wheel import ROOMS

ROOT = Path(__file__).parents[2]
OWN = f"3.{sys.version_info[1]}"
RELEASE = os.environ.get(release.FOLDER_VARIABLE)
PYTHONS = release.interpreters() if RELEASE else {OWN: sys.executable}
CAN_COMPILE = shutil.which("cc") is not None
KINDS = ["pure", "compiled"] if RELEASE else ["compiled"] if CAN_COMPILE else ["pure"]
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


@pytest.fixture(scope="module", autouse=True)
def times_of_files() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOURCE_DATE_EPOCH", os.environ.get("SOURCE_DATE_EPOCH", "1700000000"))
        yield


@pytest.fixture(scope="module")
def files(times_of_files: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A release; else an sdist, a pure wheel, and a compiled one of a copy, for the tests' own Python."""
    if RELEASE:
        return Path(RELEASE)
    sources, out = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("release")
    for name in ("LICENSE", "README.md", "pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, sources)
    for name in ("src", "immortal", *ROOMS, "bench"):  # in the first two are links
        left_out = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, sources / name, symlinks=True, ignore=left_out)
    sdist = release.build_sdist(sources, out)
    release.build_wheel(sdist, out, sys.executable, "--no-build-isolation", pure=True)
    if CAN_COMPILE:
        release.build_wheel(sources, out, sys.executable, "--no-build-isolation")
    release.write_sums(out)
    return out


def wheel_of(files: Path, kind: str, version: str) -> Path:
    (found,) = files.glob("*-py3-none-any.whl" if kind == "pure" else f"*-cp{version.replace('.', '')}-*.whl")
    return found


@pytest.mark.timeout(release.BUILD_TIMEOUT_S)
def test_the_files_of_a_release(files: Path) -> None:
    sums = dict(reversed(line.split("  ")) for line in (files / release.SUMS).read_text().splitlines())
    assert sums == {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files.iterdir()
        if path.name != release.SUMS
    }
    for wheel in files.glob("*.whl"):
        folders = {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
        assert {name for name in folders if not name.endswith(".dist-info")} == {"immortal"}
    assert len(list(files.glob("*.tar.gz"))) == 1
    if RELEASE:
        assert (files / release.NOTES).read_text().strip()
        (sbom,) = files.glob("*.cdx.json")
        listed = json.loads(sbom.read_text())
        assert listed["metadata"]["component"]["name"] == "immortal-services"
        assert {"msgspec", "psycopg", "prometheus_client"} <= {one["name"] for one in listed["components"]}


@pytest.mark.timeout(release.BUILD_TIMEOUT_S)
def test_another_build_has_the_same_bytes(files: Path, tmp_path: Path) -> None:
    (sdist,) = files.glob("*.tar.gz")
    shutil.unpack_archive(sdist, tmp_path)
    (sources,) = tmp_path.iterdir()
    (sources / "setup.cfg").unlink()  # made with an sdist, and no source
    out = tmp_path / "out"
    out.mkdir()
    assert release.build_sdist(sources, out).read_bytes() == sdist.read_bytes()
    again = [release.build_wheel(sdist, out, sys.executable, "--no-build-isolation", pure=True)]
    if RELEASE and CAN_COMPILE:
        again.append(release.build_wheel(sdist, out, sys.executable, "--no-build-isolation"))
    for wheel in again:
        assert wheel.read_bytes() == (files / wheel.name).read_bytes()


@pytest.fixture(params=PYTHONS)
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def python(version: str, tmp_path: Path) -> Iterator[Path]:
    """A fresh environment."""
    yield release.environment(tmp_path / "environment", PYTHONS[version])
    shutil.rmtree(tmp_path / "environment")


@pytest.mark.timeout(release.BUILD_TIMEOUT_S)
@pytest.mark.parametrize("kind", KINDS)
def test_a_wheel(kind: str, version: str, files: Path, python: Path, tmp_path: Path) -> None:
    run(python, "-m", "pip", "install", "--quiet", wheel_of(files, kind, version), "mypy", "pytest", cwd=tmp_path)
    project = tmp_path / "project"
    project.mkdir()
    command = python.with_name("immortal")
    said = run(command, "--version", cwd=project)
    assert said.strip().endswith("compiled codec and core" if kind == "compiled" else "(none is compiled)")
    place = run(python, "-c", "import immortal; print(immortal.__file__)", cwd=project)
    assert place.startswith(str(python.parents[1]))

    run(command, "init", "shop", cwd=project)
    assert " passed" in run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=project / "shop")
    assert "Success" in run(python, "-m", "mypy", "--strict", ".", cwd=project / "shop")
    assert json.loads(run(command, "doctor", "--json", cwd=project))["findings"][0]["level"] == "ok"
    count_through_kills(project, str(python))


@pytest.mark.timeout(release.BUILD_TIMEOUT_S)
def test_a_new_project_by_uv(files: Path, tmp_path: Path) -> None:
    tools = release.environment(tmp_path / "tools", sys.executable)
    run(tools, "-m", "pip", "install", "--quiet", "uv", cwd=tmp_path)
    make_project(tmp_path / "shop", "shop", "shop")
    uv = functools.partial(run, tools.with_name("uv"), cwd=tmp_path / "shop", UV_PYTHON=sys.executable)
    try:
        uv("add", str(wheel_of(files, "pure", OWN)))  # uv asks for every Python that the project allows
    except release.ReleaseError as error:
        if "Failed to fetch" in str(error):
            pytest.skip("uv reaches no package index: it does not read pip's settings")
        raise
    assert " passed" in uv("run", "pytest", "-q", "-p", "no:cacheprovider")
    assert "Success" in uv("run", "mypy", ".")
    uv("add", "immortal-services[metrics]")
    assert "extras: metrics;" in uv("run", "immortal", "doctor")


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
