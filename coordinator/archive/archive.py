"""The archive of one instance: its moments, and the objects that they name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pyrage
from pyrage import x25519

from immortal.coordinator.archive.chain import check_follows
from immortal.coordinator.archive.format import (
    MOMENTS,
    ArchiveError,
    Moment,
    PackedRow,
    Part,
    decode_moment,
    digest,
    encode_moment,
    moment_name,
    object_name,
    pack,
    unpack,
)
from immortal.coordinator.objects import DamagedObjectError
from immortal.coordinator.objects.store import Objects


class Archive:
    """Archive of the instance whose folder is ``objects``. ``cipher`` None: objects are not encrypted."""

    def __init__(self, objects: Objects, cipher: Cipher | None = None) -> None:
        self.objects = objects
        self.cipher = cipher

    # --- moments ------------------------------------------------------------------------------------------------------

    def numbers(self) -> list[int]:
        """Return numbers of the moments that are stored, ascending. Raises StoreError."""
        return [number for number, _ in self._listed()]

    def last(self) -> tuple[Moment, str] | None:
        """Return the newest moment, with the digest of its manifest. Raises ArchiveError, StoreError."""
        numbers = self.numbers()
        return self._read(numbers[-1]) if numbers else None

    def moments(self) -> list[Moment]:
        """Read all moments, and check that they follow one another. Raises ArchiveError, StoreError."""
        return [moment for moment, _ in self.dated_moments()]

    def dated_moments(self) -> list[tuple[Moment, float]]:
        """Read all moments, each with the time it was stored (s since the Unix epoch, by the store's clock).

        Raises ArchiveError, StoreError.
        """
        listed = self._listed()
        names = [moment_name(number) for number, _ in listed]
        found = [self._decoded(name, data) for name, data in zip(names, self.objects.get_all(names), strict=True)]
        check_follows([moment for moment, _ in found], [its_digest for _, its_digest in found])
        return [(moment, stored_s) for (moment, _), (_, stored_s) in zip(found, listed, strict=True)]

    def follow(self, known: dict[int, tuple[Moment, str]]) -> list[Moment]:
        """Return all moments, without reading those in ``known`` again (by number, with their manifests' digests).

        The newest is always read: it says whether the others are what was there. ``known`` grows.
        """
        numbers = self.numbers()
        names = [moment_name(number) for number in numbers if number not in known or number == numbers[-1]]
        found = [self._decoded(name, data) for name, data in zip(names, self.objects.get_all(names), strict=True)]
        known.update({moment.number: (moment, its_digest) for moment, its_digest in found})
        for gone in known.keys() - set(numbers):
            del known[gone]
        moments = [known[number][0] for number in numbers]
        check_follows(moments, [known[number][1] for number in numbers])
        return moments

    def put_moment(self, moment: Moment) -> str | None:
        """Store a moment. Returns its manifest's digest; None if another one has that number. Raises StoreError."""
        name, data = moment_name(moment.number), encode_moment(moment)
        # An answer may get lost, and the store be asked again: then it is our own that is there.
        if self.objects.put_new(name, data) or self.objects.get(name) == data:
            return digest(data)
        return None

    def _listed(self) -> list[tuple[int, float]]:
        """Number, and when it was stored."""
        listed = ((one.name.removeprefix(MOMENTS), one.modified_s) for one in self.objects.listed(MOMENTS))
        return [(int(name), modified_s) for name, modified_s in listed if name.isdecimal()]

    def _read(self, number: int) -> tuple[Moment, str]:
        name = moment_name(number)
        return self._decoded(name, self.objects.get(name))

    def _decoded(self, name: str, data: bytes) -> tuple[Moment, str]:
        where = f"{self.objects.where}/{name}"
        moment = decode_moment(data, where)
        if moment_name(moment.number) != name:
            raise DamagedObjectError(f"the object {where} is the manifest of moment {moment.number}")
        return moment, digest(data)

    # --- objects ------------------------------------------------------------------------------------------------------

    def put(self, folder: str, what: str, epoch: int, rows: list[PackedRow]) -> Part:
        """Store rows as an object. ``what`` is part of its name, for people. Raises StoreError."""
        data = pack(rows)
        if self.cipher is not None:
            data = self.cipher.encrypt(data)
        name = object_name(folder, what, epoch)
        self.objects.put_new(name, data)
        return Part(name, len(data), digest(data))

    def stored(self, parts: Iterable[Part]) -> Iterator[bytes]:
        """Yield the objects as they are stored, checked. Raises DamagedObjectError, which names it, and StoreError."""
        wanted = list(parts)
        for part, data in zip(wanted, self.objects.get_all(part.name for part in wanted), strict=True):
            if (len(data), digest(data)) != (part.size_bytes, part.digest):
                raise DamagedObjectError(
                    f"the object {self.objects.where}/{part.name} is damaged: it has {len(data)} bytes with digest"
                    f" {digest(data)}, its manifest says {part.size_bytes} with {part.digest}"
                )
            yield data

    def rows_of(self, part: Part, data: bytes, *, encrypted: bool) -> list[PackedRow]:
        """Decode the rows of an object as it is stored.

        Raises DamagedObjectError; ArchiveError where the key is missing.
        """
        name = f"{self.objects.where}/{part.name}"
        if not encrypted:
            return unpack(data, name)
        if self.cipher is None:
            raise ArchiveError(f"the archive {self.objects.where} is encrypted: give its secret key with --key-file")
        return unpack(self.cipher.decrypt(data, name), name)


# Encryption of objects with age (X25519): writing needs the public key alone, reading the private key.


_PUBLIC, _SECRET = "age1", "AGE-SECRET-KEY-1"
_OTHERS = 0o077


class Cipher:
    """The keys of a file as `age-keygen` writes it, secret ones, or of one with public ones, one a line."""

    def __init__(self, recipients: Sequence[x25519.Recipient], identities: Sequence[x25519.Identity]) -> None:
        self._recipients = recipients
        self._identities = identities

    @classmethod
    def of_file(cls, path: Path) -> Cipher:
        """Read a key file. Raises ArchiveError for anything else, and for a secret that others may read."""
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
        if not recipients and not identities:  # the lines themselves stay untold
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
        """Decrypt an object. ``name``: of the object, for the error. Raises ArchiveError, DamagedObjectError."""
        if not self._identities:
            raise ArchiveError("the key file has public keys alone: give the one with the secret key (--key-file)")
        try:
            return pyrage.decrypt(data, self._identities)
        except pyrage.DecryptError as error:
            raise DamagedObjectError(
                f"the object {name} cannot be decrypted with the keys of the key file: {error}"
            ) from None
