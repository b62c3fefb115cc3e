"""A replay's messages against the marks of the log, whichever is known first."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from immortal.coordinator.core.interfaces import OutputBatch, OutputMark
from immortal.coordinator.core.output import output_check
from immortal.coordinator.core.output.output_check import OutputCheck, OutputDivergenceError
from immortal.protocol.checksum import crc64
from tests.helpers.core import rpc


class Stream:
    """What a live run made, with the mark at each position; and a replay of it."""

    def __init__(self, messages: list[bytes]) -> None:
        self.messages = messages
        self.checksums = [0]
        for message in messages:
            self.checksums.append(crc64(message, self.checksums[-1]))

    def mark(self, position: int) -> OutputMark:
        return OutputMark(position, self.checksums[position])

    def batch(self, first: int, last: int) -> tuple[OutputBatch, int, int]:
        payload = b"".join(self.messages[first - 1 : last])
        return OutputBatch(first, last - first + 1, payload), self.checksums[first - 1], self.checksums[last]


LIVE = Stream([rpc(number) for number in range(1, 11)])
OTHER = Stream([rpc(number if number != 7 else 99) for number in range(1, 11)])


def check_of(replay: Stream, marks: list[int], cuts: list[int], *, marks_first: bool) -> OutputCheck:
    check = OutputCheck("b")

    def expect() -> None:
        for index, position in enumerate(marks):
            check.expect(100 + index, LIVE.mark(position))
        check.compare()

    def make() -> None:
        for first, last in zip([1, *[cut + 1 for cut in cuts]], [*cuts, 10], strict=True):
            check.add_made(*replay.batch(first, last))

    for step in (expect, make) if marks_first else (make, expect):
        step()
    return check


@given(
    st.lists(st.integers(1, 10), max_size=6).map(sorted),
    st.sets(st.integers(1, 9), max_size=4).map(sorted),
    st.booleans(),
)
def test_the_same_messages_pass_whatever_the_batches(marks: list[int], cuts: list[int], marks_first: bool) -> None:
    check_of(LIVE, marks, cuts, marks_first=marks_first).finish()


@given(
    st.lists(st.integers(1, 10), min_size=1, max_size=6).map(sorted),
    st.sets(st.integers(1, 9), max_size=4).map(sorted),
    st.booleans(),
)
def test_another_message_is_found_by_the_first_mark_behind_it(
    marks: list[int], cuts: list[int], marks_first: bool
) -> None:
    wrong = [index for index, position in enumerate(marks) if position >= 7]
    if not wrong:
        check_of(OTHER, marks, cuts, marks_first=marks_first).finish()
        return
    with pytest.raises(OutputDivergenceError) as caught:
        check_of(OTHER, marks, cuts, marks_first=marks_first)
    divergence = caught.value.divergence
    right = max([position for position in marks if position < 7], default=0)
    assert divergence.sequence_id == 100 + wrong[0]
    assert (divergence.after_position, divergence.position) == (right, marks[wrong[0]])
    made = [position for position, _ in divergence.made]
    assert made == list(range(right + 1, made[-1] + 1))  # batches behind a mark that has not come may not be made yet
    assert (7, rpc(99)) in divergence.made


def test_too_few_are_found_at_the_end() -> None:
    check = OutputCheck("b")
    check.expect(3, LIVE.mark(5))
    check.add_made(*LIVE.batch(1, 4))
    with pytest.raises(OutputDivergenceError) as caught:
        check.finish()
    assert (caught.value.divergence.made_position, caught.value.divergence.position) == (4, 5)


def test_marks_at_or_below_the_checkpoint_s_are_its_own() -> None:
    check = OutputCheck("b", LIVE.mark(5))
    check.expect(1, OutputMark(4, 12345))
    check.expect(2, LIVE.mark(6))
    check.add_made(*LIVE.batch(6, 10))
    check.finish()


def test_impulses_take_positions_and_change_no_checksum() -> None:
    check = OutputCheck("b")
    checksum = crc64(rpc(1))
    check.add_made(OutputBatch(1, 1, rpc(1)), 0, checksum)
    check.add_made(OutputBatch(2, 3, b"impulses that are acknowledged"), checksum, checksum)
    for position in (1, 2, 3, 4):
        check.expect(position, OutputMark(position, checksum))
    check.compare()
    check.finish()


def test_what_was_made_long_before_its_mark_is_still_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_check, "KEPT_SIZE_BYTES_MAX", len(rpc(1)) * 2)
    check = OutputCheck("b")
    for position in range(1, 11):
        check.add_made(*OTHER.batch(position, position))
    check.expect(1, LIVE.mark(8))  # its messages are gone; the next one covers them
    check.compare()
    check.expect(2, LIVE.mark(10))
    with pytest.raises(OutputDivergenceError):
        check.compare()
