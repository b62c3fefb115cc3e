"""Messenger: owner of all ZeroMQ sockets of a process, driven through one descriptor and process().

One thread, the owner, drives it: it waits for fileno() to become readable, at most until next_deadline_ns(), and calls
process(). Other threads can send and reply; their messages wait until the owner takes them. Alternatively start() makes
a thread that does all this; then any thread can call every method.

This module decides the order of work; the connections to and from others, and which of their sockets are ready, are in
connections.py. While anything is ready, or was posted by other threads, after process() or flush(), the wake descriptor
is readable.
"""

from __future__ import annotations

import os
import random as random_module
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import TypeVar

import zmq

from immortal.coordinator.messenger import limits
from immortal.coordinator.messenger.backpressure import PENDING_LIMITS, PendingLimits, PendingRoom
from immortal.coordinator.messenger.connections import CALLBACK_ID_MAX, Links, Listeners, Poller
from immortal.coordinator.messenger.envelope import NOOP, MessengerClosedError, MessengerError
from immortal.coordinator.messenger.link import Link
from immortal.coordinator.messenger.listener import ClientLoop, ClientReply, Listener, Reply, ServerLoop
from immortal.coordinator.messenger.outbox import (
    AnswerCallback,
    ConversationMessage,
    Outbox,
    ReplyCallback,
    RetryPolicy,
)
from immortal.coordinator.messenger.owner_thread import OwnerThread
from immortal.coordinator.messenger.security import Security
from immortal.coordinator.messenger.sockets import (
    Context,
    Counters,
    Shared,
    WakeupEvent,
    check_destination,
    message_parts,
)
from immortal.protocol.process import after_fork_message, register

Result = TypeVar("Result")


