"""The rooms whose code is changed, the tests of each, and which of them run which function."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "immortal"  # what runs is called by its links to the rooms
CACHE = ROOT / ".venv" / "mutants"
SIMULATION = "tests/simulation"  # beside the test files, in what was run
SIMULATION_SEEDS_PROFILED = 20
# Without pytest's own loader, which would import the SDK, that has a plugin of pytest, past the change.
PYTEST = (
    *("-m", "pytest", "--medium", "-q", "-x", "--no-header", "--tb=short", "--assert=plain"),
    *("-pno:xdist", "-pno:cacheprovider", "-otimeout=60", "--hypothesis-seed=0"),
)
Function = tuple[str, str]  # the path of a module, and the name of a function as its class has it


@dataclass(frozen=True, slots=True)
class Room:
    name: str
    folder: str
    tests: tuple[str, ...]  # patterns of files

    def modules(self) -> list[str]:
        return sorted(str(path.relative_to(ROOT)) for path in (ROOT / self.folder).rglob("*.py"))

    def test_files(self) -> list[str]:
        return sorted({str(path.relative_to(ROOT)) for one in self.tests for path in (ROOT / "tests").glob(one)})


ROOMS = (
    Room(
        "core",
        "coordinator/core",
        (
            "traces/test_*.py",
            "unit/test_core_*.py",
            "unit/test_driver.py",
            "properties/test_core_*.py",
            "properties/test_clients.py",
            "contract/test_instance_clock.py",
            "contract/test_operator_verbs.py",
            "security/test_peer_bounds.py",
            "security/test_permissions.py",
        ),
    ),
    Room(
        "driver",
        "coordinator/driver",
        (
            "traces/test_*.py",
            "unit/test_driver*.py",
            "contract/test_log_endpoint.py",
            "unit/test_core_*.py",
            "unit/test_testing_*.py",
        ),
    ),
    Room(
        "log",
        "coordinator/log",
        (
            "unit/test_log_*.py",
            "contract/test_log_*.py",
            "properties/test_log_*.py",
            "contract/test_begun_commits.py",
            "contract/test_postgres_*.py",
            "security/test_log_forgery.py",
            "*/test_trailer.py",
        ),
    ),
    Room(
        "messenger",
        "coordinator/messenger",
        (
            "unit/test_messenger_*.py",
            "contract/test_messenger*.py",
            "contract/test_cut_links.py",
            "contract/test_peer_*.py",
            "properties/test_receive_window.py",
            "security/test_peer_port.py",
            "security/test_warnings.py",
        ),
    ),
    Room(
        "sdk",
        "appsdk",
        (
            "*/test_sdk_*.py",
            "*/test_testing_*.py",
            "*/test_client_*.py",
            "unit/test_*_guide.py",
            "properties/test_state_diff.py",
            "*/test_types.py",
            "*/test_trace_context.py",
            "*/test_query_limit.py",
            "*/test_timings.py",
            "*/test_failing_services.py",
            "*/test_pickle.py",
            "*/test_integrations*.py",
            "*/test_nodes*.py",
            "*/test_ordering*.py",
            "*/test_views.py",
            "*/test_clone*.py",
            "*/test_harmony*.py",
            "*/test_pirate*.py",
            "*/test_queue*.py",
        ),
    ),
)


@dataclass(frozen=True, slots=True)
class Reach:
    """What a room's tests did with the code as it is: ``files``, the seconds of a processor that each file took;
    ``of_function``, the files that ran it in their own process, and ``SIMULATION`` where that runs its module."""

    files: Mapping[str, float]
    of_function: Mapping[Function, frozenset[str]]

    def tests_of(self, function: Function) -> list[str]:
        """The quickest first. All of the room where none was seen to run it: while it was imported, one may."""
        found = [file for file in self.of_function.get(function, ()) if file in self.files] or self.files
        return sorted(found, key=lambda file: (self.files[file], file))

    def is_simulated(self, path: str) -> bool:
        return any(SIMULATION in files for (module, _), files in self.of_function.items() if module == path)


class BaselineError(Exception):
    """A room's tests fail as the code is."""


def environment(folder: str) -> dict[str, str]:
    """Modules that are compiled run as their source, and nothing is written into the work tree."""
    return os.environ | {
        "IMMORTAL_PURE_PYTHON": "1",
        "PYTHONPATH": folder,
        "PYTHONDONTWRITEBYTECODE": "1",
        "HYPOTHESIS_STORAGE_DIRECTORY": folder,
    }


def reach_of(room: Room) -> Reach:
    """As it was found for the same sources before, or by running the room's tests. Raises BaselineError."""
    kept = CACHE / f"{room.name}-{_hash(room)}.json"
    if not kept.exists():
        with tempfile.TemporaryDirectory(prefix="immortal-mutants-") as folder:
            found = Path(folder, "reach.json")
            command = [sys.executable, "-m", "tests.mutants.profile", str(found), room.folder, *room.test_files()]
            done = subprocess.run(command, cwd=ROOT, env=environment(folder), capture_output=True, text=True)
            if done.returncode != 0 or not found.exists():
                raise BaselineError(f"the tests of {room.name} fail as the code is:\n{done.stdout}{done.stderr}")
            CACHE.mkdir(exist_ok=True)
            for old in CACHE.glob(f"{room.name}-*.json"):
                old.unlink()
            kept.write_text(found.read_text())
    content = json.loads(kept.read_text())
    of_function: defaultdict[Function, set[str]] = defaultdict(set)
    for file, functions in content["functions"].items():
        for module, function in functions:
            of_function[module, function].add(file)
    return Reach(content["seconds"], {function: frozenset(files) for function, files in of_function.items()})


def _hash(room: Room) -> str:
    digest = hashlib.blake2b(digest_size=8)
    helpers = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "tests" / "helpers").glob("*.py"))]
    for path in (*room.modules(), *room.test_files(), *helpers, "tests/conftest.py", "tests/mutants/profile.py"):
        digest.update(f"{path}\n".encode() + ROOT.joinpath(path).read_bytes())
    return digest.hexdigest()
