"""What a receiver has, compared with what a replay makes: the first message that is another one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from immortal.protocol.messages import encode_incoming_rpc
from immortal.replay.verify import Difference, ReceiverComparison


def message(number: int, text: bytes = b"") -> bytes:
    return encode_incoming_rpc(3, 1, number.to_bytes(2, "big") + text)


def segment(first: int, count: int) -> tuple[int, int, bytes]:
    return first, count, b"".join(message(position) for position in range(first, first + count))


def segments(sizes: list[int], first: int = 1) -> list[tuple[int, int, bytes]]:
    cut = []
    for size in sizes:
        cut.append(segment(first, size))
        first += size
    return cut


@given(
    then=st.lists(st.integers(1, 5), max_size=8),
    now=st.lists(st.integers(1, 5), max_size=8),
    then_first=st.integers(1, 6),
    now_first=st.integers(1, 6),
)
def test_the_same_is_the_same_however_it_is_cut(
    then: list[int], now: list[int], then_first: int, now_first: int
) -> None:
    witness = ReceiverComparison(iter(segments(then, then_first)))
    for batch in segments(now, now_first):
        witness.compare_outputs(*batch)
    assert witness.difference is None
    common = min(then_first + sum(then), now_first + sum(now)) - 1
    both = common >= max(then_first, now_first)
    assert witness.compared_position == (common if both else 0)


@given(then=st.lists(st.integers(1, 5), min_size=4), now=st.lists(st.integers(1, 5), min_size=4), data=st.data())
def test_the_first_message_that_is_another_one_is_found(then: list[int], now: list[int], data: st.DataObject) -> None:
    both = min(sum(then), sum(now))
    changed = data.draw(st.sets(st.integers(1, both), min_size=1))
    witness = ReceiverComparison(iter(segments(then)))
    position = 1
    for size in now:
        numbers = range(position, position + size)
        witness.compare_outputs(
            position, size, b"".join(message(each, b"!" if each in changed else b"") for each in numbers)
        )
        position += size
    first = min(changed)
    assert witness.difference == Difference(first, message(first), message(first, b"!"))


def test_impulses_which_only_the_receiver_has_are_passed_over() -> None:
    witness = ReceiverComparison(iter(segments([10])))
    witness.compare_outputs(*segment(1, 3))
    witness.compare_outputs(*segment(6, 5))  # 4 and 5 were impulses
    assert witness.difference is None
    assert witness.compared_position == 10


def test_what_the_receiver_has_not_is_no_difference() -> None:
    witness = ReceiverComparison(iter([segment(5, 2)]))
    witness.compare_outputs(1, 1, message(99))  # trimmed there
    witness.compare_outputs(*segment(5, 2))
    witness.compare_outputs(7, 1, message(99))  # not there yet
    assert witness.difference is None
    assert witness.compared_position == 6
