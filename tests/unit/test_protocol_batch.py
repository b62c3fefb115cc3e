"""Batches: checked and cut without decoding, on the stride path and by the walk."""

from __future__ import annotations

import pytest

from immortal.protocol import batch
from immortal.protocol.batch import (
    CallRules,
    check_batch,
    decode_batch,
    decode_replayable_batch,
    encode_batch,
    encode_replayable_batch,
    offset_after,
)
from immortal.protocol.errors import LocalProtocolError, RemoteProtocolError
from immortal.protocol.messages import MessageType, RpcKind, decode_message, encode_incoming_rpc, encode_message

SMALL = encode_incoming_rpc(3, 1, b"\1")  # 6 bytes
LARGE = encode_incoming_rpc(3, 1, b"x" * 100)  # its size takes 2 bytes
HUGE = encode_incoming_rpc(3, 1, b"x" * 10_000)  # its size takes 3


class Large(bytes):
    """Looks larger than it is."""

    def __len__(self) -> int:
        return (1 << 30) - (64 << 10)


@pytest.mark.parametrize("rpc", [SMALL, LARGE, HUGE, b"\x08\x00\x00\x00\x00"])
@pytest.mark.parametrize("total", [1, 2, 3, 50])
def test_homogeneous(rpc: bytes, total: int) -> None:
    payload = rpc * total
    check_batch(payload, total)
    assert [offset_after(payload, count, total) for count in range(total + 1)] == [
        len(rpc) * count for count in range(total + 1)
    ]


def test_homogeneous_batches_are_not_walked(monkeypatch: pytest.MonkeyPatch) -> None:
    visited = []

    def counting(data: bytes, offset: int = 0) -> tuple[int, int, int]:
        visited.append(offset)
        return decode_message(data, offset)

    monkeypatch.setattr(batch, "decode_message", counting)
    check_batch(LARGE * 1000, 1000)
    assert visited == [0]


def test_mixed() -> None:
    parts = [SMALL, LARGE, SMALL, HUGE, LARGE, SMALL, SMALL]
    payload = b"".join(parts)
    check_batch(payload, len(parts))
    for count in range(len(parts) + 1):
        assert offset_after(payload, count, len(parts)) == len(b"".join(parts[:count]))


@pytest.mark.parametrize("rpc", [SMALL, LARGE])
@pytest.mark.parametrize("total", [1, 2, 3, 10])
def test_wrong_counts(rpc: bytes, total: int) -> None:
    payload = rpc * total
    with pytest.raises(
        RemoteProtocolError, match=f"a batch of {total + 1} messages ends after {total}, at byte {len(payload)}"
    ):
        check_batch(payload, total + 1)
    with pytest.raises(RemoteProtocolError, match=f"a batch of {total - 1} messages has {len(rpc)} bytes too many"):
        check_batch(payload, total - 1)
    with pytest.raises(RemoteProtocolError, match=f"ends after {total}"):
        offset_after(payload, total + 1, total)  # not a stride beyond the end


def test_no_messages() -> None:
    check_batch(b"", 0)
    assert offset_after(b"", 0, 0) == offset_after(b"garbage", 0, 5) == 0
    with pytest.raises(RemoteProtocolError, match="a batch of 0 messages has 6 bytes too many"):
        check_batch(SMALL, 0)


@pytest.mark.parametrize("count", [1, 2, 3, 1000])
def test_an_empty_payload(count: int) -> None:
    with pytest.raises(RemoteProtocolError):
        check_batch(b"", count)
    with pytest.raises(RemoteProtocolError):
        offset_after(b"", 1, count)


@pytest.mark.parametrize("count", [-1, -(1 << 31)])
def test_negative_counts(count: int) -> None:
    for payload in (b"", SMALL, SMALL * 5):
        with pytest.raises(RemoteProtocolError, match=f"count as {count}"):
            check_batch(payload, count)
        with pytest.raises(RemoteProtocolError, match=f"count as {count}"):
            offset_after(payload, count, 5)


@pytest.mark.parametrize("filler", [SMALL, LARGE])
@pytest.mark.parametrize("total", [1, 2, 3, 10])
@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (encode_message(MessageType.ATTACH_TO, b"abcd"), r"has type 1, an RPC \(0\)"),  # as long as SMALL
        (encode_message(MessageType.RPC_BATCH, LARGE[3:]), r"has type 5, an RPC \(0\)"),  # as long as LARGE
        (b"\x00", "gives its size as 0"),
        (b"\x00\x00\x00\x01\x02\x03", "gives its size as 0"),  # as long as SMALL
        (b"\x01\x00", "gives its size as -1"),
        (b"\x09\x00\x00\x06\x01\x01", "gives its size as -5"),  # as long as SMALL
        (b"\x81\x01\x00", "gives its size as -65"),
        (b"\x80\x80\x80\x80\x80", "longer than 5 bytes"),
    ],
)
def test_wrong_messages_anywhere(filler: bytes, total: int, wrong: bytes, error: str) -> None:
    for place in range(total):
        parts = [filler] * total
        parts[place] = wrong
        with pytest.raises(RemoteProtocolError, match=error):
            check_batch(b"".join(parts), total)


