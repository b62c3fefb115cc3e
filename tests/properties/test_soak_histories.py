"""The checker of counters' histories agrees with a search through all orders."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hypothesis import example, given
from hypothesis import strategies as st

from tests.soak.histories import Operation, problems_of


def is_linearizable(operations: Sequence[Operation], final: int) -> bool:
    """By the definition: some order of what was answered, and of some of the rest, agrees with times and numbers."""
    known = [one for one in operations if one.number is not None]
    unknown = [one for one in operations if one.number is None and one.adds]
    for count in range(len(unknown) + 1):
        for done in itertools.combinations(unknown, count):
            if any(agrees(order, final) for order in itertools.permutations([*known, *done])):
                return True
    return False


def agrees(order: Sequence[Operation], final: int) -> bool:
    counted = 0
    for place, one in enumerate(order):
        if any(one.begun_ns > (later.ended_ns or one.begun_ns) for later in order[place + 1 :]):
            return False
        counted += one.adds
        if one.number is not None and one.number != counted:
            return False
    return counted == final


@st.composite
def operation(draw: st.DrawFn) -> Operation:
    begun_ns = draw(st.integers(0, 8))
    adds = draw(st.booleans())
    if draw(st.integers(0, 3)) == 0:
        return Operation(adds, begun_ns, None, None)
    return Operation(adds, begun_ns, begun_ns + draw(st.integers(1, 4)), draw(st.integers(int(adds), 4)))


@given(st.lists(operation(), max_size=5), st.integers(0, 5))
@example([Operation(True, 0, 1, 1), Operation(False, 2, 3, 0)], 1)  # a read of the past
@example([Operation(True, 0, 1, 2), Operation(True, 2, None, None)], 2)  # done before it was asked for
@example([Operation(True, 0, None, None), Operation(True, 3, 4, 2), Operation(False, 1, 2, 1)], 2)
@example([Operation(True, 0, 1, 1), Operation(True, 0, 1, 1)], 1)
def test_it_agrees_with_the_definition(operations: list[Operation], final: int) -> None:
    assert (not problems_of(operations, final)) == is_linearizable(operations, final)


@st.composite
def history(draw: st.DrawFn) -> tuple[list[Operation], int]:
    """One of a counter that is right: each takes effect at a moment of its own, within its time."""
    moments_ns = draw(st.lists(st.integers(0, 40), unique=True, max_size=6))
    operations, counted = [], 0
    for at_ns in sorted(moments_ns):
        adds = draw(st.booleans())
        begun_ns = at_ns - draw(st.integers(0, 8))
        counted += adds
        if draw(st.integers(0, 3)) == 0:
            operations.append(Operation(adds, begun_ns, None, None))
        else:
            operations.append(Operation(adds, begun_ns, at_ns + draw(st.integers(0, 8)), counted))
    lost = draw(st.lists(st.integers(0, 40).map(lambda at_ns: Operation(True, at_ns, None, None)), max_size=2))
    return draw(st.permutations([*operations, *lost])), counted


@given(history())
def test_a_counter_that_is_right_passes(given: tuple[list[Operation], int]) -> None:
    operations, final = given
    assert problems_of(operations, final) == []
