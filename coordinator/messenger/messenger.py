"""The messenger: every ZeroMQ socket, behind one descriptor and one process().

One thread, the owner, drives it: it waits for fileno() to become readable, at most until
next_deadline_ns(), and calls process(). Other threads may send and reply; what they give waits in deques
until the owner takes it. Alternatively start() makes a thread that does all this, and every method may be
called from any thread.

ZeroMQ's descriptors tell of news once, and any call on a socket may take the news in. The rule that keeps
wake-ups from being lost: a socket is in ``_ready`` from the moment its descriptor, or a look at its events
after sending, says that there is something, until a receive has found nothing. While anything is in
``_ready``, or in the deques, after process() or flush(), the wake descriptor is readable.

Links' descriptors are behind an epoll of their own, ``_link_epoll``: replies need not wake a patient owner.
"""

from __future__ import annotations

import itertools
import random as random_module
import select
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType

import zmq

from coordinator.messenger.envelope import NOOP
from coordinator.messenger.errors import MessengerClosedError, MessengerError
from coordinator.messenger.gate import Gate
from coordinator.messenger.limits import IN_FLIGHT_MAX, IO_THREADS, PATIENCE_NS, SPAN_MAX, TURNS_MAX
from coordinator.messenger.link import Link
from coordinator.messenger.listener import ClientLoop, ClientReply, Listener, Reply, ServerLoop
from coordinator.messenger.outbox import Outbox, ReplyCallback, RetryPolicy
from coordinator.messenger.security import Security
from coordinator.messenger.sockets import Context, Counters, Warnings, check_destination, message_parts
from coordinator.messenger.threaded import OwnerThread
from coordinator.messenger.wake import Wake

_Source = Link | Listener
_Send = tuple[str, tuple[bytes, ...], ReplyCallback | None]


