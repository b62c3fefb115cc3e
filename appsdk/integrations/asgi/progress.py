"""Progress of a handler as server-sent events.

Progress is a list in the state that only grows, such as the steps of a job. An event is one entry; its ID is the
entry's position, from 1. A client that reconnects sends the last ID, and gets the later entries: none is lost or
doubled, whichever process of the web server answers, and whatever has crashed in between.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

import msgspec
from sse_starlette.event import ServerSentEvent
from sse_starlette.sse import EventSourceResponse
from starlette.requests import Request
from starlette.responses import Response

from immortal.appsdk.client.errors import ClientError
from immortal.appsdk.errors import UsageError
from immortal.appsdk.integrations.asgi.middleware import Problem, RefusedRequest

E = TypeVar("E")

PAUSE_MIN_S = 0.1  # between two calls of ``look``: each one is a record in the instance's log
PAUSE_MAX_S = 2.0  # after a while without new entries
HEARTBEAT_S = 15  # so that proxies do not close the connection as idle
RECONNECT_MS = 1000


async def progress(
    request: Request,
    look: Callable[[int], Awaitable[Sequence[E]]],
    *,
    is_last: Callable[[E], bool] | None = None,
    event: str | None = None,
    pause_max: float = PAUSE_MAX_S,
) -> Response:
    """Send a handler's progress as server-sent events: ``return await progress(request, lambda after:
    jobs(request).steps(job, after), is_last=...)``.

    ``look(after)`` returns the entries after the first ``after`` ones: a query, or a handler that waits for the next
    one. ``is_last`` returns True for the last entry: the stream ends there, and a client that reconnects
    gets 204, which ends its attempts. ``event``: the name of the events. ``pause_max``: between two calls that found
    nothing, in seconds. An entry is sent as JSON. Raises the errors of the first ``look``, and UsageError.
    """
    if isinstance(pause_max, bool) or not isinstance(pause_max, int | float) or pause_max <= 0:
        raise UsageError(f"progress(pause_max={pause_max!r}): a number of seconds above 0 was expected")
    given = request.headers.get("last-event-id", "0").strip() or "0"
    if not (given.isascii() and given.isdigit() and len(given) < 19):
        detail = "Last-Event-ID: the ID of an event of this stream was expected, a number"
        raise RefusedRequest(Problem("event-id", 400, "The ID of the last event is none", detail))
    after = int(given)
    entries = list(await look(max(after - 1, 0)))  # includes the client's last entry: it can be the stream's last
    if after:
        if not entries:
            detail = f"there are fewer than {after} events: the stream is another one, or its log was cut"
            raise RefusedRequest(Problem("event-id", 409, "There is no such event", detail))
        if is_last is not None and is_last(entries[0]):
            return Response(status_code=204)
        entries = entries[1:]
    events = _events(look, entries, after, is_last, event, pause_max)
    return EventSourceResponse(events, ping=HEARTBEAT_S, headers={"Cache-Control": "no-store"})


async def _events(
    look: Callable[[int], Awaitable[Sequence[Any]]],
    entries: Sequence[Any],
    after: int,
    is_last: Callable[[Any], bool] | None,
    event: str | None,
    pause_max_s: float,
) -> AsyncIterator[ServerSentEvent]:
    pause_s = min(PAUSE_MIN_S, pause_max_s)
    yield ServerSentEvent(retry=RECONNECT_MS, comment="entries follow")
    while True:
        for entry in entries:
            after += 1
            yield ServerSentEvent(
                data=msgspec.json.encode(entry, enc_hook=str).decode(), id=str(after), event=event, retry=RECONNECT_MS
            )
            if is_last is not None and is_last(entry):
                return
        pause_s = min(PAUSE_MIN_S, pause_max_s) if entries else min(2 * pause_s, pause_max_s)
        await asyncio.sleep(pause_s)
        try:
            entries = list(await look(after))
        except ClientError:  # the client reconnects, and sends the ID of its last event
            return
