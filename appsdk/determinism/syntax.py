"""Mistakes that a function's syntax shows: dropped awaitables, swallowed exceptions, changes of outer variables."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import (
    Callable,
    Iterator,
    Mapping,
    MutableMapping,
    MutableSequence,
    MutableSet,
    Sequence,
    Set,
)

from immortal.appsdk.determinism.values import Value, is_object
from immortal.appsdk.waiting.loop import LazyFuture

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_CHANGES = {*dir(MutableMapping), *dir(MutableSequence), *dir(MutableSet)} - {*dir(Mapping), *dir(Sequence), *dir(Set)}


def changes(function: ast.AST) -> Iterator[tuple[ast.AST, str, str]]:
    """Yield (place, variable, its attribute or "") for each change of an object, such as ``self.found.append(1)``."""
    for node in ast.walk(function):
        changed: ast.expr | None = None
        if isinstance(node, ast.Nonlocal | ast.Global):
            yield from ((node, name, "") for name in node.names)
        elif isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
            changed = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _CHANGES:
            changed = node.func.value
        attribute = ""
        while isinstance(changed, ast.Attribute | ast.Subscript):
            attribute = changed.attr if isinstance(changed, ast.Attribute) else ""
            changed = changed.value
        if isinstance(changed, ast.Name):
            yield node, changed.id, attribute


def bound_names(function: ast.AST) -> set[str]:
    """Return the names of variables that the function makes, or a function in it."""
    nodes = list(ast.walk(function))
    stored = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    return stored | {node.arg for node in nodes if isinstance(node, ast.arg)}


# Code that swallows exceptions that are not the program's own: the SDK stops and cancels handlers by exceptions.


INSTEAD = "write 'except Exception' or end with 'raise', as the SDK stops and cancels handlers by exceptions of its own"


def swallowed(node: ast.Try | ast.TryStar, value_of: Callable[[ast.expr], Value]) -> Iterator[tuple[int, str]]:
    """Yield (line, problem) for each 'except' of all exceptions without a 'raise', and each 'finally' that returns."""
    for handler in node.handlers:
        if _catches_all(handler.type, value_of) and not _has(handler.body, ast.Raise):
            what = "except" if handler.type is None else f"except {ast.unparse(handler.type)}"
            yield handler.lineno, f"swallows every exception ('{what}:')"
    if _has(node.finalbody, ast.Return):
        yield node.finalbody[0].lineno, "swallows every exception (a 'return' in a 'finally')"


def suppressed(node: ast.With | ast.AsyncWith, value_of: Callable[[ast.expr], Value]) -> Iterator[tuple[int, str]]:
    """Yield (line, problem) for each 'with suppress(BaseException)'."""
    for with_item in node.items:
        call = with_item.context_expr
        if not isinstance(call, ast.Call) or not is_object(value_of(call.func), contextlib.suppress):
            continue
        if any(_catches_all(argument, value_of) for argument in call.args):
            yield call.lineno, f"swallows every exception ('{ast.unparse(call)}')"


def _catches_all(kind: ast.expr | None, value_of: Callable[[ast.expr], Value]) -> bool:
    if isinstance(kind, ast.Tuple):
        return any(_catches_all(each, value_of) for each in kind.elts)
    return kind is None or is_object(value_of(kind), BaseException)


def _has(body: list[ast.stmt], kind: type[ast.stmt]) -> bool:
    return any(isinstance(node, kind) for node in nodes_of_function(ast.Module(body, [])))


# Awaitables that are not awaited, and so never begin.


_OF_AWAITABLES = frozenset({"__await__", *dir(LazyFuture)})


def nodes_of_function(function: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function, without those of functions and classes within it."""
    for child in ast.iter_child_nodes(function):
        yield child
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            yield from nodes_of_function(child)


def dropped_awaitables(function: ast.AST) -> Iterator[ast.Call]:
    """Yield the calls whose awaitable is dropped, or used in place of its result.

    An awaitable that is passed on, or kept under a name that is read, can be awaited elsewhere.
    """
    read: set[str] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            read.add(node.id)
        elif isinstance(node, ast.Global | ast.Nonlocal):
            read.update(node.names)
    for node in ast.walk(function):
        for used in _used(node, read):
            if isinstance(used, ast.Call):
                yield used


def _used(node: ast.AST, read: set[str]) -> list[ast.expr]:
    match node:
        case ast.Expr(value=value) | ast.AugAssign(value=value) | ast.FormattedValue(value=value):
            return [value]
        case ast.Assign(targets=[ast.Name(id=name)], value=value) if name not in read:
            return [value]
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test) | ast.Assert(test=test):
            return [test]
        case ast.For(iter=value) | ast.comprehension(iter=value, is_async=0) | ast.Subscript(value=value):
            return [value]
        case ast.Attribute(value=value, attr=name) if name not in _OF_AWAITABLES:
            return [value]
        case ast.UnaryOp(operand=value):
            return [value]
        case ast.BinOp(left=left, right=right):
            return [left, right]
        case ast.Compare(left=left, comparators=others):
            return [left, *others]
    return []
