"""Pieces of a page that are sent as they change, to a browser that leaves in the middle of them."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

pytest.importorskip("starlette")
pytest.importorskip("sse_starlette")

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from immortal.web.auth import VISITOR, Visitor
from immortal.web.site import stream

PIECES = 20_000
"""So many that they are still being sent when the browser has gone."""
ENDS_S = 40.0


def look() -> Iterator[tuple[str, str]]:
    for number in range(PIECES):
        yield f"row-{number}", "<td>a row of a table</td>"


class Page:
    """The stream, served on a free port. ``ended`` is set once its request is."""

    def __init__(self) -> None:
        self.visitor = Visitor(has_token=True)
        self.ended = threading.Event()
        self._routes = Starlette(routes=[Route("/", self._page)])
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = self._listener.getsockname()
        self._server = uvicorn.Server(uvicorn.Config(self, lifespan="off", log_level="warning"))
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._listener]})
        self._thread.start()

    async def _page(self, request: Request) -> Response:
        return stream(request, look)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[VISITOR] = self.visitor
        try:
            await self._routes(scope, receive, send)
        finally:
            self.ended.set()

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join()
        self._listener.close()


@pytest.fixture
def page() -> Iterator[Page]:
    page = Page()
    yield page
    page.stop()


def test_a_browser_that_leaves_is_no_news(page: Page, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_connection(page.address) as browser:
        browser.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert browser.recv(4096).startswith(b"HTTP/1.1 200")
        assert b"row-" in browser.recv(4096)
    assert page.ended.wait(ENDS_S)
    assert caplog.messages == []


def test_it_ends_with_the_cookie_that_let_look(page: Page) -> None:
    page.visitor = Visitor(has_token=False, until_s=time.time() - 1)
    with socket.create_connection(page.address) as browser:
        browser.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert page.ended.wait(ENDS_S)
