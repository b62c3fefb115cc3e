"""The golden bytes of tests/vectors/wire.json, made by an independent encoder: every field of it, both ways."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from immortal.protocol.batch import (
    check_batch,
    decode_batch,
    decode_replayable_batch,
    encode_batch,
    encode_replayable_batch,
)
from immortal.protocol.checksum import crc64, crc64_reference
from immortal.protocol.errors import DamagedRecordError, RemoteProtocolError
from immortal.protocol.messages import (
    IncomingRpc,
    MessageType,
    OutgoingRpc,
    RpcKind,
    RpcType,
    decode_attach_to,
    decode_checkpoint,
    decode_incoming_rpc,
    decode_message,
    decode_messages,
    decode_outgoing_rpc,
    encode_attach_to,
    encode_checkpoint,
    encode_incoming_data,
    encode_incoming_rpc,
    encode_message,
    encode_outgoing_rpc,
)
from immortal.protocol.readers import BlobStart, Message, MessageReader, Record, RecordReader
from immortal.protocol.record import HEADER_SIZE_BYTES, encode_record, verify_record
from immortal.protocol.varint import decode_zigzag_int, decode_zigzag_long, encode_zigzag

GOLDEN: dict[str, list[dict[str, Any]]] = json.loads(
    (Path(__file__).parents[1] / "vectors" / "wire.json").read_text(encoding="utf-8")
)
T = MessageType


def named(field: str, key: str) -> list[Any]:
    return [pytest.param(case, id=str(case[key]) or "empty") for case in GOLDEN[field]]


def test_every_field_of_the_vectors_is_tested() -> None:
    assert set(GOLDEN) == {
        "zigzag_int",
        "zigzag_long",
        "zigzag_malformed",
        "check_bytes",
        "messages",
        "records",
        "damaged_records",
    }
    assert [case["name"] for case in GOLDEN["messages"]] == list(MESSAGES)
    assert [case["name"] for case in GOLDEN["records"]] == list(RECORDS)
    assert [case["damaged"] for case in GOLDEN["damaged_records"]] == list(DAMAGED)
    assert [case["why"] for case in GOLDEN["zigzag_malformed"]] == list(MALFORMED)


# --- primitives ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", named("zigzag_int", "value"))
def test_zigzag_int(case: dict[str, Any]) -> None:
    data = bytes.fromhex(case["hex"])
    assert encode_zigzag(case["value"]) == data
    assert decode_zigzag_int(data) == (case["value"], len(data))
    assert decode_zigzag_int(b"\xff" + data + b"\xff", 1) == (case["value"], 1 + len(data))


@pytest.mark.parametrize("case", named("zigzag_long", "value"))
def test_zigzag_long(case: dict[str, Any]) -> None:
    data = bytes.fromhex(case["hex"])
    assert encode_zigzag(case["value"]) == data
    assert decode_zigzag_long(data) == (case["value"], len(data))
    assert decode_zigzag_long(b"\xff" + data + b"\xff", 1) == (case["value"], 1 + len(data))


MALFORMED = {
    "runs on after five groups": "ZigZagInt at byte 0 is longer than 5 bytes",
    "six groups": "ZigZagInt at byte 0 is longer than 5 bytes",
    "ends inside": "ZigZagInt at byte 0 runs past the end",
    "eleven groups": "ZigZagLong at byte 0 is longer than 10 bytes",
}


@pytest.mark.parametrize("case", named("zigzag_malformed", "why"))
def test_malformed_zigzag(case: dict[str, Any]) -> None:
    decode = {"int": decode_zigzag_int, "long": decode_zigzag_long}[case["kind"]]
    with pytest.raises(RemoteProtocolError, match=MALFORMED[case["why"]]):
        decode(bytes.fromhex(case["hex"]))


@pytest.mark.parametrize("case", named("check_bytes", "crc64_xz"))
def test_check_bytes(case: dict[str, Any]) -> None:
    data = bytes.fromhex(case["hex"])
    assert crc64(data) == crc64_reference(data) == int(case["crc64_xz"], 16)


# --- messages --------------------------------------------------------------------------------------------------------

CALL_32 = IncomingRpc(RpcKind.CALL, 32, RpcType.FORK, b"\5\4\3")
CALL_MINUS_5 = IncomingRpc(RpcKind.CALL, -5, RpcType.ASYNC, b"x" * 100)
IMPULSE_300 = IncomingRpc(RpcKind.CALL, 300, RpcType.IMPULSE, b"")


def incoming(rpc: IncomingRpc) -> bytes:
    return encode_incoming_rpc(rpc.method_id, rpc.rpc_type, rpc.arguments, rpc.kind)


def rpcs_of(payload: bytes) -> list[IncomingRpc]:
    found = list(decode_messages(payload))
    assert {message_type for message_type, _, _ in found} <= {T.RPC}
    return [decode_incoming_rpc(payload, start, end) for _, start, end in found]


def batch_of(data: bytes) -> tuple[int, list[IncomingRpc]]:
    count, start = decode_batch(data)
    check_batch(data[start:], count)
    return count, rpcs_of(data[start:])


def replayable_batch_of(data: bytes) -> tuple[int, int, list[IncomingRpc]]:
    count, replayable, start = decode_replayable_batch(data)
    check_batch(data[start:], count)
    return count, replayable, rpcs_of(data[start:])


def outgoing(destination: str, method_id: int, rpc_type: int, arguments: bytes) -> OutgoingRpc:
    return OutgoingRpc(destination, rpc_type, encode_incoming_data(method_id, rpc_type, arguments))


def no_data(data: bytes) -> None:
    assert data == b""


TWO = incoming(CALL_32) + incoming(CALL_MINUS_5)
THREE = incoming(CALL_32) + incoming(IMPULSE_300) + incoming(CALL_MINUS_5)

# name: (its bytes as this project encodes them, type, decoder of its data, what that gives)
MESSAGES: dict[str, tuple[bytes, MessageType, Callable[[bytes], Any], Any]] = {
    "AttachTo counter": (encode_attach_to("counter"), T.ATTACH_TO, decode_attach_to, "counter"),
    "TakeCheckpoint": (encode_message(T.TAKE_CHECKPOINT), T.TAKE_CHECKPOINT, no_data, None),
    "UpgradeTakeCheckpoint": (
        encode_message(T.UPGRADE_TAKE_CHECKPOINT),
        T.UPGRADE_TAKE_CHECKPOINT,
        no_data,
        None,
    ),
    "TakeBecomingPrimaryCheckpoint": (
        encode_message(T.TAKE_BECOMING_PRIMARY_CHECKPOINT),
        T.TAKE_BECOMING_PRIMARY_CHECKPOINT,
        no_data,
        None,
    ),
    "UpgradeService": (encode_message(T.UPGRADE_SERVICE), T.UPGRADE_SERVICE, no_data, None),
    "BecomingPrimary": (encode_message(T.BECOMING_PRIMARY), T.BECOMING_PRIMARY, no_data, None),
    "TrimTo 70000": (encode_message(T.TRIM_TO, encode_zigzag(70000)), T.TRIM_TO, decode_zigzag_long, (70000, 3)),
    "Checkpoint of 9 bytes": (encode_checkpoint(9), T.CHECKPOINT, decode_checkpoint, 9),
    "Checkpoint of 5 GiB": (encode_checkpoint(5 << 30), T.CHECKPOINT, decode_checkpoint, 5 << 30),
    "Checkpoint of 9 bytes, fixed-width size of existing C clients": (
        encode_message(T.CHECKPOINT, (9).to_bytes(8, "little")),
        T.CHECKPOINT,
        decode_checkpoint,
        9,
    ),
    "InitialMessage wrapping an RPC, method 32, fork, args 05 04 03": (
        encode_message(T.INITIAL_MESSAGE, incoming(CALL_32)),
        T.INITIAL_MESSAGE,
        rpcs_of,
        [CALL_32],
    ),
    "incoming RPC, method 32, fork, args 05 04 03": (incoming(CALL_32), T.RPC, decode_incoming_rpc, CALL_32),
    "incoming RPC, method -5, async, 100 x 'x'": (incoming(CALL_MINUS_5), T.RPC, decode_incoming_rpc, CALL_MINUS_5),
    "incoming RPC, method 300, impulse, no args": (incoming(IMPULSE_300), T.RPC, decode_incoming_rpc, IMPULSE_300),
    "incoming returned value, method 7, args 2a": (
        encode_incoming_rpc(7, RpcType.ASYNC, b"\x2a", RpcKind.RETURNED_VALUE),
        T.RPC,
        decode_incoming_rpc,
        IncomingRpc(RpcKind.RETURNED_VALUE, 7, RpcType.ASYNC, b"\x2a"),
    ),
    "outgoing RPC to counter, method 3, fork, args 01": (
        encode_outgoing_rpc("counter", 3, RpcType.FORK, b"\1"),
        T.RPC,
        decode_outgoing_rpc,
        outgoing("counter", 3, RpcType.FORK, b"\1"),
    ),
    "outgoing RPC to oneself, method 3, fork, args 01": (
        encode_outgoing_rpc("", 3, RpcType.FORK, b"\1"),
        T.RPC,
        decode_outgoing_rpc,
        outgoing("", 3, RpcType.FORK, b"\1"),
    ),
    "outgoing RPC to zähler (name length in bytes: 7), method 3, async, no args": (
        encode_outgoing_rpc("zähler", 3, RpcType.ASYNC, b""),
        T.RPC,
        decode_outgoing_rpc,
        outgoing("zähler", 3, RpcType.ASYNC, b""),
    ),
    "RPCBatch of 2": (encode_batch(TWO, 2) + TWO, T.RPC_BATCH, batch_of, (2, [CALL_32, CALL_MINUS_5])),
    "RPCBatch of 0": (encode_batch(b"", 0), T.RPC_BATCH, batch_of, (0, [])),
    "CountReplayableRPCBatch of 3, 2 replayable": (
        encode_replayable_batch(THREE, 3, 2),
        T.COUNT_REPLAYABLE_RPC_BATCH,
        replayable_batch_of,
        (3, 2, [CALL_32, IMPULSE_300, CALL_MINUS_5]),
    ),
}


@pytest.mark.parametrize("case", named("messages", "name"))
def test_message(case: dict[str, Any]) -> None:
    golden = bytes.fromhex(case["hex"])
    encoded, message_type, decode, value = MESSAGES[case["name"]]
    assert encoded == golden
    found_type, start, end = decode_message(golden)
    assert (found_type, end) == (message_type, len(golden))
    assert decode(golden[start:end]) == value

    reader = MessageReader()
    reader.receive_data(golden)
    event = reader.next_event()
    assert event == (BlobStart(value) if message_type is T.CHECKPOINT else Message(message_type, golden[start:]))
    assert reader.buffered_bytes == 0


# --- records ---------------------------------------------------------------------------------------------------------

RECORDS = {
    "first start": encode_message(T.TAKE_BECOMING_PRIMARY_CHECKPOINT),
    "checkpoint announcement": encode_checkpoint(9),
    "initial message": encode_message(T.INITIAL_MESSAGE, incoming(CALL_32)),
    "batch and a single RPC": encode_batch(TWO, 2) + TWO + incoming(IMPULSE_300),
    "empty": b"",
}


@pytest.mark.parametrize("case", named("records", "name"))
def test_record(case: dict[str, Any]) -> None:
    golden = bytes.fromhex(case["hex"])
    content = RECORDS[case["name"]]
    assert encode_record(case["committer_id"], case["sequence_id"], content) == golden
    header = verify_record(golden)
    assert (header.committer_id, header.size_bytes, header.sequence_id) == (
        case["committer_id"],
        len(golden),
        case["sequence_id"],
    )
    assert golden[HEADER_SIZE_BYTES:] == content

    reader = RecordReader()
    reader.receive_data(golden)
    assert reader.next_event() == (BlobStart(9) if case["sequence_id"] == -2 else Record(header, content))
    assert reader.buffered_bytes == 0


DAMAGED = {
    "committer ID": r"record 1: the check bytes are 5d5ae38e54dc7816, its bytes give [0-9a-f]{16}",
    "size": r"record 1 has 148 bytes, its header says 149",
    "check bytes": r"record 1: the check bytes are 5d5ae38e54dc7916, its bytes give 5d5ae38e54dc7816",
    "sequence ID": r"record 0: the check bytes are 5d5ae38e54dc7816, its bytes give [0-9a-f]{16}",
    "content": r"record 1: the check bytes are 5d5ae38e54dc7816, its bytes give [0-9a-f]{16}",
    "last byte": r"record 1: the check bytes are 5d5ae38e54dc7816, its bytes give [0-9a-f]{16}",
}


@pytest.mark.parametrize("case", named("damaged_records", "damaged"))
def test_damaged_record(case: dict[str, Any]) -> None:
    damaged = bytes.fromhex(case["hex"])
    with pytest.raises(DamagedRecordError, match=DAMAGED[case["damaged"]]):
        verify_record(damaged)

    reader = RecordReader()
    reader.receive_data(damaged + b"\0")  # a size that is one too large is seen once that byte is there
    with pytest.raises(DamagedRecordError, match=r"record [01]: the check bytes are"):
        reader.next_event()
