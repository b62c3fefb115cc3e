"""Format of an archive: manifests of moments and packs of a log's rows; the chain of moments; retention. No I/O.

NAME/moments/000000000042                    the manifest of moment 42: a line with a checksum, then JSON
NAME/segments/0000000000812-...-e7-<random>  records, of a log in its 7th epoch
NAME/states/..., NAME/checkpoints/...

A manifest is written after its objects, and only if no other has its number. So an object that no manifest names does
not count, and all archivers write one history. A manifest has no user data, so that archiving needs no secret key.
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
    """Description of a stored object, encrypted or not. ``name`` is relative to the instance's folder."""

    name: str
    size_bytes: int
    digest: str


class Segment(Struct, frozen=True):
    """Object with consecutive records, both ends included, and their MACs if the log has a key."""

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
    """Manifest of one moment: a log as it was, and the objects that hold it. Times: ns since the Unix epoch."""

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


def object_name(folder: str, label: str, epoch: int) -> str:
    """Return a unique name for an object: two writers, also of one epoch, never get the same."""
    return f"{folder}{label}-e{epoch}-{secrets.token_hex(8)}"


def encode_moment(moment: Moment) -> bytes:
    body = msgspec.json.encode(moment)
    return f"{_HEAD} {VERSION} {digest(body)}\n".encode() + body


def decode_moment(data: bytes, name: str) -> Moment:
    """Decode a manifest. ``name``: for errors. Raises DamagedObjectError; ArchiveError for another version."""
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
    """Raised if this archive does not allow a requested operation."""


class ConflictError(ArchiveError):
    """Raised if the log has changed, or another archiver has written the next moment first."""


# Packs: rows of a log as one object. Segments, checkpoint parts and states of moments are packs.


PackedRow: TypeAlias = tuple[str, bytes, bytes | None]
"""Row of a pack: table, key, value; None: the row was deleted after the moment before."""

_MAGIC = b"IMMPACK1"
_DIGEST_SIZE_BYTES = 16
_LEVEL = 3  # of zstd: the disk's pace on one processor
_SIZE_BYTES_MAX = 1 << 32  # MessagePack has no longer value
_encode = msgspec.msgpack.Encoder().encode
_ROWS = decoding.Decoder(list[PackedRow])


def pack(rows: Sequence[PackedRow]) -> bytes:
    """Encode rows as a pack: compressed, with zstd's own checksum (XXH64)."""
    return _MAGIC + zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True).compress(_encode(rows))


def unpack(data: bytes, name: str) -> list[PackedRow]:
    """Decode the rows of a pack. ``name``: the object's name, for the error. Raises DamagedObjectError."""
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


class NeededObjects(Struct, frozen=True):
    """Objects that make up a moment, each kind from the oldest on."""

    states: list[Part]  # the first is whole
    segments: list[Segment]
    checkpoint_parts: list[Part]
    oldest_index: int  # index of the first moment whose manifest names one of these

    @property
    def parts(self) -> list[Part]:
        return [*self.states, *(segment.part for segment in self.segments), *self.checkpoint_parts]


def needed_objects(moments: Sequence[Moment], index: int) -> NeededObjects:
    """Find the objects of ``moments[index]``. ``moments`` are consecutive. Raises DamagedObjectError for a gap."""
    moment = moments[index]
    states: list[Part] = []
    segments: list[Segment] = []
    first, wanted = moment.first_sequence_id, moment.last_sequence_id
    has_state, oldest = False, index
    for at in range(index, -1, -1):
        before = moments[at]
        if not has_state:
            oldest = at
            states += [] if before.state is None else [before.state]
            has_state = before.state_is_whole
        for segment in reversed(before.segments):
            if wanted >= first and segment.last_sequence_id >= first:
                if segment.last_sequence_id != wanted:
                    break
                oldest = at
                segments.append(segment)
                wanted = segment.first_sequence_id - 1
        if before.begins or (has_state and wanted < first):
            break
    if wanted >= first:
        raise DamagedObjectError(f"the archive has no records {first} to {wanted}, which moment {moment.number} needs")
    if not has_state:
        raise DamagedObjectError(f"the archive has no whole state at or before moment {moment.number}")
    return NeededObjects(states[::-1], segments[::-1], moment.checkpoint_parts, oldest)


