"""Messages between processes over ZeroMQ: sent until acknowledged, given to their server loop once, in order.

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
)
from coordinator.messenger.listener import ClientLoop, ClientRoute, Received, ServerLoop
from coordinator.messenger.messenger import Messenger
from coordinator.messenger.outbox import ReplyCallback, RetryPolicy
from coordinator.messenger.security import KeyPair, Role, Security
from coordinator.messenger.sockets import Counters

__all__ = [
    "AlreadyRepliedError",
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
    "Received",
    "ReplyCallback",
    "RetryPolicy",
    "Role",
    "Security",
    "ServerLoop",
]
