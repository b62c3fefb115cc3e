"""Time limits of handlers, queries and the encoding of the state; and notes of the times at which handlers ran.

The watchdog tells the coordinator which handler takes long, or ends the process, as a crash would, if the coordinator
has left. Handlers pay nothing for it: it checks at intervals which message is being handled.

The times at which handlers begin and return are noted for traces if the instance's settings ask for it, but not in
replays: what they execute was executed before. No replay depends on any of this.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from immortal.appsdk.calls.context import Context
from immortal.appsdk.calls.user_code import in_debugger
from immortal.appsdk.dispatch.delivery import Delivery, Entry
from immortal.appsdk.errors import EXIT_FAILED, EXIT_RECOVER, QueryTooLong, StateError
from immortal.appsdk.handlers.definition import Definition
from immortal.protocol.messages import MessageType, encode_message
from immortal.protocol.timings import APP, BackgroundWriter, PlainRow, SegmentWriter, TimingKind
from immortal.protocol.verdicts import Handling, encode_handling

CHECK_INTERVAL_S = 0.5
REPORT_AFTER_S = (1.0, 10.0)  # then the coordinator is told, and after that each REPORT_INTERVAL_S
REPORT_INTERVAL_S = 30.0
DISCONNECT_GRACE_S = 1.0  # a handler that runs for so long after the end of the connection is not waited for
_RETURNED = Handling(-1, for_s=1.0)


class Watchdog:
    """Watchdog of handlers that take long. ``current_handling``: returns what is being handled; None: nothing.

    ``send``: sends a message beside the handler; False if that is not possible now. ``is_disconnected``: returns True
    if the coordinator has ended the connection. ``end``: ends the process. ``is_debugged``: returns True while the
    handler is debugged; by default in this thread."""

    def __init__(
        self,
        current_handling: Callable[[], Handling | None],
        send: Callable[[bytes], bool],
        limit: timedelta | None,
        warn: Callable[[str], None],
        is_disconnected: Callable[[], bool] = lambda: False,
        end: Callable[[int], object] = os._exit,
        clock_s: Callable[[], float] = time.monotonic,
        is_debugged: Callable[[], bool] | None = None,
        query_limit: QueryLimit | None = None,
    ) -> None:
        self._current_handling = current_handling
        self._send = send
        self._limit_s = None if limit is None else limit.total_seconds()
        self._warn = warn
        self._is_disconnected = is_disconnected
        self._end = end
        self._clock_s = clock_s
        handlers = threading.get_ident()
        self._is_debugged = is_debugged or (lambda: in_debugger(sys._current_frames().get(handlers)))
        self._query_limit = query_limit
        self._checked_s = clock_s()
        self._handling: Handling | None = None
        self._since_s = 0.0
        self._report_at_s = 0.0
        self._disconnected_at_s: float | None = None  # when the connection was first found ended, during this handler
        self._reported: Handling | None = None  # what the coordinator was told takes long
        self._ended = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._run, name="watchdog", daemon=True).start()

    def stop(self) -> None:
        self._ended.set()
        if self._limit_s is not None:
            faulthandler.cancel_dump_traceback_later()

    def _run(self) -> None:
        interval_s = CHECK_INTERVAL_S if self._limit_s is None else min(CHECK_INTERVAL_S, self._limit_s / 4)
        while not self._ended.wait(interval_s):
            self.check()
            if self._limit_s is not None and not self._ended.is_set():
                # A handler can keep the interpreter, so that no thread can check. This timer does not need it.
                faulthandler.dump_traceback_later(2 * self._limit_s + 1, exit=True)

    def check(self) -> None:
        """Check the current handler once: report it, or end the process, if it takes too long."""
        self._check_query()
        handling, now_s = self._current_handling(), self._clock_s()
        since_check_s, self._checked_s = now_s - self._checked_s, now_s
        if self._reported is not None and handling != self._reported and self._send(encode_handling(_RETURNED)):
            self._reported = None
        if handling is None or handling != self._handling:
            self._handling, self._since_s, self._report_at_s = handling, now_s, now_s + REPORT_AFTER_S[0]
            self._disconnected_at_s = None
            return
        if self._is_debugged():
            self._since_s += since_check_s
            self._report_at_s += since_check_s
        for_s = now_s - self._since_s
        if now_s >= self._report_at_s and self._send(encode_handling(msgspec.structs.replace(handling, for_s=for_s))):
            following_s = next((after_s for after_s in REPORT_AFTER_S if after_s > for_s), for_s + REPORT_INTERVAL_S)
            self._report_at_s = self._since_s + following_s
            self._reported = handling
        if self._disconnected_at_s is None and self._is_disconnected():  # the handler's thread is too busy to notice
            self._disconnected_at_s = now_s
        why = ""
        if self._limit_s is not None and for_s >= self._limit_s:
            why = f"its limit is {self._limit_s:g} s"
        elif self._disconnected_at_s is not None and now_s - self._disconnected_at_s >= DISCONNECT_GRACE_S:
            why = "and the coordinator has ended the connection"
        if why and self._current_handling() == handling:  # it can have returned just now
            self._send(encode_handling(msgspec.structs.replace(handling, for_s=for_s)))
            self._warn(
                f"the handler of message {handling.message_index} of record {handling.sequence_id} has not come back "
                f"for {for_s:.1f} s, {why}: the process ends"
            )
            faulthandler.dump_traceback(file=sys.__stderr__ or sys.stderr, all_threads=True)
            self._end(EXIT_FAILED)

    def _check_query(self) -> None:
        """End the process, after a report, if an unlogged query does not return, so that no logged message is blamed.

        An embedded app can't report, and must not end its process."""
        limit = self._query_limit
        if limit is None or not limit.check(is_debugged=self._is_debugged()):
            return
        text = "a query that is not logged does not come back: the app is recovered from its log, without that"
        if not self._send(encode_message(MessageType.LEAVING, text.encode())):
            return
        self._warn(text)
        faulthandler.dump_traceback(file=sys.__stderr__ or sys.stderr, all_threads=True)
        self._end(EXIT_RECOVER)


