"""What an app may say and when: its messages, checked and made uniform.

Calls come singly, in base batches or in batches that are demultiplexed already; they leave here as :class:`Calls`, all
to one destination and all impulses or none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

from immortal.coordinator.core.errors import AppProtocolError
from immortal.coordinator.core.interfaces import ONESELF
from immortal.coordinator.core.notices import CallTooLarge
from immortal.coordinator.core.session import SENDS_CALLS, SENDS_IMPULSES, AppSession
from immortal.protocol.batch import decode_batch
from immortal.protocol.client import CLIENTS
from immortal.protocol.errors import LimitExceededError
from immortal.protocol.extensions import decode_app_batch
from immortal.protocol.limits import RPC_FRONT_SIZE_BYTES_MAX
from immortal.protocol.messages import (
    MessageType,
    OutgoingRpc,
    RpcType,
    decode_messages,
    decode_name,
    decode_outgoing_rpc,
    encode_message,
)
from immortal.protocol.peer import PAYLOAD_SIZE_BYTES_MAX
from immortal.protocol.readers import Message, TooLargeRpc

CALLS = frozenset({MessageType.RPC, MessageType.RPC_BATCH, MessageType.STREAM_BATCH, MessageType.IMPULSE_BATCH})
_DEMULTIPLEXED = frozenset({MessageType.STREAM_BATCH, MessageType.IMPULSE_BATCH})


@dataclass(slots=True, eq=False, repr=False)
class Calls:
    destination: str
    count: int
    payload: bytes
    impulses: bool


def late_hello(message: Message) -> NoReturn:
    """A Hello that is not the first message, which :meth:`AppSession.hear` takes."""
    raise AppProtocolError("a Hello must be the app's first message")


def read_calls(session: AppSession, own_name: str, message: Message) -> Iterator[Calls]:
    """The calls in ``message``. Raises AppProtocolError, RemoteProtocolError."""
    message_type = message.message_type
    if session.phase not in SENDS_CALLS:
        raise AppProtocolError(
            f"the app sent a call in the phase {session.phase.value!r}: "
            f"calls may come behind the first checkpoint, or during and after a replay"
        )
    if message_type in _DEMULTIPLEXED:
        if message_type not in session.extensions:
            raise AppProtocolError(f"the app sent extension {message_type}, which its Hello did not ask for")
        batch = decode_app_batch(message.data)
        calls = Calls(batch.destination, batch.count, batch.payload, message_type == MessageType.IMPULSE_BATCH)
        yield _checked(session, own_name, calls)
        return
    for calls in _base_calls(message):
        yield _checked(session, own_name, calls)


def refuse_too_large(session: AppSession, rpc: TooLargeRpc) -> CallTooLarge:
    """An RPC was dropped. For an app that says a Hello it breaks the protocol: LimitExceededError.

    To end the connection would not help a client of the base protocol: its replay makes the same call again.
    """
    if session.hello is not None:
        raise LimitExceededError("an RPC", rpc.size_bytes, rpc.limit_bytes)
    destination, _ = decode_name(rpc.front, 0)
    most_mib = (rpc.limit_bytes - RPC_FRONT_SIZE_BYTES_MAX) >> 20
    return CallTooLarge(destination or "itself", rpc.size_bytes, most_mib)


def _base_calls(message: Message) -> Iterator[Calls]:
    """The calls of an app that demultiplexes nothing: neighbours that go the same way are joined."""
    destination, impulses = "", False
    run: list[bytes] = []
    for rpc in _outgoing(message):
        is_impulse = rpc.rpc_type == RpcType.IMPULSE
        if run and (rpc.destination != destination or is_impulse != impulses):
            yield Calls(destination, len(run), b"".join(run), impulses)
            run = []
        destination, impulses = rpc.destination, is_impulse
        run.append(encode_message(MessageType.RPC, rpc.incoming))
    if run:
        yield Calls(destination, len(run), b"".join(run), impulses)


def _outgoing(message: Message) -> Iterator[OutgoingRpc]:
    if message.message_type == MessageType.RPC:
        yield decode_outgoing_rpc(message.data)
        return
    count, start = decode_batch(message.data)
    body = message.data[start:]
    seen = 0
    for message_type, start, end in decode_messages(body):
        if message_type != MessageType.RPC:
            raise AppProtocolError(f"an RPCBatch holds a message of type {message_type}, only RPCs (0) are allowed")
        seen += 1
        yield decode_outgoing_rpc(body, start, end)
    if seen != count:
        raise AppProtocolError(f"an RPCBatch gives its count as {count} and holds {seen} messages")


def _checked(session: AppSession, own_name: str, calls: Calls) -> Calls:
    if len(calls.payload) > PAYLOAD_SIZE_BYTES_MAX:
        raise LimitExceededError(f"a batch to {calls.destination!r}", len(calls.payload), PAYLOAD_SIZE_BYTES_MAX)
    if calls.destination == own_name:
        calls.destination = ONESELF
    elif calls.destination != ONESELF and calls.destination not in session.attached:
        if session.hello is not None:
            raise AppProtocolError(
                f"the app called {calls.destination!r} without AttachTo: send AttachTo once before the first call to it"
            )
        session.attached.add(calls.destination)  # a client of the base protocol that answers whoever called it
    session.rules(own_name, calls.destination).check(calls.payload, calls.count)
    if calls.impulses and calls.destination == CLIENTS:
        raise AppProtocolError(f"the app sent an impulse to {CLIENTS!r}, which takes answers to clients alone")
    if calls.impulses and session.phase not in SENDS_IMPULSES and not session.upgraded:
        raise AppProtocolError(
            f"the app sent an impulse in the phase {session.phase.value!r}: impulses may come once it is primary"
        )
    return calls
