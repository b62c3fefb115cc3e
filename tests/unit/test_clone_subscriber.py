"""A copy's connection: a ZeroMQ socket that hears of a connection later than who watches it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from immortal.appsdk.client.discovery import Finder
from immortal.appsdk.patterns.clone.frames import Activate, Ping, Pong, decode_request, encode
from immortal.appsdk.patterns.clone.model import Place
from immortal.appsdk.patterns.clone.replica import Options, Replica
from immortal.appsdk.patterns.clone.subscriber import Subscriber

WAIT_S = 20.0


class LateSocket(zmq.Socket[bytes]):
    """Takes nothing the first time."""

    refused = 0

    def send(self, *arguments: Any, **options: Any) -> Any:
        if not LateSocket.refused:
            LateSocket.refused += 1
            raise zmq.Again
        return super().send(*arguments, **options)


class LateContext(zmq.Context[zmq.Socket[bytes]]):
    _socket_class = LateSocket


@pytest.fixture
def publisher() -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.bind("tcp://127.0.0.1:*")
        yield socket


def test_what_was_not_taken_is_asked_for_again(publisher: zmq.Socket[bytes], tmp_path: Path) -> None:
    LateSocket.refused = 0
    endpoint = publisher.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
    context = LateContext()
    subscriber = Subscriber(
        context,
        Replica(Options(subtrees=("",))),
        lambda anew: [Place(endpoint)],
        lambda place: Finder("prices", tmp_path, [place.endpoint]),
        time.monotonic(),
    )
    try:
        deadline_s = time.monotonic() + WAIT_S
        asked: list[object] = []
        while not any(isinstance(one, Activate) for one in asked):
            assert time.monotonic() < deadline_s, asked
            subscriber.process(time.monotonic())
            if publisher.poll(10):
                route, data = publisher.recv_multipart()
                asked.append(decode_request(data))
                if isinstance(asked[-1], Ping):  # as a publisher does: the connection is alive
                    publisher.send_multipart([route, encode(Pong(asked[-1].stream))])
        assert LateSocket.refused == 1
    finally:
        subscriber._disconnect()
        context.destroy(linger=0)
