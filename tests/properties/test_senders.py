"""Who may send what: the checks of packed calls against a plain decoder's opinion of each."""

from __future__ import annotations

import msgspec
from hypothesis import example, given, settings
from hypothesis import strategies as st

from immortal.protocol.batch import CallRules, check_batch
from immortal.protocol.errors import RemoteProtocolError
from immortal.protocol.messages import RpcKind, RpcType, decode_incoming_rpc, decode_messages, encode_incoming_rpc
from tests.helpers.effort import effort

NAMES = ["", "a", "b", "bb", "~", "~web", "b" * 40, "ü" * 40]


def string_in(form: int, name: str) -> bytes:
    data = name.encode()
    if form == 0 and len(data) < 32:
        return bytes((0xA0 | len(data),)) + data
    size_bytes = (1, 2, 4)[form % 3] if len(data) < 256 else 4
    return bytes(({1: 0xD9, 2: 0xDA, 4: 0xDB}[size_bytes],)) + len(data).to_bytes(size_bytes, "big") + data


def array_in(form: int, items: list[bytes]) -> bytes:
    front = (
        bytes((0x90 | len(items),)),
        b"\xdc" + len(items).to_bytes(2, "big"),
        b"\xdd" + len(items).to_bytes(4, "big"),
    )
    return front[form] + b"".join(items)


callers = st.builds(string_in, st.integers(0, 3), st.sampled_from(NAMES))
arguments = st.one_of(
    st.builds(
        array_in,
        st.integers(0, 2),
        st.builds(lambda caller, rest: [caller, *rest], callers, st.lists(st.sampled_from([b"\1", b"\xc0", b"\xa1x"]))),
    ),
    st.builds(
        array_in, st.integers(0, 2), st.lists(st.sampled_from([b"\1", b"\xc0", b"\xc4\1b", b"\x90"]), max_size=3)
    ),
    st.binary(max_size=6),
    st.sampled_from([b"", b"\x92", b"\xdc\0", b"\x91\xd9", b"\x91\xa5b", b"\xc4\1b", b"\x81\xa1b\1"]),
)
message = st.builds(
    encode_incoming_rpc,
    st.sampled_from([0, 3, 343311, -1, -3]),
    st.sampled_from(RpcType),
    arguments,
    st.sampled_from([RpcKind.CALL] * 3 + [*RpcKind]),
)
batches = st.one_of(
    st.lists(message, min_size=1, max_size=8), st.builds(lambda one, count: [one] * count, message, st.integers(1, 8))
)


def caller_of(data: bytes) -> str | None:
    """What msgspec takes for the first item of an array, if that is a string."""
    try:
        items = msgspec.msgpack.decode(data, type=list[msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    try:
        return msgspec.msgpack.decode(items[0], type=str) if items else None
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def may_be_sent(one: bytes, *, negative: bool, names: tuple[str, ...] | None, negative_answers: bool = False) -> bool:
    ((_, start, end),) = decode_messages(one)
    rpc = decode_incoming_rpc(one, start, end)
    if rpc.method_id < 0 and not negative and not (negative_answers and rpc.kind != RpcKind.CALL):
        return False
    if names is None or (rpc.kind, rpc.rpc_type) != (RpcKind.CALL, RpcType.ASYNC):
        return True
    caller = caller_of(rpc.arguments)
    return caller is None or caller in names


AN_EMPTY_ARRAY_AND_MORE = encode_incoming_rpc(0, RpcType.ASYNC, b"\x90\xa2bb" + b"\1" * 15, RpcKind.CALL)


@settings(max_examples=effort(160), deadline=None)
@example([[AN_EMPTY_ARRAY_AND_MORE]], False, ("", "b"))
@given(
    st.lists(batches, min_size=1, max_size=4), st.booleans(), st.sampled_from([None, ("b",), ("", "b"), ("ü" * 40,)])
)
def test_nothing_passes_that_the_sender_may_not_send(
    parts: list[list[bytes]], negative: bool, names: tuple[str, ...] | None
) -> None:
    """One rule's checks follow each other: what it remembers of one batch must not let the next one through."""
    rules = CallRules(negative=negative, callers=names)
    reporting = CallRules(reports_negative=True, callers=names)
    answering = CallRules(negative=negative, negative_answers=True, callers=names)
    for one in parts:
        payload = b"".join(one)
        check_batch(payload, len(one))
        refused = False
        try:
            rules.check(payload, len(one))
        except RemoteProtocolError:
            refused = True
        allowed = all(may_be_sent(each, negative=negative, names=names) for each in one)
        assert allowed or refused, "something passed"
        if refused and allowed:  # only arguments that are no array in order behind the caller may be refused as well
            assert names is not None
            assert any(caller_looks_foreign(each, names) for each in one)
        may = all(may_be_sent(each, negative=negative, names=names, negative_answers=True) for each in one)
        try:
            answering.check(payload, len(one))
        except RemoteProtocolError:
            assert not may or any(caller_looks_foreign(each, names or ()) for each in one)
        else:
            assert may, "something passed"
        is_told = all(may_be_sent(each, negative=True, names=names) for each in one)
        try:
            reported = reporting.check(payload, len(one))
        except RemoteProtocolError:
            assert not is_told or any(caller_looks_foreign(each, names or ()) for each in one)
            continue
        assert is_told, "who waits for the refusal of a reserved method is somebody else"
        assert reported == [index for index, each in enumerate(one) if is_negative(each)]


def is_negative(one: bytes) -> bool:
    ((_, start, end),) = decode_messages(one)
    return decode_incoming_rpc(one, start, end).method_id < 0


def caller_looks_foreign(one: bytes, names: tuple[str, ...]) -> bool:
    """Bytes that are no array in order, and look like one that begins with a string that is none of ``names``."""
    ((_, start, end),) = decode_messages(one)
    data = decode_incoming_rpc(one, start, end).arguments
    item = data[{b"\xdc": 3, b"\xdd": 5}.get(data[:1], 1) :]
    size_bytes = {b"\xd9": 1, b"\xda": 2, b"\xdb": 4}.get(item[:1], 0)
    if not size_bytes and not b"\xa0" <= item[:1] <= b"\xbf":
        return False
    length = int.from_bytes(item[1 : 1 + size_bytes], "big") if size_bytes else item[0] & 0x1F
    name = item[1 + size_bytes :][:length]
    return caller_of(data) is None and name not in [each.encode() for each in names]
