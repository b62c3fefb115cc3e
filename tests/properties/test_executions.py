"""The list of executions after crashes at any point is what was done, whatever of it had been written."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

import immortal
from immortal import Immortal, impulse, rpc
from tests.helpers.effort import effort
from tests.helpers.listed import Listed
from tests.helpers.memory import in_memory


class Desk(Immortal):
    sums: list[int]

    def __init__(self) -> None:
        self.sums = []

    @impulse(labels=("number",))
    def book(self, number: int) -> None:
        if number % 3 == 0:
            raise ValueError(number)
        self.sums.append(number)

    @rpc
    def note(self, number: int) -> int:
        self.sums.append(number)
        return number

    @impulse(labels=("number",))
    async def serve(self, number: int) -> None:
        immortal.label(parity="odd" if number % 2 else "even")
        await immortal.step(self.note, number)
        if not await immortal.event(f"go {number}", bool):
            raise ValueError(number)
        await immortal.step(self.note, -number)

    @impulse
    def signal(self, number: int, well: bool) -> None:
        immortal.signal(f"go {number}", well)


def rows(instances: Listed) -> dict[tuple[str, str], tuple[str, str]]:
    """(state, parity) by handler and number."""
    found = instances.find("desk")
    return {(one.handler, one.labels["number"]): (one.state, one.labels.get("parity", "")) for one in found}


_moves = st.lists(
    st.one_of(
        st.sampled_from(["book", "serve"]),
        st.tuples(st.sampled_from(["well", "badly", "cancel"]), st.integers(0, 7)),
        st.sampled_from(["crash", "checkpoint"]),
    ),
    max_size=25,
)


@settings(max_examples=effort(15), deadline=None)
@given(moves=_moves)
@example(moves=["serve", "crash", ("well", 0), "book"])
def test_the_list_is_what_was_done(moves: list[Any]) -> None:
    expected: dict[tuple[str, str], tuple[str, str]] = {}
    waiting: list[int] = []
    with tempfile.TemporaryDirectory(dir=in_memory()) as folder:
        instances = Listed(Path(folder), {"desk": Desk})
        try:
            instances.settle()
            for number, move in enumerate(moves, 1):
                if move == "crash":
                    instances.crash("desk")
                    instances.settle()
                elif move == "checkpoint":
                    instances["desk"].checkpoint()
                elif move == "book":
                    instances["desk"].impulse("book", number)
                    expected["Desk.book", str(number)] = ("ended" if number % 3 else "failed", "")
                elif move == "serve":
                    instances["desk"].impulse("serve", number)
                    waiting.append(number)
                    expected["Desk.serve", str(number)] = ("waiting", "odd" if number % 2 else "even")
                elif waiting:
                    how, which = move
                    one = waiting.pop(which % len(waiting))
                    before = expected["Desk.serve", str(one)][1]
                    if how == "cancel":
                        task = next(
                            task
                            for task in instances["desk"].dispatcher.tasks.all_waiting
                            if task.decoded_arguments() == (one,)
                        )
                        instances.cancel("desk", task.number)
                    else:
                        instances["desk"].impulse("signal", one, how == "well")
                    state = {"well": "ended", "badly": "failed", "cancel": "cancelled"}[how]
                    expected["Desk.serve", str(one)] = (state, before)
            if expected:
                assert rows(instances) == expected
                instances.crash("desk")
                instances.settle()
                assert rows(instances) == expected
        finally:
            instances.close()
