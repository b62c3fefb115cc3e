"""Who has connected and has not proven to be the instance's own app yet: nobody of them holds up another.

accepted --Challenge--> answered --the right Proof--> proven --Hello--> the app
   |                       '--a wrong Proof--> refused
   |--Hello with the secret, where that is permitted--> the app
   |--another Hello--> refused: told why, and closed once it has had the chance to read that
   |--anything else--> closed
   '--silence, or too slow: closed after HELLO_TIMEOUT_S, wherever it is by then
"""

from __future__ import annotations

import hmac
import secrets
import select
import time
from collections.abc import Mapping

from msgspec import Struct, field

from immortal.coordinator.app.secret import FILE_NAME, SECRET_FILE_VARIABLE
from immortal.coordinator.app.sockets import AppConnection
from immortal.coordinator.notices import Notices
from immortal.protocol.app_handshake import (
    NONCE_SIZE_BYTES,
    Answer,
    Handshake,
    Role,
    decode_challenge,
    decode_proof,
    encode_answer,
)
from immortal.protocol.errors import RemoteProtocolError
from immortal.protocol.extensions import Hello, decode_hello
from immortal.protocol.messages import MessageType, encode_message
from immortal.protocol.readers import Message, MessageReader
from immortal.protocol.record import CONTROL_SEQUENCE_ID, encode_record

HELLO_TIMEOUT_S = 5.0  # from the connection to a whole Hello: an app says what it has to say at once
FAREWELL_TIMEOUT_S = 1.0  # for one that is refused, to read why
HELLO_SIZE_BYTES_MAX = 4096  # the largest has about 1500; no more is read at a time of who is not proven
FAREWELL_SIZE_BYTES_MAX = 1 << 20  # read of one that is refused: closing with bytes unread would take the reason away
UNAUTHENTICATED_MAX = 64  # descriptors that strangers may hold; beyond it one has to go

_ANEW = "a coordinator makes a new one at each start"
_NO_HELLO = "it began with something else than a Challenge or a Hello"
_STRANGERS = "the app's socket"  # the kind of lines that they can cause
_NOBODY = 1  # the committer ID of a refusal: a stranger learns nothing of the log


class _Guest(Struct):
    connection: AppConnection
    leaves_ns: int
    said: bytearray = field(default_factory=bytearray)  # and not understood yet
    handshake: Handshake | None = None  # once it has sent its Challenge
    proven: bool = False
    refused: bool = False
    unheard_bytes: int = 0  # read since it was refused


