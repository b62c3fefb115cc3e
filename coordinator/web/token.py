"""The secret that opens the page. Whoever has it sees all states, and can run code with the rights of the apps' user.

So there is one always, also on loopback, where other users of the machine come as well.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from pathlib import Path

from immortal.coordinator.web.errors import WebError

COOKIE_AGE_S = 12 * 3600
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
        self.csrf = self._derived("form", os.urandom(16))  # lives as long as this process does

    def is_right(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(errors="replace"), self._token.encode())

    def cookie(self, origin: str, now_s: float) -> str:
        """For a browser that has asked at ``origin`` (scheme, host and port): it lets look there for 12 hours."""
        return self._cookie(origin, int(now_s) + COOKIE_AGE_S)

    def cookie_end_s(self, given: str, origin: str, now_s: float) -> float | None:
        """The time at which a cookie ends; None for one that does not let look."""
        until = given.partition(".")[0]
        if not (until.isascii() and until.isdecimal() and len(until) <= 12):
            return None
        is_ours = hmac.compare_digest(given.encode(errors="replace"), self._cookie(origin, int(until)).encode())
        return int(until) if is_ours and now_s < int(until) <= now_s + COOKIE_AGE_S else None

    def is_csrf(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(errors="replace"), self.csrf.encode())

    def _cookie(self, origin: str, until_s: int) -> str:
        return f"{until_s}.{self._derived('cookie', f'{until_s} {origin}'.encode())}"

    def _derived(self, what: str, salt: bytes) -> str:
        return hmac.new(self._token.encode(), what.encode() + salt, hashlib.sha256).hexdigest()
