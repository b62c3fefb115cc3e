"""The machine of the figures and the versions of its packages; the environment of measured processes."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from immortal.protocol import distribution

ROOT = Path(__file__).parents[2]


def prepare_environment() -> None:
    """Set the environment so that started processes find this package, and ours, wherever they run."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    os.environ["DO_NOT_TRACK"] = "1"
    # As if the package were installed: otherwise each start of ours, not of the rivals', would compile its modules.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


# The machine and the versions of the figures.


PACKAGES = (
    *(distribution.NAME, "lmdb", "pyzmq", "msgspec", "fastcrc"),
    *("grpcio", "dbos", "sqlalchemy", "psycopg", "restate-sdk"),
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
        "packages": dict(_versions()),
    }


def load_average() -> list[float]:
    return [round(load, 2) for load in os.getloadavg()]


def _versions() -> Iterator[tuple[str, str]]:
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            yield package, metadata.version(package)


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
