"""The client's sockets, over real ones."""

from __future__ import annotations

import asyncio
import itertools
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.auth
from msgspec.structs import replace
from zmq.auth.thread import ThreadAuthenticator

from immortal.appsdk.client.clients import AsyncClient
from immortal.appsdk.client.connection import Connection
from immortal.appsdk.client.discovery import Finder, Places
from immortal.appsdk.client.errors import ClientClosed, NotConnectable
from immortal.appsdk.client.transport import SocketMonitor, Transport

REOPENED = 400  # one in a hundred or so was enough
ACCEPTED_S = 10.0
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)  # ZMTP 3.0


@pytest.mark.slow
def test_a_socket_that_is_made_anew_while_nobody_listens_connects_to_who_listens_then() -> None:
    """Found by the soak: ZeroMQ's thread waited for ever for who was to hear of the socket before."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))  # and does not listen yet
        endpoint = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        connection = Connection("shop", "somebody", time.monotonic())
        transport = Transport(connection, Finder("shop", endpoints=[endpoint], insecure=True))
        for count in range(REOPENED):
            time.sleep(0.0004 * (count % 30))  # at each moment of an attempt to connect
            transport._reopen(time.monotonic())
        listener.listen()
        listener.settimeout(ACCEPTED_S)
        listener.accept()[0].close()
        transport.close()


class Listener:
    """A ROUTER; ``secret_key``: it takes only callers who know its public key."""

    def __init__(self, secret_key: bytes | None, endpoint: str = "tcp://127.0.0.1:*") -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        if secret_key is not None:
            self._socket.setsockopt(zmq.CURVE_SERVER, 1)
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, secret_key)
            self._socket.setsockopt(zmq.ZAP_DOMAIN, b"peers")
        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.start()
        self.let_in(everybody=True)
        self._socket.bind(endpoint)
        self.endpoint: str = self._socket.getsockopt(zmq.LAST_ENDPOINT).decode()  # type: ignore[union-attr]

    def let_in(self, *, everybody: bool) -> None:
        """Or nobody: no file of a key is in no folder."""
        self._authenticator.configure_curve(location=zmq.auth.CURVE_ALLOW_ANY if everybody else "/nowhere")

    @property
    def has_heard(self) -> bool:
        return bool(self._socket.poll(0))

    def close(self) -> None:
        self._authenticator.stop()
        self._socket.close()
        self._context.term()


def test_where_nobody_listens_the_next_place_is_tried_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for silence in ("SILENCE_S", "SILENCE_CALLING_S"):
        monkeypatch.setattr(f"immortal.appsdk.client.connection.{silence}", 10 * ACCEPTED_S)
    there = Listener(None)
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        endpoints = [f"tcp://127.0.0.1:{nobody.getsockname()[1]}", there.endpoint]
        transport = Transport(
            Connection("shop", "somebody", time.monotonic()), Finder("shop", endpoints=endpoints, insecure=True)
        )
        deadline_s = time.monotonic() + ACCEPTED_S
        while transport.endpoint != there.endpoint:
            assert time.monotonic() < deadline_s
            transport.process()
        transport.close()
    there.close()


def watched_until(problem: str, endpoint: str, server_key: bytes | None) -> None:
    """Watch a caller who calls ``endpoint`` until it has that problem; ``server_key``: the one that is known here."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    watch, caller = SocketMonitor(context), context.socket(zmq.DEALER)
    try:
        caller.setsockopt(zmq.LINGER, 0)
        caller.setsockopt(zmq.RECONNECT_IVL, 10)
        if server_key is not None:
            public, secret = zmq.curve_keypair()
            caller.setsockopt(zmq.CURVE_SERVERKEY, server_key)
            caller.setsockopt(zmq.CURVE_PUBLICKEY, public)
            caller.setsockopt(zmq.CURVE_SECRETKEY, secret)
        watch.watch(caller, has_keys=server_key is not None)
        caller.connect(endpoint)
        deadline_s = time.monotonic() + ACCEPTED_S
        while watch.problem != problem:
            assert time.monotonic() < deadline_s, f"what is seen is {watch.problem!r}"
            time.sleep(0.001)
            watch.read_events()
        assert watch.is_unreachable == (problem == "nobody listens there")
    finally:
        watch.close()
        caller.close()
        context.term()


