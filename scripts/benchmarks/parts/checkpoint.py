"""Measures how long a checkpoint holds up the handlers, by the size of the state.

The app is a real one; the other end of its socket keeps it busy, so that a pause is seen to the microsecond.
"""

from __future__ import annotations

from functools import partial

from scripts.benchmarks.context import Context
from scripts.benchmarks.figures import Figure, Target
from scripts.benchmarks.snapshot import Measured, measure

INLINE, FORK = 'checkpoint="inline"', 'checkpoint="fork"'
REPEATS_MAX = 3


def run(context: Context) -> list[Figure]:
    figures = []
    for size_mib in context.amounts.state_sizes_mib:
        repeated = context.with_repeats(min(context.repeats, REPEATS_MAX))
        results = repeated.interleave(
            {
                FORK: partial(measure, "Fork", "large", size_mib),
                INLINE: partial(measure, "Inline", "large", size_mib),
            },
            f"checkpoint of {size_mib} MiB",
        )
        figures += _figures(size_mib, results)
    return figures


def _figures(size_mib: int, results: dict[str, list[Measured]]) -> list[Figure]:
    whole = size_mib == 1024
    pauses = {name: [1e3 * one.longest_pause_s for one in some] for name, some in results.items()}
    pauses["no checkpoint"] = [1e3 * one.steady_pause_s for some in results.values() for one in some]
    during = {
        name: [100 * one.during_calls_per_s / one.steady_calls_per_s for one in some] for name, some in results.items()
    }
    took = {name: [one.checkpoint_s for one in some] for name, some in results.items()}
    by_size = {"x": size_mib, "x_label": "size of the state, MiB"}
    return [
        Figure(
            f"checkpoint of {size_mib} MiB: longest pause of the handlers",
            "ms",
            "lower",
            pauses,
            [Target("at most", 100, of=FORK)] if whole else [],
            group="checkpoint: longest pause, ms",
            **by_size,  # type: ignore[arg-type]
        ),
        Figure(
            f"checkpoint of {size_mib} MiB: calls/s meanwhile",
            "% of those before",
            "higher",
            during,
            [Target("at least", 50, of=FORK)] if whole else [],
        ),
        Figure(f"checkpoint of {size_mib} MiB: until it is sent", "s", "lower", took),
    ]
