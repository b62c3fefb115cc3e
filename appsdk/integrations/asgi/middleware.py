"""ASGI middleware: keys of requests, errors as problems, connections that end with the server."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from starlette.requests import HTTPConnection, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from immortal.appsdk.client.errors import ClientError
from immortal.appsdk.errors import UsageError
from immortal.appsdk.integrations.asgi.calls import SCOPE_KEY, RequestCalls
from immortal.appsdk.integrations.asgi.problems import (
    Problem,
    ProblemResponse,
    RefusedRequest,
    problem_of_call,
    problem_of_declared,
    problem_of_misfit,
)
from immortal.appsdk.integrations.asgi.services import Service
from immortal.protocol.errors import LocalProtocolError
from immortal.protocol.trace_context import read_traceparent

KEY_HEADER = "Idempotency-Key"
KEY_SIZE_BYTES_MAX = 255
KEYED_METHODS = ("POST", "PUT", "PATCH", "DELETE")  # the others change nothing

_log = logging.getLogger("immortal.asgi")


class ImmortalMiddleware:
    """``app.add_middleware(ImmortalMiddleware, services=[shop])``. Raises UsageError.

    ``services``: their connections are closed as the server stops. ``statuses``: of what handlers declare to raise, by
    type; 409 for others. ``key_header``: of what tells that a request is the same one, sent again; ``requires_key``:
    one of KEYED_METHODS without it is refused with 400. ``key_scope``: whose key it is, such as the user's name:
    requests of two users with one key are two requests. ``problem_types``: what stands in front of the names of
    problems, as their type.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        services: Sequence[Service[Any]],
        statuses: Mapping[type[BaseException], int] | None = None,
        key_header: str = KEY_HEADER,
        requires_key: bool = False,
        key_scope: Callable[[Request], str] | None = None,
        problem_types: str = "/problems/",
    ) -> None:
        self._app = app
        self._services = _checked_services(services)
        self._statuses = _checked_statuses(statuses or {})
        self._key_header = key_header
        self._requires_key = requires_key
        self._key_scope = key_scope
        self._problem_types = problem_types

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, self._closing(send))
        elif scope["type"] == "http":
            await self._serve(scope, receive, send)
        else:
            context = _trace_context(HTTPConnection(scope)) if scope["type"] == "websocket" else ""
            scope[SCOPE_KEY] = RequestCalls(None, context)
            await self._app(scope, receive, send)

    def _closing(self, send: Send) -> Send:
        async def send_closing(message: Message) -> None:
            if message["type"] in ("lifespan.shutdown.complete", "lifespan.shutdown.failed"):
                for service in self._services:
                    await service.close()
            await send(message)

        return send_closing

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def send_noting(message: Message) -> None:
            nonlocal has_begun
            has_begun = has_begun or message["type"] == "http.response.start"
            await send(message)

        calls = RequestCalls(None)
        try:
            request = Request(scope)
            scope[SCOPE_KEY] = calls = RequestCalls(self._key(request), _trace_context(request))
            await self._app(scope, receive, send_noting)
        except Exception as error:
            problem = self._problem(error, calls)
            if problem is None or has_begun:
                raise
            if problem.status >= 500:
                _log.error("%s %s: %s: %s", scope["method"], scope["path"], type(error).__name__, error)
            await ProblemResponse(problem, self._problem_types)(scope, receive, send)

    def _problem(self, error: Exception, calls: RequestCalls) -> Problem | None:
        """None: it is none of a call's."""
        if isinstance(error, RefusedRequest):
            return error.problem
        if isinstance(error, ClientError):
            return problem_of_call(error)
        if any(error is other for other in calls.misfits):
            return problem_of_misfit(error)
        if any(error is other for other in calls.declared):
            return problem_of_declared(error, self._statuses)
        return None

    def _key(self, request: Request) -> str | None:
        """Of the request: its header, and all by which two requests with one header differ. Raises RefusedRequest."""
        if request.method not in KEYED_METHODS:
            return None
        given = request.headers.getlist(self._key_header)
        if not given:
            if self._requires_key:
                detail = f"{request.method} needs the header {self._key_header}: the same when it is sent again"
                raise RefusedRequest(Problem("key-missing", 400, "The request has no key", detail))
            return None
        if len(given) > 1 or not given[0].strip() or len(given[0].encode()) > KEY_SIZE_BYTES_MAX:
            detail = f"one header {self._key_header} of 1 to {KEY_SIZE_BYTES_MAX} bytes was expected"
            raise RefusedRequest(Problem("key-invalid", 400, "The key of the request is none", detail))
        whose = "" if self._key_scope is None else self._key_scope(request)
        return "\n".join((repr(whose), request.method, request.url.path, given[0].strip()))


def _trace_context(request: HTTPConnection) -> str:
    """As W3C Trace Context has it: where the header is no one's, or there are two, it is as if there were none."""
    given = request.headers.getlist("traceparent")
    try:
        return read_traceparent(given[0]) if len(given) == 1 else ""
    except LocalProtocolError:
        return ""


def _checked_services(services: Iterable[Service[Any]]) -> tuple[Service[Any], ...]:
    found = tuple(services)
    for one in found:
        if not isinstance(one, Service):
            raise UsageError(f"ImmortalMiddleware(services=[{one!r}]): what Service(...) makes was expected")
    return found


def _checked_statuses(statuses: Mapping[type[BaseException], int]) -> dict[type[BaseException], int]:
    for kind, status in statuses.items():
        if not (isinstance(kind, type) and issubclass(kind, BaseException) and 400 <= status <= 599):
            raise UsageError(
                f"ImmortalMiddleware(statuses={{{kind!r}: {status!r}}}): an exception and a status from 400 to 599 "
                f"were expected"
            )
    return dict(statuses)
