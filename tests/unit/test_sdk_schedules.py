"""``@cron``: when it runs, and that a replay runs it when it ran, whatever the machine knows of time zones by then."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

import immortal
from immortal import Immortal, cron, every, rpc
from immortal.appsdk.handlers.decorators import CLOCK_METHOD_ID, TIME_NS_MAX, Cron
from immortal.appsdk.handlers.definition import definition_of
from immortal.appsdk.running.inspection import inspect_state
from immortal.appsdk.waiting.impulses import LoggedTime
from immortal.coordinator.core import events as ev
from immortal.errors import DefinitionError
from immortal.protocol.messages import RpcType
from tests.helpers.sdk import first_start
from tests.helpers.waiting import WaitingInstances
from tests.helpers.wire import START_TIME_NS, call, logged

S_NS = 1_000_000_000


def ns(text: str) -> int:
    return int(datetime.fromisoformat(text).timestamp()) * S_NS


def times(schedule: Cron, start: str, count: int) -> list[str]:
    found, time_ns = [], ns(start)
    for _ in range(count):
        time_ns = schedule.next_ns(time_ns)
        found.append(datetime.fromtimestamp(time_ns // S_NS, UTC).strftime("%d %H:%M:%S"))
    return found


class Nightly(Immortal):
    runs: list[datetime]
    awaited: int

    def __init__(self) -> None:
        self.runs = []
        self.awaited = 0

    @cron("30 3 * * *")
    def run(self) -> None:
        self.runs.append(immortal.now())

    @rpc
    def add(self) -> None:
        self.awaited += 1

    @cron("0 12 * * mon-fri", tz="Europe/Berlin")
    async def later(self) -> None:
        await immortal.step(self.add)  # type: ignore[func-returns-value]

    @every("1h")
    def hourly(self) -> None:
        pass


# --- expressions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expression", "zone", "start", "expected"),
    [
        ("0 3 * * mon", "UTC", "2026-11-20T00:00:00Z", ["23 03:00:00", "30 03:00:00"]),
        ("*/20 * * * *", "UTC", "2026-11-20T10:20:00Z", ["20 10:40:00", "20 11:00:00"]),
        ("*/30 * * * * *", "UTC", "2026-11-20T10:20:00Z", ["20 10:20:30", "20 10:21:00"]),
        ("0 9 * * *", "Asia/Kolkata", "2026-11-20T00:00:00Z", ["20 03:30:00", "21 03:30:00"]),
        # the clocks go forward in the night, and back
        ("0 9 * * *", "Europe/Berlin", "2026-03-28T00:00:00Z", ["28 08:00:00", "29 07:00:00"]),
        ("30 2 * * *", "Europe/Berlin", "2026-03-28T02:00:00Z", ["29 01:00:00", "30 00:30:00"]),
        ("30 2 * * *", "Europe/Berlin", "2026-10-24T12:00:00Z", ["25 00:30:00", "26 01:30:00"]),
    ],
)
def test_times(expression: str, zone: str, start: str, expected: list[str]) -> None:
    assert times(Cron(expression, zone), start, 2) == expected


def test_a_time_that_does_not_come() -> None:
    assert Cron("0 0 29 2 *", "UTC").next_ns(ns("2240-01-01T00:00:00Z")) == ns("2240-02-29T00:00:00Z")
    assert Cron("0 0 29 2 *", "UTC").next_ns(ns("2261-01-01T00:00:00Z")) == TIME_NS_MAX


@pytest.mark.parametrize(
    ("arguments", "keywords", "words"),
    [
        (["0 3 * *"], {}, ["@cron('0 3 * *')", "Wrong number of fields", "five fields"]),
        (["0 25 * * *"], {}, ["Bad hour", "0 3 * * mon"]),
        (["@daily"], {}, ["Wrong number of fields"]),
        (["0 0 30 2 *"], {}, ["@cron('0 0 30 2 *')"]),
        ([5], {}, ["a cron expression was expected"]),
        (["0 3 * * *"], {"tz": "Europe/Nowhere"}, ["no such time zone", "tzdata"]),
        (["0 3 * * *"], {"tz": "../etc"}, ["no such time zone"]),
        (["0 3 * * *"], {"tz": None}, ["no such time zone"]),
    ],
)
def test_what_is_no_schedule(arguments: list[Any], keywords: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(DefinitionError) as caught:
        cron(*arguments, **keywords)
    for word in words:
        assert word in str(caught.value)
    with pytest.raises(DefinitionError, match="@cron calls it without arguments"):

        class Wrong(Immortal):
            @cron("0 3 * * *")
            def run(self, number: int) -> None:
                pass


# --- runs -------------------------------------------------------------------------------------------------------------


def test_it_runs_at_its_times_and_makes_up_for_missed_ones_once(tmp_path: Path) -> None:
    one = WaitingInstances(tmp_path, {"one": Nightly})  # it is a Tuesday, 22:13
    one.log_time()
    for _ in range(3 * 24):
        one.pass_time(3600)
        one.crash("one")
    assert [f"{run:%d}" for run in one.app("one").runs] == ["15", "16", "17"]
    assert one.app("one").awaited == 3
    one["one"].checkpoint()
    one.kill("one")
    one.pass_time(10 * 86_400)
    one.start("one", Nightly)
    one.log_time()
    assert len(one.app("one").runs) == 4
    assert one.app("one").awaited == 4
    one.pass_time(86_400)
    assert len(one.app("one").runs) == 5
    one.close()


def test_what_runs_by_itself_is_told_with_its_next_run(tmp_path: Path) -> None:
    one = WaitingInstances(tmp_path, {"one": Nightly})
    schedules = one.ask("one", ev.HandlersAsked, 0)["schedules"]
    assert [(told["handler"], told["schedule"], told["due_ns"]) for told in schedules] == [
        ("Nightly.run", "30 3 * * * (UTC)", None),
        ("Nightly.later", "0 12 * * mon-fri (Europe/Berlin)", None),
        ("Nightly.hourly", "every 1h", None),
    ]
    one.log_time()
    due_ns = {told["handler"]: told["due_ns"] for told in one.ask("one", ev.HandlersAsked, 0)["schedules"]}
    assert due_ns["Nightly.run"] == ns("2023-11-15T03:30:00Z")
    assert due_ns["Nightly.later"] == ns("2023-11-15T11:00:00Z")
    assert isinstance(due_ns["Nightly.hourly"], int)
    one.close()


def test_a_replay_does_not_work_times_out_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = WaitingInstances(tmp_path, {"one": Nightly})
    one.log_time()
    one.pass_time(6 * 3600)
    schedules = dict(one["one"].dispatcher.tasks.clock.schedules)
    runs = one.app("one").runs
    assert len(runs) == 1
    monkeypatch.setattr(Cron, "next_ns", lambda self, time_ns: 1 / 0)
    one.crash("one")
    assert one["one"].dispatcher.tasks.clock.schedules == schedules
    assert one.app("one").runs == runs
    monkeypatch.undo()
    blob = b"".join(one["one"].dispatcher._life.encode())
    shown = inspect_state(definition_of(Nightly), blob).to_json()["state"]["$schedules"]
    assert sorted(shown) == ["hourly", "later", "run"]
    assert "2023-11-16T03:30:00" in str(shown["run"])
    one.close()


def test_what_the_log_knows_nothing_of_has_not_begun() -> None:
    life = first_start(Nightly)
    clock = life.dispatcher.tasks.clock
    told = call(CLOCK_METHOD_ID, START_TIME_NS, rpc_type=RpcType.IMPULSE)  # as before there was @cron
    life.give(logged(1, [told]))
    handlers = definition_of(Nightly).handlers
    assert list(clock.schedules) == [handlers["hourly"].method_id]
    assert life.dispatcher.next_due_ns == 0
    life.dispatcher.log_time(START_TIME_NS)
    life.give(b"")
    (_, method_id, arguments) = life.output.calls[-1]
    assert method_id == CLOCK_METHOD_ID
    run_id, later_id = handlers["run"].method_id, handlers["later"].method_id
    assert arguments == (START_TIME_NS, {run_id: ns("2023-11-15T03:30:00Z"), later_id: ns("2023-11-15T11:00:00Z")})
    life.give(logged(2, [call(CLOCK_METHOD_ID, *arguments, rpc_type=RpcType.IMPULSE)]))
    assert clock.schedules[later_id] == ns("2023-11-15T11:00:00Z")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode([5]), type=LoggedTime) == LoggedTime(5)
