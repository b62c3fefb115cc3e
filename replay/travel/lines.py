"""Finds the line of user code that changes a value while one message is handled, and the values read before."""

from __future__ import annotations

import ast
import linecache
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from types import FrameType
from typing import Any, NamedTuple

from immortal.appsdk.running.debugger import is_of_user
from immortal.appsdk.state.tree import Tree
from immortal.appsdk.waiting.task_self import TaskSelf
from immortal.appsdk.waiting.tasks import describe_place
from immortal.replay.travel.values import same, step_text

TRAIL_MAX = 10_000  # lines of one message that are kept
LINES_SHOWN_MAX = 8

Line = tuple[FrameType, int]


class LineWatch:
    """Trace function that notes the last line of user code after which ``read_value()`` returned another value.

    ``package``: that of the app's class. ``running()``: the async handler that runs, or None. ``is_late()``: True if
    the search must stop. ``state``: the app's object, to note which of its values are read.
    """

    def __init__(
        self,
        read_value: Callable[[], Tree],
        package: str,
        running: Callable[[], Any],
        is_late: Callable[[], bool],
        state: object,
    ) -> None:
        self._read_value = read_value
        self._package = package
        self._running = running
        self._is_late = is_late
        self._state = state
        self._read: dict[str, None] = {}
        self._read_count = 0  # number of reads up to the last change
        self._before = sys.gettrace()
        self._outside = set(_frames(sys._getframe()))  # frames that ran before
        self._trail: list[Line] = []  # the first lines that have run
        self._trail_count = 0  # number of lines up to the last change
        self._changes: list[Line] = []  # the lines that changed the value
        self._at: tuple[FrameType, int, Any] | None = None  # the line that runs
        self.found: tuple[FrameType, int, Any] | None = None  # the last line that changed the value, and its handler
        self.changed = self.is_cut = self._is_over = False
        self._value = read_value()
        sys.settrace(self)

    def __call__(self, frame: FrameType, event: str, argument: object) -> LineWatch | None:
        if not is_of_user(frame, self._package):
            return None
        self._compare()
        if self._is_late():
            self.is_cut = self._is_over = True
            sys.settrace(self._before)
            return None
        at = self._outer(frame) if event == "return" else frame
        self._at = at, at.f_lineno, self._running()
        if event == "line" and len(self._trail) < TRAIL_MAX:
            self._trail.append((frame, frame.f_lineno))
            self._read.update(dict.fromkeys(paths_read(frame, self._state)))
        return self

    def _outer(self, frame: FrameType) -> FrameType:
        """Return the user's frame that continues when this one returns; this one if there is none."""
        for outer in _frames(frame.f_back):
            if outer in self._outside:
                break
            if is_of_user(outer, self._package):
                return outer
        return frame

    def _compare(self) -> None:
        try:
            value = self._read_value()
        except Exception:  # of an object that is incomplete
            return
        if not same(value, self._value):
            self._value, self.found, self.changed = value, self._at, True
            self._read_count, self._trail_count = len(self._read), len(self._trail)
            if self._at is not None:
                self._changes.append(self._at[:2])

    def stop(self) -> None:
        """End the search with a last comparison. Later calls do nothing."""
        if not self._is_over:
            self._is_over = True
            sys.settrace(self._before)
            self._compare()

    @property
    def read(self) -> list[str]:
        """Paths of the values that user code read before the change; without one, in the whole message."""
        return list(self._read)[: self._read_count if self.changed else None]

    def place(self) -> dict[str, Any] | None:
        return None if self.found is None else describe_place(*self.found[:2])

    def lines_before(self) -> list[dict[str, Any]]:
        """Return earlier lines, newest first, that set names for the found line; without one, all that set any."""
        if self.found is None:
            found = [one for one in reversed(self._trail) if _flow(one).sets]
        else:
            found = self._changes[::-1]
            if self._trail_count < TRAIL_MAX:  # otherwise lines between are not known
                found += _lines_that_set(self.found[:2], self._trail[: self._trail_count])
        places = {(frame.f_code, number): (frame, number) for frame, number in found}
        if self.found is not None:
            del places[self.found[0].f_code, self.found[1]]
        return [describe_place(*one) for one in places.values()][:LINES_SHOWN_MAX]


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


# Names that a line uses, and the lines that set these.


class _Flow(NamedTuple):
    sets: frozenset[str]
    uses: frozenset[str]


_NO_FLOW = _Flow(frozenset(), frozenset())


def _flow(line: Line) -> _Flow:
    return _flows(line[0].f_code.co_filename).get(line[1], _NO_FLOW)


@cache
def _flows(file: str) -> dict[int, _Flow]:
    """Parse a file: the names that the statement at a line sets and uses."""
    found: dict[int, _Flow] = {}
    for node in ast.walk(_tree(file)):
        if not isinstance(node, ast.stmt) or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        parts = [one for one in ast.iter_child_nodes(node) if not isinstance(one, ast.stmt | ast.excepthandler)]
        names = [one for part in parts for one in ast.walk(part) if isinstance(one, ast.Name)]
        sets = frozenset(one.id for one in names if isinstance(one.ctx, ast.Store))
        uses = frozenset(one.id for one in names if isinstance(one.ctx, ast.Load) or isinstance(node, ast.AugAssign))
        last = max([node.lineno, *(one.end_lineno or 0 for one in parts if isinstance(one, ast.expr))])
        found |= dict.fromkeys(range(node.lineno, last + 1), _Flow(sets, uses))
    return found


