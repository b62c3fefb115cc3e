"""What strangers, peers and clients try at the peer port: memory, routing IDs, and frames that nobody knows."""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from immortal.coordinator.messenger.envelope import (
    ENVELOPE_SIZE_BYTES,
    Kind,
    decode_envelope,
    decode_parts,
    encode_message,
)
from immortal.coordinator.messenger.limits import CLIENT_QUEUED_SIZE_BYTES_MAX, HANDSHAKE_SIZE_BYTES_MAX, HANDSHAKES_MAX
from immortal.coordinator.messenger.security import Role, connect_with
from immortal.messenger import ClientRoute, KeyPair, Messenger, Received, Security
from immortal.protocol.checksum import crc64
from immortal.protocol.client_frames import ClientFrame, ClientFrameType, encode_client_frame
from immortal.protocol.peer_frames import FrameType, PeerFrame, RefusedCode, decode_frame, encode_frame
from tests.helpers.processes import DEADLINE_S, House

MIB = 1 << 20
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00%s\0" + bytes(31)  # of ZMTP; %s: the mechanism, 20 bytes


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "it does not come about"
        time.sleep(0.001)


def address_of(endpoint: str) -> tuple[str, int]:
    return "127.0.0.1", int(endpoint.rsplit(":", 1)[1])


class Port:
    """A messenger that listens, with keys or without, and what has come in."""

    def __init__(self, *, secured: bool) -> None:
        self.server, self.alice, self.web = KeyPair.new(), KeyPair.new(), KeyPair.new()
        callers, roles = {self.alice.public: "alice", self.web.public: "web"}, {self.web.public: Role.CLIENT}
        self.security = Security(self.server, callers, lambda endpoint: (), roles) if secured else None
        self.messenger = Messenger(security=self.security)
        self.messenger.start()
        self.arrived: list[bytes] = []
        self.clients: list[tuple[ClientRoute, bytes]] = []
        self.endpoint = self.messenger.listen(
            "tcp://127.0.0.1:*", self._loop, client_loop=lambda route, data: self.clients.append((route, data))
        )

    def _loop(self, received: Received) -> None:
        self.arrived.append(received.parts[0])
        received.reply(received.parts[0])

    def peer(self) -> Messenger:
        security = None if self.security is None else Security(self.alice, {}, lambda endpoint: (self.server.public,))
        messenger = Messenger(security=security)
        messenger.start()
        return messenger

    def dealer(
        self, context: zmq.Context[zmq.Socket[bytes]], routing_id: bytes = b"", *, of_peer: bool = False
    ) -> zmq.Socket[bytes]:
        """Of a client, or ``of_peer``."""
        dealer: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        dealer.linger = 0
        if routing_id:
            dealer.setsockopt(zmq.ROUTING_ID, routing_id)
        if self.security is not None:
            connect_with(dealer, self.alice if of_peer else self.web, self.server.public)
        dealer.connect(self.endpoint)
        return dealer

    def stranger(self) -> socket.socket:
        """A connection that has said its greeting."""
        connection = socket.create_connection(address_of(self.endpoint), timeout=DEADLINE_S)
        mechanism = b"NULL" if self.security is None else b"CURVE"
        connection.sendall(GREETING % mechanism.ljust(20, b"\0"))
        return connection


@pytest.fixture(params=["with keys", "in plain"])
def port(request: pytest.FixtureRequest) -> Iterator[Port]:
    port = Port(secured=request.param == "with keys")
    yield port
    port.messenger.close()


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    with zmq.Context() as context:
        yield context


# --- before it is known who somebody is -------------------------------------------------------------------------------


def test_a_stranger_cannot_send_a_large_command_in_the_handshake(port: Port) -> None:
    sent_bytes = 0
    with port.stranger() as stranger, contextlib.suppress(OSError):  # it is ended
        stranger.sendall(b"\x06" + struct.pack(">Q", 1 << 30))
        while sent_bytes < 1 << 30:
            stranger.sendall(bytes(64 * 1024))
            sent_bytes += 64 * 1024
    assert HANDSHAKE_SIZE_BYTES_MAX <= sent_bytes < 256 * MIB
    until(lambda: port.messenger.counters().strangers_refused)
    peer = port.peer()
    peer.send_message(port.endpoint, b"an honest one")
    until(lambda: port.arrived)
    peer.close()


