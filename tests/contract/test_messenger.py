"""The messenger's promises, the same over tcp, ipc and inproc, in plain and with CURVE; waiting is for descriptors."""

from __future__ import annotations

import contextlib
import itertools
import random
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from msgspec.structs import replace

from immortal.coordinator.messenger import limits as messenger_limits
from immortal.coordinator.messenger import link as messenger_link
from immortal.coordinator.messenger.envelope import (
    ENVELOPE_SIZE_BYTES,
    Kind,
    decode_envelope,
    decode_missing,
    decode_parts,
    encode_message,
    encode_parts,
    encode_reply,
)
from immortal.coordinator.messenger.limits import (
    LARGE_PART_SIZE_BYTES,
    PIGGYBACKED_MAX,
    RECONNECT_REFUSED_NS,
    REPLY_DELAY_NS_MAX,
)
from immortal.coordinator.messenger.link import Link
from immortal.coordinator.messenger.listener import Listener
from immortal.messenger import (
    AlreadyRepliedError,
    ClientRoute,
    EndpointError,
    EndpointInUseError,
    MessageTooLargeError,
    Messenger,
    MessengerClosedError,
    MessengerError,
    Received,
    RetryPolicy,
    Role,
)
from immortal.protocol.client_frames import ClientFrame, ClientFrameType, encode_client_frame
from tests.helpers.effort import effort
from tests.helpers.messengers import WAIT_SECONDS, House, echo, listen_when_free


