"""Handling of logged records: their messages go to handlers in slices, without those that have a verdict.

A message that fails alone gets its verdict here, and the next ones are handled. If the state before a failed message is
needed, the app rewinds to a copy of the state and handles the records since then again, without that message.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence

from msgspec import Raw
from msgspec.structs import replace

from immortal.appsdk.calls.codec import encoder
from immortal.appsdk.calls.context import Context
from immortal.appsdk.calls.failures import describe_failure, method_of, rpc_of, waiting_caller
from immortal.appsdk.dispatch.events import Event, Flush, HandlerTimeSamples, OutputReady
from immortal.appsdk.dispatch.lifecycle import Life
from immortal.appsdk.dispatch.verdicts import (
    Failures,
    RewindNeededError,
    find_rpcs,
    message_at,
    offset_after,
    without_result,
)
from immortal.appsdk.errors import HandlerError, RecoveryNeeded, StateError
from immortal.appsdk.ordering.messages import Plain
from immortal.appsdk.state.guard import Guard
from immortal.appsdk.state.snapshots import Copies, Copy
from immortal.protocol import decoding
from immortal.protocol.errors import RemoteProtocolError
from immortal.protocol.extensions import decode_record_time
from immortal.protocol.messages import MessageType, RpcKind, decode_messages
from immortal.protocol.readers import Record
from immortal.protocol.system_methods import OTHER_MESSAGES
from immortal.protocol.verdicts import Careful, Handling, Verdict, VerdictKind, encode_handling

SLICE_SIZE_BYTES = 64 << 10  # of input, handled before the transport can send: keeps both ends busy


class SingleStepNeededError(Exception):
    """Raised if a message of the handled record, from ``message_index`` on, left a state that can't be saved."""

    def __init__(self, message_index: int) -> None:
        super().__init__(f"message {message_index} or one behind it")
        self.message_index = message_index


