"""Ordered multicasts of many instances, in any interleaving, with crashes at any step."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.effort import effort
from tests.helpers.ordering_world import Op, Script, World

NAMES = ("a", "b", "c", "d")
OPS = st.one_of(
    st.lists(st.sampled_from(NAMES), min_size=1, max_size=4, unique=True).map(lambda to: Op("multicast", tuple(to))),
    st.sampled_from(NAMES).map(lambda to: Op("plain", (to,))),
)
SCRIPTS = st.dictionaries(st.sampled_from((*NAMES, "x", "y")), st.lists(OPS, max_size=8).map(tuple), min_size=1)


def _without_calls_to_oneself(script: Script) -> Script:
    return {
        name: tuple(op for op in ops if op.kind == "multicast" or op.destinations != (name,))
        for name, ops in script.items()
    }


@settings(max_examples=effort(25))
@given(SCRIPTS.map(_without_calls_to_oneself), st.randoms(use_true_random=False), st.integers(1, 10))
def test_the_order_holds_and_crashes_change_nothing(script: Script, random: object, crash_each: int) -> None:
    world, crashing = World(script), World(script)
    count = 0
    while steps := world.steps():
        assert steps == crashing.steps()
        step = random.choice(steps)  # type: ignore[attr-defined]
        world.do(step)
        crashing = crashing.after(step, crashes=count % crash_each == 0)
        count += 1
    world.check_end()
    crashing.check_end()
    assert world.delivered == crashing.delivered
    assert world.key() == crashing.key()
