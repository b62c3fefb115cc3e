"""Runs of ``def`` handlers for somebody who waits: for callers, and as steps of ``async def`` handlers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from immortal.appsdk.calls.codec import encoder
from immortal.appsdk.calls.context import Context
from immortal.appsdk.calls.failures import encode_failed, failure_of, reference, verdict_on
from immortal.appsdk.calls.report import handler_failed
from immortal.appsdk.calls.run_contexts import handed_down
from immortal.appsdk.calls.run_failures import is_failure
from immortal.appsdk.errors import HandlerError, StateError
from immortal.appsdk.handlers.decorators import Handler
from immortal.appsdk.handlers.definition import Definition
from immortal.appsdk.handlers.queries import Queries
from immortal.appsdk.state.journal import declared_name, encode_raised
from immortal.appsdk.waiting.operations import NOTHING
from immortal.protocol.verdicts import MessageKey, Verdict


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
        self.check: Callable[[], StateError | None] | None = None  # the state, behind each handler that may change it

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
        except BaseException as error:
            if not is_failure(error):
                raise
            if (declared := declared_name(handler.raises, error)) is None:
                failed = self.failed(handler, arguments, error)
                if failed.failure is not None and failed.failure.policy == "keep":
                    self._require_savable(handler)
                raise failed from error
            self._require_savable(handler)
            if not waits:
                return True, NOTHING
            return True, self.encoded(
                handler, arguments, partial(encode_raised, declared, error, self.context.sites.rules)
            )
        self._require_savable(handler)
        if not waits:
            return False, NOTHING
        return False, self.encoded(handler, arguments, partial(self.result, handler, value))

    def _require_savable(self, handler: Handler[Any, Any]) -> None:
        """Raises HandlerError."""
        if self.check is not None and not handler.is_query and (problem := self.check()) is not None:
            raise self.unsavable(handler, problem, max(self.context.message_index, 0))

    def unsavable(self, handler: Handler[Any, Any] | None, problem: StateError, message_index: int) -> HandlerError:
        """``handler`` (None: one that is not known) has left a state that can't be saved: its call is undone."""
        context, definition = self.context, self.definition
        policy = "undo" if handler is None else definition.policy(handler)
        name = "a message" if handler is None else handler.function.__qualname__
        made = HandlerError(
            f"{name} has left a state that can't be saved, at record {context.sequence_id}, message {message_index}; "
            f"the app stops\n  {problem}",
            context.sequence_id,
            message_index,
        )
        if policy != "stop":
            made.failure = failure_of("undo", name, None if handler is None else handler.method_id, problem)
        made.__cause__ = problem
        return made

    def result(self, handler: Handler[Any, Any], value: Any) -> bytes:
        """What goes to who waits: checked here, so that what does not fit is this handler's failure, not theirs."""
        codec = self.definition.codec(handler)
        data = codec.encode_result(value) if self.context.keeps_types else encoder.encode(value)
        if value is not None or not codec.returns_nothing:
            codec.decode_result(data)
        return data

    def encoded(self, handler: Handler[Any, Any], arguments: tuple[Any, ...], encode: Callable[[], bytes]) -> bytes:
        """What ``handler`` returned or raised, by ``encode``. Raises HandlerError where it can't be sent."""
        try:
            return encode()
        except BaseException as error:
            if not is_failure(error):
                raise
            name = handler.function.__qualname__
            problem = TypeError(f"what {name} returned or raised can't be sent to whoever waits for it: {error}")
            raise self.failed(handler, arguments, problem) from error

    def failed(
        self, handler: Handler[Any, Any], arguments: tuple[Any, ...], error: BaseException, task: int = 0
    ) -> HandlerError:
        """It raised ``error``, or did what it can't. ``task``: its number, of one that waits."""
        context, definition = self.context, self.definition
        name = handler.function.__qualname__
        made = handler_failed(name, arguments, error, context.sequence_id, max(context.message_index, 0))
        if (policy := definition.policy(handler)) != "stop":
            shares_trace = definition.share_tracebacks
            made.failure = failure_of(policy, name, handler.method_id, error, task, shares_trace=shares_trace)
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
        verdict = self.verdicts.get(key)
        if verdict is None or not verdict.skips:
            try:
                return handed_down().run(self.run_handler, handler, arguments)
            except HandlerError as error:
                if error.failure is None:
                    raise
                error.failure = failure = replace(error.failure, task=task, step=step)
                verdict = verdict_on(error, failure, None, b"")
                if failure.policy != "keep" or not self.tell(verdict):
                    raise
        where = reference(context.instance_name, verdict.sequence_id, verdict.message_index)
        return True, encode_failed(verdict.type_name, verdict.text, where)
