# cython: annotation_typing=False
"""App's side of the protocol without I/O: bytes in, events and bytes out; it calls the handlers.

    nothing --11--> __init__, initial message, checkpoint --the initial message is logged--> primary      first start
    nothing --blob--> restored --records--> ... --11--> checkpoint --> primary                            recovery
                                               --15--> primary
    nothing --blob--> restored --records--> ... --10--> upgraded, checkpoint --2--> checkpoint --> primary      upgrade
                                                                             --records--> ...    one of the log's past
    nothing --blob--> restored --12--> upgraded --records--> ...                                what-if of an upgrade

One thread creates the :class:`Dispatcher` and makes all calls to it; the handlers run in that thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from immortal.appsdk.calls.context import Context
from immortal.appsdk.calls.outbox import Chunk, Outbox, encode_call, make_writer
from immortal.appsdk.dispatch.delivery import Delivery
from immortal.appsdk.dispatch.events import (
    BecamePrimary,
    Blob,
    Event,
    Goodbye,
    JournalGrew,
    OutputReady,
    Refusal,
    SnapshotBegun,
)
from immortal.appsdk.dispatch.invocation import answer_query
from immortal.appsdk.dispatch.lifecycle import HookGate, Life, guarded
from immortal.appsdk.dispatch.records import Records, Rewinds
from immortal.appsdk.dispatch.state_repair import StateRepair, one_line
from immortal.appsdk.dispatch.verdicts import Failures
from immortal.appsdk.effects.effect import EffectRunner
from immortal.appsdk.errors import StateError, UpgradeError
from immortal.appsdk.handlers.decorators import INITIAL_METHOD_ID
from immortal.appsdk.handlers.definition import Definition
from immortal.appsdk.handlers.proxy import all_method_names
from immortal.appsdk.nodes.nodes import Nodes
from immortal.appsdk.ordering.multicasts import Multicasts
from immortal.appsdk.state.incoming import Incoming
from immortal.appsdk.state.journal import Entry
from immortal.appsdk.state.snapshots import Copies
from immortal.appsdk.types.handles import current
from immortal.appsdk.waiting.tasks import Tasks, describe_all, describe_one, retry_effects
from immortal.protocol.errors import RemoteProtocolError
from immortal.protocol.extensions import (
    ALL_EXTENSIONS,
    AppDescription,
    AppTime,
    Hello,
    decode_app_time,
    decode_impulses_accepted,
    decode_sources,
    decode_version,
    encode_app_description,
    encode_hello,
)
from immortal.protocol.messages import MessageType, RpcType, decode_messages, encode_checkpoint, encode_message
from immortal.protocol.queries import QueryQuestion, decode_query, encode_query_answer
from immortal.protocol.readers import BlobData, BlobStart, Record, RecordReader
from immortal.protocol.record import CONTROL_SEQUENCE_ID
from immortal.protocol.system_methods import (
    TIMES_TASK,
    HandlersAnswer,
    HandlersQuestion,
    decode_handlers_question,
    encode_handlers_answer,
)
from immortal.protocol.verdicts import (
    Handling,
    Unsaved,
    decode_careful,
    decode_verdict,
    decode_verdicts,
    encode_unsaved,
)

JOURNAL_RESULTS_FEW, JOURNAL_RESULTS_MANY, JOURNAL_SIZE_BYTES_LARGE = 100, 1_000, 1 << 20


class Dispatcher:
    """Protocol of one connection, during one life of one class.

    ``draw_seed`` returns SEED_SIZE_BYTES bytes at a first start. ``wake`` is called by other threads after they queued
    impulses for :meth:`data_to_send`. An error that is raised ends the connection: stop the app. ``effects`` runs the
    effects of handlers once the app is primary; without it they wait. ``extensions``, ``make_outbox``,
    ``make_delivery`` and ``make_tasks`` are replaced where a run is inspected. ``keeps_large_copies``: a state of any
    size can be restored without a restart. ``fails_alone`` False: a message that fails stops the app, for tests that
    must fail with it. ``compares_queries``: the state is compared around each query, at any cost.
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
        self.context.multicasts = Multicasts(self.context)
        self._nodes = self.context.nodes = Nodes(self.context)
        self.tasks = self.context.tasks = make_tasks(self.context)
        self.tasks.queries.compares_all = compares_queries
        self._life = Life(definition, self.context, self.tasks, make_delivery)
        self._failures = Failures(self.context, fails_alone=fails_alone)
        copies = Copies(enabled=any(one.can_undo for one in definition.chain), keeps_large=keeps_large_copies)
        self.records = Records(self.context, self._life, self._failures)
        self._rewinds = Rewinds(self.context, self._life, self.records, self._failures, copies)
        self.healing = StateRepair(self.context, self._life, self.records, self._failures, self._rewinds)
        self._gate = HookGate(self.context)
        self._draw_seed = draw_seed
        self._effects = effects
        self._reader = RecordReader()
        self._extended = False  # the coordinator used an extension, so it accepted our Hello
        self.is_primary = False  # if True, its hooks can still have to wait
        self.primary_since = 0  # the first record that the app handles as the primary
        self.forks_next = True  # False: the child of the last checkpoint hung
        self._reported_journals: dict[str, tuple[int, int]] = {}  # the longest ones, by handler: results, bytes
        self._upgraded = False  # the next TakeCheckpoint completes the upgrade, unless more records come
        self._awaiting_initial = False
        self._read_by_child: list[object] = []  # rows in the files of tables, while a child encodes the state
        self.streams = False  # the owner takes a :class:`Blob` as output, else its pieces
        self._sources: list[str] | None = None  # sources of the batches of the next records, see Record
        self.time: AppTime | None = None  # the instance's time, as the coordinator last sent it; None: never
        self._work = self._run()
        self.outbox.send(encode_hello(Hello(extensions, definition.label)))
        description = AppDescription(definition.version, all_method_names(definition))
        self.outbox.send(encode_app_description(description))

    @property
    def definition(self) -> Definition:
        """Definition of the class that runs now; during an upgrade the old class comes first."""
        return self._life.definition

    @property
    def instance(self) -> Any:
        return self._life.instance

    def limit_encoding(self, limit_time: Callable[[Callable[[], tuple[bytes, bytes]]], tuple[bytes, bytes]]) -> None:
        """Let ``limit_time`` call the function that encodes the state. It can stop that function with a StateError."""
        self._life.limit_time = limit_time

    @property
    def may_start_hooks(self) -> bool:
        """True if the state covers all impulses that were logged before; :class:`BecamePrimary` reports that once."""
        return self._gate.is_open

    def describe_hooks(self) -> list[dict[str, Any]]:
        """Describe what the hooks wait for; empty if there are no hooks or they do not wait."""
        return self._gate.describe() if self.definition.on_primary else []

    # --- called by the transport ------------------------------------------------------------------------------------

    def receive_data(self, data: bytes) -> None:
        """Take in bytes from the coordinator, in pieces of any size."""
        self._reader.receive_data(data)

    def next_event(self) -> Event | None:
        """Handle input up to the next event, and return that; None if there is no more input.

        Raises HandlerError, StateError, UpgradeError, RemoteProtocolError: each ends the connection. After an
        UpgradeError the output tells the coordinator of it.
        """
        current.life = self._nodes  # handles that are decoded now belong to this instance
        self.tasks.ready.note_outside()
        try:
            return next(self._work)
        finally:
            current.life = None

    def announce_leaving(self, reason: str) -> None:
        """Tell the coordinator that the app ends the connection by itself: it has not crashed."""
        if self._failures.can_fail:
            self.outbox.report(encode_message(MessageType.LEAVING, reason.encode("utf-8", "replace")))

    def data_to_send(self) -> list[Chunk]:
        """Return all bytes to be sent now, in order. The caller owns them."""
        return self.outbox.pop_chunks()

    @property
    def next_due_ns(self) -> int | None:
        """Time of the next timer, ns since the Unix epoch, at which to call :meth:`log_time`; None: no timer."""
        return self.tasks.time_impulses.next_due_ns

    def log_time(self, time_ns: int) -> None:
        """Log the instance's time, ns since the Unix epoch: it comes back as input and ends timers."""
        self.tasks.time_impulses.log_time(time_ns)

    @property
    def buffered_bytes(self) -> int:
        """Size of received bytes of records that are incomplete or not handled yet."""
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
                yield from self._restore()

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
                    self._list_executions()
                    self._save(heals=True)
                    yield from self._become_primary()  # raises before a checkpoint leaves that this code can't use
                    yield OutputReady()
            elif message_type == MessageType.BECOMING_PRIMARY:
                yield from self._become_primary()
            elif message_type == MessageType.VERDICTS:
                self._failures.add_verdicts(decode_verdicts(data))
                self._rewinds.copies.pinned = bool(self._failures.taken_back)
            elif message_type == MessageType.TAKE_BACK:
                self.healing.forced.append(decode_verdict(data))
            elif message_type == MessageType.SOURCES:
                self._sources = decode_sources(data)
            elif message_type == MessageType.CAREFUL:
                self.records.careful = decode_careful(data)
            elif message_type == MessageType.APP_TIME:
                self.time = decode_app_time(data)
                if self.time.jumped_ns:
                    self.tasks.time_impulses.note_jump(self.time.time_ns, self.time.jumped_ns)
            elif message_type == MessageType.HANDLERS_ASKED:
                self._send_handlers(decode_handlers_question(data))
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

    def _send_handlers(self, question: HandlersQuestion) -> None:
        if question.sequence_id >= 0:
            value = self.tasks.orders.outcome(question.sequence_id, question.message_index)
        elif question.retries:
            value = retry_effects(self.tasks, question.task)
        elif question.task == TIMES_TASK:
            value = self.records.times.answer()
        elif question.task:
            value = describe_one(self.tasks, question.task)
        else:
            value = describe_all(self.tasks, self.describe_hooks())
        self.outbox.report(encode_handlers_answer(HandlersAnswer(question.ticket, value)))

    def _answer_query(self, question: QueryQuestion) -> None:
        if self.instance is None or not self.is_primary:
            raise RemoteProtocolError("a query came before the app was told that it is primary")
        answer = answer_query(question, self.definition, self.instance, self.context, self.tasks)
        self.outbox.report(encode_query_answer(answer))
        if answer.changed:
            self._rewinds.reload_from_log()

    def _logged(self, record: Record) -> Iterator[Event]:
        sequence_id = record.header.sequence_id
        if self.instance is None:
            raise RemoteProtocolError(f"record {sequence_id} came before a checkpoint or a first start")
        if sequence_id != self._life.next_sequence_id:
            raise RemoteProtocolError(f"record {sequence_id} came, {self._life.next_sequence_id} was expected")
        self._upgraded = False
        record.sources = self._sources
        careful = self.records.careful
        if careful is not None and sequence_id <= careful.last_sequence_id:
            yield from self.records.announce(Handling(sequence_id))
        yield from self._rewinds.handle(record)
        if sequence_id in self._failures.taken_back:
            self.healing.apply_taken_back(sequence_id)
        if self.context.record_time_ns is not None:
            self._extended = True
        if careful is not None and sequence_id >= careful.last_sequence_id:
            self.records.careful = None  # else the death at a later record would be attributed to this one
            yield from self.records.announce(Handling(-1))
        if self.is_primary and not self._gate.is_open and self._gate.poll():
            yield BecamePrimary()
        if self._awaiting_initial:
            self._awaiting_initial = False
            self._life.require_savable()
            yield from self._become_primary()

    # --- life -------------------------------------------------------------------------------------------------------

    def _start_first(self) -> None:
        self._life.start(self._draw_seed())
        message = encode_call(make_writer("initial", INITIAL_METHOD_ID, RpcType.FORK), ())
        self.outbox.send(encode_message(MessageType.INITIAL_MESSAGE, message))
        self._checkpoint(self._life.encode())
        self._awaiting_initial = True

    def _restore(self) -> Iterator[None]:
        pieces = yield from self._life.restore(Incoming(self._blob()))
        if self._life.tables:  # a copy has none of their rows
            self._rewinds.retake_copy()
        else:
            self._rewinds.take_copy(pieces)

    def _blob(self) -> Iterator[bytes | None]:
        """Yield the pieces of the checkpoint that comes in, and None while none is there."""
        while True:
            event = self._reader.next_event()
            yield event.data if isinstance(event, BlobData) else None
            if isinstance(event, BlobData) and event.last:
                return

    def _upgrade(self, version: int | None, *, with_checkpoint: bool) -> None:
        """Bring state and code to ``version`` (None: that of the app), after all outputs of the old code."""
        if self.instance is None or self.is_primary:
            raise RemoteProtocolError(
                "an upgrade was asked for before the app had a state"
                if self.instance is None
                else "an upgrade was asked for after the app was told that it is primary"
            )
        self.outbox.close_batches()
        self._rewinds.copies.forget()
        try:
            self._life.upgrade(version)
            if with_checkpoint:
                self._checkpoint(guarded(self.definition, f"{self.definition.name}.checkpoint", self._life.encode))
                self._upgraded = True
            else:
                self._rewinds.retake_copy()
        except UpgradeError as error:
            self.outbox.send(encode_message(MessageType.UPGRADE_FAILED, error.reason.encode("utf-8", "replace")))
            raise

    def _grown_journals(self) -> Iterator[Event]:
        """Report waiting handlers whose journals grow long because they never use `continue_as`."""
        long: dict[str, list[list[Entry]]] = {}
        for task in self.tasks.all_waiting:
            if len(task.entries) >= JOURNAL_RESULTS_FEW:
                long.setdefault(task.name, []).append(task.entries)
        for name, journals in long.items():
            count = sum(map(len, journals))
            size_bytes = sum(len(entry.value) for entries in journals for entry in entries)
            told_count, told_bytes = self._reported_journals.get(name, (0, 0))
            is_long = count >= max(JOURNAL_RESULTS_MANY, 2 * told_count)
            if is_long or size_bytes >= max(JOURNAL_SIZE_BYTES_LARGE, 2 * told_bytes):
                self._reported_journals[name] = count, size_bytes
                yield JournalGrew(name, len(journals), count, size_bytes)

    def _take_checkpoint(self) -> Iterator[Event]:
        forks = self.definition.checkpoint_mode == "fork" and self.forks_next
        self._list_executions()
        if self.is_primary:
            yield from self._grown_journals()
        if self._upgraded and not self.is_primary:
            self._checkpoint(self._life.encode())
            if self.definition.retries_refused and self._failures.can_fail:
                self.outbox.send(encode_message(MessageType.RETRY_REFUSED))
            yield OutputReady()
            yield from self._become_primary()
        elif forks and self.is_primary and self._extended and not self.healing.forced:
            self.outbox.close_batches()
            self.outbox.send(encode_message(MessageType.SNAPSHOT_BEGIN))
            self._read_by_child = [table.snapshot for table in self._life.tables]
            yield SnapshotBegun(self._life.encode_blob)
        else:
            self._save(heals=self.is_primary)  # a follower takes nothing back
            self.forks_next = True
            yield OutputReady()

    def _list_executions(self) -> None:
        """Write all executions so far into their list on disk: no replay from a checkpoint lists the earlier ones."""
        if self.tasks.executions is not None:
            self.tasks.executions.flush(is_primary=self.is_primary)

    def snapshot_ended(self, reason: str, *, forks_next: bool) -> None:
        """Report the end of the child process that encodes the state. ``reason``: why there is no checkpoint, or ""."""
        self._read_by_child = []
        self.outbox.send(encode_message(MessageType.SNAPSHOT_END, reason.encode("utf-8", "replace")))
        self.forks_next = forks_next

    def snapshot_failed(self, error: StateError) -> None:
        """Ask at once for the next checkpoint, taken in this process: the child could not encode the state. Raises
        StateError if that would not help."""
        if not self._failures.can_fail:
            raise error
        self.snapshot_ended(one_line(error), forks_next=False)
        self.outbox.send(encode_message(MessageType.TAKE_CHECKPOINT))

    def _save(self, *, heals: bool) -> None:
        """Send a checkpoint, possibly of a repaired state, or a report that there is none. Raises RecoveryNeeded, and
        StateError if a message can't fail alone."""
        if self.instance is None:
            raise RemoteProtocolError("a checkpoint was asked for before the first start or a recovery")
        self.outbox.close_batches()
        if not self._failures.can_fail:
            self._checkpoint(self._life.encode())
        elif isinstance(result := self.healing.encode(heals=heals), Unsaved):
            self.outbox.send(encode_unsaved(result))
        else:
            self._checkpoint(result)

    def _checkpoint(self, pieces: Sequence[bytes]) -> None:
        """Send a checkpoint after all outputs of the records so far. Its output must be taken before more input is
        handled, since the rows of tables are read then."""
        self.outbox.close_batches()
        self._rewinds.take_copy(pieces)
        size_bytes, whole = self._life.checkpoint_blob(pieces)
        self.outbox.send(encode_checkpoint(size_bytes))
        chunks: Any = (Blob(size_bytes, whole),) if self.streams else whole
        for chunk in chunks:
            self.outbox.send(chunk)

    def _become_primary(self) -> Iterator[Event]:
        if self.instance is None:
            raise RemoteProtocolError("the app was told that it is primary before it had a state")
        if not self.is_primary:
            self._life.require_shard()
            self.is_primary = True
            self.primary_since = self.context.sequence_id + 1
            self.tasks.effects.start(self._effects)
            self.tasks.queries.is_live = True
            self._failures.report_pending()
            self._list_executions()
            self._rewinds.start_guard()
            self.tasks.time_impulses.start()
            self._gate.begin()
            if self.may_start_hooks:
                yield BecamePrimary()