class Records:
    """Handler of the log's records, one after the other.

    ``guard``: checks the state after messages; ``can_rewind``: returns True if there is a copy of the state.
    ``single_steps_from``: (record, message) from which on it checks after each message, to find the one that broke the
    state.

    ``careful``: an earlier app died at one of these records, so each is announced. ``times``: of handlers, sampled.
    """

    def __init__(self, context: Context, life: Life, failures: Failures) -> None:
        self.careful: Careful | None = None
        self.times = HandlerTimeSamples()
        self.guard = Guard()
        self.can_rewind: Callable[[], bool] = lambda: False
        self.single_steps_from: tuple[int, int] | None = None
        self._unchecked_from: int | None = None  # the first message since the guard's last check
        self._context = context
        self._life = life
        self._failures = failures
        self.probe: Callable[[int], None] | None = None  # called with each handled message of a record
        self._batch_sources: Iterator[str] | None = None  # sources of the batches of the record that is handled
        self._batch_start = b"", 0, 0  # content, offset and index of the first message of the batch that is handled

    @property
    def current_handling(self) -> Handling | None:
        """Message whose handler runs; None between two. For any thread: it can be over by then."""
        context = self._context
        content, start, first_index = self._batch_start
        sequence_id, index = context.sequence_id, context.message_index
        if not context.handling_thread_id or not self._failures.can_fail or index < first_index:
            return None
        if (task := context.tasks.running) is not None:
            return replace(self._failures.describe_task(sequence_id, index, task), message=b"")
        try:
            message = message_at(content, offset_after(content, start, index - first_index))
        except RemoteProtocolError:  # of a batch that began meanwhile
            return None
        return replace(self._failures.describe_message(sequence_id, index, message), message=b"")

    def announce(self, handling: Handling) -> Iterator[Event]:
        """Announce what is handled next, since it can end the process: the coordinator must know what it was."""
        self._context.outbox.report(encode_handling(handling))
        yield Flush()

    def handle(self, record: Record) -> Iterator[Event]:
        """Handle the messages of one record. Raises RewindNeededError."""
        sequence_id, content = record.header.sequence_id, record.content
        context = self._context
        if context.multicasts.waiting:  # as if each record came alone; a replay brings many at once
            context.outbox.close_batches()
        context.committer_id = record.header.committer_id
        context.sequence_id = sequence_id
        context.record_time_ns = None
        context.message_index = 0
        context.source = None if record.sources is None else ""
        self._batch_sources = iter(record.sources) if record.sources else None
        self._unchecked_from = None
        for message_type, start, end in decode_messages(content):
            if message_type == MessageType.RECORD_TIME:
                context.record_time_ns = decode_record_time(content, start, end)
            elif (packed := find_rpcs(content, message_type, start, end)) is not None:
                count, first = packed
                yield from self._batch(content, first, end, count)
            elif message_type == MessageType.INSTANCE_NAME:
                context.instance_name = content[start:end].decode("utf-8", "replace")
            else:
                raise RemoteProtocolError(
                    f"record {sequence_id} holds a message of type {message_type}, which is never logged"
                )
        self._check()
        self._life.next_sequence_id = sequence_id + 1

    def _check(self) -> None:
        """Check the state before output of the messages so far leaves. Raises SingleStepNeededError."""
        first, self._unchecked_from = self._unchecked_from, None
        if first is None or self.guard.check() is None:
            return
        if self.can_rewind():
            raise SingleStepNeededError(first)
        self.guard.suspend()  # the next checkpoint reports it

    def _check_one(self, message: bytes, index: int) -> None:
        """Check the state after one message that was handled alone. Raises HandlerError."""
        handler = self._life.definition.by_method_id.get(-1 if (found := method_of(message)) is None else found)
        if (handler is not None and handler.is_query) or (problem := self.guard.check()) is None:
            return
        raise self._context.tasks.handler_runs.unsavable(handler, problem, index)

    def _batch(self, content: bytes, offset: int, end: int, count: int) -> Iterator[Event]:
        """Handle the ``count`` RPC messages of ``content[offset:end]``, with a pause wherever there is much to send."""
        context, life, failures = self._context, self._life, self._failures
        outbox, multicasts, runs, is_own = context.outbox, context.multicasts, context.tasks.handler_runs, False
        sequence_id, first_index = context.sequence_id, context.message_index
        if self._batch_sources is not None:
            context.source = next(self._batch_sources, None)
        start = offset
        self._batch_start = content, start, first_index
        is_guarded = self.guard.is_on
        is_alone = is_guarded and count == 1 and end == len(content)
        is_watched = self.careful is not None and self.careful.suspect_sequence_id == sequence_id
        probe = self.probe
        skips = sequence_id in failures.skipped
        one_by_one = is_watched and self.careful is not None and self.careful.handlers
        context.tasks.one_by_one = one_by_one
        while offset < end:
            slice_end = min(offset + SLICE_SIZE_BYTES, end)
            by_itself = is_alone or (
                self.single_steps_from is not None and (sequence_id, context.message_index) >= self.single_steps_from
            )
            if by_itself:
                self._check()
                slice_end = offset + 1
            if is_watched:
                self._check()
                message = message_at(content, offset)
                yield from self.announce(failures.describe_message(sequence_id, context.message_index, message))
                slice_end = offset + 1
            if probe is not None:
                if context.message_index:
                    probe(context.message_index - 1)
                slice_end = offset + 1
            skipped = failures.next_skipped_index(sequence_id, context.message_index) if skips else None
            if skipped is not None and skipped < first_index + count:  # else it is in another batch of the record
                at = offset_after(content, start, skipped - first_index)
                if at == offset:
                    offset = yield from self._skip(content, offset, skipped)
                    continue
                slice_end = min(slice_end, at)
            if multicasts.is_busy and not is_own:
                plain = Plain(message_at(content, offset), context.source)
                is_own = plain.is_own
                if not is_own:
                    if multicasts.enqueue_if_must_wait(plain):
                        offset += len(plain.message)
                        context.message_index += 1
                        continue
                    slice_end = offset + 1
            if self._unchecked_from is None:
                outbox.mark()
            if is_guarded and not by_itself and self._unchecked_from is None:
                self._unchecked_from = context.message_index
            begun, runs.check = offset, self.guard.check if by_itself else None
            failed: HandlerError | None = None
            try:
                if self.times.remaining:
                    offset = self._timed(content, offset, end)
                else:
                    offset = life.delivery.deliver(life.instance, content, offset, end, slice_end)
                if by_itself:
                    runs.check = None
                    self._check_one(content[begun:offset], context.message_index - 1)
            except HandlerError as error:  # what runs next must not see it as the exception that is handled
                failed = error
            if failed is not None:
                runs.check = None
                context.handling_thread_id = 0
                if is_guarded and failed.failure is not None and failed.failure.policy == "keep":
                    failed = self._check_kept(failed, content[begun:], by_itself)
                at = offset_after(content, start, failed.message_index - first_index)
                message = message_at(content, at)
                yield from self._failed(failed, message)
                offset = at + len(message)
                context.message_index = failed.message_index + 1
            if one_by_one:
                yield from self._run_woken(context.message_index - 1, message)
            if outbox.ready_size_bytes:
                self._check()
                yield OutputReady()
        context.tasks.one_by_one = False
        if context.message_index - first_index != count:
            raise RemoteProtocolError(
                f"record {sequence_id}: a batch of {context.message_index - first_index} messages gives its count as "
                f"{count}"
            )

    def _check_kept(self, error: HandlerError, content: bytes, by_itself: bool) -> HandlerError:
        """Check that the state can be saved after a message that fails while its changes stay; else they are undone.

        Raises SingleStepNeededError.
        """
        if not by_itself:
            self._check()
        else:
            try:
                self._check_one(message_at(content, 0), error.message_index)
            except HandlerError as unsavable:
                return unsavable
        return error

    def _run_woken(self, index: int, message: bytes) -> Iterator[Event]:
        """Run the handlers that ``message`` has woken, one after the other, each announced. Calls made since the first
        one do not leave in between: a verdict on one of the handlers can take them back."""
        context, tasks, outbox = self._context, self._context.tasks, self._context.outbox
        behind, context.message_index = context.message_index, index
        is_left = True
        while is_left:
            failed: HandlerError | None = None
            if (call := tasks.next_announced) is not None:
                outbox.only_reports = True
                yield from self.announce(self._failures.describe_task(context.sequence_id, index, call))
                outbox.only_reports = False
            context.handling_thread_id = context.thread_id
            try:
                is_left = context.run_contexts.run(tasks.run_next_woken)
            except HandlerError as error:
                failed = error
            context.handling_thread_id = 0
            if failed is not None:
                yield from self._failed(failed, message)
        context.message_index = behind

    def _timed(self, content: bytes, offset: int, end: int) -> int:
        """Handle one message and note its time; return the offset of the next one. Raises what ``deliver`` raises."""
        times, life = self.times, self._life
        begun_ns = times.clock_ns()
        behind = life.delivery.deliver(life.instance, content, offset, end, offset + 1)
        duration_ns = times.clock_ns() - begun_ns
        method_id = method_of(content[offset:behind])  # of a call; the ID in an answer is that of another's method
        handler = None if method_id is None else life.definition.by_method_id.get(method_id)
        times.add(OTHER_MESSAGES if handler is None else handler.function.__qualname__, duration_ns)
        return behind

    def _failed(self, error: HandlerError, message: bytes) -> Iterator[Event]:
        """Note that ``message`` has failed, and continue after it.

        Raises ``error`` if it can't fail alone, and RewindNeededError if its changes must be undone first.
        """
        verdict = self._failures.verdict(error, message)
        if verdict is None:
            raise error
        known = verdict.key in self._failures.known
        if not known and self._failures.succeeded_before(verdict):
            raise error  # it did not fail before: no replay can be right
        if verdict.kind is VerdictKind.UNDONE:
            self._failures.note(verdict, error)
            raise RewindNeededError(verdict, error.failure.method_id if error.failure else None)
        woken: HandlerError | None = None
        try:
            self._context.tasks.drain()
        except HandlerError as another:  # of a handler that waited, and that the failed one has woken
            woken = another
        if woken is not None:
            yield from self._failed(woken, message)
        if not known:
            self._failures.note(verdict, error)
        known_verdict = self._failures.known[verdict.key]
        yield from self._end_waiting(known_verdict, message)
        self._failures.answer(known_verdict, message)

    def _skip(self, content: bytes, offset: int, index: int) -> Generator[Event, None, int]:
        """Skip the message at ``offset``, which has a verdict; return the offset of the next one."""
        context, message = self._context, message_at(content, offset)
        behind = offset + len(message)
        context.message_index = index
        verdict = self._failures.known[context.sequence_id, index, 0, 0]
        self._list_failed(verdict, message)
        yield from self._end_waiting(verdict, message)
        self._failures.answer(verdict, message)
        context.message_index = index + 1
        return behind

    def _list_failed(self, verdict: Verdict, message: bytes) -> None:
        """List the call of a ``def`` handler with labels as failed, since it is not handled again."""
        context, executions, rpc = self._context, self._context.tasks.executions, rpc_of(message)
        if executions is None or rpc is None or rpc.kind != RpcKind.CALL:
            return
        handler = self._life.definition.by_method_id.get(rpc.method_id)
        if handler is None or handler.is_async or handler.labels is None:
            return
        caller, arguments = waiting_caller(message), rpc.arguments
        if caller is not None:
            arguments = encoder.encode(decoding.decode(arguments, type=list[Raw])[2:])
        executions.note_handled_call(context, handler, arguments, caller, {}, "failed", describe_failure(verdict))

    def _end_waiting(self, verdict: Verdict, message: bytes) -> Iterator[Event]:
        """End the wait of a handler for a message that is skipped, so that it does not wait for ever."""
        if not verdict.ends_waiting or (waking := without_result(message)) is None:
            return
        context, index = self._context, self._context.message_index
        with context.tasks.incoming.failing(verdict):
            self._life.delivery.deliver(self._life.instance, waking, 0, len(waking), 1)
            if context.tasks.one_by_one:
                yield from self._run_woken(index, message)
        context.handling_thread_id = 0
        context.message_index = index


