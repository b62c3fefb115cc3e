"""The search for what would not run as it is written. Lines with ``#: words`` are to be found, and no others."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.programs import Program


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    return Program(tmp_path, monkeypatch)


WAITING = """
import asyncio
from immortal import every
from datetime import timedelta
from contextlib import suppress

def fetch(url: str) -> bytes:
    return b""

async def both(counter: Counter, text: str) -> int:
    return len(text)

class Other(Immortal):
    @rpc
    def price(self, name: str) -> int:
        return 5

    @rpc
    async def quote(self, name: str) -> int:
        return 5
"""


def test_what_is_not_awaited(program: Program) -> None:
    program.compare(
        WAITING
        + """
async def elsewhere() -> None:
    await pending_elsewhere

class Counter(Immortal):
    other = peer(Other, "other")
    total: int

    @rpc
    def add(self, number: int) -> int:
        self.add(1)
        self.late.fork()
        self.total += self.add(2)
        return self.total

    @rpc
    def is_open(self) -> bool:
        return True

    @rpc
    async def late(self) -> int:
        immortal.sleep(timedelta(1))  #: Counter.late does not await immortal.sleep(...), which so never begins: write
        immortal.at(immortal.now())  #: immortal.at(...)
        immortal.event("x", bool)  #: immortal.event(...)
        immortal.step(self.add, 1)  #: immortal.step(...), which so never begins: write 'await'
        immortal.step(self.add, 1)  #: immortal.step(...)
        self.add(1)  #: self.add(...), which so never begins: write await immortal.step(self.add, ...)
        self.late()  #: self.late(...), which so never begins: write 'await' in front of it, or .fork(...) if
        self.other.price("x")  #: self.other.price(...)
        other = self.other
        other.quote("x")  #: other.quote(...)
        asyncio.sleep(1)  #: asyncio.sleep(...)
        asyncio.gather(immortal.step(self.add, 1), self.other.quote("x"))
        immortal.race(immortal.step(self.add, 1), immortal.sleep(timedelta(1)))  #: immortal.race(...)
        immortal.effect(fetch, "x")  #: immortal.effect(...)
        careful = immortal.effect.options(key="x")
        careful(fetch, "x")  #: careful(...)
        both(self, "x")  #: both(...)
        self.helped()  #: self.helped(...)
        self.plain()
        unread = immortal.step(self.add, 1)  #: immortal.step(...)
        if immortal.step(self.is_open):  #: immortal.step(...)
            pass
        while not immortal.step(self.is_open):  #: immortal.step(...)
            pass
        count = 5 if immortal.step(self.is_open) else 6  #: immortal.step(...)
        count += immortal.step(self.add, 1)  #: immortal.step(...)
        count = 1 + immortal.step(self.add, count)  #: immortal.step(...)
        print(f"{immortal.step(self.add, 1)}", immortal.step(self.add, 1) > 5)  #: immortal.step(...)
        for number in self.other.price("x"): pass  #: self.other.price(...)
        self.other.price("x")["a"], immortal.race(both).index  #: immortal.race(...) #: self.other.price(...)
        return count

    async def helped(self) -> None:
        immortal.step(self.add, 1)  #: Counter.helped does not await immortal.step(...)

    def plain(self) -> Any:
        self.add(1)  #: Counter.plain does not await self.add(...)
        return self.add(1)

    @rpc
    async def right(self) -> int:
        global pending_elsewhere  #: changes pending_elsewhere, a variable of the module
        pending_elsewhere = immortal.step(self.add, 1)
        await elsewhere()
        await immortal.sleep(timedelta(1))
        pending = immortal.step(self.add, 1)
        pair = asyncio.gather(pending, self.other.price("x"))
        waits = [immortal.step(self.add, number) for number in range(5)]
        waits.append(self.late())
        await asyncio.gather(*waits, both(self, "x"), *(immortal.effect(fetch, "x") for _ in range(2)))
        self.add.fork(1), self.late.fork(), self.other.price.fork("x"), immortal.signal("x", 5)
        if await immortal.step(self.is_open) and (await immortal.step(self.add, 1)) > 5:
            return await self.plain() + await (immortal.step(self.add, 1) if pair else immortal.step(self.add, 2))
        return immortal.continue_as()
"""
    )


def test_the_state_in_async_handlers(program: Program) -> None:
    program.compare(
        WAITING
        + """
class Base(Immortal):
    total: int

    @rpc
    async def of_base(self) -> None:
        self.total = 5  #: Base.of_base sets self.total in an async handler

