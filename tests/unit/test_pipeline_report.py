"""Pages and lines that people read: complete, self-contained, and safe whatever the names are."""

from __future__ import annotations

import html
import json
import re
from dataclasses import asdict
from html.parser import HTMLParser
from pathlib import Path

import pytest

from immortal.pipeline.jobs.audit import AuditReport, LogReport, StreamReport
from immortal.pipeline.jobs.export import ExportReport, InstanceExport
from immortal.pipeline.jobs.stats import BinStats, Figures, MethodStats, ServiceStats, Stats, TalkerStats, bin_size_ns
from immortal.pipeline.jobs.stream_audit import Violation
from immortal.pipeline.jobs.trace import Node, Trace
from immortal.pipeline.jobs.verify import Problem, VerifyReport
from immortal.pipeline.jobs.what_if import InstanceResult, summarize
from immortal.pipeline.report.pages import bars, duration_text, matrix, over_time, stats_page, trace_svg
from immortal.pipeline.report.text import audit_lines, export_lines, stats_lines, verify_lines, what_if_lines
from immortal.presenters.what_if_fleet import fleet_page, fleet_report
from immortal.replay.fleet.outcome import (
    BrokenCheck,
    Calls,
    ClientAnswers,
    Consequence,
    End,
    Fate,
    First,
    FleetOutcome,
    Hour,
    Seeds,
    ServiceOutcome,
)

NAMES = ["<script>alert(1)</script>", "b&b", *(f"service-{number:02}" for number in range(30))]
MINUTE_NS = 60 * 10**9
START_NS = 1_767_225_600 * 10**9


def figures(calls: int) -> Figures:
    return Figures(calls, calls * 10, 1.5, 2.25, 3.125, 4.0)


@pytest.fixture(scope="module")
def stats() -> Stats:
    services = [
        ServiceStats(name, figures(100 - number), START_NS, START_NS + 5 * MINUTE_NS, 9, 900, 3.0, 8.0, 12, number % 2)
        for number, name in enumerate(NAMES)
    ]
    methods = [MethodStats(name, f"method {number}", figures(9)) for number, name in enumerate(NAMES * 8)]
    bins = [BinStats(name, START_NS + minute * MINUTE_NS, figures(minute + 1)) for minute in range(5) for name in NAMES]
    talkers = [TalkerStats(sender, receiver, figures(7)) for sender in ["outside", *NAMES] for receiver in NAMES[:5]]
    return Stats(services, methods, MINUTE_NS, bins, talkers)


@pytest.fixture(scope="module")
def page_text(stats: Stats) -> str:
    return stats_page(stats)


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.links: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in ("meta", "path", "use", "rect", "image"):
            self.open.append(tag)
        self.links += [value or "" for name, value in attributes if name in ("src", "href", "xlink:href", "action")]

    def handle_endtag(self, tag: str) -> None:
        if self.open and self.open[-1] == tag:
            self.open.pop()

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_the_page_needs_nothing_from_elsewhere_and_takes_no_name_for_html(page_text: str) -> None:
    page = _Page()
    page.feed(page_text)
    assert page.open == []
    assert "script" not in page.tags
    assert page.tags.count("svg") == 5
    assert all(link.startswith(("#", "data:")) for link in page.links)
    assert not re.search(r"@import|url\((?!#)", page_text)
    assert NAMES[0] in "".join(page.text)
    assert "b&b" in "".join(page.text)
    assert "and 56 more" in page_text  # of 256 methods


def test_the_page_of_a_what_if_takes_no_name_for_html() -> None:
    bad = NAMES[0]
    hours = [Hour(name, name, name, START_NS, changed=1) for name in (bad, *NAMES[2:])]
    service = ServiceOutcome(
        bad,
        True,
        bad,
        9,
        8,
        First(1, 2, bad, bad),
        [Calls(bad, bad, 1)],
        [Fate(bad, bad, 1, bad)],
        [{"path": bad}],
        bad,
    )
    where = BrokenCheck(bad, None, None, bad, bad, bad, 1, {bad: 1})
    tree = Consequence(bad, "added", bad, bad, 1, bad, [Consequence(bad, "added", bad, bad, 1, bad, [])])
    clients = ClientAnswers(1, 0, 0, [bad])
    effects = [dict.fromkeys(("service", "effect", "call", "outcome", "time"), bad)]
    seeds = Seeds(2, 1, 1, [End(0, 1, 0, ""), End(1, 1, 1, bad)])
    outcome = FleetOutcome(
        True, [service], [bad], [tree], clients, effects, effects, where, where, where, seeds, [bad], hours=hours
    )
    page = _Page()
    page.feed(fleet_page(outcome, {bad: bad}))
    assert page.open == []
    assert "script" not in page.tags
    assert page.tags.count("svg") == 2
    assert all(link.startswith(("#", "data:")) for link in page.links)
    assert page.tags.count("h2") == 12
    service.state *= 300
    report = json.loads(json.dumps(fleet_report(outcome)))  # plain values, for another page
    assert len(report["parts"]) == 12
    (states,) = [part for part in report["parts"] if part["title"] == "States at the end"]
    assert (len(states["rows"]), states["more"]) == (200, 100)
    (tree,) = [part["tree"] for part in report["parts"] if part["tree"]]
    assert [one["text"] for one in (tree[0], *tree[0]["then"])] == [f"1 added: {bad} -> {bad}: {bad}; e.g. {bad}"] * 2


