"""Frames between coordinators: the layout by hand, and every kind of damage."""

from __future__ import annotations

import struct

import pytest
from msgspec import structs

from immortal.protocol.checksum import crc64_reference
from immortal.protocol.errors import DamagedRecordError, LocalProtocolError, RemoteProtocolError
from immortal.protocol.messages import encode_incoming_rpc
from immortal.protocol.peer_frames import FrameType, PeerFrame, RefusedCode, decode_frame, encode_frame

RPC = encode_incoming_rpc(3, 1, b"\1")
BATCH = PeerFrame(FrameType.BATCH, "a", "counter", 0x01020304, 3, 41, 2, 1_700_000_000_000_000_000, RPC * 2)
REFUSED = PeerFrame(FrameType.REFUSED, "b", "a", 5, 1, 0, code=RefusedCode.NOT_ME, reason="this is 'b'")


def frame_bytes(
    *,
    version: int = 1,
    frame_type: int = 14,
    code: int = 0,
    committer_id: int = 7,
    epoch: int = 1,
    position: int = 1,
    count: int = 0,
    names: bytes = b"\x02a\x02b\0",
    payload: bytes = b"",
) -> list[bytes]:
    """A frame with right check bytes, whatever its fields."""
    front = struct.pack("<BBHiqqiq", version, frame_type, code, committer_id, epoch, position, count, 0)
    check = crc64_reference(front + bytes(8) + names + payload)
    header = front + check.to_bytes(8, "little") + names
    return [header, payload] if payload else [header]


def test_the_layout_by_the_words_of_wire_md() -> None:
    header, payload = encode_frame(BATCH)
    assert payload == RPC * 2
    fixed = bytes.fromhex("01 05 0000 04030201 0300000000000000 2900000000000000 02000000 00002a36fe9c9717")
    names = b"\x02a\x0ecounter\x00"
    assert header[:36] == fixed
    assert header[44:] == names
    assert int.from_bytes(header[36:44], "little") == crc64_reference(fixed + bytes(8) + names + payload)


@pytest.mark.parametrize("frame_type", [one for one in FrameType if one is not FrameType.UNKNOWN])
def test_every_type_there_and_back(frame_type: FrameType) -> None:
    frame = structs.replace(BATCH, frame_type=frame_type, payload=RPC * 2 if frame_type == FrameType.BATCH else b"")
    assert decode_frame(encode_frame(frame)) == frame


def test_a_frame_without_payload_is_one_part() -> None:
    (header,) = encode_frame(REFUSED)
    assert decode_frame([header]) == REFUSED
    assert decode_frame([header, b""]) == REFUSED


