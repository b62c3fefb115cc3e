"""Figures: samples of several implementations and limits, and their targets."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any, Literal

Better = Literal["higher", "lower"]

IMMORTAL = "immortal"  # as it is installed
PURE = "immortal, pure Python"  # beside it if the codec is compiled
DISK = "disk: append + fdatasync"
TCP = "loopback TCP"
HANDLER = "bare Python loop"
LIMITS = (DISK, TCP, HANDLER)


@dataclass(frozen=True, slots=True)
class Target:
    """Target of a figure. ``value`` is in its unit, or, with ``against``, times that one's figure in the same turn."""

    bound: Literal["at least", "at most"]
    value: float
    against: str | None = None
    of: str = IMMORTAL
    note: str = ""  # "compiled": the target holds for that alone

    def measured(self, samples: dict[str, list[float]]) -> float | None:
        """Return the figure to compare with ``value``; None if it was not measured."""
        ours = samples.get(self.of)
        if not ours:
            return None
        if self.against is None:
            return statistics.median(ours)
        theirs = samples.get(self.against)
        if not theirs:
            return None
        if len(ours) == len(theirs):
            return statistics.median(our / their for our, their in zip(ours, theirs, strict=True))
        return statistics.median(ours) / statistics.median(theirs)

    def met(self, samples: dict[str, list[float]]) -> bool | None:
        measured = self.measured(samples)
        if measured is None:
            return None
        return measured >= self.value if self.bound == "at least" else measured <= self.value

    def in_words(self, unit: str) -> str:
        note = f" ({self.note})" if self.note else ""
        value = number(self.value)
        return f"{self.bound} {value} {f'times {self.against}' if self.against else unit}{note}"


@dataclass(frozen=True, slots=True)
class Figure:
    """Measured figure. ``samples``: by implementation, or by limit, one for each turn.

    ``group`` and ``x`` make a line of a chart out of several figures; without them the figure is a number of its own.
    """

    name: str
    unit: str
    better: Better
    samples: dict[str, list[float]]
    targets: list[Target] = field(default_factory=list)
    note: str = ""
    group: str = ""
    x: float | None = None
    x_label: str = ""

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Figure:
        return cls(**{**data, "targets": [Target(**target) for target in data["targets"]]})


def figures_of(part: dict[str, Any]) -> list[Figure]:
    """Return the figures of a part in the file of a run."""
    return [Figure.from_json(data) for data in part["figures"]]


def number(value: float) -> str:
    """Format a number with about three digits."""
    if value == 0:
        return "0"
    size = abs(value)
    digits = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 else 3
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def spread(values: list[float]) -> str:
    """Format the median, and lowest to highest if there are several values."""
    middle = number(statistics.median(values))
    return middle if len(values) < 2 else f"{middle} ({number(min(values))}-{number(max(values))})"