def test_the_page_of_a_fleet_that_did_nothing() -> None:
    page = _Page()
    page.feed(stats_page(Stats([], [], 10**6, [], [])))
    assert page.open == []
    assert "nothing logged" in "".join(page.text)


def labels(chart: str) -> list[str]:
    """The texts of a chart."""
    return [html.unescape(text) for text in re.findall(r"<text[^>]*>(.*?)</text>", chart)]


@pytest.mark.parametrize(("bin_ns", "bins_count"), [(10**6, 1), (50 * 10**6, 100), (86_400 * 10**9, 3)])
@pytest.mark.parametrize("stacked", [True, False])
def test_a_chart_is_as_long_as_what_it_shows(bin_ns: int, bins_count: int, stacked: bool) -> None:
    points = {START_NS + number * bin_ns: 5.0 for number in range(bins_count)}
    found = labels(over_time("calls", "calls", {"shop": points}, bin_ns, stacked=stacked))
    years = {text[:4] for text in found if re.match(r"20\d\d", text)}
    assert years == {"2026"}, found


def test_names_stand_in_charts_as_they_are() -> None:
    names = ["_hidden", "__", "a$b$c", "$", r"x$\frac$", "plain"]
    series = {name: {START_NS: 1.0} for name in names}
    for stacked in (True, False):
        assert set(names) <= {*labels(over_time("t", "u", series, MINUTE_NS, stacked=stacked))}
    assert set(names) <= {*labels(bars("t", "u", [(name, 1.0) for name in names]))}
    assert set(names) <= {*labels(matrix("t", names, names, {}))}
    nodes = [
        Node(number, None, 0, name, number, "outside", 1, 1, START_NS, START_NS, 1, (f"_{name}$x$",))
        for number, name in enumerate(names)
    ]
    assert {*names, *(f"{number} _{name}$x$" for number, name in enumerate(names))} <= {
        *labels(trace_svg(Trace(nodes, False, 0, 1)))
    }


