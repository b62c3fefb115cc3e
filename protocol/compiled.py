"""Modules that run compiled if they have been compiled, from the same source (``setup.py``).

Cython compiles the codec (loops over bytes) to C. mypyc compiles the core (state machines: many small objects and
methods) to native classes. A compiled file's name has a hash of all its sources, so the import finds no stale file and
the source runs. A set runs compiled completely or not at all. ``IMMORTAL_PURE_PYTHON=1`` selects the source.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader, ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

PURE_VARIABLE = "IMMORTAL_PURE_PYTHON"

_ROOT = Path(__file__).parent.parent.parent  # above the package `immortal`
SETTLED_S = 2
_THIS = Path("immortal", "protocol", "compiled.py")


class CompiledSet:
    """Set of modules compiled together. ``name``: for messages. ``folder``: of the compiled files, below the root."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.folder = folder

    def sources(self, root: Path = _ROOT) -> dict[Path, bytes]:
        """Return the sources that the compiled files depend on: content by path below ``root``.

        Raises OSError.
        """
        raise NotImplementedError

    def modules_of(self, sources: Mapping[Path, bytes]) -> list[str]:
        """Return the names of the set's compiled files: its modules, and their shared library if there is one."""
        raise NotImplementedError

    def paths(self, root: Path = _ROOT) -> dict[str, Path]:
        """Return the path of each module's compiled file for the present sources, existing or not. Raises OSError."""
        sources = self.sources(root)
        end = f"-{_hash_of({_THIS: (root / _THIS).read_bytes(), **sources})}{EXTENSION_SUFFIXES[0]}"
        folder = root / self.folder
        return {module: folder / f"{module}{end}" for module in self.modules_of(sources)}

    @property
    def is_installed(self) -> bool:
        """True if this process runs the set compiled."""
        return self in _installed

    def describe(self) -> str:
        """Describe how this process runs the set (compiled or as Python), or would if it were imported, and why."""
        if self._found():
            return f"compiled {self.name}"
        if not is_wanted():
            return f"pure Python {self.name} ({PURE_VARIABLE} is set)"
        is_stale = any((_ROOT / self.folder).glob(f"*{EXTENSION_SUFFIXES[0]}"))
        why = "the compiled one is of another source" if is_stale else "none is compiled"
        return f"pure Python {self.name} ({why})"

    def install(self) -> None:
        """Import the set's modules compiled from now on, if all files exist and the source is not requested."""
        if self not in _installed and (paths := self._found()):
            sys.meta_path.insert(0, _Finder(paths))
            _installed.add(self)

    def _found(self) -> dict[str, Path]:
        """Return the compiled files of the set if this process must use them, else an empty dict."""
        if not is_wanted():
            return {}
        stamp = _ROOT / self.folder / stamp_name()
        try:
            names = _stamped(stamp)
            if names is None:
                paths = self.paths()
                if not all(path.exists() for path in paths.values()):
                    return {}
                names = {module: path.name for module, path in paths.items()}
                _write_stamp(stamp, names, [_ROOT / _THIS, *map(_ROOT.joinpath, self.sources())])
        except OSError:  # without sources there is nothing to compare with
            return {}
        return {module: stamp.with_name(name) for module, name in names.items()}


class _Codec(CompiledSet):
    """Set of Cython modules, each with the .pxd types that only the compiled form has."""

    def sources(self, root: Path = _ROOT) -> dict[Path, bytes]:
        stems = [Path(*module.split(".")) for module in MODULES]
        found = [stem.with_suffix(suffix) for stem in stems for suffix in (".py", ".pxd")]
        return {path: (root / path).read_bytes() for path in found if (root / path).exists()}

    def modules_of(self, sources: Mapping[Path, bytes]) -> list[str]:
        return list(MODULES)


class _Core(CompiledSet):
    """Core and the driver's turn, compiled by mypyc. Native classes can be no Structs of msgspec and have no subclasses
    elsewhere, so modules with Structs and the errors stay Python.

    The protocol modules that the core imports are sources too: their constants become part of the C.
    """

    def sources(self, root: Path = _ROOT) -> dict[Path, bytes]:
        package = root / "immortal"
        found = [package / "coordinator" / "driver" / "turn.py", *(package / "coordinator" / "core").rglob("*.py")]
        found += (package / "protocol").glob("*.py")
        return {path.relative_to(root): path.read_bytes() for path in sorted(found)}

    def modules_of(self, sources: Mapping[Path, bytes]) -> list[str]:
        stay = ("__init__.py", "errors.py")
        names = [
            ".".join(path.with_suffix("").parts)
            for path, content in sources.items()
            if path.parts[1] == "coordinator" and path.name not in stay and b"(Struct" not in content
        ]
        return [*names, CORE_SHARED]


