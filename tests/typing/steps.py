"""The steps of an async handler, and the answers of a multicast: both checkers know their types. Never run."""

from __future__ import annotations

import asyncio
from typing import assert_type

import immortal
from immortal import Immortal, peer, query, rpc


class Counter(Immortal):
    other = peer(lambda: Counter, "other")
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
        assert_type(await immortal.step(self.count, number), int)
        assert_type(await immortal.step(self.clear), None)
        assert_type(await immortal.step(self.look), int)
        assert_type(await immortal.step(lambda: self.total), int)
        assert_type(await asyncio.gather(immortal.step(self.count, 1), immortal.step(self.count, 2)), tuple[int, int])
        text: str = await immortal.step(self.count, 4)  # mypy: the result is an int  # pyright: "int" is not assignable to "str"
        await immortal.step(self.count, "5")  # mypy: a str for an int  # pyright: "Literal['5']" cannot be assigned
        late: int = immortal.step(self.count, 3)  # mypy: it is not awaited  # pyright: is not assignable to "int"
        await self.count(4)  # mypy: it is a step  # pyright: "int" is not awaitable
        numbers = await immortal.multicast([self.other, type(self)]).count.all(3)
        assert_type(numbers, tuple[int, ...])
        return late + len(text)
