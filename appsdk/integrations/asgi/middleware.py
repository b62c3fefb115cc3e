"""ASGI middleware: idempotency keys of requests, and errors of calls as problem details (RFC 9457)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Any

import msgspec
from msgspec import Struct, field
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from immortal.appsdk.client.errors import (
    CallConflict,
    CalleeFailed,
    CallRaised,
    CallRefused,
    CallTimeout,
    ClientClosed,
    ClientError,
    NotConnectable,
    OutcomeUnknown,
    ReplyGone,
)
from immortal.appsdk.errors import UsageError
from immortal.appsdk.integrations.asgi.services import SCOPE_KEY, RequestCalls, Service, TooManyCalls
from immortal.protocol.errors import LocalProtocolError
from immortal.protocol.trace_context import read_traceparent

RETRY_AFTER_S = 1  # an instance that has crashed is usually back by then
DECLARED_STATUS = HTTPStatus.CONFLICT  # a declared exception depends on the state: a later request can succeed


class Problem(Struct, frozen=True):
    """Problem details of one error (RFC 9457). ``name``: the last part of the type, by which programs recognize it.
    ``detail``: for people, about this occurrence.

    ``extra``: further members. ``retry_after_s``: when to send the request again; None: a repetition is useless.
    """

    name: str
    status: int
    title: str
    detail: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)
    retry_after_s: int | None = None


class RefusedRequest(Exception):  # noqa: N818 (what happened, not what is wrong)
    """Raised for a request that can't be answered, as ``problem`` says."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.detail)
        self.problem = problem


class ProblemResponse(Response):
    """Response with problem details. ``types``: the prefix of the problem types."""

    media_type = "application/problem+json"

    def __init__(self, problem: Problem, types: str) -> None:
        body = {"type": types + problem.name, "title": problem.title, "status": problem.status}
        if problem.detail:
            body["detail"] = problem.detail
        headers = {} if problem.retry_after_s is None else {"Retry-After": str(problem.retry_after_s)}
        data = msgspec.json.encode({**problem.extra, **body}, enc_hook=str)
        super().__init__(data, problem.status, headers)


def problem_of_call(error: ClientError) -> Problem:
    """Return the problem of a failed call. It hides the instance's internals; its log has them."""
    if isinstance(error, CallRaised):
        return declared_problem(error.name, error.arguments, error.attributes, DECLARED_STATUS)
    if isinstance(error, CallConflict):
        return Problem("key-reused", 422, "The key of the request is that of another request")
    if isinstance(error, CallRefused):
        return Problem("call-refused", 422, "The service does not take such a call", str(error))
    if isinstance(error, TooManyCalls):
        return Problem("too-many-calls", 429, "Too many requests wait already", retry_after_s=RETRY_AFTER_S)
    if isinstance(error, CallTimeout) and error.sent:
        title = "The service did not answer in time, and may still do what it was asked for"
        return Problem("no-answer", 504, title, retry_after_s=RETRY_AFTER_S)
    if isinstance(error, CallTimeout | NotConnectable | ClientClosed):
        return Problem("not-available", 503, "The service is not available", retry_after_s=RETRY_AFTER_S)
    if isinstance(error, ReplyGone):
        return Problem("reply-gone", 410, "The request was done, and its answer is not kept any more")
    if isinstance(error, OutcomeUnknown):
        return Problem("outcome-unknown", 500, "Nobody knows whether the request was done")
    extra = _reference(error.reference) if isinstance(error, CalleeFailed) and error.reference else {}
    return Problem("failed", 500, "The service failed at this request", extra=extra)


def _reference(text: str) -> dict[str, Any]:
    """Return the members that name a failed execution. ``text``: such as "shop record 312:0"."""
    name, _, place = text.partition(" record ")
    return {"reference": text} | ({"execution": f"immortal executions {name} {place}"} if place else {})


def problem_of_declared(error: BaseException, statuses: Mapping[type[BaseException], int]) -> Problem:
    status = next((statuses[kind] for kind in type(error).__mro__ if kind in statuses), DECLARED_STATUS)
    return declared_problem(type(error).__name__, error.args, vars(error), status)


