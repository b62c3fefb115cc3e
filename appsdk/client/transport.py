"""A connection over ZeroMQ: one DEALER, made anew when there is silence. Whoever drives it waits for its descriptor."""

from __future__ import annotations

import time

import zmq

from appsdk.client.connection import Connection
from appsdk.client.errors import NotConnectable
from appsdk.client.limits import (
    MESSAGE_SIZE_BYTES_MAX,
    QUEUED_MAX,
    RECONNECT_MS_MAX,
    RECONNECT_MS_MIN,
)
from appsdk.client.places import Finder, Places

_NOBLOCK = int(zmq.NOBLOCK)
GOODBYE_LINGER_MS = 100


class Transport:
    """Used by one thread at a time. Raises NotConnectable as it is made."""

    def __init__(self, connection: Connection, finder: Finder) -> None:
        self.connection = connection
        self._finder = finder
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._turn = 0
        try:
            self._places: Places = finder.find()
            self._open()
        except BaseException:
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
        try:
            socket.connect(self.endpoint)
        except zmq.ZMQError as error:
            socket.close()
            raise NotConnectable(f"{self.endpoint!r} can't be connected to: {error.strerror}") from None
        self._socket = socket
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
        return self.connection.next_deadline_s()

    def close(self) -> None:
        """What is not answered may still be done."""
        for data in self.connection.goodbye():
            self._send(data)
        self._socket.close(linger=GOODBYE_LINGER_MS)
        self._context.term()
