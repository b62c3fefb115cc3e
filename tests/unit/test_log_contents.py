"""The messages inside a record, counted as apps count them."""

from __future__ import annotations

import pytest

from immortal.coordinator.log.record_contents import (
    NoSuchMessageError,
    batches,
    message_at,
    record_of,
    with_first_messages,
)
from immortal.protocol.batch import encode_batch, encode_replayable_batch
from immortal.protocol.errors import RemoteProtocolError
from immortal.protocol.extensions import encode_record_time
from immortal.protocol.messages import MessageType, encode_incoming_rpc, encode_message
from immortal.protocol.readers import Record
from immortal.protocol.record import encode_record, verify_record


def rpc(number: int, rpc_type: int = 1) -> bytes:
    return encode_incoming_rpc(number, rpc_type, b"x" * number)


def batch(*messages: bytes) -> bytes:
    payload = b"".join(messages)
    return encode_batch(payload, len(messages)) + payload


MESSAGES = [rpc(1), rpc(2), rpc(3), rpc(4), rpc(5, 2), rpc(6), rpc(7)]
TIME = encode_record_time(5)
CONTENT = (
    TIME
    + batch(*MESSAGES[:3])
    + batch(MESSAGES[3])
    + encode_replayable_batch(b"".join(MESSAGES[4:6]), 2, 1)
    + batch(MESSAGES[6])
)


def record(content: bytes = CONTENT) -> Record:
    return record_of(encode_record(7, 12, content) + b"a trailer")


def messages_of(value: bytes) -> list[bytes]:
    verify_record(value)
    content = record_of(value).content
    count = sum(batch.count for batch in batches(content))
    return [message for index in range(count) if (message := message_at(content, index)) is not None]


def test_batches_are_those_of_the_trailer() -> None:
    assert [(found.count, found.payload) for found in batches(CONTENT)] == [
        (3, b"".join(MESSAGES[:3])),
        (1, MESSAGES[3]),
        (2, b"".join(MESSAGES[4:6])),
        (1, MESSAGES[6]),
    ]


def test_what_stands_in_front_of_the_initial_message_is_not_counted() -> None:
    initial = encode_message(MessageType.INITIAL_MESSAGE, rpc(3))
    front = TIME + encode_message(MessageType.INSTANCE_NAME, b"counter")
    assert message_at(front + initial, 0) == rpc(3)
    assert with_first_messages(record(front + initial), 0) == encode_record(7, 12, front)


def test_each_message_is_found_by_its_number() -> None:
    assert [message_at(CONTENT, index) for index in range(7)] == MESSAGES
    assert message_at(CONTENT, 7) is None


@pytest.mark.parametrize("count", range(8))
def test_a_record_can_be_cut_behind_each_of_its_messages(count: int) -> None:
    value = with_first_messages(record(), count)
    assert messages_of(value) == MESSAGES[:count]
    assert record_of(value).content.startswith(TIME)
    header = verify_record(value)
    assert (header.committer_id, header.sequence_id, header.size_bytes) == (7, 12, len(value))


def test_a_whole_record_stays_as_it_is() -> None:
    assert with_first_messages(record(), 7) == encode_record(7, 12, CONTENT)


def test_a_cut_batch_gives_its_own_counts() -> None:
    value = with_first_messages(record(), 5)
    found = list(batches(record_of(value).content))
    assert found[-1].message_type == MessageType.COUNT_REPLAYABLE_RPC_BATCH
    assert value.endswith(encode_replayable_batch(MESSAGES[4], 1, 0))


def test_a_record_with_fewer_messages_says_how_many_it_has() -> None:
    with pytest.raises(NoSuchMessageError, match="record 12 has no message 7: its 7 messages are counted from 0 to 6"):
        with_first_messages(record(), 8)
    with pytest.raises(NoSuchMessageError, match="record 12 has no message 0: it holds none"):
        with_first_messages(record(TIME), 1)


def test_the_initial_message_is_one_and_may_be_any_bytes() -> None:
    content = TIME + encode_message(MessageType.INITIAL_MESSAGE, b"anything")
    assert message_at(content, 0) == b"anything"
    assert with_first_messages(record(content), 1) == encode_record(7, 12, content)


def test_what_is_never_logged_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="type 2, which is never logged"):
        list(batches(encode_message(MessageType.TAKE_CHECKPOINT)))
