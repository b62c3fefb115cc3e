"""Messages from the app: which are allowed when, checked and made uniform, and who handles them.

Calls come one by one, in base batches or in demultiplexed batches; they leave here as :class:`Calls`, all
to one destination and all impulses or none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NoReturn

from immortal.coordinator.core import events as ev
from immortal.coordinator.core.checkpoints.taking import CheckpointTaker
from immortal.coordinator.core.client.queries import Queries
from immortal.coordinator.core.client.requests import Clients
from immortal.coordinator.core.effects import CloseApp, OpenPeer
from immortal.coordinator.core.errors import AppProtocolError
from immortal.coordinator.core.failures.call_failure import CallFailures
from immortal.coordinator.core.failures.dead_letters import OperatorActions
from immortal.coordinator.core.input.admission import Admission
from immortal.coordinator.core.input.back_pressure import Impulses, LogCapacity
from immortal.coordinator.core.interfaces import ONESELF
from immortal.coordinator.core.life_cycle.pause_stop import Shutdown
from immortal.coordinator.core.life_cycle.recovery import Lifecycle, Upgrades
from immortal.coordinator.core.life_cycle.session import SENDS_CALLS, SENDS_IMPULSES, AppSession, Phase
from immortal.coordinator.core.life_cycle.waiting_handlers import WaitingHandlers
from immortal.coordinator.core.notices import AppBrokeProtocol, CallTooLarge
from immortal.coordinator.core.peers import Peers
from immortal.coordinator.core.state import AppOutbox, Turn
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

CALLS = frozenset({MessageType.RPC, MessageType.RPC_BATCH, MessageType.STREAM_BATCH, MessageType.IMPULSE_BATCH})
_DEMULTIPLEXED = frozenset({MessageType.STREAM_BATCH, MessageType.IMPULSE_BATCH})


@dataclass(slots=True, eq=False, repr=False)
class Calls:
    destination: str
    count: int
    payload: bytes
    impulses: bool


def late_hello(message: Message) -> NoReturn:
    """Refuse a Hello that is not the first message, which :meth:`AppSession.note_first_message` takes."""
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
    """An RPC was dropped. For an app that says a Hello it breaks the protocol: LimitExceededError.

    To end the connection would not help a client of the base protocol: its replay makes the same call again.
    """
    if session.hello is not None:
        raise LimitExceededError("an RPC", rpc.size_bytes, rpc.limit_bytes)
    destination, _ = decode_name(rpc.front, 0)
    most_mib = (rpc.limit_bytes - RPC_FRONT_SIZE_BYTES_MAX) >> 20
    return CallTooLarge(destination or "itself", rpc.size_bytes, most_mib)


def _base_calls(message: Message) -> Iterator[Calls]:
    """Yield the calls of an app that does not demultiplex; neighbours to one destination are joined."""
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


# Dispatch: one table of the app's messages, each with its handler.


LOGGED_EXTENSIONS = frozenset({MessageType.RECORD_TIME, MessageType.INSTANCE_NAME})
"""Extensions that change what the log holds: an app must ask for the same ones all its life."""


@dataclass(slots=True, eq=False, repr=False)
class AppInbox:
    """Dispatches the app's messages to the parts that handle them. ``name``: the instance."""

    name: str
    turn: Turn
    outbox: AppOutbox
    session: AppSession
    peers: Peers
    clients: Clients
    impulses: Impulses
    log_capacity: LogCapacity
    admission: Admission
    call_failures: CallFailures
    operator: OperatorActions
    waiting_handlers: WaitingHandlers
    queries: Queries
    lifecycle: Lifecycle
    checkpoint_taker: CheckpointTaker
    upgrades: Upgrades
    shutdown: Shutdown
    _by_type: dict[int, Callable[[Message], None]] = field(init=False)  # what takes which message

    def __post_init__(self) -> None:
        self._by_type = {
            **dict.fromkeys(CALLS, self._calls),
            **dict.fromkeys(REPORTS, self._report_of_app),
            MessageType.HELLO: late_hello,
            MessageType.ATTACH_TO: self._attach,
            MessageType.BARRIER: self._barrier,
            MessageType.APP_DESCRIPTION: self._description,
            MessageType.INITIAL_MESSAGE: self._initial_message,
            MessageType.TAKE_CHECKPOINT: self._checkpoint_wanted,
            MessageType.SNAPSHOT_BEGIN: self.checkpoint_taker.snapshot_began,
            MessageType.SNAPSHOT_CHUNK: self.checkpoint_taker.snapshot_chunk,
            MessageType.SNAPSHOT_END: self.checkpoint_taker.snapshot_ended,
            MessageType.CHECKPOINT_FAILED: self.checkpoint_taker.failed,
            MessageType.TAKEN_BACK: self.checkpoint_taker.taken_back,
            MessageType.UPGRADE_FAILED: self.upgrades.failed,
            MessageType.RETRY_REFUSED: self._retry_refused,
            MessageType.HANDLERS: self.waiting_handlers.answered,
            MessageType.QUERY_ANSWERED: self.queries.answered,
        }

    def received(self, event: ev.AppData) -> None:
        """Handle bytes from the app. Raises RemoteProtocolError."""
        session = self.session
        if session.phase is Phase.WAITING or session.refused:
            return
        reader = session.reader
        reader.receive_data(event.data)
        if not session.is_loaded:
            return  # whether it is the app that this log is of is not known yet
        while not session.refused and (message := reader.next_event()) is not None:
            if isinstance(message, Message):
                self._message(message)
            elif isinstance(message, BlobStart):
                self._base_app_began()
                self.checkpoint_taker.blob_began()
            elif isinstance(message, TooLargeRpc):
                self._base_app_began()
                self.turn.report(refuse_too_large(session, message))
            else:
                self.checkpoint_taker.blob_received(message)

    def _message(self, message: Message) -> None:
        if not self.session.has_spoken:
            self._first_message(message)
            if message.message_type == MessageType.HELLO:
                return
        handler = self._by_type.get(message.message_type)
        if handler is None:
            raise AppProtocolError(
                f"the app sent a message of type {message.message_type}, which is not for apps to send"
            )
        handler(message)

    # --- the first message -------------------------------------------------------------------------------------------

    def _first_message(self, message: Message) -> None:
        session = self.session
        session.note_first_message(message)
        self._check_extensions()
        self.admission.permissions.app_came(
            takes_verdicts=MessageType.VERDICTS in session.extensions,
            describes=MessageType.APP_DESCRIPTION in session.extensions,
        )
        if message.message_type == MessageType.HELLO and session.phase is Phase.FIRST_START:
            self.lifecycle.send_introduction()

    def _base_app_began(self) -> None:
        """Note a first message that is no Hello: an app of the base protocol."""
        if not self.session.has_spoken:
            self.session.note_first_message(None)
            self.admission.permissions.app_came(takes_verdicts=False)
            self._check_extensions()

    def _check_extensions(self) -> None:
        """The log's records have, or have not, what the app asked for at its first start."""
        if not self.peers.ready:
            return
        logged = LOGGED_EXTENSIONS & (self.session.logged_extensions or frozenset())
        asked = LOGGED_EXTENSIONS & self.session.extensions
        if logged != asked - (frozenset({MessageType.INSTANCE_NAME}) - logged):  # an older log may lack the name
            raise AppProtocolError(
                f"the log of {self.name!r} was begun by an app with the extensions {sorted(map(int, logged))}, "
                f"this one asks for {sorted(map(int, asked))}: an instance keeps the kind of app that it was begun with"
            )

    # --- calls and impulses ------------------------------------------------------------------------------------------

    def _calls(self, message: Message) -> None:
        impulses = self.impulses
        for calls in read_calls(self.session, self.name, message):
            if not calls.impulses:
                self.peers.append(calls.destination, calls.count, calls.payload)
            elif self._impulses_wait or impulses.held_bytes:
                impulses.hold(calls)
            else:
                impulses.take(calls)

    def admit_impulses(self) -> None:
        """Take the impulses that were held back, unless they must still wait."""
        if not self._impulses_wait:
            self.impulses.take_held()

    @property
    def _impulses_wait(self) -> bool:
        """Impulses must wait for room in the log, or for the upgrade to be durable."""
        return bool(self.log_capacity.full) or self.session.phase not in SENDS_IMPULSES

    def _attach(self, message: Message) -> None:
        destination = decode_attach_to(message.data)
        if destination != self.name:
            self.session.attached.add(destination)
            if destination != CLIENTS:
                self.turn.effects.append(OpenPeer(destination))

    def _barrier(self, message: Message) -> None:
        self.peers.put_barrier(decode_attach_to(message.data), self.turn.now_ns)

    # --- what it says of itself --------------------------------------------------------------------------------------

    def _description(self, message: Message) -> None:
        description = self.session.description = decode_app_description(message.data)
        self.call_failures.methods = description.methods
        self.clients.describe_methods(description)
        self.admission.permissions.describe(description)
        if self.peers.ready:
            self.peers.answer_parked(self.turn.now_ns)

    def _initial_message(self, message: Message) -> None:
        session = self.session
        if session.phase is not Phase.FIRST_START or session.initial_message is not None:
            raise AppProtocolError("an InitialMessage may come once, at the first start, before the checkpoint")
        session.initial_message = message.data

    def _checkpoint_wanted(self, message: Message) -> None:
        self.checkpoint_taker.checkpoints.wanted = True

    def _retry_refused(self, message: Message) -> None:
        self.operator.retry_refused()

    def _report_of_app(self, message: Message) -> None:
        self.call_failures.app_reported(message, self.turn.now_ns, stopping=self.shutdown.is_requested)

    # --- it breaks the protocol --------------------------------------------------------------------------------------

    def refuse(self, error: RemoteProtocolError) -> None:
        """End the connection of an app that broke the protocol; its successor recovers."""
        self.session.refused = True
        self.turn.report(AppBrokeProtocol(str(error)))
        self.outbox.send_text(MessageType.REFUSAL, str(error))
        self.turn.effects.append(CloseApp())
