"""Random programs of asyncio: in a handler, with a crash at any point, they do what they do on asyncio's own loop."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import immortal
from immortal import Immortal, rpc
from immortal.errors import UsageError
from immortal.testing import Environment, crash_everywhere
from tests.helpers.effort import effort
from tests.helpers.virtual_loop import WaitsForEverError, run_virtually

PROGRAMS_COUNT = effort(120)
BATCH_COUNT = 20
DEPTH_MAX = 4
CRASHES_MAX = 3

Node = tuple[Any, ...]


class OwnError(Exception):
    pass


ERRORS = (OwnError, TimeoutError, asyncio.CancelledError, BaseExceptionGroup)


class Grammar:
    """Draws programs. No two of its timers have one duration, so that no two are due at one moment."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._durations_ms = itertools.count(1)

    def program(self) -> Node:
        return ("block", [self._node(0) for _ in range(self._random.randint(1, 3))])

    def _ms(self) -> float:
        """Return a duration. No sums of some are equal: two timers of one moment wake a handler in two turns."""
        return (
            self._random.choice((10, 100, 1000, 10_000)) * 1009 + next(self._durations_ms) ** 2 + self._random.random()
        )

    def _nodes(self, depth: int, least: int = 1) -> list[Node]:
        return [self._node(depth + 1) for _ in range(self._random.randint(least, 3))]

    def _node(self, depth: int) -> Node:
        leaves = ["sleep", "sleep", "step", "yield", "put", "get", "set", "wait", "fail", "locked sleep", "cancel me"]
        inner = ["gather", "gather errors", "group", "timeout", "wait_for", "shield", "first", "spawn", "finally"]
        kind = self._random.choice(leaves if depth >= DEPTH_MAX else [*leaves, *inner * 2, "try"])
        if kind in ("sleep", "locked sleep"):
            return kind, self._ms()
        if kind in ("timeout", "wait_for"):
            return kind, self._ms(), self._nodes(depth)
        if kind in ("gather", "gather errors", "group", "first"):
            return kind, [("block", self._nodes(depth)) for _ in range(self._random.randint(1, 3))]
        if kind in ("shield", "spawn", "try"):
            return kind, self._nodes(depth)
        if kind == "finally":
            return kind, self._nodes(depth), [("sleep", self._ms()), ("step",)]
        return (kind,)


class Player:
    """Runs one program. ``step``: what notes a text."""

    def __init__(self, step: Callable[[str], Awaitable[int]]) -> None:
        self._step = step
        self._seen: list[str] = []
        self._queue: asyncio.Queue[int] = asyncio.Queue(2)
        self._event = asyncio.Event()
        self._lock = asyncio.Lock()

    async def run(self, program: Node) -> list[str]:
        try:
            async with asyncio.timeout(100_000):
                await self._play(program, "0")
        except ERRORS as error:
            self._seen.append(f"ends with {_named(error)}")
        return self._seen

    async def _block(self, nodes: list[Node], at: str) -> str:
        for index, node in enumerate(nodes):
            try:
                await self._play(node, f"{at}.{index}")
            except ERRORS as error:
                self._seen.append(f"{at}.{index} {node[0]}: {_named(error)}")
                raise
            self._seen.append(f"{at}.{index} {node[0]}")
        return at

    async def _play(self, node: Node, at: str) -> Any:
        kind, *rest = node
        parts = rest[-1] if rest and isinstance(rest[-1], list) else []
        match kind:
            case "block":
                return await self._block(parts, at)
            case "sleep":
                await asyncio.sleep(rest[0] / 1000)
            case "step":
                self._seen.append(f"{at} {await self._step(at)}")
            case "yield":
                await asyncio.sleep(0)
            case "put":
                await self._queue.put(len(self._seen))
            case "get":
                await self._queue.get()
            case "set":
                self._event.set()
            case "wait":
                await self._event.wait()
            case "fail":
                raise OwnError(at)
            case "locked sleep":
                async with self._lock:
                    await asyncio.sleep(rest[0] / 1000)
            case "cancel me":
                current = asyncio.current_task()
                assert current is not None
                current.cancel(at)
                await asyncio.sleep(0)
            case "gather":
                self._seen.append(str(await asyncio.gather(*self._all(parts, at))))
            case "gather errors":
                found = await asyncio.gather(*self._all(parts, at), return_exceptions=True)
                self._seen.append(str([_named(one) if isinstance(one, BaseException) else one for one in found]))
            case "group":
                async with asyncio.TaskGroup() as group:
                    for one in self._all(parts, at):
                        group.create_task(one)
            case "timeout":
                async with asyncio.timeout(rest[0] / 1000):
                    await self._block(parts, at)
            case "wait_for":
                await asyncio.wait_for(self._block(parts, at), rest[0] / 1000)
            case "shield":
                await asyncio.shield(asyncio.create_task(self._block(parts, at)))
            case "first":
                tasks = [asyncio.create_task(one) for one in self._all(parts, at)]
                done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                self._seen.append(str(sorted(map(tasks.index, done))))
                for task in sorted(pending, key=tasks.index):
                    task.cancel()
            case "spawn":
                asyncio.create_task(self._block(parts, at)).add_done_callback(_see)
            case "try":
                try:
                    await self._block(parts, at)
                except (Exception, asyncio.CancelledError) as error:
                    self._seen.append(f"{at} caught {_named(error)}")
            case "finally":
                try:
                    await self._block(parts if len(rest) == 1 else rest[0], at)
                finally:
                    await self._block(rest[1], f"{at}f")
        return None

    def _all(self, nodes: list[Node], at: str) -> list[Any]:
        return [self._play(node, f"{at}.{index}") for index, node in enumerate(nodes)]


def _see(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()


def _named(error: BaseException) -> str:
    if isinstance(error, BaseExceptionGroup):
        return f"{type(error).__name__}[{', '.join(map(_named, error.exceptions))}]"
    return f"{type(error).__name__}({error})"


class Playing(Immortal):
    """``seed`` in place of a program, which is a tree of Python's own objects."""

    noted: list[str]

    def __init__(self) -> None:
        self.noted = []

    @rpc
    def note(self, text: str) -> int:
        self.noted.append(text)
        return len(self.noted)

    @rpc
    async def run(self, seed: int) -> list[str]:
        return await Player(lambda text: immortal.step(self.note, text)).run(Grammar(seed).program())


def alone(seed: int) -> tuple[list[str], list[str]]:
    noted: list[str] = []

    async def note(text: str) -> int:
        noted.append(text)
        return len(noted)

    async def program() -> list[str]:
        return await Player(note).run(Grammar(seed).program())

    return run_virtually(program()), noted


def played(env: Environment, seed: int) -> tuple[list[str], list[str]]:
    with env:
        playing = env.start(Playing, "playing")
        return playing.call(Playing.run, seed), playing.state.noted


@pytest.mark.parametrize("first", range(0, PROGRAMS_COUNT, BATCH_COUNT))
def test_a_handler_does_what_asyncio_does(first: int) -> None:
    for seed in range(first, min(first + BATCH_COUNT, PROGRAMS_COUNT)):
        try:
            expected = alone(seed)
        except WaitsForEverError:  # of what the program has left running
            with pytest.raises(UsageError, match="wait for each other, and for nothing that could come"):
                played(Environment(), seed)
            continue
        assert played(Environment(), seed) == expected, f"program {seed}"
        if seed % 5 == 0:
            for env in crash_everywhere(runs_max=CRASHES_MAX):
                assert played(env, seed) == expected, f"program {seed}"
