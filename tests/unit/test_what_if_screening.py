"""First round of a what-if: old and new code of one service side by side, record by record."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, ClassVar

import pytest

import immortal
from immortal import Immortal, peer, rpc
from immortal.appsdk.handlers.definition import definition_of
from immortal.appsdk.testing.instance import MemorySource
from immortal.appsdk.testing.outside import OUTSIDERS
from immortal.replay.fleet.player import first_checkpoint, logged
from immortal.replay.fleet.screening import RecordDifference, Screened, Screening, screen
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


class Unwilling(Shop, formerly=("Shop",)):
    @rpc(on_error="stop")
    def note(self, count: int) -> None:
        raise KeyError(count)


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


def screened(source: MemorySource, cls: type[Shop]) -> Screened:
    route = first_checkpoint(source, None)
    return screen(source, route, definition_of(Shop), definition_of(cls), outsiders=OUTSIDERS)


def all_found(source: MemorySource, cls: type[Shop]) -> list[RecordDifference]:
    route = first_checkpoint(source, None)
    one = Screening(source, route, definition_of(Shop), definition_of(cls), OUTSIDERS)
    found = [one.give(record) for record in logged(source, route.checkpoint, None)]
    one.close()
    return [each for each in found if each is not None]


@pytest.mark.parametrize("cls", [Shop, Same])
def test_equal_code_is_equal_with_failures_timers_and_effects(source: MemorySource, cls: type[Shop]) -> None:
    found = screened(source, cls)
    assert (found.is_different, found.first, found.state_differs) == (False, None, False)
    assert found.sent > 0
    assert found.messages > found.sent


def test_changed_calls_are_found_and_the_recorded_inputs_go_on(source: MemorySource) -> None:
    found = all_found(source, Greedy)
    calls = [one for each in found for one in each.calls]
    pair = [("changed", "till"), ("missing", "test")]  # the recorded answer is that of another call
    assert [(one.kind, one.destination) for one in calls] == pair * 3
    first = screened(source, Greedy)
    assert first.first is not None
    assert (first.first.calls, first.state_differs) == ([calls[0]], None)


def test_another_effect_is_found_and_what_follows_is_missing(source: MemorySource) -> None:
    found = all_found(source, Dearer)
    assert "pay" in found[0].other
    assert {one.kind for each in found for one in each.calls} == {"missing"}


@pytest.mark.parametrize(
    ("cls", "what"),
    [(Slower, "the next timer: was 2030-01-01T00:00:01"), (Unwilling, "KeyError")],
)
def test_a_timer_and_an_app_that_stops_are_differences(source: MemorySource, cls: type[Shop], what: str) -> None:
    found = screened(source, cls)
    assert found.first is not None
    assert what in found.first.other


def test_a_call_that_fails_no_more_is_a_difference(source: MemorySource) -> None:
    found: Any = screened(source, Kinder).first
    assert [(one.method, one.fate.would_be) for one in found.fates] == [("Shop.order", "would not fail")]


def test_a_state_that_only_differs_inside_is_found_at_the_end(source: MemorySource) -> None:
    found = screened(source, Forgetful)
    assert (found.first, found.state_differs, found.is_different) == (None, True, True)


def test_a_log_that_the_old_code_did_not_make_is_refused(source: MemorySource) -> None:
    route = first_checkpoint(source, None)
    with pytest.raises(ReplayError, match="never was"):
        screen(source, route, definition_of(Greedy), definition_of(Greedy), outsiders=OUTSIDERS)
