"""What can go wrong in the messenger, by whose fault it is."""

from __future__ import annotations

from immortal.protocol.errors import ImmortalError, LimitExceededError, RemoteProtocolError


class MessengerError(ImmortalError):
    """The messenger can't do what it was asked to."""


class EndpointError(MessengerError):
    """An endpoint is not one that can be listened at, or sent to."""


class EndpointInUseError(EndpointError):
    """Another socket already listens at the endpoint."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(
            f"{endpoint} is in use: another process, or another loop of this one, listens there; "
            f"stop it, or give another endpoint (tcp://127.0.0.1:* takes any free port)"
        )
        self.endpoint = endpoint


class MessengerClosedError(MessengerError):
    """The messenger was closed, or its thread has failed."""


class AlreadyRepliedError(MessengerError):
    """A message was replied to twice; its one reply is its acknowledgement."""


class PendingFullError(MessengerError):
    """As much is pending for a destination as may be: nothing was sent."""


class MessageTooLargeError(LimitExceededError):
    """A message to be sent is larger than receivers accept."""


class EnvelopeError(RemoteProtocolError):
    """The first part of what came in is not an envelope of this version."""


class UnknownEnvelopeError(EnvelopeError):
    """It is of another version, or of a kind that this build does not know: its sender is told, once."""
