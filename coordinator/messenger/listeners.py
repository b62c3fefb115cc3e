"""The listeners of a messenger, one for each endpoint, and the gate before those that go by keys."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable

from msgspec.structs import replace

from immortal.coordinator.messenger.gate import Gate
from immortal.coordinator.messenger.listener import ClientLoop, ClientReply, Listener, Reply, ServerLoop
from immortal.coordinator.messenger.posted import Posted
from immortal.coordinator.messenger.readiness import Readiness
from immortal.coordinator.messenger.security import Security
from immortal.coordinator.messenger.sockets import Counters, Shared

CALLBACK_ID_MAX = 2**64 - 1


class Listeners:
    """For the messenger's owner, but for counted(). ``posted`` takes what is replied."""

    def __init__(self, shared: Shared, readiness: Readiness, posted: Posted, clock_ns: Callable[[], int]) -> None:
        self.all: list[Listener] = []
        self._shared = shared
        self._readiness = readiness
        self._posted = posted
        self._clock_ns = clock_ns
        self._gate: Gate | None = None
        self._security: Security | None = None
        self._given_ids = itertools.count(shared.incarnation)  # so no other messenger has given them

    def open(
        self, endpoint: str, server_loop: ServerLoop, ordered: bool, secured: bool, client_loop: ClientLoop | None
    ) -> Listener:
        """See Messenger.listen(). Raises EndpointInUseError, EndpointError."""
        listener = Listener(
            self._shared,
            endpoint,
            server_loop,
            self._posted.reply,
            self._security if secured else None,
            secured,
            client_loop,
            ordered=ordered,
            new_callback_id=self._new_callback_id,
        )
        self.all.append(listener)
        self._readiness.watch(listener)
        # Over inproc, what was sent before comes in with the binding, unannounced.
        self._readiness.ready[listener] = None
        return listener

    def _new_callback_id(self) -> int:
        """For a callback that is given with a reply; never NOOP."""
        return next(self._given_ids) % CALLBACK_ID_MAX + 1

    def secure(self, security: Security) -> None:
        """Go by ``security`` from now on."""
        if self._gate is None:
            self._gate = Gate(self._shared.context, security.callers, self._clock_ns)
        self._gate.callers = security.callers
        self._security = security
        for listener in self.all:
            if listener.secured:
                self._readiness.unwatch(listener)
                listener.secure(security, self._clock_ns())
                self._readiness.watch(listener)

    def reopen_due(self, now_ns: int) -> None:
        for listener in self.all:
            if listener.reopen_due_ns is not None and listener.reopen_due_ns <= now_ns:
                listener.reopen(now_ns)

    def transmit(self, replies: deque[Reply | ClientReply]) -> None:
        """Send ``replies``."""
        replied: dict[Listener, None] = {}
        for _ in range(len(replies)):
            reply = replies.popleft()
            listener = reply.listener
            if not listener.closed:
                listener.reply(reply)
                replied[listener] = None
        for listener in replied:
            if listener.has_unread():
                self._readiness.ready[listener] = None

    def counted(self) -> Counters:
        """A copy of what the messenger has counted, with those who were not let in. For any thread."""
        counters, gate = self._shared.counters, self._gate
        refused = counters.strangers_refused + sum(one.refused for one in list(self.all))
        counters = replace(counters, strangers_refused=refused, refused_by=counters.refused_by.copy())
        if gate is not None:
            counters.strangers_refused += gate.refused
            counters.let_in_by, counters.last_refused = gate.let_in.copy(), gate.last_refused
        return counters

    def close(self) -> None:
        for listener in self.all:
            self._readiness.unwatch(listener)
            listener.close()
        if self._gate is not None:
            self._gate.close()
        self.all.clear()
