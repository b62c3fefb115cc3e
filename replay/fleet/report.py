"""Text of the outcome of a fleet's what-if."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from immortal.protocol.command_line import counted, table_lines
from immortal.replay.fleet.outcome import (
    KINDS,
    SHOWN_MAX,
    BrokenCheck,
    Consequence,
    FleetOutcome,
    Seeds,
    ServiceOutcome,
    value_text,
)


def service_rows(outcome: FleetOutcome) -> tuple[list[str], list[list[str]]]:
    """Return heads and rows of a table of the cone's services."""
    rows = []
    for one in outcome.services:
        counts = [sum(getattr(call, kind) for call in one.calls) for kind in KINDS]
        fates = sum(fate.count for fate in one.fates)
        state = "stopped" if one.stopped else "differs" if one.state else "same"
        shown = [one.messages, one.equal, *counts, fates]
        rows.append([f"{one.name}{' (changed code)' if one.is_changed else ''}", *(f"{n:,}" for n in shown), state])
    return ["service", "messages", "same calls", *KINDS, "fail differently", "state"], rows


def outcome_lines(outcome: FleetOutcome) -> Iterator[str]:
    """Yield the lines of the outcome."""
    heads, rows = service_rows(outcome)
    yield from table_lines(heads, rows, right=heads[1:-1])
    if outcome.equal_services:
        yield f"proved equal, and not run: {', '.join(outcome.equal_services)}"
    for one in outcome.services:
        if one.is_different:
            yield ""
            yield from _service_lines(one)
    if outcome.consequences:
        yield from ("", "causes and consequences:", *_tree_lines(outcome.consequences, 1))
    clients = outcome.client_answers
    if clients.examples:
        yield ""
        yield f"answers to clients: {clients.changed} changed, {clients.added} added, {clients.missing} missing"
        yield from (f"  {one}" for one in clients.examples[:SHOWN_MAX])
    yield from _list_lines("effects without a recorded result at their place", outcome.effects, "effect")
    yield from _list_lines("calls to services without a log", outcome.unanswered, "call")
    for lines in (check_lines(outcome), seed_lines(outcome.seeds)):
        if shown := list(lines):
            yield from ("", *shown)
    yield from (f"note: {note}" for note in outcome.notes)
    yield ""
    yield "different" if outcome.is_different else "no difference"


def check_lines(outcome: FleetOutcome) -> Iterator[str]:
    """Yield lines on where the check fails, if it does."""
    if (broken := outcome.broken) is not None:
        yield f"the check fails after {_place_words(broken)}: {broken.text}"
        then = outcome.broken_in_record
        yield (
            "  in the recorded run the check passes"
            if then is None
            else f"  in the recorded run it fails too, after {_place_words(then)}"
        )
    if (prefix := outcome.prefix) is not None:
        yield (
            f"  the smallest prefix of the input that fails the check only with the change has"
            f" {counted(prefix.inputs, 'input')} from outside, and ends with {prefix.input}"
            f" at {_place_words(prefix)}: {prefix.text}"
        )


def seed_lines(seeds: Seeds) -> Iterator[str]:
    """Yield lines on how the outcome depends on the order, if several were tried."""
    if seeds.runs > 1:
        broken = f"; in {seeds.broken} the check fails" if seeds.broken else ""
        yield f"in {seeds.different} of {seeds.runs} orders the outcome differs from this one{broken}"
        yield from (f"  in {one.count}, the first with seed {one.seed}: {one.example}" for one in seeds.ends[1:])


def _service_lines(service: ServiceOutcome) -> Iterator[str]:
    yield f"{service.name}: {service.because}" if not service.is_changed else f"{service.name}:"
    if service.first is not None:
        yield f"  first: {service.first.time} {service.first.words}"
    if service.calls:
        heads = ["to", "call", *KINDS]
        rows = [[each.to, each.handler, *(f"{getattr(each, kind):,}" for kind in KINDS)] for each in service.calls]
        yield from (f"  {line}" for line in table_lines(heads, rows, right=heads[2:]))
    yield from (f"  {fate.count} of {fate.method} {fate.fate}: {fate.example}" for fate in service.fates)
    if service.state:
        yield "  the state at the end:"
        for each in service.state[:SHOWN_MAX]:
            yield f"    {each['path']}: was {value_text(each, 'old')}; would be {value_text(each, 'new')}"
        if len(service.state) > SHOWN_MAX:
            yield "    ..."
    if service.stopped:
        yield f"  it stops at {service.stopped}"


def _tree_lines(nodes: Sequence[Consequence], depth: int) -> Iterator[str]:
    for one in nodes:
        yield f"{'  ' * depth}{one.text}"
        yield from _tree_lines(one.then, depth + 1)


def _list_lines(title: str, rows: Sequence[Mapping[str, str]], noun: str) -> Iterator[str]:
    if rows:
        yield ""
        yield f"{title}: {len(rows)}"
        yield from (f"  {row['service']}: {row[noun]}: {row['outcome']}" for row in rows[:SHOWN_MAX])
        if len(rows) > SHOWN_MAX:
            yield "  ..."


def _place_words(check: BrokenCheck) -> str:
    where = "a message that the log does not have"
    if check.record is not None:
        where = f"record {check.record}, message {check.message}"
    return f"{check.service}, {where} ({check.time})"
