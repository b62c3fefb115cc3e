"""Who may ask for what: looked at before any page is made.

A cookie lets look, no more: a browser sends it to each port of its host, so others may have it. What a form does needs
the token itself.

A browser is made to ask by whatever page it shows. So the Host must be ours (another site's name may be pointed at our
address), what another site embeds is refused, and a form must come from a page of ours. What is made of names,
arguments and states is escaped; should one get through all the same, the Content-Security-Policy lets no script run
but the files that are shipped.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection
from urllib.parse import urlsplit

from msgspec import Struct
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from immortal.coordinator.web.connections import PLACE
from immortal.coordinator.web.token import Token

VISITOR = "immortal.visitor"
"""Under this name the scope of a request has its Visitor, or None."""
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
    "referrer-policy": "same-origin",  # with less a form would not say where it comes from
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


class Visitor(Struct, frozen=True):
    """Somebody who may look. ``has_token``: by the token itself, in a header. ``until_s``: when the cookie ends."""

    has_token: bool
    until_s: float = math.inf


class Guard:
    """ASGI middleware. ``hosts``: the names, without a port, under which it may be asked for; empty: any."""

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
            scope["state"][PLACE].know()
        refusal = self._refusal(scope)
        await (refusal or self._app)(scope, receive, send_guarded)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if self._hosts and _name_of(host) not in self._hosts:
            return PlainTextResponse("this is not a name under which the page is served\n", 421)
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
        if scheme.lower() == "bearer" and self._token.is_right(given.strip()):
            return Visitor(has_token=True)
        host, now_s = headers.get("host", ""), time.time()
        wanted = cookie_name(self._scheme, host)
        for cookie in headers.get("cookie", "").split(";"):  # there may be others of this name, of other ports
            name, _, value = cookie.strip().partition("=")
            if name == wanted:
                until_s = self._token.cookie_end_s(value, origin_of(self._scheme, host), now_s)
                if until_s is not None:
                    return Visitor(has_token=False, until_s=until_s)
        return None


def origin_of(scheme: str, host: str) -> str:
    return f"{scheme}://{host.lower()}"


def cookie_name(scheme: str, host: str) -> str:
    """One for each port of a host; with TLS one that no other host, and nobody without TLS, can set."""
    try:
        port = urlsplit(f"//{host}").port or 0
    except ValueError:
        port = 0
    return f"{'__Host-' if scheme == 'https' else ''}immortal_web_{port}"


def _name_of(host: str) -> str:
    """Of a Host header: without its port, and in small letters."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _size_of(headers: Headers) -> int:
    text = headers.get("content-length", "")
    return int(text) if text.isdecimal() and len(text) < 12 else -1
