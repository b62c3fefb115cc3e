"""Findings about the installation: versions of packages, compiled parts, installed extras, native libraries."""

from __future__ import annotations

import importlib
import platform
import re
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

import immortal
from immortal.coordinator.doctor.finding import Area, Finding, note, ok, problem
from immortal.protocol import compiled, distribution

AREA = Area.INSTALLATION
EXTRAS = (
    "archive",
    "debug",
    "delta",
    "encryption",
    "http",
    "lineage",
    "metrics",
    "postgres",
    "pydantic-ai",
    "spark",
    "sql",
    "web",
)
"""Extras for users; the others are for work on the project itself."""
PYTHON_MIN = (3, 11)
_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)(?:\[[^\]]*\])?\s*([<>=!~0-9.,\s]*)(?:;\s*(.*))?")
_BOUND = re.compile(r"(>=|<)\s*([0-9.]+)")


def findings() -> Iterator[Finding]:
    yield from _check_python()
    try:
        version, required = metadata.version(distribution.NAME), metadata.requires(distribution.NAME) or []
    except metadata.PackageNotFoundError:
        yield problem(
            AREA,
            f"the package {distribution.NAME!r} is not installed for {sys.executable}: these are its sources alone",
            "nothing says which versions of other packages it works with, and tests find no fixtures of it",
            distribution.pip("install", str(_root())),
        )
    else:
        yield ok(AREA, f"{distribution.NAME} {version} in {_root()}")
        yield from _check_packages(required)
        yield _check_extras(required)
    yield from _check_native()
    yield from _check_compiled()


def _check_python() -> Iterator[Finding]:
    found = f"Python {platform.python_version()} ({platform.python_implementation()}) at {sys.executable}"
    if sys.version_info < PYTHON_MIN:
        least = ".".join(map(str, PYTHON_MIN))
        yield problem(AREA, found, f"Immortal needs {least} or newer", "make an environment with a newer Python")
    elif platform.python_implementation() != "CPython":
        yield note(AREA, found, "it is tested with CPython only", "use CPython for what is in service")
    else:
        yield ok(AREA, found)


def _check_packages(required: Sequence[str]) -> Iterator[Finding]:
    versions = []
    for name, bounds, marker in map(_parts, required):
        if "extra" in marker:
            continue
        version = _version(name)
        if version is None:
            yield problem(
                AREA, f"the package {name!r} is missing", "Immortal can't run without it", _install(name, bounds)
            )
            continue
        if not is_within(version, bounds):
            why = f"Immortal is made for {name} {bounds}"
            yield problem(AREA, f"{name} is of version {version}", why, _install(name, bounds))
        versions.append(f"{name} {version}")
    yield ok(AREA, ", ".join(sorted(versions)))


def _check_extras(required: Sequence[str]) -> Finding:
    there = {extra: is_installed(extra, required) for extra in EXTRAS}
    installed = ", ".join(extra for extra in EXTRAS if there[extra]) or "none"
    missing = ", ".join(extra for extra in EXTRAS if not there[extra]) or "none"
    return ok(AREA, f"extras: {installed}; not installed: {missing} ({distribution.add_extra('NAME')})")


def is_installed(extra: str, required: Sequence[str] | None = None) -> bool:
    """Return True if all packages of ``extra`` are installed; False if Immortal itself is not installed."""
    if required is None:
        try:
            required = metadata.requires(distribution.NAME) or []
        except metadata.PackageNotFoundError:
            return False
    names = [name for name, _, marker in map(_parts, required) if f'extra == "{extra}"' in marker.replace("'", '"')]
    return bool(names) and None not in map(_version, names)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _parts(requirement: str) -> tuple[str, str, str]:
    """Split a requirement such as ``lmdb<4,>=1.6; extra == "x"`` into name, bounds and marker."""
    found = _REQUIREMENT.match(requirement)
    if found is None:
        return requirement, "", ""
    return found[1], (found[2] or "").replace(" ", ""), found[3] or ""


def is_within(version: str, bounds: str) -> bool:
    """Return True if a version is within bounds such as ``>=1.6,<4``, the form that our own package uses."""

    def numbers(text: str) -> tuple[int, ...]:
        return tuple(int(number) for number in re.findall(r"\d+", re.split(r"[a-z+-]", text, maxsplit=1)[0]))

    own = numbers(version)
    for operator, bound in _BOUND.findall(bounds):
        size = max(len(own), len(numbers(bound)))
        left, right = (one + (0,) * (size - len(one)) for one in (own, numbers(bound)))
        if (left < right) if operator == ">=" else (left >= right):
            return False
    return True


def _install(name: str, bounds: str) -> str:
    return distribution.pip("install", f"{name}{bounds}")


def _check_native() -> Iterator[Finding]:
    """Check the native libraries that packages bring."""
    try:
        import zmq
    except ImportError as error:
        yield _broken("pyzmq", error)
    else:
        description = f"libzmq {zmq.zmq_version()}"
        if zmq.has("curve"):
            yield ok(AREA, f"{description}, with encryption (CURVE)")
        else:
            yield problem(
                AREA,
                f"{description} is built without encryption (CURVE)",
                "peers and clients prove who they are by it: no connection over TCP comes up",
                distribution.pip("install", "--force-reinstall", "--only-binary", "pyzmq", "pyzmq"),
            )
    try:
        lmdb = importlib.import_module("lmdb")
    except ImportError as error:
        yield _broken("lmdb", error)
    else:
        yield ok(AREA, f"LMDB {'.'.join(map(str, lmdb.version()))}")
    try:
        importlib.import_module("fastcrc.crc64")
    except ImportError:
        yield note(
            AREA,
            "fastcrc can't be imported: checksums are computed by crcmod",
            "each record is checked, and that takes longer so",
            _install("fastcrc", ""),
        )


def _broken(name: str, error: ImportError) -> Finding:
    return problem(
        AREA,
        f"{name} can't be imported: {error}",
        "it is installed for another Python, or not whole",
        distribution.pip("install", "--force-reinstall", name),
    )


def _check_compiled() -> Iterator[Finding]:
    description = compiled.describe()
    if all(one.describe() == f"compiled {one.name}" for one in compiled.SETS):
        yield ok(AREA, description)
        return
    why = "it runs the same, slower: an awaited call takes 1.7 times the processor time"
    if not compiled.is_wanted():
        yield note(AREA, description, why, f"take {compiled.PURE_VARIABLE} out of the environment")
        return
    lacks = [] if shutil.which("cc") or shutil.which("gcc") else ["a C compiler"]
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        lacks.append("the header files of this Python")
    if not lacks:
        yield note(AREA, description, why, _compile())
    else:
        why += f". It lacks {' and '.join(lacks)}, which Debian calls gcc and python3-dev"
        yield note(AREA, description, why, f"apt-get install gcc python3-dev && {_compile()}")


def _compile() -> str:
    """Return the command that compiles this installation, from its sources."""
    if (setup := _root() / "scripts" / "setup").exists():
        return shlex.quote(str(setup))
    try:
        source = distribution.origin()
    except metadata.PackageNotFoundError:
        source = str(_root())
    if source.endswith(".whl"):  # the sources are beside it in a release
        source = re.sub(r"-py3-none-any\.whl$|-cp\d+-[^/]*\.whl$", ".tar.gz", source)
    options = ("--force-reinstall", "--no-cache-dir", "--no-deps", "--no-binary", distribution.NAME)
    return distribution.pip("install", *options, source)


def _root() -> Path:
    """Return the folder above the package; for a checkout its root."""
    return Path(immortal.__file__).resolve().parents[1]
