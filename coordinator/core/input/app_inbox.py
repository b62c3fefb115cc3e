"""Messages from the app: which are allowed when, how they are checked, and which component handles them.

Calls arrive one by one, in base batches or in demultiplexed batches. They leave as :class:`Calls`: all to one
destination, and either all impulses or none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from immortal.coordinator.core import events as ev
from immortal.coordinator.core.effects import CloseApp, OpenPeer
from immortal.coordinator.core.errors import AppProtocolError
from immortal.coordinator.core.interfaces import ONESELF
from immortal.coordinator.core.life_cycle.session import SENDS_CALLS, SENDS_IMPULSES, AppSession, Phase
from immortal.coordinator.core.notices import AppBrokeProtocol, CallTooLarge
from immortal.protocol.batch import decode_batch
from immortal.protocol.client_frames import CLIENTS
from immortal.protocol.errors import LimitExceededError, RemoteProtocolError
from immortal.protocol.extensions import REPORTS, decode_app_batch, decode_app_description
from immortal.protocol.limits import RPC_FRONT_SIZE_BYTES_MAX
from immortal.protocol.messages import (
    MessageType,
    OutgoingRpc,
    RpcType,
    decode_attach_to,
    decode_messages,
    decode_name,
    decode_outgoing_rpc,
    encode_message,
)
from immortal.protocol.peer_frames import PAYLOAD_SIZE_BYTES_MAX
from immortal.protocol.readers import BlobStart, Message, TooLargeRpc

if TYPE_CHECKING:
    from immortal.coordinator.core.components import Components

CALLS = frozenset({MessageType.RPC, MessageType.RPC_BATCH, MessageType.STREAM_BATCH, MessageType.IMPULSE_BATCH})
_DEMULTIPLEXED = frozenset({MessageType.STREAM_BATCH, MessageType.IMPULSE_BATCH})


@dataclass(slots=True, eq=False, repr=False)
class Calls:
    """Packed calls of the app to one destination: all impulses, or none."""

    destination: str
    count: int
    payload: bytes
    impulses: bool


def late_hello(message: Message) -> NoReturn:
    """Refuse a Hello that is not the first message; :meth:`AppSession.note_first_message` handles the first one."""
    raise AppProtocolError("a Hello must be the app's first message")


def read_calls(session: AppSession, own_name: str, message: Message) -> Iterator[Calls]:
    """Yield the calls in ``message``. Raises AppProtocolError, RemoteProtocolError."""
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
    """Return the notice about an RPC that was dropped. Raises LimitExceededError for an app with a Hello, as it
    breaks the protocol."""
    if session.hello is not None:
        raise LimitExceededError("an RPC", rpc.size_bytes, rpc.limit_bytes)
    destination, _ = decode_name(rpc.front, 0)
    most_mib = (rpc.limit_bytes - RPC_FRONT_SIZE_BYTES_MAX) >> 20
    return CallTooLarge(destination or "itself", rpc.size_bytes, most_mib)


def _base_calls(message: Message) -> Iterator[Calls]:
    """Yield the calls of an app that does not demultiplex. Consecutive calls to one destination are joined."""
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
        session.attached.add(calls.destination)  # an app of the base protocol that answers its caller
    session.rules(own_name, calls.destination).check(calls.payload, calls.count)
    if calls.impulses and calls.destination == CLIENTS:
        raise AppProtocolError(f"the app sent an impulse to {CLIENTS!r}, which takes answers to clients alone")
    if calls.impulses and session.phase not in SENDS_IMPULSES and not session.upgraded:
        raise AppProtocolError(
            f"the app sent an impulse in the phase {session.phase.value!r}: impulses may come once it is primary"
        )
    return calls


# Dispatch: one table of the app's messages and their handlers.


LOGGED_EXTENSIONS = frozenset({MessageType.RECORD_TIME, MessageType.INSTANCE_NAME})
"""Extensions that change what the log holds: an app must always ask for the same ones."""


class AppInbox:
    """Dispatches the app's messages to the components that handle them."""

    def __init__(self, components: Components) -> None:
        self._components = components
        self._state = components.state
        self._peers = components.peers
        self._impulses = components.impulses
        checkpoint_taker = components.checkpoint_taker
        self._by_type: dict[int, Callable[[Message], None]] = {
            **dict.fromkeys(CALLS, self._calls),
            **dict.fromkeys(REPORTS, components.call_failures.app_reported),
            MessageType.HELLO: late_hello,
            MessageType.ATTACH_TO: self._attach,
            MessageType.BARRIER: self._barrier,
            MessageType.APP_DESCRIPTION: self._description,
            MessageType.INITIAL_MESSAGE: self._initial_message,
            MessageType.TAKE_CHECKPOINT: self._checkpoint_wanted,
            MessageType.SNAPSHOT_BEGIN: checkpoint_taker.snapshot_began,
            MessageType.SNAPSHOT_CHUNK: checkpoint_taker.snapshot_chunk,
            MessageType.SNAPSHOT_END: checkpoint_taker.snapshot_ended,
            MessageType.CHECKPOINT_FAILED: checkpoint_taker.failed,
            MessageType.TAKEN_BACK: checkpoint_taker.taken_back,
            MessageType.UPGRADE_FAILED: components.upgrades.failed,
            MessageType.RETRY_REFUSED: components.operator.retry_refused,
            MessageType.HANDLERS: components.waiting_handlers.answered,
            MessageType.QUERY_ANSWERED: components.queries.answered,
        }

    def received(self, event: ev.AppData) -> None:
        """Handle bytes from the app. Raises RemoteProtocolError."""
        session = self._state.session
        if session.phase is Phase.WAITING or session.refused:
            return
        reader = session.reader
        reader.receive_data(event.data)
        if not session.is_loaded:
            return  # it is not known yet whether this log belongs to the app
        while not session.refused and (message := reader.next_event()) is not None:
            if isinstance(message, Message):
                self._message(message)
            elif isinstance(message, BlobStart):
                self._base_app_began()
                self._components.checkpoint_taker.blob_began()
            elif isinstance(message, TooLargeRpc):
                self._base_app_began()
                self._state.report(refuse_too_large(session, message))
            else:
                self._components.checkpoint_taker.blob_received(message)

    def _message(self, message: Message) -> None:
        if not self._state.session.has_sent:
            self._first_message(message)
            if message.message_type == MessageType.HELLO:
                return
        handler = self._by_type.get(message.message_type)
        if handler is None:
            raise AppProtocolError(
                f"the app sent a message of type {message.message_type}, which is not for apps to send"
            )
        handler(message)

    def _first_message(self, message: Message) -> None:
        session = self._state.session
        session.note_first_message(message)
        self._check_extensions()
        self._components.admission.permissions.app_connected(
            accepts_verdicts=MessageType.VERDICTS in session.extensions,
            describes=MessageType.APP_DESCRIPTION in session.extensions,
        )
        if message.message_type == MessageType.HELLO and session.phase is Phase.FIRST_START:
            self._components.lifecycle.send_introduction()

    def _base_app_began(self) -> None:
        """Note a first message that is not a Hello: the app uses the base protocol."""
        if not self._state.session.has_sent:
            self._state.session.note_first_message(None)
            self._components.admission.permissions.app_connected(accepts_verdicts=False)
            self._check_extensions()

    def _check_extensions(self) -> None:
        """Check that the app asks for the same extensions as at its first start, if they changed the log's records."""
        state = self._state
        if not state.ready:
            return
        logged = LOGGED_EXTENSIONS & (state.session.logged_extensions or frozenset())
        asked = LOGGED_EXTENSIONS & state.session.extensions
        if logged != asked - (frozenset({MessageType.INSTANCE_NAME}) - logged):  # an older log can lack the name
            raise AppProtocolError(
                f"the log of {state.name!r} was begun by an app with the extensions {sorted(map(int, logged))}, "
                f"this one asks for {sorted(map(int, asked))}: an instance keeps the kind of app that it was begun with"
            )

    # --- calls and impulses ------------------------------------------------------------------------------------------

    def _calls(self, message: Message) -> None:
        impulses = self._impulses
        for calls in read_calls(self._state.session, self._state.name, message):
            if not calls.impulses:
                self._peers.outbound.append(calls.destination, calls.count, calls.payload)
            elif self._impulses_wait or impulses.held_bytes:
                impulses.hold(calls)
            else:
                impulses.log_calls(calls)

    def admit_impulses(self) -> None:
        """Log the held impulses, unless they must still wait."""
        if not self._impulses_wait:
            self._impulses.log_held()

    @property
    def _impulses_wait(self) -> bool:
        """True if impulses must wait for room in the log, or for the upgrade to be durable."""
        return bool(self._state.log_capacity.full_reason) or self._state.session.phase not in SENDS_IMPULSES

    def _attach(self, message: Message) -> None:
        destination = decode_attach_to(message.data)
        if destination != self._state.name:
            self._state.session.attached.add(destination)
            if destination != CLIENTS:
                self._state.effects.append(OpenPeer(destination))

    def _barrier(self, message: Message) -> None:
        self._peers.outbound.add_barrier(decode_attach_to(message.data))

    def _description(self, message: Message) -> None:
        description = self._state.session.description = decode_app_description(message.data)
        self._components.call_failures.methods = description.methods
        self._components.clients.describe_methods(description)
        self._components.admission.permissions.describe(description)
        self._peers.inbound.answer_parked()

    def _initial_message(self, message: Message) -> None:
        session = self._state.session
        if session.phase is not Phase.FIRST_START or session.initial_message is not None:
            raise AppProtocolError("an InitialMessage may come once, at the first start, before the checkpoint")
        session.initial_message = message.data

    def _checkpoint_wanted(self, message: Message) -> None:
        self._state.checkpoints.is_requested = True

    def refuse(self, error: RemoteProtocolError) -> None:
        """Close the connection of an app that broke the protocol; its successor recovers."""
        state = self._state
        state.session.refused = True
        state.report(AppBrokeProtocol(str(error)))
        state.outbox.send_text(MessageType.REFUSAL, str(error))
        state.effects.append(CloseApp())