@pytest.fixture(params=["tcp", "ipc", "inproc", "tcp+curve", "ipc+curve"])
def house(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[House]:
    house = House(request.param, tmp_path)
    yield house
    for messenger in house.messengers:
        messenger.close()
    house.context.destroy(linger=0)


@pytest.fixture(params=["tcp", "ipc", "tcp+curve"])
def networked(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[House]:
    house = House(request.param, tmp_path)
    yield house
    for messenger in house.messengers:
        messenger.close()
    house.context.destroy(linger=0)


def test_round_trip(house: House) -> None:
    receiver, sender = house.messenger(incarnation=7), house.messenger(incarnation=9)
    arrived: list[Received] = []

    def loop(received: Received) -> None:
        arrived.append(received)
        received.reply(b"answer", *received.parts)

    endpoint = receiver.listen(house.endpoint(), loop)
    replies: list[list[bytes]] = []
    sender.send_message(endpoint, b"one", replies.append)
    sender.send_message(endpoint, [b"a", b"", b"c" * 100_000], replies.append)
    sender.send_message(endpoint, [], replies.append)
    assert sender.pending_count(endpoint) == 3
    house.drive(lambda: len(replies) == 3)
    assert replies == [[b"answer", b"one"], [b"answer", b"a", b"", b"c" * 100_000], [b"answer"]]
    assert [received.sender for received in arrived] == [9, 9, 9]
    assert {received.endpoint for received in arrived} == {endpoint}
    assert sender.pending_count(endpoint) == 0
    assert sender.connected(endpoint)
    assert not sender.connected("tcp://127.0.0.1:9")
    assert sender.counters().sent == sender.counters().acknowledged == receiver.counters().received == 3


def test_a_message_without_callback_is_acknowledged(house: House) -> None:
    receiver, sender = house.messenger(), house.messenger()
    endpoint = receiver.listen(house.endpoint(), echo)
    sender.send_message(endpoint, b"x")
    house.drive(lambda: sender.pending_count(endpoint) == 0)
    assert sender.counters().acknowledged == 1


def test_a_clients_frame_goes_to_the_loop_of_clients_which_may_answer_as_often_as_it_likes(house: House) -> None:
    messages: list[Received] = []
    frames: list[tuple[str | None, bytes]] = []

    def client_loop(route: ClientRoute, data: bytes) -> None:
        frames.append((route.peer, data))
        for answer in (b"first ", b"second "):
            route.send(answer + data)

    security = house.security
    if security is not None:
        security = replace(security, roles={security.own.public: Role.CLIENT})
    receiver = house.messenger(security=security)
    endpoint = receiver.listen(house.endpoint(), messages.append, client_loop=client_loop)
    with house.raw(zmq.DEALER) as client:
        client.setsockopt(zmq.LINGER, 0)
        client.connect(endpoint)
        frame = encode_client_frame(ClientFrame(ClientFrameType.HELLO, "c", "b"))
        client.send(frame)
        house.drive(lambda: frames)
        for answer in (b"first ", b"second "):
            assert client.poll(int(WAIT_SECONDS * 1000))
            assert client.recv() == answer + frame
    assert (messages, frames) == ([], [(house.peer, frame)])
    assert receiver.counters().received == 1


def test_to_itself(house: House) -> None:
    messenger = house.messenger()
    endpoint = messenger.listen(house.endpoint(), echo)
    replies: list[list[bytes]] = []
    messenger.send_message(endpoint, b"me", replies.append)
    house.drive(lambda: replies)
    assert replies == [[b"me"]]


def test_replies_may_come_later_and_in_any_order(house: House) -> None:
    receiver, sender = house.messenger(), house.messenger()
    held: list[Received] = []
    endpoint = receiver.listen(house.endpoint(), held.append)
    replies: list[bytes] = []
    for number in range(5):
        sender.send_message(endpoint, b"%d" % number, lambda parts: replies.append(parts[0]))
    house.drive(lambda: len(held) == 5)
    house.settle()
    assert replies == []
    assert sender.pending_count(endpoint) == 5
    for received in reversed(held):
        received.reply(*received.parts)
    house.drive(lambda: len(replies) == 5)
    assert replies == [b"4", b"3", b"2", b"1", b"0"]


def test_one_reply_each(house: House) -> None:
    receiver, sender = house.messenger(), house.messenger()
    held: list[Received] = []
    endpoint = receiver.listen(house.endpoint(), held.append)
    sender.send_message(endpoint, b"x")
    house.drive(lambda: held)
    with pytest.raises(TypeError):
        held[0].reply("text")  # type: ignore[arg-type]
    held[0].reply()
    with pytest.raises(AlreadyRepliedError):
        held[0].reply()


def test_a_reply_after_close_does_nothing(house: House) -> None:
    receiver, sender = house.messenger(), house.messenger()
    held: list[Received] = []
    endpoint = receiver.listen(house.endpoint(), held.append)
    sender.send_message(endpoint, b"x")
    house.drive(lambda: held)
    house.close(receiver)
    held[0].reply(b"too late")


def test_several_loops(house: House) -> None:
    receiver, sender = house.messenger(), house.messenger()
    first: list[bytes] = []
    second: list[bytes] = []

    def loop_into(arrived: list[bytes]) -> Callable[[Received], None]:
        def loop(received: Received) -> None:
            arrived.append(received.parts[0])
            received.reply()

        return loop

    one = receiver.listen(house.endpoint(), loop_into(first))
    two = receiver.listen(house.endpoint(), loop_into(second))
    for number in range(10):
        sender.send_message(one if number % 2 else two, b"%d" % number)
    house.drive(lambda: sender.pending_count(one) + sender.pending_count(two) == 0)
    assert first == [b"1", b"3", b"5", b"7", b"9"]
    assert second == [b"0", b"2", b"4", b"6", b"8"]


def test_callbacks_run_before_server_loops(house: House) -> None:
    """Both a reply and a message wait; the message came first."""
    middle, other = house.messenger(), house.messenger()
    happened: list[str] = []
    held: list[Received] = []

    def middle_loop(received: Received) -> None:
        happened.append("server loop")
        received.reply()

    middle_endpoint = middle.listen(house.endpoint(), middle_loop)
    other_endpoint = other.listen(house.endpoint(), held.append)
    middle.send_message(other_endpoint, b"x", lambda parts: happened.append("callback"))
    other.send_message(middle_endpoint, b"connect")  # with CURVE, nobody gets in to one that sleeps
    house.drive(lambda: held and happened)
    happened.clear()
    house.messengers.remove(middle)  # it sleeps while both arrive
    other.send_message(middle_endpoint, b"y")
    other.process()
    watched = select.poll()
    watched.register(middle._listeners.all[0].descriptor, select.POLLIN)
    end = time.monotonic() + WAIT_SECONDS
    while other.counters().sent < 2 or not watched.poll(10):
        other.process()
        assert time.monotonic() < end
    held[0].reply()
    other.process()
    watched = select.poll()
    watched.register(middle._links[other_endpoint].descriptor, select.POLLIN)
    assert watched.poll(WAIT_SECONDS * 1000)
    # The descriptors tell of news, perhaps of a connection only: hand over to the messenger when both have come.
    for ready in (middle._listeners.all[0]._socket, middle._links[other_endpoint]._socket):
        assert ready.poll(int(WAIT_SECONDS * 1000), zmq.POLLIN)
        messenger_source = middle._listeners.all[0] if ready.type == zmq.ROUTER else middle._links[other_endpoint]
        middle._poller.ready[messenger_source] = None  # the poll above took the news in
    middle.process()
    house.messengers.append(middle)
    assert happened == ["callback", "server loop"]


def test_order_is_kept_far_beyond_what_may_be_in_flight(house: House) -> None:
    receiver, sender = house.messenger(), house.messenger(in_flight_max=16)
    arrived: list[int] = []
    most = 0

    def loop(received: Received) -> None:
        nonlocal most
        arrived.append(int(received.parts[0]))
        most = max(most, receiver.counters().received - sender.counters().acknowledged)
        received.reply()

    endpoint = receiver.listen(house.endpoint(), loop, ordered=True)
    for number in range(3000):
        sender.send_message(endpoint, b"%d" % number)
    house.drive(lambda: sender.pending_count(endpoint) == 0)
    assert arrived == list(range(3000))
    assert 2 <= most <= 16
    assert sender.counters().retried == 0


def test_a_withheld_reply_stops_the_link_after_what_may_be_in_flight(house: House) -> None:
    receiver, sender = house.messenger(), house.messenger(in_flight_max=8)
    held: list[Received] = []
    endpoint = receiver.listen(house.endpoint(), held.append)
    for number in range(20):
        sender.send_message(endpoint, b"%d" % number)
    house.drive(lambda: len(held) == 8)
    for received in held[1:]:
        received.reply()
    house.drive(lambda: sender.pending_count(endpoint) == 13)
    house.settle()
    assert len(held) == 8
    held[0].reply()
    house.drive(lambda: len(held) == 16)


@pytest.mark.parametrize("seed", range(3))
def test_exactly_once_whatever_is_lost_or_comes_twice(house: House, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A third of messages and replies is lost, retries are due at once: each arrives once, is called back once."""
    chance = random.Random(seed)
    send_reply, accept = Listener._send, Listener._accept

    def lossy_reply(self: Listener, *arguments: Any) -> None:
        if chance.random() > 0.33:
            send_reply(self, *arguments)

    def lossy_accept(self: Listener, *arguments: Any) -> Received | None:
        return accept(self, *arguments) if chance.random() > 0.33 else None

    monkeypatch.setattr(Listener, "_send", lossy_reply)
    monkeypatch.setattr(Listener, "_accept", lossy_accept)
    receiver = house.messenger()
    sender = house.messenger(in_flight_max=64, retry=RetryPolicy(delay_ns_min=10, delay_ns_max=1000))
    arrived: list[int] = []
    replies: list[int] = []
    held: list[Received] = []

    def loop(received: Received) -> None:
        arrived.append(int(received.parts[0]))
        held.append(received)

    def callback(parts: list[bytes]) -> None:
        replies.append(int(parts[0]))

    endpoint = receiver.listen(house.endpoint(), loop)
    for number in range(500):
        sender.send_message(endpoint, b"%d" % number, callback)

    def done() -> bool:
        house.clock.now_ns += 1000
        while held and chance.random() < 0.8:
            received = held.pop(chance.randrange(len(held)))
            received.reply(*received.parts)
        for messenger in house.messengers:
            messenger.process()
        return sender.pending_count(endpoint) == 0

    end = time.monotonic() + WAIT_SECONDS
    while not done():
        assert time.monotonic() < end
    assert sorted(arrived) == list(range(500))
    assert sorted(replies) == list(range(500))
    assert sender.counters().retried > 100
    assert receiver.counters().duplicates_dropped > 50
    assert receiver.counters().replies_resent > 10
    assert receiver.counters().refused == 0


def test_an_unanswered_message_is_sent_again_and_again_but_given_once(house: House) -> None:
    receiver, sender = house.messenger(), house.messenger(random=lambda: 0.0)
    held: list[Received] = []
    endpoint = receiver.listen(house.endpoint(), held.append)
    replies: list[list[bytes]] = []
    sender.send_message(endpoint, b"x", replies.append)
    house.drive(lambda: held)
    delays_s: list[float] = []
    for attempt in range(1, 12):
        sent_ns = house.clock.now_ns
        while sender.counters().retried < attempt:
            deadline_ns = sender.next_deadline_ns()
            assert deadline_ns is not None
            house.clock.now_ns = max(deadline_ns, house.clock.now_ns)
            sender.process()
        delays_s.append(round((house.clock.now_ns - sent_ns) / 1e9, 3))
        house.drive(lambda attempt=attempt: sender.counters().replies_awaited == attempt)
        assert receiver.counters().duplicates_dropped == sender.counters().retried == attempt
    assert delays_s == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30, 30]
    held[0].reply(b"at last")
    house.drive(lambda: replies)
    assert replies == [[b"at last"]]
    assert len(held) == 1


def test_a_reply_that_is_no_longer_kept_still_acknowledges(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    receiver, sender = house.messenger(), house.messenger()
    send_reply = Listener._send
    monkeypatch.setattr(Listener, "_send", lambda *arguments: None)
    arrived: list[bytes] = []

    def loop(received: Received) -> None:
        arrived.append(received.parts[0])
        received.reply(received.parts[0] * 1000)

    endpoint = receiver.listen(house.endpoint(), loop)
    receiver._listeners.all[0]._inbox.link(sender.incarnation, 1, house.peer).replies_size_bytes_max = 1500
    replies: list[list[bytes]] = []
    sender.send_message(endpoint, b"a", replies.append)
    sender.send_message(endpoint, b"b", replies.append)
    house.drive(lambda: len(arrived) == 2)
    monkeypatch.setattr(Listener, "_send", send_reply)
    for count in (1, 2):  # nothing tells the sender that more than the first has arrived
        house.clock.now_ns += 2_000_000_000
        house.drive(lambda count=count: len(replies) == count)
    assert replies == [[], [b"b" * 1000]]
    assert arrived == [b"a", b"b"]
    sender.send_message(endpoint, b"c", replies.append)
    house.drive(lambda: len(replies) == 3)
    assert sender.counters().acknowledged == 3
    assert sender.counters().replies_expired == 1


@pytest.mark.parametrize("in_flight_max", [8, 1024])
def test_receiver_closed_and_opened_again(house: House, in_flight_max: int) -> None:
    sender = house.messenger(in_flight_max=in_flight_max)
    first, second = house.messenger(), house.messenger()
    arrived_first: list[int] = []
    arrived_second: list[int] = []
    replies: list[int] = []

    def first_loop(received: Received) -> None:
        arrived_first.append(int(received.parts[0]))
        if len(arrived_first) <= 20:
            received.reply()

    def second_loop(received: Received) -> None:
        arrived_second.append(int(received.parts[0]))
        received.reply()

    def send(first_number: int, last_number: int) -> None:
        for number in range(first_number, last_number + 1):
            sender.send_message(endpoint, b"%d" % number, lambda parts, number=number: replies.append(number))

    endpoint = first.listen(house.fixed_endpoint(), first_loop, ordered=True)
    send(1, 50)
    house.drive(lambda: len(replies) == 20 and len(arrived_first) > 20)
    house.close(first)
    house.drive(lambda: not sender.connected(endpoint))
    send(51, 100)
    listen_when_free(second, endpoint, second_loop, ordered=True)
    send(101, 2500)
    house.drive(lambda: sender.pending_count(endpoint) == 0)
    assert arrived_second == list(range(21, 2501))
    assert replies == list(range(1, 2501))
    assert second.counters().refused == 0


def test_what_comes_too_early_waits_until_what_is_missing_has_come(house: House) -> None:
    """A message that was lost with a connection, and those behind it that were not."""
    receiver = house.messenger()
    held: list[Received] = []
    endpoint = receiver.listen(house.endpoint(), held.append, ordered=True)
    sender = house.raw(zmq.DEALER)
    sender.connect(endpoint)
    for message_id in (1, 3, 4, 2, 4, 3, 2, 4):
        sender.send_multipart([encode_message(1, 1, message_id, 1, 0), b"%d" % message_id])
    house.drive(lambda: len(held) == 4)
    assert [received.parts for received in held] == [[b"1"], [b"2"], [b"3"], [b"4"]]
    report = sender.recv()
    envelope = decode_envelope(report[:ENVELOPE_SIZE_BYTES])  # all that builds before reports read
    assert (envelope.kind, envelope.message_id) == (Kind.REPLY_PENDING, 3)
    assert decode_missing(decode_parts(report, ENVELOPE_SIZE_BYTES)[0]) == [2]
    assert receiver.counters().early_kept == 2
    assert receiver.counters().duplicates_dropped == 4
    sender.close(0)


def test_without_order_what_comes_early_is_given_at_once_and_what_was_missing_once_it_comes(house: House) -> None:
    receiver = house.messenger()
    held: list[Received] = []
    endpoint = receiver.listen(house.endpoint(), held.append)
    sender = house.raw(zmq.DEALER)
    sender.connect(endpoint)
    for message_id in (1, 3, 7, 2, 4, 3, 2, 7):
        sender.send_multipart([encode_message(1, 1, message_id, 1, 0), b"%d" % message_id])
    house.drive(lambda: receiver.counters().duplicates_dropped == 3)
    assert [received.parts for received in held] == [[b"1"], [b"3"], [b"7"], [b"2"], [b"4"]]
    assert receiver.counters().early_kept == 0
    far = [encode_message(1, 1, 8192, 1, 0), encode_message(1, 1, 8193, 1, 0), encode_message(1, 1, 6, 1, 0)]
    for envelope in far:
        sender.send_multipart([envelope, b"far"])
    house.drive(lambda: len(held) == 7)
    assert receiver.counters().refused == 1
    sender.close(0)


def test_what_is_lost_unnoticed_at_a_reconnect_does_not_break_the_order(
    networked: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sender's thread is late: what it sends goes down with the old connection, and more goes over the new one
    before it looks whether there is one."""
    house = networked
    receiver = house.messenger()
    arrived: list[int] = []

    def loop(received: Received) -> None:
        arrived.append(int(received.parts[0]))
        received.reply()

    endpoint = receiver.listen(house.endpoint(), loop, ordered=True)
    with Forwarder(endpoint) as forwarder:
        sender = house.messenger()

        numbers = itertools.count()

        def send(count: int) -> None:
            for number in itertools.islice(numbers, count):
                sender.send_message(forwarder.endpoint, b"%d" % number)
                sender.process()

        send(10)
        house.drive(lambda: sender.pending_count(forwarder.endpoint) == 0)
        link = sender._links[forwarder.endpoint]
        with monkeypatch.context() as late:
            late.setattr(link, "_plain_send", lambda *arguments, **options: None)
            send(10)
            late.undo()
            late.setattr(link, "_check_connection", lambda now_ns: None)
            send(10)
            house.drive(lambda: receiver.counters().early_kept == 10)
        assert arrived == list(range(10))
        forwarder.cut()
        house.drive(lambda: sender.pending_count(forwarder.endpoint) == 0)
        sender.drop(forwarder.endpoint)
    assert arrived == list(range(30))


def test_a_receiver_that_starts_anew_knows_what_need_not_come(house: House) -> None:
    """Replies came in another order: what is behind the gaps is not early."""
    sender, first, second = house.messenger(), house.messenger(), house.messenger()
    endpoint = house.fixed_endpoint()
    held: list[Received] = []
    arrived: list[bytes] = []
    first.listen(endpoint, held.append, ordered=True)
    for number in range(6):
        sender.send_message(endpoint, b"%d" % number)
    house.drive(lambda: len(held) == 6)
    for index in (1, 2, 4):
        held[index].reply()
    house.drive(lambda: sender.pending_count(endpoint) == 3)
    house.close(first)
    house.drive(lambda: not sender.connected(endpoint))

    def loop(received: Received) -> None:
        arrived.append(received.parts[0])
        received.reply()

    listen_when_free(second, endpoint, loop, ordered=True)
    house.drive(lambda: sender.pending_count(endpoint) == 0)
    assert arrived == [b"0", b"3", b"5"]
    assert second.counters().early_kept == 0


def test_receiver_keeps_coming_and_going(house: House) -> None:
    """Each receiver answers a few and goes, with the rest in flight; to each of them, first deliveries are in order."""
    sender = house.messenger()
    endpoint = house.fixed_endpoint()
    replies: list[int] = []
    chance = random.Random(1)
    number = 0
    for _ in range(8):
        receiver = house.messenger()
        arrived: list[int] = []
        answers = chance.randrange(1, 400)

        def loop(received: Received, arrived: list[int] = arrived, answers: int = answers) -> None:
            arrived.append(int(received.parts[0]))
            if len(arrived) <= answers:
                received.reply()

        listen_when_free(receiver, endpoint, loop, ordered=True)
        for _ in range(500):
            number += 1
            sender.send_message(endpoint, b"%d" % number, lambda parts, number=number: replies.append(number))
        wanted = len(replies) + answers
        house.drive(lambda wanted=wanted: len(replies) >= wanted)
        assert arrived == list(range(arrived[0], arrived[0] + len(arrived)))
        house.close(receiver)
    last = house.messenger()
    listen_when_free(last, endpoint, echo)
    house.drive(lambda: sender.pending_count(endpoint) == 0)
    assert replies == list(range(1, number + 1))


def test_a_connection_counts_as_made_from_its_handshake_to_its_end(networked: House) -> None:
    house = networked
    sender, endpoint = house.messenger(), house.fixed_endpoint()
    assert not sender.connected(endpoint)
    sender.send_message(endpoint, b"1")
    sender.process()
    assert (sender.connected(endpoint), sender.connected_since_ns(endpoint)) == (False, None)
    assert sender._links[endpoint].silence_deadline_ns is None, "nobody is there who could be silent"
    assert sender.counters().sent == 0
    for number in (1, 2):
        house.clock.now_ns += 1_000_000
        made_ns = house.clock.now_ns
        receiver = house.messenger()
        listen_when_free(receiver, endpoint, echo)
        house.drive(lambda number=number: sender.counters().acknowledged == number)
        house.clock.now_ns += 1
        sender.process()
        assert (sender.connected(endpoint), sender.connected_since_ns(endpoint)) == (True, made_ns)
        assert sender._links[endpoint].reopen_due_ns is None
        house.close(receiver)
        house.drive(lambda: not sender.connected(endpoint))
        assert sender.connected_since_ns(endpoint) is None
        sender.send_message(endpoint, b"2")
    receiver = house.messenger()
    listen_when_free(receiver, endpoint, echo)
    house.drive(lambda: sender.connected(endpoint))
    link = sender._links[endpoint]
    house.close(sender)
    assert not link.connected


def test_where_no_handshake_succeeds_there_is_no_connection(networked: House) -> None:
    """A failed handshake is told by the monitor as well, in one of three words."""
    house = networked
    receiver, sender = house.messenger(), house.messenger()
    endpoint = receiver.listen(house.endpoint(), echo)
    sender.send_message(endpoint, b"1")
    house.drive(lambda: sender.counters().acknowledged == 1)
    link = sender._links[endpoint]
    for kind in messenger_link._FAILED:
        link.connected, link.reopen_due_ns = True, None
        told_ns = house.clock.now_ns
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(messenger_link.sockets, "monitored_events", lambda monitor, kind=kind: [(kind, 0)])
            link.read_monitor(told_ns)
            link.read_monitor(told_ns + 1)
        assert not link.connected
        assert link.reopen_due_ns == link.next_deadline_ns() == told_ns + RECONNECT_REFUSED_NS
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(messenger_link.sockets, "monitored_events", lambda monitor: [(messenger_link._CONNECTED, 0)])
        link.read_monitor(told_ns)
    assert link.connected
    assert link.reopen_due_ns is None, "it is not made anew"


def test_a_lost_connection_is_not_a_lost_message(networked: House) -> None:
    """The receiver lives on while its connections break: nothing comes twice, replies given meanwhile arrive."""
    house = networked
    receiver = house.messenger()
    arrived: list[int] = []
    held: list[Received] = []
    replies: list[int] = []

    def loop(received: Received) -> None:
        arrived.append(int(received.parts[0]))
        held.append(received)

    endpoint = receiver.listen(house.endpoint(), loop)
    with Forwarder(endpoint) as forwarder:
        sender = house.messenger()
        for number in range(100):
            sender.send_message(forwarder.endpoint, b"%d" % number, lambda parts, number=number: replies.append(number))
        house.drive(lambda: len(arrived) == 100)
        for _ in range(5):
            forwarder.cut()
            house.drive(lambda: not sender.connected(forwarder.endpoint))
            for received in held[:20]:
                received.reply()
            del held[:20]
            receiver.process()
            house.drive(lambda: sender.connected(forwarder.endpoint))
        house.drive(lambda: sender.pending_count(forwarder.endpoint) == 0)
        sender.drop(forwarder.endpoint)
    assert arrived == list(range(100))
    assert sorted(replies) == list(range(100))
    assert sender.counters().retried >= 100


class Forwarder:
    """Passes a stream on between a tcp port and ``endpoint``, and cuts its connections when told to."""

    def __init__(self, endpoint: str) -> None:
        self._target: Any
        if endpoint.startswith("tcp://"):
            host, port = endpoint.removeprefix("tcp://").split(":")
            self._family, self._target = socket.AF_INET, (host, int(port))
        else:
            self._family, self._target = socket.AF_UNIX, endpoint.removeprefix("ipc://")
        self._server = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._server.getsockname()[1]}"
        self._pairs: list[tuple[socket.socket, socket.socket]] = []

    def __enter__(self) -> Forwarder:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self.cut()

    def cut(self) -> None:
        while self._pairs:
            for side in self._pairs.pop():
                with contextlib.suppress(OSError):  # it ended by itself
                    side.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._server.accept()
            except OSError:
                return
            far = socket.socket(self._family)
            far.connect(self._target)
            self._pairs.append((near, far))
            for one, other in ((near, far), (far, near)):
                threading.Thread(target=self._copy, args=(one, other), daemon=True).start()

    def _copy(self, one: socket.socket, other: socket.socket) -> None:
        try:
            while data := one.recv(65536):
                other.sendall(data)
            other.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass


def test_a_reply_goes_where_its_message_came_from_last(house: House) -> None:
    """Each connection has a routing ID of its own, given or its own."""
    receiver = house.messenger()
    held: list[Received] = []
    endpoint = receiver.listen(house.endpoint(), held.append)
    senders = []
    for count, routing_id in enumerate([b"", b"", b"other"], start=1):
        sender = house.raw(zmq.DEALER)
        if routing_id:
            sender.setsockopt(zmq.ROUTING_ID, routing_id)
        sender.connect(endpoint)
        for message_id in (1, 2, 3):
            sender.send(encode_message(1, 1, message_id, 1, 0))
        house.drive(lambda count=count: receiver.counters().duplicates_dropped == 3 * (count - 1) and len(held) == 3)
        held[count - 1].reply(b"%d" % count)
        receiver.process()
        assert sender.poll(int(WAIT_SECONDS * 1000))
        answers: list[list[bytes]] = []
        while not answers or answers[-1] != [b"%d" % count]:
            answer = sender.recv()
            if decode_envelope(answer[:ENVELOPE_SIZE_BYTES]).kind != Kind.REPLY_PENDING:
                answers.append(decode_parts(answer, ENVELOPE_SIZE_BYTES))
        assert answers == [[b"%d" % number] for number in range(1, count + 1)]
        senders.append(sender)
    for sender in senders:
        sender.close(0)


def test_destination_comes_up_later(house: House) -> None:
    sender, receiver = house.messenger(), house.messenger()
    endpoint = house.fixed_endpoint()
    replies: list[bytes] = []
    for number in range(10):
        sender.send_message(endpoint, b"%d" % number, lambda parts: replies.append(parts[0]))
    sender.process()
    house.settle()
    assert sender.pending_count(endpoint) == 10
    assert sender.next_deadline_ns() is None or house.transport == "inproc"
    receiver.listen(endpoint, echo)
    house.drive(lambda: len(replies) == 10)
    assert replies == [b"%d" % number for number in range(10)]
    assert sender.counters().retried == 0


def test_drop_forgets_and_the_next_send_starts_over(house: House) -> None:
    sender, receiver = house.messenger(), house.messenger()
    held: list[Received] = []
    endpoint = receiver.listen(house.endpoint(), held.append)
    replies: list[bytes] = []

    def send(part: bytes) -> None:
        sender.send_message(endpoint, part, lambda parts: replies.append(parts[0]))

    send(b"old 1")
    house.drive(lambda: len(held) == 1)
    send(b"old 2")
    assert sender.drop(endpoint) == 2
    assert sender.drop(endpoint) == 0
    assert sender.pending_count(endpoint) == 0
    assert not sender.connected(endpoint)
    held.pop().reply(b"unheard")
    send(b"new")
    house.drive(lambda: held)
    assert held[0].parts == [b"new"]
    held[0].reply(b"heard")
    house.drive(lambda: replies)
    assert replies == [b"heard"]


def test_drop_within_a_callback(house: House) -> None:
    sender, receiver = house.messenger(), house.messenger()
    endpoint = receiver.listen(house.endpoint(), echo)
    dropped: list[int] = []
    replies: list[list[bytes]] = []
    sender.send_message(endpoint, b"1", lambda parts: dropped.append(sender.drop(endpoint)))
    for _ in range(5):
        sender.send_message(endpoint, b"2", replies.append)
    house.drive(lambda: dropped)
    assert dropped == [5]
    house.settle()
    assert replies == []


def test_endpoint_in_use(house: House) -> None:
    receiver, other, sender = house.messenger(), house.messenger(), house.messenger()
    endpoint = receiver.listen(house.endpoint(), echo)
    with pytest.raises(EndpointInUseError, match="is in use") as raised:
        other.listen(endpoint, echo)
    assert raised.value.endpoint == endpoint
    replies: list[list[bytes]] = []
    sender.send_message(endpoint, b"still there", replies.append)
    house.drive(lambda: replies)


def test_ipc_path_left_behind_by_a_dead_process(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "left"))
    messenger = Messenger()
    assert messenger.listen(f"ipc://{tmp_path}/left", echo) == f"ipc://{tmp_path}/left"
    messenger.close()


@pytest.mark.parametrize(
    "endpoint", ["tcp://127.0.0.1", "tcp://127.0.0.1:70000", "nonsense", "udp://x:1", "tcp://192.0.2.1:1"]
)
def test_not_an_endpoint_to_listen_at(endpoint: str) -> None:
    messenger = Messenger()
    with pytest.raises(EndpointError, match="can't listen"):
        messenger.listen(endpoint, echo)
    messenger.close()


@pytest.mark.parametrize(
    "endpoint",
    [
        "",
        "tcp://127.0.0.1",
        "tcp://h:0",
        "tcp://h:65536",
        "tcp://h:*",
        "tcp://*:1",
        "ipc://",
        "ipc://*",
        "ipc:///" + "x" * 107,
        "inproc://",
        "udp://h:1",
        "h:1",
    ],
)
def test_not_an_endpoint_to_send_to(endpoint: str) -> None:
    messenger = Messenger()
    with pytest.raises(EndpointError, match="can't be sent to"):
        messenger.send_message(endpoint, b"x")
    messenger.close()


def test_what_is_too_large_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messenger_limits, "PART_SIZE_BYTES_MAX", 10)
    messenger = Messenger()
    with pytest.raises(MessageTooLargeError, match="11 bytes"):
        messenger.send_message("tcp://127.0.0.1:1", b"x" * 11)
    with pytest.raises(MessageTooLargeError):
        messenger.send_message("tcp://127.0.0.1:1", [b""] * 1024)
    messenger.close()


