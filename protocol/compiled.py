"""Which modules run compiled where they have been compiled: the same source, made into C by Cython (``setup.py``).

What is compiled bears a hash of all its sources in its name, so one that is stale is not found, and the source runs.
All of the modules run compiled or none of them. ``IMMORTAL_PURE_PYTHON=1`` leaves the source in charge.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Sequence
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader, ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

MODULES = (
    "protocol.varint",
    "protocol.messages",
    "protocol.batch",
    "appsdk.calls.context",
    "appsdk.calls.outbox",
    "appsdk.dispatch.delivery",
)
PURE_VARIABLE = "IMMORTAL_PURE_PYTHON"

_ROOT = Path(__file__).parent.parent
_FOLDER = Path("protocol") / "_compiled"


def source_paths(root: Path = _ROOT) -> list[Path]:
    """What is compiled: each module, and beside it the types that it has only when compiled."""
    stems = [root.joinpath(*module.split(".")) for module in MODULES]
    found = [stem.with_suffix(suffix) for stem in stems for suffix in (".py", ".pxd")]
    return [path for path in found if path.exists()]


def source_hash(root: Path = _ROOT) -> str:
    """Raises OSError."""
    digest = hashlib.blake2b(digest_size=8)
    for path in [root / "protocol" / "compiled.py", *source_paths(root)]:
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def compiled_paths(root: Path = _ROOT) -> dict[str, Path]:
    """Where each module is, or would be, compiled from the sources as they are now. Raises OSError."""
    end = f"-{source_hash(root)}{EXTENSION_SUFFIXES[0]}"
    return {module: root / _FOLDER / f"{module}{end}" for module in MODULES}


class _Finder:
    def __init__(self, paths: dict[str, Path]) -> None:
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


def is_compiled() -> bool:
    """Whether this process runs the compiled modules."""
    return any(isinstance(finder, _Finder) for finder in sys.meta_path)


def describe() -> str:
    """For people: what this process runs, and why."""
    if is_compiled():
        return "compiled codec"
    if not is_wanted():
        return f"pure Python codec ({PURE_VARIABLE} is set)"
    is_stale = any((_ROOT / _FOLDER).glob(f"*{EXTENSION_SUFFIXES[0]}"))
    return f"pure Python codec ({'the compiled one is of another source' if is_stale else 'none is compiled'})"


def install() -> None:
    """From here on the modules are imported compiled, if all of them are there and nobody wants the source."""
    if not is_wanted() or is_compiled():
        return
    try:
        paths = compiled_paths()
    except OSError:  # without sources there is nothing to compare with
        return
    if all(path.exists() for path in paths.values()):
        sys.meta_path.insert(0, _Finder(paths))
