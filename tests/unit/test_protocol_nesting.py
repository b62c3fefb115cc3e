"""How deeply MessagePack is nested, found without recursion; and that no decoder raises anything but DecodeError."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from immortal.protocol import decoding
from immortal.protocol.client_frames import logged_calls
from immortal.protocol.errors import RemoteProtocolError
from immortal.protocol.messages import RpcKind, RpcType, encode_incoming_rpc
from immortal.protocol.nesting import is_nested_beyond, messages_nested_too_deep, nesting_depth, without_values
from tests.helpers.effort import effort

SIZES = st.sampled_from((0, 1, 2, 4, 8, 16, 17, 31, 32, 300, 70_000))
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 63), (1 << 64) - 1),
    st.floats(allow_nan=False),
    st.builds(str.__mul__, st.just("a"), SIZES),
    st.builds(bytes, SIZES),
    st.builds(msgspec.msgpack.Ext, st.sampled_from((-128, 0, 5, 127)), st.builds(bytes, SIZES)),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.sampled_from("abc"), inner, max_size=3)),
    max_leaves=12,
)


def depth_of(value: Any) -> int:
    if isinstance(value, list):
        return 1 + max(map(depth_of, value), default=0)
    return 1 + max(map(depth_of, value.values()), default=0) if isinstance(value, dict) else 0


@settings(max_examples=effort(25), deadline=None)
@given(VALUES)
def test_the_depth_of_what_can_be_encoded(value: Any) -> None:
    data, depth = msgspec.msgpack.encode(value), depth_of(value)
    assert nesting_depth(data) == depth
    for limit in range(depth + 2):
        assert is_nested_beyond(b"xy" + data, 2, 2 + len(data), limit) == (depth > limit)


@settings(max_examples=effort(25), deadline=None)
@given(st.binary(max_size=300))
def test_of_any_bytes_a_decoder_comes_no_deeper(data: bytes) -> None:
    nesting_depth(data)
    if not is_nested_beyond(data, 0, len(data), 20):
        raised: Exception | None = None
        try:
            decoding.decode(data)
        except decoding.DecodeError as error:
            raised = error
        assert not isinstance(raised, decoding.TooDeepError)


@pytest.mark.parametrize("level", [b"\x91", b"\x81\xa1k", b"\x81", b"\xdc\x00\x01", b"\xdd\x00\x00\x00\x01"])
@pytest.mark.parametrize("depth", [64, 65, 1100, 100_000])
def test_each_way_to_nest(level: bytes, depth: int) -> None:
    data = level * depth + b"\x01"
    assert nesting_depth(data) == depth
    assert is_nested_beyond(data, 0, len(data), 64) == (depth > 64)
    assert nesting_depth(level * depth) == depth, "it ends too soon"


@settings(max_examples=effort(25), deadline=None)
@given(st.lists(VALUES, min_size=1, max_size=3), st.sampled_from(RpcKind), st.integers(1, 6))
def test_messages_that_are_too_deep_are_found_by_their_index(values: list[Any], kind: RpcKind, limit: int) -> None:
    messages = [encode_incoming_rpc(300, RpcType.FORK, msgspec.msgpack.encode([one]), kind) for one in values]
    deep = [index for index, one in enumerate(values) if depth_of(one) > limit]
    found = messages_nested_too_deep(b"".join(messages), len(messages), limit)
    assert [index for index, _ in found] == deep
    assert all(b"".join(messages)[start] == kind for _, start in found)


@pytest.mark.parametrize("data", [b"\x81\x01" * 1100, b"\xc8\xff\xff\x05", "текст".encode() * 40])
def test_arguments_that_are_no_array_are_not_looked_at(data: bytes) -> None:
    assert messages_nested_too_deep(encode_incoming_rpc(3, RpcType.FORK, data), 1, 64) == []


@pytest.mark.parametrize(
    ("data", "count", "left"),
    [
        (b"\x92\x07" + b"\x91" * 5000, 1, b"\x92\x07\xc0"),
        (b"\x91\x07", 1, b"\x91\x07"),
        (b"\xdc\x00\x03\xcd\x01\x00\xa1a\x93", 2, b"\xdc\x00\x03\xcd\x01\x00\xa1a\xc0"),
        (b"\x93\xc4\x02ab\xc7\x01\x05x\x91", 2, b"\x93\xc4\x02ab\xc7\x01\x05x\xc0"),
        (b"\x92\x91\x07\x01", 1, None),
        (b"\x90", 1, None),
        (b"", 1, None),
        (b"\x07", 1, None),
        (b"\x92\xc4\xff", 1, None),
        (b"\xdd\xff\xff\xff\xff\x01", 1, None),
    ],
)
def test_the_front_of_an_array_without_its_values(data: bytes, count: int, left: bytes | None) -> None:
    assert without_values(data, count) == left


@pytest.mark.parametrize("front", [b"\xdc\xff\xff", b"\xdd\xff\xff\xff\xff", b"\xdd\xff\xff\xff\xfe\x01\x02"])
def test_a_request_whose_array_gives_more_items_than_it_has_bytes(front: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="items in"):
        logged_calls(encode_incoming_rpc(3, RpcType.ASYNC, front), 1, "c", 1)


class Strange(msgspec.Struct):
    """As a user's own class."""

    number: int

    def __post_init__(self) -> None:
        raise {0: RuntimeError, 1: MemoryError, 2: OverflowError, 3: KeyError, 4: RecursionError}[self.number]("no")


@pytest.mark.parametrize("number", range(5))
def test_whatever_is_raised_is_a_decode_error(number: int) -> None:
    data = msgspec.msgpack.encode({"number": number})
    with pytest.raises(decoding.DecodeError):
        decoding.Decoder(Strange).decode(data)
    with pytest.raises(decoding.DecodeError):
        decoding.decode(data, type=Strange)
    with pytest.raises(decoding.DecodeError):
        decoding.decode_json(b'{"number": %d}' % number, type=Strange)


@pytest.mark.parametrize("text", ["[" * 2000, '{"a":' * 2000, "\ud800", "[" * 2000 + "]" * 2000])
def test_json_too(text: str) -> None:
    with pytest.raises(decoding.DecodeError):
        decoding.load_json(text if "[" in text or "{" in text else text.encode("utf-16", "surrogatepass"))


def test_a_hook_that_raises() -> None:
    def hook(code: int, data: memoryview) -> Any:
        raise RuntimeError("a codec of the user's")

    with pytest.raises(decoding.DecodeError, match="a codec of the user's"):
        decoding.decode(b"\xd4\x05\x01", ext_hook=hook)


@pytest.mark.parametrize("depth", [128, 129])
def test_what_a_person_gives_is_nested_as_far_as_it_can_be_shown(depth: int) -> None:
    text = "[" * depth + "]" * depth
    if depth == 128:
        assert decoding.parse_json_argument(text)
    else:
        with pytest.raises(decoding.TooDeepError):
            decoding.parse_json_argument(text)
