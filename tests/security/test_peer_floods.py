"""Floods at the peer port of a real coordinator, with two cores busy: its memory, and what its honest peer feels.

The honest peer, who floods, and the app are a process each, so that none waits for another's Python. Each drive takes
2 seconds; memory is asserted, and that the honest peer is served. With IMMORTAL_DRIVE_S a drive takes so many seconds,
and as many without the flood, IMMORTAL_DRIVE_TURNS times (1): then latencies are printed (pytest -rP), since they are
those of the machine as well.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import statistics
import struct
import threading
import time
from collections.abc import Callable
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from immortal.bench.workload import percentile
from immortal.coordinator.messenger.envelope import encode_message
from immortal.coordinator.messenger.security import Role, connect_with
from immortal.coordinator.peers import keys
from immortal.messenger import Messenger, Security
from immortal.protocol.client_frames import (
    ClientFrame,
    ClientFrameType,
    encode_client_frame,
    encode_numbers,
    encode_request,
)
from immortal.protocol.messages import (
    RpcKind,
    decode_incoming_rpc,
    encode_attach_to,
    encode_incoming_rpc,
    encode_outgoing_rpc,
)
from immortal.protocol.peer_frames import FrameType, PeerFrame, decode_frame, encode_frame
from tests.helpers.processes import DEADLINE_S, TOLD, House, SocketApp
from tests.security.test_peer_port import GREETING, encode_later_frame

MIB = 1 << 20
MEASURES = "IMMORTAL_DRIVE_S" in os.environ
DRIVE_S = float(os.environ.get("IMMORTAL_DRIVE_S", "2"))
DRIVE_TURNS = int(os.environ.get("IMMORTAL_DRIVE_TURNS", "1"))
RESIDENT_MIB_MAX = 300
ANSWER_METHOD, ANSWER_SIZE_BYTES = 3, MIB
LARGE = encode_incoming_rpc(TOLD, 1, bytes(8 * MIB - 64))
Flood = Callable[["Place", Event, int], None]
"""Until the event is set. The number grows by one each time: an epoch for whoever needs one."""


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
    """bob, whom alice calls honestly, and mallory otherwise; both have keys that he knows. For any process."""

    def __init__(self, home: Path) -> None:
        self.house = House(home)
        self.endpoint = self.house.settings("bob").peer
        self.server_key = keys.read_public_keys(self.house.settings("bob").folder)[0]
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

    @staticmethod
    def resident_mib(pid: int) -> float:
        """At most, since the start."""
        status = Path(f"/proc/{pid}/status").read_text()
        return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) / 1024

    def latencies_ms(self, alice: Messenger, drive_s: float) -> list[float]:
        """Of calls of alice's, each until it is durable at bob."""
        found: list[float] = []
        end_s = time.monotonic() + drive_s
        while time.monotonic() < end_s:
            self.position += 1
            began_s = time.monotonic()
            payload = encode_incoming_rpc(TOLD, 1, self.position.to_bytes(4, "little"))
            self.ask(alice, PeerFrame(FrameType.BATCH, "alice", "bob", 7, 1, self.position, 1, 1, payload))
            found.append((time.monotonic() - began_s) * 1000)
        return sorted(found)

    def ask(self, alice: Messenger, frame: PeerFrame) -> PeerFrame:
        answers: list[list[bytes]] = []
        there = threading.Event()

        def answered(parts: list[bytes]) -> None:
            answers.append(parts)
            there.set()

        alice.send_message(self.endpoint, encode_frame(frame), answered)
        assert there.wait(DEADLINE_S)
        return decode_frame(answers[0])

    def greet(self, alice: Messenger) -> None:
        welcome = self.ask(alice, PeerFrame(FrameType.HELLO, "alice", "bob", 7, 1, 0, time_ns=1))
        assert welcome.frame_type is FrameType.WELCOME, welcome


# --- floods -----------------------------------------------------------------------------------------------------------


def strangers_with_large_commands(place: Place, stop: Event, turn: int) -> None:
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


