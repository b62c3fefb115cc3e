"""Parts of the suite. Each is the function of its name, in a module for one subject."""

from __future__ import annotations

from typing import Any

from immortal.bench.harness import Figure

PARTS = {
    "one_way": ("calls", "one-way calls by size, and what they cost"),
    "calls": ("calls", "awaited calls"),
    "queries": ("calls", "calls from outside, logged and not"),
    "shapes": ("calls", "fan-out, fan-in, a chain of five"),
    "durable": ("durable", "a durable handler of three steps"),
    "database": ("durable", "a log in PostgreSQL"),
    "recovery": ("life_cycle", "replay, and kill -9"),
    "checkpoint": ("life_cycle", "checkpoint pauses"),
    "start": ("life_cycle", "start and idle memory"),
    "growth": ("life_cycle", "growth: log, state, peers, waiting handlers"),
    "slow_disk": ("calls", "slower disks"),
    "curve": ("calls", "encrypted peers"),
    "pirate": ("patterns", "request-reply to a pool of servers"),
    "queue": ("patterns", "a queue of tasks"),
    "clone": ("clone", "copies of a table"),
    "pipeline": ("pipeline", "Spark over logs"),
    "ordering": ("ordering", "multicasts in one order"),
}
"""Parts by name: the module, and the title."""

TITLES = {name: title for name, (_, title) in PARTS.items()}


def figures_of(part: dict[str, Any]) -> list[Figure]:
    """Return the figures of a part in the file of a run."""
    return [Figure.from_json(data) for data in part["figures"]]
