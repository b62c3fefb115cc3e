"""Protocol of a client with one instance, without I/O: frames in, frames out, and when to try another endpoint.

    CALLING --Welcome--> TALKING --silence, or "not me"--> CALLING, at the next endpoint

Outstanding requests are sent again after each Welcome; the coordinator takes each number once.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator

from immortal.appsdk.client.errors import CallRefused, ClientError, OutcomeUnknown
from immortal.appsdk.client.methods import query_name, query_of
from immortal.appsdk.client.session import Call, Question, Session, refused
from immortal.appsdk.handlers.definition import KEY_MARK
from immortal.protocol.client_frames import (
    KEY_PREFIX,
    ClientCode,
    ClientFrame,
    ClientFrameType,
    conflict_reply,
    decode_client_frame,
    decode_methods,
    decode_replies,
    encode_client_frame,
    encode_request,
    logged_calls,
)
from immortal.protocol.errors import RemoteProtocolError
from immortal.protocol.identity import KEY_ADVICE, IdentityConflict, describe_call_identity

QUERIES_SENT_MAX = 64  # unlogged queries, sent and not answered: the limit that a coordinator has per caller
QUERY_POLL_S = 1.0  # an unanswered query is asked again: it can have been lost with a connection
IDLE_POLL_S = 5.0  # with nothing outstanding: time between pings
HELLO_MIN_S = 0.05  # until the instance answers
HELLO_MAX_S = 1.0
METHODS_POLL_S = 0.2  # for the names of the methods, while the app is not up yet
BUSY_S = 0.1  # before refused requests are sent again
# Without any frame for this time, although there were questions, the client tries the next endpoint, or the same one
# again with the registry's newest data. Longer than the pauses of a busy coordinator.
SILENCE_S = 2.5
SILENCE_CALLING_S = 0.5  # ... while nobody has answered yet, and there is another endpoint
CLIENT_ID_SIZE_BYTES = 12  # random; two clients with one ID would take each other's numbers


def random_client_id() -> str:
    return secrets.token_urlsafe(CLIENT_ID_SIZE_BYTES)


def _may_be_same(first: Call, call: Call) -> bool:
    """Return True if two calls can be one request, as far as both are known.

    If both methods have no ID yet, their names are compared."""
    if first.method and call.method and type(first.method) is type(call.method) and first.method != call.method:
        return False
    if not call.arguments or not (first.message or first.arguments):
        return True
    if not first.message:
        return first.arguments == call.arguments
    return first.message == encode_request(int(first.method), call.arguments)


class Connection:
    """State of a client's conversation with one instance. ``client_id``: the user's, or None for a random one.

    Times are monotonic, in seconds."""

    def __init__(self, instance: str, client_id: str | None, now_s: float) -> None:
        self.instance = instance
        self.needs_reconnect = False  # the socket must be replaced
        self.was_welcomed = False  # at any time
        self.endpoints_count = 1
        self.problem = "nobody answers"  # why there is no conversation
        self.heartbeats = 0  # answers to pings, idle or not
        self._main = Session(
            client_id or random_client_id(),
            instance,
            keeps_replies=client_id is not None,
            renew=None if client_id is not None else random_client_id,
        )
        self._lanes: dict[str, Session] = {self._main.client_id: self._main}
        self._queries = Queries(instance, self.submit)
        self._methods: dict[str, int] = {}  # by name; also by their names with keys and as queries
        self._methods_at_s: float | None = None
        self._names_needed = False
        self._committer_id = 0
        self._clock_offset_ns = 0
        self.is_talking = False
        self._hello_s = HELLO_MIN_S
        self._hello_due_s = now_s
        self.last_received_s = now_s  # when the last frame came, or the socket was made
        self._unanswered_since_s: float | None = None  # time of the first question since the last frame came
        self._idle_due_s = now_s + IDLE_POLL_S
        self._resend: dict[str, int] = {}  # client ID: resend numbers above this one

    @property
    def client_id(self) -> str:
        return self._main.client_id

    # --- calls -------------------------------------------------------------------------------------------------------

    def submit(self, call: Call, key: str | None = None) -> None:
        """Send a call as soon as possible. ``key``: makes it the one request of that key."""
        if key is None:
            self._main.add(call)
            return
        lane = self._session_of(key)
        if self._joins_open_request(lane, call, key):
            return
        if lane.was_sent:  # and answered
            lane.attach(call, 1)
        else:
            lane.add(call)

    def _joins_open_request(self, lane: Session, call: Call, key: str) -> bool:
        """Join ``call`` to the open request of that key here, or refuse it if it is another call.

        Return False if there is no open request."""
        self._resolve_known_name(call)
        first = lane.first
        if first is None:
            return False
        self._resolve_known_name(first)
        if not _may_be_same(first, call):
            known, given = self._describe(first), self._describe(call)
            call.finish(conflict_reply(1, IdentityConflict(f"key {key!r}", known, given, KEY_ADVICE)))
        else:
            lane.follow(call, first)
        return True

    def _resolve_known_name(self, call: Call) -> None:
        """Replace the method's name by its ID, if that is known."""
        if isinstance(call.method, str):
            call.method = self._methods.get(call.method, call.method)

    def _describe(self, call: Call) -> str:
        method = call.method
        name = next((name for name, number in self._methods.items() if number == method), f"method {method}")
        message = call.message or (encode_request(0, call.arguments) if call.arguments else b"")
        return describe_call_identity(logged_calls(message, 1, "", 1)[1][0], name) if message else f"a call of {name}"

    def query(self, call: Call) -> None:
        """Ask a query as soon as possible, without the log if the instance supports that."""
        self._queries.add(call)

    def _session_of(self, key: str) -> Session:
        client_id = KEY_PREFIX + key
        if (lane := self._lanes.get(client_id)) is None:
            lane = self._lanes[client_id] = Session(client_id, self.instance, keeps_replies=True)
        return lane

    def attach(self, call: Call, key: str) -> None:
        """Give ``call`` the reply of the request of that key, which was sent, possibly by another process."""
        lane = self._session_of(key)
        if not self._joins_open_request(lane, call, key):
            lane.attach(call, 1)

    def cancel(self, call: Call, key: str) -> None:
        """Ask the instance to cancel the request of that key; ``call`` gets the reply."""
        self._session_of(key).add_second(call)

    def ask_status(self, question: Question, key: str) -> None:
        """Ask for the status of the request of that key."""
        self._session_of(key).ask_status(question)

    def withdraw(self, call: Call) -> bool:
        """Forget a call that was not sent yet; return True if so."""
        self._queries.withdraw(call)
        return all(lane.withdraw(call) for lane in self._lanes.values())

    def refuse(self, error: ClientError) -> None:
        """End with ``error`` the calls that were not sent yet, and all queries: none of those was done."""
        self._queries.close(error)
        for lane in list(self._lanes.values()):
            lane.refuse_waiting(error)
            self._drop_idle(lane)

    def _drop_idle(self, lane: Session) -> None:
        if lane is not self._main and lane.is_idle:
            self._lanes.pop(lane.client_id, None)

    def ping_soon(self, now_s: float) -> None:
        """Ping at once, unless something is outstanding: that is polled anyway."""
        self._idle_due_s = now_s

    def close(self, error: ClientError) -> None:
        self._queries.close(error)
        for lane in list(self._lanes.values()):
            lane.fail(error)

    # --- the socket --------------------------------------------------------------------------------------------------

    def reopened(self, now_s: float) -> None:
        """Start again on a new socket, to another endpoint or to the same."""
        self.needs_reconnect = False
        self.is_talking = False
        self._hello_s = HELLO_MIN_S
        self._hello_due_s = self.last_received_s = now_s
        self._unanswered_since_s = None

    def receive(self, data: bytes, now_s: float) -> None:
        """Process one message. A malformed one is dropped: its content is asked for again."""
        try:
            frame = decode_client_frame(data)
            self.last_received_s, self._unanswered_since_s = now_s, None
            if frame.frame_type is ClientFrameType.UNKNOWN:
                return  # of a later version: it can do without an answer
            if self._queries.received(frame, now_s):
                self.problem = self._queries.problem or "there is no reply yet"
                return
            lane = self._lanes.get(frame.client_id)
            if lane is None:
                return
            if frame.frame_type is ClientFrameType.REFUSED:
                self._refused(lane, frame, now_s)
                return
            if self._is_another_log(frame):
                return
            if frame.frame_type is ClientFrameType.REPLY:
                for reply in decode_replies(frame.payload, frame.count):
                    lane.replied(reply)
                self._drop_idle(lane)
            elif frame.frame_type is ClientFrameType.WELCOME:
                self._welcomed(frame, now_s)
            elif frame.frame_type is ClientFrameType.PONG:
                self._ponged(lane, frame, now_s)
        except RemoteProtocolError as error:
            self.problem = str(error)

    def _welcomed(self, frame: ClientFrame, now_s: float) -> None:
        names, queries = decode_methods(frame.payload)
        self._methods = {name.rpartition(".")[2]: number for number, name in names.items()}
        is_keyed = any(f"{KEY_MARK}." in name for name in names.values())
        self._methods |= {name + KEY_MARK: number for name, number in self._methods.items() if is_keyed}
        self._methods |= {query_name(name): number for name, number in self._methods.items() if number in queries}
        self._methods_at_s = now_s
        self._clock_offset_ns = frame.time_ns - int(now_s * 1e9)
        if self._main.was_forgotten(frame.number):
            self._forgotten(self._main)
        self.was_welcomed = True
        if not self.is_talking:
            self.is_talking = True
            self.problem = "there is no reply yet"
            self._resend = dict.fromkeys(self._lanes, 0)
            self._queries.greeted()

    def _ponged(self, lane: Session, frame: ClientFrame, now_s: float) -> None:
        self.heartbeats += 1
        if lane.was_forgotten(frame.number):
            self._forgotten(lane)
        elif frame.code == ClientCode.BUSY:
            self.problem = "it is busy"
            lane.resend_due_s, lane.resend_after = now_s + BUSY_S, frame.number
        elif lane.is_behind(frame.number):
            self._resend[lane.client_id] = frame.number
        if lane is not self._main and frame.code != ClientCode.BUSY:
            lane.ponged(frame.number, now_s, is_pending=frame.code == ClientCode.PENDING)
            if lane.error is not None or lane.is_idle:
                self._lanes.pop(lane.client_id, None)

    def _refused(self, lane: Session, frame: ClientFrame, now_s: float) -> None:
        self.problem = frame.reason
        if frame.code == ClientCode.NOT_ME:
            self.needs_reconnect = True
        elif frame.code == ClientCode.NOT_READY:
            self.is_talking = False
            self._hello_due_s = now_s + self._hello_s
        elif frame.code == ClientCode.FORGOTTEN:
            self._forgotten(lane)
        elif frame.code in (ClientCode.MALFORMED, ClientCode.NOT_YOURS):
            self._restart_session(lane, refused(frame.reason))

    def _forgotten(self, lane: Session) -> None:
        self._restart_session(
            lane,
            OutcomeUnknown(
                f"{self.instance!r} does not know client {lane.client_id!r} any more: what it was sent may have been "
                f"done or not"
            ),
        )

    def _is_another_log(self, frame: ClientFrame) -> bool:
        before, self._committer_id = self._committer_id, frame.committer_id
        if before in (0, frame.committer_id):
            return False
        error = OutcomeUnknown(
            f"{self.instance!r} was committer {before} and is {frame.committer_id} now: its log was replaced, and what "
            f"it was sent before may have been done or not"
        )
        for lane in list(self._lanes.values()):
            self._restart_session(lane, error)
        self.is_talking = False
        return True

    def _restart_session(self, lane: Session, error: ClientError) -> None:
        self._lanes.pop(lane.client_id, None)
        self._resend.pop(lane.client_id, None)
        lane.restart(error)
        if lane is self._main:
            self._lanes[lane.client_id] = lane

    # --- output ------------------------------------------------------------------------------------------------------

    def data_to_send(self, now_s: float) -> list[bytes]:
        """Return all frames that are due now."""
        if self._unanswered_since_s is not None and now_s - self._unanswered_since_s >= self._silence_s:
            self.problem = f"nothing was heard for {now_s - self.last_received_s:.1f} s"
            self.needs_reconnect = True
        if self.needs_reconnect:
            return []
        frames = list(self._frames(now_s))
        return [encode_client_frame(frame) for frame in frames]

    def _frames(self, now_s: float) -> Iterator[ClientFrame]:
        if not self.is_talking:
            if now_s >= self._hello_due_s:
                yield self._hello(now_s)
            return
        resend, self._resend = self._resend, {}
        for client_id, after in resend.items():
            if (lane := self._lanes.get(client_id)) is not None:
                yield from lane.resend_all(after)
        created_ns = int(now_s * 1e9) + self._clock_offset_ns
        self._names_needed = False
        for lane in list(self._lanes.values()):
            if lane.waiting:
                yield from lane.requests(lambda call: self._resolve(call, now_s), created_ns, now_s)
            if lane.resend_due_s is not None and now_s >= lane.resend_due_s:
                lane.resend_due_s = None
                yield from lane.resend_all(lane.resend_after)
            if lane.poll_due_s is not None and now_s >= lane.poll_due_s:
                for call in lane.unresolved():
                    self._resolve(call, now_s)
                for frame in lane.polls(created_ns, now_s):
                    yield self._expecting_answer(frame, now_s)
        query_due_s = self._queries.due_s
        if query_due_s is not None and now_s >= query_due_s and now_s - self.last_received_s >= BUSY_S:
            yield self._expecting_answer(self._main.ping(now_s), now_s)  # the query itself can take long
        yield from self._queries.frames(self.client_id, lambda call: self._resolve(call, now_s), now_s)
        if self._names_needed and now_s >= self._hello_due_s:
            self._hello_due_s = now_s + METHODS_POLL_S
            yield self._expecting_answer(self._hello_frame(), now_s)
        if now_s >= self._idle_due_s:
            self._idle_due_s = now_s + IDLE_POLL_S
            if not any(lane.outstanding for lane in self._lanes.values()):
                yield self._expecting_answer(self._main.ping(now_s), now_s)

    def _hello(self, now_s: float) -> ClientFrame:
        self._hello_due_s = now_s + self._hello_s
        self._hello_s = min(self._hello_s * 2, HELLO_MAX_S)
        return self._expecting_answer(self._hello_frame(), now_s)

    def _hello_frame(self) -> ClientFrame:
        return ClientFrame(ClientFrameType.HELLO, self._main.client_id, self.instance)

    def _expecting_answer(self, frame: ClientFrame, now_s: float) -> ClientFrame:
        if self._unanswered_since_s is None:
            self._unanswered_since_s = now_s
        return frame

    def _resolve(self, call: Call, now_s: float) -> bool:
        """Give ``call`` its method's ID; return False if the ID is not known.

        If there is no such method, the call ends with an error."""
        if isinstance(call.method, int):
            return True
        found = self._methods.get(call.method)
        if found is not None:
            call.method = found
            return True
        fresh = self._methods_at_s is not None and now_s - self._methods_at_s < METHODS_POLL_S
        if self._methods and fresh:
            call.finish(CallRefused(self._unknown_text(call.method)))
            return False
        if not self._methods:
            self.problem = "its app is not up, so the names of its methods are not known"
        self._names_needed = True
        return False

    def _unknown_text(self, name: str) -> str:
        if name.endswith(KEY_MARK):
            name = name.removesuffix(KEY_MARK)
            if name in self._methods:
                return f"{self.instance!r} has no keys, its class is not keyed: call {self.instance!r} without [...]"
        handlers = _listed(self._methods)
        query = query_of(name)
        if not query:
            return f"{self.instance!r} has no handler {name!r} (its handlers: {handlers})"
        queries = _listed(map(query_of, self._methods))
        known = f"its queries: {queries}" if queries else "it marks none with @query, or is of an earlier version"
        if query in self._methods:
            return f"{query!r} of {self.instance!r} is no query ({known}): it is called without .query"
        return f"{self.instance!r} has no query {query!r} ({known})"

    @property
    def _silence_s(self) -> float:
        return SILENCE_CALLING_S if self.endpoints_count > 1 and not self.is_talking else SILENCE_S

    def goodbye(self) -> list[bytes]:
        """Return the frames to send before the end: they release all replies."""
        return [encode_client_frame(self._main.ping(0.0))] if self.is_talking else []

    def next_deadline_s(self) -> float:
        """Time at which :meth:`data_to_send` must be called, even if no frame comes."""
        due_s = [self._idle_due_s] if self.is_talking else []
        if not self.is_talking or self._names_needed:
            due_s.append(self._hello_due_s)
        if self._unanswered_since_s is not None:
            due_s.append(self._unanswered_since_s + self._silence_s)
        if self.is_talking:
            if (query_due_s := self._queries.due_s) is not None:
                due_s.append(query_due_s)
            for lane in self._lanes.values():
                due_s += [at_s for at_s in (lane.poll_due_s, lane.resend_due_s) if at_s is not None]
        return min(due_s)


