"""A web server over a real instance: keys, errors, progress; and kills of both in the middle of requests."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from immortal.client import connect
from tests.helpers.cli import HOME, Run, immortal
from tests.helpers.web import Web

DEADLINE_S = 40.0
LOOK_S = 0.01

SERVICE = """
from datetime import timedelta

import immortal
from immortal import Immortal, query, rpc


class Refused(Exception):
    def __init__(self, item: str, there: int) -> None:
        super().__init__(item, there)
        self.hint = "order less"


class Ledger(Immortal):
    entries: list[str]
    waiting: int

    def __init__(self) -> None:
        self.entries = []
        self.waiting = 0

    @rpc(raises=[Refused, KeyError])
    def add(self, entry: str, count: int = 1) -> int:
        if count > 100:
            raise Refused(entry, 5)
        if entry == "unknown":
            raise KeyError(entry)
        self.entries += [entry] * count
        return len(self.entries)

    @rpc
    def waits(self) -> None:
        self.waiting += 1

    @rpc
    async def add_when_released(self, entry: str) -> int:
        await immortal.step(self.waits)
        await immortal.event("released")
        return await immortal.step(self.add, entry)

    @rpc
    def release(self) -> None:
        immortal.signal("released")

    @rpc
    def fail(self) -> None:
        raise RuntimeError("the secret is 1234")

    @query
    def all(self) -> list[str]:
        return self.entries

    @query
    def behind(self, after: int) -> list[str]:
        return self.entries[after:]

    @query
    def waiters(self) -> int:
        return self.waiting
"""

WEB = """
from service import Ledger, Refused
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from immortal.client import with_key
from immortal.integrations.asgi import ImmortalMiddleware, Service, progress

ledger = Service(Ledger, "ledger", timeout=30.0)
hasty = Service(Ledger, "ledger", timeout=0.5)
narrow = Service(Ledger, "ledger", calls_max=1)
plain = Service("ledger")
absent = Service("absent", timeout=1.0)


async def add(request: Request) -> Response:
    body = await request.json()
    first = await ledger(request).add(body["entry"], body.get("count", 1))
    second = await ledger(request).add(body["entry"]) if body.get("twice") else None
    return JSONResponse([first, second])


async def add_plain(request: Request) -> Response:
    return JSONResponse(await plain(request).add(*(await request.json())))


async def call_any(request: Request) -> Response:
    method, *arguments = await request.json()
    return JSONResponse(await getattr(ledger(request), method)(*arguments))


async def add_late(request: Request) -> Response:
    return JSONResponse(await ledger(request).add_when_released((await request.json())["entry"]))


async def add_hastily(request: Request) -> Response:
    return JSONResponse(await hasty(request).add_when_released("hasty"))


async def add_narrowly(request: Request) -> Response:
    return JSONResponse(await narrow(request).add_when_released("narrow"))


async def own_key(request: Request) -> Response:
    return JSONResponse(await with_key(ledger(request), "mine").add("own"))


async def fail(request: Request) -> Response:
    return JSONResponse(await ledger(request).fail())


async def call_absent(request: Request) -> Response:
    return JSONResponse(await absent(request).add("x"))


async def own_bug(request: Request) -> Response:
    await ledger(request).all()
    raise KeyError("its own")


async def events(request: Request) -> Response:
    return await progress(
        request,
        lambda after: ledger(request).behind(after),
        is_last=lambda entry: entry == "end",
        event="entry",
        pause_max=0.2,
    )


app = Starlette(
    routes=[
        Route("/add", add, methods=["POST", "PUT"]),
        Route("/plain", add_plain, methods=["POST"]),
        Route("/any", call_any, methods=["POST"]),
        Route("/late", add_late, methods=["POST"]),
        Route("/hasty", add_hastily, methods=["POST"]),
        Route("/narrow", add_narrowly, methods=["POST"]),
        Route("/own-key", own_key, methods=["POST"]),
        Route("/fail", fail, methods=["POST"]),
        Route("/absent", call_absent, methods=["POST"]),
        Route("/bug", own_bug, methods=["POST"]),
        Route("/events", events),
    ],
    middleware=[
        Middleware(
            ImmortalMiddleware,
            services=[ledger, hasty, narrow, plain, absent],
            statuses={LookupError: 404},
            key_scope=lambda request: request.headers.get("x-user", ""),
        )
    ],
)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("web")
    (made / "service.py").write_text(SERVICE)
    (made / "web.py").write_text(WEB)
    return made


