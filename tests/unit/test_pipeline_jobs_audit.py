"""From many streams to one judgement: what the logs' tables add, what damage explains, which orders are impossible."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from immortal.coordinator.log.authentication import ForgedLogError, forged_record
from immortal.pipeline.jobs import evidence
from immortal.pipeline.jobs.audit import AuditReport, LogReport, impossible_orders, judge
from immortal.pipeline.jobs.evidence import LOG, Row, evidence_of_raw, evidence_of_record, evidence_of_values
from immortal.pipeline.jobs.sources import LogFleet
from immortal.pipeline.jobs.stream_audit import Needs, Violation
from immortal.pipeline.reading import NO_LIMIT, Gap, LogRange, close_shared, read_range, whole_range
from immortal.protocol.messages import RpcType, encode_incoming_rpc
from tests.helpers.fleet import (
    Plan,
    audit_here,
    cut,
    damage,
    is_impulse,
    plan_fleet,
    remove_record,
    split_messages,
    trim,
)
from tests.helpers.recorded import Instances, load_module, write_module
from tests.helpers.synthetic_logs import encode_planned

DAY_NS = 86_400 * 10**9


def kinds(report: AuditReport) -> list[tuple[str, str, str]]:
    return [(violation.kind, violation.sender, violation.receiver) for violation in report.violations]


def busy_stream(plan: Plan) -> tuple[str, str]:
    """The stream between two services with the most batches."""
    pairs = [(sender, receiver) for sender in plan.names for receiver in plan.names if sender != receiver]
    return max(pairs, key=lambda pair: len(plan.batches(*pair)))


# --- rows of evidence ------------------------------------------------------------------------------------------------


def test_many_records_at_once_say_what_one_by_one_they_say(tmp_path: Path) -> None:
    rng = random.Random(5)
    plan = plan_fleet(3, messages=1_500, batch_messages_max=40)
    for name in plan.names:
        damage(plan, name, rng)
    for folder in plan.write(tmp_path):
        wanted = whole_range(folder)
        together: list[Row] = []
        by_raw: list[Row] = []
        of_log: list[Row] = []
        one_by_one: list[Row] = []
        for values in read_range(wanted):
            assert not isinstance(values, Gap)
            together += rows_of(evidence_of_values(values, wanted.instance, wanted.committer_id))
            of_log += rows_of(evidence_of_values(values, wanted.instance, wanted.committer_id, streams=False))
            stored = [bytes(values.value(index)) for index in range(len(values.start))]
            raw = pa.RecordBatch.from_arrays(
                [[wanted.instance] * len(stored), pa.array(values.sequence_ids), pa.array(stored, pa.binary())],
                names=["instance", "sequence_id", "value"],
            )
            by_raw += rows_of(evidence_of_raw(iter([raw]), {wanted.instance: wanted.committer_id}))
            for sequence_id, value in zip(values.sequence_ids.tolist(), stored, strict=True):
                one_by_one += evidence_of_record(wanted.instance, sequence_id, value, wanted.committer_id)
        close_shared()
        assert by_raw == together

        def of_streams(rows: list[Row]) -> list[Row]:
            return sorted((row for row in rows if row.what != LOG), key=lambda row: row[:5])

        assert of_streams(together) == of_streams(one_by_one)
        assert log_of(together) == log_of(one_by_one)
        assert log_of(together).damaged == 1
        assert of_log == [row for row in together if row.what == LOG]


def rows_of(batches: object) -> list[Row]:
    return [Row(**row) for batch in batches for row in batch.to_pylist()]  # type: ignore[attr-defined]


def log_of(rows: list[Row]) -> LogReport:
    report = LogReport("x")
    for row in sorted((row for row in rows if row.what == LOG), key=lambda row: row.sequence_id):
        report.add(row)
    return report


def test_missing_records_are_told_once_whoever_finds_them() -> None:
    def log(sequence_id: int, items: int, reason: str | None = None) -> Row:
        return Row("", "x", LOG, sequence_id, items=items, reason=reason)

    found = log_of([log(3, 4), log(9, 2)])
    assert (found.first, found.last, found.records, found.damaged) == (3, 10, 6, 1)
    assert found.damages == [(7, 8, "records 7 to 8 are missing")]
    found = log_of([log(0, 2), log(2, 0, "records 2 to 4 are missing"), log(5, 1)])
    assert found.damages == [(2, 4, "records 2 to 4 are missing")]
    found = log_of([log(0, 1), log(1, 1, "record 1 is damaged"), log(3, 1)])
    assert found.damages == [(1, 1, "record 1 is damaged"), (2, 2, "record 2 is missing")]
    found = log_of([log(0, 3), Row("", "x", LOG, 3, position=NO_LIMIT, reason="a broken page")])
    assert (found.last, found.records, found.damaged, found.unread) == (2, 3, 0, [(3, NO_LIMIT - 1)])


def test_a_forged_record_is_damage_and_those_around_it_are_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    def forged(_: object) -> Any:
        raise forged_record(5)

    monkeypatch.setattr(evidence, "read_range", forged)
    batches: list[pa.RecordBatch] = []
    wanted = LogRange("/log", "x", 7, 3, 9)
    with pytest.raises(ForgedLogError):
        batches.extend(evidence.evidence_of_range(wanted, 0, NO_LIMIT))
    found = log_of(rows_of(batches))
    assert [damage[:2] for damage in found.damages] == [(5, 5)]
    assert "not authentic" in found.damages[0][2]
    assert found.unread == [(3, 4), (6, 8)]


# --- what the tables add ---------------------------------------------------------------------------------------------


def test_what_was_acknowledged_and_is_not_there_is_lost_and_not_in_flight(tmp_path: Path) -> None:
    plan = plan_fleet(3, messages=900)
    sender, receiver = busy_stream(plan)
    record, index, batch = plan.batches(sender, receiver)[-1]
    plan.endings[sender].acknowledged[receiver] = batch.last_position
    del plan.records[receiver][record].inputs[index]
    report = audit_here(plan.write(tmp_path))
    assert [(v.kind, v.first, v.last) for v in report.violations] == [
        ("lost", batch.first_position, batch.last_position)
    ]
    assert f"which '{receiver}' has acknowledged" in report.violations[0].text
    stream = next(each for each in report.streams if (each.sender, each.receiver) == (sender, receiver))
    assert stream.in_flight == max(0, stream.made - batch.last_position)
    assert stream.violations == {"lost": 1}


def test_what_was_not_acknowledged_is_in_flight(tmp_path: Path) -> None:
    plan = plan_fleet(3, messages=900)
    sender, receiver = busy_stream(plan)
    record, index, batch = plan.batches(sender, receiver)[-1]
    plan.endings[sender].acknowledged[receiver] = batch.first_position - 1
    del plan.records[receiver][record].inputs[index]
    report = audit_here(plan.write(tmp_path))
    assert report.violations == []
    stream = next(each for each in report.streams if (each.sender, each.receiver) == (sender, receiver))
    assert stream.in_flight == stream.made - batch.first_position + 1 > 0


def test_what_was_in_a_damaged_record_is_unknown_not_lost(tmp_path: Path) -> None:
    plan = plan_fleet(3, messages=900)
    sender, receiver = busy_stream(plan)
    batches = plan.batches(sender, receiver)
    record = next(record for record, _, _ in batches[2:-2] if sum(each[0] == record for each in batches) == 1)
    plan.damaged[receiver] = {record}
    inside = sum(batch.count for at, _, batch in batches if at == record)
    report = audit_here(plan.write(tmp_path))
    assert kinds(report) == [("damage", "", receiver)]
    assert f"record {record}" in report.violations[0].text
    stream = next(each for each in report.streams if (each.sender, each.receiver) == (sender, receiver))
    assert stream.unknown == inside
    assert stream.violations == {}


def test_a_record_that_is_gone_is_damage(tmp_path: Path) -> None:
    plan = plan_fleet(2, messages=300)
    folders = plan.write(tmp_path)
    remove_record(Path(folders[0]), 4)
    report = audit_here(folders)
    assert kinds(report) == [("damage", "", plan.names[0])]
    assert "record 4 is missing" in report.violations[0].text


def test_a_trimmed_log_has_lost_nothing(tmp_path: Path) -> None:
    plan = plan_fleet(3, messages=900)
    folders = plan.write(tmp_path)
    name = plan.names[1]
    middle = len(plan.records[name]) // 2
    trim(Path(folders[1]), plan, name, middle)
    report = audit_here(folders)
    log = next(log for log in report.logs if log.instance == name)
    assert (log.first, log.last) == (middle + 1, len(plan.records[name]) - 1)
    assert report.violations == []


def test_a_fleet_that_goes_on_while_it_is_audited_is_sound(tmp_path: Path) -> None:
    """The tables are read first; then some logs grow, and only then the records are read."""
    plan = plan_fleet(3, messages=900)
    earlier = cut(plan, 0.5)
    for name in plan.names:
        for receiver in plan.names:
            batches = earlier.batches(name, receiver)
            if batches and receiver != name:
                earlier.endings[name].acknowledged[receiver] = batches[-1][2].last_position
    states = LogFleet(earlier.write(tmp_path / "earlier"), strict=True).states
    for grown in (set(), {plan.names[0]}, set(plan.names[1:]), set(plan.names)):
        records = {name: (plan if name in grown else earlier).records[name] for name in plan.names}
        now = Plan(plan.committer_ids, records, plan.endings)
        report = audit_here(now.write(tmp_path / f"now-{len(grown)}"), states=states)
        assert report.violations == []
        assert sum(log.records for log in report.logs) == sum(map(len, records.values()))


def test_a_log_that_was_swapped_is_found_from_both_sides(tmp_path: Path) -> None:
    plan = plan_fleet(3, messages=900)
    sender, receiver = busy_stream(plan)
    folders = plan.write(tmp_path)
    states = LogFleet(folders, strict=True).states
    states[sender] = replace(states[sender], committer_id=5)
    report = judge([], {sender: states[sender], receiver: replace(states[receiver], peers={}, acknowledged={})})
    texts = [each.text for each in report.violations if (each.kind, each.receiver) == ("identity", receiver)]
    assert texts == [
        f"the log of '{receiver}' knows its sender '{sender}' as committer {plan.committer_ids[sender]}, the log of"
        f" '{sender}' given here is committer 5's: it was wiped or swapped"
    ]


def test_of_streams_with_one_log_only_that_end_is_checked(tmp_path: Path) -> None:
    plan = plan_fleet(4, messages=900)
    folders = plan.write(tmp_path)
    report = audit_here(folders[:2])
    assert report.violations == []
    assert report.notes == [
        f"no log was given of {', '.join(plan.names[2:])}: of their streams only one end is checked"
    ]
    assert {stream.sender_given and stream.receiver_given for stream in report.streams} == {True, False}


def test_calls_that_the_sender_had_not_made_are_invented(tmp_path: Path) -> None:
    plan = plan_fleet(3, messages=900)
    sender, receiver = busy_stream(plan)
    record, _, last = plan.batches(sender, receiver)[-1]
    made = plan.endings[sender].outputs[receiver].position
    first = last.last_position + 1
    payload = b"".join(encode_incoming_rpc(1, RpcType.FORK, b"%d" % number) for number in range(made - first + 3))
    invented = replace(last, first_position=first, count=made - first + 3, payload=payload)
    plan.records[receiver][record].inputs.append(invented)
    report = audit_here(plan.write(tmp_path))
    assert {"invented"} <= {violation.kind for violation in report.violations} <= {"invented", "content", "causality"}
    violation = next(violation for violation in report.violations if violation.kind == "invented")
    assert (violation.sender, violation.receiver, violation.last) == (sender, receiver, made + 2)


def test_a_second_initial_message_is_no_input() -> None:
    plan = plan_fleet(1, messages=60)
    name = plan.names[0]
    plan.records[name][3].inputs.append(plan.records[name][0].inputs[0])
    value = encode_planned(plan.records[name][3], 9, 3)
    reasons = [row.reason for row in evidence_of_record(name, 3, value, 9) if row.what == LOG]
    assert reasons == ["record 3 holds an initial message, which belongs in record 0"]


# --- orders ----------------------------------------------------------------------------------------------------------


def stuck(*needs: tuple[str, int, str, int], known: str = "abc") -> set[str]:
    by_stream: dict[tuple[str, str], list[Needs]] = {}
    for receiver, record, sender, sender_record in needs:
        by_stream.setdefault((sender, receiver), []).append(Needs(record, sender_record))
    return {violation.receiver for violation in impossible_orders(by_stream, set(known))}


def test_orders_that_are_possible() -> None:
    assert stuck() == set()
    assert stuck(("b", 5, "a", 4), ("a", 6, "b", 5), ("b", 7, "a", 6)) == set()
    assert stuck(("a", 5, "a", 4), ("a", 6, "a", 5)) == set()
    chain = [("b" if number % 2 else "a", number, "a" if number % 2 else "b", number - 1) for number in range(1, 2_000)]
    assert stuck(*chain) == set()


@pytest.mark.parametrize(
    ("needs", "expected"),
    [
        ([("b", 5, "a", 4), ("a", 4, "b", 5)], {"a", "b"}),  # each first
        ([("a", 4, "a", 4)], {"a"}),  # made behind the very record that holds it
        ([("b", 1, "a", 9), ("c", 1, "b", 9), ("a", 1, "c", 9)], {"a", "b", "c"}),
        ([("b", 5, "a", 4), ("a", 4, "b", 5), ("c", 1, "a", 4), ("c", 0, "a", 3)], {"a", "b", "c"}),
    ],
)
def test_orders_that_are_not(needs: list[tuple[str, int, str, int]], expected: set[str]) -> None:
    assert stuck(*needs) == expected


def test_what_depends_on_a_log_that_is_not_there_is_taken_as_possible() -> None:
    assert stuck(("b", 5, "a", 4), ("a", 4, "b", 5), known="b") == set()


def test_a_violation_of_order_names_both_records() -> None:
    violations = impossible_orders({("a", "b"): [Needs(5, 4)], ("b", "a"): [Needs(4, 5)]}, {"a", "b"})
    assert violations[0] == Violation("causality", "b", "a", 0, 0, 4, violations[0].text)
    assert "record 4 of 'a' holds a message made behind record 5 of 'b'" in violations[0].text


# --- logs of real coordinators ---------------------------------------------------------------------------------------

TALK = """
from immortal import Immortal, Impulses, impulse, peer, rpc


