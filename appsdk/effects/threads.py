"""Threads that take work in order, each piece in a thread of its own as long as none is free.

A thread that is woken up must wait for the interpreter, which whoever runs does not let go for some 0.5 ms. So one is
woken at a time: work that computes, and is done by then, is all done by the thread that runs already. Work that waits
lets the interpreter go at once, to the thread that takes the next piece and wakes one more.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeVar

W = TypeVar("W")


class Threads(Generic[W]):
    """At most ``count`` daemons, which call ``run`` with each piece of work; it raises nothing. They never end."""

    def __init__(self, count: int, run: Callable[[W], None]) -> None:
        self._count = count
        self._run = run
        self._lock = threading.Lock()
        self._work: deque[W] = deque()
        self._idle: list[SimpleQueue[None]] = []  # the bells of those that are, the last one first: it is still warm
        self._made_count = 0
        self._is_called = False  # one is woken or made, and has not looked yet

    def add(self, work: W) -> None:
        """Any thread; returns at once."""
        with self._lock:
            self._work.append(work)
            self._call_one()

    def forget_all(self) -> None:
        """What no thread has begun with."""
        with self._lock:
            self._work.clear()

    def _call_one(self) -> None:
        if self._is_called:
            return  # it calls the next one
        if self._idle:
            self._is_called = True
            self._idle.pop().put(None)
        elif self._made_count < self._count:
            try:
                threading.Thread(target=self._serve, name="effect", daemon=True).start()
            except RuntimeError:  # the system gives no more: those that there are take it when they are done
                if not self._made_count:
                    raise
            else:
                self._made_count += 1
                self._is_called = True

    def _serve(self) -> None:
        bell: SimpleQueue[None] = SimpleQueue()
        is_called = True
        while True:
            with self._lock:
                if is_called:
                    self._is_called = is_called = False
                work = self._work.popleft() if self._work else None
                if work is None:
                    self._idle.append(bell)
                elif self._work:
                    self._call_one()
            if work is None:
                bell.get()
                is_called = True
            else:
                self._run(work)
                del work  # not to be kept until there is more