def _lines_that_set(line: Line, trail: Sequence[Line]) -> Iterator[Line]:
    """Yield the lines of ``trail``, newest first, that ``line`` depends on, also through others and in callers."""
    needed = {line[0]: set(_flow(line).uses)}
    began = {frame: at for at, (frame, _) in reversed(list(enumerate(trail)))}
    for at in reversed(range(len(trail))):
        frame = trail[at][0]
        names, flow = needed.get(frame, set()), _flow(trail[at])
        if names & flow.sets and trail[at] != line:
            yield trail[at]
            names -= flow.sets
            names |= flow.uses
        if at and began[frame] == at and names & set(_parameters(frame)):  # the line before has called it
            needed.setdefault(trail[at - 1][0], set()).update(_flow(trail[at - 1]).uses)
            yield trail[at - 1]


def _parameters(frame: FrameType) -> tuple[str, ...]:
    code = frame.f_code
    return tuple(name for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount] if name != "self")


@cache
def _tree(file: str) -> ast.Module:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:  # of a file that was changed meanwhile
        return ast.Module([], [])


# Values of a state that a line reads: found in its source, with keys evaluated in its frame.


_BY_KEY = ("get", "pop", "setdefault")  # methods of a dict whose first argument is a key
_READ_LESS = (*_BY_KEY, "append", "add", "extend", "insert", "update", "clear", "discard", "remove")  # not all of it
_SIMPLE = (ast.Name, ast.Constant, ast.Attribute, ast.Subscript, ast.Tuple, ast.BinOp, ast.JoinedStr, ast.UnaryOp)
_PARTS = (*_SIMPLE, ast.FormattedValue, ast.expr_context, ast.operator, ast.unaryop)


def paths_read(frame: FrameType, state: object) -> Iterator[str]:
    """Yield the paths of the values of ``state`` that the frame's next line reads."""
    for node in _reads_by_line(frame.f_code.co_filename)[frame.f_lineno]:
        found = _path(node, frame, state)
        if found is not None and found[0]:
            yield found[0]


@cache
def _reads_by_line(file: str) -> defaultdict[int, list[ast.expr]]:
    """Parse a file: by line, the longest expressions there that can be a value of a state."""
    found: defaultdict[int, list[ast.expr]] = defaultdict(list)

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.AugAssign):
            found[node.target.lineno].append(node.target)
        if isinstance(node, ast.Call) and _key_of(node) is not None:
            found[node.lineno].append(node)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _READ_LESS:
            for argument in (*node.args, *node.keywords):
                visit(argument)
            return
        if isinstance(node, ast.Attribute | ast.Subscript):
            if isinstance(node.ctx, ast.Load):
                found[node.lineno].append(node)
            if isinstance(node, ast.Subscript):
                visit(node.slice)
            return
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(_tree(file))
    return found


def _key_of(call: ast.Call) -> ast.expr | None:
    is_by_key = isinstance(call.func, ast.Attribute) and call.func.attr in _BY_KEY and call.args
    return call.args[0] if is_by_key else None


def _path(node: ast.expr, frame: FrameType, state: object) -> tuple[str, Any] | None:
    """Return (path, value) of an expression, or of its part before a call; None if it is not a value of the
    state."""
    if isinstance(node, ast.Name):
        value = frame.f_locals.get(node.id)
        return ("", state) if value is state or type(value) is TaskSelf else None
    if isinstance(node, ast.Call):
        key, holder = _key_of(node), node.func
        inner = holder.value if isinstance(holder, ast.Attribute) else holder
    elif isinstance(node, ast.Subscript):
        key, inner = node.slice, node.value
    elif isinstance(node, ast.Attribute):
        key, inner = None, node.value
    else:
        return None
    found = _path(inner, frame, state)
    if found is None:
        return None
    path, whole = found
    if isinstance(node, ast.Attribute):
        if node.attr not in getattr(whole, "__dict__", ()) and node.attr not in getattr(whole, "__struct_fields__", ()):
            return found if path else None  # a method, a peer
        return f"{path}.{node.attr}".lstrip("."), getattr(whole, node.attr, None)
    if key is None or not all(isinstance(one, _PARTS) for one in ast.walk(key)):
        return found
    if any(isinstance(one, ast.Name) and type(frame.f_locals.get(one.id)) is TaskSelf for one in ast.walk(key)):
        return found  # evaluating the key would count as a read by the handler
    try:
        at = eval(compile(ast.Expression(key), "<key>", "eval"), frame.f_globals, frame.f_locals)  # noqa: S307
        if isinstance(whole, list) and isinstance(at, int):
            return f"{path}[{range(len(whole))[at]}]", whole[at]
        if isinstance(whole, dict) and isinstance(at, int | str | bytes | bool):
            return step_text(whole, at, path), whole.get(at)
    except Exception:  # of the user's code: the line raises it as well
        return found
    return found
