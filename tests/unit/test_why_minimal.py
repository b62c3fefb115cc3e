"""Delta debugging: of inputs that matter none is left out, of all others each, in few tries."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from immortal.replay.travel.minimal import fewest, literals


def places(count: int) -> list[tuple[int, int]]:
    return [(number // 3, number % 3) for number in range(count)]


@given(st.integers(1, 60), st.data())
def test_all_that_matter_are_left_and_nothing_else(count: int, data: st.DataObject) -> None:
    inputs = places(count)
    needed = data.draw(st.sets(st.sampled_from(inputs)))
    assert set(fewest(inputs, lambda some: needed <= set(some), lambda: False)) == needed


def test_what_needs_a_number_of_inputs_gets_as_many() -> None:
    assert len(fewest(places(40), lambda some: len(some) >= 7, lambda: False)) == 7


@pytest.mark.parametrize("at", [0, 5_000, 9_999])
def test_one_of_many_is_found_in_few_tries(at: int) -> None:
    inputs, tries = places(10_000), list[int]()

    def holds(some: list[tuple[int, int]]) -> bool:
        tries.append(len(some))
        return inputs[at] in some

    assert fewest(inputs, holds, lambda: False) == [inputs[at]]
    assert len(tries) <= 30
    assert sum(tries) <= 2 * len(inputs) + 10


def test_without_time_it_is_what_was_left_by_then() -> None:
    inputs, tries = places(100), list[int]()

    def holds(some: list[tuple[int, int]]) -> bool:
        tries.append(len(some))
        return inputs[99] in some

    assert fewest(inputs, holds, lambda: len(tries) >= 3) == inputs[75:]


def test_only_plain_values_are_literals() -> None:
    assert literals(1, "a", b"b", [None, {"x": 2.5}], True) == ["1", "'a'", "b'b'", "[None, {'x': 2.5}]", "True"]
    assert literals(float("nan"), object(), [{1}]) == [None] * 3
