"""A link's sender side: IDs, the limits on what is in flight, reconnects and retries, with a clock of its own."""

from __future__ import annotations

import pytest

from coordinator.messenger.outbox import Outbox, RetryPolicy

SECOND_NS = 1_000_000_000


def outbox(**limits: int) -> Outbox:
    return Outbox(RetryPolicy(), lambda: 0.0, **limits)


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
    delays = [policy.delay_ns(attempts, 0.0) / SECOND_NS for attempts in range(1, 9)]
    assert delays == [1, 2, 4, 8, 16, 30, 30, 30]
    assert policy.delay_ns(10_000, 0.0) == 30 * SECOND_NS


def test_jitter_only_shortens() -> None:
    policy = RetryPolicy(jitter=0.25)
    assert policy.delay_ns(1, 0.5) == 0.875 * SECOND_NS
    assert policy.delay_ns(1, 0.999999) >= 0.75 * SECOND_NS


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
    box.requeue_all()
    assert box.retry_check_ns is None
    assert send_all(box) == [1, 3, 4]
    for message_id in (1, 3, 4):
        box.acknowledge(message_id)
    assert send_all(box) == [5, 6, 7]


def test_acknowledged_while_queued_again() -> None:
    box = outbox()
    add(box, 3)
    send_all(box)
    box.requeue_all()
    box.acknowledge(1)
    assert send_all(box) == [2, 3]


def test_what_was_sent_before_is_known() -> None:
    box = outbox()
    add(box, 2)
    message = box.next_to_send()
    assert message is not None
    assert not message.sent_before
    box.mark_sent(message, 0)
    box.requeue_all()
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
    assert box.retry_check_ns == SECOND_NS
    assert not box.requeue_due(SECOND_NS - 1)
    add(box, 1)
    assert box.requeue_due(SECOND_NS)
    assert not box.requeue_due(SECOND_NS), "once"
    assert send_all(box, SECOND_NS) == [1, 3, 6]
    assert box.requeue_due(SECOND_NS * 3 // 2)
    assert send_all(box, SECOND_NS * 3 // 2) == [4, 5]


def test_retries_come_at_growing_distances_until_a_reconnect() -> None:
    box = outbox()
    add(box, 1)
    now_ns, distances = 0, []
    send_all(box, now_ns)
    for _ in range(7):
        assert box.retry_check_ns is not None
        distances.append((box.retry_check_ns - now_ns) // SECOND_NS)
        now_ns = box.retry_check_ns
        assert box.requeue_due(now_ns)
        assert send_all(box, now_ns) == [1]
    assert distances == [1, 2, 4, 8, 16, 30, 30]
    box.requeue_all()
    assert send_all(box, now_ns) == [1]
    assert box.retry_check_ns == now_ns + SECOND_NS


def test_no_retry_for_what_waits_or_is_acknowledged() -> None:
    box = outbox(in_flight_max=1)
    add(box, 2)
    send_all(box, 0)
    box.acknowledge(1)
    assert not box.requeue_due(60 * SECOND_NS)
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