def test_of_the_parts_that_no_loop_takes_one_is_kept(house: House) -> None:
    receiver, sender = house.messenger(), house.messenger()
    held: list[Received] = []
    endpoint = receiver.listen(house.endpoint(), held.append, parts_max=2)
    for count in (1, 2, 3, 250):
        sender.send_message(endpoint, [b"%d" % number for number in range(count)])
    house.drive(lambda: len(held) == 4)
    assert [len(received.parts) for received in held] == [1, 2, 3, 3]


def test_a_reply_that_is_too_large_is_refused_and_another_may_be_given(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messenger_limits, "REPLY_SIZE_BYTES_MAX", 10)
    receiver, sender = house.messenger(), house.messenger()
    held: list[Received] = []
    endpoint = receiver.listen(house.endpoint(), held.append)
    replies: list[list[bytes]] = []
    sender.send_message(endpoint, b"x", replies.append)
    house.drive(lambda: held)
    with pytest.raises(MessageTooLargeError, match="a reply of 11 bytes, at most 10"):
        held[0].reply(b"12345", b"678901")
    held[0].reply(b"12345", b"67890")
    house.drive(lambda: replies)
    assert replies == [[b"12345", b"67890"]]


def test_a_stranger_is_dropped_and_counted(house: House, caplog: pytest.LogCaptureFixture) -> None:
    receiver, sender = house.messenger(), house.messenger()
    endpoint = receiver.listen(house.endpoint(), echo)
    stranger = house.raw(zmq.DEALER)
    stranger.connect(endpoint)
    garbage = [
        [b""],
        [b"hello"],
        [b"x" * 48, b"y"],
        [b"\0" * 48],
        [encode_reply(2, 1, 1, 1, 1, 0)],
        [encode_message(1, 1, 1, 1, 0) + b"!"],
        [encode_message(1, 1, 5, 1, 0)] + [b""] * 2000,
    ]
    far_ahead = [encode_message(1, 1, 1_000_000, 1, 0)]
    for parts in [*garbage, far_ahead]:
        stranger.send_multipart(parts)
    if house.transport == "tcp":
        with socket.create_connection(("127.0.0.1", int(endpoint.rsplit(":", 1)[1]))) as raw:
            raw.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
    replies: list[list[bytes]] = []
    sender.send_message(endpoint, b"friend", replies.append)
    house.drive(lambda: replies and receiver.counters().refused)
    assert receiver.counters().malformed == len(garbage)
    assert receiver.counters().refused == 1
    assert receiver.counters().received == 1
    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1, "the clock stands still: one warning for all of them"
    stranger.close(0)


