"""HTML page of the outcome of a fleet's what-if, and its parts as plain values."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from immortal.pipeline.report.pages import ROWS_MAX, SERIES_MAX, Part, bars, over_time, page
from immortal.protocol.safe_output import printable
from immortal.replay.fleet.outcome import HOUR_NS, KINDS, Consequence, FleetOutcome, Hour, value_text
from immortal.replay.fleet.report import check_lines, seed_lines, service_rows

_TEXTS = [
    *("service", "state", "to", "call", "fate", "example", "path", "was", "would be", "effect", "outcome", "time"),
    *("because", "first", "difference from seed 0"),
]


def fleet_page(outcome: FleetOutcome, changes: Mapping[str, str]) -> str:
    """Return the page as HTML. ``changes``: the class that was tried, by service. The outcome needs details."""
    title = ", ".join(f"{name} = {app}" for name, app in changes.items())
    return page(f"What if {title}?", _about(outcome), _parts(outcome), _TEXTS)


def fleet_report(outcome: FleetOutcome) -> dict[str, Any]:
    """Return the page as plain values, for another page. The outcome needs details."""
    parts = [
        {
            **part._asdict(),
            "lines": list(map(printable, part.lines)),
            "rows": [list(map(printable, row)) for row in part.rows[:ROWS_MAX]],
            "more": len(part.rows[ROWS_MAX:]),
            "tree": list(map(_node, part.tree)),
        }
        for part in _parts(outcome)
    ]
    return {"same": not outcome.is_different, "verdict": _about(outcome), "parts": parts, "texts": _TEXTS}


def _node(consequence: Consequence) -> dict[str, Any]:
    return {"text": printable(consequence.text), "then": list(map(_node, consequence.then))}


def _about(outcome: FleetOutcome) -> str:
    equal = ", ".join(outcome.equal_services)
    return f"{'Different' if outcome.is_different else 'No difference'}. Proved equal, and not run: {equal or 'none'}."


def _parts(outcome: FleetOutcome) -> list[Part]:
    return [part for part in _all_parts(outcome) if part.rows or part.lines or part.tree]


def _all_parts(outcome: FleetOutcome) -> Iterator[Part]:
    services, clients, seeds = outcome.services, outcome.client_answers, outcome.seeds
    yield Part("Services", "", *service_rows(outcome))
    yield Part("The check", lines=list(check_lines(outcome)))
    firsts = [(one.name, one.because, one.first.time, one.first.words) for one in services if one.first]
    yield Part("First differences", "", ("service", "because", "time", "first"), firsts)
    fates = [
        (one.name, each.method, f"{each.count:,}", each.fate, each.example) for one in services for each in one.fates
    ]
    yield Part("Calls that fail differently", "", ("service", "call", "calls", "fate", "example"), fates)
    yield Part("Causes and consequences", tree=outcome.consequences)
    states = [
        (one.name, each["path"], value_text(each, "old"), value_text(each, "new"))
        for one in services
        for each in one.state
    ]
    yield Part("States at the end", "", ("service", "path", "was", "would be"), states)
    counts = f"{clients.changed:,} changed, {clients.added:,} added, {clients.missing:,} missing; such as"
    yield Part("Answers to clients", lines=[counts, *clients.examples] if clients.examples else [])
    for name, what, found in (
        ("Effects without a recorded result at their place", "effect", outcome.effects),
        ("Calls to services without a log", "call", outcome.unanswered),
    ):
        heads = ("service", what, "outcome", "time")
        yield Part(name, "", heads, [[one[head] for head in heads] for one in found])
    if seeds.runs > 1:
        chart = bars(
            "orders with the same outcome", "orders", [(f"as seed {one.seed}", one.count) for one in seeds.ends]
        )
        rows = [(f"{one.seed}", f"{one.count:,}", f"{one.broken:,}", one.example) for one in seeds.ends]
        heads = ("first seed", "orders", "check fails", "difference from seed 0")
        yield Part("Orders", chart, heads, rows, lines=list(seed_lines(seeds))[:1])
    yield _outcomes(outcome.hours)
    yield Part("Notes", lines=outcome.notes)


def _outcomes(hours: list[Hour]) -> Part:
    """Draw the calls that differ by handler and hour, the handlers with most of them; count all by handler."""
    by_handler: dict[tuple[str, str, str], list[Hour]] = defaultdict(list)
    for hour in hours:
        by_handler[hour.service, hour.to, hour.handler].append(hour)

    most = sorted(by_handler, key=lambda key: -sum(hour.different for hour in by_handler[key]))
    series: dict[str, dict[int, float]] = {}
    for number, key in enumerate(most):
        name = f"{key[0]} -> {key[1]}: {key[2]}" if number < SERIES_MAX else "all others"
        points = series.setdefault(name, defaultdict(float))
        for hour in by_handler[key]:
            points[hour.start_ns] += hour.different
    rows = []
    for key in most:
        recorded, *counts = (sum(getattr(hour, kind) for hour in by_handler[key]) for kind in ("recorded", *KINDS))
        would_be = recorded + sum(hour.added - hour.missing for hour in by_handler[key])
        rows.append([*key, *(f"{count:,}" for count in (recorded, would_be, *counts))])
    chart = over_time("calls that differ, by handler and hour", "calls in an hour", series, HOUR_NS, stacked=True)
    return Part("Outcomes by handler and hour", chart, ["service", "to", "call", "then", "now", *KINDS], rows)
