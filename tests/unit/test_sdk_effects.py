"""``immortal.effect``: instances with real machines and logs, whose effects are run by hand."""

from __future__ import annotations

import asyncio
import functools
import math
import time
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import immortal
from immortal import EffectContext, EffectFailed, Immortal, Retry, effect_context, impulse, peer, rpc
from immortal.appsdk.dispatch.lifecycle import upgrades
from immortal.appsdk.effects.effect import FAILURE_TEXT_CHARACTERS_MAX
from immortal.appsdk.handlers.definition import definition_of
from immortal.appsdk.handlers.log import FailureReporter
from immortal.appsdk.running.inspection import inspect_state
from immortal.appsdk.state.journal import JournalError
from immortal.errors import DefinitionError, HandlerError, UsageError
from immortal.protocol.limits import MESSAGE_SIZE_BYTES_MAX
from tests.helpers.sdk import TAKE_FIRST, Life
from tests.helpers.waiting import EffectsByHand, WaitingInstances
from tests.helpers.wire import checkpoint_record


class SoldOut(Exception):  # noqa: N818
    def __init__(self, item: str, left: int) -> None:
        super().__init__(f"{item} is sold out")
        self.left = left


def price(item: str, day: datetime | None = None, *, currency: str = "EUR") -> int:
    return len(item) * (1 if currency == "EUR" else 2)


def change(items: list[str]) -> list[str]:
    items.append(effect_context().key)
    return items


def context() -> str:
    return f"{effect_context()}"


async def ask(question: str) -> dict[str, int]:
    return {question: effect_context().attempt}


def nothing() -> None:
    pass


def other(item: str) -> int:
    return 0


@functools.lru_cache
def cached(item: str) -> int:
    return len(item)


def unannotated(item, other: int):  # type: ignore[no-untyped-def]
    pass


def listless(*items: str) -> int:
    return 0


def unencodable(item: object) -> int:
    return 0


def unresolvable(item: Missing) -> int:  # type: ignore[name-defined]  # noqa: F821
    return 0


class Callee(Immortal):
    @rpc
    def hello(self) -> int:
        return 1


class Shop(Immortal):
    LIMIT = 2
    callee = peer(Callee, "callee")
    notes: list[str]

    def __init__(self) -> None:
        self.notes = []

    @rpc
    def note(self, text: str) -> int:
        self.notes.append(text)
        return len(self.notes)

    def helper(self, item: str) -> int:
        return 0

    @staticmethod
    def static(item: str) -> int:
        return len(item)

    @impulse
    async def work(self, kind: str) -> None:
        found: Any = None
        try:
            if kind == "price":
                found = await immortal.effect(price, "apple", currency="USD")
            elif kind == "cached":
                found = (await immortal.effect(cached, "x"), await immortal.effect(self.static, "abc"))
            elif kind == "nothing":
                found = await immortal.effect(nothing)
            elif kind == "context":
                found = await immortal.effect(context)
            elif kind == "change":
                items = ["a"]
                found = (await immortal.effect(change, items), items)
            elif kind == "two":
                found = tuple(await asyncio.gather(immortal.effect(price, "apple"), immortal.effect(ask, "why")))
            elif kind == "race":
                found = await immortal.race(immortal.effect(price, "apple"), immortal.event("enough"))
            elif kind == "declared":
                found = await immortal.effect.options(raises=[SoldOut])(price, "apple")
            elif kind == "key":
                found = await immortal.effect.options(key="order 7")(price, "apple")
            elif kind == "uncaught":
                await self.uncaught.fork()  # type: ignore[func-returns-value]
        except SoldOut as error:
            found = (error, error.left)
        except EffectFailed as failed:
            found = (failed.effect, failed.type_name, failed.message, failed.attempts, failed.traceback)
        await immortal.step(self.note, f"{found}")  # type: ignore[misc]

    @impulse
    def send(self) -> None:
        immortal.signal("enough", 1)

    @impulse
    async def price_and_send(self) -> None:
        await immortal.effect(price, "apple")
        immortal.signal("enough", 2)

    @impulse
    async def uncaught(self) -> None:
        await immortal.effect(price, "apple")

    @impulse
    async def over(self, rounds: int) -> None:
        await immortal.effect(price, "apple")
        if rounds:
            immortal.continue_as(rounds - 1)

    @impulse
    async def wrong(self, kind: str) -> None:
        effect: Any = immortal.effect
        if kind == "lambda":
            effect(lambda: 1)
        elif kind == "inner":

            def inner() -> int:
                return len(kind)

            effect(inner)
        elif kind == "method":
            effect(self.helper, "x")
        elif kind == "handler":
            effect(self.note, "x")
        elif kind == "class":
            effect(SoldOut, "x", 1)
        elif kind == "no function":
            effect(5)
        elif kind == "unannotated":
            effect(unannotated, 1, 2)
        elif kind == "listless":
            effect(listless, "x")
        elif kind == "unencodable":
            effect(unencodable, "x")
        elif kind == "unresolvable":
            effect(unresolvable, "x")
        elif kind == "built in":
            effect(math.hypot, 1.0)
        elif kind == "too few":
            effect(price)
        elif kind == "by position":
            effect(price, "tea", None, "USD")
        elif kind == "other type":
            await effect(price, 5)
        elif kind == "no type":
            await effect(price, object())
        elif kind == "not awaited":
            effect(price, "x")
            await immortal.step(self.note, "never")  # type: ignore[misc]
        elif kind == "retry":
            effect.options(retry=3)
        elif kind == "timeout":
            effect.options(timeout=5)
        elif kind == "raises":
            effect.options(raises=[BaseException])
        elif kind == "key":
            effect.options(key="")


