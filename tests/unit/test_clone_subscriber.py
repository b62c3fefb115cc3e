"""A copy's connection: a ZeroMQ socket that hears of a connection later than who watches it."""

from __future__ import annotations

import select
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from immortal.appsdk.client.discovery import Finder
from immortal.appsdk.patterns.clone.frames import MAGIC, Activate, Ping, Pong, decode_answer, decode_request, encode
from immortal.appsdk.patterns.clone.model import Entries, Place, Row
from immortal.appsdk.patterns.clone.publication import Publication
from immortal.appsdk.patterns.clone.publisher import Publisher
from immortal.appsdk.patterns.clone.subscriber import Options, Replica, Subscriber
from immortal.protocol.checksum import crc64
from tests.helpers.lossy import LossyNetwork
from tests.helpers.proxy import FaultProxy

WAIT_S = 20.0
RIGHT_AGAIN_S = 2.0


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
        subscriber.close()
        context.destroy(linger=0)


@pytest.mark.parametrize("seed", [1, 4])
def test_a_copy_that_is_cut_where_messages_are_lost_is_soon_right_again(seed: int, tmp_path: Path) -> None:
    """Without questions it took up to half a minute, or no end where the last message was lost."""
    publisher, context = Publisher("tcp://127.0.0.1:*", home=tmp_path), zmq.Context[zmq.Socket[bytes]]()
    publisher.publishing = publishing = Publication("p", "table", Entries(), blocking_s=0.0)
    replica, number = Replica(Options()), 0
    with LossyNetwork(publisher.endpoint, loss=0.2, seed=seed) as network, FaultProxy(network.endpoint) as proxy:
        subscriber = Subscriber(
            context,
            replica,
            lambda anew: [Place(proxy.endpoint)],
            lambda place: Finder("prices", tmp_path, [place.endpoint]),
            time.monotonic(),
        )
        for _ in range(4):
            for _ in range(3):
                number += 1
                publishing.publish([Row(f"k{number}", number, b"\1")])
            end_s = time.monotonic() + RIGHT_AGAIN_S
            while replica.subtrees is None or replica.number != number:
                assert time.monotonic() < end_s
                publisher.turn()
                subscriber.process(time.monotonic())
                sockets = [one.fileno() for one in subscriber.sockets()]
                select.select([publisher.fileno(), *sockets], [], [], 0.002)
            proxy.cut()
        subscriber.close()
    context.destroy(linger=0)
    publisher.close()


def test_pings_and_pongs_of_earlier_builds_say_no_bytes() -> None:
    assert decode_answer(_frame(["pong", 1])) == Pong(1, -1)
    assert decode_request(_frame(["ping", 1])) == Ping(1, 0)


def _frame(fields: list[object]) -> bytes:
    data = MAGIC + msgspec.msgpack.encode(fields)
    return data + crc64(data).to_bytes(8, "big")
