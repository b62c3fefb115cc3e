"""The entries of a journal, byte by byte: docs/LOG_FORMAT.md, "The journal". No I/O."""

from __future__ import annotations

import struct

from msgspec import Struct

from immortal.protocol import decoding
from immortal.protocol.checksum import crc64

BLOCK_SIZE_BYTES = 4096  # an entry begins with one: what is durable already is never written again
NO_NONCE = 1  # what the tables of version 4 say


class Place(Struct, frozen=True):
    """Which entry it is: entries of one journal come in this order."""

    transaction_id: int  # the one of LMDB that it follows
    number: int  # of those that follow it, from 0
    nonce: int = NO_NONCE  # of the life that wrote it


class Form(Struct, frozen=True):
    """How an entry begins: what its CRC covers, the CRC, and then the rows."""

    magic: bytes
    checked: struct.Struct  # magic, size of the rows, then the fields of Place

    @property
    def header_size_bytes(self) -> int:
        return self.checked.size + _CRC_SIZE_BYTES


_CRC_SIZE_BYTES = 8
FORM = Form(b"IMJ2", struct.Struct("<4sIQQQ"))
_FORM_4 = Form(b"IMJ1", struct.Struct("<4sIQQ"))  # of version 4
_FORMS = {form.magic: form for form in (FORM, _FORM_4)}
ROWS = decoding.Decoder(list[tuple[str, bytes, bytes]])


def form_of(place: Place) -> Form:
    return _FORM_4 if place.nonce == NO_NONCE else FORM


def fields_of(form: Form, place: Place) -> tuple[int, ...]:
    numbers = (place.transaction_id, place.number)
    return numbers if form is _FORM_4 else (*numbers, place.nonce)


def place_of(data: bytes) -> Place | None:
    """Where the entry with which ``data`` begins says that it belongs."""
    form = _FORMS.get(data[:4])
    if form is None or len(data) < form.header_size_bytes:
        return None
    return Place(*form.checked.unpack_from(data)[2:])


def blocks_size_bytes(form: Form, packed: bytes) -> int:
    return -(-(form.header_size_bytes + len(packed)) // BLOCK_SIZE_BYTES) * BLOCK_SIZE_BYTES


def encode_entry(seed: int, transaction_id: int, number: int, nonce: int, packed: bytes) -> bytes:
    checked = FORM.checked.pack(FORM.magic, len(packed), transaction_id, number, nonce)
    return b"".join((checked, crc64(packed, crc64(checked, seed)).to_bytes(_CRC_SIZE_BYTES, "little"), packed))


def decode_entry(data: bytes, seed: int, place: Place) -> bytes | None:
    """The rows of the entry with which ``data`` begins; None unless it is that one, whole."""
    form = form_of(place)
    if data[:4] != form.magic or place_of(data) != place:
        return None
    checked = data[: form.checked.size]
    size_bytes = form.checked.unpack(checked)[1]
    packed = data[form.header_size_bytes : form.header_size_bytes + size_bytes]
    check = int.from_bytes(data[form.checked.size : form.header_size_bytes], "little")
    if len(packed) != size_bytes or check != crc64(packed, crc64(checked, seed)):
        return None
    return packed
