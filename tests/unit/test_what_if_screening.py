"""First round of a what-if: old and new code of one service side by side, record by record."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import ClassVar

import pytest

import immortal
from immortal import Immortal, peer, rpc
from immortal.appsdk.handlers.definition import definition_of
from immortal.appsdk.testing.instance import MemorySource
from immortal.appsdk.testing.outside import OUTSIDERS
from immortal.replay.fleet.player import first_checkpoint, logged
from immortal.replay.fleet.recorded import Recorded
from immortal.replay.fleet.screening import RecordDifference, Screening, screen
from immortal.replay.plan import ReplayError
from immortal.testing import Environment


def pay(cents: int) -> str:
    return f"paid {cents}"


class Till(Immortal):
    sold: int

    def __init__(self) -> None:
        self.sold = 0

    @rpc
    def sell(self, count: int) -> int:
        self.sold += count
        return self.sold


class Shop(Immortal):
    till = peer(Till, "till")
    last: int
    seconds: ClassVar[int] = 1
    more: ClassVar[int] = 0

    def __init__(self) -> None:
        self.last = 0

    @rpc
    def note(self, count: int) -> None:
        self.last = count

    @rpc
    async def order(self, count: int) -> int:
        if count == 7:
            raise ValueError("no seven")
        await immortal.sleep(timedelta(seconds=self.seconds))
        await immortal.effect(pay, count)
        await immortal.step(self.note, count)
        return await self.till.sell(count + self.more)


class Same(Shop, formerly=("Shop",)):
    """Another name."""


class Dearer(Shop, formerly=("Shop",)):
    @rpc
    async def order(self, count: int) -> int:
        return await super().order(count + (count == 2))


class Greedy(Shop, formerly=("Shop",)):
    more = 1


class Slower(Shop, formerly=("Shop",)):
    seconds = 2


class Kinder(Shop, formerly=("Shop",)):
    @rpc
    async def order(self, count: int) -> int:
        return 0 if count == 7 else await super().order(count)


class Forgetful(Shop, formerly=("Shop",)):
    @rpc
    def note(self, count: int) -> None:
        self.last = min(count, 2)


class Deadly(Shop, formerly=("Shop",)):
    @rpc
    def note(self, count: int) -> None:
        os._exit(0)


class Unwilling(Shop, formerly=("Shop",)):
    @rpc(on_error="stop")
    def note(self, count: int) -> None:
        raise KeyError(count)


class Teller(Immortal):
    till = peer(Till, "till")

    @rpc
    async def tell(self, count: int) -> None:
        self.till.sell.fork(count)
        await immortal.sleep(timedelta(seconds=1))


class Later(Teller, formerly=("Teller",)):
    @rpc
    async def tell(self, count: int) -> None:
        await immortal.sleep(timedelta(seconds=1))
        self.till.sell.fork(count)


@pytest.fixture(scope="module")
def source() -> MemorySource:
    """The log of a shop with orders of 1, 2, 7 and 3; the third one fails."""
    with Environment(fail_alone=True) as env:
        env.start(Till, "till")
        shop = env.start(Shop, "shop", effects={pay: pay})
        for count in (1, 2, 7, 3):
            shop.begin(Shop.order, count)
            env.advance(seconds=2)
        return MemorySource("shop", shop._node.store)


@pytest.fixture(params=[False, True], ids=["in one process", "in two"])
def forks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr("immortal.replay.fleet.screening.can_fork", lambda: request.param)
    monkeypatch.setattr("immortal.replay.fleet.screening.PART_SIZE_BYTES", 1)
    return bool(request.param)


def screened(source: MemorySource, cls: type[Shop], *, continues: bool = True) -> tuple[Recorded, bool]:
    route = first_checkpoint(source, None)
    return screen(source, route, definition_of(Shop), definition_of(cls), OUTSIDERS, continues=continues)


def all_found(source: MemorySource, cls: type[Shop]) -> list[RecordDifference]:
    route = first_checkpoint(source, None)
    one = Screening(source, route, definition_of(Shop), definition_of(cls), OUTSIDERS)
    found = [one.give(record) for record in logged(source, route.checkpoint, None)]
    one.close()
    return [each for each in found if each is not None]


@pytest.mark.parametrize("cls", [Shop, Same])
@pytest.mark.usefixtures("forks")
def test_equal_code_is_equal_with_failures_timers_and_effects(source: MemorySource, cls: type[Shop]) -> None:
    recorded, is_same = screened(source, cls)
    assert is_same
    assert 0 < recorded.sent_count < recorded.log.messages


@pytest.mark.parametrize("cls", [Greedy, Dearer, Slower, Kinder, Forgetful, Unwilling])
@pytest.mark.usefixtures("forks")
def test_other_code_is_found_and_the_run_of_the_logs_code_is_whole(source: MemorySource, cls: type[Shop]) -> None:
    whole, _ = screened(source, Shop)
    recorded, is_same = screened(source, cls)
    assert not is_same
    assert (recorded.state, len(recorded.log)) == (whole.state, len(whole.log))


@pytest.mark.parametrize("forks", [True], indirect=True)
def test_code_that_ends_its_process_is_other_code(source: MemorySource, forks: bool) -> None:
    assert forks
    assert not screened(source, Deadly)[1]


def test_the_logs_code_ends_at_a_difference_if_it_is_to(source: MemorySource) -> None:
    with pytest.raises(ReplayError, match="differs"):
        screened(source, Greedy, continues=False)


def test_changed_calls_are_found_and_the_recorded_inputs_go_on(source: MemorySource) -> None:
    found = all_found(source, Greedy)
    calls = [one for each in found for one in each.calls]
    pair = [("changed", "till"), ("missing", "test")]  # the recorded answer is that of another call
    assert [(one.kind, one.destination) for one in calls] == pair * 3


def test_another_effect_is_found_and_what_follows_is_missing(source: MemorySource) -> None:
    found = all_found(source, Dearer)
    assert "pay" in found[0].other
    assert {one.kind for each in found for one in each.calls} == {"missing"}


@pytest.mark.parametrize(
    ("cls", "what"),
    [(Slower, "the next timer: was 2030-01-01T00:00:01"), (Unwilling, "KeyError")],
)
def test_a_timer_and_an_app_that_stops_are_differences(source: MemorySource, cls: type[Shop], what: str) -> None:
    assert what in all_found(source, cls)[0].other


def test_a_call_that_fails_no_more_is_a_difference(source: MemorySource) -> None:
    (found,) = all_found(source, Kinder)[:1]
    assert [(one.method, one.fate.would_be) for one in found.fates] == [("Shop.order", "would not fail")]


def test_a_state_that_only_differs_inside_is_found_at_the_end(source: MemorySource) -> None:
    assert not all_found(source, Forgetful)
    assert not screened(source, Forgetful)[1]


def test_a_log_that_the_old_code_did_not_make_is_refused(source: MemorySource) -> None:
    route = first_checkpoint(source, None)
    with pytest.raises(ReplayError, match="never had the state"):
        screen(source, route, definition_of(Greedy), definition_of(Greedy), OUTSIDERS)


def test_a_call_that_comes_later_is_in_no_mark_but_is_found() -> None:
    with Environment() as env:
        env.start(Till, "till")
        teller = env.start(Teller, "teller")
        for count in (1, 2, 3):
            teller.begin(Teller.tell, count)
            env.advance(seconds=2)
        source = MemorySource("teller", teller._node.store)
        assert Recorded(source, first_checkpoint(source, None), definition_of(Later), OUTSIDERS, None).sent_count
        route = first_checkpoint(source, None)
        assert not screen(source, route, definition_of(Teller), definition_of(Later), OUTSIDERS)[1]
        found = env.what_if({"teller": Later})
        assert sum(one.moved for service in found.services for one in service.calls) == 3
