"""Messages and reserved methods about handlers: an operator's questions and orders, ordered multicast, handles.

A question is answered out of the app's memory, and is not logged. An order is input: an impulse of the instance to
itself, with ORDER_METHOD_ID, so that each replay obeys it at the same place. `docs/WIRE.md`, part 7.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from immortal.protocol import decoding
from immortal.protocol.messages import MessageType, RpcType, decode_incoming_rpc, encode_incoming_rpc, encode_message

CLOCK_METHOD_ID = -2  # the impulse with the time
EFFECT_METHOD_ID = -3  # the impulse with what an effect has returned or raised
ORDER_METHOD_ID = -4  # the impulse that brings an operator's order
CANCEL_CALL_METHOD_ID = 1 << 20
"""A call that cancels an earlier one of the same caller: [number of that, reason]. One above the largest of users, and
not negative: an app that does not know it refuses it like any unknown method."""
TIMES_TASK = (1 << 63) - 1
"""A question for this handler, which there can't be, asks how long handlers took: [method, ns] in "times"."""
OTHER_MESSAGES = "other"  # method name for answers, results of effects and the clock
HANDLERS_COUNT_MAX = 1000  # handlers in one answer, the oldest: some MiB, as arguments are shortened
REASON_CHARACTERS_MAX = 4096

Verb = Literal["cancel", "terminate", "signal", "expel", "restart"]
NIL = msgspec.Raw(b"\xc0")


class HandlersQuestion(msgspec.Struct, array_like=True, frozen=True):
    """Question about handlers.

    ``ticket`` identifies the answer. ``task``: the handler to describe in full; 0: all of them, HANDLERS_COUNT_MAX at
    most.

    With ``sequence_id``: what the order in that message has come to. With ``retries``: effects of ``task`` that wait
    for their next attempt are to be tried at once. No log knows of attempts, so this is a question and no order.
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

    ``text``: the reason of a "cancel" or "terminate", the name of the event of a "signal", whose ``value`` is
    MessagePack. An "expel" is to no handler, 0: ``text`` is the member, and ``value`` the name of its group. A
    "restart" begins the execution ``task``, which may have ended, again: ``value`` is [method ID, arguments, entries of
    a journal]: results of its first steps.
    """

    verb: str
    task: int
    text: str
    who: str = ""
    value: msgspec.Raw = NIL

    def in_words(self) -> str:
        return f"{self.verb} {self.text}" if not self.task else f"{self.verb} of the handler {self.task}: {self.text}"


_QUESTION = decoding.Decoder(HandlersQuestion)
_ANSWER = decoding.Decoder(HandlersAnswer)


def encode_handlers_question(question: HandlersQuestion) -> bytes:
    """Encode a question as a HandlersAsked message."""
    return encode_message(MessageType.HANDLERS_ASKED, msgspec.msgpack.encode(question))


def decode_handlers_question(data: bytes) -> HandlersQuestion:
    """Decode a question from a HandlersAsked message. Raises RemoteProtocolError."""
    return _QUESTION.decode_message(data, "a HandlersAsked")


def encode_handlers_answer(answer: HandlersAnswer) -> bytes:
    """Encode an answer as a Handlers message."""
    return encode_message(MessageType.HANDLERS, msgspec.msgpack.encode(answer))


def decode_handlers_answer(data: bytes) -> HandlersAnswer:
    """Decode an answer from a Handlers message. Raises RemoteProtocolError."""
    return _ANSWER.decode_message(data, "a Handlers")


def encode_order(order: Order) -> bytes:
    """Encode an order as a call, with its size in front, as the log holds it."""
    return encode_incoming_rpc(ORDER_METHOD_ID, RpcType.IMPULSE, msgspec.msgpack.encode(order))


# Ordered multicast: calls by which SDKs of senders and receivers agree on an order (`docs/explanation/ordering.md`).
#
# The method IDs are above those of users, and not negative: an app that does not know them refuses them like any other
# method. EXECUTED is a call of an app to itself.


ORDERED_METHOD_ID = (1 << 20) + 1  # calls that are to be ordered: [method ID of all of them, ...]
ORDERING_METHOD_ID = (1 << 20) + 2  # everything else that is said about them; it calls no method of the user's
FENCING_METHOD_ID = (1 << 20) + 5  # expels a member from a group
FENCING_METHODS = frozenset({"group_change", "group_told"})
"""Handlers of groups. A caller of any of them may also expel, since each of them changes the group."""
EXECUTED_METHOD_ID = -5  # sent behind released calls to oneself

_first_of = decoding.Decoder(list[msgspec.Raw]).decode
_number_of = decoding.Decoder(int).decode


def ordered_method(data: bytes, start: int, end: int) -> int:
    """Return the ID of the method that ``data[start:end]``, a call of ORDERED_METHOD_ID, is for; -1 if malformed."""
    rpc = decode_incoming_rpc(data, start, end)
    try:
        return _number_of(_first_of(rpc.arguments)[0])
    except (decoding.DecodeError, IndexError):
        return -1


# Calls for handles (`docs/reference/nodes.md`). Their IDs are above those of users, like those of ordered multicast.


NODE_METHOD_ID = (1 << 20) + 4  # a call of a node: [sender, keys, method ID, arguments]
HANDLES_METHOD_ID = (1 << 20) + 3  # messages between owners and holders: [sender, message]
