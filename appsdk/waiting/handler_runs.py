"""Runs of ``def`` handlers for somebody who waits: for callers, and as steps of ``async def`` handlers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from appsdk.calls.codec import encoder
from appsdk.calls.context import Context
from appsdk.calls.failures import encode_failed, failure_of, reference, verdict_on
from appsdk.calls.report import handler_failed
from appsdk.errors import HandlerError
from appsdk.handlers.decorators import Handler
from appsdk.handlers.definition import Definition
from appsdk.handlers.queries import Queries
from appsdk.state.journal import declared_name, encode_raised
from appsdk.waiting.operations import NOTHING
from protocol.verdicts import MessageKey, Verdict


class HandlerRuns:
    """``definition`` and ``instance`` are of the class that runs; ``verdicts`` are those that are known.

    ``tell``: of one verdict more; False: the message can't fail alone.
    """

    definition: Definition

    def __init__(self, context: Context, queries: Queries) -> None:
        self.context = context
        self.instance: Any = None
        self.queries = queries
        self.verdicts: Mapping[MessageKey, Verdict] = {}
        self.tell: Callable[[Verdict], bool] = lambda verdict: False

    def use(self, definition: Definition, instance: Any) -> None:
        """From here on this class's code runs."""
        self.definition = definition
        self.instance = instance
        self.queries.use(definition.state())

    def run_handler(
        self, handler: Handler[Any, Any], arguments: tuple[Any, ...], *, waits: bool = True, node: Any = None
    ) -> tuple[bool, bytes]:
        """Run a ``def`` handler, the instance's or of ``node``, for somebody who ``waits``: (whether it raised, what
        for them). Raises HandlerError."""
        try:
            if handler.is_query:
                value = self.queries.run(handler, self.instance, *arguments)
            else:
                value = handler.function(self.instance if node is None else node, *arguments)
        except (Exception, SystemExit) as error:
            if (declared := declared_name(handler.raises, error)) is None:
                raise self._failed(handler, arguments, error) from error
            if not waits:
                return True, NOTHING
            return True, self.encoded(handler, arguments, partial(encode_raised, declared, error))
        if not waits:
            return False, NOTHING
        try:
            return False, self.result(handler, value)
        except Exception as error:
            raise self._unsendable(handler, arguments, error) from error

    def result(self, handler: Handler[Any, Any], value: Any) -> bytes:
        """What goes to who waits: checked here, so that what does not fit is this handler's failure, not theirs."""
        data = encoder.encode(value)
        codec = self.definition.codec(handler)
        if value is not None or not codec.returns_nothing:
            codec.decode_result(data)
        return data

    def encoded(self, handler: Handler[Any, Any], arguments: tuple[Any, ...], encode: Callable[[], bytes]) -> bytes:
        try:
            return encode()
        except Exception as error:
            raise self._unsendable(handler, arguments, error) from error

    def _unsendable(self, handler: Handler[Any, Any], arguments: tuple[Any, ...], error: Exception) -> HandlerError:
        name = handler.function.__qualname__
        problem = TypeError(f"what {name} returned or raised can't be sent to whoever waits for it: {error}")
        return self._failed(handler, arguments, problem)

    def _failed(self, handler: Handler[Any, Any], arguments: tuple[Any, ...], error: BaseException) -> HandlerError:
        context = self.context
        name = handler.function.__qualname__
        made = handler_failed(name, arguments, error, context.sequence_id, context.message_index)
        if (policy := self.definition.policy(handler)) != "stop":
            made.failure = failure_of(
                policy, name, handler.method_id, error, shares_trace=self.definition.share_tracebacks
            )
        made.__cause__ = error
        return made

    def run_step(
        self, task: int, step: int, handler: Handler[Any, Any], arguments: tuple[Any, ...]
    ) -> tuple[bool, bytes]:
        """A ``def`` handler that the ``async def`` handler with the number ``task`` awaits: as :meth:`run_handler`.

        One that has failed is not called again.
        """
        context = self.context
        key = context.sequence_id, context.message_index, task, step
        if (verdict := self.verdicts.get(key)) is not None and verdict.skips:
            where = reference(context.instance_name, verdict.sequence_id, verdict.message_index)
            return True, encode_failed(verdict.type_name, verdict.text, where)
        try:
            return self.run_handler(handler, arguments)
        except HandlerError as error:
            if error.failure is None:
                raise
            error.failure = failure = replace(error.failure, task=task, step=step)
            if failure.policy != "keep":
                raise
            if not self.tell(verdict_on(error, failure, None, b"")):
                raise
            where = reference(context.instance_name, error.sequence_id, error.message_index)
            return True, encode_failed(failure.type_name, failure.text, where)
