"""Reduction of a failing plan while it still fails: fewer faults, a kinder network, fewer instances, less work.

Leaving out a part shifts the rest, so another failure can take the place of the first. That does not matter: it is a
failure, and smaller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from tests.simulation.plan import Fault, Plan

Fails = Callable[[Plan], bool]


def shrink(plan: Plan, fails: Fails, runs_max: int = 400) -> Plan:
    """Return the smallest failing plan that was found, in at most ``runs_max`` runs; ``fails`` is true for it."""
    runs = 0

    def still_fails(candidate: Plan) -> bool:
        nonlocal runs
        runs += 1
        return runs <= runs_max and fails(candidate)

    while runs < runs_max:
        smaller = next((candidate for candidate in _smaller(plan) if still_fails(candidate)), None)
        if smaller is None:
            break
        plan = smaller
    return plan


def _smaller(plan: Plan) -> Iterator[Plan]:
    """Yield plans with a little less, the boldest first."""
    for faults in _fewer(plan.faults):
        yield replace(plan, faults=faults)
    for rate in ("loss_rate", "duplicate_rate", "late_rate"):
        if getattr(plan, rate):
            yield replace(plan, **{rate: 0.0})  # type: ignore[arg-type]
    if plan.fails:
        yield replace(plan, fails=False)
    if plan.ends_with_power_failure:
        yield replace(plan, ends_with_power_failure=False)
    if len(plan.names) > (2 if plan.app == "sdk" else 1):
        yield replace(plan, names=plan.names[:-1])
    for work in (1, plan.work // 2, plan.work - 1):
        if 0 < work < plan.work:
            yield replace(plan, work=work)


def _fewer(faults: tuple[Fault, ...]) -> Iterator[tuple[Fault, ...]]:
    """Yield ``faults`` without all, without each half, quarter, ... of them, without each one."""
    size = len(faults)
    while size:
        for start in range(0, len(faults), size):
            yield faults[:start] + faults[start + size :]
        size //= 2
