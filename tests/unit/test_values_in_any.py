"""What is annotated ``Any`` comes as what it is, or is refused where it is made; logs from before go by their rules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from enum import Enum
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import pytest

import immortal
from immortal import CalleeFailed, Immortal, peer, rpc
from immortal.appsdk.client.methods import typed_method
from immortal.appsdk.handlers.definition import definition_of
from immortal.testing import Environment

KEPT = [(1, (2,)), {"a": {1, 2}}, [Decimal("1.10")], date(2024, 2, 29), {UUID(int=1): frozenset({"x"})}, 2**70]
KEPT += [datetime(2024, 1, 1, fold=1), datetime(2024, 1, 1, tzinfo=ZoneInfo("Europe/Berlin")), b"\xff", {(1, 2): 3}]


class Colour(Enum):
    RED = "red"


@dataclass
class Item:
    name: str


class Word(str):
    __slots__ = ()


REFUSED: list[Any] = [Item("a"), [Colour.RED], {"a": Word("b")}]


class Keeper(Immortal):
    said: list[Any]

    def __init__(self) -> None:
        self.said = []

    @rpc
    def keep(self, what: Any, more: dict[str, Any] | None = None) -> Any:
        self.said.append(what)
        return more["it"] if more else what

    @rpc
    async def later(self, what: Any) -> Any:
        await immortal.event("go")
        return await immortal.step(self.keep, what)

    @rpc
    async def twice(self, what: Any, again: bool = True) -> Any:
        if again:
            immortal.continue_as(what, False)
        return what

    @rpc
    def go(self) -> None:
        immortal.signal("go")

    @rpc
    def makes(self, index: int) -> Any:
        return REFUSED[index]


class Sender(Immortal):
    keeper = peer(Keeper, "keeper")

    @rpc
    def forks(self, what: Any) -> None:
        self.keeper.keep.fork(what)
        self.keeper.keep.fork(what, more={"it": what})
        immortal.multicast([self.keeper]).keep.fork(what)

    @rpc
    async def awaits(self, what: Any) -> Any:
        self.keeper.keep.fork(what)
        return await self.keeper.keep(what, {"it": what})

    @rpc
    def forks_refused(self, index: int) -> None:
        self.keeper.keep.fork(REFUSED[index])

    @rpc
    async def awaits_refused(self, index: int) -> None:
        await self.keeper.keep(1, {"it": REFUSED[index]})


@pytest.mark.parametrize("what", KEPT, ids=repr)
def test_it_comes_as_what_it_is(what: Any) -> None:
    with Environment() as env:
        keeper, sender = env.start(Keeper, "keeper"), env.start(Sender, "sender")
        results = [sender.call(Sender.awaits, what), keeper.call(Keeper.keep, what), keeper.call(Keeper.twice, what)]
        sender.call(Sender.forks, what)
        pending = keeper.begin(Keeper.later, what)
        keeper.checkpoint()
        keeper.crash()
        keeper.recover()
        keeper.call(Keeper.go)
        results.append(pending.result())
        assert list(map(repr, results + keeper.state.said)) == [repr(what)] * (len(results) + 7)
        method = typed_method(definition_of(Keeper), "keep")
        codec = definition_of(Keeper).codec(definition_of(Keeper).handlers["keep"])
        assert repr(codec.decode(method.encode((what,), {}))[0]) == repr(what)


@pytest.mark.parametrize("index", range(len(REFUSED)))
@pytest.mark.parametrize("handler", [Sender.forks_refused, Sender.awaits_refused, Keeper.makes])
def test_what_nobody_could_read_back_is_refused_where_it_is_made(handler: Callable[..., Any], index: int) -> None:
    with Environment(fail_alone=True) as env:
        keeper, sender = env.start(Keeper, "keeper"), env.start(Sender, "sender")
        called: Any = keeper if handler is Keeper.makes else sender
        with pytest.raises(CalleeFailed, match=r"can't be (kept where the annotation is Any|encoded)"):
            called.call(handler, index)
        assert keeper.state.said == []
        with pytest.raises(TypeError, match=r"Keeper\.keep: parameter 'what'.* can't be (kept|encoded)"):
            keeper.call(Keeper.keep, REFUSED[index])
        with pytest.raises(TypeError, match=r"Keeper\.keep: parameter 'what'.* can't be (kept|encoded)"):
            typed_method(definition_of(Keeper), "keep").encode((REFUSED[index],), {})


# --- logs from before -------------------------------------------------------------------------------------------------


# --- effects ----------------------------------------------------------------------------------------------------------


async def echo(what: Any) -> Any:
    raise AssertionError("a test runs another one in its place")


class Effective(Immortal):
    @rpc
    async def do(self, what: Any) -> Any:
        return await immortal.effect(echo, what)

    @rpc
    async def do_refused(self, index: int) -> Any:
        return await immortal.effect(echo, REFUSED[index])


def test_effects_get_and_give_what_it_is() -> None:
    seen = []

    def instead(what: Any) -> Any:
        seen.append(what)
        return Colour.RED if what == (1, "enum") else what

    with Environment(fail_alone=True) as env:
        effective = env.start(Effective, "effective", effects={echo: instead})
        assert effective.call(Effective.do, (1, {2})) == (1, {2})
        assert seen == [(1, {2})]
        with pytest.raises(CalleeFailed, match=r"echo: parameter 'what'.* can't be (kept|encoded)"):
            effective.call(Effective.do_refused, 0)
        with pytest.raises(TypeError, match="returned a Colour that can't be kept"):  # by who stands in
            effective.call(Effective.do, (1, "enum"))
