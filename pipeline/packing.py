"""Archive of this environment's packages and of the user's code, for executors of Spark that have neither.

An archive holds no Python and no Spark: executors bring these, Python in the version that made the archive.
"""

from __future__ import annotations

import os
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import IO

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import immortal
from immortal.pipeline.errors import SourceError
from immortal.protocol import distribution
from immortal.protocol.files import open_beside

_UNPACKED = "immortal_env"  # in the folder where an executor runs
_EXTRAS = "spark,archive,postgres"
_NOT_PACKED = ("pyspark", "py4j", "matplotlib", "jinja2")  # a cluster has the first two; pages are made at the driver
_COMPRESSION = 1  # three times as quick as the default, for a tenth more


def with_archive(archive: Path, settings: Mapping[str, str]) -> dict[str, str]:
    """Return Spark's ``settings`` with ``archive``, from which executors import before what they have themselves."""
    archives, path = "spark.archives", "spark.executorEnv.PYTHONPATH"
    return {
        **settings,
        archives: ",".join(filter(None, (f"{archive.absolute()}#{_UNPACKED}", settings.get(archives)))),
        path: ":".join(filter(None, (_UNPACKED, settings.get(path)))),
    }


def pack(out: Path, code: Path | None = None) -> int:
    """Write the archive ``out``, with the modules of ``code``, a folder or wheel. Return its number of packages.

    Raises SourceError if there is no such code, OSError.
    """
    if code is not None and not code.is_dir() and not zipfile.is_zipfile(code):
        raise SourceError(f"{code} is no folder and no wheel")
    packages = _distributions()
    descriptor, temporary = open_beside(out)
    try:
        with open(descriptor, "wb") as file:
            _write(file, packages, code, out.name)
        os.replace(temporary, out)
    finally:
        temporary.unlink(missing_ok=True)
    return len(packages)


def _write(file: IO[bytes], packages: Sequence[metadata.Distribution], code: Path | None, name: str) -> None:
    """Write the archive; ``name``: of its file, which may be among the code since the run before."""
    package = Path(immortal.__file__).parent
    with (
        tarfile.open(fileobj=file, mode="w:gz", compresslevel=_COMPRESSION, dereference=True) as tar,
        tempfile.TemporaryDirectory() as folder,
    ):
        for found in packages:
            files = found.files if found.read_text("RECORD") is not None else None
            for each in files or ():
                path = Path(str(each.locate()))
                # Another package may have replaced a file, or taken it along.
                if not {"..", "__pycache__"} & set(each.parts) and each.parts[0] != package.name and path.is_file():
                    tar.add(path, str(each))
            for top in () if files is not None else (found.read_text("top_level.txt") or "").split():
                for path in Path(str(found.locate_file(""))).glob(f"{top}*"):  # an old installation lists other paths
                    if path.name.partition(".")[0] == top:
                        _add(tar, path, path.name, name)
        _add(tar, package, package.name, name)  # wherever it is: an editable installation lists no modules
        if code is not None and code.is_file():
            with zipfile.ZipFile(code) as wheel:
                wheel.extractall(folder)  # noqa: S202 (the user's own wheel)
        for entry in sorted((code if code is not None and code.is_dir() else Path(folder)).iterdir()):
            _add(tar, entry, entry.name, name)


def _add(tar: tarfile.TarFile, path: Path, name: str, but: str) -> None:
    """Add a file, or a folder with all below it, without what is hidden, compiled by Python or named ``but``."""

    def wanted(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        file = Path(member.name).name
        return None if file.startswith((".", "__pycache__")) or file == but else member

    tar.add(path, name, filter=wanted)


def _distributions() -> list[metadata.Distribution]:
    """Return what is installed of the packages that the pipeline needs."""
    found: dict[str, metadata.Distribution] = {}
    pending, seen = [Requirement(f"{distribution.NAME}[{_EXTRAS}]")], set[str]()
    while pending:
        wanted = pending.pop()
        name = canonicalize_name(wanted.name)
        if str(wanted) in seen or name in _NOT_PACKED:
            continue
        seen.add(str(wanted))
        try:
            found[name] = metadata.distribution(name)
        except metadata.PackageNotFoundError:  # of an extra
            continue
        needed = map(Requirement, found[name].requires or ())
        extras = [{"extra": extra} for extra in (*wanted.extras, "")]
        pending += [each for each in needed if each.marker is None or any(map(each.marker.evaluate, extras))]
    return list(found.values())
