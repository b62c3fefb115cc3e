"""Feeder that gives the app its input, and passes an operator's questions and orders to its waiting handlers.

The app gets its checkpoint's blob and the log's records, as far as it is allowed to and has room.

An order is an impulse of the instance to itself. It is answered once the app has obeyed it: after the record that holds
it, the app is asked for the result.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from immortal.coordinator.core import events as ev
from immortal.coordinator.core.effects import OperatorAnswered, ReadRecords
from immortal.coordinator.core.errors import AppProtocolError
from immortal.coordinator.core.group_commit import Group
from immortal.coordinator.core.input.back_pressure import Impulses
from immortal.coordinator.core.interfaces import AuditEntry, Token
from immortal.coordinator.core.life_cycle.recovery import BEHIND, Lifecycle
from immortal.coordinator.core.life_cycle.session import (
    GETS_RECORDS,
    RECOVERED,
    RECOVERING,
    REPLAYS,
    WORKS,
    Phase,
    Step,
)
from immortal.coordinator.core.peers import Peers
from immortal.coordinator.core.state import CoreState
from immortal.protocol import system_methods
from immortal.protocol.messages import MessageType
from immortal.protocol.readers import Message
from immortal.protocol.record import decode_header
from immortal.protocol.trailer import decode_trailer


@dataclass(slots=True, eq=False, repr=False)
class RecordFeeder:
    """Feeder that gives the app its checkpoint's blob and the log's records."""

    state: CoreState
    peers: Peers
    lifecycle: Lifecycle

    def feed(self) -> None:
        """Give the app its next input, as far as it is allowed to and has room."""
        state, session = self.state, self.state.session
        if session.phase in RECOVERING:
            if not self._recover():
                return
            if session.phase is Phase.FOLLOWING and not state.write_lease.writes:
                if state.write_lease.follows and not state.write_lease.is_granted:
                    self._read()  # to the end of the log, and what the writer adds
                return
        elif session.reading or self._is_input_blocked:
            return
        if (
            session.fed_sequence_id < state.log.durable_sequence_id  # most of the time it has all of them
            and session.phase in GETS_RECORDS
            and not session.reading
            and session.fed_sequence_id < self._last_sequence_id()
        ):
            self._read()
        if session.acceptances:
            state.outbox.send_acceptances()

    def _read(self) -> None:
        session = self.state.session
        session.reading = True
        first = session.fed_sequence_id + 1
        self.state.effects.append(ReadRecords(first, self.state.limits.read_size_bytes, session.number))

    def _recover(self) -> bool:
        """Continue the recovery; return True if the app can get more in this turn."""
        session = self.state.session
        if session.phase is Phase.LOADING:
            self.lifecycle.load_if_due()
            return False
        if session.refused:
            return False
        gets_none = session.reading or self._is_input_blocked or session.waits_for_hello
        if (
            gets_none
            and session.phase in REPLAYS
            and self.state.write_lease.follows
            and self.peers.outbound.spilling.full
        ):
            self.lifecycle.reload_if_due()
        if session.reading or self._is_input_blocked:
            return False
        if session.phase is Phase.RESTORING:
            read = self.lifecycle.recovery.next_read()
            if read is None:
                session.advance(Step.BLOB_SENT)
            else:
                session.reading = True
                self.state.effects.append(read)
        if session.phase in REPLAYS:
            if session.phase is Phase.REPLAYING and self.state.following:
                session.advance(Step.FOLLOWS)
            if session.waits_for_hello:
                return False
            self.lifecycle.send_introduction()
            self.lifecycle.end_replay_if_due()
        return True

    @property
    def _is_input_blocked(self) -> bool:
        """True if the app gets no input now: it has enough to read, must send its last checkpoint, or is paused."""
        state = self.state
        return (
            state.session.unsent_bytes >= state.limits.app_window_bytes
            or state.shutdown.is_feeding_stopped
            or state.pause.is_paused
        )

    def _last_sequence_id(self) -> int:
        """Return the last record that the app can get now."""
        state, session = self.state, self.state.session
        if self.lifecycle.proof is BEHIND:
            return session.replay_target  # after a later record the missing calls could not be told apart
        if session.phase in WORKS:
            return state.log.durable_sequence_id
        if session.phase in REPLAYS:
            return state.versions.replay_bound(session.replay_target)
        return state.log.durable_sequence_id if session.flushes else session.replay_target  # as above

    def checkpoint_chunk_read(self, event: ev.CheckpointChunkRead) -> None:
        session = self.state.session
        session.reading = False
        if session.phase is not Phase.RESTORING:
            return
        self.lifecycle.recovery.chunk_read(event.data)
        self.state.outbox.send(event.data)
        if self.lifecycle.recovery.next_read() is None:
            session.advance(Step.BLOB_SENT)  # from here on the app can send what a restored app can

    def records_read(self, event: ev.RecordsRead) -> None:
        state, session = self.state, self.state.session
        if event.session not in (None, session.number):
            return  # the session that asked is gone
        session.reading = False
        if session.phase not in GETS_RECORDS or state.shutdown.is_feeding_stopped or state.pause.is_paused:
            return
        if state.write_lease.follows and event.summary is not None and not self.lifecycle.log_grew(event.summary):
            return
        replaying = session.phase in REPLAYS
        for value in event.values:
            header = decode_header(value)
            if header.sequence_id != session.fed_sequence_id + 1:
                return  # of a session that has ended, or after the replay's end
            if header.sequence_id > self._last_sequence_id():
                return
            record = memoryview(value)[: header.size_bytes]
            trailer = decode_trailer(memoryview(value)[header.size_bytes :], header.check)
            if replaying:
                self.peers.outbound.expected.expect_record(header.sequence_id, record, trailer)
                self.peers.admission.replayed(header.sequence_id, record, trailer.batches)
                if state.following:
                    self.peers.outbound.place(trailer.outputs)
            session.fed_sequence_id = header.sequence_id
            state.outbox.send_record(record, trailer.batches)

    def committed(self, group: Group) -> None:
        """Give an app that is up to date the durable record of ``group``: the same bytes that were written."""
        session = self.state.session
        if (
            group.record is not None
            and group.sequence_id == session.fed_sequence_id + 1
            and session.phase in RECOVERED
            and group.sequence_id <= self._last_sequence_id()
            and not self._is_input_blocked
        ):
            session.fed_sequence_id = group.sequence_id
            self.state.outbox.send_record(group.record, group.batches)


OPEN_MAX = 64  # unanswered questions and orders: an app that is busy for long gets no more


@dataclass(slots=True, eq=False, repr=False)
class _Ordered:
    """Operator's order that is in the log, and whose result must still be asked for."""

    token: Token
    sequence_id: int
    message_index: int


