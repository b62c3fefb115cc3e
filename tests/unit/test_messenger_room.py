"""How much may be pending: what is refused, who waits, and what makes room."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path

import pytest
import zmq

from immortal.coordinator.messenger.backpressure import PendingRoom
from immortal.coordinator.messenger.limits import PENDING_MAX, PENDING_SIZE_BYTES_MAX
from immortal.messenger import Messenger, MessengerError, PendingFullError, PendingLimits, Received
from tests.helpers.messengers import House

DEADLINE_S = 20.0


def room(count_max: int = 2, size_bytes_max: int = 100, wait_s: float | None = 0.0) -> PendingRoom:
    return PendingRoom(PendingLimits(count_max, size_bytes_max, wait_s), lambda: True)


def test_a_number_of_messages_to_each_destination() -> None:
    full = room()
    for destination in ("a", "b"):
        full.reserve(destination, 1)
        full.reserve(destination, 1)
        with pytest.raises(
            PendingFullError, match=f"2 messages with 2 bytes are pending for {destination}, one with 1"
        ):
            full.reserve(destination, 1)
    full.release("a", 1)
    full.reserve("a", 1)
    with pytest.raises(PendingFullError):
        full.reserve("b", 1)
    assert full.refused_count == 3


def test_a_number_of_bytes_but_for_one_message_that_is_larger() -> None:
    full = room(count_max=10)
    full.reserve("a", 500)
    with pytest.raises(PendingFullError, match="expected at most 10 and 100 bytes"):
        full.reserve("a", 0)
    full.release("a", 500)
    full.reserve("a", 60)
    with pytest.raises(PendingFullError):
        full.reserve("a", 41)
    full.reserve("a", 40)


def test_nothing_is_remembered_of_a_destination_that_is_dropped_with_nothing_pending() -> None:
    full = room(count_max=10)
    for number in range(100):
        full.reserve(f"{number}", 7)
        full.reserve(f"{number}", 8)
        full.forget(f"{number}", 7, 1)
        assert len(full._by_destination) == 1, "another thread has sent meanwhile"
        full.forget(f"{number}", 8, 1)
    assert full._by_destination == {}


@pytest.mark.parametrize("values", [(0, 1, 0.0), (1, 0, 0.0), (1, 1, -1.0), (1, 1, float("nan"))])
def test_limits_that_are_none(values: tuple[int, int, float]) -> None:
    with pytest.raises(MessengerError, match="expected limits of 1 at least, and a wait of 0 s at least or None"):
        PendingLimits(*values)


def test_who_may_wait_is_refused_after_that_time() -> None:
    full = room(count_max=1, wait_s=0.001)
    full.reserve("a", 1)
    with pytest.raises(PendingFullError):
        full.reserve("a", 1)
    assert (full.waited_count, full.refused_count) == (1, 1)


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House("inproc", tmp_path)


def test_by_default_a_send_beyond_the_limit_is_refused_at_once_and_taken_when_there_is_room(house: House) -> None:
    receiver, sender = house.messenger(), house.messenger(pending=PendingLimits(3, 1000))
    held: list[Received] = []
    endpoint = receiver.listen(house.endpoint(), held.append)
    for _ in range(3):
        sender.send_message(endpoint, b"12")
    for refused in (sender.send_message, sender.converse):
        with pytest.raises(PendingFullError, match=re.escape(f"3 messages with 6 bytes are pending for {endpoint}")):
            refused(endpoint, b"12")
    assert (sender.pending_count(endpoint), sender.pending_size_bytes(endpoint)) == (3, 6)
    assert (sender.counters().sends_refused, sender.counters().sends_waited) == (2, 0)
    house.drive(lambda: len(held) == 3)
    held[0].reply()
    house.drive(lambda: sender.pending_count(endpoint) == 2)
    sender.send_message(endpoint, b"12")
    assert sender.drop(endpoint) == 3
    assert sender.pending_size_bytes(endpoint) == 0
    for _ in range(3):
        sender.send_message(endpoint, b"12")
    for messenger in house.messengers:
        messenger.close()
    house.context.destroy(linger=0)


def test_a_callback_has_the_room_that_its_own_message_has_left(house: House) -> None:
    receiver, sender = house.messenger(), house.messenger(pending=PendingLimits(1))
    endpoint = receiver.listen(house.endpoint(), lambda received: received.reply())
    rounds = 0

    def replied(parts: list[bytes]) -> None:
        nonlocal rounds
        rounds += 1
        if rounds < 100:
            sender.send_message(endpoint, b"x", replied)

    sender.send_message(endpoint, b"x", replied)
    house.drive(lambda: rounds == 100)
    for messenger in house.messengers:
        messenger.close()
    house.context.destroy(linger=0)


def test_with_a_thread_senders_wait_for_room_and_the_thread_itself_never_does() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    held: list[Received] = []
    came = threading.Semaphore(0)
    refused: list[PendingFullError] = []

    def loop(received: Received) -> None:
        held.append(received)
        came.release()

    def replied(parts: list[bytes]) -> None:
        try:
            for _ in range(3):
                sender.send_message(endpoint, b"within")
        except PendingFullError as error:
            refused.append(error)
        came.release()

    limits = PendingLimits(count_max=2, wait_s=None)
    with Messenger(context=context) as receiver, Messenger(context=context, pending=limits) as sender:
        endpoint = receiver.listen("inproc://room", loop)
        sender.send_message(endpoint, b"1", replied)
        sender.send_message(endpoint, b"2")
        for _ in range(2):
            assert came.acquire(timeout=DEADLINE_S)
        waits = threading.Thread(target=sender.send_message, args=(endpoint, b"3"), daemon=True)
        waits.start()
        end_s = time.monotonic() + DEADLINE_S
        while sender.counters().sends_waited == 0:
            assert time.monotonic() < end_s
        assert waits.is_alive()
        held[1].reply()
        waits.join(DEADLINE_S)
        assert not waits.is_alive()
        assert came.acquire(timeout=DEADLINE_S)
        held[0].reply()
        assert came.acquire(timeout=DEADLINE_S)
        assert len(refused) == 1
    context.destroy(linger=0)


def test_who_waits_for_room_is_refused_when_the_messenger_stops() -> None:
    caught: list[Exception] = []
    sender = Messenger(pending=PendingLimits(count_max=1, wait_s=None))
    sender.start()
    sender.send_message("tcp://127.0.0.1:9", b"nobody is there")

    def send() -> None:
        try:
            sender.send_message("tcp://127.0.0.1:9", b"another")
        except MessengerError as error:
            caught.append(error)

    waits = threading.Thread(target=send, daemon=True)
    waits.start()
    end_s = time.monotonic() + DEADLINE_S
    while sender.counters().sends_waited == 0:
        assert time.monotonic() < end_s
    sender.stop()
    waits.join(DEADLINE_S)
    assert [type(error) for error in caught] == [PendingFullError]
    with pytest.raises(PendingFullError):
        sender.send_message("tcp://127.0.0.1:9", b"nobody runs it: nothing is waited for")
    sender.close()


def test_without_limits_nothing_is_refused() -> None:
    sender = Messenger(pending=None)
    count = PENDING_MAX + 1
    for _ in range(count):
        sender.send_message("tcp://127.0.0.1:9", b"")
    assert sender.pending_count("tcp://127.0.0.1:9") == count
    sender.close()


def test_the_limits_by_default() -> None:
    assert PendingLimits() == PendingLimits(PENDING_MAX, PENDING_SIZE_BYTES_MAX, 0.0)
    sender = Messenger()
    for _ in range(PENDING_MAX):
        sender.send_message("tcp://127.0.0.1:9", b"")
    with pytest.raises(PendingFullError):
        sender.send_message("tcp://127.0.0.1:9", b"")
    sender.close()
