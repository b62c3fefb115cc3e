"""The service of a fleet: it calls its neighbours, and checks that each of them calls in order."""

from __future__ import annotations

import os
from types import new_class
from typing import Any

from immortal import Immortal, Impulses, impulse, on_primary, peer, rpc

NAME_VARIABLE = "IMMORTAL_BENCH_NAME"
NEIGHBOURS_VARIABLE = "IMMORTAL_BENCH_NEIGHBOURS"  # names, with commas between them
CALLS_VARIABLE = "IMMORTAL_BENCH_CALLS"  # for each of them
NEIGHBOURS = [name for name in os.environ.get(NEIGHBOURS_VARIABLE, "").split(",") if name]


class _Member(Immortal):
    begun: bool
    taken: dict[str, int]

    def __init__(self) -> None:
        self.begun = False
        self.taken = {}

    @impulse(id=1)
    def begin(self, name: str, calls: int) -> None:
        if self.begun:
            return  # the hook runs at each start
        self.begun = True
        for number in range(1, calls + 1):
            for index in range(len(NEIGHBOURS)):
                getattr(self, f"neighbour{index}").take.fork(name, number)

    @rpc(id=2)
    def take(self, sender: str, number: int) -> None:
        before = self.taken.get(sender, 0)
        if number != before + 1:
            raise ValueError(f"call {number} of {sender} came behind its call {before}")
        self.taken[sender] = number

    @on_primary
    def drive(self, impulses: Impulses) -> None:
        impulses.begin(os.environ[NAME_VARIABLE], int(os.environ[CALLS_VARIABLE]))


def _with_neighbours(namespace: dict[str, Any]) -> None:
    namespace["__module__"] = __name__
    for index, name in enumerate(NEIGHBOURS):
        namespace[f"neighbour{index}"] = peer(lambda: Member, name)


Member: Any = new_class("Member", (_Member,), {}, _with_neighbours)
