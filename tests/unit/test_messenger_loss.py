"""A network that loses, duplicates and delays messages and replies: how often each is sent and how long it takes, by a
clock of its own."""

from __future__ import annotations

import heapq
import itertools
import random
from typing import NamedTuple

import pytest

from immortal.coordinator.messenger.envelope import decode_missing, encode_missing
from immortal.coordinator.messenger.inbox import Arrival, LinkState, ReceiveWindow
from immortal.coordinator.messenger.outbox import Outbox, RetryPolicy
from tests.helpers.effort import effort

MESSAGES = 5_000
ROUND_TRIP_NS = 1_000_000
LOOK_NS = 100_000
SECOND_NS = 1_000_000_000


class Run(NamedTuple):
    """Figures of one run."""

    sends_per_message: float
    seconds: float


def run(
    *,
    ordered: bool,
    loss: float = 0.0,
    reordered: float = 0.0,
    duplicated: float = 0.0,
    seed: int = 0,
    messages: int = MESSAGES,
    awaited: bool = False,
    reports: bool = True,
    reply_ns: int = 0,
) -> Run:
    """Send messages from an outbox to a link's receiver; each is given once, in order where that is asked for.

    ``loss``: the share lost of messages and of replies; ``reordered``: the share that is up to a round trip late;
    ``duplicated``: the share that comes twice. ``awaited``: each message waits for the reply to the one before.
    ``reports``: the receiver says what is missing; builds that did not also dropped early messages.
    ``reply_ns``: how late it replies.
    """
    chance = random.Random(seed)
    box = Outbox(RetryPolicy(), chance.random)
    link = LinkState(1, 1, ReceiveWindow(ordered))
    for _ in range(1 if awaited else messages):
        box.add((b"x",), None, 0)
    under_way: list[tuple[int, int, str, tuple[int, int, int], bytes]] = []  # when, number, to whom, fields, report
    given: list[int] = []
    sent_count = now_ns = 0
    numbers = itertools.count()

    def pass_on(to: str, fields: tuple[int, int, int], report: bytes = b"") -> None:
        for _ in range(2 if chance.random() < duplicated else 1):
            if chance.random() >= loss:
                late_ns = int(ROUND_TRIP_NS * chance.random()) if chance.random() < reordered else 0
                due_ns = now_ns + ROUND_TRIP_NS // 2 + late_ns
                heapq.heappush(under_way, (due_ns, next(numbers), to, fields, report))

    def answer(message_id: int, *, replied: bool) -> None:
        window = link.window
        fields = (message_id, max(message_id, window.complete_id), int(replied))
        missing = encode_missing(window.lowest_pending_id, window.missing)
        pass_on("sender", fields, missing if reports and not replied else b"")

    def give(message_id: int) -> None:
        given.append(message_id)
        heapq.heappush(under_way, (now_ns + reply_ns, next(numbers), "app", (message_id, 0, 0), b""))

    def arrive(message_id: int, lowest_pending_id: int, skipped_count: int) -> None:
        arrival = link.mark_received(message_id, lowest_pending_id, skipped_count)
        if arrival == Arrival.FIRST:
            give(message_id)
        elif arrival == Arrival.EARLY and not reports:
            link.window.mark_missing(message_id)
        elif arrival == Arrival.EARLY:
            assert link.store_early(message_id, message_id, (b"x",))
        elif message_id in link.replies or message_id >= link.window.lowest_pending_id:
            answer(message_id, replied=message_id in link.replies)
        if reports and arrival != Arrival.DUPLICATE and link.window.is_missing(message_id - skipped_count - 1):
            answer(message_id, replied=False)
        for early in link.pop_early():
            give(early)

    while len(box):
        while (message := box.next_to_send()) is not None:
            sent_count += 1
            pass_on("receiver", (message.message_id, box.lowest_pending_id, box.skipped_count(message)))
            box.mark_sent(message, now_ns)
        now_ns = max(now_ns, min(under_way[0][0] if under_way else 1 << 62, box.retry_check_ns or 1 << 62))
        while under_way and under_way[0][0] <= now_ns + LOOK_NS:
            _, _, to, fields, report = heapq.heappop(under_way)
            if to == "receiver":
                arrive(*fields)
            elif to == "app":
                link.store_reply(fields[0], 0, ())
                answer(fields[0], replied=True)
            else:
                message_id, arrived_id, replied = fields
                box.record_reply(message_id, arrived_id, now_ns, awaited=not replied)
                if report:
                    box.record_missing(decode_missing(report))
                if replied and box.acknowledge(message_id) and awaited and message_id < messages:
                    box.add((b"x",), None, 0)
        box.retransmit_due(now_ns)
    assert sorted(given) == list(range(1, messages + 1))
    assert not ordered or given == sorted(given)
    return Run(sent_count / messages, now_ns / SECOND_NS)


