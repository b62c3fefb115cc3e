"""Calls of one handler: by a fork, by a call that waits for the answer, or by a query beside the log."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from immortal.appsdk.calls.codec import ArgumentCodec, check_value
from immortal.appsdk.calls.context import Context
from immortal.appsdk.calls.failures import argument_mismatch, encode_failed, encode_refused, failure_of, text_of
from immortal.appsdk.calls.user_code import is_user_failure
from immortal.appsdk.errors import QueryError
from immortal.appsdk.handlers.decorators import Handler
from immortal.appsdk.handlers.definition import Definition
from immortal.appsdk.state.journal import declared_name, encode_raised
from immortal.appsdk.waiting.tasks import Tasks
from immortal.protocol.client_frames import Caller, ReplyKind
from immortal.protocol.queries import ANSWER_SIZE_BYTES_MAX, QueryAnswer, QueryQuestion


def receiver(tasks: Tasks, handler: Handler[Any, Any], *, wakes: bool) -> Callable[..., None]:
    """Return the function that handles a fork or impulse of ``handler``. ``wakes``: handlers can wait for its signals.

    For a plain ``def`` handler without ``wakes``, of a class without tables, this is the handler itself.
    """
    if handler.is_async:
        return _with_shard_check(handler, lambda instance, *arguments: tasks.start(handler, arguments, None, 0))
    if handler.raises or (tasks.has_tables and not handler.is_query):

        def run(instance: object, *arguments: Any) -> tuple[bool, bytes]:
            outcome = tasks.handler_runs.run_handler(handler, arguments, waits=False)
            tasks.drain()
            return outcome

        return _with_shard_check(handler, listed(tasks, handler, run))
    function: Callable[..., None] = partial(tasks.queries.run, handler) if handler.is_query else handler.call
    return _with_shard_check(handler, listed(tasks, handler, waking(tasks, function) if wakes else function))


def _with_shard_check(handler: Handler[Any, Any], function: Callable[..., Any], front: int = 0) -> Callable[..., Any]:
    """Wrap ``function``, which handles calls of ``handler``: in a keyed class, those of other shards are forwarded or
    refused.

    ``front``: number of arguments before the handler's own.
    """
    if not handler.is_keyed:
        return function

    def run(instance: Any, *arguments: Any) -> Any:
        to = instance.next_shard_of(handler.function.__qualname__, arguments[front])
        return function(instance, *arguments) if to is None else instance.forward(handler, to, arguments, front)

    return run


def waking(tasks: Tasks, function: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``function``: after it the handlers that it has woken run."""

    def run(instance: object, *arguments: Any) -> None:
        function(instance, *arguments)
        tasks.drain()

    return run


def rpc_receiver(tasks: Tasks, handler: Handler[Any, Any]) -> Callable[..., None]:
    """Return the function that handles a call whose caller waits: (instance, caller, number of the call, arguments)."""
    if handler.is_async:
        start = lambda instance, caller, number, *arguments: tasks.start(handler, arguments, caller, number)  # noqa: E731
        return _with_shard_check(handler, start, 2)

    def run(instance: object, caller: str, number: int, *arguments: Any) -> tuple[bool, bytes]:
        outcome = tasks.handler_runs.run_handler(handler, arguments, caller=caller)
        tasks.answers.answer(handler, caller, number, *outcome)
        tasks.drain()
        return outcome

    return _with_shard_check(handler, listed(tasks, handler, run, 2), 2)


def listed(
    tasks: Tasks, handler: Handler[Any, Any], function: Callable[..., Any], front: int = 0
) -> Callable[..., None]:
    """Wrap ``function``, which handles calls of ``handler``: calls with labels are added to the list of executions.

    ``front``: number of arguments before the handler's own: its caller, and the number of the call.
    """
    if handler.labels is None:
        return function
    context = tasks.context

    def run(instance: object, *arguments: Any) -> None:
        caller, number = arguments[:2] if front else (None, 0)
        encoded = b"" if tasks.executions is None else tasks.codec(handler).encoded(arguments[front:])[1]
        labels: dict[str, str] = {}
        state, result = "failed", None
        tasks.open_labels = labels
        try:
            outcome = function(instance, *arguments)
            state = "ended"
            if isinstance(outcome, tuple) and (front or handler.raises):
                raised, result = outcome
                state = "failed" if raised else state
        except BaseException as error:
            result = f"{type(error).__name__}: {text_of(error)}"
            raise
        finally:
            tasks.open_labels = None
            if tasks.executions is not None:
                waits = Caller(caller, number, handler.method_id) if front else None
                tasks.executions.note_handled_call(context, handler, encoded, waits, labels, state, result)

    return run


