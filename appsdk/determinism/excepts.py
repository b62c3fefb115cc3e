"""Where an exception is swallowed that is none of the program's own: by what the SDK stops or cancels a handler."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Callable, Iterator

from immortal.appsdk.determinism.values import Value, is_object
from immortal.appsdk.determinism.waits import own_nodes

INSTEAD = "write 'except Exception' or end with 'raise', as the SDK stops and cancels handlers by exceptions of its own"


def swallowed(node: ast.Try | ast.TryStar, value_of: Callable[[ast.expr], Value]) -> Iterator[tuple[int, str]]:
    """(line, what it does), of an 'except' without a 'raise' and a 'finally' that returns."""
    for handler in node.handlers:
        if _catches_all(handler.type, value_of) and not _has(handler.body, ast.Raise):
            what = "except" if handler.type is None else f"except {ast.unparse(handler.type)}"
            yield handler.lineno, f"swallows every exception ('{what}:')"
    if _has(node.finalbody, ast.Return):
        yield node.finalbody[0].lineno, "swallows every exception (a 'return' in a 'finally')"


def suppressed(node: ast.With | ast.AsyncWith, value_of: Callable[[ast.expr], Value]) -> Iterator[tuple[int, str]]:
    """(line, what it does), of 'with suppress(BaseException)'."""
    for item in node.items:
        call = item.context_expr
        if not isinstance(call, ast.Call) or not is_object(value_of(call.func), contextlib.suppress):
            continue
        if any(_catches_all(argument, value_of) for argument in call.args):
            yield call.lineno, f"swallows every exception ('{ast.unparse(call)}')"


def _catches_all(kind: ast.expr | None, value_of: Callable[[ast.expr], Value]) -> bool:
    if isinstance(kind, ast.Tuple):
        return any(_catches_all(each, value_of) for each in kind.elts)
    return kind is None or is_object(value_of(kind), BaseException)


def _has(body: list[ast.stmt], kind: type[ast.stmt]) -> bool:
    return any(isinstance(node, kind) for node in own_nodes(ast.Module(body, [])))
