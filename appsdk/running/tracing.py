"""A run that is looked at: it says which logged message made each call, and which one its handler failed at.

It also tells the numbers that it draws for what its handlers wait for, and takes those of another run
(:mod:`immortal.appsdk.running.counterparts`).

Nothing of it is in the way of an ordinary run, which has neither this outbox nor these extensions.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from immortal.appsdk.calls.context import Context
from immortal.appsdk.calls.outbox import Batch, Chunk, Outbox, Send
from immortal.appsdk.dispatch.dispatcher import Dispatcher
from immortal.appsdk.dispatch.events import Event
from immortal.appsdk.errors import HandlerError
from immortal.appsdk.handlers.definition import Definition
from immortal.appsdk.running.counterparts import TracedTasks
from immortal.appsdk.running.transport import Transport
from immortal.protocol.extensions import (
    ALL_EXTENSIONS,
    TRACE_EXTENSIONS,
    HandlerFailure,
    Origin,
    encode_handler_failed,
    encode_origins,
)
from immortal.protocol.messages import MessageType, RpcKind, RpcType, decode_messages
from immortal.protocol.numbers import DRAWS_MAX, decode_numbers, encode_numbers
from immortal.protocol.readers import Record

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

    def make_sender(
        self,
        destination: str,
        name: str,
        method_id: int,
        kind: RpcKind,
        parameters: Iterable[str] = (),
        rpc_type: RpcType = RpcType.ASYNC,
    ) -> Send:
        send = super().make_sender(destination, name, method_id, kind, parameters, rpc_type)
        return self._traced(destination, send)

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

    def _hold(self, batch: Batch) -> None:
        self._drop_origins(batch.destination, batch.count)
        super()._hold(batch)

    def _note_pushed(self, batch: Batch) -> None:
        context, runs = self._context, self._runs.setdefault(batch.destination, [])
        runs.append(Origin(context.sequence_id, context.message_index, batch.count))

    def _drop_repeated(self, batch: Batch, count: int) -> None:
        super()._drop_repeated(batch, count)
        self._drop_origins(batch.destination, count)

    def _drop_origins(self, destination: str, count: int) -> None:
        runs = self._runs[destination]
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


class TracingDispatcher(Dispatcher):
    """One connection's life of an app that is looked at."""

    tasks: TracedTasks

    def __init__(
        self,
        definition: Definition,
        draw_seed: Callable[[], bytes],
        wake: Callable[[], None] = lambda: None,
        **how: Any,
    ) -> None:
        tracing: dict[str, Any] = {"make_outbox": TracingOutbox, "make_tasks": TracedTasks}
        super().__init__(definition, draw_seed, wake, extensions=EXTENSIONS, **tracing, **how)
        self._rewinds.copies.keeps_all = True  # nobody starts it again
        self._ended_sequence_id = -1  # the last record that was handled whole
        self._told_sequence_id = -1

    def _control(self, record: Record) -> Iterator[Event]:
        self._tell_progress()  # before a checkpoint, which may be the last that it says
        for message_type, start, end in decode_messages(record.content):
            if message_type == MessageType.NUMBERS:  # it comes alone
                self.tasks.told(decode_numbers(record.content[start:end]).draws)
                return
        yield from super()._control(record)

    def _logged(self, record: Record) -> Iterator[Event]:
        yield from super()._logged(record)
        self.tasks.record_ends()
        self._ended_sequence_id = sequence_id = record.header.sequence_id
        drawn, self.tasks.drawn = self.tasks.drawn, []
        for start in range(0, len(drawn), DRAWS_MAX):
            self.outbox.send(encode_numbers(sequence_id, drawn[start : start + DRAWS_MAX]))

    def data_to_send(self) -> list[Chunk]:
        self._tell_progress()
        return super().data_to_send()

    def _tell_progress(self) -> None:
        """Whoever is told what this run draws is to know that no more comes of the records so far."""
        if self.tasks.others is None and self._told_sequence_id < self._ended_sequence_id:
            self._told_sequence_id = self._ended_sequence_id
            self.outbox.send(encode_numbers(self._ended_sequence_id))

    def report_failure(self, error: HandlerError) -> None:
        """Say where the app stops, behind all that it has said until then."""
        self._tell_progress()
        self.outbox.close_batches()
        self.outbox.send(encode_handler_failed(HandlerFailure(error.sequence_id, error.message_index, str(error))))


def report_failure(error: HandlerError, dispatcher: TracingDispatcher, transport: Transport) -> None:
    """Tell the coordinator, before the connection is closed. Raises nothing."""
    dispatcher.report_failure(error)
    transport.say_last_words(LAST_WORDS_TIMEOUT_S)
