"""The cut of a fleet for a query: the longest one in which no effect is without its cause."""

from __future__ import annotations

from pathlib import Path

import duckdb
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from immortal.log import open_reader
from immortal.pipeline.sql.database import LogCut, make_consistent
from immortal.pipeline.sql.parquet_cache import update
from immortal.protocol.trailer import BatchKind
from tests.helpers.effort import effort
from tests.helpers.fleet import Plan, plan_fleet


class Written:
    """A fleet's logs, and a database with their tables."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.plan = plan_fleet(services=4, messages=400, seed=seed)
        self.database = duckdb.connect()
        paths: dict[str, list[str]] = {"messages": [], "outputs": []}
        for log in self.plan.write(folder):
            with open_reader(log) as reader:
                for one in update(reader, Path(log).parent):
                    for table, found in paths.items():
                        found.append(str(one.path(table)))
        for table, found in paths.items():
            self.database.execute(f"create view _logged_{table} as select * from read_parquet({found})")


@pytest.fixture(scope="module", params=[1, 2])
def written(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Written:
    return Written(tmp_path_factory.mktemp("cut"), request.param)


def made_by(plan: Plan, sender: str, receiver: str, last: int) -> int:
    """What the sender's records up to ``last`` have made at least, by the marks up to the next."""
    marks = [mark for record in plan.records[sender][: last + 2] for mark in record.marks]
    return max((mark.position for mark in marks if mark.destination == receiver), default=0)


def is_consistent(plan: Plan, lasts: dict[str, int], bounded: set[str]) -> bool:
    for receiver, last in lasts.items():
        for record in plan.records[receiver][: last + 1]:
            for batch in record.inputs:
                if batch.kind != BatchKind.STREAM or batch.name not in bounded:
                    continue
                if batch.last_position > made_by(plan, batch.name, receiver, lasts[batch.name]):
                    return False
    return True


@settings(max_examples=effort(12), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shares=st.lists(st.integers(0, 100), min_size=4, max_size=4))
def test_no_effect_without_its_cause_and_no_more_is_cut(written: Written, shares: list[int]) -> None:
    plan = written.plan
    ends = {name: len(records) - 1 for name, records in plan.records.items()}
    wanted = {name: ends[name] * share // 100 for name, share in zip(ends, shares, strict=True)}
    cuts = [LogCut(name, 0, last, has_more=last < ends[name]) for name, last in wanted.items()]
    make_consistent(written.database, cuts)
    found = {cut.instance: cut.last for cut in cuts}
    assert all(found[name] <= wanted[name] for name in wanted)
    bounded = {cut.instance for cut in cuts if cut.has_more}
    assert is_consistent(plan, found, bounded)
    # No log could be longer by itself; consistent cuts are closed under union, so this one is the longest.
    for name, last in found.items():
        if last < wanted[name]:
            assert not is_consistent(plan, {**found, name: last + 1}, bounded)


def test_logs_at_rest_are_shown_whole(written: Written) -> None:
    ends = {name: len(records) - 1 for name, records in written.plan.records.items()}
    cuts = [LogCut(name, 0, last, has_more=False) for name, last in ends.items()]
    make_consistent(written.database, cuts)
    assert {cut.instance: cut.last for cut in cuts} == ends


def test_a_cut_that_needs_no_other(written: Written) -> None:
    """A cut by time is one already, where clocks agree: what was sent before was made before."""
    plan = written.plan
    for share in (10, 50, 90):
        times = sorted(record.time_ns for records in plan.records.values() for record in records)
        at_ns = times[len(times) * share // 100]
        lasts = {n: sum(r.time_ns <= at_ns for r in records) - 1 for n, records in plan.records.items()}
        cuts = [LogCut(name, 0, last, has_more=True) for name, last in lasts.items()]
        make_consistent(written.database, cuts)
        assert {cut.instance: cut.last for cut in cuts} == lasts
