# cython: annotation_typing=False
"""The app's side of the protocol without I/O: bytes in, events and bytes out, the handlers called in between.

    nothing --11--> __init__, initial message, checkpoint --the initial message comes back--> primary     first start
    nothing --blob--> restored --records--> ... --11--> checkpoint --> primary                            recovery
                                               --15--> primary
    nothing --blob--> restored --records--> ... --10--> upgraded, checkpoint --2--> checkpoint --> primary      upgrade
                                                                             --records--> ...    one of the log's past
    nothing --blob--> restored --12--> upgraded --records--> ...                                what-if of an upgrade

One thread: the one that made the :class:`Dispatcher` calls it, and the handlers run in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from msgspec.structs import replace

from appsdk.calls.context import Context
from appsdk.calls.failures import method_of
from appsdk.calls.outbox import Chunk, Outbox, encode_call, make_writer
from appsdk.dispatch.asking import answer_query
from appsdk.dispatch.delivery import Delivery
from appsdk.dispatch.events import (
    BecamePrimary,
    Event,
    Flush,
    Goodbye,
    MessageFailed,
    OutputReady,
    Refusal,
    SnapshotBegun,
)
from appsdk.dispatch.failing import Failures, UndoNeededError, offset_behind, size_of_message, wakes_handlers
from appsdk.dispatch.life import Life
from appsdk.dispatch.times import HandlerTimes
from appsdk.dispatch.upgrades import guarded
from appsdk.effects.request import EffectRunner
from appsdk.errors import HandlerError, RecoveryNeeded, StateError, UpgradeError
from appsdk.handlers.decorators import INITIAL_METHOD_ID
from appsdk.handlers.definition import Definition
from appsdk.handlers.proxy import all_method_names
from appsdk.nodes.nodes import Nodes
from appsdk.ordering.multicasts import Multicasts
from appsdk.ordering.plain import Plain
from appsdk.state.copies import Copies
from appsdk.types.handles import current
from appsdk.waiting.listing import describe_all, describe_one
from appsdk.waiting.retries import retry_effects
from appsdk.waiting.tasks import Tasks
from protocol.batch import decode_batch, decode_replayable_batch
from protocol.errors import RemoteProtocolError
from protocol.extensions import (
    ALL_EXTENSIONS,
    AppDescription,
    AppTime,
    Hello,
    decode_app_time,
    decode_impulses_accepted,
    decode_record_time,
    decode_sources,
    decode_version,
    encode_app_description,
    encode_hello,
)
from protocol.handlers import (
    OTHER_MESSAGES,
    TIMES_TASK,
    HandlersAnswer,
    HandlersQuestion,
    decode_question,
    encode_answer,
)
from protocol.messages import (
    MessageType,
    RpcType,
    decode_messages,
    encode_checkpoint,
    encode_message,
)
from protocol.queries import QueryQuestion, decode_query, encode_query_answer
from protocol.readers import BlobData, BlobStart, Record, RecordReader
from protocol.record import CONTROL_SEQUENCE_ID
from protocol.varint import encode_zigzag
from protocol.verdicts import (
    Careful,
    Handling,
    VerdictKind,
    decode_careful,
    decode_verdicts,
    encode_handling,
)

MESSAGE_INDEX_MAX = (1 << 31) - 1  # of a record: above any that there is
SLICE_SIZE_BYTES = 64 << 10  # of input, handled before the transport may send: keeps both ends at work


class Dispatcher:
    """One connection's life of one class.

    ``draw_seed`` gives SEED_SIZE_BYTES bytes at a first start; ``wake`` is called by other threads when they have
    put impulses where :meth:`data_to_send` finds them. An error that is raised ends the connection: stop the app.
    ``effects`` runs the effects of its handlers once it is primary; without it they wait.
    ``extensions``, ``make_outbox``, ``make_delivery`` and ``make_tasks`` are others where a run is looked at more
    closely.
    ``keeps_large_copies``: a state of any size can be put back without another start. ``fails_alone`` False: a message
    that fails stops the app, as for a test that is to fail with it. ``compares_queries``: the state is compared around
    each query, whatever that costs.
    """

    def __init__(
        self,
        definition: Definition,
        draw_seed: Callable[[], bytes],
        wake: Callable[[], None] = lambda: None,
        *,
        extensions: frozenset[int] = ALL_EXTENSIONS,
        effects: EffectRunner | None = None,
        make_outbox: Callable[[Context, Callable[[], None]], Outbox] = Outbox,
        make_delivery: Callable[[Definition, Context], Delivery] = Delivery,
        keeps_large_copies: bool = False,
        fails_alone: bool = True,
        make_tasks: Callable[[Context], Tasks] = Tasks,
        compares_queries: bool = False,
    ) -> None:
        for one in definition.chain:
            one.resolve(names_may_be_missing=False)
        self.context = Context(b"")
        self.outbox = self.context.outbox = make_outbox(self.context, wake)
        self._multicasts = self.context.multicasts = Multicasts(self.context)
        self._nodes = self.context.nodes = Nodes(self.context)
        self.tasks = self.context.tasks = make_tasks(self.context)
        self.tasks.queries.compares_all = compares_queries
        self._life = Life(definition, self.context, self.tasks, self._use)
        self._draw_seed = draw_seed
        self._effects = effects
        self._make_delivery = make_delivery
        self._reader = RecordReader()
        self._extended = False  # the coordinator has used an extension, so it took our Hello
        self._primary = False
        self.forks_next = True  # False: the child of the last checkpoint hung
        self._upgraded = False  # the next TakeCheckpoint completes it, unless more records come
        self._awaiting_initial = False
        self._blob: list[bytes] = []
        self._delivery = make_delivery(definition, self.context)
        self._failures = Failures(self.context, fails_alone=fails_alone)
        self._copies = Copies(enabled=any(one.can_undo for one in definition.chain), keeps_large=keeps_large_copies)
        self._careful: Careful | None = None
        self._times = HandlerTimes()
        self._sources: list[str] | None = None  # of the batches of the records that come, see Record
        self._batch_sources: Iterator[str] | None = None  # of those of the record that is handled
        self.time: AppTime | None = None  # of the instance, as the coordinator last told it; None: it never did
        self._jumps: list[AppTime] = []  # to be logged, once the app is primary
        self._batch_begin = b"", 0, 0  # content, offset, and index of the first message, of what is handled now
        self._work = self._run()
        self.outbox.send(encode_hello(Hello(extensions, definition.label)))
        description = AppDescription(definition.version, all_method_names(definition))
        self.outbox.send(encode_app_description(description))

    @property
    def definition(self) -> Definition:
        """Of the class that runs: one that this app upgrades from, until it is told to."""
        return self._life.definition

    @property
    def instance(self) -> Any:
        return self._life.instance

    # --- what the transport calls -----------------------------------------------------------------------------------

    def receive_data(self, data: bytes) -> None:
        """Bytes from the coordinator, in any pieces."""
        self._reader.receive_data(data)

    def next_event(self) -> Event | None:
        """Handle input up to the next event; None when there is no more input.

        Raises HandlerError, StateError, UpgradeError, RemoteProtocolError: each ends the connection. What is to be sent
        after an UpgradeError says so to the coordinator.
        """
        current.life = self._nodes  # handles that are read now are of this instance
        try:
            return next(self._work)
        finally:
            current.life = None

    def say_leaving(self, reason: str) -> None:
        """The app ends the connection by itself: it has not crashed."""
        if self._failures.can_fail:
            self.outbox.report(encode_message(MessageType.LEAVING, reason.encode("utf-8", "replace")))

    @property
    def now_handling(self) -> Handling | None:
        """The message whose handler runs; None between two. Any thread: what it says may be over by then."""
        context = self.context
        content, start, first_index = self._batch_begin
        sequence_id, index = context.sequence_id, context.message_index
        if not context.handling_thread_id or not self._failures.can_fail or index < first_index:
            return None
        try:
            at = offset_behind(content, start, index - first_index)
            message = content[at : at + size_of_message(content, at)]
        except RemoteProtocolError:  # of a batch that has begun since
            return None
        return replace(self._failures.handling(sequence_id, index, message), message=b"")

    def data_to_send(self) -> list[Chunk]:
        """All bytes that are to be sent now, in order. They are the caller's."""
        return self.outbox.take()

    @property
    def next_due_ns(self) -> int | None:
        """When a timer is due, in ns since the Unix epoch: then :meth:`tell_time`. None: nothing."""
        return self.tasks.next_due_ns if self._primary else None

    def tell_time(self, time_ns: int) -> None:
        """The instance's time, ns since the Unix epoch: it goes into the log, and comes back as input."""
        self.tasks.tell_time(time_ns)

    @property
    def buffered_bytes(self) -> int:
        """Bytes that came in and belong to a record that is not whole yet, or that is still to be handled."""
        return self._reader.buffered_bytes

    # --- records ----------------------------------------------------------------------------------------------------

    def _run(self) -> Iterator[Event | None]:
        while True:
            event = self._reader.next_event()
            if event is None:
                yield None
            elif isinstance(event, Record):
                if event.header.sequence_id == CONTROL_SEQUENCE_ID:
                    yield from self._control(event)
                else:
                    yield from self._logged(event)
            elif isinstance(event, BlobStart):
                if self.instance is not None:
                    raise RemoteProtocolError("a second checkpoint came in: an app is restored once, as it connects")
                self._blob.clear()
            elif isinstance(event, BlobData):
                self._blob.append(event.data)
                if event.last:
                    self._restore()

    def _control(self, record: Record) -> Iterator[Event]:
        content = record.content
        self.context.committer_id = record.header.committer_id
        version: int | None = None
        for message_type, start, end in decode_messages(content):
            data = content[start:end]
            if message_type == MessageType.TAKE_CHECKPOINT:
                yield from self._take_checkpoint()
            elif message_type == MessageType.VERSION:
                version = decode_version(data)
                self._extended = True
            elif message_type == MessageType.UPGRADE_TAKE_CHECKPOINT:
                self._upgrade(version, with_checkpoint=True)
                yield OutputReady()
            elif message_type == MessageType.UPGRADE_SERVICE:
                self._upgrade(version, with_checkpoint=False)
            elif message_type == MessageType.TAKE_BECOMING_PRIMARY_CHECKPOINT:
                if self.instance is None:
                    self._start_first()
                    yield OutputReady()
                else:
                    self._checkpoint()
                    yield from self._become_primary()
            elif message_type == MessageType.BECOMING_PRIMARY:
                yield from self._become_primary()
            elif message_type == MessageType.VERDICTS:
                self._failures.know(decode_verdicts(data))
            elif message_type == MessageType.SOURCES:
                self._sources = decode_sources(data)
            elif message_type == MessageType.CAREFUL:
                self._careful = decode_careful(data)
            elif message_type == MessageType.APP_TIME:
                self._tell_time(decode_app_time(data))
            elif message_type == MessageType.HANDLERS_ASKED:
                self._tell_handlers(decode_question(data))
                yield OutputReady()
            elif message_type == MessageType.QUERY_ASKED:
                self._answer_query(decode_query(data))
                yield OutputReady()
            elif message_type == MessageType.IMPULSES_ACCEPTED:
                self._extended = True
                self.outbox.impulses.accept(decode_impulses_accepted(data))
            elif message_type == MessageType.GOODBYE:
                yield Goodbye(data.decode("utf-8", "replace"))
            elif message_type == MessageType.REFUSAL:
                yield Refusal(data.decode("utf-8", "replace"))
            else:
                raise RemoteProtocolError(
                    f"a control record holds a message of type {message_type}, which this SDK does not know"
                )

    def _tell_handlers(self, question: HandlersQuestion) -> None:
        if question.sequence_id >= 0:
            value = self.tasks.orders.outcome(question.sequence_id, question.message_index)
        elif question.retries:
            value = retry_effects(self.tasks, question.task)
        elif question.task == TIMES_TASK:
            value = self._times.answer()
        elif question.task:
            value = describe_one(self.tasks, question.task)
        else:
            value = describe_all(self.tasks)
        self.outbox.report(encode_answer(HandlersAnswer(question.ticket, value)))

    def _answer_query(self, question: QueryQuestion) -> None:
        if self.instance is None or not self._primary:
            raise RemoteProtocolError("a query came before the app was told that it is primary")
        answer = answer_query(question, self.definition, self.instance, self.context, self.tasks)
        self.outbox.report(encode_query_answer(answer))
        if answer.changed:
            self._back_to_log()

    def _tell_time(self, time: AppTime) -> None:
        self.time = time
        if time.jumped_ns:
            self._jumps.append(time)
            self._log_jumps()

    def _log_jumps(self) -> None:
        """What sleeps is to sleep no less for it: that is for the log to say, to each replay."""
        if self._primary:
            for time in self._jumps:
                if time.time_ns > self.tasks.clock.jumped_to_ns:  # else the log has it
                    self.tasks.tell_jump(time.time_ns, time.jumped_ns)
            self._jumps.clear()

    def _logged(self, record: Record) -> Iterator[Event]:
        sequence_id = record.header.sequence_id
        if self.instance is None:
            raise RemoteProtocolError(f"record {sequence_id} came before a checkpoint or a first start")
        if sequence_id != self._life.next_sequence_id:
            raise RemoteProtocolError(f"record {sequence_id} came, {self._life.next_sequence_id} was expected")
        self._upgraded = False
        record.sources = self._sources
        careful = self._careful
        if careful is not None:
            yield from self._say_record(careful, sequence_id)
        rewound = False
        while True:
            try:
                yield from self._record(record)
                break
            except UndoNeededError as needed:
                self._rewind(needed, record)
                rewound = True
                yield MessageFailed(needed.verdict)
        if rewound:
            self._failures.settle(self._delivery)
            self.tasks.effects.resume()
        if self._copies.add(record, rewound=rewound):
            self._copy_again()
        if careful is not None and sequence_id >= careful.last_sequence_id:
            self._careful = None
            self.outbox.report(encode_handling(Handling(-1)))
            yield Flush()  # else the death of a later record would be laid to this one
        if self._awaiting_initial:
            self._awaiting_initial = False
            yield from self._become_primary()

    def _record(self, record: Record) -> Iterator[Event]:
        """Handle the messages of one record. Raises UndoNeededError."""
        sequence_id, content = record.header.sequence_id, record.content
        context = self.context
        context.committer_id = record.header.committer_id
        context.sequence_id = sequence_id
        context.record_time_ns = None
        context.message_index = 0
        context.source = None if record.sources is None else ""
        self._batch_sources = iter(record.sources) if record.sources else None
        for message_type, start, end in decode_messages(content):
            if message_type == MessageType.RECORD_TIME:
                self._extended = True
                context.record_time_ns = decode_record_time(content, start, end)
            elif message_type == MessageType.RPC_BATCH:
                count, skipped = decode_batch(content[start : start + 16])
                yield from self._batch(content, start + skipped, end, count)
            elif message_type == MessageType.RPC:
                size_of_size = len(encode_zigzag(end - start + 1))
                yield from self._batch(content, start - 1 - size_of_size, end, 1)
            elif message_type == MessageType.COUNT_REPLAYABLE_RPC_BATCH:
                count, _, skipped = decode_replayable_batch(content[start : start + 16])
                yield from self._batch(content, start + skipped, end, count)
            elif message_type == MessageType.INITIAL_MESSAGE:
                yield from self._batch(content, start, end, 1)
            elif message_type == MessageType.INSTANCE_NAME:
                context.instance_name = content[start:end].decode("utf-8", "replace")
            else:
                raise RemoteProtocolError(
                    f"record {sequence_id} holds a message of type {message_type}, which is never logged"
                )
        self._life.next_sequence_id = sequence_id + 1

    def _batch(self, content: bytes, offset: int, end: int, count: int) -> Iterator[Event]:
        """Handle the ``count`` RPC messages of ``content[offset:end]``, with a pause wherever there is much to send."""
        first_index = self.context.message_index
        if self._batch_sources is not None:
            self.context.source = next(self._batch_sources, None)
        start = offset
        self._batch_begin = content, start, first_index
        is_watched = self._careful is not None and self._careful.suspect_sequence_id == self.context.sequence_id
        skips = self.context.sequence_id in self._failures.skipped
        multicasts, is_own = self._multicasts, False
        while offset < end:
            slice_end = min(offset + SLICE_SIZE_BYTES, end)
            if is_watched:
                yield from self._say_message(content, offset)
                slice_end = offset + 1
            skipped = self._failures.next_skipped(*self._place) if skips else None
            if skipped is not None and skipped < first_index + count:  # else it is in another batch of the record
                at = offset_behind(content, start, skipped - first_index)
                if at == offset:
                    offset = self._pass_over(content, offset, skipped)
                    continue
                slice_end = min(slice_end, at)
            if multicasts.is_busy and not is_own:
                message = Plain(content[offset : offset + size_of_message(content, offset)], self.context.source)
                is_own = message.is_own
                if not is_own:
                    if multicasts.files(message):
                        offset += len(message.message)
                        self.context.message_index += 1
                        continue
                    slice_end = offset + 1
            self.outbox.mark()
            try:
                if self._times.left:
                    offset = self._timed(content, offset, end)
                else:
                    offset = self._delivery.deliver(self.instance, content, offset, end, slice_end)
            except HandlerError as error:
                self.context.handling_thread_id = 0
                at = offset_behind(content, start, error.message_index - first_index)
                yield from self._failed(error, content, at)
                offset = at + size_of_message(content, at)
                self.context.message_index = error.message_index + 1
            if self.outbox.ready_size_bytes:
                yield OutputReady()
        if self.context.message_index - first_index != count:
            raise RemoteProtocolError(
                f"record {self.context.sequence_id}: a batch of {self.context.message_index - first_index} messages "
                f"gives its count as {count}"
            )

    def _timed(self, content: bytes, offset: int, end: int) -> int:
        """Handle one message, and note how long that took: where the next one starts. Raises as ``deliver`` does."""
        times = self._times
        begun_ns = times.clock_ns()
        behind = self._delivery.deliver(self.instance, content, offset, end, offset + 1)
        duration_ns = times.clock_ns() - begun_ns
        method_id = method_of(content[offset:behind])  # of a call; an answer has that of another's method
        handler = None if method_id is None else self.definition.by_method_id.get(method_id)
        times.add(OTHER_MESSAGES if handler is None else handler.function.__qualname__, duration_ns)
        return behind

    @property
    def _place(self) -> tuple[int, int]:
        return self.context.sequence_id, self.context.message_index

    # --- messages that fail -----------------------------------------------------------------------------------------

    def _failed(self, error: HandlerError, content: bytes, offset: int) -> Iterator[Event]:
        """The message at ``offset`` has failed: note it, and go on behind it.

        Raises ``error`` where it can't fail alone, UndoNeededError where the state must be as before it first, and
        RecoveryNeeded where it takes another start for that.
        """
        message = content[offset : offset + size_of_message(content, offset)]
        verdict = self._failures.verdict(error, message)
        if verdict is None:
            raise error
        known = verdict.key in self._failures.known
        if not known and self._failures.did_not_fail(verdict):
            raise error  # when it was handled before: no replay can be right
        if verdict.kind is VerdictKind.UNDONE:
            self._failures.note(verdict)
            if self._copies.current is None:
                self.outbox.back_to_copy()
                raise RecoveryNeeded(
                    f"{verdict.method} failed at record {verdict.sequence_id}, message {verdict.message_index}; the "
                    f"app is recovered without it"
                )
            raise UndoNeededError(verdict, error.failure.method_id if error.failure else None)
        self.tasks.drain()
        if not known:
            self._failures.note(verdict)
            yield MessageFailed(verdict)
        self._failures.answer(self._failures.known[verdict.key], message)

    def _pass_over(self, content: bytes, offset: int, index: int) -> int:
        """The message at ``offset`` has a verdict: where the next one starts."""
        size_bytes = size_of_message(content, offset)
        self.context.message_index = index
        verdict = self._failures.known[self.context.sequence_id, index, 0, 0]
        message = content[offset : offset + size_bytes]
        is_ended = verdict.kind in (VerdictKind.KILLED, VerdictKind.SKIPPED)
        if is_ended and wakes_handlers(message):  # who waited for it must not wait for ever
            with self.tasks.failing_waits(verdict):
                self._delivery.deliver(self.instance, content, offset, offset + size_bytes, offset + 1)
            self.context.handling_thread_id = 0
        self._failures.answer(verdict, message)
        self.context.message_index = index + 1
        return offset + size_bytes

    def _rewind(self, needed: UndoNeededError, record: Record) -> None:
        """Back to the copy of the state, and again over the records behind it, up to ``record``."""
        copy = self._copies.current
        if copy is None:
            raise needed
        self._copies.failed()
        self._failures.repeat(needed, [*copy.tail, record], len(copy.blob) + copy.tail_size_bytes, self._delivery)
        self.outbox.back_to_copy()
        self.tasks.effects.pause()
        self.tasks.queries.passed = needed.verdict.key[:2]
        self._life.go_back(copy.blob)
        for handled in copy.tail:
            for _ in self._record(handled):
                pass

    def _back_to_log(self) -> None:
        """The state is none that the records so far make: make it anew from them. Raises RecoveryNeeded."""
        copy, sequence_id = self._copies.current, self._life.next_sequence_id
        self.outbox.mark()
        if copy is None:
            raise RecoveryNeeded("a query has changed the state: the app is recovered from its log, without that")
        self._copies.failed()
        self._failures.repeat_all(sequence_id, self._delivery)
        self.outbox.back_to_copy()
        self.tasks.effects.pause()
        self.tasks.queries.passed = sequence_id - 1, MESSAGE_INDEX_MAX
        self._life.go_back(copy.blob)
        for handled in copy.tail:
            for _ in self._record(handled):
                pass
        self._failures.settle(self._delivery)
        self.tasks.effects.resume()

    def _copy_again(self) -> None:
        """Much log lies behind the last copy."""
        self.outbox.close_batches()
        try:
            blob = b"".join(self._life.encode())
        except StateError:
            return  # the next checkpoint says so
        self._take_copy((blob,))

    def _take_copy(self, pieces: Sequence[bytes]) -> None:
        """The state as it is now, behind all calls made so far."""
        self.outbox.begin_copy()
        self.tasks.queries.state_size_bytes = sum(map(len, pieces))
        self._copies.take(pieces, self._life.next_sequence_id - 1)
        self._failures.forget_up_to(self._copies.sequence_id(self._life.next_sequence_id - 1))

    def _say_record(self, careful: Careful, sequence_id: int) -> Iterator[Event]:
        """An app before this one did not live through one of these records: say which is next."""
        if sequence_id <= careful.last_sequence_id:
            self.outbox.report(encode_handling(Handling(sequence_id)))
            yield Flush()

    def _say_message(self, content: bytes, offset: int) -> Iterator[Event]:
        message = content[offset : offset + size_of_message(content, offset)]
        handling = self._failures.handling(self.context.sequence_id, self.context.message_index, message)
        self.outbox.report(encode_handling(handling))
        yield Flush()

    # --- life -------------------------------------------------------------------------------------------------------

    def _start_first(self) -> None:
        self._life.start(self._draw_seed())
        message = encode_call(make_writer("initial", INITIAL_METHOD_ID, RpcType.FORK), ())
        self.outbox.send(encode_message(MessageType.INITIAL_MESSAGE, message))
        self._checkpoint()
        self._awaiting_initial = True

    def _restore(self) -> None:
        blob = b"".join(self._blob)
        self._blob.clear()
        self._life.restore(blob)
        self._take_copy((blob,))

    def _use(self, definition: Definition) -> None:
        """From here on this class's code handles what comes in."""
        self._delivery = self._make_delivery(definition, self.context)

    def _upgrade(self, version: int | None, *, with_checkpoint: bool) -> None:
        """Bring state and code to ``version`` (None: that of the app), behind all outputs of the old code."""
        if self.instance is None or self._primary:
            raise RemoteProtocolError(
                "an upgrade was asked for before the app had a state"
                if self.instance is None
                else "an upgrade was asked for after the app was told that it is primary"
            )
        self.outbox.close_batches()
        self._copies.forget()
        try:
            self._life.upgrade(version)
            if with_checkpoint:
                guarded(self.definition, f"{self.definition.name}.checkpoint", self._checkpoint)
                self._upgraded = True
            else:
                self._copy_again()
        except UpgradeError as error:
            self.outbox.send(encode_message(MessageType.UPGRADE_FAILED, error.reason.encode("utf-8", "replace")))
            raise

    def _take_checkpoint(self) -> Iterator[Event]:
        if self._upgraded and not self._primary:
            self._checkpoint()
            if self.definition.retries_refused and self._failures.can_fail:
                self.outbox.send(encode_message(MessageType.RETRY_REFUSED))
            yield OutputReady()
            yield from self._become_primary()
        elif self.definition.checkpoint_mode == "fork" and self.forks_next and self._primary and self._extended:
            self.outbox.close_batches()
            self.outbox.send(encode_message(MessageType.SNAPSHOT_BEGIN))
            yield SnapshotBegun(self._life.encode)
        else:
            self._checkpoint()
            self.forks_next = True
            yield OutputReady()

    def _checkpoint(self) -> None:
        """Put a checkpoint behind all outputs of the records so far."""
        if self.instance is None:
            raise RemoteProtocolError("a checkpoint was asked for before the first start or a recovery")
        self.outbox.close_batches()
        pieces = self._life.encode()
        self._take_copy(pieces)
        self.outbox.send(encode_checkpoint(sum(map(len, pieces))))
        for piece in pieces:
            self.outbox.send(piece)

    def _become_primary(self) -> Iterator[Event]:
        if self.instance is None:
            raise RemoteProtocolError("the app was told that it is primary before it had a state")
        if not self._primary:
            self._primary = True
            self.tasks.effects.start(self._effects)
            self.tasks.queries.is_live = True
            self._log_jumps()
            yield BecamePrimary()
