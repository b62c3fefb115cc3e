"""What a standby says of a checkpoint whose chunks it has written for the one that writes the log."""

from __future__ import annotations

import msgspec

from immortal.coordinator.core.errors import LogError
from immortal.coordinator.core.interfaces import Offer
from immortal.coordinator.log import format as log_format
from immortal.coordinator.log.format import CHUNK_KEY
from immortal.protocol import decoding
from immortal.protocol.varint import Readable

_encode = msgspec.msgpack.Encoder().encode
_decode = decoding.Decoder(Offer).decode


def sealed_chunk(checkpoint_id: int, index: int, data: Readable) -> bytes:
    """As it stands in the table of chunks."""
    return log_format.seal_chunk(CHUNK_KEY.pack(checkpoint_id, index), data)


def encode_offer(offer: Offer) -> bytes:
    """It is read by the writer alone, soon: no part of the log's format."""
    return _encode(offer)


def decode_offer(data: bytes) -> Offer:
    """Raises LogError."""
    try:
        return _decode(data)
    except decoding.DecodeError as error:
        raise LogError(f"what a standby says of its checkpoint can't be read: {error}") from None
