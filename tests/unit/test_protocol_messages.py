"""Messages, names, RPCs: their limits, and what is said of those that are wrong."""

from __future__ import annotations

import pytest

from immortal.protocol.errors import LimitExceededError, LocalProtocolError, RemoteProtocolError
from immortal.protocol.limits import MESSAGE_SIZE_BYTES_MAX
from immortal.protocol.messages import (
    MessageType,
    RpcKind,
    RpcType,
    decode_attach_to,
    decode_checkpoint,
    decode_incoming_rpc,
    decode_message,
    decode_messages,
    decode_name,
    decode_outgoing_rpc,
    encode_attach_to,
    encode_checkpoint,
    encode_incoming_rpc,
    encode_message,
    encode_name,
    encode_outgoing_rpc,
)
from immortal.protocol.varint import INT_MAX, INT_MIN, encode_zigzag

MIB_64 = 67_108_864


# --- messages --------------------------------------------------------------------------------------------------------


def test_the_largest_message_is_64_mib_of_type_and_data() -> None:
    assert MESSAGE_SIZE_BYTES_MAX == MIB_64
    message = encode_message(MessageType.INITIAL_MESSAGE, bytes(MIB_64 - 1))
    assert decode_message(message) == (9, 5, len(message))
    with pytest.raises(LocalProtocolError, match="a message of 67108865 bytes, at most 67108864 are allowed"):
        encode_message(MessageType.INITIAL_MESSAGE, bytes(MIB_64))


def test_a_larger_message_is_refused_by_its_size_field_alone() -> None:
    most = (1 << 30) - (64 << 10)  # of an RPC: it has to fit into a record
    with pytest.raises(LimitExceededError, match="1073676289 bytes, at most 1073676288") as caught:
        decode_message(encode_zigzag(most + 1))
    assert (caught.value.size_bytes, caught.value.limit_bytes) == (most + 1, most)


@pytest.mark.parametrize(
    ("data", "error"),
    [
        ("00", "at byte 0 gives its size as 0, at least 1"),
        ("0109", "at byte 0 gives its size as -1, at least 1"),
        ("0209 00", "at byte 2 gives its size as 0"),
        ("0209 06 09 01", "at byte 2 gives its size as 3, only 2 bytes are left"),
        ("0209 02", "at byte 2 gives its size as 1, only 0 bytes are left"),
        ("0209 80", "ZigZagInt at byte 2 runs past the end"),
        ("0209 8080808080", "ZigZagInt at byte 2 is longer than 5 bytes"),
        ("0209 feffffff0f", "at byte 2 of 2147483647 bytes, at most 1073676288"),
    ],
)
def test_malformed_messages(data: str, error: str) -> None:
    with pytest.raises(RemoteProtocolError, match=error):
        list(decode_messages(bytes.fromhex(data)))


# --- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "a", "a" * 255, "é" * 127, "😀" * 63])
def test_names_that_fit(name: str) -> None:
    encoded = encode_name(name)
    assert decode_name(encoded + b"\xff", 0) == (name, len(encoded))
    if name:
        message = encode_attach_to(name)
        _, start, end = decode_message(message)
        assert decode_attach_to(message[start:end]) == name


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("a" * 256, "a name of 256 bytes, at most 255"),
        ("é" * 128, "a name of 256 bytes, at most 255"),
        ("a\ud800", "a name that UTF-8 cannot hold"),
        ("a\0b", "a name with a zero byte"),
    ],
)
def test_names_that_no_instance_can_have_are_not_sent(name: str, error: str) -> None:
    with pytest.raises(LocalProtocolError, match=error):
        encode_name(name)
    with pytest.raises(LocalProtocolError, match=error):
        encode_attach_to(name)
    with pytest.raises(LocalProtocolError, match=error):
        encode_outgoing_rpc(name, 1, RpcType.FORK, b"")


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (encode_zigzag(256) + b"a" * 256, "at byte 0 gives its length as 256 bytes, 0 to 255"),
        (b"\x01", "at byte 0 gives its length as -1 bytes"),
        (b"\x06ab", "a name at byte 0 runs past the end"),
        (b"\x04\xc3(", r"a name at byte 1 is not UTF-8: b'\\xc3\('"),
        (b"\x06\xed\xa0\x80", "a name at byte 1 is not UTF-8"),  # a surrogate
        (b"\x06a\0b", "a name at byte 1 has a zero byte"),
    ],
)
def test_malformed_names(data: bytes, error: str) -> None:
    with pytest.raises(RemoteProtocolError, match=error):
        decode_name(data, 0)


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"", "AttachTo names 0 bytes, 1 to 255"),
        (b"a" * 256, "AttachTo names 256 bytes, 1 to 255"),
        (b"\xff", "is not UTF-8"),
        (b"a\0", "has a zero byte"),
    ],
)
def test_malformed_attach_to(data: bytes, error: str) -> None:
    with pytest.raises(RemoteProtocolError, match=error):
        decode_attach_to(data)


def test_oneself_needs_no_attaching() -> None:
    with pytest.raises(LocalProtocolError, match="oneself needs no attaching"):
        encode_attach_to("")


# --- RPCs ------------------------------------------------------------------------------------------------------------


def test_the_numbers_in_an_rpc() -> None:
    assert [int(kind) for kind in RpcKind] == [0, 1, 2, 3]
    assert [int(rpc_type) for rpc_type in RpcType] == [0, 1, 2]
    assert (RpcKind.CALL, RpcKind.RETURNED_VALUE, RpcKind.RETURNED_NOTHING, RpcKind.RAISED) == (0, 1, 2, 3)
    assert (RpcType.ASYNC, RpcType.FORK, RpcType.IMPULSE) == (0, 1, 2)


