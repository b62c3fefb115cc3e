"""The messenger: every ZeroMQ socket, behind one descriptor and one process().

One thread, the owner, drives it: it waits for fileno() to become readable, at most until
next_deadline_ns(), and calls process(). Other threads may send and reply; what they give waits in deques
until the owner takes it. Alternatively start() makes a thread that does all this, and every method may be
called from any thread.

Which sockets have news is in readiness.py, connections are made in links.py. While anything is ready, or in the
deques, after process() or flush(), the wake descriptor is readable.
"""

from __future__ import annotations

import itertools
import random as random_module
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType

import zmq

from coordinator.messenger.envelope import NOOP
from coordinator.messenger.errors import MessengerClosedError, MessengerError
from coordinator.messenger.gate import Gate
from coordinator.messenger.limits import IN_FLIGHT_MAX, IO_THREADS, SPAN_MAX, TURNS_MAX
from coordinator.messenger.link import Link
from coordinator.messenger.links import Links
from coordinator.messenger.listener import ClientLoop, ClientReply, Listener, Reply, ServerLoop
from coordinator.messenger.outbox import Outbox, ReplyCallback, RetryPolicy
from coordinator.messenger.readiness import Readiness
from coordinator.messenger.room import PENDING_LIMITS, PendingLimits, Room
from coordinator.messenger.security import Security
from coordinator.messenger.sockets import Context, Counters, Warnings, check_destination, message_parts
from coordinator.messenger.threaded import OwnerThread
from coordinator.messenger.turns import AnswerCallback, Turn
from coordinator.messenger.wake import Wake

CALLBACK_ID_MAX = 2**64 - 1
_Send = tuple[str, tuple[bytes, ...], ReplyCallback | None, Turn | None]


