"""The gate: ZeroMQ asks it about each connection that somebody makes with CURVE (ZAP, ZeroMQ's RFC 27).

The question is an inproc message with the public key; what came with the connection itself has not been read by then.
An own thread answers, so that nobody waits outside while the messenger's owner waits for a disk.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping

import zmq
from zmq.utils import z85

from immortal.coordinator.messenger.errors import MessengerError
from immortal.coordinator.messenger.sockets import Context, Socket, Warnings, receive_parts
from immortal.coordinator.messenger.wake import Wake

ENDPOINT = "inproc://zeromq.zap.01"
_VERSION = b"1.0"
_PARTS = 9  # of a question about CURVE: routing ID, empty, version, request, domain, address, identity, mechanism, key


class Gate:
    """Lets in the keys of ``callers``, and counts the connections. One for each ZeroMQ context."""

    def __init__(self, context: Context, callers: Mapping[str, str], clock_ns: Callable[[], int]) -> None:
        self.callers = callers
        self.refused = 0
        self.let_in: Counter[str] = Counter()  # connections, by key
        self.last_refused = ""  # key, and where from
        self._warnings = Warnings(clock_ns)
        self._socket: Socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        try:
            self._socket.bind(ENDPOINT)
        except zmq.ZMQError as error:
            self._socket.close()
            raise MessengerError(
                f"the ZeroMQ context has a gate already ({error.strerror}): a messenger with keys needs its own context"
            ) from error
        self._wake = Wake()
        self._thread = threading.Thread(target=self._run, name="gate", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake.descriptor, zmq.POLLIN)
        with self._socket:
            while self._wake.descriptor not in dict(poller.poll()):
                while (parts := receive_parts(self._socket)) is not None:
                    self._answer(parts)

    def _answer(self, parts: list[bytes]) -> None:
        if len(parts) < 4:
            return  # not ZeroMQ's; nobody to answer
        known = len(parts) == _PARTS and parts[2] == _VERSION and parts[7] == b"CURVE" and len(parts[8]) == 32
        key = z85.encode(parts[8]).decode() if known else ""
        if key in self.callers:
            self.let_in[key] += 1
            answer = [b"200", b"OK", key.encode(), b""]
        else:
            answer = [b"400", b"this key may not call here", b"", b""]
            self.refused += 1
            origin = parts[5].decode(errors="replace") if known else "somebody"
            self.last_refused = f"{key} from {origin}"
            self._warnings.warn(f"a connection from {origin}: its key {key} is of nobody who may call here", "refused")
        self._socket.send_multipart([parts[0], b"", _VERSION, parts[3], *answer], zmq.NOBLOCK)

    def close(self) -> None:
        """Let nobody in any more."""
        self._wake.signal()
        self._thread.join()
        self._wake.close()
