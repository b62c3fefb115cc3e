"""Traced runs, which report the message that made each call, and match the operations of two runs over one log.

A traced run also reports the numbers that it draws for the waits of its handlers, or takes those of another run.
Ordinary runs pay nothing for it: they have neither this outbox nor these extensions.
"""

from __future__ import annotations

import inspect
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, count, starmap
from typing import Any, TypeVar

from msgspec import Struct, field

from immortal.appsdk.calls.context import Context
from immortal.appsdk.calls.outbox import Batch, Chunk, Outbox, Send
from immortal.appsdk.dispatch.dispatcher import Dispatcher
from immortal.appsdk.dispatch.events import Event
from immortal.appsdk.errors import HandlerError
from immortal.appsdk.handlers.definition import Definition
from immortal.appsdk.running.transport import Transport
from immortal.appsdk.state.journal import Described, SavedTasks
from immortal.appsdk.waiting.operations import Call, Operation
from immortal.appsdk.waiting.task import Task
from immortal.appsdk.waiting.tasks import Tasks
from immortal.protocol.extensions import (
    ALL_EXTENSIONS,
    DRAWS_MAX,
    TRACE_EXTENSIONS,
    HandlerFailure,
    Origin,
    RandomDraw,
    decode_numbers,
    encode_handler_failed,
    encode_numbers,
    encode_origins,
)
from immortal.protocol.messages import MessageType, RpcKind, RpcType, decode_messages
from immortal.protocol.readers import Record

EXTENSIONS = ALL_EXTENSIONS | TRACE_EXTENSIONS
LAST_OUTPUT_TIMEOUT_S = 60.0  # for all output so far, which the coordinator can still be comparing


class TracingOutbox(Outbox):
    """Outbox that sends, before each batch of calls, the logged messages that made them."""

    def __init__(self, context: Context, wake: Callable[[], None] = lambda: None) -> None:
        super().__init__(context, wake)
        self._runs: dict[str, list[list[int]]] = {}  # fields of Origins of the open batch's calls, by destination
        self.made: Counter[str] = Counter()  # messages that code has made so far, by destination

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
        context, runs, made = self._context, self._runs.setdefault(destination, []), self.made

        def traced(*arguments: Any, **keywords: Any) -> None:
            # Noted before the call, which can close the batch; taken back if the call fails.
            run = runs[-1] if runs else None
            if run is None or run[1] != context.message_index or run[0] != context.sequence_id:
                runs.append(run := [context.sequence_id, context.message_index, 0])
            run[2] += 1
            try:
                send(*arguments, **keywords)
            except BaseException:
                run[2] -= 1
                runs[:] = [each for each in runs if each[2]]
                raise
            made[destination] += 1

        return traced

    def rewind_to_copy(self) -> None:
        super().rewind_to_copy()
        for runs in self._runs.values():
            runs.clear()

    def _hold_back(self, batch: Batch) -> None:
        self._drop_origins(batch.destination, batch.count)
        super()._hold_back(batch)

    def _note_pushed(self, batch: Batch) -> None:
        context, runs = self._context, self._runs.setdefault(batch.destination, [])
        runs.append([context.sequence_id, context.message_index, batch.count])

    def _drop_repeated(self, batch: Batch, count: int) -> None:
        super()._drop_repeated(batch, count)
        self._drop_origins(batch.destination, count)

    def _drop_origins(self, destination: str, count: int) -> None:
        runs = self._runs[destination]
        while count:
            if runs[0][2] > count:
                runs[0][2] -= count
                return
            count -= runs.pop(0)[2]

    def _append(self, message_type: MessageType, batch: Batch) -> None:
        self._attach(batch.destination)
        if message_type == MessageType.STREAM_BATCH:
            runs = self._runs[batch.destination]
            self.send(encode_origins(list(starmap(Origin, runs))))
            runs.clear()
        super()._append(message_type, batch)