@pytest.fixture(scope="module")
def ledger(folder: Path) -> Iterator[Run]:
    os.environ["IMMORTAL_HOME"] = str(folder / HOME)
    immortal(folder, "register", "ledger", "--peer", "tcp://127.0.0.1:*")
    run = Run(folder, "ledger", "service:Ledger", "--restart")
    try:
        run.line("ready")
        yield run
    finally:
        run.kill()
        del os.environ["IMMORTAL_HOME"]


@pytest.fixture(scope="module")
def web(folder: Path, ledger: Run) -> Iterator[Web]:
    with Web(folder, "web:app") as made:
        yield made


@pytest.fixture
def state(folder: Path, ledger: Run) -> Iterator[Any]:
    """The instance, for the test's own calls."""
    with connect("ledger", home=folder / HOME) as client:
        yield client


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s
        threading.Event().wait(LOOK_S)


class Asking(threading.Thread):
    """A request beside the test, sent again until it is answered, as by a browser. ``starts``: how often."""

    def __init__(self, web: Web, path: str, body: Any, key: str | None, *, again: bool = True) -> None:
        super().__init__(daemon=True)
        self._arguments = (path, body)
        self._web, self._key, self._again = web, key, again
        self.answer: tuple[int, Any, dict[str, str]] | None = None
        self.starts = 0
        self.start()

    def run(self) -> None:
        while self.answer is None:
            self.starts += 1
            try:
                self.answer = self._web.post(*self._arguments, key=self._key)
            except (OSError, http.client.HTTPException):
                if not self._again:
                    return

    def result(self) -> tuple[int, Any]:
        self.join(DEADLINE_S)
        assert self.answer is not None
        return self.answer[:2]


# --- keys -------------------------------------------------------------------------------------------------------------


def test_a_request_with_a_key_is_done_once(web: Web, state: Any) -> None:
    before = len(state.all())
    assert [web.post("/add", {"entry": "a"}, key="k1")[:2] for _ in range(3)] == [(200, [before + 1, None])] * 3
    assert web.post("/add", {"entry": "a"}, key="k2")[1] == [before + 2, None]
    assert web.post("/add", {"entry": "a"})[1] == [before + 3, None]
    assert web.post("/add", {"entry": "a"})[1] == [before + 4, None]


def test_two_calls_of_one_request_are_two(web: Web, state: Any) -> None:
    before = len(state.all())
    answers = [web.post("/add", {"entry": "a", "twice": True}, key="k3")[1] for _ in range(2)]
    assert answers == [[before + 1, before + 2]] * 2
    assert len(state.all()) == before + 2


def test_a_key_is_of_one_path_method_and_user(web: Web, state: Any) -> None:
    before = len(state.all())
    headers = {"Idempotency-Key": "k4"}
    body = {"entry": "a"}
    assert web.ask("POST", "/add", body, headers)[1] == [before + 1, None]
    assert web.ask("PUT", "/add", body, headers)[1] == [before + 2, None]
    assert web.ask("POST", "/add", body, {**headers, "X-User": "ann"})[1] == [before + 3, None]
    assert web.ask("POST", "/plain", ["a"], headers)[1] == before + 4
    assert web.ask("POST", "/add", body, headers)[1] == [before + 1, None]


def test_a_key_with_another_body_is_refused_and_nothing_is_done(web: Web, state: Any) -> None:
    first = web.post("/any", ["add", "a"], key="k7")[:2]
    before = state.all()
    for body in (["add", "b"], ["add", "a", 2], ["waits"], ["all"]):
        status, problem, _ = web.post("/any", body, key="k7")
        assert (status, problem["type"]) == (422, "/problems/key-reused")
    assert state.all() == before
    assert web.post("/any", ["add", "a"], key="k7")[:2] == first


