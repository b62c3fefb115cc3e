"""What a handler returns and does not say so in its annotation, as far as that can be seen without running it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from types import NoneType
from typing import Any

import msgspec

from immortal.appsdk.calls.codec import encoder
from immortal.appsdk.determinism.values import hints_of, shape
from immortal.appsdk.determinism.waits import own_nodes
from immortal.appsdk.handlers.decorators import Handler
from immortal.appsdk.handlers.definition import Definition

INSTEAD = "a caller that waits gets no answer that it can read: return what is annotated, or change the annotation"

_SHOWN_SIZE_MAX = 40
_LISTS = frozenset({list, tuple, set, frozenset})  # the same on their way
_BUILT: dict[type[ast.expr], tuple[str, frozenset[type]]] = {  # what it makes, and what that can be taken for
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
_GOES_ON = frozenset({"fork", "append", "add", "update", "extend", "clear", "discard", "remove", "insert"})


def misfits(
    definition: Definition, handler: Handler[Any, Any], node: ast.FunctionDef | ast.AsyncFunctionDef
) -> Iterator[tuple[ast.AST, str]]:
    """Where it returns something else, and what."""
    hint = hints_of(handler.function).get("return", Any)
    try:
        decode = definition.codec(handler).decode_result
    except Exception:  # an annotation that can't be resolved or encoded: others say so
        return
    annotated = ast.unparse(node.returns) if node.returns is not None else "None"
    returns = [each for each in own_nodes(node) if isinstance(each, ast.Return)]
    for each in returns:
        if (found := _misfit(each.value, hint, decode)) is not None:
            yield each, f"returns {found} where '-> {annotated}' is declared"
    ends = not returns and _never_raises(node) and _comes_to_its_end(node.body)
    if ends and _misfit(None, hint, decode) is not None:
        yield node.body[-1], f"ends without a 'return' where '-> {annotated}' is declared"


def _misfit(value: ast.expr | None, hint: Any, decode: Any) -> str | None:
    """In words, if this is surely not what the annotation says."""
    try:
        literal = None if value is None else ast.literal_eval(value)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return _misfit_by_kind(value, hint)
    try:
        decode(encoder.encode(literal))
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError):
        text = "nothing" if value is None else ast.unparse(value)
        return text if len(text) <= _SHOWN_SIZE_MAX else f"{text[:_SHOWN_SIZE_MAX]}..."
    except Exception:  # what a type's own code does
        return None
    return None


def _misfit_by_kind(value: ast.expr | None, hint: Any) -> str | None:
    """Of what is no literal the kind is known at most, which says something to the plainest annotations alone."""
    name, kinds = _BUILT.get(type(value), ("", frozenset()))  # type: ignore[arg-type]
    cls = NoneType if hint is None else shape(hint)[0]
    return name if name and cls in _PLAIN and cls not in kinds else None


def _never_raises(node: ast.AST) -> bool:
    return not any(isinstance(each, ast.Raise | ast.Assert | ast.Yield | ast.YieldFrom) for each in own_nodes(node))


def _comes_to_its_end(body: list[ast.stmt]) -> bool:
    """Whether that is sure: a stub is none, nor what ends in a loop or in a call that may never return."""
    last = body[-1]
    if isinstance(last, ast.If):
        return _comes_to_its_end(last.body) or (bool(last.orelse) and _comes_to_its_end(last.orelse))
    if isinstance(last, ast.Expr):
        value = last.value.value if isinstance(last.value, ast.Await) else last.value
        function = value.func if isinstance(value, ast.Call) else None
        return isinstance(function, ast.Attribute) and function.attr in _GOES_ON
    return isinstance(last, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Delete)
