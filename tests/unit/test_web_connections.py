"""How long a connection of the page may take, and for whom one is closed."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial

import pytest

pytest.importorskip("uvicorn")

import uvicorn
from starlette.types import Receive, Scope, Send

from immortal.web import connections
from immortal.web.connections import PLACE, Connection, Listener

SHORT_S = 0.2
LONG_S = 60.0
DEADLINE_S = 30.0
KNOWN = b"GET /known HTTP/1.1\r\nHost: localhost\r\n\r\n"
STRANGE = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
LARGE = 64 << 20


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """ "/known..." shows the token; "/large..." is answered with much; all others with a letter."""
    if scope["path"].startswith("/known"):
        scope["state"][PLACE].mark_known()
    body = b"x" * (LARGE if scope["path"].endswith("large") else 1)
    length = str(len(body)).encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", length)]})
    for begin in range(0, len(body), 1 << 16):
        await send({"type": "http.response.body", "body": body[begin : begin + (1 << 16)], "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


class Page:
    """The app, served on a free port."""

    def __init__(self) -> None:
        self.listener = Listener(socket.AF_INET)
        self.listener.bind(("127.0.0.1", 0))
        self.listener.listen()
        config = uvicorn.Config(
            app,
            http=partial(Connection, self.listener),  # type: ignore[arg-type]
            lifespan="off",
            backlog=1,
            log_level="error",
            timeout_keep_alive=int(LONG_S),
            timeout_graceful_shutdown=0,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self.listener]})
        self._thread.start()

    def connect(self, said: bytes = b"", source: str = "127.0.0.1") -> socket.socket:
        """One that has been answered, where it said something."""
        made = socket.create_connection(self.listener.getsockname(), DEADLINE_S, source_address=(source, 0))
        if said:
            assert is_alive(made, said)
        return made

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join()
        self.listener.close()


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Iterator[Page]:
    for limit in ("REQUEST_S", "STRANGER_S", "ANSWER_S"):
        monkeypatch.setattr(connections, limit, LONG_S)
    made = Page()
    yield made
    made.stop()


def is_ended(connection: socket.socket) -> bool:
    """Waits for it."""
    try:
        while connection.recv(1 << 20):
            pass
    except ConnectionResetError:
        pass
    except TimeoutError:
        return False
    return True


def is_alive(connection: socket.socket, said: bytes = KNOWN) -> bool:
    answer = b""
    try:
        connection.sendall(said)
        while not answer.endswith(b"\r\n\r\nx"):
            piece = connection.recv(1 << 16)
            if not piece:
                return False
            answer += piece
    except OSError:
        return False
    return answer.startswith(b"HTTP/1.1 200")


def until_places(page: Page, count: int) -> None:
    for _ in range(int(DEADLINE_S * 100)):
        if len(page.listener.places) == count:
            return
        threading.Event().wait(0.01)
    raise AssertionError(f"{len(page.listener.places)} places are taken")


@pytest.mark.parametrize(
    "said",
    [b"", b"GET / HTTP/1.1\r\nHost: ", b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\nx", b"\r\n"],
)
def test_a_request_that_does_not_come_whole(page: Page, monkeypatch: pytest.MonkeyPatch, said: bytes) -> None:
    monkeypatch.setattr(connections, "REQUEST_S", SHORT_S)
    with page.connect() as first:
        first.sendall(said)
        assert is_ended(first)


@pytest.mark.parametrize("more", [b"G", STRANGE[:-1], b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\nx"])
def test_a_further_request_that_does_not_come_whole(page: Page, monkeypatch: pytest.MonkeyPatch, more: bytes) -> None:
    with page.connect(KNOWN) as known:
        monkeypatch.setattr(connections, "REQUEST_S", SHORT_S)
        known.sendall(more)
        assert is_ended(known)


def test_a_stranger_has_a_time_whatever_it_asks(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "STRANGER_S", SHORT_S)
    with page.connect(KNOWN) as known, page.connect(STRANGE) as stranger:
        assert is_ended(stranger)
        assert is_alive(known)


@pytest.mark.parametrize(("path", "limit"), [("/known-large", "ANSWER_S"), ("/large", "STRANGER_S")])
def test_who_does_not_read_the_answer(page: Page, monkeypatch: pytest.MonkeyPatch, path: str, limit: str) -> None:
    monkeypatch.setattr(connections, limit, SHORT_S)
    with page.connect() as slow:
        slow.sendall(STRANGE.replace(b"/ ", path.encode() + b" "))
        assert slow.recv(1) == b"H"
        until_places(page, 0)
        assert is_ended(slow)


def test_the_oldest_stranger_makes_room_and_nobody_known(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "ADDRESS_MAX", 4)
    with ExitStack() as held:
        known = [held.enter_context(page.connect(KNOWN)) for _ in range(6)]
        strangers = [held.enter_context(page.connect(STRANGE)) for _ in range(5)]
        assert is_ended(strangers[0])
        assert all(is_alive(one, STRANGE) for one in strangers[1:])
        assert all(is_alive(one) for one in known)


def test_a_flood_of_one_address_closes_nobody_of_another(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "CONNECTIONS_MAX", 8)
    with ExitStack() as held:
        other = held.enter_context(page.connect(STRANGE, "127.0.0.2"))
        flood = [held.enter_context(page.connect(source="127.0.0.3")) for _ in range(30)]
        assert is_ended(flood[0])
        assert is_alive(other, STRANGE)
        assert is_alive(held.enter_context(page.connect(source="127.0.0.4")))


def test_where_all_are_known_the_next_one_waits(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "CONNECTIONS_MAX", 2)
    with page.connect(KNOWN) as first, page.connect(KNOWN) as second:
        with page.connect() as third:
            assert is_ended(third)
        assert is_alive(first)
        first.close()
        until_places(page, 1)
        with page.connect(KNOWN):
            assert is_alive(second)


def test_what_one_caller_has_of_ipv6() -> None:
    assert connections._network("2001:db8::1") == connections._network("2001:db8::ffff:1")
    assert connections._network("2001:db8::1") != connections._network("2001:db8:0:1::1")
    assert connections._network("::ffff:192.0.2.1") == connections._network("192.0.2.1")
    assert connections._network("fe80::1%eth0") == connections._network("fe80::2")
