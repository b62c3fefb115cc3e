"""Two messengers with a proxy between them: what the network does to connections, without coordinators."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import zmq

from immortal.coordinator.messenger import limits as messenger_limits
from immortal.messenger import Counters, Messenger, Received, RetryPolicy
from tests.helpers.lossy import LossyNetwork
from tests.helpers.proxy import DEADLINE_S, FaultProxy

ROOT = Path(__file__).parents[2]
COUNT = 300
GREETING_SIZE_BYTES = 64  # of ZMTP 3; a command follows it: flags, size, READY and its properties


class Receiver:
    """Notes what its loop is given, replies the same, and lets a test wait for the ``n``-th."""

    def __init__(self) -> None:
        self.arrived: list[int] = []
        self._changed = threading.Condition()

    def loop(self, received: Received) -> None:
        with self._changed:
            self.arrived.append(int(received.parts[0]))
            self._changed.notify_all()
        received.reply(received.parts[0])

    def until(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.arrived) >= count, DEADLINE_S), len(self.arrived)


class Sender:
    """Sends numbers, from 0, and notes the replies."""

    def __init__(self, messenger: Messenger) -> None:
        self._messenger = messenger
        self.replies: list[int] = []
        self.sent = 0
        self._changed = threading.Condition()

    def send(self, endpoint: str, count: int) -> None:
        for _ in range(count):
            self._messenger.send_message(endpoint, b"%d" % self.sent, self._replied)
            self.sent += 1

    def _replied(self, parts: list[bytes]) -> None:
        with self._changed:
            self.replies.append(int(parts[0]))
            self._changed.notify_all()

    def until_all(self) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.replies) >= self.sent, DEADLINE_S), len(self.replies)


def until(messenger: Messenger, condition: object) -> Counters:
    """The counters for which the condition holds."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition(counters := messenger.counters()):  # type: ignore[operator]
        assert time.monotonic() < deadline_s, counters
    return counters


def test_a_connection_that_is_played_again_gives_nothing_twice() -> None:
    """All bytes of a connection come once more, as from its sender, whose own connection it takes over."""
    receiver = Receiver()
    with Messenger() as servers, Messenger() as messenger:
        endpoint = servers.listen("tcp://127.0.0.1:*", receiver.loop)
        with FaultProxy(endpoint, record=True) as proxy:
            sender = Sender(messenger)
            sender.send(proxy.endpoint, COUNT)
            sender.until_all()
            proxy.set(refusing=True)  # else the sender takes its place back before anything is read
            proxy.cut()
            (recording,) = proxy.recordings
            before = servers.counters().duplicates_dropped
            handshake_size_bytes = GREETING_SIZE_BYTES + 2 + recording[GREETING_SIZE_BYTES + 1]
            replayed = proxy.play_again(recording[:handshake_size_bytes])
            answer = b""
            while b"READY" not in answer:  # ZeroMQ takes nothing before that
                answer += replayed.recv(1000)
            replayed.sendall(recording[handshake_size_bytes:])
            until(servers, lambda counters: counters.duplicates_dropped >= before + COUNT)
            proxy.set(refusing=False)
            sender.send(proxy.endpoint, COUNT)
            sender.until_all()
            replayed.close()
    assert receiver.arrived == sender.replies == list(range(2 * COUNT))


def test_a_black_hole_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing comes back and nothing ends: the connection is given up, and made anew where that helps."""
    monkeypatch.setattr(messenger_limits, "SILENCE_NS", 200_000_000)
    receiver = Receiver()
    with Messenger() as servers, Messenger(retry=RetryPolicy(delay_ns_min=20_000_000)) as messenger:
        endpoint = servers.listen("tcp://127.0.0.1:*", receiver.loop)
        with FaultProxy(endpoint) as proxy:
            sender = Sender(messenger)
            sender.send(proxy.endpoint, COUNT)
            sender.until_all()
            accepted = proxy.accepted
            proxy.set(black_hole=True)
            sender.send(proxy.endpoint, COUNT)
            proxy.until(lambda: proxy.accepted > accepted)
            proxy.set(black_hole=False)
            proxy.cut()  # the handshake that the hole has swallowed
            sender.until_all()
            assert messenger.counters().silences >= 1
    assert receiver.arrived == sender.replies == list(range(2 * COUNT))


def test_a_reply_that_takes_its_time_is_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """The receiver answers what comes again at once, also while there is no reply."""
    monkeypatch.setattr(messenger_limits, "SILENCE_NS", 200_000_000)
    held: list[Received] = []
    replied = threading.Event()
    retry = RetryPolicy(delay_ns_min=10_000_000, delay_ns_max=20_000_000)
    with Messenger() as servers, Messenger(retry=retry) as messenger:
        endpoint = servers.listen("tcp://127.0.0.1:*", held.append)
        messenger.send_message(endpoint, b"x", lambda parts: replied.set())
        until(messenger, lambda counters: counters.replies_awaited >= 30)
        held[0].reply()
        assert replied.wait(DEADLINE_S)
        assert messenger.counters().silences == 0
    assert len(held) == 1


@pytest.mark.parametrize("parts", [1, 3])
def test_cuts_while_replies_of_several_parts_come_in(parts: int) -> None:
    """A reply is whole, and its own message's, wherever the connection ends."""
    wrong: list[list[bytes]] = []
    done = threading.Semaphore(0)

    def loop(received: Received) -> None:
        received.reply(*received.parts * parts)

    with (
        Messenger() as servers,
        Messenger(retry=RetryPolicy(delay_ns_min=20_000_000)) as messenger,
        FaultProxy(servers.listen("tcp://127.0.0.1:*", loop)) as proxy,
    ):
        for number in range(20 * COUNT):
            expected = [b"%d" % number] * parts

            def replied(reply: list[bytes], expected: list[bytes] = expected) -> None:
                if reply != expected:
                    wrong.append(reply)
                done.release()

            messenger.send_message(proxy.endpoint, b"%d" % number, replied)
            if number % COUNT == COUNT - 1:
                proxy.cut()
        for _ in range(20 * COUNT):
            assert done.acquire(timeout=DEADLINE_S)
    assert wrong == []


