"""What may be asked for again and again: so much at once, and so much a second."""

from __future__ import annotations

from immortal.coordinator.core.client.table import S_NS, TokenBucket


def test_what_is_used_up_comes_back_second_by_second() -> None:
    allowance = TokenBucket(100, 0)
    allowance.take(99)
    assert allowance.is_left(0)
    allowance.take(1)
    assert not allowance.is_left(0)
    assert allowance.is_left(S_NS // 100)
    allowance.take(201)  # given where anything is left, and made up for later
    assert not allowance.is_left(2 * S_NS)
    assert allowance.is_left(2 * S_NS + S_NS // 50)


def test_what_is_not_used_does_not_gather() -> None:
    allowance = TokenBucket(100, 0)
    assert allowance.is_left(10 * S_NS)
    allowance.take(100)
    assert not allowance.is_left(10 * S_NS)


def test_a_clock_that_is_set_gives_nothing_back() -> None:
    allowance = TokenBucket(100, 10 * S_NS)
    allowance.take(100)
    assert not allowance.is_left(0)
    assert allowance.is_left(S_NS // 100), "it counts from then on"
