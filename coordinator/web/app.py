"""The routes, and what becomes of errors."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from immortal.coordinator.config import ConfigError
from immortal.coordinator.instances.registry import UnknownInstanceError
from immortal.coordinator.operator.control import NotRunningError, RefusedError
from immortal.coordinator.web import (
    action_pages,
    fleet_pages,
    instance_pages,
    letter_pages,
    message_pages,
    query_pages,
    sql_pages,
    timeline_pages,
    travel_pages,
    what_if_pages,
)
from immortal.coordinator.web.errors import WebError
from immortal.coordinator.web.guard import STATIC_PATH, Guard
from immortal.coordinator.web.rendering import page
from immortal.coordinator.web.site import Site
from immortal.protocol.errors import ImmortalError
from immortal.replay import ReplayError

STATIC = Path(__file__).with_name("static")
ROUTES = [
    *fleet_pages.routes(),
    *instance_pages.routes(),
    *letter_pages.routes(),
    *message_pages.routes(),
    *timeline_pages.routes(),
    *travel_pages.routes(),
    *query_pages.routes(),
    *sql_pages.routes(),
    *what_if_pages.routes(),
    *action_pages.routes(),
]


class _Static(StaticFiles):
    """Files of this version: a browser asks whether they are still the same."""

    def file_response(self, *arguments: object, **options: object) -> Response:
        response = super().file_response(*arguments, **options)  # type: ignore[arg-type]
        response.headers["cache-control"] = "no-cache"
        return response


def make_app(site: Site, hosts: Collection[str], scheme: str) -> ASGIApp:
    """``hosts``: as :class:`immortal.coordinator.web.guard.Guard`; ``scheme``: "http" or "https"."""
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
    if isinstance(error, HTTPException):
        status = error.status_code
    elif isinstance(error, WebError):
        status = error.status
    elif isinstance(error, UnknownInstanceError | ConfigError):
        status = 404
    elif isinstance(error, NotRunningError | RefusedError):
        status = 409
    elif isinstance(error, ReplayError):
        status = 422
    else:
        status = 500
    if status == 404:
        heading = "There is nothing here"
    is_part = "hx-request" in request.headers
    if is_part and isinstance(error, ReplayError):
        status = 200  # an answer like any other: such as an expression that is none
    template = "_error.html" if is_part else "error.html"
    return _error_page(request, template, status, heading, text.split("\n"))


async def _broken(request: Request, error: Exception) -> Response:
    """A mistake of ours: its traceback goes to stderr."""
    lines = [f"a mistake in the page itself: {type(error).__name__}", "what 'immortal web' printed says where"]
    return _error_page(request, "error.html", 500, "This could not be done", lines)


def _error_page(request: Request, template: str, status: int, heading: str, lines: list[str]) -> Response:
    return page(template, status, site=request.app.state.site, refused=status == 403, heading=heading, lines=lines)
