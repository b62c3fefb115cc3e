"""Records: the header's bounds, the check bytes' cover. Golden records are in test_protocol_golden.py."""

from __future__ import annotations

import struct

import pytest

from immortal.protocol.checksum import crc64_reference
from immortal.protocol.errors import DamagedRecordError, LimitExceededError, LocalProtocolError, RemoteProtocolError
from immortal.protocol.limits import RECORD_SIZE_BYTES_MAX
from immortal.protocol.record import (
    CHECKPOINT_SEQUENCE_ID,
    COMMITTER_ID_MAX,
    CONTROL_SEQUENCE_ID,
    HEADER_SIZE_BYTES,
    decode_header,
    encode_header,
    encode_record,
    verify_record,
)

GIB = 1 << 30


class Large(bytes):
    """Looks as large as fits, plus its first byte: the limit is tested without a gibibyte."""

    def __len__(self) -> int:
        return GIB - HEADER_SIZE_BYTES + self[0]


def header_of(size_bytes: int) -> bytes:
    return struct.pack("<iiQq", 7, size_bytes, 0, 5)


def test_the_check_bytes_by_the_words_of_wire_md() -> None:
    record = encode_record(7, 5, b"content")
    assert record[8:16] == crc64_reference(record[0:8] + record[16:24] + record[24:]).to_bytes(8, "little")


def test_the_layout_by_the_words_of_wire_md() -> None:
    record = encode_record(7, 5, b"content")
    assert (record[0:4], record[4:8], record[16:24]) == (
        (7).to_bytes(4, "little"),
        (31).to_bytes(4, "little"),
        (5).to_bytes(8, "little"),
    )


def test_every_flipped_bit_is_found() -> None:
    record = encode_record(0x01020304, 5, b"content")
    for bit in range(len(record) * 8):
        damaged = bytearray(record)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DamagedRecordError):
            verify_record(damaged)


def test_every_cut_is_found() -> None:
    record = encode_record(7, 5, b"content")
    for size_bytes in range(len(record)):
        with pytest.raises(DamagedRecordError, match=str(size_bytes)):
            verify_record(record[:size_bytes])


def test_what_follows_a_record_is_ignored() -> None:
    record = encode_record(7, 5, b"content")
    assert verify_record(record + b"trailer") == verify_record(record)


def test_chunks_are_their_concatenation() -> None:
    whole = encode_header(7, 5, (b"content",))
    assert encode_header(7, 5, (b"con", bytearray(b""), memoryview(b"tent"))) == whole
    assert encode_header(7, 5, (chunk for chunk in (b"c", b"ontent"))) == whole


def test_the_size_limit() -> None:
    assert RECORD_SIZE_BYTES_MAX == GIB
    assert decode_header(header_of(GIB)).size_bytes == GIB
    with pytest.raises(LimitExceededError, match="record 5 of 1073741825 bytes, at most 1073741824 are accepted"):
        decode_header(header_of(GIB + 1))
    with pytest.raises(LocalProtocolError, match="a record of 1073741825 bytes, at most 1073741824"):
        encode_header(7, 5, (Large(b"\1"),))
    assert decode_header(encode_header(7, 5, (Large(b"\0"),))).size_bytes == GIB


@pytest.mark.parametrize("size_bytes", [-(1 << 31), -1, 0, 23])
def test_sizes_below_the_header(size_bytes: int) -> None:
    with pytest.raises(RemoteProtocolError, match=f"record 5 gives its size as {size_bytes} bytes, less than .* 24"):
        decode_header(header_of(size_bytes))
    with pytest.raises(DamagedRecordError, match=f"damaged record header: record 5 gives its size as {size_bytes}"):
        verify_record(header_of(size_bytes))


def test_a_header_that_is_not_whole() -> None:
    with pytest.raises(RemoteProtocolError, match="a record header has 24 bytes, 22 came"):
        decode_header(header_of(24), 2)


def test_a_header_inside_other_bytes() -> None:
    assert decode_header(b"xx" + header_of(GIB), 2).size_bytes == GIB


@pytest.mark.parametrize("committer_id", [1, COMMITTER_ID_MAX])
@pytest.mark.parametrize("sequence_id", [-2, -1, 0, (1 << 63) - 1])
def test_ids_that_fit(committer_id: int, sequence_id: int) -> None:
    assert (COMMITTER_ID_MAX, CONTROL_SEQUENCE_ID, CHECKPOINT_SEQUENCE_ID) == (2_147_483_647, -1, -2)
    header = verify_record(encode_record(committer_id, sequence_id, b""))
    assert (header.committer_id, header.size_bytes, header.sequence_id) == (
        committer_id,
        HEADER_SIZE_BYTES,
        sequence_id,
    )


@pytest.mark.parametrize(
    ("committer_id", "sequence_id"), [(0, 0), (-1, 0), (COMMITTER_ID_MAX + 1, 0), (1, -3), (1, 1 << 63)]
)
def test_ids_that_no_record_has_are_not_sent(committer_id: int, sequence_id: int) -> None:
    wrong = sequence_id if committer_id == 1 else committer_id
    with pytest.raises(LocalProtocolError, match=f"ID {wrong}, "):
        encode_header(committer_id, sequence_id, ())