MODULES = (
    "immortal.protocol.varint",
    "immortal.protocol.messages",
    "immortal.protocol.batch",
    "immortal.protocol.decoding",
    "immortal.protocol.nesting",
    "immortal.protocol.readers",
    "immortal.protocol.record",
    "immortal.protocol.trailer",
    "immortal.appsdk.calls.context",
    "immortal.appsdk.calls.outbox",
    "immortal.appsdk.dispatch.delivery",
    "immortal.appsdk.dispatch.dispatcher",
    "immortal.appsdk.dispatch.records",
    "immortal.coordinator.log.format",
    "immortal.coordinator.log.rows",
)
CORE_GROUP = "immortal"
CORE_SHARED = f"{CORE_GROUP}__mypyc"
"""Library with the code of all modules. Each module's own file only finds its part in this library."""

CODEC = _Codec("codec", Path("immortal", "protocol", "_compiled"))
CORE = _Core("core", Path("immortal", "coordinator", "_compiled"))
SETS = (CODEC, CORE)

_installed: set[CompiledSet] = set()


class _Finder:
    def __init__(self, paths: Mapping[str, Path]) -> None:
        self._paths = {module: str(path) for module, path in paths.items()}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        where = self._paths.get(fullname)
        if where is None:
            return None
        return spec_from_file_location(fullname, where, loader=ExtensionFileLoader(fullname, where))


def is_wanted() -> bool:
    return os.environ.get(PURE_VARIABLE, "0") in ("", "0")


def describe() -> str:
    """Describe how this process runs all sets (compiled or as Python), and why."""
    said = [one.describe() for one in SETS]
    ways = {text.partition(f" {one.name}")[::2] for one, text in zip(SETS, said, strict=True)}
    if len(ways) == 1:
        ((how, why),) = ways
        return f"{how} {' and '.join(one.name for one in SETS)}{why}"
    return ", ".join(said)


# Reading and hashing all sources takes a fifth of a command's start. So a stamp records folders and files with time and
# size, as Python does for its caches. A new or deleted file changes its folder's time.


def stamp_name() -> str:
    """Return the name of a set's stamp, with the Python version: several Pythons can share one folder."""
    return f"sources{EXTENSION_SUFFIXES[0]}.stamp"


def _stamped(path: Path) -> dict[str, str] | None:
    """Return the names of compiled files by module if all exist and the sources are those of the stamp, else None."""
    try:
        modules, states = path.read_text("utf-8").split("\n\n")
        if any(line != _state(line.partition(" ")[2]) for line in states.splitlines()):
            return None
        names = dict(line.split(" ") for line in modules.splitlines())
        return names if set(names.values()) <= set(os.listdir(path.parent)) else None
    except (OSError, ValueError):
        return None


def _state(path: str) -> str:
    """Return the stamp's line for one path: a file's time and size, or a folder's time, then the path."""
    found = os.stat(os.path.join(_ROOT, path))
    return f"{found.st_mtime_ns}:{0 if stat.S_ISDIR(found.st_mode) else found.st_size} {path}"


def _write_stamp(path: Path, names: Mapping[str, str], sources: Sequence[Path]) -> None:
    """Write a stamp if allowed, unless a source has just changed: another change could get the same time."""
    paths = dict.fromkeys(str(one.relative_to(_ROOT)) for each in sources for one in (each.parent, each))
    newest_s = max(os.stat(os.path.join(_ROOT, one)).st_mtime for one in paths)
    if sys.dont_write_bytecode or time.time() - newest_s < SETTLED_S:
        return
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    modules = (f"{module} {name}" for module, name in names.items())
    with contextlib.suppress(OSError):
        temporary.write_text("\n".join([*modules, "", *map(_state, paths)]), "utf-8")
        temporary.replace(path)


def source_hash(root: Path = _ROOT) -> str:
    """Return the hash of the sources of all sets. Raises OSError."""
    return _hash_of({path: content for one in SETS for path, content in one.sources(root).items()})


def _hash_of(sources: Mapping[Path, bytes]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for path, content in sources.items():
        digest.update(f"{path} {len(content)}\n".encode() + content)
    return digest.hexdigest()
