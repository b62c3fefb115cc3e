"""Builds a release in dist/VERSION: sdist, wheels, an SBOM, notes and checksums; then tests install each wheel.

    scripts/release            the commit that is checked out; CHANGELOG.md must have a section of its version
    scripts/release --draft    the files as they are; the notes are those of "Unreleased"

Wheels are built from the sdist: a pure one for every Python, and a compiled one for each Python from 3.11 to 3.14 that
is found, on the path or of pyenv. Compilers and other build tools come from the package index. The SBOM (CycloneDX)
lists the packages of the image: the wheel, and deploy/requirements.lock. Nothing is uploaded.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

from immortal.protocol import distribution
from immortal.protocol.compiled import PURE_VARIABLE
from scripts.stopwatch import copy_checkout

ROOT = Path(__file__).parents[1]
MINORS = (11, 12, 13, 14)
FOLDER_VARIABLE = "IMMORTAL_TEST_RELEASE"
"""Variable with a release for tests/scenarios/test_installed.py to try, instead of a wheel of its own."""
SUMS, NOTES = "SHA256SUMS", "NOTES.md"
BUILD_TIMEOUT_S = 1200  # mypyc and a C compiler, on a slow and busy machine


class ReleaseError(Exception):
    """Raised when a release can't be built from these files."""


def run(*command: str | Path, cwd: Path, **variables: str) -> str:
    """Run a command that sees nothing of the checkout; return its output. Raises ReleaseError."""
    left_out = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", PURE_VARIABLE)
    inherited = {name: value for name, value in os.environ.items() if name not in left_out}
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**inherited, "PIP_DISABLE_PIP_VERSION_CHECK": "1", **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=BUILD_TIMEOUT_S,
        check=False,
    )
    if done.returncode != 0:
        raise ReleaseError(f"{' '.join(map(str, command))} ended with status {done.returncode}: {done.stdout[-4000:]}")
    return done.stdout