def test_strangers_cannot_keep_more_connections_open_than_are_watched(port: Port) -> None:
    strangers = [port.stranger() for _ in range(HANDSHAKES_MAX + 20)]
    for stranger in strangers[:20]:  # the oldest
        while stranger.recv(1024):
            pass
    peer = port.peer()
    peer.send_message(port.endpoint, b"an honest one")
    until(lambda: port.arrived)
    peer.close()
    for stranger in strangers:
        stranger.close()


def test_a_large_message_of_a_known_peer_is_no_handshake(port: Port) -> None:
    peers = [port.peer() for _ in range(5)]
    large = bytes(20 * MIB)
    for peer in peers:
        peer.send_message(port.endpoint, large)
    until(lambda: len(port.arrived) == len(peers))
    assert port.messenger.counters().strangers_refused == 0
    for peer in peers:
        peer.close()


# --- routing IDs ------------------------------------------------------------------------------------------------------

HELLO = encode_client_frame(ClientFrame(ClientFrameType.HELLO, "c", "a"))


def test_a_routing_id_in_use_cannot_be_taken_over(port: Port, context: zmq.Context[zmq.Socket[bytes]]) -> None:
    honest = port.dealer(context, b"known to all")
    honest.send(HELLO)
    until(lambda: port.clients)
    route, _ = port.clients[0]
    thief = port.dealer(context, b"known to all")
    for _ in range(5):
        thief.send(HELLO)
    other = port.dealer(context)
    other.send(HELLO)
    until(lambda: len(port.clients) >= 2)
    route.send(b"for the honest one")
    assert honest.poll(int(DEADLINE_S * 1000))
    assert honest.recv() == b"for the honest one"
    assert not thief.poll(100)
    for dealer in (honest, thief, other):
        dealer.close()


