"""Outputs of two runs compared: what is equal, changed, missing and added, aligned by what made them."""

from __future__ import annotations

from immortal.protocol.messages import RpcType, encode_incoming_rpc
from immortal.replay.comparison import (
    WINDOW_MESSAGES_MAX,
    Comparison,
    Difference,
    Key,
    Kind,
    MemoryBudget,
    Outputs,
    Side,
    SpillingQueue,
    method_of,
)

COUNT, LOG = 10, 20


def call(argument: str, method_id: int = COUNT) -> bytes:
    return encode_incoming_rpc(method_id, RpcType.FORK, argument.encode())


def batch(*made: tuple[int, str]) -> Outputs:
    """(sequence ID, argument) of each message."""
    return Outputs([(sequence_id, 0) for sequence_id, _ in made], b"".join(call(argument) for _, argument in made))


class Run:
    def __init__(self) -> None:
        self.found: list[Difference] = []
        self.comparison = Comparison(self.found.append)

    def add(self, side: Side, *made: tuple[int, str], to: str = "b") -> Run:
        self.comparison.add(side, to, batch(*made))
        return self

    def finish(self) -> Run:
        self.comparison.finish(Side.OLD)
        self.comparison.finish(Side.NEW)
        return self

    @property
    def differences(self) -> list[tuple[Kind, int, bytes | None, bytes | None]]:
        return [(found.kind, found.key[0], found.old, found.new) for found in self.found]


def compare(old: list[bytes], new: list[bytes]) -> list[Difference]:
    """What two handlers of the same input made."""
    found: list[Difference] = []
    comparison = Comparison(found.append)
    comparison.add(Side.OLD, "b", Outputs([(5, 0)] * len(old), b"".join(old)))
    comparison.add(Side.NEW, "b", Outputs([(5, 0)] * len(new), b"".join(new)))
    comparison.finish(Side.OLD)
    comparison.finish(Side.NEW)
    missing = sum(difference.old is not None for difference in found)
    assert comparison.equal_count == len(old) - missing
    assert set(comparison.pending_size_bytes.values()) == {0}
    return found


def test_equal_runs_have_no_differences_however_they_are_batched() -> None:
    run = Run()
    made = [(number, f"word {number}") for number in range(100)]
    run.add(Side.OLD, *made[:1]).add(Side.OLD, *made[1:70]).add(Side.NEW, *made[:50])
    assert run.comparison.equal_count == 50
    run.add(Side.NEW, *made[50:]).add(Side.OLD, *made[70:]).finish()
    assert (run.found, run.comparison.equal_count) == ([], 100)


def test_other_arguments_for_the_same_input_are_a_change() -> None:
    run = Run().add(Side.OLD, (1, "a"), (2, "B"), (3, "c")).add(Side.NEW, (1, "a"), (2, "b"), (3, "c"))
    assert run.differences == [(Kind.CHANGED, 2, call("B"), call("b"))]
    assert run.comparison.equal_count == 2


def test_inputs_that_make_something_on_one_side_only() -> None:
    run = Run().add(Side.OLD, (1, "a"), (3, "c")).add(Side.NEW, (2, "b"), (3, "c")).finish()
    assert run.differences == [(Kind.MISSING, 1, call("a"), None), (Kind.ADDED, 2, None, call("b"))]


def test_destinations_are_apart() -> None:
    run = Run().add(Side.OLD, (1, "a"), to="b").add(Side.NEW, (1, "a"), to="c").finish()
    assert [(found.destination, found.kind) for found in run.found] == [("c", Kind.ADDED), ("b", Kind.MISSING)]


def test_one_insertion_is_one_addition() -> None:
    old = [call(text) for text in "abcdef"]
    assert compare(old, [*old[:2], call("x"), *old[2:]]) == [Difference(Kind.ADDED, "b", (5, 0), None, call("x"))]
    assert compare([*old[:2], call("x"), *old[2:]], old) == [Difference(Kind.MISSING, "b", (5, 0), call("x"), None, 3)]