@pytest.fixture
def by_hand() -> EffectsByHand:
    return EffectsByHand()


@pytest.fixture
def shop(tmp_path: Path, by_hand: EffectsByHand) -> Iterator[WaitingInstances]:
    made = WaitingInstances(tmp_path, {"shop": Shop}, by_hand)
    yield made
    made.close()


def notes(shop: WaitingInstances) -> list[str]:
    found: list[str] = shop.app("shop").notes
    return found


# --- results ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpoint", [False, True])
def test_a_result_in_the_log_is_the_only_one(shop: WaitingInstances, by_hand: EffectsByHand, checkpoint: bool) -> None:
    shop["shop"].impulse("work", "price")
    (first,) = by_hand.requests
    assert (first.name, first.function, first.is_async) == ("price", price, False)
    assert first.arguments == (("apple", None), {"currency": "USD"})
    if checkpoint:
        shop["shop"].checkpoint()
    shop.crash("shop")  # no result yet: it is run again
    first, second = by_hand.requests
    assert (second.key, second.number) == (first.key, first.number)
    second.returned(second.call())
    shop.settle()
    assert notes(shop) == ["10"]
    if checkpoint:
        shop["shop"].checkpoint()
    shop.crash("shop")  # there is one: it is not
    assert notes(shop) == ["10"]
    assert len(by_hand.requests) == 2
    second.returned(11)  # and what comes later is nobody's
    shop.settle()
    assert notes(shop) == ["10"]


def test_what_fails_for_good_is_told_of_though_its_handler_catches_it(
    shop: WaitingInstances, by_hand: EffectsByHand, capsys: pytest.CaptureFixture[str]
) -> None:
    shop["shop"].dispatcher.context.reporter = FailureReporter("Shop")
    for kind in ("price", "declared"):
        shop["shop"].impulse("work", kind)
    first, second = by_hand.requests
    first.raised(KeyError("BANK_URL"))
    second.raised(SoldOut("apple", 3))
    shop.settle()
    assert len(notes(shop)) == 2
    told = capsys.readouterr().err
    assert (
        "error   shop> the effect price has failed for good: KeyError: 'BANK_URL'  handler=Shop.work "
        """arguments=('price') caller="nobody waits" record=1:0 remedy="its handler has EffectFailed: mend what """
        """price needs, and call that again"\n    KeyError: 'BANK_URL'\n"""
    ) in told
    assert "info    shop> the effect price has failed for good: SoldOut: " in told
    assert told.count("for good") == 2
    first.is_cancelled = True
    first.raised(KeyError("BANK_URL"))  # nobody waits for it any more
    assert capsys.readouterr().err == ""


