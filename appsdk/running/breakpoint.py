"""``--break``: the debugger at one logged message, before the first line of its handler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from immortal.appsdk.calls.context import Context
from immortal.appsdk.calls.report import describe_arguments
from immortal.appsdk.calls.run_failures import PassesThrough
from immortal.appsdk.dispatch.delivery import Delivery, Entry
from immortal.appsdk.handlers.definition import Definition
from immortal.protocol.shown import printable


class _Left(KeyboardInterrupt, PassesThrough):
    """Somebody has left the debugger: the app ends as at Ctrl-C."""


class Breakpoint:
    """The message to stop at: ``message_index`` (from 0) of the record ``sequence_id``."""

    def __init__(self, sequence_id: int, message_index: int = 0) -> None:
        self.sequence_id = sequence_id
        self.message_index = message_index
        self.reached = False

    def __str__(self) -> str:
        return f"record {self.sequence_id}, message {self.message_index}"

    def make_delivery(self, definition: Definition, context: Context) -> Delivery:
        return _BreakingDelivery(definition, context, self)

    def debugged(self, function: Callable[..., Any], name: str) -> Callable[..., None]:
        """``function``, in the debugger: it stops at the first line. Leaving the debugger ends the app like Ctrl-C."""

        import pdb  # here: it loads much that no ordinary run needs

        class Debugger(pdb.Pdb):
            left = False

            def set_quit(self) -> None:
                self.left = True
                super().set_quit()

        def run(instance: object, *arguments: Any) -> None:
            self.reached = True
            print(printable(f"{self}: {name}{describe_arguments(arguments)}"), flush=True)  # noqa: T201
            debugger = Debugger(nosigint=True, skip=["immortal.*"])  # an async handler is called by the SDK
            debugger.runcall(function, instance, *arguments)
            if debugger.left:
                raise _Left

        return run


class _BreakingDelivery(Delivery):
    """Hands the one message to the debugger. In its record each message is looked up by itself, elsewhere as ever."""

    def __init__(self, definition: Definition, context: Context, stop: Breakpoint) -> None:
        super().__init__(definition, context)
        self._stop = stop

    def deliver(self, instance: Any, content: bytes, offset: int, end: int, slice_end: int) -> int:
        if self._context.sequence_id == self._stop.sequence_id:
            slice_end = offset + 1
            self._known.clear()
        return super().deliver(instance, content, offset, end, slice_end)

    def _look_up(self, content: bytes, offset: int, end: int, index: int) -> tuple[Entry, int, int]:
        entry, start, stride = super()._look_up(content, offset, end, index)
        if (self._context.sequence_id, index) == (self._stop.sequence_id, self._stop.message_index):
            decode, function, name = entry
            entry = (decode, self._stop.debugged(function, name), name)
        return entry, start, stride