def interpreters() -> dict[str, str]:
    """Return the Python executables by version, such as "3.12"; the one that runs this script first."""
    found = {f"3.{sys.version_info[1]}": sys.executable}
    for executable in _candidates():
        program = "import ensurepip, venv, sys; print('%d.%d' % sys.version_info[:2])"  # a shim of pyenv can fail
        done = subprocess.run([executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
        if done.returncode == 0 and (version := done.stdout.strip()) in {f"3.{minor}" for minor in MINORS}:
            found.setdefault(version, executable)
    return found


def _candidates() -> Iterator[str]:
    yield from filter(None, (shutil.which(f"python3.{minor}") for minor in MINORS))
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    yield from map(str, sorted(root.glob("versions/3.*/bin/python3")))


def environment(folder: Path, python: str, *options: str) -> Path:
    """Create a virtual environment; return the path of its Python."""
    run(python, "-m", "venv", *options, folder, cwd=folder.parent)
    return folder / "bin" / "python"


def build_sdist(sources: Path, out: Path) -> Path:
    """Build the sdist. The same sources and SOURCE_DATE_EPOCH make the same bytes."""
    program = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    run(sys.executable, "-c", program, out, cwd=sources)
    (made,) = out.glob("*.tar.gz")
    time_s = int(os.environ.get("SOURCE_DATE_EPOCH", "0"))
    packed = io.BytesIO()
    with tarfile.open(made) as built, tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for member in sorted(built.getmembers(), key=lambda one: one.name):
            member.mtime, member.uid, member.gid, member.uname, member.gname, member.pax_headers = (
                time_s,
                0,
                0,
                "",
                "",
                {},
            )
            archive.addfile(member, built.extractfile(member) if member.isreg() else None)
    made.write_bytes(gzip.compress(packed.getvalue(), mtime=time_s))
    return made


def build_wheel(source: Path, out: Path, python: str | Path, *options: str, pure: bool = False) -> Path:
    """Build a wheel of an sdist or a folder; return its path. Raises ReleaseError if it was not compiled."""
    before = set(out.glob("*.whl"))
    variables = {PURE_VARIABLE: "1"} if pure else {}
    command = (python, "-m", "pip", "wheel", "--no-deps", *options, "--wheel-dir", out, source)
    said = run(*command, cwd=out, **variables)
    (made,) = set(out.glob("*.whl")) - before
    if not pure and "could not be compiled" in said:
        raise ReleaseError(f"{made.name} is not compiled:\n{said[-4000:]}")
    return made


def write_sbom(wheel: Path, python: str, path: Path, scratch: Path) -> None:
    """Write the SBOM of the container image, from an environment with the same packages."""
    tools = environment(scratch / "tools", sys.executable)
    run(tools, "-m", "pip", "install", "cyclonedx-bom>=7,<8", cwd=scratch)
    image = environment(scratch / "image", python, "--without-pip")
    install = (tools, "-m", "pip", "--python", image, "install")
    run(*install, "--require-hashes", "-r", ROOT / "deploy" / "requirements.lock", cwd=scratch)
    run(*install, "--no-deps", wheel, cwd=scratch)
    command = (tools.with_name("cyclonedx-py"), "environment", "--pyproject", ROOT / "pyproject.toml")
    run(*command, "--output-reproducible", "--output-file", path, image, cwd=scratch)


def write_sums(out: Path) -> None:
    """Write the checksums of all files in a folder, for `sha256sum --check`."""
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in sorted(out.iterdir())]
    (out / SUMS).write_text("".join(lines))


def notes_of(changelog: str, version: str, *, is_draft: bool) -> str:
    """Return the section of the version, or for a draft the unreleased one. Raises ReleaseError if there is none."""
    sections: dict[str, str] = {
        title.split(" - ")[0]: text.strip()
        for title, text in re.findall(r"^## (.*)\n((?:(?!## ).*(?:\n|$))*)", changelog, re.MULTILINE)
    }
    if not is_draft and sections.get("Unreleased"):
        raise ReleaseError(f"CHANGELOG.md has entries under 'Unreleased': which are of {version}?")
    found = sections.get("Unreleased" if is_draft else version) or sections.get(version)
    if not found:
        raise ReleaseError(f"CHANGELOG.md has no section '## {version} - DATE' with entries")
    return found + "\n"


def build(out: Path, *, is_draft: bool) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    changed = run("git", "status", "--porcelain", cwd=ROOT)
    if changed and not is_draft:
        raise ReleaseError(f"there are changes that are not committed; --draft takes them along:\n{changed}")
    if shutil.which("cc") is None:
        raise ReleaseError("there is no C compiler 'cc': on Debian, apt-get install gcc")
    notes = notes_of((ROOT / "CHANGELOG.md").read_text(), version, is_draft=is_draft)
    os.environ["SOURCE_DATE_EPOCH"] = run("git", "log", "-1", "--format=%ct", cwd=ROOT).strip()
    pythons = interpreters()
    with tempfile.TemporaryDirectory(prefix="immortal-release-") as name:
        scratch = Path(name)
        copy_checkout(scratch / "sources")
        sdist = build_sdist(scratch / "sources", out)
        wheel = build_wheel(sdist, out, sys.executable, pure=True)
        for of_version, python in pythons.items():
            print(f"release: compiles for Python {of_version}", flush=True)
            build_wheel(sdist, out, environment(scratch / of_version, python))
        print("release: lists what the image has", flush=True)
        sbom = out / f"{sdist.name.removesuffix('.tar.gz')}.cdx.json"
        write_sbom(wheel, pythons.get("3.13", sys.executable), sbom, scratch)
    (out / NOTES).write_text(notes)
    write_sums(out)


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/release", description=__doc__.partition("\n")[0])
    parser.add_argument("--draft", action="store_true", help="take the files as they are, committed or not")
    options = parser.parse_args()
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    out = ROOT / "dist" / version
    if out.exists():
        parser.error(f"{out} is there already: remove it first")
    partial = out.with_name(f".{version}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        build(partial, is_draft=options.draft)
    except (ReleaseError, subprocess.TimeoutExpired) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    command = [sys.executable, "-m", "pytest", "-v", "tests/scenarios/test_installed.py"]
    if (status := subprocess.call(command, cwd=ROOT, env={**os.environ, FOLDER_VARIABLE: str(partial)})) == 0:
        partial.rename(out)
        print(f"release: {distribution.NAME} {version} is in {out}:", *sorted(os.listdir(out)), sep="\n  ")
    return status


if __name__ == "__main__":
    sys.exit(main())