def test_a_sender_of_another_build_is_told_once_what_is_known_as_long_as_it_is_kept_in_mind(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messenger_limits, "NOTIFIED_ROUTES_MAX", 1)
    receiver = house.messenger()
    endpoint = receiver.listen(house.endpoint(), echo)
    later = bytes((3, 1)) + encode_message(1, 1, 1, 1, 0)[2:]
    strangers = [house.raw(zmq.DEALER) for _ in range(2)]
    for stranger in strangers:
        stranger.connect(endpoint)
    asked_count = known_count = 0
    for index, times in [(0, 2), (1, 1), (0, 1)]:  # the first was forgotten for the second
        stranger = strangers[index]
        for _ in range(times):
            stranger.send(later)
        stranger.send_multipart([encode_message(index + 1, 1, known_count + 1, known_count + 1, 0), b"known"])
        asked_count, known_count = asked_count + times, known_count + 1
        house.drive(lambda asked=asked_count: receiver.counters().malformed == asked)
        house.drive(lambda known=known_count: receiver.counters().received == known)
        for kind in (Kind.NOT_KNOWN, Kind.REPLY):
            assert stranger.poll(int(WAIT_SECONDS * 1000))
            answer = stranger.recv()
            assert decode_envelope(answer[:ENVELOPE_SIZE_BYTES]).kind == kind
    for stranger in strangers:
        stranger.close(0)