def encrypted_parts(moments: Sequence[Moment]) -> dict[str, bool]:
    """Return the names of all objects of ``moments``, each with True if it is encrypted."""
    return {part.name: one.encrypted for one in moments for part in (*one.new_parts, *one.checkpoint_parts)}


def check_follows(moments: Sequence[Moment], digests: Sequence[str]) -> None:
    """Check that each manifest continues the one before. Raises DamagedObjectError."""
    for before, moment, its_digest in zip(moments, moments[1:], digests, strict=False):
        if moment.number != before.number + 1:
            missing = f"{before.number + 1} to {moment.number - 1}"
            raise DamagedObjectError(f"the archive has no manifest of the moments {missing}: they were removed")
        if moment.before_digest != its_digest:
            raise DamagedObjectError(
                f"the manifest of moment {moment.number} does not follow the one of moment {before.number}: one of the"
                " two was replaced"
            )


def index_of(moments: Sequence[Moment], *, until_ns: int | None, until_record: int | None) -> int:
    """Return the index of the last moment that has no record after ``until_record`` or later than ``until_ns``.

    Raises ArchiveError if all are later.
    """
    for index in range(len(moments) - 1, -1, -1):
        moment = moments[index]
        if (until_ns is None or moment.time_ns <= until_ns) and (
            until_record is None or moment.last_sequence_id <= until_record
        ):
            return index
    oldest = moments[0]
    raise ArchiveError(
        f"the oldest moment of {oldest.instance!r} in the archive ends with record {oldest.last_sequence_id}: that is"
        " later than what was asked for"
    )


# Retention: chooses the moments that may be removed. Pure; the archiver removes them.


_DAY_NS = 86_400 * 1_000_000_000
_MIB = 1 << 20


class Retention(Struct, frozen=True):
    """Rule for the moments of an archive that are kept.

    ``keep_days``: any moment of these days before the newest can be restored. ``keep_mb``: largest size in MiB, unless
    the newest moment alone needs more. With both, the one that keeps less applies.
    """

    keep_days: float | None = None
    keep_mb: int | None = None

    def __bool__(self) -> bool:
        return self.keep_days is not None or self.keep_mb is not None

    def first_kept(self, moments: Sequence[Moment], stored_s: Sequence[float]) -> int:
        """Return the index of the oldest moment that must stay restorable.

        ``stored_s``: time when the manifest of each was stored, by the store's clock.
        """
        index = 0
        if self.keep_days is not None:
            keep_ns = int(self.keep_days * _DAY_NS)
            ages_ns = _ages_ns(moments, stored_s)
            index = max((at for at, age_ns in enumerate(ages_ns) if age_ns >= keep_ns), default=0)
        if self.keep_mb is not None:
            index = max(index, self._first_within(moments, self.keep_mb * _MIB))
        return index

    def _first_within(self, moments: Sequence[Moment], size_bytes_max: int) -> int:
        own = [sum(part.size_bytes for part in moment.new_parts) for moment in moments]
        behind = [0] * (len(moments) + 1)
        for at in range(len(moments) - 1, -1, -1):
            behind[at] = behind[at + 1] + own[at]
        checkpoints: dict[str, int] = {}
        first = len(moments) - 1
        for at in range(len(moments) - 1, -1, -1):
            checkpoints |= {part.name: part.size_bytes for part in moments[at].checkpoint_parts}
            if behind[needed_objects(moments, at).oldest_index] + sum(checkpoints.values()) > size_bytes_max:
                break
            first = at
        return first


def _ages_ns(moments: Sequence[Moment], stored_s: Sequence[float]) -> list[int]:
    """Return the age of each moment relative to the newest, in ns: by its records or the store's clock, the lower one.

    The present time is not used, and one wrong clock cannot make a moment old: a jump of a clock would remove data that
    has no second copy.
    """
    return [
        min(moments[-1].time_ns - moment.time_ns, int((stored_s[-1] - when_s) * 1e9))
        for moment, when_s in zip(moments, stored_s, strict=True)
    ]
