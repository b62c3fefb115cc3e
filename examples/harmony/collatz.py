"""Function for workers: ``python -m immortal.patterns.harmony work NAME collatz:steps`` starts one."""

from __future__ import annotations


def steps(number: int) -> int:
    """Count the steps of the Collatz sequence from ``number + 1`` to 1."""
    value, count = number + 1, 0
    while value != 1:
        value = value // 2 if value % 2 == 0 else 3 * value + 1
        count += 1
    return count
