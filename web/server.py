"""Server of the page: its routes, its error pages, and its run."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from immortal.coordinator.config import ConfigError
from immortal.coordinator.instances.registry import Registry, UnknownInstanceError
from immortal.coordinator.log.identity import MomentError
from immortal.coordinator.operator.control import NotRunningError, RefusedError
from immortal.protocol.errors import ImmortalError
from immortal.protocol.executions import ExecutionsError
from immortal.replay import ReplayError
from immortal.web import (
    WebError,
    actions,
    execution_pages,
    instance_pages,
    job_pages,
    map_pages,
    message_pages,
    travel_pages,
)
from immortal.web.auth import STATIC_PATH, Guard, Token
from immortal.web.connections import Connection, listen, make_config, url_of
from immortal.web.instance_pages import warm_up
from immortal.web.rendering import page
from immortal.web.site import Site

STATIC = Path(__file__).with_name("static")
PAGES = (instance_pages, map_pages, execution_pages, message_pages, travel_pages, job_pages, actions)
ROUTES = [route for pages in PAGES for route in pages.routes()]


class _Static(StaticFiles):
    """Static files of this version. A browser asks each time if they have changed."""

    def file_response(self, *arguments: object, **options: object) -> Response:
        response = super().file_response(*arguments, **options)  # type: ignore[arg-type]
        response.headers["cache-control"] = "no-cache"
        return response


def make_app(site: Site, hosts: Collection[str], scheme: str) -> ASGIApp:
    """Return the ASGI app. ``hosts``: as of :class:`immortal.web.auth.Guard`; ``scheme``: "http" or "https"."""
    app = Starlette(
        routes=[*ROUTES, Mount(STATIC_PATH.rstrip("/"), _Static(directory=STATIC))],
        exception_handlers={ImmortalError: _failed, OSError: _failed, HTTPException: _failed, Exception: _broken},
    )
    app.state.site = site
    app.state.scheme = scheme
    return Guard(app, site.token, hosts, scheme)


async def _failed(request: Request, error: Exception) -> Response:
    text = error.detail if isinstance(error, HTTPException) else str(error)
    heading = "This could not be done"
    asked_wrong = ReplayError, ExecutionsError, MomentError
    if isinstance(error, HTTPException):
        status = error.status_code
    elif isinstance(error, WebError):
        status = error.status
    elif isinstance(error, UnknownInstanceError | ConfigError):
        status = 404
    elif isinstance(error, NotRunningError | RefusedError):
        status = 409
    elif isinstance(error, asked_wrong):
        status = 422
    else:
        status = 500
    if status == 404:
        heading = "There is nothing here"
    is_part = "hx-request" in request.headers
    if is_part and isinstance(error, asked_wrong):
        status = 200  # an answer like any other: such as an expression that is none
    template = "_error.html" if is_part else "error.html"
    return _error_page(request, template, status, heading, text.split("\n"))


async def _broken(request: Request, error: Exception) -> Response:
    """Answer after a mistake in our code, whose traceback goes to stderr."""
    lines = [f"an error in the page itself: {type(error).__name__}", "its traceback is in the output of 'immortal web'"]
    return _error_page(request, "error.html", 500, "This could not be done", lines)


def _error_page(request: Request, template: str, status: int, heading: str, lines: list[str]) -> Response:
    return page(template, status, site=request.app.state.site, refused=status == 403, heading=heading, lines=lines)


# The server: its socket, its threads, and its end.


LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
SWITCH_INTERVAL_S = 0.0005  # so that an answer does not wait 5 ms for each thread that asks an instance
STOP_S = 2  # for answers that are not complete, and streams that never end


def serve(
    registry: Registry,
    host: str,
    port: int,
    tls: tuple[Path, Path] | None,
    token: str,
    reader: str | None = None,
    *,
    allow_actions: bool,
    ready: Callable[[str], None],
) -> None:
    """Serve the page until SIGINT or SIGTERM. ``ready`` gets its URL without a path. Raises WebError, RegistryError."""
    registry.names()  # raises if the registry can't be read
    listener = listen(host, port)
    scheme = "http" if tls is None else "https"
    address = listener.getsockname()[0]
    any_host = address in ("0.0.0.0", "::")  # noqa: S104 (asked, not bound)
    hosts = () if any_host else (*LOOPBACK_NAMES, host.lower(), address)
    site = Site(registry, Token(token, reader), allow_actions=allow_actions)
    config = make_config(
        make_app(site, hosts, scheme),
        tls,
        STOP_S,
        http=partial(Connection, listener),
        loop="asyncio",
        backlog=1,
    )
    logging.getLogger("uvicorn.error").addFilter(_is_news)
    server = uvicorn.Server(config)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        warm_up(site)
        ready(url_of(listener, host, tls))
        server.run(sockets=[listener])
    except KeyboardInterrupt:
        pass  # uvicorn has stopped by then
    finally:
        site.close()
        listener.close()


def _is_news(record: logging.LogRecord) -> bool:
    """Return False for uvicorn's errors about open streams of events, which only end with the server."""
    return "without completing response" not in record.getMessage()
