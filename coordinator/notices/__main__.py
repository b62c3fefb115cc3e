"""Tables of notices and metrics for docs/reference/notices.md: ``python -m immortal.coordinator.notices``."""

from __future__ import annotations

import inspect
import string
import sys
from collections.abc import Iterable, Iterator

from msgspec.structs import fields

from immortal.coordinator.core.notices import Notice
from immortal.coordinator.notices.metrics import EXECUTION_WAIT, HANDLER, NOTICES, PHASE, STATUS, TIMES, UP
from immortal.coordinator.notices.sinks import LOG_LEVELS, notice_types


def notices() -> list[type[Notice]]:
    """Return all types of notices, in the order of their definition."""
    return sorted(notice_types(), key=lambda one: (one.__module__, inspect.getsourcelines(one)[1]))


def notices_table() -> Iterator[str]:
    yield from _rows(("notice", "level", "line", "fields", "when"), map(_notice, notices()))


def _notice(one: type[Notice]) -> tuple[str, ...]:
    parts = string.Formatter().parse(one.template)
    text = "".join(f"{text}{f'`{name}`' if name else ''}" for text, name, _, _ in parts)
    names = ", ".join(field.encode_name for field in fields(one) if field.name != "left_out")
    return one.__name__, one.level, text if one.level in LOG_LEVELS else "", names, inspect.getdoc(one) or ""


def metrics_table() -> Iterator[str]:
    rows = [(UP[0], "gauge", "", UP[1]), (f"{PHASE[0]}_info", "info", "phase", PHASE[1])]
    for one in STATUS:
        counts = one.counts
        name = f"{one.name}_total" if counts else one.name
        rows.append((name, "counter" if counts else "gauge", one.label, one.text))
    rows.append((f"{NOTICES[0]}_total", "counter", "notice, level", NOTICES[1]))
    rows += [(time.name, "histogram", "", time.text) for time in TIMES]
    rows += [(EXECUTION_WAIT[0], "histogram", "", EXECUTION_WAIT[1]), (HANDLER[0], "histogram", "method", HANDLER[1])]
    yield from _rows(("metric", "kind", "labels", "what"), rows)


def _rows(headings: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    for row in (headings, ["---"] * len(headings), *rows):
        yield f"| {' | '.join(row)} |"


if __name__ == "__main__":
    for table in (notices_table(), metrics_table()):
        sys.stdout.writelines(f"{line}\n" for line in (*table, ""))
