"""A step of the clock, from the core to the handlers: what lasts a while lasts no less for it, in each replay too."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

import msgspec
import pytest

import immortal
from immortal import Immortal, every, impulse, rpc
from immortal.appsdk.calls.context import datetime_of
from immortal.appsdk.waiting.impulses import LoggedTime
from immortal.coordinator.core import events as ev
from immortal.protocol.errors import RemoteProtocolError
from immortal.protocol.extensions import AppTime, decode_app_time, encode_app_time
from immortal.protocol.messages import MessageType, decode_messages
from tests.helpers.core import HELLO, Driven, first_start, records
from tests.helpers.sdk import Life
from tests.helpers.waiting import S_NS, WaitingInstances

HOUR_NS = 3600 * S_NS


class Sleeper(Immortal):
    woken: list[str]
    beats: int

    def __init__(self) -> None:
        self.woken = []
        self.beats = 0

    @every("10m")
    def beat(self) -> None:
        self.beats += 1

    @rpc
    def wake(self, name: str) -> None:
        self.woken.append(name)

    @impulse
    async def sleep_for(self, name: str, minutes: int) -> None:
        await immortal.sleep(timedelta(minutes=minutes))
        await immortal.step(self.wake, name)  # type: ignore[func-returns-value]

    @impulse
    async def sleep_until(self, name: str, moment: datetime) -> None:
        await immortal.at(moment)
        await immortal.step(self.wake, name)  # type: ignore[func-returns-value]


class Sleeping(WaitingInstances):
    """One instance, whose clock is stepped."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, {"one": Sleeper})
        self.steps: list[ev.ClockMoved] = []
        self.log_time()

    def tell_clock(self, *events: ev.ClockMoved) -> None:
        driven = self["one"].driven
        driven.now_ns = self._time_ns
        driven.handle(*events, ev.ClockMoved(self._time_ns, 0))
        self.settle()

    def jump(self, by_ns: int) -> None:
        self._time_ns += by_ns
        self.steps.append(ev.ClockMoved(self._time_ns, 0, by_ns))
        self.tell_clock(self.steps[-1])
        self.log_time()

    def crash_and_hear_of_it_again(self) -> None:
        self.crash("one")
        self.tell_clock(*self.steps)

    @property
    def woken(self) -> list[str]:
        woken: list[str] = self.app("one").woken
        return woken

    @property
    def beats(self) -> int:
        beats: int = self.app("one").beats
        return beats


@pytest.fixture
def one(tmp_path: Path) -> Iterator[Sleeping]:
    made = Sleeping(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("crashes", [False, True], ids=["", "crashes"])
@pytest.mark.parametrize("checkpoint", [False, True], ids=["", "checkpoint"])
def test_who_sleeps_sleeps_no_less_for_a_step(one: Sleeping, crashes: bool, checkpoint: bool) -> None:
    one["one"].impulse("sleep_for", "before", 30)
    one.pass_time(60)
    one.jump(HOUR_NS)
    one["one"].impulse("sleep_for", "behind", 5)
    if checkpoint:
        one["one"].checkpoint()
    if crashes:
        one.crash_and_hear_of_it_again()
    one.pass_time(299)
    assert (one.woken, one.beats) == ([], 0)
    one.pass_time(2)
    assert (one.woken, one.beats) == (["behind"], 0)
    one.pass_time(180)
    assert (one.woken, one.beats) == (["behind"], 0)
    one.pass_time(60)
    assert one.beats == 1, "ten minutes since the start"
    one.pass_time(1200 - 3)
    assert one.woken == ["behind"]
    one.pass_time(3)
    assert one.woken == ["behind", "before"]


def test_a_moment_is_one_of_the_clock(one: Sleeping) -> None:
    moment = datetime_of(one["one"].dispatcher.context.record_time_ns or 0) + timedelta(minutes=30)
    one["one"].impulse("sleep_until", "at", moment)
    one.pass_time(60)
    assert one.woken == []
    one.jump(HOUR_NS)
    assert one.woken == ["at"]


def test_each_step_is_logged_once_however_often_it_is_told(one: Sleeping) -> None:
    one["one"].impulse("sleep_for", "nap", 60)
    one.jump(HOUR_NS)
    one.pass_time(60)
    one.jump(24 * HOUR_NS)
    one["one"].checkpoint()
    for _ in range(3):
        one.crash_and_hear_of_it_again()
    one.pass_time(3600 - 61)
    assert one.woken == []
    one.pass_time(2)
    assert one.woken == ["nap"]


def test_a_step_while_the_app_is_down_is_told_to_the_next(one: Sleeping) -> None:
    one["one"].impulse("sleep_for", "nap", 60)
    one.kill("one")
    one._time_ns += HOUR_NS
    one.steps.append(ev.ClockMoved(one._time_ns, 0, HOUR_NS))
    one.start("one", Sleeper)
    one.tell_clock(*one.steps)
    one.log_time()
    one.pass_time(3599)
    assert one.woken == []
    one.pass_time(2)
    assert one.woken == ["nap"]


def test_old_logs_say_nothing_of_steps() -> None:
    decode = msgspec.msgpack.Decoder(LoggedTime).decode
    assert decode(msgspec.msgpack.encode([7])) == LoggedTime(7)
    assert decode(msgspec.msgpack.encode([7, {3: 9}])) == LoggedTime(7, {3: 9}, 0)


# --- on the wire -----------------------------------------------------------------------------------------------------


def test_an_app_time_is_read_whole_or_refused() -> None:
    time = AppTime(1_700_000_000 * S_NS, 12 * S_NS, -5)
    message = encode_app_time(time)
    assert decode_app_time(message[2:]) == time
    for data in (b"", message[2:-1], message[2:] + b"\0"):
        with pytest.raises(RemoteProtocolError, match=f"an AppTime has {len(data)} bytes, 24 were expected"):
            decode_app_time(data)


def times(driven: Driven) -> list[AppTime]:
    return [
        decode_app_time(record.content[start:end])
        for record in records(bytes(driven.app_bytes))
        for kind, start, end in decode_messages(record.content)
        if kind == MessageType.APP_TIME
    ]


def test_an_app_is_told_before_its_first_record_and_whenever_the_clock_moves() -> None:
    driven = Driven()
    driven.handle(ev.ClockMoved(driven.now_ns, 5, 0))
    driven.connect()
    assert times(driven) == []
    driven.data(HELLO)
    assert times(driven) == [AppTime(driven.now_ns, 5)]
    driven.data(first_start())
    driven.handle(ev.ClockMoved(driven.now_ns + 9, 6, 3))
    assert times(driven)[1:] == [AppTime(driven.now_ns + 9, 6, 3)]


def test_an_app_that_does_not_ask_is_told_nothing() -> None:
    driven = Driven()
    driven.handle(ev.ClockMoved(driven.now_ns, 5, 0))
    driven.connect()
    driven.data(first_start())
    driven.handle(ev.ClockMoved(driven.now_ns + 9, 6, 3))
    assert times(driven) == []


def test_an_app_without_anything_that_waits_logs_no_step() -> None:
    class Plain(Immortal):
        @rpc
        def nothing(self) -> None: ...

    life = Life.of(Plain)
    tasks = life.dispatcher.tasks
    tasks.use(life.dispatcher.definition, None)
    tasks.time_impulses.start()
    tasks.time_impulses.note_jump(7, 5)
    assert MessageType.IMPULSE_BATCH not in life.sent_types
