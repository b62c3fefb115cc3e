"""The app's socket, driven by hand: apps, strangers, and a coordinator's endpoint without a coordinator."""

from __future__ import annotations

import contextlib
import select
import socket
import time
from pathlib import Path
from typing import Any

from immortal.appsdk.running.transport import read_secret
from immortal.coordinator.app import secret as app_secret
from immortal.coordinator.app.endpoint import AppEndpoint
from immortal.coordinator.config import AppAuth, InstanceSettings
from immortal.coordinator.core import events as ev
from immortal.coordinator.instances.registry import Registry
from immortal.coordinator.notices import Notices
from immortal.protocol.app_handshake import (
    NONCE_SIZE_BYTES,
    Answer,
    Handshake,
    Role,
    channel_of,
    decode_answer,
    encode_challenge,
    encode_proof,
)
from immortal.protocol.extensions import ALL_EXTENSIONS, Hello, encode_hello
from immortal.protocol.messages import MessageType, decode_messages
from immortal.protocol.readers import Record, RecordReader
from tests.helpers.notices import Told
from tests.helpers.processes import DEADLINE_S

NONCE = bytes(range(NONCE_SIZE_BYTES))
OTHER_SECRET = b"0" * 64
REFUSED = "a connection to the app's socket was refused"


def secret_of(settings: InstanceSettings) -> bytes:
    return read_secret(str(app_secret.path(settings.folder)))


def stranger(settings: InstanceSettings, said: bytes = b"", host: str = "127.0.0.1") -> socket.socket:
    made = socket.create_connection((host, settings.app_port), timeout=DEADLINE_S)
    made.sendall(said)
    return made


def hello(secret: bytes, extensions: frozenset[int] = ALL_EXTENSIONS) -> bytes:
    return encode_hello(Hello(extensions, "stranger", secret))


def all_that_came(connection: socket.socket) -> bytes:
    """Return all received bytes, up to the end of the connection, which it waits for."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := connection.recv(1 << 16):
            data += piece
    return data


def only_message(data: bytes) -> tuple[int, bytes]:
    """Return type and data of the only message in ``data``, which must be one control record and nothing else."""
    reader = RecordReader()
    reader.receive_data(data)
    record = reader.next_event()
    assert isinstance(record, Record), data
    assert (record.header.sequence_id, record.header.committer_id, reader.buffered_bytes) == (-1, 1, 0)
    ((message_type, start, end),) = decode_messages(record.content)
    return message_type, record.content[start:end]


def only_refusal(data: bytes) -> str:
    """Return the reason in ``data``, which must be one Refusal and nothing else."""
    message_type, reason = only_message(data)
    assert message_type == MessageType.REFUSAL
    return reason.decode()


def only_answer(data: bytes) -> Answer:
    """Return the answer to a Challenge in ``data``, which must be one Proof and nothing else."""
    message_type, said = only_message(data)
    assert message_type == MessageType.PROOF
    return decode_answer(said)


def handshake_at(one: socket.socket, answer: Answer, nonce: bytes = NONCE) -> Handshake:
    """Return the handshake that an app computes from ``answer``, at its end ``one`` of the connection."""
    channel = channel_of(one.getsockname(), one.getpeername())
    return Handshake(nonce, answer.coordinator_nonce, answer.instance, channel)


class Endpoint:
    """App's endpoint of a coordinator, with the secret, driven by hand."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.settings = Registry(folder).register("alice", "tcp://127.0.0.1:*", app_port=0, **options)
        assert self.settings.app_auth is AppAuth.CHALLENGE
        self.epoll = select.epoll()
        self.log = Told()
        self.endpoint = AppEndpoint(self.settings, Notices("alice", self.log), self.epoll)
        self.endpoint.listen()

    def turn(self) -> list[ev.Event]:
        """Run one turn, when something is ready or the deadline is reached."""
        due_ns = self.endpoint.next_deadline_ns()
        timeout_s = DEADLINE_S if due_ns is None else max(0.0, (due_ns - time.monotonic_ns()) / 1e9)
        ready = dict(self.epoll.poll(timeout_s))
        assert ready or due_ns is not None, "nothing comes, and nothing is due"
        return self.endpoint.process(ready)

    def close(self) -> None:
        self.endpoint.close()
        self.epoll.close()

    def proof_for(self, one: socket.socket) -> bytes:
        """Return the Proof message that the app at ``one`` must send, once its Challenge is answered."""
        one.sendall(encode_challenge(NONCE))
        while not select.select([one], [], [], 0)[0]:
            assert self.turn() == []
        handshake = handshake_at(one, only_answer(one.recv(4096)))
        return encode_proof(handshake.proof(secret_of(self.settings), Role.APP))
