"""Times at which handlers began and returned, noted for traces if the instance's settings ask for it.

Replays are not noted: what they execute was executed before. No replay depends on any of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from immortal.appsdk.calls.context import Context
from immortal.appsdk.dispatch.delivery import Delivery, Entry
from immortal.appsdk.handlers.definition import Definition
from immortal.protocol.timings import APP, Noting, PlainRow, SegmentWriter, TimingKind

_KIND = int(TimingKind.HANDLED)
_Handled = tuple[int, PlainRow]  # by committer ID


class HandlerTimings:
    """Writer of timings in ``folder``, on the monotonic clock. ``say`` is told if they can't be written."""

    def __init__(
        self,
        folder: Path,
        limit_bytes: int,
        say: Callable[[str], None],
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.clock_ns = clock_ns
        self._writer = SegmentWriter(folder, APP, limit_bytes, say)
        self._noting: Noting[_Handled] = Noting(self._write)
        self._put = self._noting.put
        self._noted = -1, -1  # what is made undone and executed again was noted

    def note(self, committer_id: int, place: tuple[int, int], began_ns: int) -> None:
        """Note that the handler of the message at ``place``, its record and index, is over now."""
        if place > self._noted:
            self._noted = place
            self._put((committer_id, (*place, _KIND, began_ns, self.clock_ns(), 0)))

    def make_delivery(self, definition: Definition, context: Context) -> Delivery:
        return _TimedDelivery(definition, context, self)

    def close(self) -> None:
        """Write what was noted."""
        self._noting.close()
        self._writer.close()

    def _write(self, handled: list[_Handled]) -> None:
        for committer_id, some in groupby(handled, key=itemgetter(0)):
            self._writer.write(committer_id, (row for _, row in some))


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
            began_ns = clock_ns()
            try:
                function(instance, *arguments)
            finally:
                note(context.committer_id, place, began_ns)

        return decode, run, name
