"""Limits on connections to the page: their number, duration and size.

A stranger is a connection that has shown neither a cookie nor the token yet. Each stranger has little time. If there
are too many, the oldest one of the address that has most is closed for the next connection, and never another one. So
the operator always has a place.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
import ssl
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from immortal.web import WebError

CONNECTIONS_MAX = 256
ADDRESS_MAX = 64  # strangers of one address
HEADERS_SIZE_BYTES_MAX = 64 << 10
REQUEST_SIZE_BYTES_MAX = 1 << 20  # with all bytes that arrive before its answer; a form is much smaller
REQUEST_S = 10.0  # from the first byte to the last; of the first request: from the connection's start
STRANGER_S = 30.0
ANSWER_S = 30.0  # in which a reader must make room for the waiting bytes
BACKLOG = 256
PLACE = "place"
"""Key of a request's state under which it has the Place of its connection."""

_Peer = tuple[Any, ...]


class Place:
    """Place of one open connection, from before its TLS handshake. ``transport``: None until that is done."""

    def __init__(self, listener: Listener, peer: _Peer, connection: socket.socket) -> None:
        self.network = _network(str(peer[0]))
        self.is_stranger = True
        self.transport: asyncio.Transport | None = None
        self._listener = listener
        self._peer = peer
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self._limits: dict[str, asyncio.TimerHandle] = {}
        self.limit("request", REQUEST_S)
        self.limit("stranger", STRANGER_S)

    def limit(self, name: str, limit_s: float) -> None:
        """End the connection after that time, unless :meth:`lift` is called before."""
        if name not in self._limits:
            self._limits[name] = self._loop.call_later(limit_s, self.end)

    def lift(self, name: str) -> None:
        if (timer := self._limits.pop(name, None)) is not None:
            timer.cancel()

    def mark_known(self) -> None:
        """Mark the connection as no stranger's: it showed a cookie or the token."""
        self.is_stranger = False
        self.lift("stranger")

    def release(self) -> None:
        """Release the place of a connection that has ended."""
        for what in list(self._limits):
            self.lift(what)
        if self._listener.places.get(self._peer) is self:
            del self._listener.places[self._peer]

    def end(self) -> None:
        self.release()
        if self.transport is not None:
            self.transport.abort()
            return
        with suppress(OSError):  # it may have ended
            self._connection.shutdown(socket.SHUT_RDWR)  # a handshake that is under way then fails


class Listener(socket.socket):
    """Listening socket that makes room for each connection that it accepts."""

    def __init__(self, family: int) -> None:
        super().__init__(family, socket.SOCK_STREAM)
        self.places: dict[_Peer, Place] = {}  # the oldest first

    def listen(self, backlog: int = BACKLOG) -> None:
        """Listen with a backlog of our own, since asyncio's is also the number of connections that it accepts at once.

        That number is one, so that each connection is read before ADDRESS_MAX others can arrive.
        """
        super().listen(BACKLOG)

    def accept(self) -> tuple[socket.socket, Any]:
        connection, peer = super().accept()
        if not self._has_room(_network(str(peer[0]))):
            connection.close()
            raise BlockingIOError
        self.places.pop(peer, None)
        self.places[peer] = Place(self, peer, connection)
        return connection, peer

    def _has_room(self, network: str) -> bool:
        strangers = [one for one in self.places.values() if one.is_stranger]
        counts = Counter(one.network for one in strangers)
        if len(self.places) < CONNECTIONS_MAX and counts[network] < ADDRESS_MAX:
            return True
        if not strangers:
            return False
        fullest = network if counts[network] >= ADDRESS_MAX else max(counts, key=lambda one: counts[one])
        next(one for one in strangers if one.network == fullest).end()
        return True


class Connection(H11Protocol):
    """HTTP of one connection, within the limits above. h11 limits the headers."""

    def __init__(self, listener: Listener, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._listener = listener
        self._place: Place | None = None
        self._size_bytes = 0  # received since the last answer

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._place = self._listener.places.get(transport.get_extra_info("peername"))
        if self._place is None:  # it was closed before it began
            transport.abort()
            return
        self._place.transport = transport
        transport.set_write_buffer_limits(1, 0)  # to notice all waiting bytes; at 0 TLS never continues
        self.app_state = {**self.app_state, PLACE: self._place}

    def connection_lost(self, exc: Exception | None) -> None:
        if self._place is not None:
            self._place.release()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._place is None:
            return
        self._size_bytes += len(data)
        if self._size_bytes > REQUEST_SIZE_BYTES_MAX:
            self._place.end()
            return
        self._place.limit("request", REQUEST_S)
        super().data_received(data)
        if self.conn.their_state is h11.DONE and self.conn.trailing_data[0]:
            self.cycle.keep_alive = False  # no browser sends the next request before it has the answer

    def handle_events(self) -> None:
        super().handle_events()
        if self._place is None:
            return
        if self.conn.their_state is h11.SEND_BODY:
            self._place.limit("request", REQUEST_S)
        elif self.conn.their_state is not h11.IDLE:
            self._place.lift("request")

    def send_400_response(self, msg: str) -> None:
        if self.cycle is not None:
            self.cycle.disconnected = True  # its answer would be too late
        try:
            super().send_400_response(msg)
        except h11.LocalProtocolError:  # the answer has begun already
            self.transport.abort()

    def on_response_complete(self) -> None:
        self._size_bytes = 0
        super().on_response_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._place is not None:
            self._place.limit("answer", ANSWER_S)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._place is not None:
            self._place.lift("answer")


def _network(address: str) -> str:
    """Return the part of an address that belongs to one caller: all of it, or the first 64 bits of IPv6."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if ip.version == 4:
        return address
    return str(ip.ipv4_mapped or ipaddress.ip_network((int(ip), 64), strict=False))


# The socket and the settings of a server.


def make_config(app: ASGIApp, tls: tuple[Path, Path] | None, stop_s: int, **more: Any) -> uvicorn.Config:
    """Return the settings of an HTTP server, or with ``tls``, a certificate and its key, of an HTTPS server.

    ``stop_s``: time for incomplete answers at its end, in s. Raises WebError.
    """
    config = uvicorn.Config(
        app,
        ws="none",
        proxy_headers=False,
        h11_max_incomplete_event_size=HEADERS_SIZE_BYTES_MAX,
        log_level="error",  # a warning tells of each stranger that speaks no HTTP
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=stop_s,
        ssl_certfile=None if tls is None else tls[0],
        ssl_keyfile=None if tls is None else tls[1],
        **more,
    )
    try:
        config.load()
    except (ssl.SSLError, OSError) as error:
        raise WebError(f"the certificate and its key can't be used: {error}") from None
    return config


def listen(host: str, port: int) -> Listener:
    """Open the socket of a server. Raises WebError."""
    listener = Listener(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen()
    except OSError as error:
        listener.close()
        raise WebError(f"can't listen at {host}:{port}: {error.strerror or os.strerror(error.errno or 0)}") from None
    return listener


def url_of(listener: socket.socket, host: str, tls: object | None) -> str:
    """Return the URL of a server without a path."""
    shown = f"[{host}]" if ":" in host else host
    return f"{'http' if tls is None else 'https'}://{shown}:{listener.getsockname()[1]}"