class Messenger:
    """Sends messages until they are acknowledged, and gives each received one to its server loop once.

    ``context``: a ZeroMQ context to share, as inproc endpoints between messengers need; else an own one.
    ``incarnation``: a random u64 that no other messenger has. ``clock_ns``: monotonic. ``random``: from [0, 1).
    ``in_flight_max``: messages sent and not acknowledged per link, at most limits.SPAN_MAX; later ones wait in the
    buffer. ``pending``: what may be pending for each destination, there and in flight; None: the caller sees to that
    itself, see pending_count(). ``security``: who this is, and
    who may send to it; it needs an own context, without inproc endpoints. Without it everything is in plain.
    """

    def __init__(
        self,
        *,
        context: Context | None = None,
        incarnation: int | None = None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        random: Callable[[], float] = random_module.random,
        retry: RetryPolicy | None = None,
        in_flight_max: int = IN_FLIGHT_MAX,
        pending: PendingLimits | None = PENDING_LIMITS,
        security: Security | None = None,
    ) -> None:
        if not 1 <= in_flight_max <= SPAN_MAX:
            raise MessengerError(f"in_flight_max is {in_flight_max}, expected 1 to {SPAN_MAX}")
        self._context: Context = zmq.Context(io_threads=IO_THREADS) if context is None else context
        self._owns_context = context is None
        self.incarnation = random_module.SystemRandom().getrandbits(64) if incarnation is None else incarnation
        self._clock_ns = clock_ns
        self._counters = Counters()
        self._warnings = Warnings(clock_ns)
        self._stranger_warnings = Warnings(clock_ns)  # apart, so that they hide no others

        self._wake = Wake()
        self._thread = OwnerThread(self, self._wake, clock_ns, self._thread_ended)
        self._room = None if pending is None else Room(pending, self._thread.others_may_wait)
        self._readiness = Readiness(self._wake)
        self._make_outbox = partial(Outbox, retry or RetryPolicy(), random, in_flight_max=in_flight_max)
        self._links = Links(
            self._context,
            self.incarnation,
            self._readiness,
            self._counters,
            self._warnings,
            self._make_outbox,
            self._listener_changed,
            self._room,
        )
        self._listeners: list[Listener] = []
        self._callback_ids = itertools.count(NOOP + 1)
        self._given_ids = itertools.count(self.incarnation)  # so no other messenger has given them

        self._sends: deque[_Send] = deque()  # appended to by any thread, as is the next
        self._replies: deque[Reply | ClientReply] = deque()
        self._gate: Gate | None = None
        self._listener_news: deque[tuple[Link, bool]] = deque()  # of inproc links; appended to by any thread
        self._sending: dict[Link, None] = {}  # have something to send, or may send again

        self.patient = False
        """Set by the owner, before flush(), while it waits for no reply: those to what is sent then come with whatever
        else does, PATIENCE_NS later at most."""

        self._processing = False
        self._held = False
        self._closed = False
        if security is not None:
            self._secure(security)

    # What any thread may do

    def send_message(
        self, destination: str, message: bytes | Sequence[bytes], callback: ReplyCallback | None = None
    ) -> None:
        """Buffer ``message`` for ``destination``; returns at once, or after PendingLimits.wait_s. It is sent, and
        resent, until it is acknowledged.

        ``callback`` gets the parts of the reply, once, in the owner's thread, before server loops get what
        came in at the same time. The list is empty if the receiver acknowledged but no longer keeps its
        reply. Raises EndpointError, MessageTooLargeError, PendingFullError, MessengerClosedError.
        """
        parts = self._take(destination, message)
        self._sends.append((destination, parts, callback, None))
        self._wake.signal()

    def converse(
        self,
        destination: str,
        message: bytes | Sequence[bytes],
        callback: AnswerCallback | None = None,
        destination_callback_id: int = NOOP,
    ) -> None:
        """As send_message(), for conversations of several turns: the reply may come with a callback of the receiver's,
        and ``message`` be for one, by the ``callback_id`` of the Answer that came last from there.

        The receiver's callback gets it once, before the server loop. It is known there as long as the receiver and this
        link live (drop() ends a link), and not too many others were given meanwhile: an Answer with CALLBACK_UNKNOWN
        else. Raises MessengerError for no such ID, and as send_message() does.
        """
        if not NOOP <= destination_callback_id <= CALLBACK_ID_MAX:
            raise MessengerError(f"callback ID {destination_callback_id}, expected the callback_id of an Answer")
        parts = self._take(destination, message)
        self._sends.append((destination, parts, None, Turn(destination_callback_id, callback)))
        self._wake.signal()

    def _take(self, destination: str, message: bytes | Sequence[bytes]) -> tuple[bytes, ...]:
        """The parts of ``message``, for which there is room."""
        if destination not in self._links:
            check_destination(destination)
        parts = message_parts(message)
        if self._closed or self._thread.failed:
            raise MessengerClosedError("the messenger is closed, or its thread has failed: nothing is sent")
        if self._room is not None:
            self._room.take(destination, sum(map(len, parts)))
        return parts

    def _accept_reply(self, reply: Reply | ClientReply) -> None:
        if not self._closed:
            self._replies.append(reply)
            self._wake.signal()

    def counters(self) -> Counters:
        """A copy of what has been counted."""
        counters, gate, room = self._counters, self._gate, self._room
        if room is not None:
            counters = replace(counters, sends_waited=room.waited_count, sends_refused=room.refused_count)
        refused = counters.strangers_refused + sum(one.refused for one in list(self._listeners))
        if gate is None:
            return replace(counters, strangers_refused=refused, refused_by=counters.refused_by.copy())
        return replace(
            counters,
            strangers_refused=refused + gate.refused,
            refused_by=counters.refused_by.copy(),
            let_in_by=gate.let_in.copy(),
            last_refused=gate.last_refused,
        )

    # What the owner does; any thread after start()

    def listen(
        self,
        endpoint: str,
        server_loop: ServerLoop,
        *,
        ordered: bool = False,
        secured: bool = True,
        client_loop: ClientLoop | None = None,
    ) -> str:
        """Give what comes in at ``endpoint`` to ``server_loop``; returns the real endpoint, with its port.

        Each message once, as it comes; ``ordered``: in the order of sending. What comes too early, since something
        before it was lost with a connection, is dropped then, and comes again.

        ``client_loop`` gets what comes from clients (docs/WIRE.md, part 9); without it that is dropped.

        Not ``secured``: in plain, for anybody, whatever the messenger's security. Raises EndpointInUseError,
        EndpointError.
        """
        return self._thread.call(lambda: self._listen(endpoint, server_loop, ordered, secured, client_loop))

    def _listen(
        self, endpoint: str, server_loop: ServerLoop, ordered: bool, secured: bool, client_loop: ClientLoop | None
    ) -> str:
        self._check_open()
        listener = Listener(
            self._context,
            endpoint,
            server_loop,
            self.incarnation,
            self._accept_reply,
            self._counters,
            self._warnings,
            self._stranger_warnings,
            self._links.security if secured else None,
            secured,
            client_loop,
            ordered=ordered,
            new_callback_id=self._new_callback_id,
        )
        self._listeners.append(listener)
        self._readiness.watch(listener)
        # Over inproc, what was sent before comes in with the binding, unannounced.
        self._readiness.ready[listener] = None
        self._wake.signal()
        return listener.endpoint

    def secure(self, security: Security) -> None:
        """Go by ``security`` from now on: nothing is lost, and nobody else is let in.

        With other keys of its own, and to destinations that may no longer have the key that they have shown, all
        connections are made anew; messages with a key that ``callers`` no longer has are dropped.
        """
        self._thread.call(lambda: self._secure(security))

    def _secure(self, security: Security) -> None:
        self._check_open()
        if self._gate is None:
            self._gate = Gate(self._context, security.callers, self._clock_ns)
        self._gate.callers = security.callers
        self._links.security = security
        now_ns = self._clock_ns()
        for listener in self._listeners:
            if listener.secured:
                self._readiness.unwatch(listener)
                listener.secure(security, now_ns)
                self._readiness.watch(listener)
        for link in list(self._links):
            if self._links.is_out_of_date(link):
                self._reopen(link)
        self._wake.signal()

    def drop(self, destination: str) -> int:
        """Forget what is pending for ``destination`` and close its link; returns how many were forgotten.

        Their callbacks are never called; a server loop there may or may not have got them. The next send
        opens a new link.
        """
        return self._thread.call(lambda: self._drop(destination))

    def _drop(self, destination: str) -> int:
        self._check_open()
        self._take_sends()
        link = self._links.drop(destination)
        if link is None:
            return 0
        self._sending.pop(link, None)
        count = len(link.outbox)
        if self._room is not None:
            self._room.forget(destination, link.outbox.size_bytes, count)
        return count

    def reconnect(self, destination: str) -> None:
        """There is a sign that somebody is there again: where there is no connection, do not wait with trying."""
        self._thread.call(lambda: self._reconnect(destination))

    def _reconnect(self, destination: str) -> None:
        self._check_open()
        link = self._links.get(destination)
        if link is not None and not link.connected and link.monitor_descriptor is not None:
            self._reopen(link)

    def pending_count(self, destination: str) -> int:
        """How many messages to ``destination`` are not acknowledged, sent or not."""
        return self._thread.call(lambda: len(self._outbox(destination)))

    def pending_size_bytes(self, destination: str) -> int:
        """The bytes of their parts."""
        return self._thread.call(lambda: self._outbox(destination).size_bytes)

    def _outbox(self, destination: str) -> Outbox:
        self._check_open()
        self._take_sends()
        link = self._links.get(destination)
        return self._make_outbox() if link is None else link.outbox

    def connected(self, destination: str) -> bool:
        """Whether there is a connection to ``destination``, as of the last process(). True for an
        inproc link whose listener has not come yet."""
        link = self._links.get(destination)
        return link is not None and link.connected

    def connected_since_ns(self, destination: str) -> int | None:
        """When the connection to ``destination`` was made, by the messenger's clock; None without one, and for
        inproc."""
        link = self._links.get(destination)
        return link.connected_since_ns if link is not None and link.connected else None

    def fileno(self) -> int:
        """The one descriptor to wait for: readable when process() has something to do."""
        return self._readiness.fileno()

    def next_deadline_ns(self) -> int | None:
        """When process() is to be called without the descriptor being readable, by the messenger's clock;
        None for never."""
        deadline_ns = self._readiness.replies_due_ns
        for link in self._links:
            check_ns = link.next_deadline_ns()
            if check_ns is not None and (deadline_ns is None or check_ns < deadline_ns):
                deadline_ns = check_ns
        for listener in self._listeners:
            check_ns = listener.reopen_due_ns
            if check_ns is not None and (deadline_ns is None or check_ns < deadline_ns):
                deadline_ns = check_ns
        return deadline_ns

    def process(self) -> None:
        """Take everything that came in, run callbacks and server loops, send and resend what is due. Never
        blocks.

        What they raise comes out of here; nothing is lost by it but the message that was being
        handled, and process() may be called again.
        """
        self._check_open()
        if self._processing:
            raise MessengerError("process() was called from within a callback of this messenger")
        self._processing, self._held = True, False
        try:
            now_ns = self._clock_ns()
            self._collect_ready(now_ns, with_replies=True)
            self._wake.hold()
            self._take_listener_news()
            self._reopen_due(now_ns)
            for turn in range(TURNS_MAX):
                self._receive()
                if self._closed:
                    break
                if turn == 0:
                    self._retry_due(now_ns)  # behind the replies that are there
                self._transmit(now_ns)
                if not (self._readiness.ready or self._sends or self._replies):
                    break
        finally:
            self._processing = False
            if self._closed:
                self._close_sockets()
            else:
                self._finish()

    def receive(self, *, replies: bool = True) -> None:
        """Take what came in and run server loops and callbacks, as process() does, and send nothing: the owner is going
        to call flush(), after what is more urgent. What is due waits for process().

        ``replies=False`` leaves them where they are if the owner is patient: ``replies_wait`` says that there are some.
        """
        self._check_open()
        if self._processing:
            raise MessengerError("receive() was called from within a callback of this messenger")
        self._processing, self._held = True, False
        try:
            self._collect_ready(self._clock_ns(), with_replies=replies or self._readiness.replies_due_ns is None)
            self._wake.hold()
            self._take_listener_news()
            self._receive()
        finally:
            self._processing, self._held = False, True
            if self._closed:
                self._close_sockets()

    @property
    def replies_wait(self) -> bool:
        """There may be replies to an owner that is patient."""
        return self._readiness.replies_wait

    @property
    def has_new(self) -> bool:
        """Messages or replies were given since the last flush() or process()."""
        return bool(self._sends or self._replies)

    def hold(self) -> None:
        """What is sent and replied from now on wakes nobody: the owner is going to call flush()."""
        if not (self._wake.signalled or self._processing):
            self._wake.hold()
            self._held = True

    def flush(self) -> bool:
        """Send what is buffered, and nothing else. True if process() has something to do: fileno() is
        readable then, too."""
        self._check_open()
        if self._processing:
            return True
        if self._sends or self._replies or self._sending:
            if self._wake.signalled and not self._held:
                self._wake.clear()
            self._wake.hold()
            try:
                self._transmit(self._clock_ns())
            finally:
                self._held = False
                self._finish()
        elif self._held:
            self._held = False
            self._finish()
        return bool(self._readiness.ready)

    def close(self) -> None:
        """Close every socket at once; what is not acknowledged is lost, replies not yet sent are too."""
        if self._closed:
            return
        self._thread.join()
        self._closed = True
        if self._processing:
            for source in (*self._links, *self._listeners):
                source.closed = True  # process() closes the sockets as it ends
        else:
            self._close_sockets()

    # With a thread of its own

    def start(self) -> None:
        """Let an own thread call process() from now on."""
        self._check_open()
        self._thread.start()

    def stop(self) -> None:
        """End that thread. Raises what a callback or server loop raised in it."""
        self._thread.stop()

    def __enter__(self) -> Messenger:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.stop()
        finally:
            self.close()

    # The owner's work

    def _collect_ready(self, now_ns: int, *, with_replies: bool) -> None:
        for monitored in self._readiness.collect(now_ns, with_replies=with_replies):
            monitored.read_monitor(now_ns)
            self._sending[monitored] = None

    def _reopen_due(self, now_ns: int) -> None:
        """Take up again what failed for reasons that may be over."""
        for listener in self._listeners:
            if listener.reopen_due_ns is not None and listener.reopen_due_ns <= now_ns:
                listener.reopen(now_ns)
        for link in list(self._links):
            if link.reopen_due_ns is not None and link.reopen_due_ns <= now_ns:
                self._reopen(link)

    def _retry_due(self, now_ns: int) -> None:
        """Queue what is to be sent again, and give up connections on which nothing is heard."""
        for link in list(self._links):
            silent_ns = link.silent_ns
            if silent_ns is not None and silent_ns <= now_ns:
                link.give_up()
                self._reopen(link)
            elif link.connected and link.outbox.requeue_due(now_ns):
                self._sending[link] = None

    def _receive(self) -> None:
        """Replies and their callbacks first, then messages and their server loops."""
        ready = self._readiness.ready
        sources = list(ready)
        for source in sources:
            if isinstance(source, Link):
                if source.receive():
                    ready.pop(source, None)
                if not source.closed:
                    self._sending[source] = None  # acknowledgements make room, and so may the news
        for source in sources:
            if isinstance(source, Listener) and source.receive():
                ready.pop(source, None)

    def _transmit(self, now_ns: int) -> None:
        self._take_sends()
        replied: dict[Listener, None] = {}
        for _ in range(len(self._replies)):
            reply = self._replies.popleft()
            listener = reply.listener
            if not listener.closed:
                listener.reply(reply)
                replied[listener] = None
        for listener in replied:
            if listener.has_unread():
                self._readiness.ready[listener] = None
        if not self._sending:
            return
        for link in self._sending:
            if link.transmit(now_ns):
                self._readiness.unread[link] = None
        self._sending.clear()
        # What could not be sent waits for news of its link, be it room or a reply.
        if self.patient and all(link.outbox.all_sent for link in self._links):
            self._readiness.put_replies_off(now_ns)
        else:
            self._readiness.expect_replies()

    def _take_sends(self) -> None:
        for _ in range(len(self._sends)):
            destination, parts, callback, turn = self._sends.popleft()
            link = self._links.get(destination)
            if link is None:
                link = self._links.open(destination)
            waits = callback is not None or (turn is not None and turn.callback is not None)
            link.outbox.add(parts, callback, next(self._callback_ids) if waits else NOOP, turn)
            self._sending[link] = None

    def _reopen(self, link: Link) -> Link:
        self._sending.pop(link, None)
        return self._links.reopen(link)

    def _listener_changed(self, link: Link, listening: bool) -> None:
        self._listener_news.append((link, listening))
        self._wake.signal()

    def _take_listener_news(self) -> None:
        """Make anew what inproc itself does not."""
        while self._listener_news:
            link, listening = self._listener_news.popleft()
            if link.closed:
                continue
            if not listening:
                link.connected = False
            elif not link.connected:
                reopened = self._reopen(link)
                reopened.outbox.requeue_all()
                self._sending[reopened] = None

    def _finish(self) -> None:
        """Keep the descriptor readable while there is work left."""
        self._wake.release()
        if self._readiness.ready or self._sends or self._replies or self._sending or self._listener_news:
            self._wake.signal()

    def _new_callback_id(self) -> int:
        """For a callback that is given with a reply; never NOOP."""
        return next(self._given_ids) % CALLBACK_ID_MAX + 1

    def _thread_ended(self) -> None:
        if self._room is not None:
            self._room.wake()

    def _check_open(self) -> None:
        if self._closed:
            raise MessengerClosedError("the messenger is closed")

    def _close_sockets(self) -> None:
        self._links.close()
        for listener in self._listeners:
            self._readiness.unwatch(listener)
            listener.close()
        if self._gate is not None:
            self._gate.close()
        self._listeners.clear()
        self._sending.clear()
        self._sends.clear()
        self._replies.clear()
        self._readiness.close()
        self._wake.close()
        if self._owns_context:
            self._context.term()
