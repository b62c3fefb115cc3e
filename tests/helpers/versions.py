"""Earlier versions that are tried with today's: a list, and for each an environment made from its commit."""

from __future__ import annotations

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
    asked = ["git", "-C", str(release.ROOT), "rev-parse", "--verify", "--quiet", f"{version.commit}^{{commit}}"]
    found = subprocess.run(asked, capture_output=True, text=True, check=False)
    if found.returncode != 0:
        pytest.skip(f"this checkout has no commit {version.commit}")
    folder = Path(sys.prefix) / "versions" / f"{found.stdout.strip()[:12]}-{sys.version_info[1]}"
    if not folder.exists():
        with tempfile.TemporaryDirectory(prefix="immortal-version-") as name:
            sources, out = Path(name, "sources"), Path(name, "out")
            sources.mkdir()
            out.mkdir()
            archive = f"git -C '{release.ROOT}' archive {found.stdout.strip()} | tar -x -C '{sources}'"
            subprocess.run(archive, shell=True, check=True)
            wheel = release.build_wheel(sources, out, sys.executable, "--no-build-isolation", pure=True)
            folder.parent.mkdir(exist_ok=True)
            made = Path(tempfile.mkdtemp(prefix=".", dir=folder.parent)) / "environment"
            python = release.environment(made, sys.executable, "--without-pip")
            site = Path(
                release.run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=made).strip()
            )
            (site / "dependencies.pth").write_text(
                sysconfig.get_path("purelib")
            )  # without what its own .pth files name
            pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index"]
            release.run(*pip, wheel, cwd=made)
            made.rename(folder)
            made.parent.rmdir()
    return (str(folder / "bin" / "python"),)
