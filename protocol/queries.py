"""Queries that are not logged: what the coordinator asks of its app, between two records, and what the app says.

`docs/WIRE.md`, part 7; as clients ask and hear it, part 9.
"""

from __future__ import annotations

import msgspec

from immortal.protocol import decoding
from immortal.protocol.client_frames import PAYLOAD_SIZE_BYTES_MAX
from immortal.protocol.errors import RemoteProtocolError
from immortal.protocol.messages import MessageType, encode_message

ANSWER_SIZE_BYTES_MAX = PAYLOAD_SIZE_BYTES_MAX
"""Largest value of an answer. The coordinator holds it in memory, and no window bounds the number of answers."""


class QueryQuestion(msgspec.Struct, array_like=True, frozen=True):
    """``ticket``: the coordinator's, for the answer. ``arguments``: a MessagePack array, the method's own.

    ``time_ns``: that of the instance, ns since the Unix epoch.
    """

    ticket: int
    method_id: int
    arguments: bytes
    time_ns: int


class QueryAnswer(msgspec.Struct, array_like=True, frozen=True):
    """Answer to a query. ``kind`` (RETURNED or RAISED) and ``value`` are as in `client_frames.Reply`.

    ``changed``: the query has changed the state, which is made anew from the log: it is better not asked again soon.
    """

    ticket: int
    kind: int
    value: bytes = b""
    changed: bool = False


_decode_question = decoding.Decoder(QueryQuestion).decode
_decode_answer = decoding.Decoder(QueryAnswer).decode


def encode_query(question: QueryQuestion) -> bytes:
    """A whole QueryAsked message."""
    return encode_message(MessageType.QUERY_ASKED, msgspec.msgpack.encode(question))


def decode_query(data: bytes) -> QueryQuestion:
    """Raises RemoteProtocolError."""
    try:
        return _decode_question(data)
    except decoding.DecodeError as error:
        raise RemoteProtocolError(f"a QueryAsked can't be read: {error}") from None


def encode_query_answer(answer: QueryAnswer) -> bytes:
    """A whole QueryAnswered message. Raises LocalProtocolError for one that is too large."""
    return encode_message(MessageType.QUERY_ANSWERED, msgspec.msgpack.encode(answer))


def decode_query_answer(data: bytes) -> QueryAnswer:
    """Raises RemoteProtocolError."""
    try:
        answer = _decode_answer(data)
    except decoding.DecodeError as error:
        raise RemoteProtocolError(f"a QueryAnswered can't be read: {error}") from None
    if len(answer.value) > ANSWER_SIZE_BYTES_MAX:
        raise RemoteProtocolError(
            f"a QueryAnswered holds {len(answer.value)} bytes, at most {ANSWER_SIZE_BYTES_MAX} are allowed"
        )
    return answer
