"""The secret of an instance's app: a file that only its owner can read, made anew at each start of the coordinator.

The app reads the file after it has connected: by then it is that of the coordinator at the other end.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from protocol.errors import ImmortalError
from protocol.private_files import make_folder, open_beside

SECRET_FILE_VARIABLE = "IMMORTAL_APP_SECRET_FILE"  # noqa: S105 (a name)
FILE_NAME = "app_secret"
_RANDOM_SIZE_BYTES = 32


class AppSecretError(ImmortalError):
    """The secret can't be written down."""


def path(folder: Path) -> Path:
    """The secret's file; ``folder`` is the instance's."""
    return folder / FILE_NAME


def make(folder: Path) -> bytes:
    """A new secret, in the place of the last one: 64 hexadecimal digits, in the file with a line end behind them.

    Raises AppSecretError.
    """
    secret = secrets.token_hex(_RANDOM_SIZE_BYTES).encode()
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
    return secret


def remove(folder: Path) -> None:
    """Nobody is asked for the secret any more."""
    path(folder).unlink(missing_ok=True)
