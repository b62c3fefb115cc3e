"""The envelope: whole, cut short, too long, and random."""

from __future__ import annotations

import contextlib
from struct import pack

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from immortal.coordinator.messenger.envelope import (
    ENVELOPE_SIZE_BYTES,
    Envelope,
    EnvelopeError,
    Kind,
    as_conversation_message,
    decode_envelope,
    decode_missing,
    decode_parts,
    encode_message,
    encode_missing,
    encode_parts,
    encode_reply,
)
from immortal.coordinator.messenger.limits import SPAN_MAX

REPLIES = [kind for kind in Kind if kind not in (Kind.MESSAGE, Kind.TURN, Kind.PATIENT)]
U32, U64 = st.integers(1, 2**32 - 1), st.integers(0, 2**64 - 1)
MESSAGE = encode_message(
    link_id=2, incarnation=3, message_id=5, lowest_pending_id=4, source_callback_id=6, skipped_count=1
)
REPLY = encode_reply(Kind.REPLY, link_id=2, incarnation=3, message_id=5, highest_seen=7, destination_callback_id=6)


def test_the_bytes_are_those_of_the_layout() -> None:
    assert MESSAGE.hex(" ", 8) == (
        "0201000100000002 0000000000000003 0000000000000005 0000000000000004 0000000000000006 0000000000000000"
    )
    assert REPLY.hex(" ", 8) == (
        "0202000000000002 0000000000000003 0000000000000005 0000000000000007 0000000000000000 0000000000000006"
    )
    turn = as_conversation_message(MESSAGE, 8)
    assert turn.hex(" ", 8) == (
        "0206000100000002 0000000000000003 0000000000000005 0000000000000004 0000000000000006 0000000000000008"
    )
    with_callback = encode_reply(Kind.REPLY, 2, 3, 5, 7, 6, 9)
    assert with_callback.hex(" ", 8) == (
        "0202000000000002 0000000000000003 0000000000000005 0000000000000007 0000000000000009 0000000000000006"
    )
    assert len(MESSAGE) == len(REPLY) == ENVELOPE_SIZE_BYTES == 48


@given(U32, U64, st.integers(1, 2**64 - 1), U64, st.data())
def test_messages_come_back(
    link_id: int, incarnation: int, message_id: int, callback_id: int, data: st.DataObject
) -> None:
    lowest = data.draw(st.integers(1, message_id))
    skipped = data.draw(st.integers(0, 2**16 - 1))
    encoded = encode_message(link_id, incarnation, message_id, lowest, callback_id, skipped)
    assert decode_envelope(encoded) == Envelope(
        2, Kind.MESSAGE, skipped, link_id, incarnation, message_id, lowest, callback_id, 0
    )


@given(U32, U64, st.integers(1, 2**64 - 1), U64, U64)
def test_messages_of_conversations_come_back(
    link_id: int, incarnation: int, message_id: int, callback_id: int, destination_callback_id: int
) -> None:
    plain = encode_message(link_id, incarnation, message_id, message_id, callback_id)
    encoded = as_conversation_message(plain, destination_callback_id)
    assert decode_envelope(encoded) == Envelope(
        2, Kind.TURN, 0, link_id, incarnation, message_id, message_id, callback_id, destination_callback_id
    )


@given(st.sampled_from(REPLIES), U32, U64, st.integers(1, 2**64 - 1), U64, st.data())
def test_replies_come_back(
    kind: Kind, link_id: int, incarnation: int, message_id: int, callback_id: int, data: st.DataObject
) -> None:
    highest = data.draw(st.integers(message_id, 2**64 - 1))
    given_id = data.draw(U64) if kind in (Kind.REPLY, Kind.REPLY_EXPIRED) else 0
    encoded = encode_reply(kind, link_id, incarnation, message_id, highest, callback_id, given_id)
    assert decode_envelope(encoded) == Envelope(
        2, kind, 0, link_id, incarnation, message_id, highest, given_id, callback_id
    )


def test_parts_are_limited() -> None:
    parts = [b"one", b"", b"three"]
    assert decode_parts(encode_parts(parts), 0, 3) == parts
    with pytest.raises(EnvelopeError, match="more than 2 parts"):
        decode_parts(encode_parts(parts), 0, 2)


@pytest.mark.parametrize("size_bytes", range(48))
def test_cut_short(size_bytes: int) -> None:
    with pytest.raises(EnvelopeError, match=f"of {size_bytes} bytes"):
        decode_envelope(MESSAGE[:size_bytes])


def test_trailing_bytes() -> None:
    with pytest.raises(EnvelopeError, match="49 bytes"):
        decode_envelope(MESSAGE + b"\0")


