"""Any trailer comes back; any bytes give a trailer or a documented error."""

from __future__ import annotations

import contextlib
import struct

from hypothesis import given
from hypothesis import strategies as st

from immortal.protocol.checksum import crc64
from immortal.protocol.errors import DamagedRecordError, RemoteProtocolError
from immortal.protocol.trailer import BatchSource, OutputMarkEntry, Trailer, decode_trailer, encode_trailer

LONGS = st.integers(-(1 << 63), (1 << 63) - 1)
POSITIONS = st.integers(0, (1 << 63) - 1)
CHECKS = st.integers(0, (1 << 64) - 1)
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
BATCHES = st.builds(BatchSource, st.integers(0, 2), NAMES, POSITIONS, st.integers(0, (1 << 31) - 1), LONGS)
MARKS = st.builds(OutputMarkEntry, NAMES, POSITIONS, CHECKS)
TRAILERS = st.builds(Trailer, LONGS, st.lists(BATCHES, max_size=5), st.lists(MARKS, max_size=5))


@given(TRAILERS, CHECKS)
def test_what_is_encoded_is_decoded(trailer: Trailer, check: int) -> None:
    assert decode_trailer(encode_trailer(trailer, check), check) == trailer


@given(st.binary(max_size=200), CHECKS, st.booleans())
def test_any_bytes_under_a_right_crc(body: bytes, check: int, versioned: bool) -> None:
    body = (b"\x01" if versioned else b"") + body
    data = body + struct.pack("<Q", crc64(struct.pack("<Q", check) + body))
    with contextlib.suppress(RemoteProtocolError, DamagedRecordError):
        trailer = decode_trailer(data, check)
        assert decode_trailer(encode_trailer(trailer, check), check) == trailer
