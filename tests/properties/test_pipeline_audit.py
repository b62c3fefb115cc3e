"""The audit of a fleet against a plain oracle, with random faults planted in its logs: all of them, nothing else."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.effort import effort
from tests.helpers.fleet import (
    STREAM_FAULTS,
    Found,
    audit_here,
    damage,
    found_in,
    oracle,
    plan_fleet,
    streams_for_faults,
)
from tests.helpers.memory import in_memory


@given(seed=st.integers(0, 10**6), services=st.integers(1, 5), faults=st.integers(0, 12))
@settings(max_examples=effort(12), deadline=None)
def test_it_finds_what_the_oracle_finds(seed: int, services: int, faults: int) -> None:
    """Faults may fall together here: what hides another one hides it from both."""
    rng = random.Random(seed)
    plan = plan_fleet(services, messages=400, seed=seed)
    for _ in range(faults):
        streams = streams_for_faults(plan)
        if rng.random() < 0.2 or not streams:
            damage(plan, rng.choice(plan.names), rng)
        else:
            rng.choice(STREAM_FAULTS)(plan, *rng.choice(streams), rng)
    with tempfile.TemporaryDirectory(dir=in_memory()) as folder:
        folders = plan.write(Path(folder))
        report = audit_here(folders, tolerance_ns=10**12)
        assert found_in(report) == oracle(folders)
        assert report.violation_count == len(report.violations) == sum(report.counts.values())


@given(seed=st.integers(0, 10**6))
@settings(max_examples=effort(5), deadline=None)
def test_it_finds_every_planted_fault_and_nothing_else(seed: int) -> None:
    """Each fault in a stream of its own: none hides another."""
    rng = random.Random(seed)
    plan = plan_fleet(6, messages=2_500, seed=seed)
    streams = streams_for_faults(plan)
    rng.shuffle(streams)
    planted: list[Found] = []
    for number, stream in enumerate(streams):
        planted.append(STREAM_FAULTS[number % len(STREAM_FAULTS)](plan, *stream, rng))
    assert len(planted) > 20
    with tempfile.TemporaryDirectory(dir=in_memory()) as folder:
        folders = plan.write(Path(folder))
        report = audit_here(folders, tolerance_ns=10**12)
    found = found_in(report)
    for fault in planted:
        assert fault <= found
    assert {fault[:3] for fault in found} == {next(iter(fault))[:3] for fault in planted}


@given(seed=st.integers(0, 10**6), services=st.integers(1, 8), batch=st.integers(1, 30))
@settings(max_examples=effort(7), deadline=None)
def test_a_sound_fleet_is_sound_to_the_nanosecond(seed: int, services: int, batch: int) -> None:
    plan = plan_fleet(services, messages=500, seed=seed, batch_messages_max=batch)
    with tempfile.TemporaryDirectory(dir=in_memory()) as folder:
        report = audit_here(plan.write(Path(folder)), tolerance_ns=0)
    assert report.violations == []
    assert report.notes == []
    executed = sum(stream.messages for stream in report.streams)
    assert executed == sum(
        batch.count for records in plan.records.values() for record in records[1:] for batch in record.inputs
    )
    for stream in report.streams:
        marks = plan.marks(stream.sender, stream.receiver) if stream.sender in plan.records else []
        assert stream.made == max(marks, default=0)
        assert stream.in_flight == max(0, stream.made - stream.last)
        assert stream.compared == max((mark for mark in marks if mark <= stream.last), default=0)