@pytest.mark.parametrize(
    ("has_keys", "known", "problem"),
    [
        (True, "none", "it takes only callers with keys, and none of its public keys is known here"),
        (False, "its own", "it has no keys, and here it is known with some"),
        (True, "another", "it breaks off the handshake: it has other keys than those that are known here"),
    ],
)
def test_a_handshake_that_fails_tells_whose_keys_are_missing(has_keys: bool, known: str, problem: str) -> None:
    public, secret = zmq.curve_keypair()
    listener = Listener(secret if has_keys else None)
    try:
        server_keys = {"none": None, "its own": public, "another": zmq.curve_keypair()[0]}
        watched_until(problem, listener.endpoint, server_keys[known])
    finally:
        listener.close()


@pytest.fixture
def caller(tmp_path: Path) -> Iterator[Callable[..., Transport]]:
    """A client with keys of its own, of an instance at one endpoint that may have any of ``server_keys``."""
    folder = tmp_path / "home" / "till" / "keys"
    folder.mkdir(parents=True)
    for made in (tmp_path / "home", folder.parent, folder):
        made.chmod(0o700)
    (folder / "pairs").write_text(" ".join(key.decode() for key in zmq.curve_keypair()) + "\n")
    (folder / "pairs").chmod(0o600)
    transports: list[Transport] = []

    def make(endpoint: str, *server_keys: bytes) -> Transport:
        keys = [key.decode() for key in server_keys]
        finder = Finder("shop", tmp_path / "home", [endpoint], keys, identity="till")
        transports.append(Transport(Connection("shop", "till", time.monotonic()), finder))
        return transports[-1]

    yield make
    for transport in transports:
        transport.close()


def until_heard(transport: Transport, there: Listener, never: str = "another problem") -> None:
    deadline_s = time.monotonic() + ACCEPTED_S
    while not there.has_heard:
        assert time.monotonic() < deadline_s, transport.problem
        transport.process()
        assert never not in transport.problem


