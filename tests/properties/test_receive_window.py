"""The receive window: each message once, in order where that is asked for, whatever a network does; what it reports as
missing is what is missing; and as few numbers as it keeps."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from immortal.coordinator.messenger.envelope import decode_missing, encode_missing
from immortal.coordinator.messenger.inbox import Arrival, LinkState, ReceiveWindow
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
        self.done.update(range(max(1, message_id - skipped_count), message_id + 1))
        early = self.ordered and not set(range(1, message_id)) <= self.done
        return Arrival.EARLY if early else Arrival.FIRST


def missing_of(window: ReceiveWindow) -> set[int]:
    """Return what a window reports, through its bytes."""
    return set(decode_missing(encode_missing(window.lowest_pending_id, window.missing)))


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60), st.integers(0, 20))), st.booleans())
def test_as_a_plain_set_whatever_comes(sightings: list[tuple[int, int, int]], ordered: bool) -> None:
    window, model = ReceiveWindow(ordered, SPAN_MAX), PlainSet(ordered=ordered)
    for first, second, skipped_count in sightings:
        lowest_pending_id, message_id = sorted((first, second))
        assert window.mark_received(message_id, lowest_pending_id, skipped_count) == model.see(
            message_id, lowest_pending_id, skipped_count
        )
        assert window.highest_seen == max(model.done, default=0)
        missing = set(range(1, window.highest_seen)) - model.done
        assert missing == missing_of(window)
        assert len(missing) < SPAN_MAX
        assert window.complete_id == min(missing, default=window.highest_seen + 1) - 1
        assert all(window.is_missing(known) == (known in missing) for known in range(1, window.highest_seen + 2))


@given(st.lists(st.integers(1, SPAN_MAX)), st.booleans())
def test_in_any_order_it_is_the_set_of_those_missing(message_ids: list[int], ordered: bool) -> None:
    """The first time is told as the algorithm with a set of the missing tells it."""
    window, highest, complement = ReceiveWindow(ordered, SPAN_MAX), 0, set[int]()
    for current in message_ids:
        first_time = current > highest or current in complement
        complement |= set(range(highest + 1, current))
        complement.discard(current)
        highest = max(highest, current)
        assert (window.mark_received(current) in (Arrival.FIRST, Arrival.EARLY)) == first_time
        assert (window.highest_seen, missing_of(window)) == (highest, complement)


@given(st.permutations(range(1, SPAN_MAX + 1)), st.sets(st.integers(1, SPAN_MAX)))
def test_what_came_early_is_given_in_order_and_what_had_no_room_once_it_comes_again(
    message_ids: list[int], without_room: set[int]
) -> None:
    link, given_ids = LinkState(1, 1, ReceiveWindow(True, SPAN_MAX)), list[int]()
    dropped: list[int] = []
    for message_id in [*message_ids, *sorted(without_room)]:
        arrival = link.mark_received(message_id, 1)
        if arrival == Arrival.EARLY:
            if message_id in without_room and message_id not in dropped:
                dropped.append(message_id)
                link.stored.size_bytes += 1 << 40
                assert not link.store_early(message_id, message_id, (b"x",))
                link.stored.size_bytes -= 1 << 40
                assert link.window.is_missing(message_id)
            else:
                assert link.store_early(message_id, message_id, (b"x",))
        elif arrival == Arrival.FIRST:
            given_ids.append(message_id)
        given_ids += link.pop_early()
    assert given_ids == list(range(1, SPAN_MAX + 1))
    assert (link.early, link.stored.size_bytes) == ({}, 0)


@given(st.data(), st.booleans())
def test_a_sender_and_any_network(data: st.DataObject, ordered: bool) -> None:
    """Connections that break and lose what they carry, old ones that still bring something, receivers that start anew,
    replies in any order: to each receiver each message once, in order if asked for, none refused, and in the end all of
    them."""
    count = 40
    box = Outbox(RetryPolicy(), lambda: 0.0, in_flight_max=SPAN_MAX)
    for _ in range(count):
        box.add((b"",), None, 0)
    link = LinkState(1, 1, ReceiveWindow(ordered, SPAN_MAX))
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
        sighting = link.mark_received(message_id, lowest_pending_id, skipped_count)
        assert sighting != Arrival.REFUSED
        if sighting == Arrival.FIRST and not link.early:
            give(message_id)
        elif sighting == Arrival.FIRST:
            link.early[message_id] = message_id, 0
        elif sighting == Arrival.EARLY:
            assert link.store_early(message_id, message_id, ())
        elif message_id in given_ids and message_id not in unanswered:
            unanswered.append(message_id)
        for early in link.pop_early() if link.early else ():
            give(early)
        return sighting

    def give(message_id: int) -> None:
        assert message_id not in given_ids
        if ordered:
            assert message_id > (given_ids[-1] if given_ids else 0)
            assert all(known in delivered for known in range(1, message_id))
        given_ids.append(message_id)
        delivered.add(message_id)
        unanswered.append(message_id)

    def report() -> None:
        box.record_missing(missing_of(link.window))

    def answer(index: int) -> None:
        message_id = unanswered.pop(index)
        box.record_reply(message_id, max(message_id, link.window.complete_id), now_ns)
        box.acknowledge(message_id)

    def reconnect() -> None:
        lines.append([])
        box.retransmit_all()

    actions = ["send", "arrive", "answer", "serve", "lose", "reconnect", "unnoticed", "anew", "due", "report"]
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
            link = LinkState(1, 1, ReceiveWindow(ordered, SPAN_MAX))
            given_ids, unanswered, lines = [], [], [[]]
            reconnect()
        elif action == "report":
            report()
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
    window = ReceiveWindow(ordered, SPAN_MAX)
    sighting = window.mark_received(lowest_pending_id + ahead, lowest_pending_id, ahead)
    assert sighting == (Arrival.FIRST if ahead < SPAN_MAX else Arrival.REFUSED)


@given(st.lists(st.tuples(st.integers(1, 2**64 - 1), st.integers(0, 2 * SPAN_MAX))))
def test_ids_far_ahead_leave_no_more_than_the_span_missing(jumps: list[tuple[int, int]]) -> None:
    window = ReceiveWindow(span_max=SPAN_MAX)
    for lowest_pending_id, ahead in jumps:
        window.mark_received(lowest_pending_id + ahead, lowest_pending_id)
        assert window.missing.bit_length() < SPAN_MAX
