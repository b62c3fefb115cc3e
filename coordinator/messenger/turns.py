"""What a conversation is made of: messages for callbacks, and what their own callbacks get.

One side sends, the other replies. A reply may carry the ID of a callback: the next message to that receiver can address
it, once. So either side goes on where it was, for as many turns as the two like.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import NamedTuple


class Outcome(Enum):
    """What became of a message of a conversation."""

    REPLIED = 1
    REPLY_EXPIRED = 2  # its receiver replied, and keeps the reply no longer
    CALLBACK_UNKNOWN = 3  # the callback that it addressed is not known (any more): nobody was given it


class Answer(NamedTuple):
    """What the callback of a message of a conversation gets: the parts of the reply, none unless REPLIED.

    ``callback_id``: the receiver's callback for one more message, 0 (NOOP) if the conversation is over.
    """

    parts: list[bytes]
    callback_id: int
    outcome: Outcome


AnswerCallback = Callable[[Answer], None]


class Turn(NamedTuple):
    """What a message of a conversation has beyond another one."""

    destination_callback_id: int  # NOOP: none
    callback: AnswerCallback | None
