"""Authentication of requests, before any page is made.

A cookie lets its owner look, and no more: a browser sends it to each port of its host, so others can have it. A form
that acts needs the token itself.

Any page can make a browser send requests. So the Host must be ours (another site's name can point at our address),
requests that another site embeds are refused, and a form must be from a page of ours. Names, arguments and states are
escaped; if one gets through all the same, the Content-Security-Policy lets only the shipped scripts run.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import os
import secrets
import time
from collections.abc import Collection
from pathlib import Path
from urllib.parse import urlsplit

from msgspec import Struct
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from immortal.web import WebError
from immortal.web.connections import PLACE

VISITOR = "immortal.visitor"
"""Key of a request's scope under which it has its Visitor, or None."""
LOGIN_PATH = "/login"
STATIC_PATH = "/static/"
BODY_SIZE_BYTES_MAX = 64 << 10  # of a form; the longest field is a signal's value

HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self';"
        " form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",  # with less a form would not tell its origin
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


class Visitor(Struct, frozen=True):
    """Visitor who may look. ``has_token``: by the token itself, in a header. ``until_s``: when the cookie ends."""

    has_token: bool
    until_s: float = math.inf


class Guard:
    """ASGI middleware that authenticates requests. ``hosts``: the allowed host names, without a port; empty: any."""

    def __init__(self, app: ASGIApp, token: Token, hosts: Collection[str], scheme: str) -> None:
        self._app = app
        self._token = token
        self._hosts = frozenset(hosts)
        self._scheme = scheme

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                headers.setdefault("cache-control", "no-store")
            await send(message)

        visitor = scope[VISITOR] = self._visitor(Headers(scope=scope))
        if visitor is not None and PLACE in scope.get("state", ()):
            scope["state"][PLACE].mark_known()
        refusal = self._refusal(scope)
        await (refusal or self._app)(scope, receive, send_guarded)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if self._hosts and _name_of(host) not in self._hosts:
            return PlainTextResponse("the page is not served under this name\n", 421)
        is_write = scope["method"] not in ("GET", "HEAD")
        if not is_write and ("transfer-encoding" in headers or headers.get("content-length", "0") != "0"):
            return PlainTextResponse("no body was expected\n", 413)
        site = headers.get("sec-fetch-site", "none")
        is_visit = (
            headers.get("sec-fetch-mode", "navigate") == "navigate"
            and headers.get("sec-fetch-dest", "document") == "document"
        )
        if site not in ("none", "same-origin") and (is_write or not is_visit):
            return PlainTextResponse("another site must not ask for this\n", 403)
        if is_write:
            origin = headers.get("origin")
            if origin is not None and origin != f"{self._scheme}://{host}":
                return PlainTextResponse("another site must not ask for this\n", 403)
            if not headers.get("content-type", "").startswith("application/x-www-form-urlencoded"):
                return PlainTextResponse("a form was expected\n", 415)
            if not 0 <= _size_of(headers) <= BODY_SIZE_BYTES_MAX:
                return PlainTextResponse(f"a form of at most {BODY_SIZE_BYTES_MAX} bytes was expected\n", 413)
        path = scope["path"]
        if path == LOGIN_PATH or path.startswith(STATIC_PATH) or scope[VISITOR] is not None:
            return None
        if is_write or not is_visit:
            return PlainTextResponse("log in first\n", 401)
        return RedirectResponse(LOGIN_PATH, 303)

    def _visitor(self, headers: Headers) -> Visitor | None:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self._token.may_read(given.strip()):
            return Visitor(has_token=self._token.is_right(given.strip()))
        host, now_s = headers.get("host", ""), time.time()
        wanted = cookie_name(self._scheme, host)
        for cookie in headers.get("cookie", "").split(";"):  # there can be others of this name, of other ports
            name, _, value = cookie.strip().partition("=")
            if name == wanted:
                until_s = self._token.cookie_end_s(value, origin_of(self._scheme, host), now_s)
                if until_s is not None:
                    return Visitor(has_token=False, until_s=until_s)
        return None


def origin_of(scheme: str, host: str) -> str:
    return f"{scheme}://{host.lower()}"


def cookie_name(scheme: str, host: str) -> str:
    """Return the cookie's name, one for each port of a host; with TLS no other host, and no plain HTTP, can set it."""
    try:
        port = urlsplit(f"//{host}").port or 0
    except ValueError:
        port = 0
    return f"{'__Host-' if scheme == 'https' else ''}immortal_web_{port}"


def _name_of(host: str) -> str:
    """Return the host of a Host header in lower case, without its port."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _size_of(headers: Headers) -> int:
    text = headers.get("content-length", "")
    return int(text) if text.isdecimal() and len(text) < 12 else -1


# The secret that opens the page. Whoever has it sees all states, and can run code with the rights of the apps' user.
#
# So there always is one, also on loopback, which other users of the machine reach as well.


COOKIE_AGE_S = 12 * 3600
TOKEN_CHARACTERS_MIN = 16
TOKEN_FILE_SIZE_BYTES_MAX = 4096
_OTHERS = 0o077


def read_token(path: Path) -> str:
    """Read a token from a file that nobody else can read. Raises WebError."""
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
    """Token of the page, with the cookies and the form secret derived from it. ``reader``: a token that only lets look.

    Raises WebError if both are equal.
    """

    def __init__(self, token: str, reader: str | None = None) -> None:
        if token == reader:
            raise WebError("the reader's token is the same as the full token, so readers could act: use another one")
        self._token, self._reader = token, reader
        self.csrf = self._derived("form", os.urandom(16))  # lives as long as this process does

    def is_right(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(errors="replace"), self._token.encode())

    def may_read(self, given: str) -> bool:
        reader = self._reader or self._token
        return self.is_right(given) or hmac.compare_digest(given.encode(errors="replace"), reader.encode())

    def cookie(self, origin: str, now_s: float) -> str:
        """Return a cookie for a browser at ``origin`` (scheme, host and port): it lets look there for 12 hours."""
        return self._cookie(origin, int(now_s) + COOKIE_AGE_S)

    def cookie_end_s(self, given: str, origin: str, now_s: float) -> float | None:
        """Return the time at which a cookie ends; None for one that does not let look."""
        until = given.partition(".")[0]
        if not (until.isascii() and until.isdecimal() and len(until) <= 12):
            return None
        is_ours = hmac.compare_digest(given.encode(errors="replace"), self._cookie(origin, int(until)).encode())
        return int(until) if is_ours and now_s < int(until) <= now_s + COOKIE_AGE_S else None

    def is_csrf(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(errors="replace"), self.csrf.encode())

    def _cookie(self, origin: str, until_s: int) -> str:
        return f"{until_s}.{self._derived('cookie', f'{until_s} {origin}'.encode())}"

    def _derived(self, purpose: str, salt: bytes) -> str:
        return hmac.new(self._token.encode(), purpose.encode() + salt, hashlib.sha256).hexdigest()
