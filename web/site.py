"""State and helpers that all requests share."""

from __future__ import annotations

import hashlib
import math
import os
import re
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import anyio.lowlevel
import msgspec
from anyio import to_thread
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from immortal.coordinator.config import InstanceSettings
from immortal.coordinator.instances.registry import Registry
from immortal.presenters.fleet import Fleet
from immortal.protocol import decoding
from immortal.protocol.files import make_folder
from immortal.replay.travel.sessions import Sessions
from immortal.web import WebError
from immortal.web.auth import BODY_SIZE_BYTES_MAX, VISITOR, Token
from immortal.web.jobs import Jobs, SqlJobs
from immortal.web.log_messages import Logs
from immortal.web.rendering import page

FOLDER_NAME = ".web"  # in the home, where no instance can have this name
NOTES_MAX = 1000  # of one instance
NOTE_CHARACTERS_MAX = 2000


class Note(msgspec.Struct, frozen=True):
    record: int
    index: int
    text: str
    time_ns: int


class Notes:
    """Notes that people wrote about moments: a file for each instance, one JSON object a line."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()

    def of_instance(self, name: str) -> list[Note]:
        """Return the notes about an instance, by moment."""
        try:
            lines = self._path(name).read_bytes().splitlines()
        except OSError:
            return []
        found = []
        for line in lines:
            try:
                found.append(decoding.decode_json(line, type=Note))
            except decoding.DecodeError:
                continue  # a crash interrupted its writing
        return sorted(found, key=lambda note: (note.record, note.index, note.time_ns))

    def add(self, name: str, record: int, index: int, text: str) -> None:
        """Add a note about a moment. Raises WebError."""
        text = text.strip()
        if not text or len(text) > NOTE_CHARACTERS_MAX:
            raise WebError(f"a note has {len(text)} characters: 1 to {NOTE_CHARACTERS_MAX} were expected")
        line = msgspec.json.encode(Note(record, index, text, time.time_ns())) + b"\n"
        with self._lock:
            if len(self.of_instance(name)) >= NOTES_MAX:
                raise WebError(f"{name} has {NOTES_MAX} notes: remove some of them from {self._path(name)}")
            make_folder(self._folder)
            descriptor = os.open(self._path(name), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "ab") as file:
                file.write(line)

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.jsonl"


class Site:
    """State of one web server: the registry, caches of logs, and the running jobs. Any thread can call its methods."""

    def __init__(self, registry: Registry, token: Token, *, allow_actions: bool = False) -> None:
        self.registry = registry
        self.token = token
        self.allow_actions = allow_actions
        self.logs = Logs()
        self.fleet = Fleet(registry, self.logs.locked)
        self.travel = Sessions(registry.home, self.logs.locked)
        self.notes = Notes(registry.home / FOLDER_NAME / "notes")
        self.jobs = Jobs(registry.home / FOLDER_NAME / "what-if")
        self.sql = SqlJobs()

    def settings(self, name: str) -> InstanceSettings:
        """Return the settings of an instance. Raises UnknownInstanceError, ConfigError."""
        return self.registry.load(name)

    def close(self) -> None:
        self.fleet.close()
        self.travel.close()
        self.jobs.close()
        self.sql.close()


# Checked contents of a request: the site, the instance, numbers, a form.


CSRF_FIELD = "csrf"
TOKEN_FIELD = "token"  # noqa: S105 (its name)
FIELDS_MAX = 50
TEXT_CHARACTERS_MAX = 2000
NUMBER_MAX = (1 << 63) - 1
Place = tuple[int, int | None]
"""Place in a log: a record, and a message in it; None: the whole record."""


def site_of(request: Request) -> Site:
    site: Site = request.app.state.site
    return site


def settings_of(request: Request) -> InstanceSettings:
    """Return the settings of the instance that the path names. Raises UnknownInstanceError, ConfigError."""
    return site_of(request).settings(request.path_params["name"])


def instance_page(request: Request, template: str, tab: str, status: int = 200, **values: Any) -> Response:
    """Render a page of the instance that the path names."""
    return page(template, status, site=site_of(request), tab=tab, name=request.path_params["name"], **values)


def text_of(request: Request, name: str, default: str = "") -> str:
    """Return the URL parameter ``name``. Raises WebError if it is too long."""
    text = request.query_params.get(name, default)
    if len(text) > TEXT_CHARACTERS_MAX:
        raise WebError(f"{name} has {len(text)} characters: at most {TEXT_CHARACTERS_MAX} were expected")
    return text


def number_of(request: Request, name: str, default: int | None = None) -> int | None:
    """Return the URL parameter ``name`` as a whole number from 0. Raises WebError."""
    text = text_of(request, name)
    if not text:
        return default
    if not (text.isascii() and text.isdecimal()) or len(text) > 19 or int(text) > NUMBER_MAX:
        raise WebError(f"{name}={text[:40]!r}: a whole number from 0 was expected")
    return int(text)


def place_of(request: Request, name: str = "at") -> Place | None:
    """Return the URL parameter ``name`` as a place, such as "312" or "312:0"; None if it is empty. Raises WebError."""
    text = text_of(request, name)
    return as_place(text, name) if text else None


def as_place(text: str, name: str = "at") -> Place:
    matched = re.fullmatch(r"([0-9]{1,18})(?::([0-9]{1,9}))?", text)
    if matched is None:
        raise WebError(f"{name}={text[:40]!r}: a record's number, or one with a message's, such as 312:0, was expected")
    return int(matched[1]), None if matched[2] is None else int(matched[2])


async def form_of(request: Request) -> dict[str, str]:
    """Return the fields of a form. Raises WebError unless one of our pages made it, and it has the token."""
    site, body = site_of(request), bytearray()
    try:
        async for piece in request.stream():
            body += piece
            if len(body) > BODY_SIZE_BYTES_MAX:
                raise WebError(f"a form of at most {BODY_SIZE_BYTES_MAX} bytes was expected", 413)
    except ClientDisconnect:
        raise WebError("the form is incomplete") from None
    try:
        fields = dict(parse_qsl(body.decode("ascii"), keep_blank_values=True, max_num_fields=FIELDS_MAX))
    except (ValueError, UnicodeDecodeError):
        raise WebError("a form was expected, with fields that can be read") from None
    if not site.token.is_csrf(fields.pop(CSRF_FIELD, "")):
        raise WebError("this form is from another page, or from before the last start: load the page again", 403)
    given = fields.pop(TOKEN_FIELD, "")
    if not request.scope[VISITOR].has_token and not site.token.is_right(given.strip()):
        raise WebError(
            f"the token is {'wrong' if given else 'missing'}: a form needs it. Go back, and type the token into the"
            " form: it is in the address that 'immortal web' printed, or in the file of --token-file",
            403,
        )
    return fields


def checked_pattern(text: str) -> str:
    """Return ``text`` if it is a regular expression. Raises WebError otherwise."""
    try:
        re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise WebError(f"{text[:100]!r} is not a regular expression: {error}", 422) from None
    return text


# Server-sent events: a piece of a page, each time that it has changed.


LOOK_S = 1.0
Pieces = Iterable[tuple[str, str]]
"""Pieces of a page, each as (event, HTML)."""


def stream(request: Request, render_pieces: Callable[[], Pieces]) -> EventSourceResponse:
    """Stream a page: call ``render_pieces`` in a thread each second; send changed pieces until the cookie expires."""
    visitor = request.scope.get(VISITOR)
    until_s = math.inf if visitor is None else visitor.until_s

    async def events() -> AsyncIterator[ServerSentEvent]:
        sent: dict[str, bytes] = {}
        while time.time() < until_s and not await request.is_disconnected():
            for event, html in await to_thread.run_sync(lambda: list(render_pieces())):
                mark = hashlib.blake2b(html.encode("utf-8", "replace"), digest_size=16).digest()
                if sent.get(event) != mark:
                    sent[event] = mark
                    await anyio.lowlevel.checkpoint()  # notice a closed page between two pieces
                    yield ServerSentEvent(html, event=event)
            await anyio.sleep(LOOK_S)

    return EventSourceResponse(events(), ping=15)
