"""What becomes durable together: a transaction takes in the one behind it."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from immortal.coordinator.core.errors import InvariantError
from immortal.coordinator.core.interfaces import (
    NO_SUSPECT,
    AuditEntry,
    CheckpointHeader,
    ClientPosition,
    ImpulseBatch,
    SourcePosition,
    SpilledBatch,
    StreamStart,
    Suspect,
    Transaction,
    VersionStart,
)
from immortal.protocol.verdicts import Verdict, VerdictKind

# Of each field: what a transaction has of it, what the one behind has, and what both have together.
FIELDS: dict[str, tuple[Any, Any, Any]] = {
    "records": ([(1, b"one")], [(2, b"two")], [(1, b"one"), (2, b"two")]),
    "sources": (
        {"b": SourcePosition(7, 1, 1), "c": SourcePosition(8, 1, 1)},
        {"b": SourcePosition(7, 1, 2)},
        {"b": SourcePosition(7, 1, 2), "c": SourcePosition(8, 1, 1)},
    ),
    "acknowledged": ({"b": 1, "c": 1}, {"b": 2}, {"b": 2, "c": 1}),
    "peers": ({"b": 7}, {"c": 8}, {"b": 7, "c": 8}),
    "stream_starts": ({"b": StreamStart(1)}, {"b": StreamStart(2)}, {"b": StreamStart(2)}),
    "impulses": (
        [ImpulseBatch(1, 1, b"1", "b")],
        [ImpulseBatch(2, 1, b"2", "b")],
        [ImpulseBatch(1, 1, b"1", "b"), ImpulseBatch(2, 1, b"2", "b")],
    ),
    "impulses_removed": ([("c", 1)], [("c", 2)], [("c", 1), ("c", 2)]),
    "clients": ({"x": ClientPosition(1, 0, 5)}, {"x": None}, {"x": None}),
    "replies": ({("x", 1): b"1", ("x", 2): b"2"}, {("x", 1): None}, {("x", 1): None, ("x", 2): b"2"}),
    "clients_forgotten_ns": (5, 6, 6),
    "spilled": (
        [SpilledBatch(1, 1, b"1", "b")],
        [SpilledBatch(2, 1, b"2", "b")],
        [SpilledBatch(1, 1, b"1", "b"), SpilledBatch(2, 1, b"2", "b")],
    ),
    "spilled_ends": ({"b": 5}, {"b": 4}, {"b": 4}),
    "checkpoint": (CheckpointHeader(1, 1, 0, 0, 5), CheckpointHeader(2, 2, 0, 0, 6), CheckpointHeader(2, 2, 0, 0, 6)),
    "adopts": (False, True, True),
    "version": (None, VersionStart(2, 1), VersionStart(2, 1)),
    "verdicts": (
        [Verdict(1, 0, VerdictKind.UNDONE, "ValueError", "no")],
        [Verdict(2, 0, VerdictKind.UNDONE, "ValueError", "no")],
        [
            Verdict(1, 0, VerdictKind.UNDONE, "ValueError", "no"),
            Verdict(2, 0, VerdictKind.UNDONE, "ValueError", "no"),
        ],
    ),
    "letters_removed": ([(1, 0, 0, 0)], [(2, 0, 0, 0)], [(1, 0, 0, 0), (2, 0, 0, 0)]),
    "suspect": (Suspect(4, 0, 1), NO_SUSPECT, NO_SUSPECT),
    "audit": ([AuditEntry(5, "me", "did")], [AuditEntry(6, "me", "did")], [AuditEntry(n, "me", "did") for n in (5, 6)]),
    "cut_healed": (False, True, True),
    "epoch": (1, 2, 2),
    "extensions": (frozenset({80}), frozenset({81}), frozenset({81})),
}


def transaction(which: int) -> Transaction:
    return Transaction(**{name: deepcopy(values[which]) for name, values in FIELDS.items()})


def test_what_both_have_is_in_the_order_of_the_log_and_the_later_word_counts() -> None:
    assert set(FIELDS) == set(Transaction.__struct_fields__), "each field is looked at"
    both = transaction(0)
    both.absorb(transaction(1))
    assert both == transaction(2)


@pytest.mark.parametrize("which", [0, 1])
def test_one_that_changes_nothing_makes_no_difference(which: int) -> None:
    before, behind = transaction(which), Transaction()
    before.absorb(Transaction())
    behind.absorb(transaction(which))
    assert before == behind == transaction(which)


def test_what_is_brought_and_removed_at_once_is_a_mistake() -> None:
    with pytest.raises(InvariantError, match="impulses are removed in the transaction that brings them"):
        transaction(0).absorb(Transaction(impulses_removed=[("b", 1)]))
    with pytest.raises(InvariantError, match="two versions begin in one transaction"):
        transaction(1).absorb(transaction(1))
