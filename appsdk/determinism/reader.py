"""Reader of one function's source: the meaning of its names, its calls, references and loops."""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import inspect
import linecache
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FunctionType
from typing import Any, Protocol, TypeGuard

from msgspec.structs import replace

from immortal.appsdk.determinism.rules import (
    AWAIT,
    AWAIT_OR_FORK,
    BY_RESULT,
    IN_A_STEP,
    IN_THE_STATE,
    NOT_BEGUN,
    NOT_KEPT,
    NOT_RUN_AGAIN,
    OF_A_COPY,
    REFUSED,
    Rule,
    Rules,
)
from immortal.appsdk.determinism.syntax import (
    INSTEAD,
    FunctionNode,
    bound_names,
    changes,
    dropped_awaitables,
    suppressed,
    swallowed,
)
from immortal.appsdk.determinism.values import (
    Bound,
    Instance,
    Known,
    PeerOf,
    Super,
    Value,
    attribute,
    element,
    hints_of,
    is_object,
    is_state_set,
    item,
    result,
    shape,
    state_names,
    values_of,
)
from immortal.appsdk.functions import Effects, at, event, race, sleep, step
from immortal.appsdk.handlers.decorators import Handler

_OPTED_OUT = re.compile(r"#\s*immortal:\s*deterministic\b")
_ORDER_FREE = frozenset({sorted, min, max, sum, len, any, all, set, frozenset, bool})
_PASSES_ORDER_ON = frozenset({list, tuple, iter, map, filter})
_ORDERED = frozenset(  # built-in functions and classes
    {"list", "tuple", "iter", "map", "filter", "enumerate", "zip", "dict", "deque", "chain", "islice", "reduce"}
)
_ORDERED_METHODS = frozenset({"join", "extend", "extendleft", "fromkeys", "writelines"})
_WAITING = (sleep, at, event, race, step)
_SET_METHODS = frozenset({"copy", "union", "difference", "intersection", "symmetric_difference"})

_NAMED = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.ExceptHandler | ast.MatchAs | ast.MatchStar


def _is_effect(value: Value) -> bool:
    kind = (
        type(value.value) if isinstance(value, Known) else shape(value.hint)[0] if isinstance(value, Instance) else None
    )
    return kind is Effects


class Source:
    """Source of one file: its lines, and its functions by name and first line."""

    def __init__(self, file: str, module_globals: dict[str, Any]) -> None:
        self.lines = linecache.getlines(file, module_globals)
        self._functions: dict[tuple[str, int], list[FunctionNode]] = {}
        try:
            tree = ast.parse("".join(self.lines))
        except SyntaxError:  # it was edited after the import
            return
        for node in ast.walk(tree):
            if isinstance(node, ast.Lambda):
                self._functions.setdefault(("<lambda>", node.lineno), []).append(node)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first_line = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                self._functions.setdefault((node.name, first_line), []).append(node)

    def find(self, code: CodeType) -> list[FunctionNode]:
        """Return the function with this code; several for lambdas of one line."""
        return self._functions.get((code.co_name, code.co_firstlineno), [])

    def opted_out(self, node: ast.AST) -> bool:
        return self.opts_out(node.lineno, node.end_lineno or node.lineno)  # type: ignore[attr-defined]

    def opts_out(self, first: int, last: int) -> bool:
        """Return True if a line from ``first`` to ``last`` has the comment that silences the check."""
        return any(_OPTED_OUT.search(line) for line in self.lines[first - 1 : last])


