"""The bounds of ZigZagInt and ZigZagLong; golden values are in test_protocol_golden.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from immortal.protocol.errors import LocalProtocolError, RemoteProtocolError
from immortal.protocol.varint import (
    INT_MAX,
    INT_MIN,
    LONG_MAX,
    LONG_MIN,
    decode_zigzag_int,
    decode_zigzag_long,
    encode_zigzag,
)


@pytest.mark.parametrize("value", [LONG_MAX + 1, LONG_MIN - 1])
def test_what_does_not_fit_is_not_encoded(value: int) -> None:
    with pytest.raises(LocalProtocolError, match=f"{value} does not fit .*64 bits"):
        encode_zigzag(value)


@pytest.mark.parametrize("value", [INT_MAX + 1, INT_MIN - 1])
def test_five_bytes_with_more_than_32_bits(value: int) -> None:
    data = encode_zigzag(value)
    assert len(data) == 5
    with pytest.raises(RemoteProtocolError, match="ZigZagInt at byte 0 is larger than its type allows"):
        decode_zigzag_int(data)
    assert decode_zigzag_long(data) == (value, 5)


@pytest.mark.parametrize("low", [b"\x80", b"\xff"])
def test_ten_bytes_with_more_than_64_bits(low: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="ZigZagLong at byte 0 is larger than its type allows"):
        decode_zigzag_long(low * 9 + b"\x02")


@pytest.mark.parametrize(("decode", "size_bytes"), [(decode_zigzag_int, 5), (decode_zigzag_long, 10)])
def test_longer_than_needed_is_read_within_the_bounds(
    decode: Callable[[bytes], tuple[int, int]], size_bytes: int
) -> None:
    for padding in range(size_bytes - 1):
        assert decode(b"\x82" + b"\x80" * padding + b"\0") == (1, 2 + padding)
    with pytest.raises(RemoteProtocolError, match=f"is longer than {size_bytes} bytes"):
        decode(b"\x82" + b"\x80" * (size_bytes - 1) + b"\0")


@pytest.mark.parametrize("decode", [decode_zigzag_int, decode_zigzag_long])
@pytest.mark.parametrize("offset", [3, 4, 7])
def test_errors_give_the_offset(decode: Callable[[bytes, int], tuple[int, int]], offset: int) -> None:
    with pytest.raises(RemoteProtocolError, match=f"at byte {offset} runs past"):
        decode(b"\0\0\0\x80", offset)
