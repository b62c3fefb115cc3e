"""Archive of one instance: its moments and objects, their encryption, and the restore and view of a moment's log.

A restore fetches and checks all objects, creates the log in one step, then verifies it. The view fetches each object
when one of its rows is first read.
"""

from __future__ import annotations

import contextlib
import tempfile
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TypeAlias

import pyrage
from msgspec import Struct
from pyrage import x25519

from immortal.coordinator.archive.format import (
    MOMENTS,
    ArchivedCheckpoint,
    ArchiveError,
    Moment,
    NeededObjects,
    PackedRow,
    Part,
    check_follows,
    decode_moment,
    digest,
    encode_moment,
    encrypted_parts,
    moment_name,
    needed_objects,
    object_name,
    pack,
    unpack,
)
from immortal.coordinator.core.errors import LogError
from immortal.coordinator.log.authentication import LogKey, Macs, find_key, read_marker
from immortal.coordinator.log.backend import Place, Severity, TableSize, View
from immortal.coordinator.log.format import SEQUENCE_KEY
from immortal.coordinator.log.identity import LogIdentity, read_identity
from immortal.coordinator.log.open import require_encrypted
from immortal.coordinator.log.verify import verify_log
from immortal.coordinator.objects import DamagedObjectError
from immortal.coordinator.objects.store import Objects
from immortal.protocol.varint import Readable


class Archive:
    """Archive of one instance, in the folder ``objects`` of a store. ``cipher`` None: objects are not encrypted."""

    def __init__(self, objects: Objects, cipher: Cipher | None = None) -> None:
        self.objects = objects
        self.cipher = cipher

    def numbers(self) -> list[int]:
        """Return the numbers of all stored moments, ascending. Raises StoreError."""
        return [number for number, _ in self._list_moments()]

    def last(self) -> tuple[Moment, str] | None:
        """Return the newest moment and the digest of its manifest; None if there is none.

        Raises ArchiveError, StoreError.
        """
        numbers = self.numbers()
        if not numbers:
            return None
        name = moment_name(numbers[-1])
        return self._decode(name, self.objects.get(name))

    def moments(self) -> list[Moment]:
        """Return all moments, checked to form one chain. Raises ArchiveError, StoreError."""
        return [moment for moment, _ in self.dated_moments()]

    def dated_moments(self) -> list[tuple[Moment, float]]:
        """Return all moments, each with the time when it was stored (s since the Unix epoch, by the store's clock).

        Raises ArchiveError, StoreError.
        """
        listed = self._list_moments()
        names = [moment_name(number) for number, _ in listed]
        found = [self._decode(name, data) for name, data in zip(names, self.objects.get_all(names), strict=True)]
        check_follows([moment for moment, _ in found], [its_digest for _, its_digest in found])
        return [(moment, stored_s) for (moment, _), (_, stored_s) in zip(found, listed, strict=True)]

    def follow(self, cached: dict[int, tuple[Moment, str]]) -> list[Moment]:
        """Return all moments, and update ``cached`` (moments with their manifests' digests, by number).

        Only the newest and those that are not cached are read; the newest shows if another archive replaced this one.
        """
        numbers = self.numbers()
        names = [moment_name(number) for number in numbers if number not in cached or number == numbers[-1]]
        found = [self._decode(name, data) for name, data in zip(names, self.objects.get_all(names), strict=True)]
        cached.update({moment.number: (moment, its_digest) for moment, its_digest in found})
        for gone in cached.keys() - set(numbers):
            del cached[gone]
        moments = [cached[number][0] for number in numbers]
        check_follows(moments, [cached[number][1] for number in numbers])
        return moments

    def put_moment(self, moment: Moment) -> str | None:
        """Store a moment; return its manifest's digest, None if another moment has its number. Raises StoreError."""
        name, data = moment_name(moment.number), encode_moment(moment)
        # If an answer is lost, the write is repeated: then the moment that exists already is our own.
        if self.objects.put_new(name, data) or self.objects.get(name) == data:
            return digest(data)
        return None

    def _list_moments(self) -> list[tuple[int, float]]:
        """Return the number of each stored moment, with the time when it was stored."""
        listed = ((one.name.removeprefix(MOMENTS), one.modified_s) for one in self.objects.listed(MOMENTS))
        return [(int(name), modified_s) for name, modified_s in listed if name.isdecimal()]

    def _decode(self, name: str, data: bytes) -> tuple[Moment, str]:
        location = f"{self.objects.location}/{name}"
        moment = decode_moment(data, location)
        if moment_name(moment.number) != name:
            raise DamagedObjectError(f"the object {location} is the manifest of moment {moment.number}")
        return moment, digest(data)

    def put(self, folder: str, label: str, epoch: int, rows: list[PackedRow]) -> Part:
        """Store rows as one object; return its description. ``label``: text for its name. Raises StoreError."""
        data = pack(rows)
        if self.cipher is not None:
            data = self.cipher.encrypt(data)
        name = object_name(folder, label, epoch)
        self.objects.put_new(name, data)
        return Part(name, len(data), digest(data))

    def read_parts(self, parts: Iterable[Part]) -> Iterator[bytes]:
        """Yield the stored bytes of each part, checked against its digest. Raises DamagedObjectError, StoreError."""
        wanted = list(parts)
        for part, data in zip(wanted, self.objects.get_all(part.name for part in wanted), strict=True):
            if (len(data), digest(data)) != (part.size_bytes, part.digest):
                raise DamagedObjectError(
                    f"the object {self.objects.location}/{part.name} is damaged: it has {len(data)} bytes with digest"
                    f" {digest(data)}, its manifest says {part.size_bytes} with {part.digest}"
                )
            yield data

    def rows_of(self, part: Part, data: bytes, *, encrypted: bool) -> list[PackedRow]:
        """Decode the rows in the stored bytes of ``part``. Raises DamagedObjectError; ArchiveError without the key."""
        name = f"{self.objects.location}/{part.name}"
        if not encrypted:
            return unpack(data, name)
        if self.cipher is None:
            raise ArchiveError(f"the archive {self.objects.location} is encrypted: give its secret key with --key-file")
        return unpack(self.cipher.decrypt(data, name), name)


