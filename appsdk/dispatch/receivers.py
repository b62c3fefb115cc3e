"""What handles the messages of one handler, by who waits for it: called with the instance and the arguments."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from immortal.appsdk.handlers.decorators import Handler
from immortal.appsdk.waiting.tasks import Tasks


def receiver(tasks: Tasks, handler: Handler[Any, Any], *, wakes: bool) -> Callable[..., None]:
    """What handles a fork or impulse of ``handler``. ``wakes``: there may be handlers that wait for its signals.

    Without, and with nothing special about it, it is the ``def`` handler itself.
    """
    if handler.is_async:
        return lambda instance, *arguments: tasks.start(handler, arguments, None, 0)
    if handler.raises:

        def run(instance: object, *arguments: Any) -> None:
            tasks.handler_runs.run_handler(handler, arguments, waits=False)
            tasks.drain()

        return run
    function: Callable[..., None] = partial(tasks.queries.run, handler) if handler.is_query else handler.function
    return waking(tasks, function) if wakes else function


def waking(tasks: Tasks, function: Callable[..., None]) -> Callable[..., None]:
    """``function``, and then whoever waited for what it has signalled."""

    def run(instance: object, *arguments: Any) -> None:
        function(instance, *arguments)
        tasks.drain()

    return run


def answering_receiver(tasks: Tasks, handler: Handler[Any, Any]) -> Callable[..., None]:
    """What handles a call of ``handler`` whose caller waits: (instance, caller, number of the call, arguments)."""
    if handler.is_async:
        return lambda instance, caller, number, *arguments: tasks.start(handler, arguments, caller, number)

    def run(instance: object, caller: str, number: int, *arguments: Any) -> None:
        tasks.answers.answer(handler, caller, number, *tasks.handler_runs.run_handler(handler, arguments))
        tasks.drain()

    return run
