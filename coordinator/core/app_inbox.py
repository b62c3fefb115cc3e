"""What the app says: one table of its messages, each with the part of the machine that it is for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from immortal.coordinator.core import events as ev
from immortal.coordinator.core.app_messages import CALLS, late_hello, read_calls, refuse_too_large
from immortal.coordinator.core.app_outbox import AppOutbox
from immortal.coordinator.core.checkpoint_taking import CheckpointTaking
from immortal.coordinator.core.clients import Clients
from immortal.coordinator.core.dead_letters import Operator
from immortal.coordinator.core.effects import CloseApp, OpenPeer
from immortal.coordinator.core.errors import AppProtocolError
from immortal.coordinator.core.failing import Failing
from immortal.coordinator.core.handlers import Handlers
from immortal.coordinator.core.impulses import Impulses
from immortal.coordinator.core.lifecycle import Lifecycle
from immortal.coordinator.core.log_room import LogRoom
from immortal.coordinator.core.notices import AppBrokeProtocol
from immortal.coordinator.core.queries import Queries
from immortal.coordinator.core.session import SENDS_IMPULSES, AppSession, Phase
from immortal.coordinator.core.stopping import Stopping
from immortal.coordinator.core.streams.intake import Intake
from immortal.coordinator.core.streams.peers import Peers
from immortal.coordinator.core.turn import Turn
from immortal.coordinator.core.upgrades import Upgrades
from immortal.protocol.client import CLIENTS
from immortal.protocol.errors import RemoteProtocolError
from immortal.protocol.extensions import REPORTS, decode_app_description
from immortal.protocol.messages import MessageType, decode_attach_to
from immortal.protocol.readers import BlobStart, Message, TooLargeRpc

LOGGED_EXTENSIONS = frozenset({MessageType.RECORD_TIME, MessageType.INSTANCE_NAME})
"""Extensions that change what the log holds: an app must ask for the same ones all its life."""


@dataclass(slots=True, eq=False, repr=False)
class AppInbox:
    """``name``: of the instance."""

    name: str
    turn: Turn
    outbox: AppOutbox
    session: AppSession
    peers: Peers
    clients: Clients
    impulses: Impulses
    log_room: LogRoom
    intake: Intake
    failing: Failing
    operator: Operator
    handlers: Handlers
    queries: Queries
    lifecycle: Lifecycle
    taking: CheckpointTaking
    upgrades: Upgrades
    stopping: Stopping
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
            MessageType.SNAPSHOT_BEGIN: self.taking.snapshot_began,
            MessageType.SNAPSHOT_CHUNK: self.taking.snapshot_chunk,
            MessageType.SNAPSHOT_END: self.taking.snapshot_ended,
            MessageType.CHECKPOINT_FAILED: self.taking.failed,
            MessageType.TAKEN_BACK: self.taking.taken_back,
            MessageType.UPGRADE_FAILED: self.upgrades.failed,
            MessageType.RETRY_REFUSED: self._retry_refused,
            MessageType.HANDLERS: self.handlers.told,
            MessageType.QUERY_ANSWERED: self.queries.told,
        }

    def received(self, event: ev.AppData) -> None:
        """Bytes of the app. Raises RemoteProtocolError."""
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
                self._heard_base_app()
                self.taking.blob_began()
            elif isinstance(message, TooLargeRpc):
                self._heard_base_app()
                self.turn.report(refuse_too_large(session, message))
            else:
                self.taking.blob_came(message)

    def _message(self, message: Message) -> None:
        if not self.session.heard:
            self._hear(message)
            if message.message_type == MessageType.HELLO:
                return
        handler = self._by_type.get(message.message_type)
        if handler is None:
            raise AppProtocolError(
                f"the app sent a message of type {message.message_type}, which is not for apps to send"
            )
        handler(message)

    # --- the first message -------------------------------------------------------------------------------------------

    def _hear(self, message: Message) -> None:
        session = self.session
        session.hear(message)
        self._check_extensions()
        self.intake.permissions.app_came(
            takes_verdicts=MessageType.VERDICTS in session.extensions,
            describes=MessageType.APP_DESCRIPTION in session.extensions,
        )
        if message.message_type == MessageType.HELLO and session.phase is Phase.FIRST_START:
            self.lifecycle.introduce()

    def _heard_base_app(self) -> None:
        """It begins with something that is no Hello."""
        if not self.session.heard:
            self.session.hear(None)
            self.intake.permissions.app_came(takes_verdicts=False)
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

    def let_impulses_in(self) -> None:
        """Those that are held back, if they need not wait any more."""
        if not self._impulses_wait:
            self.impulses.let_in()

    @property
    def _impulses_wait(self) -> bool:
        """For room in the log; or until the upgrade that the app takes for done is."""
        return bool(self.log_room.full) or self.session.phase not in SENDS_IMPULSES

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
        self.failing.methods = description.methods
        self.clients.describe_methods(description)
        self.intake.permissions.describe(description)
        if self.peers.ready:
            self.peers.answer_parked(self.turn.now_ns)

    def _initial_message(self, message: Message) -> None:
        session = self.session
        if session.phase is not Phase.FIRST_START or session.initial_message is not None:
            raise AppProtocolError("an InitialMessage may come once, at the first start, before the checkpoint")
        session.initial_message = message.data

    def _checkpoint_wanted(self, message: Message) -> None:
        self.taking.checkpoints.wanted = True

    def _retry_refused(self, message: Message) -> None:
        self.operator.retry_refused()

    def _report_of_app(self, message: Message) -> None:
        self.failing.received(message, self.turn.now_ns, stopping=self.stopping.asked)

    # --- it breaks the protocol --------------------------------------------------------------------------------------

    def refuse(self, error: RemoteProtocolError) -> None:
        """Its connection ends; the next one recovers."""
        self.session.refused = True
        self.turn.report(AppBrokeProtocol(str(error)))
        self.outbox.say(MessageType.REFUSAL, str(error))
        self.turn.effects.append(CloseApp())
