"""Who has connected and has not shown the instance's secret yet: nobody of them is told anything, or holds up another.

accepted --the secret, in its Hello--> the app
         --anything else-------------> told why, and closed once it has had the chance to read that
         --silence, a slow Hello-----> closed after HELLO_TIMEOUT_S
"""

from __future__ import annotations

import hmac
import select
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from coordinator.app_connection import AppConnection
from coordinator.app_secret import FILE_NAME, SECRET_FILE_VARIABLE
from coordinator.limited_log import LimitedLog
from coordinator.logs import Events
from protocol.errors import RemoteProtocolError
from protocol.extensions import Hello, decode_hello
from protocol.messages import MessageType, encode_message
from protocol.readers import Message, MessageReader
from protocol.record import CONTROL_SEQUENCE_ID, encode_record

HELLO_TIMEOUT_S = 5.0  # an app says Hello as soon as it is connected
FAREWELL_TIMEOUT_S = 1.0  # for one that is refused, to read why
HELLO_SIZE_BYTES_MAX = 4096  # the largest has about 1500
FAREWELL_SIZE_BYTES_MAX = 1 << 20  # read of one that is refused: closing with bytes unread would take the reason away
GUESTS_MAX = 64  # descriptors that strangers may hold; beyond it one has to go

_NOBODY = 1  # the committer ID of a refusal: a stranger learns nothing of the log


@dataclass(slots=True)
class _Guest:
    connection: AppConnection
    leaves_ns: int
    said: bytearray = field(default_factory=bytearray)
    refused: bool = False
    unheard_bytes: int = 0  # read since it was refused


class AppGate:
    """Asks those who connect for ``secret``. Their sockets are registered with ``epoll``."""

    def __init__(self, instance: str, secret: bytes, log: Events, epoll: select.epoll) -> None:
        self._instance = instance
        self._secret = secret
        self._log = LimitedLog(log)
        self._epoll = epoll
        self._guests: dict[int, _Guest] = {}  # by descriptor

    def next_deadline_ns(self) -> int | None:
        """When :meth:`process` is to be called although nothing is ready, on the monotonic clock."""
        deadlines = [guest.leaves_ns for guest in self._guests.values()]
        told_ns = self._log.next_deadline_ns()
        return min(deadlines if told_ns is None else [*deadlines, told_ns], default=None)

    def admit(self, connection: AppConnection) -> None:
        """``connection``, of one socket for both directions, has come in."""
        if len(self._guests) >= GUESTS_MAX:
            # Who came by the Unix socket is no stranger: a flood at the port does not drive it out.
            leaves = min(self._guests.values(), key=lambda guest: (guest.connection.is_owners, guest.leaves_ns))
            if not leaves.refused:
                self._log.warning(f"a connection to the app's socket was closed: {GUESTS_MAX} wait there")
            self._let_go(leaves)
        self._guests[connection.receiver_fileno] = _Guest(connection, _in_ns(HELLO_TIMEOUT_S))
        self._epoll.register(connection.receiver_fileno, select.EPOLLIN | select.EPOLLRDHUP)

    def process(self, ready: Mapping[int, int]) -> tuple[AppConnection, bytes] | None:
        """Go on with what is ``ready`` (masks by descriptor) or due.

        The app's connection once it has shown the secret, and what it has said so far; the others are closed then.
        """
        for descriptor in [descriptor for descriptor in self._guests if descriptor in ready]:
            guest = self._guests[descriptor]
            if self._listen(guest):
                del self._guests[descriptor]
                self._epoll.unregister(descriptor)
                self.close()
                return guest.connection, bytes(guest.said)
        now_ns = time.monotonic_ns()
        for guest in [guest for guest in self._guests.values() if now_ns >= guest.leaves_ns]:
            if not guest.refused:
                self._tell(f"it said no whole Hello within {HELLO_TIMEOUT_S:g} s")
            self._let_go(guest)
        self._log.process()
        return None

    def close(self) -> None:
        """Send all away."""
        for guest in list(self._guests.values()):
            self._let_go(guest)

    def _listen(self, guest: _Guest) -> bool:
        """Take in what it says; True when that is the secret."""
        data = guest.connection.receive()
        if data is None:
            return False
        if guest.refused:
            guest.unheard_bytes += len(data)
            if not data or guest.unheard_bytes > FAREWELL_SIZE_BYTES_MAX:
                self._let_go(guest)
            return False
        if not data:
            self._tell("it ended before it had said Hello")
            self._let_go(guest)
            return False
        guest.said += data
        try:
            hello = _read_hello(bytes(guest.said))
        except RemoteProtocolError as error:
            self._tell(
                f'{error}; an app that knows only the base protocol needs app_auth = "none" in the settings of '
                f"{self._instance!r}"
            )
            self._let_go(guest)
            return False
        if hello is None:
            return False
        if hmac.compare_digest(hello.secret, self._secret):
            return True
        self._refuse(guest, hello)
        return False

    def _refuse(self, guest: _Guest, hello: Hello) -> None:
        came = "it showed another secret" if hello.secret else "it showed no secret"
        self._tell(came)
        reason = (
            f"the secret of {self._instance!r} is not the one that came: a coordinator makes a new one at each start"
            if hello.secret
            else f"the app of {self._instance!r} must show its secret, none came"
        )
        reason += (
            f"; start the app with 'immortal run', or let {SECRET_FILE_VARIABLE} or --secret-file name the file "
            f"{self._instance}/{FILE_NAME} in the registry's folder"
        )
        guest.refused = True
        guest.leaves_ns = _in_ns(FAREWELL_TIMEOUT_S)
        if MessageType.REFUSAL in hello.extensions:
            message = encode_message(MessageType.REFUSAL, reason.encode())
            guest.connection.send(encode_record(_NOBODY, CONTROL_SEQUENCE_ID, message))
        guest.connection.flush()
        guest.connection.end_sending()

    def _tell(self, why: str) -> None:
        self._log.warning(f"a connection to the app's socket was refused: {why}")

    def _let_go(self, guest: _Guest) -> None:
        descriptor = guest.connection.receiver_fileno
        del self._guests[descriptor]
        self._epoll.unregister(descriptor)
        guest.connection.close()


def _read_hello(said: bytes) -> Hello | None:
    """The Hello that ``said`` begins with; None while it is not whole. Raises RemoteProtocolError for anything else."""
    reader = MessageReader(HELLO_SIZE_BYTES_MAX)
    reader.receive_data(said)
    message = reader.next_event()
    if message is None:
        return None
    if not isinstance(message, Message) or message.message_type != MessageType.HELLO:
        raise RemoteProtocolError("the first message was no Hello")
    return decode_hello(message.data)


def _in_ns(delay_s: float) -> int:
    return time.monotonic_ns() + int(delay_s * 1e9)
