# cython: annotation_typing=False
# (Compiled annotations of built-in types would refuse subclasses. The directive works only in the first line.)
"""Messages of the local protocol: size (ZigZagInt, of type + data), type (1 byte), data. `docs/WIRE.md` lists types."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import TypeVar

from msgspec import Struct, msgpack

from immortal.protocol.decoding import Decoder
from immortal.protocol.errors import LimitExceededError, LocalProtocolError, RemoteProtocolError
from immortal.protocol.limits import MESSAGE_SIZE_BYTES_MAX, NAME_SIZE_BYTES_MAX, RPC_SIZE_BYTES_MAX
from immortal.protocol.varint import INT_MAX, INT_MIN, Readable, decode_zigzag_int, decode_zigzag_long, encode_zigzag

T = TypeVar("T")


class MessageType(IntEnum):
    RPC = 0
    ATTACH_TO = 1
    TAKE_CHECKPOINT = 2
    RPC_BATCH = 5
    CHECKPOINT = 8
    INITIAL_MESSAGE = 9
    UPGRADE_TAKE_CHECKPOINT = 10
    TAKE_BECOMING_PRIMARY_CHECKPOINT = 11
    UPGRADE_SERVICE = 12
    COUNT_REPLAYABLE_RPC_BATCH = 13
    TRIM_TO = 14
    BECOMING_PRIMARY = 15
    # Extensions of this project; an app gets one only if its Hello has requested it.
    HELLO = 64
    RECORD_TIME = 65
    STREAM_BATCH = 66
    IMPULSE_BATCH = 67
    IMPULSES_ACCEPTED = 68
    GOODBYE = 69
    REFUSAL = 70
    SNAPSHOT_BEGIN = 71
    SNAPSHOT_CHUNK = 72
    SNAPSHOT_END = 73
    APP_DESCRIPTION = 74
    UPGRADE_FAILED = 75
    VERSION = 76
    ORIGINS = 77
    HANDLER_FAILED = 78
    INSTANCE_NAME = 79
    VERDICT = 80
    VERDICTS = 81
    HANDLING = 82
    CAREFUL = 83
    LEAVING = 84
    RETRY_REFUSED = 85
    NUMBERS = 86
    CHALLENGE = 87
    PROOF = 88
    SOURCES = 89
    APP_TIME = 90
    HANDLERS_ASKED = 91
    HANDLERS = 92
    QUERY_ASKED = 93
    QUERY_ANSWERED = 94
    CHECKPOINT_FAILED = 95
    TAKEN_BACK = 96
    TAKE_BACK = 97
    BARRIER = 98


class RpcKind(IntEnum):
    """Kind of an incoming RPC (its byte 0): a call, or one of three answers."""

    CALL = 0
    RETURNED_VALUE = 1
    RETURNED_NOTHING = 2
    RAISED = 3


class RpcType(IntEnum):
    """Way in which an RPC was sent."""

    ASYNC = 0
    FORK = 1
    IMPULSE = 2


class IncomingRpc(Struct, frozen=True):
    """RPC in the receiver's form."""

    kind: int
    method_id: int
    rpc_type: int
    arguments: bytes


class OutgoingRpc(Struct, frozen=True):
    """RPC in the sending app's form: the destination ("" is oneself), then the incoming RPC's bytes, undecoded."""

    destination: str
    rpc_type: int
    incoming: bytes


def encode_message(message_type: int, data: bytes = b"") -> bytes:
    """Encode one message. Raises LocalProtocolError above MESSAGE_SIZE_BYTES_MAX, and RPC_SIZE_BYTES_MAX for an RPC."""
    size_bytes = len(data) + 1
    most = MESSAGE_SIZE_BYTES_MAX if message_type != MessageType.RPC else RPC_SIZE_BYTES_MAX
    if size_bytes > most:
        raise LocalProtocolError(f"a message of {size_bytes} bytes, at most {most} are allowed: send it in parts")
    return encode_zigzag(size_bytes) + bytes((message_type,)) + data


def message_of(kind: MessageType, form: type[T], name: str) -> tuple[Callable[[T], bytes], Callable[[bytes], T]]:
    """Return the encoder and the decoder of a message whose data is a ``form`` as MessagePack.

    The encoder raises LocalProtocolError if the message is too large. The decoder takes the data alone, and raises
    RemoteProtocolError, whose text calls the message ``name``.
    """
    decode = Decoder(form).decode_message
    return lambda value: encode_message(kind, msgpack.encode(value)), lambda data: decode(data, name)


