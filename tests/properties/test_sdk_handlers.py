"""Handlers cancelled and signalled at any point, with crashes and checkpoints around it: each order is obeyed once."""

from __future__ import annotations

import asyncio
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

import immortal
from immortal import CallCancelled, Cancelled, Immortal, impulse, peer, rpc
from immortal.coordinator.core import events as ev
from immortal.protocol.system_methods import Order
from tests.helpers.effort import effort
from tests.helpers.memory import in_memory
from tests.helpers.waiting import WaitingInstances

HANDLERS_COUNT = 4


class Worker(Immortal):
    other = peer(lambda: Worker, "two")
    notes: dict[str, list[str]]

    def __init__(self) -> None:
        self.notes = {}

    @rpc
    def note(self, key: str, text: str) -> int:
        self.notes.setdefault(key, []).append(text)
        return len(self.notes[key])

    @impulse
    async def run(self, key: str, kind: int) -> None:
        while True:
            try:
                if kind == 0:
                    await immortal.event(key)
                elif kind == 1:
                    await asyncio.gather(immortal.event(key), self.nap(key))
                elif kind == 2:
                    await self.other.wait(key)
                else:
                    await immortal.race(immortal.sleep(timedelta(days=1)), immortal.event(key))
                await immortal.step(self.note, key, "ended")
                return
            except Cancelled as cancelled:
                await immortal.step(self.note, key, f"cancelled {cancelled}")
                if kind == 3 and str(cancelled) < "2":
                    continue
                await immortal.sleep(timedelta(milliseconds=5))
                await self.other.note(key, "left")
                raise
            except CallCancelled as cancelled:
                await immortal.step(self.note, key, f"callee {cancelled.message}")
                return

    async def nap(self, key: str) -> None:
        await immortal.sleep(timedelta(milliseconds=1))

    @rpc
    async def wait(self, key: str) -> None:
        try:
            await immortal.event(key)
        finally:
            await immortal.step(self.note, key, "let go")


moves = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["crash", "checkpoint"]), st.sampled_from(["one", "two"])),
        st.tuples(st.sampled_from(["cancel", "cancel and crash", "signal", "cancel callee"]), st.integers(0, 9)),
        st.tuples(st.just("time"), st.integers(1, 10)),
    ),
    min_size=5,
    max_size=20,
)


def waiting(both: WaitingInstances, name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = both.ask(name, ev.HandlersAsked, 0)["handlers"]
    return found


@settings(max_examples=effort(15), deadline=None)
@given(kinds=st.lists(st.integers(0, 3), min_size=1, max_size=HANDLERS_COUNT), moves=moves)
def test_each_order_is_obeyed_once(kinds: list[int], moves: list[tuple[str, Any]]) -> None:
    with tempfile.TemporaryDirectory(dir=in_memory()) as folder:
        both = WaitingInstances(Path(folder), {"one": Worker, "two": Worker})
        both["one"].impulses([("run", (str(index), kind)) for index, kind in enumerate(kinds)])
        ordered: dict[str, list[str]] = {str(index): [] for index in range(len(kinds))}  # what is to be noted
        for number, (move, argument) in enumerate(moves):
            if move == "crash":
                both.crash(argument)
            elif move == "checkpoint":
                both[argument].checkpoint()
            elif move == "time":
                both.pass_time(argument / 1000)
            else:
                name = "two" if move == "cancel callee" else "one"
                if not (found := waiting(both, name)):
                    continue
                one = found[argument % len(found)]
                key = one["arguments"].split("'")[1]
                if move == "signal":
                    order = Order("signal", one["id"], key, "ann")
                    done = both.ask(name, ev.HandlerOrdered, order)["done"]
                    assert done == any(wait["kind"] == "event" for wait in one["waits"])
                    continue
                if move == "cancel and crash":
                    driven = both[name].driven
                    driven.handle(ev.HandlerOrdered(Order("cancel", one["id"], str(number % 4), "ann"), object()))
                    both.crash(name)
                else:
                    assert both.cancel(name, one["id"], str(number % 4))["done"]
                if name == "one" and not is_cleaning_up(one):
                    ordered[key].append(f"cancelled {number % 4}")
        both.pass_time(1)
        for one in waiting(both, "one"):
            both.cancel("one", one["id"], "3")
        for one in waiting(both, "two"):
            both.cancel("two", one["id"], "3")
        both.pass_time(1)
        both.crash("one", "two")
        assert waiting(both, "one") == waiting(both, "two") == []
        for key, expected in ordered.items():
            notes = both.app("one").notes.get(key, [])
            assert notes[: len(expected)] == expected
            assert len(notes) <= len(expected) + 1, "something was done twice"
            left = both.app("two").notes.get(key, [])
            assert left.count("left") <= 1
            assert left.count("let go") <= 1
        both.close()


def is_cleaning_up(one: dict[str, Any]) -> bool:
    """It was cancelled and waits for what its cleaning takes: another cancellation ends it there."""
    return bool(one["cancelled"]) and not any(
        wait["kind"] == "event" or wait["for"] == "call two.wait" for wait in one["waits"]
    )