class Left(Immortal):
    right = peer(lambda: Right, "right")
    count: int

    def __init__(self) -> None:
        self.count = 0

    @impulse
    def begin(self, number: int) -> None:
        for each in range(number):
            self.right.forward.fork(each)
        self.again.fork(number)

    @rpc
    def again(self, number: int) -> None:
        self.count += 1

    @rpc
    def back(self, number: int) -> None:
        self.count += number


class Right(Immortal):
    left = peer(Left, "left")
    seen: int

    def __init__(self) -> None:
        self.seen = 0

    @rpc
    def forward(self, number: int) -> None:
        self.seen += 1
        if number % 2:
            self.left.back.fork(number)
"""


def test_logs_of_real_coordinators_that_crashed_and_sent_impulses_are_sound(tmp_path: Path) -> None:
    module = load_module(tmp_path, write_module(tmp_path, TALK))
    instances = Instances(tmp_path / "logs")
    left = instances.start("left", module.Left)
    instances.start("right", module.Right)
    for number in range(12):
        left.impulses([("begin", (number,)), ("begin", (2,))])
        left.impulse("forward", number, to="right")
        if number == 4:
            left.checkpoint()
        if number in (2, 7):
            instances.stop("left")
            left = instances.start("left", module.Left)
        if number == 9:
            instances.stop("right")
            instances.start("right", module.Right)
    instances.close()
    folders = [str(tmp_path / "logs" / name / "log") for name in ("left", "right")]
    report = audit_here(folders, tolerance_ns=10**9)  # here each instance has a clock of its own, which may stand still
    assert report.violations == []
    streams = {(stream.sender, stream.receiver): stream for stream in report.streams}
    assert set(streams) == {("!impulses", "left"), ("left", "left"), ("left", "right"), ("right", "left")}
    assert streams["left", "right"].impulses == 12
    assert streams["left", "right"].compared > 50


def test_impulses_are_kept_in_the_plan_as_a_coordinator_keeps_them() -> None:
    """What the made-up fleet says of its impulses is what its streams hold."""
    plan = plan_fleet(4, messages=2_000)
    kept = [(name, batch) for name, ending in plan.endings.items() for batch in ending.impulses]
    assert kept
    held = 0
    for sender, impulses in kept:
        for _, _, batch in plan.batches(sender, impulses.destination):
            for position, message in enumerate(split_messages(batch.payload), batch.first_position):
                if impulses.first_position <= position <= impulses.last_position:
                    assert is_impulse(message)
                    assert message in impulses.payload
                    held += 1
    assert 0 < held <= sum(impulses.count for _, impulses in kept)


def test_a_stream_that_was_reset_is_not_compared_with_marks_of_other_numbers(tmp_path: Path) -> None:
    """The receiver's log was wiped and the operator has reset the stream: its positions begin behind what it had."""
    plan = plan_fleet(3, messages=900)
    sender, receiver = busy_stream(plan)
    record, index, first = plan.batches(sender, receiver)[0]
    del plan.records[receiver][record].inputs[index]
    offset = first.count
    for _, _, batch in plan.batches(sender, receiver):
        batch.first_position -= offset
    plan.endings[sender].acknowledged.pop(receiver, None)
    folders = plan.write(tmp_path)
    states = LogFleet(folders, strict=True).states
    assert any(violation.kind == "content" for violation in audit_here(folders).violations)
    states[sender] = replace(states[sender], offsets={receiver: offset})
    report = audit_here(folders, states=states)
    assert report.violations == []
    assert report.notes == [
        f"the stream from '{sender}' to '{receiver}' was reset, since the log of '{receiver}' was replaced:"
        " its contents are not compared"
    ]
    stream = next(each for each in report.streams if (each.sender, each.receiver) == (sender, receiver))
    assert (stream.compared, stream.in_flight) == (0, max(0, stream.made - offset - stream.last))