class AppAuthenticator:
    """Lets in who proves to know ``secret``. The sockets of the others are registered with ``epoll``.

    ``takes_secret``: also who shows the secret itself in its Hello, for apps that can't answer a challenge.
    """

    def __init__(
        self, instance: str, secret: bytes, log: Notices, epoll: select.epoll, *, takes_secret: bool = False
    ) -> None:
        self._instance = instance
        self._secret = secret
        self._takes_secret = takes_secret
        self._log = log
        self._epoll = epoll
        self._guests: dict[int, _Guest] = {}  # by descriptor

    def next_deadline_ns(self) -> int | None:
        """When :meth:`process` is to be called although nothing is ready, on the monotonic clock."""
        return min([guest.leaves_ns for guest in self._guests.values()], default=None)

    def admit(self, connection: AppConnection) -> None:
        """``connection``, of one socket for both directions, has come in."""
        if len(self._guests) >= UNAUTHENTICATED_MAX:
            # Who came by the Unix socket is no stranger: a flood at the port does not drive it out.
            leaves = min(self._guests.values(), key=lambda guest: (guest.connection.is_owners, guest.leaves_ns))
            if not leaves.refused:
                what = f"a connection to the app's socket was closed: {UNAUTHENTICATED_MAX} wait there"
                self._log.warning(what, kind=_STRANGERS)
            self._let_go(leaves)
        self._guests[connection.receiver_fileno] = _Guest(connection, _in_ns(HELLO_TIMEOUT_S))
        self._epoll.register(connection.receiver_fileno, select.EPOLLIN | select.EPOLLRDHUP)

    def process(self, ready: Mapping[int, int]) -> tuple[AppConnection, bytes] | None:
        """Go on with what is ``ready`` (masks by descriptor) or due.

        The app's connection, and what it has said from its Hello on; the others are closed then.
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
                self._tell(f"it came to no Hello within {HELLO_TIMEOUT_S:g} s")
            self._let_go(guest)
        return None

    def close(self) -> None:
        """Send all away."""
        for guest in list(self._guests.values()):
            self._let_go(guest)

    def _listen(self, guest: _Guest) -> bool:
        """Take in what it says; True once it is the app."""
        data = guest.connection.receive(HELLO_SIZE_BYTES_MAX)
        if data is None:
            return False
        if guest.refused:
            guest.unheard_bytes += len(data)
            if not data or guest.unheard_bytes > FAREWELL_SIZE_BYTES_MAX:
                self._let_go(guest)
            return False
        if not data:
            when = "before it had said Hello" if guest.handshake is None else "when it had read our proof"
            self._tell(f"it ended {when}")
            self._let_go(guest)
            return False
        guest.said += data
        try:
            return self._is_app(guest)
        except RemoteProtocolError as error:
            self._tell(
                f'{error}; an app that knows only the base protocol needs app_auth = "none" in the settings of '
                f"{self._instance!r}"
            )
        except OSError:
            self._tell("it was gone when its Challenge was to be answered")
        self._let_go(guest)
        return False

    def _is_app(self, guest: _Guest) -> bool:
        """Go through the messages that are there. Raises RemoteProtocolError, OSError."""
        while not guest.refused and (first := _first_message(guest.said)) is not None:
            message, size_bytes = first
            if message.message_type == MessageType.HELLO:
                if guest.proven:
                    return True  # with its Hello: the core reads that
                return self._shows_secret(guest, decode_hello(message.data))
            if message.message_type == MessageType.CHALLENGE and guest.handshake is None:
                self._answer(guest, decode_challenge(message.data))
            elif message.message_type == MessageType.PROOF and guest.handshake is not None and not guest.proven:
                guest.proven = guest.handshake.is_proven(self._secret, Role.APP, decode_proof(message.data))
                if not guest.proven:
                    reason = f"the proof of the app of {self._instance!r} is wrong, so it has another secret: {_ANEW}; "
                    self._refuse(guest, "its proof is wrong", reason + self._where_it_is)
            else:
                raise RemoteProtocolError(_NO_HELLO)
            del guest.said[:size_bytes]
        return False

    def _answer(self, guest: _Guest, app_nonce: bytes) -> None:
        nonce = secrets.token_bytes(NONCE_SIZE_BYTES)
        guest.handshake = handshake = Handshake(app_nonce, nonce, self._instance, guest.connection.channel)
        proof = handshake.proof(self._secret, Role.COORDINATOR)
        self._say(guest, encode_answer(Answer(nonce, proof, self._instance)))

    def _shows_secret(self, guest: _Guest, hello: Hello) -> bool:
        """Whether it may be the app by its Hello alone."""
        right = hmac.compare_digest(hello.secret, self._secret)
        if right and self._takes_secret:
            return True
        own = repr(self._instance)
        if not hello.secret:
            came, reason = "it proved nothing", f"the app of {own} must prove that it knows its secret, and did not; "
            reason += self._where_it_is
        elif self._takes_secret:
            came, reason = "it showed another secret", f"the secret of {own} is not the one that came: {_ANEW}; "
            reason += self._where_it_is
        else:
            came = "it sent a secret itself, instead of a proof that it knows it"
            reason = (
                f"the app of {own} must prove that it knows the secret, and must not send it: use an SDK that answers "
                f'a challenge (docs/WIRE.md, part 5), or say app_auth = "secret" in the settings of {own}'
            )
        self._refuse(guest, came, reason, told=MessageType.REFUSAL in hello.extensions)
        return False

    @property
    def _where_it_is(self) -> str:
        return (
            f"start the app with 'immortal run', or let {SECRET_FILE_VARIABLE} or --secret-file name the file "
            f"{self._instance}/{FILE_NAME} in the registry's folder"
        )

    def _refuse(self, guest: _Guest, came: str, reason: str, *, told: bool = True) -> None:
        """``told``: it understands a Refusal."""
        self._tell(came)
        guest.refused = True
        guest.leaves_ns = _in_ns(FAREWELL_TIMEOUT_S)
        if told:
            self._say(guest, encode_message(MessageType.REFUSAL, reason.encode()))
        guest.connection.end_sending()

    def _say(self, guest: _Guest, message: bytes) -> None:
        guest.connection.send(encode_record(_NOBODY, CONTROL_SEQUENCE_ID, message))
        guest.connection.flush()  # a fresh socket has room for it

    def _tell(self, why: str) -> None:
        self._log.warning(f"a connection to the app's socket was refused: {why}", kind=_STRANGERS)

    def _let_go(self, guest: _Guest) -> None:
        descriptor = guest.connection.receiver_fileno
        del self._guests[descriptor]
        self._epoll.unregister(descriptor)
        guest.connection.close()


def _first_message(said: bytearray) -> tuple[Message, int] | None:
    """The message that ``said`` begins with, and its size; None while it is not whole. Raises RemoteProtocolError."""
    reader = MessageReader(HELLO_SIZE_BYTES_MAX)
    reader.receive_data(bytes(said))
    message = reader.next_event()
    if message is None:
        return None
    if not isinstance(message, Message):
        raise RemoteProtocolError(_NO_HELLO)
    return message, len(said) - reader.buffered_bytes


def _in_ns(delay_s: float) -> int:
    return time.monotonic_ns() + int(delay_s * 1e9)
