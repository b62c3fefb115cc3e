"""Check of handlers before the app starts: finds code that a replay would not repeat, or that would not run.

The search starts at each handler and follows every function of the user that it refers to: methods, functions of their
modules, classes that it creates. Names are resolved as the running code would resolve them, so an import under another
name is found. Code without source is skipped, and so is the inside of Python and of libraries.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import os
from collections.abc import Iterator, Sequence
from types import CodeType, FunctionType, MethodType, NoneType
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from immortal.appsdk.calls.codec import encoder
from immortal.appsdk.calls.user_code import is_in_users_file
from immortal.appsdk.determinism.reader import Reader, Source
from immortal.appsdk.determinism.rules import Rules
from immortal.appsdk.determinism.syntax import nodes_of_function
from immortal.appsdk.determinism.values import Bound, Instance, Known, Value, attribute, hints_of, shape
from immortal.appsdk.errors import DefinitionError
from immortal.appsdk.handlers.decorators import Handler
from immortal.appsdk.handlers.definition import Definition

_SDK = "immortal"


class Finding(Struct, frozen=True):
    """Place in the code with a problem: function ``where``, ``what`` it does, and what to do ``instead``."""

    file: str
    line: int
    where: str
    what: str
    instead: str

    def __str__(self) -> str:
        file = self.file
        if file.startswith(os.getcwd() + os.sep):
            file = os.path.relpath(file)
        return f"{file}, line {self.line}: {self.where} {self.what}: {self.instead}"


class DeterminismError(DefinitionError):
    """Raised if the app was started with ``--strict`` and the check has findings."""

    def __init__(self, findings: list[Finding]) -> None:
        lines = "".join(f"\n  {finding}" for finding in findings)
        places = "1 place" if len(findings) == 1 else f"{len(findings)} places"
        super().__init__(
            f"{places} would not run, or not be replayed, as they are written (--strict):{lines}\n"
            f"  A line that is known to be harmless is left out with the comment '# immortal: deterministic' on it."
        )


def check(definition: Definition) -> list[Finding]:
    """Check a class's handlers, and functions of the user that they reach, for code that a replay does not repeat.

    Also find code that would not run. Return the findings in the order of files and lines.
    """
    search = Search([(version.objects or version).cls for version in definition.chain])
    for version in definition.chain:  # a replay also runs the old classes, and the upgrades of their state
        own = version.objects or version
        app = Instance(own.cls, of_state=True, waits=True)
        for name, handler in own.handlers.items():
            search.follow(attribute(app, name))
            search.check_returns(own, handler)
        app = replace(app, waits=False)
        for hook in (own.initial, "upgrade" if version.upgrades else None):
            search.follow(attribute(app, hook) if hook is not None else None)
    return search.run()


def _package_of(app: type) -> str:
    """Return the package of an app, with a dot at its end; for an app of the SDK only its own subpackage."""
    top, _, rest = app.__module__.partition(".")
    return f"{app.__module__.rpartition('.')[0] if top == _SDK else top}." if rest else f"{top}."


class Search:
    """Search through all code that handlers reach; a method is searched once for each class that has it."""

    def __init__(self, apps: Sequence[type]) -> None:
        self.apps = tuple(apps)
        self.rules = Rules()
        self._packages = tuple(_package_of(app) for app in apps)
        self._sources: dict[str, Source] = {}
        self._visited: set[tuple[object, ...]] = set()
        self._waiting: list[tuple[FunctionType, Value]] = []
        self._findings: dict[Finding, None] = {}

    def run(self) -> list[Finding]:
        while self._waiting:
            function, receiver = self._waiting.pop()
            source = self._source(function)
            for node in source.find(function.__code__):
                Reader(self, source, function, receiver, node).read()
        return sorted(self._findings, key=lambda found: (found.file, found.line, found.what))

    def _source(self, function: FunctionType) -> Source:
        file = function.__code__.co_filename
        if (source := self._sources.get(file)) is None:
            source = self._sources[file] = Source(file, function.__globals__)
        return source

    def check_returns(self, definition: Definition, handler: Handler[Any, Any]) -> None:
        function = inspect.unwrap(handler.function)
        if not isinstance(function, FunctionType) or not self._is_users(function):
            return
        source = self._source(function)
        for node in source.find(function.__code__):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                for place, what in return_mismatches(definition, handler, node):
                    if not source.opted_out(place):
                        self.add(function.__code__, place.lineno, what, INSTEAD)  # type: ignore[attr-defined]

    def add(self, code: CodeType, line: int, what: str, instead: str) -> None:
        where = code.co_qualname.replace(".<locals>", "")
        self._findings[Finding(code.co_filename, line, where, what, instead)] = None

    def follow(self, value: Value) -> None:
        """Search the function that ``value`` is, or that it calls, if it is the user's."""
        if isinstance(value, Bound):
            self._enter(value.function, value.receiver)
        elif isinstance(value, Known):
            found = value.value
            if isinstance(found, FunctionType):
                self._enter(found, None)
            elif isinstance(found, MethodType):
                if isinstance(found.__func__, FunctionType):
                    self._enter(found.__func__, Known(found.__self__))
            elif isinstance(found, functools.partial):
                self.follow(Known(found.func))
            else:
                wrapped = inspect.getattr_static(found, "__wrapped__", None)  # functools.lru_cache has one
                self.follow(Known(wrapped) if isinstance(wrapped, FunctionType) else None)

    def _is_users(self, function: FunctionType) -> bool:
        is_of_package = f"{function.__module__ or ''}.".startswith(self._packages)
        return is_of_package or is_in_users_file(function.__code__.co_filename)

    def _enter(self, function: FunctionType, receiver: Value) -> None:
        if isinstance(wrapped := getattr(function, "__wrapped__", None), FunctionType):
            self._enter(wrapped, receiver)
        if not self._is_users(function):
            return
        key: tuple[object, ...] = (function.__code__,)
        if isinstance(receiver, Instance):
            key += (id(shape(receiver.hint)[0]), receiver.of_state, receiver.waits)
        elif isinstance(receiver, Known) and isinstance(receiver.value, type):
            key += (id(receiver.value),)
        if key not in self._visited:
            self._visited.add(key)
            self._waiting.append((function, receiver))

    def default_calls(self, cls: type) -> Iterator[tuple[str, Value]]:
        """Yield the code that runs when an instance is created: methods, and factories of fields (with the name)."""
        for name in ("__new__", "__init__", "__post_init__"):
            yield "", attribute(Instance(cls), name)
        if dataclasses.is_dataclass(cls):
            for made in dataclasses.fields(cls):
                if made.default_factory is not dataclasses.MISSING:
                    yield made.name, Known(made.default_factory)
        elif issubclass(cls, msgspec.Struct):
            for field in msgspec.structs.fields(cls):
                if field.default_factory is not msgspec.NODEFAULT:
                    yield field.name, Known(field.default_factory)


