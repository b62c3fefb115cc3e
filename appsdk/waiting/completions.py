"""Ends of waits and of handlers: replies that arrive, answers to callers, orders of operators."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
from msgspec.structs import astuple

from immortal.appsdk.calls.codec import encoder
from immortal.appsdk.calls.context import Context
from immortal.appsdk.calls.failures import (
    CANCELLED,
    describe_failure,
    encode_failed,
    forked,
    reference,
    refused,
    text_of,
    verdict_on,
)
from immortal.appsdk.errors import HandlerError, UsageError
from immortal.appsdk.handlers.decorators import Handler
from immortal.appsdk.ordering.messages import Scope
from immortal.appsdk.state.journal import declared_name, describe_operation, encode_raised
from immortal.appsdk.types.handles import MARK
from immortal.appsdk.waiting.host import Answers, HandlerRuns, Host
from immortal.appsdk.waiting.operations import NOTHING, Event, MulticastCall
from immortal.appsdk.waiting.task import Task
from immortal.protocol import decoding
from immortal.protocol.client_frames import Caller
from immortal.protocol.messages import RpcKind
from immortal.protocol.system_methods import Order
from immortal.protocol.verdicts import Cause, Verdict


class Endings:
    """Ends handlers of one instance. All methods raise the HandlerError of a handler that can't fail alone."""

    def __init__(self, context: Context, answers: Answers, handler_runs: HandlerRuns) -> None:
        self._context = context
        self._answers = answers
        self._handler_runs = handler_runs

    def finish(self, task: Task) -> None:
        """Answer the caller of a handler that has ended."""
        value, error = task.result()
        task.close_leftovers()
        if (reason := task.cancelled_with) is not None:  # an operator or caller wanted it: no failure, no dead letter
            self.note(task.number, "cancelled", reason, task)
            self.answer_cancelled(task.handler, task.caller, task.call_number, reason)
            return
        declared = None if error is None else declared_name(task.handler.raises, error)
        if error is not None and declared is None:
            self._failed(task, task.failure(error))
            return
        arguments = task.decoded_arguments()
        if error is not None:
            self._handler_runs.declared(task.handler, arguments, task.caller, error)
        state, shown = ("ended", None) if error is None else ("failed", f"{type(error).__name__}: {text_of(error)}")
        if task.caller is None:
            self.note(task.number, state, shown, task)
            return
        if error is not None and declared is not None:
            encode = partial(encode_raised, declared, error)
        else:
            encode = partial(self._handler_runs.result, task.handler, value)
        try:
            encoded = self._handler_runs.encoded(task.handler, arguments, encode)
            self._answers.answer(task.handler, task.caller, task.call_number, error is not None, encoded)
            self.note(task.number, state, encoded if error is None else shown, task)
        except HandlerError as problem:
            self._failed(task, problem)
        except UsageError as problem:  # it contains a handle that can't be passed on
            self._failed(task, task.failure(problem))

    def answer_cancelled(self, handler: Handler[Any, Any], caller: str | None, call_number: int, reason: str) -> None:
        """Answer the caller of a cancelled call, even if the call had not begun."""
        if caller is not None:
            context = self._context
            where = reference(context.instance_name, context.sequence_id, context.message_index)
            self._answers.answer(handler, caller, call_number, True, encode_failed(CANCELLED, reason, where))

    def _failed(self, task: Task, error: HandlerError) -> None:
        """Answer the caller of a failed async handler. It changed no state by itself, so nothing must be undone."""
        failure = error.failure
        if failure is None:
            raise error
        failed = replace(failure, policy="keep", task=task.number)
        verdict = verdict_on(error, failed, task.caller, forked(task.handler.method_id, task.arguments))
        verdict = self._handler_runs.verdicts.get(verdict.key, verdict)
        if not self._handler_runs.report_failure(verdict, error):
            raise error
        self.note(task.number, "failed", describe_failure(verdict), task)
        if task.caller is not None:
            self._answers.answer_verdict(verdict, Caller(task.caller, task.call_number, task.handler.method_id))

    def note(self, number: int, state: str, result: bytes | str | None, task: Task | None = None) -> None:
        """Note in the list of executions how the execution ``number`` has ended."""
        if (executions := self._context.tasks.executions) is not None:
            entries = () if task is None else task.entries
            place = self._context.sequence_id, self._context.message_index
            executions.note_end(number, state, result, entries, self._context.record_time_ns, place)


