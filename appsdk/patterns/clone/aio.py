"""As `threaded`, with asyncio. The same thread follows the table; nothing here waits but with ``await``."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar

from immortal.appsdk.patterns.clone.replica import Counts, Told
from immortal.appsdk.patterns.clone.threaded import Changed, Clone, require_ours

V = TypeVar("V")
R = TypeVar("R")


class AsyncChanges(Generic[V]):
    """``async for change in prices.changes():`` See :class:`~immortal.appsdk.patterns.clone.threaded.Changes`."""

    def __init__(self, clone: Clone[V], timeout_s: float | None) -> None:
        self._clone = clone
        self._timeout_s = timeout_s
        self._waiting: deque[Told] = deque()
        self._process_id = os.getpid()
        self._came = asyncio.Event()
        loop = asyncio.get_running_loop()

        def rouse() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._came.set)

        self._rouse: Callable[[], None] = rouse
        clone._listen(self._waiting, rouse)

    def __aiter__(self) -> AsyncIterator[Changed[V]]:
        return self

    async def __anext__(self) -> Changed[V]:
        require_ours(self._process_id)
        while True:
            self._came.clear()
            with self._clone._lock:
                told = self._clone._take(self._waiting)
                is_over = self._clone._is_over
            if told is not None:
                return self._clone._changed(told)
            if is_over:
                raise StopAsyncIteration
            try:
                await asyncio.wait_for(self._came.wait(), self._timeout_s)
            except TimeoutError:
                raise StopAsyncIteration from None

    def close(self) -> None:
        """Nothing more is kept for it."""
        self._clone._forget(self._waiting, self._rouse)


class AsyncClone(Mapping[str, V]):
    """As :class:`~immortal.appsdk.patterns.clone.threaded.Clone`: reading asks nobody, so it is not awaited."""

    def __init__(self, clone: Clone[V]) -> None:
        self._clone = clone

    def __getitem__(self, key: str) -> V:
        return self._clone[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._clone)

    def __len__(self) -> int:
        return len(self._clone)

    def __contains__(self, key: object) -> bool:
        return key in self._clone

    def __repr__(self) -> str:
        return repr(self._clone)

    @property
    def number(self) -> int:
        return self._clone.number

    @property
    def subtrees(self) -> tuple[str, ...]:
        """See Clone."""
        return self._clone.subtrees

    @property
    def counts(self) -> Counts:
        """See Clone."""
        return self._clone.counts

    @property
    def problem(self) -> str:
        """See Clone."""
        return self._clone.problem

    @property
    def endpoint(self) -> str:
        """See Clone."""
        return self._clone.endpoint

    def snapshot(self) -> tuple[int, dict[str, V]]:
        """See Clone."""
        return self._clone.snapshot()

    def changes(self, timeout: float | None = None) -> AsyncChanges[V]:
        """See Clone."""
        return AsyncChanges(self._clone, timeout)

    async def wait(self, number: int, timeout: float | None = None) -> None:
        """See Clone."""
        await asyncio.to_thread(self._clone.wait, number, timeout)

    async def put(self, key: str, value: V, *, ttl: float = 0.0, wait: bool = True) -> int:
        """See Clone."""
        return await _in_thread(lambda: self._clone.put(key, value, ttl=ttl, wait=wait))

    async def delete(self, key: str, *, wait: bool = True) -> int:
        """See Clone."""
        return await _in_thread(lambda: self._clone.delete(key, wait=wait))

    async def update(self, values: Mapping[str, V], *, ttl: float = 0.0, wait: bool = True) -> int:
        """See Clone."""
        return await _in_thread(lambda: self._clone.update(values, ttl=ttl, wait=wait))


async def _in_thread(call: Callable[[], R]) -> R:
    found: Any = await asyncio.to_thread(call)
    return found  # type: ignore[no-any-return]
