"""Where an awaitable is of no use: what is not awaited there never begins."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from immortal.appsdk.waiting.waits import Wait

METHODS = frozenset({"sleep", "at", "event", "gather", "race"})  # of self, in an async handler
_OF_AWAITABLES = frozenset({"__await__", *dir(Wait)})


def own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function, without those of functions and classes within it."""
    for child in ast.iter_child_nodes(function):
        yield child
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            yield from own_nodes(child)


def useless_awaitables(function: ast.AST) -> Iterator[ast.Call]:
    """The calls whose value is dropped, or used as what the awaitable would give.

    What is passed on, or kept under a name that is read, may be awaited elsewhere.
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
