"""The extensions' layouts by hand, and what is said of those that are wrong."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from immortal.protocol.errors import LocalProtocolError, RemoteProtocolError
from immortal.protocol.extensions import (
    ALL_EXTENSIONS,
    ANSWERS,
    RECORD_TIME_SIZE_BYTES,
    REPORTS,
    TAKING_BACK,
    TRACE_EXTENSIONS,
    AppBatch,
    Hello,
    decode_app_batch,
    decode_app_description,
    decode_handler_failed,
    decode_hello,
    decode_impulses_accepted,
    decode_origins,
    decode_record_time,
    decode_version,
    encode_app_batch,
    encode_hello,
    encode_impulses_accepted,
    encode_record_time,
)
from immortal.protocol.messages import MessageType, decode_message

HELLO_BYTES = bytes.fromhex("16 40  01  02 82 01  04 70 79  04 aa bb")


def test_hello() -> None:
    hello = Hello(frozenset({65}), "py", b"\xaa\xbb")
    assert encode_hello(hello) == HELLO_BYTES
    assert decode_hello(HELLO_BYTES[2:]) == hello


def test_hello_asks_in_ascending_order_and_is_read_in_any() -> None:
    hello = Hello(frozenset({70, 65}))
    assert encode_hello(hello)[2:] == bytes.fromhex("01  04 8201 8c01  00  00")
    assert decode_hello(bytes.fromhex("01  06 8c01 8201 8c01  00  00")) == hello


def test_unknown_extensions_are_kept() -> None:
    assert decode_hello(bytes.fromhex("01  02 d00f  00  00")).extensions == {1000}


def test_all_extensions_are_those_behind_hello() -> None:
    assert {65, 66, 67, 68, 69, 70, 71, 72, 73, 74, 75, 76, 79, 81, 83, 89, 90, 91, 93, 95} == ALL_EXTENSIONS
    assert {77, 78, 86} == TRACE_EXTENSIONS
    assert {member for member in MessageType if member >= 64} == {
        *ALL_EXTENSIONS,
        *REPORTS,
        *ANSWERS,
        *TAKING_BACK,
        *TRACE_EXTENSIONS,
        MessageType.HELLO,
        MessageType.CHALLENGE,
        MessageType.PROOF,
    }


@pytest.mark.parametrize(
    ("data", "error"),
    [
        ("", "a Hello of version none, expected 1"),
        ("00 00 00 00", "a Hello of version 0, expected 1"),
        ("02 00 00 00", "a Hello of version 2, expected 1"),
        ("01 01 00 00", "asks for -1 extensions, at most 64"),
        ("01 8201 00 00", "asks for 65 extensions, at most 64"),
        ("01", "runs past the end"),
        ("01 04 8201", "runs past the end"),
        ("01 00", "runs past the end"),
        ("01 00 04 61", "a name at byte 2 runs past the end"),
        ("01 00 00", "runs past the end"),
        ("01 00 00 01", "secret's size as -1 bytes, 0 to 1024"),
        ("01 00 00 8210" + "00" * 1025, "secret's size as 1025 bytes, 0 to 1024"),
        ("01 00 00 04 aa", "secret's size as 2 bytes, 1 bytes are left"),
        ("01 00 00 04 aabbcc", "secret's size as 2 bytes, 3 bytes are left"),
    ],
)
def test_malformed_hellos(data: str, error: str) -> None:
    with pytest.raises(RemoteProtocolError, match=error):
        decode_hello(bytes.fromhex(data))


def test_the_limits_of_a_hello() -> None:
    largest = Hello(frozenset(range(64, 128)), "x" * 255, b"s" * 1024)
    encoded = encode_hello(largest)
    assert decode_hello(encoded[decode_message(encoded)[1] :]) == largest
    with pytest.raises(LocalProtocolError, match="65 extensions, at most 64"):
        encode_hello(Hello(frozenset(range(64, 129))))
    with pytest.raises(LocalProtocolError, match="secret of 1025 bytes, at most 1024"):
        encode_hello(Hello(frozenset(), "", b"s" * 1025))
    with pytest.raises(LocalProtocolError, match="a name of 256 bytes, at most 255"):
        encode_hello(Hello(frozenset(), "x" * 256))


def test_record_time() -> None:
    message = encode_record_time(1_700_000_000_000_000_000)
    assert message == bytes.fromhex("12 41 00002a36fe9c9717")
    assert len(message) == RECORD_TIME_SIZE_BYTES
    assert decode_message(message) == (MessageType.RECORD_TIME, 2, 10)
    assert decode_record_time(b"xx" + message, 4, 12) == 1_700_000_000_000_000_000


@pytest.mark.parametrize("size_bytes", [0, 7, 9])
def test_a_record_time_has_eight_bytes(size_bytes: int) -> None:
    with pytest.raises(RemoteProtocolError, match=f"a RecordTime has {size_bytes} bytes, 8 were expected"):
        decode_record_time(bytes(20), 2, 2 + size_bytes)


@pytest.mark.parametrize("message_type", [MessageType.STREAM_BATCH, MessageType.IMPULSE_BATCH])
def test_app_batch(message_type: MessageType) -> None:
    message = encode_app_batch(message_type, "counter", 2, b"rpcs")
    assert message == bytes((28, message_type)) + b"\x0ecounter\x04rpcs"
    assert decode_app_batch(message[2:]) == AppBatch("counter", 2, b"rpcs")


@pytest.mark.parametrize(
    ("data", "error"),
    [
        ("", "runs past the end"),
        ("02 61", "runs past the end"),
        ("02 61 00", "a batch gives its count as 0, at least 1"),
        ("02 61 01", "a batch gives its count as -1, at least 1"),
        ("04 61", "a name at byte 0 runs past the end"),
    ],
)
def test_malformed_app_batches(data: str, error: str) -> None:
    with pytest.raises(RemoteProtocolError, match=error):
        decode_app_batch(bytes.fromhex(data))


@pytest.mark.parametrize("count", [0, -1])
def test_an_app_batch_of_nothing_is_not_sent(count: int) -> None:
    with pytest.raises(LocalProtocolError, match=f"a batch of {count} messages"):
        encode_app_batch(MessageType.STREAM_BATCH, "", count, b"")


def test_impulses_accepted() -> None:
    assert encode_impulses_accepted(70) == bytes.fromhex("06 44 8c01")
    assert decode_impulses_accepted(b"\x8c\x01") == 70
    with pytest.raises(RemoteProtocolError, match="gives its count as -1"):
        decode_impulses_accepted(b"\x01")
    with pytest.raises(RemoteProtocolError, match="has 1 bytes too many"):
        decode_impulses_accepted(b"\x02\x00")
    with pytest.raises(RemoteProtocolError, match="runs past the end"):
        decode_impulses_accepted(b"")
    with pytest.raises(LocalProtocolError, match="of -1"):
        encode_impulses_accepted(-1)


@pytest.mark.parametrize(
    ("decode", "data", "error"),
    [
        (decode_app_description, "00 00", "an AppDescription gives the version 0, at least 1"),
        (decode_app_description, "02 0a", "announces 5 methods in 2 bytes"),
        (decode_app_description, "02 02 00 06 02 61 00", "AppDescription has 1 bytes too many"),
        (decode_app_description, "02 02 00 06 04 61", "runs past the end"),
        (decode_version, "00", "a Version of 0, at least 1"),
        (decode_version, "02 00", "Version has 1 bytes too many"),
        (decode_origins, "0a 02", "an Origins announces 5 entries in 2 bytes"),
        (decode_origins, "02 02 02", "runs past the end"),
        (decode_origins, "02 02 02 02 02", "Origins has 1 bytes too many"),
        (decode_handler_failed, "", "runs past the end"),
    ],
)
def test_what_is_wrong_with_the_others(decode: Callable[[bytes], object], data: str, error: str) -> None:
    with pytest.raises(RemoteProtocolError, match=error):
        decode(bytes.fromhex(data))
