"""A run that is looked at: it says which logged message made each call, and which one its handler failed at.

Nothing of it is in the way of an ordinary run, which has neither this outbox nor these extensions.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from appsdk.context import Context
from appsdk.dispatch import Dispatcher
from appsdk.errors import HandlerError
from appsdk.outbox import Batch, Outbox, Send
from appsdk.transport import Transport
from protocol.extensions import (
    ALL_EXTENSIONS,
    TRACE_EXTENSIONS,
    HandlerFailure,
    Origin,
    encode_handler_failed,
    encode_origins,
)
from protocol.messages import MessageType, RpcKind

EXTENSIONS = ALL_EXTENSIONS | TRACE_EXTENSIONS
LAST_WORDS_TIMEOUT_S = 60.0  # behind all output so far, which the coordinator may be comparing meanwhile


class TracingOutbox(Outbox):
    """Each batch of calls has the logged messages that made them in front of it."""

    def __init__(self, context: Context, wake: Callable[[], None] = lambda: None) -> None:
        super().__init__(context, wake)
        self._runs: dict[str, list[Origin]] = {}  # of what is in the open batch, by destination

    def make_fork(
        self, destination: str, name: str, method_id: int, signature: inspect.Signature
    ) -> Callable[..., None]:
        return self._traced(destination, super().make_fork(destination, name, method_id, signature))

    def make_sender(self, destination: str, name: str, method_id: int, kind: RpcKind) -> Send:
        return self._traced(destination, super().make_sender(destination, name, method_id, kind))

    def _traced(self, destination: str, send: Callable[..., None]) -> Callable[..., None]:
        context, runs = self._context, self._runs.setdefault(destination, [])

        def traced(*arguments: Any, **keywords: Any) -> None:
            # Noted before the call, which may close the batch; taken back when there is no call after all.
            before = runs[-1] if runs else None
            if before and (before.sequence_id, before.message_index) == (context.sequence_id, context.message_index):
                runs[-1] = Origin(before.sequence_id, before.message_index, before.count + 1)
                undo = [before]
            else:
                runs.append(Origin(context.sequence_id, context.message_index, 1))
                undo = []
            try:
                send(*arguments, **keywords)
            except BaseException:
                runs[-1:] = undo
                raise

        return traced

    def back_to_copy(self) -> None:
        super().back_to_copy()
        for runs in self._runs.values():
            runs.clear()

    def _drop_repeated(self, batch: Batch, count: int) -> None:
        super()._drop_repeated(batch, count)
        runs = self._runs[batch.destination]
        while count:
            first = runs[0]
            if first.count > count:
                runs[0] = Origin(first.sequence_id, first.message_index, first.count - count)
                return
            count -= first.count
            del runs[0]

    def _append(self, message_type: MessageType, batch: Batch) -> None:
        self._attach(batch.destination)
        if message_type == MessageType.STREAM_BATCH:
            runs = self._runs[batch.destination]
            self.send(encode_origins(runs))
            runs.clear()
        super()._append(message_type, batch)


def report_failure(error: HandlerError, dispatcher: Dispatcher, transport: Transport) -> None:
    """Tell the coordinator where the app stops, behind all that it had sent until then. Raises nothing."""
    dispatcher.outbox.close_batches()
    dispatcher.outbox.send(encode_handler_failed(HandlerFailure(error.sequence_id, error.message_index, str(error))))
    transport.say_last_words(LAST_WORDS_TIMEOUT_S)
