"""A connection over ZeroMQ: one DEALER, made anew when there is silence. Whoever drives it waits for its descriptor."""

from __future__ import annotations

import time

import zmq

from immortal.appsdk.client.connection import Connection
from immortal.appsdk.client.errors import NotConnectable
from immortal.appsdk.client.limits import (
    DESERTED_S,
    KEY_REFUSED_S,
    KEY_RETRY_S,
    MESSAGE_SIZE_BYTES_MAX,
    MOVED_LOOK_S,
    QUEUED_MAX,
    RECONNECT_MS_MAX,
    RECONNECT_MS_MIN,
    STOPPED_S,
)
from immortal.appsdk.client.places import Finder, Following, Places
from immortal.appsdk.client.presence import Presence, presence
from immortal.appsdk.client.watch import Watch

_NOBLOCK = int(zmq.NOBLOCK)
GOODBYE_LINGER_MS = 100


class Transport:
    """Used by one thread at a time. Raises NotConnectable as it is made."""

    def __init__(self, connection: Connection, finder: Finder) -> None:
        self.connection = connection
        self._finder = finder
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._turn = 0
        self._watch = Watch(self._context)
        self._refused_s: float | None = None  # when the key was turned away first
        self._stopped_s: float | None = None  # when the instance was found stopped first
        self._look_due_s: float | None = None
        self._following: Following | None = None
        try:
            self._places: Places = finder.find()
            self._open()
            self._following = finder.follow()
        except BaseException:
            self._watch.close()
            self._context.term()
            raise

    @property
    def endpoint(self) -> str:
        endpoints = self._places.endpoints
        return endpoints[self._turn % len(endpoints)]

    def _open(self) -> None:
        places = self._places
        socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, QUEUED_MAX)
        # What comes is bounded by what is outstanding. With a limit of ZeroMQ's, or its heartbeats, it ends the process
        # where a connection breaks that is not read to its end; that there is nobody, the pings tell.
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, MESSAGE_SIZE_BYTES_MAX)
        socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS_MIN)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MS_MAX)
        if "[" in self.endpoint:
            socket.setsockopt(zmq.IPV6, 1)
        if places.pair is not None:
            server_key = places.server_keys[self._turn // len(places.endpoints) % len(places.server_keys)]
            socket.setsockopt(zmq.CURVE_SERVERKEY, server_key.encode())
            socket.setsockopt(zmq.CURVE_PUBLICKEY, places.pair.public.encode())
            socket.setsockopt(zmq.CURVE_SECRETKEY, places.pair.secret.encode())
        self._watch.watch(socket, has_keys=places.pair is not None)
        try:
            socket.connect(self.endpoint)
        except zmq.ZMQError as error:
            self._watch.close()
            socket.close()
            raise NotConnectable(f"{self.endpoint!r} can't be connected to: {error.strerror}") from None
        self._socket = socket
        self._opened_s = time.monotonic()
        self.connection.endpoints_count = len(places.endpoints)

    def fileno(self) -> int:
        """What to wait for; another one after :meth:`process` has made the socket anew."""
        descriptor = self._socket.getsockopt(zmq.FD)
        assert isinstance(descriptor, int)
        return descriptor

    def process(self) -> bool:
        """Take what has come, send what is to be sent. True: :meth:`fileno` is another one now."""
        connection = self.connection
        reopened = False
        now_s = time.monotonic()
        if not connection.is_talking:
            self._look(now_s)
        if len(self._places.endpoints) > 1 and self._is_deserted(now_s):
            connection.wants_reopening = True  # at the next endpoint, where the instance may be by now
        if self._following is not None and self._following.moved(self._places):
            self._turn = -1  # the first of its places, with the first of its keys
            connection.wants_reopening = True
        while True:
            self._receive()
            now_s = time.monotonic()
            data = connection.data_to_send(now_s)
            if connection.wants_reopening:
                self._reopen(now_s)
                reopened = True
                continue
            for one in data:
                self._send(one)
            # Sending may have taken in the news that something has come, of which the descriptor tells only once.
            if not data and not self._has_unread():
                return reopened

    def _look(self, now_s: float) -> None:
        """Whether there is something to wait for; calls that were not sent end where there is not."""
        self._watch.look()
        self._look_due_s = None
        refusal = self._places.refusal or self._key_refusal(now_s)
        if not refusal and self._watch.finds_nobody and not self.connection.was_welcomed:
            refusal = self._absence(now_s)
        if refusal:
            self.connection.refuse(NotConnectable(refusal))
        elif self._watch.has_another_key and len(self._places.endpoints) == 1:
            self._try_next_key(now_s)

    def _try_next_key(self, now_s: float) -> None:
        """All that it may have are tried at once, and again after a while: by then others may be known."""
        count = len(self._places.server_keys)
        is_last = (self._turn + 1) % count == 0
        due_s = self._opened_s + KEY_RETRY_S if is_last else now_s
        if now_s >= due_s:
            self.connection.wants_reopening = True
        else:
            self._look_due_s = due_s

    def _is_deserted(self, now_s: float) -> bool:
        """Nobody listens there, or not any more."""
        if now_s - self._opened_s < DESERTED_S:
            return False
        self._watch.look()
        return not self._watch.is_up and self._watch.finds_nobody

    def _key_refusal(self, now_s: float) -> str:
        """A new key may not be known there yet: it is shown again, until it was turned away long enough."""
        if not self._watch.refusals or len(self._places.endpoints) > 1:  # it may be at another of them
            self._refused_s = None
            return ""
        if self._refused_s is None:
            self._refused_s = now_s
        if now_s - self._refused_s >= KEY_REFUSED_S:
            return self.problem
        self._look_due_s = self._opened_s + KEY_RETRY_S
        if now_s >= self._look_due_s:
            self._turn -= 1  # whoever turns the caller's key away has shown that it has the one that is tried
            self.connection.wants_reopening = True
        return ""

    def _absence(self, now_s: float) -> str:
        found = self._presence
        if not found.stopped:
            self._stopped_s = None
            return ""
        if self._stopped_s is None:
            self._stopped_s = now_s
        if now_s - self._stopped_s >= STOPPED_S:
            return found.problem
        self._look_due_s = self._stopped_s + STOPPED_S
        return ""

    @property
    def _presence(self) -> Presence:
        folder = self._places.folder
        return Presence(False, "") if folder is None else presence(folder)

    @property
    def problem(self) -> str:
        """Why there is no reply, as far as that can be known from here."""
        if self.connection.is_talking:
            return self.connection.problem
        self._watch.look()
        known, seen = self._places.refusal or self._presence.problem, self._watch.problem
        if known or not seen:
            return known or self.connection.problem
        name = self.connection.instance
        if not self._watch.refusals:
            return f"{seen} ('immortal status {name}', where it runs, says how it is, and where)"
        pair, caller = self._places.pair, self._finder.caller or name
        key = pair.public if pair is not None else ""
        whose = f"'allow', [peer_keys] and the registry folder of {name!r} say whose keys it lets in"
        return f"{seen} ({key}, of {caller!r}): {whose}"

    def _receive(self) -> None:
        receive, connection = self._socket.recv, self.connection
        try:
            while True:
                connection.receive(receive(_NOBLOCK), time.monotonic())
        except zmq.Again:
            return

    def _send(self, data: bytes) -> None:
        try:
            self._socket.send(data, _NOBLOCK)
        except zmq.Again:
            return  # it is full, as nobody takes it: all is sent again once somebody does

    def _has_unread(self) -> bool:
        events = self._socket.getsockopt(zmq.EVENTS)
        assert isinstance(events, int)
        return bool(events & zmq.POLLIN)

    def _reopen(self, now_s: float) -> None:
        """At the next endpoint, with what is known of it by now."""
        self._watch.close()
        self._socket.close()
        self._turn += 1
        try:
            self._places = self._finder.find()
        except NotConnectable as error:
            self.connection.problem = str(error)  # as it was
        self._open()
        self.connection.reopened(now_s)

    def next_deadline_s(self) -> float:
        """When :meth:`process` is to be called, whatever happens; monotonic."""
        due_s = self.connection.next_deadline_s()
        if self._following is not None:
            due_s = min(due_s, time.monotonic() + MOVED_LOOK_S)
        return due_s if self._look_due_s is None else min(due_s, self._look_due_s)

    def close(self) -> None:
        """What is not answered may still be done."""
        for data in self.connection.goodbye():
            self._send(data)
        self._watch.close()
        if self._following is not None:
            self._following.close()
        self._socket.close(linger=GOODBYE_LINGER_MS)
        self._context.term()