def decode_size(data: Readable, offset: int) -> tuple[int, int]:
    """Decode the size at the front of a message: (bytes of type + data, offset after it). Checks its bounds."""
    size_bytes, start = decode_zigzag_int(data, offset)
    if size_bytes < 1:
        raise RemoteProtocolError(f"a message at byte {offset} gives its size as {size_bytes}, at least 1 was expected")
    if size_bytes > RPC_SIZE_BYTES_MAX:
        raise LimitExceededError(f"a message at byte {offset}", size_bytes, RPC_SIZE_BYTES_MAX)
    return size_bytes, start


def decode_message(data: Readable, offset: int = 0) -> tuple[int, int, int]:
    """Decode the message at ``offset``: (type, start of its data, end of its data). Raises RemoteProtocolError."""
    size_bytes, start = decode_size(data, offset)
    end = start + size_bytes
    if end > len(data):
        raise RemoteProtocolError(
            f"a message at byte {offset} gives its size as {size_bytes}, only {len(data) - start} bytes are left"
        )
    return data[start], start + 1, end


def decode_messages(data: Readable) -> Iterator[tuple[int, int, int]]:
    """Yield (type, start, end) for each message in ``data``, which are packed without gaps."""
    offset = 0
    while offset < len(data):
        message_type, start, offset = decode_message(data, offset)
        yield message_type, start, offset


# --- names -----------------------------------------------------------------------------------------------------------


def encode_name(name: str) -> bytes:
    """Encode a name: length (ZigZagInt, bytes), UTF-8. Raises LocalProtocolError for an impossible name."""
    encoded = _encode_utf8(name)
    return encode_zigzag(len(encoded)) + encoded


def _encode_utf8(name: str) -> bytes:
    try:
        encoded = name.encode()
    except UnicodeEncodeError:  # a lone surrogate
        raise LocalProtocolError(f"a name that UTF-8 cannot hold: {name!r}") from None
    if len(encoded) > NAME_SIZE_BYTES_MAX:
        raise LocalProtocolError(f"a name of {len(encoded)} bytes, at most {NAME_SIZE_BYTES_MAX} are allowed")
    if 0 in encoded:
        raise LocalProtocolError(f"a name with a zero byte: {name!r}")
    return encoded


def _decode_utf8(data: Readable, start: int, end: int) -> str:
    try:
        name = str(data[start:end], "utf-8")
    except UnicodeDecodeError:
        raise RemoteProtocolError(f"a name at byte {start} is not UTF-8: {bytes(data[start:end])!r}") from None
    if "\0" in name:  # the log ends its keys with one
        raise RemoteProtocolError(f"a name at byte {start} has a zero byte: {name!r}")
    return name


def decode_name(data: Readable, offset: int) -> tuple[str, int]:
    """Decode the name at ``offset``: (name, offset after it). Raises RemoteProtocolError."""
    size_bytes, start = decode_zigzag_int(data, offset)
    if not 0 <= size_bytes <= NAME_SIZE_BYTES_MAX:
        raise RemoteProtocolError(
            f"a name at byte {offset} gives its length as {size_bytes} bytes, 0 to {NAME_SIZE_BYTES_MAX} are allowed"
        )
    end = start + size_bytes
    if end > len(data):
        raise RemoteProtocolError(f"a name at byte {offset} runs past the end of its message")
    return _decode_utf8(data, start, end), end


# --- RPCs ------------------------------------------------------------------------------------------------------------


def encode_incoming_data(method_id: int, rpc_type: int, arguments: bytes, kind: int = RpcKind.CALL) -> bytes:
    """Encode the data of an incoming RPC message."""
    if not INT_MIN <= method_id <= INT_MAX:
        raise LocalProtocolError(f"method ID {method_id} does not fit into 32 bits")
    return bytes((kind,)) + encode_zigzag(method_id) + bytes((rpc_type,)) + arguments


def encode_incoming_rpc(method_id: int, rpc_type: int, arguments: bytes, kind: int = RpcKind.CALL) -> bytes:
    """Encode a whole incoming RPC message."""
    return encode_message(MessageType.RPC, encode_incoming_data(method_id, rpc_type, arguments, kind))


