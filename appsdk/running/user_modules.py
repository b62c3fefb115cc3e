"""Loader of the user's modules: the folder on ``sys.path``; in a replay the code of ``--code``, with its digest.

A file with the name of one of Python's modules, or of one that is loaded already (the SDK, what it uses), is hidden: an
``import`` of that name gives the other module. That does no harm, except if the user means the file: then a message
says so.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib
import importlib.util
import inspect
import json
import linecache
import os
import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import (
    ExtensionFileLoader,
    ModuleSpec,
    PathFinder,
    SourceFileLoader,
    SourcelessFileLoader,
)
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any
from zipimport import zipimporter

from immortal.appsdk.calls.user_code import is_sdk_file, is_users_module
from immortal.appsdk.errors import DefinitionError, LoadError
from immortal.appsdk.types.registry import current_module
from immortal.protocol.errors import ImmortalError


def add_to_path(folder: str) -> None:
    """Let modules of ``folder`` be found before installed ones, and after Python's own."""
    if folder in sys.path or "" in sys.path:
        return
    library = os.path.dirname(os.__file__)
    own = [place for place, path in enumerate(sys.path) if path in (library, os.path.join(library, "lib-dynload"))]
    sys.path.insert(max(own, default=-1) + 1, folder)


def load_module(name: str) -> ModuleType:
    """Load a module by its name, or by the path of a file, even if its name can't be imported.

    Raises ImportError, and what the module raises when it is imported.
    """
    if not (name.endswith(".py") and os.path.isfile(name)):
        return importlib.import_module(current_module(name))
    path = os.path.realpath(name)
    folder, module_name = os.path.dirname(path), os.path.basename(path).removesuffix(".py")
    add_to_path(folder)
    if module_name == "__main__":  # the name of this process's own module
        module_name = f"{os.path.basename(folder)}-main"
    if module_name.isidentifier():
        module = importlib.import_module(module_name)  # the same module that others import by its name
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


def explain(error: ImmortalError, cls: type | None = None) -> str:
    """Return the text of ``error``, after the line of user code that it is about, if that is known.

    ``cls``: the class that is refused; None: take the last line of user code in the traceback.
    """
    file, number = "", 0
    with contextlib.suppress(OSError, TypeError, SyntaxError):  # there is no source
        if cls is None:
            for frame, line in traceback.walk_tb(error.__traceback__):
                if not is_sdk_file(frame.f_code.co_filename):
                    file, number = frame.f_code.co_filename, line
        elif isinstance(error, DefinitionError):
            file, number = inspect.getsourcefile(cls) or "", inspect.getsourcelines(cls)[1]
        number = _member_line(Path(file).read_text(), number, str(error))
    if not (shown := linecache.getline(file, number).strip()):
        return str(error)
    where = os.path.relpath(file) if file.startswith(os.getcwd() + os.sep) else file
    return f"{where}, line {number}: {shown}\n  {error}"


def _member_line(source: str, number: int, text: str) -> int:
    """Return the line of the member that ``text`` names ("App.take: ...", "attribute 'left'").

    ``number``: the line of its class; the result if ``text`` names no member."""
    named = {*re.findall(r"attribute '(\w+)'", text), *re.findall(r"^[\w.]+\.(\w+)\b", text)}
    classes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)]
    inside = [node for node in classes if _first_line(node) <= number <= (node.end_lineno or 0)]
    for member in inside[-1].body if inside else ():
        name = getattr(member, "name", None) or getattr(getattr(member, "target", None), "id", None)
        if name in named:
            return member.lineno
    return number


def _first_line(node: ast.ClassDef) -> int:
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])


