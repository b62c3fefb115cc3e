"""The secret that opens the page. Whoever has it sees all states, and can run code with the rights of the apps' user.

So there is one always, also on loopback, where other users of the machine come as well.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from pathlib import Path

from coordinator.web.errors import WebError

TOKEN_CHARACTERS_MIN = 16
TOKEN_FILE_SIZE_BYTES_MAX = 4096
_OTHERS = 0o077


def read_token(path: Path) -> str:
    """The text of a file that nobody else may read. Raises WebError."""
    try:
        status = path.stat()
        if status.st_mode & _OTHERS:
            raise WebError(
                f"{path} has mode {status.st_mode & 0o777:04o}, expected 0600: others may know the token;"
                f" put another one there, and 'chmod 0600 {path}'"
            )
        if status.st_size > TOKEN_FILE_SIZE_BYTES_MAX:
            raise WebError(
                f"{path} has {status.st_size} bytes: a token of at most {TOKEN_FILE_SIZE_BYTES_MAX} was expected"
            )
        token = path.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise WebError(f"{path} cannot be read as a token: {getattr(error, 'strerror', None) or error}") from None
    if len(token) < TOKEN_CHARACTERS_MIN:
        raise WebError(
            f"the token in {path} has {len(token)} characters: at least {TOKEN_CHARACTERS_MIN} were expected"
        )
    return token


def new_token() -> str:
    return secrets.token_urlsafe(24)


class Token:
    """What follows from one token: a browser's cookie, and what its forms have to bring along."""

    def __init__(self, token: str) -> None:
        self._token = token
        self._start = os.urandom(16)
        self.cookie = self._derived("cookie", b"")  # lives as long as the token does
        self.csrf = self._derived("form", self._start)  # as long as this process does

    def is_right(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(errors="replace"), self._token.encode())

    def is_cookie(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(errors="replace"), self.cookie.encode())

    def is_csrf(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(errors="replace"), self.csrf.encode())

    def _derived(self, what: str, salt: bytes) -> str:
        return hmac.new(self._token.encode(), what.encode() + salt, hashlib.sha256).hexdigest()
