"""Authentication of apps: a new connection must prove that it is the instance's own app. No connection delays others.

accepted --Challenge--> answered --the right Proof--> proven --Hello--> the app
   |                       '--a wrong Proof--> refused
   |--Hello with the secret, where that is permitted--> the app
   |--another Hello--> refused: receives the reason, and is closed after it had time to read it
   |--anything else--> closed
   '--silence, or too slow: closed after HELLO_TIMEOUT_S, at any stage
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

HELLO_TIMEOUT_S = 20.0  # from the connection to a whole Hello: if 200 instances start at once, 5 s are too short
REFUSAL_TIMEOUT_S = 1.0  # for a refused app to read the reason
HELLO_SIZE_BYTES_MAX = 4096  # the largest has about 1500; also the size of one read from an unproven app
REFUSAL_SIZE_BYTES_MAX = 1 << 20  # read from a refused app: closing with bytes unread would destroy the reason
UNAUTHENTICATED_MAX = 64  # largest number of pending connections, each with a descriptor; one more displaces the oldest

_NEW_EACH_START = "a coordinator makes a new one at each start"
_NO_HELLO = "it began with something else than a Challenge or a Hello"
_STRANGERS = "the app's socket"  # kind of the notices that strangers can cause, for the rate limit
_NO_COMMITTER_ID = 1  # in the records of this handshake, so that a stranger does not learn the real committer ID


class _PendingConnection(Struct):
    connection: AppConnection
    deadline_ns: int
    received: bytearray = field(default_factory=bytearray)  # bytes received and not parsed yet
    handshake: Handshake | None = None  # set when it has sent its Challenge
    proven: bool = False
    refused: bool = False
    discarded_bytes: int = 0  # read after its refusal


class AppAuthenticator:
    """Authenticator of an instance's app: admits a connection that proves that it knows ``secret``.

    ``epoll``: watches the pending connections. ``allow_secret``: also admit an app that sends the secret in its Hello.
    """

    def __init__(
        self, instance: str, secret: bytes, log: Notices, epoll: select.epoll, *, allow_secret: bool = False
    ) -> None:
        self._instance = instance
        self._secret = secret
        self._allow_secret = allow_secret
        self._log = log
        self._epoll = epoll
        self._pending: dict[int, _PendingConnection] = {}  # by descriptor

    def next_deadline_ns(self) -> int | None:
        """Return the time (monotonic clock, ns) at which :meth:`process` must run even if no socket is ready."""
        return min([pending.deadline_ns for pending in self._pending.values()], default=None)

    def admit(self, connection: AppConnection) -> None:
        """Begin to authenticate ``connection``, which has one socket for both directions."""
        if len(self._pending) >= UNAUTHENTICATED_MAX:
            # Only the owner can connect to the Unix socket: a flood at the port must not displace such connections.
            oldest = min(self._pending.values(), key=lambda pending: (pending.connection.is_unix, pending.deadline_ns))
            if not oldest.refused:
                what = f"a connection to the app's socket was closed: {UNAUTHENTICATED_MAX} wait there"
                self._log.warning(what, kind=_STRANGERS)
            self._drop(oldest)
        self._pending[connection.receiver_fileno] = _PendingConnection(connection, _deadline_ns(HELLO_TIMEOUT_S))
        self._epoll.register(connection.receiver_fileno, select.EPOLLIN | select.EPOLLRDHUP)

    def process(self, ready: Mapping[int, int]) -> tuple[AppConnection, bytes] | None:
        """Read from the ``ready`` connections (epoll masks by descriptor), and close those whose time is up.

        Return the app's connection and its bytes from the Hello on when one is admitted; all others are then closed.
        """
        for descriptor in [descriptor for descriptor in self._pending if descriptor in ready]:
            pending = self._pending[descriptor]
            if self._receive(pending):
                del self._pending[descriptor]
                self._epoll.unregister(descriptor)
                self.close()
                return pending.connection, bytes(pending.received)
        now_ns = time.monotonic_ns()
        for pending in [pending for pending in self._pending.values() if now_ns >= pending.deadline_ns]:
            if not pending.refused:
                self._warn(f"it came to no Hello within {HELLO_TIMEOUT_S:g} s")
            self._drop(pending)
        return None

    def close(self) -> None:
        """Close all pending connections."""
        for pending in list(self._pending.values()):
            self._drop(pending)

    def _receive(self, pending: _PendingConnection) -> bool:
        """Read from a pending connection; return True if it is now admitted as the app."""
        data = pending.connection.receive(HELLO_SIZE_BYTES_MAX)
        if data is None:
            return False
        if pending.refused:
            pending.discarded_bytes += len(data)
            if not data or pending.discarded_bytes > REFUSAL_SIZE_BYTES_MAX:
                self._drop(pending)
            return False
        if not data:
            when = "before it had said Hello" if pending.handshake is None else "when it had read our proof"
            self._warn(f"it ended {when}")
            self._drop(pending)
            return False
        pending.received += data
        try:
            return self._handle_messages(pending)
        except RemoteProtocolError as error:
            self._warn(
                f'{error}; an app that knows only the base protocol needs app_auth = "none" in the settings of '
                f"{self._instance!r}"
            )
        except OSError:
            self._warn("it was gone when its Challenge was to be answered")
        self._drop(pending)
        return False

    def _handle_messages(self, pending: _PendingConnection) -> bool:
        """Handle all complete messages; return True if they admit the app. Raises RemoteProtocolError, OSError."""
        while not pending.refused and (first := _first_message(pending.received)) is not None:
            message, size_bytes = first
            if message.message_type == MessageType.HELLO:
                if pending.proven:
                    return True  # its Hello stays in ``received``, for the core
                return self._accepts_secret(pending, decode_hello(message.data))
            if message.message_type == MessageType.CHALLENGE and pending.handshake is None:
                self._answer(pending, decode_challenge(message.data))
            elif message.message_type == MessageType.PROOF and pending.handshake is not None and not pending.proven:
                pending.proven = pending.handshake.is_proven(self._secret, Role.APP, decode_proof(message.data))
                if not pending.proven:
                    reason = f"the proof of the app of {self._instance!r} is wrong, so it has another secret"
                    reason += f": {_NEW_EACH_START}; {self._secret_file_hint}"
                    self._refuse(pending, "its proof is wrong", reason)
            else:
                raise RemoteProtocolError(_NO_HELLO)
            del pending.received[:size_bytes]
        return False

    def _answer(self, pending: _PendingConnection, app_nonce: bytes) -> None:
        nonce = secrets.token_bytes(NONCE_SIZE_BYTES)
        pending.handshake = handshake = Handshake(app_nonce, nonce, self._instance, pending.connection.channel)
        proof = handshake.proof(self._secret, Role.COORDINATOR)
        self._send(pending, encode_answer(Answer(nonce, proof, self._instance)))

    def _accepts_secret(self, pending: _PendingConnection, hello: Hello) -> bool:
        """Return True if the secret in the Hello admits the app; otherwise refuse the connection."""
        right = hmac.compare_digest(hello.secret, self._secret)
        if right and self._allow_secret:
            return True
        own = repr(self._instance)
        if not hello.secret:
            problem = "it proved nothing"
            reason = f"the app of {own} must prove that it knows its secret, and did not; {self._secret_file_hint}"
        elif self._allow_secret:
            problem = "it showed another secret"
            reason = f"the secret of {own} is not the one that came: {_NEW_EACH_START}; {self._secret_file_hint}"
        else:
            problem = "it sent a secret itself, instead of a proof that it knows it"
            reason = (
                f"the app of {own} must prove that it knows the secret, and must not send it: use an SDK that answers "
                f'a challenge (docs/WIRE.md, part 5), or say app_auth = "secret" in the settings of {own}'
            )
        self._refuse(pending, problem, reason, explain=MessageType.REFUSAL in hello.extensions)
        return False

    @property
    def _secret_file_hint(self) -> str:
        return (
            f"start the app with 'immortal run', or let {SECRET_FILE_VARIABLE} or --secret-file name the file "
            f"{self._instance}/{FILE_NAME} in the registry's folder"
        )

    def _refuse(self, pending: _PendingConnection, problem: str, reason: str, *, explain: bool = True) -> None:
        """Refuse a pending connection. ``explain``: True if the app understands a Refusal."""
        self._warn(problem)
        pending.refused = True
        pending.deadline_ns = _deadline_ns(REFUSAL_TIMEOUT_S)
        if explain:
            self._send(pending, encode_message(MessageType.REFUSAL, reason.encode()))
        pending.connection.end_sending()

    def _send(self, pending: _PendingConnection, message: bytes) -> None:
        pending.connection.send(encode_record(_NO_COMMITTER_ID, CONTROL_SEQUENCE_ID, message))
        pending.connection.flush()  # a new socket has room for it

    def _warn(self, why: str) -> None:
        self._log.warning(f"a connection to the app's socket was refused: {why}", kind=_STRANGERS)

    def _drop(self, pending: _PendingConnection) -> None:
        descriptor = pending.connection.receiver_fileno
        del self._pending[descriptor]
        self._epoll.unregister(descriptor)
        pending.connection.close()


def _first_message(received: bytearray) -> tuple[Message, int] | None:
    """Return the first message of ``received`` and its size; None if it is incomplete. Raises RemoteProtocolError."""
    reader = MessageReader(HELLO_SIZE_BYTES_MAX)
    reader.receive_data(bytes(received))
    message = reader.next_event()
    if message is None:
        return None
    if not isinstance(message, Message):
        raise RemoteProtocolError(_NO_HELLO)
    return message, len(received) - reader.buffered_bytes


def _deadline_ns(delay_s: float) -> int:
    return time.monotonic_ns() + int(delay_s * 1e9)
