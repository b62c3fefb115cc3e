"""Clients: processes that are no instances, and call one. Their requests are done once, however often they are sent.

A client numbers its requests from 1, and the next number is the only one that is taken. Its last number becomes durable
in one transaction with the record that holds the request; so each life of the coordinator knows what was taken. To the
app a request is a call that waits for an answer. All answers to clients are one output stream, whose receiver is the
table of replies here: it acknowledges what is durable in the log, and a replay makes the rest again.

    a number    not taken --its record--> open --the app's answer--> kept --acknowledged, or beyond the window--> gone

A request that is sent again is answered from the table; one that is open, when its answer comes; one whose reply is
gone is told so. It is never done a second time.

Where callers have keys, a client ID belongs to the name of the first key that has used it: nobody else can ask for its
replies, or use up its numbers.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace

from coordinator.core.allowance import Allowance
from coordinator.core.clock import RunningTime
from coordinator.core.effects import Effect, ReplyToClient
from coordinator.core.group_commit import GroupCommit
from coordinator.core.interfaces import ONESELF, ClientPosition, OutputBatch, StoredClients, Token
from coordinator.core.limits import Limits
from coordinator.core.streams.delivery import Delivery
from protocol.client import (
    CLIENTS,
    KNOWN_TO_COORDINATORS,
    ClientCode,
    ClientFrame,
    ClientFrameType,
    Reply,
    ReplyKind,
    caller_of,
    decode_answer,
    encode_methods,
    encode_replies,
    logged_calls,
)
from protocol.errors import ProtocolError
from protocol.extensions import QUERIES, AppDescription
from protocol.messages import decode_messages
from protocol.trace_context import is_trace_context, split_name
from protocol.trailer import BatchKind, BatchSource

REPLY_FRAME_SIZE_BYTES = 1 << 20  # replies to one client are joined up to this
FORGOTTEN_PER_REQUEST = 2  # so that a request's cost stays small; more than one, so that they do become fewer
REPLY_FRONT_SIZE_BYTES = 16  # number, kind and size, at most
LOOKING_BYTES = 4  # for each byte of a PING: to look takes as long as to tell so many
REPLY_OVERHEAD_BYTES = 200  # of Python's objects around a reply, or around the number of one that is gone
_FROM_CLIENTS = (ClientFrameType.HELLO, ClientFrameType.REQUEST, ClientFrameType.PING, ClientFrameType.QUERY)
_GONE = bytes((ReplyKind.GONE,))
_LOST = bytes((ReplyKind.LOST,))


@dataclass(slots=True)
class Client:
    """``number``: the last one taken. Above ``released`` each number is open, in ``replies``, or in ``gone``."""

    number: int = 0
    released: int = 0
    time_ns: int = 0
    replies: dict[int, bytes] = field(default_factory=dict)  # kind and value, oldest first
    gone: set[int] = field(default_factory=set)  # behind the window, and above an open one
    size_bytes: int = 0  # of the replies
    token: Token = None  # where it was last heard
    owner: str = ""  # whose keys have used the ID first
    again: Allowance | None = None  # of what it may be told again
    used: int = 0  # grows with each use of any client
    holds: bool = False  # it is among those that have replies

    @property
    def open_count(self) -> int:
        return self.number - self.released - len(self.replies) - len(self.gone)

    @property
    def position(self) -> ClientPosition:
        return ClientPosition(self.number, self.released, self.time_ns, self.owner)


class Clients:
    """Those of one instance. ``effects``: where effects go; the machine's."""

    def __init__(
        self,
        name: str,
        limits: Limits,
        log: GroupCommit,
        effects: list[Effect],
        is_ready: Callable[[], bool],
        delivery: Delivery,
        running: RunningTime,
    ) -> None:
        self.accepting = False  # once there is the right to write, and not while stopping
        self.replies_count = self.replies_bytes = self.open_count = 0
        self._name = name
        self._committer_id = 0
        self._limits = limits
        self._log = log
        self._effects = effects
        self._is_ready = is_ready
        self._delivery = delivery
        self._intake = delivery.intake
        self._running = running
        self._methods = encode_methods({})  # of the app; the last one that was here
        self._forgotten_ns = 0
        self._clients: OrderedDict[str, Client] = OrderedDict()  # the one that was unused for longest first
        # Those that have replies: (used, then; ID; client), a heap. Who has none any more is left out when it is met.
        self._holders: list[tuple[int, str, Client]] = []
        self._uses = 0
        self._outgoing: dict[str, dict[int, Reply]] = {}  # by client and number
        self._again = Allowance(limits.again_bytes, 0)
        self._asked: set[str] = set()  # who has sent a PING in this turn
        self._gone_count = 0
        self._undurable: deque[tuple[int, int]] = deque()  # (ticket, size in bytes) of requests on their way to the log
        self._undurable_bytes = 0
        self.log_full = False  # no more is taken until there is room again
        self._ungathered_bytes = 0  # replies that no commit has been asked for
        self._open_by: Counter[str] = Counter()  # open requests, by owner

    def load(self, committer_id: int, stored: StoredClients) -> None:
        """What the log has, once."""
        self._committer_id = committer_id
        self._forgotten_ns = stored.forgotten_ns
        for client_id, known in sorted(stored.positions.items(), key=lambda item: (item[1].time_ns, item[0])):
            self._use(client_id, Client(known.number, known.released, known.time_ns, owner=known.owner))
        for (client_id, number), data in sorted(stored.replies.items()):
            client = self._clients.get(client_id)
            if client is None or not client.released < number <= client.number:
                continue  # released since; or of a client that was forgotten
            if data == _GONE:
                client.gone.add(number)
                self._gone_count += 1
            else:
                self._keep(client_id, client, number, data)
        for client in self._clients.values():
            self._opened(client, client.open_count)

    def __len__(self) -> int:
        return len(self._clients)

    def describe_methods(self, description: AppDescription) -> None:
        """What the app says of itself: its own methods are what clients may call."""
        own = {
            method_id: name
            for (destination, method_id), name in description.methods.items()
            if destination == ONESELF and method_id >= 0
        }
        queries = {method_id for destination, method_id in description.methods if destination == QUERIES}
        self._methods = encode_methods(own, queries & own.keys())

    # --- what clients say --------------------------------------------------------------------------------------------

    def received(self, token: Token, frame: ClientFrame, now_ns: int, caller: str = "") -> None:
        """A frame has come, by the key of ``caller``. Each is answered at once, but for requests that are taken."""
        if self.refuses(token, frame, caller):
            return
        client = self._clients.get(frame.client_id)
        if client is not None:
            client.token = token
            if caller and not client.owner:  # it was used without keys before
                self._open_by[caller] += client.open_count
                self._open_by[""] -= client.open_count
                client.owner = caller
                self._log.open.transaction.clients[frame.client_id] = client.position
        if frame.frame_type is ClientFrameType.REQUEST:
            self._request(token, frame, client, now_ns, caller)
            return
        number, released = (client.number, client.released) if client is not None else (0, 0)
        if frame.frame_type is ClientFrameType.HELLO:
            self._say(
                token,
                frame,
                ClientFrameType.WELCOME,
                number=number,
                acknowledged=released,
                time_ns=self._log.time_ns(now_ns),
                payload=self._methods,
            )
            return
        if client is not None:
            if frame.client_id not in self._asked:  # else it asks again, after this turn
                self._asked.add(frame.client_id)
                self._asks(frame, client, now_ns)
            self._release(frame.client_id, client, min(frame.acknowledged, number))
        self._say(token, frame, ClientFrameType.PONG, number=number, acknowledged=released)

    def refuses(self, token: Token, frame: ClientFrame, caller: str) -> bool:
        """Whether the frame can't be looked at at all; then the client is told why."""
        refusal = self._refusal(frame, caller)
        if refusal is not None:
            self.refuse(token, frame, *refusal)
        return refusal is not None

    def refuse(self, token: Token, frame: ClientFrame, code: ClientCode, reason: str) -> None:
        """The number says which query is meant; it is 0 where it is none."""
        number = frame.number if frame.frame_type is ClientFrameType.QUERY else 0
        self._say(token, frame, ClientFrameType.REFUSED, number=number, code=code, reason=reason)

    def answer_query(self, token: Token, frame: ClientFrame, reply: Reply) -> None:
        payload = encode_replies((reply,))
        self._say(token, frame, ClientFrameType.ANSWER, number=frame.number, count=1, payload=payload)

    def open_of(self, caller: str) -> int:
        """How many requests of that caller are not answered yet."""
        return self._open_by[caller]

    def _asks(self, frame: ClientFrame, client: Client, now_ns: int) -> None:
        """A PING: to look is not free either, and counts as what it brings."""
        again = client.again = client.again or Allowance(self._limits.client_again_bytes, now_ns)
        if again.is_left(now_ns) and self._again.is_left(now_ns):
            looking_bytes = len(frame.payload) * LOOKING_BYTES
            again.take(looking_bytes)
            self._again.take(looking_bytes)
            numbers = (asked for asked in frame.asked_numbers() if asked <= client.number)
            self._tell_again(frame.client_id, client, numbers, now_ns)

    def _refusal(self, frame: ClientFrame, caller: str) -> tuple[ClientCode, str] | None:
        if frame.frame_type is ClientFrameType.UNKNOWN:
            return ClientCode.UNKNOWN, f"{frame.reason} is not known here: {KNOWN_TO_COORDINATORS}"
        if frame.instance != self._name:
            return ClientCode.NOT_ME, f"this is {self._name!r}, the request is for {frame.instance!r}"
        if not self._is_ready():
            return ClientCode.NOT_READY, f"{self._name!r} has not completed its first start"
        if not self.accepting:
            return ClientCode.NOT_READY, f"{self._name!r} is stopping"
        if frame.frame_type not in _FROM_CLIENTS:
            return ClientCode.MALFORMED, f"unexpected frame {frame.frame_type.name}"
        if split_name(frame.client_id)[1]:
            return ClientCode.MALFORMED, "the client's ID ends like the trace context of a request"
        if why := self._intake.why_waiting(caller):
            return ClientCode.NOT_READY, why
        client = self._clients.get(frame.client_id)
        if client is not None and caller and client.owner not in ("", caller):
            return ClientCode.NOT_YOURS, f"the client ID {frame.client_id!r} is another's than {caller!r}"
        return None

    def _request(self, token: Token, frame: ClientFrame, client: Client | None, now_ns: int, caller: str) -> None:
        known = client or Client(token=token, owner=caller)
        first_new = known.number + 1
        if client is None and 0 < frame.time_ns <= self._forgotten_ns:
            reason = f"{self._name!r} does not know any more whether client {frame.client_id!r} has called it before"
            self.refuse(token, frame, ClientCode.FORGOTTEN, reason)
            return
        if frame.number > first_new:  # what is between was lost on the way; or this is not the log that it was
            self._say(token, frame, ClientFrameType.PONG, number=known.number, acknowledged=known.released)
            return
        repeated = min(frame.count, first_new - frame.number)
        if client is not None:
            self._tell_again(frame.client_id, client, range(frame.number, frame.number + repeated), now_ns)
        if repeated < frame.count:
            self._take(token, frame, known, repeated, now_ns, caller)
        if known.number:
            self._release(frame.client_id, known, min(frame.acknowledged, known.number))

    def _take(self, token: Token, frame: ClientFrame, client: Client, repeated: int, now_ns: int, caller: str) -> None:
        """Log what of ``frame`` is behind the first ``repeated`` requests."""
        if self._is_busy(client, frame) or self._intake.is_full(caller):
            self._say_busy(token, frame, client)
            return
        try:
            calls = logged_calls(frame.payload, frame.count, frame.client_id, frame.number, repeated)
        except ProtocolError as error:
            self.refuse(token, frame, ClientCode.MALFORMED, str(error))
            return
        new = frame.count - repeated
        source = BatchSource(
            BatchKind.CLIENT,
            caller_of(frame.client_id),
            frame.number + repeated,
            new,
            frame.time_ns,
            frame.reason if frame.reason and is_trace_context(frame.reason) else "",
        )
        delivered = self._delivery.deliver(source, calls, caller, now_ns, self._open_by[caller])
        if delivered is None:
            self._say_busy(token, frame, client)
            return
        group, count = delivered.group, delivered.count
        self._undurable.append((group.ticket, delivered.record_size_bytes))
        self._undurable_bytes += delivered.record_size_bytes
        client.number = frame.number + repeated + count - 1
        client.time_ns = self._log.time_ns(now_ns)
        self._opened(client, count)
        self._use(frame.client_id, client)
        group.transaction.clients[frame.client_id] = client.position
        self._forget_unused()
        if count < new:
            self._say_busy(token, frame, client)

    def _use(self, client_id: str, client: Client) -> None:
        """It is the one now that was used last."""
        self._uses += 1
        client.used = self._uses
        self._clients[client_id] = client
        self._clients.move_to_end(client_id)

    def _say_busy(self, token: Token, frame: ClientFrame, client: Client) -> None:
        """What is behind the client's number is to be sent again later."""
        code = ClientCode.BUSY
        self._say(token, frame, ClientFrameType.PONG, number=client.number, acknowledged=client.released, code=code)

    def _opened(self, client: Client, count: int) -> None:
        """So many more of its requests are open; below 0: fewer."""
        self.open_count += count
        self._open_by[client.owner] += count

    def _is_busy(self, client: Client, frame: ClientFrame) -> bool:
        while self._undurable and self._undurable[0][0] <= self._log.durable_ticket:
            self._undurable_bytes -= self._undurable.popleft()[1]
        limits = self._limits
        released = max(client.released, min(frame.acknowledged, client.number))
        return (
            self.log_full
            or self.open_count >= limits.requests_open_max
            or self._undurable_bytes >= limits.log_pending_bytes
            or frame.number + frame.count - 1 - released > limits.client_span_max
            or (len(client.gone) > 0 and self._gone_count >= limits.gone_max)
        )

    def _tell_again(self, client_id: str, client: Client, numbers: Iterable[int], now_ns: int) -> None:
        """Say what the requests ``numbers``, which were taken, came to; nothing yet of one that is open, and no more
        than may be told at once: it is asked for again."""
        if client.again is None:
            client.again = Allowance(self._limits.client_again_bytes, now_ns)
        outgoing = self._outgoing.setdefault(client_id, {})
        for number in numbers:
            if number in outgoing:
                continue
            if number <= client.released or number in client.gone:
                reply = Reply(number, ReplyKind.GONE)
            elif (data := client.replies.get(number)) is not None:
                reply = Reply(number, data[0], data[1:])
            else:
                continue
            if not (client.again.is_left(now_ns) and self._again.is_left(now_ns)):
                return
            size_bytes = len(reply.value) + REPLY_OVERHEAD_BYTES
            client.again.take(size_bytes)
            self._again.take(size_bytes)
            outgoing[number] = reply

    # --- what the app answers ----------------------------------------------------------------------------------------

    def answered(self, batch: OutputBatch) -> None:
        """The app's next answers, at their place in the stream to CLIENTS; what is none of them is passed over."""
        size_bytes = 0
        for _, start, end in decode_messages(batch.payload):
            answer = decode_answer(batch.payload, start, end)
            if answer is not None:
                size_bytes += self._answered(*answer)
        group = self._log.open
        group.transaction.acknowledged[CLIENTS] = batch.last_position
        group.size_bytes += size_bytes
        self._ungathered_bytes = size_bytes + (self._ungathered_bytes if not group.required else 0)
        if self._ungathered_bytes >= self._limits.replies_gather_bytes:
            group.required = True

    def _answered(self, client_id: str, reply: Reply) -> int:
        client = self._clients.get(client_id)
        number = reply.number
        if client is None or not client.released < number <= client.number or number in client.gone:
            return 0
        if number in client.replies:
            return 0  # a replay has made it again; or it counts as lost, and the client may have been told so
        self._opened(client, -1)
        data = bytes((reply.kind,)) + reply.value
        self._keep(client_id, client, number, data)
        self._log.open.transaction.replies[client_id, number] = data
        if client.token is not None:
            self._outgoing.setdefault(client_id, {})[number] = reply
        self._stay_within(client_id, client)
        return len(data)

    def _keep(self, client_id: str, client: Client, number: int, data: bytes) -> None:
        client.replies[number] = data
        if not client.holds:
            client.holds = True
            heappush(self._holders, (client.used, client_id, client))
            if len(self._holders) > 2 * len(self._clients):  # of those that were forgotten, most
                self._leave_out_empty()
        client.size_bytes += len(data) + REPLY_OVERHEAD_BYTES
        self.replies_count += 1
        self.replies_bytes += len(data) + REPLY_OVERHEAD_BYTES

    def _drop(self, client: Client, number: int) -> bool:
        """Whether there was a reply."""
        data = client.replies.pop(number, None)
        if data is None:
            return False
        client.size_bytes -= len(data) + REPLY_OVERHEAD_BYTES
        self.replies_count -= 1
        self.replies_bytes -= len(data) + REPLY_OVERHEAD_BYTES
        return True

    def lose_open(self) -> None:
        """The log was cut: of what is open it is not known whether its record was lost."""
        for client_id, client in self._clients.items():
            for number in range(client.released + 1, client.number + 1) if client.open_count else ():
                if number not in client.replies and number not in client.gone:
                    self._opened(client, -1)
                    self._keep(client_id, client, number, _LOST)
                    self._log.open.transaction.replies[client_id, number] = _LOST
                    if client.token is not None:
                        self._outgoing.setdefault(client_id, {})[number] = Reply(number, ReplyKind.LOST)

    # --- the window --------------------------------------------------------------------------------------------------

    def _stay_within(self, client_id: str, client: Client) -> None:
        limits = self._limits
        while len(client.replies) > 1 and (
            len(client.replies) > limits.client_replies_max or client.size_bytes > limits.client_replies_bytes
        ):
            self._let_go(client_id, client)
        if self.replies_bytes > limits.replies_bytes:
            self._let_go_of_unused(client)

    def _leave_out_empty(self) -> None:
        for _, _, client in self._holders:
            client.holds = bool(client.replies)
        self._holders = [holder for holder in self._holders if holder[2].holds]
        heapify(self._holders)

    def _let_go_of_unused(self, answered: Client) -> None:
        """Of replies of those unused for longest, until the rest is within the limit; not of the last one for
        ``answered``."""
        holders = self._holders
        passed_over = None
        while holders and self.replies_bytes > self._limits.replies_bytes:
            used, client_id, client = holders[0]
            if not client.replies:
                heappop(holders)
                client.holds = False
            elif client.used != used:
                heapreplace(holders, (client.used, client_id, client))
            elif client is answered and len(client.replies) == 1:
                passed_over = heappop(holders)
            else:
                self._let_go(client_id, client)
        if passed_over is not None:
            heappush(holders, passed_over)

    def _let_go(self, client_id: str, client: Client) -> None:
        """Of the oldest reply."""
        number = next(iter(client.replies))
        self._drop(client, number)
        client.gone.add(number)
        self._gone_count += 1
        self._log.open.transaction.replies[client_id, number] = _GONE
        up_to = client.released
        while up_to + 1 in client.gone:
            up_to += 1
        self._release(client_id, client, up_to)

    def _release(self, client_id: str, client: Client, up_to: int) -> None:
        """Nobody asks for the numbers up to ``up_to`` any more, or they are gone."""
        if up_to <= client.released:
            return
        self._opened(client, -client.open_count)
        transaction = self._log.open.transaction
        for number in range(client.released + 1, up_to + 1):
            if number in client.gone:
                client.gone.discard(number)
                self._gone_count -= 1
            elif not self._drop(client, number):
                continue
            elif transaction.replies.pop((client_id, number), None) is not None:
                continue  # it was on its way to the log: it need not get there
            transaction.replies[client_id, number] = None
        client.released = up_to
        self._opened(client, client.open_count)
        transaction.clients[client_id] = client.position

    def _forget_unused(self) -> None:
        """A clock that is wrong makes nobody old: only so much time in which the instance ran."""
        limits = self._limits
        unused_since_ns = self._running.before(limits.client_keep_ns)
        for _ in range(FORGOTTEN_PER_REQUEST):
            client_id, client = next(iter(self._clients.items()))
            if len(self._clients) <= limits.clients_max and client.time_ns >= unused_since_ns:
                return
            if client.open_count and len(self._clients) > 1:
                self._use(client_id, client)  # its answer will come
                continue
            del self._clients[client_id]
            transaction = self._log.open.transaction
            self._gone_count -= len(client.gone)
            for number in (*client.replies, *client.gone):
                self._drop(client, number)
                transaction.replies[client_id, number] = None
            self._outgoing.pop(client_id, None)
            self._forgotten_ns = max(self._forgotten_ns, client.time_ns)
            transaction.clients[client_id] = None
            transaction.clients_forgotten_ns = self._forgotten_ns

    # --- what is said ------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Send the replies that have gathered."""
        for client_id, replies in self._outgoing.items():
            client = self._clients.get(client_id)
            if client is not None:
                for some in _in_frames(replies.values()):
                    frame = ClientFrame(
                        ClientFrameType.REPLY,
                        client_id,
                        self._name,
                        self._committer_id,
                        number=client.number,
                        acknowledged=client.released,
                        count=len(some),
                        payload=encode_replies(some),
                    )
                    self._effects.append(ReplyToClient(client.token, frame))
        self._outgoing.clear()
        self._asked.clear()

    def _say(
        self,
        token: Token,
        frame: ClientFrame,
        frame_type: ClientFrameType,
        *,
        number: int = 0,
        acknowledged: int = 0,
        count: int = 0,
        time_ns: int = 0,
        payload: bytes = b"",
        code: ClientCode = ClientCode.NONE,
        reason: str = "",
    ) -> None:
        answer = ClientFrame(
            frame_type,
            frame.client_id,
            self._name,
            self._committer_id,
            number,
            acknowledged,
            count,
            time_ns,
            payload,
            code,
            reason,
        )
        self._effects.append(ReplyToClient(token, answer))

    def describe(self) -> dict[str, int]:
        """For the status."""
        return {
            "known": len(self._clients),
            "open_requests": self.open_count,
            "replies": self.replies_count,
            "replies_bytes": self.replies_bytes,
        }


def _in_frames(replies: Iterable[Reply]) -> Iterable[list[Reply]]:
    some: list[Reply] = []
    size_bytes = 0
    for reply in replies:
        reply_size_bytes = len(reply.value) + REPLY_FRONT_SIZE_BYTES
        if some and size_bytes + reply_size_bytes > REPLY_FRAME_SIZE_BYTES:
            yield some
            some, size_bytes = [], 0
        some.append(reply)
        size_bytes += reply_size_bytes
    if some:
        yield some
