"""What an operator orders: a handler that waits to be cancelled or to have an event, a member of a group to go.

An order comes in by the log, so each replay obeys it at the same place. What it has come to is kept for whoever asks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from immortal.appsdk.calls.context import Context
from immortal.appsdk.state.journal import described
from immortal.appsdk.waiting.operations import Event
from immortal.appsdk.waiting.task import Task
from immortal.protocol import decoding
from immortal.protocol.handlers import Order

OUTCOMES_MAX = 1000  # that are kept: they are asked for as soon as the order is durable


class Orders:
    """Those of one instance. Outcomes are plain values: ``done`` says whether the order was carried out."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._outcomes: dict[tuple[int, int], dict[str, Any]] = {}

    def outcome(self, sequence_id: int, message_index: int) -> dict[str, Any]:
        unknown = {"done": None, "text": "what it has come to is not known any more: see which handlers wait now"}
        return self._outcomes.get((sequence_id, message_index), unknown)

    def obey(self, order: Order) -> None:
        """Raises HandlerError."""
        context = self._context
        key = context.sequence_id, context.message_index
        done, text = self._obey(order)
        self._outcomes[key] = {"done": done, "text": text}
        if len(self._outcomes) > OUTCOMES_MAX:
            del self._outcomes[next(iter(self._outcomes))]

    def _obey(self, order: Order) -> tuple[bool, str]:
        tasks = self._context.tasks
        if order.verb == "expel":
            return self._expel(str(decoding.decode(order.value)), order.text)
        task: Task | None = tasks.waiting(order.task)
        if task is None and order.verb == "cancel" and (name := tasks.give_up(order.task, order.text)) is not None:
            return True, f"{name} was cancelled before its turn"
        if task is None:
            return False, f"no handler {order.task} waits: it has ended, or there never was one"
        if order.verb == "cancel":
            tasks.cancel(task, order.text, order.who)
            return True, f"{task.name} was cancelled, and {_what_it_does(task)}"
        if order.verb == "signal":
            return self._signal(task, order)
        return False, f"{order.verb!r} is no order that this app knows: its SDK is older than the coordinator"

    def _expel(self, group: str, member: str) -> tuple[bool, str]:
        tasks = self._context.tasks
        expel: Callable[[str, str], tuple[bool, str]] | None = getattr(tasks.instance, "_immortal_expel", None)
        return (False, f"{tasks.definition.name} takes part in no groups") if expel is None else expel(group, member)

    def _signal(self, task: Task, order: Order) -> tuple[bool, str]:
        """An event that this very handler waits for, whoever else does."""
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
        return True, f"{task.name} has the event {order.text!r}, and {_what_it_does(task)}"


def _what_it_does(task: Task) -> str:
    if task.is_done:
        return "has ended"
    return f"waits for {', '.join(map(described, task.pending.values()))}"