def fields(*values: int) -> bytes:
    return pack(">BBHIQQQQQ", *values)


@pytest.mark.parametrize(
    ("what", "data"),
    [
        ("version 1", fields(1, 1, 0, 2, 3, 5, 4, 6, 0)),
        ("kind 0", fields(2, 0, 0, 2, 3, 5, 5, 0, 0)),
        ("kind 10", fields(2, 10, 0, 2, 3, 5, 5, 0, 0)),
        ("destination callback ID 1", fields(2, 8, 0, 2, 3, 5, 4, 6, 1)),
        ("skipped count 1", fields(2, 2, 1, 2, 3, 5, 5, 0, 6)),
        ("link ID 0", fields(2, 1, 0, 0, 3, 5, 4, 6, 0)),
        ("message ID 0", fields(2, 2, 0, 2, 3, 0, 0, 0, 0)),
        ("lowest pending ID 0", fields(2, 1, 0, 2, 3, 5, 0, 6, 0)),
        ("lowest pending ID 6", fields(2, 1, 0, 2, 3, 5, 6, 6, 0)),
        ("destination callback ID 1", fields(2, 1, 0, 2, 3, 5, 4, 6, 1)),
        ("highest ID 4", fields(2, 2, 0, 2, 3, 5, 4, 0, 6)),
        ("source callback ID 1", fields(2, 4, 0, 2, 3, 5, 5, 1, 6)),
        ("source callback ID 1", fields(2, 7, 0, 2, 3, 5, 5, 1, 6)),
        ("lowest pending ID 6", fields(2, 6, 0, 2, 3, 5, 6, 6, 1)),
    ],
)
def test_fields_out_of_range(what: str, data: bytes) -> None:
    with pytest.raises(EnvelopeError, match=what):
        decode_envelope(data)


@given(st.one_of(st.binary(max_size=100), st.binary(min_size=48, max_size=48)))
@example(b"\2\1" + b"\0" * 46)
def test_random_bytes_raise_nothing_else(data: bytes) -> None:
    try:
        envelope = decode_envelope(data)
    except EnvelopeError:
        return
    assert fields(*envelope) == data


@given(st.integers(0, 47), st.integers(1, 255))
def test_changed_bytes_raise_nothing_else(index: int, change: int) -> None:
    for whole in (MESSAGE, REPLY):
        changed = bytearray(whole)
        changed[index] ^= change
        with contextlib.suppress(EnvelopeError):
            assert fields(*decode_envelope(bytes(changed))) == changed


@given(st.lists(st.binary(max_size=300), max_size=20), st.binary(max_size=60))
def test_the_parts_of_a_reply(parts: list[bytes], front: bytes) -> None:
    data = front + encode_parts(parts)
    assert decode_parts(data, len(front)) == parts


@given(st.lists(st.binary(max_size=30), min_size=1, max_size=5), st.data())
def test_the_parts_of_a_reply_that_is_cut_off(parts: list[bytes], data: st.DataObject) -> None:
    """It is refused, or ends between two of its parts."""
    whole = encode_parts(parts)
    cut = data.draw(st.integers(0, len(whole) - 1))
    ends = [len(encode_parts(parts[:count])) for count in range(len(parts))]
    if cut in ends:
        assert decode_parts(whole[:cut], 0) == parts[: ends.index(cut)]
    else:
        with pytest.raises(EnvelopeError, match=r"a reply ends inside|only .* are left"):
            decode_parts(whole[:cut], 0)


@given(st.integers(1, 2**64 - 1), st.sets(st.integers(0, SPAN_MAX - 1), max_size=20))
def test_what_is_missing(lowest_pending_id: int, distances: set[int]) -> None:
    data = encode_missing(lowest_pending_id, sum(1 << distance for distance in distances))
    assert decode_missing(data) == sorted(lowest_pending_id + distance for distance in distances)
    assert len(data) <= 8 + SPAN_MAX // 8


def test_the_bytes_of_what_is_missing() -> None:
    assert encode_missing(258, 0b1_0000_0101).hex(" ") == "00 00 00 00 00 00 01 02 01 05"
    assert encode_missing(258, 0) == (258).to_bytes(8, "big")


@pytest.mark.parametrize("size_bytes", [0, 7, 8 + SPAN_MAX // 8 + 1])
def test_what_is_missing_in_a_wrong_size(size_bytes: int) -> None:
    with pytest.raises(EnvelopeError, match=f"in {size_bytes} bytes, expected 8 to 1032"):
        decode_missing(bytes(size_bytes))
