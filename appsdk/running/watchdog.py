"""A thread that sees when a handler does not come back: it tells the coordinator, and where there is a limit, or the
coordinator has left, it ends the process, as a crash would.

Handlers pay nothing for it: once in a while it looks which message is being handled. Time in a debugger does not count.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import msgspec

from immortal.appsdk.errors import EXIT_FAILED, EXIT_RECOVER
from immortal.appsdk.running.debugger import in_debugger
from immortal.appsdk.running.query_limit import QueryLimit
from immortal.protocol.messages import MessageType, encode_message
from immortal.protocol.verdicts import Handling, encode_handling

LOOK_INTERVAL_S = 0.5
TOLD_AFTER_S = (1.0, 10.0)  # then the coordinator hears of it, and from then on each TOLD_EACH_S
TOLD_EACH_S = 30.0
LEFT_AFTER_S = 1.0  # a handler that goes on for so long behind the end of the connection is not waited for
_COME_BACK = Handling(-1, for_s=1.0)


class Watchdog:
    """``now_handling``: what is being handled; None: nothing. ``say``: sends a message beside the handler; False where
    that is not possible now. ``is_left``: the coordinator has ended the connection. ``end``: of the process.
    ``is_debugged``: somebody looks at the handler in a debugger; by default at those of the thread that makes this."""

    def __init__(
        self,
        now_handling: Callable[[], Handling | None],
        say: Callable[[bytes], bool],
        limit: timedelta | None,
        warn: Callable[[str], None],
        is_left: Callable[[], bool] = lambda: False,
        end: Callable[[int], object] = os._exit,
        clock_s: Callable[[], float] = time.monotonic,
        is_debugged: Callable[[], bool] | None = None,
        query_limit: QueryLimit | None = None,
    ) -> None:
        self._now_handling = now_handling
        self._say = say
        self._limit_s = None if limit is None else limit.total_seconds()
        self._warn = warn
        self._is_left = is_left
        self._end = end
        self._clock_s = clock_s
        handlers = threading.get_ident()
        self._is_debugged = is_debugged or (lambda: in_debugger(handlers))
        self._query_limit = query_limit
        self._looked_s = clock_s()
        self._handling: Handling | None = None
        self._since_s = 0.0
        self._tell_at_s = 0.0
        self._left_at_s: float | None = None  # when the connection was first seen ended, during this handler
        self._told: Handling | None = None  # what the coordinator believes that takes long
        self._ended = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._run, name="watchdog", daemon=True).start()

    def stop(self) -> None:
        self._ended.set()
        if self._limit_s is not None:
            faulthandler.cancel_dump_traceback_later()

    def _run(self) -> None:
        interval_s = LOOK_INTERVAL_S if self._limit_s is None else min(LOOK_INTERVAL_S, self._limit_s / 4)
        while not self._ended.wait(interval_s):
            self.look()
            if self._limit_s is not None and not self._ended.is_set():
                # A handler that holds the interpreter lets no thread look: this one needs none of it.
                faulthandler.dump_traceback_later(2 * self._limit_s + 1, exit=True)

    def look(self) -> None:
        """Once: tell, or end the process, where it is time for that."""
        self._look_at_query()
        handling, now_s = self._now_handling(), self._clock_s()
        since_look_s, self._looked_s = now_s - self._looked_s, now_s
        if self._told is not None and handling != self._told and self._say(encode_handling(_COME_BACK)):
            self._told = None
        if handling is None or handling != self._handling:
            self._handling, self._since_s, self._tell_at_s = handling, now_s, now_s + TOLD_AFTER_S[0]
            self._left_at_s = None
            return
        if self._is_debugged():
            self._since_s += since_look_s
            self._tell_at_s += since_look_s
        for_s = now_s - self._since_s
        if now_s >= self._tell_at_s and self._say(encode_handling(msgspec.structs.replace(handling, for_s=for_s))):
            following_s = next((after_s for after_s in TOLD_AFTER_S if after_s > for_s), for_s + TOLD_EACH_S)
            self._tell_at_s = self._since_s + following_s
            self._told = handling
        if self._left_at_s is None and self._is_left():  # who would see that is in the handler
            self._left_at_s = now_s
        why = ""
        if self._limit_s is not None and for_s >= self._limit_s:
            why = f"its limit is {self._limit_s:g} s"
        elif self._left_at_s is not None and now_s - self._left_at_s >= LEFT_AFTER_S:
            why = "and the coordinator has ended the connection"
        if why and self._now_handling() == handling:  # it may have come back just now
            self._warn(
                f"the handler of message {handling.message_index} of record {handling.sequence_id} has not come back "
                f"for {for_s:.1f} s, {why}: the process ends"
            )
            faulthandler.dump_traceback(file=sys.__stderr__ or sys.stderr, all_threads=True)
            self._end(EXIT_FAILED)

    def _look_at_query(self) -> None:
        """One that is not logged and does not come back is ended with the process, once that is said: no message of the
        log is suspected of it. An embedded app can't say it, and its process is not its own to end."""
        limit = self._query_limit
        if limit is None or not limit.look(is_debugged=self._is_debugged()):
            return
        text = "a query that is not logged does not come back: the app is recovered from its log, without that"
        if not self._say(encode_message(MessageType.LEAVING, text.encode())):
            return
        self._warn(text)
        faulthandler.dump_traceback(file=sys.__stderr__ or sys.stderr, all_threads=True)
        self._end(EXIT_RECOVER)