def test_whom_a_handler_wakes_behind_its_effect_goes_on_at_once(shop: WaitingInstances, by_hand: EffectsByHand) -> None:
    shop["shop"].impulses([("work", ("race",)), ("price_and_send", ())])
    by_hand.requests[1].returned(10)
    shop.settle()
    assert notes(shop) == ["Winner(index=1, value=2)"]


def test_a_crash_before_the_result_is_logged_runs_it_again(shop: WaitingInstances, by_hand: EffectsByHand) -> None:
    shop["shop"].impulse("work", "price")
    by_hand.waiting[0].returned(1)  # sent by nobody any more
    shop.crash("shop")
    by_hand.waiting[0].returned(2)
    shop.settle()
    assert notes(shop) == ["2"]


@pytest.mark.parametrize(
    ("kind", "expected"), [("cached", "(1, 3)"), ("nothing", "None"), ("two", "(5, {'why': 0})"), ("key", "5")]
)
def test_what_is_returned(shop: WaitingInstances, by_hand: EffectsByHand, kind: str, expected: str) -> None:
    shop["shop"].impulse("work", kind)
    while by_hand.waiting:
        for request in by_hand.waiting:
            request.returned({"why": 0} if request.is_async else request.call())
        shop.settle()
    assert notes(shop) == [expected]


def test_arguments_and_results_are_copies(shop: WaitingInstances, by_hand: EffectsByHand) -> None:
    shop["shop"].impulse("work", "change")
    (request,) = by_hand.requests
    assert request.call() == request.call() == ["a", request.key]
    request.returned(request.call())
    shop.settle()
    assert notes(shop) == [f"(['a', '{request.key}'], ['a'])"]


def test_what_is_not_what_the_annotation_says(shop: WaitingInstances, by_hand: EffectsByHand) -> None:
    shop["shop"].impulse("work", "price")
    (request,) = by_hand.waiting
    with pytest.raises(TypeError, match="price returned a str that can't be kept: Expected `int`, got `str`"):
        request.returned("5")
    with pytest.raises(TypeError, match="price returned a PosixPath that can't be kept"):
        request.returned(Path())
    assert not request.is_done
    request.returned(5)
    shop.settle()
    assert notes(shop) == ["5"]


def test_what_is_too_large(shop: WaitingInstances, by_hand: EffectsByHand) -> None:
    shop["shop"].impulse("work", "change")
    shop["shop"].impulse("work", "declared")
    large, declared = by_hand.waiting
    text = "x" * MESSAGE_SIZE_BYTES_MAX
    with pytest.raises(UsageError, match=r"the result of an effect: .* bytes, at most"):
        large.returned([text])
    assert not large.is_done
    large.raised(ValueError(text))
    declared.raised(SoldOut(text, 0))
    shop.settle()
    first, second = notes(shop)
    assert first.startswith("('change', 'ValueError', 'xxx")
    assert len(first) < 3 * FAILURE_TEXT_CHARACTERS_MAX
    assert second.startswith("""('price', 'UsageError', "the result of an effect: """)


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("crashing", [False, True])
def test_declared_exceptions_and_others(shop: WaitingInstances, by_hand: EffectsByHand, crashing: bool) -> None:
    class Inherits(SoldOut):
        pass

    shop["shop"].impulse("work", "declared")
    shop["shop"].impulse("work", "declared")
    shop["shop"].impulse("work", "price")
    declared, listed, undeclared = by_hand.waiting
    declared.raised(SoldOut("apple", 3))
    listed.raised(Inherits("pear", 4), 2)
    try:
        raise SoldOut("plum", 1)
    except SoldOut as error:
        undeclared.raised(error, 3)
    shop.settle()
    if crashing:
        shop["shop"].checkpoint()
        shop.crash("shop")
    assert notes(shop)[:2] == ["(SoldOut('apple is sold out'), 3)", "(SoldOut('pear is sold out'), 4)"]
    assert notes(shop)[2].startswith("('price', 'SoldOut', 'plum is sold out', 3, '    Traceback (most recent")
    assert "test_sdk_effects.py" in notes(shop)[2]


