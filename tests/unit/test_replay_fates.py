"""What becomes of messages that fail, compared with what became of them."""

from __future__ import annotations

from immortal.protocol.verdicts import Verdict, VerdictKind
from immortal.replay.result import MessageOutcome, changed_outcomes, format_failure, new_failure_lines


def undone(sequence_id: int, index: int = 0, text: str = "no", method: str = "Shop.sell", trace: str = "") -> Verdict:
    return Verdict(sequence_id, index, VerdictKind.UNDONE, "ValueError", text, method=method, trace=trace)


def found(then: list[Verdict], now: list[Verdict], after: int = -1, before: tuple[int, int] = (99, 0)) -> object:
    return [
        (fates.method, fates.fate, fates.count, fates.first.key[:2])
        for fates in changed_outcomes(then, now, after, before)
    ]


def test_what_fails_alike_is_left_out() -> None:
    assert found([undone(1), undone(2)], [undone(2, trace="a trace"), undone(1)]) == []
    assert found([], []) == []


def test_each_method_and_fate_has_its_count_and_its_first_place() -> None:
    then = [undone(1), undone(2), undone(3), undone(4), undone(5, method="Shop.buy")]
    now = [undone(2, text="others"), undone(7, 2), undone(7, 1), undone(4)]
    assert found(then, now) == [
        ("Shop.sell", MessageOutcome.WORKS, 2, (1, 0)),
        ("Shop.sell", MessageOutcome.DIFFERS, 1, (2, 0)),
        ("Shop.buy", MessageOutcome.WORKS, 1, (5, 0)),
        ("Shop.sell", MessageOutcome.FAILS, 2, (7, 1)),
    ]


def test_another_kind_is_another_way() -> None:
    skipped = Verdict(1, 0, VerdictKind.SKIPPED, "", "it is wrong", method="Shop.sell")
    assert found([skipped], [undone(1)]) == [("Shop.sell", MessageOutcome.DIFFERS, 1, (1, 0))]


def test_a_step_is_a_message_of_its_own() -> None:
    step = Verdict(1, 0, VerdictKind.UNDONE, "ValueError", "no", task=3, step=1, method="Till.note")
    assert found([step], [undone(1)]) == [
        ("Shop.sell", MessageOutcome.FAILS, 1, (1, 0)),
        ("Till.note", MessageOutcome.WORKS, 1, (1, 0)),
    ]


def test_only_what_the_app_was_given_counts() -> None:
    then = [undone(2), undone(3, 0), undone(3, 1), undone(4)]
    assert found(then, [], after=2, before=(3, 1)) == [("Shop.sell", MessageOutcome.WORKS, 1, (3, 0))]
    assert found(then, [], after=2, before=(5, 0)) == [("Shop.sell", MessageOutcome.WORKS, 3, (3, 0))]


def test_failures_in_words() -> None:
    refused = Verdict(1, 0, VerdictKind.REFUSED, "", "Shop.sell takes 1 arguments, 2 came")
    assert format_failure(refused) == "refused: Shop.sell takes 1 arguments, 2 came"
    assert format_failure(Verdict(1, 0, VerdictKind.SKIPPED, "", "wrong")) == "skipped by an operator: wrong"
    assert format_failure(undone(1, text="")) == "ValueError"
    assert format_failure(undone(1, text="two\nlines\x1b[31m")) == "ValueError: two\\nlines\\x1b[31m"


def test_what_fails_now_is_told_once_for_each_method() -> None:
    news = [undone(1, trace="    one\n    two"), undone(2, method="Shop.buy"), undone(3)]
    assert list(new_failure_lines(news)) == [
        [
            "Shop.sell at record 1, message 0 did not fail when it was handled, and fails now (the first of 2): "
            "ValueError: no",
            "    one",
            "    two",
        ],
        ["Shop.buy at record 2, message 0 did not fail when it was handled, and fails now: ValueError: no"],
    ]
