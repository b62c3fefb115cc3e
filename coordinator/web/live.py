"""Server-sent events: a piece of a page, whenever it is another one than before."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import AsyncIterator, Callable, Iterable

import anyio.lowlevel
from anyio import to_thread
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.requests import Request

from immortal.coordinator.web.guard import VISITOR

LOOK_S = 1.0
Pieces = Iterable[tuple[str, str]]
"""(event, HTML)"""


def stream(request: Request, look: Callable[[], Pieces]) -> EventSourceResponse:
    """``look`` is called in a thread each second; what it gives, is sent where it has changed, up to a cookie's end."""
    visitor = request.scope.get(VISITOR)
    until_s = math.inf if visitor is None else visitor.until_s

    async def events() -> AsyncIterator[ServerSentEvent]:
        sent: dict[str, bytes] = {}
        while time.time() < until_s and not await request.is_disconnected():
            for event, html in await to_thread.run_sync(lambda: list(look())):
                mark = hashlib.blake2b(html.encode("utf-8", "replace"), digest_size=16).digest()
                if sent.get(event) != mark:
                    sent[event] = mark
                    await anyio.lowlevel.checkpoint()  # a page that was left is heard of between two pieces
                    yield ServerSentEvent(html, event=event)
            await anyio.sleep(LOOK_S)

    return EventSourceResponse(events(), ping=15)