def test_an_exception_that_says_nothing(shop: WaitingInstances, by_hand: EffectsByHand) -> None:
    class Mute(Exception):  # noqa: N818
        def __str__(self) -> str:
            raise ValueError

    shop["shop"].impulse("work", "price")
    shop["shop"].impulse("work", "price")
    shop["shop"].impulse("work", "declared")
    mute, surrogate, unsendable = by_hand.waiting
    mute.raised(Mute())
    surrogate.raised(ValueError("\ud800"))
    unsendable.raised(SoldOut(object(), 1))  # type: ignore[arg-type]
    error = SoldOut("x", 1)
    error.extra = object()  # type: ignore[attr-defined]
    shop.settle()
    first, second, third = notes(shop)
    assert first.startswith("('price', 'Mute', 'its str() raises ValueError', 1")
    assert second.startswith("('price', 'ValueError', '?', 1")
    assert third.startswith("(SoldOut('<object")
    shop["shop"].impulse("work", "declared")
    by_hand.waiting[0].raised(error)
    shop.settle()
    assert notes(shop)[3].startswith("""('price', 'TypeError', "SoldOut, which price raised, can't be encoded: """)


def test_what_nobody_catches_stops_the_app_with_the_effects_own_traceback(
    shop: WaitingInstances, by_hand: EffectsByHand
) -> None:
    shop["shop"].impulse("uncaught")
    (request,) = by_hand.waiting
    try:
        price(None)  # type: ignore[arg-type]
    except TypeError as error:
        request.raised(error)
    with pytest.raises(HandlerError) as caught:
        shop.settle()
    text = str(caught.value)
    assert "Shop.uncaught raised EffectFailed" in text
    assert "the effect price failed: TypeError: object of type 'NoneType' has no len()" in text
    assert "in the effect:" in text
    assert "return len(item) * " in text


# --- given up ---------------------------------------------------------------------------------------------------------


def test_an_effect_that_has_lost_a_race(shop: WaitingInstances, by_hand: EffectsByHand) -> None:
    shop["shop"].impulse("work", "race")
    (request,) = by_hand.waiting
    shop["shop"].impulse("send")
    assert notes(shop) == ["Winner(index=1, value=1)"]
    assert by_hand.cancelled == [request]
    sequence_id = shop["shop"].dispatcher.context.sequence_id
    request.returned(5)
    request.raised(ValueError())
    shop.settle()
    assert shop["shop"].dispatcher.context.sequence_id == sequence_id  # nothing was logged
    shop.crash("shop")
    assert by_hand.requests == [request]
    shop["shop"].impulse("work", "race")
    by_hand.waiting[0].returned(5)
    shop.settle()
    assert notes(shop)[1:] == ["Winner(index=0, value=5)"]
    assert by_hand.cancelled == [request]
    assert shop["shop"].dispatcher.tasks.effects.waiting == {}


# --- keys -------------------------------------------------------------------------------------------------------------


def test_keys(tmp_path: Path, shop: WaitingInstances, by_hand: EffectsByHand) -> None:
    shop["shop"].impulses([("work", ("two",)), ("work", ("price",)), ("over", (1,)), ("work", ("key",))])
    keys = [request.key for request in by_hand.requests]
    assert keys[-1] == "order 7"
    assert len(set(keys)) == 5
    by_hand.requests[3].returned(1)
    shop.settle()
    keys.append(by_hand.requests[-1].key)  # of the next round
    assert len(set(keys)) == 6
    shop.crash("shop")
    again = [request.key for request in by_hand.requests[6:]]
    assert sorted(again) == sorted(set(keys) - {keys[3]})
    elsewhere = WaitingInstances(tmp_path / "more", {"shop2": Shop}, by_hand)  # the seed is the same: tests draw none
    elsewhere["shop2"].impulse("work", "two")
    assert by_hand.requests[-1].key not in keys
    elsewhere.close()


