"""Connections of a messenger: the poller, the links, the listeners.

ZeroMQ's descriptors are edge-triggered, and any call on a socket can consume the edge. This rule prevents lost
wake-ups: a socket is in ``ready`` from the moment when its descriptor, or a check of its events after sending, reports
something, until a receive finds nothing.

Links' descriptors have their own epoll, ``link_epoll``, so that replies need not wake a patient owner.
"""

from __future__ import annotations

import itertools
import select
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from msgspec.structs import replace

from immortal.coordinator.messenger.backpressure import PendingRoom
from immortal.coordinator.messenger.envelope import ENVELOPE_SIZE_BYTES, NOOP, EnvelopeError, decode_envelope
from immortal.coordinator.messenger.limits import REPLY_DELAY_NS_MAX
from immortal.coordinator.messenger.link import Link
from immortal.coordinator.messenger.listener import ClientLoop, ClientReply, Listener, Reply, ServerLoop
from immortal.coordinator.messenger.outbox import ConversationMessage, Outbox, ReplyCallback
from immortal.coordinator.messenger.security import Security, ZapAuthenticator
from immortal.coordinator.messenger.sockets import Counters, Shared, WakeupEvent

Source = Link | Listener


class Poller:
    """Poller of one messenger's sockets and its ``wake`` event. Only the owner's thread uses it."""

    def __init__(self, wake: WakeupEvent) -> None:
        self.ready: dict[Source, None] = {}  # have something to receive, or may have
        self.unread: dict[Link, None] = {}  # have, or may have, replies that nobody waits for yet
        self.replies_due_ns: int | None = None  # when links are polled again; None: they are polled now
        self.link_epoll = select.epoll()
        self._epoll = select.epoll()
        self._epoll.register(self.link_epoll.fileno(), select.EPOLLIN)
        self._wake = wake
        self._epoll.register(wake.descriptor, select.EPOLLIN)
        self._sources: dict[int, Source] = {}  # by descriptor
        self._monitors: dict[int, Link] = {}  # by their monitor's descriptor

    def fileno(self) -> int:
        return self._epoll.fileno()

    def watch(self, source: Source) -> None:
        self._sources[source.descriptor] = source
        self._epoll_of(source).register(source.descriptor, select.EPOLLIN)
        if isinstance(source, Link) and source.monitor_descriptor is not None:
            self._monitors[source.monitor_descriptor] = source
            self._epoll.register(source.monitor_descriptor, select.EPOLLIN)

    def unwatch(self, source: Source) -> None:
        del self._sources[source.descriptor]
        self._epoll_of(source).unregister(source.descriptor)
        if isinstance(source, Link) and source.monitor_descriptor is not None:
            del self._monitors[source.monitor_descriptor]
            self._epoll.unregister(source.monitor_descriptor)

    def _epoll_of(self, source: Source) -> select.epoll:
        return self.link_epoll if isinstance(source, Link) else self._epoll

    def forget(self, link: Link) -> None:
        """Stop watching ``link``, which is about to be closed."""
        self.ready.pop(link, None)
        self.unread.pop(link, None)
        self.unwatch(link)

    def collect(self, now_ns: int, *, with_replies: bool) -> Sequence[Link]:
        """Mark the sockets that have input as ready; return the links whose monitors have events."""
        monitored: list[Link] = []
        for descriptor, _ in self._epoll.poll(0):
            if descriptor == self._wake.descriptor:
                self._wake.clear()
            elif descriptor == self.link_epoll.fileno():
                pass  # polled below
            elif descriptor in self._monitors:
                monitored.append(self._monitors[descriptor])
            else:
                self.ready[self._sources[descriptor]] = None
        if with_replies:
            for descriptor, _ in self.link_epoll.poll(0):
                self.ready[self._sources[descriptor]] = None
            if self.replies_due_ns is not None and self.replies_due_ns <= now_ns:
                self._listen_to_replies()
            self._mark_unread_ready()
        return monitored

    # --- replies to a patient owner ---------------------------------------------------------------------------------

    @property
    def replies_wait(self) -> bool:
        return self.replies_due_ns is not None and bool(self.unread or self.link_epoll.poll(0))

    def postpone_replies(self, now_ns: int) -> None:
        """Stop replies from waking the owner until REPLY_DELAY_NS_MAX from now."""
        if self.replies_due_ns is None:
            self._epoll.modify(self.link_epoll.fileno(), 0)
        self.replies_due_ns = now_ns + REPLY_DELAY_NS_MAX

    def expect_replies(self) -> None:
        """Let replies wake the owner again, and mark links with unread replies as ready."""
        if self.replies_due_ns is not None:
            self._listen_to_replies()
        self._mark_unread_ready()

    def _listen_to_replies(self) -> None:
        self.replies_due_ns = None
        self._epoll.modify(self.link_epoll.fileno(), select.EPOLLIN)

    def _mark_unread_ready(self) -> None:
        for link in self.unread:
            self.ready[link] = None
        self.unread.clear()

    def close(self) -> None:
        """Close the epolls; all sources must be unwatched by then."""
        self.ready.clear()
        self.unread.clear()
        self.link_epoll.close()
        self._epoll.close()