@pytest.mark.parametrize("rpc", [SMALL, LARGE, HUGE])
@pytest.mark.parametrize("total", [1, 2, 3])
def test_every_cut(rpc: bytes, total: int) -> None:
    payload = rpc * total
    for size_bytes in {*range(len(rpc) + 8), *range(len(payload) - 8, len(payload))}:
        if 0 <= size_bytes < len(payload):
            for cut in (check_batch, lambda payload, count: offset_after(payload, count, count)):
                with pytest.raises(RemoteProtocolError, match=r"ends after|bytes are left|runs past the end"):
                    cut(payload[:size_bytes], total)


@pytest.mark.parametrize("total", [1, 2, 3, 50])
@pytest.mark.parametrize("message_type", [1, 5, 9, 66, 255])
def test_a_homogeneous_batch_of_another_type(total: int, message_type: int) -> None:
    payload = encode_message(message_type, b"data") * total
    with pytest.raises(RemoteProtocolError, match=rf"message 0 of a batch has type {message_type}, an RPC \(0\)"):
        check_batch(payload, total)
    with pytest.raises(RemoteProtocolError, match="message 0 of a batch"):
        offset_after(payload, 1, total)


def test_a_type_is_looked_at_in_each_message() -> None:
    payload = bytearray(SMALL * 10)
    payload[7 * len(SMALL) + 1] = 9
    with pytest.raises(RemoteProtocolError, match="message 7 of a batch has type 9"):
        check_batch(bytes(payload), 10)
    assert offset_after(bytes(payload), 7, 10) == 7 * len(SMALL)
    with pytest.raises(RemoteProtocolError, match="message 7"):
        offset_after(bytes(payload), 8, 10)


def test_more_sizes_than_are_remembered() -> None:
    parts = [encode_incoming_rpc(3, 1, bytes(size_bytes)) for size_bytes in range(batch._FRONTS_KEPT_MAX + 10)]
    payload = b"".join(parts)
    check_batch(payload, len(parts))
    assert offset_after(payload, len(parts) - 1, len(parts)) == len(payload) - len(parts[-1])
    assert 0 < len(batch._strides) <= batch._FRONTS_KEPT_MAX
    with pytest.raises(RemoteProtocolError, match=f"ends after {len(parts)}"):
        check_batch(payload, len(parts) + 1)


def test_a_size_of_four_bytes_among_others() -> None:
    parts = [SMALL, encode_incoming_rpc(3, 1, bytes(2 << 20)), LARGE]
    payload = b"".join(parts)
    check_batch(payload, len(parts))
    assert offset_after(payload, 2, len(parts)) == len(payload) - len(LARGE)


def test_sizes_that_only_add_up() -> None:
    """As many bytes as ten of the first, and none of the others of its size."""
    longer, shorter = encode_incoming_rpc(3, 1, b"12"), encode_incoming_rpc(3, 1, b"")
    parts = [SMALL, longer, shorter, SMALL, shorter, longer, longer, shorter, SMALL, SMALL]
    payload = b"".join(parts)
    assert len(payload) == 10 * len(SMALL)
    check_batch(payload, 10)
    assert [offset_after(payload, count, 10) for count in range(11)] == [
        len(b"".join(parts[:count])) for count in range(11)
    ]


# --- fronts ----------------------------------------------------------------------------------------------------------


def test_one_rpc_is_its_own_message() -> None:
    assert encode_batch(SMALL, 1) == b""


