"""One stream against its two logs: each way in which it can be wrong, and what is no fault at all."""

from __future__ import annotations

import pytest

from immortal.coordinator.core.interfaces import IMPULSES
from immortal.pipeline.jobs.stream_audit import FINDINGS_PER_STREAM_MAX, Mark, Needs, Part, StreamAudit
from immortal.protocol.checksum import crc64
from immortal.protocol.messages import RpcType, encode_incoming_rpc

MS = 1_000_000


def call(number: int) -> bytes:
    return encode_incoming_rpc(3, RpcType.FORK, b"%03d" % number * (1 + number % 3))


def impulse(number: int) -> bytes:
    return encode_incoming_rpc(3, RpcType.IMPULSE, b"%d" % number)


def part(first: int, *messages: bytes, sent_ms: int = 0) -> Part:
    impulses = sum(message[-len(message) :] in map(impulse, range(100)) for message in messages)
    return Part(first, len(messages), impulses, sent_ms * MS, b"".join(messages))


def calls(first: int, last: int, sent_ms: int = 0) -> Part:
    return part(first, *map(call, range(first, last + 1)), sent_ms=sent_ms)


def mark(position: int, record: int = 1, *, of: int | None = None, time_ms: int = 0) -> Mark:
    """The mark of a stream of calls; ``of``: as if only so many had been made."""
    made = b"".join(map(call, range(1, (position if of is None else of) + 1)))
    return Mark(position, crc64(made), record, time_ms * MS)


def audited(marks: list[Mark], parts: list[Part], sender: str = "a") -> StreamAudit:
    """Part n is executed with record n, at second n."""
    stream = StreamAudit(sender, "b")
    for each in marks:
        stream.add_mark(each)
    for record, each in enumerate(parts, 1):
        stream.add_batch(record, record * 1000 * MS, each)
    stream.finish()
    return stream


def found(stream: StreamAudit) -> list[tuple[str, int, int, int]]:
    assert stream.figures.counts == {
        kind: sum(finding.kind == kind for finding in stream.findings) for kind in stream.figures.counts
    }
    return [(finding.kind, finding.first, finding.last, finding.record) for finding in stream.findings]


@pytest.mark.parametrize("cuts", [[9], [3, 9], [1, 2, 3, 4, 5, 6, 7, 8, 9], [5, 6, 9]])
@pytest.mark.parametrize("marks", [[9], [1, 4, 9], [2, 5], [3, 30], []])
def test_however_batches_and_marks_lie_a_sound_stream_is_sound(cuts: list[int], marks: list[int]) -> None:
    starts = [1, *(cut + 1 for cut in cuts[:-1])]
    stream = audited([mark(position) for position in marks], list(map(calls, starts, cuts)))
    assert found(stream) == []
    figures = stream.figures
    assert (figures.messages, figures.first, figures.last, figures.impulses) == (9, 1, 9, 0)
    assert figures.compared == max([position for position in marks if position <= 9], default=0)
    assert figures.made == (marks[-1] if marks else 0)


def test_missing_messages_are_lost_and_only_they() -> None:
    stream = audited([mark(2), mark(4), mark(8)], [calls(1, 2), calls(5, 6), calls(7, 9)])
    assert found(stream) == [("lost", 3, 4, 2)]
    assert stream.findings[0].behind_record == 1
    assert "messages 3 to 4 of 'a': never executed by 'b'" in stream.findings[0].text
    assert stream.figures.compared == 2 + 4  # those behind the gap go on from the mark at its end


def test_what_was_missing_and_comes_later_is_out_of_order() -> None:
    stream = audited([], [calls(1, 2), calls(6, 8), calls(3, 4), calls(9, 9)])
    assert found(stream) == [("order", 3, 4, 3), ("lost", 5, 5, 2)]


