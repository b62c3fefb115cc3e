"""Floods at the peer port of a real coordinator, with two cores busy: its memory, and what its honest peer feels.

Each drive takes IMMORTAL_DRIVE_S seconds (2) with the flood, and as many without. Memory is asserted. Latencies are
printed (pytest -rP), since they are those of the machine as well.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from coordinator import keys
from coordinator.bench.latency import percentile
from coordinator.messenger import Messenger, Security
from coordinator.messenger.envelope import encode_message
from coordinator.messenger.security import Role, connect_with
from protocol.client import ClientFrame, ClientFrameType, encode_client_frame, encode_numbers, encode_request
from protocol.messages import RpcKind, decode_incoming_rpc, encode_attach_to, encode_incoming_rpc, encode_outgoing_rpc
from protocol.peer import FrameType, PeerFrame, decode_frame, encode_frame
from tests.helpers.processes import DEADLINE_S, TOLD, House, SocketApp
from tests.security.test_peer_port import GREETING, encode_later_frame

MIB = 1 << 20
DRIVE_S = float(os.environ.get("IMMORTAL_DRIVE_S", "2"))
RESIDENT_MIB_MAX = 300
ANSWER_METHOD, ANSWER_SIZE_BYTES = 3, MIB
Flood = Callable[["Place", threading.Event], None]


class AnsweringApp(SocketApp):
    """Answers each client with 1 MiB."""

    def _called(self, data: bytes) -> None:
        rpc = decode_incoming_rpc(data)
        if rpc.method_id != ANSWER_METHOD:
            return
        caller, number, *_ = msgspec.msgpack.decode(bytes(rpc.arguments))
        if not self.attached:
            self.attached = True
            self.send(encode_attach_to("~"))
        answer = msgspec.msgpack.encode((caller, number, bytes(ANSWER_SIZE_BYTES)))
        self.send(encode_outgoing_rpc("~", ANSWER_METHOD, 0, answer, RpcKind.RETURNED_VALUE))


class Place:
    """bob, whom alice calls honestly, and mallory otherwise; both have keys that he knows."""

    def __init__(self, house: House) -> None:
        house.register("alice", "bob", "mallory")
        for name in ("alice", "bob", "mallory"):
            keys.make(house.settings(name).folder)
        keys.make(house.home / "web", Role.CLIENT)
        self.house = house
        self.process = house.start("bob")
        self.app = house.app("bob", AnsweringApp)
        self.app.ready()
        self.endpoint = house.settings("bob").peer
        self.server_key = keys.read_public_keys(house.settings("bob").folder)[0]
        self.position = 0

    def security(self, name: str) -> Security:
        pair = keys.read_pairs(self.house.settings(name).folder)[0]
        return Security(pair, {}, lambda endpoint: (self.server_key,))

    def dealer(self, context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
        """mallory's, as the client web, who reads nothing but what is asked for."""
        dealer: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        dealer.linger = 0
        dealer.setsockopt(zmq.RCVHWM, 1)
        dealer.setsockopt(zmq.SNDTIMEO, 100)
        connect_with(dealer, keys.read_pairs(self.house.home / "web")[0], self.server_key)
        dealer.connect(self.endpoint)
        return dealer

    def resident_mib(self) -> float:
        """At most, since the start."""
        status = Path(f"/proc/{self.process.process.pid}/status").read_text()
        return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) / 1024

    def latencies_ms(self, alice: Messenger, drive_s: float) -> list[float]:
        """Of calls of alice's, each until it is durable at bob."""
        found: list[float] = []
        end_s = time.monotonic() + drive_s
        while time.monotonic() < end_s:
            self.position += 1
            began_s = time.monotonic()
            payload = encode_incoming_rpc(TOLD, 1, self.position.to_bytes(4, "little"))
            self._ask(alice, PeerFrame(FrameType.BATCH, "alice", "bob", 7, 1, self.position, 1, 1, payload))
            found.append((time.monotonic() - began_s) * 1000)
        return sorted(found)

    def _ask(self, alice: Messenger, frame: PeerFrame) -> PeerFrame:
        answers: list[list[bytes]] = []
        there = threading.Event()

        def answered(parts: list[bytes]) -> None:
            answers.append(parts)
            there.set()

        alice.send_message(self.endpoint, encode_frame(frame), answered)
        assert there.wait(DEADLINE_S)
        return decode_frame(answers[0])

    def greet(self, alice: Messenger) -> None:
        welcome = self._ask(alice, PeerFrame(FrameType.HELLO, "alice", "bob", 7, 1, 0, time_ns=1))
        assert welcome.frame_type is FrameType.WELCOME, welcome


# --- floods -----------------------------------------------------------------------------------------------------------