class HiddenModules:
    """Finds modules of ``folder`` that an import does not give. Create it before the user's modules are loaded."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._paths = {name: path for name, path in _modules_in(folder) if self._is_hidden(name)}

    def _is_hidden(self, name: str) -> bool:
        loaded = sys.modules.get(name)
        return name in sys.stdlib_module_names if loaded is None else not self._is_own(loaded)

    def _is_own(self, module: ModuleType) -> bool:
        """Return True if a module is of the folder, and not of an environment in it."""
        file = getattr(module, "__file__", None) or ""
        place = os.path.join(self._folder, module.__name__.partition(".")[0])
        if file == f"{place}.py" or file.startswith(f"{place}{os.sep}"):
            return True
        path = getattr(module, "__path__", None)  # a package that is also reached by a link, as ours in its checkout
        return (
            path is not None
            and os.path.isdir(place)
            and any(os.path.realpath(one) == os.path.realpath(place) for one in path)
        )

    def problem(self, name: str) -> str | None:
        """Return the text for a user who wants the module ``name`` of the folder; None if it is not hidden."""
        path = self._paths.get(name)
        if path is None:
            return None
        whose = "Python's own module" if name in sys.stdlib_module_names else "the module that Immortal uses"
        return f"'import {name}' gives {whose} of that name, not {path}: give that file another name"

    def problems_of(self, error: BaseException) -> list[str]:
        """Return texts on why the import of the user's code can have failed with ``error``."""
        if not isinstance(error, ImportError | AttributeError):
            return []
        named = re.findall(r"'(\w+)[.']", str(error))
        return [problem for name in dict.fromkeys(named) if (problem := self.problem(name)) is not None]

    def problems(self) -> list[str]:
        """Return a text for each import, in loaded modules of the folder, that gets another module than the user's."""
        if not self._paths:
            return []
        loaded = [module for module in list(sys.modules.values()) if self._is_own(module)]
        found = sorted((name, str(module.__file__)) for module in loaded for name in _imports(module))
        return [f"{file}: {problem}" for name, file in found if (problem := self.problem(name)) is not None]


