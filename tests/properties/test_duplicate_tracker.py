"""The duplicate tracker against a plain set of everything seen."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from coordinator.messenger.duplicates import DuplicateTracker, Sighting

SPAN_MAX = 16


class PlainSet:
    """The same rules with nothing forgotten: what was seen, and how far the sender has said that it is."""

    def __init__(self) -> None:
        self.seen: set[int] = set()
        self.lowest_pending_id = 1

    def see(self, message_id: int, lowest_pending_id: int) -> Sighting:
        self.lowest_pending_id = max(self.lowest_pending_id, lowest_pending_id)
        if message_id < self.lowest_pending_id or message_id in self.seen:
            return Sighting.DUPLICATE
        if message_id - self.lowest_pending_id >= SPAN_MAX:
            return Sighting.REFUSED
        self.seen.add(message_id)
        return Sighting.FIRST


def check_bounds(tracker: DuplicateTracker) -> None:
    assert len(tracker.missing) < SPAN_MAX
    assert all(tracker.lowest_pending_id <= missing < tracker.highest_seen for missing in tracker.missing)


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60))))
def test_as_a_plain_set_whatever_comes(sightings: list[tuple[int, int]]) -> None:
    tracker, model = DuplicateTracker(SPAN_MAX), PlainSet()
    for first, second in sightings:
        lowest_pending_id, message_id = sorted((first, second))
        assert tracker.see(message_id, lowest_pending_id) == model.see(message_id, lowest_pending_id)
        check_bounds(tracker)


@given(st.lists(st.integers(1, SPAN_MAX)))
def test_as_the_seed_describes_it_when_nothing_is_acknowledged(message_ids: list[int]) -> None:
    tracker, seen = DuplicateTracker(SPAN_MAX), set[int]()
    for message_id in message_ids:
        assert (tracker.see(message_id) == Sighting.FIRST) == (message_id not in seen)
        seen.add(message_id)
        assert tracker.highest_seen == max(seen)
        assert tracker.missing == set(range(1, max(seen))) - seen


@given(st.data())
def test_a_sender_that_keeps_to_its_span_is_never_refused_and_each_is_seen_once(data: st.DataObject) -> None:
    """A sender with a window, a network that loses, repeats and delays, and receivers that start anew."""
    tracker = DuplicateTracker(SPAN_MAX)
    pending = set(range(1, 41))
    delayed: list[tuple[int, int]] = []
    seen: list[int] = []
    for _ in range(data.draw(st.integers(0, 120))):
        lowest = min(pending, default=41)
        if lowest == 41:
            break
        action = data.draw(st.sampled_from(["send", "send", "delay", "late", "acknowledge", "new receiver"]))
        window = sorted(message_id for message_id in pending if message_id < lowest + SPAN_MAX)
        if action == "new receiver":
            tracker, seen, delayed = DuplicateTracker(SPAN_MAX), [], []
        elif action == "acknowledge":
            pending -= set(seen[: data.draw(st.integers(0, len(seen)))])
        else:
            message = (data.draw(st.sampled_from(window)), lowest)
            if action == "delay":
                delayed.append(message)
                continue
            if action == "late" and delayed:
                message = delayed.pop(0)
            sighting = tracker.see(*message)
            assert sighting != Sighting.REFUSED
            assert (sighting == Sighting.FIRST) == (message[0] not in seen and message[0] >= tracker.lowest_pending_id)
            if sighting == Sighting.FIRST:
                seen.append(message[0])
        check_bounds(tracker)


@given(st.integers(1, 2**64 - 1), st.integers(0, 100))
def test_it_starts_anywhere_and_jumps_cost_nothing(lowest_pending_id: int, ahead: int) -> None:
    tracker = DuplicateTracker(SPAN_MAX)
    sighting = tracker.see(lowest_pending_id + ahead, lowest_pending_id)
    assert sighting == (Sighting.FIRST if ahead < SPAN_MAX else Sighting.REFUSED)
    assert len(tracker.missing) == (ahead if ahead < SPAN_MAX else 0)