# Encryption of objects with age (X25519): writing needs the public key alone, reading the private key.


_PUBLIC, _SECRET = "age1", "AGE-SECRET-KEY-1"
_OTHERS = 0o077


class Cipher:
    """Cipher with the keys of a key file: secret keys as `age-keygen` writes them, or public keys, one a line."""

    def __init__(self, recipients: Sequence[x25519.Recipient], identities: Sequence[x25519.Identity]) -> None:
        self._recipients = recipients
        self._identities = identities

    @classmethod
    def from_file(cls, path: Path) -> Cipher:
        """Read a key file. Raises ArchiveError for any other file, and for secret keys that others can read."""
        try:
            lines = [line.strip() for line in path.read_text("ascii").splitlines()]
            mode = path.stat().st_mode & 0o777
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no text"
            raise ArchiveError(f"the key file {path} cannot be read: {reason}") from None
        lines = [line for line in lines if line and not line.startswith("#")]
        try:
            identities = [x25519.Identity.from_str(line) for line in lines if line.startswith(_SECRET)]
            recipients = [x25519.Recipient.from_str(line) for line in lines if not line.startswith(_SECRET)]
        except (pyrage.IdentityError, pyrage.RecipientError):
            recipients, identities = [], []
        if not recipients and not identities:  # the error does not show the lines
            raise ArchiveError(
                f"{path} is no key file: lines with age's keys were expected, public ones ({_PUBLIC}...) or secret ones"
                f" ({_SECRET}...): 'age-keygen -o {path}' makes one"
            )
        if identities and mode & _OTHERS:
            raise ArchiveError(f"{path} has a secret key and mode {mode:04o}, expected 0600: 'chmod 0600 {path}'")
        return cls([*recipients, *(identity.to_public() for identity in identities)], identities)

    def encrypt(self, data: bytes) -> bytes:
        return pyrage.encrypt(data, self._recipients)

    def decrypt(self, data: bytes, name: str) -> bytes:
        """Decrypt an object. ``name``: its name, for the error. Raises ArchiveError, DamagedObjectError."""
        if not self._identities:
            raise ArchiveError("the key file has public keys alone: give the one with the secret key (--key-file)")
        try:
            return pyrage.decrypt(data, self._identities)
        except pyrage.DecryptError as error:
            raise DamagedObjectError(
                f"the object {name} cannot be decrypted with the keys of the key file: {error}"
            ) from None


