"""All small changes of a module: each is one that a slip could make, and changes one place."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass
from itertools import accumulate

_COMPARISONS: dict[type[ast.cmpop], ast.cmpop] = {
    ast.Lt: ast.LtE(),
    ast.LtE: ast.Lt(),
    ast.Gt: ast.GtE(),
    ast.GtE: ast.Gt(),
    ast.Eq: ast.NotEq(),
    ast.NotEq: ast.Eq(),
    ast.Is: ast.IsNot(),
    ast.IsNot: ast.Is(),
    ast.In: ast.NotIn(),
    ast.NotIn: ast.In(),
}
_ARITHMETIC: dict[type[ast.operator], ast.operator] = {
    ast.Add: ast.Sub(),
    ast.Sub: ast.Add(),
    ast.Mult: ast.FloorDiv(),
    ast.FloorDiv: ast.Mult(),
    ast.BitAnd: ast.BitOr(),
    ast.BitOr: ast.BitAnd(),
}
# Removed as they are. A name that is not bound any more is no slip, so only what is kept in an object is left unbound.
_STATEMENTS = (ast.AugAssign, ast.Delete, ast.Continue, ast.Break)
# What does not run, and what is a text for people.
_SKIPPED = (ast.JoinedStr, ast.Raise, ast.Assert)
_ANY_ORDER = ("min", "max")
_NOT_RUN = ("annotation", "returns", "decorator_list")


@dataclass(frozen=True, slots=True)
class Mutant:
    """Bytes ``begin`` to ``end`` of a module's source become ``text``. ``within``: the class and the function."""

    path: str
    line: int  # from 1
    within: str
    operator: str
    original: bytes
    begin: int
    end: int
    text: str

    @property
    def source(self) -> bytes:
        return self.original[: self.begin] + self.text.encode() + self.original[self.end :]

    @property
    def is_sound(self) -> bool:
        """Whether it is a program, and another one."""
        try:
            return ast.dump(ast.parse(self.source)) != ast.dump(ast.parse(self.original))
        except SyntaxError:
            return False

    @property
    def change(self) -> str:
        """The lines that go ("- ...") and those that come ("+ ..."), without their indentation."""
        begin = self.original.rfind(b"\n", 0, self.begin) + 1
        end = self.end + len(self.original[self.end :].partition(b"\n")[0])
        old = self.original[begin:end].decode().splitlines()
        new = (self.original[begin : self.begin] + self.text.encode() + self.original[self.end : end]).decode()
        return "\n".join([*(f"- {line.strip()}" for line in old), *(f"+ {line.strip()}" for line in new.splitlines())])


def mutants(path: str, source: bytes) -> list[Mutant]:
    """All of a module's functions, in the order of their lines. Raises SyntaxError."""
    starts = [0, *accumulate(map(len, source.splitlines(keepends=True)))]
    found = []
    for node, within, operator, text in _changes(ast.parse(source), ""):
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        begin, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        found.append(Mutant(path, node.lineno, within, operator, source, begin, end, text))
    return sorted(found, key=lambda mutant: (mutant.begin, mutant.end, mutant.text))


def _changes(node: ast.AST, within: str) -> Iterator[tuple[ast.expr | ast.stmt, str, str, str]]:
    """(what is replaced, where it is, the operator, by what)."""
    if isinstance(node, ast.Module | ast.ClassDef):
        for child in node.body:
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield from _changes(child, f"{within}.{child.name}".lstrip("."))
        return
    if isinstance(node, ast.stmt):
        for operator, text in _of_statement(node):
            yield node, within, operator, text
    elif isinstance(node, ast.expr):
        for operator, changed in _of_expression(node):
            yield node, within, operator, f"({ast.unparse(changed)})"
    for condition in _conditions(node):
        yield condition, within, "condition negated", f"(not {ast.unparse(condition)})"
    if isinstance(node, _SKIPPED):
        return
    for name, value in ast.iter_fields(node):
        if name not in _NOT_RUN:
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from _changes(child, within)


def _conditions(node: ast.AST) -> list[ast.expr]:
    """Those in ``node`` that no other operator turns around."""
    conditions: list[ast.expr] = []
    if isinstance(node, ast.If | ast.While | ast.IfExp):
        conditions = [node.test]
    elif isinstance(node, ast.BoolOp):
        conditions = node.values
    return [one for one in conditions if isinstance(one, ast.Name | ast.Attribute | ast.Call)]


def _of_statement(node: ast.stmt) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call | ast.Await):
        yield "call removed", "pass"
    elif isinstance(node, ast.Raise):
        yield "raise removed", "pass"
    elif isinstance(node, _STATEMENTS) or (isinstance(node, ast.Return) and node.value is None):
        yield "statement removed", "pass"
    elif isinstance(node, ast.Assign) and all(isinstance(one, ast.Attribute | ast.Subscript) for one in node.targets):
        yield "assignment removed", "pass"
    elif isinstance(node, ast.Return) and not isinstance(node.value, ast.Constant):
        yield "returned value", "return None"


def _of_expression(node: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    changed = copy(node)  # a copy of this node alone: its fields are set anew, not changed
    match changed:
        case ast.Compare(ops=[op]) if type(op) in _COMPARISONS:
            changed.ops = [_COMPARISONS[type(op)]]
            yield "comparison", changed
        case ast.BoolOp():
            changed.op = ast.Or() if isinstance(changed.op, ast.And) else ast.And()
            yield "and, or", changed
        case ast.UnaryOp(op=ast.Not()):
            yield "negation", changed.operand
        case ast.IfExp():
            changed.body, changed.orelse = changed.orelse, changed.body
            yield "branches swapped", changed
        case ast.BinOp(op=op) if type(op) in _ARITHMETIC and not (_is_text(changed.left) or _is_text(changed.right)):
            changed.op = _ARITHMETIC[type(op)]
            yield "arithmetic", changed
        case ast.Constant(value=bool(value)):
            yield "constant", ast.Constant(not value)
        case ast.Constant(value=int(value)):
            yield "constant", ast.Constant(value + 1)
        case ast.Call(func=called, args=args) if ast.unparse(called) not in _ANY_ORDER:
            for index in range(len(args) - 1):
                swapped = copy(changed)
                swapped.args = [*args[:index], args[index + 1], args[index], *args[index + 2 :]]
                yield "arguments swapped", swapped


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))
