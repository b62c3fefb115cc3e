"""Which message made which call: no log says it, but a replay does, call by call.

What it says is kept in files, one for each stream, in the order of positions: a log may have any length.
"""

from __future__ import annotations

import mmap
import struct
from bisect import bisect_right
from collections.abc import Container, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import BinaryIO

import msgspec

from immortal.coordinator.config import InstanceSettings
from immortal.protocol import decoding
from immortal.protocol.extensions import Origin
from immortal.protocol.trailer import Trailer
from immortal.replay import AppCommand, ReplayPlan, plan_route, run_replay
from immortal.replay.apps import default_app
from immortal.replay.result import Sink
from immortal.sight.errors import SightError
from immortal.sight.trace.messages import Source
from immortal.sight.trace.waits import Drawn, Telling, Waits

_ROW = struct.Struct("<qqi")  # from this position on: record, message; record -1: nobody knows
_UNKNOWN = -1
_SIZE = struct.Struct("<I")


class ReplayedCauses:
    """``folder``: for its files. For one thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._committers: dict[str, int] = {}
        self._streams: dict[tuple[str, str], mmap.mmap] = {}
        self._waits: dict[str, Waits] = {}

    def learn(self, source: Source, settings: InstanceSettings) -> list[str]:
        """Replay a log, and keep what its messages made; gives what should be known of it, in words.

        Raises SightError, ReplayError and what else a replay raises.
        """
        reader, instance = source.reader, source.instance
        summary = reader.summary()
        last = None if source.last is None else min(source.last, summary.last_sequence_id)
        route = plan_route(ReplayPlan(last_sequence_id=last, checkpoint_id=self._start(source)), reader, summary)
        app = default_app(instance, settings.app, summary, route.last_version)
        command = AppCommand.of(app, settings=settings)
        sink = _CausesSink(self._folder, instance)
        try:
            result = run_replay(reader, route, command, sink)
        finally:
            sink.close()
        if result.failure is not None:
            raise SightError(
                f"{instance}: the replay ends at record {result.failure.sequence_id}, message"
                f" {result.failure.message_index}: {result.failure.text}"
            )
        self._committers[instance] = reader.identity.committer_id
        self._waits[instance] = Waits(partial(next, _drawn_in(sink.drawn), None))
        for destination, path in sink.paths.items():
            with path.open("rb") as file:
                self._streams[instance, destination] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return [f"{instance}: {note}" for note in result.notes]

    def of(self, caller: str, receiver: str, position: int) -> tuple[int, int, int] | None:
        rows = self._streams.get((caller, receiver))
        if rows is None:
            return None
        count = len(rows) // _ROW.size
        row = bisect_right(range(count), position, key=lambda index: _ROW.unpack_from(rows, index * _ROW.size)[0]) - 1
        if row < 0:
            return None
        _, record, message = _ROW.unpack_from(rows, row * _ROW.size)
        return None if record == _UNKNOWN else (self._committers[caller], record, message)

    def made_by(self, caller: str, places: Container[tuple[int, int]]) -> dict[str, list[tuple[int, int]]]:
        """By receiver, what these messages (record, message) have made: the first and the last of positions."""
        found: dict[str, list[tuple[int, int]]] = {}
        for (sender, receiver), rows in self._streams.items():
            if sender == caller:
                made = found[receiver] = []
                before: tuple[int, int, int] | None = None
                for row in _ROW.iter_unpack(rows):
                    if before is not None and before[1:] in places and row[0] > before[0]:
                        made.append((before[0], row[0] - 1))
                    before = row
        return found

    def waits(self, instance: str) -> Waits | None:
        return self._waits.get(instance)

    def close(self) -> None:
        for rows in self._streams.values():
            rows.close()

    @staticmethod
    def _start(source: Source) -> int | None:
        """The newest checkpoint before the first record that is asked for; None: the oldest one of all."""
        summary = source.reader.summary()
        usable = [one for one in summary.checkpoints if one.sequence_id + 1 >= summary.first_sequence_id]
        before = [one for one in usable if source.first is None or one.sequence_id < source.first]
        if source.first is None:
            return usable[0].checkpoint_id if usable else None
        chosen = before or usable[:1]
        return chosen[-1].checkpoint_id if chosen else None


class _CausesSink(Sink):
    def __init__(self, folder: Path, instance: str) -> None:
        self._folder = folder
        self._instance = instance
        self._files: dict[str, BinaryIO] = {}
        self.paths: dict[str, Path] = {}
        self.drawn = folder / f"{instance}-drawn"
        self._drawn = self.drawn.open("wb")
        self._telling = Telling()

    def record(self, sequence_id: int, value: bytes, trailer: Trailer) -> None:
        self._telling.record(sequence_id, trailer.time_ns)

    def numbers(self, sequence_id: int | None, data: bytes, *, complete: bool) -> None:
        drawn = self._telling.numbers(sequence_id, data, complete=complete)
        if drawn is not None:
            packed = msgspec.msgpack.encode(drawn)
            self._drawn.write(_SIZE.pack(len(packed)) + packed)

    def outputs(
        self, destination: str, first_position: int, count: int, payload: bytes, origins: Sequence[Origin] | None
    ) -> None:
        if origins is None:
            self._add(destination, first_position, _UNKNOWN, 0)
            return
        position = first_position
        for origin in origins:
            self._add(destination, position, origin.sequence_id, origin.message_index)
            position += origin.count
        self._add(destination, position, _UNKNOWN, 0)

    def impulses(self, destination: str, first_position: int, count: int, payload: bytes) -> None:
        self._add(destination, first_position, _UNKNOWN, 0)

    def _add(self, destination: str, position: int, record: int, message: int) -> None:
        """A row of the same position as the one before counts instead of it, since the last such one is found."""
        receiver = destination or self._instance
        file = self._files.get(receiver)
        if file is None:
            path = self.paths[receiver] = self._folder / f"{self._instance}-{len(self._files)}"
            file = self._files[receiver] = path.open("wb")
        file.write(_ROW.pack(position, record, message))

    def close(self) -> None:
        for file in (*self._files.values(), self._drawn):
            file.close()


def _drawn_in(path: Path) -> Iterator[Drawn]:
    """As it is asked for: what a replay told of a log of any length."""
    with path.open("rb") as file:
        while front := file.read(_SIZE.size):
            yield decoding.decode(file.read(*_SIZE.unpack(front)), type=Drawn)
