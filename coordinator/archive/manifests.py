"""A moment of a log in an archive: which objects it adds, whose log it is, and how far that was.

NAME/moments/000000000042                    the manifest of moment 42: a line with a checksum, then JSON
NAME/segments/0000000000812-...-e7-<random>  records, of a log in its 7th epoch
NAME/states/..., NAME/checkpoints/...

A manifest is written last, and only where none of its number is: so an object that no manifest names does not count,
and one history is written whoever writes it. It has no user's data, so that who archives needs no secret.
"""

from __future__ import annotations

import secrets

import msgspec
from msgspec import Struct

from immortal.coordinator.archive.errors import ArchiveError
from immortal.coordinator.archive.packs import digest
from immortal.coordinator.objects.errors import DamagedObjectError
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
    begins: bool  # it stands on no moment before
    segments: list[Segment]  # that the moment before has not
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
    """A name that nobody else gives: a writer of an older epoch, and a second one of this, has others."""
    return f"{folder}{what}-e{epoch}-{secrets.token_hex(8)}"


def encode_moment(moment: Moment) -> bytes:
    body = msgspec.json.encode(moment)
    return f"{_HEAD} {VERSION} {digest(body)}\n".encode() + body


def decode_moment(data: bytes, name: str) -> Moment:
    """``name``: of the object, for the errors. Raises DamagedObjectError; ArchiveError for a newer version."""
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
