"""A query that is not logged has its time: what it does can be given up, as nothing depends on it.

It is ended by an exception wherever it is in its Python code. One that is in code of another kind (a sleep, a lock)
can't be reached so: some time later the process ends, and the next one is recovered from the log.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Callable
from typing import Any

from immortal.appsdk.errors import QueryTooLong

LIMIT_S = 30.0  # of one query: as long the handlers, and whoever waits for them, stand still
GRACE_S = 10.0  # then, until the process ends

_raise_in: Any = ctypes.pythonapi.PyThreadState_SetAsyncExc


class QueryLimit:
    """:meth:`run` is for the thread of the handlers, :meth:`look` for another one."""

    def __init__(self, limit_s: float = LIMIT_S, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._limit_s = limit_s
        self._clock_s = clock_s
        self._lock = threading.Lock()  # of what follows
        self._since_s: float | None = None  # when the query that runs began
        self._thread_id = 0
        self._told = False  # it was told to end, and may not have heard it yet

    def run(self, query: Callable[[], Any]) -> Any:
        """What the query returns. Raises QueryTooLong, and whatever it raises."""
        self._thread_id = threading.get_ident()
        self._told = False
        self._since_s = self._clock_s()
        try:
            try:
                return query()
            finally:
                self._end()
        except QueryTooLong:
            self._end()  # it may have come in the first one; it comes once
            raise QueryTooLong(
                f"it has kept the handlers waiting for {self._limit_s:g} s, as long as a query may that is not logged: "
                f"let it do less, or call it without .query"
            ) from None

    def _end(self) -> None:
        with self._lock:
            self._since_s = None
        if self._told:
            # What it has not heard yet it hears here. Taken back (with None) it would leave CPython 3.11 a flag that
            # nothing clears, and whoever debugs or traces that thread then hangs at the next function's beginning.
            with contextlib.suppress(QueryTooLong):
                _raise_in(ctypes.c_ulong(self._thread_id), ctypes.py_object(QueryTooLong))
                for _ in range(2):  # it comes at a jump back
                    pass

    def look(self, *, is_debugged: bool = False) -> bool:
        """Now and then: end what takes too long. True: it does not come back, and the process is to end."""
        with self._lock:
            if self._since_s is None:
                return False
            if is_debugged:
                self._since_s = self._clock_s()
                return False
            for_s = self._clock_s() - self._since_s
            if for_s >= self._limit_s and not self._told:
                self._told = True
                _raise_in(ctypes.c_ulong(self._thread_id), ctypes.py_object(QueryTooLong))
            return for_s >= self._limit_s + GRACE_S
