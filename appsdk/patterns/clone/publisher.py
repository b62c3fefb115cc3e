"""The socket of a publisher, and who may talk to it. It has no loop: who owns it waits for its descriptor."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import zmq

from immortal.appsdk.patterns.clone import limits
from immortal.appsdk.patterns.clone.errors import CloneError
from immortal.appsdk.patterns.clone.frames import Refused, decode_request, encode
from immortal.appsdk.patterns.clone.publishing import Publishing
from immortal.appsdk.patterns.listening import Listener, ListenError
from immortal.protocol.errors import RemoteProtocolError
from immortal.protocol.rate_limit import RateLimit

logger = logging.getLogger("immortal.clone")

_NOBLOCK = int(zmq.NOBLOCK)
_QUEUED_MAX = 65_536  # frames to one client inside ZeroMQ: its window is what bounds them
_TURN_FRAMES_MAX = 1000  # that are taken in before others have their turn
_OPTIONS = {
    zmq.MAXMSGSIZE: limits.REQUEST_SIZE_BYTES_MAX,
    zmq.SNDHWM: _QUEUED_MAX,
    zmq.BACKLOG: limits.BACKLOG,
    zmq.ROUTER_MANDATORY: 1,
    zmq.HANDSHAKE_IVL: limits.HANDSHAKE_TIMEOUT_MS,
}


class Publisher:
    """Listens from here to :meth:`close`. ``publishing`` is what it publishes; None: nothing yet.

    ``identity``: whose keys in the registry folder ``home`` are shown; then only callers with keys of that folder get
    in. "": everybody does that reaches ``endpoint``, which is on this machine then, unless ``insecure`` is True.
    Raises CloneError.
    """

    def __init__(self, endpoint: str, *, home: Path, identity: str = "", insecure: bool = False) -> None:
        self.publishing: Publishing | None = None
        self.malformed = 0  # frames that were dropped
        self._flushed_s = self._pause_s = 0.0
        self._warnings = RateLimit(burst=1)
        try:
            self._listener = Listener(endpoint, _OPTIONS, home=home, identity=identity, insecure=insecure)
        except ListenError as error:
            raise CloneError(str(error)) from None
        self.endpoint = self._listener.endpoint
        self._socket = self._listener.socket

    def fileno(self) -> int:
        """What to wait for; it tells of news once: :meth:`receive` takes them all."""
        descriptor = self._socket.getsockopt(zmq.FD)
        assert isinstance(descriptor, int)
        return descriptor

    def receive(self, now_ns: int) -> bool:
        """What clients say. False: there may be more."""
        for _ in range(_TURN_FRAMES_MAX):
            try:
                parts = self._socket.recv_multipart(_NOBLOCK, copy=False)
            except zmq.Again:
                return True
            self._received(parts, now_ns)
        return False

    def _received(self, parts: list[zmq.Frame], now_ns: int) -> None:
        try:
            name = self._listener.caller_of(parts[0])
        except PermissionError as error:
            self._drop(str(error))
            return
        if len(parts) != 2:
            self._drop(f"a message of {len(parts) - 1} parts, 1 was expected")
            return
        route = parts[0].bytes
        try:
            request = decode_request(parts[1].bytes)
        except RemoteProtocolError as error:
            self._drop(str(error))
            return
        if self.publishing is not None:
            self.publishing.take(route, name, request, now_ns)
        else:
            self._send(route, encode(Refused(getattr(request, "stream", 0), "nothing is published here yet", True)))

    def _drop(self, what: str) -> None:
        self.malformed += 1
        left_out = self._warnings.admit("malformed", time.monotonic_ns())
        if left_out is not None:
            logger.warning("at %s: %s; dropped (%d more since the last warning)", self.endpoint, what, left_out)

    def turn(self) -> float:
        """All that is to be done now. How long nothing else need be, unless something comes: seconds."""
        now_s = time.monotonic()
        is_read = self.receive(int(now_s * 1e9))
        if self.publishing is None:
            return limits.BEAT_S if is_read else 0.0
        if now_s >= self._due_s():
            self._flush(int(now_s * 1e9))
            self._flushed_s = time.monotonic()
            busy_s = limits.FLUSH_PAUSES * (self._flushed_s - now_s)
            self._pause_s = max(limits.FLUSH_S_MIN, min(busy_s, limits.FLUSH_S_MAX))
            is_read = self.receive(int(now_s * 1e9))  # sending may have taken in the news that something has come
        return max(0.0, self._due_s() - time.monotonic()) if is_read else 0.0

    def _due_s(self) -> float:
        """When to flush."""
        is_dirty = self.publishing is not None and self.publishing.is_dirty
        return self._flushed_s + (self._pause_s if is_dirty else limits.BEAT_S)

    def _flush(self, now_ns: int) -> None:
        """All that may leave does."""
        publishing = self.publishing
        if publishing is None:
            return
        publishing.flush(now_ns)
        outgoing, publishing.outgoing = publishing.outgoing, []
        for route, data in outgoing:
            if not self._send(route, data):
                publishing.lost(route)

    def _send(self, route: bytes, data: bytes) -> bool:
        """Whether there still is a connection, and room."""
        try:
            self._socket.send_multipart((route, data), _NOBLOCK, copy=len(data) < 4096)
        except zmq.ZMQError:
            return False
        return True

    def close(self) -> None:
        self._listener.close(limits.CLOSE_LINGER_MS)