@pytest.mark.parametrize("total", [0, 2, 3, 100])
def test_fronts(total: int) -> None:
    payload = SMALL * total
    whole = encode_batch(payload, total) + payload
    message_type, start, end = decode_message(whole)
    assert (message_type, end) == (MessageType.RPC_BATCH, len(whole))
    count, offset = decode_batch(whole[start:])
    assert (count, whole[start + offset :]) == (total, payload)

    whole = encode_replayable_batch(payload, total, total // 2)
    message_type, start, end = decode_message(whole)
    assert (message_type, end) == (MessageType.COUNT_REPLAYABLE_RPC_BATCH, len(whole))
    count, replayable, offset = decode_replayable_batch(whole[start:])
    assert (count, replayable, whole[start + offset :]) == (total, total // 2, payload)


@pytest.mark.parametrize(
    ("data", "error"),
    [("", "runs past the end"), ("01", "an RPCBatch gives its count as -1"), ("80", "runs past the end")],
)
def test_malformed_batches(data: str, error: str) -> None:
    with pytest.raises(RemoteProtocolError, match=error):
        decode_batch(bytes.fromhex(data))


@pytest.mark.parametrize(
    ("data", "error"),
    [
        ("04", "runs past the end"),
        ("04 06", "of 2 gives 3 as replayable"),
        ("04 01", "of 2 gives -1 as replayable"),
        ("01 01", "of -1 gives -1 as replayable"),
    ],
)
def test_malformed_replayable_batches(data: str, error: str) -> None:
    with pytest.raises(RemoteProtocolError, match=error):
        decode_replayable_batch(bytes.fromhex(data))


def test_what_a_reader_would_refuse_is_not_sent() -> None:
    with pytest.raises(LocalProtocolError, match="a batch of -1 messages"):
        encode_batch(b"", -1)
    with pytest.raises(LocalProtocolError, match="of 2 with 3 replayable"):
        encode_replayable_batch(b"", 2, 3)
    with pytest.raises(LocalProtocolError, match="of -1 with -1 replayable"):
        encode_replayable_batch(b"", -1, -1)
    with pytest.raises(LocalProtocolError, match="a batch of 1073676290 bytes, at most 1073676288"):
        encode_batch(Large(), 2)
    with pytest.raises(LocalProtocolError, match="a batch of 1073676291 bytes, at most 1073676288"):
        encode_replayable_batch(Large(), 2, 1)


def test_a_batch_as_large_as_a_message_may_be() -> None:
    class AlmostLarge(bytes):
        def __len__(self) -> int:
            return (64 << 20) - 2

    assert decode_message(encode_batch(AlmostLarge(), 2) + bytes((64 << 20) - 2))[0] == MessageType.RPC_BATCH


@pytest.mark.parametrize("count", [1, 2, 3, 50])
def test_an_rpc_without_room_for_its_fields_is_refused(count: int) -> None:
    # It would be logged, and every replay would meet it again.
    with pytest.raises(RemoteProtocolError, match="is an RPC of 3 bytes, at least 4 were expected"):
        check_batch(b"\x06\x00\x00\x00" * count, count)


# --- what an app can be given ----------------------------------------------------------------------------------------


def mixed_calls(count: int) -> list[bytes]:
    """Calls and answers of methods with IDs of one to five bytes, of many sizes."""
    method_ids = (3, 300, 70_000, 2**30)
    return [
        encode_incoming_rpc(method_ids[index * 7 % 4], index % 3, bytes(index % 90), index * 5 % 4)
        for index in range(count)
    ]


BAD_CALLS = [
    (encode_message(0, b"\x04\x06\x01\x01"), "is an RPC of kind 4, 0 to 3 were expected"),
    (encode_message(0, b"\xff\x06\x01\x01"), "is an RPC of kind 255"),
    (encode_message(0, b"\x00\x06\x03\x01"), "has the RPC type 3, 0 to 2 were expected"),
    (encode_message(0, b"\x00\x05\x01\x01"), "has the method -3: only an app itself may call negative ones"),
    (encode_message(0, b"\x00\x80\x80\x80\x01"), "ends inside its method ID, or before its RPC type"),
    (encode_message(2, b"\x00\x06\x01\x01"), "has type 2, an RPC"),
    (encode_message(0, b"\x00\x06"), "is an RPC of 3 bytes"),
]


@pytest.mark.parametrize(("bad", "reason"), BAD_CALLS)
@pytest.mark.parametrize("count", [0, 1, 5, 200])
@pytest.mark.parametrize("alike", [True, False])
def test_no_app_is_given_what_is_no_call(bad: bytes, reason: str, count: int, alike: bool) -> None:
    parts = [encode_incoming_rpc(3, 1, b"\1")] * count if alike else mixed_calls(count)
    CallRules().check(b"".join(parts), count)
    for index in {0, count // 2, count}:
        payload = b"".join([*parts[:index], bad, *parts[index:]])
        with pytest.raises(RemoteProtocolError, match=f"message {index} of a batch {reason}"):
            CallRules().check(payload, count + 1)


@pytest.mark.parametrize("bad", [bad for bad, _ in BAD_CALLS[:4]])
def test_nor_is_one_that_is_given_it_many_times(bad: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="message 0 of a batch"):
        CallRules().check(bad * 1000, 1000)


def test_an_app_may_call_the_sdk_itself_alone() -> None:
    for parts in (
        [encode_incoming_rpc(-3, 2, b"\1")] * 9,
        [encode_incoming_rpc(-3, 2, bytes(size)) for size in (1, 99)],
    ):
        payload = b"".join(parts)
        CallRules(negative=True).check(payload, len(parts))
        with pytest.raises(RemoteProtocolError, match="message 0 of a batch has the method -3"):
            CallRules().check(payload, len(parts))
    for kind in RpcKind:
        with pytest.raises(RemoteProtocolError, match="message 0 of a batch has the method -3"):
            CallRules().check(encode_incoming_rpc(-3, 0, b"\1", kind), 1)


@pytest.mark.parametrize("wrong", [-1, 0, 1, 2, 39, 41, 100])
def test_calls_are_counted(wrong: int) -> None:
    payload = b"".join(mixed_calls(40))
    CallRules().check(payload, 40)
    with pytest.raises(RemoteProtocolError):
        CallRules().check(payload, wrong)


def test_calls_that_end_too_early() -> None:
    parts = mixed_calls(40)
    payload = b"".join(parts)
    for end in range(len(payload) - len(parts[-1]) + 1, len(payload)):
        with pytest.raises(RemoteProtocolError, match=r"only \d+ bytes are left"):
            CallRules().check(payload[:end], 40)
    CallRules().check(b"", 0)
