"""Plugin for mypy that types calls by async handlers: a call of one's own ``def`` handler is awaitable, and awaiting
``immortal.multicast([...]).count(...)`` gives a tuple of what ``count`` returns.

Types can't say so by themselves, as in a ``def`` handler the same call returns at once (those of
``self.<handler>.step`` and ``immortal.multicast([...]).<handler>.all`` can: they are for async handlers alone). In the
settings of mypy: ``plugins = ["immortal.mypy_plugin"]``. Nothing else imports this module.
"""

from __future__ import annotations

from collections.abc import Callable

from mypy.nodes import CallExpr, FuncDef, MemberExpr, NameExpr
from mypy.plugin import MethodContext, Plugin
from mypy.types import Instance, Type, get_proper_type

_CALL = "immortal.appsdk.handlers.decorators.BoundHandler.__call__"
_REMOTE_CALL = "immortal.appsdk.handlers.decorators.RemoteHandler.__call__"


class _AppPlugin(Plugin):
    def get_method_hook(self, fullname: str) -> Callable[[MethodContext], Type] | None:
        if fullname == _REMOTE_CALL:
            return _all_answers
        return _awaitable if fullname == _CALL else None


def _all_answers(context: MethodContext) -> Type:
    returned = get_proper_type(context.default_return_type)
    call = context.context
    callee = call.callee if isinstance(call, CallExpr) else None
    receiver = callee.expr if isinstance(callee, MemberExpr) else None
    made = receiver.callee if isinstance(receiver, CallExpr) else None
    is_multicast = isinstance(made, MemberExpr | NameExpr) and made.name == "multicast"
    if not is_multicast or not isinstance(returned, Instance) or not returned.args:
        return returned
    answers = context.api.named_generic_type("builtins.tuple", list(returned.args))
    return context.api.named_generic_type("typing.Awaitable", [answers])


def _awaitable(context: MethodContext) -> Type:
    returned = get_proper_type(context.default_return_type)
    return context.api.named_generic_type("typing.Awaitable", [returned]) if _is_step(context) else returned


def _is_step(context: MethodContext) -> bool:
    """Tell whether a call is ``self.<handler>(...)`` in an ``async def``."""
    function = context.api.scope.current_function()  # type: ignore[attr-defined]
    if not isinstance(function, FuncDef) or not function.is_coroutine or not function.arguments:
        return False
    call = context.context
    callee = call.callee if isinstance(call, CallExpr) else None
    receiver = callee.expr if isinstance(callee, MemberExpr) else None
    return isinstance(receiver, NameExpr) and receiver.name == function.arguments[0].variable.name


def plugin(version: str) -> type[Plugin]:
    return _AppPlugin
