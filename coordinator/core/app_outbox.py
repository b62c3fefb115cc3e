"""What goes to the app: logged bytes, and control records around them. All of it is counted as unsent."""

from __future__ import annotations

from collections.abc import Sequence

from immortal.coordinator.core.effects import SendToApp
from immortal.coordinator.core.session import AppSession, Phase
from immortal.coordinator.core.turn import Turn
from immortal.protocol.extensions import encode_impulses_accepted
from immortal.protocol.messages import MessageType, encode_message
from immortal.protocol.trailer import BatchSource


class AppOutbox:
    __slots__ = ("_session", "_turn")

    def __init__(self, session: AppSession, turn: Turn) -> None:
        self._session = session
        self._turn = turn

    def send(self, data: bytes | memoryview) -> None:
        self._session.unsent_bytes += len(data)
        self._turn.effects.append(SendToApp(data))

    def record(self, record: memoryview, batches: Sequence[BatchSource]) -> None:
        """A logged ``record``, whose trailer has ``batches``."""
        sources = self._session.sources_record(batches)
        if sources is not None:
            self._turn.effects.append(SendToApp(sources))
        self.send(record)

    def control(self, message_type: MessageType, message: bytes | None = None) -> None:
        """A control record: ``message``, whole, or one of that type without data."""
        self._turn.effects.append(SendToApp(self._session.control_record(message_type, message)))

    def say(self, message_type: MessageType, text: str) -> None:
        """In words, to an app that has asked for them."""
        if self._session.phase is Phase.RESTORING or not self._session.is_loaded:
            return  # the app would take it for a part of the blob; or for words of another instance
        if message_type in self._session.extensions:
            self.control(message_type, encode_message(message_type, text.encode()))

    def acceptances(self) -> None:
        """How many impulses are durable, once the app has the record behind which that is."""
        accepted = self._session.acceptance_to_send()
        if accepted is not None and MessageType.IMPULSES_ACCEPTED in self._session.extensions:
            self.control(MessageType.IMPULSES_ACCEPTED, encode_impulses_accepted(accepted))
