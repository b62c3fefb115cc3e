"""What the app says: one table of its messages, each with the part of the machine that it is for."""

from __future__ import annotations

from collections.abc import Callable

from coordinator.core import events as ev
from coordinator.core.app_messages import CALLS, late_hello, read_calls, refuse_too_large
from coordinator.core.app_outbox import AppOutbox
from coordinator.core.checkpoint_taking import CheckpointTaking
from coordinator.core.clients import Clients
from coordinator.core.dead_letters import Operator
from coordinator.core.effects import CloseApp, OpenPeer
from coordinator.core.errors import AppProtocolError
from coordinator.core.failing import Failing
from coordinator.core.handlers import Handlers
from coordinator.core.impulses import Impulses
from coordinator.core.lifecycle import Lifecycle
from coordinator.core.log_room import LogRoom
from coordinator.core.notices import AppBrokeProtocol
from coordinator.core.queries import Queries
from coordinator.core.session import SENDS_IMPULSES, AppSession, Phase
from coordinator.core.stopping import Stopping
from coordinator.core.streams.intake import Intake
from coordinator.core.streams.peers import Peers
from coordinator.core.turn import Turn
from coordinator.core.upgrades import Upgrades
from protocol.client import CLIENTS
from protocol.errors import RemoteProtocolError
from protocol.extensions import REPORTS, decode_app_description
from protocol.messages import MessageType, decode_attach_to
from protocol.readers import BlobStart, Message, TooLargeRpc

LOGGED_EXTENSIONS = frozenset({MessageType.RECORD_TIME, MessageType.INSTANCE_NAME})
"""Extensions that change what the log holds: an app must ask for the same ones all its life."""


