"""Clients of plain code and of asyncio, their threads and sockets real, and a coordinator that is played here, in a
thread."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from immortal import Immortal, rpc
from immortal.appsdk.client.clients import _Waiting
from immortal.appsdk.client.methods import NamedMethod
from immortal.appsdk.client.session import Call
from immortal.appsdk.client.transport import Transport
from immortal.client import CallRefused, CallTimeout, ClientClosed, connect, start, with_timeout
from immortal.protocol.client_frames import (
    ClientFrame,
    ClientFrameType,
    Reply,
    ReplyKind,
    decode_client_frame,
    encode_client_frame,
    encode_methods,
    encode_replies,
)
from immortal.protocol.messages import decode_incoming_rpc, decode_message
from tests.helpers.clients import client_of

DEADLINE_S = 20.0
METHODS = encode_methods({3: "Shop.echo"})


class Shop(Immortal):
    @rpc(id=3)
    def echo(self, token: str = "none") -> str:
        return token


class Coordinator:
    """Returns to each call what it was called with. ``called``: that of each, in the order of the requests.

    ``is_up``: whether it answers at all; ``replies``: whether it answers calls, and those before when it is asked next.
    """

    def __init__(self) -> None:
        self.is_up = self.replies = True
        self.called: list[Any] = []
        self._unsent: list[Reply] = []
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind("tcp://127.0.0.1:*")
        self.endpoint = self._socket.getsockopt(zmq.LAST_ENDPOINT).decode()  # type: ignore[union-attr]
        self._end = os.eventfd(0)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        os.eventfd_write(self._end, 1)
        self._thread.join()
        self._socket.close()
        self._context.term()
        os.close(self._end)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._end, zmq.POLLIN)
        while self._end not in dict(poller.poll()):
            sender, data = self._socket.recv_multipart()
            if self.is_up:
                self._answer(sender, decode_client_frame(data))

    def _answer(self, sender: bytes, frame: ClientFrame) -> None:
        if frame.frame_type is ClientFrameType.HELLO:
            self._say(sender, frame, ClientFrameType.WELCOME, payload=METHODS, time_ns=1)
        elif frame.frame_type is ClientFrameType.REQUEST:
            replies, offset = [], 0
            for number in range(frame.number, frame.number + frame.count):
                _, start, offset = decode_message(frame.payload, offset)
                (token,) = msgspec.msgpack.decode(decode_incoming_rpc(frame.payload, start, offset).arguments)
                self.called.append(token)
                replies.append(Reply(number, ReplyKind.VALUE, msgspec.msgpack.encode(token)))
            self._unsent += replies
        if self.replies and self._unsent:
            last, payload = self._unsent[-1].number, encode_replies(self._unsent)
            self._say(sender, frame, ClientFrameType.REPLY, count=len(self._unsent), number=last, payload=payload)
            self._unsent.clear()

    def _say(self, sender: bytes, asked: ClientFrame, frame_type: ClientFrameType, **fields: Any) -> None:
        frame = ClientFrame(frame_type, asked.client_id, asked.instance, committer_id=7, **fields)
        self._socket.send_multipart((sender, encode_client_frame(frame)))


@pytest.fixture
def coordinator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Coordinator]:
    monkeypatch.setenv("IMMORTAL_HOME", str(tmp_path / "home"))
    made = Coordinator()
    yield made
    made.close()


@pytest.fixture
def nothing_due(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pause of a client ends while a test runs: it hears what happens, or it waits too long."""
    monkeypatch.setattr(Transport, "next_deadline_s", lambda self: time.monotonic() + 10 * DEADLINE_S)