def test_all_keys_that_it_may_have_are_tried_at_once(
    caller: Callable[..., Transport], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("immortal.appsdk.client.connection.SILENCE_S", 10 * ACCEPTED_S)
    monkeypatch.setattr("immortal.appsdk.client.transport.KEY_RETRY_S", 10 * ACCEPTED_S)
    public, secret = zmq.curve_keypair()
    there = Listener(secret)
    transport = caller(there.endpoint, zmq.curve_keypair()[0], zmq.curve_keypair()[0], public)
    until_heard(transport, there)
    there.close()


def test_when_none_of_its_keys_is_right_they_are_looked_for_again(
    caller: Callable[..., Transport], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("immortal.appsdk.client.connection.SILENCE_S", 10 * ACCEPTED_S)
    monkeypatch.setattr("immortal.appsdk.client.transport.KEY_RETRY_S", 0.05)
    public, secret = zmq.curve_keypair()
    there = Listener(secret)
    transport = caller(there.endpoint, zmq.curve_keypair()[0], zmq.curve_keypair()[0])
    find, looks = Finder.find, itertools.count(1)

    def find_anew(finder: Finder) -> Places:
        found = find(finder)
        keys = (*found.server_keys, public.decode())
        return replace(found, server_keys=keys) if next(looks) > 5 else found

    monkeypatch.setattr(Finder, "find", find_anew)
    until_heard(transport, there)
    there.close()


def test_who_turns_the_callers_key_away_is_shown_it_again_under_the_same_key_of_its_own(
    caller: Callable[..., Transport], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is about to learn of a new caller. The key of another machine was tried meanwhile, and that was the end."""
    monkeypatch.setattr("immortal.appsdk.client.transport.KEY_RETRY_S", 0.05)
    monkeypatch.setattr("immortal.appsdk.client.transport.KEY_REFUSED_S", 10 * ACCEPTED_S)
    public, secret = zmq.curve_keypair()
    there = Listener(secret)
    there.let_in(everybody=False)
    transport = caller(there.endpoint, public, zmq.curve_keypair()[0])
    deadline_s = time.monotonic() + ACCEPTED_S
    while "does not let the caller's key in" not in transport.problem:
        assert time.monotonic() < deadline_s
        transport.process()
    there.let_in(everybody=True)
    until_heard(transport, there, never="breaks off")
    there.close()


def test_who_ends_in_a_handshake_and_is_back_has_no_other_key() -> None:
    public, secret = zmq.curve_keypair()
    own_public, own_secret = zmq.curve_keypair()
    deadline_s = time.monotonic() + ACCEPTED_S
    with zmq.Context() as context, context.socket(zmq.DEALER) as caller:
        caller.setsockopt(zmq.LINGER, 0)
        caller.setsockopt(zmq.RECONNECT_IVL, 10)
        caller.setsockopt(zmq.CURVE_SERVERKEY, public)
        caller.setsockopt(zmq.CURVE_PUBLICKEY, own_public)
        caller.setsockopt(zmq.CURVE_SECRETKEY, own_secret)
        watch = SocketMonitor(context)
        watch.watch(caller, has_keys=True)
        try:
            with socket.create_server(("127.0.0.1", 0)) as dying:
                dying.settimeout(ACCEPTED_S)
                endpoint = f"tcp://127.0.0.1:{dying.getsockname()[1]}"
                caller.connect(endpoint)
                while not watch.has_key_mismatch:
                    assert time.monotonic() < deadline_s, watch.problem
                    with dying.accept()[0] as connection:
                        connection.sendall(GREETING)
                        connection.recv(1)
                    watch.read_events()
            back = Listener(secret, endpoint)
            while not watch.is_up:
                assert time.monotonic() < deadline_s, watch.problem
                watch.read_events()
            assert not watch.has_key_mismatch
            assert watch.problem == ""
            back.close()
        finally:
            watch.close()


@pytest.mark.parametrize("has_keys", [False, True])
def test_without_a_handshake_it_is_told_whether_somebody_listens(has_keys: bool) -> None:
    server_key = zmq.curve_keypair()[0] if has_keys else None
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        endpoint = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        watched_until("nobody listens there", endpoint, server_key)
        listener.listen()
        watched_until("somebody listens there, and does not answer", endpoint, server_key)


class Noted:
    """A method of the instance."""

    method, name = "note", "Shop.note"

    def encode(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> bytes:
        return b""

    def value(self, reply: object) -> object:
        return reply


def test_settling_waits_for_the_replies_and_no_longer_than_it_is_told() -> None:
    async def settle() -> None:
        client = AsyncClient(Finder("shop", endpoints=["tcp://127.0.0.1:9"], insecure=True), None)
        loop = asyncio.get_running_loop()
        forks = [client._shell.machine.forks.call(Noted(), b"") for _ in range(2)]
        loop.call_soon(forks[0].done, forks[0])
        with pytest.raises(ClientClosed, match="1 calls that were forked to 'shop' have no reply"):
            await client.settle(0.01)
        loop.call_soon(forks[1].done, forks[1])
        await client.settle(ACCEPTED_S)
        await client.close()

    asyncio.run(settle())


@pytest.mark.parametrize("content", [b"peer = ", b"\xff"])
def test_a_registry_that_cannot_be_read_is_said(tmp_path: Path, content: bytes) -> None:
    tmp_path.chmod(0o700)
    path = tmp_path / "shop.toml"
    path.write_bytes(content)
    with pytest.raises(NotConnectable, match=f"{path} cannot be read: "):
        Finder("shop", home=tmp_path).find()