# Input for calls that wait: their answers, or the message that the called member of a group was expelled.


WHAT = "an answer"


class _ReturnedValue(msgspec.Struct, array_like=True, gc=False):
    number: int  # of the call
    value: msgspec.Raw


class _ReturnedNothing(msgspec.Struct, array_like=True, gc=False):
    number: int


_decode_raised = decoding.Decoder(list[msgspec.Raw]).decode
_RETURNED_VALUE, _RETURNED_NOTHING, _RAISED = RpcKind.RETURNED_VALUE, RpcKind.RETURNED_NOTHING, RpcKind.RAISED
# ... aliases, which are found faster than an enum's attributes
_decode_value = decoding.Decoder(_ReturnedValue).decode
_decode_nothing = decoding.Decoder(_ReturnedNothing).decode


class Incoming:
    """Gives results to the waits of one instance.

    ``failed``: encoded error that replaces each result; None: results are not replaced.
    """

    def __init__(self, tasks: Host) -> None:
        self.failed: bytes | None = None
        self._tasks = tasks
        self._calls = tasks.calls
        self._context = tasks.context

    @contextmanager
    def failing(self, verdict: Verdict) -> Iterator[None]:
        """Inside this context, turn each result that arrives into a failure with the text of ``verdict``."""
        where = reference(self._context.instance_name, verdict.sequence_id, verdict.message_index)
        self.failed = encode_failed(verdict.type_name or verdict.kind.name.capitalize(), verdict.text, where)
        try:
            yield
        finally:
            self.failed = None

    def receive_answer(self, kind: RpcKind, data: bytes) -> None:
        """Give an answer to its wait; ignore it if nobody waits for it any more. Raises HandlerError."""
        context = self._context
        try:
            if kind is _RETURNED_VALUE:
                returned = _decode_value(data)
                number, value = returned.number, bytes(returned.value)
            elif kind is _RETURNED_NOTHING:
                number, value = _decode_nothing(data).number, NOTHING
            else:
                number_raw, *rest = _decode_raised(data)
                number, value = decoding.decode(number_raw, type=int), encoder.encode(rest)
        except (ValueError, IndexError) as error:
            raise refused(context, WHAT, Cause.UNUSABLE, f"an answer that can't be read: {error}") from None
        if (call := self._calls.get(number)) is not None:
            if context.source and not call.is_addressed_to(context.source):  # the instance itself is trusted
                if self.failed is None:
                    text = f"an answer of {context.source!r} to call {number}, which went to somebody else"
                    raise refused(context, WHAT, Cause.SENDER, text)
                return
            if MARK in data and (kind is _RAISED or call.result_may_hold_handles) and self.failed is None:
                context.nodes.accounts.count_incoming(data)
            self._tasks.resolve(call, kind is _RAISED, value)
            self._tasks.drain()
        elif (relay := getattr(self._tasks.instance, "_immortal_relay", None)) is not None and relay(
            number, kind is _RAISED, value
        ):
            return
        elif MARK in data and self.failed is None:
            context.nodes.accounts.return_copies(data)

    def answer_expelled(self, scope: Scope, member: str, source: str, value: bytes) -> None:
        """Answer calls of multicasts in place of the expelled ``member``, as another member, ``source``, reports.

        Callers that wait for ``member`` get ``value``; its earlier answers come before this. A multicast that
        ``source`` has not answered was cancelled: all of its answers are ``value``."""
        done: set[int] = set()
        for call in list(self._calls.values()):
            if not isinstance(call, MulticastCall) or call.scope is None or not call.scope.reaches(*astuple(scope)):
                continue
            of = {one.to: one for one in call.multicast}
            if member not in of or call.number in done:
                continue
            is_cancelled = source not in of or of[source].number in self._calls
            ended = of.values() if is_cancelled else [of[member]]
            for one in ended:
                if self._calls.get(one.number) is one:
                    done.add(one.number)
                    self._tasks.defer(partial(self._tasks.resolve, one, False, value))

    def receiver_of_call(self, number: int) -> str | None:
        """Return the destination of the open call ``number``; None: there is none."""
        call = self._calls.get(number)
        return None if call is None else call.target.destination


