"""Spans of logs that grow: each message's once, whatever the endpoint does and whenever it is started again."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from coordinator.log import open_reader
from sight.errors import SightError
from sight.trace import follow
from sight.trace.follow import Follower, Positions
from sight.trace.messages import Source
from tests.helpers.pipeline_logs import RecordSpec, make_log, random_specs
from tests.unit.test_sql_extract import append

NAME = "counter"


class Endpoint:
    def __init__(self) -> None:
        self.spans: list[dict[str, Any]] = []
        self.refuses = 0

    def send(self, request: bytes) -> None:
        if self.refuses:
            self.refuses -= 1
            raise SightError("nobody is there")
        for one in json.loads(request)["resourceSpans"]:
            self.spans += one["scopeSpans"][0]["spans"]

    @property
    def records(self) -> list[int]:
        """Of the spans of handlers."""
        found = [span for span in self.spans if "parentSpanId" in span]
        (name,) = {a["key"] for span in found for a in span["attributes"] if a["key"].endswith(".record")}
        return sorted(int(a["value"]["intValue"]) for span in found for a in span["attributes"] if a["key"] == name)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / NAME / "log"


@contextmanager
def following(
    log: Path, endpoint: Endpoint, resume: Path | None, rounds: list[Callable[[], None]], said: list[str] | None = None
) -> Iterator[Follower]:
    """Between two looks the next of ``rounds`` is done; behind the last it ends."""

    def wait(seconds: float) -> bool:
        if not rounds:
            return True
        rounds.pop(0)()
        return False

    with open_reader(log, NAME) as reader:
        source = Source(reader, {})
        positions = Positions(resume)
        source.first = positions.next_of(source) or 0
        yield Follower([source], endpoint.send, positions, wait, (said if said is not None else []).append)


def records_of(specs: list[RecordSpec]) -> list[int]:
    return [spec.sequence_id for spec in specs for batch in spec.batches for _ in batch.calls]


def test_a_log_that_grows(log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "ROUND_RECORDS_MAX", 7)
    specs = random_specs(1, 60)
    make_log(log, NAME, specs[:20])
    endpoint, resume = Endpoint(), tmp_path / "resume"
    with following(log, endpoint, resume, []) as follower:
        follower.run()
    assert endpoint.records == records_of(specs[:20])
    append(log, specs[20:40])
    with following(log, endpoint, resume, []) as follower:
        follower.run()
    append(log, specs[40:])
    with following(log, endpoint, resume, []) as follower:
        follower.run()
    assert endpoint.records == records_of(specs)
    assert len({span["spanId"] for span in endpoint.spans}) == len(endpoint.spans)
    assert resume.stat().st_mode & 0o077 == 0


def test_an_endpoint_that_is_away_loses_nothing(log: Path) -> None:
    specs = random_specs(2, 20)
    make_log(log, NAME, specs)
    endpoint, said = Endpoint(), []
    endpoint.refuses = 3
    with following(log, endpoint, None, [lambda: None] * 3, said) as follower:
        follower.run()
    assert endpoint.records == records_of(specs)
    assert said == ["nobody is there; it is tried again"] * 3


def test_what_was_not_taken_is_sent_by_the_next_run(log: Path, tmp_path: Path) -> None:
    specs = random_specs(3, 20)
    make_log(log, NAME, specs)
    endpoint, resume = Endpoint(), tmp_path / "resume"
    endpoint.refuses = 100
    with following(log, endpoint, resume, [lambda: None] * 2) as follower:
        follower.run()
    assert endpoint.spans == []
    endpoint.refuses = 0
    with following(log, endpoint, resume, []) as follower:
        follower.run()
    assert endpoint.records == records_of(specs)


def test_another_log_begins_anew(log: Path, tmp_path: Path) -> None:
    resume = tmp_path / "resume"
    resume.write_text(json.dumps({NAME: [1, 1000]}))
    specs = random_specs(4, 5)
    make_log(log, NAME, specs)
    endpoint = Endpoint()
    with following(log, endpoint, resume, []) as follower:
        follower.run()
    assert endpoint.records == records_of(specs)


@pytest.mark.parametrize("text", ["", "[]", '{"a": 1}', '{"a": ["x", 1]}', "\x00"])
def test_a_file_that_is_something_else_is_not_written_over(tmp_path: Path, text: str) -> None:
    file = tmp_path / "resume"
    file.write_text(text)
    with pytest.raises(SightError, match="no file that"):
        Positions(file)
    assert file.read_text() == text