def _closure(function: FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # not filled yet
            yield name, cell.cell_contents


class Follower(Protocol):
    """Receiver of a reader's findings and of functions to read next. ``apps``: the classes that are checked."""

    apps: tuple[type, ...]
    rules: Rules

    def add(self, code: CodeType, line: int, what: str, instead: str) -> None: ...
    def follow(self, value: Value) -> None: ...
    def default_calls(self, cls: type) -> Iterator[tuple[str, Value]]: ...


class Reader(ast.NodeVisitor):
    """Reader of one function: reports findings to its Follower."""

    def __init__(
        self, search: Follower, source: Source, function: FunctionType, receiver: Value, node: FunctionNode
    ) -> None:
        self._search = search
        self._source = source
        self._function = function
        self._node = node
        self._waits = inspect.iscoroutinefunction(function) or (isinstance(receiver, Instance) and receiver.waits)
        self._closure = dict(_closure(function))
        self._order_free: set[ast.AST] = set()
        self._bound: Counter[str] = Counter()
        self._bindings: dict[str, Callable[[], Value]] = {}  # of names that are bound once
        self._collect_names(receiver)
        self._step_depth = 0
        self._steps = self._find_steps()

    def read(self) -> None:
        body = self._node.body
        for part in body if isinstance(body, list) else [body]:
            self.visit(part)
        self._check_changes()
        if self._waits:
            for call in dropped_awaitables(self._node):
                if instead := self._begins_by(call):
                    self._report(call, f"does not await {ast.unparse(call.func)}(...), {NOT_BEGUN}", instead)

    # --- names --------------------------------------------------------------------------------------------------------

    def _collect_names(self, receiver: Value) -> None:
        arguments = self._node.args
        own = [*arguments.posonlyargs, *arguments.args]
        for index, argument in enumerate(own):
            if index == 0 and receiver is not None:
                self._bindings[argument.arg] = lambda: receiver
            elif (hint := hints_of(self._function).get(argument.arg)) is not None:
                self._bindings[argument.arg] = functools.partial(self._parameter, hint)
        for node in ast.walk(self._node):
            if isinstance(node, ast.arg):
                self._bound[node.arg] += 1
            elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
                self._bound[node.id] += 1
            elif isinstance(node, _NAMED) and node is not self._node:
                self._bound[node.name or ""] += 1
            elif isinstance(node, ast.MatchMapping) and node.rest:
                self._bound[node.rest] += 1
            elif isinstance(node, ast.Import | ast.ImportFrom):
                for alias in node.names:
                    name = alias.asname or alias.name.partition(".")[0]
                    self._bound[name] += 1
                    self._bindings[name] = functools.partial(self._imported, node, alias)
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                self._bindings[node.targets[0].id] = functools.partial(self._value, node.value)
            elif isinstance(node, ast.NamedExpr):
                self._bindings[node.target.id] = functools.partial(self._value, node.value)
            elif isinstance(node, ast.For | ast.comprehension) and isinstance(node.target, ast.Name):
                self._bindings[node.target.id] = functools.partial(self._element, node.iter)

    def _parameter(self, hint: Any) -> Value:
        cls, _ = shape(hint)
        is_app = isinstance(cls, type) and cls is not object and any(issubclass(app, cls) for app in self._search.apps)
        return Instance(hint, of_state=is_app)

    def _element(self, node: ast.expr) -> Value:
        return element(self._value(node))

    def _imported(self, node: ast.Import | ast.ImportFrom, alias: ast.alias) -> Value:
        module_name = alias.name
        if isinstance(node, ast.Import):
            if alias.asname is None:
                self._search.rules.module(module_name)
                module_name = module_name.partition(".")[0]
        elif node.level or node.module is None:
            package = (self._function.__globals__.get("__package__") or "").split(".")
            base = package[: len(package) - node.level + 1]
            module_name = ".".join([*base, *([node.module] if node.module else [])])
        else:
            module_name = node.module
        module = self._search.rules.module(module_name)
        if module is None or isinstance(node, ast.Import):
            return None if module is None else Known(module)
        return attribute(Known(module), alias.name)

    def _name(self, name: str) -> Value:
        if self._bound[name]:
            binding = self._bindings.pop(name, None) if self._bound[name] == 1 else None
            if binding is None:
                return None
            value = binding()  # the binding is removed meanwhile: it can refer to its own name
            self._bindings[name] = lambda: value
            return value
        for names in (self._closure, self._function.__globals__, vars(builtins)):
            if name in names:
                return Known(names[name])
        return None

    # --- expressions --------------------------------------------------------------------------------------------------

    def _value(self, node: ast.expr) -> Value:
        """Return the value of an expression; None if it is not known."""
        if isinstance(node, ast.Name):
            return self._name(node.id)
        if isinstance(node, ast.Attribute):
            return attribute(self._value(node.value), node.attr)
        if isinstance(node, ast.Subscript):
            return item(self._value(node.value))
        if isinstance(node, ast.NamedExpr):
            return self._value(node.value)
        if isinstance(node, ast.BinOp):
            for side in (node.left, node.right):
                if is_state_set(value := self._value(side)):
                    return value
        if isinstance(node, ast.Call):
            return self._result(node)
        return None

    def _result(self, node: ast.Call) -> Value:
        function = node.func
        if isinstance(function, ast.Attribute):
            receiver = self._value(function.value)
            if is_state_set(receiver) and function.attr in _SET_METHODS:
                return receiver
            if isinstance(receiver, Instance) and function.attr == "values":
                return values_of(receiver)
            if isinstance(receiver, Instance) and function.attr in ("get", "setdefault", "pop"):
                return item(receiver)
        value = self._value(function)
        if is_object(value, super) and not node.args:
            own, cls = self._first_parameter(), self._closure.get("__class__")
            return Super(own, cls) if isinstance(own, Instance) and isinstance(cls, type) else None
        if is_object(value, set, frozenset) and node.args and is_state_set(first := self._value(node.args[0])):
            return first
        return result(value)

    def _first_parameter(self) -> Value:
        arguments = [*self._node.args.posonlyargs, *self._node.args.args]
        return self._name(arguments[0].arg) if arguments else None

    # --- async handlers -----------------------------------------------------------------------------------------------

    def _begins_by(self, node: ast.Call) -> str:
        """Return how to begin the result of a call ("write 'await' ..."); "" if it needs nothing."""
        function = node.func
        value = self._value(function)
        if _is_effect(value) or is_object(value, *_WAITING):
            return AWAIT
        if isinstance(value, Instance):
            return ""
        called = value.function if isinstance(value, Bound) else value.value if isinstance(value, Known) else None
        if not isinstance(function, ast.Attribute):
            return AWAIT if inspect.iscoroutinefunction(called) else ""
        receiver = self._value(function.value)
        if isinstance(receiver, PeerOf):
            return AWAIT_OR_FORK if receiver.waits else ""
        if isinstance(receiver, Instance) and receiver.waits:
            own = inspect.getattr_static(shape(receiver.hint)[0], function.attr, None)
            if isinstance(own, Handler):
                return AWAIT_OR_FORK if own.is_async else f"write await immortal.step({ast.unparse(function)}, ...)"
        return AWAIT if inspect.iscoroutinefunction(called) else ""

    def _check_attribute(self, node: ast.Attribute) -> None:
        """Report state that an async handler sets outside of its steps' functions; it reads a copy."""
        receiver = self._value(node.value)
        if self._step_depth or not (isinstance(receiver, Instance) and receiver.waits):
            return
        if not isinstance(node.ctx, ast.Load):
            verb = "sets" if isinstance(node.ctx, ast.Store) else "deletes"
            self._report(node, f"{verb} {ast.unparse(node)} in an async handler, {REFUSED}", IN_A_STEP)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        of = node.value
        if not isinstance(node.ctx, ast.Load) and not self._step_depth and isinstance(of, ast.Attribute):
            receiver = self._value(of.value)
            if isinstance(receiver, Instance) and receiver.waits and of.attr in state_names(shape(receiver.hint)[0]):
                self._report(node, f"changes a copy of {ast.unparse(of)} in an async handler, {OF_A_COPY}", IN_A_STEP)
        self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.Lambda) -> None:
        is_step = node in self._steps
        if is_step:
            self._check_step(node)
        self._step_depth += is_step
        self.generic_visit(node)
        self._step_depth -= is_step

    visit_Lambda = visit_FunctionDef  # noqa: N815 (the name is ast's)

    def _check_step(self, function: ast.AST) -> None:
        """Report variables of the handler that a step's function changes: a recovery does not run it again."""
        own = bound_names(function)
        for node, name, _ in changes(function):
            is_outer = self._bound[name] and name not in own and not self._is_app(self._name(name))
            if isinstance(node, ast.Nonlocal) or is_outer:
                self._report(node, f"changes {name} of its handler in a step, {NOT_RUN_AGAIN}", BY_RESULT)

    def _is_app(self, value: Value) -> TypeGuard[Instance]:
        return isinstance(value, Instance) and shape(value.hint)[0] in self._search.apps

    def _check_changes(self) -> None:
        """Report variables of the module, or of the app's class, that the function changes: no checkpoint has them."""
        inner = self._bound.keys() | self._closure.keys()
        for node, name, attribute_name in changes(self._node):
            found = None if name in inner else self._function.__globals__.get(name)
            if isinstance(node, ast.Global) or type(found).__hash__ is None:
                self._report(node, f"changes {name}, a variable of the module, {NOT_KEPT}", IN_THE_STATE)
            elif self._is_app(value := self._name(name)):
                cls = shape(value.hint)[0]
                found = inspect.getattr_static(cls, attribute_name, None)
                if type(found).__hash__ is None and attribute_name not in state_names(cls):
                    what = f"changes {name}.{attribute_name}, a variable of the class, {NOT_KEPT}"
                    self._report(node, what, f"annotate it in the class, {attribute_name}: <its type>")

    def _find_steps(self) -> set[ast.AST]:
        """Return the functions that are passed to `immortal.step`: defined here, a lambda, or `self.method`."""
        calls = [one for one in ast.walk(self._node) if isinstance(one, ast.Call) and one.args]
        given = [one.args[0] for one in calls if is_object(self._value(one.func), step)]
        names = {one.id for one in given if isinstance(one, ast.Name)}
        functions = [one for one in ast.walk(self._node) if isinstance(one, ast.FunctionDef) and one.name in names]
        return {*functions, *(one for one in given if isinstance(one, ast.Lambda | ast.Attribute))}

    # --- findings -----------------------------------------------------------------------------------------------------

    def _report(self, node: Any, what: str, instead: str) -> None:
        if not self._source.opted_out(node):
            self._search.add(self._function.__code__, node.lineno, what, instead)

    def _report_rule(self, node: ast.expr, verb: str, rule: Rule) -> None:
        self._report(node, f"{verb} {rule.name}{'()' if verb == 'calls' else ''}, {rule.why}", rule.instead)

    def _reference(self, node: ast.expr) -> None:
        """Report a name or attribute that is read: a function that is passed on will be called."""
        value = self._value(node)
        if isinstance(value, Known) and (rule := self._search.rules.rule_of_function(value.value)) is not None:
            if rule.arguments_count < 0:
                self._report_rule(node, "uses", rule)
        elif not self._source.opted_out(node):
            if node in self._steps and isinstance(value, Bound) and isinstance(value.receiver, Instance):
                value = replace(value, receiver=replace(value.receiver, waits=False))  # a step has the app itself
            self._search.follow(value)

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load):
            self._reference(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.ctx, ast.Load):
            self._reference(node)
        self._check_attribute(node)
        self.visit(node.value)

    def visit_Call(self, node: ast.Call) -> None:
        function = self._value(node.func)
        self._check_order(node, function)
        if isinstance(function, Known) and isinstance(function.value, type):
            self._check_creation(node, function.value)
        elif isinstance(function, Known | Instance) and not self._source.opted_out(node):
            self._search.follow(attribute(function, "__call__"))
        rule = self._search.rules.rule_of_function(function.value) if isinstance(function, Known) else None
        if rule is None:
            self.visit(node.func)
        elif rule.applies_to(node):
            self._report_rule(node, "calls", rule)
        # The function of an effect is not replayed: it can do anything.
        for part in (*node.args[_is_effect(function) :], *node.keywords):
            self.visit(part)

    def _check_creation(self, node: ast.Call, cls: type) -> None:
        if (rule := self._search.rules.rule_of_class(cls)) is not None and rule.applies_to(node):
            self._report_rule(node, "calls", rule)
            return
        if self._source.opted_out(node):
            return
        given = {keyword.arg for keyword in node.keywords}
        for field, value in self._search.default_calls(cls):
            if field in given:
                continue
            rule = self._search.rules.rule_of_function(value.value) if isinstance(value, Known) else None
            if rule is None:
                self._search.follow(value)
            else:
                what = f"makes a {cls.__name__} without {field!r}, whose default is {rule.name}(), {rule.why}"
                self._report(node, what, f"pass it: {rule.instead}")

    # --- sets ---------------------------------------------------------------------------------------------------------

    def _check_order(self, node: ast.Call, function: Value) -> None:
        called = function.value if isinstance(function, Known) else None
        known = called if inspect.isbuiltin(called) or isinstance(called, type) else None
        if known in _ORDER_FREE or (known in _PASSES_ORDER_ON and node in self._order_free):
            for argument in node.args:
                self._order_free.update((argument, *getattr(argument, "generators", ())))
            return
        if isinstance(node.func, ast.Attribute):
            if node.func.attr == "pop" and not node.args and is_state_set(self._value(node.func.value)):
                self._report_set(node.func.value, "takes any one element of", "min")
            if node.func.attr == "fork":
                for argument in node.args:
                    if is_state_set(self._value(argument)):
                        self._report_set(argument, "sends", "sorted")
            if node.func.attr not in _ORDERED_METHODS:
                return
        elif known is None or known.__name__ not in _ORDERED:
            return
        for argument in node.args:
            self._check_iteration(argument)

    def _check_iteration(self, node: ast.expr) -> None:
        if is_state_set(self._value(node)):
            self._report_set(node, "goes through", "sorted")

    def _report_set(self, node: ast.expr, verb: str, replacement: str) -> None:
        text = ast.unparse(node)
        self._report(
            node, f"{verb} {text}, a set, whose order can differ after a recovery", f"use {replacement}({text})"
        )

    def visit_For(self, node: ast.For) -> None:
        self._check_iteration(node.iter)
        self.generic_visit(node)

    def visit_SetComp(self, node: ast.SetComp) -> None:
        self._order_free.update(node.generators)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        if node not in self._order_free:
            self._check_iteration(node.iter)
        self.generic_visit(node)

    def visit_Starred(self, node: ast.Starred) -> None:
        if isinstance(node.ctx, ast.Load) and node not in self._order_free:
            self._check_iteration(node.value)
        self.generic_visit(node)

    def visit_Set(self, node: ast.Set) -> None:
        for part in node.elts:
            self.visit(part.value if isinstance(part, ast.Starred) else part)

    def visit_YieldFrom(self, node: ast.YieldFrom) -> None:
        self._check_iteration(node.value)
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        if any(isinstance(target, ast.Tuple | ast.List) for target in node.targets):
            self._check_iteration(node.value)
        self.generic_visit(node)

    # --- exceptions ---------------------------------------------------------------------------------------------------

    def visit_Try(self, node: ast.Try | ast.TryStar) -> None:
        self._report_lines(swallowed(node, self._value))
        self.generic_visit(node)

    visit_TryStar = visit_Try  # noqa: N815 (the name is ast's)

    def visit_With(self, node: ast.With | ast.AsyncWith) -> None:
        self._report_lines(suppressed(node, self._value))
        self.generic_visit(node)

    visit_AsyncWith = visit_With  # noqa: N815 (the name is ast's)

    def _report_lines(self, found: Iterable[tuple[int, str]]) -> None:
        for line, what in found:
            if not self._source.opts_out(line, line):
                self._search.add(self._function.__code__, line, what, INSTEAD)

    # --- code that is not run -----------------------------------------------------------------------------------------

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.visit(node.target)
        if node.value is not None:
            self.visit(node.value)

    def visit_arg(self, node: ast.arg) -> None:
        """Skip the annotation of an argument."""