def test_a_key_of_the_handlers_own_goes_before(web: Web, state: Any) -> None:
    first = web.post("/own-key", key="k5")[1]
    assert web.post("/own-key", key="k6")[1] == first
    assert web.post("/own-key")[1] == first


@pytest.mark.parametrize("key", ["", " ", "k" * 256])
def test_a_key_that_is_none_is_refused(key: str, web: Web) -> None:
    status, problem, headers = web.post("/add", {"entry": "a"}, key=key)
    assert (status, problem["type"]) == (400, "/problems/key-invalid")
    assert headers["content-type"] == "application/problem+json"


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("/add", {"entry": "a", "count": 101}, {"status": 409, "type": "/problems/Refused", "arguments": ["a", 5]}),
        ("/add", {"entry": "unknown"}, {"status": 404, "type": "/problems/KeyError", "arguments": ["unknown"]}),
        ("/plain", ["a", 101], {"status": 409, "error": "Refused", "attributes": {"hint": "order less"}}),
        ("/add", {"entry": 5}, {"status": 422, "type": "/problems/arguments"}),
        ("/plain", [5], {"status": 422, "type": "/problems/call-refused"}),
        ("/fail", None, {"status": 500, "type": "/problems/failed"}),
        ("/absent", None, {"status": 503, "type": "/problems/not-available"}),
    ],
)
def test_errors_of_calls(path: str, body: Any, expected: dict[str, Any], web: Web) -> None:
    status, problem, headers = web.post(path, body)
    assert expected.items() <= problem.items()
    assert status == problem["status"]
    assert headers["content-type"] == "application/problem+json"
    assert ("retry-after" in headers) == (status == 503)
    assert "secret" not in str(problem)
    if path == "/fail":
        assert re.fullmatch(r"ledger record \d+:\d+", problem["reference"])
        assert re.fullmatch(r"immortal executions ledger \d+:\d+", problem["execution"])


def test_an_error_of_the_web_servers_own_is_none_of_a_call(web: Web) -> None:
    """Although a handler of the service declares exceptions of that type."""
    assert web.post("/bug")[:2] == (500, "Internal Server Error")


def test_an_answer_that_is_late_can_be_asked_for_again_by_its_key(web: Web, state: Any) -> None:
    status, problem, headers = web.post("/hasty", key="k7")
    assert (status, problem["type"], headers["retry-after"]) == (504, "/problems/no-answer", "1")
    before = len(state.all())
    state.release()
    until(lambda: len(state.all()) == before + 1)
    assert web.post("/hasty", key="k7")[:2] == (200, before + 1)


def test_as_many_calls_wait_as_may(web: Web, state: Any) -> None:
    waiters = state.waiters()
    asking = Asking(web, "/narrow", None, "k8")
    until(lambda: state.waiters() == waiters + 1)
    status, problem, headers = web.post("/narrow", key="k9")
    assert (status, problem["type"], headers["retry-after"]) == (429, "/problems/too-many-calls", "1")
    state.release()
    assert asking.result()[0] == 200
    assert web.post("/narrow", key="k8")[:2] == asking.result()  # there is room again


# --- kills ------------------------------------------------------------------------------------------------------------


def app_pid(run: Run, starts: int) -> int:
    found = re.search(r"app_pid=(\d+)", run.line("app_pid=", starts))
    assert found is not None
    return int(found[1])


def test_kills_of_the_web_server_and_the_service_in_the_middle_of_a_post(web: Web, ledger: Run, state: Any) -> None:
    before, waiters = len(state.all()), state.waiters()
    asking = Asking(web, "/late", {"entry": "late"}, "k10")
    until(lambda: state.waiters() == waiters + 1)
    web.kill()
    web.start()
    until(lambda: asking.starts > 1)
    starts = ledger.count("app_pid=")
    os.kill(app_pid(ledger, starts), signal.SIGKILL)
    ledger.line("app_pid=", starts + 1)
    state.release()
    assert asking.result() == (200, before + 1)
    assert web.post("/late", {"entry": "late"}, key="k10")[:2] == (200, before + 1)
    assert state.all()[before:] == ["late"]
    assert state.waiters() == waiters + 1