@pytest.mark.parametrize("ordered", [True, False])
def test_a_network_that_loses_and_changes_the_order(ordered: bool) -> None:
    receiver = Receiver()
    retry = RetryPolicy(delay_ns_min=30_000_000, delay_ns_max=60_000_000)
    with Messenger() as servers, Messenger(retry=retry) as messenger:
        endpoint = servers.listen("tcp://127.0.0.1:*", receiver.loop, ordered=ordered)
        with LossyNetwork(endpoint, loss=0.05, reordered=0.2, late_s=0.002) as network:
            sender = Sender(messenger)
            sender.send(network.endpoint, COUNT)
            sender.until_all()
            assert messenger.counters().retried >= 1
            assert network.lost_count >= 1
    assert sorted(receiver.arrived) == sorted(sender.replies) == list(range(sender.sent))
    assert receiver.arrived == sorted(receiver.arrived) if ordered else servers.counters().early_kept == 0


ENDS_BADLY = """
import sys, time, zmq
from immortal.coordinator.messenger import listener
from immortal.messenger import Messenger
listener.HEARTBEAT_INTERVAL_MS = 20  # where there is one
messenger = Messenger()
endpoint = messenger.listen("tcp://127.0.0.1:*", lambda received: None)
context = zmq.Context()

def connect():
    peer = context.socket(zmq.DEALER)
    peer.setsockopt(zmq.ROUTING_ID, b"one and the same")
    peer.setsockopt(zmq.SNDHWM, 0)
    if sys.argv[1] == "pings":
        peer.setsockopt(zmq.HEARTBEAT_IVL, 1)
        peer.setsockopt(zmq.HEARTBEAT_TIMEOUT, 60_000)
    peer.connect(endpoint)
    return peer

def receive_for(seconds):
    deadline_s = time.monotonic() + seconds
    while time.monotonic() < deadline_s:
        messenger.process()

first = connect()
if sys.argv[1] == "taken over":
    first.send(b"x")
    receive_for(0.1)
    second = connect()
    second.send(b"x")
    receive_for(0.1)
    for _ in range(100):
        first.send(b"nobody reads it")
else:
    for _ in range(200):
        for _ in range(100):
            first.send(b"more than is taken at once")
        time.sleep(0.001)  # between them are pings
time.sleep(0.1)
first.close(60_000)  # once all is sent
time.sleep(0.2)  # several heartbeats
receive_for(0.3)
if sys.argv[1] != "taken over":
    deadline_s = time.monotonic() + 50
    while messenger.counters().malformed < 20_000 and time.monotonic() < deadline_s:
        messenger.process()
print("alive", messenger.counters().malformed)
"""


@pytest.mark.parametrize("how", ["full", "pings", "taken over"])
def test_a_connection_that_breaks_unread_does_not_end_the_process(how: str) -> None:
    """ZeroMQ ends the process where a heartbeat is due on a connection that broke while nothing more was read from it:
    since too much waited already, or another connection had taken its place."""
    command = [sys.executable, "-c", ENDS_BADLY, how]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended
    if how != "taken over":
        assert int(ended.stdout.split()[1]) >= 20_000, "all that came before the end was read"


def test_nothing_in_zeromq_stops_reading_or_has_a_heartbeat() -> None:
    """Both are what the assertion takes: see keep_alive()."""
    with Messenger() as messenger:
        endpoint = messenger.listen("tcp://127.0.0.1:*", lambda received: received.reply())
        messenger.send_message(endpoint, b"x")
        until(messenger, lambda counters: counters.acknowledged)
        for source in (messenger._listeners.all[0], messenger._links[endpoint]):
            assert source._socket.getsockopt(zmq.HEARTBEAT_IVL) == 0
            assert source._socket.getsockopt(zmq.RCVHWM) == 0
            assert source._socket.getsockopt(zmq.TCP_KEEPALIVE) == 1


def test_inproc_listeners_that_come_and_go_in_other_threads() -> None:
    """Each listener replies to all that it is given before it goes; the sender goes on with the next."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    endpoint = "inproc://comes-and-goes"
    with Messenger(context=context) as messenger:
        sender = Sender(messenger)
        for _ in range(10):
            receiver = Receiver()
            with Messenger(context=context) as servers:
                servers.listen(endpoint, receiver.loop)
                sender.send(endpoint, COUNT)
                receiver.until(COUNT)
                sender.until_all()
            assert receiver.arrived == list(range(sender.sent - COUNT, sender.sent))
        assert sender.replies == list(range(10 * COUNT))
    context.destroy(linger=0)