def test_who_comes_back_with_its_own_routing_id_gets_through_once_its_old_connection_has_ended(
    port: Port, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    for number in range(1, 4):
        dealer = port.dealer(context, b"mine")
        dealer.send(HELLO)
        until(lambda number=number: len(port.clients) == number)
        route, _ = port.clients[-1]
        route.send(b"hello")
        while not (said := dealer.recv()):
            pass  # what was still to be said to the one before: it had the same routing ID
        assert said == b"hello"
        dealer.close()
        unsent = port.messenger.counters().replies_unsent

        def ended(route: ClientRoute = route, unsent: int = unsent) -> bool:
            route.send(b"")
            return port.messenger.counters().replies_unsent > unsent

        until(ended)


def say_until_it_has_come(port: Port, route: ClientRoute, dealer: zmq.Socket[bytes], data: bytes) -> None:
    """As a client does: what was not sent, it asks for again. That it has read the ones before, ZeroMQ may say late."""
    deadline = time.monotonic() + DEADLINE_S
    unsent = port.messenger.counters().replies_unsent
    route.send(data)
    while not dealer.poll(1):
        assert time.monotonic() < deadline, "it does not come"
        if (now := port.messenger.counters().replies_unsent) > unsent:
            unsent = now
            route.send(data)
    assert dealer.recv() == data


# --- clients that do not read -----------------------------------------------------------------------------------------


def test_a_client_that_does_not_read_cannot_have_more_queued_than_its_share(
    port: Port, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    if port.security is not None:
        pytest.skip("a socket that speaks no CURVE does not read")
    ready = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER\x08Identity" + bytes(4)
    with port.stranger() as deaf:
        greeting = 64  # bytes, in pieces: ZeroMQ may end who speaks on before all of it has come
        while greeting:
            greeting -= len(deaf.recv(greeting)) or pytest.fail("the connection has ended")
        deaf.sendall(b"\x04" + bytes([len(ready)]) + ready + b"\0" + bytes([len(HELLO)]) + HELLO)
        until(lambda: port.clients)
        route, _ = port.clients[0]
        (listener,) = port.messenger._listeners.all
        queues = listener._client_queues
        for size_bytes, count in ((MIB, 100), (1000, 20_000)):
            unsent = port.messenger.counters().replies_unsent
            for _ in range(count):
                route.send(bytes(size_bytes))
            until(lambda unsent=unsent: port.messenger.counters().replies_unsent > unsent)
            until(lambda: not port.messenger._replies)
            assert queues._size_bytes <= CLIENT_QUEUED_SIZE_BYTES_MAX + MIB
        reads = port.dealer(context)
        reads.send(HELLO)
        until(lambda: len(port.clients) == 2)
        reading, _ = port.clients[1]
        for _ in range(20):  # one that reads gets everything
            say_until_it_has_come(port, reading, reads, bytes(4 * MIB))
        reads.close()
    until(lambda: not queues.has_room(b"", 0) or not queues._drop_sent(route._route))


# --- of another build -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("version", "kind"), [(2, 10), (3, 1)])
def test_an_envelope_that_is_not_known_is_answered_once(
    port: Port, context: zmq.Context[zmq.Socket[bytes]], version: int, kind: int
) -> None:
    dealer = port.dealer(context, of_peer=True)
    envelope = encode_message(1, 1, 1, 1, 0)
    for _ in range(10):
        dealer.send(bytes((version, kind)) + envelope[2:])
    assert dealer.poll(int(DEADLINE_S * 1000))
    answer = dealer.recv()
    assert decode_envelope(answer[:ENVELOPE_SIZE_BYTES]).kind == Kind.NOT_KNOWN
    assert decode_parts(answer, ENVELOPE_SIZE_BYTES) == [b"version 2, kinds 1 to 9"]
    dealer.send_multipart([envelope, b"one that is known"])
    assert dealer.poll(int(DEADLINE_S * 1000))
    assert decode_envelope(dealer.recv()[:ENVELOPE_SIZE_BYTES]).kind == Kind.REPLY, "the next answer is to that"
    dealer.close()


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path)
    yield house
    house.close()


def test_a_frame_that_is_not_known_is_answered_with_what_is(house: House) -> None:
    """The sender is of a build that knows one frame type more."""
    house.register("bob")
    _, bob = house.both("bob")
    peer = Messenger()
    peer.start()
    answers: list[list[bytes]] = []
    hello = PeerFrame(FrameType.HELLO, "later", "bob", 7, 1, 0)
    peer.send_message(house.settings("bob").peer, encode_later_frame(hello, 36), answers.append)
    peer.send_message(house.settings("bob").peer, encode_frame(hello), answers.append)
    until(lambda: len(answers) == 2)
    refused, welcome = (decode_frame(parts) for parts in answers)
    assert (refused.frame_type, refused.code) == (FrameType.REFUSED, RefusedCode.UNKNOWN)
    assert "a frame of type 36 is not known here: this coordinator takes" in refused.reason
    assert welcome.frame_type is FrameType.WELCOME, "the stream goes on with what both know"
    assert bob.primary
    peer.close()


def encode_later_frame(frame: PeerFrame, frame_type: int) -> list[bytes]:
    header, *payload = encode_frame(frame)
    unchecked = header[:1] + bytes((frame_type,)) + header[2:36] + bytes(8) + header[44:]
    return [unchecked[:36] + struct.pack("<Q", crc64(unchecked)) + unchecked[44:], *payload]


@pytest.mark.slow
@pytest.mark.parametrize("answer", ["nonsense", "nothing", "later frame"])
def test_an_answer_that_cannot_be_read_is_no_hot_loop(house: House, answer: str) -> None:
    came: list[int] = []
    trim_to = PeerFrame(FrameType.TRIM_TO, "bob", "alice", 7, 1, 0)
    parts = {"nonsense": [b"nonsense"], "nothing": [], "later frame": encode_later_frame(trim_to, 36)}[answer]
    honest = False

    def loop(received: Received) -> None:
        came.append(time.monotonic_ns())
        frame = decode_frame(received.parts)
        if honest:
            position = frame.position + frame.count - 1 if frame.frame_type is FrameType.BATCH else 0
            kind = FrameType.TRIM_TO if frame.frame_type is FrameType.BATCH else FrameType.WELCOME
            received.reply(*encode_frame(PeerFrame(kind, "bob", "alice", 7, 1, position)))
        else:
            received.reply(*parts)

    bob = Messenger()
    bob.start()
    endpoint = bob.listen("tcp://127.0.0.1:*", loop)
    house.register("alice")
    path = house.registry.path("alice")
    path.write_text(path.read_text() + f'\n[peers]\nbob = "{endpoint}"\n')
    process, alice = house.both("alice", peer="bob")
    alice.impulse(1)
    alice.until(lambda: bool(alice.state["forwarded"]))
    until(lambda: len(came) >= 6)
    assert came[5] - came[0] >= 1_400_000_000, "0.1, 0.2, 0.4 and 0.8 s"
    assert process.count("dropped") <= 6
    honest = True
    process.until(lambda status: status["outputs"]["bob"]["acknowledged"] >= 1)
    bob.close()