def test_the_context_of_an_effect(shop: WaitingInstances, by_hand: EffectsByHand) -> None:
    shop["shop"].impulse("work", "context")
    (request,) = by_hand.requests
    assert [request.call(attempt) for attempt in (1, 2)] == [f"{EffectContext(request.key, n)}" for n in (1, 2)]
    with pytest.raises(UsageError, match=r"only a function that is run by immortal\.effect"):
        effect_context()


# --- replays and changed code -----------------------------------------------------------------------------------------


def test_no_effect_is_run_before_the_app_is_primary(shop: WaitingInstances, by_hand: EffectsByHand) -> None:
    shop["shop"].impulse("work", "price")
    life = Life.of(Shop, by_hand)
    blob = b"".join(shop["shop"].dispatcher._life.encode())
    life.give(checkpoint_record(blob))
    assert len(life.dispatcher.tasks.effects.waiting) == 1
    assert len(by_hand.requests) == 1
    life.give(TAKE_FIRST)
    assert len(by_hand.requests) == 2


class Changed(Shop, formerly=("Shop",)):
    @impulse
    async def work(self, kind: str) -> None:
        found = await immortal.effect(other, "apple")
        await immortal.step(self.note, f"{found}")  # type: ignore[misc]


def test_a_recovery_does_not_take_the_result_of_another_effect(shop: WaitingInstances, by_hand: EffectsByHand) -> None:
    shop["shop"].impulse("work", "price")
    by_hand.requests[0].returned(5)
    shop.settle()
    shop.kill("shop")
    with pytest.raises(JournalError) as caught:
        shop.start("shop", Changed)
    for words in ["Changed.work waits for effect other (arg", "record 2 has the result of effect price", "@upgrades"]:
        assert words in str(caught.value)
    assert len(by_hand.requests) == 1
    shop.kill("shop")
    shop.start("shop", Shop)
    assert notes(shop) == ["5"]


def test_an_upgrade_while_an_effect_is_in_flight(shop: WaitingInstances, by_hand: EffectsByHand) -> None:
    @upgrades(Shop)
    class Upgraded(Shop):
        @classmethod
        def upgrade(cls, old: Shop) -> Upgraded:
            new = cls()
            new.notes = [*old.notes, "upgraded"]
            return new

    shop["shop"].impulse("work", "price")
    shop.kill("shop")
    shop.classes["shop"] = Upgraded
    shop.start("shop", Upgraded, upgrade_to=2)
    first, second = by_hand.requests
    assert first.key == second.key
    second.returned(7)
    shop.settle()
    assert notes(shop) == ["upgraded", "7"]


# --- what can't be ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("lambda", ["function of a module was expected", "pass them as arguments"]),
        ("inner", ["Shop.wrong.<locals>.inner", "pass them as arguments"]),
        ("method", ["Shop.helper", "there is no self"]),
        ("handler", ["call handlers without immortal.effect"]),
        ("class", ["SoldOut", "function of a module was expected"]),
        ("no function", ["immortal.effect(5, ...)"]),
        ("unannotated", ["immortal.effect(unannotated, ...): item, return: no annotation"]),
        ("listless", ["not listed one by one (*items: 'str')"]),
        ("unencodable", ["unencodable: parameter 'item'"]),
        ("unresolvable", ["unresolvable: an annotation can't be resolved: name 'Missing'"]),
        ("built in", ["immortal.effect(hypot, ...)", "write a function of your own that calls it"]),
        ("too few", ["price(item", "missing a required argument: 'item'"]),
        ("by position", ["price(item", "too many positional arguments"]),
        ("other type", ["price: parameter 'item': Expected `str`, got `int`"]),
        ("no type", ["price: parameter 'item' (a object) can't be encoded: "]),
        ("not awaited", ["effect price was made and never awaited"]),
        ("retry", ["Retry(attempts=...) was expected"]),
        ("timeout", ["a timedelta was expected"]),
        ("raises", ["immortal.effect.options(raises=[<class 'BaseException'>])", "a class below Exception"]),
        ("key", ["a str was expected that is not empty"]),
    ],
)
def test_what_stops_the_app(shop: WaitingInstances, by_hand: EffectsByHand, kind: str, words: list[str]) -> None:
    with pytest.raises(HandlerError) as caught:
        shop["shop"].impulse("wrong", kind)
    for word in words:
        assert word in str(caught.value)
    assert by_hand.requests == []