@dataclass(slots=True, eq=False, repr=False)
class WaitingHandlers:
    """Questions and orders of operators about waiting handlers."""

    state: CoreState
    impulses: Impulses
    _ticket: int = 0
    _unanswered: dict[int, tuple[Token, _Ordered | None]] = field(default_factory=dict)  # by ticket
    _ordered: deque[_Ordered] = field(default_factory=deque)  # orders whose results were not asked for yet

    @property
    def has_work(self) -> bool:
        """True if an order's result must still be asked for: :meth:`advance` can do something."""
        return bool(self._ordered)

    def query(self, event: ev.HandlersAsked) -> None:
        if problem := self._problem():
            self._answer(event.token, {"refused": problem})
        else:
            self._send(event.token, None, event.task, event.retries)

    def order(self, event: ev.HandlerOrdered) -> None:
        problem = self._problem() or self.state.log_capacity.full_reason or self._paused()
        if problem:
            self._answer(event.token, {"refused": problem})
            return
        order = event.order
        group = self.impulses.log_own(1, system_methods.encode_order(order))
        index = sum([batch.count for batch in group.batches[:-1]])
        group.transaction.audit.append(AuditEntry(self.state.now_ns, order.who, order.in_words()))
        self._ordered.append(_Ordered(event.token, self.state.log.open_sequence_id, index))

    def _problem(self) -> str:
        name, session = self.state.name, self.state.session
        if session.phase not in WORKS:
            return (
                f"the app of {name!r} does not work now (phase: {session.phase.value}), and only it knows what "
                f"its handlers wait for: try again once it does"
            )
        if MessageType.HANDLERS_ASKED not in session.extensions:
            return f"the app of {name!r} has an SDK that does not tell of its handlers: restart it with this one"
        if len(self._unanswered) + len(self._ordered) >= OPEN_MAX:
            return f"the app of {name!r} has not answered {OPEN_MAX} questions yet: it is busy"
        return ""

    def _paused(self) -> str:
        """Return why an order must wait until the instance is resumed; "" if it need not."""
        name, pause = self.state.name, self.state.pause
        if not pause.is_paused:
            return ""
        return f"{name!r} is paused by {pause.by}, and its handlers get no order until 'immortal resume {name}'"

    def advance(self) -> None:
        """Ask the app for the results of the orders in its records."""
        while self._ordered and self._ordered[0].sequence_id <= self.state.session.fed_sequence_id:
            entry = self._ordered.popleft()
            self._send(entry.token, entry)

    def _send(self, token: Token, ordered: _Ordered | None, task: int = 0, retries: bool = False) -> None:
        self._ticket += 1
        self._unanswered[self._ticket] = token, ordered
        place = (-1, 0) if ordered is None else (ordered.sequence_id, ordered.message_index)
        question = system_methods.HandlersQuestion(self._ticket, task, *place, retries)
        self.state.outbox.send_control(MessageType.HANDLERS_ASKED, system_methods.encode_handlers_question(question))

    def answered(self, message: Message) -> None:
        """Pass the app's answer on to the operator. Raises RemoteProtocolError."""
        answer = system_methods.decode_handlers_answer(message.data)
        unanswered = self._unanswered.pop(answer.ticket, None)
        if unanswered is None:
            raise AppProtocolError(
                f"the app sent Handlers (92) for the question {answer.ticket}, which it was not asked, or has answered"
            )
        token, ordered = unanswered
        place = {} if ordered is None else {"record": ordered.sequence_id, "message": ordered.message_index}
        self._answer(token, {**answer.value, **place})

    def app_lost(self) -> None:
        """Answer all operators, since the app is gone. Its successor obeys the orders in the log."""
        unanswered, ordered = self._unanswered, self._ordered
        self._unanswered, self._ordered = {}, deque()
        for token, entry in unanswered.values():
            if entry is None:
                self._answer(token, {"refused": "the app has ended before it could answer: try again"})
            else:
                ordered.append(entry)
        for entry in ordered:
            text = (
                f"the order is in the log, as record {entry.sequence_id}, or about to be, and the app has ended before "
                f"it said what that came to: the next one obeys it ('immortal handlers {self.state.name}')"
            )
            self._answer(
                entry.token, {"done": None, "text": text, "record": entry.sequence_id, "message": entry.message_index}
            )

    def _answer(self, token: Token, answer: Mapping[str, object]) -> None:
        self.state.effects.append(OperatorAnswered(token, answer))
