"""What can go wrong with a call, in the words of HTTP: problem details (RFC 9457)."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import msgspec
from msgspec import Struct, field
from starlette.responses import Response

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
from immortal.appsdk.integrations.asgi.calls import TooManyCalls

RETRY_AFTER_S = 1  # an instance that has crashed is usually back by then
DECLARED_STATUS = HTTPStatus.CONFLICT  # what a handler declares depends on its state: another time it may be done


class Problem(Struct, frozen=True):
    """``name``: the last part of its type, by which programs know it. ``detail``: for people, of this occurrence.

    ``extra``: further members. ``retry_after_s``: when to send the request again; None: that is of no use.
    """

    name: str
    status: int
    title: str
    detail: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)
    retry_after_s: int | None = None


class RefusedRequest(Exception):  # noqa: N818 (what happened, not what is wrong)
    """The request is none that can be answered, as ``problem`` says."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.detail)
        self.problem = problem


class ProblemResponse(Response):
    """``types``: what stands in front of the names of the types."""

    media_type = "application/problem+json"

    def __init__(self, problem: Problem, types: str) -> None:
        body = {"type": types + problem.name, "title": problem.title, "status": problem.status}
        if problem.detail:
            body["detail"] = problem.detail
        headers = {} if problem.retry_after_s is None else {"Retry-After": str(problem.retry_after_s)}
        super().__init__(_json({**problem.extra, **body}), problem.status, headers)


def problem_of_call(error: ClientError) -> Problem:
    """Says nothing of the instance's insides: those are for its log."""
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
    extra = {"reference": error.reference} if isinstance(error, CalleeFailed) and error.reference else {}
    return Problem("failed", 500, "The service failed at this request", extra=extra)


def problem_of_declared(error: BaseException, statuses: Mapping[type[BaseException], int]) -> Problem:
    status = next((statuses[kind] for kind in type(error).__mro__ if kind in statuses), DECLARED_STATUS)
    return declared_problem(type(error).__name__, error.args, vars(error), status)


def declared_problem(name: str, arguments: tuple[Any, ...], attributes: Mapping[str, Any], status: int) -> Problem:
    extra = {"error": name, "arguments": list(arguments), "attributes": dict(attributes)}
    return Problem(name, status, f"The service refuses: {name}", extra=extra)


def problem_of_misfit(error: BaseException) -> Problem:
    return Problem("arguments", 422, "The arguments do not fit the call", str(error))


def _json(value: Any) -> bytes:
    return msgspec.json.encode(value, enc_hook=str)
