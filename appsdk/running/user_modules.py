"""The folder of the user's modules on ``sys.path``: behind Python's own modules, and what that hides in it.

A file that has the name of one of Python's modules, or of one that is loaded already (this SDK, what it uses), is not
what an ``import`` of that name gives. It does no harm, but for whoever means that file: they are told.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from immortal.appsdk.types.former_names import current_module


def add_to_path(folder: str) -> None:
    """Let modules of ``folder`` be found before installed ones, and behind Python's own."""
    if folder in sys.path or "" in sys.path:
        return
    library = os.path.dirname(os.__file__)
    own = [place for place, path in enumerate(sys.path) if path in (library, os.path.join(library, "lib-dynload"))]
    sys.path.insert(max(own, default=-1) + 1, folder)


def load_module(name: str) -> ModuleType:
    """``name``: of a module, or the path of a file, which need not have a name that can be imported.

    Raises ImportError; what the module raises as it is imported passes.
    """
    if not (name.endswith(".py") and os.path.isfile(name)):
        return importlib.import_module(current_module(name))
    path = os.path.realpath(name)
    folder, module_name = os.path.dirname(path), os.path.basename(path).removesuffix(".py")
    add_to_path(folder)
    if module_name == "__main__":  # is this process's own
        module_name = f"{os.path.basename(folder)}-main"
    if module_name.isidentifier():
        module = importlib.import_module(module_name)  # what others import by its name is the same one
        if os.path.realpath(getattr(module, "__file__", None) or "") == path:
            return module
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} can't be imported", name=module_name)
    loaded = sys.modules.get(module_name)
    if loaded is not None and getattr(loaded, "__file__", None) == path:
        return loaded
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise
    return module


def is_import(file: str, importer: str) -> bool:
    """Whether a frame of ``file`` is of the import, and not of the user's module. ``importer``: who asks for it."""
    return file in (importer, __file__) or "importlib" in file


class HiddenModules:
    """The modules of ``folder`` that an import does not give, as things are now: before the user's are loaded."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._paths = {name: path for name, path in _modules_in(folder) if self._is_hidden(name)}

    def _is_hidden(self, name: str) -> bool:
        loaded = sys.modules.get(name)
        return name in sys.stdlib_module_names if loaded is None else not self._is_own(loaded)

    def _is_own(self, module: ModuleType) -> bool:
        """Not: of an environment in the folder."""
        file = getattr(module, "__file__", None) or ""
        place = os.path.join(self._folder, module.__name__.partition(".")[0])
        return file == f"{place}.py" or file.startswith(f"{place}{os.sep}")

    def problem(self, name: str) -> str | None:
        """What is to be said to who wants the module ``name`` of the folder; None if it is not hidden."""
        path = self._paths.get(name)
        if path is None:
            return None
        whose = "Python's own module" if name in sys.stdlib_module_names else "the module that Immortal uses"
        return f"'import {name}' gives {whose} of that name, not {path}: give that file another name"

    def problems_of(self, error: BaseException) -> list[str]:
        """Why the user's code may have failed with ``error`` as it was imported."""
        if not isinstance(error, ImportError | AttributeError):
            return []
        named = re.findall(r"'(\w+)[.']", str(error))
        return [problem for name in dict.fromkeys(named) if (problem := self.problem(name)) is not None]

    def problems(self) -> list[str]:
        """What the modules of the folder that are loaded now import, and do not get."""
        if not self._paths:
            return []
        loaded = [module for module in list(sys.modules.values()) if self._is_own(module)]
        found = sorted((name, str(module.__file__)) for module in loaded for name in _imports(module))
        return [f"{file}: {problem}" for name, file in found if (problem := self.problem(name)) is not None]


def _modules_in(folder: str) -> Iterator[tuple[str, str]]:
    """Names and paths. What can't be read is none."""
    try:
        entries = sorted(os.listdir(folder))
    except OSError:
        return
    for entry in entries:
        path = os.path.join(folder, entry)
        if entry.endswith(".py"):
            yield entry.removesuffix(".py"), path
        elif entry.isidentifier() and os.path.exists(os.path.join(path, "__init__.py")):
            yield entry, path


def _imports(module: ModuleType) -> set[str]:
    """The modules, by the first part of their names, that the source of ``module`` imports anywhere."""
    try:
        tree = ast.parse(Path(str(module.__file__)).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return set()
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names += [
        node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module and not node.level
    ]
    return {name.partition(".")[0] for name in names}