def _modules_in(folder: str) -> Iterator[tuple[str, str]]:
    """Yield names and paths of a folder's modules; none if it can't be read."""
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
    """Return the modules that the source of ``module`` imports anywhere, by the first part of their names."""
    try:
        tree = ast.parse(Path(str(module.__file__)).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return set()
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names += [
        node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module and not node.level
    ]
    return {name.partition(".")[0] for name in names}


# The user's code in a replay: compiled from its sources, those of ``--code`` first, and noted with a digest.
#
# In service Python's own rules apply. They are not enough where code is judged: a stale ``.pyc`` whose source has the
# same size and second, an editable install with its own finder, or PYTHONPATH would run other code than the named one,
# and nobody would notice.


CODE_VARIABLE = "IMMORTAL_CODE"
"""Variable with a folder or a wheel whose modules precede those of any other place; empty: none."""

NOTES_VARIABLE = "IMMORTAL_CODE_NOTES"
"""Variable with a file that gets a JSON line per user module: {"module", "file", "sha256"}. Set only in replays."""


def sources_of(cls: type) -> dict[str, tuple[str, bytes]]:
    """Read the sources of the loaded user modules; return {name in an archive: (path, source)}.

    Empty for a class that no archive could contain: one of ``__main__``, or without a source.
    """
    found: dict[str, tuple[str, bytes]] = {}
    top = cls.__module__.partition(".")[0]
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        if name != "__main__" and file.endswith(".py") and is_users_module(top, name, os.path.abspath(file)):
            place = name.replace(".", "/")
            place += "/__init__.py" if hasattr(module, "__path__") else ".py"
            with contextlib.suppress(OSError):
                found[place] = os.path.abspath(file), Path(file).read_bytes()
    own = cls.__module__.replace(".", "/")
    return found if {f"{own}.py", f"{own}/__init__.py"} & found.keys() else {}


class UserCode(MetaPathFinder):
    """Finder of modules, before all others. ``code``: value of CODE_VARIABLE. ``target``: "module:Class"."""

    def __init__(self, target: str, code: str, notes: str) -> None:
        self._target = target
        self._top = target.partition(":")[0].partition(".")[0]
        self._code = os.path.realpath(code) if code else ""  # as the kernel has it, after symbolic links
        self._notes = notes
        self._is_used = False  # a module of ``code`` was loaded

    @classmethod
    def from_environment(cls, target: str) -> UserCode | None:
        """Install the finder for the code that the environment names; None in service. Raises LoadError."""
        notes = os.environ.get(NOTES_VARIABLE)
        if not notes:
            return None
        found = cls(target, os.environ.get(CODE_VARIABLE, ""), notes)
        found._install()
        return found

    def _install(self) -> None:
        if self._code:
            if (problem := HiddenModules(self._code).problem(self._top)) is not None:
                raise LoadError(f"{self._target!r}: {problem}")
            add_to_path(self._code)  # for namespace packages and resources
        sys.meta_path.insert(0, self)

    def check(self) -> None:
        """Check that a module of ``code`` was loaded. Raises LoadError if none was."""
        if self._code and not self._is_used:
            module = sys.modules.get(self._target.partition(":")[0])
            raise LoadError(
                f"{self._target!r}: nothing of it is in {self._code}: its module is"
                f" {getattr(module, '__file__', None) or 'built in'}; give the folder or the wheel that has it"
            )

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] in sys.stdlib_module_names:
            return None
        spec = self._in_code(fullname, path) or self._elsewhere(fullname, path, target)
        if spec is None or spec.loader is None or not spec.origin:
            return spec
        is_code = self._is_in_code(spec.origin)
        if is_code or is_users_module(self._top, fullname, spec.origin):
            self._is_used |= is_code
            self._load_from_source(fullname, spec)
        return spec

    def _in_code(self, fullname: str, path: Sequence[str] | None) -> ModuleSpec | None:
        """Find a module in ``code``; None also for a namespace package, whose other parts are elsewhere."""
        if not self._code:
            return None
        entries = [self._code] if path is None else [entry for entry in path if self._is_in_code(entry)]
        spec = PathFinder.find_spec(fullname, entries) if entries else None
        return None if spec is None or spec.loader is None else spec

    def _elsewhere(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
        for finder in sys.meta_path:
            if not isinstance(finder, UserCode) and (spec := finder.find_spec(fullname, path, target)) is not None:
                return spec
        return None

    def _is_in_code(self, place: str) -> bool:
        return bool(self._code) and _is_below(place, self._code)

    def _load_from_source(self, fullname: str, spec: ModuleSpec) -> None:
        """Let a module be compiled from its source, and noted; one without a source is noted as it is."""
        loader: object = spec.loader
        origin = str(spec.origin)
        if type(loader) is SourceFileLoader:
            spec.loader, spec.cached = _FromSource(fullname, origin, self), None
        elif type(loader) is zipimporter:
            wheel: Any = _FromWheel(os.path.join(loader.archive, loader.prefix), self)  # a Loader, for the type checker
            spec.loader = wheel
        elif isinstance(loader, ExtensionFileLoader | SourcelessFileLoader):
            self.note(fullname, origin, Path(origin).read_bytes())

    def note(self, fullname: str, file: str, content: bytes) -> None:
        row = {"module": fullname, "file": os.path.abspath(file), "sha256": hashlib.sha256(content).hexdigest()}
        with open(self._notes, "a") as notes:
            notes.write(f"{json.dumps(row)}\n")


class _FromSource(SourceFileLoader):
    def __init__(self, fullname: str, path: str, code: UserCode) -> None:
        super().__init__(fullname, path)
        self._code = code

    def get_code(self, fullname: str) -> CodeType:
        """Compile the source now: no ``.pyc`` is read or written."""
        path = self.get_filename(fullname)
        source = self.get_data(path)
        self._code.note(fullname, path, source)
        code: CodeType = self.source_to_code(source, path)
        return code


class _FromWheel(zipimporter):
    def __init__(self, path: str, code: UserCode) -> None:
        super().__init__(path)
        self._code = code

    def get_code(self, fullname: str) -> CodeType:
        path, source = self.get_filename(fullname), self.get_source(fullname)
        if source is None:
            self._code.note(fullname, path, self.get_data(path))
            return super().get_code(fullname)
        self._code.note(fullname, path, source.encode())
        code: CodeType = compile(source, path, "exec", dont_inherit=True)
        return code


def _is_below(place: str, folder: str) -> bool:
    return place == folder or place.startswith(folder.rstrip(os.sep) + os.sep)