# Orders of an operator: to cancel a waiting handler, to signal an event to it, to expel a member of a group.
#
# An order comes through the log, so each replay obeys it at the same place. Its outcome is kept for the operator.


OUTCOMES_MAX = 1000  # kept outcomes: they are asked for as soon as the order is durable


class Orders:
    """Carries out orders of operators. Outcomes are plain values; ``done``: True if the order was carried out."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._outcomes: dict[tuple[int, int], dict[str, Any]] = {}

    def outcome(self, sequence_id: int, message_index: int) -> dict[str, Any]:
        unknown = {"done": None, "text": "what it has come to is not known any more: see which handlers wait now"}
        return self._outcomes.get((sequence_id, message_index), unknown)

    def execute(self, order: Order) -> None:
        """Carry out an order. Raises HandlerError."""
        context = self._context
        key = context.sequence_id, context.message_index
        done, text = self._execute(order)
        self._outcomes[key] = {"done": done, "text": text}
        if len(self._outcomes) > OUTCOMES_MAX:
            del self._outcomes[next(iter(self._outcomes))]

    def _execute(self, order: Order) -> tuple[bool, str]:
        tasks = self._context.tasks
        if order.verb == "expel":
            return self._expel(str(decoding.decode(order.value)), order.text)
        if order.verb == "restart":
            return tasks.restart(order)  # type: ignore[no-any-return]
        task: Task | None = tasks.waiting(order.task)
        ends = order.verb in ("cancel", "terminate")
        if task is None and ends and (name := tasks.cancel_queued(order.task, order.text)) is not None:
            return True, f"{name} was cancelled before its turn"
        if task is None:
            return False, f"no handler {order.task} waits: it has ended, or there never was one"
        if order.verb == "cancel":
            tasks.cancel(task, order.text, order.who)
            return True, f"{task.name} was cancelled, and {_describe_wait(task)}"
        if order.verb == "terminate":
            tasks.terminate(task, order.text, order.who)
            return True, f"{task.name} was terminated"
        if order.verb == "signal":
            return self._signal(task, order)
        return False, f"{order.verb!r} is no order that this app knows: its SDK is older than the coordinator"

    def _expel(self, group: str, member: str) -> tuple[bool, str]:
        tasks = self._context.tasks
        expel: Callable[[str, str], tuple[bool, str]] | None = getattr(tasks.instance, "_immortal_expel", None)
        return (False, f"{tasks.definition.name} takes part in no groups") if expel is None else expel(group, member)

    def _signal(self, task: Task, order: Order) -> tuple[bool, str]:
        """Signal an event to this handler alone, even if others wait for it."""
        events = [one for one in task.pending.values() if isinstance(one, Event)]
        event = next((one for one in events if one.name == order.text), None)
        if event is None:
            names = ", ".join(repr(one.name) for one in events) or "none"
            return False, f"{task.name} does not wait for the event {order.text!r} (its events: {names})"
        value = bytes(order.value)
        try:
            event.decode(value)
        except decoding.DecodeError as error:
            return False, f"the value is not what {task.name} waits for: {error}"
        self._context.tasks.resolve(event, False, value)
        return True, f"{task.name} has the event {order.text!r}, and {_describe_wait(task)}"


def _describe_wait(task: Task) -> str:
    if task.is_done:
        return "has ended"
    return f"waits for {', '.join(map(describe_operation, task.pending.values()))}"