class AppInbox:
    """``name``: of the instance."""

    def __init__(
        self,
        name: str,
        turn: Turn,
        outbox: AppOutbox,
        session: AppSession,
        peers: Peers,
        clients: Clients,
        impulses: Impulses,
        log_room: LogRoom,
        intake: Intake,
        failing: Failing,
        operator: Operator,
        handlers: Handlers,
        queries: Queries,
        lifecycle: Lifecycle,
        taking: CheckpointTaking,
        upgrades: Upgrades,
        stopping: Stopping,
    ) -> None:
        self._name = name
        self._turn = turn
        self._outbox = outbox
        self._session = session
        self._peers = peers
        self._clients = clients
        self._impulses = impulses
        self._log_room = log_room
        self._permissions = intake.permissions
        self._failing = failing
        self._operator = operator
        self._lifecycle = lifecycle
        self._taking = taking
        self._stopping = stopping
        self._handlers: dict[int, Callable[[Message], None]] = {
            **dict.fromkeys(CALLS, self._calls),
            **dict.fromkeys(REPORTS, self._report_of_app),
            MessageType.HELLO: late_hello,
            MessageType.ATTACH_TO: self._attach,
            MessageType.APP_DESCRIPTION: self._description,
            MessageType.INITIAL_MESSAGE: self._initial_message,
            MessageType.TAKE_CHECKPOINT: self._checkpoint_wanted,
            MessageType.SNAPSHOT_BEGIN: taking.snapshot_began,
            MessageType.SNAPSHOT_CHUNK: taking.snapshot_chunk,
            MessageType.SNAPSHOT_END: taking.snapshot_ended,
            MessageType.UPGRADE_FAILED: upgrades.failed,
            MessageType.RETRY_REFUSED: self._retry_refused,
            MessageType.HANDLERS: handlers.told,
            MessageType.QUERY_ANSWERED: queries.told,
        }

    def received(self, event: ev.AppData) -> None:
        """Bytes of the app. Raises RemoteProtocolError."""
        session = self._session
        if session.phase is Phase.WAITING or session.refused:
            return
        reader = session.reader
        reader.receive_data(event.data)
        if not session.is_loaded:
            return  # whether it is the app that this log is of is not known yet
        while (message := reader.next_event()) is not None:
            if isinstance(message, Message):
                self._message(message)
            elif isinstance(message, BlobStart):
                self._heard_base_app()
                self._taking.blob_began()
            elif isinstance(message, TooLargeRpc):
                self._heard_base_app()
                self._turn.report(refuse_too_large(session, message))
            else:
                self._taking.blob_came(message)

    def _message(self, message: Message) -> None:
        if not self._session.heard:
            self._hear(message)
            if message.message_type == MessageType.HELLO:
                return
        handler = self._handlers.get(message.message_type)
        if handler is None:
            raise AppProtocolError(
                f"the app sent a message of type {message.message_type}, which is not for apps to send"
            )
        handler(message)

    # --- the first message -------------------------------------------------------------------------------------------

    def _hear(self, message: Message) -> None:
        session = self._session
        session.hear(message)
        self._check_extensions()
        self._permissions.app_came(takes_verdicts=MessageType.VERDICTS in session.extensions)
        if message.message_type == MessageType.HELLO and session.phase is Phase.FIRST_START:
            self._lifecycle.introduce()

    def _heard_base_app(self) -> None:
        """It begins with something that is no Hello."""
        if not self._session.heard:
            self._session.hear(None)
            self._permissions.app_came(takes_verdicts=False)
            self._check_extensions()

    def _check_extensions(self) -> None:
        """The log's records have, or have not, what the app asked for at its first start."""
        if not self._peers.ready:
            return
        logged = LOGGED_EXTENSIONS & (self._session.logged_extensions or frozenset())
        asked = LOGGED_EXTENSIONS & self._session.extensions
        if logged != asked - (frozenset({MessageType.INSTANCE_NAME}) - logged):  # an older log may lack the name
            raise AppProtocolError(
                f"the log of {self._name!r} was begun by an app with the extensions {sorted(map(int, logged))}, "
                f"this one asks for {sorted(map(int, asked))}: an instance keeps the kind of app that it was begun with"
            )

    # --- calls and impulses ------------------------------------------------------------------------------------------

    def _calls(self, message: Message) -> None:
        impulses = self._impulses
        for calls in read_calls(self._session, self._name, message):
            if not calls.impulses:
                self._peers.append(calls.destination, calls.count, calls.payload)
            elif self._impulses_wait or impulses.held_bytes:
                impulses.hold(calls)
            else:
                impulses.take(calls)

    def let_impulses_in(self) -> None:
        """Those that are held back, if they need not wait any more."""
        if not self._impulses_wait:
            self._impulses.let_in()

    @property
    def _impulses_wait(self) -> bool:
        """For room in the log; or until the upgrade that the app takes for done is."""
        return bool(self._log_room.full) or self._session.phase not in SENDS_IMPULSES

    def _attach(self, message: Message) -> None:
        destination = decode_attach_to(message.data)
        if destination != self._name:
            self._session.attached.add(destination)
            if destination != CLIENTS:
                self._turn.effects.append(OpenPeer(destination))

    # --- what it says of itself --------------------------------------------------------------------------------------

    def _description(self, message: Message) -> None:
        description = self._session.description = decode_app_description(message.data)
        self._failing.methods = description.methods
        self._clients.describe_methods(description)
        self._permissions.describe(description)
        if self._peers.ready:
            self._peers.answer_parked(self._turn.now_ns)

    def _initial_message(self, message: Message) -> None:
        session = self._session
        if session.phase is not Phase.FIRST_START or session.initial_message is not None:
            raise AppProtocolError("an InitialMessage may come once, at the first start, before the checkpoint")
        session.initial_message = message.data

    def _checkpoint_wanted(self, message: Message) -> None:
        self._taking.checkpoints.wanted = True

    def _retry_refused(self, message: Message) -> None:
        self._operator.retry_refused()

    def _report_of_app(self, message: Message) -> None:
        self._failing.received(message, self._turn.now_ns, stopping=self._stopping.asked)

    # --- it breaks the protocol --------------------------------------------------------------------------------------

    def refuse(self, error: RemoteProtocolError) -> None:
        """Its connection ends; the next one recovers."""
        self._session.refused = True
        self._turn.report(AppBrokeProtocol(str(error)))
        self._outbox.say(MessageType.REFUSAL, str(error))
        self._turn.effects.append(CloseApp())
