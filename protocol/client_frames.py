"""Frames between a client (a process that is no instance) and a coordinator: one ZeroMQ message part each.

HELLO     client -> coordinator   the client's ID, and the instance
WELCOME   coordinator -> client   the last request number taken from this client; the methods of the instance
REQUEST   client -> coordinator   ``count`` calls, with consecutive numbers from ``number`` on
REPLY     coordinator -> client   the outcomes of ``count`` calls
PING      client -> coordinator   asks for the outcomes of ``count`` request numbers
PONG      coordinator -> client   the last request number taken from this client
REFUSED   coordinator -> client   the reason, as text; with a number, for the QUERY with that number
QUERY     client -> coordinator   one call of a method that only reads, which is not logged
ANSWER    coordinator -> client   the outcome of the query with that number

A client numbers its requests from 1. The coordinator accepts only the next number, so a repeated request is done once.
To an app the client is a caller called ``~ID`` that waits for an answer. Queries have their own numbers, by which a
client recognizes their answers. A repeated query can run again.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable, Iterator, Mapping
from enum import IntEnum

import msgspec
from msgspec import Struct

from immortal.protocol.checksum import crc64
from immortal.protocol.errors import DamagedRecordError, LimitExceededError, LocalProtocolError, RemoteProtocolError
from immortal.protocol.extensions import QUERIES
from immortal.protocol.identity import IdentityConflict, call_identity
from immortal.protocol.messages import (
    MessageType,
    RpcKind,
    RpcType,
    decode_message,
    decode_name,
    encode_incoming_rpc,
    encode_name,
)
from immortal.protocol.varint import decode_zigzag_int, decode_zigzag_long, encode_zigzag

CLIENT_VERSION = 1
FRAME_MARK = 0xC0 | CLIENT_VERSION  # the first byte: the messenger's frames begin with 02
PAYLOAD_SIZE_BYTES_MAX = 16 << 20  # of a REQUEST: the coordinator holds it in memory more than once
ASKED_MAX = 4096  # numbers in a PING
CALL_SIZE_BYTES_MIN = 6  # in a REQUEST: size, message type, kind, method, type, an array of nothing
CLIENT_ID_SIZE_BYTES_MAX = 200  # with the tilde in front it is a caller's name, and part of a key in the log
NUMBER_MAX = (1 << 53) - 1
KEY_PREFIX = "key "  # a client ID that is built from a key: its own client, with one request
CLIENTS = "~"
"""Destination of all answers to clients; no instance can have this name."""

_FIXED = struct.Struct("<BBHiqqiqQ")
_NUMBER = struct.Struct("<Q")


class ClientFrameType(IntEnum):
    UNKNOWN = 0  # type or version unknown to this build; never written
    HELLO = 1
    WELCOME = 2
    REQUEST = 3
    REPLY = 4
    PING = 5
    PONG = 6
    REFUSED = 7
    QUERY = 8
    ANSWER = 9


KNOWN_TO_COORDINATORS = "this coordinator takes version 1, types 1 (Hello), 3 (Request), 5 (Ping) and 8 (Query)"


class ClientCode(IntEnum):
    """Reason in a REFUSED or a PONG."""

    NONE = 0
    NOT_ME = 1  # the frame is for an instance of another name
    NOT_READY = 2  # the instance has not completed its first start, or is stopping: ask again
    MALFORMED = 3  # nothing of it was accepted, and sending it again is useless
    BUSY = 4  # too many calls wait for an answer: send again later what was not taken
    FORGOTTEN = 5  # the client was unused for so long, or there are so many others, that its numbers were dropped
    NOT_YOURS = 6  # a caller with other keys used the client's ID first: nothing was taken
    UNKNOWN = 7  # the frame's type, or its version: the reason says which are known
    LOGGED_ONLY = 8  # the app takes no queries beside its log; a request for the same method works
    PENDING = 9  # in a PONG: the last request is not durable yet, so a crash takes it back


class ReplyKind(IntEnum):
    """Outcome of a request; equal to the RPC kind of the same meaning, if there is one."""

    GONE = 0  # done, and the reply is no longer kept
    VALUE = 1
    NOTHING = 2
    RAISED = 3  # [name of the exception, its arguments, its attributes], without the array around it
    LOST = 4  # an operator cut its record off: whether it was done is unknown


class ClientFrame(Struct, frozen=True):
    """Frame between a client and a coordinator. Fields that a type does not use are 0 or empty.

    ``number``: of the first request (REQUEST), of the last one taken (WELCOME, PONG, REPLY), or of the query (QUERY,
    ANSWER, REFUSED; a REFUSED for no query has 0). ``acknowledged``: the client no longer needs replies up to this
    number. ``time_ns``: in a REQUEST the time of its first sending, by the coordinator's clock, which the client knows
    from the WELCOME. ``reason``: in a REQUEST the trace context of its calls (:mod:`immortal.protocol.timings`), or
    empty; a coordinator without traces ignores it.
    """

    frame_type: ClientFrameType
    client_id: str
    instance: str
    committer_id: int = 0
    number: int = 0
    acknowledged: int = 0
    count: int = 0
    time_ns: int = 0
    payload: bytes = b""
    code: int = ClientCode.NONE
    reason: str = ""

    def requested_numbers(self) -> list[int]:
        """Return the request numbers in a PING, each once. :func:`decode_client_frame` has checked the payload."""
        return list(dict.fromkeys(number for (number,) in _NUMBER.iter_unpack(self.payload)))


_FRAME_TYPES = {int(one): one for one in ClientFrameType if one is not ClientFrameType.UNKNOWN}


def encode_numbers(numbers: Iterable[int]) -> bytes:
    """Encode the payload of a PING."""
    return b"".join(map(_NUMBER.pack, numbers))


def encode_client_frame(frame: ClientFrame) -> bytes:
    reason = frame.reason.replace("\0", " ").encode(errors="replace")[:255].decode(errors="ignore")
    names = encode_name(frame.client_id) + encode_name(frame.instance) + encode_name(reason)
    fixed = (
        FRAME_MARK,
        frame.frame_type,
        frame.code,
        frame.committer_id,
        frame.number,
        frame.acknowledged,
        frame.count,
        frame.time_ns,
    )
    check = crc64(frame.payload, crc64(_FIXED.pack(*fixed, 0) + names))
    return b"".join((_FIXED.pack(*fixed, check), names, frame.payload))


def is_client_frame(data: bytes) -> bool:
    """Return True if ``data`` is a client's frame of any version; the messenger's messages begin with other bytes."""
    return bool(data) and data[0] & 0xF0 == FRAME_MARK & 0xF0


def decode_client_frame(data: bytes) -> ClientFrame:
    """Decode a frame. A frame of another version or type becomes UNKNOWN, with its version or type in ``reason``.

    Raises RemoteProtocolError, or DamagedRecordError if the check does not match.
    """
    if len(data) < _FIXED.size:
        raise RemoteProtocolError(f"a client's frame of {len(data)} bytes, at least {_FIXED.size} were expected")
    *fixed, check = _FIXED.unpack_from(data)
    mark, frame_type, code, committer_id, number, acknowledged, count, time_ns = fixed
    if not is_client_frame(data):
        raise RemoteProtocolError(f"a client's frame begins with {mark:#04x}, {FRAME_MARK:#04x} was expected")
    computed = crc64(memoryview(data)[_FIXED.size :], crc64(_FIXED.pack(*fixed, 0)))
    if computed != check:
        raise DamagedRecordError(f"a client's frame has the check {check:016x}, its bytes give {computed:016x}")
    if mark != FRAME_MARK:
        return ClientFrame(ClientFrameType.UNKNOWN, "?", "", reason=f"a frame of version {mark & 0x0F}")
    client_id, offset = decode_name(data, _FIXED.size)
    instance, offset = decode_name(data, offset)
    reason, offset = decode_name(data, offset)
    known_type = _FRAME_TYPES.get(frame_type, ClientFrameType.UNKNOWN)
    if not 1 <= len(client_id.encode()) <= CLIENT_ID_SIZE_BYTES_MAX:
        raise RemoteProtocolError(
            f"a client's ID of {len(client_id.encode())} bytes, 1 to {CLIENT_ID_SIZE_BYTES_MAX} were expected"
        )
    if (
        committer_id < 0
        or not 0 <= number <= NUMBER_MAX
        or not 0 <= acknowledged <= NUMBER_MAX
        or not 0 <= count <= NUMBER_MAX - number
    ):
        raise RemoteProtocolError(
            f"a client's frame of number {number}, {acknowledged} acknowledged, with a count of {count}"
        )
    if known_type is ClientFrameType.UNKNOWN:
        return ClientFrame(known_type, client_id, instance, reason=f"a frame of type {frame_type}")
    payload = data[offset:]
    if known_type is ClientFrameType.REQUEST:
        if number < 1 or not 1 <= count <= len(payload) // CALL_SIZE_BYTES_MIN:
            raise RemoteProtocolError(
                f"a request of {count} calls from number {number}, {len(payload)} bytes; a call has at least "
                f"{CALL_SIZE_BYTES_MIN}"
            )
        if len(payload) > PAYLOAD_SIZE_BYTES_MAX:
            raise LimitExceededError("a request", len(payload), PAYLOAD_SIZE_BYTES_MAX)
    if known_type is ClientFrameType.QUERY and (number < 1 or not 0 < len(payload) <= PAYLOAD_SIZE_BYTES_MAX):
        raise RemoteProtocolError(
            f"a query with the number {number}, {len(payload)} bytes: 1 and up, 1 to {PAYLOAD_SIZE_BYTES_MAX} bytes"
        )
    if known_type is ClientFrameType.PING and (count > ASKED_MAX or len(payload) != count * _NUMBER.size):
        raise RemoteProtocolError(f"a PING for {count} numbers (at most {ASKED_MAX}) has {len(payload)} bytes")
    return ClientFrame(
        known_type, client_id, instance, committer_id, number, acknowledged, count, time_ns, payload, code, reason
    )


# --- requests: RPC messages whose arguments are those of the method alone ---------------------------------------------

_BYTES = tuple(bytes((value,)) for value in range(256))
_RPC = _BYTES[MessageType.RPC]
_CALL = _BYTES[RpcKind.CALL]
_FIXARRAY, _FIXARRAY_MAX, _ARRAY_16, _ARRAY_32 = 0x90, 15, 0xDC, 0xDD
_FIXSTR, _FIXSTR_MAX, _STR_8 = 0xA0, 31, 0xD9
_UINTS = {0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8}
_INTS = {0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}


def caller_of(client_id: str) -> str:
    """Return the name of the client in a call that waits for an answer."""
    return CLIENTS + client_id


def encode_request(method_id: int, arguments: bytes) -> bytes:
    """Encode one call of a REQUEST; ``arguments`` is a MessagePack array. Raises LocalProtocolError."""
    return encode_incoming_rpc(method_id, RpcType.ASYNC, arguments)


def logged_calls(
    payload: bytes, count: int, client_id: str, first_number: int, skipped: int = 0
) -> tuple[bytes, list[bytes]]:
    """Return ``count`` calls of a REQUEST in the app's form (caller and number before the arguments), and identities.

    The calls leave out the first ``skipped``; the checks and the identities cover all.

    Raises RemoteProtocolError unless ``payload`` is exactly ``count`` method calls.
    """
    caller = msgpack_string(caller_of(client_id))
    parts: list[bytes] = []
    identities: list[bytes] = []
    offset = 0
    for number in range(first_number, first_number + count):
        if offset == len(payload):
            raise RemoteProtocolError(f"a request of {count} calls ends after {number - first_number}")
        message_type, start, end = decode_message(payload, offset)
        if message_type != MessageType.RPC or payload[start : start + 1] != _CALL:
            raise RemoteProtocolError(f"request {number} is no call")
        method_id, method_end = decode_zigzag_int(payload, start + 1)
        if method_id < 0:
            raise RemoteProtocolError(f"request {number} calls method {method_id}: negative ones are the system's")
        if method_end + 1 >= end or payload[method_end] != RpcType.ASYNC:
            raise RemoteProtocolError(f"request {number} is no call that waits for an answer")
        arguments_count, arguments = _array(payload, method_end + 1, end)
        offset = end
        identities.append(call_identity(method_id, payload[method_end + 1 : end]))
        if number - first_number < skipped:
            continue
        front = b"".join(
            (payload[start : method_end + 1], _array_front(arguments_count + 2), caller, msgpack_integer(number))
        )
        parts += (encode_zigzag(1 + len(front) + end - arguments), _RPC, front, payload[arguments:end])
    if offset != len(payload):
        raise RemoteProtocolError(f"a request of {count} calls has {len(payload) - offset} bytes too many")
    return b"".join(parts), identities


def decode_query_call(payload: bytes) -> tuple[int, bytes]:
    """Decode the one call of a QUERY: method ID and arguments. Raises RemoteProtocolError."""
    message_type, start, end = decode_message(payload, 0)
    if message_type != MessageType.RPC or payload[start : start + 1] != _CALL or end != len(payload):
        raise RemoteProtocolError("a query is exactly one call")
    method_id, method_end = decode_zigzag_int(payload, start + 1)
    if method_id < 0:
        raise RemoteProtocolError(f"a query calls method {method_id}: negative ones are the system's")
    if method_end + 1 >= end or payload[method_end] != RpcType.ASYNC:
        raise RemoteProtocolError("a query is a call that waits for an answer")
    _array(payload, method_end + 1, end)
    return method_id, payload[method_end + 1 :]


class Caller(Struct, frozen=True):
    """Caller that waits for the answer of a call: an instance ("" is oneself), or a client, with ``~`` in front."""

    name: str
    number: int
    method_id: int


def decode_caller(data: bytes, start: int, end: int) -> Caller | None:
    """Decode the caller of the RPC ``data[start:end]``; None if the RPC names none, or nobody waits for its answer."""
    try:
        method_id, offset = decode_zigzag_int(data, start + 1)
        if data[start] != RpcKind.CALL or offset >= end or data[offset] != RpcType.ASYNC:
            return None
        count, offset = _array(data, offset + 1, end)
        name, offset = _string(data, offset, end)
        number, _ = _integer(data, offset, end)
    except RemoteProtocolError:
        return None
    if count < 2:
        return None
    return Caller(name, number, method_id)


def decode_answered_number(data: bytes, start: int, end: int) -> int | None:
    """Decode the number of the call that the RPC ``data[start:end]`` answers; None if the RPC has no such number."""
    try:
        _, offset = decode_zigzag_int(data, start + 1)
        if data[start] == RpcKind.CALL:
            return None
        _, offset = _array(data, offset + 1, end)
        return _integer(data, offset, end)[0]
    except RemoteProtocolError:
        return None


REFUSED_CALL = "~refused"
"""Name of the error that a client receives if its call cannot be made; no exception has it. Arguments: [reason].

