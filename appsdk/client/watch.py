"""What ZeroMQ tells of a socket's connection: why nothing comes, where nothing comes."""

from __future__ import annotations

import struct

import zmq

_EVENT = struct.Struct("=HI")
_UP = int(zmq.EVENT_HANDSHAKE_SUCCEEDED)
_CONNECTED = int(zmq.EVENT_CONNECTED)
_BROKEN = int(zmq.EVENT_DISCONNECTED)
_NOBODY = int(zmq.EVENT_CLOSED)  # of an attempt that found nobody
_REFUSED = int(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
_OTHER_MECHANISM = int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
_BROKEN_OFF = int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
_ALL = _UP | _CONNECTED | _BROKEN | _NOBODY | _REFUSED | _OTHER_MECHANISM | _BROKEN_OFF
_NOBODY_LISTENS = "nobody listens there"
_NOBLOCK = int(zmq.NOBLOCK)


class Watch:
    """Of one socket after the other. ``problem``: what keeps it from talking; "" where nothing is known.

    ``refusals`` counts how often the key was turned away, since a connection was made last or who listens was another
    one; ``connections`` those that were made in all. ``is_up``: there is one. ``has_another_key``: who listens has
    broken off the handshake with this socket, as one does that has another key.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.problem = ""
        self.refusals = 0
        self.connections = 0
        self.is_up = self.has_another_key = False
        self._context = context
        self._count = 0
        self._watched: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._has_keys = False

    def watch(self, socket: zmq.Socket[bytes], *, has_keys: bool) -> None:
        """From now on this one, which has not connected yet."""
        self.close()
        self._watched = socket
        self._count += 1
        self._has_keys = has_keys
        address = f"inproc://watch-{id(self)}-{self._count}"  # of one context
        socket.monitor(address, _ALL)
        self._monitor = self._context.socket(zmq.PAIR)
        self._monitor.setsockopt(zmq.LINGER, 0)
        self._monitor.setsockopt(zmq.RCVHWM, 0)  # so that nobody waits for who does not look
        self._monitor.connect(address)
        self.is_up = self.has_another_key = False

    @property
    def finds_nobody(self) -> bool:
        return self.problem == _NOBODY_LISTENS

    def fileno(self) -> int:
        """What to wait for; it tells of news, once: :meth:`look` takes them all. Only while a socket is watched."""
        assert self._monitor is not None
        descriptor = self._monitor.getsockopt(zmq.FD)
        assert isinstance(descriptor, int)
        return descriptor

    def look(self) -> None:
        """Take in what has happened."""
        if self._monitor is None:
            return
        try:
            while True:
                event, _ = _EVENT.unpack(self._monitor.recv_multipart(_NOBLOCK)[0])
                self._note(event)
        except zmq.Again:
            return

    def _note(self, event: int) -> None:
        if event == _UP:
            self.problem, self.refusals, self.has_another_key = "", 0, False
            self.is_up = True
            self.connections += 1
        elif event == _BROKEN:
            self.is_up = False
        elif event == _REFUSED:
            self.refusals += 1
            self.problem = "it does not let the caller's key in"
        elif event == _OTHER_MECHANISM and self._has_keys:
            self.problem = "it has no keys, and here it is known with some"
        elif event == _OTHER_MECHANISM:
            self.problem = "it takes only callers with keys, and none of its public keys is known here"
        elif event == _BROKEN_OFF and self._has_keys:
            self.refusals, self.has_another_key = 0, True
            self.problem = "it breaks off the handshake: it has other keys than those that are known here"
        elif event == _NOBODY:
            self.problem = _NOBODY_LISTENS
        elif event == _CONNECTED and self.problem in ("", _NOBODY_LISTENS):  # else there is more to say
            self.problem = "somebody listens there, and does not answer"

    def close(self) -> None:
        """Before the socket that is watched is closed.

        It must not have anything more to tell: ZeroMQ's thread would wait for somebody who listens, for ever, and make
        no connection any more.
        """
        if self._watched is not None:
            self._watched.disable_monitor()
            self._watched = None
        if self._monitor is not None:
            self._monitor.close()
            self._monitor = None