def test_what_was_there_and_comes_again_is_a_duplicate() -> None:
    stream = audited([mark(6)], [calls(1, 3), calls(2, 5), calls(1, 1), calls(6, 6)])
    assert found(stream) == [("duplicate", 2, 3, 2), ("duplicate", 1, 1, 3)]
    assert stream.figures.messages == stream.figures.compared == 6


def test_one_batch_that_is_late_and_double_and_new() -> None:
    stream = audited([], [calls(1, 2), calls(5, 6), calls(2, 8)])
    assert found(stream) == [("duplicate", 2, 2, 3), ("order", 3, 4, 3), ("duplicate", 5, 6, 3)]
    assert stream.figures.last == 8


def test_messages_that_changed_places_or_were_altered() -> None:
    swapped = part(1, call(1), call(3), call(2), call(4))
    stream = audited([mark(1), mark(3), mark(4)], [swapped])
    assert found(stream) == [("content", 2, 3, 1)]  # narrowed down to what lies between two marks
    altered = part(4, call(44), call(5))
    stream = audited([mark(3), mark(5), mark(7)], [calls(1, 3), altered, calls(6, 7)])
    assert found(stream) == [("content", 4, 5, 2)]
    assert stream.figures.compared == 7


def test_impulses_take_positions_and_are_in_no_checksum() -> None:
    made = [call(1), impulse(2), call(3), impulse(4), call(5)]
    checks = {3: crc64(call(1) + call(3)), 4: crc64(call(1) + call(3)), 5: crc64(call(1) + call(3) + call(5))}
    marks = [Mark(position, check, position, 0) for position, check in checks.items()]
    for cut in range(1, 5):
        stream = audited(marks, [part(1, *made[:cut]), part(cut + 1, *made[cut:])])
        assert found(stream) == []
        assert (stream.figures.messages, stream.figures.impulses, stream.figures.compared) == (5, 2, 5)
    wrong = audited(marks, [part(1, call(1), impulse(2), call(33), impulse(4), call(5))])
    assert found(wrong) == [("content", 1, 3, 1)]


def test_a_mark_may_count_impulses_that_a_crash_took_away() -> None:
    """Record 2 was sealed with an impulse at position 3, which was not durable; the calls took its place."""
    counted = Mark(3, mark(2).checksum, 2, 0)
    stream = audited([mark(1), counted, mark(5, 3)], [calls(1, 4), calls(5, 5)])
    assert found(stream) == []
    assert (stream.figures.shifted_marks, stream.figures.compared) == (1, 5)
    lost_call = audited([mark(1), Mark(3, mark(3).checksum, 2, 0)], [part(1, call(1), call(3), call(4))])
    assert found(lost_call) == [("content", 2, 3, 1)]  # a missing call is never taken for that


def test_a_log_that_begins_later_goes_on_from_the_first_mark() -> None:
    stream = audited([mark(4), mark(6), mark(9)], [calls(6, 7), calls(8, 9)])
    assert found(stream) == [("lost", 1, 5, 1)]  # who knows the log knows that it was trimmed
    assert stream.findings[0].behind_record == -1
    assert stream.figures.compared == 3
    stream = audited([mark(5), mark(7)], [part(6, call(7), call(6)), calls(8, 9)])
    assert ("content", 6, 7, 1) in found(stream)


def test_clocks_show_what_was_executed_too_early() -> None:
    stream = StreamAudit("a", "b", tolerance_ns=5 * MS)
    stream.add_mark(mark(2, 7, time_ms=100))
    stream.add_batch(1, 90 * MS, calls(1, 2, sent_ms=95))  # 5 ms before it was sent: that much clocks may differ
    stream.add_batch(2, 200 * MS, calls(3, 3, sent_ms=95))
    stream.finish()
    assert found(stream) == []
    stream.add_batch(3, 200 * MS, calls(4, 4, sent_ms=94))
    stream.add_batch(4, 200 * MS, calls(5, 5, sent_ms=206))
    assert found(stream) == [("causality", 4, 4, 3), ("causality", 5, 5, 4)]
    assert "was sent 6.000 ms before record 7 of 'a'" in stream.findings[0].text
    assert stream.findings[1].text == "message 5 of 'a': logged 6.000 ms before being sent"


