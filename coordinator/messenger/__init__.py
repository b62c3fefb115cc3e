"""Messages between processes over ZeroMQ: sent until acknowledged, given to their server loop once.

:class:`Messenger` owns every socket. A receiver's :meth:`Received.reply` is the acknowledgement; nothing
ever reports "sent".
"""

from coordinator.messenger.errors import (
    AlreadyRepliedError,
    EndpointError,
    EndpointInUseError,
    MessageTooLargeError,
    MessengerClosedError,
    MessengerError,
    PendingFullError,
)
from coordinator.messenger.listener import ClientLoop, ClientRoute, Received, ServerLoop
from coordinator.messenger.messenger import Messenger
from coordinator.messenger.outbox import ReplyCallback, RetryPolicy
from coordinator.messenger.room import PendingLimits
from coordinator.messenger.security import KeyPair, Role, Security
from coordinator.messenger.sockets import Counters
from coordinator.messenger.turns import Answer, AnswerCallback, Outcome

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
