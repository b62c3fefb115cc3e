"""A link's sender side: IDs, the limits on what is in flight, reconnects and retries, with a clock of its own."""

from __future__ import annotations

from random import Random

import pytest

from immortal.coordinator.messenger.limits import SILENCE_NS
from immortal.coordinator.messenger.outbox import CHECKS_PER_DELAY, Outbox, RetryPolicy, RoundTrip

SECOND_NS = 1_000_000_000


def outbox(**limits: int) -> Outbox:
    measured = RoundTrip(timeout_ns=SECOND_NS)
    return Outbox(RetryPolicy(), lambda: 0.0, _round_trip=measured, **limits)  # type: ignore[arg-type]


def add(box: Outbox, count: int, size_bytes: int = 1) -> None:
    for _ in range(count):
        box.add((b"x" * size_bytes,), None, 0)


def send_all(box: Outbox, now_ns: int = 0) -> list[int]:
    """Send what may be sent; the IDs."""
    sent = []
    while (message := box.next_to_send()) is not None:
        box.mark_sent(message, now_ns)
        sent.append(message.message_id)
    return sent


def test_delays_double_up_to_the_longest() -> None:
    policy = RetryPolicy()
    delays = [policy.delay_ns(5 * SECOND_NS, doublings, 0.0) / SECOND_NS for doublings in range(8)]
    assert delays == [1, 2, 4, 8, 16, 30, 30, 30]
    assert policy.delay_ns(SECOND_NS // 8, 3, 0.0) == SECOND_NS
    assert policy.delay_ns(1, 10_000, 0.0) == 30 * SECOND_NS


def test_jitter_only_shortens() -> None:
    policy = RetryPolicy(jitter=0.25)
    assert policy.delay_ns(SECOND_NS, 0, 0.5) == 0.875 * SECOND_NS
    assert policy.delay_ns(SECOND_NS, 0, 0.999999) >= 0.75 * SECOND_NS


def test_ids_count_from_one_and_go_out_in_order() -> None:
    box = outbox()
    assert box.next_to_send() is None
    add(box, 3)
    assert send_all(box) == [1, 2, 3]
    add(box, 1)
    assert send_all(box) == [4]
    assert len(box) == 4
    assert box.lowest_pending_id == 1


def test_acknowledged_in_any_order() -> None:
    box = outbox()
    add(box, 4)
    send_all(box)
    lowest = []
    for message_id in (3, 1, 2, 4):
        message = box.acknowledge(message_id)
        assert message is not None
        assert message.message_id == message_id
        lowest.append(box.lowest_pending_id)
    assert lowest == [1, 2, 4, 5]
    assert len(box) == 0
    assert box.acknowledge(4) is None
    assert box.acknowledge(9) is None


def test_the_window_reaches_from_the_lowest_pending_id() -> None:
    box = outbox(in_flight_max=4)
    add(box, 10)
    assert send_all(box) == [1, 2, 3, 4]
    box.acknowledge(2)
    box.acknowledge(3)
    assert send_all(box) == []
    box.acknowledge(1)
    assert send_all(box) == [5, 6, 7]


def test_the_window_in_bytes() -> None:
    box = outbox(in_flight_size_bytes_max=100)
    add(box, 1, 500)
    add(box, 3, 60)
    assert send_all(box) == [1], "one is always let through"
    box.acknowledge(1)
    assert send_all(box) == [2]
    assert send_all(box) == []
    box.acknowledge(2)
    assert send_all(box) == [3]


def test_a_reconnect_sends_everything_in_flight_again_first() -> None:
    box = outbox(in_flight_max=4, in_flight_size_bytes_max=3)
    add(box, 8)
    assert send_all(box) == [1, 2, 3]
    box.acknowledge(2)
    add(box, 1)
    box.retransmit_all()
    assert box.retry_check_ns is None
    assert send_all(box) == [1, 3, 4]
    for message_id in (1, 3, 4):
        box.acknowledge(message_id)
    assert send_all(box) == [5, 6, 7]


def test_acknowledged_while_queued_again() -> None:
    box = outbox()
    add(box, 3)
    send_all(box)
    box.retransmit_all()
    box.acknowledge(1)
    assert send_all(box) == [2, 3]


def test_what_was_sent_before_is_known() -> None:
    box = outbox()
    add(box, 2)
    message = box.next_to_send()
    assert message is not None
    assert not message.sent_before
    box.mark_sent(message, 0)
    box.retransmit_all()
    message = box.next_to_send()
    assert message is not None
    assert message.sent_before


def test_only_what_is_due_is_tried_again_in_id_order() -> None:
    box = outbox()
    add(box, 3)
    send_all(box, 0)
    add(box, 2)
    send_all(box, SECOND_NS // 2)
    box.acknowledge(2)
    box.record_reply(2, 5, 0)
    assert box.retry_check_ns == SECOND_NS
    assert not box.retransmit_due(SECOND_NS - 1)
    add(box, 1)
    assert box.retransmit_due(SECOND_NS)
    assert not box.retransmit_due(SECOND_NS), "once"
    assert send_all(box, SECOND_NS) == [1, 3, 6]
    box.record_reply(3, 6, 0)
    assert box.retransmit_due(SECOND_NS * 3 // 2)
    assert send_all(box, SECOND_NS * 3 // 2) == [4, 5]


def test_of_what_is_still_on_its_way_only_the_first_is_tried_again() -> None:
    box = outbox()
    add(box, 5)
    send_all(box, 0)
    box.record_reply(1, 2, SECOND_NS)  # it has had 2, its replies are late
    assert box.retransmit_due(SECOND_NS)
    assert send_all(box, SECOND_NS) == [1, 2]
    assert box.retry_check_ns == 2 * SECOND_NS  # the others wait on


def test_until_the_last_question_is_answered_only_the_first_is_asked_again() -> None:
    """Whatever waits unread at a receiver that is stuck: at most each message twice, and one at each delay."""
    box = outbox()
    add(box, 4)
    send_all(box, 0)
    box.record_reply(4, 4, SECOND_NS)
    assert box.retransmit_due(SECOND_NS)
    assert send_all(box, SECOND_NS) == [1, 2, 3, 4]
    box.record_reply(3, 4, SECOND_NS)  # perhaps what was sent first
    assert box.retransmit_due(3 * SECOND_NS)
    assert send_all(box, 3 * SECOND_NS) == [1]
    box.record_reply(4, 4, 3 * SECOND_NS)  # what was asked last has become 1
    assert box.retransmit_due(5 * SECOND_NS)
    assert send_all(box, 5 * SECOND_NS) == [1]
    box.record_reply(1, 4, 5 * SECOND_NS, awaited=True)
    assert box.retransmit_due(10 * SECOND_NS)
    assert send_all(box, 10 * SECOND_NS) == [1, 2, 3, 4]


def test_a_receiver_that_is_stuck_is_asked_by_one_message_in_half_the_shortest_delay() -> None:
    """Each look is at all that is in flight: with times of their own, as jitter gives them, they took all the time."""
    units = Random(0)
    policy = RetryPolicy(delay_ns_min=5_000_000, delay_ns_max=50_000_000)
    box = Outbox(policy, units.random)
    add(box, 1000)
    for now_ns in range(0, 4_000_000, 4_000):
        message = box.next_to_send()
        assert message is not None
        box.mark_sent(message, now_ns)
    looks = 0
    sent: list[int] = []
    now_ns = 0
    while now_ns < SECOND_NS:
        assert box.retry_check_ns is not None
        now_ns = box.retry_check_ns
        box.retransmit_due(now_ns)
        looks += 1
        sent += send_all(box, now_ns)
    assert 1 < len(sent) <= looks <= SECOND_NS // policy.delay_ns_min * CHECKS_PER_DELAY + 1


def test_a_message_says_how_many_below_it_will_not_come() -> None:
    box = outbox()

    def said() -> list[tuple[int, int, int]]:
        sent = []
        while (message := box.next_to_send()) is not None:
            sent.append((message.message_id, box.lowest_pending_id, box.skipped_count(message)))
            box.mark_sent(message, 0)
        return sent

    add(box, 6)
    assert said() == [(number, 1, 0) for number in range(1, 7)]
    for acknowledged in (1, 3, 4, 6):
        box.acknowledge(acknowledged)
    add(box, 1)
    assert said() == [(7, 2, 0)]
    box.retransmit_all()
    assert said() == [(2, 2, 0), (5, 2, 2), (7, 2, 1)]
    box.acknowledge(2)
    box.record_reply(2, 7, 0)
    assert box.retransmit_due(SECOND_NS)
    assert said() == [(5, 5, 2), (7, 5, 1)]


def test_silence_is_counted_from_the_first_question_and_lasts_longer_each_time() -> None:
    box = outbox()
    add(box, 1)
    send_all(box, 0)
    assert box.silence_deadline_ns is None, "a reply may take its time"
    now_ns = 0
    for doublings in (0, 1, 2, 3, 4, 5, 5):
        asked_ns = now_ns + SECOND_NS
        for delay in (1, 2):
            now_ns += delay * SECOND_NS
            assert box.retransmit_due(now_ns)
            send_all(box, now_ns)
        assert box.silence_deadline_ns == asked_ns + (SILENCE_NS << doublings)
        box.connection_lost()
        box.retransmit_all()
        assert box.silence_deadline_ns is None
        send_all(box, now_ns)
    box.retransmit_due(now_ns + SECOND_NS)
    send_all(box, now_ns + SECOND_NS)
    box.record_reply(1, 1, 0)
    assert box.silence_deadline_ns is None
    assert box.silence_ns == SILENCE_NS


def test_retries_come_at_growing_distances_until_a_reconnect() -> None:
    box = outbox()
    add(box, 1)
    now_ns, distances = 0, []
    send_all(box, now_ns)
    for _ in range(7):
        assert box.retry_check_ns is not None
        distances.append((box.retry_check_ns - now_ns) // SECOND_NS)
        now_ns = box.retry_check_ns
        assert box.retransmit_due(now_ns)
        assert send_all(box, now_ns) == [1]
    assert distances == [1, 2, 4, 8, 16, 30, 30]
    box.retransmit_all()
    assert send_all(box, now_ns) == [1]
    assert box.retry_check_ns == now_ns + SECOND_NS


def test_no_retry_for_what_waits_or_is_acknowledged() -> None:
    box = outbox(in_flight_max=1)
    add(box, 2)
    send_all(box, 0)
    box.acknowledge(1)
    assert not box.retransmit_due(60 * SECOND_NS)
    assert box.retry_check_ns is None
    assert send_all(box, 60 * SECOND_NS) == [2]


@pytest.mark.parametrize("count", [50_000])
def test_a_long_buffer_costs_no_more_per_message(count: int) -> None:
    """A list of pending messages that is searched from its start would take minutes here."""
    box = outbox()
    add(box, count)
    done = 0
    while (sent := send_all(box)) != []:
        for message_id in sent:
            box.acknowledge(message_id)
            done += 1
    assert done == count