class TracingDispatcher(Dispatcher):
    """Dispatcher of one connection, for an app that is inspected."""

    tasks: RenumberedTasks

    def __init__(
        self,
        definition: Definition,
        draw_seed: Callable[[], bytes],
        wake: Callable[[], None] = lambda: None,
        **how: Any,
    ) -> None:
        tracing: dict[str, Any] = {"make_outbox": TracingOutbox, "make_tasks": RenumberedTasks}
        super().__init__(definition, draw_seed, wake, extensions=EXTENSIONS, **tracing, **how)
        self._rewinds.copies.keeps_all = True  # it is not restarted
        self.reports_numbers = True
        """False: the caller takes them from ``tasks.drawn``."""
        self._ended_sequence_id = -1  # the last record that was handled completely
        self._reported_sequence_id = -1

    def _control(self, record: Record) -> Iterator[Event]:
        self._report_progress()  # before a checkpoint, which can be its last output
        for message_type, start, end in decode_messages(record.content):
            if message_type == MessageType.NUMBERS:  # it comes alone
                self.tasks.receive_draws(decode_numbers(record.content[start:end]).draws)
                return
        yield from super()._control(record)

    def _logged(self, record: Record) -> Iterator[Event]:
        yield from super()._logged(record)
        self.tasks.end_record()
        self._ended_sequence_id = sequence_id = record.header.sequence_id
        if not self.reports_numbers:
            return
        drawn, self.tasks.drawn = self.tasks.drawn, []
        for start in range(0, len(drawn), DRAWS_MAX):
            self.outbox.send(encode_numbers(sequence_id, drawn[start : start + DRAWS_MAX]))

    def expect(self, sequence_id: int) -> None:
        """Expect a record of that number next, in a run that gets records of more than one log."""
        self._life.next_sequence_id = sequence_id

    def data_to_send(self) -> list[Chunk]:
        self._report_progress()
        return super().data_to_send()

    def _report_progress(self) -> None:
        """Report that this run draws no more numbers for the records so far."""
        if self.reports_numbers and self.tasks.matcher is None and self._reported_sequence_id < self._ended_sequence_id:
            self._reported_sequence_id = self._ended_sequence_id
            self.outbox.send(encode_numbers(self._ended_sequence_id))

    def report_failure(self, error: HandlerError) -> None:
        """Report where the app stops, after all its output."""
        self._report_progress()
        self.outbox.close_batches()
        self.outbox.send(encode_handler_failed(HandlerFailure(error.sequence_id, error.message_index, str(error))))


def report_failure(error: HandlerError, dispatcher: TracingDispatcher, transport: Transport) -> None:
    """Tell the coordinator of the failure before the connection is closed. Never raises."""
    dispatcher.report_failure(error)
    transport.send_last_output(LAST_OUTPUT_TIMEOUT_S)


# Two runs over one log: operations that the second run repeats have the numbers of the first.
#
# Each ``async def`` handler, and each of its waits, has a number, drawn in turn: answers and results of effects come
# with it, and random numbers follow from it. So code that omits a single call would shift all later numbers. In a
# what-if the old code therefore reports its numbers and their operations, and the new code gets them before each
# record. An operation that it repeats gets the same number: the same handler instance, callee, method and arguments;
# the first matches the first, the second the second. An operation without a counterpart has a number that no log has:
# negative, or very large.
#
# The two can do it at different records. Input for an operation that the new code has not begun yet is kept for it, as
# long as the handler runs. If the new code is first, it gets the number once that is known.


OperationKey = tuple[str, int]
T = TypeVar("T")


