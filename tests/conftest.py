"""What all folders of tests share: how they are run, which are quick, and fixtures."""

from __future__ import annotations

import gc
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from immortal.coordinator.instances.registry import PORTS_VARIABLE
from immortal.protocol import compiled
from tests.helpers import fork_server, kinds
from tests.helpers.effort import EFFORT, effort
from tests.helpers.memory import in_memory

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from xdist.scheduler import Scheduling
    from xdist.workermanage import WorkerController

    from tests.helpers.postgres import Postgres
    from tests.helpers.side_by_side import Room


EXAMPLES = 40  # of Hypothesis, where a test does not say how many
CLUSTER_TIMEOUT_S = 600  # Spark on a slow and busy machine
ROOM_FOLDER = pytest.StashKey[str]()
ROOM: pytest.StashKey[Room] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help=f"leave out what is marked: {', '.join(kinds.NOT_QUICK)}")
    parser.addoption("--medium", action="store_true", help=f"leave out what is marked: {', '.join(kinds.NOT_MEDIUM)}")


def pytest_configure(config: pytest.Config) -> None:
    """Processes that tests start can be interrupted, also where the run is a shell's background job."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as such a shell leaves it, and as children would have it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # How long one example takes, is up to the others.
    settings.register_profile("shared machine", deadline=None, max_examples=effort(EXAMPLES))
    settings.load_profile("shared machine")
    if hasattr(config, "workerinput") or not getattr(config.option, "numprocesses", None):
        fork_server.start()
    if hasattr(config, "workerinput"):
        from tests.helpers.side_by_side import Room, ports_of

        config.stash[ROOM] = Room(Path(config.workerinput["room"]))
        os.environ[PORTS_VARIABLE] = ports_of(config.workerinput["workerid"], config.workerinput["workercount"])


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """What a run leaves out takes seconds to import, in each process."""
    if collection_path.suffix != ".py":
        return None
    if config.getoption("markexpr") == "source":
        return "pytest.mark.source" not in collection_path.read_text() or None
    return kinds.is_left_out(str(collection_path.relative_to(config.rootpath)), _left_out(config)) or None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        for kind in kinds.kinds_of(item.nodeid):
            item.add_marker(kind)
        if item.get_closest_marker("cluster"):
            item.add_marker(pytest.mark.timeout(CLUSTER_TIMEOUT_S))
        if EFFORT > 1:
            own = item.get_closest_marker("timeout")
            limit_s = own.args[0] if own else float(config.getini("timeout"))
            item.add_marker(pytest.mark.timeout(limit_s * EFFORT), append=False)
        if item.get_closest_marker("source") and compiled.CORE.is_installed:
            item.add_marker(pytest.mark.skip(f"it changes the core's code: {compiled.PURE_VARIABLE}=1 runs it"))
    if left_out := _left_out(config):
        config.hook.pytest_deselected(items=[item for item in items if any(map(item.get_closest_marker, left_out))])
        items[:] = [item for item in items if not any(map(item.get_closest_marker, left_out))]
    if ROOM in config.stash:
        # What wants to be alone comes first: later it would wait, idle, for whatever the other processes are at.
        # A module that takes long is not begun last, when the others have nothing left to do.
        slow = {item.path for item in items if item.get_closest_marker("slow")}
        items.sort(
            key=lambda item: (
                item.get_closest_marker("alone") is None,
                kinds.place_of(item.nodeid),
                item.path not in slow,
            )
        )


def pytest_collection_finish() -> None:
    """Modules that tests write are not cached: of two texts of one size within a second, the first would run twice.

    Nor is garbage looked for each 700 objects: there is much by now that stays, and that is looked through as well.
    """
    gc.set_threshold(20_000, 20, 20)
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"


def _left_out(config: pytest.Config) -> tuple[str, ...]:
    """Return the kinds of tests that this run leaves out."""
    return kinds.NOT_QUICK if config.getoption("quick") else kinds.NOT_MEDIUM if config.getoption("medium") else ()


# --- side by side, with pytest-xdist ----------------------------------------------------------------------------------


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> Scheduling:
    from tests.helpers.side_by_side import Groups

    config.option.loadscopereorder = False  # the order is that of the collection
    return Groups(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: WorkerController) -> None:
    stash = node.config.stash
    if ROOM_FOLDER not in stash:
        folder = tempfile.TemporaryDirectory(prefix="immortal-tests-")
        node.config.add_cleanup(folder.cleanup)
        stash[ROOM_FOLDER] = folder.name
    node.workerinput["room"] = stash[ROOM_FOLDER]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """What measures runs while nothing else does. The time of a test begins when it may run."""
    room = item.config.stash.get(ROOM, None)
    if room is None:
        return (yield)
    room.enter(alone=item.get_closest_marker("alone") is not None)
    try:
        return (yield)
    finally:
        room.leave()


# --- fixtures ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """In memory; on a disk for what kills processes or instances in the middle of their writes."""
    is_of_disk = request.node.nodeid.startswith(kinds.DISK_MODULES) or any(
        map(request.node.get_closest_marker, kinds.ON_DISK)
    )
    folder = None if is_of_disk else in_memory()
    if folder is None:
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="immortal-test-", dir=folder) as made:
        yield Path(made)


@pytest.fixture(autouse=True)
def signals_as_they_were() -> Iterator[None]:
    """A coordinator that a test has run in here ignores signals at its end, and so would all that is started later."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        if signal.getsignal(number) != handler:
            signal.signal(number, handler)


@pytest.fixture
def started_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that the test starts are no forks of one that has imported all modules: it measures their memory."""
    monkeypatch.setenv(fork_server.EXEC_VARIABLE, "1")


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """The one Spark session of a test run: starting it takes seconds."""
    from immortal.pipeline.errors import JavaError
    from immortal.pipeline.java import find_java
    from tests.helpers.spark import running_session  # pyspark is imported only where a test asks for it

    try:
        find_java()
    except JavaError as error:
        pytest.skip(str(error))
    with running_session() as session:
        yield session


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """The one PostgreSQL of a test process: making it takes a second."""
    from tests.helpers.postgres import VERSION_MIN, Postgres, binaries

    pytest.importorskip("psycopg", reason="psycopg is not installed: 'scripts/setup dev' does it")
    programs = binaries()
    if programs is None:
        pytest.skip(
            f"there is no PostgreSQL {VERSION_MIN} or newer in /usr/lib/postgresql: 'apt-get install postgresql'"
        )
    server = Postgres(programs)
    try:
        yield server
    finally:
        server.remove()