class Counter(Base):
    other = peer(Other, "other")
    words: dict[str, int]
    cache: Transient[set[str]]
    LIMIT = 5

    @property
    def count(self) -> int:
        return self.total

    @rpc
    def add(self, number: int) -> int:
        self.total += number
        self.words["x"] = self.of_def()
        return self.total

    def of_def(self) -> int:
        return self.total

    def of_both(self) -> int:
        self.total = 5  #: Counter.of_both sets self.total
        return self.total

    @rpc
    def uses(self) -> int:
        return self.of_both()

    def close(self) -> None:  # no handler: as a step it has the app itself
        self.total = 0

    def reset(self) -> None:
        self.total = 0  #: Counter.reset sets self.total in an async handler

    @rpc
    async def late(self, counter: Counter) -> int:
        print(self.total)
        await immortal.step(self.close)
        self.reset()
        self.total += 1  #: Counter.late sets self.total in an async handler, which is refused there, as others
        self.total: int = 5  #: sets self.total
        self.words["x"] = 5  #: changes a copy of self.words in an async handler, so the state stays as it is
        del self.words["x"]  #: changes a copy of self.words
        del self.total  #: move this line into a function, or a 'def' handler, and await immortal.step(
        self.unheard_of = 5  #: sets self.unheard_of
        def inner() -> int:
            self.total = 5  #: sets self.total
            return self.total
        def changes() -> None:
            self.total += 1
            self.words["x"] = self.total
        await immortal.step(changes)
        await immortal.step(lambda: self.words.update(x=1))
        immortal.step(fetch, "x")  #: Counter.late does not await immortal.step(...)
        await self.other.price(self.LIMIT)
        await asyncio.gather(immortal.step(self.add, 1), super().of_base())
        return self.of_both() + self.count + counter.total + immortal.now_ns()

    @every("5s")
    async def tick(self) -> None:
        self.total = 5  # immortal: deterministic
        await immortal.step(self.add, immortal.random.randint(1, self.LIMIT))
"""
    )


def test_a_step_that_changes_variables_of_its_handler(program: Program) -> None:
    program.compare(
        WAITING
        + """
class Counter(Immortal):
    other = peer(Other, "other")
    totals: dict[str, list[int]]
    total: int

    @rpc
    async def late(self, given: list[int], others: dict[str, int]) -> int:
        count, found = 0, {}
        me = self
        def changes() -> list[int]:
            nonlocal count  #: Counter.late changes count of its handler in a step, which no recovery runs again
            count += 1
            found["x"] = self.total  #: changes found of its handler in a step
            others["x"] += 5  #: changes others of its handler
            own = [1]
            own.append(2)
            of_state = self.totals["x"]
            of_state.clear()
            self.totals["x"].extend(given)
            me.total += 1
            return own
        await immortal.step(changes)
        await immortal.step(lambda: given.append(self.total))  #: changes given of its handler
        await immortal.step(lambda: self.totals.update(x=given))
        await immortal.step(lambda: found.pop("x"))  # immortal: deterministic
        given.append(5)
        return len(await immortal.step(lambda given: given.copy(), given))

    @rpc
    def plain(self, given: list[int]) -> int:
        def changes() -> None:
            given.append(self.total)
        changes()
        return len(given)
"""
    )


def test_variables_of_the_module_or_class(program: Program) -> None:
    program.compare(
        """
prices: dict[str, int] = {}
seen: set[str] = set()
LIMITS = (1, 2)
count = 0

def note(name: str) -> None:
    seen.add(name)  #: note changes seen, a variable of the module, whose first value comes back in a recovery

def load(name: str) -> bytes:
    prices.clear()
    return b""

class Counter(Immortal):
    names = []
    cache: Transient[list[str]] = []
    notes: list[str] = []
    total: int

    def keep(self, name: str) -> None:
        self.names.append(name)  #: Counter.keep changes self.names, a variable of the class, whose first value
        self.notes.append(name)
        self.cache.append(name)

    @rpc
    def add(self, name: str) -> int:
        self.keep(name)
        global count  #: Counter.add changes count
        count += 1
        note(name)
        prices[name] = 5  #: keep it in an attribute of the class
        prices.setdefault(name, 5)  # immortal: deterministic
        return prices.get(name, LIMITS[0])

    @rpc
    async def late(self, seen: set[str]) -> int:
        prices = {}
        prices["x"] = 5
        seen.add("x")
        await immortal.effect(load, "x")
        return len(prices)

    @on_primary
    def feed(self, impulses: Impulses) -> None:
        seen.clear()