class Links:
    """Links of a messenger, by destination: opened at the first message, reopened after each failure.

    ``make_outbox`` makes the outbox of a new link, ``wake`` wakes the owner when an inproc listener is bound or
    unbound. ``room``: counts what is pending; None: no limit.
    """

    def __init__(
        self,
        shared: Shared,
        poller: Poller,
        make_outbox: Callable[[], Outbox],
        wake: WakeupEvent,
        room: PendingRoom | None,
    ) -> None:
        self.sending: dict[Link, None] = {}  # have something to send, or may send again
        self.listener_news: deque[tuple[Link, bool]] = deque()  # of inproc links; appended to by any thread
        self._security: Security | None = None  # of connections that are made from now on; None: they are in plain
        self._shared = shared
        self._poller = poller
        self._make_outbox = make_outbox
        self._wake = wake
        self._room = room
        self._by_destination: dict[str, Link] = {}
        self._by_id: dict[int, Link] = {}
        self._link_ids = itertools.count(1)
        self._callback_ids = itertools.count(NOOP + 1)

    def __iter__(self) -> Iterator[Link]:
        return iter(self._by_destination.values())

    def __contains__(self, destination: object) -> bool:
        return destination in self._by_destination

    def __getitem__(self, destination: str) -> Link:
        return self._by_destination[destination]

    def get(self, destination: str) -> Link | None:
        return self._by_destination.get(destination)

    def outbox(self, destination: str) -> Outbox:
        """Return the outbox of the link to ``destination``, or an empty one."""
        link = self._by_destination.get(destination)
        return self._make_outbox() if link is None else link.outbox

    def add(
        self,
        destination: str,
        parts: tuple[bytes, ...],
        callback: ReplyCallback | None,
        conversation: ConversationMessage | None,
    ) -> None:
        """Put a message for ``destination`` into its outbox; :meth:`transmit` sends it."""
        link = self._by_destination.get(destination)
        if link is None:
            link = self._connect(destination, next(self._link_ids), self._make_outbox(), None)
        waits = callback is not None or (conversation is not None and conversation.callback is not None)
        link.outbox.add(parts, callback, next(self._callback_ids) if waits else NOOP, conversation)
        self.sending[link] = None

    def transmit(self, now_ns: int, *, patient: bool) -> None:
        """Send on all links that have something to send. ``patient``: True if nobody waits for the replies."""
        for link in self.sending:
            if link.transmit(now_ns, patient=patient):
                self._poller.unread[link] = None
        self.sending.clear()
        # Messages that could not be sent wait until their link has room or a reply.
        if patient and all(link.outbox.all_sent for link in self):
            self._poller.postpone_replies(now_ns)
        else:
            self._poller.expect_replies()

    def retry_due(self, now_ns: int) -> None:
        """Queue messages due for retransmission, and replace connections on which nothing was received for too long."""
        for link in list(self):
            silence_deadline_ns = link.silence_deadline_ns
            if silence_deadline_ns is not None and silence_deadline_ns <= now_ns:
                link.abandon_connection()
                self.reopen(link)
            elif link.connected and link.outbox.retransmit_due(now_ns):
                self.sending[link] = None

    # --- connections -------------------------------------------------------------------------------------------------

    def reopen_due(self, now_ns: int) -> None:
        """Reopen each link that failed and whose pause is over."""
        for link in list(self):
            if link.reopen_due_ns is not None and link.reopen_due_ns <= now_ns:
                self.reopen(link)

    def reopen(self, link: Link) -> Link:
        """Replace the link's socket, and try the next of its destination's possible keys."""
        self._close(link)
        return self._connect(link.endpoint, link.link_id, link.outbox, link.server_key)

    def drop(self, destination: str) -> int:
        """Close and remove the link to ``destination``; return the number of pending messages that were dropped."""
        link = self._by_destination.pop(destination, None)
        if link is None:
            return 0
        del self._by_id[link.link_id]
        self._close(link)
        count = len(link.outbox)
        if self._room is not None:
            self._room.forget(destination, link.outbox.size_bytes, count)
        return count

    def _close(self, link: Link) -> None:
        self.sending.pop(link, None)
        self._poller.forget(link)
        link.close()

    def secure(self, security: Security) -> None:
        """Use ``security`` from now on; reconnect the links whose keys differ from those that it gives."""
        self._security = security
        for link in list(self):
            keys = security.servers(link.endpoint)
            expected = link.server_key in keys if keys else link.server_key is None
            if link.pair != (security.own if keys else None) or not expected:
                self.reopen(link)
            else:
                link.peer = self._peer_of(link)

    def _peer_of(self, link: Link) -> str | None:
        key = link.server_key
        return None if key is None or self._security is None else self._security.callers.get(key)

    def deliver_piggybacked_replies(self, now_ns: int) -> None:
        """Give the replies that came with messages to their links, if the owner of the link's key sent them."""
        shared = self._shared
        while shared.piggybacked_replies:
            reply, key = shared.piggybacked_replies.popleft()
            try:
                envelope = decode_envelope(reply[:ENVELOPE_SIZE_BYTES])
            except EnvelopeError as error:
                shared.counters.malformed += 1
                shared.warnings.warn(f"behind an envelope: {error}")
                continue
            link = self._by_id.get(envelope.link_id)
            if link is not None and link.server_key == key and envelope.incarnation == shared.incarnation:
                link.handle_reply([reply], now_ns)
                if link.outbox.queued_count:  # an acknowledgement can make room
                    self.sending[link] = None

    def _connect(self, destination: str, link_id: int, outbox: Outbox, tried_key: str | None) -> Link:
        keys = () if self._security is None else self._security.servers(destination)
        following = (keys.index(tried_key) + 1) % len(keys) if tried_key in keys else 0
        link = Link(
            self._shared,
            destination,
            link_id,
            outbox,
            self._security.own if self._security is not None and keys else None,
            keys[following] if keys else None,
            self._listener_changed,
            self._room,
        )
        self._by_destination[destination] = self._by_id[link_id] = link
        link.peer = self._peer_of(link)
        self._poller.watch(link)
        return link

    def _listener_changed(self, link: Link, listening: bool) -> None:
        self.listener_news.append((link, listening))
        self._wake.signal()

    def reconnect_rebound_links(self) -> None:
        """Reconnect inproc links whose listener was bound again; ZeroMQ does not do that itself."""
        while self.listener_news:
            link, listening = self.listener_news.popleft()
            if link.closed:
                continue
            if not listening:
                link.connected = False
            elif not link.connected:
                reopened = self.reopen(link)
                reopened.outbox.retransmit_all()
                self.sending[reopened] = None

    def close(self) -> None:
        for link in self:
            self._poller.unwatch(link)
            link.close()
        self._by_destination.clear()
        self._by_id.clear()
        self.sending.clear()


