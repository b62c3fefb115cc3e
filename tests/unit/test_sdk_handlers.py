"""Handlers under an operator's hand: listed, explained, cancelled, signalled; and what crashes change of that."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

import immortal
from immortal import CallCancelled, CalleeFailed, Cancelled, Immortal, impulse, peer, rpc
from immortal.coordinator.core import events as ev
from immortal.protocol.system_methods import REASON_CHARACTERS_MAX, Order
from tests.helpers.waiting import EffectsByHand, WaitingInstances


def fetch(url: str) -> str:
    return url


class Clerk(Immortal):
    log: list[str]

    def __init__(self) -> None:
        self.log = []

    @rpc
    def note(self, text: str) -> int:
        self.log.append(text)
        return len(self.log)

    @rpc
    async def slow(self, text: str) -> str:
        try:
            return await immortal.event(text, str)
        except Cancelled as cancelled:
            await immortal.step(self.note, f"{text} was cancelled: {cancelled}")
            raise


class Desk(Clerk):
    clerk = peer(Clerk, "clerk")

    @impulse
    async def plain(self, name: str) -> None:
        await immortal.event(name, int)
        await immortal.step(self.note, f"{name} went on")

    @impulse
    async def cleans_up(self, name: str) -> None:
        try:
            try:
                await asyncio.gather(immortal.event(name, bool), immortal.sleep(timedelta(hours=1)))
            except Exception:
                await immortal.step(self.note, f"{name} failed")
        finally:
            await immortal.sleep(timedelta(seconds=10))
            number = await self.clerk.note(f"{name} is over")
            await immortal.step(self.note, f"{name} cleaned up, {number} {immortal.random.random() < 2}")

    @impulse
    async def refuses(self, name: str) -> None:
        for _ in range(3):
            try:
                await immortal.event(name)
            except Cancelled:
                await immortal.step(self.note, f"{name} does not care")
        await immortal.step(self.note, f"{name} ends")

    @impulse
    async def turns(self, name: str) -> None:
        try:
            await immortal.event(name)
        except Cancelled as cancelled:
            raise ValueError(f"turned: {cancelled}") from None

    @impulse
    async def in_part(self, name: str) -> None:
        await asyncio.gather(self.part(name), immortal.sleep(timedelta(hours=1)))

    async def part(self, name: str) -> None:
        try:
            await immortal.event(name)
        finally:
            self.note.fork(f"the part of {name} is given up")

    @impulse
    async def stubborn(self, name: str) -> None:
        await asyncio.gather(self.stubborn_part(name))

    async def stubborn_part(self, name: str) -> None:
        try:
            await immortal.event(name)
        finally:
            await immortal.sleep(timedelta(hours=1))

    @rpc
    def breaks(self, text: str) -> None:
        self.log.append(text)
        raise ValueError("a bug")

    @impulse
    async def breaks_down(self, name: str) -> None:
        try:
            await immortal.event(name)
        except Cancelled:
            try:
                await immortal.step(self.breaks, name)
            except CalleeFailed as error:
                await immortal.step(self.note, f"{name}: {error.type_name}")
            await immortal.event("more")
            raise

    @impulse
    async def asks(self, text: str) -> None:
        try:
            answer = await self.clerk.slow(text)
        except CalleeFailed as error:
            answer = f"{type(error).__name__} {error.message}, {error}"
        await immortal.step(self.note, answer)

    @impulse
    async def fetches(self, url: str) -> None:
        await immortal.effect(fetch, url)


@pytest.fixture
def effects() -> EffectsByHand:
    return EffectsByHand()


@pytest.fixture
def two(tmp_path: Path, effects: EffectsByHand) -> Iterator[WaitingInstances]:
    made = WaitingInstances(tmp_path, {"clerk": Clerk, "desk": Desk}, effects)
    yield made
    made.close()


def listed(two: WaitingInstances, name: str = "desk") -> list[dict[str, Any]]:
    answer = two.ask(name, ev.HandlersAsked, 0)
    assert answer["count"] == len(answer["handlers"])
    found: list[dict[str, Any]] = answer["handlers"]
    return found


def log(two: WaitingInstances, name: str = "desk") -> list[str]:
    found: list[str] = two.app(name).log
    return found


def signal(two: WaitingInstances, name: str, task: int, event: str, value: object) -> Any:
    raw = msgspec.Raw(msgspec.msgpack.encode(value))
    return two.ask(name, ev.HandlerOrdered, Order("signal", task, event, "ann", raw))


# --- what is listed ---------------------------------------------------------------------------------------------------


def test_each_handler_says_what_it_waits_for_and_where(two: WaitingInstances) -> None:
    assert listed(two) == []
    two["desk"].impulse("cleans_up", "a")
    two["desk"].impulse("asks", "b")
    two["desk"].impulse("fetches", "http://c")
    gathered, asking, fetching = listed(two)
    assert [wait["kind"] for wait in gathered["waits"]] == ["event", "timer"]
    assert gathered["waits"][0]["event"] == "a"
    assert gathered["waits"][1]["due_ns"] == gathered["waits"][1]["since_ns"] + 3600 * 10**9
    assert gathered["handler"] == "Desk.cleans_up"
    assert (gathered["arguments"], gathered["caller"]) == ("('a')", None)
    ((frame,),) = gathered["at"]
    assert frame["text"].startswith("await asyncio.gather(immortal.event(name, bool)")
    assert frame["file"].endswith("tests/unit/test_sdk_handlers.py")
    assert frame["function"] == "Desk.cleans_up"
    (wait,) = asking["waits"]
    assert (wait["kind"], wait["to"], wait["for"]) == ("call", "clerk", "call clerk.slow")
    (wait,) = fetching["waits"]
    assert (wait["kind"], wait["for"], wait["attempt"]) == ("effect", "effect fetch(url='http://c')", 0)
    (called,) = listed(two, "clerk")
    assert (called["caller"], called["call_number"]) == ("desk", asking["waits"][0]["number"])


def test_since_when_and_what_began_it_outlive_a_crash(two: WaitingInstances) -> None:
    two["desk"].impulse("cleans_up", "a")
    two.pass_time(60)
    two["desk"].impulse("plain", "b")
    before = listed(two)
    assert before[0]["since_ns"] < before[1]["since_ns"]
    assert all(one["record"] > 0 for one in before)
    two["desk"].checkpoint()
    two.crash("desk")
    assert listed(two) == before


def test_one_is_explained_with_its_steps(two: WaitingInstances) -> None:
    two["desk"].impulse("asks", "a")
    (waits,) = listed(two)
    one = two.ask("desk", ev.HandlersAsked, waits["id"])["handler"]
    assert (one["steps"], one["steps_count"]) == ([], 0)
    assert two.ask("desk", ev.HandlersAsked, 99) == {"handler": None}
    two["desk"].impulse("refuses", "b")
    number = listed(two)[1]["id"]
    two.cancel("desk", number, "enough")
    one = two.ask("desk", ev.HandlersAsked, number)["handler"]
    (cancelled,) = one["cancelled"]
    assert (cancelled["reason"], cancelled["who"]) == ("enough", "ann")
    assert [step["what"] for step in one["steps"]] == ["cancelled", "step note"]
    assert one["steps"][1]["value"] == "1"


def test_coroutines_that_run_beside_each_other_are_listed_each(two: WaitingInstances) -> None:
    two["desk"].impulse("in_part", "a")
    (one,) = listed(two)
    ((outer,), (inner,)) = one["at"]
    assert outer["function"] == "Desk.in_part"
    assert (inner["function"], inner["text"]) == ("Desk.part", "await immortal.event(name)")


# --- cancelled -----------------------------------------------------------------------------------------------------


def test_a_cancelled_handler_ends_and_is_no_failure(two: WaitingInstances) -> None:
    two["desk"].impulse("plain", "a")
    (one,) = listed(two)
    answer = two.cancel("desk", one["id"], "no more")
    assert (answer["done"], answer["text"]) == (True, "Desk.plain was cancelled, and has ended")
    assert answer["record"] > one["record"]
    assert listed(two) == []
    assert log(two) == []
    assert two["desk"].driven.machine.view.letters == []
    two.crash("desk")
    assert (listed(two), log(two)) == ([], [])


@pytest.mark.parametrize("checkpoints", [False, True])
def test_what_it_does_about_it_is_durable(two: WaitingInstances, checkpoints: bool) -> None:
    two["desk"].impulse("cleans_up", "a")
    (one,) = listed(two)

    def crash() -> None:
        if checkpoints:
            two["desk"].checkpoint()
        two.crash("desk")

    crash()
    answer = two.cancel("desk", one["id"])
    assert "was cancelled, and waits for timer" in answer["text"]
    crash()
    (cleaning,) = listed(two)
    assert cleaning["cancelled"][0]["who"] == "ann"
    assert [wait["kind"] for wait in cleaning["waits"]] == ["timer"]
    two["clerk"].instances.stop("clerk")
    two.pass_time(11)
    crash()
    assert log(two) == []
    two.start("clerk", Clerk)
    two.settle()
    assert log(two, "clerk") == ["a is over"]
    assert log(two) == ["a cleaned up, 1 True"]
    crash()
    assert log(two) == ["a cleaned up, 1 True"]
    assert listed(two) == []


def test_one_that_has_ended_says_so(two: WaitingInstances) -> None:
    two["desk"].impulse("plain", "a")
    (one,) = listed(two)
    assert signal(two, "desk", one["id"], "a", 5)["done"]
    answer = two.cancel("desk", one["id"])
    assert (answer["done"], answer["text"]) == (
        False,
        f"no handler {one['id']} waits: it has ended, or there never was one",
    )
    assert log(two) == ["a went on"]


def test_an_order_that_meets_its_end_in_the_same_record(two: WaitingInstances) -> None:
    """Both are in the log before the app sees one of them: the first counts."""
    two["desk"].impulse("plain", "a")
    (one,) = listed(two)
    driven = two["desk"].driven
    driven.auto = False
    raw = msgspec.Raw(msgspec.msgpack.encode(5))
    driven.handle(
        ev.HandlerOrdered(Order("signal", one["id"], "a", "ann", raw), "signal"),
        ev.HandlerOrdered(Order("cancel", one["id"], "", "bob"), "cancel"),
    )
    driven.auto = True
    driven.disk_all()
    two.settle()
    assert [two.answers[token]["done"] for token in ("signal", "cancel")] == [True, False]
    assert log(two) == ["a went on"]


def test_one_that_refuses_is_shown_as_such(two: WaitingInstances) -> None:
    two["desk"].impulse("refuses", "a")
    (one,) = listed(two)
    for times in (1, 2):
        answer = two.cancel("desk", one["id"], f"the {times}.")
        assert answer["text"] == "Desk.refuses was cancelled, and waits for event a"
        two.crash("desk")
        (still,) = listed(two)
        assert [each["reason"] for each in still["cancelled"]] == ["the 1.", "the 2."][:times]
    two.cancel("desk", one["id"])
    assert log(two) == ["a does not care"] * 3 + ["a ends"]


def test_the_caller_is_told(two: WaitingInstances) -> None:
    two["desk"].impulse("asks", "a")
    (one,) = listed(two, "clerk")
    two.crash("desk")
    answer = two.cancel("clerk", one["id"], "no stock")
    where = f"clerk record {answer['record']}:{answer['message']}"
    assert log(two) == [f"CallCancelled no stock, Clerk.slow was cancelled ({where}): no stock"]
    assert log(two, "clerk") == ["a was cancelled: no stock"]
    two.crash("clerk", "desk")
    assert len(log(two)) == 1


def test_what_a_cancelled_handler_raises_in_its_place_is_a_failure(two: WaitingInstances) -> None:
    two.fails_alone = True
    two.crash("desk")
    two["desk"].impulse("turns", "a")
    (one,) = listed(two)
    assert two.cancel("desk", one["id"], "so")["text"] == "Desk.turns was cancelled, and has ended"
    ((sequence_id, *_),) = two["desk"].driven.machine.view.letters
    letter = two["desk"].driven.store.letter(two["desk"].driven.machine.view.letters[0])
    assert letter is not None
    assert (letter.verdict.type_name, letter.verdict.text) == ("ValueError", "turned: so")
    assert sequence_id > one["record"]


def test_a_step_of_the_cleaning_up_that_fails_is_undone(two: WaitingInstances) -> None:
    """The app goes back to before the cancellation, and obeys it once more."""
    two.fails_alone = True
    two.crash("desk")
    two["desk"].impulse("breaks_down", "a")
    (one,) = listed(two)
    answer = two.cancel("desk", one["id"], "so")
    assert answer["text"] == "Desk.breaks_down was cancelled, and waits for event more"
    assert log(two) == ["a: ValueError"]
    (cleaning,) = listed(two)
    assert len(cleaning["cancelled"]) == 1
    two.crash("desk")
    assert listed(two) == [cleaning]
    assert log(two) == ["a: ValueError"]


def test_of_two_calls_with_one_number_the_older_is_cancelled_first(two: WaitingInstances) -> None:
    """A caller chooses its numbers."""
    clerk = two["clerk"].dispatcher
    slow = clerk.definition.handlers["slow"]
    for text in ("a", "b", "c"):
        clerk.tasks.start(slow, (text,), "desk", 7)
    clerk.tasks.start(slow, ("d",), "desk", 8)
    saved = clerk.tasks.save()
    assert saved is not None
    for text in "abc":
        clerk.tasks.cancel_call("desk", 99, 7, "so")
        assert log(two, "clerk")[-1].startswith(f"{text} was cancelled")
    clerk.tasks.cancel_call("desk", 99, 7, "so")
    assert [task.call_number for task in clerk.tasks.all_waiting] == [8]
    clerk.tasks.restore(saved)
    clerk.tasks.cancel_call("desk", 99, 7, "so")
    assert [task.decoded_arguments() for task in clerk.tasks.all_waiting] == [("b",), ("c",), ("d",)]


def test_the_reason_of_a_caller_is_shortened(two: WaitingInstances) -> None:
    two["desk"].impulse("asks", "a")
    (one,) = listed(two, "clerk")
    two["clerk"].dispatcher.tasks.cancel_call("desk", 99, one["call_number"], "x" * 100_000)
    (noted,) = log(two, "clerk")
    assert noted == f"a was cancelled: {'x' * REASON_CHARACTERS_MAX}"


def test_coroutines_of_a_cancelled_handler_are_given_up(two: WaitingInstances) -> None:
    two["desk"].impulse("in_part", "a")
    (one,) = listed(two)
    assert two.cancel("desk", one["id"])["text"] == "Desk.in_part was cancelled, and has ended"
    two.crash("desk")
    assert log(two) == ["the part of a is given up"]


def test_a_coroutine_that_is_given_up_may_wait_as_it_cleans_up(two: WaitingInstances) -> None:
    two["desk"].impulse("stubborn", "a")
    (one,) = listed(two)
    assert "waits for timer" in two.cancel("desk", one["id"])["text"]
    two.crash("desk")
    two.pass_time(3600)
    assert listed(two) == []


def test_an_effect_is_cancelled_with_its_handler(two: WaitingInstances, effects: EffectsByHand) -> None:
    two["desk"].impulse("fetches", "http://a")
    (request,) = effects.waiting
    (one,) = listed(two)
    two.cancel("desk", one["id"])
    assert effects.cancelled == [request]
    assert effects.waiting == []


def test_a_caller_cancels_its_own_call_and_no_other(two: WaitingInstances) -> None:
    two["desk"].impulse("asks", "a")
    (one,) = listed(two, "clerk")
    tasks = two["clerk"].dispatcher.tasks
    for caller, number in (("other", one["call_number"]), ("desk", one["call_number"] + 1)):
        tasks.cancel_call(caller, 1, number, "")
    assert listed(two, "clerk") == [one]
    two["clerk"].checkpoint()
    two.crash("clerk")
    tasks = two["clerk"].dispatcher.tasks
    assert tasks._by_call.keys() == {("desk", one["call_number"])}, "it is not found any more"


# --- signals -----------------------------------------------------------------------------------------------------


def test_a_signal_goes_to_the_handler_that_it_names(two: WaitingInstances) -> None:
    two["desk"].impulse("cleans_up", "x")
    two["desk"].impulse("plain", "x")
    first, second = listed(two)
    answer = signal(two, "desk", second["id"], "x", 5)
    assert answer["text"] == "Desk.plain has the event 'x', and has ended"
    assert log(two) == ["x went on"]
    assert [one["id"] for one in listed(two)] == [first["id"]]
    two.crash("desk")
    assert log(two) == ["x went on"]


def test_a_signal_that_does_not_fit_changes_nothing(two: WaitingInstances) -> None:
    two["desk"].impulse("plain", "x")
    (one,) = listed(two)
    answer = signal(two, "desk", one["id"], "x", "text")
    assert (answer["done"], answer["text"]) == (
        False,
        "the value is not what Desk.plain waits for: Expected `int`, got `str`",
    )
    answer = signal(two, "desk", one["id"], "y", 5)
    assert answer["text"] == "Desk.plain does not wait for the event 'y' (its events: 'x')"
    assert listed(two) == [one]


def test_an_order_of_a_later_version_is_refused(two: WaitingInstances) -> None:
    two["desk"].impulse("plain", "x")
    (one,) = listed(two)
    answer = two.ask("desk", ev.HandlerOrdered, Order("freeze", one["id"], ""))
    assert answer["text"] == "'freeze' is no order that this app knows: its SDK is older than the coordinator"


# --- exceptions -----------------------------------------------------------------------------------------------------


def test_the_exceptions_that_people_see() -> None:
    assert issubclass(CallCancelled, CalleeFailed)
    assert not issubclass(Cancelled, Exception), "'except Exception' would stop it"
