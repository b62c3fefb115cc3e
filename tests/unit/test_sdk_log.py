"""``immortal.logger``: which lines come, what they say, and that nothing of it is felt by a handler."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import pytest

import immortal
from immortal import Immortal, Impulses, Transient, impulse, initial, on_primary, peer, query, rpc
from immortal.appsdk.determinism.check import check
from immortal.appsdk.handlers.definition import definition_of
from immortal.errors import StateError
from tests.helpers.recorded import Instances
from tests.helpers.waiting import EffectsByHand, WaitingInstances

LINE = re.compile(r"\d\d:\d\d:\d\d\.\d{3} (?P<level>\w+) +(?P<instance>\S+)> (?P<text>.*)")


class Shop(Immortal):
    orders: int

    def __init__(self) -> None:
        self.orders = 0
        immortal.logger.info("begins")

    @initial
    def begin(self) -> None:
        immortal.logger.info("begun")

    @impulse
    def take(self, what: str) -> None:
        self.orders += 1
        self._note(what)
        if what == "bad":
            raise ValueError(what)

    def _note(self, what: str) -> None:
        immortal.logger.info("took order", what=what, orders=self.orders)

    @query
    def count(self) -> int:
        return self.orders

    @impulse
    async def wait(self, what: str) -> None:
        log = immortal.logger.bind(what=what)
        log.info("waits")
        await immortal.sleep(timedelta(seconds=1))
        log.warning("waited")
        await immortal.sleep(timedelta(seconds=1))
        log.info("done")


Said = Callable[[], list[str]]


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Said:
    """The lines since the last time, without what differs from run to run."""
    for name in ("IMMORTAL_LOG_FORMAT", "IMMORTAL_LOG_LEVEL", "IMMORTAL_LOG_REPLAYED"):
        monkeypatch.delenv(name, raising=False)

    def take() -> list[str]:
        found = [LINE.fullmatch(line) for line in capsys.readouterr().err.splitlines()]
        assert all(found)
        return [f"{one['level']} {one['instance']} {one['text']}" for one in found if one is not None]

    return take


def test_lines_say_where_they_come_from_and_a_recovery_repeats_none(tmp_path: Path, said: Said) -> None:
    instances = Instances(tmp_path)
    shop = instances.start("shop", Shop)
    assert said() == ["info Shop begins", "info shop begun  handler=Shop.begin record=0:0"]
    shop.impulses([("take", ["tea"]), ("take", ["two words"])])
    assert said() == [
        "info shop took order  what=tea orders=1 handler=Shop.take record=1:0",
        'info shop took order  what="two words" orders=2 handler=Shop.take record=1:1',
    ]
    instances.stop("shop")
    shop = instances.start("shop", Shop)
    assert shop.app.orders == 2
    assert said() == []
    shop.impulse("take", "rice")
    assert said() == ["info shop took order  what=rice orders=3 handler=Shop.take record=2:0"]
    instances.close()


def test_a_replay_writes_them_where_it_is_asked_to(tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    instances = Instances(tmp_path)
    instances.start("shop", Shop).impulse("take", "tea")
    instances.stop("shop")
    said()
    monkeypatch.setenv("IMMORTAL_LOG_REPLAYED", "1")
    instances.start("shop", Shop)
    assert said()[-1] == "info shop took order  what=tea orders=1 handler=Shop.take record=1:0 replayed=True"
    instances.close()


def test_a_message_that_fails_makes_none_come_twice(tmp_path: Path, said: Said) -> None:
    instances = Instances(tmp_path, fails_alone=True)
    shop = instances.start("shop", Shop)
    said()
    shop.impulses([("take", ["tea"]), ("take", ["bad"]), ("take", ["rice"])])
    assert shop.app.orders == 2
    assert [line.partition("  ")[2].split()[0] for line in said()] == ["what=tea", "what=bad", "what=rice"]
    shop.impulse("take", "salt")
    assert len(said()) == 1
    instances.close()


def test_an_async_handler_that_is_rebuilt(tmp_path: Path, said: Said) -> None:
    instances = WaitingInstances(tmp_path, {"shop": Shop}, EffectsByHand())
    said()
    instances["shop"].impulse("wait", "tea")
    assert said() == ["info shop waits  what=tea handler=Shop.wait record=1:0"]
    instances.crash("shop")
    assert said() == []
    instances.pass_time(1)
    (line,) = said()
    assert line.startswith("warning shop waited  what=tea handler=Shop.wait record=")
    instances.crash("shop")
    instances.pass_all_time()
    assert [line.split()[2] for line in said()] == ["done"]
    instances.close()


class Hostile:
    def __str__(self) -> NoReturn:
        raise RuntimeError("no")

    __repr__ = __str__


class Careless(Immortal):
    @impulse
    def say(self) -> None:
        log = immortal.logger
        log.info("%d of %s", 1, "x")
        log.info("%d", "no number")
        log.info(Hostile(), value=Hostile(), huge=10**5000, line="a\nb\x1b[2J", text="\ud800")
        try:
            raise KeyError("gone")
        except KeyError:
            log.exception("failed")
        log.bind(a=1).bind(b=2).unbind("a").error("bound", c=3)
        log.debug("not shown")
        log.new(x=0.12345).critical("done")


def test_nothing_is_felt_by_the_handler(tmp_path: Path, said: Said) -> None:
    instances = Instances(tmp_path)
    instances.start("shop", Careless).impulse("say")
    hostile = "<Hostile that can't be shown>"
    assert [line.partition(" handler=")[0] for line in said()] == [
        "info shop 1 of x ",
        "info shop %d ('no number',) ",
        f'info shop {hostile}  value="{hostile}" huge="<int that can\'t be shown>"'
        ' line="a\\nb\\u001b[2J" text="\\ud800"',
        "error shop failed  exception=\"KeyError: 'gone'\"",
        "error shop bound  b=2 c=3",
        "error shop done  x=0.123",
    ]
    instances.close()


def test_a_closed_stderr(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed:
        def write(self, text: str) -> NoReturn:
            raise BrokenPipeError

    instances = Instances(tmp_path)
    shop = instances.start("shop", Shop)
    monkeypatch.setattr("sys.stderr", Closed())
    shop.impulse("take", "tea")
    monkeypatch.undo()
    assert shop.app.orders == 1
    instances.close()


def test_lines_for_machines_and_levels(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IMMORTAL_LOG_FORMAT", "json")
    monkeypatch.setenv("IMMORTAL_LOG_LEVEL", "error")
    instances = Instances(tmp_path)
    instances.start("shop", Careless).impulse("say")
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["message"] for line in lines] == ["failed", "bound", "done"]
    assert {**lines[1], "time": ""} == {
        "time": "", "level": "error", "instance": "shop", "message": "bound", "b": 2, "c": 3,
        "handler": "Careless.say", "record": "1:0",
    }  # fmt: skip
    instances.close()


# --- classes that call something of theirs so -------------------------------------------------------------------------


class Ledger(Immortal):
    log: list[str]

    def __init__(self) -> None:
        self.log = []

    @impulse
    def add(self, what: str) -> None:
        self.log.append(what)


class Cached(Immortal):
    log: Transient[list[str]]

    def prepare(self) -> None:
        self.log = ["made"]

    @impulse
    def add(self, what: str) -> None:
        self.log.append(what)


class Unset(Immortal):
    log: int


class Handled(Immortal):
    seen: list[str]

    def __init__(self) -> None:
        self.seen = []

    @rpc
    def log(self, what: str) -> None:
        self.seen.append(what)

    @impulse
    async def add(self, what: str) -> None:
        await immortal.step(self.log, what)


class Peered(Immortal):
    log = peer(Handled, "handled")

    @impulse
    def add(self, what: str) -> None:
        self.log.log.fork(what)


class Helped(Immortal):
    seen: list[str]

    def __init__(self) -> None:
        self.seen = []

    def log(self, what: str) -> None:
        self.seen.append(what)

    @impulse
    def add(self, what: str) -> None:
        self.log(what)


@pytest.mark.parametrize(
    ("cls", "expected"),
    [
        (Ledger, lambda app: app.log == ["a", "b"]),
        (Cached, lambda app: app.log == ["made", "a", "b"]),
        (Handled, lambda app: app.seen == ["a", "b"]),
        (Helped, lambda app: app.seen == ["a", "b"]),
    ],
)
def test_a_class_may_have_something_of_that_name(tmp_path: Path, cls: type, expected: Callable[[Any], bool]) -> None:
    instances = Instances(tmp_path)
    instances.start("one", cls).impulse("add", "a")
    instances.stop("one")
    one = instances.start("one", cls)
    one.impulse("add", "b")
    assert expected(one.app)
    instances.close()


def test_one_that_is_not_set_is_missed_as_any(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="'log' is annotated but not set"):
        Instances(tmp_path).start("one", Unset)


def test_a_peer_of_that_name(tmp_path: Path) -> None:
    instances = WaitingInstances(tmp_path, {"one": Peered, "handled": Handled})
    instances["one"].impulse("add", "a")
    assert instances.app("handled").seen == ["a"]
    instances.close()


def test_in_an_async_handler_a_state_of_that_name_is_a_copy_as_any(tmp_path: Path) -> None:
    class Waiting(Ledger):
        @impulse
        async def look(self) -> None:
            self.log.append("x")

    instances = WaitingInstances(tmp_path, {"one": Waiting})
    with pytest.raises(Exception, match=r"has changed what it read as self\.log"):
        instances["one"].impulse("look")


def test_a_plain_object_has_it(said: Said) -> None:
    Shop()
    assert said() == ["info Shop begins"]


def test_a_hook_has_it(tmp_path: Path, said: Said) -> None:
    class Hooked(Immortal):
        @on_primary
        def serve(self, impulses: Impulses) -> None: ...

    instances = Instances(tmp_path)
    run = instances.start("one", Hooked).dispatcher.context.run_contexts.run
    thread = threading.Thread(target=run, args=(immortal.logger.info, "from a hook"))
    thread.start()
    thread.join()
    assert said() == ["info one from a hook"]
    instances.close()


def test_it_is_no_finding() -> None:
    assert check(definition_of(Shop)) == []
    assert check(definition_of(Careless)) == []