def test_only_async_handlers_have_effects() -> None:
    Shop()
    with pytest.raises(UsageError, match=r"immortal\.effect: only an 'async def' handler waits"):
        immortal.effect(nothing)
    with pytest.raises(UsageError, match=r"immortal\.effect: only an 'async def' handler waits"):
        immortal.effect.options(timeout=timedelta(seconds=1))(nothing)


def test_how_often_to_retry() -> None:
    retry = Retry(first_wait=timedelta(seconds=2), factor=3, max_wait=timedelta(seconds=30))
    assert [retry.wait_s(attempt) for attempt in range(1, 5)] == [2, 6, 18, 30]
    assert retry.wait_s(100_000) == 30
    wrong: list[dict[str, Any]] = [
        {"attempts": 0},
        {"attempts": True},
        {"first_wait": 5},
        {"max_wait": timedelta(seconds=-1)},
        {"factor": 0.5},
        {"factor": float("inf")},
        {"on": ValueError},
        {"on": (BaseException,)},
        {"not_on": ValueError},
        {"give_up_after": 5},
    ]
    for keywords in wrong:
        with pytest.raises(UsageError, match=rf"Retry\({next(iter(keywords))}=.* expected"):
            Retry(**keywords)


def test_what_to_retry() -> None:
    """The nearest class that is named decides; by default all but what is plainly the program's own."""
    errors = [ConnectionError(), ValueError(), KeyError(), TypeError(), SystemExit()]

    def retried(**options: Any) -> list[str]:
        return [type(error).__name__ for error in errors if Retry(**options).is_for(error)]

    assert retried() == ["ConnectionError", "ValueError", "SystemExit"]
    assert retried(on=(KeyError, OSError)) == ["ConnectionError", "KeyError"]
    assert retried(not_on=(OSError,)) == ["ValueError", "KeyError", "TypeError", "SystemExit"]


def test_how_many_at_once() -> None:
    class Few(Shop, concurrent_effects=2):
        pass

    class Fewer(Few):
        pass

    assert [definition_of(cls).concurrent_effects for cls in (Shop, Few, Fewer)] == [32, 2, 2]
    for number in (0, True, "5"):
        with pytest.raises(DefinitionError, match=r"concurrent_effects=.*: a number from 1 was expected"):
            type("Wrong", (Shop,), {}, concurrent_effects=number)


def test_what_waits_is_shown(shop: WaitingInstances) -> None:
    shop["shop"].impulse("work", "price")
    blob = b"".join(shop["shop"].dispatcher._life.encode())
    (waiting,) = inspect_state(definition_of(Shop), blob).to_json()["state"]["$waiting"]
    assert waiting["waits_for"] == ["effect price"]


def test_many_effects_at_once(shop: WaitingInstances, by_hand: EffectsByHand) -> None:
    shop["shop"].impulses([("work", ("price",))] * 500)
    shop["shop"].checkpoint()
    started = time.perf_counter()
    shop.crash("shop")
    assert time.perf_counter() - started < 10
    assert [request.number for request in by_hand.requests[500:]] == [
        request.number for request in by_hand.requests[:500]
    ]
    for request in by_hand.requests[500:]:
        request.returned(request.number)
    shop.settle()
    assert notes(shop) == [str(request.number) for request in by_hand.requests[500:]]
