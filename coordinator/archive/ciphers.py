"""Objects that only the holder of a key reads: age, with X25519. Who writes them needs the public half alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyrage
from pyrage import x25519

from immortal.coordinator.archive.errors import ArchiveError
from immortal.coordinator.objects.errors import DamagedObjectError

_PUBLIC, _SECRET = "age1", "AGE-SECRET-KEY-1"
_OTHERS = 0o077


class Cipher:
    """The keys of a file as `age-keygen` writes it, secret ones, or of one with public ones, one a line."""

    def __init__(self, recipients: Sequence[x25519.Recipient], identities: Sequence[x25519.Identity]) -> None:
        self._recipients = recipients
        self._identities = identities

    @classmethod
    def of_file(cls, path: Path) -> Cipher:
        """Raises ArchiveError for anything else, and for a secret that others may read."""
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
        """``name``: of the object, for the error. Raises ArchiveError, DamagedObjectError."""
        if not self._identities:
            raise ArchiveError("the key file has public keys alone: give the one with the secret key (--key-file)")
        try:
            return pyrage.decrypt(data, self._identities)
        except pyrage.DecryptError as error:
            raise DamagedObjectError(
                f"the object {name} cannot be decrypted with the keys of the key file: {error}"
            ) from None
