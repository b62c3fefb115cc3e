"""A network that loses messages and replies and changes their order: how often each message is sent, by a clock."""

from __future__ import annotations

import heapq
import itertools
import random

import pytest

from immortal.coordinator.messenger.inbox import Arrival, DuplicateTracker, LinkState, OrderedTracker
from immortal.coordinator.messenger.outbox import Outbox, RetryPolicy

MESSAGES = 5_000
ROUND_TRIP_NS = 1_000_000
LOOK_NS = 100_000


def sends_per_message(
    *, ordered: bool, loss: float, reordered: float, seed: int = 0, messages: int = MESSAGES
) -> float:
    """Of messages from an outbox to a conversation; each is given once, in order where that is asked for.

    ``loss``: the share lost of messages and of replies; ``reordered``: the share that is up to a round trip late.
    """
    chance = random.Random(seed)
    box = Outbox(RetryPolicy(), chance.random)
    talk = LinkState(1, 1, (OrderedTracker if ordered else DuplicateTracker)())
    for _ in range(messages):
        box.add((b"x",), None, 0)
    under_way: list[tuple[int, int, bool, tuple[int, int, int]]] = []  # when, number, whether a message, fields
    given: list[int] = []
    sent_count = now_ns = 0
    numbers = itertools.count()

    def pass_on(is_message: bool, fields: tuple[int, int, int]) -> None:
        if chance.random() >= loss:
            late_ns = int(ROUND_TRIP_NS * chance.random()) if chance.random() < reordered else 0
            heapq.heappush(under_way, (now_ns + ROUND_TRIP_NS // 2 + late_ns, next(numbers), is_message, fields))

    while len(box):
        while (message := box.next_to_send()) is not None:
            sent_count += 1
            pass_on(True, (message.message_id, box.lowest_pending_id, box.skipped_count(message)))
            box.mark_sent(message, now_ns)
        now_ns = min(under_way[0][0] if under_way else 1 << 62, box.retry_check_ns or 1 << 62)
        while under_way and under_way[0][0] <= now_ns + LOOK_NS:
            _, _, is_message, (message_id, second, third) = heapq.heappop(under_way)
            if not is_message:
                box.record_reply(message_id, second)
                box.acknowledge(message_id)
                continue
            sighting = talk.see(message_id, second, third)
            if sighting == Arrival.FIRST:
                given.append(message_id)
                talk.keep_reply(message_id, 0, ())
            if message_id in talk.replies:
                pass_on(False, (message_id, talk.tracker.highest_seen, 0))
        box.retransmit_due(now_ns)
    assert sorted(given) == list(range(1, messages + 1))
    assert not ordered or given == sorted(given)
    return sent_count / messages


@pytest.mark.parametrize("seed", range(3))
def test_of_what_is_lost_each_is_sent_again_and_little_else(seed: int) -> None:
    assert sends_per_message(ordered=False, loss=0.01, reordered=0.05, seed=seed) <= 1.05


def test_in_order_each_comes_again_that_came_too_early() -> None:
    assert sends_per_message(ordered=True, loss=0.01, reordered=0.05, messages=500) > 1.05


@pytest.mark.parametrize("ordered", [True, False])
def test_what_is_not_lost_is_sent_once(ordered: bool) -> None:
    assert sends_per_message(ordered=ordered, loss=0.0, reordered=0.0) == 1.0


def test_what_is_late_is_sent_once_where_no_order_is_asked_for() -> None:
    assert sends_per_message(ordered=False, loss=0.0, reordered=0.5) == 1.0
