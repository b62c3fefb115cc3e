"""Templates to HTML. Each value is escaped, and what no browser should obey, or show as nothing, is written out."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from starlette.responses import HTMLResponse

from immortal.coordinator.cli.records import time_text
from immortal.coordinator.cli.status import age_text
from immortal.protocol.command_line import size_text
from immortal.protocol.shown import printable

CLIPPED_CHARACTERS = 160


def _finalize(value: Any) -> Any:
    """Names, arguments and states come from outside."""
    if isinstance(value, str) and not hasattr(value, "__html__"):
        return printable(value)
    return "" if value is None else value


def _raw(text: str) -> Markup:
    """As it is, for the value of a field that nobody sees: it is to come back so. Escaped all the same."""
    return escape(text.encode("utf-8", "replace").decode())


def number(value: int | None) -> str:
    return "" if value is None else f"{value:,}"


def clipped(text: str, characters: int = CLIPPED_CHARACTERS) -> str:
    return text if len(text) <= characters else f"{text[: characters - 1]}…"


def day_and_time(time_ns: int) -> str:
    """To the millisecond, in UTC."""
    try:
        return f"{datetime.fromtimestamp(time_ns / 1e9, UTC):%Y-%m-%d %H:%M:%S.%f}"[:-3]
    except (OverflowError, ValueError, OSError):
        return time_text(time_ns)


def ago(time_ns: int) -> str:
    age_s = time.time() - time_ns / 1e9
    return f"{age_text(age_s)} ago" if age_s >= 0 else f"in {age_text(-age_s)}"


def duration(duration_ns: int) -> str:
    """Of a message's way: "340 µs", "12 ms", "3.4 s"."""
    if duration_ns < 1_000_000:
        return f"{duration_ns / 1e3:.0f} µs"
    if duration_ns < 1_000_000_000:
        return f"{duration_ns / 1e6:.1f} ms"
    return f"{duration_ns / 1e9:.2f} s"


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("immortal.coordinator.web"),
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
        "moment": day_and_time,
        "ago": ago,
        "duration": duration,
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
