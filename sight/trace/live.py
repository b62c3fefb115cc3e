"""Logs that are replayed as they grow: their messages, and which message made which call.

A copy of each app shadows the running one: its replay is given each record once it is logged, and says what it makes.
So a message comes together with its cause, if the caller's log is followed too; a little later than without.
"""

from __future__ import annotations

import sys
import threading
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Sequence

from msgspec import Struct, field

from immortal.coordinator.config import InstanceSettings
from immortal.pipeline.plain import read_record
from immortal.protocol.extensions import Origin
from immortal.protocol.trailer import Trailer
from immortal.replay import AppCommand, ReplayPlan, plan_route, run_replay
from immortal.replay.apps import default_app
from immortal.replay.result import Sink
from immortal.sight.errors import SightError
from immortal.sight.trace.messages import Executed, Source, executed
from immortal.sight.trace.waits import Drawn, Telling, Waits

ROWS_MAX = 200_000  # of a stream: of older calls nobody knows the cause
_UNKNOWN = -1


class _Made(Struct):
    """What is known of one stream: from each position on, which (record, message) made it; and up to where."""

    positions: list[int] = field(default_factory=list)
    origins: list[tuple[int, int]] = field(default_factory=list)
    known: int = 0

    def add(self, position: int, record: int, message: int) -> None:
        self.positions.append(position)
        self.origins.append((record, message))
        if len(self.positions) > ROWS_MAX:
            del self.positions[: ROWS_MAX // 2], self.origins[: ROWS_MAX // 2]


class LiveLog(Sink):
    """One log, in a thread of its own from :meth:`start` on; its reader is that thread's alone."""

    def __init__(self, source: Source, settings: InstanceSettings) -> None:
        """``source.first``: the first record whose messages are wanted. Raises ReplayError for a log that has no
        checkpoint from which to begin."""
        self.source = source
        self.committer_id = source.reader.identity.committer_id
        self.begins = source.first or 0
        """The record whose messages come first."""
        self.taken = self._seen = self.begins - 1
        summary = source.reader.summary()
        plan = ReplayPlan(follow=True)
        usable = [one for one in summary.checkpoints if one.sequence_id + 1 >= summary.first_sequence_id]
        before = [one for one in usable if one.sequence_id < self.begins]
        if before:
            plan = ReplayPlan(checkpoint_id=before[-1].checkpoint_id, follow=True)
        self._route = plan_route(plan, source.reader, summary)
        app = default_app(source.instance, settings.app, summary, self._route.last_version)
        self._command = AppCommand.of(app, settings=settings)
        self._lock = threading.Lock()
        self._messages: deque[Executed] = deque()
        self._made: dict[str, _Made] = defaultdict(_Made)
        self._telling = Telling()
        self._drawn: deque[Drawn] = deque(maxlen=ROWS_MAX)
        self.waits = Waits(self._take_drawn)
        self._told = self.begins - 1  # up to this record it is known what began
        self._over = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=f"replay of {source.instance}", daemon=True)

    @property
    def instance(self) -> str:
        return self.source.instance

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()

    def take(self) -> list[Executed]:
        """What has come since, up to record ``taken``. Raises what has ended the replay."""
        with self._lock:
            found = list(self._messages)
            self._messages.clear()
            self.taken = self._seen
        if not found and self._error is not None:
            raise self._error
        return found

    def cause(self, receiver: str, position: int) -> tuple[bool, tuple[int, int] | None]:
        """(whether it is known by now, the record and message that made that call; None: none did)."""
        with self._lock:
            made = self._made.get(receiver)
            if made is None or made.known < position:
                return False, None
            row = bisect_right(made.positions, position) - 1
            return True, None if row < 0 or made.origins[row][0] == _UNKNOWN else made.origins[row]

    def knows_waits(self, sequence_id: int) -> bool:
        """Whether it is known by now what began before that record."""
        return self._told >= sequence_id - 1

    def _take_drawn(self) -> Drawn | None:
        return self._drawn.popleft() if self._drawn else None

    def _run(self) -> None:
        try:
            result = run_replay(self.source.reader, self._route, self._command, self, stop=self._over.is_set)
            if result.failure is not None:
                failure = result.failure
                raise SightError(f"{self.instance}: the replay ends at record {failure.sequence_id}: {failure.text}")
        except Exception as error:  # the one who takes is told
            self._error = error

    # --- what the replay says, in its thread --------------------------------------------------------------------------

    def numbers(self, sequence_id: int | None, data: bytes, *, complete: bool) -> None:
        if sequence_id is None:  # an app that tells none
            self._told = sys.maxsize
            return
        drawn = self._telling.numbers(sequence_id, data, complete=complete)
        if drawn is not None:
            self._drawn.append(drawn)
        if complete:
            self._told = sequence_id

    def record(self, sequence_id: int, value: bytes, trailer: Trailer) -> None:
        self._telling.record(sequence_id, trailer.time_ns)
        if sequence_id < self.begins:
            return
        record = read_record(value, sequence_id, self.committer_id, whole=True)
        messages = [] if isinstance(record, str) else list(executed(self.source, record, None))
        with self._lock:
            self._seen = sequence_id
            self._messages += messages

    def outputs(
        self, destination: str, first_position: int, count: int, payload: bytes, origins: Sequence[Origin] | None
    ) -> None:
        with self._lock:
            made = self._made[destination or self.instance]
            position = first_position
            for origin in origins or ():
                made.add(position, origin.sequence_id, origin.message_index)
                position += origin.count
            if position < first_position + count:
                made.add(position, _UNKNOWN, 0)
            made.known = first_position + count - 1

    def impulses(self, destination: str, first_position: int, count: int, payload: bytes) -> None:
        with self._lock:
            made = self._made[destination or self.instance]
            made.add(first_position, _UNKNOWN, 0)
            made.known = max(made.known, first_position + count - 1)