If another call has the same number or key, the error has the attributes of an IdentityConflict.
"""


def split_caller(arguments: bytes) -> tuple[str, bytes]:
    """Split the arguments of a logged call that waits for an answer: (caller's name, arguments of the method).

    Raises RemoteProtocolError.
    """
    end = len(arguments)
    try:
        count, offset = _array(arguments, 0, end)
        caller, offset = _string(arguments, offset, end)
        _, offset = _integer(arguments, offset, end)
    except RemoteProtocolError:
        count = 0
    if count < 2:
        raise RemoteProtocolError("a call that waits does not begin with who waits and a number")
    return caller, _array_front(count - 2) + arguments[offset:end]


# --- answers: RPC messages to the destination CLIENTS, whose arguments begin with the caller and the number -----------


class Reply(Struct):
    """Outcome of request ``number``. ``value`` is encoded as :class:`ReplyKind` says, or empty."""

    number: int
    kind: int
    value: bytes = b""


def decode_answer(data: bytes, start: int, end: int) -> tuple[str, Reply] | None:
    """Decode the answer to a client in the RPC ``data[start:end]``: (client ID, reply); None if it is none."""
    kind = data[start]
    if not RpcKind.RETURNED_VALUE <= kind <= RpcKind.RAISED:
        return None
    try:
        _, offset = decode_zigzag_int(data, start + 1)
        count, offset = _array(data, offset + 1, end)
        caller, offset = _string(data, offset, end)
        number, offset = _integer(data, offset, end)
    except RemoteProtocolError:
        return None
    if count < 2 or number < 1 or not caller.startswith(CLIENTS):
        return None
    return caller[len(CLIENTS) :], Reply(number, kind, data[offset:end])


def conflict_reply(number: int, conflict: IdentityConflict) -> Reply:
    """Return the reply to a request whose number another call used before."""
    said = REFUSED_CALL, [str(conflict)], vars(conflict)
    return Reply(number, ReplyKind.RAISED, msgspec.msgpack.encode(said)[1:])


def encode_replies(replies: Iterable[Reply]) -> bytes:
    """Encode the payload of a REPLY."""
    parts: list[bytes] = []
    for reply in replies:
        parts += (encode_zigzag(reply.number), _BYTES[reply.kind], encode_zigzag(len(reply.value)), reply.value)
    return b"".join(parts)


def decode_replies(payload: bytes, count: int) -> Iterator[Reply]:
    """Decode exactly ``count`` replies. Raises RemoteProtocolError for anything else."""
    offset = 0
    for _ in range(count):
        number, offset = decode_zigzag_long(payload, offset)
        if offset >= len(payload):
            raise RemoteProtocolError(f"a reply to request {number} ends before its kind")
        kind = payload[offset]
        size_bytes, start = decode_zigzag_int(payload, offset + 1)
        offset = start + size_bytes
        if number < 1 or kind > max(ReplyKind) or size_bytes < 0 or offset > len(payload):
            raise RemoteProtocolError(f"a reply to request {number} of kind {kind} gives its size as {size_bytes}")
        yield Reply(number, kind, payload[start:offset])
    if offset != len(payload):
        raise RemoteProtocolError(f"{count} replies have {len(payload) - offset} bytes too many")


def encode_methods(methods: Mapping[int, str], queries: Collection[int] = ()) -> bytes:
    """Encode the payload of a WELCOME: the names of the instance's methods, by method ID.

    ``queries``: IDs of methods that only read. Each also stands in front under the name QUERIES: a client that knows no
    queries takes the second of two names.
    """
    parts = [encode_zigzag(len(queries) + len(methods))]
    for method_id in sorted(queries):
        parts += (encode_zigzag(method_id), encode_name(QUERIES))
    for method_id, name in sorted(methods.items()):
        parts += (encode_zigzag(method_id), encode_name(name))
    return b"".join(parts)


def decode_methods(payload: bytes) -> tuple[dict[int, str], set[int]]:
    """Decode names of methods by method ID, and the IDs of queries among them. Raises RemoteProtocolError."""
    count, offset = decode_zigzag_int(payload, 0)
    if not 0 <= count <= len(payload):
        raise RemoteProtocolError(f"a WELCOME announces {count} methods in {len(payload)} bytes")
    methods: dict[int, str] = {}
    queries: set[int] = set()
    for _ in range(count):
        method_id, offset = decode_zigzag_int(payload, offset)
        name, offset = decode_name(payload, offset)
        if name == QUERIES:
            queries.add(method_id)
        else:
            methods[method_id] = name
    if offset != len(payload):
        raise RemoteProtocolError(f"a WELCOME has {len(payload) - offset} bytes too many")
    return methods, queries & methods.keys()


# --- the leading part of MessagePack values ---------------------------------------------------------------------------


def msgpack_string(text: str) -> bytes:
    raw = text.encode()
    if len(raw) <= _FIXSTR_MAX:
        return _BYTES[_FIXSTR | len(raw)] + raw
    if len(raw) > 0xFF:
        raise LocalProtocolError(f"a caller's name of {len(raw)} bytes, at most 255 are allowed")
    return bytes((_STR_8, len(raw))) + raw


def msgpack_integer(value: int) -> bytes:
    """Encode a non-negative number as MessagePack, in its shortest form."""
    if value < 0x80:
        return _BYTES[value]
    for code, size_bytes in _UINTS.items():
        if value < 1 << 8 * size_bytes:
            return _BYTES[code] + value.to_bytes(size_bytes, "big")
    raise LocalProtocolError(f"{value} does not fit into 64 bits")


def _array_front(count: int) -> bytes:
    if count <= _FIXARRAY_MAX:
        return _BYTES[_FIXARRAY | count]
    if count <= 0xFFFF:
        return _BYTES[_ARRAY_16] + count.to_bytes(2, "big")
    return _BYTES[_ARRAY_32] + count.to_bytes(4, "big")


def _array(data: bytes, offset: int, end: int) -> tuple[int, int]:
    """Decode an array's header: (count, offset of the first item)."""
    first = data[offset] if offset < end else -1
    if _FIXARRAY <= first <= _FIXARRAY | _FIXARRAY_MAX:
        return first & _FIXARRAY_MAX, offset + 1
    size_bytes = {_ARRAY_16: 2, _ARRAY_32: 4}.get(first, 0)
    start = offset + 1 + size_bytes
    if not size_bytes or start > end:
        raise RemoteProtocolError("the arguments of a call are no MessagePack array")
    count = int.from_bytes(data[offset + 1 : start], "big")
    if count > end - start:  # each item has at least one byte
        raise RemoteProtocolError(f"the arguments of a call are an array of {count} items in {end - start} bytes")
    return count, start


def _string(data: bytes, offset: int, end: int) -> tuple[str, int]:
    first = data[offset] if offset < end else -1
    if _FIXSTR <= first <= _FIXSTR | _FIXSTR_MAX:
        start, size_bytes = offset + 1, first & _FIXSTR_MAX
    elif first == _STR_8 and offset + 1 < end:
        start, size_bytes = offset + 2, data[offset + 1]
    else:
        raise RemoteProtocolError("an answer does not begin with its caller")
    try:
        return data[start : start + size_bytes].decode(), start + size_bytes
    except UnicodeDecodeError:
        raise RemoteProtocolError("an answer's caller is not UTF-8") from None


def _integer(data: bytes, offset: int, end: int) -> tuple[int, int]:
    first = data[offset] if offset < end else -1
    if 0 <= first < 0x80:
        return first, offset + 1
    size_bytes = _UINTS.get(first) or _INTS.get(first) or 0
    stop = offset + 1 + size_bytes
    if not size_bytes or stop > end:
        raise RemoteProtocolError("an answer has no number behind its caller")
    return int.from_bytes(data[offset + 1 : stop], "big", signed=first in _INTS), stop
