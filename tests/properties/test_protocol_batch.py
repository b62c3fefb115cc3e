"""The stride path against a plain walk, on batches that are homogeneous, nearly so, and mixed."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from immortal.protocol.batch import check_batch, offset_after
from immortal.protocol.errors import RemoteProtocolError
from immortal.protocol.messages import MessageType, decode_message, encode_message

REFUSED = "refused"

rpcs = st.integers(3, 200).map(lambda size_bytes: encode_message(MessageType.RPC, bytes(size_bytes)))
wrong = st.one_of(
    st.sampled_from((b"", b"\0", b"\x01", b"\x02", b"\x03\0", b"\x80", b"\x80\x80\x80\x80\x80", b"\x02\x01")),
    st.binary(max_size=8),
    st.tuples(st.integers(1, 255), st.binary(max_size=70)).map(lambda item: encode_message(*item)),
)


@st.composite
def homogeneous(draw: st.DrawFn) -> bytes:
    size_bytes = draw(st.sampled_from((3, 4, 5, 61, 62, 63, 64, 100, 300)))
    arguments = st.binary(min_size=size_bytes, max_size=size_bytes)
    return b"".join(encode_message(MessageType.RPC, draw(arguments)) for _ in range(draw(st.integers(1, 12))))


@st.composite
def nearly_homogeneous(draw: st.DrawFn) -> bytes:
    """One message, or one byte, is not like the others; or two sizes that only add up."""
    payload = bytearray(draw(homogeneous()))
    place = draw(st.integers(0, len(payload) - 1))
    match draw(st.integers(0, 5)):
        case 0:
            payload[place] ^= draw(st.integers(1, 255))
        case 1:
            del payload[place]
        case 2:
            payload.insert(place, draw(st.integers(0, 255)))
        case 3:
            del payload[-draw(st.integers(1, 9)) :]
        case 4:
            _, start, end = decode_message(payload)
            payload[start - 1 :: end] = bytes((draw(st.integers(1, 255)),)) * (len(payload) // end)
        case _:
            _, _, end = decode_message(payload)
            payload += encode_message(MessageType.RPC, bytes(end)) + payload[:end]
    return bytes(payload)


mixed = st.lists(st.one_of(rpcs, wrong), max_size=10).map(b"".join)
sound = st.lists(rpcs, max_size=10).map(b"".join)
batches = st.one_of(homogeneous(), nearly_homogeneous(), mixed, sound)


def walk(payload: bytes, count: int) -> int | str:
    """Where the first ``count`` messages end, one after the other."""
    if count < 0:
        return REFUSED
    offset = 0
    for _ in range(count):
        try:
            message_type, start, offset = decode_message(payload, offset)
        except RemoteProtocolError:
            return REFUSED
        if message_type != MessageType.RPC or offset - start < 3:  # kind, method ID, RPC type
            return REFUSED
    return offset


def outcome_of_offset_after(payload: bytes, count: int, total: int) -> int | str:
    try:
        return offset_after(payload, count, total)
    except RemoteProtocolError:
        return REFUSED


def messages_in(payload: bytes) -> int:
    """How many whole messages are at the front."""
    count = 0
    while walk(payload, count + 1) != REFUSED:
        count += 1
    return count


@given(batches, st.integers(-2, 15))
@example(b"\x02\x00" * 4, 4)
def test_check_batch(payload: bytes, difference: int) -> None:
    for count in {messages_in(payload), difference, messages_in(payload) + 1, messages_in(payload) - 1}:
        try:
            check_batch(payload, count)
            accepted = True
        except RemoteProtocolError:
            accepted = False
        assert accepted == (walk(payload, count) == len(payload))


@given(batches, st.integers(-1, 13), st.integers(-1, 13))
def test_offset_after(payload: bytes, count: int, total: int) -> None:
    whole = messages_in(payload)
    assert outcome_of_offset_after(payload, count, total) == walk(payload, count)
    for first in range(-1, whole + 2):
        assert outcome_of_offset_after(payload, first, whole) == walk(payload, first)
        assert outcome_of_offset_after(payload, first, whole + 1) == walk(payload, first)


@given(batches, st.integers(1, 12))
def test_cutting_gives_two_sound_batches(payload: bytes, count: int) -> None:
    total = messages_in(payload)
    if walk(payload, total) != len(payload) or count > total:
        return
    offset = offset_after(payload, count, total)
    check_batch(payload[:offset], count)
    check_batch(payload[offset:], total - count)