MESSAGE_INDEX_MAX = (1 << 31) - 1  # larger than the number of messages of any record


class Rewinds:
    """Rewinds of one app, to ``copies`` of its state."""

    def __init__(self, context: Context, life: Life, records: Records, failures: Failures, copies: Copies) -> None:
        self.copies = copies
        self._context = context
        self._life = life
        self._records = records
        self._failures = failures
        records.can_rewind = lambda: copies.current is not None

    def handle(self, record: Record) -> Iterator[Event]:
        """Handle ``record``, and again for each of its messages that must leave no trace. Raises RecoveryNeeded."""
        rewound = False
        while True:
            needed: RewindNeededError | SingleStepNeededError
            try:
                yield from self._records.handle(record)
                break
            except (RewindNeededError, SingleStepNeededError) as error:
                needed = error  # handlers that run again must not see it as the exception that is handled
            rewound = True
            if isinstance(needed, RewindNeededError):
                self._undo(needed, record)
                continue
            sequence_id = record.header.sequence_id
            self._records.single_steps_from = sequence_id, needed.message_index
            if (copy := self.copies.current) is None:
                raise RecoveryNeeded("there is no copy of the state any more: the app is recovered from its log")
            self._failures.note_full_rewind(sequence_id, self._life.delivery)
            self._context.outbox.rewind_to_copy()
            self._replay(copy, copy.tail, (sequence_id, MESSAGE_INDEX_MAX))
        self._records.single_steps_from = None
        if rewound:
            self.end()
        has_tables = self._context.tasks.has_tables
        undo_size_bytes = sum(table.undo_size_bytes for table in self._life.tables) if has_tables else 0
        if self.copies.add(record, rewound=rewound, undo_size_bytes=undo_size_bytes):
            self.retake_copy()
        elif undo_size_bytes and self.copies.current is None:
            self._update_undo()

    def _undo(self, needed: RewindNeededError, record: Record) -> None:
        """Go back to the copy of the state, and handle the records after it again, up to ``record``."""
        copy, verdict = self.copies.current, needed.verdict
        if copy is None:
            self._context.outbox.rewind_to_copy()
            raise RecoveryNeeded(
                f"{verdict.method} failed at record {verdict.sequence_id}, message {verdict.message_index}; the app "
                f"is recovered without it"
            )
        size_bytes = len(copy.blob) + copy.tail_size_bytes
        self._failures.note_rewind(needed, [*copy.tail, record], size_bytes, self._life.delivery)
        self._context.outbox.rewind_to_copy()
        self._replay(copy, copy.tail, verdict.key[:2])

    def reload_from_log(self) -> None:
        """Rebuild the state from the records so far, since the present one differs. Raises RecoveryNeeded."""
        copy = self.copies.current
        self._context.outbox.mark()
        if copy is None:
            raise RecoveryNeeded("a query has changed the state: the app is recovered from its log, without that")
        self._context.outbox.rewind_to_copy()
        self.replay_records(copy, copy.tail)
        self.end()

    def replay_records(self, copy: Copy, records: Iterable[Record]) -> None:
        """Handle ``records`` of the copy's tail again, from the first one on; no new failures are allowed. Call
        :meth:`end` afterwards, once for all such runs."""
        last_sequence_id = copy.sequence_id + len(copy.tail)
        self._failures.note_full_rewind(last_sequence_id + 1, self._life.delivery)
        self._replay(copy, records, (last_sequence_id, MESSAGE_INDEX_MAX))

    def start_guard(self) -> None:
        """Begin to guard the state: messages are handled for the first time, and each is followed by a check."""
        self._records.guard.is_on = self._failures.can_fail or not self._failures.fails_alone
        self._restart_guard()

    def _restart_guard(self) -> None:
        """Restart the guard with the present state: no later message is blamed for problems that it has already."""
        guard, context = self._records.guard, self._context
        if guard.is_on:
            size_bytes = context.tasks.queries.state_size_bytes
            schema = self._life.definition.state()
            guard.begin(schema, self._life.instance, size_bytes)

    def _replay(self, copy: Copy, records: Iterable[Record], passed: tuple[int, int]) -> None:
        """Handle ``records`` on top of the copy. ``passed``: the last (record, message) that was handled before."""
        tasks = self._context.tasks
        self.copies.expect_failures()
        tasks.note_rewind()
        tasks.effects.pause()
        tasks.queries.passed = passed
        guard = self._records.guard
        was_on, guard.is_on = guard.is_on, False
        try:
            self._life.restore_copy(copy.blob)
            for handled in records:
                for _ in self._records.handle(handled):
                    pass
        finally:  # a search can end such a run early
            guard.is_on = was_on
        self._restart_guard()

    def end(self) -> None:
        """End a rewind: the state is again that after the last record."""
        self._failures.end_replay(self._life.delivery)
        self._context.tasks.effects.resume()

    def retake_copy(self) -> None:
        """Take a new copy: the last one is far behind in the log, or the state changed by more than records."""
        self._context.outbox.close_batches()
        try:
            blob = b"".join(self._life.encode())
        except StateError:
            self.copies.note_failed_copy()  # the next checkpoint reports it
            return
        self.take_copy((blob,))

    def _update_undo(self) -> None:
        """Let tables keep old values of rows, if there is a copy of the state for a rewind."""
        for table in self._life.tables:
            table.track_undo(enabled=self.copies.current is not None)

    def take_copy(self, pieces: Sequence[bytes]) -> None:
        """Take a copy of the present state, after all calls made so far."""
        tasks, sequence_id = self._context.tasks, self._life.next_sequence_id - 1
        self._context.outbox.begin_copy()
        tasks.queries.state_size_bytes = sum(map(len, pieces))
        if self.copies.take(pieces, sequence_id):
            self._update_undo()
        self._failures.forget_up_to(self.copies.sequence_id(sequence_id))
        tasks.note_copy()
        self._restart_guard()
