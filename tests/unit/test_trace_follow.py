"""Spans of logs that grow: each message's once, whatever the endpoint does and whenever it is started again."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from immortal.log import open_reader
from immortal.protocol.trailer import BatchKind
from immortal.replay.plan import LogViewError
from immortal.replay.trace import follower as follow
from immortal.replay.trace.follower import Follower, Positions, ShadowFollower
from immortal.replay.trace.messages import Executed, Source
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
            raise LogViewError("nobody is there")
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
    with pytest.raises(LogViewError, match="no file that"):
        Positions(file)
    assert file.read_text() == text


# --- with causes ------------------------------------------------------------------------------------------------------


class FakeLog:
    """What a replay has said by now, set by a test."""

    def __init__(self, instance: str) -> None:
        self.instance = instance
        self.committer_id = 1
        self.begins = 0
        self.taken = -1
        self.messages: list[Executed] = []
        self.causes: dict[tuple[str, int], tuple[int, int] | None] = {}
        identity = SimpleNamespace(instance_name=instance, committer_id=1)
        self.source: Any = SimpleNamespace(instance=instance, first=0, reader=SimpleNamespace(identity=identity))

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def take(self) -> list[Executed]:
        found, self.messages = self.messages, []
        self.taken = max([self.taken, *(one.sequence_id for one in found)])
        return found

    def cause(self, receiver: str, position: int) -> tuple[bool, tuple[int, int] | None]:
        return (receiver, position) in self.causes, self.causes.get((receiver, position))

    def logs(self, record: int, caller: str, position: int, kind: BatchKind = BatchKind.STREAM) -> None:
        time_ns = 1_000 * (record + 1)
        self.messages.append(
            Executed(self.instance, 1, record, 0, caller, kind, position, time_ns - 1, time_ns, "work", 0, None)
        )


def run_live(endpoint: Endpoint, logs: list[FakeLog], steps: list[Callable[[], float]], resume: Path) -> None:
    """Each step is done between two looks, and gives the seconds that pass meanwhile."""
    now_s = 0.0

    def wait(seconds: float) -> bool:
        nonlocal now_s
        if not steps:
            return True
        now_s += steps.pop(0)()
        return False

    positions = Positions(resume)
    ShadowFollower(cast("Any", logs), endpoint.send, positions, wait, lambda text: None, lambda: now_s).run()


def test_a_message_waits_for_its_cause_and_that_for_its_own(tmp_path: Path) -> None:
    a, b, endpoint, resume = FakeLog("a"), FakeLog("b"), Endpoint(), tmp_path / "resume"
    noted: list[Any] = []

    def first() -> float:
        b.logs(0, "a", 1)  # caused by record 1 of a, which is caused by record 0 of b's ...
        a.logs(0, "outside", 1, BatchKind.IMPULSES)
        return 0.1

    def second() -> float:
        assert len(endpoint.spans) == 2  # the impulse
        noted.append(json.loads(resume.read_text()))
        a.logs(1, "a", 1)
        a.causes["b", 1] = (1, 0)
        return 0.1

    def third() -> float:
        assert len(endpoint.spans) == 2
        a.causes["a", 1] = (0, 0)
        return 0.1

    run_live(endpoint, [a, b], [first, second, third], resume)
    assert len(endpoint.spans) == 6
    assert len({span["traceId"] for span in endpoint.spans}) == 1
    assert noted == [{"a": [1, 1], "b": [1, 0]}]  # what waits is not noted as sent
    assert json.loads(resume.read_text()) == {"a": [1, 2], "b": [1, 1]}


def test_no_message_waits_for_ever(tmp_path: Path) -> None:
    a, b, endpoint = FakeLog("a"), FakeLog("b"), Endpoint()

    def logged() -> float:
        b.logs(0, "a", 1)  # its cause never comes
        b.logs(1, "a", 2)  # it is known to have none
        a.causes["b", 2] = None
        b.logs(2, "a", 3)  # its cause came before this one began
        a.causes["b", 3] = (4, 0)
        a.begins = 5
        return 0.1

    def later() -> float:
        assert len(endpoint.spans) == 4
        return follow.GRACE_S

    run_live(endpoint, [a, b], [logged, later], tmp_path / "resume")
    assert len(endpoint.spans) == 6
    assert len({span["traceId"] for span in endpoint.spans}) == 3
