"""What a request says: its site, its instance, its numbers, its form; each checked."""

from __future__ import annotations

import re
from urllib.parse import parse_qsl

from starlette.requests import ClientDisconnect, Request

from immortal.coordinator.config import InstanceSettings
from immortal.coordinator.web.errors import WebError
from immortal.coordinator.web.guard import BODY_SIZE_BYTES_MAX, VISITOR
from immortal.coordinator.web.site import Site

CSRF_FIELD = "csrf"
TOKEN_FIELD = "token"  # noqa: S105 (its name)
FIELDS_MAX = 50
TEXT_CHARACTERS_MAX = 2000
NUMBER_MAX = (1 << 63) - 1
Place = tuple[int, int | None]
"""A record, and a message in it; None: the whole record."""


def site_of(request: Request) -> Site:
    site: Site = request.app.state.site
    return site


def settings_of(request: Request) -> InstanceSettings:
    """Of the instance that the path names. Raises UnknownInstanceError, ConfigError."""
    return site_of(request).settings(request.path_params["name"])


def text_of(request: Request, name: str, default: str = "") -> str:
    """A parameter behind the "?". Raises WebError for one that is too long."""
    text = request.query_params.get(name, default)
    if len(text) > TEXT_CHARACTERS_MAX:
        raise WebError(f"{name} has {len(text)} characters: at most {TEXT_CHARACTERS_MAX} were expected")
    return text


def number_of(request: Request, name: str, default: int | None = None) -> int | None:
    """A count from 0. Raises WebError."""
    text = text_of(request, name)
    if not text:
        return default
    if not (text.isascii() and text.isdecimal()) or len(text) > 19 or int(text) > NUMBER_MAX:
        raise WebError(f"{name}={text[:40]!r}: a whole number from 0 was expected")
    return int(text)


def place_of(request: Request, name: str = "at") -> Place | None:
    """ "312" or "312:0". Raises WebError."""
    text = text_of(request, name)
    return place_in(text, name) if text else None


def place_in(text: str, name: str = "at") -> Place:
    matched = re.fullmatch(r"([0-9]{1,18})(?::([0-9]{1,9}))?", text)
    if matched is None:
        raise WebError(f"{name}={text[:40]!r}: a record's number, or one with a message's, such as 312:0, was expected")
    return int(matched[1]), None if matched[2] is None else int(matched[2])


async def form_of(request: Request) -> dict[str, str]:
    """The fields of a form that a page of ours has made, and that brings the token. Raises WebError."""
    site, body = site_of(request), bytearray()
    try:
        async for piece in request.stream():
            body += piece
            if len(body) > BODY_SIZE_BYTES_MAX:
                raise WebError(f"a form of at most {BODY_SIZE_BYTES_MAX} bytes was expected", 413)
    except ClientDisconnect:
        raise WebError("the form did not come whole") from None
    try:
        fields = dict(parse_qsl(body.decode("ascii"), keep_blank_values=True, max_num_fields=FIELDS_MAX))
    except (ValueError, UnicodeDecodeError):
        raise WebError("a form was expected, with fields that can be read") from None
    if not site.token.is_csrf(fields.pop(CSRF_FIELD, "")):
        raise WebError("this form is of another page, or from before the last start: load the page again", 403)
    given = fields.pop(TOKEN_FIELD, "")
    if not request.scope[VISITOR].has_token and not site.token.is_right(given.strip()):
        raise WebError(
            f"{'that is not the token' if given else 'the token is missing'}: to look on takes none, a form does. Go"
            " back, and type the token into it: it is in the address that 'immortal web' has printed, or in the file"
            " that it was given",
            403,
        )
    return fields


def checked_pattern(text: str) -> str:
    """Raises WebError for a text that is no regular expression."""
    try:
        re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise WebError(f"{text[:100]!r} is no regular expression: {error}", 422) from None
    return text
