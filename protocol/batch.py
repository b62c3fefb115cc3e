"""Checks, splitting and wrapping of batches (packed RPC messages); arguments stay undecoded.

In most batches all messages call one method with arguments of one size. Then each message starts with the same bytes at
the same stride, and slices compare them at C speed. Other batches are checked message by message. Few sizes occur there
again and again, so checked fronts of messages are looked up.
"""

from __future__ import annotations

from itertools import repeat
from typing import TYPE_CHECKING

from immortal.protocol.errors import LocalProtocolError, RemoteProtocolError
from immortal.protocol.limits import RPC_SIZE_BYTES_MAX
from immortal.protocol.messages import MessageType, RpcKind, RpcType, decode_message
from immortal.protocol.varint import Readable, decode_zigzag_int, encode_zigzag

if TYPE_CHECKING:
    import cython

RPC_SIZE_BYTES_MIN = 4  # type, kind, method ID, RPC type
_FRONT_SIZE_BYTES = 4  # whole sizes of up to 1 MiB, and the type
_FRONTS_KEPT_MAX = 4096  # some 500 KiB
_CHECKED_FRONTS_MAX = 256  # for each sender


class _Strides(dict[bytes, int]):
    """Sizes of RPC messages by their first _FRONT_SIZE_BYTES. Raises KeyError for bytes that may begin no message."""

    def __missing__(self, front: bytes) -> int:
        try:
            size_bytes, start = decode_zigzag_int(front)
        except RemoteProtocolError:
            raise KeyError(front) from None
        if not RPC_SIZE_BYTES_MIN <= size_bytes <= RPC_SIZE_BYTES_MAX or front[start : start + 1] != _RPC:
            raise KeyError(front)
        if len(self) >= _FRONTS_KEPT_MAX:
            self.clear()
        self[front] = start + size_bytes
        return start + size_bytes


_RPC = bytes((MessageType.RPC,))
_strides = _Strides()


def _stride(payload: bytes, count: int) -> int:
    """Return the size in bytes of each message if all ``count`` start with the same size and type RPC, else 0."""
    message_type, start, end = decode_message(payload, 0)
    if end * count != len(payload) or message_type != MessageType.RPC or end - start + 1 < RPC_SIZE_BYTES_MIN:
        return 0  # the slow walk reports what is wrong
    for offset in range(start):
        if payload[offset::end] != payload[offset : offset + 1] * count:
            return 0
    return end


def common_size(payload: bytes, count: int) -> int:
    """Return the size in bytes of each RPC message if all ``count`` begin alike and have one size, else 0."""
    return _stride(payload, count) if count > 0 else 0


def check_batch(payload: bytes, count: int) -> None:
    """Raise RemoteProtocolError unless ``payload`` is exactly ``count`` RPC messages."""
    end = offset_after(payload, count, count)
    if end != len(payload):
        raise RemoteProtocolError(f"a batch of {count} messages has {len(payload) - end} bytes too many")


def offset_after(payload: bytes, count: int, total: int) -> int:
    """Return the offset after the first ``count`` of ``total`` RPC messages. Raises RemoteProtocolError.

    Messages after the first ``count`` may stay unchecked; :func:`check_batch` checks all.
    """
    if count <= 0:
        if count < 0:
            raise RemoteProtocolError(f"a batch gives its count as {count}")
        return 0
    if total > 2 and count <= total and (stride := _stride(payload, total)):
        return stride * count
    octets: cython.p_const_uchar = payload  # compiled code does not cut slices at the end: compare offsets first
    offset: cython.Py_ssize_t = 0
    last: cython.Py_ssize_t = len(payload) - _FRONT_SIZE_BYTES
    strides = _strides
    try:
        for _ in repeat(None, count):
            if offset > last:
                break
            offset += strides[octets[offset : offset + _FRONT_SIZE_BYTES]]
        else:
            return offset if offset <= len(payload) else _walk(payload, count, total)
    except KeyError:
        pass
    return _walk(payload, count, total)


def _walk(payload: bytes, count: int, total: int) -> int:
    """Compute :func:`offset_after` for messages of any size, with precise errors."""
    offset = 0
    for index in range(count):
        _, offset = _rpc_at(payload, offset, index, total)
    return offset