class Messenger:
    """Sends messages until they are acknowledged, and gives each received one to its server loop once.

    ``context``: a ZeroMQ context to share, as inproc endpoints between messengers need; else an own one.
    ``incarnation``: a random u64 that no other messenger has. ``clock_ns``: monotonic. ``random``: from [0, 1).
    ``in_flight_max``: unacknowledged messages per link, at most limits.SPAN_MAX; later ones wait in
    the buffer, which is bounded by who calls send_message(): see pending_count(). ``security``: who this is, and
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
        security: Security | None = None,
    ) -> None:
        if not 1 <= in_flight_max <= SPAN_MAX:
            raise MessengerError(f"in_flight_max is {in_flight_max}, expected 1 to {SPAN_MAX}")
        self._context: Context = zmq.Context(io_threads=IO_THREADS) if context is None else context
        self._owns_context = context is None
        self.incarnation = random_module.SystemRandom().getrandbits(64) if incarnation is None else incarnation
        self._clock_ns = clock_ns
        self._random = random
        self._retry = retry or RetryPolicy()
        self._in_flight_max = in_flight_max
        self._counters = Counters()
        self._warnings = Warnings(clock_ns)
        self._stranger_warnings = Warnings(clock_ns)  # apart, so that they hide no others

        self._links: dict[str, Link] = {}
        self._listeners: list[Listener] = []
        self._link_ids = itertools.count(1)
        self._callback_ids = itertools.count(NOOP + 1)

        self._sends: deque[_Send] = deque()  # appended to by any thread, as is the next
        self._replies: deque[Reply | ClientReply] = deque()
        self._security: Security | None = None
        self._gate: Gate | None = None
        self._listener_news: deque[tuple[Link, bool]] = deque()  # of inproc links; appended to by any thread
        self._ready: dict[_Source, None] = {}  # have something to receive, or may have
        self._sending: dict[Link, None] = {}  # have something to send, or may send again

        self.patient = False
        """Set by the owner, before flush(), while it waits for no reply: those to what is sent then come with whatever
        else does, PATIENCE_NS later at most."""

        self._epoll = select.epoll()
        self._link_epoll = select.epoll()
        self._epoll.register(self._link_epoll.fileno(), select.EPOLLIN)
        self._replies_due_ns: int | None = None  # when their epoll is listened to again; None: it is
        self._unread: dict[Link, None] = {}  # have replies, or may have, that nobody waits for before that
        self._sources: dict[int, _Source] = {}  # by descriptor
        self._monitors: dict[int, Link] = {}  # by their monitor's descriptor
        self._wake = Wake()
        self._epoll.register(self._wake.descriptor, select.EPOLLIN)
        self._processing = False
        self._held = False
        self._closed = False
        self._thread = OwnerThread(self, self._wake, clock_ns)
        if security is not None:
            self._secure(security)

    # What any thread may do

    def send_message(
        self, destination: str, message: bytes | Sequence[bytes], callback: ReplyCallback | None = None
    ) -> None:
        """Buffer ``message`` for ``destination``; returns at once. It is sent, and resent, until it is
        acknowledged.

        ``callback`` gets the parts of the reply, once, in the owner's thread, before server loops get what
        came in at the same time. The list is empty if the receiver acknowledged but no longer keeps its
        reply. Raises EndpointError, MessageTooLargeError, MessengerClosedError.
        """
        if destination not in self._links:
            check_destination(destination)
        parts = message_parts(message)
        if self._closed or self._thread.failed:
            raise MessengerClosedError("the messenger is closed, or its thread has failed: nothing is sent")
        self._sends.append((destination, parts, callback))
        self._wake.signal()

    def _accept_reply(self, reply: Reply | ClientReply) -> None:
        if not self._closed:
            self._replies.append(reply)
            self._wake.signal()

    def counters(self) -> Counters:
        """A copy of what has been counted."""
        counters, gate = self._counters, self._gate
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
        self, endpoint: str, server_loop: ServerLoop, *, secured: bool = True, client_loop: ClientLoop | None = None
    ) -> str:
        """Give what comes in at ``endpoint`` to ``server_loop``; returns the real endpoint, with its port.

        ``client_loop`` gets what comes from clients (docs/WIRE.md, part 9); without it that is dropped.

        Not ``secured``: in plain, for anybody, whatever the messenger's security. Raises EndpointInUseError,
        EndpointError.
        """
        return self._thread.call(lambda: self._listen(endpoint, server_loop, secured, client_loop))

    def _listen(self, endpoint: str, server_loop: ServerLoop, secured: bool, client_loop: ClientLoop | None) -> str:
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
            self._security if secured else None,
            secured,
            client_loop,
        )
        self._listeners.append(listener)
        self._watch(listener)
        self._ready[listener] = None  # over inproc, what was sent before comes in with the binding, unannounced
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
        self._security = security
        now_ns = self._clock_ns()
        for listener in self._listeners:
            if listener.secured:
                self._unwatch(listener)
                listener.secure(security, now_ns)
                self._watch(listener)
        for link in list(self._links.values()):
            keys = security.servers(link.endpoint)
            pair = security.own if keys else None
            expected = link.server_key in keys if keys else link.server_key is None
            if link.pair != pair or not expected:
                self._reopen_link(link)
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
        link = self._links.pop(destination, None)
        if link is None:
            return 0
        self._ready.pop(link, None)
        self._unread.pop(link, None)
        self._sending.pop(link, None)
        self._unwatch(link)
        link.close()
        return len(link.outbox)

    def reconnect(self, destination: str) -> None:
        """There is a sign that somebody is there again: where there is no connection, do not wait with trying."""
        self._thread.call(lambda: self._reconnect(destination))

    def _reconnect(self, destination: str) -> None:
        self._check_open()
        link = self._links.get(destination)
        if link is not None and not link.connected and link.monitor_descriptor is not None:
            self._reopen_link(link)

    def pending_count(self, destination: str) -> int:
        """How many messages to ``destination`` are not acknowledged, sent or not."""
        return self._thread.call(lambda: self._pending_count(destination))

    def _pending_count(self, destination: str) -> int:
        self._check_open()
        self._take_sends()
        link = self._links.get(destination)
        return 0 if link is None else len(link.outbox)

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
        return self._epoll.fileno()

    def next_deadline_ns(self) -> int | None:
        """When process() is to be called without the descriptor being readable, by the messenger's clock;
        None for never."""
        deadline_ns = self._replies_due_ns
        for link in self._links.values():
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
                if not (self._ready or self._sends or self._replies):
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
            self._collect_ready(self._clock_ns(), with_replies=replies or self._replies_due_ns is None)
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
        return self._replies_due_ns is not None and bool(self._unread or self._link_epoll.poll(0))

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
        return bool(self._ready)

    def close(self) -> None:
        """Close every socket at once; what is not acknowledged is lost, replies not yet sent are too."""
        if self._closed:
            return
        self._thread.join()
        self._closed = True
        if self._processing:
            for source in self._all_sources():
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
        for descriptor, _ in self._epoll.poll(0):
            if descriptor == self._wake.descriptor:
                self._wake.clear()
            elif descriptor == self._link_epoll.fileno():
                pass  # looked at below
            elif descriptor in self._monitors:
                monitored = self._monitors[descriptor]
                monitored.read_monitor(now_ns)
                self._sending[monitored] = None
            else:
                self._ready[self._sources[descriptor]] = None
        if not with_replies:
            return
        for descriptor, _ in self._link_epoll.poll(0):
            self._ready[self._sources[descriptor]] = None
        if self._replies_due_ns is not None and self._replies_due_ns <= now_ns:
            self._listen_to_replies()
        self._take_unread()

    def _listen_to_replies(self) -> None:
        self._replies_due_ns = None
        self._epoll.modify(self._link_epoll.fileno(), select.EPOLLIN)

    def _take_unread(self) -> None:
        for link in self._unread:
            self._ready[link] = None
        self._unread.clear()

    def _put_replies_off(self, now_ns: int) -> None:
        if self._replies_due_ns is None:
            self._epoll.modify(self._link_epoll.fileno(), 0)
        self._replies_due_ns = now_ns + PATIENCE_NS

    def _reopen_due(self, now_ns: int) -> None:
        """Take up again what failed for reasons that may be over."""
        for listener in self._listeners:
            if listener.reopen_due_ns is not None and listener.reopen_due_ns <= now_ns:
                listener.reopen(now_ns)
        for link in list(self._links.values()):
            if link.reopen_due_ns is not None and link.reopen_due_ns <= now_ns:
                self._reopen_link(link)

    def _retry_due(self, now_ns: int) -> None:
        """Queue what is to be sent again, and give up connections on which nothing is heard."""
        for link in list(self._links.values()):
            silent_ns = link.silent_ns
            if silent_ns is not None and silent_ns <= now_ns:
                link.give_up()
                self._reopen_link(link)
            elif link.connected and link.outbox.requeue_due(now_ns):
                self._sending[link] = None

    def _receive(self) -> None:
        """Replies and their callbacks first, then messages and their server loops."""
        sources = list(self._ready)
        for source in sources:
            if isinstance(source, Link):
                if source.receive():
                    self._ready.pop(source, None)
                if not source.closed:
                    self._sending[source] = None  # acknowledgements make room, and so may the news
        for source in sources:
            if isinstance(source, Listener) and source.receive():
                self._ready.pop(source, None)

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
                self._ready[listener] = None
        if not self._sending:
            return
        for link in self._sending:
            if link.transmit(now_ns):
                self._unread[link] = None
        self._sending.clear()
        # What could not be sent waits for news of its link, be it room or a reply.
        if self.patient and all(link.outbox.all_sent for link in self._links.values()):
            self._put_replies_off(now_ns)
            return
        if self._replies_due_ns is not None:
            self._listen_to_replies()
        self._take_unread()

    def _take_sends(self) -> None:
        for _ in range(len(self._sends)):
            destination, parts, callback = self._sends.popleft()
            link = self._links.get(destination)
            if link is None:
                link = self._open_link(destination)
            link.outbox.add(parts, callback, NOOP if callback is None else next(self._callback_ids))
            self._sending[link] = None

    def _open_link(self, destination: str) -> Link:
        outbox = Outbox(self._retry, self._random, in_flight_max=self._in_flight_max)
        return self._connect(destination, next(self._link_ids), outbox, None)

    def _reopen_link(self, link: Link) -> None:
        """The same link over a new socket, with the next of the keys that its destination may have."""
        self._ready.pop(link, None)
        self._unread.pop(link, None)
        self._sending.pop(link, None)
        self._unwatch(link)
        link.close()
        self._connect(link.endpoint, link.link_id, link.outbox, link.server_key)

    def _connect(self, destination: str, link_id: int, outbox: Outbox, tried_key: str | None) -> Link:
        keys = () if self._security is None else self._security.servers(destination)
        following = (keys.index(tried_key) + 1) % len(keys) if tried_key in keys else 0
        link = Link(
            self._context,
            destination,
            link_id,
            self.incarnation,
            outbox,
            self._counters,
            self._warnings,
            self._security.own if self._security is not None and keys else None,
            keys[following] if keys else None,
            self._listener_changed,
        )
        self._links[destination] = link
        self._watch(link)
        return link

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
                self._reopen_link(link)
                link.outbox.requeue_all()
                self._sending[self._links[link.endpoint]] = None

    def _watch(self, source: _Source) -> None:
        self._sources[source.descriptor] = source
        self._epoll_of(source).register(source.descriptor, select.EPOLLIN)
        if isinstance(source, Link) and source.monitor_descriptor is not None:
            self._monitors[source.monitor_descriptor] = source
            self._epoll.register(source.monitor_descriptor, select.EPOLLIN)

    def _unwatch(self, source: _Source) -> None:
        del self._sources[source.descriptor]
        self._epoll_of(source).unregister(source.descriptor)
        if isinstance(source, Link) and source.monitor_descriptor is not None:
            del self._monitors[source.monitor_descriptor]
            self._epoll.unregister(source.monitor_descriptor)

    def _epoll_of(self, source: _Source) -> select.epoll:
        return self._link_epoll if isinstance(source, Link) else self._epoll

    def _all_sources(self) -> list[_Source]:
        return [*self._links.values(), *self._listeners]

    def _finish(self) -> None:
        """Keep the descriptor readable while there is work left."""
        self._wake.release()
        if self._ready or self._sends or self._replies or self._sending or self._listener_news:
            self._wake.signal()

    def _check_open(self) -> None:
        if self._closed:
            raise MessengerClosedError("the messenger is closed")

    def _close_sockets(self) -> None:
        for source in self._all_sources():
            self._unwatch(source)
            source.close()
        if self._gate is not None:
            self._gate.close()
        self._links.clear()
        self._listeners.clear()
        self._ready.clear()
        self._unread.clear()
        self._sending.clear()
        self._sends.clear()
        self._replies.clear()
        self._link_epoll.close()
        self._epoll.close()
        self._wake.close()
        if self._owns_context:
            self._context.term()
