"""Context variables: each run of user code has a copy of its own, which no other run sees and which ends with it.

Python keeps in them decimal's precision and numpy's errstate, libraries what a log line or a span belongs to, users
their tenant. Without a copy one handler would change what all others compute, and a recovery, which does not run what
has changed it, would compute something else. decisions/0073.
"""

from __future__ import annotations

import contextvars
import sys
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

_SETTINGS = ("prec", "rounding", "Emin", "Emax", "capitals", "clamp", "traps")  # of a decimal context
_decimal_variable: contextvars.ContextVar[Any] | None = None


class RunContexts:
    """Those of one instance: copies of what the thread that makes this has now, once the app's modules are imported."""

    __slots__ = ("_base", "_is_empty")

    def __init__(self) -> None:
        self._base = _without_usual_decimal(contextvars.copy_context())
        self._is_empty = not len(self._base)

    def new(self) -> contextvars.Context:
        """For one run that nobody else's context is handed down to."""
        made = self._base.copy()
        return made if self._is_empty else _separated(made)

    def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """One such run; it may be within another."""
        return self.new().run(function, *arguments)


def handed_down() -> contextvars.Context:
    """A copy of the context that runs now, for what it starts: a branch, a step, an effect."""
    return _separated(contextvars.copy_context())


def copy_of(context: contextvars.Context) -> contextvars.Context:
    """For one of several runs that begin with what ``context`` has."""
    return _separated(context.copy())


def _separated(context: contextvars.Context) -> contextvars.Context:
    """``context``, with a decimal context of its own: its users change that object in place."""
    variable = _variable_of_decimal()
    if variable is not None and variable in context:
        context.run(variable.set, context[variable].copy())
    return context


def _without_usual_decimal(context: contextvars.Context) -> contextvars.Context:
    """``context``, with no decimal context that says what any new one would: each number that a module makes as it is
    imported leaves one behind."""
    variable = _variable_of_decimal()
    if variable is None or variable not in context:
        return context
    usual = contextvars.Context().run(sys.modules["decimal"].getcontext)
    if any(getattr(context[variable], name) != getattr(usual, name) for name in _SETTINGS):
        return _separated(context)
    made = contextvars.Context()
    for other, value in context.items():
        if other is not variable:
            made.run(other.set, value)
    return made


def _variable_of_decimal() -> contextvars.ContextVar[Any] | None:
    """Where decimal keeps its context; None: nobody has imported it."""
    global _decimal_variable
    if _decimal_variable is None and hasattr(decimal := sys.modules.get("decimal"), "getcontext"):
        probe = contextvars.Context()
        probe.run(decimal.getcontext)  # type: ignore[union-attr]
        _decimal_variable = next(iter(probe), None)
    return _decimal_variable