# Time limit of queries that are not logged: they can be ended, since nothing depends on them.
#
# A query is ended by an exception anywhere in its Python code. In other code (a sleep, a lock) that can't reach it:
# some time later the process ends, and the next one is recovered from the log.


QUERY_LIMIT_S = 30.0  # of one query: for this time the handlers, and their callers, stand still
GRACE_S = 10.0  # after the limit, until the process ends

_raise_in: Any = ctypes.pythonapi.PyThreadState_SetAsyncExc


class QueryLimit:
    """Time limit of queries. The handlers' thread calls :meth:`run`, another one :meth:`check`."""

    def __init__(self, limit_s: float = QUERY_LIMIT_S, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._limit_s = limit_s
        self._clock_s = clock_s
        self._lock = threading.Lock()  # of the attributes below
        self._since_s: float | None = None  # when the running query began
        self._thread_id = 0
        self._is_interrupted = False  # QueryTooLong was raised in it; the exception can still be pending

    def run(self, query: Callable[[], Any]) -> Any:
        """Run a query and return its result. Raises QueryTooLong, and what the query raises."""
        self._thread_id = threading.get_ident()
        self._is_interrupted = False
        self._since_s = self._clock_s()
        try:
            try:
                return query()
            finally:
                self._end()
        except QueryTooLong:
            self._end()  # the exception can have come in the first one; it comes only once
            raise QueryTooLong(
                f"it has kept the handlers waiting for {self._limit_s:g} s, as long as a query may that is not logged: "
                f"let it do less, or call it without .query"
            ) from None

    def _end(self) -> None:
        with self._lock:
            self._since_s = None
        if self._is_interrupted:
            # A pending exception is raised here. If it were withdrawn (with None), CPython 3.11 would keep a flag that
            # nothing clears: a debugger or tracer of that thread then hangs at the start of the next function.
            with contextlib.suppress(QueryTooLong):
                _raise_in(ctypes.c_ulong(self._thread_id), ctypes.py_object(QueryTooLong))
                for _ in range(2):  # it comes at a jump back
                    pass

    def check(self, *, is_debugged: bool = False) -> bool:
        """Interrupt a query that takes too long; called at intervals. Return True if the process must end instead."""
        with self._lock:
            if self._since_s is None:
                return False
            if is_debugged:
                self._since_s = self._clock_s()
                return False
            for_s = self._clock_s() - self._since_s
            if for_s >= self._limit_s and not self._is_interrupted:
                self._is_interrupted = True
                _raise_in(ctypes.c_ulong(self._thread_id), ctypes.py_object(QueryTooLong))
            return for_s >= self._limit_s + GRACE_S


# Time limit of encoding the state: the user's own hooks could wait for ever.
#
# A longer encoding is ended by a signal, which also reaches code that sleeps or waits for a lock. Only the main thread
# has signals, and a SIGALRM handler of the user's stays: in these cases there is no limit.


T = TypeVar("T")

ENCODING_LIMIT_S = 120.0  # 1 GiB is encoded in 3 s
SIGNAL_INTERVAL_S = 1.0  # of further signals, if the code catches the exception and continues


class _TakesTooLong(BaseException):
    pass


def limit_encoding_time(encode: Callable[[], T]) -> T:
    """Run ``encode`` and return its result. Raises StateError if it takes too long, and what it raises."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGALRM) is not signal.SIG_DFL:
        return encode()
    is_over = False

    def ring(number: int, frame: object) -> None:
        if not is_over:
            raise _TakesTooLong

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, ENCODING_LIMIT_S, SIGNAL_INTERVAL_S)
    try:
        return encode()
    except _TakesTooLong:
        is_over = True
        error = StateError(f"to encode the state has not come to its end within {ENCODING_LIMIT_S:g} s")
        error.takes_too_long = True
        raise error from None
    finally:
        is_over = True
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)


_KIND = int(TimingKind.HANDLED)
_Handled = tuple[int, PlainRow]  # by committer ID


class HandlerTimings:
    """Writer of timings in ``folder``, on the monotonic clock. ``warn`` is called if they can't be written."""

    def __init__(
        self,
        folder: Path,
        limit_bytes: int,
        warn: Callable[[str], None],
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.clock_ns = clock_ns
        self._writer = SegmentWriter(folder, APP, limit_bytes, warn)
        self._noting: BackgroundWriter[_Handled] = BackgroundWriter(self._write)
        self._put = self._noting.put
        self._noted = -1, -1  # messages that are undone and executed again were noted before

    def note(self, committer_id: int, place: tuple[int, int], started_ns: int) -> None:
        """Note that the handler of the message at ``place``, its record and index, has ended now."""
        if place > self._noted:
            self._noted = place
            self._put((committer_id, (*place, _KIND, started_ns, self.clock_ns(), 0)))

    def make_delivery(self, definition: Definition, context: Context) -> Delivery:
        return _TimedDelivery(definition, context, self)

    def close(self) -> None:
        """Write the noted times."""
        self._noting.close()
        self._writer.close()

    def _write(self, handled: list[_Handled]) -> None:
        for committer_id, rows in groupby(handled, key=itemgetter(0)):
            self._writer.write(committer_id, (row for _, row in rows))


class _TimedDelivery(Delivery):
    def __init__(self, definition: Definition, context: Context, timings: HandlerTimings) -> None:
        super().__init__(definition, context)
        self._timings = timings
        self._by_front = {front: self._timed(entry) for front, entry in self._by_front.items()}
        self._answers = {kind: self._timed(entry) for kind, entry in self._answers.items()}

    def _timed(self, entry: Entry) -> Entry:
        decode, function, name = entry
        context, queries = self._context, self._context.tasks.queries
        note, clock_ns = self._timings.note, self._timings.clock_ns

        def run(instance: Any, *arguments: Any) -> None:
            if not queries.is_live:
                function(instance, *arguments)
                return
            place = context.sequence_id, context.message_index
            started_ns = clock_ns()
            try:
                function(instance, *arguments)
            finally:
                note(context.committer_id, place, started_ns)

        return decode, run, name
