"""Earlier versions that are tried with today's: a list, and for each an environment made from its commit."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
from pathlib import Path

import msgspec
import pytest

from scripts import release

LISTED = Path(__file__).parents[1] / "vectors" / "versions.toml"


class Version(msgspec.Struct, frozen=True):
    """An earlier version. ``commit``: or a tag. ``log_format``: the newest that it reads."""

    name: str
    commit: str
    log_format: int


def listed() -> list[Version]:
    """Return all versions of the list, oldest first."""
    return msgspec.convert(tomllib.loads(LISTED.read_text())["version"], list[Version])


def python_of(version: Version) -> tuple[str, ...]:
    """Return the Python that imports this version, with today's dependencies; build it once, as a pure wheel."""
    git = ["git", "-C", str(release.ROOT)]
    asked = [*git, "rev-parse", "--verify", "--quiet", f"{version.commit}^{{commit}}"]
    commit = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    if not commit:
        pytest.skip(f"this checkout has no commit {version.commit}")
    folder = Path(sys.prefix) / "versions" / f"{commit[:12]}-{sys.version_info[1]}"
    if not folder.exists():
        folder.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".", dir=folder.parent) as name:
            scratch, made = Path(name), Path(name, "environment")
            subprocess.run([*git, "archive", "--output", scratch / "sources.tar", commit], check=True)
            shutil.unpack_archive(scratch / "sources.tar", scratch / "sources")
            wheel = release.build_wheel(scratch / "sources", scratch, sys.executable, "--no-build-isolation", pure=True)
            python = release.environment(made, sys.executable, "--without-pip")
            (site,) = made.glob("lib/*/site-packages")
            (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))  # not what that one's .pth files name
            pip = (sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index")
            release.run(*pip, wheel, cwd=scratch)
            made.rename(folder)
    return (str(folder / "bin" / "python"),)
