"""Causes of calls: no log says which message caused a call, but a replay does, call by call.

The causes are kept in files, one for each stream, in the order of positions: a log can have any length.
"""

from __future__ import annotations

import mmap
import struct
import sys
import threading
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import BinaryIO

import msgspec
from msgspec import Struct, field

from immortal.coordinator.config import InstanceSettings
from immortal.coordinator.core.interfaces import LogSummary
from immortal.coordinator.log.record_contents import read_record
from immortal.protocol import decoding
from immortal.protocol.trailer import Trailer
from immortal.replay import AppCommand, ReplayPlan, plan_route, run_replay
from immortal.replay.app_process import code_at_end, default_app
from immortal.replay.plan import LogViewError, usable_checkpoints
from immortal.replay.result import Sink
from immortal.replay.session import KeptImpulses, Outputs
from immortal.replay.trace.messages import Executed, Source, executed
from immortal.replay.trace.spans import DrawCollector, RecordDraws, Waits

_ROW = struct.Struct("<qqi")  # from this position on: record, message; record -1: unknown
_UNKNOWN = -1
_SIZE = struct.Struct("<I")


class ReplayedCauses:
    """Causes of calls that replays found, in files below ``folder``. For one thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._committers: dict[str, int] = {}
        self._streams: dict[tuple[str, str], mmap.mmap] = {}
        self._waits: dict[str, Waits] = {}

    def learn(self, source: Source, settings: InstanceSettings) -> list[str]:
        """Replay a log, and keep the causes of its calls; return notes for people.

        Raises LogViewError, ReplayError, and the other errors of a replay.
        """
        reader, instance = source.reader, source.instance
        summary = reader.summary()
        last = None if source.last is None else min(source.last, summary.last_sequence_id)
        route = plan_route(ReplayPlan(_checkpoint_before(source, summary), last), reader, summary)
        own = code_at_end(settings, summary, route)
        command = AppCommand.of(own.app, settings=settings, code=own.archive)
        sink = _CausesSink(self._folder, instance)
        try:
            result = run_replay(reader, route, command, sink)
        finally:
            sink.close()
        if result.failure is not None:
            raise LogViewError(
                f"{instance}: the replay ends at record {result.failure.sequence_id}, message"
                f" {result.failure.message_index}: {result.failure.text}"
            )
        self._committers[instance] = reader.identity.committer_id
        self._waits[instance] = Waits(partial(next, _drawn_in(sink.drawn), None))
        for destination, path in sink.paths.items():
            with path.open("rb") as file:
                self._streams[instance, destination] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return [f"{instance}: {note}" for note in result.notes]

    def cause_of(self, caller: str, receiver: str, position: int) -> tuple[int, int, int] | None:
        rows = self._streams.get((caller, receiver))
        if rows is None:
            return None
        count = len(rows) // _ROW.size
        row = bisect_right(range(count), position, key=lambda index: _ROW.unpack_from(rows, index * _ROW.size)[0]) - 1
        if row < 0:
            return None
        _, record, message = _ROW.unpack_from(rows, row * _ROW.size)
        return None if record == _UNKNOWN else (self._committers[caller], record, message)

    def waits(self, instance: str) -> Waits | None:
        return self._waits.get(instance)

    def close(self) -> None:
        for rows in self._streams.values():
            rows.close()


def _checkpoint_before(source: Source, summary: LogSummary) -> int | None:
    """Return the newest checkpoint before the first requested record, or else the oldest; None if there is none."""
    usable = usable_checkpoints(summary)
    before = [one for one in usable if source.first is not None and one.sequence_id < source.first]
    chosen = before[-1:] or usable[:1]
    return chosen[0].checkpoint_id if chosen else None


class _CausesSink(Sink):
    def __init__(self, folder: Path, instance: str) -> None:
        self._folder = folder
        self._instance = instance
        self._files: dict[str, BinaryIO] = {}
        self.paths: dict[str, Path] = {}
        self.drawn = folder / f"{instance}-drawn"
        self._drawn = self.drawn.open("wb")
        self._draw_collector = DrawCollector()

    def record(self, sequence_id: int, value: bytes, trailer: Trailer) -> None:
        self._draw_collector.record(sequence_id, trailer.time_ns)

    def numbers(self, sequence_id: int | None, data: bytes, *, complete: bool) -> None:
        drawn = self._draw_collector.numbers(sequence_id, data, complete=complete)
        if drawn is not None:
            packed = msgspec.msgpack.encode(drawn)
            self._drawn.write(_SIZE.pack(len(packed)) + packed)

    def outputs(self, made: Outputs) -> None:
        position = made.first_position
        for origin in made.origins or ():
            self._add(made.destination, position, origin.sequence_id, origin.message_index)
            position += origin.count
        self._add(made.destination, position, _UNKNOWN, 0)

    def impulses(self, kept: KeptImpulses) -> None:
        self._add(kept.destination, kept.first_position, _UNKNOWN, 0)

    def _add(self, destination: str, position: int, record: int, message: int) -> None:
        """Write a row. It replaces an earlier row of the same position, since a search finds the last one."""
        receiver = destination or self._instance
        file = self._files.get(receiver)
        if file is None:
            path = self.paths[receiver] = self._folder / f"{self._instance}-{len(self._files)}"
            file = self._files[receiver] = path.open("wb")
        file.write(_ROW.pack(position, record, message))

    def close(self) -> None:
        for file in (*self._files.values(), self._drawn):
            file.close()


def _drawn_in(path: Path) -> Iterator[RecordDraws]:
    """Yield the draws that a replay reported, reading the file on demand: a log can have any length."""
    with path.open("rb") as file:
        while front := file.read(_SIZE.size):
            yield decoding.decode(file.read(*_SIZE.unpack(front)), type=RecordDraws)


# Replay of logs as they grow: their messages, and the causes of their calls.
#
# A copy of each app shadows the running one: its replay gets each record once it is logged, and reports its calls. So
# a message is known together with its cause if the caller's log is followed too, a little later than without a replay.


ROWS_MAX = 200_000  # of a stream: causes of older calls are dropped


class _Made(Struct):
    """Causes in one stream: from each position on, the (record, message); ``known``: the last position known."""

    positions: list[int] = field(default_factory=list)
    origins: list[tuple[int, int]] = field(default_factory=list)
    known: int = 0

    def add(self, position: int, record: int, message: int) -> None:
        self.positions.append(position)
        self.origins.append((record, message))
        if len(self.positions) > ROWS_MAX:
            del self.positions[: ROWS_MAX // 2], self.origins[: ROWS_MAX // 2]


class ShadowReplay(Sink):
    """Replay of one growing log, in its own thread after :meth:`start`; only that thread uses the reader."""

    def __init__(self, source: Source, settings: InstanceSettings) -> None:
        """Plan the replay. ``source.first``: the first record whose messages are wanted. Raises ReplayError if the log
        has no checkpoint to begin at."""
        self.source = source
        self.committer_id = source.reader.identity.committer_id
        self.begins = source.first or 0
        """First record whose messages are wanted."""
        self.taken = self._last_record = self.begins - 1
        summary = source.reader.summary()
        plan = ReplayPlan(_checkpoint_before(source, summary), follow=True)
        self._route = plan_route(plan, source.reader, summary)
        app = default_app(source.instance, settings.app, summary, self._route.last_version)
        self._command = AppCommand.of(app, settings=settings)
        self._lock = threading.Lock()
        self._messages: deque[Executed] = deque()
        self._causes_by_receiver: dict[str, _Made] = defaultdict(_Made)
        self._draw_collector = DrawCollector()
        self._drawn: deque[RecordDraws] = deque(maxlen=ROWS_MAX)
        self.waits = Waits(self._pop_draws)
        self._waits_known_until = self.begins - 1  # waits that began up to this record are known
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
        """Return messages since the last call, up to record ``taken``. Raises the error that ended the replay."""
        with self._lock:
            found = list(self._messages)
            self._messages.clear()
            self.taken = self._last_record
        if not found and self._error is not None:
            raise self._error
        return found

    def cause(self, receiver: str, position: int) -> tuple[bool, tuple[int, int] | None]:
        """Return (True if it is known by now, the record and message that caused the call or None if none did)."""
        with self._lock:
            made = self._causes_by_receiver.get(receiver)
            if made is None or made.known < position:
                return False, None
            row = bisect_right(made.positions, position) - 1
            return True, None if row < 0 or made.origins[row][0] == _UNKNOWN else made.origins[row]

    def has_waits_before(self, sequence_id: int) -> bool:
        """Return True if every wait that began before that record is known."""
        return self._waits_known_until >= sequence_id - 1

    def _pop_draws(self) -> RecordDraws | None:
        return self._drawn.popleft() if self._drawn else None

    def _run(self) -> None:
        try:
            result = run_replay(self.source.reader, self._route, self._command, self, stop=self._over.is_set)
            if result.failure is not None:
                failure = result.failure
                raise LogViewError(f"{self.instance}: the replay ends at record {failure.sequence_id}: {failure.text}")
        except Exception as error:  # take() raises it
            self._error = error

    # --- the replay's reports, in its thread --------------------------------------------------------------------------

    def numbers(self, sequence_id: int | None, data: bytes, *, complete: bool) -> None:
        if sequence_id is None:  # an app that reports none
            self._waits_known_until = sys.maxsize
            return
        drawn = self._draw_collector.numbers(sequence_id, data, complete=complete)
        if drawn is not None:
            self._drawn.append(drawn)
        if complete:
            self._waits_known_until = sequence_id

    def record(self, sequence_id: int, value: bytes, trailer: Trailer) -> None:
        self._draw_collector.record(sequence_id, trailer.time_ns)
        if sequence_id < self.begins:
            return
        record = read_record(value, sequence_id, self.committer_id, whole=True)
        messages = [] if isinstance(record, str) else list(executed(self.source, record, None))
        with self._lock:
            self._last_record = sequence_id
            self._messages += messages

    def outputs(self, made: Outputs) -> None:
        with self._lock:
            stream = self._causes_by_receiver[made.destination or self.instance]
            position, end = made.first_position, made.first_position + made.count
            for origin in made.origins or ():
                stream.add(position, origin.sequence_id, origin.message_index)
                position += origin.count
            if position < end:
                stream.add(position, _UNKNOWN, 0)
            stream.known = end - 1

    def impulses(self, kept: KeptImpulses) -> None:
        with self._lock:
            stream = self._causes_by_receiver[kept.destination or self.instance]
            stream.add(kept.first_position, _UNKNOWN, 0)
            stream.known = max(stream.known, kept.first_position + kept.count - 1)
