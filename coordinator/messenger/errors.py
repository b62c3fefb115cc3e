"""Errors of the messenger, by whose fault they are."""

from __future__ import annotations

from immortal.protocol.errors import ImmortalError, LimitExceededError, RemoteProtocolError


class MessengerError(ImmortalError):
    """The messenger can't do what it was asked to."""


class EndpointError(MessengerError):
    """An endpoint is not one that can be listened at, or sent to."""


class EndpointInUseError(EndpointError):
    """An endpoint is in use: another socket already listens there."""

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
    """A send was refused, since the limit on what is pending for its destination is reached."""


class MessageTooLargeError(LimitExceededError):
    """A message to be sent is larger than receivers accept."""


class EnvelopeError(RemoteProtocolError):
    """The first part of what came in is not an envelope of this version."""


class UnknownEnvelopeError(EnvelopeError):
    """An envelope has a version or kind that this build does not know; its sender is told, once."""
