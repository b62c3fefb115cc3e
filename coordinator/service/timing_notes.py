"""Timing notes for traces: when each record's input arrived, was submitted, became durable, and went to the app.

The coordinator's loop only stores observations, each with its time. Another thread finds the records that they belong
to and writes the rows. The machine and replays know nothing of this (docs/decisions/0051).
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from immortal.coordinator.core import effects as ef
from immortal.coordinator.core import events as ev
from immortal.protocol.client_frames import CLIENTS, ClientFrameType
from immortal.protocol.errors import ProtocolError
from immortal.protocol.peer_frames import FrameType
from immortal.protocol.record import HEADER_SIZE_BYTES, decode_header
from immortal.protocol.timings import COORDINATOR, FOLDER_NAME, BackgroundWriter, SegmentWriter, TimingKind, TimingRow
from immortal.protocol.trailer import BatchKind, decode_trailer

RECORDS_MAX = 10_000  # records not sent to the app yet; beyond it the oldest is written without the time of sending
SOURCES_MAX = 10_000
ARRIVALS_MAX = 1_000  # arrivals of one source that are not logged yet


class Submitted(Struct):
    """Observation: a commit with this record was submitted."""

    ticket: int
    sequence_id: int
    committer_id: int
    time_ns: int
    trailer: bytes
    check: int
    durable_ns: int = 0


class Durable(Struct):
    """Observation: the commit with this ticket, and all before it, are durable."""

    ticket: int
    time_ns: int


class SentToApp(Struct):
    """Observation: this record was sent to the app."""

    sequence_id: int
    time_ns: int


class Arrived(Struct):
    """Observation: messages of a source arrived, up to ``last_position``."""

    source: tuple[int, str]  # kind, name
    last_position: int
    time_ns: int


Observation = Submitted | Durable | SentToApp | Arrived


class TimingRecorder:
    """Recorder of one running coordinator's timings, in the folder of its instance. Times are monotonic, in ns.

    ``limit_bytes``: largest size of its segments. ``report``: called with the reason if they can't be written.
    """

    def __init__(
        self,
        folder: Path,
        limit_bytes: int,
        report: Callable[[str], None],
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._clock_ns = clock_ns
        self._rows = RowBuilder()
        self._writer = SegmentWriter(folder / FOLDER_NAME, COORDINATOR, limit_bytes, report)
        self._background: BackgroundWriter[Observation] = BackgroundWriter(self._write)

    def observe(self, effect: ef.Effect) -> None:
        """Store the time of an effect, just before it is carried out."""
        if type(effect) is ef.Commit:
            now_ns = self._clock_ns()
            for sequence_id, value in effect.transaction.records:
                header = decode_header(value)
                trailer = bytes(memoryview(value)[header.size_bytes :])
                self._background.put(
                    Submitted(effect.ticket, sequence_id, header.committer_id, now_ns, trailer, header.check)
                )
        elif type(effect) is ef.SendToApp and len(effect.data) >= HEADER_SIZE_BYTES:
            try:
                header = decode_header(effect.data)
            except ProtocolError:  # a part of a checkpoint
                return
            if header.sequence_id >= 0 and header.size_bytes == len(effect.data):
                self._background.put(SentToApp(header.sequence_id, self._clock_ns()))

    def on_durable(self, ticket: int) -> None:
        """Store the time when the commit ``ticket``, and all before it, are durable. Any thread may call it."""
        self._background.put(Durable(ticket, self._clock_ns()))

    def on_event(self, event: ev.Event) -> None:
        """Store the time of an event when it arrives."""
        if type(event) is ev.PeerFrameReceived and event.frame.frame_type is FrameType.BATCH:
            frame = event.frame
            source = int(BatchKind.STREAM), frame.sender
            self._background.put(Arrived(source, frame.position + frame.count - 1, self._clock_ns()))
        elif type(event) is ev.ClientFrameReceived and event.frame.frame_type is ClientFrameType.REQUEST:
            request = event.frame
            source = int(BatchKind.CLIENT), CLIENTS + request.client_id
            self._background.put(Arrived(source, request.number + request.count - 1, self._clock_ns()))

    def close(self) -> None:
        """Write what was observed, and close the segments."""
        self._background.close()
        self._write_rows(self._rows.pop_rest())
        self._writer.close()

    def _write(self, observations: list[Observation]) -> None:
        for observation in observations:
            self._write_rows(self._rows.add(observation))

    def _write_rows(self, rows: list[TimingRow]) -> None:
        if rows:
            self._writer.write(self._rows.committer_id, rows)


class RowBuilder:
    """Builder of rows from observations, in the order of records; a row is due when the app has its record. No I/O."""

    def __init__(self) -> None:
        self.committer_id = 0
        self._waiting: OrderedDict[int, Submitted] = OrderedDict()  # by sequence ID
        self._undurable: deque[Submitted] = deque()
        self._arrivals: OrderedDict[tuple[int, str], deque[Arrived]] = OrderedDict()

    def add(self, observation: Observation) -> list[TimingRow]:
        if isinstance(observation, Submitted):
            return self._add_submitted(observation)
        if isinstance(observation, Durable):
            while self._undurable and self._undurable[0].ticket <= observation.ticket:
                self._undurable.popleft().durable_ns = observation.time_ns
        elif isinstance(observation, Arrived):
            self._add_arrived(observation)
        elif observation.sequence_id in self._waiting:
            place = next(place for place, waiting in enumerate(self._waiting, 1) if waiting == observation.sequence_id)
            return self._pop_rows(place, observation.time_ns)
        return []

    def pop_rest(self) -> list[TimingRow]:
        """Return the rows of records that were not sent to the app."""
        return self._pop_rows(len(self._waiting))

    def _add_submitted(self, observation: Submitted) -> list[TimingRow]:
        rows: list[TimingRow] = []
        if observation.sequence_id in self._waiting:  # submitted again, as the log did not answer
            return rows
        if len(self._waiting) >= RECORDS_MAX:
            rows = self._pop_rows(1)
        self.committer_id = observation.committer_id
        self._waiting[observation.sequence_id] = observation
        self._undurable.append(observation)
        return rows

    def _add_arrived(self, observation: Arrived) -> None:
        known = self._arrivals.get(observation.source)
        if known is None:
            known = self._arrivals[observation.source] = deque(maxlen=ARRIVALS_MAX)
            if len(self._arrivals) > SOURCES_MAX:
                self._arrivals.popitem(last=False)
        if not known or known[-1].last_position < observation.last_position:  # otherwise the source sent it again
            known.append(observation)

    def _pop_rows(self, count: int, given_ns: int = 0) -> list[TimingRow]:
        """Return the rows of the oldest ``count`` records; the last of them went to the app at ``given_ns``."""
        rows: list[TimingRow] = []
        for left in range(count, 0, -1):
            submitted = self._waiting.popitem(last=False)[1]
            rows += self._rows(submitted, given_ns if left == 1 else 0)
        return rows

    def _rows(self, submitted: Submitted, given_ns: int) -> list[TimingRow]:
        rows = [
            TimingRow(submitted.sequence_id, 0, TimingKind.COMMIT, submitted.time_ns, submitted.durable_ns, given_ns)
        ]
        try:
            batches = decode_trailer(submitted.trailer, submitted.check).batches
        except ProtocolError:  # a trailer that another process has made
            return rows
        message = 0
        for batch in batches:
            if (arrived_ns := self._arrival(batch.kind, batch.name, batch.first_position)) is not None:
                rows.append(TimingRow(submitted.sequence_id, message, TimingKind.ARRIVED, arrived_ns))
            message += batch.count
        return rows

    def _arrival(self, kind: int, name: str, first_position: int) -> int | None:
        known = self._arrivals.get((kind, name))
        if known is None:
            return None
        while known and known[0].last_position < first_position:
            known.popleft()
        return known[0].time_ns if known else None