@pytest.mark.parametrize("frame", [BATCH, REFUSED], ids=["batch", "refused"])
def test_every_flipped_bit_is_refused(frame: PeerFrame) -> None:
    parts = encode_frame(frame)
    for index, part in enumerate(parts):
        for bit in range(len(part) * 8):
            flipped = bytearray(part)
            flipped[bit // 8] ^= 1 << bit % 8
            damaged = [*parts[:index], bytes(flipped), *parts[index + 1 :]]
            with pytest.raises(RemoteProtocolError if (index, bit // 8) == (0, 0) else DamagedRecordError):
                decode_frame(damaged)


@pytest.mark.parametrize("frame", [BATCH, REFUSED], ids=["batch", "refused"])
def test_every_cut_is_refused(frame: PeerFrame) -> None:
    parts = encode_frame(frame)
    for index, part in enumerate(parts):
        for size_bytes in range(len(part)):
            with pytest.raises(RemoteProtocolError):
                decode_frame([*parts[:index], part[:size_bytes], *parts[index + 1 :]])


def test_no_byte_can_move_between_header_and_payload() -> None:
    header, payload = encode_frame(BATCH)
    whole = header + payload
    for cut in range(len(whole) + 1):
        if cut != len(header):
            try:
                found = decode_frame([whole[:cut], whole[cut:]])
            except RemoteProtocolError:
                continue
            assert found.frame_type is FrameType.UNKNOWN, "what is behind the names may be a later build's field"


@pytest.mark.parametrize("field", ["committer_id", "epoch", "position", "count", "time_ns", "code"])
def test_the_check_covers_each_field(field: str) -> None:
    other = structs.replace(BATCH, **{field: getattr(BATCH, field) + 1})
    header, payload = encode_frame(BATCH)
    check = encode_frame(other)[0][36:44]
    with pytest.raises(DamagedRecordError, match=f"a frame's check is {int.from_bytes(check, 'little'):016x}, its"):
        decode_frame([header[:36] + check + header[44:], payload])


@pytest.mark.parametrize(
    ("parts", "error"),
    [
        ([], "a frame of 0 parts, 1 or 2"),
        ([b"", b"", b""], "a frame of 3 parts, 1 or 2"),
        ([bytes(43)], "a frame header of 43 bytes, at least 44"),
        (frame_bytes(names=b""), "runs past the end"),
        (frame_bytes(names=b"\x02a\x02b"), "runs past the end"),
        (frame_bytes(names=b"\x02\xff\x02b\0"), "is not UTF-8"),
        (frame_bytes(names=b"\x02\0\x02b\0"), "has a zero byte"),
        (frame_bytes(committer_id=0), "a frame of committer 0, epoch 1, position 1 with a count of 0"),
        (frame_bytes(committer_id=-7), "a frame of committer -7"),
        (frame_bytes(epoch=-1), "epoch -1"),
        (frame_bytes(position=-1), "position -1"),
        (frame_bytes(count=-1), "a count of -1"),
        (frame_bytes(frame_type=5, count=0, payload=RPC), "a Batch of 0 messages at position 1, 6 bytes"),
        (frame_bytes(frame_type=5, count=1, position=0, payload=RPC), "a Batch of 1 messages at position 0, 6 bytes"),
        (frame_bytes(frame_type=5, count=1), "a Batch of 1 messages at position 1, 0 bytes"),
    ],
)
def test_malformed_frames(parts: list[bytes], error: str) -> None:
    with pytest.raises(RemoteProtocolError, match=error):
        decode_frame(parts)


@pytest.mark.parametrize(
    ("parts", "sender", "what"),
    [
        (frame_bytes(version=2), "", "a frame of version 2"),
        (frame_bytes(frame_type=6), "a", "a frame of type 6"),
        (frame_bytes(frame_type=0), "a", "a frame of type 0"),
        (frame_bytes(names=b"\x02a\x02b\0\0\0"), "a", "a field of 2 bytes behind the names of a frame"),
    ],
)
def test_what_another_build_may_have_sent_is_said_to_be_unknown(parts: list[bytes], sender: str, what: str) -> None:
    frame = decode_frame(parts)
    assert (frame.frame_type, frame.sender, frame.reason) == (FrameType.UNKNOWN, sender, what)


def test_a_payload_that_a_type_does_not_use_is_not_kept() -> None:
    assert decode_frame(frame_bytes(payload=b"payload")).payload == b""


def test_a_frame_of_ones_own_making_is_read() -> None:
    assert decode_frame(frame_bytes()) == PeerFrame(FrameType.TRIM_TO, "a", "b", 7, 1, 1)


def test_an_unknown_code_is_kept() -> None:
    assert decode_frame(frame_bytes(frame_type=35, code=999)).code == 999


@pytest.mark.parametrize(
    ("reason", "sent"),
    [
        ("x" * 300, "x" * 255),
        ("x" * 254 + "é", "x" * 254),  # never half a character
        ("é" * 200, "é" * 127),
        ("lone \ud800", "lone ?"),
        ("zero \0 byte", "zero   byte"),
    ],
)
def test_a_reason_is_made_to_fit(reason: str, sent: str) -> None:
    assert decode_frame(encode_frame(structs.replace(REFUSED, reason=reason))).reason == sent


@pytest.mark.parametrize("field", ["sender", "receiver"])
def test_a_name_is_not_made_to_fit(field: str) -> None:
    with pytest.raises(LocalProtocolError, match="a name of 256 bytes, at most 255"):
        encode_frame(structs.replace(REFUSED, **{field: "x" * 256}))
