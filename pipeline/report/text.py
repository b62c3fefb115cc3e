"""Results of jobs as lines of text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from immortal.coordinator.core.interfaces import IMPULSES
from immortal.pipeline.jobs.audit import AuditReport, StreamReport
from immortal.pipeline.jobs.export import ExportReport
from immortal.pipeline.jobs.stats import Figures, Stats
from immortal.pipeline.jobs.verify import VerifyReport
from immortal.pipeline.jobs.what_if import FleetResult
from immortal.protocol.command_line import counted, table_lines


def export_lines(report: ExportReport, folder: Path) -> Iterator[str]:
    for name, done in report.instances.items():
        if done.skipped:
            yield f"warning: {counted(done.skipped, 'record')} of {name} were trimmed before they could be exported"
    rows = [(name, f"{rows:,}") for name, rows in report.rows.items()]
    yield from table_lines(("table", "new rows"), rows, right=("new rows",))
    new = [name for name, done in report.instances.items() if done.last >= done.first]
    instances = counted(len(report.instances), "instance")
    yield f"{folder}: new records of {len(new):,} of {instances}, compared with the logs"
    if report.copied:
        yield f"copied to Delta tables: {counted(report.copied, 'file')}"


# --- audit -----------------------------------------------------------------------------------------------------------


def audit_lines(report: AuditReport, limit: int, *, all_streams: bool) -> Iterator[str]:
    records = sum(log.records for log in report.logs)
    messages = sum(stream.messages for stream in report.streams)
    yield (
        f"{counted(len(report.logs), 'log')}, {counted(records, 'record')}, {counted(messages, 'message')}"
        f" in {counted(len(report.streams), 'stream')}"
    )
    flying = [stream for stream in report.streams if stream.in_flight]
    in_flight = counted(sum(stream.in_flight for stream in flying), "message")
    yield f"in flight: {in_flight} in {counted(len(flying), 'stream')}"
    yield f"compared with what their senders made: {counted(sum(each.compared for each in report.streams), 'message')}"
    unknown = sum(stream.unknown for stream in report.streams)
    if unknown:
        yield f"in damaged or unread records, so not known: {counted(unknown, 'message')}"
    for note in report.notes:
        yield f"note: {note}"
    if all_streams:
        yield ""
        yield from _stream_table(report.streams)
    yield ""
    if not report.violation_count:
        what = "no violation in what could be read" if report.unreadable else "sound"
        yield f"{what}: every message was executed once, in order, after its cause"
        return
    yield "VIOLATIONS: " + ", ".join(f"{number:,} {kind}" for kind, number in report.counts.items())
    yield from _violations(report, limit)


def _violations(report: AuditReport, limit: int) -> Iterator[str]:
    shown: dict[tuple[str, str], list[str]] = {}
    for violation in report.violations[:limit]:
        where = f"record {violation.record}: " if violation.record >= 0 and violation.sender else ""
        shown.setdefault((violation.sender, violation.receiver), []).append(
            f"  {violation.kind}: {where}{violation.text}"
        )
    for (sender, receiver), lines in shown.items():
        yield f"{_sender(sender)} -> {receiver}" if sender else receiver
        yield from lines
    if report.violation_count > limit:
        yield f"and {report.violation_count - limit:,} more; --limit shows them"


def _stream_table(streams: Sequence[StreamReport]) -> Iterator[str]:
    heads = ("from", "to", "messages", "first", "last", "made", "in flight", "compared", "violations")
    rows = [
        (
            _sender(stream.sender),
            stream.receiver,
            f"{stream.messages:,}",
            f"{stream.first}",
            f"{stream.last}",
            f"{stream.made}" if stream.made else "-",
            f"{stream.in_flight:,}",
            f"{stream.compared:,}",
            ", ".join(f"{number:,} {kind}" for kind, number in stream.violations.items()) or "-",
        )
        for stream in streams
    ]
    yield from table_lines(heads, rows, right=heads[2:])


def _sender(name: str) -> str:
    return "outside" if name == IMPULSES else name


def verify_lines(report: VerifyReport, limit: int) -> Iterator[str]:
    for problem in report.problems[:limit]:
        yield f"{problem.instance}: {problem.place}: {problem.text}"
    if report.problem_count > limit:
        yield f"and {report.problem_count - limit:,} more; --limit shows them"
    sound = f"{counted(sum(report.records.values()), 'sound record')} in {counted(len(report.records), 'log')}"
    checkpoints = counted(sum(report.checkpoints.values()), "sound checkpoint")
    verdict = "no damage in what could be read: " if report.unreadable else "sound: "
    if report.problem_count:
        verdict = f"DAMAGED: {counted(report.problem_count, 'problem')}; "
    yield f"{verdict}{sound}, {checkpoints}"


# --- stats -----------------------------------------------------------------------------------------------------------

_FIGURES_OF_CALLS = ("calls", "bytes", "median ms", "95 %", "99 %", "longest")


def stats_lines(stats: Stats, top: int) -> Iterator[str]:
    heads = ("service", *_FIGURES_OF_CALLS, "records", "messages/record", "damaged")
    services = [
        (
            service.instance,
            *figure_cells(service.figures),
            f"{service.records:,}",
            f"{service.messages_median:,.0f}",
            f"{service.damaged:,}",
        )
        for service in stats.services
    ]
    yield from table_lines(heads, services, right=heads[1:])
    for pair, rows in ((("service", "method"), method_rows(stats)), (("from", "to"), talker_rows(stats))):
        yield ""
        yield from table_lines((*pair, *_FIGURES_OF_CALLS), rows[:top], right=_FIGURES_OF_CALLS)
        if len(rows) > top:
            yield f"and {len(rows) - top:,} more; --top shows them"


def method_rows(stats: Stats) -> list[tuple[str, ...]]:
    """Return a row of cells for each method: service, method, figures."""
    return [(method.instance, method.method, *figure_cells(method.figures)) for method in stats.methods]


def talker_rows(stats: Stats) -> list[tuple[str, ...]]:
    """Return a row of cells for each pair of services: from, to, figures."""
    return [(talker.sender, talker.receiver, *figure_cells(talker.figures)) for talker in stats.talkers]


def figure_cells(figures: Figures) -> tuple[str, ...]:
    """Format calls, bytes and times in ms, a cell of a table each."""
    times = (figures.median_ms, figures.p95_ms, figures.p99_ms, figures.max_ms)
    return (f"{figures.calls:,}", f"{figures.size_bytes:,}", *(f"{time:,.3f}" for time in times))


# --- what-if ---------------------------------------------------------------------------------------------------------

INSTANCES_SHOWN_MAX = 5
_VERDICTS = {0: "the same", 3: "DIFFERENT"}


def _notes_of(result: FleetResult) -> Iterator[str]:
    said: dict[str, list[str]] = {}
    for each in result.instances:
        values = each.values or {}
        codes = ((side, values.get(f"{side}_code")) for side in ("old", "new"))
        lines = [f"not worked out: {text}" for text in each.not_worked_out]
        lines += [
            f"{side} code: {code['file']}, {counted(code['modules'], 'module')} with digest {code['digest'][:16]}"
            for side, code in codes
            if code is not None
        ]
        for line in [*lines, *(f"note: {note}" for note in values.get("notes", []))]:
            said.setdefault(line, []).append(each.instance)
    for line, names in sorted(said.items(), key=lambda item: _SAID.index(item[0].partition(" ")[0])):
        yield f"{line} ({', '.join(names[:INSTANCES_SHOWN_MAX])}{', ...' if len(names) > INSTANCES_SHOWN_MAX else ''})"


_SAID = ("old", "new", "note:", "not")  # beginnings of lines, in the order of the lines
_NOTHING: dict[str, Any] = {
    "records": 0,
    "differences": {},
    "state": [],
    "state_known": False,
    "exception": None,
    "fates": [],
}


def what_if_lines(result: FleetResult) -> Iterator[str]:
    rows = []
    for each in result.instances:
        values = each.values or _NOTHING
        failing = sum(one["count"] for one in values["fates"] if one["fate"] != "works now")
        differences = ", ".join(f"{number:,} {kind}" for kind, number in values["differences"].items() if number)
        row = (
            each.instance,
            each.app,
            _VERDICTS.get(each.status, "FAILED"),
            f"{values['records']:,}",
            differences or "-",
            f"{len(values['state']):,}" if values["state"] else "-" if values["state_known"] else "?",
            "the end" if values["exception"] else f"{failing:,}" if failing else "-",
            f"{each.duration_s:.1f}",
        )
        rows.append(row)
    figures = ("records", "calls", "state", "failing", "s")
    yield from table_lines(("instance", "app", "", *figures), rows, right=figures)
    for each in result.instances:
        if each.error:
            yield f"{each.instance}: {each.error}"
    yield from _notes_of(result)
    if result.by_method:
        kinds = [kind for kind in result.by_method[0] if kind not in ("destination", "method")]
        yield ""
        methods = [
            (row["destination"], row["method"], *(f"{row.get(kind, 0):,}" for kind in kinds))
            for row in result.by_method
        ]
        yield from table_lines(("to", "method", *kinds), methods, right=kinds)
    yield ""
    yield (
        f"{result.same:,} the same, {result.different:,} different, {result.failed:,} failed:"
        f" {counted(result.records, 'record')} with {counted(result.messages, 'message')}"
    )
