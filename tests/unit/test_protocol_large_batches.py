"""RPCBatches of any size: taken apart as they arrive. And single RPCs above the limit: passed over."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from immortal.protocol import readers
from immortal.protocol.batch import decode_batch
from immortal.protocol.errors import LimitExceededError, RemoteProtocolError
from immortal.protocol.limits import RPC_FRONT_SIZE_BYTES_MAX
from immortal.protocol.messages import MessageType, decode_messages, encode_message, encode_outgoing_rpc
from immortal.protocol.readers import Message, MessageReader, TooLargeRpc
from immortal.protocol.varint import encode_zigzag
from tests.helpers.effort import effort

CHECKPOINT_REQUESTED = encode_message(MessageType.TAKE_CHECKPOINT)
RPC_MAX = 2000


def rpc(number: int, size_bytes: int = 0) -> bytes:
    return encode_outgoing_rpc("b", 3, 1, number.to_bytes(4, "little") + bytes(size_bytes))


def batch(*messages: bytes, count: int | None = None) -> bytes:
    body = encode_zigzag(len(messages) if count is None else count) + b"".join(messages)
    return encode_zigzag(1 + len(body)) + bytes((MessageType.RPC_BATCH,)) + body


def events(reader: MessageReader, data: bytes, cuts: list[int]) -> list[object]:
    found: list[object] = []
    for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
        reader.receive_data(data[start:end])
        while (event := reader.next_event()) is not None:
            found.append(event)
    assert not reader.buffered_bytes
    return found


def flat(found: list[object]) -> list[object]:
    """The RPCs of all batches one by one, whatever the pieces they came in."""
    result: list[object] = []
    for event in found:
        if isinstance(event, Message) and event.message_type == MessageType.RPC_BATCH:
            count, at = decode_batch(event.data)
            body, last = event.data[at:], 0
            assert len(list(decode_messages(body))) == count
            for _, _, end in decode_messages(body):
                result.append(body[last:end])
                last = end
        else:
            result.append(event)
    return result


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "WHOLE_BATCH_SIZE_BYTES_MAX", 100)


@settings(max_examples=effort(25))
@given(st.data())
def test_any_split_gives_the_same_calls(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.sampled_from([0, 1, 30, 70, 900, RPC_MAX, 5000]), min_size=5, max_size=30))
    messages = [rpc(number, size) for number, size in enumerate(sizes)]
    stream = rpc(999) + batch(*messages) + CHECKPOINT_REQUESTED + batch(rpc(1), rpc(2)) + CHECKPOINT_REQUESTED
    cuts = sorted(data.draw(st.sets(st.integers(1, len(stream) - 1), max_size=40)))
    found = flat(events(MessageReader(rpc_size_bytes_max=RPC_MAX), stream, cuts))
    kept = [event if isinstance(event, bytes) else type(event) for event in found[1 : 1 + len(messages)]]
    assert kept == [message if len(message) - 2 <= RPC_MAX else TooLargeRpc for message in messages]
    assert found[1 + len(messages) :] == [Message(2, b""), rpc(1), rpc(2), Message(2, b"")]


def test_it_is_never_held_whole() -> None:
    reader = MessageReader(rpc_size_bytes_max=RPC_MAX)
    stream = batch(*[rpc(number, 50) for number in range(10_000)])
    taken = 0
    for start in range(0, len(stream), 1000):
        reader.receive_data(stream[start : start + 1000])
        while (event := reader.next_event()) is not None:
            assert isinstance(event, Message)
            taken += decode_batch(event.data)[0]
        assert reader.buffered_bytes < 100
    assert taken == 10_000


@pytest.mark.parametrize("cuts", [[], list(range(1, 5_000))])
def test_a_single_rpc_above_the_limit_is_passed_over(cuts: list[int]) -> None:
    large = rpc(7, 5_000)
    found = events(MessageReader(rpc_size_bytes_max=RPC_MAX), rpc(1) + large + rpc(2), cuts)
    assert [type(event) for event in found] == [Message, TooLargeRpc, Message]
    size_bytes = len(large) - 2
    data = large[3:]
    assert found[1] == TooLargeRpc(size_bytes, RPC_MAX, data[:RPC_FRONT_SIZE_BYTES_MAX])


@pytest.mark.parametrize(
    ("stream", "error"),
    [
        (batch(*[rpc(1, 50)] * 4, count=5), "gives its count as 5 and holds 4 messages"),
        (batch(*[rpc(1, 50)] * 4, count=3), "gives its count as 3 and holds 4 messages"),
        (batch(*[rpc(1, 50)] * 4, count=-1), "gives its count as -1"),
        (batch(*[rpc(1, 50)] * 4, encode_zigzag(200), count=5), "a message of 200 bytes runs past the end of its RPC"),
        (batch(*[rpc(1, 50)] * 4, b"\0", count=5), "gives its size as 0"),
    ],
)
def test_what_is_wrong_with_a_large_batch_is_still_found(stream: bytes, error: str) -> None:
    with pytest.raises(RemoteProtocolError, match=error):
        events(MessageReader(rpc_size_bytes_max=RPC_MAX), stream + CHECKPOINT_REQUESTED * 4, [])


def test_other_messages_keep_their_limit_and_a_stranger_s_are_not_taken_apart() -> None:
    reader = MessageReader(1000, rpc_size_bytes_max=RPC_MAX)
    reader.receive_data(encode_zigzag(1001) + bytes((MessageType.INITIAL_MESSAGE,)))
    with pytest.raises(LimitExceededError, match="a message of 1001 bytes, at most 1000"):
        reader.next_event()
    reader = MessageReader(1000)
    reader.receive_data(encode_zigzag(1001) + bytes((MessageType.RPC_BATCH,)))
    with pytest.raises(LimitExceededError, match="a message of 1001 bytes, at most 1000"):
        reader.next_event()
