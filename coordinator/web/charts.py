"""A value over records, as SVG that is made here: steps, since a value holds until it is written again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from immortal.coordinator.web.rendering import render

WIDTH, HEIGHT, LEFT, TOP = 960, 200, 8, 8


def chart(name: str, path: str, points: Sequence[Sequence[Any]]) -> str:
    """``points``: [record, text, number or null]; "" where there are no two numbers."""
    numbers = [(record, number) for record, _, number in points if number is not None]
    if len(numbers) < 2:
        return ""
    low, high = min(number for _, number in numbers), max(number for _, number in numbers)
    first, last = points[0][0], max(points[0][0] + 1, points[-1][0])
    span = (high - low) or 1

    def x(record: int) -> float:
        return round(LEFT + (WIDTH - 2 * LEFT) * float((record - first) / (last - first)), 1)

    def y(number: float) -> float:
        return round(TOP + (HEIGHT - 2 * TOP) * float((high - number) / span), 1)

    line = f"M{x(numbers[0][0])} {y(numbers[0][1])}"
    line += "".join(f"H{x(record)}V{y(number)}" for record, number in numbers[1:])
    return render(
        "_chart.html",
        name=name,
        path=path,
        line=line,
        low=low,
        high=high,
        first=first,
        last=last,
        width=WIDTH,
        height=HEIGHT,
        zero=y(0) if low < 0 < high else None,
    )
