"""Nodes and handles over real instances, by seed: crashes, partitions, calls that fail; planted bugs are found."""

from __future__ import annotations

from typing import Any

import pytest

from immortal.appsdk.nodes.accounts import Accounts
from immortal.appsdk.nodes.nodes import Nodes
from immortal.appsdk.nodes.reference_counts import Grant, Holder, Key, Owner
from tests.helpers.effort import effort
from tests.helpers.nodes_runs import PASSING, BrokenHandlesError, run_seed

SEEDS = effort(8)
SEEDS_MAX = 300  # within which each planted bug is found
FOUND = 41  # the first seed that finds dead handles: the search for them begins there


def test_handles_are_counted_and_ended_in_order_under_faults() -> None:
    destroyed = released = 0
    for seed in range(SEEDS):
        one, other = run_seed(seed)
        destroyed, released = destroyed + one, released + other
    assert destroyed > SEEDS / 4
    assert released > SEEDS / 4


def test_no_dead_handle_comes_before_word_of_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(SEEDS):
        run_seed(seed, PASSING)
    monkeypatch.setattr(Accounts, "_find_end", lambda accounts, owner, key: None)
    with pytest.raises(BrokenHandlesError, match="before it was told of its end"):
        _run_seeds(FOUND, FOUND + SEEDS_MAX, PASSING)


def _run_seeds(first: int, end: int, *acts: tuple[str, ...]) -> None:
    for seed in range(first, end):
        run_seed(seed, *acts)


def _not_given_back(self: Accounts, data: bytes) -> None:
    self._context.carries_handles = False


def _end_at_once(self: Nodes, key: Key, how: str) -> None:
    """The owner does not wait for its queue."""
    self.accounts.owner.start_end(key)
    self.living.nodes.pop(self.accounts.owner.grants[key].node, None)
    self.accounts.owner.grants[key].notified.clear()
    self.accounts.owner.end(key, how)
    self.accounts.send_actions()


def _forgotten(self: Holder, owner: str, key: Key, how: str) -> bool:
    one = self.held.pop((owner, key), None)
    return one is not None


def _never_free(grant: Grant) -> bool:
    return False


BUGS: dict[str, tuple[Any, str, Any]] = {
    "copies of failed calls are lost": (Accounts, "return_copies", _not_given_back),
    "the end is not ordered": (Nodes, "_end", _end_at_once),
    "who is told of an end forgets it": (Holder, "note_end", _forgotten),
    "what is over is never forgotten": (Owner, "_is_free", staticmethod(_never_free)),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, broken = BUGS[bug]
    monkeypatch.setattr(owner, name, broken)
    with pytest.raises(BrokenHandlesError) as found:
        _run_seeds(0, SEEDS_MAX)
    assert "object has no attribute" not in str(found.value), "the text of the bug itself is wrong"
