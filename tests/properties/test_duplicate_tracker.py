"""The duplicate trackers: each message once, in order where that is asked for, whatever a network does; and as few
numbers as they keep."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from immortal.coordinator.messenger.inbox import Arrival, DuplicateTracker, OrderedTracker
from immortal.coordinator.messenger.outbox import Outbox, RetryPolicy

SPAN_MAX = 16


class PlainSet:
    """The same rules with nothing forgotten: every ID that was seen, or that its sender will not send any more."""

    def __init__(self, *, ordered: bool) -> None:
        self.ordered = ordered
        self.done: set[int] = set()
        self.lowest_pending_id = 1

    def see(self, message_id: int, lowest_pending_id: int, skipped_count: int) -> Arrival:
        self.lowest_pending_id = max(self.lowest_pending_id, lowest_pending_id)
        self.done.update(range(1, self.lowest_pending_id))
        if message_id in self.done:
            return Arrival.DUPLICATE
        if message_id - self.lowest_pending_id >= SPAN_MAX:
            return Arrival.REFUSED
        skipped = set(range(max(1, message_id - skipped_count), message_id))
        if self.ordered and not set(range(1, message_id)) <= self.done | skipped:
            return Arrival.EARLY
        highest = max(self.done, default=0)
        self.done |= {known for known in skipped if known > highest} | {message_id}
        return Arrival.FIRST


def tracker_of(*, ordered: bool) -> DuplicateTracker | OrderedTracker:
    return OrderedTracker(SPAN_MAX) if ordered else DuplicateTracker(SPAN_MAX)


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60), st.integers(0, 20))), st.booleans())
def test_as_a_plain_set_whatever_comes(sightings: list[tuple[int, int, int]], ordered: bool) -> None:
    tracker, model = tracker_of(ordered=ordered), PlainSet(ordered=ordered)
    for first, second, skipped_count in sightings:
        lowest_pending_id, message_id = sorted((first, second))
        assert tracker.see(message_id, lowest_pending_id, skipped_count) == model.see(
            message_id, lowest_pending_id, skipped_count
        )
        assert tracker.highest_seen == max(model.done, default=0)
        unseen = set(range(1, tracker.highest_seen)) - model.done
        assert len(unseen) < SPAN_MAX
        assert unseen == set() if isinstance(tracker, OrderedTracker) else len(unseen) == tracker.unseen_count


@given(st.lists(st.integers(1, SPAN_MAX)))
def test_in_any_order_it_is_the_set_of_those_unseen(message_ids: list[int]) -> None:
    """The first time is told as the algorithm with a set of the unseen tells it."""
    tracker, highest, complement = DuplicateTracker(SPAN_MAX), 0, set[int]()
    for current in message_ids:
        first_time = current > highest or current in complement
        complement |= set(range(highest + 1, current))
        complement.discard(current)
        highest = max(highest, current)
        assert (tracker.see(current) == Arrival.FIRST) == first_time
        assert (tracker.highest_seen, tracker.unseen_count) == (highest, len(complement))


@given(st.lists(st.integers(1, SPAN_MAX)))
def test_in_order_nobody_is_unseen(message_ids: list[int]) -> None:
    """The first time is told as by a set of all that was seen; the set of unseen ones below the highest stays empty."""
    tracker, seen = OrderedTracker(SPAN_MAX), set[int]()
    for message_id in message_ids:
        sighting = tracker.see(message_id)
        if sighting == Arrival.EARLY:
            assert not set(range(1, message_id)) <= seen
            continue
        assert (sighting == Arrival.FIRST) == (message_id not in seen)
        seen.add(message_id)
        assert seen == set(range(1, tracker.highest_seen + 1))


@given(st.data(), st.booleans())
def test_a_sender_and_any_network(data: st.DataObject, ordered: bool) -> None:
    """Connections that break and lose what they carry, old ones that still bring something, receivers that start anew,
    replies in any order: to each receiver each message once, in order if asked for, none refused, and in the end all of
    them."""
    count = 40
    box = Outbox(RetryPolicy(), lambda: 0.0, in_flight_max=SPAN_MAX)
    for _ in range(count):
        box.add((b"",), None, 0)
    tracker = tracker_of(ordered=ordered)
    given_ids: list[int] = []  # to the receiver that there is
    unanswered: list[int] = []
    delivered: set[int] = set()
    lines: list[list[tuple[int, int, int]]] = [[]]  # connections, the newest last: what is on its way
    now_ns = 0

    def send() -> None:
        while (message := box.next_to_send()) is not None:
            lines[-1].append((message.message_id, box.lowest_pending_id, box.skipped_count(message)))
            box.mark_sent(message, now_ns)

    def arrive(line: list[tuple[int, int, int]]) -> Arrival:
        message_id, lowest_pending_id, skipped_count = line.pop(0)
        sighting = tracker.see(message_id, lowest_pending_id, skipped_count)
        assert sighting != Arrival.REFUSED
        if sighting == Arrival.FIRST:
            assert message_id not in given_ids
            if ordered:
                assert message_id > (given_ids[-1] if given_ids else 0)
                assert all(known in delivered for known in range(1, message_id))
            given_ids.append(message_id)
            delivered.add(message_id)
            unanswered.append(message_id)
        elif sighting == Arrival.DUPLICATE and message_id in given_ids and message_id not in unanswered:
            unanswered.append(message_id)
        return sighting

    def answer(index: int) -> None:
        message_id = unanswered.pop(index)
        box.record_reply(message_id, tracker.highest_seen)
        box.acknowledge(message_id)

    def reconnect() -> None:
        lines.append([])
        box.retransmit_all()

    actions = ["send", "arrive", "answer", "serve", "lose", "reconnect", "unnoticed", "anew", "due"]
    for action in data.draw(st.lists(st.sampled_from(actions), max_size=80)):
        if action == "send":
            send()
        elif action == "arrive" and any(lines):
            arrive(data.draw(st.sampled_from([line for line in lines if line])))
        elif action == "answer" and unanswered:
            answer(data.draw(st.integers(0, len(unanswered) - 1)))
        elif action == "serve":
            send()
            while lines[-1]:
                arrive(lines[-1])
            for _ in range(data.draw(st.integers(0, len(unanswered)))):
                answer(data.draw(st.integers(0, len(unanswered) - 1)))
        elif action == "lose":
            del lines[-1][data.draw(st.integers(0, len(lines[-1]))) :]
            reconnect()
        elif action == "reconnect":
            reconnect()
        elif action == "unnoticed":  # lost with one connection, and the sender goes on over the next before it knows
            lines[-1] = []
            send()
        elif action == "anew":
            tracker, given_ids, unanswered, lines = tracker_of(ordered=ordered), [], [], [[]]
            reconnect()
        elif action == "due":
            now_ns += 1_000_000_000
            box.retransmit_due(now_ns)
    reconnect()
    send()
    while lines[-1]:
        assert arrive(lines[-1]) != Arrival.EARLY, "all that is pending has come, in order"
    for _ in range(1000):
        if not len(box):
            break
        now_ns += 1_000_000_000
        box.retransmit_due(now_ns)
        send()
        while lines[-1]:
            arrive(lines[-1])
        while unanswered:
            answer(0)
    assert not len(box)
    assert delivered == set(range(1, count + 1))


@given(st.integers(1, 2**64 - 1), st.integers(0, 100), st.booleans())
def test_it_starts_anywhere_and_jumps_cost_nothing(lowest_pending_id: int, ahead: int, ordered: bool) -> None:
    tracker = tracker_of(ordered=ordered)
    sighting = tracker.see(lowest_pending_id + ahead, lowest_pending_id, ahead)
    assert sighting == (Arrival.FIRST if ahead < SPAN_MAX else Arrival.REFUSED)


@given(st.lists(st.tuples(st.integers(1, 2**64 - 1), st.integers(0, 2 * SPAN_MAX))))
def test_ids_far_ahead_leave_no_more_than_the_span_unseen(jumps: list[tuple[int, int]]) -> None:
    tracker = DuplicateTracker(SPAN_MAX)
    for lowest_pending_id, ahead in jumps:
        tracker.see(lowest_pending_id + ahead, lowest_pending_id)
        assert tracker.unseen_count < SPAN_MAX
        assert tracker._unseen.bit_length() < SPAN_MAX
