"""Envelope, the first part of each message on the wire (sender, number, who waits for the reply); messenger errors.

48 bytes, all integers big-endian::

    offset  size  field
         0     1  version                 2
         1     1  kind                    1 message, 2 reply, 3 reply that is no longer kept, 4 reply still to come,
                                          5 version or kind not known, 6 message of a conversation, 7 reply: the
                                          callback that the message was for is not known, 8 message whose reply
                                          nobody waits for, 9 piggybacked reply
         2     2  skipped count           message: so many IDs right below its own will not be sent again.
                                          reply: 0
         4     4  link ID                 of the link that the message was sent on; not 0
         8     8  incarnation             of the messenger that sends this envelope; in kind 9, of the one that it is
                                          for
        16     8  message ID              per link, from 1; a reply has that of its message
        24     8  lowest pending ID       message: no ID of the link below it will be sent again; 1 to
        message ID.
                                          reply: message ID, or the highest ID up to which the receiver has had
                                          all, if that is higher
        32     8  source callback ID      message: what waits for the reply, 0 (NOOP) if nothing does. reply: what
                                          waits at its sender for one more message, 0 if nothing does, as always
                                          in kinds 4, 5, 7 and 9 and where the message was of kind 1 or 8
        40     8  destination callback ID message of kind 6: the source callback ID of a reply, 0 if it is for the
                                          server loop alone; of kinds 1 and 8: 0. reply: the message's source
                                          callback ID

A message's parts follow as parts of the ZeroMQ message, none or more. A reply is one part: the envelope, then each of
the reply's parts with its size (4 bytes) in front; kinds 3 and 7 have no parts, kind 4 has one or none. (If a DEALER's
connection ends while a message of several parts is read, the rest never arrives, or that of another message does.) A
message that is sent again has the same bytes except for kind (1 for 8), lowest pending ID and skipped count. From a
DEALER to a ROUTER and back: ZeroMQ puts the routing ID before the envelope and takes it off.

The lowest pending ID tells a new receiver that another receiver has acknowledged the IDs below, and tells an old one
which replies nobody can ask for any more. The skipped count says the same of IDs above it, so that the receiver knows
if anything is missing before a message.

Kind 5 answers an envelope of another version, or of an unknown kind, once on each connection. Link and message ID are
1 and mean nothing; its one part says which versions and kinds are known.

Kind 6 means that the sender accepts a callback ID with the reply; else it is as kind 1. A receiver that knows only
kinds 1 to 5 answers it with kind 5: the sender then uses kind 1, on this connection, for messages to no callback.
Coordinators send messages of kinds 1 and 8 alone.

The reply to a message of kind 8 may wait until a message goes to its receiver, at most REPLY_DELAY_NS_MAX. It follows
that message's envelope, in the same part, with its size in front, and other such replies follow it, at most
PIGGYBACKED_MAX; their kind is 9. Only the messenger with its incarnation takes one, and only from the key that it
expects at the link's other end.

A message that arrives again is answered at once: with its reply or, while there is none, with kind 4. The answer tells
the sender that the connection and the receiver are alive, and what has arrived. Kind 4 is also sent for a message
before which one is missing. Its one part has the missing IDs: the lowest pending ID as the receiver knows it (8 bytes),
then bits, big-endian, the lowest for that ID: set if the ID is not above the highest that arrived, and has not arrived.
Senders without this rule skip the part; receivers without it send none.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from struct import Struct
from struct import error as struct_error
from typing import NamedTuple

from immortal.coordinator.messenger.limits import PARTS_MAX, SPAN_MAX
from immortal.protocol.errors import ImmortalError, LimitExceededError, RemoteProtocolError


class MessengerError(ImmortalError):
    """Raised if the messenger can't do a requested operation."""


class EndpointError(MessengerError):
    """Raised for an endpoint at which nobody can listen, or to which nothing can be sent."""


