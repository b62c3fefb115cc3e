"""Messaging between processes over ZeroMQ: a message is sent until acknowledged, and delivered to a server loop once.

:class:`Messenger` owns every socket. :meth:`Received.reply` is the acknowledgement; nothing reports "sent".
"""

from immortal.coordinator.messenger.backpressure import PendingLimits
from immortal.coordinator.messenger.envelope import (
    AlreadyRepliedError,
    EndpointError,
    EndpointInUseError,
    MessageTooLargeError,
    MessengerClosedError,
    MessengerError,
    PendingFullError,
)
from immortal.coordinator.messenger.listener import ClientLoop, ClientRoute, Received, ServerLoop
from immortal.coordinator.messenger.messenger import Messenger
from immortal.coordinator.messenger.outbox import Answer, AnswerCallback, Outcome, ReplyCallback, RetryPolicy
from immortal.coordinator.messenger.security import KeyPair, Role, Security
from immortal.coordinator.messenger.sockets import Counters

__all__ = [
    "AlreadyRepliedError",
    "Answer",
    "AnswerCallback",
    "ClientLoop",
    "ClientRoute",
    "Counters",
    "EndpointError",
    "EndpointInUseError",
    "KeyPair",
    "MessageTooLargeError",
    "Messenger",
    "MessengerClosedError",
    "MessengerError",
    "Outcome",
    "PendingFullError",
    "PendingLimits",
    "Received",
    "ReplyCallback",
    "RetryPolicy",
    "Role",
    "Security",
    "ServerLoop",
]