def pings_for_the_same_reply(place: Place, stop: Event, turn: int) -> None:
    payload = encode_numbers([1] * 4096)
    ping = encode_client_frame(ClientFrame(ClientFrameType.PING, "m", "bob", count=4096, payload=payload))
    with zmq.Context() as context, place.dealer(context) as dealer:
        _client_with_a_reply(place, dealer)
        while not stop.is_set():
            with contextlib.suppress(zmq.Again):
                dealer.send(ping)
                stop.wait(0.0005)


def a_request_repeated(place: Place, stop: Event, turn: int) -> None:
    with zmq.Context() as context, place.dealer(context) as dealer:
        request = _client_with_a_reply(place, dealer)
        while not stop.is_set():
            with contextlib.suppress(zmq.Again):
                dealer.send(request)
                stop.wait(0.0005)


def frames_that_nobody_knows(place: Place, stop: Event, turn: int) -> None:
    messenger = Messenger(security=place.security("mallory"))
    messenger.start()
    hello = PeerFrame(FrameType.HELLO, "mallory", "bob", 9, turn, 0)
    while not stop.is_set():
        messenger.send_message(place.endpoint, encode_later_frame(hello, 36))
        messenger.send_message(place.endpoint, [b"nonsense", b"x" * 1000])
        stop.wait(0.001)
    messenger.close()


def a_new_link_for_each_message(place: Place, stop: Event, turn: int) -> None:
    hello = encode_frame(PeerFrame(FrameType.HELLO, "mallory", "bob", 9, 1, 0))
    with zmq.Context() as context, place.dealer(context) as dealer:
        incarnation = 0
        while not stop.is_set():
            incarnation += 1
            with contextlib.suppress(zmq.Again):
                dealer.send_multipart([encode_message(1, incarnation, 1, 1, 0), *hello])
                stop.wait(0.0005)


def batches_beyond_the_window(place: Place, stop: Event, turn: int) -> None:
    """50 a second of 8 MiB, whatever is answered: what comes behind 16 MiB that are not on the disk is refused."""
    messenger = Messenger(security=place.security("mallory"))
    messenger.start()
    welcome = place.ask(messenger, PeerFrame(FrameType.HELLO, "mallory", "bob", 9, turn, 0))
    position = welcome.position
    while not stop.is_set():
        if messenger.pending_count(place.endpoint) < 12:  # its own memory has an end
            position += 1
            messenger.send_message(place.endpoint, encode_frame(large_batch(turn, position)))
        stop.wait(0.02)
    messenger.close()


def large_batch(epoch: int, position: int) -> PeerFrame:
    return PeerFrame(FrameType.BATCH, "mallory", "bob", 9, epoch, position, 1, 1, LARGE)


def _keep_under_way(place: Place, stop: Event, turn: int, batches: int) -> None:
    """Always so many of 8 MiB, numbered as they should be, and again where one was not taken."""
    messenger = Messenger(security=place.security("mallory"))
    messenger.start()
    done = sent = place.ask(messenger, PeerFrame(FrameType.HELLO, "mallory", "bob", 9, turn, 0)).position
    under_way, changed = 0, threading.Condition()

    def answered(parts: list[bytes]) -> None:
        nonlocal done, sent, under_way
        frame = decode_frame(parts)
        with changed:
            under_way -= 1
            if frame.frame_type is FrameType.TRIM_TO:
                done = max(done, frame.position)
            else:
                sent = min(sent, done)
            changed.notify()

    def has_room() -> bool:
        return under_way < batches

    while not stop.is_set():
        with changed:
            if not changed.wait_for(has_room, 0.1):
                continue
            sent += 1
            under_way += 1
            frame = large_batch(turn, sent)
        messenger.send_message(place.endpoint, encode_frame(frame), answered)
    messenger.close()


def batches_that_fill_the_window(place: Place, stop: Event, turn: int) -> None:
    """Nothing of it is refused: 16 MiB are allowed."""
    _keep_under_way(place, stop, turn, 2)