def test_it_says_which_records_lie_before_which() -> None:
    stream = audited([mark(2, 3), mark(5, 4), mark(6, 8)], [calls(1, 3), calls(4, 5), calls(6, 6), calls(7, 9)])
    assert stream.needs == [Needs(1, 3), Needs(3, 4), Needs(4, 8)]


def test_calls_behind_the_last_mark_are_noted_impulses_not() -> None:
    messages = [call(1), call(2), impulse(3)]
    stream = audited([mark(1)], [part(1, *messages, sent_ms=8), part(4, impulse(4)), part(5, call(5), sent_ms=9)])
    assert stream.figures.unmarked == [(2, 3, 8 * MS, 1), (5, 5, 9 * MS, 3)]


def test_impulses_to_oneself_have_positions_only() -> None:
    stream = audited([], [part(1, impulse(1)), part(3, impulse(3))], sender=IMPULSES)
    assert found(stream) == [("lost", 2, 2, 2)]
    assert stream.figures.unmarked == []


def test_of_very_many_findings_only_the_number_stays() -> None:
    count = FINDINGS_PER_STREAM_MAX + 10
    stream = StreamAudit("a", "b")
    stream.add_batch(1, 0, calls(1, 1))
    for record in range(2, count + 2):
        stream.add_batch(record, 0, calls(1, 1))
    stream.finish()
    assert len(stream.findings) == FINDINGS_PER_STREAM_MAX
    assert stream.figures.counts == {"duplicate": count}


# --- streams that begin anew, since a log was replaced by the operator's word ----------------------------------------


def new_life(*numbers: int) -> Mark:
    return Mark(len(numbers), crc64(b"".join(map(call, numbers))), 9, 0)


@pytest.mark.parametrize(
    "second",
    [
        [part(1, call(21), call(22)), part(3, call(23))],  # its first batch ends where one of the first life did
        [part(1, call(21)), part(2, call(22), call(23))],  # ... or not: what follows it says so
    ],
)
def test_a_sender_with_another_log_begins_anew(second: list[Part]) -> None:
    stream = audited([new_life(21, 22, 23)], [calls(1, 2), calls(3, 3), part(4, call(4), call(5)), *second])
    assert found(stream) == []
    assert (stream.figures.restarts, stream.figures.first, stream.figures.last) == (1, 1, 3)
    assert (stream.figures.messages, stream.figures.compared) == (8, 3)


def test_of_the_life_before_only_positions_are_judged() -> None:
    second = [part(1, call(21), call(22)), part(3, call(23))]
    stream = audited([new_life(21, 22, 23)], [calls(1, 2), calls(4, 9), calls(8, 9), *second])
    assert found(stream) == [("duplicate", 8, 9, 3), ("lost", 3, 3, 2)]


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([calls(1, 2), calls(3, 4), calls(1, 2), calls(5, 5)], [("duplicate", 1, 2, 3)]),
        ([calls(1, 4), calls(5, 6), calls(1, 2), calls(7, 7)], [("duplicate", 1, 2, 3)]),
        ([calls(1, 4), calls(5, 6), calls(1, 2)], [("duplicate", 1, 2, 3)]),
        ([calls(1, 3), calls(1, 3), calls(4, 4)], [("duplicate", 1, 3, 2)]),
        ([calls(3, 4), calls(1, 2), calls(5, 5)], [("order", 1, 2, 2)]),
        ([calls(1, 4), part(1, call(21), call(22))], [("duplicate", 1, 2, 2)]),  # it may be one; nothing follows yet
    ],
)
def test_a_first_batch_that_comes_again_is_no_new_life(
    parts: list[Part], expected: list[tuple[str, int, int, int]]
) -> None:
    stream = audited([mark(5)], parts)
    assert found(stream) == expected
    assert stream.figures.restarts == 0
