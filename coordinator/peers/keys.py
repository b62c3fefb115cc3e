"""CURVE keys of an instance: a secret file that only its owner can read, and a public one for its peers.

<home>/counter/keys/pairs       "public secret" on each line; mode 0600, in a folder of mode 0700
<home>/counter/public_keys      the public key of each pair, one a line; comments in front of it have its first and last
                                day, and the role of its owner: "; role: client" (without: an instance)

The first pair is in use. A rotation adds a second, which peers accept from then on; retiring removes the first, and the
second takes its place. So no peer ever sees a key that it could not know.

An instance of a shared registry has keys of its own on each machine that can run it; no secret leaves its machine.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, date, datetime
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from immortal.coordinator.config import InstanceSettings, write_atomically
from immortal.coordinator.instances.own_logs import OwnLogs
from immortal.coordinator.instances.registry import (
    PUBLIC_KEYS_FILE_NAME,
    Registry,
    RegistryError,
    remove_file,
    write_text,
)
from immortal.coordinator.log.open import log_exists
from immortal.coordinator.log_url import is_in_folder
from immortal.coordinator.messenger.security import KeyPair, Role
from immortal.protocol.errors import ImmortalError
from immortal.protocol.files import make_folder
from immortal.protocol.shared_registry import SharedHomeError

PUBLIC_FILE_NAME = PUBLIC_KEYS_FILE_NAME
_FOLDER_NAME = "keys"
_FILE_NAME = "pairs"
_KEY = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")  # Z85 of 32 bytes
_OTHERS = 0o077
AGE_DAYS_MAX = 365  # age from which the status reports a key
SOON_DAYS = 30  # time before its expiry from which the status reports a key
PUBLIC_FILE_SIZE_BYTES_MAX = 4096  # far more than two keys and a few comments
COMMENT = ";"  # begins a comment; "#" and "/" may be part of a key
_ROLE = re.compile(r";\s*role:\s*(\S+)\s*")
_DATES = re.compile(r";\s*(?:made: (?P<made>\d{4}-\d\d-\d\d))?(?:, )?(?:expires: (?P<expires>\d{4}-\d\d-\d\d))?\s*")
_ROLES = (Role.INSTANCE, Role.CLIENT, Role.OPERATOR)  # that a file can give


class KeysError(ImmortalError):
    """Raised if keys are missing, unreadable, wrong, or open to other users."""


class PublicKey(Struct, frozen=True):
    """Public key, the day (UTC) when it was made, and the last day on which it is valid; None: not given."""

    key: str
    made: date | None = None
    expires: date | None = None

    def has_expired(self, today: date) -> bool:
        return self.expires is not None and today > self.expires


class PublicFile(Struct, frozen=True):
    """Contents of a public file. ``role`` None: the file gives no role."""

    keys: tuple[PublicKey, ...] = ()
    role: Role | None = None


def today() -> date:
    """Return the current day, UTC."""
    return datetime.now(UTC).date()


def secret_path(folder: Path) -> Path:
    """Return the path of the file of the pairs; ``folder`` is the instance's."""
    return folder / _FOLDER_NAME / _FILE_NAME


def public_path(folder: Path) -> Path:
    """Return the path of the file of the public keys; ``folder`` is the instance's."""
    return folder / PUBLIC_FILE_NAME


def is_key(text: object) -> bool:
    """Return True if ``text`` is a key in Z85."""
    return isinstance(text, str) and _KEY.fullmatch(text) is not None


def read_pairs(folder: Path) -> tuple[KeyPair, ...]:
    """Read the instance's own pairs, the one in use first; none if it has no keys.

    Raises KeysError for a file that cannot be read, or that others than the owner can read or change.
    """
    path = secret_path(folder)
    try:
        for place, expected in ((path.parent, 0o700), (path, 0o600)):
            _check_mode(place, expected)
        lines = path.read_text("ascii").split("\n")
    except (FileNotFoundError, NotADirectoryError):
        return ()
    except (OSError, UnicodeDecodeError) as error:
        raise KeysError(f"the secret keys in {path} cannot be read: {error}") from None
    pairs = []
    for line in filter(None, lines):
        public, _, secret = line.partition(" ")
        if not (is_key(public) and is_key(secret) and KeyPair(public, secret).matches):  # no secret in the error
            raise KeysError(f"{path} holds something else than key pairs: restore it, or make new keys without it")
        pairs.append(KeyPair(public, secret))
    return tuple(pairs)