NETWORKS = [(0.01, 0.0, 0.0), (0.01, 0.05, 0.05), (0.2, 0.0, 0.0), (0.2, 0.5, 0.2)]


@pytest.mark.parametrize("seed", range(effort(1)))
@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize(("loss", "reordered", "duplicated"), NETWORKS)
def test_each_comes_once_and_soon_whatever_the_network_does(
    ordered: bool, loss: float, reordered: float, duplicated: float, seed: int
) -> None:
    figures = run(ordered=ordered, loss=loss, reordered=reordered, duplicated=duplicated, seed=seed, messages=2_000)
    assert figures.seconds < (0.5 if loss == 0.01 else 10.0)
    assert figures.sends_per_message < (1.1 if loss == 0.01 else 1.8)


def test_order_costs_no_more_time_under_loss() -> None:
    """Over some seeds together: the one in order took 400 times as long."""
    took = {mode: sum(run(ordered=mode, loss=0.01, seed=seed).seconds for seed in range(5)) for mode in (True, False)}
    assert took[True] <= 1.2 * took[False]


@pytest.mark.parametrize("seed", range(effort(1)))
def test_what_is_lost_is_sent_again_and_little_else(seed: int) -> None:
    assert run(ordered=False, loss=0.01, reordered=0.05, seed=seed).sends_per_message <= 1.05


@pytest.mark.parametrize("ordered", [True, False])
def test_what_is_not_lost_is_sent_once(ordered: bool) -> None:
    assert run(ordered=ordered).sends_per_message == 1.0


@pytest.mark.parametrize("ordered", [True, False])
def test_what_is_late_is_hardly_sent_again(ordered: bool) -> None:
    assert run(ordered=ordered, reordered=0.5).sends_per_message <= 1.05


def test_messages_that_wait_for_the_reply_before_lose_no_seconds() -> None:
    took = [run(ordered=True, loss=0.2, seed=seed, messages=20, awaited=True).seconds for seed in range(20)]
    assert sum(took) / len(took) < 1.5
    assert max(took) < 6.0


@pytest.mark.parametrize("ordered", [True, False])
def test_a_receiver_that_does_not_say_what_is_missing(ordered: bool) -> None:
    """A receiver of an earlier build says nothing, and in order drops what comes early: slow, and complete."""
    assert run(ordered=ordered, loss=0.01, messages=1_000, reports=False).seconds < (60.0 if ordered else 1.0)


@pytest.mark.parametrize("ordered", [True, False])
def test_a_reply_that_is_slow_by_itself_is_learnt(ordered: bool) -> None:
    """A reply later than the first delay: soon no message is sent before its reply had time."""
    figures = run(ordered=ordered, reply_ns=300_000_000, messages=50, awaited=True)
    assert figures.sends_per_message <= 1.1


@pytest.mark.parametrize("ordered", [True, False])
def test_replies_of_seconds_are_asked_for_with_growing_pauses(ordered: bool) -> None:
    assert run(ordered=ordered, reply_ns=3_000_000_000, messages=20, awaited=True).sends_per_message <= 4.0