def test_a_receiver_that_answers_nonsense(house: House) -> None:
    sender = house.messenger()
    router = house.raw(zmq.ROUTER)
    router.bind(house.endpoint())
    endpoint = router.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()
    replies: list[list[bytes]] = []
    sender.send_message(endpoint, b"x", replies.append)
    house.drive(lambda: sender.counters().sent)
    assert router.poll(int(WAIT_SECONDS * 1000))
    route, envelope, part = router.recv_multipart()
    assert part == b"x"
    for answer in (
        b"",
        envelope,
        encode_reply(2, 99, 1, 1, 1, 1),  # another link
        encode_reply(2, 1, 1, 1, 1, 77),  # another callback
        encode_reply(2, 1, 1, 1, 1, 1) + b"\0",  # a part that is cut off
        encode_reply(2, 1, 1, 2, 2, 1),  # another message
        encode_reply(2, 1, 1, 1, 1, 1),
        encode_reply(2, 1, 1, 1, 1, 1),
    ):
        router.send_multipart([route, answer + encode_parts([b"answer"])])
    house.drive(lambda: sender.counters().duplicates_dropped == 2)
    assert replies == [[b"answer"]]
    assert sender.counters().malformed == 5
    sender.send_message(endpoint, b"y", replies.append)
    house.drive(lambda: sender.counters().sent == 2)
    router.send_multipart([route, encode_reply(2, 1, 1, 2, 2, 2), b"a reply in two parts"])
    router.send_multipart([route, encode_reply(3, 1, 1, 2, 2, 2) + b"expired, and yet something"])
    house.drive(lambda: len(replies) == 2)
    assert replies[1] == []
    router.close(0)