def read_public_keys(folder: Path) -> tuple[str, ...]:
    """Read the public keys of an instance, the one in use first; none if there is no file. Raises KeysError."""
    return tuple(known.key for known in read_public_file(folder).keys)


def read_public_file(folder: Path) -> PublicFile:
    """Read the public keys of an instance, the one in use first, with dates and role. Raises KeysError."""
    path = public_path(folder)
    try:
        with path.open("rb") as file:
            text = file.read(PUBLIC_FILE_SIZE_BYTES_MAX + 1)
    except (FileNotFoundError, NotADirectoryError):
        return PublicFile()
    except OSError as error:
        raise KeysError(f"the public keys in {path} cannot be read: {error.strerror}") from None
    lines = [line.strip() for line in text.decode("ascii", "replace").split("\n")]
    keys = tuple(line for line in lines if line and not line.startswith(COMMENT))
    if len(text) > PUBLIC_FILE_SIZE_BYTES_MAX or not all(map(is_key, keys)):
        raise KeysError(f"{path} holds something else than public keys: one a line is expected, 40 characters of Z85")
    return _public_file(path, lines)


def _public_file(path: Path, lines: list[str]) -> PublicFile:
    """Parse lines that are keys or comments. Raises KeysError for a comment with a wrong date or role."""
    found: list[PublicKey] = []
    role: Role | None = None
    made = expires = None
    for line in lines:
        if line and not line.startswith(COMMENT):
            found.append(PublicKey(line, made, expires))
            made = expires = None
        elif match := _ROLE.fullmatch(line):
            if match[1] not in _ROLES:
                roles = ", ".join(_ROLES)
                raise KeysError(f"{path} gives the role {match[1]!r}, one of these was expected: {roles}")
            role = Role(match[1])
        elif line and (match := _DATES.fullmatch(line)):
            try:
                made, expires = (None if text is None else date.fromisoformat(text) for text in match.group(1, 2))
            except ValueError as error:
                raise KeysError(f"{path} has no valid date in {line!r}: {error}") from None
    return PublicFile(tuple(found), role)


def reminders(file: PublicFile, today: date, age_days_max: int | None, soon_days: int) -> Iterator[str]:
    """Yield a text about each key that expires within ``soon_days``, or is older than ``age_days_max``."""
    for public in file.keys:
        if public.has_expired(today):
            yield f"the key {public.key} expired on {public.expires}: nobody lets it in; rotate it, and retire it"
        elif public.expires is not None and (days := (public.expires - today).days) <= soon_days:
            yield f"the key {public.key} expires in {days} days, on {public.expires}: rotate it"
        elif age_days_max is not None and public.made is not None and (today - public.made).days > age_days_max:
            yield f"the key {public.key} is {(today - public.made).days} days old: rotate it"


def create(folder: Path, role: Role = Role.INSTANCE, expires: date | None = None) -> tuple[KeyPair, ...]:
    """Create a key pair for an owner with ``role`` if there is none, and write the public file anew; return all pairs.

    ``expires``: the last day of a new pair. Raises KeysError.
    """
    return _write(folder, read_pairs(folder) or (KeyPair.new(),), role, expires)


def rotate(folder: Path, expires: date | None = None) -> tuple[KeyPair, ...]:
    """Add a pair, to be used after the one in use is retired. ``expires``: its last day. Raises KeysError."""
    pairs = read_pairs(folder)
    if not pairs:
        raise KeysError(f"{folder.name!r} has no keys yet: 'immortal keys {folder.name} --make' makes them")
    if len(pairs) > 1:
        raise KeysError(
            f"a rotation of {folder.name!r} is under way already: end it with 'immortal keys {folder.name} --retire'"
        )
    return _write(folder, (*pairs, KeyPair.new()), expires=expires)


