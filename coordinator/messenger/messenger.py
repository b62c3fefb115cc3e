"""The messenger: every ZeroMQ socket, behind one descriptor and one process().

One thread, the owner, drives it: it waits for fileno() to become readable, at most until
next_deadline_ns(), and calls process(). Other threads may send and reply; what they give waits in deques
until the owner takes it. Alternatively start() makes a thread that does all this, and every method may be
called from any thread.

ZeroMQ's descriptors tell of news once, and any call on a socket may take the news in. The rule that keeps
wake-ups from being lost: a socket is in ``_ready`` from the moment its descriptor, or a look at its events
after sending, says that there is something, until a receive has found nothing. While anything is in
``_ready``, or in the deques, after process() or flush(), the wake descriptor is readable.
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
from coordinator.messenger.limits import IN_FLIGHT_MAX, SPAN_MAX, TURNS_MAX
from coordinator.messenger.link import Link
from coordinator.messenger.listener import Listener, Reply, ServerLoop
from coordinator.messenger.outbox import Outbox, ReplyCallback, RetryPolicy
from coordinator.messenger.sockets import Context, Counters, Warnings, check_destination, message_parts
from coordinator.messenger.threaded import OwnerThread
from coordinator.messenger.wake import Wake

_Send = tuple[str, tuple[bytes, ...], ReplyCallback | None]


class Messenger:
    """Sends messages until they are acknowledged, and gives each received one to its server loop once.

    ``context``: a ZeroMQ context to share, as inproc endpoints between messengers need; else an own one.
    ``incarnation``: a random u64 that no other messenger has. ``clock_ns``: monotonic. ``random``: from [0, 1).
    ``in_flight_max``: unacknowledged messages per link, at most limits.SPAN_MAX; later ones wait in
    the buffer, which is bounded by who calls send_message(): see pending_count().
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
    ) -> None:
        if not 1 <= in_flight_max <= SPAN_MAX:
            raise MessengerError(f"in_flight_max is {in_flight_max}, expected 1 to {SPAN_MAX}")
        self._context: Context = zmq.Context() if context is None else context
        self._owns_context = context is None
        self.incarnation = random_module.SystemRandom().getrandbits(64) if incarnation is None else incarnation
        self._clock_ns = clock_ns
        self._random = random
        self._retry = retry or RetryPolicy()
        self._in_flight_max = in_flight_max
        self._counters = Counters()
        self._warnings = Warnings(clock_ns)

        self._links: dict[str, Link] = {}
        self._listeners: list[Listener] = []
        self._link_ids = itertools.count(1)
        self._callback_ids = itertools.count(NOOP + 1)

        self._sends: deque[_Send] = deque()  # appended to by any thread, as is the next
        self._replies: deque[Reply] = deque()
        self._ready: dict[Link | Listener, None] = {}  # have something to receive, or may have
        self._sending: dict[Link, None] = {}  # have something to send, or may send again

        self._epoll = select.epoll()
        self._sources: dict[int, Link | Listener] = {}  # by descriptor
        self._monitors: dict[int, Link] = {}  # by their monitor's descriptor
        self._wake = Wake()
        self._epoll.register(self._wake.descriptor, select.EPOLLIN)
        self._processing = False
        self._closed = False
        self._thread = OwnerThread(self, self._wake, clock_ns)

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

    def _accept_reply(self, reply: Reply) -> None:
        if not self._closed:
            self._replies.append(reply)
            self._wake.signal()

    def counters(self) -> Counters:
        """A copy of what has been counted."""
        return replace(self._counters)

    # What the owner does; any thread after start()

    def listen(self, endpoint: str, server_loop: ServerLoop) -> str:
        """Give what comes in at ``endpoint`` to ``server_loop``; returns the real endpoint, with its port.

        Raises EndpointInUseError, EndpointError.
        """
        return self._thread.call(lambda: self._listen(endpoint, server_loop))

    def _listen(self, endpoint: str, server_loop: ServerLoop) -> str:
        self._check_open()
        listener = Listener(
            self._context,
            endpoint,
            server_loop,
            self.incarnation,
            self._accept_reply,
            self._counters,
            self._warnings,
        )
        self._listeners.append(listener)
        self._watch(listener.descriptor, listener)
        self._ready[listener] = None  # over inproc, what was sent before comes in with the binding, unannounced
        self._wake.signal()
        return listener.endpoint

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
        self._sending.pop(link, None)
        self._unwatch(link)
        link.close()
        return len(link.outbox)

    def pending_count(self, destination: str) -> int:
        """How many messages to ``destination`` are not acknowledged, sent or not."""
        return self._thread.call(lambda: self._pending_count(destination))

    def _pending_count(self, destination: str) -> int:
        self._check_open()
        self._take_sends()
        link = self._links.get(destination)
        return 0 if link is None else len(link.outbox)

    def connected(self, destination: str) -> bool:
        """Whether there is a connection to ``destination``, as of the last process(). Always true for an
        inproc link."""
        link = self._links.get(destination)
        return link is not None and link.connected

    def fileno(self) -> int:
        """The one descriptor to wait for: readable when process() has something to do."""
        return self._epoll.fileno()

    def next_deadline_ns(self) -> int | None:
        """When process() is to be called without the descriptor being readable, by the messenger's clock;
        None for never."""
        deadline_ns: int | None = None
        for link in self._links.values():
            check_ns = link.outbox.retry_check_ns
            if link.connected and check_ns is not None and (deadline_ns is None or check_ns < deadline_ns):
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
        self._processing = True
        try:
            self._collect_ready()
            self._wake.hold()
            now_ns = self._clock_ns()
            for link in self._links.values():
                if link.connected and link.outbox.requeue_due(now_ns):
                    self._sending[link] = None
            for _ in range(TURNS_MAX):
                self._receive()
                if self._closed:
                    break
                self._transmit(now_ns)
                if not (self._ready or self._sends or self._replies):
                    break
        finally:
            self._processing = False
            if self._closed:
                self._close_sockets()
            else:
                self._finish()

    def flush(self) -> bool:
        """Send what is buffered, and nothing else. True if process() has something to do: fileno() is
        readable then, too."""
        self._check_open()
        if self._processing:
            return True
        if self._sends or self._replies or self._sending:
            if self._wake.signalled:
                self._wake.clear()
            self._wake.hold()
            try:
                self._transmit(self._clock_ns())
            finally:
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

    def _collect_ready(self) -> None:
        for descriptor, _ in self._epoll.poll(0):
            if descriptor == self._wake.descriptor:
                self._wake.clear()
            elif descriptor in self._monitors:
                link = self._monitors[descriptor]
                link.read_monitor()
                self._sending[link] = None
            else:
                self._ready[self._sources[descriptor]] = None

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
        for link in self._sending:
            if link.transmit(now_ns):
                self._ready[link] = None
        self._sending.clear()

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
        link = Link(
            self._context,
            destination,
            next(self._link_ids),
            self.incarnation,
            outbox,
            self._counters,
            self._warnings,
        )
        self._links[destination] = link
        self._watch(link.descriptor, link)
        if link.monitor_descriptor is not None:
            self._monitors[link.monitor_descriptor] = link
            self._epoll.register(link.monitor_descriptor, select.EPOLLIN)
        return link

    def _watch(self, descriptor: int, source: Link | Listener) -> None:
        self._sources[descriptor] = source
        self._epoll.register(descriptor, select.EPOLLIN)

    def _unwatch(self, source: Link | Listener) -> None:
        del self._sources[source.descriptor]
        self._epoll.unregister(source.descriptor)
        if isinstance(source, Link) and source.monitor_descriptor is not None:
            del self._monitors[source.monitor_descriptor]
            self._epoll.unregister(source.monitor_descriptor)

    def _all_sources(self) -> list[Link | Listener]:
        return [*self._links.values(), *self._listeners]

    def _finish(self) -> None:
        """Keep the descriptor readable while there is work left."""
        self._wake.release()
        if self._ready or self._sends or self._replies or self._sending:
            self._wake.signal()

    def _check_open(self) -> None:
        if self._closed:
            raise MessengerClosedError("the messenger is closed")

    def _close_sockets(self) -> None:
        for source in self._all_sources():
            self._unwatch(source)
            source.close()
        self._links.clear()
        self._listeners.clear()
        self._ready.clear()
        self._sending.clear()
        self._sends.clear()
        self._replies.clear()
        self._epoll.close()
        self._wake.close()
        if self._owns_context:
            self._context.term()