def test_no_wake_up_is_lost_in_ping_pong(house: House) -> None:
    """The clock stands still, so no retry can cover up; round trips between two, messages going both ways."""
    left, right = house.messenger(), house.messenger()
    rounds, wanted = 0, effort(1500)

    def left_loop(received: Received) -> None:
        nonlocal rounds
        rounds += 1
        received.reply()
        if rounds < wanted:
            left.send_message(right_endpoint, b"ping")

    def right_loop(received: Received) -> None:
        right.send_message(left_endpoint, b"pong")
        received.reply()

    left_endpoint = left.listen(house.endpoint(), left_loop)
    right_endpoint = right.listen(house.endpoint(), right_loop)
    left.send_message(right_endpoint, b"ping")
    house.drive(lambda: rounds == wanted)
    house.drive(lambda: left.pending_count(right_endpoint) + right.pending_count(left_endpoint) == 0)
    assert left.counters().retried == right.counters().retried == 0


@pytest.mark.parametrize("receives_apart", [False, True])
def test_no_wake_up_is_lost_in_bursts(house: House, receives_apart: bool) -> None:
    """Bursts both ways at once, sent with flush() while others come in; replies are given outside of process()."""
    house.receives_apart = receives_apart
    left, right = house.messenger(), house.messenger()
    chance = random.Random(5)
    held: list[Received] = []
    endpoints = {left: left.listen(house.endpoint(), held.append), right: right.listen(house.endpoint(), held.append)}
    sent = 0
    acknowledged = 0

    def callback(parts: list[bytes]) -> None:
        nonlocal acknowledged
        acknowledged += 1

    while sent < effort(3000):
        for sender, receiver in ((left, right), (right, left)):
            for _ in range(chance.randrange(100)):
                sender.send_message(endpoints[receiver], b"x", callback)
                sent += 1
                if chance.random() < 0.3:
                    sender.flush()
            if chance.random() < 0.8:
                sender.flush()
        wanted = min(len(held) + acknowledged + chance.randrange(50), sent)
        house.drive(lambda wanted=wanted: len(held) + acknowledged >= wanted)
        while held and chance.random() < 0.99:
            held.pop(0).reply()
            if chance.random() < 0.1:
                chance.choice([left, right]).flush()

    def done() -> bool:
        while held:
            held.pop().reply()
        left.flush()
        right.flush()
        return acknowledged == sent

    house.drive(done)
    assert left.counters().retried == right.counters().retried == 0


def test_nothing_to_do_is_not_readable(house: House) -> None:
    """A descriptor that stays readable would spin the outer loop."""
    receiver, sender = house.messenger(), house.messenger()
    endpoint = receiver.listen(house.endpoint(), echo)
    sender.send_message(endpoint, b"x")
    house.drive(lambda: sender.pending_count(endpoint) == 0)
    house.settle()
    for messenger in house.messengers:
        for _ in range(3):
            messenger.process()
        assert select.select([messenger.fileno()], [], [], 0)[0] == []
        assert messenger.flush() is False


def test_who_only_receives_sends_nothing_before_the_flush(house: House) -> None:
    receiver, sender = house.messenger(), house.messenger()
    endpoint = receiver.listen(house.endpoint(), echo)
    sender.send_message(endpoint, b"x")
    house.drive(lambda: sender.counters().sent == 1)
    while not receiver.counters().received:
        select.select([receiver], [], [], WAIT_SECONDS)
        receiver.receive()
    assert receiver.has_new
    receiver.receive()
    assert receiver.has_new
    assert len(receiver._replies) == 1
    receiver.flush()
    assert not receiver.has_new
    house.drive(lambda: sender.counters().acknowledged == 1)


def become_patient(
    house: House,
    sender: Messenger,
    endpoint: str,
    given: list[Received],
    replies: list[list[bytes]],
    *,
    echoes: bool = False,
) -> None:
    """With a connection, and one reply that has come."""
    sender.send_message(endpoint, b"finds the connection", replies.append)
    if not echoes:
        house.drive(lambda: given)
        given.pop().reply()
    house.drive(lambda: replies)
    sender.patient = True


def test_replies_do_not_wake_a_patient_owner(house: House) -> None:
    receiver, sender, other = house.messenger(), house.messenger(), house.messenger()
    given: list[Received] = []
    endpoint = receiver.listen(house.endpoint(), given.append)
    own_endpoint = sender.listen(house.endpoint(), echo)
    replies: list[list[bytes]] = []
    become_patient(house, sender, endpoint, given, replies)
    sender.send_message(endpoint, b"1", replies.append)
    house.drive(lambda: given)
    given.pop().reply()
    house.settle()
    assert select.select([sender.fileno()], [], [], 0)[0] == []
    assert sender.next_deadline_ns() == house.clock.now_ns + REPLY_DELAY_NS_MAX
    other.send_message(own_endpoint, b"whatever else comes")
    house.drive(lambda: len(replies) == 2)  # the clock stands still


def test_replies_can_be_left_for_later(house: House) -> None:
    """Messages are taken at once, the replies to one that is patient when it asks for them, and none is lost."""
    receiver, sender, other = house.messenger(), house.messenger(), house.messenger()
    given: list[Received] = []
    endpoint = receiver.listen(house.endpoint(), given.append)
    taken: list[Received] = []
    own_endpoint = sender.listen(house.endpoint(), taken.append)
    replies: list[list[bytes]] = []
    become_patient(house, sender, endpoint, given, replies)
    for number in range(2, 5):
        sender.send_message(endpoint, b"x", replies.append)
        house.drive(lambda: given)
        given.pop().reply()
        receiver.flush()
        while not sender.replies_wait:
            assert select.select([sender._poller.link_epoll], [], [], WAIT_SECONDS)[0], "no reply has come"
        other.send_message(own_endpoint, b"more urgent")
        while not taken:
            select.select([sender, other], [], [], WAIT_SECONDS)
            other.process()
            sender.receive(replies=False)
            sender.flush()
        taken.clear()
        assert len(replies) == number - 1
        assert sender.replies_wait
        sender.receive()
        sender.flush()
        assert len(replies) == number
    assert not sender.replies_wait


def test_patience_ends(house: House) -> None:
    receiver, sender = house.messenger(), house.messenger()
    given: list[Received] = []
    endpoint = receiver.listen(house.endpoint(), given.append)
    replies: list[list[bytes]] = []
    become_patient(house, sender, endpoint, given, replies)
    sender.send_message(endpoint, b"the reply comes soon", replies.append)
    house.drive(lambda: given)
    given.pop().reply()
    house.settle()
    assert len(replies) == 1
    house.clock.now_ns += REPLY_DELAY_NS_MAX
    house.drive(lambda: len(replies) == 2)
    sender.send_message(endpoint, b"the reply comes late", replies.append)
    house.drive(lambda: given)
    house.clock.now_ns += REPLY_DELAY_NS_MAX
    house.settle()
    given.pop().reply()
    house.drive(lambda: len(replies) == 3)  # from the descriptor alone


def test_who_waits_for_room_is_not_patient(house: House) -> None:
    receiver, sender = house.messenger(), house.messenger(in_flight_max=2)
    given: list[Received] = []
    endpoint = receiver.listen(house.endpoint(), given.append)
    sender.patient = True
    for number in range(3):
        sender.send_message(endpoint, b"%d" % number)
    house.drive(lambda: len(given) == 2)
    for received in given[:2]:
        received.reply()
    house.drive(lambda: len(given) == 3)  # the clock stands still


class Pair:
    """Two patient messengers that send to each other, with connections both ways, whose clock stands still."""

    def __init__(self, house: House) -> None:
        self.house = house
        self.one, self.other = house.messenger(), house.messenger()
        self.given: list[Received] = []
        self.replies: list[list[bytes]] = []
        self.to_one = self.one.listen(house.endpoint(), echo)
        self.to_other = self.other.listen(house.endpoint(), self.given.append, ordered=True)
        become_patient(house, self.one, self.to_other, self.given, self.replies)
        become_patient(house, self.other, self.to_one, [], [], echoes=True)
        self.replies.clear()

    def call(self, *parts: bytes) -> None:
        """Send to the other one, which replies as it gets the message."""
        self.one.send_message(self.to_other, parts, self.replies.append)
        self.house.drive(lambda: self.given)
        self.given.pop().reply(*parts)
        self.house.settle()


