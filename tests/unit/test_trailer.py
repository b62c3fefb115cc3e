"""The trailer, byte by byte."""

from __future__ import annotations

import struct

import pytest

from immortal.protocol.checksum import crc64
from immortal.protocol.errors import DamagedRecordError, LocalProtocolError, RemoteProtocolError
from immortal.protocol.trailer import (
    BatchKind,
    BatchSource,
    OutputMarkEntry,
    Trailer,
    check_trailer,
    decode_trailer,
    encode_trailer,
)

CHECK = 0x0123456789ABCDEF
EXAMPLE = Trailer(
    5,
    [BatchSource(BatchKind.STREAM, "bob", 63, 2, 4), BatchSource(BatchKind.IMPULSES, "", 64, 1, -1)],
    [OutputMarkEntry("é", 8192, 0xFFFFFFFFFFFFFFFF)],
)


def sealed(body: bytes, check: int = CHECK) -> bytes:
    return body + struct.pack("<Q", crc64(struct.pack("<Q", check) + body))


def test_the_bytes_are_those_of_the_document() -> None:
    body = (
        bytes.fromhex("01 0500000000000000 04")
        + bytes.fromhex("00 06 626f62 7e 04 0400000000000000")
        + bytes.fromhex("01 00 8001 02 ffffffffffffffff")
        + bytes.fromhex("02 04 c3a9 808001 ffffffffffffffff")
    )
    assert encode_trailer(EXAMPLE, CHECK) == sealed(body)
    assert decode_trailer(sealed(body), CHECK) == EXAMPLE


def test_an_empty_trailer() -> None:
    data = encode_trailer(Trailer(0), 0)
    assert len(data) == 19
    assert decode_trailer(memoryview(data), 0) == Trailer(0, [], [])


def test_a_clients_trace_stands_behind_its_name_and_takes_no_byte_where_there_is_none() -> None:
    context = f"{'4b' * 16}-{'0f' * 8}-01"
    plain = BatchSource(BatchKind.CLIENT, "~web", 7, 1, 4)
    traced = BatchSource(BatchKind.CLIENT, "~web", 7, 1, 4, context)
    data = encode_trailer(Trailer(5, [traced]), CHECK)
    assert b"~web\0" + context.encode() in data
    assert decode_trailer(data, CHECK) == Trailer(5, [traced])
    assert len(data) == len(encode_trailer(Trailer(5, [plain]), CHECK)) + 1 + len(context)
    longest = BatchSource(BatchKind.CLIENT, "~" + 200 * "w", 7, 1, 4, context)
    assert decode_trailer(encode_trailer(Trailer(5, [longest]), CHECK), CHECK).batches == [longest]


def test_every_flipped_bit_is_damage() -> None:
    data = encode_trailer(EXAMPLE, CHECK)
    for bit in range(len(data) * 8):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DamagedRecordError):
            check_trailer(damaged, CHECK)


def test_a_trailer_fits_no_other_record() -> None:
    with pytest.raises(DamagedRecordError, match="its CRC is"):
        decode_trailer(encode_trailer(EXAMPLE, CHECK), CHECK ^ 1)


def test_every_cut_and_a_trailing_byte_are_damage() -> None:
    data = encode_trailer(EXAMPLE, CHECK)
    for end in range(len(data)):
        with pytest.raises(DamagedRecordError):
            decode_trailer(data[:end], CHECK)
    with pytest.raises(DamagedRecordError):
        decode_trailer(data + b"\0", CHECK)


def test_another_version_is_not_called_damage() -> None:
    body = b"\x02" + bytes(10)
    with pytest.raises(RemoteProtocolError, match="version 2, this program reads version 1") as caught:
        decode_trailer(sealed(body), CHECK)
    assert not isinstance(caught.value, DamagedRecordError)


@pytest.mark.parametrize(
    ("rest", "message"),
    [
        ("02 04 00 02 02 0000000000000000 00", "kind 4"),
        ("02 00 00 01 02 0000000000000000 00", "position -1"),
        ("02 00 00 02 01 0000000000000000 00", "-1 messages"),
        ("02 00 01 02 02 0000000000000000 00", "name of -1 bytes"),
        ("02 00 8004 02 02 0000000000000000 00", "name of 256 bytes"),
        ("02 00 02 ff 02 02 0000000000000000 00", "not UTF-8"),
        ("02 00 0a 02 02 0000000000000000 00", "runs past"),
        ("feffffff0f 00", "announces 2147483647 batches"),
        ("01 00", "announces -1 batches"),
        ("00 fe01 00", "announces 127 output marks"),
        ("00 00 00", "1 bytes behind"),
    ],
)
def test_what_makes_no_sense_is_refused(rest: str, message: str) -> None:
    with pytest.raises(RemoteProtocolError, match=message):
        decode_trailer(sealed(b"\x01" + bytes(8) + bytes.fromhex(rest)), CHECK)


@pytest.mark.parametrize(
    "trailer",
    [
        Trailer(1 << 63),
        Trailer(0, [BatchSource(4, "", 1, 1, 0)]),
        Trailer(0, [BatchSource(0, "x" * 256, 1, 1, 0)]),
        Trailer(0, [BatchSource(0, "\ud800", 1, 1, 0)]),
        Trailer(0, [BatchSource(0, "x", -1, 1, 0)]),
        Trailer(0, [BatchSource(0, "x", 1, 1 << 31, 0)]),
        Trailer(0, [], [OutputMarkEntry("x", 1 << 63, 0)]),
        Trailer(0, [], [OutputMarkEntry("x", 1, -1)]),
    ],
)
def test_what_could_not_be_read_again_is_not_written(trailer: Trailer) -> None:
    with pytest.raises(LocalProtocolError, match="cannot hold"):
        encode_trailer(trailer, 0)