def test_calls_of_the_same_method_are_taken_to_be_each_others() -> None:
    found = compare([call("A")], [call("noted", LOG), call("a")])
    assert [(difference.kind, difference.new) for difference in found] == [
        (Kind.ADDED, call("noted", LOG)),
        (Kind.CHANGED, call("a")),
    ]


def test_another_method_in_the_same_place_is_a_change() -> None:
    assert compare([call("a")], [call("a", LOG)]) == [
        Difference(Kind.CHANGED, "b", (5, 0), call("a"), call("a", LOG), 1)
    ]


def test_an_input_that_makes_more_than_a_window_holds() -> None:
    old = [call(f"{number}") for number in range(20 * WINDOW_MESSAGES_MAX)]
    new = [*old[:100], call("x"), *old[100:500], *old[501:]]
    found = compare(old, new)
    assert [(difference.kind, difference.old, difference.new) for difference in found] == [
        (Kind.ADDED, None, call("x")),
        (Kind.MISSING, old[500], None),
    ]


def test_a_long_input_of_which_nothing_is_as_it_was() -> None:
    old = [call(f"{number}") for number in range(3 * WINDOW_MESSAGES_MAX)]
    new = [call(f"new {number}") for number in range(2 * WINDOW_MESSAGES_MAX)]
    kinds = [difference.kind for difference in compare(old, new)]
    assert kinds == [Kind.CHANGED] * len(new) + [Kind.MISSING] * (len(old) - len(new))


def test_a_group_is_aligned_only_when_all_of_it_is_there() -> None:
    run = Run().add(Side.OLD, (1, "a"), (1, "b")).add(Side.NEW, (1, "x"))
    assert run.differences == []  # more of input 1 may follow on both sides
    run.add(Side.NEW, (1, "a"), (1, "b"), (2, "c")).add(Side.OLD, (2, "c"))
    assert run.differences == [(Kind.ADDED, 1, None, call("x"))]
    assert run.comparison.equal_count == 3


def cut_short(before: Key | None) -> list[int]:
    """The inputs of which something is missing, when the new side stops in the middle of input 3."""
    run = Run().add(Side.OLD, (1, "a"), (2, "b"), (2, "c"), (3, "d"), (3, "e"), (4, "f")).add(Side.NEW, (1, "a"))
    run.comparison.finish(Side.NEW, complete=False, before=before)
    run.add(Side.OLD, (5, "g"))
    run.comparison.finish(Side.OLD)
    assert set(run.comparison.pending_size_bytes.values()) == {0}
    return [found.key[0] for found in run.found]


def test_what_lies_behind_the_end_of_a_run_that_was_cut_short_is_no_difference() -> None:
    assert cut_short(None) == []
    assert cut_short((3, 0)) == [2, 2]


def test_what_waits_is_counted() -> None:
    run = Run().add(Side.OLD, (1, "a"), (2, "b"))
    waiting = run.comparison.pending_size_bytes[Side.OLD]
    assert waiting > 2 * len(call("a"))
    assert run.comparison.pending_size_bytes[Side.NEW] == 0
    run.add(Side.NEW, (1, "a"))
    assert 0 < run.comparison.pending_size_bytes[Side.OLD] < waiting


def test_method_of_a_damaged_message_is_none() -> None:
    assert method_of(call("a", LOG)) == LOG
    assert method_of(b"\x02\x00") is None
    assert method_of(b"\x80") is None


def test_a_spool_keeps_its_order_across_memory_and_disk() -> None:
    batches = [batch(*((number, "x" * number) for _ in range(number % 5 + 1))) for number in range(40)]
    budget = MemoryBudget(batches[0].size_bytes + batches[1].size_bytes)
    spool = SpillingQueue(budget)
    got = []
    for index, each in enumerate(batches):
        spool.append(each)
        assert budget.used_bytes <= budget.size_bytes_max
        if index % 3 == 2:
            got.append(spool.popleft())
    assert len(spool) == len(batches) - len(got)
    while len(spool):
        got.append(spool.popleft())
    assert got == batches
    assert budget.used_bytes == 0
    spool.append(batches[0])  # in memory again
    assert budget.used_bytes == batches[0].size_bytes
    assert spool.popleft() == batches[0]
