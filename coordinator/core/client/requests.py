"""Requests of clients, which call an instance and are none. Each is done once, however often it is sent.

A client numbers its requests from 1, and only the next number is accepted. The client's last number becomes durable in
one transaction with the request's record; so each process of the coordinator knows which requests were accepted. For
the app a request is a call that waits for an answer. All answers to clients are one output stream, whose receiver is
the table of clients: it acknowledges what is durable in the log, and a replay makes the rest again.

A repeated request is answered from the table, or, if it is still open, once its answer arrives. If its reply is gone,
the client is told so. The request is never done a second time.

If callers have keys, a client ID belongs to the owner of the first key that used it: nobody else can ask for its
replies, or use up its numbers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from immortal.coordinator.core.client.table import REPLY_OVERHEAD_BYTES, Client, ClientTable
from immortal.coordinator.core.clock import RunningTime
from immortal.coordinator.core.effects import ReplyToClient
from immortal.coordinator.core.input.admission import Delivery
from immortal.coordinator.core.interfaces import ONESELF, OutputBatch, Token
from immortal.coordinator.core.permissions import TokenBucket
from immortal.coordinator.core.state import CoreState
from immortal.protocol.client_frames import (
    CLIENTS,
    KEY_PREFIX,
    KNOWN_TO_COORDINATORS,
    ClientCode,
    ClientFrame,
    ClientFrameType,
    Reply,
    ReplyKind,
    caller_of,
    conflict_reply,
    decode_answer,
    encode_methods,
    encode_replies,
    logged_calls,
)
from immortal.protocol.errors import ProtocolError
from immortal.protocol.extensions import QUERIES, AppDescription
from immortal.protocol.identity import (
    CLIENT_ADVICE,
    KEY_ADVICE,
    IdentityConflict,
    describe_call_identity,
    method_of_identity,
)
from immortal.protocol.messages import decode_messages
from immortal.protocol.trace_context import is_trace_context, split_name
from immortal.protocol.trailer import BatchKind, BatchSource

CONFLICTS_REPORTED_MAX = 16  # of one frame, as a conflict is far larger than a call can be; the client repeats the rest
_FROM_CLIENTS = (ClientFrameType.HELLO, ClientFrameType.REQUEST, ClientFrameType.PING, ClientFrameType.QUERY)


@dataclass(slots=True, eq=False, repr=False)
class Clients:
    """Requests of clients to one instance."""

    state: CoreState
    delivery: Delivery
    running: RunningTime
    table: ClientTable = field(init=False)
    answers: ClientAnswers = field(init=False)
    _methods: bytes = field(default_factory=lambda: encode_methods({}))  # of the app that last connected
    _names: dict[int, str] = field(default_factory=dict)  # of its methods
    _undurable: deque[tuple[int, int]] = field(default_factory=deque)  # (ticket, size in bytes), not in the log yet
    _undurable_bytes: int = 0
    _ungathered_bytes: int = 0  # replies for which no commit was requested

    def __post_init__(self) -> None:
        self.table = ClientTable(self.state.limits, self.state.log, self.running)
        self.answers = ClientAnswers(self.state, self.table)

    def describe_methods(self, description: AppDescription) -> None:
        """Note the app's description: clients can call its own methods."""
        own = {
            method_id: name
            for (destination, method_id), name in description.methods.items()
            if destination == ONESELF and method_id >= 0
        }
        self._names = own
        queries = {method_id for destination, method_id in description.methods if destination == QUERIES}
        self._methods = encode_methods(own, queries & own.keys())

    def holder_of(self, caller: str) -> str:
        """Return the party behind a caller's name: for a client with a key, the key's owner."""
        client = self.table.get(caller.removeprefix(CLIENTS)) if caller.startswith(CLIENTS) else None
        return caller if client is None else client.owner or caller

    # --- frames of clients -------------------------------------------------------------------------------------------

    def received(self, token: Token, frame: ClientFrame, caller: str = "") -> None:
        """Handle a frame of a client whose key belongs to ``caller``. Answer it at once, except for accepted
        requests."""
        if self.refuses(token, frame, caller):
            return
        client = self.table.get(frame.client_id)
        if client is not None:
            if caller and not client.owner:  # the ID was used without keys before
                self.table.set_owner(frame.client_id, client, caller)
            if self._refuse_conflicts(token, frame, client):
                return
            client.token = token
        if frame.frame_type is ClientFrameType.REQUEST:
            self._request(token, frame, client, caller)
        elif frame.frame_type is ClientFrameType.HELLO:
            self.answers.welcome(
                token, frame, client or Client(), self.state.log.time_ns(self.state.now_ns), self._methods
            )
        else:
            self.answers.pong(token, frame, client or Client())
            if client is not None:
                self.answers.answer_ping(frame, client)
                self.table.release(frame.client_id, client, min(frame.acknowledged, client.number))

    def refuses(self, token: Token, frame: ClientFrame, caller: str) -> bool:
        """Refuse a frame that can't be handled, and tell the client why. False if it can be handled."""
        refusal = self._refusal(frame, caller)
        if refusal is not None:
            self.answers.refuse(token, frame, *refusal)
        return refusal is not None

    def _refusal(self, frame: ClientFrame, caller: str) -> tuple[ClientCode, str] | None:
        state = self.state
        if frame.frame_type is ClientFrameType.UNKNOWN:
            return ClientCode.UNKNOWN, f"{frame.reason} is not known here: {KNOWN_TO_COORDINATORS}"
        if frame.instance != state.name:
            return ClientCode.NOT_ME, f"this is {state.name!r}, the request is for {frame.instance!r}"
        if not state.ready:
            return ClientCode.NOT_READY, f"{state.name!r} has not completed its first start"
        if not state.accepting:
            return ClientCode.NOT_READY, f"{state.name!r} is stopping"
        if frame.frame_type not in _FROM_CLIENTS:
            return ClientCode.MALFORMED, f"unexpected frame {frame.frame_type.name}"
        if split_name(frame.client_id)[1]:
            return ClientCode.MALFORMED, "the client's ID ends like the trace context of a request"
        if why := self.delivery.admission.permissions.wait_reason(caller):
            return ClientCode.NOT_READY, why
        client = self.table.get(frame.client_id)
        if client is not None and caller and client.owner not in ("", caller):
            return ClientCode.NOT_YOURS, f"the client ID {frame.client_id!r} is another's than {caller!r}"
        return None

    def _refuse_conflicts(self, token: Token, frame: ClientFrame, client: Client) -> bool:
        """Refuse requests that can't be decoded, or have the number of another call; return True if there are any.

        Then the whole frame is refused, and its sender gets no reply of that client: it must send the rest again.
        """
        if frame.frame_type is ClientFrameType.PING:
            return self._refuse_conflicting_ping(token, frame, client)
        if frame.frame_type is not ClientFrameType.REQUEST or frame.number > client.number:
            return False
        try:
            _, identities = logged_calls(frame.payload, frame.count, frame.client_id, frame.number, frame.count)
        except ProtocolError as error:
            self.answers.refuse(token, frame, ClientCode.MALFORMED, str(error))
            return True
        conflicts: list[Reply] = []
        for number, identity in enumerate(identities, frame.number):
            known = client.identity(number)
            if known and known != identity and len(conflicts) < CONFLICTS_REPORTED_MAX:
                conflicts.append(self._conflict(frame.client_id, number, known, self._call_text(identity)))
        self.answers.send_replies(token, frame, client, conflicts)
        return len(conflicts) > 0

    def _refuse_conflicting_ping(self, token: Token, frame: ClientFrame, client: Client) -> bool:
        """Refuse a PING about a number that is known for another method. Its reason names the method, if any."""
        if not frame.reason.isdecimal() or frame.count != 1:
            return False
        (number,) = frame.requested_numbers()
        known = client.identity(number)
        method_id = int(frame.reason)
        if not known or method_of_identity(known) == method_id:
            return False
        other = self._conflict(frame.client_id, number, known, f"a call of {self._method_name(method_id)}")
        self.answers.send_replies(token, frame, client, [other])
        return True

    def _conflict(self, client_id: str, number: int, known: bytes, given: str) -> Reply:
        what, advice = f"request {number} of client {client_id!r}", CLIENT_ADVICE
        if client_id.startswith(KEY_PREFIX):
            what, advice = f"key {client_id[len(KEY_PREFIX) :]!r}", KEY_ADVICE
        return conflict_reply(number, IdentityConflict(what, self._call_text(known), given, advice))

    def _call_text(self, identity: bytes) -> str:
        return describe_call_identity(identity, self._method_name(method_of_identity(identity)))

    def _method_name(self, method_id: int) -> str:
        return self._names.get(method_id, f"method {method_id}")

    def _request(self, token: Token, frame: ClientFrame, client: Client | None, caller: str) -> None:
        known = client or Client(token=token, owner=caller)
        first_new = known.number + 1
        if client is None and 0 < frame.time_ns <= self.table.forgotten_ns:
            reason = (
                f"{self.state.name!r} does not know any more whether client {frame.client_id!r} has called it before"
            )
            self.answers.refuse(token, frame, ClientCode.FORGOTTEN, reason)
            return
        if frame.number > first_new:  # earlier frames were lost, or the log was replaced
            self.answers.pong(token, frame, known)
            return
        repeated = min(frame.count, first_new - frame.number)
        if client is not None:
            numbers = range(frame.number, frame.number + repeated)
            self.answers.resend_reply(frame.client_id, client, numbers)
        if repeated < frame.count and not self._log_requests(token, frame, known, repeated, caller):
            self.answers.pong(token, frame, known, ClientCode.BUSY)
        if known.number:
            self.table.release(frame.client_id, known, min(frame.acknowledged, known.number))

    def _log_requests(self, token: Token, frame: ClientFrame, client: Client, repeated: int, caller: str) -> bool:
        """Log the requests of ``frame`` after the first ``repeated``; False if not all can be accepted now."""
        if self._is_busy(client, frame) or self.delivery.admission.is_full(caller or caller_of(frame.client_id)):
            return False
        try:
            calls, identities = logged_calls(frame.payload, frame.count, frame.client_id, frame.number, repeated)
        except ProtocolError as error:
            self.answers.refuse(token, frame, ClientCode.MALFORMED, str(error))
            return True  # a repetition would not help
        new = frame.count - repeated
        source = BatchSource(
            BatchKind.CLIENT,
            caller_of(frame.client_id),
            frame.number + repeated,
            new,
            frame.time_ns,
            frame.reason if frame.reason and is_trace_context(frame.reason) else "",
        )
        delivered = self.delivery.deliver(source, calls, caller, self.table.open_by_owner[caller])
        if delivered is None:
            return False
        group, count = delivered.group, delivered.count
        self._undurable.append((group.ticket, delivered.record_size_bytes))
        self._undurable_bytes += delivered.record_size_bytes
        client.number = frame.number + repeated + count - 1
        client.time_ns = self.state.log.time_ns(self.state.now_ns)
        client.ticket = group.ticket
        self.table.add_requests(frame.client_id, client, identities[repeated : repeated + count], group.transaction)
        for forgotten in self.table.forget_unused():
            self.answers.forget(forgotten)
        return count == new

    def _is_busy(self, client: Client, frame: ClientFrame) -> bool:
        while self._undurable and self._undurable[0][0] <= self.state.log.durable_ticket:
            self._undurable_bytes -= self._undurable.popleft()[1]
        limits, table = self.state.limits, self.table
        released = max(client.released, min(frame.acknowledged, client.number))
        return (
            bool(self.state.log_capacity.full_reason)
            or table.open_count >= limits.requests_open_max
            or self._undurable_bytes >= limits.log_pending_bytes
            or frame.number + frame.count - 1 - released > limits.client_span_max
            or (len(client.gone) > 0 and table.gone_count >= limits.gone_replies_max)
        )

    # --- answers of the app ------------------------------------------------------------------------------------------

    def app_answered(self, batch: OutputBatch) -> None:
        """Handle the app's next answers in the stream to CLIENTS; ignore any other message there."""
        size_bytes = 0
        for _, start, end in decode_messages(batch.payload):
            answer = decode_answer(batch.payload, start, end)
            if answer is None:
                continue
            client_id, reply = answer[0], self.delivery.admission.checked_reply(answer[1])
            client = self.table.get(client_id)
            if client is None or not client.is_open(reply.number):
                continue  # a replay has repeated the answer; or the request counts as lost, which the client may know
            self._set_reply(client_id, client, reply)
            self.table.enforce_limits(client_id, client)
            size_bytes += len(reply.value) + 1
        group = self.state.log.open
        group.transaction.acknowledged[CLIENTS] = batch.last_position
        group.size_bytes += size_bytes
        self._ungathered_bytes = size_bytes + (self._ungathered_bytes if not group.required else 0)
        if self._ungathered_bytes >= self.state.limits.replies_gather_bytes:
            group.required = True

    def _set_reply(self, client_id: str, client: Client, reply: Reply) -> None:
        self.table.answer(client_id, client, reply)
        self.answers.add_reply(client_id, client, reply)

    def mark_open_lost(self) -> None:
        """Answer open requests as lost after a cut: their records can be lost."""
        for client_id, client in self.table.items():
            for number in client.open_numbers():
                self._set_reply(client_id, client, Reply(number, ReplyKind.LOST))

    def describe(self) -> dict[str, int]:
        """Return the counts for the status."""
        table = self.table
        return {
            "known": len(table),
            "open_requests": table.open_count,
            "replies": table.replies_count,
            "replies_bytes": table.replies_bytes,
        }


