"""What came of a message: exact where the log leaves no choice; otherwise it says how many choices there are."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest

from immortal.coordinator.core.interfaces import IMPULSES
from immortal.pipeline.jobs.evidence import BATCH, MARK, Row, evidence_of_record
from immortal.pipeline.jobs.trace import OUTSIDE, Batch, Trace, TraceError, TraceIndex, follow
from immortal.pipeline.reading import Gap, close_shared, read_range, whole_range
from immortal.pipeline.report.pages import trace_dot, trace_lines, trace_svg
from tests.helpers.recorded import Instances, load_module, write_module

MS = 1_000_000


def batch(instance: str, record: int, source: str, first: int, count: int, sent_ms: float, time_ms: float) -> Batch:
    return Batch(instance, record, source, first, count, int(sent_ms * MS), int(time_ms * MS))


def shape(trace: Trace) -> list[tuple[int | None, str, int, int, int, int]]:
    return [(node.parent, node.instance, node.record, node.first, node.last, node.candidates) for node in trace.nodes]


def quiet(lag_records: int = 1, within_ms: int = 100) -> TraceIndex:
    """Every second something happens: a calls b, which calls a back; each record has one message."""
    index = TraceIndex(lag_records, within_ms)
    for second in range(1, 6):
        now = second * 1000
        index.add_batch(batch("a", 2 * second - 1, OUTSIDE, second, 1, now, now))
        index.add_batch(batch("b", second, "a", second, 1, now + 1, now + 2))
        index.add_batch(batch("a", 2 * second, "b", second, 1, now + 3, now + 4))
        index.add_mark("a", "b", 2 * second, second)  # sealed when the answer came
        if second > 1:
            index.add_mark("b", "a", second, second - 1)
    return index


def test_where_nothing_else_happens_causes_are_exact() -> None:
    assert shape(follow(quiet(), "a", 3, 0)) == [
        (None, "a", 3, 2, 2, 1),
        (0, "b", 2, 2, 2, 1),
        (1, "a", 4, 2, 2, 1),
    ]


def test_a_longer_time_leaves_more_choices() -> None:
    trace = follow(quiet(lag_records=1, within_ms=1_500), "a", 3, 0)
    assert min(node.candidates for node in trace.nodes if node.parent is not None) > 1
    assert len(trace.nodes) > 3


def test_marks_say_what_cannot_be_an_effect() -> None:
    index = TraceIndex(lag_records=0, within_ms=1_000)
    for record in (1, 2, 3):
        index.add_batch(batch("a", record, OUTSIDE, record, 2, record, record))
    index.add_mark("a", "b", 1, 4)
    index.add_mark("a", "b", 2, 6)
    index.add_mark("a", "b", 3, 9)
    index.add_batch(batch("b", 1, "a", 1, 12, 5, 6))
    assert shape(follow(index, "a", 1, 1))[1:] == [(0, "b", 1, 5, 6, 2)]  # two messages of record 1 may have made them
    assert shape(follow(index, "a", 2, 0))[1:] == [(0, "b", 1, 7, 9, 2)]
    assert shape(follow(index, "a", 3, 0))[1:] == [(0, "b", 1, 10, 12, 2)]  # no mark holds back what comes last


def test_an_app_that_lags_behind_leaves_one_more_choice() -> None:
    index = TraceIndex(lag_records=1, within_ms=1_000)
    for record in (1, 2, 3, 4):
        index.add_batch(batch("a", record, OUTSIDE, record, 1, record, record))
        index.add_mark("a", "b", record, record * 2)
    index.add_batch(batch("b", 1, "a", 1, 12, 5, 6))
    assert shape(follow(index, "a", 1, 0))[1:] == [(0, "b", 1, 3, 6, 2)]
    assert shape(follow(index, "a", 2, 0))[1:] == [(0, "b", 1, 5, 8, 3)]


def test_what_was_sent_before_the_record_is_no_effect_of_it() -> None:
    index = TraceIndex()
    index.add_batch(batch("a", 1, OUTSIDE, 1, 1, 10, 10))
    index.add_batch(batch("b", 1, "a", 1, 1, 9, 11))
    index.add_batch(batch("b", 2, "a", 2, 1, 10, 12))
    assert shape(follow(index, "a", 1, 0))[1:] == [(0, "b", 2, 2, 2, 1)]


def test_a_message_by_its_number_and_what_there_is_none_of() -> None:
    index = TraceIndex()
    index.add_batch(batch("a", 1, OUTSIDE, 8, 2, 10, 10))
    index.add_batch(batch("a", 1, "c", 3, 1, 9, 10))
    found = [follow(index, "a", 1, message).nodes[0] for message in (None, 0, 1, 2)]
    assert [(node.source, node.first, node.last) for node in found] == [
        (OUTSIDE, 8, 9),
        (OUTSIDE, 8, 8),
        (OUTSIDE, 9, 9),
        ("c", 3, 3),
    ]
    with pytest.raises(TraceError, match="record 1 of 'a' has the messages 0 to 2, 3 was asked for"):
        follow(index, "a", 1, 3)
    with pytest.raises(TraceError, match="record 7 of 'a' holds no calls"):
        follow(index, "a", 7, None)


def test_a_tree_that_is_too_large_is_cut_off_and_says_so() -> None:
    trace = follow(quiet(within_ms=10_000), "a", 1, 0, nodes_max=4)
    assert len(trace.nodes) == 4
    assert trace.cut_off
    assert list(trace_lines(trace))[-1] == "... and more than the 4 that --limit allows"


CHAIN = """
from immortal import Immortal, impulse, peer, rpc