def test_another_process_of_the_web_server_gives_the_same_answer(folder: Path, web: Web, state: Any) -> None:
    waiters = state.waiters()
    with Web(folder, "web:app") as other:
        both = [Asking(one, "/late", {"entry": "both"}, "k11") for one in (web, other)]
        until(lambda: state.waiters() == waiters + 1)
        state.release()
        answers = {asking.result() for asking in both}
    assert len(answers) == 1
    assert state.all()[-1] == "both"
    assert state.waiters() == waiters + 1


# --- progress ---------------------------------------------------------------------------------------------------------


class Events:
    """A client of server-sent events that connects again with the last ID, as a browser does."""

    def __init__(self, web: Web) -> None:
        self._web = web
        self.last_id = ""
        self.entries: list[str] = []
        self.names: set[str] = set()
        self.connect()

    def connect(self) -> int:
        self._connection = self._web.connection()
        self._connection.request("GET", "/events", headers={"Last-Event-ID": self.last_id} if self.last_id else {})
        self._response = self._connection.getresponse()
        return self._response.status

    def read(self, count: int) -> None:
        """Until there are so many. Raises OSError, HTTPException where the connection ends."""
        data = identity = ""
        while len(self.entries) < count:
            line = self._response.readline().decode()
            if not line:
                raise ConnectionError("the stream has ended")
            name, _, value = line.rstrip("\r\n").partition(": ")
            if name == "data":
                data = value
            elif name == "id":
                identity = value
            elif name == "event":
                self.names.add(value)
            elif not name and identity:
                self.last_id = identity
                self.entries.append(data)
                data = identity = ""

    def close(self) -> None:
        self._connection.close()


def test_progress_loses_and_doubles_nothing(web: Web, ledger: Run, state: Any) -> None:
    def add(*entries: str) -> None:
        for entry in entries:
            state.add(entry)

    add("p1", "p2")
    events = Events(web)
    events.read(len(state.all()))
    web.kill()
    add("p3", "p4")
    with pytest.raises((OSError, http.client.HTTPException)):
        events.read(1 << 30)
    web.start()
    assert events.connect() == 200
    events.read(len(state.all()))
    starts = ledger.count("app_pid=")
    os.kill(app_pid(ledger, starts), signal.SIGKILL)  # the stream goes on
    add("p5", "end")
    events.read(len(state.all()))
    expected = state.all()
    assert events.entries == [f'"{entry}"' for entry in expected]
    assert events.last_id == str(len(expected))
    assert events.names == {"entry"}
    with pytest.raises(ConnectionError, match="ended"):
        events.read(1 << 30)
    assert events.connect() == 204
    events.close()


@pytest.mark.parametrize(("last_id", "status"), [("abc", 400), ("-1", 400), ("1000000", 409)])
def test_an_id_of_no_event_is_refused(last_id: str, status: int, web: Web) -> None:
    got, problem, _ = web.ask("GET", "/events", headers={"Last-Event-ID": last_id})
    assert (got, problem["type"]) == (status, "/problems/event-id")


def test_the_trace_of_a_request_goes_on_in_the_log(folder: Path, web: Web) -> None:
    trace, parent = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    for number, traceparent in enumerate((f"00-{trace}-{parent}-01", "00-this-is-none")):
        web.ask("POST", "/add", {"entry": f"traced {number}"}, {"traceparent": traceparent})
    immortal(folder, "trace", "export", "ledger", "--otlp", "spans.jsonl")
    requests = [json.loads(line) for line in (folder / "spans.jsonl").read_text().splitlines()]
    spans = [span for one in requests for part in one["resourceSpans"] for span in part["scopeSpans"][0]["spans"]]
    of_trace = sorted((span for span in spans if span["traceId"] == trace), key=lambda span: str(span["kind"]))
    assert [span["name"] for span in of_trace] == ["call Ledger.add", "Ledger.add"]
    assert [span["parentSpanId"] for span in of_trace] == [parent, of_trace[0]["spanId"]]