class Restored(Struct, frozen=True):
    first_sequence_id: int
    last_sequence_id: int
    checkpoints_count: int
    objects_count: int
    authenticated: bool


def restore(
    archive: Archive, name: str, moments: Sequence[Moment], index: int, place: Place, keys: Sequence[LogKey]
) -> Restored:
    """Create the log of ``moments[index]`` of the instance ``name`` in ``place``, which must have no log.

    ``keys``: keys with which the log can be authenticated. A failed restore leaves no log. Raises ArchiveError, which
    names the damaged object; StoreError, LogError, OSError.
    """
    moment = moments[index]
    needs = needed_objects(moments, index)
    if moment.instance != name:
        raise ArchiveError(
            f"the archive in {archive.objects.location} is of the instance {moment.instance!r}, not of {name!r}:"
            f" nothing was written; 'immortal archive --show' says what each archive has"
        )
    encrypted = encrypted_parts(moments[: index + 1])
    with tempfile.TemporaryDirectory(prefix="immortal-restore-", dir=_fetch_folder(place)) as folder:
        spool = Path(folder)
        parts = needs.parts
        for number, data in enumerate(archive.read_parts(parts)):
            (spool / str(number)).write_bytes(data)
        files = {part.name: spool / str(number) for number, part in enumerate(parts)}

        def rows_of(part: Part) -> list[PackedRow]:
            return archive.rows_of(part, files[part.name].read_bytes(), encrypted=encrypted[part.name])

        view = ArchivedView(needs, rows_of, moment)
        identity = read_identity(view, archive.objects.location, moment.instance)
        require_encrypted(place, identity)
        marker = read_marker(view)
        mac = None
        if marker is not None:
            mac = Macs(find_key(keys, marker, moment.instance), identity, marker).mark
        if place.exists():
            raise ArchiveError(f"there is a log in {place.label} already: nothing was written")
        place.copy(view, identity, mac)
    try:
        _check(place, moment, identity, keys)
    except LogError:
        with contextlib.suppress(LogError, OSError):
            place.remove()
        raise
    return Restored(
        moment.first_sequence_id, moment.last_sequence_id, len(moment.checkpoints), len(parts), marker is not None
    )


def _fetch_folder(place: Place) -> Path | None:
    """Return the folder for the fetched objects, beside the new log; None for a log that is not in a folder."""
    if place.scheme != "lmdb":
        return None
    folder = Path(place.location).parent
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def _check(place: Place, moment: Moment, identity: LogIdentity, keys: Sequence[LogKey]) -> None:
    """Verify the restored log, and check that it has the records of ``moment``. Raises LogError."""
    verification = verify_log(place, moment.instance, keys=keys)
    wrong = [str(finding.message) for finding in verification.findings() if finding.severity is not Severity.NOTE]
    if wrong:
        raise LogError(f"what came back of {moment.instance!r} is damaged, and was removed again: {wrong[0]}")
    found = verification.first_sequence_id, verification.last_sequence_id
    if found != (moment.first_sequence_id, moment.last_sequence_id):
        raise LogError(f"what came back of {moment.instance!r} has records {found[0]} to {found[1]}, and was removed")


_SEGMENT_TABLES = ("records", "record_seals")
_CHECKPOINT_TABLES = ("checkpoints", "chunks", "outputs")
_Rows: TypeAlias = list[tuple[bytes, bytes]]
_RowsOf: TypeAlias = Callable[[Part], list[PackedRow]]