# A query changes nothing and is in no log: a repetition does no harm, and no number must be kept. If the instance's app
# can't answer without the log, the query becomes a logged call.


class Queries:
    """Table of open queries. ``submit_logged``: turns a query into a logged call, if the instance needs that."""

    def __init__(self, instance: str, submit_logged: Callable[[Call], None]) -> None:
        self.problem = ""  # why the last query was not answered yet
        self._instance = instance
        self._submit_logged = submit_logged
        self._number = 0
        self._waiting: dict[int, Call] = {}  # by number; not sent yet
        self._sent: dict[int, Call] = {}
        self._repeat_due_s: dict[int, float] = {}  # of sent queries: when to ask again

    def add(self, call: Call) -> None:
        self._number += 1
        self._waiting[self._number] = call

    def withdraw(self, call: Call) -> None:
        """Forget a query that no caller waits for any more."""
        for calls in (self._waiting, self._sent):
            for number in [number for number, one in calls.items() if one is call]:
                del calls[number]
                self._repeat_due_s.pop(number, None)

    def greeted(self) -> None:
        """Ask all sent queries again: the coordinator can be another one."""
        self._repeat_due_s = dict.fromkeys(self._sent, 0.0)

    def close(self, error: ClientError) -> None:
        calls = [*self._sent.values(), *self._waiting.values()]
        self._waiting, self._sent, self._repeat_due_s = {}, {}, {}
        for call in calls:
            call.finish(error)

    @property
    def due_s(self) -> float | None:
        """Time at which :meth:`frames` must ask a query again; None: never."""
        return min(self._repeat_due_s.values(), default=None)

    # --- output ------------------------------------------------------------------------------------------------------

    def frames(self, client_id: str, resolve: Callable[[Call], bool], now_s: float) -> Iterator[ClientFrame]:
        """Yield the frames of queries that are due. ``resolve``: see :meth:`appsdk.client.session.Session.requests`."""
        for number in [number for number, due_s in self._repeat_due_s.items() if now_s >= due_s]:
            yield self._frame(client_id, number, now_s)
        for number, call in list(self._waiting.items()):
            if len(self._sent) >= QUERIES_SENT_MAX:
                return
            if call.outcome is None and not resolve(call) and call.outcome is None:
                continue
            del self._waiting[number]
            if call.outcome is None:
                call.message = encode_request(int(call.method), call.arguments)
                self._sent[number] = call
                yield self._frame(client_id, number, now_s)

    def _frame(self, client_id: str, number: int, now_s: float) -> ClientFrame:
        self._repeat_due_s[number] = now_s + QUERY_POLL_S
        message = self._sent[number].message
        return ClientFrame(ClientFrameType.QUERY, client_id, self._instance, number=number, count=1, payload=message)

    # --- input -------------------------------------------------------------------------------------------------------

    def received(self, frame: ClientFrame, now_s: float) -> bool:
        """Process a frame; return False if it does not concern queries. Raises RemoteProtocolError."""
        if frame.frame_type is ClientFrameType.ANSWER:
            (reply,) = decode_replies(frame.payload, 1)
            self.problem = ""
            call = self._remove(frame.number)
            if call is not None:
                call.finish(reply)
            return True
        if frame.frame_type is not ClientFrameType.REFUSED or not frame.number:
            return False
        call = self._sent.get(frame.number)
        if call is None:
            return True
        self.problem = frame.reason
        if frame.code in (ClientCode.NOT_READY, ClientCode.BUSY):
            self._repeat_due_s[frame.number] = now_s + BUSY_S
            return True
        self._remove(frame.number)
        if frame.code == ClientCode.LOGGED_ONLY:
            self._submit_logged(call)
        else:
            call.finish(refused(frame.reason))
        return True

    def _remove(self, number: int) -> Call | None:
        self._repeat_due_s.pop(number, None)
        return self._sent.pop(number, None)


def _listed(names: Iterable[str]) -> str:
    """List the names of handlers for people: without those by which the SDK moves keys."""
    return ", ".join(sorted(name for name in names if name.isidentifier() and not name.startswith("immortal_")))
