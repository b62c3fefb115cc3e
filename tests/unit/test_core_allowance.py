"""What may be asked for again and again: so much at once, and so much a second."""

from __future__ import annotations

from immortal.coordinator.core.permissions import TokenBucket

S_NS = 1_000_000_000


def test_what_is_used_up_comes_back_second_by_second() -> None:
    allowance = TokenBucket(100, 0)
    allowance.tokens -= 99
    assert allowance.fill(0) > 0
    allowance.tokens -= 1
    assert allowance.fill(0) <= 0
    assert allowance.fill(S_NS // 100) > 0
    allowance.tokens -= 201  # given where anything is left, and made up for later
    assert allowance.fill(2 * S_NS) <= 0
    assert allowance.fill(2 * S_NS + S_NS // 50) > 0


def test_what_is_not_used_does_not_gather() -> None:
    allowance = TokenBucket(100, 0)
    assert allowance.fill(10 * S_NS) > 0
    allowance.tokens -= 100
    assert allowance.fill(10 * S_NS) <= 0


def test_a_clock_that_is_set_gives_nothing_back() -> None:
    allowance = TokenBucket(100, 10 * S_NS)
    allowance.tokens -= 100
    assert allowance.fill(0) <= 0
    assert allowance.fill(S_NS // 100) > 0, "it counts from then on"