class First(Immortal):
    second = peer(lambda: Second, "second")
    count: int

    def __init__(self) -> None:
        self.count = 0

    @impulse
    def begin(self, number: int) -> None:
        self.second.work.fork(number)
        self.second.work.fork(number + 1)

    @rpc
    def done(self, number: int) -> None:
        self.count += number


class Second(Immortal):
    first = peer(First, "first")
    seen: int

    def __init__(self) -> None:
        self.seen = 0

    @rpc
    def work(self, number: int) -> None:
        self.seen += 1
        if number % 2:
            self.first.done.fork(number)
"""


def test_the_tree_of_real_coordinators_is_what_the_handlers_did(tmp_path: Path) -> None:
    """One impulse at a time, so the truth is known: each makes two calls, of which one is answered."""
    module = load_module(tmp_path, write_module(tmp_path, CHAIN))
    instances = Instances(tmp_path / "logs")
    first = instances.start("first", module.First)
    instances.start("second", module.Second)
    for number in range(6):
        first.impulse("begin", number)
    instances.close()
    rows: list[Row] = []
    for name in ("first", "second"):
        wanted = whole_range(str(tmp_path / "logs" / name / "log"))
        for values in read_range(wanted):
            assert not isinstance(values, Gap)
            for at, sequence_id in enumerate(values.sequence_ids.tolist()):
                rows += evidence_of_record(name, sequence_id, bytes(values.value(at)), wanted.committer_id)
    close_shared()
    index = TraceIndex(lag_records=0, within_ms=3)
    impulses = []
    for row in sorted(rows, key=lambda row: (row.sequence_id, row.batch)):
        if row.what == MARK:
            index.add_mark(row.sender, row.receiver, row.sequence_id, row.position)
        elif row.what == BATCH:
            source = OUTSIDE if row.sender == IMPULSES else row.sender
            index.add_batch(
                Batch(row.receiver, row.sequence_id, source, row.position, row.items, row.sent_ns, row.time_ns)
            )
            if source == OUTSIDE:
                impulses.append(row.sequence_id)
    assert len(impulses) == 6
    for number, record in enumerate(impulses):
        trace = follow(index, "first", record, 0)
        made = [(node.instance, node.source, node.first, node.last) for node in trace.nodes]
        assert made == [
            ("first", OUTSIDE, number + 1, number + 1),
            ("second", "first", 2 * number + 1, 2 * number + 2),
            ("first", "second", number + 1, number + 1),
        ]
        assert [node.candidates for node in trace.nodes] == [1, 1, 2]  # the answer is one of two calls'


# --- pictures --------------------------------------------------------------------------------------------------------


@pytest.fixture
def trace() -> Trace:
    trace = follow(quiet(), "a", 3, 0)
    trace.nodes[1] = replace(trace.nodes[1], candidates=4)
    trace.nodes = [replace(node, methods=('say "<hi>"',)) for node in trace.nodes]
    return trace


def test_the_tree_as_text(trace: Trace) -> None:
    assert list(trace_lines(trace)) == [
        'a record 3  say "<hi>"  outside 2  0.000 ms under way',
        '  b record 2  say "<hi>"  a 2  1.000 ms under way  one of 4',
        '    a record 4  say "<hi>"  b 2  1.000 ms under way  exact',
    ]


def test_the_tree_for_graphviz(trace: Trace) -> None:
    lines = trace_dot(trace).splitlines()
    assert lines[0] == "digraph trace {"
    assert lines[-1] == "}"
    assert '  n1 [label="b record 2\\nsay \\"<hi>\\""];' in lines
    assert '  n0 -> n1 [weight=1, style=dotted, label="1 of 4"];' in lines
    assert "  n1 -> n2 [weight=1];" in lines


def test_the_tree_as_a_picture(trace: Trace) -> None:
    svg = trace_svg(trace)
    root = ElementTree.fromstring(svg)
    assert root.tag.endswith("svg")
    text = "".join(root.itertext())
    assert "ms after the first record" in text
    assert 'say "<hi>"' in text
    assert svg == trace_svg(trace)