def encode_outgoing_rpc(
    destination: str, method_id: int, rpc_type: int, arguments: bytes, kind: int = RpcKind.CALL
) -> bytes:
    """Encode a whole outgoing RPC message; ``destination`` "" is the app's own instance."""
    incoming = encode_incoming_data(method_id, rpc_type, arguments, kind)
    return encode_message(MessageType.RPC, encode_name(destination) + incoming)


def decode_incoming_rpc(data: Readable, start: int = 0, end: int | None = None) -> IncomingRpc:
    """Decode the data of an incoming RPC message, ``data[start:end]``. Raises RemoteProtocolError."""
    end = len(data) if end is None else end
    if end - start < 3:
        raise RemoteProtocolError(f"an RPC of {end - start} bytes, at least 3 were expected")
    kind = data[start]
    if kind > RpcKind.RAISED:
        raise RemoteProtocolError(f"an RPC's first byte is {kind}, 0 to 3 were expected")
    method_id, offset = decode_zigzag_int(data, start + 1)
    if offset >= end:
        raise RemoteProtocolError("an RPC ends inside its method ID or before its RPC type")
    rpc_type = data[offset]
    if rpc_type > RpcType.IMPULSE:
        raise RemoteProtocolError(f"an RPC has type {rpc_type}, 0 (async), 1 (fork) or 2 (impulse) were expected")
    return IncomingRpc(kind, method_id, rpc_type, bytes(data[offset + 1 : end]))


def decode_outgoing_rpc(data: Readable, start: int = 0, end: int | None = None) -> OutgoingRpc:
    """Decode the data of an outgoing RPC message; the bytes after the destination are checked and kept."""
    end = len(data) if end is None else end
    destination, offset = decode_name(data, start)
    if offset > end:
        raise RemoteProtocolError("an outgoing RPC ends inside its destination")
    rpc = decode_incoming_rpc(data, offset, end)
    return OutgoingRpc(destination, rpc.rpc_type, bytes(data[offset:end]))


# --- the other messages with data ------------------------------------------------------------------------------------


def encode_barrier(destination: str) -> bytes:
    """Encode a Barrier: later messages to others wait until ``destination`` has all earlier messages to it."""
    return encode_message(MessageType.BARRIER, _encode_utf8(destination))


def encode_attach_to(destination: str) -> bytes:
    if not destination:
        raise LocalProtocolError("AttachTo needs a destination's name; oneself needs no attaching")
    return encode_message(MessageType.ATTACH_TO, _encode_utf8(destination))


def decode_attach_to(data: Readable) -> str:
    if not 1 <= len(data) <= NAME_SIZE_BYTES_MAX:
        raise RemoteProtocolError(f"AttachTo names {len(data)} bytes, 1 to {NAME_SIZE_BYTES_MAX} were expected")
    return _decode_utf8(data, 0, len(data))


def encode_checkpoint(size_bytes: int) -> bytes:
    """Encode a Checkpoint message; the blob of ``size_bytes`` bytes must follow it without a header."""
    if size_bytes < 0:
        raise LocalProtocolError(f"a checkpoint of {size_bytes} bytes")
    return encode_message(MessageType.CHECKPOINT, encode_zigzag(size_bytes))


def decode_checkpoint(data: Readable) -> int:
    """Decode a checkpoint's size in bytes: a ZigZagLong, or the 8 fixed bytes of existing C clients.

    The two cannot be confused: in an 8-byte varint the first seven bytes have the high bit and the last has not. Read
    as fixed bytes they would be at least 2**55, larger than any checkpoint.
    """
    if len(data) == 8 and (data[7] >= 0x80 or min(data[:7]) < 0x80):
        size_bytes = int.from_bytes(data, "little", signed=True)
    else:
        size_bytes, end = decode_zigzag_long(data, 0)
        require_end("Checkpoint", data, end)
    if size_bytes < 0:
        raise RemoteProtocolError(f"a Checkpoint gives its size as {size_bytes} bytes")
    return size_bytes


def require_end(name: str, data: Readable, end: int) -> None:
    """Raise RemoteProtocolError if the data of the message ``name`` goes on after ``end``."""
    if end != len(data):
        raise RemoteProtocolError(f"{name} has {len(data) - end} bytes too many")
