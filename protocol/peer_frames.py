"""Frames between coordinators, carried by the messenger: a header part and, in a Batch, the payload as second part.

Hello    sender -> receiver   opens the stream sender -> receiver after a (re)start of the sender
Welcome  receiver -> sender   answers it: the position up to which the stream is durable at the receiver, and its window
Batch    sender -> receiver   count RPC messages, in incoming form, from position on
TrimTo   receiver -> sender   durable up to position; the window from now on
Resend   receiver -> sender   there is a gap: send again from the position after this one
Refused  receiver -> sender   the reason, as text
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from enum import IntEnum

from msgspec import Struct

from immortal.protocol.checksum import crc64
from immortal.protocol.errors import DamagedRecordError, LimitExceededError, RemoteProtocolError
from immortal.protocol.limits import RPC_SIZE_BYTES_MAX
from immortal.protocol.messages import decode_name, encode_name

PEER_VERSION = 1
PAYLOAD_SIZE_BYTES_MAX = RPC_SIZE_BYTES_MAX - 16  # leaves room for size, type and count: it becomes one message
REASON_SIZE_BYTES_MAX = 255

_FIXED = struct.Struct("<BBHiqqiqQ")
_CHECK = struct.Struct("<Q")  # the last of the fixed fields
_NO_CHECK = bytes(_CHECK.size)  # placeholder while the check is computed
_NAMES_KEPT = 1024  # the names of a stream are the same in all its frames
FRAME_PARTS_MAX = 2  # header and payload


class FrameType(IntEnum):
    """Type of a frame: the base protocol's number if it has the message, else a number above its range."""

    UNKNOWN = 0  # type, version or fields unknown to this build; never written
    BATCH = 5
    TRIM_TO = 14
    HELLO = 32
    WELCOME = 33
    RESEND = 34
    REFUSED = 35


class RefusedCode(IntEnum):
    NONE = 0
    NOT_ME = 1  # the frame is for an instance of another name
    STALE_EPOCH = 2  # a later start of the sender was seen
    COMMITTER_CHANGED = 3  # the sender has another log than before
    NOT_READY = 4  # the instance has never completed its first start, or is stopping
    MALFORMED = 5
    ROLLED_BACK = 6  # a side has less of the stream than it once had
    LOG_FULL = 7  # the receiver takes no more input until its log has room again
    UNKNOWN = 8  # the frame's type, version or fields: the reason says which are known
    BEYOND_WINDOW = 9  # more is in flight than the receiver has granted


_FRAME_TYPES = {int(one): one for one in FrameType if one is not FrameType.UNKNOWN}
KNOWN_TO_RECEIVERS = "this coordinator takes version 1, types 5 (Batch) and 32 (Hello)"


class PeerFrame(Struct, frozen=True):
    """Frame between coordinators, immutable. Fields that a type does not use are 0 or empty.

    ``committer_id`` and ``epoch`` are the writer's; ``position`` is the stream's (in a Batch: of its first message).
    ``count``: messages in a Batch; in a Welcome and a TrimTo the window in bytes, 0 if the receiver gives none.
    """

    frame_type: FrameType
    sender: str
    receiver: str
    committer_id: int
    epoch: int
    position: int
    count: int = 0
    time_ns: int = 0
    payload: bytes = b""
    code: int = RefusedCode.NONE
    reason: str = ""


def encode_frame(frame: PeerFrame) -> list[bytes]:
    """Encode ``frame`` in parts: the header, and the payload if there is one."""
    names = _encode_names(frame.sender, frame.receiver, frame.reason)
    payload = frame.payload
    unchecked = _FIXED.pack(
        PEER_VERSION,
        frame.frame_type,
        frame.code,
        frame.committer_id,
        frame.epoch,
        frame.position,
        frame.count,
        frame.time_ns,
        0,
    )
    check = crc64(unchecked + names)
    if payload:
        check = crc64(payload, check)
    header = unchecked[: -_CHECK.size] + _CHECK.pack(check) + names
    return [header, payload] if payload else [header]


@functools.lru_cache(_NAMES_KEPT)
def _encode_names(sender: str, receiver: str, reason: str) -> bytes:
    shortened = reason.replace("\0", " ").encode(errors="replace")[:REASON_SIZE_BYTES_MAX].decode(errors="ignore")
    return encode_name(sender) + encode_name(receiver) + encode_name(shortened)


@functools.lru_cache(_NAMES_KEPT)
def _decode_names(names: bytes) -> tuple[str, str, str, int]:
    """Decode a frame's names: (sender, receiver, reason, number of bytes after them). Raises RemoteProtocolError."""
    sender, offset = decode_name(names, 0)
    receiver, offset = decode_name(names, offset)
    reason, offset = decode_name(names, offset)
    return sender, receiver, reason, len(names) - offset


def _unknown(sender: str, receiver: str, reason: str) -> PeerFrame:
    return PeerFrame(FrameType.UNKNOWN, sender, receiver, 0, 0, 0, reason=reason)


def decode_frame(parts: Sequence[bytes]) -> PeerFrame:
    """Decode a frame. Raises RemoteProtocolError, or DamagedRecordError if the check does not match.

    A frame of an unknown type or version becomes UNKNOWN, described in ``reason``; of another version no name is read.
    """
    if not 1 <= len(parts) <= FRAME_PARTS_MAX:
        raise RemoteProtocolError(f"a frame of {len(parts)} parts, 1 or 2 were expected")
    header = parts[0]
    payload = parts[1] if len(parts) == 2 else b""
    if len(payload) > PAYLOAD_SIZE_BYTES_MAX:
        raise LimitExceededError("the payload of a frame", len(payload), PAYLOAD_SIZE_BYTES_MAX)
    if len(header) < _FIXED.size:
        raise RemoteProtocolError(f"a frame header of {len(header)} bytes, at least {_FIXED.size} were expected")
    version, frame_type, code, committer_id, epoch, position, count, time_ns, check = _FIXED.unpack_from(header)
    names = header[_FIXED.size :]
    computed = crc64(payload, crc64(header[: _FIXED.size - _CHECK.size] + _NO_CHECK + names))
    if computed != check:
        raise DamagedRecordError(f"a frame's check is {check:016x}, its bytes give {computed:016x}")
    if version != PEER_VERSION:
        return _unknown("", "", f"a frame of version {version}")
    sender, receiver, reason, rest_bytes = _decode_names(names)
    known_type = _FRAME_TYPES.get(frame_type)
    if known_type is None:
        return _unknown(sender, receiver, f"a frame of type {frame_type}")
    if rest_bytes:
        return _unknown(sender, receiver, f"a field of {rest_bytes} bytes behind the names of a frame")
    if committer_id < 1 or epoch < 0 or position < 0 or count < 0:
        raise RemoteProtocolError(
            f"a frame of committer {committer_id}, epoch {epoch}, position {position} with a count of {count}"
        )
    if known_type is FrameType.BATCH and (count < 1 or position < 1 or not payload):
        raise RemoteProtocolError(f"a Batch of {count} messages at position {position}, {len(payload)} bytes")
    if known_type is not FrameType.BATCH:
        payload = b""  # unchecked, so dropped
    return PeerFrame(known_type, sender, receiver, committer_id, epoch, position, count, time_ns, payload, code, reason)
