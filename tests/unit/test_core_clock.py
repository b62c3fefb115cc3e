"""The instance's time: what is made of a wall clock that jumps, with readings by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from immortal.coordinator.core.clock import SPANS_MAX, STEPS_MAX, TOLERANCE_NS, RunningTime, SteadyClock, Timekeeper

S = 1_000_000_000
HOUR, DAY = 3600 * S, 86_400 * S
START = 1_700_000_000 * S
HOLD = 600 * S


def clock() -> SteadyClock:
    made = SteadyClock(START, HOLD)
    assert made.read(START, 0).time_ns == START
    return made


@pytest.mark.parametrize("jump", [HOUR, -HOUR, 3 * DAY, -3 * DAY, 3652 * DAY, -3652 * DAY])
def test_a_jump_is_held_back_and_over_when_the_clock_is_right_again(jump: int) -> None:
    one = clock()
    begun = one.read(START + 10 * S + jump, 10 * S)
    assert (begun.time_ns, begun.held_jump_ns, begun.is_news) == (START + 10 * S, jump, True)
    for at in range(11, 100):
        reading = one.read(START + at * S + jump, at * S)
        assert (reading.time_ns, reading.is_news) == (START + at * S, False)
    ended = one.read(START + 100 * S, 100 * S)
    assert (ended.time_ns, ended.jump_ended) == (START + 100 * S, True)


def test_a_jump_ahead_that_stands_is_taken_as_one_step() -> None:
    one = clock()
    for at in range(1, 601):
        assert one.read(START + at * S + HOUR, at * S).time_ns == START + at * S
    taken = one.read(START + 601 * S + HOUR, 601 * S)
    assert (taken.time_ns, taken.accepted_jump_ns) == (START + 601 * S + HOUR, HOUR)
    assert not one.read(START + 602 * S + HOUR, 602 * S).is_news


def test_a_jump_back_that_stands_slows_time_until_the_clock_has_caught_up() -> None:
    one = clock()
    at, last, taken = 0, START, None
    while True:
        at += 1
        reading = one.read(START + at * S - HOUR, at * S)
        assert 0 < reading.time_ns - last <= S
        last, taken = reading.time_ns, taken or reading.accepted_jump_ns
        if reading.jump_ended:
            break
    assert taken == -HOUR
    assert at == pytest.approx(601 + 20 * 3600, rel=0.01)
    assert abs(last - (START + at * S - HOUR)) <= TOLERANCE_NS


def test_a_jump_that_changes_has_to_stand_anew() -> None:
    one = clock()
    for at in range(1, 3000):
        jump = HOUR if at // 300 % 2 else DAY
        reading = one.read(START + at * S + jump, at * S)
        assert reading.accepted_jump_ns is None
        assert reading.time_ns == START + at * S


def test_many_small_steps_are_no_way_around() -> None:
    one = clock()
    for at in range(1, 500):
        reading = one.read(START + at * S + at * 900_000_000, at * S)  # 0.9 s more at each look
        assert abs(reading.time_ns - START - at * S) < S
        assert reading.accepted_jump_ns is None


def test_what_ntp_corrects_is_followed_without_a_step() -> None:
    one = clock()
    for at in range(1, 5000):
        assert not one.read(START + at * S + 800_000_000, at * S).is_news
    assert one.read(START + 5000 * S + 800_000_000, 5000 * S).time_ns == START + 5000 * S + 800_000_000


def test_an_operator_need_not_wait() -> None:
    one = clock()
    one.read(START + S + HOUR, S)
    accepted = one.accept(START + 2 * S + HOUR, 2 * S)
    assert (accepted.time_ns, accepted.accepted_jump_ns) == (START + 2 * S + HOUR, HOUR)
    assert one.accept(START + 3 * S + HOUR, 3 * S).accepted_jump_ns is None
    back = one.accept(START + 4 * S, 4 * S)
    assert (back.accepted_jump_ns, one.slowed) == (-HOUR, True)


@given(
    st.lists(
        st.tuples(st.integers(0, 400 * S), st.sampled_from([0, 0, HOUR, -HOUR, DAY, -3652 * DAY, 3652 * DAY, S // 2]))
    )
)
def test_time_never_goes_back_and_never_stands_still(steps: list[tuple[int, int]]) -> None:
    keeper = Timekeeper(SteadyClock(START, HOLD), RunningTime())
    keeper.running.start_span(START)
    steady, last = 0, START
    for passed, jump in steps:
        steady += passed
        wall = START + steady + jump
        time_ns = keeper.time_if_calm(wall, steady) or keeper.read(wall, steady).time_ns
        assert time_ns - last >= passed * 94 // 100
        last = time_ns
    keeper.running.extend_to(last)
    ran = sum(to_ns - from_ns for from_ns, to_ns in keeper.running.spans if from_ns)
    assert ran <= steady * 1001 // 1000 + 1, "no jump makes it older"


def test_the_core_hears_of_steps_and_of_what_came_first() -> None:
    keeper = Timekeeper(SteadyClock(START, HOLD), RunningTime())
    keeper.read(START, 0)
    (first,) = keeper.pop_events()
    assert (first.time_ns, first.steady_ns, first.jumped_ns) == (START, 0, 0)
    keeper.read(START + S, S)
    keeper.read(START + 2 * S + HOUR, 2 * S)
    assert keeper.pop_events() == []
    keeper.read(START + 3 * S + HOUR, 3 * S, accept=True)
    (step,) = keeper.pop_events()
    assert (step.time_ns, step.steady_ns, step.jumped_ns) == (START + 3 * S + HOUR, 3 * S, HOUR)
    assert Timekeeper(keeper.clock, keeper.running, keeper.steps).pop_events() == [step]


def test_only_the_last_steps_are_kept() -> None:
    keeper = Timekeeper(SteadyClock(START, HOLD), RunningTime())
    keeper.read(START, 0)
    for number in range(1, STEPS_MAX + 4):
        keeper.read(START + number * (HOUR + S), number * S, accept=True)
    assert [step.steady_ns for step in keeper.steps] == [number * S for number in range(4, STEPS_MAX + 4)]


# --- for how long it has run -----------------------------------------------------------------------------------------


def test_what_is_old_is_so_by_the_time_in_which_it_ran() -> None:
    running = RunningTime(((START, START + 10 * DAY),), START + 40 * DAY, START + 45 * DAY)
    assert running.time_of_age(0) == START + 45 * DAY
    assert running.time_of_age(5 * DAY) == START + 40 * DAY
    assert running.time_of_age(6 * DAY) == START + 9 * DAY, "the thirty days between two starts do not count"
    assert running.time_of_age(15 * DAY) == START
    assert running.time_of_age(15 * DAY + 1) == 0, "nothing is as old as that"


def test_a_short_stop_counts_as_running_and_a_long_one_does_not() -> None:
    running = RunningTime((), START, START + DAY)
    running.start_span(START + DAY + S // 2)
    running.start_span(START + 2 * DAY)
    running.extend_to(START + 3 * DAY)
    assert running.spans == ((START, START + DAY + S // 2), (START + 2 * DAY, START + 3 * DAY))


def test_a_start_before_what_was_reached_counts_less_rather_than_more() -> None:
    running = RunningTime(((START, START + DAY),), START + 60 * DAY, START + 61 * DAY)
    running.start_span(START + DAY // 2)
    assert running.spans == ((START, START + DAY // 2), (START + DAY // 2, START + DAY // 2))


def test_spans_are_few() -> None:
    running = RunningTime()
    for number in range(3 * SPANS_MAX):
        running.start_span(START + number * HOUR)
        running.extend_to(START + number * HOUR + S)
    assert len(running.spans) == SPANS_MAX
    assert running.time_of_age(S) == START + (3 * SPANS_MAX - 1) * HOUR
