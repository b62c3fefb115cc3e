"""Finder of the Java that runs Spark. `python -m immortal.pipeline.java` needs nothing but Python."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from immortal.pipeline.errors import JavaError

JAVA_VERSION_MIN = 17
_VERSION_TIMEOUT_S = 30
_USUAL_PLACE = Path("/usr/lib/jvm")  # where Linux distributions put them
_VERSION = re.compile(r'version "(?:1\.)?(\d+)')  # "17.0.9"; up to Java 8 "1.8.0_392"
_ADVICE = "on Debian: apt-get install openjdk-17-jre-headless (scripts/setup --system spark does it), or set JAVA_HOME"


@dataclass(frozen=True, slots=True)
class Java:
    """Java installation. ``home`` is the value that JAVA_HOME needs; None if PATH leads to it already."""

    home: Path | None
    version: int


def find_java() -> Java:
    """Return the first new enough Java of JAVA_HOME, PATH and /usr/lib/jvm. Raises JavaError, with what was found.

    A JAVA_HOME that is set is used or refused: its user wants no other Java.
    """
    if home := os.environ.get("JAVA_HOME"):
        version = java_version(Path(home) / "bin" / "java")
        if version is None:
            raise JavaError(f"JAVA_HOME is {home}, where there is no Java that runs; {_ADVICE}")
        if version < JAVA_VERSION_MIN:
            raise JavaError(f"JAVA_HOME is {home}, Java {version}: Spark needs Java {JAVA_VERSION_MIN}+; {_ADVICE}")
        return Java(None, version)
    too_old = None
    for home_found, executable in _candidates():
        version = java_version(executable)
        if version is not None and version >= JAVA_VERSION_MIN:
            return Java(home_found, version)
        too_old = too_old or version
    found = "there is none" if too_old is None else f"here is Java {too_old}"
    raise JavaError(f"Spark needs Java {JAVA_VERSION_MIN} or newer, {found}; {_ADVICE}")


def _candidates() -> Iterator[tuple[Path | None, Path]]:
    if on_path := shutil.which("java"):
        yield None, Path(on_path)
    for executable in sorted(_USUAL_PLACE.glob("*/bin/java")):
        yield executable.parent.parent, executable


def java_version(executable: Path) -> int | None:
    """Return the major version that ``executable`` reports; None if it does not run."""
    try:
        answer = subprocess.run(
            [executable, "-version"], capture_output=True, text=True, timeout=_VERSION_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = _VERSION.search(answer.stderr + answer.stdout)
    return int(found[1]) if found and answer.returncode == 0 else None


def main() -> int:
    try:
        find_java()
    except JavaError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201 (for scripts/setup)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
