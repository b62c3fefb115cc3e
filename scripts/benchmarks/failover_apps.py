"""Apps for failover.py: an instance that moves, and one that calls it all the time."""

from __future__ import annotations

import os
import time

from immortal import Immortal, peer, rpc, upgrades

PIECE_SIZE_BYTES = 1 << 20


class Keeper(Immortal, formerly=("FormerKeeper",)):
    """Has a state of some size, and counts."""

    count: int
    ballast: list[bytes]

    def __init__(self) -> None:
        self.count = 0
        self.ballast = []

    @rpc
    def grow(self, mib: int) -> None:
        first = len(self.ballast)
        self.ballast += [bytes([number % 251]) * PIECE_SIZE_BYTES for number in range(first, first + mib)]

    @rpc
    def add(self) -> int:
        self.count += 1
        return self.count


@upgrades(Keeper)
class NextKeeper(Immortal):
    """Version 2."""

    count: int
    ballast: list[bytes]

    def __init__(self) -> None:
        self.count = 0
        self.ballast = []

    @classmethod
    def upgrade(cls, old: Keeper) -> NextKeeper:
        new = cls()
        new.count, new.ballast = old.count, old.ballast
        return new

    @rpc
    def add(self) -> int:
        self.count += 1
        return self.count


@upgrades(NextKeeper)
class FormerKeeper(Immortal, version=1):
    """Version 1 again."""

    count: int
    ballast: list[bytes]

    def __init__(self) -> None:
        self.count = 0
        self.ballast = []

    @classmethod
    def upgrade(cls, old: NextKeeper) -> FormerKeeper:
        new = cls()
        new.count, new.ballast = old.count, old.ballast
        return new

    @rpc
    def add(self) -> int:
        self.count += 1
        return self.count


class Asker(Immortal):
    """Calls one after the other, and writes down when each answer came: where ANSWERS says, and not in its state."""

    keeper = peer(Keeper, "keeper")

    @rpc
    async def ask(self) -> None:
        answers = os.open(os.environ["ANSWERS"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        while True:
            await self.keeper.add()
            os.write(answers, b"%d\n" % time.monotonic_ns())
