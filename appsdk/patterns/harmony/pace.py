"""How many tasks a worker asks for: as many as it does in RUN_S, by what it has seen. No I/O, no clock."""

from __future__ import annotations

from immortal.appsdk.patterns.harmony.limits import RUN_S, RUN_TASKS_MAX

_FIRST_TASKS = 8
_GROWTH = 8  # from one run to the next: a few quick tasks say little


class Pace:
    def __init__(self) -> None:
        self.limit = _FIRST_TASKS

    def took(self, count: int, seconds: float) -> None:
        """``count`` tasks, at least one, took so long."""
        fits = int(RUN_S * count / max(seconds, 1e-6))
        self.limit = max(1, min(fits, self.limit * _GROWTH, RUN_TASKS_MAX))
