"""Rendering of templates as HTML. Each value is escaped; control and invisible characters are written out."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote
from weakref import WeakKeyDictionary

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from starlette.responses import HTMLResponse

from immortal.coordinator.core.formatting import time_text
from immortal.presenters.fleet import Row
from immortal.presenters.status import age_text, duration_text, rate_text
from immortal.protocol.command_line import size_text
from immortal.protocol.safe_output import printable

CLIPPED_CHARACTERS = 160


def _finalize(value: Any) -> Any:
    """Make a value printable, since names, arguments and states are from outside."""
    if isinstance(value, str) and not hasattr(value, "__html__"):
        return printable(value)
    return "" if value is None else value


def _raw(text: str) -> Markup:
    """Escape a hidden field's value so that the form returns it unchanged."""
    return escape(text.encode("utf-8", "replace").decode())


def number(value: int | None) -> str:
    return "" if value is None else f"{value:,}"


def clipped(text: str, characters: int = CLIPPED_CHARACTERS) -> str:
    return text if len(text) <= characters else f"{text[: characters - 1]}…"


def day_and_time(time_ns: int) -> str:
    """Format a time in UTC to the millisecond."""
    try:
        return f"{datetime.fromtimestamp(time_ns / 1e9, UTC):%Y-%m-%d %H:%M:%S.%f}"[:-3]
    except (OverflowError, ValueError, OSError):
        return time_text(time_ns)


def ago(time_ns: int) -> str:
    age_s = time.time() - time_ns / 1e9
    return f"{age_text(age_s)} ago" if age_s >= 0 else f"in {age_text(-age_s)}"


_CELLS: WeakKeyDictionary[Row, Markup] = WeakKeyDictionary()


def cells(row: Row) -> Markup:
    """Render the table cells of an instance, once for all viewers."""
    return _CELLS.get(row) or _CELLS.setdefault(row, Markup(render("_cells.html", row=row)))  # noqa: S704 -- escaped


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("immortal.web"),
        autoescape=True,
        finalize=_finalize,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "number": number,
        "clipped": clipped,
        "size": size_text,
        "age": age_text,
        "rate": rate_text,
        "cells": cells,
        "moment": day_and_time,
        "ago": ago,
        "duration": duration_text,
        "raw": _raw,
        "json": lambda value: json.dumps(value, ensure_ascii=False),
        "part": lambda text: quote(str(text), safe=""),
    }
    return environment


_ENVIRONMENT = _environment()


def render(template: str, **values: Any) -> str:
    return _ENVIRONMENT.get_template(template).render(values)


def page(template: str, status: int = 200, **values: Any) -> HTMLResponse:
    return HTMLResponse(render(template, **values), status)


# Chart of a value over records, as SVG: steps, since a value holds until it is written again.


WIDTH, HEIGHT, LEFT, TOP = 960, 200, 8, 8


def chart(path: str, points: Sequence[Sequence[Any]]) -> str:
    """Return an SVG chart of ``points``, each [record, text, number or null]; "" for fewer than two numbers."""
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
