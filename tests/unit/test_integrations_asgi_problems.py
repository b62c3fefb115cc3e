"""What became of a call, as problem details of HTTP: a status for each, and nothing of the service's insides."""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

import msgspec
import pytest

pytest.importorskip("starlette")

import starlette.requests

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
from immortal.appsdk.integrations.asgi.gateway import _body
from immortal.appsdk.integrations.asgi.middleware import (
    ProblemResponse,
    RefusedRequest,
    problem_of_call,
    problem_of_declared,
)
from immortal.appsdk.integrations.asgi.services import TooManyCalls


class Request(NamedTuple):
    sent: bool
    client_id: str = "browser"
    number: int = 1
    idempotency_key: str = ""


class SoldOutError(Exception):
    pass


class RareError(SoldOutError):
    pass


@pytest.mark.parametrize(
    ("error", "name", "status", "retry_after_s"),
    [
        (CallRaised("Shop.buy", "SoldOut", ["tea"], {"left": 0}), "SoldOut", 409, None),
        (CallConflict("key 'a'", "one", "two", "another"), "key-reused", 422, None),
        (CallRefused("no method 'sell'"), "call-refused", 422, None),
        (TooManyCalls("100 wait"), "too-many-calls", 429, 1),
        (CallTimeout("no reply", Request(sent=True), None), "no-answer", 504, 1),
        (CallTimeout("no reply", Request(sent=False), None), "not-available", 503, 1),
        (NotConnectable("nobody is there"), "not-available", 503, 1),
        (ClientClosed("it is closed"), "not-available", 503, 1),
        (ReplyGone("it is not kept"), "reply-gone", 410, None),
        (OutcomeUnknown("nobody can say"), "outcome-unknown", 500, None),
        (CalleeFailed("Shop.buy", "KeyError", "secret", "12:3"), "failed", 500, None),
        (ClientError("something else"), "failed", 500, None),
    ],
)
def test_each_error_is_a_problem(error: ClientError, name: str, status: int, retry_after_s: int | None) -> None:
    problem = problem_of_call(error)
    assert (problem.name, problem.status, problem.retry_after_s) == (name, status, retry_after_s)
    response = ProblemResponse(problem, "https://shop/")
    said = msgspec.json.decode(bytes(response.body))
    assert (response.status_code, said["status"], said["type"]) == (status, status, f"https://shop/{name}")
    assert said["title"]
    assert response.headers.get("retry-after") == (None if retry_after_s is None else str(retry_after_s))
    assert "secret" not in bytes(response.body).decode()


def test_what_a_handler_declares_is_said_in_full() -> None:
    problem = problem_of_call(CallRaised("Shop.buy", "SoldOut", ["tea"], {"left": 0}))
    assert problem.extra == {"error": "SoldOut", "arguments": ["tea"], "attributes": {"left": 0}}
    assert problem_of_call(CalleeFailed("Shop.buy", "KeyError", "secret", "12:3")).extra == {"reference": "12:3"}


def test_a_status_holds_for_what_is_derived() -> None:
    statuses: dict[type[BaseException], int] = {SoldOutError: 410}
    assert problem_of_declared(RareError("tea"), statuses).status == 410
    assert problem_of_declared(ValueError("tea"), statuses).status == 409


def test_a_client_that_leaves_within_its_body_is_no_traceback() -> None:
    messages = iter([{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}])

    async def receive() -> dict[str, Any]:
        return next(messages)

    with pytest.raises(RefusedRequest) as refused:
        asyncio.run(_body(starlette.requests.Request({"type": "http", "method": "POST"}, receive)))
    assert refused.value.problem.detail == "the connection ended within it"
