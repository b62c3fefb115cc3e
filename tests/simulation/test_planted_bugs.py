"""Proof of the checkers: a few of the seeds that the right code passes find each planted bug."""

from __future__ import annotations

import pytest

from tests.simulation.mutations import MUTATIONS, Mutation, planted
from tests.simulation.plan import draw
from tests.simulation.run import failure_of

SEEDS_MAX = 1000


@pytest.mark.slow
@pytest.mark.parametrize(
    "mutation",
    [
        pytest.param(mutation, id=mutation.name, marks=[pytest.mark.source] if mutation.is_compiled else [])
        for mutation in MUTATIONS
    ],
)
def test_a_planted_bug_is_found(mutation: Mutation) -> None:
    with planted(mutation):
        seeds = (mutation.seed, *range(SEEDS_MAX))
        failures = ((seed, failure_of(draw(seed))) for seed in seeds)
        found, failure = next(((seed, text) for seed, text in failures if text is not None), (None, ""))
    assert found is not None, f"not in {SEEDS_MAX} seeds"
    assert not failure.startswith("NameError"), "the text of the bug itself is wrong"
    assert failure_of(draw(found)) is None, f"seed {found} fails without it, too"


def test_there_are_enough_of_them() -> None:
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS) >= 12