def _rpc_at(payload: bytes, offset: int, index: int, total: int) -> tuple[int, int]:
    """Return start and end of the data of message ``index``. Raises RemoteProtocolError."""
    if offset == len(payload):
        raise RemoteProtocolError(f"a batch of {total} messages ends after {index}, at byte {offset}")
    message_type, start, end = decode_message(payload, offset)
    if message_type != MessageType.RPC:
        raise RemoteProtocolError(f"message {index} of a batch has type {message_type}, an RPC (0) was expected")
    if end - start + 1 < RPC_SIZE_BYTES_MIN:
        raise RemoteProtocolError(
            f"message {index} of a batch is an RPC of {end - start + 1} bytes, at least {RPC_SIZE_BYTES_MIN} were "
            f"expected"
        )
    return start, end


class CallRules:
    """Rules for the calls of one sender to one receiver; `protocol/call_permissions.py` lists all rules.

    ``negative``: methods with negative IDs (the SDK's own) are allowed. ``reports_negative``: if they are not allowed,
    ``check`` reports them instead of raising. ``negative_answers``: if they are not allowed, answers to refused calls
    can still name them. ``callers``: names that calls waiting for an answer can give as their caller; None: callers
    are not checked, since the arguments are the sender's own matter.
    """

    def __init__(
        self,
        *,
        negative: bool = False,
        reports_negative: bool = False,
        negative_answers: bool = False,
        callers: tuple[str, ...] | None = None,
    ) -> None:
        self.negative = negative
        self.reports_negative = reports_negative
        self.negative_answers = negative_answers
        self.callers = None if callers is None else tuple([caller.encode() for caller in callers])
        self._fronts = _Fronts()

    def check(self, payload: bytes, count: int) -> list[int]:
        """Check a batch like :func:`check_batch`, and check that kind and RPC type of each message exist and that this
        sender may send it. Raises RemoteProtocolError.

        Returns the indices of messages with a negative method ID, if these rules report them.
        """
        negative: list[int] = []
        if count > 2 and self._is_one_front(payload, count):
            return negative
        fronts = self._fronts
        octets: cython.p_const_uchar = payload  # compiled code does not cut slices at the end: compare offsets first
        size_bytes: cython.Py_ssize_t = len(payload)
        offset: cython.Py_ssize_t = 0
        length: cython.Py_ssize_t = fronts.length
        other: cython.Py_ssize_t = fronts.other
        for index in range(count):
            stride = fronts.get(octets[offset : offset + length]) if offset + length <= size_bytes else None
            if stride is None:
                length, other = other, length
                stride = fronts.get(octets[offset : offset + length]) if offset + length <= size_bytes else None
            if stride is None or offset + stride > size_bytes:
                length, stride = self._call_at(payload, offset, index, count)
                if length > 0:
                    fronts.add(payload[offset : offset + length], stride)
                elif length < 0:
                    negative.append(index)
                    length = 0
            offset += stride
        fronts.length, fronts.other = length, other
        if count < 0 or offset != size_bytes:
            check_batch(payload, count)
        return negative

    def _is_one_front(self, payload: bytes, count: int) -> bool:
        """Check the first message; True if all others have its size and begin with the same checked bytes."""
        length, stride = self._call_at(payload, 0, 0, count)
        if length <= 0 or stride * count != len(payload):
            return False
        return all(payload[at::stride] == payload[at : at + 1] * count for at in range(length))

    def _call_at(self, payload: bytes, offset: int, index: int, total: int) -> tuple[int, int]:
        """Return the number of bytes of message ``index`` that decide whether it is valid, and the message's size.

        The first number is 0 if all bytes decide, and -1 if the method ID is negative and must be reported.

        Raises RemoteProtocolError.
        """
        start, end = _rpc_at(payload, offset, index, total)
        kind = payload[start]
        if kind > RpcKind.RAISED:
            raise RemoteProtocolError(f"message {index} of a batch is an RPC of kind {kind}, 0 to 3 were expected")
        method_id, at = decode_zigzag_int(payload, start + 1)
        if at >= end:
            raise RemoteProtocolError(f"message {index} of a batch ends inside its method ID, or before its RPC type")
        rpc_type = payload[at]
        if rpc_type > RpcType.IMPULSE:
            raise RemoteProtocolError(f"message {index} of a batch has the RPC type {rpc_type}, 0 to 2 were expected")
        is_reserved = method_id < 0 and not self.negative and (kind == RpcKind.CALL or not self.negative_answers)
        if is_reserved and not self.reports_negative:
            raise RemoteProtocolError(
                f"message {index} of a batch has the method {method_id}: only an app itself may call negative ones"
            )
        at += 1
        if kind == RpcKind.CALL and rpc_type == RpcType.ASYNC and self.callers is not None:
            at = self._caller_end(payload, at, end, index)
        if is_reserved:  # its refusal is answered, so the caller must be the sender
            return -1, end - offset
        return at - offset if at else 0, end - offset

    def _caller_end(self, payload: bytes, start: int, end: int, index: int) -> int:
        """Return the offset after the caller in ``payload[start:end]``, the arguments of a call that waits.

        The receiver refuses arguments that do not begin like those of such a call. For these the offset is after the
        bytes that show it, or 0 if all bytes are needed. Raises RemoteProtocolError if the caller is somebody else.
        """
        if start == end:
            return start
        first = payload[start]
        array_size = _ARRAY_FRONTS.get(first, 1 if 0x90 <= first <= 0x9F else 0)
        at = start + array_size
        if not array_size:
            return start + 1
        if at >= end:
            return 0 if at > end else at
        first = payload[at]
        length_size = _STRING_LENGTHS.get(first, 0)
        if not length_size and not 0xA0 <= first <= 0xBF:
            return at + 1
        behind = at + 1 + length_size
        size_bytes = int.from_bytes(payload[at + 1 : behind], "big") if length_size else first & 0x1F
        behind += size_bytes
        if behind > end:
            return 0
        caller = payload[behind - size_bytes : behind]
        if caller not in (self.callers or ()):
            expected = " or ".join([repr(one.decode()) for one in self.callers or ()])
            raise RemoteProtocolError(
                f"message {index} of a batch is a call whose answer is to go to {caller.decode('utf-8', 'replace')!r}, "
                f"its sender may give only {expected}"
            )
        return behind