class Messenger:
    """Messenger: sends messages until they are acknowledged, and delivers each received one to a server loop once.

    ``context``: a ZeroMQ context to share, which inproc endpoints between messengers need; None: an own one.
    ``incarnation``: a random u64 that no other messenger has. ``clock_ns``: monotonic. ``random``: from [0, 1).
    ``in_flight_max``: messages sent and not acknowledged per link, at most limits.SPAN_MAX; later ones wait in the
    buffer. ``pending``: limits on what is buffered and in flight for each destination; None: the caller limits that
    itself, see pending_count(). ``security``: own keys, and who may send to it; it needs a context of its own, without
    inproc endpoints. Without it nothing is encrypted.
    """

    def __init__(
        self,
        *,
        context: Context | None = None,
        incarnation: int | None = None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        random: Callable[[], float] = random_module.random,
        retry: RetryPolicy | None = None,
        in_flight_max: int = limits.IN_FLIGHT_MAX,
        pending: PendingLimits | None = PENDING_LIMITS,
        security: Security | None = None,
    ) -> None:
        if not 1 <= in_flight_max <= limits.SPAN_MAX:
            raise MessengerError(f"in_flight_max is {in_flight_max}, expected 1 to {limits.SPAN_MAX}")
        self._context: Context = zmq.Context(io_threads=limits.IO_THREADS) if context is None else context
        self._owns_context = context is None
        self.incarnation = random_module.SystemRandom().getrandbits(64) if incarnation is None else incarnation
        self._clock_ns = clock_ns
        self._wake = WakeupEvent()
        self._thread = OwnerThread(self, self._wake, clock_ns, self._thread_ended)
        self._room = None if pending is None else PendingRoom(pending, self._thread.can_be_awaited)
        self._poller = Poller(self._wake)
        make_outbox = partial(Outbox, retry or RetryPolicy(), random, in_flight_max=in_flight_max)
        shared = Shared(self._context, self.incarnation, clock_ns)
        self._links = Links(shared, self._poller, make_outbox, self._wake, self._room)
        self._listeners = Listeners(shared, self._poller, self._accept_reply, clock_ns)
        self._delayed, self._piggybacked = shared.delayed_replies, shared.piggybacked_replies
        self._closed = False
        self._why_closed = ""
        # Messages and replies that any thread posted and the owner has not taken yet:
        self._messages: deque[tuple[str, tuple[bytes, ...], ReplyCallback | None, ConversationMessage | None]] = deque()
        self._replies: deque[Reply | ClientReply] = deque()

        self.patient = False
        """True while the owner waits for no reply; it sets this before flush(). Replies to what is sent then leave with
        the next message from there, and are read together with the next other input, or after REPLY_DELAY_NS_MAX each.
        So do the owner's own replies to such messages."""

        self._processing = False
        self._held = False
        self._process_id = os.getpid()
        if security is not None:
            self._secure(security)
        register(self)

    def forked_in_child(self) -> None:
        """Refuse to send in a forked child: sockets, context and thread belong to its parent."""
        self._thread.forget_after_fork()
        what, advice = "this messenger", "make one here, which has an incarnation of its own"
        self._closed, self._why_closed = True, after_fork_message(what, self._process_id, advice)

    # For any thread

    def send_message(
        self, destination: str, message: bytes | Sequence[bytes], callback: ReplyCallback | None = None
    ) -> None:
        """Buffer ``message`` for ``destination``, to be sent until it is acknowledged. Returns at once, or after at
        most PendingLimits.wait_s.

        ``callback`` gets the parts of the reply, once, in the owner's thread, before server loops get messages that
        arrived at the same time; after them if it came with one. The list is empty if the receiver acknowledged but
        no longer keeps its reply. Raises EndpointError, MessageTooLargeError, PendingFullError, MessengerClosedError.
        """
        self._post(destination, message, callback, None)

    def converse(
        self,
        destination: str,
        message: bytes | Sequence[bytes],
        callback: AnswerCallback | None = None,
        destination_callback_id: int = NOOP,
    ) -> None:
        """Send a message of a conversation of several turns. The reply can have a callback of the receiver, and
        ``message`` can address one, by the ``callback_id`` of the last Answer from there.

        The receiver's callback gets the message once, before the server loop. The receiver knows the callback as long
        as it and this link live (drop() ends a link) and not too many others were given meanwhile; otherwise the Answer
        has CALLBACK_UNKNOWN. Raises MessengerError for an ID out of range, and the errors of send_message().
        """
        if not NOOP <= destination_callback_id <= CALLBACK_ID_MAX:
            raise MessengerError(f"callback ID {destination_callback_id}, expected the callback_id of an Answer")
        self._post(destination, message, None, ConversationMessage(destination_callback_id, callback))

    def _post(
        self,
        destination: str,
        message: bytes | Sequence[bytes],
        callback: ReplyCallback | None,
        conversation: ConversationMessage | None,
    ) -> None:
        if destination not in self._links:  # those are known to be right
            check_destination(destination)
        parts = message_parts(message)
        if self._closed or self._thread.failed:
            why = self._why_closed or "the messenger is closed, or its thread has failed: nothing is sent"
            raise MessengerClosedError(why)
        if self._room is not None:
            self._room.reserve(destination, sum(map(len, parts)))
        self._messages.append((destination, parts, callback, conversation))
        self._wake.signal()

    def _accept_reply(self, reply: Reply | ClientReply) -> None:
        if not self._closed:
            self._replies.append(reply)
            self._wake.signal()

    def counters(self) -> Counters:
        """Return a copy of the counters."""
        counters, room = self._listeners.counted(), self._room
        if room is not None:
            counters.sends_waited, counters.sends_refused = room.waited_count, room.refused_count
        return counters

    # For the owner; for any thread after start()

    def listen(
        self,
        endpoint: str,
        server_loop: ServerLoop,
        *,
        ordered: bool = False,
        secured: bool = True,
        client_loop: ClientLoop | None = None,
        parts_max: int = limits.PARTS_MAX - 1,
        most_bytes: Callable[[], int] | None = None,
    ) -> str:
        """Listen at ``endpoint`` and deliver its messages to ``server_loop``; return the real endpoint, with its port.

        Each message is delivered once, when it arrives; with ``ordered``, in the order of sending: a message that
        arrives too early, since one before it was lost, waits for that one.

        ``client_loop`` gets the frames of clients (docs/WIRE.md, part 9); without it they are dropped.

        ``parts_max``: of a message with more parts, one more is delivered, and the rest is dropped without a copy.

        ``most_bytes``: returns the size of the largest message of an honest sender; a connection that brings a larger
        one is ended. Called in another thread, when more than the usual 64 MiB have arrived. None: no limit.

        Not ``secured``: without keys, open to anybody, whatever the messenger's security. Raises EndpointInUseError,
        EndpointError.
        """
        listener = self._call(
            lambda: self._listeners.open(endpoint, server_loop, ordered, secured, client_loop, parts_max, most_bytes)
        )
        self._wake.signal()
        return listener.endpoint

    def secure(self, security: Security) -> None:
        """Use ``security`` from now on. No pending message is lost, and nobody else is admitted.

        All connections are made anew if the own keys have changed; those to a destination, if the key that it showed is
        no longer one of its keys. Messages with a key that ``callers`` no longer has are dropped.
        """
        self._call(lambda: self._secure(security))

    def _secure(self, security: Security) -> None:
        self._listeners.secure(security)
        self._links.secure(security)
        self._wake.signal()

    def drop(self, destination: str) -> int:
        """Drop the messages pending for ``destination`` and close its link; return the number of dropped messages.

        Their callbacks are never called; the server loop there may or may not have got them. The next send opens a new
        link.
        """
        return self._call(lambda: self._drop(destination))

    def _drop(self, destination: str) -> int:
        self._add_posted_messages()
        return self._links.drop(destination)

    def reconnect(self, destination: str) -> None:
        """Retry the connection to ``destination`` at once if there is none, since it is known to be up again."""
        self._call(lambda: self._reconnect(destination))

    def _reconnect(self, destination: str) -> None:
        link = self._links.get(destination)
        if link is not None and not link.connected and link.monitor_descriptor is not None:
            self._links.reopen(link)

    def pending_count(self, destination: str) -> int:
        """Return the number of messages to ``destination`` that are not acknowledged, sent or not."""
        return self._call(lambda: len(self._outbox(destination)))

    def pending_size_bytes(self, destination: str) -> int:
        """Return the bytes of the messages to ``destination`` that are not acknowledged, sent or not."""
        return self._call(lambda: self._outbox(destination).size_bytes)

    def _outbox(self, destination: str) -> Outbox:
        self._add_posted_messages()
        return self._links.outbox(destination)

    def _call(self, function: Callable[[], Result]) -> Result:
        """Run ``function`` in the thread that owns the sockets, unless they are closed."""

        def called() -> Result:
            self._check_open()
            return function()

        return self._thread.call(called)

    def connected(self, destination: str) -> bool:
        """Return True if there was a connection to ``destination`` at the last process(). True also for an inproc link
        whose listener is not bound yet."""
        link = self._links.get(destination)
        return link is not None and link.connected

    def connected_since_ns(self, destination: str) -> int | None:
        """Return the time when the connection to ``destination`` was made, by the messenger's clock; None without a
        connection, and for inproc."""
        link = self._links.get(destination)
        return link.connected_since_ns if link is not None and link.connected else None

    def fileno(self) -> int:
        """Return the one descriptor to wait for: it is readable when process() has work."""
        return self._poller.fileno()

    def next_deadline_ns(self) -> int | None:
        """Return the time, by the messenger's clock, at which process() must run even if the descriptor is not
        readable; None for never."""
        moments_ns = [self._delayed.due_ns, self._poller.replies_due_ns]
        moments_ns += [link.next_deadline_ns() for link in self._links]
        moments_ns += [listener.reopen_due_ns for listener in self._listeners.all]
        return min([moment_ns for moment_ns in moments_ns if moment_ns is not None], default=None)

    def process(self) -> None:
        """Receive everything, run callbacks and server loops, send and resend what is due. Never blocks.

        Exceptions of callbacks and server loops leave process(); only the message that was being handled is lost, and
        process() can be called again.
        """
        self._start_processing("process")
        try:
            now_ns = self._clock_ns()
            self._collect_ready(now_ns, with_replies=True)
            self._listeners.reopen_due(now_ns)
            self._links.reopen_due(now_ns)
            for turn in range(limits.TURNS_MAX):
                self._receive()
                self._links.deliver_piggybacked_replies(now_ns)
                if self._closed:
                    break
                if turn == 0:
                    self._links.retry_due(now_ns)  # after the replies that are there
                self._transmit(now_ns)
                if not (self._poller.ready or self.has_new):
                    break
        finally:
            self._processing = False
            if self._closed:
                self._close_sockets()
            else:
                self._finish()

    def receive(self, *, replies: bool = True) -> None:
        """Receive everything and run server loops and callbacks, as process() does, but send nothing: the owner calls
        flush() after more urgent work. Retransmissions wait for process().

        ``replies=False`` leaves replies unread if the owner is patient: ``replies_wait`` tells if there are some.
        """
        self._start_processing("receive")
        try:
            now_ns, replies = self._clock_ns(), replies or self._poller.replies_due_ns is None
            self._collect_ready(now_ns, with_replies=replies)
            self._receive()
            if replies:
                self._links.deliver_piggybacked_replies(now_ns)
        finally:
            self._processing, self._held = False, True
            if self._closed:
                self._close_sockets()

    def _start_processing(self, name: str) -> None:
        self._check_open()
        if self._processing:
            raise MessengerError(f"{name}() was called from within a callback of this messenger")
        self._processing, self._held = True, False

    @property
    def replies_wait(self) -> bool:
        """True if there may be replies that receive() has left unread."""
        return bool(self._piggybacked) or self._poller.replies_wait

    @property
    def has_new(self) -> bool:
        """True if messages or replies were posted after the last flush() or process()."""
        return bool(self._messages or self._replies)

    def hold(self) -> None:
        """Stop sends and replies from waking the owner, which is going to call flush()."""
        if not (self._wake.signalled or self._processing):
            self._wake.hold()
            self._held = True

    def flush(self) -> bool:
        """Send what is buffered, and do nothing else. Return True if process() has work: fileno() is then readable,
        too."""
        self._check_open()
        if self._processing:
            return True
        if self.has_new or self._links.sending or (self._delayed.due_ns is not None and not self.patient):
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
        return bool(self._poller.ready)

    def close(self) -> None:
        """Close every socket at once; unacknowledged messages and unsent replies are lost."""
        if self._closed:
            return
        self._thread.join()
        self._closed = True
        if self._processing:
            for source in (*self._links, *self._listeners.all):
                source.closed = True  # process() closes the sockets as it ends
        else:
            self._close_sockets()

    # With a thread of its own

    def start(self) -> None:
        """Start a thread that calls process() from now on."""
        self._check_open()
        self._thread.start()

    def stop(self) -> None:
        """End the messenger's thread. Raises what a callback or server loop raised in it."""
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
        for monitored in self._poller.collect(now_ns, with_replies=with_replies):
            monitored.read_monitor(now_ns)
            self._links.sending[monitored] = None
        self._wake.hold()
        self._links.reconnect_rebound_links()

    def _receive(self) -> None:
        """Receive replies and run their callbacks, then receive messages and run their server loops."""
        ready, now_ns = self._poller.ready, self._clock_ns()
        sources = list(ready)
        for source in sources:
            if isinstance(source, Link):
                if source.receive(now_ns):
                    ready.pop(source, None)
                if not source.closed:
                    self._links.sending[source] = None  # acknowledgements and monitor events can make room
        for source in sources:
            if isinstance(source, Listener) and source.receive():
                ready.pop(source, None)

    def _transmit(self, now_ns: int) -> None:
        self._add_posted_messages()
        if self._replies:
            self._listeners.transmit(self._replies, now_ns)
        if self._links.sending:
            self._links.transmit(now_ns, patient=self.patient)
        if (due_ns := self._delayed.due_ns) is not None and (now_ns >= due_ns or not self.patient):
            self._listeners.transmit_delayed()

    def _add_posted_messages(self) -> None:
        for _ in range(len(self._messages)):
            self._links.add(*self._messages.popleft())

    def _finish(self) -> None:
        self._wake.release()
        if self._poller.ready or self.has_new or self._links.sending or self._links.listener_news:
            self._wake.signal()

    def _thread_ended(self) -> None:
        if self._room is not None:
            self._room.wake()

    def _check_open(self) -> None:
        if self._closed:
            raise MessengerClosedError(self._why_closed or "the messenger is closed")

    def _close_sockets(self) -> None:
        self._links.close()
        self._listeners.close()
        self._messages.clear()
        self._replies.clear()
        self._poller.close()
        self._wake.close()
        if self._owns_context:
            self._context.term()