CALLBACK_ID_MAX = 2**64 - 1


class Listeners:
    """Listeners of a messenger, one for each endpoint, and the ZAP authenticator in front of those with keys.

    Only the messenger's owner uses it, except counted(). ``accept_reply`` takes the replies.
    """

    def __init__(
        self,
        shared: Shared,
        poller: Poller,
        accept_reply: Callable[[Reply | ClientReply], None],
        clock_ns: Callable[[], int],
    ) -> None:
        self.all: list[Listener] = []
        self._shared = shared
        self._poller = poller
        self._accept_reply = accept_reply
        self._clock_ns = clock_ns
        self._authenticator: ZapAuthenticator | None = None
        self._security: Security | None = None
        self._given_ids = itertools.count(shared.incarnation)  # so no other messenger has given them

    def open(
        self,
        endpoint: str,
        server_loop: ServerLoop,
        ordered: bool,
        secured: bool,
        client_loop: ClientLoop | None,
        parts_max: int,
        most_bytes: Callable[[], int] | None = None,
    ) -> Listener:
        """Open a listener, see Messenger.listen(). Raises EndpointInUseError, EndpointError."""
        listener = Listener(
            self._shared,
            endpoint,
            server_loop,
            self._accept_reply,
            self._security if secured else None,
            secured,
            client_loop,
            ordered=ordered,
            parts_max=parts_max,
            most_bytes=most_bytes,
            new_callback_id=self._new_callback_id,
        )
        self.all.append(listener)
        self._poller.watch(listener)
        # Over inproc, earlier messages arrive with the binding, without an event.
        self._poller.ready[listener] = None
        return listener

    def _new_callback_id(self) -> int:
        """Return a new ID for a callback that is given with a reply; never NOOP."""
        return next(self._given_ids) % CALLBACK_ID_MAX + 1

    def secure(self, security: Security) -> None:
        """Use ``security`` for all secured listeners from now on."""
        if self._authenticator is None:
            self._authenticator = ZapAuthenticator(self._shared.context, security.callers, self._clock_ns)
        self._authenticator.callers = security.callers
        self._security = security
        for listener in self.all:
            if listener.secured:
                self._poller.unwatch(listener)
                listener.secure(security, self._clock_ns())
                self._poller.watch(listener)

    def reopen_due(self, now_ns: int) -> None:
        for listener in self.all:
            if listener.reopen_due_ns is not None and listener.reopen_due_ns <= now_ns:
                listener.reopen(now_ns)

    def transmit(self, replies: deque[Reply | ClientReply], now_ns: int) -> None:
        """Remove all ``replies``, and send those that do not wait for a message to their receiver."""
        is_sent = False
        for _ in range(len(replies)):
            reply = replies.popleft()
            if not reply.listener.closed:
                is_sent |= reply.listener.reply(reply, now_ns)
        if is_sent:
            self._check_unread()

    def transmit_delayed(self) -> None:
        """Send the replies that have waited for a message to their receiver."""
        for reply in self._shared.delayed_replies.pop_all():
            if not reply.listener.closed:
                reply.listener.send_delayed(reply)
        self._check_unread()

    def _check_unread(self) -> None:
        for listener in self.all:
            if listener.has_unread():
                self._poller.ready[listener] = None

    def counted(self) -> Counters:
        """Return a copy of the messenger's counters, with the refused connections. For any thread."""
        counters, authenticator = self._shared.counters, self._authenticator
        refused = counters.strangers_refused + sum(one.refused for one in list(self.all))
        counters = replace(counters, strangers_refused=refused, refused_by=counters.refused_by.copy())
        if authenticator is not None:
            counters.strangers_refused += authenticator.refused
            counters.let_in_by, counters.last_refused = authenticator.let_in.copy(), authenticator.last_refused
        return counters

    def close(self) -> None:
        for listener in self.all:
            self._poller.unwatch(listener)
            listener.close()
        if self._authenticator is not None:
            self._authenticator.close()
        self.all.clear()