"""
    )


def test_what_is_returned(program: Program) -> None:
    program.compare(
        """
        import sys
        from dataclasses import dataclass
        from datetime import datetime
        from enum import Enum
        from typing import Literal

        class Color(Enum):
            RED = "red"

        @dataclass
        class Item:
            name: str

        class Counter(Immortal):
            words: dict[str, int]

            @rpc
            def number(self, line: str) -> int:
                if line:
                    return  #: Counter.number returns nothing where '-> int' is declared: a caller
                if self.words:
                    return None  #: returns None where '-> int'
                if len(line) > 5:
                    return f"{line}"  #: returns f'{line}' where
                def inner() -> str:
                    return "not its own"
                list(map(lambda x: "x", line))
                return "5"  #: returns '5' where '-> int' is declared

            @rpc
            def nothing(self) -> None:
                if self.words:
                    return 5  #: returns 5 where '-> None' is declared
                if len(self.words) > 7:
                    return [word for word in self.words]  #: returns a list where '-> None'
                return self.words.clear()

            @rpc
            def none(self) -> int:
                self.words["x"] = 5  #: Counter.none ends without a 'return' where '-> int' is declared

            @rpc
            def forks(self) -> int:
                if self.words:  #: ends without a 'return'
                    self.none.fork()

            @rpc
            async def late(self) -> list[int]:
                if await immortal.step(self.number, ""):
                    return {"a": 5}  #: returns {'a': 5} where '-> list[int]'
                return [1, "b"]  #: returns [1, 'b'] where

            @impulse
            def color(self) -> Color:
                return "blue"  #: returns 'blue' where '-> Color'
        """.replace("returns f'{line}' where", "returns a str where")
    )


def test_what_may_be_returned(program: Program) -> None:
    program.compare(
        """
        import sys
        from dataclasses import dataclass
        from datetime import datetime
        from enum import Enum
        from typing import Literal, NoReturn
        import functools

        class Color(Enum):
            RED = "red"

        @dataclass
        class Item:
            name: str

        class Counter(Immortal):
            words: dict[str, int]

            @rpc
            def color(self, n: int) -> Color:
                return "red" if n else Color.RED

            @rpc
            def red(self) -> Color:
                return "red"

            @rpc
            def item(self) -> Item:
                return {"name": "x"}

            @rpc
            def moment(self, day: int) -> datetime:
                return f"2030-01-{day}T00:00:00"

            @rpc
            def half(self) -> float:
                return 5

            @rpc
            def pairs(self, n: int) -> tuple[int, int]:
                return [n, n]

            @rpc
            def maybe(self) -> int | None:
                if self.words:
                    return
                return None

            @rpc
            def anything(self) -> Any:
                self.words["x"] = 5

            @rpc
            def literal(self) -> Literal["a", "b"]:
                return "a"

            @rpc
            def stub(self) -> int: ...

            @rpc
            def documented(self) -> int:
                "It is to be written."

            @rpc
            def to_do(self) -> int:
                raise NotImplementedError

            @rpc
            def leaves(self) -> int:
                sys.exit(5)

            @rpc
            def raises(self) -> int:
                if self.words:
                    raise ValueError("x")
                self.words["x"] = 5

            @rpc
            def loops(self) -> int:
                while True:
                    if self.words:
                        return 5

            @rpc
            def nothing(self) -> None:
                return self.words.clear()

            @rpc
            def known(self) -> int:
                return "x"  # immortal: deterministic
        """
    )


def test_what_swallows_the_sdks_own_exceptions(program: Program) -> None:
    program.compare(
        WAITING
        + """
def helper(text: str) -> int:
    try:
        return int(text)
    except:  #: helper swallows every exception ('except:'): write 'except Exception' or end with 'raise'
        return 0

class Counter(Immortal):
    @rpc
    def add(self, text: str) -> int:
        try:
            return helper(text)
        except (ValueError, BaseException) as error:  #: every exception ('except (ValueError, BaseException):')
            def inner() -> None:
                raise KeyError
            return 5

    @rpc
    async def late(self) -> int:
        try:
            await immortal.step(self.add, "x")
        except BaseException:  #: Counter.late swallows every exception ('except BaseException:')
            pass
        with suppress(KeyError, BaseException):  #: swallows every exception ('suppress(KeyError, BaseException)')
            await immortal.step(self.add, "x")
        try:
            await immortal.step(self.add, "x")
        finally:
            return 5  #: swallows every exception (a 'return' in a 'finally')

    @rpc
    async def right(self) -> int:
        try:
            await immortal.step(self.add, "x")
        except Exception:
            pass
        try:
            await immortal.step(self.add, "x")
        except BaseException:
            self.add.fork("gone")
            raise
        try:
            await immortal.step(self.add, "x")
        except BaseException as error:
            if isinstance(error, ValueError):
                raise ValueError("y") from None
            raise
        finally:
            def inner() -> int:
                return 5
        try:
            await immortal.step(self.add, "x")
        except:  # immortal: deterministic
            pass
        with suppress(ValueError):
            await immortal.step(self.add, "x")
        return 5
"""
    )
