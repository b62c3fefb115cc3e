"""Secret of an instance's app, in a file that only its owner can read. Each start of the coordinator writes a new one.

The app reads the file after it has connected, so that it has the secret of the coordinator at the other end.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from immortal.protocol.errors import ImmortalError
from immortal.protocol.files import make_folder, open_beside

SECRET_FILE_VARIABLE = "IMMORTAL_APP_SECRET_FILE"  # noqa: S105 (a name)
FILE_NAME = "app_secret"
_RANDOM_SIZE_BYTES = 32


class AppSecretError(ImmortalError):
    """Raised if the secret can't be written to its file."""


def path(folder: Path) -> Path:
    """Return the path of the secret's file; ``folder`` is the instance's."""
    return folder / FILE_NAME


def create(folder: Path) -> bytes:
    """Create a new secret of 64 hexadecimal digits and write it over the last one. Raises AppSecretError."""
    secret = secrets.token_hex(_RANDOM_SIZE_BYTES).encode()
    write(folder, secret)
    return secret


def write(folder: Path, secret: bytes) -> None:
    """Replace the contents of the secret's file by ``secret`` and a line end. Raises AppSecretError."""
    try:
        make_folder(folder)
        descriptor, temporary = open_beside(path(folder))
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(secret + b"\n")
            os.replace(temporary, path(folder))
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise AppSecretError(f"the app's secret can't be written to {path(folder)}: {error.strerror}") from None


def remove(folder: Path, secret: bytes | None = None) -> None:
    """Remove the secret's file. ``secret``: remove the file only if it holds this secret, not a successor's."""
    if secret is None or _read(folder) == secret:
        path(folder).unlink(missing_ok=True)


def _read(folder: Path) -> bytes:
    try:
        return path(folder).read_bytes().strip()
    except OSError:
        return b""
