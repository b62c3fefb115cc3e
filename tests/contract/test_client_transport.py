"""The client's sockets, over real ones."""

from __future__ import annotations

import asyncio
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from appsdk.client.aio import AsyncClient
from appsdk.client.connection import Connection
from appsdk.client.errors import ClientClosed, NotConnectable
from appsdk.client.places import Finder
from appsdk.client.transport import Transport

REOPENED = 400  # one in a hundred or so was enough
ACCEPTED_S = 10.0


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
        forks = [client._forks.call(Noted(), b"") for _ in range(2)]
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
