"""Before the first record: who listens must prove to be the coordinator, and then the app proves to be its app.

The secret itself is never sent, so who listens in the coordinator's place learns nothing, and is not listened to.
"""

from __future__ import annotations

import os
import socket
import struct
import time

from immortal.appsdk.errors import ConnectError, Refused
from immortal.protocol.app_proof import (
    ANSWER_SIZE_BYTES_MAX,
    NONCE_SIZE_BYTES,
    Answer,
    Handshake,
    Role,
    channel_of,
    decode_answer,
    encode_challenge,
    encode_proof,
)
from immortal.protocol.errors import RemoteProtocolError
from immortal.protocol.messages import MessageType, decode_messages
from immortal.protocol.readers import Record, RecordReader

ANSWER_TIMEOUT_S = 60.0  # a coordinator answers at once, unless its disk hangs
_ROOT = 0
_CREDENTIALS = struct.Struct("3i")  # process, user, group


def check_owner(connection: socket.socket, address: str) -> None:
    """Raises ConnectError unless this user, or root, listens at the other end of a Unix socket."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process_id, user_id, _ = _CREDENTIALS.unpack(credentials)
    if user_id not in (_ROOT, os.geteuid()):
        raise ConnectError(
            f"user {user_id} listens at {address} (process {process_id}), not user {os.geteuid()}, whose this app is: "
            f"run the app and its coordinator as the same user"
        )


def authenticate(connection: socket.socket, secret: bytes, address: str) -> None:
    """Both ends of the fresh ``connection`` prove that they know ``secret``. It does not block before and after.

    Raises ConnectError where who listens can't, and Refused where it says that it does not want this app; nothing else
    that it says is looked at.
    """
    nonce = os.urandom(NONCE_SIZE_BYTES)
    try:
        connection.settimeout(ANSWER_TIMEOUT_S)
        connection.sendall(encode_challenge(nonce))
        answer = _answer(connection, address)
        channel = channel_of(connection.getsockname(), connection.getpeername())
        handshake = Handshake(nonce, answer.coordinator_nonce, answer.instance, channel)
        if not handshake.is_proven(secret, Role.COORDINATOR, answer.proof):
            raise ConnectError(
                f"who listens at {address} does not know the secret that this app was given, so it is not its "
                f"coordinator (it calls itself {answer.instance!r}), or something stands between the two; see "
                f"that the address and the secret's file are those of one instance that runs"
            )
        connection.sendall(encode_proof(handshake.proof(secret, Role.APP)))
        connection.setblocking(False)
    except RemoteProtocolError as error:
        raise ConnectError(f"who listens at {address} is not the coordinator of this app: {error}") from None
    except TimeoutError:
        raise ConnectError(
            f"who listens at {address} has not proven to be the coordinator of this app within {ANSWER_TIMEOUT_S:g} s"
        ) from None
    except OSError as error:
        raise _gone(address, error.strerror or str(error)) from None


def _answer(connection: socket.socket, address: str) -> Answer:
    """Raises ConnectError, Refused, RemoteProtocolError, OSError."""
    reader = RecordReader()
    deadline_s = time.monotonic() + ANSWER_TIMEOUT_S
    size_bytes = 0
    while True:
        data = connection.recv(ANSWER_SIZE_BYTES_MAX)
        if not data:
            raise _gone(address, "the connection was closed")
        reader.receive_data(data)
        size_bytes += len(data)
        event = reader.next_event()
        if event is not None:
            break
        if size_bytes >= ANSWER_SIZE_BYTES_MAX:
            raise RemoteProtocolError(f"its answer has more than {ANSWER_SIZE_BYTES_MAX} bytes")
        if (rest_s := deadline_s - time.monotonic()) <= 0:  # it may come byte by byte
            raise TimeoutError
        connection.settimeout(rest_s)
    messages = list(decode_messages(event.content)) if isinstance(event, Record) else []
    if isinstance(event, Record) and len(messages) == 1 and not reader.buffered_bytes:
        message_type, start, end = messages[0]
        if message_type == MessageType.PROOF:
            return decode_answer(event.content[start:end])
        if message_type == MessageType.REFUSAL:
            reason = event.content[start:end].decode("utf-8", "replace")
            raise Refused(f"who listens at {address} refuses: {''.join(filter(str.isprintable, reason))}")
    raise RemoteProtocolError("its answer to a Challenge is something else than a Proof")


def _gone(address: str, problem: str) -> ConnectError:
    return ConnectError(
        f"who listens at {address} went away before it had proven to be the coordinator of this app ({problem}): it "
        f"has another app ('immortal status' says), ends, or is of a version before this proof"
    )
