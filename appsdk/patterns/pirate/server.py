"""Server of the pirate pattern: a plain process with one function, which answers each request.

    socket thread   frames in and out, pings, waiting requests  --queue-->   run(): the function, the store
                                                                <--queue--

So a busy server still answers pings, and reports the time that it has spent on its present request.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial

import zmq

from immortal.appsdk.calls.failures import text_of
from immortal.appsdk.calls.user_code import RunContexts, is_user_failure, mark_interrupts
from immortal.appsdk.client.discovery import home_of
from immortal.appsdk.patterns.listener import Listener
from immortal.appsdk.patterns.pirate.frames import (
    BODY_SIZE_BYTES_MAX,
    CLOSE_LINGER_MS,
    FRAME_SIZE_BYTES_MAX,
    Frame,
    Kind,
    ServerError,
    decode_frame,
    encode_frame,
)
from immortal.appsdk.patterns.pirate.store import Failure, ReplyStore

logger = logging.getLogger("immortal.pirate")

# Requests that wait or are worked on, by the name of a caller's key (without keys: all). The server answers one more
# with BUSY, and it goes to the next server.
WAITING_MAX = 1024
WAITING_SIZE_BYTES_MAX = 64 << 20
# Requests of one write transaction: one sync for all of them. It ends earlier after TURN_S, since no caller gets a
# reply before it ends.
TURN_REQUESTS_MAX = 64
TURN_S = 0.005
TEXT_SIZE_BYTES_MAX = 2048  # of a function's exception: a message for people
_OPTIONS = {
    zmq.MAXMSGSIZE: FRAME_SIZE_BYTES_MAX,
    zmq.SNDHWM: 64,  # replies in flight to one client; one more is dropped, and the client asks again
    zmq.HANDSHAKE_IVL: 3_000,
}
_Key = tuple[str, str, int]  # name of the caller's key, client ID, number


class Request:
    """Request that the function gets. ``caller``: the name of the client's key; "" without keys.

    ``client_id`` and ``number`` are the same however often it is sent. A request whose number is settled or whose reply
    is stored does not reach the function again.
    """

    __slots__ = ("_rows", "body", "caller", "client_id", "number")

    def __init__(self, frame: Frame, caller: str, rows: MutableMapping[bytes, bytes] | None) -> None:
        self.body = frame.body
        self.client_id = frame.client_id
        self.number = frame.number
        self.caller = caller
        self._rows = rows

    def __repr__(self) -> str:
        return f"<request {self.number} of client {self.client_id!r}: {len(self.body)} bytes>"

    @property
    def rows(self) -> MutableMapping[bytes, bytes]:
        """Rows of the user in the store: the function's writes here are durable together with the reply. Raises
        ServerError.
        """
        if self._rows is None:
            raise ServerError("request.rows: this server has no store; give it one with store=FOLDER")
        return self._rows


Function = Callable[[Request], bytes]


@dataclass(frozen=True, slots=True)
class Answer:
    """Reply to send, once it is durable."""

    key: _Key
    frame: Frame


@dataclass(slots=True)
class _Waiting:
    """Request that waits for the function. ``route``: the newest connection that it came by."""

    frame: Frame
    caller: str
    route: bytes


class Server:
    """Server that listens until :meth:`close`; :meth:`run` does the work. Raises ServerError.

    ``store``: a folder of replies that all servers of a pool share; None: the function can be called more than once for
    one request. ``identity``: the name whose keys in the registry folder ``home`` this server shows; ``callers``: the
    names whose keys can call, beside the server's own. Without an identity everybody who reaches ``endpoint`` can call;
    it must be on this machine unless ``insecure`` is True.
    """

    def __init__(
        self,
        function: Function,
        endpoint: str,
        *,
        store: str | os.PathLike[str] | None = None,
        identity: str | None = None,
        callers: Sequence[str] = (),
        home: str | os.PathLike[str] | None = None,
        insecure: bool = False,
    ) -> None:
        if isinstance(callers, str):
            raise TypeError(f"callers={callers!r}: a list of names was expected")
        if callers and not identity:
            raise ServerError(f"callers={list(callers)!r} need keys of this server: say whose, with identity=NAME")
        self._function = function
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._queue: deque[_Key] = deque()
        self._pending: dict[_Key, _Waiting] = {}  # requests that wait or are worked on
        self._pending_counts: Counter[str] = Counter()  # requests, by caller
        self._pending_bytes: Counter[str] = Counter()
        self._outgoing: deque[tuple[bytes, bytes]] = deque()
        self._working_since_s: float | None = None
        self._running = False
        self._closing = False
        self._listener = Listener(
            endpoint,
            _OPTIONS,
            decode_frame,
            logger,
            ServerError,
            home=home_of(home),
            identity=identity or "",
            names=callers,
            insecure=insecure,
        )
        try:
            self._store = None if store is None else ReplyStore(store)
        except BaseException:
            self._listener.close(0)
            raise
        self.endpoint = self._listener.endpoint
        self._store_id = b"" if self._store is None else self._store.store_id
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._serve_socket, name=f"pirate at {self.endpoint}", daemon=True)
        self._thread.start()

    # --- work: the thread that calls run() ---------------------------------------------------------------------------

    def run(self) -> None:
        """Work until :meth:`close`. Raises StoreError if the store can't be written: no caller was answered then."""
        self._contexts = RunContexts()
        with self._lock:
            self._running = not self._closing
        try:
            with mark_interrupts():
                while self._wait():
                    if self._store is None:
                        self.send([self._plain_answer()])
                    else:
                        self.send(self._stored_answers(self._store))
        finally:
            with self._lock:
                self._running = False
                self._queue = deque(self._pending)  # requests without an answer, for the next run()
                if self._closing:
                    self._close_store()

    def _wait(self) -> bool:
        """Wait for a request; return False if the server was closed."""
        with self._work:
            self._working_since_s = None
            while not self._queue and not self._closing:
                self._work.wait()
            self._working_since_s = time.monotonic()
            return not self._closing

    def _plain_answer(self) -> Answer:
        key = self._queue.popleft()
        pending = self._pending[key]
        try:
            body = self._reply(pending, None)
        except Failure as failure:
            return Answer(key, Frame(Kind.FAILED, pending.frame.number, body=failure.text))
        return Answer(key, Frame(Kind.REPLY, pending.frame.number, body=body))

    def _stored_answers(self, store: ReplyStore) -> list[Answer]:
        """Answer waiting requests within one transaction, as many as fit into TURN_S."""
        answers: list[Answer] = []
        with store.turn() as turn:
            ends_s = time.monotonic() + TURN_S
            while self._queue and len(answers) < TURN_REQUESTS_MAX and (not answers or time.monotonic() < ends_s):
                key = self._queue.popleft()
                self._working_since_s = time.monotonic()
                pending = self._pending[key]
                answers.append(Answer(key, turn.answer(pending.caller, pending.frame, partial(self._reply, pending))))
        return answers

    def _reply(self, pending: _Waiting, rows: MutableMapping[bytes, bytes] | None) -> bytes:
        """Call the function and return its reply. Raises Failure."""
        request = Request(pending.frame, pending.caller, rows)
        try:
            reply = self._contexts.run(self._function, request)
            if not isinstance(reply, bytes):
                raise TypeError(f"the function returned {type(reply).__name__}, bytes were expected")
            if len(reply) > BODY_SIZE_BYTES_MAX:
                raise ValueError(f"a reply of {len(reply)} bytes, at most {BODY_SIZE_BYTES_MAX} are possible")
        except BaseException as error:
            if not is_user_failure(error):
                raise
            problem = text_of(error)
            logger.warning("%r failed: %s: %s", request, type(error).__name__, problem)
            text = f"{type(error).__name__}\n{problem}".encode()
            raise Failure(text[:TEXT_SIZE_BYTES_MAX]) from error
        return reply

    def send(self, answers: Iterable[Answer]) -> None:
        """Send answers, which are durable if there is a store."""
        with self._lock:
            if self._closing:
                return
            for answer in answers:
                pending = self._pending.pop(answer.key)
                self._pending_counts[pending.caller] -= 1
                self._pending_bytes[pending.caller] -= len(pending.frame.body)
                self._outgoing.append((pending.route, encode_frame(answer.frame)))
            os.eventfd_write(self._wake, 1)

    # --- the socket's thread -----------------------------------------------------------------------------------------

    def _serve_socket(self) -> None:
        socket = self._listener.socket
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._wake in ready:
                os.eventfd_read(self._wake)
                with self._lock:
                    outgoing, self._outgoing = self._outgoing, deque()
                    closing = self._closing
                for route, data in outgoing:
                    self._listener.send(route, data)  # if the connection is gone or full, the client asks again
                if closing:
                    return
            if socket in ready:  # few requests at once, so that replies are not delayed for long
                self._listener.receive(TURN_REQUESTS_MAX, self._received)

    def _received(self, route: bytes, caller: str, frame: Frame) -> None:
        if frame.kind is Kind.PING:
            since_s = self._working_since_s
            working_ms = 0 if since_s is None else int(1000 * (time.monotonic() - since_s))
            pong = Frame(Kind.PONG, frame.number, working_ms, body=self._store_id)
            self._listener.send(route, encode_frame(pong))
        elif frame.kind is Kind.REQUEST:
            self._accept(route, frame, caller)
        else:
            self._listener.drop(f"a {frame.kind.name}, which only servers send")

    def _accept(self, route: bytes, frame: Frame, caller: str) -> None:
        key = (caller, frame.client_id, frame.number)
        with self._work:
            if (pending := self._pending.get(key)) is not None:
                if pending.frame.body == frame.body:
                    pending.route = route  # the request was repeated: send its reply to the newer connection
                    return
                kind, text = Kind.REFUSED, f"number {frame.number} is in use for another request"
            elif self._has_room(caller, len(frame.body)):
                self._pending[key] = _Waiting(frame, caller, route)
                self._pending_counts[caller] += 1
                self._pending_bytes[caller] += len(frame.body)
                self._queue.append(key)
                self._work.notify()
                return
            else:
                kind, text = Kind.BUSY, ""
        self._listener.send(route, encode_frame(Frame(kind, frame.number, body=text.encode())))

    def _has_room(self, caller: str, size_bytes: int) -> bool:
        pending = self._pending_counts[caller]
        return not pending or (
            pending < WAITING_MAX and self._pending_bytes[caller] + size_bytes <= WAITING_SIZE_BYTES_MAX
        )

    @property
    def malformed(self) -> int:
        """Number of dropped frames."""
        return self._listener.malformed

    # --- the end -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop the server, from any thread; :meth:`run` returns after the function has. Clients ask again for missing
        replies.
        """
        with self._work:
            if self._closing:
                return
            self._closing = True
            self._work.notify_all()
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        os.close(self._wake)
        if not self._running:
            self._close_store()
        self._listener.close(CLOSE_LINGER_MS)

    def _close_store(self) -> None:
        if self._store is not None:
            self._store.close()


def serve(
    function: Function,
    endpoint: str,
    *,
    store: str | os.PathLike[str] | None = None,
    identity: str | None = None,
    callers: Sequence[str] = (),
    home: str | os.PathLike[str] | None = None,
    insecure: bool = False,
) -> None:
    """Serve until the process ends; see :class:`Server`. Raises ServerError."""
    server = Server(function, endpoint, store=store, identity=identity, callers=callers, home=home, insecure=insecure)
    with closing(server):
        server.run()