@pytest.mark.parametrize("method_id", [INT_MIN, INT_MAX])
def test_the_outermost_method_ids(method_id: int) -> None:
    message = encode_incoming_rpc(method_id, RpcType.FORK, b"")
    assert decode_incoming_rpc(message[2:]).method_id == method_id


@pytest.mark.parametrize("method_id", [INT_MIN - 1, INT_MAX + 1])
def test_method_ids_have_32_bits(method_id: int) -> None:
    with pytest.raises(LocalProtocolError, match=f"method ID {method_id} does not fit into 32 bits"):
        encode_incoming_rpc(method_id, RpcType.FORK, b"")


@pytest.mark.parametrize(
    ("data", "error"),
    [
        ("", "an RPC of 0 bytes, at least 3"),
        ("0000", "an RPC of 2 bytes, at least 3"),
        ("040001", "first byte is 4, 0 to 3"),
        ("00 8001", "ends inside its method ID or before its RPC type"),
        ("00 808080", "runs past the end"),
        ("00 00 03", r"has type 3, 0 \(async\), 1 \(fork\) or 2 \(impulse\)"),
        ("00 8080808010 00", "larger than its type allows"),
    ],
)
def test_malformed_rpcs(data: str, error: str) -> None:
    raw = bytes.fromhex(data)
    with pytest.raises(RemoteProtocolError, match=error):
        decode_incoming_rpc(raw)
    with pytest.raises(RemoteProtocolError, match=error):
        decode_outgoing_rpc(b"\x02a" + raw)


@pytest.mark.parametrize("cut", range(6))
def test_an_rpc_does_not_read_into_what_follows_it(cut: int) -> None:
    """The RPC is the first ``cut`` bytes of something longer that would make sense as a whole."""
    whole = bytes.fromhex("02 61  00 8001 01 aabb")  # to a: call, method 64, fork
    with pytest.raises(RemoteProtocolError):
        decode_outgoing_rpc(whole, 0, cut)
    if cut >= 2:
        with pytest.raises(RemoteProtocolError):
            decode_incoming_rpc(whole, 2, cut)
    assert decode_outgoing_rpc(whole, 0, 6).incoming == whole[2:6]
    assert decode_incoming_rpc(whole, 2, 6).arguments == b""


def test_an_outgoing_rpc_that_ends_inside_its_destination() -> None:
    with pytest.raises(RemoteProtocolError, match="ends inside its destination"):
        decode_outgoing_rpc(bytes.fromhex("06 616263 000001"), 0, 3)


# --- the other messages with data ------------------------------------------------------------------------------------


@pytest.mark.parametrize("size_bytes", [0, 1, 9, 127, 128, 129, 255, 256, 4096, 40_000, 1 << 20, 5 << 30, 1 << 47])
def test_checkpoint_in_both_encodings(size_bytes: int) -> None:
    message = encode_checkpoint(size_bytes)
    _, start, end = decode_message(message)
    assert decode_checkpoint(message[start:end]) == size_bytes
    assert decode_checkpoint(size_bytes.to_bytes(8, "little")) == size_bytes
    assert decode_checkpoint(memoryview(size_bytes.to_bytes(8, "little"))) == size_bytes


@pytest.mark.parametrize("high_bits", range(256))
def test_eight_bytes_are_a_varint_or_fixed_by_their_high_bits(high_bits: int) -> None:
    data = bytes(0x11 | (0x80 if high_bits >> index & 1 else 0) for index in range(8))
    if high_bits == 0b0111_1111:  # seven times "another follows", then the last
        groups = sum((byte & 0x7F) << 7 * index for index, byte in enumerate(data))
        assert groups & 1  # so it stands for a negative size
        with pytest.raises(RemoteProtocolError, match=f"gives its size as -{groups + 1 >> 1} bytes"):
            decode_checkpoint(data)
        assert decode_checkpoint(b"\x90" + data[1:]) == groups - 1 >> 1
    elif high_bits & 0x80:
        with pytest.raises(RemoteProtocolError, match=r"gives its size as -[0-9]+ bytes"):
            decode_checkpoint(data)
    else:
        assert decode_checkpoint(data) == int.from_bytes(data, "little")


@pytest.mark.parametrize("size_bytes", [1 << 48, (1 << 48) + 1, 1 << 52, (1 << 55) - 1])
def test_varints_of_eight_bytes(size_bytes: int) -> None:
    varint = encode_zigzag(size_bytes)
    assert len(varint) == 8
    assert decode_checkpoint(varint) == size_bytes


@pytest.mark.parametrize(
    ("data", "error"),
    [
        ("", "runs past the end"),
        ("01", "gives its size as -1 bytes"),
        ("1200", "Checkpoint has 1 bytes too many"),
        ("09000000", "Checkpoint has 3 bytes too many"),  # four fixed bytes are no encoding
        ("ffffffffffffffff", "gives its size as -1 bytes"),
        ("090000000000000000", "has 8 bytes too many"),
    ],
)
def test_malformed_checkpoints(data: str, error: str) -> None:
    with pytest.raises(RemoteProtocolError, match=error):
        decode_checkpoint(bytes.fromhex(data))


def test_negative_sizes_are_not_sent() -> None:
    with pytest.raises(LocalProtocolError, match="-1 bytes"):
        encode_checkpoint(-1)
