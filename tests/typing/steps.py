"""An async handler's own ``def`` handlers: ``.step`` is right for both, the short form for mypy's plugin. Never run.

So with ``.all``, of multicasts.
"""

from __future__ import annotations

import asyncio
from typing import assert_type

import immortal
from immortal import Immortal, peer, query, rpc


class Counter(Immortal):
    other = peer(lambda: Counter, "other")
    third = peer(lambda: Counter, "third")
    total: int

    @rpc
    def count(self, number: int) -> int:
        return self.count(number) + 1

    @rpc
    def clear(self) -> None:
        self.total = 0

    @query
    def look(self) -> int:
        return self.total

    @rpc
    async def twice(self, number: int) -> int:
        assert_type(await self.count(number), int)  # pyright: "int" is not awaitable
        await self.clear()  # pyright: "None" is not awaitable
        assert_type(await self.look(), int)  # pyright: "int" is not awaitable
        assert_type(await self.look.step(), int)
        both = await asyncio.gather(self.count(1), self.count(2))  # pyright: "int" is not assignable to "Awaitable[A@gather]"
        assert_type(await self.count.step(number), int)
        assert_type(await self.clear.step(), None)
        assert_type(await asyncio.gather(self.count.step(1), self.count.step(2)), tuple[int, int])
        wrong: str = await self.count.step(4)  # mypy: the result is an int  # pyright: "int" is not assignable to "str"
        await self.count.step("5")  # mypy: a str for an int  # pyright: "Literal['5']" cannot be assigned
        await self.twice.step(5)  # mypy: it is none of a def handler  # pyright: Cannot access attribute "step"
        late: int = self.count(3)  # mypy: it is not awaited
        text: str = await self.count(4)  # mypy: the result is an int  # pyright: "int" is not awaitable
        await self.count("5")  # mypy: a str for an int  # pyright: "int" is not awaitable
        numbers = await immortal.multicast([self.other, type(self)]).count.all(3)
        assert_type(numbers, tuple[int, ...])
        short = await immortal.multicast([self.other, self.third]).count(3)
        assert_type(short, tuple[int, ...])  # pyright: "assert_type" mismatch
        await immortal.multicast([self.other, self.third]).count("3")  # mypy: a str for an int  # pyright: cannot be assigned
        return both[0] + late + len(text + wrong)
