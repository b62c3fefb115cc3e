"""The numbers that a run draws for what its handlers wait for: told by one run, so that another one can draw the same.

Only replays that look into an app know of them. `docs/WIRE.md`, part 7.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from immortal.protocol import decoding
from immortal.protocol.errors import RemoteProtocolError
from immortal.protocol.messages import MessageType, encode_message

DRAWS_MAX = 10_000  # in one message; a record may have more, in several


class Draw(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """``number`` was drawn by the handler ``task`` for ``what`` with the detail ``detail``, as a journal says it.

    Of a handler that starts: ``task`` 0, ``what`` "" and, as ``detail``, the index of the message that starts it.
    """

    number: int
    task: int
    what: str
    detail: int


class Numbers(msgspec.Struct, array_like=True, frozen=True):
    """Numbers that were drawn in the record ``sequence_id``; none: there are no more of it, nor of any before it."""

    sequence_id: int
    draws: list[Draw] = []


_encode = msgspec.msgpack.Encoder().encode
_decode = decoding.Decoder(Numbers).decode


def encode_numbers(sequence_id: int, draws: Sequence[Draw] = ()) -> bytes:
    """A whole Numbers message."""
    return encode_message(MessageType.NUMBERS, pack_numbers(sequence_id, draws))


def pack_numbers(sequence_id: int, draws: Sequence[Draw] = ()) -> bytes:
    """The data of one."""
    return _encode(Numbers(sequence_id, list(draws)))


def decode_numbers(data: bytes) -> Numbers:
    """Raises RemoteProtocolError."""
    try:
        return _decode(data)
    except decoding.DecodeError as error:
        raise RemoteProtocolError(f"a Numbers message can't be read: {error}") from None
