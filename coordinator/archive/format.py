"""Format of an archive: manifests of moments, and packs of a log's rows.

NAME/moments/000000000042                    the manifest of moment 42: a line with a checksum, then JSON
NAME/segments/0000000000812-...-e7-<random>  records, of a log in its 7th epoch
NAME/states/..., NAME/checkpoints/...

A manifest is written last, and only where none of its number is: so an object that no manifest names does not count,
and one history is written whoever writes it. It has no user's data, so that who archives needs no secret.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import msgspec
import zstandard
from blake3 import blake3
from msgspec import Struct

from immortal.coordinator.objects import DamagedObjectError, ObjectError
from immortal.protocol import decoding

VERSION = 1
MOMENTS = "moments/"
OBJECT_FOLDERS = ("segments/", "states/", "checkpoints/")
_HEAD = "IMMORTAL ARCHIVE"


class Part(Struct, frozen=True):
    """An object as it is stored, encrypted or not. ``name`` is relative to the instance's folder."""

    name: str
    size_bytes: int
    digest: str


class Segment(Struct, frozen=True):
    """Records, both ends included, with their MACs where the log has a key."""

    first_sequence_id: int
    last_sequence_id: int
    part: Part


class ArchivedCheckpoint(Struct, frozen=True):
    checkpoint_id: int
    sequence_id: int
    time_ns: int
    header_digest: str
    parts: list[Part]


class Moment(Struct, frozen=True):
    """A log as it was. Times are ns since the Unix epoch."""

    number: int
    instance: str
    committer_id: int
    created_ns: int
    format_version: int
    nonce: str  # in hex, of the log's authentication; "": it has none
    epoch: int
    taken_ns: int  # by the archiver's clock
    time_ns: int  # of the last record, by the instance's; 0: there is none
    first_sequence_id: int  # that the log kept
    last_sequence_id: int
    last_digest: str  # of the last record's value; "": it was not kept
    begins: bool  # no earlier moment is needed
    segments: list[Segment]  # those that the moment before lacks
    state: Part | None  # the other tables, or what has changed in them; None: nothing has
    state_is_whole: bool
    state_digest: str
    checkpoints: list[ArchivedCheckpoint]  # all that the log kept
    encrypted: bool
    before_digest: str  # of the manifest before; "": there is none
    version: int = VERSION

    @property
    def new_parts(self) -> list[Part]:
        parts = [segment.part for segment in self.segments]
        return parts if self.state is None else [*parts, self.state]

    @property
    def checkpoint_parts(self) -> list[Part]:
        return [part for checkpoint in self.checkpoints for part in checkpoint.parts]


_MOMENT = decoding.JsonDecoder(Moment)


class _Version(Struct):
    version: int


_VERSION = decoding.JsonDecoder(_Version)


def moment_name(number: int) -> str:
    return f"{MOMENTS}{number:012}"


def object_name(folder: str, what: str, epoch: int) -> str:
    """Make a unique name: writers of other epochs, and a second one of this epoch, make other names."""
    return f"{folder}{what}-e{epoch}-{secrets.token_hex(8)}"


def encode_moment(moment: Moment) -> bytes:
    body = msgspec.json.encode(moment)
    return f"{_HEAD} {VERSION} {digest(body)}\n".encode() + body


def decode_moment(data: bytes, name: str) -> Moment:
    """Decode a manifest.

    ``name``: of the object, for the errors. Raises DamagedObjectError; ArchiveError for a newer version.
    """
    head, _, body = data.partition(b"\n")
    words = head.decode("ascii", "replace").rsplit(" ", 2)
    if words[0] != _HEAD:
        raise DamagedObjectError(f"the object {name} begins with {data[:16]!r}: no manifest of an archive")
    if words[2:] != [digest(body)]:
        raise DamagedObjectError(f"the object {name} is damaged: its checksum does not match")
    try:
        version = _VERSION.decode(body).version
        if version != VERSION:
            raise ArchiveError(
                f"the object {name} has version {version}, this program reads version {VERSION}: use the newer version"
                " of the program that wrote it"
            )
        return _MOMENT.decode(body)
    except decoding.DecodeError as error:
        raise DamagedObjectError(f"the object {name} is no manifest: {error}") from None


# Errors.


class ArchiveError(ObjectError):
    """Raised when this archive does not allow what was requested."""


class ConflictError(ArchiveError):
    """Raised when another archiver has written the next moment first."""


# Packs: rows of a log as one object. Segments, checkpoint parts and states of moments are packs.


PackedRow: TypeAlias = tuple[str, bytes, bytes | None]
"""Table, key, value; None: the row is gone since the moment before."""
_MAGIC = b"IMMPACK1"
_DIGEST_SIZE_BYTES = 16
_LEVEL = 3  # of zstd: the disk's pace on one processor
_SIZE_BYTES_MAX = 1 << 32  # MessagePack has no longer value
_encode = msgspec.msgpack.Encoder().encode
_ROWS = decoding.Decoder(list[PackedRow])


def pack(rows: Sequence[PackedRow]) -> bytes:
    """Compressed, and with a checksum of its own (zstd's, XXH64)."""
    return _MAGIC + zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True).compress(_encode(rows))


def unpack(data: bytes, name: str) -> list[PackedRow]:
    """Decode a pack. ``name``: of the object, for the error. Raises DamagedObjectError."""
    if not data.startswith(_MAGIC):
        raise DamagedObjectError(f"the object {name} begins with {data[:8]!r}, {_MAGIC!r} was expected")
    try:
        size_bytes = zstandard.frame_content_size(data[len(_MAGIC) :])
        if not 0 <= size_bytes <= _SIZE_BYTES_MAX:
            said = "does not say its size" if size_bytes < 0 else f"says that {size_bytes} bytes are in it"
            raise DamagedObjectError(f"the object {name} {said}: at most {_SIZE_BYTES_MAX} were expected")
        return _ROWS.decode(zstandard.ZstdDecompressor().decompress(data[len(_MAGIC) :]))
    except (decoding.DecodeError, zstandard.ZstdError) as error:
        raise DamagedObjectError(f"the object {name} is damaged: {error}") from None


def digest(data: bytes) -> str:
    """Return the digest of a stored object or of a value: 16 bytes of BLAKE3, in hex."""
    return blake3(data).hexdigest(_DIGEST_SIZE_BYTES)


def digest_of_rows(digests: Iterable[tuple[tuple[str, bytes], bytes]]) -> str:
    """Return the digest of a state from the digests of its rows, independent of their order."""
    whole = blake3()
    for (table, key), of_value in sorted(digests):
        whole.update(_encode((table, key, of_value)))
    return whole.hexdigest(_DIGEST_SIZE_BYTES)