@pytest.mark.parametrize("services_count", [1, 30, 10_000])
def test_time_is_cut_as_it_is_long(services_count: int) -> None:
    spans_ns = [span_s * 10**9 for span_s in (1, 4, 60, 1000, 86_400, 400 * 86_400)]
    for span_ns in spans_ns:
        bins = span_ns / bin_size_ns(span_ns, services_count)
        most = min(120, max(20, 10_000 // services_count))
        assert most / 3 <= bins <= most
    assert bin_size_ns(0, services_count) == 10**6
    assert bin_size_ns((1 << 63) - 1, services_count) <= 1000 * 86_400 * 10**9


def test_the_page_says_how_its_time_is_cut(page_text: str) -> None:
    assert "calls in 1 min" in labels(page_text)
    sizes_ns = (10**6, 500 * 10**6, 2 * 10**9, 30 * MINUTE_NS, 3 * 60 * MINUTE_NS, 86_400 * 10**9)
    assert [*map(duration_text, sizes_ns)] == ["1 ms", "500 ms", "2 s", "30 min", "3 h", "1 d"]


def test_statistics_as_lines(stats: Stats) -> None:
    lines = list(stats_lines(stats, top=3))
    assert lines[0].split()[:3] == ["service", "calls", "bytes"]
    assert lines[1].split() == [NAMES[0], "100", "1,000", "1.500", "2.250", "3.125", "4.000", "9", "3", "0"]
    assert f"and {len(NAMES) * 8 - 3} more; --top shows them" in lines
    assert len(lines) == 1 + len(NAMES) + 2 * (1 + 1 + 3 + 1)


def audit_report(*violations: Violation) -> AuditReport:
    streams = [
        StreamReport("a", "b", 10, made=12, in_flight=2, compared=9, first=1, last=10, unknown=3),
        StreamReport("!impulses", "b", 1, first=1, last=1),
    ]
    counts = {"lost": len(violations)} if violations else {}
    return AuditReport([LogReport("b", 4)], streams, list(violations), len(violations), counts, ["look here"])


def test_an_audit_in_lines() -> None:
    lines = list(audit_lines(audit_report(), 10, all_streams=True))
    assert lines == [
        "1 log, 4 records, 11 messages in 2 streams",
        "in flight: 2 messages in 1 stream",
        "compared with what their senders made: 9 messages",
        "in damaged or unread records, so not known: 3 messages",
        "note: look here",
        "",
        "from     to  messages  first  last  made  in flight  compared  violations",
        "a        b         10      1    10    12          2         9           -",
        "outside  b          1      1     1     -          0         0           -",
        "",
        "sound: every message was executed once, in order, after its cause",
    ]


def test_violations_in_lines() -> None:
    lost = Violation("lost", "a", "b", 3, 4, 7, "gone")
    damaged = Violation("damage", "", "b", 3, 3, 3, "the log of 'b': broken")
    lines = list(audit_lines(audit_report(lost, damaged, lost), 2, all_streams=False))
    assert lines[lines.index("VIOLATIONS: 3 lost") :] == [
        "VIOLATIONS: 3 lost",
        "a -> b",
        "  lost: record 7: gone",
        "b",
        "  damage: the log of 'b': broken",
        "and 1 more; --limit shows them",
    ]
    assert not any(line.startswith("sound") for line in lines)


def test_an_export_in_lines() -> None:
    instances = {"a": InstanceExport(5, 9, 5, skipped=2), "b": InstanceExport(3, 2)}
    report = ExportReport(2, ["raw"], instances, {"raw": 5}, copied=2)
    assert list(export_lines(report, Path("to"))) == [
        "warning: 2 records of a were trimmed before they could be exported",
        "table  new rows",
        "raw           5",
        "to: new records of 1 of 2 instances, compared with the logs",
        "copied to Delta tables: 2 files",
    ]


def test_a_verification_in_lines() -> None:
    report = VerifyReport({"a": 5}, {"a": 1})
    assert list(verify_lines(report, 1)) == ["sound: 5 sound records in 1 log, 1 sound checkpoint"]
    for number in range(2):
        report.add(Problem("a", f"record {number}", "broken"))
    assert list(verify_lines(report, 1)) == [
        "a: record 0: broken",
        "and 1 more; --limit shows them",
        "DAMAGED: 2 problems; 5 sound records in 1 log, 1 sound checkpoint",
    ]


def what_if_values(name: str, changed: int) -> dict[str, object]:
    return {
        "instance": name,
        "records": 10,
        "messages": 20,
        "differences": {"added": 0, "missing": 0, "changed": changed},
        "by_method": [{"destination": "", "method": "m", "added": 0, "missing": 0, "changed": changed}],
        "state": [],
        "state_known": not changed,
        "exception": None,
        "fates": [],
        "old_code": {"digest": "0" * 64, "modules": 1, "file": "/old/m.py"},
        "new_code": {"digest": "1" * 64, "modules": 2, "file": "/new/m.py"},
        "notes": [],
        "not_worked_out": [{"text": "what 4 other calls to itself would do"}] if changed else [],
    }


def test_a_what_if_of_a_fleet_is_summed_up() -> None:
    results = [
        InstanceResult("a", "m:New", 0, 1.0, what_if_values("a", 0), None),
        InstanceResult("b", "m:New", 3, 1.0, what_if_values("b", 4), None),
        InstanceResult("c", "m:New", 1, 1.0, None, "error: no such class"),
    ]
    summary = summarize(iter(results))
    assert (summary.same, summary.different, summary.failed, summary.exit_status) == (1, 1, 1, 3)
    assert (summary.records, summary.messages) == (20, 40)
    assert summary.differences == {"added": 0, "missing": 0, "changed": 4}
    assert [(row["destination"], row["changed"]) for row in summary.by_method] == [("a", 0), ("b", 4)]
    lines = list(what_if_lines(summary))
    assert lines[2].split() == ["b", "m:New", "DIFFERENT", "10", "4", "changed", "?", "-", "1.0"]
    assert lines[5:8] == [
        "old code: /old/m.py, 1 module with digest 0000000000000000 (a, b)",
        "new code: /new/m.py, 2 modules with digest 1111111111111111 (a, b)",
        "not worked out: what 4 other calls to itself would do (b)",
    ]
    assert summary.not_worked_out == {"b": ["what 4 other calls to itself would do"]}
    assert asdict(summary)["not_worked_out"] == summary.not_worked_out
    assert "c: error: no such class" in lines
    assert lines[-1] == "1 the same, 1 different, 1 failed: 20 records with 40 messages"
    assert summarize(iter(results[:2])).exit_status == 3
    assert summarize(iter(results[:1])).exit_status == 0
