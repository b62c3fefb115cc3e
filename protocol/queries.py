"""Messages of queries: a coordinator sends a query to its app between two records and does not log it.

`docs/WIRE.md`, part 7; part 9 for clients.
"""

from __future__ import annotations

import msgspec

from immortal.protocol.client_frames import PAYLOAD_SIZE_BYTES_MAX
from immortal.protocol.errors import RemoteProtocolError
from immortal.protocol.messages import MessageType, message_of

ANSWER_SIZE_BYTES_MAX = PAYLOAD_SIZE_BYTES_MAX
"""Size limit of an answer's value. The coordinator holds answers in memory, and no window bounds their number."""


class QueryQuestion(msgspec.Struct, array_like=True, frozen=True):
    """Query of a method. ``ticket`` identifies its answer. ``arguments``: a MessagePack array.

    ``time_ns``: the instance's time, ns since the Unix epoch.
    """

    ticket: int
    method_id: int
    arguments: bytes
    time_ns: int


class QueryAnswer(msgspec.Struct, array_like=True, frozen=True):
    """Answer to a query. ``kind`` (RETURNED or RAISED) and ``value`` are as in `client_frames.Reply`.

    ``changed``: the query changed the state, which is now rebuilt from the log: do not send the query again soon.
    """

    ticket: int
    kind: int
    value: bytes = b""
    changed: bool = False


encode_query, decode_query = message_of(MessageType.QUERY_ASKED, QueryQuestion, "a QueryAsked")
encode_query_answer, _decode_query_answer = message_of(MessageType.QUERY_ANSWERED, QueryAnswer, "a QueryAnswered")


def decode_query_answer(data: bytes) -> QueryAnswer:
    """Decode a QueryAnswered. Raises RemoteProtocolError."""
    answer = _decode_query_answer(data)
    if len(answer.value) > ANSWER_SIZE_BYTES_MAX:
        raise RemoteProtocolError(
            f"a QueryAnswered holds {len(answer.value)} bytes, at most {ANSWER_SIZE_BYTES_MAX} are allowed"
        )
    return answer
