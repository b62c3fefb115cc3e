"""The CURVE keys of an instance: a secret file that only its owner can read, and a public one for its peers.

<home>/counter/keys/pairs       "public secret" on each line; mode 0600, in a folder of mode 0700
<home>/counter/public_keys      the public key of each pair, one a line

The first pair is the one in use. A rotation adds a second, which peers accept from then on; retiring removes the first,
and the second takes its place. So there is no moment at which a peer is shown a key that it could not know.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from coordinator.config import write_atomically
from coordinator.messenger.security import KeyPair
from coordinator.registry import PUBLIC_KEYS_FILE_NAME
from protocol.errors import ImmortalError
from protocol.private_files import PUBLIC_FILE_MODE, make_folder

PUBLIC_FILE_NAME = PUBLIC_KEYS_FILE_NAME
_FOLDER_NAME = "keys"
_FILE_NAME = "pairs"
_KEY = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")  # Z85 of 32 bytes
_OTHERS = 0o077
PUBLIC_FILE_SIZE_BYTES_MAX = 4096  # far more than two keys and a few comments
COMMENT = ";"  # begins a line that says nothing; "#" and "/" are characters of keys


class KeysError(ImmortalError):
    """Keys are not what or where they must be."""


def secret_path(folder: Path) -> Path:
    """The file of the pairs; ``folder`` is the instance's."""
    return folder / _FOLDER_NAME / _FILE_NAME


def public_path(folder: Path) -> Path:
    """The file of the public keys; ``folder`` is the instance's."""
    return folder / PUBLIC_FILE_NAME


def is_key(text: object) -> bool:
    """Whether ``text`` is a key in Z85."""
    return isinstance(text, str) and _KEY.fullmatch(text) is not None


def read_pairs(folder: Path) -> tuple[KeyPair, ...]:
    """The instance's own pairs, the one in use first; none where it has no keys.

    Raises KeysError for what cannot be read, and for what others than the owner could read or change.
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
        if not (is_key(public) and is_key(secret) and KeyPair(public, secret).fits):  # the line itself stays untold
            raise KeysError(f"{path} holds something else than key pairs: restore it, or make new keys without it")
        pairs.append(KeyPair(public, secret))
    return tuple(pairs)


def read_public_keys(folder: Path) -> tuple[str, ...]:
    """The public keys of an instance, the one in use first; none where there is no file. Raises KeysError."""
    path = public_path(folder)
    try:
        with path.open("rb") as file:
            text = file.read(PUBLIC_FILE_SIZE_BYTES_MAX + 1)
    except (FileNotFoundError, NotADirectoryError):
        return ()
    except OSError as error:
        raise KeysError(f"the public keys in {path} cannot be read: {error.strerror}") from None
    lines = [line.strip() for line in text.decode("ascii", "replace").split("\n")]
    keys = tuple(line for line in lines if line and not line.startswith(COMMENT))
    if len(text) > PUBLIC_FILE_SIZE_BYTES_MAX or not all(map(is_key, keys)):
        raise KeysError(f"{path} holds something else than public keys: one a line is expected, 40 characters of Z85")
    return keys


def make(folder: Path) -> tuple[KeyPair, ...]:
    """The instance's pairs, made where there are none; the public file is written anew. Raises KeysError."""
    return _write(folder, read_pairs(folder) or (KeyPair.new(),))


def rotate(folder: Path) -> tuple[KeyPair, ...]:
    """Add a pair, which takes over when the one in use is retired. Raises KeysError."""
    pairs = read_pairs(folder)
    if not pairs:
        raise KeysError(f"{folder.name!r} has no keys yet: 'immortal keys {folder.name} --make' makes them")
    if len(pairs) > 1:
        raise KeysError(
            f"a rotation of {folder.name!r} is under way already: end it with 'immortal keys {folder.name} --retire'"
        )
    return _write(folder, (*pairs, KeyPair.new()))


def retire(folder: Path) -> tuple[KeyPair, ...]:
    """Forget the pair in use for good: the next one takes its place. Raises KeysError."""
    pairs = read_pairs(folder)
    if len(pairs) < 2:
        raise KeysError(
            f"{folder.name!r} has no second key to use instead: 'immortal keys {folder.name} --rotate' adds one"
        )
    return _write(folder, pairs[1:])


def remove(folder: Path) -> None:
    """Forget all keys for good."""
    shutil.rmtree(secret_path(folder).parent, ignore_errors=True)
    public_path(folder).unlink(missing_ok=True)


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


def _write(folder: Path, pairs: tuple[KeyPair, ...]) -> tuple[KeyPair, ...]:
    """The secret file first: what is announced without being there would be of no use."""
    path = secret_path(folder)
    try:
        make_folder(path.parent)
        text = "".join(f"{pair.public} {pair.secret}\n" for pair in pairs)
        write_atomically(path, text.encode(), mode=0o600)
        public = "".join(f"{pair.public}\n" for pair in pairs)
        write_atomically(public_path(folder), public.encode(), mode=PUBLIC_FILE_MODE)
    except OSError as error:
        raise KeysError(f"the keys of {folder.name!r} cannot be written to {path}: {error.strerror}") from None
    return pairs
