"""Queries that are not logged: a client asks, and the app answers between two records.

    taken --there is room at the app--> asked --its answer--> held --what it follows from is durable--> told

The state that a query sees follows from records, which were durable before the app got them, and from verdicts of the
app, which may not be durable yet: an answer after such a verdict waits for it. So no crash undoes what a client was
told.

A query that can't be asked now is refused, and the client repeats it until its time is over. Callers take turns, and
the app has only as many queries at once as it answers in some milliseconds: so one caller's flood delays neither
records nor the queries of others.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, field

from immortal.coordinator.core import notices
from immortal.coordinator.core.client.requests import Clients
from immortal.coordinator.core.errors import AppProtocolError
from immortal.coordinator.core.failures.call_failure import CallFailures
from immortal.coordinator.core.failures.poison_guard import digest_of
from immortal.coordinator.core.input.admission import Admission
from immortal.coordinator.core.interfaces import Token
from immortal.coordinator.core.life_cycle.session import WORKS
from immortal.coordinator.core.state import CoreState
from immortal.protocol.client_frames import ClientCode, ClientFrame, Reply, ReplyKind, decode_query_call
from immortal.protocol.errors import ProtocolError
from immortal.protocol.messages import MessageType
from immortal.protocol.queries import QueryQuestion, decode_query_answer, encode_query
from immortal.protocol.readers import Message

Key = tuple[str, str, int]  # caller, client ID, the client's number of the query
CONCURRENCY_MIN = 2  # one is being answered, one is in transit
ANSWER_KINDS = (ReplyKind.VALUE, ReplyKind.NOTHING, ReplyKind.RAISED)


@dataclass(slots=True, eq=False, repr=False)
class _Query:
    token: Token
    frame: ClientFrame
    caller: str
    method_id: int
    arguments: bytes
    sent_ns: int = 0
    _digest: bytes = b""

    @property
    def key(self) -> Key:
        return self.caller, self.frame.client_id, self.frame.number

    @property
    def asker(self) -> str:
        """Name under which queries take turns: the caller's, or the client's if callers have no keys."""
        return self.caller or f"~{self.frame.client_id}"

    @property
    def digest(self) -> bytes:
        """Digest that identifies the query when it is repeated."""
        if not self._digest:
            self._digest = digest_of(self.asker, self.method_id, self.arguments)
        return self._digest


@dataclass(slots=True, eq=False, repr=False)
class Queries:
    """Open queries of one instance."""

    state: CoreState
    clients: Clients
    call_failures: CallFailures
    admission: Admission
    answered_count: int = 0
    _ticket: int = 0
    _open: dict[Key, _Query] = field(default_factory=dict)
    _open_bytes: int = 0
    _open_by_asker: Counter[str] = field(default_factory=Counter)  # by asker
    _waiting: OrderedDict[str, deque[_Query]] = field(default_factory=OrderedDict)  # by asker, in turns
    _at_app: dict[int, _Query] = field(default_factory=dict)  # by ticket
    _concurrency: int = CONCURRENCY_MIN  # most queries at the app at once
    _held_answers: deque[tuple[int, _Query, Reply]] = field(default_factory=deque)  # by commit to wait for
    _is_exclusive: bool = False  # the app handles a query that may end its process: it gets no other one meanwhile
    _barred: dict[int, int] = field(default_factory=dict)  # time until which a method is refused, by method ID

    @property
    def has_work(self) -> bool:
        """True if queries wait for the app, or answers wait for a commit: :meth:`advance` can do something."""
        return bool(self._waiting or self._held_answers)

    def received(self, token: Token, frame: ClientFrame, caller: str) -> None:
        """Accept a QUERY, or refuse it. ``caller``: the name that its key proves."""
        if self.clients.refuses(token, frame, caller):
            return
        known = self._open.get((caller, frame.client_id, frame.number))
        if known is not None:  # the client repeats it
            known.token = token
            return
        refusal = self._refusal(frame, caller)
        if refusal is not None:
            self.clients.answers.refuse(token, frame, *refusal)
            return
        query = _Query(token, frame, caller, *decode_query_call(frame.payload))
        self._open[query.key] = query
        self._open_by_asker[query.asker] += 1
        self._open_bytes += len(frame.payload)
        self._waiting.setdefault(query.asker, deque()).append(query)

    def _refusal(self, frame: ClientFrame, caller: str) -> tuple[ClientCode, str] | None:
        state, session, permissions = self.state, self.state.session, self.admission.permissions
        name, now_ns = state.name, state.now_ns
        if session.phase not in WORKS or session.fed_sequence_id < 0:  # an app is primary only after its first record
            text = f"the app of {name!r} does not work now (phase: {session.phase.value}): ask again once it does"
            return ClientCode.NOT_READY, text
        if MessageType.QUERY_ASKED not in session.extensions:
            return ClientCode.LOGGED_ONLY, f"the app of {state.name!r} takes queries as logged calls only"
        try:
            method_id, arguments = decode_query_call(frame.payload)
        except ProtocolError as error:
            return ClientCode.MALFORMED, str(error)
        method = permissions.name_of(method_id)
        if permissions.find_forbidden(caller, frame.payload):
            text = self.admission.format_permission_refusal(caller, method)
            self.call_failures.note_forbidden(caller, 1, text)
            return ClientCode.MALFORMED, text
        asker = caller or f"~{frame.client_id}"
        if self.admission.is_nested(arguments):
            text = self.admission.format_nesting_refusal(f"the query {method}")
            self.call_failures.note_nested(asker, 1, f"{text} (from {asker!r})")
            return ClientCode.MALFORMED, text
        if not permissions.is_query(method_id):
            return ClientCode.MALFORMED, f"{method!r} of {state.name!r} is no query: it is called without .query"
        if self._barred.get(method_id, 0) > now_ns:
            return (
                ClientCode.MALFORMED,
                f"{method!r} of {state.name!r} has changed the state: it is asked again later",
            )
        penalties = self.call_failures.penalties
        if why := penalties.hold_off_reason(asker, now_ns):
            return ClientCode.BUSY, why
        if why := penalties.query_refusal(digest_of(asker, method_id, arguments)) if penalties.has_suspects else "":
            return ClientCode.MALFORMED, why
        limits, asker_count = state.limits, self._open_by_asker[asker]
        if (
            len(self._open) >= limits.queries_open_max
            or asker_count >= limits.caller_queries_max
            or self._open_bytes + len(frame.payload) > max(limits.queries_bytes, len(frame.payload))
        ):
            return (
                ClientCode.BUSY,
                f"{state.name!r} has {len(self._open)} queries to answer, {asker_count} of them here",
            )
        open_count = self.clients.table.open_by_owner[caller] + asker_count
        if not self.admission.admit(caller, frame.payload, 1, open_count)[0]:
            return ClientCode.BUSY, f"{caller!r} has used up what it may call of {state.name!r} for now"
        return None

    # --- the app -----------------------------------------------------------------------------------------------------

    def advance(self) -> None:
        """Give the app as many queries as it has room for, and send the answers that are durable."""
        state = self.state
        while self._waiting and self._has_room():
            asker, queries = next(iter(self._waiting.items()))
            penalties = self.call_failures.penalties
            is_suspected = penalties.has_suspects and penalties.is_suspected(queries[0].digest)
            if is_suspected and self._at_app:
                break
            self._is_exclusive = is_suspected
            query = queries.popleft()
            if queries:
                self._waiting.move_to_end(asker)
            else:
                del self._waiting[asker]
            self._ticket += 1
            self._at_app[self._ticket] = query
            query.sent_ns = state.now_ns
            question = QueryQuestion(self._ticket, query.method_id, query.arguments, state.now_ns)
            state.outbox.send_control(MessageType.QUERY_ASKED, encode_query(question))
        while self._held_answers and self._held_answers[0][0] <= state.log.durable_ticket:
            _, query, reply = self._held_answers.popleft()
            self._send_answer(query, reply)

    def answered(self, message: Message) -> None:
        """Handle the app's answer. Raises RemoteProtocolError."""
        state = self.state
        answer = decode_query_answer(message.data)
        query = self._at_app.pop(answer.ticket, None)
        if query is None or answer.kind not in ANSWER_KINDS:
            raise AppProtocolError(
                f"the app sent QueryAnswered (94) of kind {answer.kind} for the query {answer.ticket}: one that it was "
                f"asked and has not answered, and a kind from 1 to 3 were expected"
            )
        self._is_exclusive = False
        if self.call_failures.penalties.has_suspects:
            self.call_failures.penalties.query_answered(query.digest)
        if state.now_ns - query.sent_ns > state.limits.queries_at_app_ns:  # a slow answer: fewer at once
            self._concurrency = max(CONCURRENCY_MIN, self._concurrency // 2)
        elif len(self._at_app) + 1 >= self._concurrency < state.limits.queries_at_app_max:
            self._concurrency += 1
        if answer.changed:
            self._barred[query.method_id] = state.now_ns + state.limits.query_barred_ns
            state.report(notices.QueryChangedState(self.admission.permissions.name_of(query.method_id)))
        # The app's earlier verdicts are in the log, or will be: the answer, which follows from them, waits for that.
        reply = self.admission.checked_reply(Reply(query.frame.number, answer.kind, answer.value))
        if state.last_verdict_ticket <= state.log.durable_ticket:
            self._send_answer(query, reply)
        else:
            self._held_answers.append((state.last_verdict_ticket, query, reply))

    def _has_room(self) -> bool:
        room = min(self._concurrency, self.state.limits.queries_at_app_max)
        return len(self._at_app) < room and not self._is_exclusive and self.state.session.phase in WORKS

    def _send_answer(self, query: _Query, reply: Reply) -> None:
        self._close(query)
        self.answered_count += 1
        self.clients.answers.answer_query(query.token, query.frame, reply)

    def _close(self, query: _Query) -> None:
        del self._open[query.key]
        self._open_bytes -= len(query.frame.payload)
        self._open_by_asker[query.asker] -= 1
        if not self._open_by_asker[query.asker]:
            del self._open_by_asker[query.asker]

    def describe(self) -> dict[str, int]:
        """Return the counts for the status."""
        return {"open_queries": len(self._open), "answered_queries": self.answered_count}

    def app_lost(self, *, at_query: bool) -> None:
        """Refuse all open queries, since the app is gone; clients ask its successor. Drop held answers: they can follow
        from verdicts that are in no log.

        ``at_query``: the app may have died at the first unanswered query.
        """
        if at_query and self._at_app:
            query = next(iter(self._at_app.values()))
            self.call_failures.penalties.query_died(query.digest)
            self.call_failures.penalize_caller(query.asker, 1)
        self._is_exclusive = False
        for query in list(self._open.values()):
            self._close(query)
            text = f"the app of {self.state.name!r} has ended before it answered"
            self.clients.answers.refuse(query.token, query.frame, ClientCode.NOT_READY, text)
        self._waiting.clear()
        self._at_app.clear()
        self._concurrency = CONCURRENCY_MIN
        self._held_answers.clear()