class EndpointInUseError(EndpointError):
    """Raised if another socket already listens at an endpoint."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(
            f"{endpoint} is in use: another process, or another loop of this one, listens there; "
            f"stop it, or give another endpoint (tcp://127.0.0.1:* takes any free port)"
        )
        self.endpoint = endpoint


class MessengerClosedError(MessengerError):
    """Raised if the messenger was closed, or its thread has failed."""


class AlreadyRepliedError(MessengerError):
    """Raised for a second reply to a message; its one reply is its acknowledgement."""


class PendingFullError(MessengerError):
    """Raised for a refused send: the limit on what is pending for its destination is reached."""


class MessageTooLargeError(LimitExceededError):
    """Raised for a message to be sent that is larger than receivers accept."""


class EnvelopeError(RemoteProtocolError):
    """Raised if the first part of a received message is not a valid envelope of this version."""


class UnknownEnvelopeError(EnvelopeError):
    """Raised for an envelope whose version or kind this build does not know; its sender is told once."""


VERSION = 2
NOOP = 0  # the callback ID that stands for no callback

_new_tuple = tuple.__new__
_LAYOUT = Struct(">BBHIQQQQQ")
_SIZE = Struct(">I")
_ID_SIZE_BYTES = 8
ENVELOPE_SIZE_BYTES = _LAYOUT.size


class Kind(IntEnum):
    MESSAGE = 1
    REPLY = 2
    REPLY_EXPIRED = 3
    REPLY_PENDING = 4
    NOT_KNOWN = 5
    TURN = 6  # a message of a conversation
    CALLBACK_UNKNOWN = 7
    PATIENT = 8  # a message whose reply nobody waits for
    PIGGYBACKED = 9  # a reply behind a message's envelope


MESSAGE, REPLY, REPLY_EXPIRED, REPLY_PENDING, NOT_KNOWN, TURN, CALLBACK_UNKNOWN, PATIENT, PIGGYBACKED = map(int, Kind)
MESSAGES = frozenset((MESSAGE, TURN, PATIENT))
_REPLIES = frozenset(map(int, Kind)) - MESSAGES
_WITH_CALLBACK = frozenset((REPLY, REPLY_EXPIRED))
KNOWN = b"version 2, kinds 1 to 9"


class Envelope(NamedTuple):
    """Fields of an envelope, as laid out above; ``version`` has been checked."""

    version: int
    kind: int
    skipped_count: int
    link_id: int
    incarnation: int
    message_id: int
    lowest_pending_id: int  # a message's; a reply's highest ID that has arrived
    source_callback_id: int
    destination_callback_id: int


def encode_message(
    link_id: int,
    incarnation: int,
    message_id: int,
    lowest_pending_id: int,
    source_callback_id: int,
    skipped_count: int = 0,
    kind: int = MESSAGE,
) -> bytes:
    """Encode the envelope of a message. The caller checks the ranges; raises struct.error if a value does not fit."""
    return _LAYOUT.pack(
        VERSION, kind, skipped_count, link_id, incarnation, message_id, lowest_pending_id, source_callback_id, NOOP
    )


def as_conversation_message(envelope: bytes, destination_callback_id: int) -> bytes:
    """Return the envelope of the same message in a conversation, for the callback with this ID or none (NOOP)."""
    return envelope[:1] + bytes((TURN,)) + envelope[2:-8] + destination_callback_id.to_bytes(8, "big")


def encode_reply(
    kind: int,
    link_id: int,
    incarnation: int,
    message_id: int,
    highest_seen: int,
    destination_callback_id: int,
    source_callback_id: int = NOOP,
) -> bytes:
    """Encode the envelope of the reply to ``message_id``; ``kind`` is none of MESSAGES."""
    return _LAYOUT.pack(
        VERSION,
        kind,
        0,
        link_id,
        incarnation,
        message_id,
        highest_seen,
        source_callback_id,
        destination_callback_id,
    )


def encode_parts(parts: Iterable[bytes]) -> bytes:
    """Encode the parts of a reply, which follow its envelope: each with its size in front."""
    pieces: list[bytes] = []
    for part in parts:
        pieces += (_SIZE.pack(len(part)), part)
    return b"".join(pieces)


def decode_parts(data: bytes, offset: int, parts_max: int = PARTS_MAX) -> list[bytes]:
    """Decode the parts of a reply, from ``offset`` on. Raises EnvelopeError unless they end where ``data`` does, or if
    there are more than ``parts_max``."""
    parts: list[bytes] = []
    available = len(data)
    while offset < available:
        start = offset + _SIZE.size
        if start > available:
            raise EnvelopeError(f"a reply ends inside the size of a part, at byte {available}")
        offset = start + _SIZE.unpack_from(data, offset)[0]
        if offset > available:
            raise EnvelopeError(f"a part of a reply has {offset - start} bytes, only {available - start} are left")
        if len(parts) == parts_max:
            raise EnvelopeError(f"more than {parts_max} parts came in one")
        parts.append(data[start:offset])
    return parts


def encode_missing(lowest_pending_id: int, missing: int) -> bytes:
    """Encode the IDs that are missing at a receiver: bit n of ``missing`` stands for ``lowest_pending_id`` + n."""
    return lowest_pending_id.to_bytes(_ID_SIZE_BYTES, "big") + missing.to_bytes((missing.bit_length() + 7) // 8, "big")


def decode_missing(data: bytes) -> list[int]:
    """Decode the IDs that are missing at a receiver, in order. Raises EnvelopeError for a wrong size."""
    size_bytes = len(data) - _ID_SIZE_BYTES
    if not 0 <= size_bytes <= SPAN_MAX // 8:
        raise EnvelopeError(
            f"what is missing came in {len(data)} bytes, expected 8 to {_ID_SIZE_BYTES + SPAN_MAX // 8}"
        )
    lowest_pending_id = int.from_bytes(data[:_ID_SIZE_BYTES], "big")
    bits = f"{int.from_bytes(data[_ID_SIZE_BYTES:], 'big'):b}"[::-1]
    return [lowest_pending_id + index for index, bit in enumerate(bits) if bit == "1"]


def decode_envelope(data: bytes) -> Envelope:
    """Decode an envelope. Raises UnknownEnvelopeError for a version or kind of another build, and EnvelopeError for
    anything else but exactly one valid envelope."""
    if data and data[0] != VERSION:
        raise UnknownEnvelopeError(f"an envelope of version {data[0]} came in, this side speaks version {VERSION}")
    try:
        envelope = _new_tuple(Envelope, _LAYOUT.unpack(data))  # as _make, which checks what unpack has
    except struct_error:
        raise EnvelopeError(f"an envelope of {len(data)} bytes came in, it has {ENVELOPE_SIZE_BYTES}") from None
    _, kind, skipped_count, link_id, _, message_id, lowest_pending_id, source, destination = envelope
    if not link_id or not message_id:
        raise EnvelopeError(f"an envelope with link ID {link_id}, message ID {message_id} came in; neither is 0")
    if kind in MESSAGES:
        if not 1 <= lowest_pending_id <= message_id or (destination and kind != TURN):
            raise EnvelopeError(
                f"message {message_id} came in with lowest pending ID {lowest_pending_id} (from 1 to its own ID) "
                f"and destination callback ID {destination} (0 except in kind {TURN})"
            )
    elif kind in _REPLIES:
        if lowest_pending_id < message_id or skipped_count or (source and kind not in _WITH_CALLBACK):
            raise EnvelopeError(
                f"the reply to message {message_id} came in with highest ID {lowest_pending_id} (from its own ID), "
                f"source callback ID {source} (0 in kind {kind}) and skipped count {skipped_count} (0)"
            )
    else:
        raise UnknownEnvelopeError(f"an envelope of kind {kind} came in, known are {[int(kind) for kind in Kind]}")
    return envelope