def until(condition: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, "it does not come about"
        time.sleep(0.001)


def test_threads_share_a_client(coordinator: Coordinator) -> None:
    tokens = list(range(400))
    with connect("shop", endpoints=[coordinator.endpoint]) as shop, ThreadPoolExecutor(8) as pool:
        assert list(pool.map(shop.echo, tokens)) == tokens
    assert sorted(coordinator.called) == tokens


def test_a_call_that_is_given_up_before_it_was_sent_is_never_sent(coordinator: Coordinator) -> None:
    coordinator.is_up = False
    with connect("shop", endpoints=[coordinator.endpoint]) as shop:
        with pytest.raises(CallTimeout, match=r"0\.05 s"):
            with_timeout(shop, 0.05).echo("given up")
        coordinator.is_up = True
        assert shop.echo("wanted") == "wanted"
    assert coordinator.called == ["wanted"]


def test_a_call_that_waits_ends_as_its_client_is_closed(coordinator: Coordinator) -> None:
    coordinator.replies = False
    raised: list[BaseException] = []
    with connect("shop", endpoints=[coordinator.endpoint], timeout=None) as shop:

        def call() -> None:
            try:
                shop.echo("asked")
            except BaseException as error:
                raised.append(error)

        thread = threading.Thread(target=call, daemon=True)  # the test ends where it waits for ever
        thread.start()
        until(lambda: coordinator.called)
        client_of(shop).close()
        until(lambda: not thread.is_alive())
    assert [type(error) for error in raised] == [ClientClosed]


def test_who_gave_up_waiting_asks_for_the_same_reply_as_often_as_it_likes(coordinator: Coordinator) -> None:
    coordinator.replies = False
    with connect("shop", endpoints=[coordinator.endpoint]) as shop:
        shop.echo.fork("first")
        until(lambda: coordinator.called)
        with pytest.raises(CallTimeout) as caught:
            with_timeout(shop, 0.2).echo("asked")
        assert caught.value.sent
        coordinator.replies = True  # the client asks for what is not answered
        assert caught.value.again() == "asked"
        assert caught.value.again() == "asked"
    assert coordinator.called == ["first", "asked"]


def test_a_reply_that_comes_as_its_call_is_given_up_counts(coordinator: Coordinator) -> None:
    with connect("shop", endpoints=[coordinator.endpoint]) as shop:
        call = Call("echo", b"", lambda call: None)
        call.finish(Reply(1, ReplyKind.VALUE, msgspec.msgpack.encode("asked")))
        client: Any = client_of(shop)
        assert client._shell.execute(_Waiting(NamedMethod("echo"), call, 0.0, lambda connection: None)) == "asked"


def test_a_call_that_was_interrupted_before_it_was_sent_is_never_sent(coordinator: Coordinator) -> None:
    coordinator.is_up = False
    with connect("shop", endpoints=[coordinator.endpoint], timeout=DEADLINE_S) as shop:
        connection = client_of(shop)._shell.machine.connection

        def interrupt() -> None:
            until(lambda: connection._main.waiting)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            shop.echo("interrupted")
        thread.join()
        coordinator.is_up = True
        assert shop.echo("wanted") == "wanted"
    assert coordinator.called == ["wanted"]


def test_two_may_await_the_same_reply_once_more(coordinator: Coordinator) -> None:
    async def main() -> None:
        coordinator.replies = False
        async with connect("shop", endpoints=[coordinator.endpoint]) as shop:
            shop.echo.fork("first")
            while not coordinator.called:
                await asyncio.sleep(0.001)
            with pytest.raises(CallTimeout) as caught:
                await with_timeout(shop, 0.01).echo("asked")
            assert caught.value.sent
            both = [asyncio.ensure_future(caught.value.again(DEADLINE_S)) for _ in range(2)]
            await asyncio.sleep(0)
            coordinator.replies = True
            assert await asyncio.gather(*both) == ["asked", "asked"]

    asyncio.run(main())


def test_a_client_with_the_class_fills_in_what_is_not_given(coordinator: Coordinator) -> None:
    with connect(Shop, "shop", endpoints=[coordinator.endpoint]) as shop:
        for token in ("a", "b"):
            shop.echo.fork(token)
        assert [shop.echo("c"), shop.echo(token="d"), shop.echo()] == ["c", "d", "none"]
        with pytest.raises(TypeError, match=r"Shop\.echo"):
            shop.echo("e", "f")  # type: ignore[call-arg]
    assert coordinator.called == ["a", "b", "c", "d", "none"]


def test_a_fork_that_can_not_be_done_is_told_as_the_block_ends(coordinator: Coordinator) -> None:
    def fork(*names: str) -> None:
        with connect("shop", endpoints=[coordinator.endpoint]) as shop:
            for name in names:
                getattr(shop, name).fork("a")

    with pytest.raises(CallRefused, match="'shop' has no handler 'nothing'"):
        fork("nothing", "echo")
    assert coordinator.called == ["a"]


@pytest.mark.usefixtures("nothing_due")
def test_neither_a_call_nor_its_reply_waits_for_what_is_due(coordinator: Coordinator) -> None:
    with connect("shop", endpoints=[coordinator.endpoint], timeout=DEADLINE_S) as shop:
        assert [shop.echo(token) for token in range(3)] == [0, 1, 2]


@pytest.mark.usefixtures("nothing_due")
def test_neither_an_awaited_call_nor_its_reply_waits_for_what_is_due(coordinator: Coordinator) -> None:
    async def main() -> None:
        async with connect("shop", endpoints=[coordinator.endpoint], timeout=DEADLINE_S) as shop:
            assert [await shop.echo(token) for token in range(3)] == [0, 1, 2]

    asyncio.run(main())


def test_a_request_that_is_started_is_there(coordinator: Coordinator) -> None:
    async def main() -> None:
        async with connect("shop", endpoints=[coordinator.endpoint], timeout=DEADLINE_S) as shop:
            await start(shop.echo, "asked")

    asyncio.run(main())
    assert coordinator.called == ["asked"]


def test_who_gave_up_awaiting_asks_for_the_same_reply_as_often_as_it_likes(coordinator: Coordinator) -> None:
    async def main() -> None:
        coordinator.replies = False
        async with connect("shop", endpoints=[coordinator.endpoint]) as shop:
            shop.echo.fork("first")
            while not coordinator.called:
                await asyncio.sleep(0.001)
            with pytest.raises(CallTimeout) as caught:
                await with_timeout(shop, 0.01).echo("asked")
            assert caught.value.sent
            with pytest.raises(CallTimeout) as caught_again:
                await caught.value.again(0.01)
            coordinator.replies = True  # the client asks for what is not answered
            for error in (caught_again.value, caught.value, caught.value):
                assert await asyncio.wait_for(error.again(), DEADLINE_S) == "asked"

    asyncio.run(main())
    assert coordinator.called == ["first", "asked"]