def retire(folder: Path) -> tuple[KeyPair, ...]:
    """Delete the pair in use; the next one takes its place. Raises KeysError."""
    pairs = read_pairs(folder)
    if len(pairs) < 2:
        raise KeysError(
            f"{folder.name!r} has no second key to use instead: 'immortal keys {folder.name} --rotate' adds one"
        )
    return _write(folder, pairs[1:])


def remove(folder: Path) -> None:
    """Delete all keys. Other files in their folder stay, such as the key of a log that is kept."""
    secret_path(folder).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        secret_path(folder).parent.rmdir()
    remove_file(public_path(folder))


def _check_mode(path: Path, expected: int) -> None:
    status = path.stat()
    mode = status.st_mode & 0o777
    if mode & _OTHERS:
        raise KeysError(
            f"{path} has mode {mode:04o}, expected {expected:04o}: others may know the secret keys of this instance; "
            f"'chmod {expected:04o} {path}', and if somebody may have read them, rotate and retire them"
        )
    if status.st_uid not in (os.geteuid(), 0):
        raise KeysError(f"{path} belongs to user {status.st_uid}, expected {os.geteuid()}, who runs this: chown it")


def _write(
    folder: Path, pairs: tuple[KeyPair, ...], role: Role | None = None, expires: date | None = None
) -> tuple[KeyPair, ...]:
    """Write the secret file, then the public one, so that no public key lacks its secret key. ``role`` None: keep the
    role."""
    path = secret_path(folder)
    before, known = _read_known(folder)
    try:
        make_folder(path.parent)
        text = "".join(f"{pair.public} {pair.secret}\n" for pair in pairs)
        write_atomically(path, text.encode(), mode=0o600)
        new = PublicKey("", today(), expires)
        public = [known.get(pair.public) or replace(new, key=pair.public) for pair in pairs]
        text = public_text(PublicFile(tuple(public), role or before))
        write_text(public_path(folder), text)
    except OSError as error:
        raise KeysError(f"the keys of {folder.name!r} cannot be written to {path}: {error.strerror}") from None
    return pairs


def _read_known(folder: Path) -> tuple[Role | None, Mapping[str, PublicKey]]:
    """Return role and public keys from the present files; a lost or unreadable public file gives no dates or role."""
    try:
        file = read_public_file(folder)
    except KeysError:
        file = PublicFile()
    known = {public.key: public for public in file.keys}
    return file.role, {pair.public: PublicKey(pair.public) for pair in read_pairs(folder)} | known


def public_text(file: PublicFile) -> str:
    """Return the text of a public file, as :func:`read_public_file` reads it."""
    lines = [] if file.role in (None, Role.INSTANCE) else [f"{COMMENT} role: {file.role}"]
    for public in file.keys:
        dates = {"made": public.made, "expires": public.expires}
        if said := ", ".join(f"{word}: {day}" for word, day in dates.items() if day is not None):
            lines.append(f"{COMMENT} {said}")
        lines.append(public.key)
    return "".join(f"{line}\n" for line in lines)


def ensure_machine_keys(settings: InstanceSettings, registry: Registry) -> bool:
    """Create keys for the instance on this machine and announce its address, if the registry is shared by machines.
    Return True if keys were created.

    Raises RegistryError for an instance whose log another machine has, KeysError, LogError, SharedHomeError.
    """
    copy = registry.copy
    if copy is None:
        return False
    is_here = log_exists(settings.log) or OwnLogs(settings.folder).is_kept if is_in_folder(settings.log) else True
    if not is_here:  # with a log of its own it would be a second instance of that name
        raise RegistryError(
            f"the log of {settings.name!r} is in a folder, {settings.log}, of the machine where it was registered: run"
            f" it there, or bring the log into the database there ('immortal log copy {settings.name} --to {copy.url}"
            " --switch')"
        )
    has_some = bool(read_pairs(settings.folder))
    if not has_some:
        create(settings.folder)
    try:
        copy.announce(settings.name, settings.peer)
    except SharedHomeError:
        if not has_some:
            raise
        # The database is unreachable, but has a key of this machine: peers try the known keys in turn.
    return not has_some