def test_a_reply_that_nobody_waits_for_comes_with_the_next_message(house: House) -> None:
    pair = Pair(house)
    pair.call(b"1", b"two parts")
    pair.call(b"2")
    assert pair.replies == []
    back: list[list[bytes]] = []
    pair.other.send_message(pair.to_one, b"the other way", back.append)
    house.drive(lambda: len(pair.replies) == 2)
    assert pair.replies == [[b"1", b"two parts"], [b"2"]]
    assert pair.one.pending_count(pair.to_other) == 0
    assert pair.other._delayed.due_ns is None
    house.clock.now_ns += REPLY_DELAY_NS_MAX
    house.drive(lambda: back == [[b"the other way"]])
    assert pair.one.counters().duplicates_dropped == 0


def test_a_reply_that_nobody_waits_for_leaves_by_itself_after_a_while(house: House) -> None:
    pair = Pair(house)
    pair.call(b"1")
    assert pair.replies == []
    assert pair.other.next_deadline_ns() == house.clock.now_ns + REPLY_DELAY_NS_MAX
    house.clock.now_ns += REPLY_DELAY_NS_MAX
    house.drive(lambda: pair.replies == [[b"1"]])


@pytest.mark.parametrize("why", ["many", "urgent", "large", "impatient"])
def test_replies_do_not_wait_for_a_message(house: House, why: str) -> None:
    """Enough of them do not, nor those before another one, nor that to much data, nor those of an owner that waits."""
    pair = Pair(house)
    pair.call(b"first")
    if why == "many":
        for _ in range(PIGGYBACKED_MAX):
            pair.call(b"one more")
    elif why == "large":
        pair.call(bytes(LARGE_PART_SIZE_BYTES))
    elif why == "impatient":
        pair.other.patient = False
        pair.other.flush()
    else:
        pair.one.patient = False
        pair.call(b"another one")
    assert pair.other._delayed.due_ns is None, "all have left"
    count = {"many": PIGGYBACKED_MAX + 1, "impatient": 1}.get(why, 2)

    def all_read() -> bool:
        house.clock.now_ns += REPLY_DELAY_NS_MAX  # when a patient owner reads what has come
        return len(pair.replies) == count

    house.drive(all_read)
    assert pair.replies[0] == [b"first"]


