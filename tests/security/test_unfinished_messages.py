"""Messages of many parts, which ZeroMQ gathers whole: what they take of a real process, and who is not ended."""

from __future__ import annotations

import errno
import itertools
import logging
import multiprocessing
import os
import select
import socket
import struct
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import zmq

from immortal.appsdk.patterns.clone.publisher import Publisher
from immortal.appsdk.patterns.listener import Listener
from immortal.coordinator.messenger.listener import Listener as PeerListener
from immortal.coordinator.messenger.security import Role, connect_with
from immortal.coordinator.peers import keys
from immortal.messenger import Messenger, Received
from immortal.patterns.pirate import Server
from immortal.protocol.messages import encode_incoming_rpc
from immortal.protocol.peer_frames import FrameType, PeerFrame
from tests.helpers.processes import DEADLINE_S, TOLD, House
from tests.security.test_peer_floods import Place
from tests.security.test_peer_port import GREETING, until

MIB = 1 << 20
PART = bytes(4 * MIB)
MIN_MIB = 3  # less, and the attack was none
# Above rest. Some 80 and 270 on a machine that has time; a watch that gets none for a while sees more.
ONE_MIB_MAX = 200
TEN_MIB_MAX = 600


def peak_of(pid: int, attack: Callable[[], object]) -> float:
    """MiB that the process has at most during the attack, above those before."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak begins anew
    before_mib = Place.resident_mib(pid)
    attack()
    return Place.resident_mib(pid) - before_mib


def until_ended(dealers: list[zmq.Socket[bytes]]) -> None:
    """Wait until each of the connections was ended."""
    monitors = [dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED) for dealer in dealers]
    for dealer in dealers:
        dealer.send_multipart([PART] * (250 if len(dealers) == 1 else 100), copy=False)
    for monitor in monitors:
        assert monitor.poll(DEADLINE_S * 1000), "a connection with 400 MiB or more in one message stands"
    for dealer in dealers:
        dealer.disable_monitor()
        dealer.close(0)


@pytest.mark.parametrize(("name", "count"), [("web", 1), ("mallory", 1), ("web", 10)])
def test_a_message_of_many_parts_takes_little_of_a_coordinator(tmp_path: Path, name: str, count: int) -> None:
    house = House(tmp_path)
    house.register("bob", "mallory")
    for one in ("bob", "mallory"):
        keys.create(house.settings(one).folder)
    keys.create(tmp_path / "web", Role.CLIENT)
    try:
        process, _ = house.both("bob")
        place = Place(tmp_path)
        with zmq.Context() as context:
            dealers = [context.socket(zmq.DEALER) for _ in range(count)]
            for dealer in dealers:
                connect_with(dealer, keys.read_pairs(tmp_path / name)[0], place.server_key)
                dealer.setsockopt(zmq.RECONNECT_IVL, -1)
                dealer.connect(place.endpoint)
            peak_mib = peak_of(process.process.pid, lambda: until_ended(dealers))
        print(f"{count} of {name}: {peak_mib:.0f} MiB above rest")
        assert MIN_MIB < peak_mib < (ONE_MIB_MAX if count == 1 else TEN_MIB_MAX)
    finally:
        house.close()


@pytest.mark.parametrize("limit_mb", [64, 200])
def test_a_call_as_large_as_its_senders_settings_allow_comes_through(tmp_path: Path, limit_mb: int) -> None:
    house = House(tmp_path)
    house.register("bob")
    house.register("alice", rpc_limit_mb=limit_mb)
    for one in ("alice", "bob"):
        keys.create(house.settings(one).folder)
    try:
        process, _ = house.both("bob")
        place = Place(tmp_path)
        alice = Messenger(security=place.security("alice"))
        alice.start()
        try:
            place.greet(alice)
            call = encode_incoming_rpc(TOLD, 1, bytes(limit_mb * MIB))
            for position in (1, 2):
                frame = PeerFrame(FrameType.BATCH, "alice", "bob", 7, 1, position, 1, 1, call)
                place.ask(alice, frame)
            assert not process.count("without an end"), "its connection was ended"
        finally:
            alice.close()
    finally:
        house.close()


def serve_requests(home: str, ready: Connection) -> None:
    server = Server(lambda request: request.body, "tcp://127.0.0.1:*", home=home)
    ready.send(server.endpoint)
    server.run()


def publish(home: str, ready: Connection) -> None:
    publisher = Publisher("tcp://127.0.0.1:*", home=Path(home))
    ready.send(publisher.endpoint)
    while True:
        select.select([publisher.fileno()], [], [], publisher.turn())


@pytest.mark.parametrize(("serve", "size_bytes"), [(serve_requests, 4 * MIB), (publish, 60 << 10)])
def test_a_stranger_cannot_fill_a_plain_server_with_a_message_without_an_end(
    tmp_path: Path, serve: Callable[[str, Connection], None], size_bytes: int
) -> None:
    spawn = multiprocessing.get_context("spawn")
    ready, told = spawn.Pipe(duplex=False)
    server: Any = spawn.Process(target=serve, args=(str(tmp_path), told), daemon=True)
    server.start()
    try:
        assert ready.poll(DEADLINE_S)
        port = int(ready.recv().rsplit(":", 1)[1])

        def attack() -> None:
            with socket.create_connection(("127.0.0.1", port), DEADLINE_S) as stranger:
                stranger.sendall(
                    GREETING % b"NULL".ljust(20, b"\0") + b"\x04\x1c\x05READY\x0bSocket-Type\0\0\0\6DEALER"
                )
                answer = b""
                while b"READY" not in answer:
                    answer += stranger.recv(4096)
                part = b"\x03" + struct.pack(">Q", size_bytes) + bytes(size_bytes)
                with pytest.raises(OSError):  # noqa: PT011 (reset or broken pipe)
                    deque(map(stranger.sendall, itertools.repeat(part, 1000 * MIB // size_bytes)), maxlen=0)

        peak_mib = peak_of(server.pid, attack)
        print(f"{serve.__name__}: {peak_mib:.0f} MiB above rest")
        assert MIN_MIB < peak_mib < ONE_MIB_MAX
    finally:
        server.kill()
        server.join()


def test_a_reader_that_is_late_ends_nobody(tmp_path: Path) -> None:
    """250 whole messages wait, some of them for a second, before any is read."""
    with zmq.Context() as context:
        log, options = logging.getLogger("test"), {zmq.MAXMSGSIZE: MIB, zmq.RCVHWM: 0}
        listener = Listener("tcp://127.0.0.1:*", options, len, log, OSError, home=tmp_path)
        dealer = context.socket(zmq.DEALER)
        dealer.connect(listener.endpoint)
        monitor = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        try:
            for count in (1, 250):
                for _ in range(count):
                    dealer.send(bytes(MIB), copy=False)
                assert not monitor.poll(1000 if count > 1 else 0)
                sizes: list[int] = []
                while len(sizes) < count:
                    assert listener.socket.poll(DEADLINE_S * 1000), f"{len(sizes)} of {count} have come"
                    listener.receive(10, lambda route, caller, size: sizes.append(size))  # noqa: B023
                assert sizes == [MIB] * count
            assert not monitor.poll(0), "the connection was ended"
        finally:
            dealer.disable_monitor()
            dealer.close(0)
            listener.close(0)


def test_a_connection_that_can_not_be_watched_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_file(descriptor: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    with zmq.Context() as context:
        log, options = logging.getLogger("test"), {zmq.MAXMSGSIZE: MIB}
        listener = Listener("tcp://127.0.0.1:*", options, len, log, OSError, home=tmp_path)
        dealer = context.socket(zmq.DEALER)
        monitor = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
        try:
            monkeypatch.setattr(os, "dup", no_file)
            dealer.connect(listener.endpoint)
            assert monitor.poll(DEADLINE_S * 1000), "it stands"
        finally:
            monkeypatch.undo()
            dealer.disable_monitor()
            dealer.close(0)
            listener.close(0)
            listener.close(0)  # once more does nothing


def test_what_is_unread_behind_a_sent_reply_is_no_evidence() -> None:
    """Sending has taken the news of it from ZeroMQ's descriptor, at which the watch looks for what waits."""
    told: list[None] = []
    listener = PeerListener.__new__(PeerListener)
    listener._watch = Mock(reading=lambda: told.append(None))
    listener._plain_get = lambda option: 0
    assert not listener.has_unread()
    assert not told
    listener._plain_get = lambda option: zmq.POLLIN
    assert listener.has_unread()
    assert told


def test_more_large_messages_at_once_than_have_room_all_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("immortal.coordinator.messenger.limits.USUAL_SIZE_BYTES", 16 * MIB)
    data, count = bytes(16 * MIB), 12
    came: list[int] = []
    with ExitStack() as stack:
        receiver = Messenger()
        stack.callback(receiver.close)
        senders = [Messenger() for _ in range(count)]
        for sender in senders:
            stack.callback(sender.close)

        def take(received: Received) -> None:
            came.append(len(received.parts[0]))
            received.reply()

        receiver.start()
        endpoint = receiver.listen("tcp://127.0.0.1:*", take, most_bytes=lambda: 0)
        for sender in senders:
            sender.start()
            sender.send_message(endpoint, data)
        until(lambda: len(came) == count)
    assert came == [len(data)] * count
