"""Context of a part: its folder, its amounts, and its progress."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar, cast

from immortal.bench.processes import BenchError, start_module
from immortal.protocol import distribution

T = TypeVar("T")

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Amounts:
    """Amounts of a full run; :meth:`quick` returns smaller ones."""

    repeats: int = 5
    seconds: float = 2.0  # of one turn of one implementation, roughly
    sizes: Sequence[int] = (16, 64, 1 << 10, 16 << 10, 64 << 10, 1 << 20, 16 << 20)
    outstanding: Sequence[int] = (1, 8, 64, 1000)
    peers: int = 16  # of fan-out and fan-in
    handlers: Sequence[int] = (1, 64, 500)  # three-step handlers at a time
    replay_mb: int = 800
    log_sizes_gib: Sequence[float] = (1, 10)
    state_sizes_mib: Sequence[int] = (1, 16, 128, 1024)
    peer_counts: Sequence[int] = (2, 8, 32)
    waiting: Sequence[int] = (0, 100, 1000, 10_000)
    delays_ms: Sequence[float] = (0, 1, 5, 10)
    multicast_destinations: Sequence[int] = (2, 3, 4, 8, 16)

    @classmethod
    def quick(cls) -> Amounts:
        return cls(
            repeats=2,
            seconds=0.4,
            sizes=(16, 1 << 10, 64 << 10, 1 << 20),
            outstanding=(1, 64, 1000),
            peers=4,
            handlers=(1, 64),
            replay_mb=200,
            log_sizes_gib=(0.1, 0.3),
            state_sizes_mib=(1, 64),
            peer_counts=(2, 6),
            waiting=(0, 1000),
            delays_ms=(0, 5),
            multicast_destinations=(2, 3),
        )


@dataclass(slots=True)
class Context:
    amounts: Amounts
    folder: Path  # of logs and databases: its disk is the measured one
    progress: Callable[[str], None] = lambda text: None
    skipped: dict[str, str] = field(default_factory=dict)  # parts that were left out, and why

    @property
    def repeats(self) -> int:
        return self.amounts.repeats

    def skip(self, what: str, why: str) -> None:
        self.skipped[what] = why

    @contextlib.contextmanager
    def home(self) -> Iterator[Path]:
        """Yield a folder that is removed at the end."""
        with tempfile.TemporaryDirectory(prefix="immortal-bench-", dir=self.folder) as name:
            yield Path(name)

    def interleave(self, turns: Mapping[str, Callable[[], T]], what: str = "") -> dict[str, list[T]]:
        """Run each of ``turns`` once, then each once more, ...: other load on the machine affects all of them alike."""
        results: dict[str, list[T]] = {name: [] for name in turns}
        for turn in range(self.repeats):
            for name, run in turns.items():
                self.progress(f"{what}: {name}, {turn + 1} of {self.repeats}")
                results[name].append(run())
        return results

    def interleave_with_limits(
        self, turns: Mapping[str, Callable[[], T]], limits: Mapping[str, Callable[[], float]], what: str
    ) -> tuple[dict[str, list[T]], dict[str, list[float]]]:
        """Interleave turns as ``interleave`` does, with the limits measured in between."""
        results = self.interleave({**turns, **limits}, what)
        return (
            {name: cast("list[T]", results[name]) for name in turns},
            {name: cast("list[float]", results[name]) for name in limits},
        )

    def with_repeats(self, repeats: int) -> Context:
        return dataclasses.replace(self, amounts=dataclasses.replace(self.amounts, repeats=repeats))


def prepare_environment() -> None:
    """Set the environment so that started processes find this package, and ours, wherever they run."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    os.environ["DO_NOT_TRACK"] = "1"
    # As if the package were installed: otherwise each start of ours, not of the rivals', would compile its modules.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


# The machine and the versions of the figures.


PACKAGES = (
    distribution.NAME,
    "lmdb",
    "pyzmq",
    "msgspec",
    "fastcrc",
    "grpcio",
    "dbos",
    "sqlalchemy",
    "psycopg",
    "restate-sdk",
)


def describe(folder: Path) -> dict[str, Any]:
    """Describe the machine. ``folder``: of the logs."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30), 1),
        "kernel": platform.release(),
        "system": platform.platform(),
        "filesystem": _filesystem(folder),
        "python": platform.python_version(),
        "commit": _commit(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
    }


def load_average() -> list[float]:
    return [round(load, 2) for load in os.getloadavg()]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _filesystem(folder: Path) -> str:
    best = ("", "unknown")
    for line in Path("/proc/mounts").read_text().splitlines():
        _, mount, kind = line.split()[:3]
        if folder.resolve().is_relative_to(mount) and len(mount) >= len(best[0]):
            best = (mount, kind)
    return best[1]


def _commit() -> str:
    git = shutil.which("git")
    if git is None:
        return ""
    asked = [git, "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude", "*"]
    return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()


# Services of the suite beside plain processes: one `immortal run` each, ready when it is returned.


QUIET = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}


def start_service(stack: ExitStack, home: Path, name: str, app: str) -> list[int]:
    """Run a service until ``stack`` ends; return the process IDs of coordinator and app. Raises BenchError."""
    register = [sys.executable, "-m", "immortal", "--home", str(home), "register", name, "--peer", "tcp://127.0.0.1:*"]
    subprocess.run(register, check=True, stdout=subprocess.DEVNULL)
    run = start_module("immortal", "--home", str(home), "run", name, app, **{**QUIET, "stderr": subprocess.PIPE})
    process = stack.enter_context(run)
    assert process.stderr is not None
    lines = process.stderr
    said = ""
    while not said.endswith("ready\n"):
        line = lines.readline()
        if not line:
            raise BenchError(f"{name} has ended before it was ready:\n{said}")
        said += line
    threading.Thread(target=lines.read, daemon=True).start()  # otherwise the process would wait for a reader
    return [int(pid) for pid in re.findall(r"_pid=(\d+)", said)]
