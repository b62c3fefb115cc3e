"""Whatever is encoded is decoded to the same; whatever comes in, only the documented errors come out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from immortal.protocol.batch import decode_batch, decode_replayable_batch, encode_batch, encode_replayable_batch
from immortal.protocol.checksum import crc64, crc64_reference
from immortal.protocol.errors import DamagedRecordError, RemoteProtocolError
from immortal.protocol.extensions import (
    AppBatch,
    AppDescription,
    HandlerFailure,
    Hello,
    Origin,
    decode_app_batch,
    decode_app_description,
    decode_handler_failed,
    decode_hello,
    decode_impulses_accepted,
    decode_origins,
    decode_record_time,
    decode_version,
    encode_app_batch,
    encode_app_description,
    encode_handler_failed,
    encode_hello,
    encode_impulses_accepted,
    encode_origins,
    encode_record_time,
    encode_version,
)
from immortal.protocol.messages import (
    IncomingRpc,
    MessageType,
    OutgoingRpc,
    decode_attach_to,
    decode_checkpoint,
    decode_incoming_rpc,
    decode_message,
    decode_messages,
    decode_name,
    decode_outgoing_rpc,
    encode_attach_to,
    encode_checkpoint,
    encode_incoming_data,
    encode_incoming_rpc,
    encode_message,
    encode_name,
    encode_outgoing_rpc,
)
from immortal.protocol.peer_frames import FrameType, PeerFrame, decode_frame, encode_frame
from immortal.protocol.record import COMMITTER_ID_MAX, decode_header, encode_record, verify_record
from immortal.protocol.varint import (
    INT_MAX,
    INT_MIN,
    LONG_MAX,
    LONG_MIN,
    decode_zigzag_int,
    decode_zigzag_long,
    encode_zigzag,
)

ints = st.integers(INT_MIN, INT_MAX)
longs = st.integers(LONG_MIN, LONG_MAX)
positions = st.integers(0, LONG_MAX)
counts = st.integers(0, INT_MAX)
payloads = st.binary(max_size=300)
names = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=60).filter(
    lambda name: len(name.encode()) <= 255
)
kinds = st.integers(0, 3)
rpc_types = st.integers(0, 2)
buffers = st.sampled_from((bytes, bytearray, memoryview))


def data_of(message: bytes, message_type: MessageType) -> bytes:
    found, start, end = decode_message(message)
    assert (found, end) == (message_type, len(message))
    return message[start:]


# --- primitives ------------------------------------------------------------------------------------------------------


@given(longs, payloads, payloads)
def test_zigzag_long(value: int, before: bytes, behind: bytes) -> None:
    data = encode_zigzag(value)
    assert len(data) == max(1, (max(value, -value - 1).bit_length() + 1 + 6) // 7)
    assert decode_zigzag_long(before + data + behind, len(before)) == (value, len(before) + len(data))


@given(ints, payloads, payloads, buffers)
def test_zigzag_int(value: int, before: bytes, behind: bytes, kind: Callable[[bytes], Any]) -> None:
    data = encode_zigzag(value)
    assert len(data) <= 5
    assert decode_zigzag_int(kind(before + data + behind), len(before)) == (value, len(before) + len(data))


@given(longs)
def test_every_cut_of_a_zigzag_is_an_error(value: int) -> None:
    data = encode_zigzag(value)
    for size_bytes in range(len(data)):
        with pytest.raises(RemoteProtocolError, match="runs past the end"):
            decode_zigzag_long(data[:size_bytes])


@given(st.lists(st.binary(max_size=200), max_size=6), st.integers(0, (1 << 64) - 1))
def test_crc_is_the_reference_and_chains(chunks: list[bytes], start: int) -> None:
    value = reference = start
    for chunk in chunks:
        value = crc64(chunk, value)
        reference = crc64_reference(chunk, reference)
    whole = b"".join(chunks)
    assert value == reference == crc64(whole, start) == crc64_reference(whole, start)
    assert crc64(whole) == crc64(whole, 0) == crc64_reference(whole)


@given(names, payloads)
def test_names(name: str, behind: bytes) -> None:
    encoded = encode_name(name)
    assert decode_name(b"xx" + encoded + behind, 2) == (name, 2 + len(encoded))


# --- messages --------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 255), payloads)), buffers)
def test_messages(messages: list[tuple[int, bytes]], kind: Callable[[bytes], Any]) -> None:
    data = b"".join(encode_message(message_type, payload) for message_type, payload in messages)
    found = [(message_type, data[start:end]) for message_type, start, end in decode_messages(kind(data))]
    assert found == messages


@given(names, ints, rpc_types, payloads, kinds, payloads)
def test_rpcs(destination: str, method_id: int, rpc_type: int, arguments: bytes, kind: int, around: bytes) -> None:
    rpc = IncomingRpc(kind, method_id, rpc_type, arguments)
    data = data_of(encode_incoming_rpc(method_id, rpc_type, arguments, kind), MessageType.RPC)
    assert data == encode_incoming_data(method_id, rpc_type, arguments, kind)
    assert decode_incoming_rpc(data) == rpc
    assert decode_incoming_rpc(around + data + around, len(around), len(around) + len(data)) == rpc

    outgoing = data_of(encode_outgoing_rpc(destination, method_id, rpc_type, arguments, kind), MessageType.RPC)
    expected = OutgoingRpc(destination, rpc_type, data)
    assert decode_outgoing_rpc(outgoing) == expected
    assert decode_outgoing_rpc(around + outgoing + around, len(around), len(around) + len(outgoing)) == expected


@given(names.filter(bool))
def test_attach_to(destination: str) -> None:
    assert decode_attach_to(data_of(encode_attach_to(destination), MessageType.ATTACH_TO)) == destination


@given(positions)
def test_checkpoint(value: int) -> None:
    assert decode_checkpoint(data_of(encode_checkpoint(value), MessageType.CHECKPOINT)) == value


@given(st.integers(0, (1 << 55) - 1))
def test_a_fixed_width_checkpoint_size_is_never_taken_for_a_varint(size_bytes: int) -> None:
    assert decode_checkpoint(size_bytes.to_bytes(8, "little")) == size_bytes


@given(st.binary(min_size=8, max_size=8))
def test_eight_bytes_have_one_meaning(data: bytes) -> None:
    """A varint if they are one to the last byte, fixed otherwise: by decoding, not by looking at bits."""
    try:
        size_bytes, end = decode_zigzag_long(data)
    except RemoteProtocolError:
        end = 0
    if end != 8:
        size_bytes = int.from_bytes(data, "little", signed=True)
    if size_bytes < 0:
        with pytest.raises(RemoteProtocolError, match=f"size as {size_bytes} bytes"):
            decode_checkpoint(data)
    else:
        assert decode_checkpoint(data) == size_bytes


@given(payloads, st.integers(0, INT_MAX).filter(lambda count: count != 1))
def test_batches(payload: bytes, count: int) -> None:
    data = data_of(encode_batch(payload, count) + payload, MessageType.RPC_BATCH)
    found, start = decode_batch(data)
    assert (found, data[start:]) == (count, payload)


@given(payloads, counts, counts)
def test_replayable_batches(payload: bytes, one: int, other: int) -> None:
    replayable, count = sorted((one, other))
    data = data_of(encode_replayable_batch(payload, count, replayable), MessageType.COUNT_REPLAYABLE_RPC_BATCH)
    *found, start = decode_replayable_batch(data)
    assert (found, data[start:]) == ([count, replayable], payload)


# --- records ---------------------------------------------------------------------------------------------------------


@given(st.integers(1, COMMITTER_ID_MAX), st.integers(-2, LONG_MAX), payloads, payloads, buffers)
def test_records(
    committer_id: int, sequence_id: int, content: bytes, behind: bytes, kind: Callable[[bytes], Any]
) -> None:
    record = encode_record(committer_id, sequence_id, content)
    header = verify_record(kind(record + behind))
    assert (header.committer_id, header.size_bytes, header.sequence_id) == (committer_id, len(record), sequence_id)
    assert decode_header(kind(behind + record), len(behind)) == header
    assert record[24:] == content


# --- extensions ------------------------------------------------------------------------------------------------------


@given(st.frozensets(ints, max_size=64), names, st.binary(max_size=1024))
def test_hellos(extensions: frozenset[int], label: str, secret: bytes) -> None:
    hello = Hello(extensions, label, secret)
    assert decode_hello(data_of(encode_hello(hello), MessageType.HELLO)) == hello


@given(longs, positions)
def test_times_and_acceptances(time_ns: int, count: int) -> None:
    message = encode_record_time(time_ns)
    assert len(data_of(message, MessageType.RECORD_TIME)) == 8
    assert decode_record_time(message, 2, 10) == time_ns
    accepted = data_of(encode_impulses_accepted(count), MessageType.IMPULSES_ACCEPTED)
    assert decode_impulses_accepted(accepted) == count


@given(st.sampled_from((MessageType.STREAM_BATCH, MessageType.IMPULSE_BATCH)), names, st.integers(1, INT_MAX), payloads)
def test_app_batches(message_type: MessageType, destination: str, count: int, payload: bytes) -> None:
    message = encode_app_batch(message_type, destination, count, payload)
    assert decode_app_batch(data_of(message, message_type)) == AppBatch(destination, count, payload)


methods = st.dictionaries(st.tuples(names, st.integers(0, INT_MAX)), names, max_size=20)


@given(st.integers(1, INT_MAX), methods)
def test_app_descriptions_and_versions(version: int, names_of: dict[tuple[str, int], str]) -> None:
    description = AppDescription(version, names_of)
    assert (
        decode_app_description(data_of(encode_app_description(description), MessageType.APP_DESCRIPTION)) == description
    )
    assert decode_version(data_of(encode_version(version), MessageType.VERSION)) == version


@given(
    st.lists(st.builds(Origin, positions, st.integers(0, INT_MAX), st.integers(1, INT_MAX)), max_size=20),
    st.builds(HandlerFailure, positions, st.integers(0, INT_MAX), st.text(max_size=100)),
)
def test_origins_and_failures(origins: list[Origin], failure: HandlerFailure) -> None:
    assert decode_origins(data_of(encode_origins(origins), MessageType.ORIGINS)) == origins
    assert decode_handler_failed(data_of(encode_handler_failed(failure), MessageType.HANDLER_FAILED)) == failure


# --- peer frames -----------------------------------------------------------------------------------------------------

frames = st.builds(
    PeerFrame,
    st.sampled_from([one for one in FrameType if one is not FrameType.UNKNOWN]),
    names,
    names,
    st.integers(1, COMMITTER_ID_MAX),
    positions,
    st.integers(1, LONG_MAX),
    st.integers(1, INT_MAX),
    longs,
    st.binary(min_size=1, max_size=300),
    st.integers(0, 0xFFFF),
    names,
)


@given(frames)
def test_frames(frame: PeerFrame) -> None:
    expected = frame if frame.frame_type is FrameType.BATCH else structs.replace(frame, payload=b"")
    assert decode_frame(encode_frame(frame)) == expected


@given(frames, st.data())
def test_damaged_frames_are_refused(frame: PeerFrame, data: st.DataObject) -> None:
    """Up to 8 neighbouring bytes, anywhere behind the version (whose own error comes before the check's)."""
    header, payload = encode_frame(frame)
    whole = header + payload
    start = data.draw(st.integers(1, len(whole) - 1), label="start")
    mask = data.draw(st.binary(min_size=1, max_size=8).filter(any), label="mask")[: len(whole) - start]
    if not any(mask):
        return
    damaged = bytearray(whole)
    for index, flips in enumerate(mask):
        damaged[start + index] ^= flips
    with pytest.raises(DamagedRecordError, match=r"a frame's check is [0-9a-f]{16}, its bytes give [0-9a-f]{16}"):
        decode_frame([bytes(damaged[: len(header)]), bytes(damaged[len(header) :])])


# --- anything at all -------------------------------------------------------------------------------------------------

DECODERS: list[Callable[[bytes], Any]] = [
    decode_zigzag_int,
    decode_zigzag_long,
    lambda data: list(decode_messages(data)),
    lambda data: decode_name(data, 0),
    decode_incoming_rpc,
    decode_outgoing_rpc,
    decode_attach_to,
    decode_checkpoint,
    decode_batch,
    decode_replayable_batch,
    decode_hello,
    lambda data: decode_record_time(data, 0, len(data)),
    decode_app_batch,
    decode_impulses_accepted,
    decode_header,
    verify_record,
    lambda data: decode_frame([data]),
    lambda data: decode_frame([data[:50], data[50:]]),
]

ANYTHING = st.one_of(
    st.binary(max_size=100),
    st.lists(st.sampled_from((0, 1, 2, 3, 4, 8, 0x7F, 0x80, 0x81, 0xFE, 0xFF)), max_size=40).map(bytes),
)


@given(ANYTHING)
def test_only_documented_errors_come_out(data: bytes) -> None:
    for decode in DECODERS:
        with contextlib.suppress(RemoteProtocolError):
            decode(data)


@given(ANYTHING, st.data())
def test_rpcs_inside_other_bytes(data: bytes, draw: st.DataObject) -> None:
    """Decoding a part does the same as decoding that part cut out."""
    start = draw.draw(st.integers(0, len(data)))
    end = draw.draw(st.integers(start, len(data)))
    for decode in (decode_incoming_rpc, decode_outgoing_rpc):
        results: list[Any] = []
        for arguments in ((data, start, end), (data[start:end],)):
            try:
                results.append(decode(*arguments))
            except RemoteProtocolError:
                results.append("refused")
        assert results[0] == results[1]