def declared_problem(name: str, arguments: tuple[Any, ...], attributes: Mapping[str, Any], status: int) -> Problem:
    extra = {"error": name, "arguments": list(arguments), "attributes": dict(attributes)}
    return Problem(name, status, f"The service refuses: {name}", extra=extra)


def problem_of_misfit(error: BaseException) -> Problem:
    return Problem("arguments", 422, "The arguments do not fit the call", str(error))


# ASGI middleware: keys of requests, errors as problems, closing of connections when the server stops.


KEY_HEADER = "Idempotency-Key"
KEY_SIZE_BYTES_MAX = 255
KEYED_METHODS = ("POST", "PUT", "PATCH", "DELETE")  # the others change nothing

_log = logging.getLogger("immortal.asgi")


class ImmortalMiddleware:
    """Middleware that each app with a :class:`Service` needs: ``app.add_middleware(ImmortalMiddleware,
    services=[shop])``. Raises UsageError.

    ``services``: their connections are closed when the server stops. ``statuses``: of the exceptions that handlers
    declare, by type; 409 for others. ``key_header``: the header by which a repeated request is recognized;
    ``requires_key``: one of KEYED_METHODS without it is refused with 400. ``key_scope``: returns the key's owner, such
    as the user's name: requests of two owners with one key are two requests. ``problem_types``: the prefix of the
    problem types.
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
        self._services = tuple(services)
        for one in self._services:
            if not isinstance(one, Service):
                raise UsageError(f"ImmortalMiddleware(services=[{one!r}]): what Service(...) makes was expected")
        self._statuses = dict(statuses or {})
        for kind, status in self._statuses.items():
            if not (isinstance(kind, type) and issubclass(kind, BaseException) and 400 <= status <= 599):
                raise UsageError(
                    f"ImmortalMiddleware(statuses={{{kind!r}: {status!r}}}): an exception and a status from 400 to 599 "
                    f"were expected"
                )
        self._key_header = key_header
        self._requires_key = requires_key
        self._key_scope = key_scope
        self._problem_types = problem_types

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_closing(message: Message) -> None:
            if message["type"] in ("lifespan.shutdown.complete", "lifespan.shutdown.failed"):
                for service in self._services:
                    await service.close()
            await send(message)

        if scope["type"] == "lifespan":
            await self._app(scope, receive, send_closing)
        elif scope["type"] == "http":
            await self._serve(scope, receive, send)
        else:
            context = _trace_context(HTTPConnection(scope)) if scope["type"] == "websocket" else ""
            scope[SCOPE_KEY] = RequestCalls(None, context)
            await self._app(scope, receive, send)

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
        """Return the problem of an error; None if it is no error of a call."""
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
        """Return the idempotency key of the request: its header, and all that separates requests with the same header.
        Raises RefusedRequest.
        """
        if request.method not in KEYED_METHODS:
            return None
        given = given_key(request, self._key_header)
        if given is None:
            if self._requires_key:
                detail = f"{request.method} needs the header {self._key_header}: the same when it is sent again"
                raise RefusedRequest(Problem("key-missing", 400, "The request has no key", detail))
            return None
        whose = "" if self._key_scope is None else self._key_scope(request)
        return "\n".join((repr(whose), request.method, request.url.path, given))


def given_key(request: Request, header: str = KEY_HEADER) -> str | None:
    """Return the key that the request has in its header; None: it has none. Raises RefusedRequest."""
    given = request.headers.getlist(header)
    if not given:
        return None
    if len(given) > 1 or not 1 <= len(given[0].strip().encode()) <= KEY_SIZE_BYTES_MAX:
        detail = f"one header {header} of 1 to {KEY_SIZE_BYTES_MAX} bytes was expected"
        raise RefusedRequest(Problem("key-invalid", 400, "The key of the request is none", detail))
    return given[0].strip()


def _trace_context(request: HTTPConnection) -> str:
    """Return the request's W3C trace context; "" if the header is missing, malformed, or repeated."""
    given = request.headers.getlist("traceparent")
    try:
        return read_traceparent(given[0]) if len(given) == 1 else ""
    except LocalProtocolError:
        return ""