def strangers_with_large_commands(place: Place, stop: threading.Event) -> None:
    address = ("127.0.0.1", int(place.endpoint.rsplit(":", 1)[1]))
    chunk = bytes(MIB)

    def stranger() -> None:
        while not stop.is_set():
            with contextlib.suppress(OSError), socket.create_connection(address, timeout=1) as connection:
                connection.sendall(GREETING % b"CURVE".ljust(20, b"\0") + b"\x06" + struct.pack(">Q", 200 * MIB))
                for _ in range(200):
                    if stop.is_set():
                        return
                    connection.sendall(chunk)

    threads = [threading.Thread(target=stranger) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _client_with_a_reply(place: Place, dealer: zmq.Socket[bytes]) -> bytes:
    """The request whose reply is there."""
    frame = ClientFrame(
        ClientFrameType.REQUEST,
        "m",
        "bob",
        number=1,
        count=2,
        time_ns=time.time_ns(),
        payload=encode_request(ANSWER_METHOD, b"\x90") * 2,
    )
    data = encode_client_frame(frame)
    dealer.send(data)
    assert dealer.poll(int(DEADLINE_S * 1000))
    dealer.recv()
    return data


def pings_for_the_same_reply(place: Place, stop: threading.Event) -> None:
    payload = encode_numbers([1] * 4096)
    ping = encode_client_frame(ClientFrame(ClientFrameType.PING, "m", "bob", count=4096, payload=payload))
    with zmq.Context() as context, place.dealer(context) as dealer:
        _client_with_a_reply(place, dealer)
        while not stop.is_set():
            with contextlib.suppress(zmq.Again):
                dealer.send(ping)
                stop.wait(0.0005)


def a_request_repeated(place: Place, stop: threading.Event) -> None:
    with zmq.Context() as context, place.dealer(context) as dealer:
        request = _client_with_a_reply(place, dealer)
        while not stop.is_set():
            with contextlib.suppress(zmq.Again):
                dealer.send(request)
                stop.wait(0.0005)


def frames_that_nobody_knows(place: Place, stop: threading.Event) -> None:
    messenger = Messenger(security=place.security("mallory"))
    messenger.start()
    hello = PeerFrame(FrameType.HELLO, "mallory", "bob", 9, 1, 0)
    while not stop.is_set():
        messenger.send_message(place.endpoint, encode_later_frame(hello, 36))
        messenger.send_message(place.endpoint, [b"nonsense", b"x" * 1000])
        stop.wait(0.001)
    messenger.close()


def a_new_link_for_each_message(place: Place, stop: threading.Event) -> None:
    hello = encode_frame(PeerFrame(FrameType.HELLO, "mallory", "bob", 9, 1, 0))
    with zmq.Context() as context, place.dealer(context) as dealer:
        incarnation = 0
        while not stop.is_set():
            incarnation += 1
            with contextlib.suppress(zmq.Again):
                dealer.send_multipart([encode_message(1, incarnation, 1, 1, 0), *hello])
                stop.wait(0.0005)


def batches_beyond_the_window(place: Place, stop: threading.Event) -> None:
    """Each asked for twice: what comes behind 16 MiB that are not on the disk is refused."""
    messenger = Messenger(security=place.security("mallory"))
    messenger.start()
    messenger.send_message(place.endpoint, encode_frame(PeerFrame(FrameType.HELLO, "mallory", "bob", 9, 1, 0)))
    large = encode_incoming_rpc(TOLD, 1, bytes(8 * MIB))
    position = 0
    while not stop.is_set() and position < 40 * DRIVE_S:
        position += 1
        frame = PeerFrame(FrameType.BATCH, "mallory", "bob", 9, 1, position, 1, 1, large)
        messenger.send_message(place.endpoint, encode_frame(frame))
        stop.wait(0.02)
    messenger.close()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    house = House(tmp_path)
    yield Place(house)
    house.close()


def _busy(until_s: float) -> None:
    while time.time() < until_s:
        pass


@pytest.mark.timeout(60 + 5 * DRIVE_S)
@pytest.mark.parametrize(
    "flood",
    [
        strangers_with_large_commands,
        pings_for_the_same_reply,
        a_request_repeated,
        frames_that_nobody_knows,
        a_new_link_for_each_message,
        batches_beyond_the_window,
    ],
    ids=lambda flood: flood.__name__,
)
def test_a_flood_cannot_take_the_memory_or_the_time_of_others(place: Place, flood: Flood) -> None:
    alice = Messenger(security=place.security("alice"))
    alice.start()
    place.greet(alice)
    stop = threading.Event()
    errors: list[BaseException] = []

    def flooding() -> None:
        try:
            flood(place, stop)
        except BaseException as error:
            errors.append(error)

    def serving() -> None:
        while not stop.is_set():
            with contextlib.suppress(AssertionError):  # its time limit
                place.app.serve_until(stop.is_set)

    spawn = multiprocessing.get_context("spawn")
    ends_s = time.time() + 2 * DRIVE_S + 3
    busy: list[Any] = [spawn.Process(target=_busy, args=(ends_s,), daemon=True) for _ in range(2)]
    app_thread, flood_thread = threading.Thread(target=serving), threading.Thread(target=flooding)
    try:
        for process in busy:
            process.start()
        app_thread.start()
        before = place.latencies_ms(alice, DRIVE_S)
        flood_thread.start()
        during = place.latencies_ms(alice, DRIVE_S)
    finally:
        stop.set()
        for thread in (flood_thread, app_thread):
            if thread.ident is not None:
                thread.join(DEADLINE_S)
        for process in busy:
            process.kill()
            process.join()
        alice.close()
    assert not errors, errors
    resident_mib = place.resident_mib()
    p99_before, p99_during = percentile(before, 99), percentile(during, 99)
    print(
        f"{flood.__name__}: {resident_mib:.0f} MiB resident at most; p99 {p99_before:.1f} ms without, "
        f"{p99_during:.1f} ms with ({p99_during / p99_before:.1f} times); {len(before)} and {len(during)} calls"
    )
    assert resident_mib < RESIDENT_MIB_MAX
    assert during, "the honest peer was served"
