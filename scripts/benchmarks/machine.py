"""The machine and the versions that figures belong to."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from scripts.benchmarks.context import ROOT

PACKAGES = ("immortal", "lmdb", "pyzmq", "msgspec", "fastcrc", "grpcio", "dbos", "sqlalchemy", "psycopg", "restate-sdk")


def describe(folder: Path) -> dict[str, Any]:
    """``folder``: where the logs are."""
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