# Answers to clients: frames are answered at once, replies gather until the end of a turn.
#
# A client can ask for earlier replies again, within a rate limit (TokenBucket).


REPLY_FRAME_SIZE_BYTES = 1 << 20  # replies to one client are joined up to this
REPLY_FRONT_SIZE_BYTES = 16  # upper bound of number, kind and size
LOOKUP_BYTES = 4  # cost of each byte of a PING: its look-up takes as long as sending this many bytes


class ClientAnswers:
    """Replies to clients."""

    def __init__(self, state: CoreState, table: ClientTable) -> None:
        self._state = state
        self._table = table
        self._outgoing: dict[str, dict[int, Reply]] = {}  # by client and number
        self._resend_bucket = TokenBucket(state.limits.resend_bytes)
        self._pinging: set[str] = set()  # clients that have sent a PING in this turn

    # --- at once -----------------------------------------------------------------------------------------------------

    @property
    def _committer_id(self) -> int:
        """Committer ID of the log; 0 as long as another process writes it."""
        return self._state.committer_id if self._state.write_lease.writes else 0

    def welcome(self, token: Token, frame: ClientFrame, client: Client, time_ns: int, methods: bytes) -> None:
        numbers = client.number, client.released
        self._send(token, ClientFrame(ClientFrameType.WELCOME, *self._address(frame), *numbers, 0, time_ns, methods))

    def pong(self, token: Token, frame: ClientFrame, client: Client, code: ClientCode = ClientCode.NONE) -> None:
        """Tell the client which requests were accepted. BUSY: it must send the others again later."""
        if not code and client.ticket > self._state.log.durable_ticket:
            code = ClientCode.PENDING
        numbers = client.number, client.released
        self._send(token, ClientFrame(ClientFrameType.PONG, *self._address(frame), *numbers, code=code))

    def refuse(self, token: Token, frame: ClientFrame, code: ClientCode, reason: str) -> None:
        """Refuse a frame. The answer's number identifies the refused query; 0: none."""
        number = frame.number if frame.frame_type is ClientFrameType.QUERY else 0
        self._send(token, ClientFrame(ClientFrameType.REFUSED, *self._address(frame), number, code=code, reason=reason))

    def answer_query(self, token: Token, frame: ClientFrame, reply: Reply) -> None:
        numbers, payload = (frame.number, 0, 1), encode_replies((reply,))
        self._send(token, ClientFrame(ClientFrameType.ANSWER, *self._address(frame), *numbers, payload=payload))

    def send_replies(self, token: Token, frame: ClientFrame, client: Client, replies: list[Reply]) -> None:
        """Send replies only to the sender of ``frame``, even if others use the same client ID."""
        if replies:
            self._send_reply(token, self._address(frame), client, replies)

    def _send_reply(self, token: Token, address: tuple[str, str, int], client: Client, replies: list[Reply]) -> None:
        numbers, payload = (client.number, client.released, len(replies)), encode_replies(replies)
        self._send(token, ClientFrame(ClientFrameType.REPLY, *address, *numbers, payload=payload))

    def _address(self, frame: ClientFrame) -> tuple[str, str, int]:
        return frame.client_id, self._state.name, self._committer_id

    def _send(self, token: Token, answer: ClientFrame) -> None:
        self._state.effects.append(ReplyToClient(token, answer))

    # --- at the end of the turn --------------------------------------------------------------------------------------

    def add_reply(self, client_id: str, client: Client, reply: Reply) -> None:
        """Send the client its reply if this process has heard from it; otherwise the client will ask."""
        if client.token is not None:
            self._outgoing.setdefault(client_id, {})[reply.number] = reply

    def answer_ping(self, frame: ClientFrame, client: Client) -> None:
        """Answer a PING. The look-up of numbers counts against the rate limit, too."""
        now_ns = self._state.now_ns
        if frame.client_id in self._pinging:
            return  # the client asks again, after this turn
        self._pinging.add(frame.client_id)
        resend_bucket = self._resend_bucket_of(client)
        if resend_bucket.fill(now_ns) > 0 and self._resend_bucket.fill(now_ns) > 0:
            lookup_bytes = len(frame.payload) * LOOKUP_BYTES
            resend_bucket.tokens -= lookup_bytes
            self._resend_bucket.tokens -= lookup_bytes
            numbers = (asked for asked in frame.requested_numbers() if asked <= client.number)
            self.resend_reply(frame.client_id, client, numbers)

    def resend_reply(self, client_id: str, client: Client, numbers: Iterable[int]) -> None:
        """Repeat the replies to the accepted requests ``numbers``, except open ones, within the rate limit. The client
        asks for the rest again."""
        now_ns = self._state.now_ns
        resend_bucket = self._resend_bucket_of(client)
        outgoing = self._outgoing.setdefault(client_id, {})
        for number in numbers:
            reply = None if number in outgoing else client.reply(number)
            if reply is None:
                continue
            if not (resend_bucket.fill(now_ns) > 0 and self._resend_bucket.fill(now_ns) > 0):
                return
            size_bytes = len(reply.value) + REPLY_OVERHEAD_BYTES
            resend_bucket.tokens -= size_bytes
            self._resend_bucket.tokens -= size_bytes
            outgoing[number] = reply

    def _resend_bucket_of(self, client: Client) -> TokenBucket:
        if client.resend_bucket is None:
            client.resend_bucket = TokenBucket(self._state.limits.client_resend_bytes, self._state.now_ns)
        return client.resend_bucket

    def forget(self, client_id: str) -> None:
        self._outgoing.pop(client_id, None)

    def flush(self) -> None:
        """Send the gathered replies."""
        for client_id, replies in self._outgoing.items():
            client = self._table.get(client_id)
            if client is None:
                continue
            for part in _split_into_frames(replies.values()):
                self._send_reply(client.token, (client_id, self._state.name, self._committer_id), client, part)
        self._outgoing.clear()
        self._pinging.clear()


def _split_into_frames(replies: Iterable[Reply]) -> Iterable[list[Reply]]:
    part: list[Reply] = []
    size_bytes = 0
    for reply in replies:
        reply_size_bytes = len(reply.value) + REPLY_FRONT_SIZE_BYTES
        if part and size_bytes + reply_size_bytes > REPLY_FRAME_SIZE_BYTES:
            yield part
            part, size_bytes = [], 0
        part.append(reply)
        size_bytes += reply_size_bytes
    if part:
        yield part