class RenumberedTasks(Tasks):
    """Tasks of a run that reports its numbers in ``drawn``, or that takes the numbers of another run."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.drawn: list[RandomDraw] = []
        self.matcher: RunMatcher | None = None
        self._since_copy: list[_Drawn] = []
        self._redrawn: deque[_Drawn] = deque()

    def draw_number(self, operation: Operation | None = None) -> int:
        if self._redrawn:
            drawn = self._redrawn.popleft()
        else:
            drawn = self._draw(operation)
            self._since_copy.append(drawn)
        self._next_number = max(self._next_number, abs(drawn.number) + 1)
        if operation is not None and drawn.outcome is not None:  # the result is there already
            self.defer(partial(self.resolve, operation, *drawn.outcome))
        return drawn.number

    def _draw(self, operation: Operation | None) -> _Drawn:
        if self.matcher is not None:
            return self.matcher.drawn_for(operation)
        number = super().draw_number()
        if operation is None:
            self.drawn.append(RandomDraw(number, 0, "", self.context.message_index))
        else:
            self.drawn.append(RandomDraw(number, operation.task.number, *_operation_key(operation)))
        return _Drawn(number)

    def note_copy(self) -> None:
        self._since_copy.clear()

    def note_rewind(self) -> None:
        self._redrawn = deque(self._since_copy)  # it draws the same again

    def note_renumbered(self, own: int, number: int) -> None:
        for drawn in self._since_copy:
            if drawn.number == own:
                drawn.number = number

    def receive_draws(self, draws: Sequence[RandomDraw]) -> None:
        """Take the numbers that the other run drew in the next record."""
        if self.matcher is None:
            self.matcher = RunMatcher(self)
        self.matcher.receive_draws(draws)

    def end_record(self) -> None:
        self._redrawn.clear()
        if self.matcher is not None:
            self.matcher.end_record()

    def is_running(self, number: int) -> bool:
        return number in self._tasks

    def restore(self, saved: SavedTasks) -> None:
        super().restore(saved)
        if self.matcher is not None:
            self.matcher.restored()

    def _end(self, task: Task) -> None:
        if self.matcher is not None:
            self.matcher.forget(task.number)
        super()._end(task)

    def resolve(self, operation: Any, raised: bool, value: bytes) -> None:
        if isinstance(operation, MatchedOperation):
            operation.outcome = (raised, value)
        else:
            super().resolve(operation, raised, value)


class _Drawn(Struct):
    """Number drawn by the other run. ``outcome``: its early result, (True if it raised, value)."""

    number: int
    outcome: tuple[bool, bytes] | None = None


def _operation_key(operation: Operation) -> OperationKey:
    """Describe an operation like a journal, but a call by its method ID: the code can have renamed the method."""
    if isinstance(operation, Call):
        return f"call {operation.target.handler.method_id} of {operation.target.destination}", operation.detail
    return operation.what, operation.detail


class MatchedOperation:
    """Operation that the old code waits for and the new code not yet. It stands in for an Operation."""

    __slots__ = ("number", "outcome", "what")

    result_may_hold_handles = True

    def __init__(self, number: int, what: str) -> None:
        self.number = number
        self.what = what
        self.outcome: tuple[bool, bytes] | None = None

    def is_addressed_to(self, name: str) -> bool:
        return self.what.endswith(f" of {name}")

    def fits(self, saved: Described) -> bool:
        """Return True: the old code has asked for this result."""
        return True


class _Handler(Struct):
    """Handler that both codes run. ``unmatched_old``: operations of only the old code so far; ``unmatched_new``:
    numbers of those of only the new code."""

    unmatched_old: dict[OperationKey, deque[MatchedOperation]] = field(default_factory=dict)
    unmatched_new: dict[OperationKey, deque[int]] = field(default_factory=dict)


def _pop_first(waiting: dict[OperationKey, deque[T]], key: OperationKey) -> T | None:
    """Remove and return the first item that waits under ``key``."""
    if (found := waiting.get(key)) is None:
        return None
    first = found.popleft()
    if not found:
        del waiting[key]
    return first


class RunMatcher:
    """Matches the operations of the other run with those of ``tasks``."""

    def __init__(self, tasks: RenumberedTasks) -> None:
        self._tasks = tasks
        self._starts: dict[int, int] = {}  # handlers that start in this record, by their message's index
        self._handlers: dict[int, _Handler] = {}
        self._own_numbers = count(-1, -1)

    # --- the other run ----------------------------------------------------------------------------------------------

    def receive_draws(self, draws: Sequence[RandomDraw]) -> None:
        for draw in draws:
            if not draw.task:
                self._starts[draw.detail] = draw.number
                self._handlers[draw.number] = _Handler()
            elif (handler := self._handler(draw.task)) is not None:
                key = (draw.what, draw.detail)
                if (own := _pop_first(handler.unmatched_new, key)) is not None:
                    self._renumber(own, draw.number)
                else:
                    counterpart = MatchedOperation(draw.number, draw.what)
                    handler.unmatched_old.setdefault(key, deque()).append(counterpart)
                    self._register(counterpart)

    def end_record(self) -> None:
        """Forget handlers of the record that only the other run started: they will never run here."""
        for number in self._starts.values():
            self.forget(number)
        self._starts.clear()

    def forget(self, number: int) -> None:
        """Forget a handler: it has ended here, or never begun."""
        handler = self._handlers.pop(number, None)
        if handler is not None:
            for counterpart in chain.from_iterable(handler.unmatched_old.values()):
                self._unregister(counterpart)

    def restored(self) -> None:
        """Register the counterparts again, after the waits were registered again."""
        for handler in self._handlers.values():
            for counterpart in chain.from_iterable(handler.unmatched_old.values()):
                self._register(counterpart)

    # --- this run ---------------------------------------------------------------------------------------------------

    def drawn_for(self, operation: Operation | None) -> _Drawn:
        """Return the number for an operation, or (None) for the handler that starts."""
        if operation is None:
            number = self._starts.pop(self._tasks.context.message_index, None)
            return self._draw_own() if number is None else _Drawn(number)
        handler = self._handler(operation.task.number)
        if handler is None:
            return self._draw_own()
        key = _operation_key(operation)
        counterpart = _pop_first(handler.unmatched_old, key)
        if counterpart is None:
            own = self._draw_own()
            handler.unmatched_new.setdefault(key, deque()).append(own.number)
            return own
        self._unregister(counterpart)
        return _Drawn(counterpart.number, counterpart.outcome)

    def number_own_from(self, first: int) -> None:
        """Set the first number of calls without a counterpart: others can only answer numbers of 0 or more."""
        self._own_numbers = count(first)

    def _draw_own(self) -> _Drawn:
        return _Drawn(next(self._own_numbers))

    def _handler(self, number: int) -> _Handler | None:
        """Return a handler by number; None if it does not run here, or not there."""
        handler = self._handlers.get(number)
        if handler is None and number > 0 and self._tasks.is_running(number):  # it has waited since before the replay
            handler = self._handlers[number] = _Handler()
        return handler

    # --- receivers of input -----------------------------------------------------------------------------------------

    def _register(self, counterpart: Any) -> None:
        self._tasks.calls[counterpart.number] = counterpart
        self._tasks.effects.add(counterpart)

    def _unregister(self, counterpart: Any) -> None:
        self._tasks.calls.pop(counterpart.number, None)
        self._tasks.effects.remove(counterpart)

    def _renumber(self, own: int, number: int) -> None:
        """Register an operation under the other run's number. Timers and events need none."""
        operation = self._tasks.calls.get(own) or self._tasks.effects.waiting.get(own)
        if operation is not None:
            self._tasks.unregister(operation)
            operation.number = number
            self._tasks.register(operation)
            self._tasks.note_renumbered(own, number)