# Queries that are not logged: they run between two records, on the state at that moment.
#
# The result of a query goes to its asker, like that of a call. Nothing else in a query must leave a trace, since no
# replay repeats it; :mod:`immortal.appsdk.handlers.queries` says what is detected.


_ARRAY_FRONT_SIZE_BYTES = 1  # of a raised reply: its array of three is sent without the front


class _RefusedError(Exception):
    """Raised if the query can't be called; the text says why."""


def answer_query(
    question: QueryQuestion, definition: Definition, instance: Any, context: Context, tasks: Tasks
) -> QueryAnswer:
    """Answer a query. ``changed``: the state must be rebuilt from the log before anything else is handled."""
    record_time_ns, source, message_index = context.record_time_ns, context.source, context.message_index
    context.record_time_ns = max(question.time_ns, record_time_ns or 0)
    context.source = ""
    try:
        kind, value, changed = context.run_contexts.run(_run, question, definition, instance, tasks)
    finally:
        context.record_time_ns, context.source, context.message_index = record_time_ns, source, message_index
        context.carries_handles = False  # nothing was sent that could contain a handle
    if len(value) > ANSWER_SIZE_BYTES_MAX:
        text = f"the answer has {len(value)} bytes, at most {ANSWER_SIZE_BYTES_MAX} are possible: ask for it in parts"
        kind, value = _raised(encode_refused(text))
    return QueryAnswer(question.ticket, kind, value, changed)


def _run(question: QueryQuestion, definition: Definition, instance: Any, tasks: Tasks) -> tuple[int, bytes, bool]:
    try:
        handler, arguments = _found(question, definition)
        if handler.is_keyed and (problem := instance.problem(arguments[0])):
            raise _RefusedError(problem)
    except _RefusedError as refused:
        return *_raised(encode_refused(str(refused))), False
    changed = False
    try:
        value = tasks.queries.run_unlogged(handler, instance, arguments)
        encoded = tasks.handler_runs.result(handler, value)
        check_value("what it returned", encoded)
        kind, encoded = (ReplyKind.NOTHING, b"") if value is None else (ReplyKind.VALUE, encoded)
        return kind, encoded, False
    except BaseException as error:
        if not is_user_failure(error):
            raise
        changed = isinstance(error, QueryError) and error.changed
        if (declared := declared_name(handler.raises, error)) is not None:
            try:
                return *_raised(encode_raised(declared, error)), changed
            except BaseException as problem:  # its contents can't be sent
                if not is_user_failure(problem):
                    raise
                error = problem
        # Without a place in the log there is no reference.
        failure = failure_of(
            "undo",
            handler.function.__qualname__,
            handler.method_id,
            error,
            shares_trace=definition.share_tracebacks,
        )
        return *_raised(encode_failed(failure.type_name, failure.text, "")), changed


def _found(question: QueryQuestion, definition: Definition) -> tuple[Handler[Any, Any], tuple[Any, ...]]:
    handler = definition.by_method_id.get(question.method_id)
    if handler is None or not handler.is_query:
        raise _RefusedError(f"{definition.name} has no query with the method ID {question.method_id}")
    codec: ArgumentCodec = definition.codec(handler)
    if codec.may_hold_handles or codec.result_may_hold_handles:
        raise _RefusedError(
            f"{codec.name} takes or returns handles, and who holds one is in the log: call it without .query"
        )
    try:
        return handler, codec.decode(question.arguments)
    except BaseException as error:  # msgspec's own, and what a type's __post_init__ raises
        if not is_user_failure(error):
            raise
        raise _RefusedError(argument_mismatch(codec, error, question.arguments, 0)) from None


def _raised(encoded: bytes) -> tuple[int, bytes]:
    return ReplyKind.RAISED, encoded[_ARRAY_FRONT_SIZE_BYTES:]