def batches_that_are_sent_again(place: Place, stop: Event, turn: int) -> None:
    """64 MiB are under way: most of them are refused, and come again."""
    _keep_under_way(place, stop, turn, 8)


FLOODS: list[Flood] = [
    strangers_with_large_commands,
    pings_for_the_same_reply,
    a_request_repeated,
    frames_that_nobody_knows,
    a_new_link_for_each_message,
    batches_beyond_the_window,
    batches_that_fill_the_window,
    batches_that_are_sent_again,
]


# --- processes --------------------------------------------------------------------------------------------------------


def _busy(ended: Event) -> None:
    while not ended.is_set():
        sum(range(100_000))


def _serve(home: Path, ready: Event, ended: Event) -> None:
    app = House(home).app("bob", AnsweringApp)
    app.ready()
    ready.set()
    while not ended.is_set():
        with contextlib.suppress(AssertionError):  # its time limit
            app.serve_until(ended.is_set)


def _flood(home: Path, flood: Flood, begin: Event, stop: Event, ended: Event) -> None:
    """Each time that ``begin`` is set, until ``stop`` is; then ``begin`` is clear again."""
    place, turn = Place(home), 0
    while not ended.is_set():
        if begin.wait(0.1):
            turn += 1
            flood(place, stop, turn)
            begin.clear()


@pytest.mark.slow
@pytest.mark.timeout(60 + 5 * DRIVE_S * DRIVE_TURNS)
@pytest.mark.parametrize("flood", FLOODS, ids=lambda flood: flood.__name__)
def test_a_flood_cannot_take_the_memory_or_the_time_of_others(tmp_path: Path, flood: Flood) -> None:
    house = House(tmp_path)
    house.register("alice", "bob", "mallory")
    for name in ("alice", "bob", "mallory"):
        keys.create(house.settings(name).folder)
    keys.create(tmp_path / "web", Role.CLIENT)
    spawn = multiprocessing.get_context("spawn")
    ready, begin, stop, ended = (spawn.Event() for _ in range(4))
    coordinator = house.start("bob")
    place = Place(tmp_path)
    alice = Messenger(security=place.security("alice"))
    flooder = spawn.Process(target=_flood, args=(tmp_path, flood, begin, stop, ended), daemon=True)
    processes: list[Any] = [
        spawn.Process(target=_serve, args=(tmp_path, ready, ended), daemon=True),
        flooder,
        *(spawn.Process(target=_busy, args=(ended,), daemon=True) for _ in range(2)),
    ]
    before, during = [], []
    try:
        for process in processes:
            process.start()
        assert ready.wait(DEADLINE_S)
        alice.start()
        place.greet(alice)
        for _ in range(DRIVE_TURNS):
            if MEASURES:
                before.append(place.latencies_ms(alice, DRIVE_S))
            stop.clear()
            begin.set()
            during.append(place.latencies_ms(alice, DRIVE_S))
            stop.set()
            deadline_s = time.monotonic() + DEADLINE_S
            while begin.is_set():
                assert flooder.is_alive(), "the flood has failed"
                assert time.monotonic() < deadline_s, "the flood does not end"
                time.sleep(0.01)
        resident_mib = place.resident_mib(coordinator.process.pid)
    finally:
        ended.set()
        stop.set()
        alice.close()
        for process in processes:
            if process.pid is not None:
                process.join(1)
                process.kill()
                process.join()
        house.close()
    if MEASURES:
        p99s_before, p99s_during = ([percentile(turn, 99) for turn in turns] for turns in (before, during))
        times = statistics.median(b / a for a, b in zip(p99s_before, p99s_during, strict=True))
        p99_before, p99_during = statistics.median(p99s_before), statistics.median(p99s_during)
        print(
            f"{flood.__name__}: {resident_mib:.0f} MiB resident at most; "
            f"p99 {p99_before:.1f} ms without, {p99_during:.1f} ms with ({times:.1f} times); "
            f"{sum(map(len, before))} and {sum(map(len, during))} calls"
        )
    assert resident_mib < RESIDENT_MIB_MAX
    assert all(during), "the honest peer was served"