_ARRAY_FRONTS = {0xDC: 3, 0xDD: 5}  # MessagePack: number of bytes before an array's first item
_STRING_LENGTHS = {0xD9: 1, 0xDA: 2, 0xDB: 4}  # MessagePack: number of bytes that give a string's length


class _Fronts(dict[bytes, int]):
    """Number of bytes that decide whether a message is valid, by these bytes: few fronts occur again and again.

    No front begins another. A lookup uses the lengths of the last two kinds of front: ``length``, ``other``.
    """

    def __init__(self) -> None:
        self.length = self.other = 0

    def add(self, front: bytes, stride: int) -> None:
        if len(self) >= _CHECKED_FRONTS_MAX:
            self.clear()
        self[front] = stride


def encode_batch(payload: Readable, count: int) -> bytes:
    """Encode the front of the top-level message that holds ``payload``; the payload must follow it.

    A single RPC is its own message and needs no front. Raises LocalProtocolError if a reader would refuse the batch.
    """
    if count == 1:
        return b""
    if count < 0:
        raise LocalProtocolError(f"a batch of {count} messages")
    return _front(MessageType.RPC_BATCH, encode_zigzag(count), len(payload))


def _front(message_type: MessageType, counts: bytes, payload_size_bytes: int) -> bytes:
    size_bytes = 1 + len(counts) + payload_size_bytes
    if size_bytes > RPC_SIZE_BYTES_MAX:
        raise LocalProtocolError(
            f"a batch of {size_bytes} bytes, at most {RPC_SIZE_BYTES_MAX} are allowed in one message"
        )
    return encode_zigzag(size_bytes) + bytes((message_type,)) + counts


def decode_batch(data: Readable) -> tuple[int, int]:
    """Decode the front of an RPCBatch's data: (count, offset of the first message). Raises RemoteProtocolError."""
    count, start = decode_zigzag_int(data, 0)
    if count < 0:
        raise RemoteProtocolError(f"an RPCBatch gives its count as {count}")
    return count, start


def decode_replayable_batch(data: Readable) -> tuple[int, int, int]:
    """Decode the front of a CountReplayableRPCBatch: (count, number of non-impulses, offset of the first message)."""
    count, offset = decode_zigzag_int(data, 0)
    replayable, start = decode_zigzag_int(data, offset)
    if not 0 <= replayable <= count:
        raise RemoteProtocolError(f"a CountReplayableRPCBatch of {count} gives {replayable} as replayable")
    return count, replayable, start


def encode_replayable_batch(payload: Readable, count: int, replayable: int) -> bytes:
    """Encode a whole CountReplayableRPCBatch message. Raises LocalProtocolError."""
    if not 0 <= replayable <= count:
        raise LocalProtocolError(f"a CountReplayableRPCBatch of {count} with {replayable} replayable")
    counts = encode_zigzag(count) + encode_zigzag(replayable)
    return _front(MessageType.COUNT_REPLAYABLE_RPC_BATCH, counts, len(payload)) + payload
