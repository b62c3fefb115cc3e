"""How an ``async def`` handler has ended, for whoever waits for its answer."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from immortal.appsdk.calls.context import Context
from immortal.appsdk.calls.failures import CANCELLED, encode_failed, forked, reference, verdict_on
from immortal.appsdk.errors import Cancelled, HandlerError, UsageError
from immortal.appsdk.handlers.decorators import Handler
from immortal.appsdk.state.journal import declared_name, encode_raised
from immortal.appsdk.waiting.answers import Answers
from immortal.appsdk.waiting.handler_runs import HandlerRuns
from immortal.appsdk.waiting.task import Task
from immortal.protocol.client import Caller


class Endings:
    """Those of one instance's handlers. All raise the HandlerError of a handler that does not fail alone."""

    def __init__(self, context: Context, answers: Answers, handler_runs: HandlerRuns) -> None:
        self._context = context
        self._answers = answers
        self._handler_runs = handler_runs

    def tell(self, task: Task) -> None:
        """It is done."""
        value, error = task.result()
        if isinstance(error, Cancelled):  # as it was told to: no failure of its own, and no dead letter
            task.drop_pending()
            self.tell_cancelled(task.handler, task.caller, task.call_number, error.reason)
            return
        declared = None if error is None else declared_name(task.handler.raises, error)
        if error is not None and declared is None:
            self._failed(task, task.failure(error))
            return
        if task.caller is None:
            return
        arguments = task.decoded_arguments()
        if error is not None and declared is not None:
            encode = partial(encode_raised, declared, error, self._context.sites.rules)
        else:
            encode = partial(self._handler_runs.result, task.handler, value)
        try:
            encoded = self._handler_runs.encoded(task.handler, arguments, encode)
            self._answers.answer(task.handler, task.caller, task.call_number, error is not None, encoded)
        except HandlerError as problem:
            self._failed(task, problem)
        except UsageError as problem:  # it has a handle that can't be passed on
            self._failed(task, task.failure(problem))

    def tell_cancelled(self, handler: Handler[Any, Any], caller: str | None, call_number: int, reason: str) -> None:
        """Of a call that was cancelled, also before it began."""
        if caller is not None:
            context = self._context
            where = reference(context.instance_name, context.sequence_id, context.message_index)
            self._answers.answer(handler, caller, call_number, True, encode_failed(CANCELLED, reason, where))

    def _failed(self, task: Task, error: HandlerError) -> None:
        """An async handler has changed no state by itself, so there is nothing to undo: who waits is told."""
        failure = error.failure
        if failure is None:
            raise error
        task.drop_pending()
        failed = replace(failure, policy="keep", task=task.number)
        verdict = verdict_on(error, failed, task.caller, forked(task.handler.method_id, task.arguments))
        verdict = self._handler_runs.verdicts.get(verdict.key, verdict)
        if not self._handler_runs.tell(verdict):
            raise error
        if task.caller is not None:
            self._answers.answer_verdict(verdict, Caller(task.caller, task.call_number, task.handler.method_id))
