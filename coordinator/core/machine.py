"""The coordinator as one state machine: events in, effects out.

It composes the app's session, the group commit and the streams. An event never waits: what must wait for something
(durability, room in a window, an answer of the disk) is picked up again by the event that brings it.

The order that keeps the promises: input -> log -> durable -> (acknowledged to its sender, given to the app); and what
the app makes of a record is sent only after that record was given to it, so after it was durable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from coordinator.core import events as ev
from coordinator.core.app_messages import Calls, read_calls
from coordinator.core.checkpoint_writer import CheckpointWriter
from coordinator.core.effects import (
    CloseApp,
    Commit,
    Effect,
    LoadLog,
    OpenPeer,
    PauseApp,
    ReadRecords,
    Report,
    ResumeApp,
    SendToApp,
    Stop,
    Trim,
)
from coordinator.core.errors import AppProtocolError, UnknownDestinationError, require
from coordinator.core.group_commit import Group, GroupCommit
from coordinator.core.interfaces import IMPULSES, ONESELF, CheckpointHeader, LogSummary, SourcePosition
from coordinator.core.limits import Limits
from coordinator.core.peers import Peers
from coordinator.core.recovery import Recovery, without_outputs
from coordinator.core.session import AWAITING_CHECKPOINT, GETS_RECORDS, AppSession, Phase, Step
from coordinator.core.status import describe
from protocol.batch import encode_batch
from protocol.errors import ImmortalError, RemoteProtocolError
from protocol.extensions import decode_hello, encode_impulses_accepted
from protocol.messages import (
    MessageType,
    decode_attach_to,
    encode_checkpoint,
    encode_message,
)
from protocol.readers import BlobData, BlobStart, Message
from protocol.record import CHECKPOINT_SEQUENCE_ID, decode_header, encode_record
from protocol.trailer import BatchKind, BatchSource

_CALLS = frozenset({MessageType.RPC, MessageType.RPC_BATCH, MessageType.STREAM_BATCH, MessageType.IMPULSE_BATCH})
LOGGED_EXTENSIONS = frozenset({MessageType.RECORD_TIME})
"""Extensions that change what the log holds: an app must ask for the same ones all its life."""


class Machine:
    """One coordinator, from the opening of its log to its end.

    ``name``: the instance. ``summary``: its log, as opened.
    """

    def __init__(self, name: str, summary: LogSummary, limits: Limits | None = None) -> None:
        self.name = name
        self.limits = limits or Limits()
        self.stopped = False
        self._effects: list[Effect] = []
        self._now_ns = 0
        self._committer_id = summary.committer_id
        self._epoch = summary.epoch
        last_checkpoint_ns = max((header.time_ns for header in summary.checkpoints), default=0)
        self._log = GroupCommit(
            summary.committer_id,
            summary.last_sequence_id,
            max(summary.last_time_ns, last_checkpoint_ns),
            self.limits.group_size_bytes,
        )
        self._log.with_record_time = MessageType.RECORD_TIME in (summary.extensions or ())
        self._session = AppSession(summary.committer_id)
        self._peers = Peers(
            name,
            summary.committer_id,
            self.limits,
            self._log,
            summary.epoch,
            self._effects,
            ready=summary.extensions is not None,
            committer_ids=dict(summary.peers),
        )
        self._peers.load_inputs(summary)
        impulses = summary.sources.get(IMPULSES)
        self._impulse_count = impulses.position if impulses else 0
        self._load_ticket = 0  # the commit to wait for before the log is loaded for a new session
        self._extensions = summary.extensions
        self._recovery = Recovery(name)
        self._writer: CheckpointWriter | None = None
        self._next_checkpoint_id = 1 + max((header.checkpoint_id for header in summary.checkpoints), default=0)
        self._last_checkpoint = without_outputs(summary.checkpoints[-1]) if summary.checkpoints else None
        self._logged_at_checkpoint = 0
        self._checkpoint_wanted = False
        self._chunks_pending_bytes = 0
        self._paused = False
        self._stopping = False
        self._final_checkpoint_asked = False
        self._final_checkpoint_id = 0
        self._goodbye_said = False
        self._handlers: dict[type, Callable[[Any], None]] = {
            ev.AppConnected: self._app_connected,
            ev.AppData: self._app_data,
            ev.AppSent: self._app_sent,
            ev.AppClosed: self._app_closed,
            ev.PeerFrameReceived: self._peer_frame_received,
            ev.PeerReplied: self._peer_replied,
            ev.PeerUnknown: self._peer_unknown,
            ev.Committed: self._committed,
            ev.ChunkWritten: self._chunk_written,
            ev.LogLoaded: self._log_loaded,
            ev.CheckpointChecked: self._checkpoint_checked,
            ev.CheckpointChunkRead: self._checkpoint_chunk_read,
            ev.RecordsRead: self._records_read,
            ev.LogFailed: self._log_failed,
            ev.CheckpointRequested: self._checkpoint_requested,
            ev.StopRequested: self._stop_requested,
        }

    def handle(self, events: Sequence[ev.Event], now_ns: int) -> list[Effect]:
        """Handle the events of one turn, in order; what is to be done now, in order.

        ``now_ns``: wall-clock time, ns since the Unix epoch. It may jump; nothing but the records' times uses it.
        """
        self._now_ns = now_ns
        for event in events:
            if self.stopped:
                break
            try:
                self._handlers[type(event)](event)
            except ImmortalError as error:
                if isinstance(event, ev.AppData) and isinstance(error, RemoteProtocolError):
                    self._refuse_app(error)
                else:
                    self._stop(error)
        if not self.stopped:
            try:
                self._end_turn()
            except ImmortalError as error:
                self._stop(error)
        effects = self._effects[:]
        self._effects.clear()
        return effects

    def _end_turn(self) -> None:
        self._feed()
        self._peers.send(self._now_ns)
        self._commit()
        self._ask_for_checkpoint()
        self._push_back()
        self._finish_stop()

    def _commit(self) -> None:
        marked = self._session.phase in (Phase.NORMAL, Phase.CHECKPOINTING)
        while self._log.commits_next:
            # Marks are new once only: they are taken when there is a record to hold them.
            marks = self._peers.new_marks() if marked and self._log.seals_next else {}
            group = self._log.next_commit(self._now_ns, marks)
            if group is not None:
                self._effects.append(Commit(group.ticket, group.transaction, group.size_bytes))

    # --- the app connects: load, restore, replay -------------------------------------------------------------------

    def _app_connected(self, event: ev.AppConnected) -> None:
        self._session.connect()
        self._session.advance(Step.APP_CONNECTED)
        # The new epoch's commit is behind all that the last app has sent: once it is durable, so is that.
        group = self._log.append_outside_record(0)
        self._epoch += 1
        group.transaction.epoch = self._epoch
        self._load_ticket = group.ticket

    def _log_loaded(self, event: ev.LogLoaded) -> None:
        if self._session.phase is not Phase.LOADING:
            return
        if self._peers.ready:
            self._effects.append(self._recovery.choose(event.summary))
            return
        self._peers.restore(None, event.summary, self._epoch)
        self._session.advance(Step.LOG_IS_NEW)
        self._send_control(MessageType.TAKE_BECOMING_PRIMARY_CHECKPOINT)

    def _checkpoint_checked(self, event: ev.CheckpointChecked) -> None:
        if self._session.phase is not Phase.LOADING:
            return
        if event.problem is not None:
            self._report(
                "error",
                f"checkpoint {event.checkpoint_id} is damaged ({event.problem}); falling back to the one before",
            )
            if (check := self._recovery.choose_another(event.checkpoint_id)) is not None:
                self._effects.append(check)
        elif (chosen := self._recovery.chosen(event.checkpoint_id)) is not None:
            self._restore(*chosen)

    def _restore(self, header: CheckpointHeader, summary: LogSummary) -> None:
        session = self._session
        session.advance(Step.CHECKPOINT_CHOSEN)
        session.fed_sequence_id = header.sequence_id
        session.replay_target = self._log.durable_sequence_id
        self._logged_at_checkpoint = self._log.logged_bytes
        self._peers.restore(header, summary, self._epoch)
        record = encode_record(self._committer_id, CHECKPOINT_SEQUENCE_ID, encode_checkpoint(header.size_bytes))
        self._send(record)
        self._report(
            "info",
            "recovering",
            {
                "checkpoint": header.checkpoint_id,
                "after_record": header.sequence_id,
                "to_replay": session.replay_target - header.sequence_id,
                "epoch": self._epoch,
            },
        )

    def _checkpoint_chunk_read(self, event: ev.CheckpointChunkRead) -> None:
        session = self._session
        session.reading = False
        if session.phase is not Phase.RESTORING:
            return
        self._recovery.chunk_read(event.data)
        self._send(event.data)

    def _records_read(self, event: ev.RecordsRead) -> None:
        session = self._session
        session.reading = False
        if session.phase not in GETS_RECORDS or self._final_checkpoint_asked:
            return
        for value in event.values:
            header = decode_header(value)
            if header.sequence_id != session.fed_sequence_id + 1:
                return  # of a session that has ended, or from behind the replay's end
            if session.phase is Phase.REPLAYING and header.sequence_id > session.replay_target:
                return
            session.fed_sequence_id = header.sequence_id
            self._send(memoryview(value)[: header.size_bytes])

    def _feed(self) -> None:
        """Give the app what it may have and has room for."""
        session = self._session
        phase = session.phase
        if phase is Phase.LOADING:
            if self._load_ticket and self._log.durable_ticket >= self._load_ticket:
                self._load_ticket = 0
                self._effects.append(LoadLog())
            return
        if session.unsent_bytes >= self.limits.app_window_bytes or session.reading or self._final_checkpoint_asked:
            return
        if phase is Phase.RESTORING:
            read = self._recovery.next_read()
            session.reading = read is not None
            if read is not None:
                self._effects.append(read)
            else:
                session.advance(Step.BLOB_SENT)
        if session.phase is Phase.REPLAYING and session.fed_sequence_id >= session.replay_target:
            session.advance(Step.CAUGHT_UP)
            session.checkpoint_sequence_id = session.fed_sequence_id
            self._send_control(MessageType.TAKE_BECOMING_PRIMARY_CHECKPOINT)
        if (
            session.phase in GETS_RECORDS
            and not session.reading
            and session.fed_sequence_id < self._log.durable_sequence_id
        ):
            session.reading = True
            self._effects.append(ReadRecords(session.fed_sequence_id + 1, self.limits.read_size_bytes))
        self._tell_acceptance()

    def _tell_acceptance(self) -> None:
        accepted = self._session.acceptance_to_send()
        if accepted is not None and MessageType.IMPULSES_ACCEPTED in self._session.extensions:
            record = self._session.control_record(MessageType.IMPULSES_ACCEPTED, encode_impulses_accepted(accepted))
            self._effects.append(SendToApp(record))

    def _send(self, data: bytes | memoryview) -> None:
        self._session.unsent_bytes += len(data)
        self._effects.append(SendToApp(data))

    def _send_control(self, message_type: MessageType) -> None:
        self._effects.append(SendToApp(self._session.control_record(message_type)))

    def _app_sent(self, event: ev.AppSent) -> None:
        self._session.unsent_bytes -= event.size_bytes

    # --- the app speaks --------------------------------------------------------------------------------------------

    def _app_data(self, event: ev.AppData) -> None:
        session = self._session
        if session.phase is Phase.WAITING or session.refused:
            return
        reader = session.reader
        reader.receive_data(event.data)
        while (message := reader.next_event()) is not None:
            if isinstance(message, Message):
                self._app_message(message)
            elif isinstance(message, BlobStart):
                self._blob_started(message)
            else:
                self._blob_data(message)

    def _app_message(self, message: Message) -> None:
        session = self._session
        message_type = message.message_type
        if not session.heard:
            session.heard = True
            if message_type == MessageType.HELLO:
                session.hello = decode_hello(message.data)
            self._check_extensions()
            if message_type == MessageType.HELLO:
                return
        if message_type in _CALLS:
            for calls in read_calls(session, self.name, message):
                self._take(calls)
        elif message_type == MessageType.ATTACH_TO:
            destination = decode_attach_to(message.data)
            if destination != self.name:
                session.attached.add(destination)
                self._effects.append(OpenPeer(destination))
        elif message_type == MessageType.TAKE_CHECKPOINT:
            self._checkpoint_wanted = True
        elif message_type == MessageType.INITIAL_MESSAGE:
            if session.phase is not Phase.FIRST_START or session.initial_message is not None:
                raise AppProtocolError("an InitialMessage may come once, at the first start, before the checkpoint")
            session.initial_message = message.data
        elif message_type == MessageType.HELLO:
            raise AppProtocolError("a Hello must be the app's first message")
        else:
            raise AppProtocolError(f"the app sent a message of type {message_type}, which is not for apps to send")

    def _check_extensions(self) -> None:
        """The log's records have, or have not, what the app asked for at its first start."""
        if not self._peers.ready:
            return
        logged = LOGGED_EXTENSIONS & (self._extensions or frozenset())
        asked = LOGGED_EXTENSIONS & self._session.extensions
        if logged != asked:
            raise AppProtocolError(
                f"the log of {self.name!r} was begun by an app with the extensions {sorted(map(int, logged))}, "
                f"this one asks for {sorted(map(int, asked))}: an instance keeps the kind of app that it was begun with"
            )

    def _take(self, calls: Calls) -> None:
        if not calls.impulses:
            self._peers.append(calls.destination, calls.count, calls.payload)
            return
        if calls.destination == ONESELF:
            group = self._log_impulses(calls.count, calls.payload)
        else:
            stream = self._peers.output(calls.destination)
            group = self._log.append_outside_record(len(calls.payload), from_app=True)
            group.transaction.impulses.append(stream.append_impulses(calls.count, calls.payload, group.ticket))
        group.impulses_accepted += calls.count

    def _log_impulses(self, count: int, payload: bytes) -> Group:
        front = encode_batch(payload, count)
        source = BatchSource(BatchKind.IMPULSES, ONESELF, self._impulse_count + 1, count, self._now_ns)
        group = self._log.append(
            (front, payload) if front else (payload,), len(front) + len(payload), source, from_app=True
        )
        self._impulse_count += count
        group.transaction.sources[IMPULSES] = SourcePosition(self._committer_id, self._epoch, self._impulse_count)
        return group

    def _refuse_app(self, error: RemoteProtocolError) -> None:
        """The app broke the protocol: its connection ends; the next one recovers."""
        self._session.refused = True
        self._report("error", f"the app broke the protocol: {error}; its connection is closed, nothing logged is lost")
        self._say(MessageType.REFUSAL, str(error))
        self._effects.append(CloseApp())

    def _say(self, message_type: MessageType, text: str) -> None:
        if self._session.phase is Phase.RESTORING:
            return  # the app would take it for a part of the blob
        if message_type in self._session.extensions:
            message = encode_message(message_type, text.encode())
            self._effects.append(SendToApp(self._session.control_record(message_type, message)))

    def _app_closed(self, event: ev.AppClosed) -> None:
        session = self._session
        if session.phase is Phase.WAITING:
            return
        if not session.refused and (session.reader.buffered_bytes or session.reader.inside_blob):
            self._report("warning", "the app's connection ended in the middle of a message; that message is dropped")
        if self._goodbye_said:
            self._stop(None)
            return
        self._report("warning", "the app is gone; waiting for the next one", {"phase": session.phase.value})
        session.advance(Step.APP_LOST)
        session.connect()
        self._log.forget_app()
        self._peers.forget_outputs()
        self._writer = None
        self._recovery.forget()
        self._load_ticket = 0
        self._checkpoint_wanted = False
        self._paused = False
        if self._stopping:
            self._stop(None)

    # --- checkpoints -----------------------------------------------------------------------------------------------

    def _ask_for_checkpoint(self) -> None:
        session = self._session
        if session.phase is not Phase.NORMAL or self._final_checkpoint_asked:
            return
        grown_bytes = self._log.logged_bytes - self._logged_at_checkpoint
        if self._checkpoint_wanted or self._stopping or grown_bytes >= self.limits.checkpoint_trigger_bytes:
            self._checkpoint_wanted = False
            self._final_checkpoint_asked = self._stopping
            self._logged_at_checkpoint = self._log.logged_bytes
            session.advance(Step.CHECKPOINT_ASKED)
            session.checkpoint_sequence_id = session.fed_sequence_id
            self._send_control(MessageType.TAKE_CHECKPOINT)

    def _blob_started(self, blob: BlobStart) -> None:
        session = self._session
        if session.phase not in AWAITING_CHECKPOINT or self._writer is not None:
            raise AppProtocolError(
                f"the app sent a Checkpoint in the phase {session.phase.value!r}, none was asked for"
            )
        if not session.heard:
            session.heard = True
            self._check_extensions()
        if session.phase is Phase.FIRST_START and session.initial_message is None:
            raise AppProtocolError("the app's first checkpoint came without an InitialMessage (type 9) before it")
        if session.phase is Phase.BECOMING_PRIMARY:
            # An app that sends batches of its own making flushes first; a base app may hold messages back.
            self._peers.finish_replay(all_sent=MessageType.STREAM_BATCH in session.extensions)
        outputs = self._peers.outputs
        self._writer = CheckpointWriter(
            self._next_checkpoint_id,
            session.checkpoint_sequence_id,
            blob.size_bytes,
            {name: stream.mark for name, stream in outputs.items()},
            {name: stream.unacknowledged for name, stream in outputs.items() if stream.waiting_bytes},
            self.limits.chunk_size_bytes,
        )
        if self._final_checkpoint_asked:
            self._final_checkpoint_id = self._next_checkpoint_id
        self._next_checkpoint_id += 1

    def _blob_data(self, blob: BlobData) -> None:
        writer = self._writer
        require(writer is not None, "a blob without a Checkpoint")
        if writer is None:
            return
        chunk = writer.receive(blob)
        if chunk is not None:
            self._chunks_pending_bytes += len(chunk.data)
            self._effects.append(chunk)
        if not blob.last:
            return
        session = self._session
        group = self._log.append_outside_record(0)
        if session.phase is Phase.FIRST_START:
            group = self._log_first_record()
        if session.phase is Phase.BECOMING_PRIMARY:
            self._report("info", "recovered", {"epoch": self._epoch, "sequence_id": session.fed_sequence_id})
        group.transaction.checkpoint = writer.header(self._log.time_ns(self._now_ns))
        self._writer = None
        session.advance(Step.CHECKPOINT_RECEIVED)

    def _log_first_record(self) -> Group:
        """The initial message is record 0, durable together with the first checkpoint: never one without the other."""
        session = self._session
        self._log.with_record_time = MessageType.RECORD_TIME in session.extensions
        message = encode_message(MessageType.INITIAL_MESSAGE, session.initial_message or b"")
        source = BatchSource(BatchKind.INITIAL, ONESELF, 1, 1, self._now_ns)
        group = self._log.append((message,), len(message), source)
        group.transaction.extensions = self._extensions = session.extensions
        return group

    def _checkpoint_committed(self, header: CheckpointHeader) -> None:
        self._last_checkpoint = without_outputs(header)
        self._report(
            "info",
            "checkpoint taken",
            {"checkpoint": header.checkpoint_id, "after_record": header.sequence_id, "bytes": header.size_bytes},
        )
        if not self._peers.ready:
            self._peers.became_ready(self._now_ns)
        self._effects.append(Trim())
        if header.checkpoint_id == self._final_checkpoint_id:
            self._goodbye_said = True
            self._say(MessageType.GOODBYE, "the coordinator was asked to stop")
            self._effects.append(CloseApp())

    def _chunk_written(self, event: ev.ChunkWritten) -> None:
        self._chunks_pending_bytes -= event.size_bytes

    def _checkpoint_requested(self, event: ev.CheckpointRequested) -> None:
        self._checkpoint_wanted = True

    # --- the log ---------------------------------------------------------------------------------------------------

    def _committed(self, event: ev.Committed) -> None:
        group = self._log.committed(event.ticket)
        transaction = group.transaction
        if transaction.sources:
            self._peers.became_durable([(name, known.position) for name, known in transaction.sources.items()])
        if transaction.epoch is not None:
            self._report("debug", "new epoch", {"epoch": transaction.epoch})
        session = self._session
        if group.impulses_accepted:
            session.note_accepted(group.impulses_accepted, self._log.durable_sequence_id)
        if (
            group.record is not None
            and group.sequence_id == session.fed_sequence_id + 1
            and session.phase in (Phase.NORMAL, Phase.CHECKPOINTING, Phase.BECOMING_PRIMARY)
            and session.unsent_bytes < self.limits.app_window_bytes
            and not self._final_checkpoint_asked
        ):  # the app is up to date: the very bytes that were just written go to it
            session.fed_sequence_id = group.sequence_id
            self._send(group.record)
        if transaction.checkpoint is not None:
            self._checkpoint_committed(transaction.checkpoint)

    def _log_failed(self, event: ev.LogFailed) -> None:
        self._stop(event.error)

    # --- peers -----------------------------------------------------------------------------------------------------

    def _peer_frame_received(self, event: ev.PeerFrameReceived) -> None:
        self._peers.received(event.token, event.frame, self._now_ns)

    def _peer_replied(self, event: ev.PeerReplied) -> None:
        self._peers.replied(event.destination, event.tag, event.frame)

    def _peer_unknown(self, event: ev.PeerUnknown) -> None:
        self._stop(UnknownDestinationError(event.reason))

    # --- back-pressure and the end -----------------------------------------------------------------------------------

    def _push_back(self) -> None:
        limits = self.limits
        outputs_full = self._peers.waiting_bytes > limits.output_waiting_bytes
        full = (
            self._log.from_app_bytes > limits.log_pending_bytes
            or self._chunks_pending_bytes > limits.chunks_pending_bytes
            or (outputs_full and not self._stopping)  # the last checkpoint comes behind what the app has sent
        )
        if full != self._paused and self._session.phase is not Phase.WAITING:
            self._paused = full
            self._effects.append(PauseApp() if full else ResumeApp())

    def _stop_requested(self, event: ev.StopRequested) -> None:
        if self._stopping:
            return
        self._stopping = True
        self._peers.accepting = False
        if self._session.phase not in (Phase.NORMAL, Phase.CHECKPOINTING, Phase.BECOMING_PRIMARY):
            self._say(MessageType.GOODBYE, "the coordinator was asked to stop")
            self._stop(None)

    def _finish_stop(self) -> None:
        if self._goodbye_said and self._session.unsent_bytes <= 0:
            self._stop(None)

    def _stop(self, error: ImmortalError | None) -> None:
        if self.stopped:
            return
        if error is not None and self._session.phase is not Phase.WAITING:
            self._say(MessageType.REFUSAL, f"the coordinator stops: {error}")
        self.stopped = True
        self._session.advance(Step.STOP)
        self._effects.append(Stop(error))

    def _report(self, level: str, message: str, fields: dict[str, object] | None = None) -> None:
        self._effects.append(Report(level, message, fields or {}))

    def status(self, now_ns: int) -> dict[str, object]:
        """What `immortal status` shows of a live instance; plain values."""
        return describe(
            self.name,
            self._committer_id,
            self._epoch,
            self._session,
            self._log,
            self._peers,
            self._last_checkpoint,
            now_ns,
        ) | {"impulses": self._impulse_count}