# Returned values that a handler's annotation does not allow, as far as the source shows it.


INSTEAD = "a caller that waits gets no answer that it can read: return what is annotated, or change the annotation"

_SHOWN_SIZE_MAX = 40
_LISTS = frozenset({list, tuple, set, frozenset})  # all encoded as arrays
_BUILT: dict[type[ast.expr], tuple[str, frozenset[type]]] = {  # the description, and compatible types
    ast.JoinedStr: ("a str", frozenset({str})),
    ast.List: ("a list", _LISTS),
    ast.ListComp: ("a list", _LISTS),
    ast.Tuple: ("a tuple", _LISTS),
    ast.Set: ("a set", _LISTS),
    ast.SetComp: ("a set", _LISTS),
    ast.Dict: ("a dict", frozenset({dict})),
    ast.DictComp: ("a dict", frozenset({dict})),
}
_PLAIN = frozenset({NoneType, bool, int, float, str, bytes, list, tuple, set, frozenset, dict})
_RETURNING_METHODS = frozenset({"fork", "append", "add", "update", "extend", "clear", "discard", "remove", "insert"})


def return_mismatches(
    definition: Definition, handler: Handler[Any, Any], node: ast.FunctionDef | ast.AsyncFunctionDef
) -> Iterator[tuple[ast.AST, str]]:
    """Yield the return statements that do not fit the annotation, each with the reason."""
    hint = hints_of(handler.function).get("return", Any)
    try:
        decode = definition.codec(handler).decode_result
    except Exception:  # an annotation that can't be resolved or encoded: other checks report it
        return
    annotated = ast.unparse(node.returns) if node.returns is not None else "None"
    returns = [each for each in nodes_of_function(node) if isinstance(each, ast.Return)]
    for each in returns:
        if (found := _mismatch(each.value, hint, decode)) is not None:
            yield each, f"returns {found} where '-> {annotated}' is declared"
    leaves = (ast.Raise, ast.Assert, ast.Yield, ast.YieldFrom)
    raises = any(isinstance(each, leaves) for each in nodes_of_function(node))
    ends = not returns and not raises and _can_fall_through(node.body)
    if ends and _mismatch(None, hint, decode) is not None:
        yield node.body[-1], f"ends without a 'return' where '-> {annotated}' is declared"


def _mismatch(value: ast.expr | None, hint: Any, decode: Any) -> str | None:
    """Return a returned value as text if it surely does not fit the annotation; None: it can fit."""
    try:
        literal = None if value is None else ast.literal_eval(value)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return _mismatch_by_kind(value, hint)
    try:
        decode(encoder.encode(literal))
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError):
        text = "nothing" if value is None else ast.unparse(value)
        return text if len(text) <= _SHOWN_SIZE_MAX else f"{text[:_SHOWN_SIZE_MAX]}..."
    except Exception:  # a type's own code failed
        return None
    return None


def _mismatch_by_kind(value: ast.expr | None, hint: Any) -> str | None:
    """Return the kind of a returned expression that does not fit a plain annotation; None: it can fit."""
    name, kinds = _BUILT.get(type(value), ("", frozenset()))  # type: ignore[arg-type]
    cls = NoneType if hint is None else shape(hint)[0]
    return name if name and cls in _PLAIN and cls not in kinds else None


def _can_fall_through(body: list[ast.stmt]) -> bool:
    """Return True if the body surely reaches its end: its last statement is no stub, loop or unknown call."""
    last = body[-1]
    if isinstance(last, ast.If):
        return _can_fall_through(last.body) or (bool(last.orelse) and _can_fall_through(last.orelse))
    if isinstance(last, ast.Expr):
        value = last.value.value if isinstance(last.value, ast.Await) else last.value
        function = value.func if isinstance(value, ast.Call) else None
        return isinstance(function, ast.Attribute) and function.attr in _RETURNING_METHODS
    return isinstance(last, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Delete)
