"""Time travel with a real log: what each moment was like, where values come from; and code that does harm."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from immortal.coordinator.config import InstanceSettings
from immortal.coordinator.instances import own_logs
from immortal.coordinator.instances.registry import Registry
from immortal.replay import ReplayError
from immortal.replay.travel import sessions as travel_sessions
from immortal.replay.travel.sessions import Sessions
from immortal.web import WebError, log_messages
from immortal.web.auth import Token
from immortal.web.site import Site
from tests.helpers.cli import HOME
from tests.helpers.recorded import Instances, load_module, write_module

SOURCE = """
import immortal
from immortal import Immortal, impulse, peer, rpc


class Ledger(Immortal):
    total: int

    def __init__(self) -> None:
        self.total = 0

    @rpc
    def book(self, amount: int) -> int:
        self.total += amount
        return self.total


class Desk(Immortal):
    ledger = peer(Ledger, "ledger")
    count: int
    last: dict[str, int]
    answers: list[int]

    def __init__(self) -> None:
        self.count = 0
        self.last = {}
        self.answers = []

    @impulse
    def add(self, who: str, amount: int) -> None:
        self.count += 1
        self.last[who] = amount
        if amount < 0:
            raise ValueError(amount)
        for _ in range(amount % 3):
            self.ledger.book.fork(amount)

    @impulse
    async def ask(self, amount: int) -> None:
        await immortal.step(self.note, await self.ledger.book(amount))

    @rpc
    def note(self, answer: int) -> None:
        self.answers.append(answer)
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 impulses in 20 records, of which one fails alone, with a checkpoint behind each fifth."""
    folder = tmp_path_factory.mktemp("travel")
    registry = Registry(folder / HOME)
    name = write_module(folder, SOURCE)
    module = load_module(folder, name)
    instances = Instances(registry.home, fails_alone=True)
    for service in ("desk", "ledger"):
        registry.register(service, "tcp://127.0.0.1:*", app=f"{name}:{service.capitalize()}", keep_checkpoints="all")
        instances.start(service, getattr(module, service.capitalize()))
    desk = instances._running["desk"]
    for number in range(20):
        desk.impulses(
            [("add", (f"p{number % 4}", -1 if number * 3 + each == 31 else number * 3 + each)) for each in range(3)]
        )
        if number == 12:
            desk.impulse("ask", 1000)
        if number % 5 == 4:
            desk.checkpoint()
    instances.close()
    return folder


@pytest.fixture
def sessions(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sessions]:
    monkeypatch.chdir(home)
    made = Sessions(home / HOME)
    yield made
    made.close()


def texts(moment: dict[str, Any]) -> dict[str, str]:
    return {one["label"]: one["text"] for one in moment["state"]["items"] if "text" in one}


def test_each_moment_has_its_state(sessions: Sessions) -> None:
    overview = sessions.ask("desk", "overview")
    assert overview["first"] == 0
    assert len(overview["checkpoints"]) == 5
    count, places = 0, []
    for record in range(1, overview["last"] + 1):
        moment = sessions.ask("desk", "moment", record=record, index=0)
        for index in range(moment["count"]):
            places.append((record, index))
    for record, index in places:
        moment = sessions.ask("desk", "moment", record=record, index=index)
        count += moment["message"].startswith("Desk.add") and not moment["failed"]
        assert texts(moment)["count"] == str(count)
    assert count == 59
    backwards = [sessions.ask("desk", "moment", record=record, index=index) for record, index in reversed(places)]
    assert [texts(one)["count"] for one in backwards][-1] == "1"


def test_what_a_message_did(sessions: Sessions) -> None:
    moment = sessions.ask("desk", "moment", record=2, index=2)
    assert moment["message"] == "Desk.add('p1', 5)"
    assert moment["changes"] == [
        {"path": "count", "old": "5", "new": "6"},
        {"path": "last['p1']", "old": "4", "new": "5"},
    ]
    assert [(one["destination"], one["words"]) for one in moment["made"]] == [("ledger", "Ledger.book(5)")] * 2
    part = sessions.ask("desk", "moment", record=2, index=2, path="last")
    assert [(one["path"], one["text"]) for one in part["state"]["items"]] == [("last['p0']", "2"), ("last['p1']", "5")]


def test_a_message_that_failed_changed_nothing(sessions: Sessions) -> None:
    found = sessions.ask("desk", "find", record=0, index=0, handler="", expression="self.count == 31", back=False)
    record, index = found["at"]
    failed = sessions.ask("desk", "moment", record=record, index=index + 1) if index < 2 else None
    moment = failed or sessions.ask("desk", "moment", record=record + 1, index=0)
    assert moment["failed"] == "ValueError: -1"
    assert moment["changes"] == moment["made"] == []


def test_when_a_value_was_last_written(sessions: Sessions) -> None:
    last = sessions.ask("desk", "overview")["last"]
    changed = sessions.ask("desk", "last_change", record=last, index=0, path="last['p2']")
    assert (changed["old"], changed["new"]) == ("55", "56")
    moment = sessions.ask("desk", "moment", record=changed["at"][0], index=changed["at"][1])
    assert moment["message"] == "Desk.add('p2', 56)"
    # behind a checkpoint that has it already, and before one that has another
    total = 1000 + sum(amount * (amount % 3) for amount in range(39) if amount != 31)
    early = sessions.ask("desk", "last_change", record=last, index=0, path="answers[0]")
    assert (early["old"], early["new"]) == ("absent", str(total))
    moment = sessions.ask("desk", "moment", record=early["at"][0], index=early["at"][1])
    assert moment["message"] == f"the answer {total} of Ledger.book to call 2"
    never = sessions.ask("desk", "last_change", record=last, index=0, path="nothing")
    assert (never["at"], never["since"]) == (None, -1)


def test_moments_where_something_holds(sessions: Sessions) -> None:
    on = sessions.ask("desk", "find", record=1, index=0, handler="Desk.add", expression="args[1] == 40", back=False)
    assert sessions.ask("desk", "moment", record=on["at"][0], index=on["at"][1])["message"] == "Desk.add('p1', 40)"
    back = sessions.ask("desk", "find", record=on["at"][0], index=on["at"][1], handler="add", expression="", back=True)
    assert tuple(back["at"]) < tuple(on["at"])
    first = sessions.ask("desk", "find", record=18, index=0, handler="", expression="self.count == 2", back=True)
    assert sessions.ask("desk", "moment", record=first["at"][0], index=first["at"][1])["message"] == "Desk.add('p0', 1)"
    none = sessions.ask("desk", "find", record=1, index=0, handler="", expression="self.nothing", back=False)
    assert none["at"] is None
    assert "AttributeError" in none["raised"]


def test_a_value_over_time(sessions: Sessions) -> None:
    points = sessions.ask("desk", "watch", path="count", first=1, last=5)["points"]
    assert points == [[record, str(3 * record), 3 * record] for record in range(1, 6)]


def test_what_caused_a_message(sessions: Sessions) -> None:
    made = sessions.ask("desk", "moment", record=2, index=2)["made"]
    origin = sessions.ask("desk", "origin", destination="ledger", position=made[1]["position"])
    assert (origin["at"], origin["message"]) == ([2, 2], "Desk.add('p1', 5)")
    assert sessions.ask("desk", "origin", destination="ledger", position=10**6)["at"] is None


def test_an_expression_sees_the_moment_and_leaves_no_trace(sessions: Sessions) -> None:
    seen = sessions.ask("desk", "evaluate", record=2, index=2, expression="(method, args, record, message, self.count)")
    assert [one["text"] for one in seen["value"]["items"] if "text" in one] == ['"Desk.add"', "2", "2", "6"]
    sessions.ask("desk", "evaluate", record=2, index=2, expression="setattr(self, 'count', 1000)")
    assert texts(sessions.ask("desk", "moment", record=3, index=0))["count"] == "7"
    assert "ZeroDivisionError" in sessions.ask("desk", "evaluate", record=2, index=2, expression="1 / 0")["raised"]
    with pytest.raises(ReplayError, match="is no Python expression"):
        sessions.ask("desk", "evaluate", record=2, index=2, expression="import os")


def test_what_is_not_there(sessions: Sessions) -> None:
    with pytest.raises(ReplayError, match="record 999 is not in the log yet"):
        sessions.ask("desk", "moment", record=999, index=0)
    with pytest.raises(ReplayError, match="record 2 has no message 9: it has 3, counted from 0"):
        sessions.ask("desk", "moment", record=2, index=9)
    with pytest.raises(ReplayError, match="names no value"):
        sessions.ask("desk", "moment", record=2, index=0, path="a[")


def test_code_that_was_changed_shows_no_moment_that_never_was(home: Path, sessions: Sessions) -> None:
    registry = Registry(home / HOME)
    own = registry.load("desk").app
    assert own is not None
    changed = write_module(home, SOURCE.replace("book.fork(amount)", "book.fork(amount + 1)"))
    registry.remember_app("desk", f"{changed}:Desk")
    try:
        with pytest.raises(ReplayError, match="never had the state that this replay gives: 'desk' does not do again"):
            sessions.ask("desk", "moment", record=3, index=0)
    finally:
        registry.remember_app("desk", own)


def test_code_that_does_harm_ends_its_process_alone(sessions: Sessions) -> None:
    def harm(expression: str) -> str:
        with pytest.raises(ReplayError) as raised:
            sessions.ask("desk", "evaluate", record=2, index=0, expression=expression)
        return str(raised.value)

    assert "has ended" in harm("__import__('os')._exit(3)")
    assert "MemoryError" in str(
        sessions.ask("desk", "evaluate", record=2, index=0, expression="len(bytearray(1 << 33))")["raised"]
    )
    sessions.ask("desk", "evaluate", record=2, index=0, expression="print('{\"answer\": 1}')")
    next(iter(sessions._sessions.values()))._answer_s = 1.0
    assert "did not answer for 1 s" in harm("__import__('time').sleep(60)")
    assert sessions.ask("desk", "moment", record=2, index=0)["record"] == 2


def test_so_many_processes_and_no_more(sessions: Sessions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(travel_sessions, "SESSIONS_MAX", 1)
    sessions.ask("desk", "overview")
    first = next(iter(sessions._sessions.values()))._process
    sessions.ask("ledger", "overview")
    assert first.poll() is not None
    assert [name for name, _ in sessions._sessions] == ["ledger"]


def test_a_log_is_read_in_its_turn(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that was asked for while another request read that log was a 500: a process can't open one twice."""
    turns: list[str] = []
    opened = own_logs.open_reader

    @contextmanager
    def locked(settings: InstanceSettings) -> Iterator[None]:
        turns.append(f"{settings.name} begins")
        yield
        turns.append("ends")

    def open_reader(settings: InstanceSettings, **options: Any) -> Any:
        turns.append("opened")
        return opened(settings, **options)

    monkeypatch.chdir(home)
    monkeypatch.setattr(own_logs, "open_reader", open_reader)
    made = Sessions(home / HOME, locked)
    made.code_of("desk", 3)
    made.close()
    assert turns == ["desk begins", "opened", "ends"]
    token = Token("a token of many characters")
    site = Site(Registry(home / HOME), token)
    with site.logs.locked(site.settings("desk")):
        monkeypatch.setattr(log_messages, "WAIT_S", 0.01)
        with pytest.raises(WebError, match="is being read by other requests"):
            site.travel.code_of("desk", 3)
    site.close()
