"""The same test again and again, each time with a crash somewhere else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime

from immortal.appsdk.errors import UsageError
from immortal.appsdk.testing.crashes import CrashPlan, Victim
from immortal.appsdk.testing.environment import START, Environment


def crash_everywhere(
    *,
    victims: Sequence[Victim] = ("instance", "app"),
    runs_max: int | None = None,
    start: datetime = START,
    seed: int = 0,
    order: int | None = None,
    fail_alone: bool = False,
) -> Iterator[Environment]:
    """Environments for one test: first one without a crash, then one for each point at which an instance could crash.

    ::

        for env in crash_everywhere():
            with env:
                ...  # the test

    The crash comes by itself, at one of the points between any two steps of any instance, and what has crashed comes
    back at once. ``victims``: "instance" is app and coordinator, "app" the app alone. ``runs_max``: at most so many
    runs, spread evenly over the points. ``fail_alone``: see :class:`Environment`. Whatever fails says where the crash
    was.
    """
    first = Environment(start=start, seed=seed, order=order, fail_alone=fail_alone)
    yield first
    if not first.is_closed:
        raise UsageError("crash_everywhere: each environment is to be used in a with statement: with env: ...")
    plans = [(point, victim) for victim in victims for point in range(1, first.crash_point_count + 1)]
    if runs_max is not None and len(plans) >= runs_max:
        plans = [plans[index * len(plans) // (runs_max - 1)] for index in range(runs_max - 1)]
    for point, victim in plans:
        plan = CrashPlan(point, victim)
        yield Environment(start=start, seed=seed, order=order, crashes=plan, fail_alone=fail_alone)
