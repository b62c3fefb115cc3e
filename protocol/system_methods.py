"""Messages and reserved methods about handlers: an operator's questions and orders, ordered multicast, handles.

The app answers a question out of its memory; it is not logged. An order is input: an impulse of the instance to
itself, with ORDER_METHOD_ID, so that each replay executes it at the same place. `docs/WIRE.md`, part 7.
"""

from __future__ import annotations

from typing import Any

import msgspec

from immortal.protocol import decoding
from immortal.protocol.messages import MessageType, RpcType, decode_incoming_rpc, encode_incoming_rpc, message_of

CLOCK_METHOD_ID = -2  # the impulse with the time
EFFECT_METHOD_ID = -3  # the impulse with the result or the error of an effect
ORDER_METHOD_ID = -4  # the impulse with an operator's order
CANCEL_CALL_METHOD_ID = 1 << 20
"""Call that cancels an earlier call of the same caller: [number of that call, reason]. The ID is one above the largest
of users, and not negative: an app that does not know the method refuses it like any unknown method."""
TIMES_TASK = (1 << 63) - 1
"""Task ID that no handler can have. A question for it asks how long handlers took: [method, ns] in "times"."""
OTHER_MESSAGES = "other"  # method name for answers, results of effects and the clock
HANDLERS_COUNT_MAX = 1000  # handlers in one answer, the oldest: some MiB, as arguments are shortened
REASON_CHARACTERS_MAX = 4096

NIL = msgspec.Raw(b"\xc0")


class HandlersQuestion(msgspec.Struct, array_like=True, frozen=True):
    """Question about handlers.

    ``ticket`` identifies the answer. ``task``: the handler to describe in full; 0: all handlers, HANDLERS_COUNT_MAX at
    most.

    With ``sequence_id``: asks for the outcome of the order in that message. With ``retries``: effects of ``task`` that
    wait for their next attempt must run at once. No log knows of attempts, so this is a question and no order.
    """

    ticket: int
    task: int = 0
    sequence_id: int = -1
    message_index: int = 0
    retries: bool = False


class HandlersAnswer(msgspec.Struct, array_like=True, frozen=True):
    """Answer to a HandlersQuestion. ``value``: plain values, for people and scripts."""

    ticket: int
    value: dict[str, Any]


class Order(msgspec.Struct, array_like=True, frozen=True):
    """Operator's order to the handler ``task``.

    ``text``: the reason of a "cancel" or "terminate", the event's name of a "signal", whose ``value`` is MessagePack.
    An "expel" has no handler (0): ``text`` is the member, ``value`` the name of its group. A "restart" begins the
    execution ``task`` again, even if it has ended: ``value`` is [method ID, arguments, journal entries] with the
    results of its first steps.
    """

    verb: str
    task: int
    text: str
    who: str = ""
    value: msgspec.Raw = NIL

    def in_words(self) -> str:
        return f"{self.verb} {self.text}" if not self.task else f"{self.verb} of the handler {self.task}: {self.text}"


encode_handlers_question, decode_handlers_question = message_of(
    MessageType.HANDLERS_ASKED, HandlersQuestion, "a HandlersAsked"
)
encode_handlers_answer, decode_handlers_answer = message_of(MessageType.HANDLERS, HandlersAnswer, "a Handlers")


def encode_order(order: Order) -> bytes:
    """Encode an order as a call, with its size in front, in the form of the log."""
    return encode_incoming_rpc(ORDER_METHOD_ID, RpcType.IMPULSE, msgspec.msgpack.encode(order))


# Ordered multicast: calls by which SDKs of senders and receivers agree on an order (`docs/explanation/ordering.md`).
#
# The method IDs are above those of users, and not negative: an app without them refuses them like any other unknown
# method. EXECUTED is a call of an app to itself.


ORDERED_METHOD_ID = (1 << 20) + 1  # calls that need an order: [method ID of all of them, ...]
ORDERING_METHOD_ID = (1 << 20) + 2  # every other message about them; it calls no method of the user
FENCING_METHOD_ID = (1 << 20) + 5  # expels a member from a group
FENCING_METHODS = frozenset({"group_change", "group_told"})
"""Handlers of groups. A caller that may call one of them may also expel, since each of them changes the group."""
EXECUTED_METHOD_ID = -5  # sent after released calls to oneself

_first_of = decoding.Decoder(list[msgspec.Raw]).decode
_number_of = decoding.Decoder(int).decode


def ordered_method(data: bytes, start: int, end: int) -> int:
    """Return the user's method ID in ``data[start:end]``, a call of ORDERED_METHOD_ID; -1 if it is malformed."""
    rpc = decode_incoming_rpc(data, start, end)
    try:
        return _number_of(_first_of(rpc.arguments)[0])
    except (decoding.DecodeError, IndexError):
        return -1


# Calls for handles (`docs/reference/nodes.md`). Their IDs are above those of users, like those of ordered multicast.


NODE_METHOD_ID = (1 << 20) + 4  # a call of a node: [sender, keys, method ID, arguments]
HANDLES_METHOD_ID = (1 << 20) + 3  # messages between owners and holders: [sender, message]
