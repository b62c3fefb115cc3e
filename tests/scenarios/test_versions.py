"""Earlier versions beside today's: peers, clients, apps and coordinators of both, and logs of both in turn.

tests/vectors/versions.toml lists the versions; a commit that the checkout does not have is skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from immortal.coordinator.instances.registry import Registry
from immortal.coordinator.log import format as log_format
from immortal.coordinator.log.identity import meta_row
from immortal.coordinator.log.open import create_log
from tests.helpers import versions
from tests.helpers.cli import HOME, Run, immortal
from tests.helpers.commands import PYTHON

PAIR = """
from immortal import Immortal, peer, query, rpc


class Pair(Immortal):
    numbers: list[int]

    def __init__(self) -> None:
        self.numbers = []

    @rpc
    def add(self, number: int) -> int:
        self.numbers.append(number)
        return sum(self.numbers)

    @query
    def total(self) -> int:
        return sum(self.numbers)


class Left(Pair):
    other = peer(Pair, "right")

    @rpc
    async def relay(self, number: int) -> int:
        return await self.other.add(number)


class Right(Pair):
    other = peer(Pair, "left")

    @rpc
    async def relay(self, number: int) -> int:
        return await self.other.add(number)
"""
pytestmark = pytest.mark.timeout(300)  # the first one builds a wheel
APPS = {"left": "pair:Left", "right": "pair:Right"}
Python = tuple[str, ...]


@pytest.fixture(params=versions.listed(), ids=lambda version: version.name)
def version(request: pytest.FixtureRequest) -> versions.Version:
    found: versions.Version = request.param
    return found


@pytest.fixture
def earlier(version: versions.Version) -> Python:
    return versions.python_of(version)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "pair.py").write_text(PAIR)
    return tmp_path


@pytest.fixture
def running() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def register(folder: Path, python: Python) -> None:
    for name in APPS:
        immortal(folder, "register", name, "--peer", "tcp://127.0.0.1:*", python=python)


def call(folder: Path, python: Python, *words: str) -> int:
    return int(immortal(folder, "call", *words, python=python))


def add_by_all_ways(folder: Path, earlier: Python, totals: dict[str, int]) -> None:
    """Let clients of both versions call both services, and these each other; compare each result."""
    for number, (name, python) in enumerate((name, python) for name in APPS for python in (earlier, PYTHON)):
        other = "left" if name == "right" else "right"
        totals[name] += 1
        assert call(folder, python, name, "add", "1") == totals[name]
        totals[other] += 10**number
        assert call(folder, python, name, "relay", str(10**number)) == totals[other]
        assert call(folder, python, other, "total") == totals[other]


def test_the_environment_is_that_of_the_version(earlier: Python, tmp_path: Path) -> None:
    program = "import immortal; print(immortal.__file__)"
    place = subprocess.check_output([*earlier, "-c", program], cwd=tmp_path, text=True)
    assert Path(place).is_relative_to(Path(earlier[0]).parents[1])


def test_services_and_logs_of_both_versions(folder: Path, earlier: Python, running: ExitStack) -> None:
    """Each service is killed, one while it waits, and goes on in the other version: the totals are exact."""
    register(folder, earlier)
    totals = dict.fromkeys(APPS, 0)
    for of_left, of_right in ((earlier, PYTHON), (PYTHON, earlier)):
        left = Run(folder, "left", APPS["left"], python=of_left)
        right = Run(folder, "right", APPS["right"], python=of_right)
        for one in (left, right):
            running.callback(one.kill)
            one.line(" ready")
        add_by_all_ways(folder, earlier, totals)
        right.kill()
        immortal(folder, "call", "--start", "left", "relay", "100000")
        assert call(folder, PYTHON, "left", "total") == totals["left"]  # so the call before is durable, at 0.1.0, too
        left.kill()
        totals["right"] += 100000
    for name, app in APPS.items():
        assert json.loads(immortal(folder, "verify", name, "--all", "--app", app, "--json"))["same"], name


@pytest.mark.parametrize("is_app_earlier", [True, False], ids=["app", "coordinator"])
def test_app_and_coordinator_of_different_versions(
    folder: Path, earlier: Python, running: ExitStack, is_app_earlier: bool
) -> None:
    """The containers of a pod may have other images for a while."""
    of_app, of_coordinator = (earlier, PYTHON) if is_app_earlier else (PYTHON, earlier)
    register(folder, of_coordinator)
    for start in range(2):
        coordinator = Run(folder, "left", command="coordinator", python=of_coordinator)
        running.callback(coordinator.kill)
        coordinator.line("coordinator started")
        place = folder / HOME / "left"
        environment = {
            **os.environ,
            "IMMORTAL_APP_ADDRESS": f"unix:{place}/app.sock",
            "IMMORTAL_APP_SECRET_FILE": f"{place}/app_secret",
        }
        app = subprocess.Popen([*of_app, "-m", "immortal.appsdk", APPS["left"]], cwd=folder, env=environment)
        running.callback(app.wait, 40)
        running.callback(app.kill)
        for number in range(3):
            assert call(folder, of_coordinator, "left", "add", "1") == 3 * start + number + 1
        coordinator.kill()
        app.wait(40)


def test_a_log_of_a_newer_format_is_refused_in_words(folder: Path, version: versions.Version, earlier: Python) -> None:
    newest = log_format.ENCRYPTED_VERSION
    if version.log_format >= newest:
        pytest.skip(f"it reads format {newest}")
    register(folder, earlier)
    store = create_log(Registry(folder / HOME).load("left").log, "left")
    store.backend.flush()
    table, key, value = meta_row(log_format.META_FORMAT, newest)
    with store.backend.environment.begin(write=True) as transaction:
        transaction.put(key, value, db=store.backend.tables[table])
    store.close()
    said = immortal(folder, "coordinator", "left", python=earlier, status=3)
    assert f"has format version {newest}, this program reads" in said
    assert "use the newer version of the program that wrote it" in said
