"""Pages of a log's messages, and searches in it, against the plainest means: all of it in memory."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("starlette")

from immortal.log import LogReader, open_reader
from immortal.presenters.records import describe_record
from immortal.protocol.trailer import BatchKind
from immortal.web import log_messages as pages
from immortal.web.log_messages import (
    At,
    Filter,
    Page,
    Times,
    Wanted,
    find_position,
    messages_of,
    page_before,
    page_from,
)
from immortal.web.log_search import Lane
from tests.helpers.fleet import flip_byte, plan_fleet, remove_record


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return plan_fleet(services=3, messages=400).write(tmp_path_factory.mktemp("fleet"))


@pytest.fixture
def reader(folders: list[str]) -> Iterator[LogReader]:
    with open_reader(folders[0]) as made:
        yield made


def all_of(reader: LogReader) -> list[pages.Message]:
    committer_id = reader.identity.committer_id
    return [one for logged in reader.records() for one in messages_of(describe_record(logged, committer_id))]


def at(message: pages.Message) -> At:
    return message.sequence_id, message.index


@pytest.mark.parametrize("limit", [1, 7, 100])
@pytest.mark.parametrize(
    "wanted", [Wanted(), Wanted(method="method 2"), Wanted(size_min_bytes=40), Wanted(pattern="x")]
)
def test_pages_have_each_message_once(reader: LogReader, limit: int, wanted: Wanted) -> None:
    expected = [at(one) for one in all_of(reader) if Filter(wanted).matches(one)]
    on: list[At] = []
    place: At | None = (0, 0)
    while place is not None:
        page = page_from(reader, {}, wanted, place, limit)
        assert len(page.messages) <= limit
        on += map(at, page.messages)
        place = page.newer
    back: list[At] = []
    found: Page | None = page_before(reader, {}, wanted, None, limit)
    while found is not None:
        back[:0] = map(at, found.messages)
        found = page_before(reader, {}, wanted, found.older, limit) if found.older is not None else None
    assert on == back == expected


def test_a_page_that_takes_too_long_says_how_far_it_came(reader: LogReader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "SCAN_S", 0.0)
    expected = [at(one) for one in all_of(reader)]
    place: At | None = (0, 0)
    steps = 0
    while place is not None:
        page = page_from(reader, {}, Wanted(method="nothing"), place, 10)
        assert page.messages == []
        assert page.is_cut == (page.newer is not None)
        place, steps = page.newer, steps + 1
    assert 1 < steps <= len(expected) + 1
    assert page_before(reader, {}, Wanted(method="nothing"), None, 10).is_cut


def test_where_a_message_of_a_stream_is(folders: list[str]) -> None:
    plan = plan_fleet(services=3, messages=400)
    for folder, receiver in zip(folders, plan.names, strict=True):
        with open_reader(folder) as reader:
            for sender in plan.names:
                name = "" if sender == receiver else sender
                places: dict[int, At] = {}
                for record, planned in enumerate(plan.records[receiver]):
                    index = 0
                    for batch in planned.inputs:
                        for offset in range(batch.count):
                            if batch.kind == BatchKind.STREAM and batch.name == name:
                                places[batch.first_position + offset] = record, index + offset
                        index += batch.count
                for position in (0, *random.Random(1).sample(sorted(places), min(40, len(places))), 10**9):
                    assert find_position(reader, name, position) == places.get(position)


def test_times(reader: LogReader) -> None:
    times = Times(reader)
    known = [times.time_ns(record) for record in range(times.first, times.last + 1)]
    for time_ns in (0, *(one + offset for one in known for offset in (-1, 0, 1)), 1 << 62):
        expected = next((record for record, one in enumerate(known, times.first) if one >= time_ns), times.last + 1)
        assert times.first_from(time_ns) == expected


@pytest.mark.parametrize("buckets", [1, 3, 160])
def test_counts_of_a_lane(reader: LogReader, buckets: int) -> None:
    times = Times(reader)
    known = [times.time_ns(record) for record in range(times.first, times.last + 1)]
    first, last = known[3], known[-5]
    expected = [0] * buckets
    for time_ns in known:
        if first <= time_ns < last:
            expected[next(n for n in reversed(range(buckets)) if time_ns >= first + (last - first) * n // buckets)] += 1
    assert Lane("a", reader, first, last).counts(buckets) == expected


def test_damage_is_shown_in_its_place(tmp_path: Path) -> None:
    folder = Path(plan_fleet(services=2, messages=300, seed=5).write(tmp_path)[0])
    flip_byte(folder, 3)
    remove_record(folder, 5)
    with open_reader(folder) as reader:
        found = page_from(reader, {}, Wanted(), (0, 0), 500).messages
        problems = {one.sequence_id: one.problem for one in found if one.problem}
        assert set(problems) == {3, 5}
        assert "missing" in problems[5]
        assert [one.sequence_id for one in page_before(reader, {}, Wanted(), (6, 0), 1).messages] == [5]