class ArchivedView(View):
    """View of the log of one moment. Holds at most two segments, one part of a checkpoint, and all smaller tables."""

    def __init__(self, needs: NeededObjects, rows_of: _RowsOf, moment: Moment) -> None:
        self._segments = needs.segments
        self._states = needs.states
        self._rows_of = rows_of
        self._first, self._last = moment.first_sequence_id, moment.last_sequence_id
        self._checkpoints = _CheckpointRows(moment.checkpoints, rows_of)
        self._records = lru_cache(maxsize=2)(lambda at: _by_table(rows_of(self._segments[at].part)))

    @cached_property
    def _tables(self) -> dict[str, _Rows]:
        state: dict[str, dict[bytes, bytes]] = {}
        for part in self._states:
            for table, key, value in self._rows_of(part):
                if value is None:
                    state.setdefault(table, {}).pop(key, None)
                else:
                    state.setdefault(table, {})[key] = value
        return {table: sorted(rows.items()) for table, rows in state.items()}

    def get(self, table: str, key: bytes) -> Readable | None:
        for found, value in self.scan(table, key):
            return value if bytes(found) == key else None
        return None

    def scan(self, table: str, first: bytes = b"") -> Iterator[tuple[Readable, Readable]]:
        if table != "records":  # in an authenticated log, the state has the seal of the record before the first
            rows = self._tables.get(table, [])
            yield from rows[bisect_left(rows, (first,)) :]
        if table in _SEGMENT_TABLES:
            for at, segment in enumerate(self._segments):
                if SEQUENCE_KEY.pack(segment.last_sequence_id) >= first:
                    rows = self._records(at).get(table, [])
                    yield from (row for row in rows if row[0] >= first and self._is_kept(row[0]))
        if table in _CHECKPOINT_TABLES:
            yield from self._checkpoints.scan(table, first)

    def scan_back(self, table: str, last: bytes | None = None) -> Iterator[tuple[Readable, Readable]]:
        if table not in _SEGMENT_TABLES:
            rows = [row for row in self.scan(table) if last is None or bytes(row[0]) <= last]
            yield from reversed(rows)
            return
        for at in range(len(self._segments) - 1, -1, -1):
            for key, value in reversed(self._records(at).get(table, [])):
                if self._is_kept(key) and (last is None or key <= last):
                    yield key, value

    def size(self, table: str) -> TableSize:
        if table == "records":  # size as stored: the exact one would need all objects
            size_bytes = sum(segment.part.size_bytes for segment in self._segments)
            return TableSize(size_bytes, self._last - self._first + 1)
        rows = [len(key) + len(value) for key, value in self.scan(table)]
        return TableSize(sum(rows), len(rows))

    def _is_kept(self, key: bytes) -> bool:
        return bool(self._first <= SEQUENCE_KEY.unpack(key)[0] <= self._last)


class _CheckpointRows:
    """Rows of a moment's checkpoints. Keeps the last keys of each part, and skips parts without the wanted rows."""

    def __init__(self, checkpoints: Sequence[ArchivedCheckpoint], rows_of: _RowsOf) -> None:
        self._parts = [part for checkpoint in checkpoints for part in checkpoint.parts]
        self._with_headers = {checkpoint.parts[0].name for checkpoint in checkpoints if checkpoint.parts}
        self._ids = [SEQUENCE_KEY.pack(one.checkpoint_id) for one in checkpoints for _ in one.parts]
        self._last_keys: dict[int, dict[str, bytes]] = {}
        self._rows_of = lru_cache(maxsize=1)(lambda at: self._read(at, rows_of))

    def _read(self, at: int, rows_of: _RowsOf) -> dict[str, _Rows]:
        found = _by_table(rows_of(self._parts[at]))
        self._last_keys[at] = {table: rows[-1][0] for table, rows in found.items()}
        return found

    def scan(self, table: str, first: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield the rows of ``table`` from the key ``first`` on, in the order of checkpoints and of their parts."""
        for at, part in enumerate(self._parts):
            if self._may_have(at, part, table, first):
                yield from (row for row in self._rows_of(at).get(table, []) if row[0] >= first)

    def _may_have(self, at: int, part: Part, table: str, first: bytes) -> bool:
        if self._ids[at] < first[: SEQUENCE_KEY.size]:
            return False
        if table == "checkpoints" and part.name not in self._with_headers:
            return False
        cached = self._last_keys.get(at)
        return cached is None or (table in cached and cached[table] >= first)


def _by_table(rows: Sequence[PackedRow]) -> dict[str, _Rows]:
    found: dict[str, _Rows] = {}
    for table, key, value in rows:
        if value is None:
            raise DamagedObjectError(f"a segment says that a row of {table!r} is gone")
        found.setdefault(table, []).append((key, value))
    return found