def test_a_piggybacked_reply_that_is_lost_is_asked_for_again(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(house)
    monkeypatch.setattr(pair.one._links[pair.to_other], "handle_reply", lambda parts, now_ns: None)
    pair.call(b"1")
    pair.other.send_message(pair.to_one, b"the other way")
    house.drive(lambda: pair.one.counters().received == 2)
    monkeypatch.undo()
    house.settle()
    assert pair.replies == []
    house.clock.now_ns += 10**9
    house.drive(lambda: pair.other.counters().replies_resent)
    house.clock.now_ns += REPLY_DELAY_NS_MAX
    house.drive(lambda: pair.replies == [[b"1"]])


@pytest.mark.parametrize("forged", ["incarnation", "link", "key", "size", None])
def test_a_piggybacked_reply_is_taken_only_from_the_links_other_end(house: House, forged: str | None) -> None:
    pair = Pair(house)
    pair.one.send_message(pair.to_other, b"1", pair.replies.append)
    house.drive(lambda: pair.given)
    link = pair.one._links[pair.to_other]
    reply = encode_reply(
        Kind.PIGGYBACKED,
        link.link_id + (forged == "link"),
        pair.one.incarnation + (forged == "incarnation"),
        2,
        2,
        link.outbox._pending[2].callback_id,
    )
    if forged == "key":
        link.server_key = "another one"
    dealer = house.raw(zmq.DEALER)
    dealer.connect(pair.to_one)
    reply = reply[:-1] if forged == "size" else reply + encode_parts([b"yes"])
    dealer.send_multipart([encode_message(1, 7, 1, 1, 0) + encode_parts([reply]), b"its own"])
    house.drive(lambda: pair.one.counters().received == 2)
    assert pair.replies == ([] if forged else [[b"yes"]])
    dealer.close(0)


def test_a_send_from_another_thread_makes_the_descriptor_readable(house: House) -> None:
    receiver, sender = house.messenger(), house.messenger()
    endpoint = receiver.listen(house.endpoint(), echo)
    sender.process()
    assert select.select([sender.fileno()], [], [], 0)[0] == []
    thread = threading.Thread(target=sender.send_message, args=(endpoint, b"x"))
    thread.start()
    assert select.select([sender.fileno()], [], [], WAIT_SECONDS)[0]
    thread.join()
    house.drive(lambda: sender.counters().acknowledged == 1)


def test_several_threads_send_and_reply(house: House) -> None:
    receiver = house.messenger(clock_ns=time.monotonic_ns)
    sender = house.messenger(clock_ns=time.monotonic_ns)
    arrived: list[bytes] = []
    to_reply: list[Received] = []
    every = threading.Event()
    replies = 0

    def loop(received: Received) -> None:
        arrived.append(received.parts[0])
        threading.Thread(target=received.reply).start() if len(arrived) % 50 == 0 else to_reply.append(received)
        while to_reply:
            to_reply.pop().reply()

    def callback(parts: list[bytes]) -> None:
        nonlocal replies
        replies += 1
        if replies == 4000:
            every.set()

    endpoint = receiver.listen(house.endpoint(), loop)

    def send(name: int) -> None:
        for number in range(1000):
            sender.send_message(endpoint, b"%d %d" % (name, number), callback)

    with receiver, sender:
        threads = [threading.Thread(target=send, args=(name,)) for name in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert every.wait(WAIT_SECONDS)
        assert sender.pending_count(endpoint) == 0
        assert sender.drop(endpoint) == 0
    for name in range(4):
        mine = [part for part in arrived if part.startswith(b"%d " % name)]
        assert mine == [b"%d %d" % (name, number) for number in range(1000)]


def test_what_cannot_be_done_in_the_thread_is_raised_where_it_was_asked_for(house: House) -> None:
    with house.messenger() as receiver:
        endpoint = receiver.listen(house.endpoint(), echo)
        with pytest.raises(EndpointInUseError):
            receiver.listen(endpoint, echo)


class BrokenError(Exception):
    pass


def test_what_a_server_loop_raises_comes_out_and_the_rest_goes_on(house: House) -> None:
    receiver, sender = house.messenger(), house.messenger()
    arrived: list[bytes] = []

    def loop(received: Received) -> None:
        arrived.append(received.parts[0])
        if received.parts[0] == b"2":
            raise BrokenError
        received.reply()

    endpoint = receiver.listen(house.endpoint(), loop)
    replies: list[int] = []
    for number in range(5):
        sender.send_message(endpoint, b"%d" % number, lambda parts, number=number: replies.append(number))
    with pytest.raises(BrokenError):
        house.drive(lambda: False)
    house.drive(lambda: len(replies) == 4)
    assert arrived == [b"0", b"1", b"2", b"3", b"4"]
    assert replies == [0, 1, 3, 4]


def test_what_a_callback_raises_comes_out_and_the_rest_goes_on(house: House) -> None:
    receiver, sender = house.messenger(), house.messenger()
    endpoint = receiver.listen(house.endpoint(), echo)
    replies: list[int] = []

    def callback(parts: list[bytes]) -> None:
        number = int(parts[0])
        if number == 2:
            raise BrokenError
        replies.append(number)

    for number in range(5):
        sender.send_message(endpoint, b"%d" % number, callback)
    with pytest.raises(BrokenError):
        house.drive(lambda: False)
    house.drive(lambda: len(replies) == 4)
    assert replies == [0, 1, 3, 4]
    assert sender.pending_count(endpoint) == 0


def test_in_a_thread_the_error_is_raised_by_stop(house: House, caplog: pytest.LogCaptureFixture) -> None:
    receiver = house.messenger(clock_ns=time.monotonic_ns)
    sender = house.messenger(clock_ns=time.monotonic_ns)
    raised = threading.Event()

    def loop(received: Received) -> None:
        raised.set()
        raise BrokenError

    receiver.start()
    endpoint = receiver.listen(house.endpoint(), loop)
    with sender:
        sender.send_message(endpoint, b"x")
        assert raised.wait(WAIT_SECONDS)
    receiver._thread._thread.join(WAIT_SECONDS)  # type: ignore[union-attr]
    with pytest.raises(MessengerClosedError):
        receiver.send_message(endpoint, b"into a void")
    with pytest.raises(MessengerClosedError):
        receiver.pending_count(endpoint)
    with pytest.raises(BrokenError):
        receiver.stop()
    assert "BrokenError" in caplog.text


def test_close_within_a_callback(house: House) -> None:
    receiver, sender = house.messenger(), house.messenger()
    endpoint = receiver.listen(house.endpoint(), echo)
    replies: list[list[bytes]] = []

    def callback(parts: list[bytes]) -> None:
        replies.append(parts)
        house.close(sender)

    sender.send_message(endpoint, b"1", callback)
    sender.send_message(endpoint, b"2", callback)
    house.drive(lambda: replies)
    assert replies == [[b"1"]]
    for refused in (sender.process, sender.flush, lambda: sender.send_message(endpoint, b"x")):
        with pytest.raises(MessengerClosedError):
            refused()
    sender.close()


def test_process_within_a_callback_is_refused(house: House) -> None:
    messenger = house.messenger()
    messenger.listen(house.endpoint(), lambda received: messenger.process())
    messenger.send_message(messenger._listeners.all[0].endpoint, b"x")
    with pytest.raises(MessengerError, match="within a callback"):
        house.drive(lambda: False)


def test_room_that_appears_while_sending_is_used(house: House) -> None:
    """ZeroMQ says EAGAIN, and then takes in the news that there is room: no descriptor will tell of it."""
    receiver, sender = house.messenger(), house.messenger()
    endpoint = receiver.listen(house.endpoint(), echo)
    sender.send_message(endpoint, b"1")
    house.drive(lambda: sender.counters().acknowledged == 1)
    link = sender._links[endpoint]
    plain_send = link._plain_send

    def full_once(*arguments: Any) -> None:
        link._plain_send = plain_send
        raise zmq.Again

    link._plain_send = full_once
    sender.send_message(endpoint, b"2")
    house.drive(lambda: sender.counters().acknowledged == 2)


def test_nothing_is_sent_on_a_connection_before_the_monitor_has_told_of_it(house: House) -> None:
    """Else a later message could overtake those that have to be sent again."""
    receiver, sender = house.messenger(), house.messenger()
    endpoint = receiver.listen(house.endpoint(), echo)
    sender.send_message(endpoint, b"1")
    house.drive(lambda: sender.counters().acknowledged == 1)
    link = sender._links[endpoint]
    link.connected = False
    sender.send_message(endpoint, b"2")
    sender.flush()
    house.settle()
    assert sender.counters().sent == 1
    link.connected = True
    sender.send_message(endpoint, b"3")
    house.drive(lambda: sender.counters().acknowledged == 3)


def test_a_reply_that_nobody_is_there_for_is_counted(house: House) -> None:
    receiver, sender = house.messenger(), house.messenger()
    held: list[Received] = []
    endpoint = receiver.listen(house.endpoint(), held.append)
    sender.send_message(endpoint, b"x")
    house.drive(lambda: held)
    sender.drop(endpoint)
    end = time.monotonic() + WAIT_SECONDS
    while receiver.counters().replies_unsent == 0:  # until ZeroMQ's thread has noticed
        held[0].replied = False
        held[0].reply()
        receiver.process()
        assert time.monotonic() < end
    assert receiver.counters().replies_unsent == 1


@pytest.fixture
def small_pipes(monkeypatch: pytest.MonkeyPatch) -> None:
    """ZeroMQ and the kernel hold little."""
    configure_link, configure_listener = Link._configure, Listener._configure

    def small_link(self: Link) -> None:
        configure_link(self)
        self._socket.setsockopt(zmq.SNDHWM, 5)
        self._socket.setsockopt(zmq.SNDBUF, 20_000)

    def small_listener(self: Listener) -> None:
        configure_listener(self)
        self._socket.setsockopt(zmq.RCVHWM, 5)
        self._socket.setsockopt(zmq.RCVBUF, 20_000)

    monkeypatch.setattr(Link, "_configure", small_link)
    monkeypatch.setattr(Listener, "_configure", small_listener)


@pytest.mark.usefixtures("small_pipes")
def test_what_waits_in_zeromq_does_not_overtake_at_a_reconnect(house: House) -> None:
    """The receiver goes while it reads nothing, with messages in ZeroMQ's pipe that were never on the wire."""
    first, second, sender = house.messenger(), house.messenger(), house.messenger()
    arrived: list[int] = []

    def loop(received: Received) -> None:
        arrived.append(int(received.parts[0]))
        received.reply()

    endpoint = first.listen(house.fixed_endpoint(), echo)
    for number in range(200):
        sender.send_message(endpoint, [b"%d" % number, b"x" * 100_000])
    house.messengers.remove(first)  # it is not driven
    house.drive(lambda: sender.counters().sent >= 8)
    house.settle()
    assert sender.counters().sent < 200
    first.close()
    house.drive(lambda: not sender.connected(endpoint))
    listen_when_free(second, endpoint, loop)
    house.drive(lambda: sender.pending_count(endpoint) == 0)
    assert arrived == list(range(200))


def test_who_is_known_to_be_there_again_is_connected_to_at_once(
    networked: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ZeroMQ by itself would wait for a minute."""
    for name in ("RECONNECT_MS_MIN", "RECONNECT_MS_MAX"):
        monkeypatch.setattr(f"immortal.coordinator.messenger.limits.{name}", 60_000)
    first, second, sender = (networked.messenger() for _ in range(3))
    endpoint = first.listen(networked.fixed_endpoint(), echo)
    sender.send_message(endpoint, b"before")
    networked.drive(lambda: sender.pending_count(endpoint) == 0)
    sender.reconnect(endpoint)
    assert sender.connected(endpoint), "a connection that there is stays"
    networked.close(first)
    networked.drive(lambda: not sender.connected(endpoint))
    sender.send_message(endpoint, b"after")
    listen_when_free(second, endpoint, echo)
    sender.reconnect(endpoint)
    networked.drive(lambda: sender.pending_count(endpoint) == 0)
    sender.reconnect("tcp://127.0.0.1:1")  # nothing was ever sent there


@pytest.mark.usefixtures("small_pipes")
def test_a_full_pipe_waits_and_loses_nothing(house: House) -> None:
    """The receiver does not read, so ZeroMQ says EAGAIN; then it reads, and the sender's descriptor tells."""
    receiver, sender = house.messenger(), house.messenger()
    arrived: list[int] = []

    def loop(received: Received) -> None:
        arrived.append(int(received.parts[0]))
        received.reply()

    endpoint = receiver.listen(house.endpoint(), loop)
    for number in range(200):
        sender.send_message(endpoint, [b"%d" % number, b"x" * 100_000])
    house.messengers.remove(receiver)
    house.drive(lambda: sender.counters().sent >= 5)
    house.settle()
    assert sender.counters().sent < 200
    house.messengers.append(receiver)
    house.drive(lambda: sender.pending_count(endpoint) == 0)
    assert arrived == list(range(200))
    assert sender.counters().retried == 0
