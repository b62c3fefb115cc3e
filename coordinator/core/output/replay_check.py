"""Check of a replay's outputs against the log: on a difference a recovery stops, or warns and continues.

Number and order of calls are always checked, since a receiver's messages are identified by position.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from immortal.coordinator.core.effects import Report
from immortal.coordinator.core.errors import DivergenceError
from immortal.coordinator.core.formatting import format_divergence
from immortal.coordinator.core.interfaces import ONESELF, CheckpointHeader, OutputBatch, OutputMark, SpilledExtent
from immortal.coordinator.core.limits import ReplayCheck
from immortal.coordinator.core.notices import Diverged
from immortal.coordinator.core.output.output_check import Divergence, OutputCheck, OutputDivergenceError
from immortal.coordinator.core.output.output_stream import OutputStream
from immortal.coordinator.core.state import CoreState
from immortal.protocol.batch import decode_batch, offset_after
from immortal.protocol.errors import ImmortalError
from immortal.protocol.messages import MessageType, decode_message
from immortal.protocol.record import HEADER_SIZE_BYTES
from immortal.protocol.trailer import BatchKind, BatchSource, Trailer

_INPUT = (MessageType.RPC, MessageType.RPC_BATCH, MessageType.COUNT_REPLAYABLE_RPC_BATCH, MessageType.INITIAL_MESSAGE)


class ReplayPolicy:
    """Strictness of one instance's replay check, and its reaction to a difference."""

    def __init__(self, state: CoreState) -> None:
        self._state = state

    @property
    def compares(self) -> bool:
        return self._state.limits.replay_check is not ReplayCheck.OFF

    @property
    def only_counts(self) -> bool:
        """True if calls are only counted: other arguments are accepted."""
        if self._state.limits.replay_check is None:
            return self._state.session.hello is None
        return self._state.limits.replay_check is ReplayCheck.COUNTS

    def handle_divergence(self, divergence: Divergence) -> None:
        """Handle a mark that does not fit. Raises OutputDivergenceError, or warns once per stream and recovery."""
        if not self.only_counts or divergence.other_calls:
            raise OutputDivergenceError(divergence)
        to = divergence.destination
        holds = f"what {to!r} has already stays as it was sent, the rest is sent as it is now"
        if to == ONESELF:
            holds = "what the log has stays as it was, the rest is as it is now"
        self._state.effects.append(Report(Diverged(to, self._divergence_text(divergence), holds)))

    def explain(self, error: ImmortalError) -> ImmortalError:
        """Return an error about a replay with a text for operators; return other errors unchanged."""
        if not isinstance(error, OutputDivergenceError):
            return error
        name = self._state.name
        return DivergenceError(
            f"{self._divergence_text(error.divergence)}: a handler does what a replay can't repeat, or its code was "
            f"changed without an upgrade. 'immortal verify {name}' finds where (with --peer-log PEER also what "
            f"was sent then); nothing is lost: mend it so that it does what it did, and start again"
        )

    def _divergence_text(self, divergence: Divergence) -> str:
        return format_divergence(divergence, self._state.name, self._state.session.description.methods)


def stream_batches(
    record: memoryview, batches: Sequence[BatchSource], senders: Container[str]
) -> Iterator[tuple[BatchSource, bytes]]:
    """Yield the packed RPC messages of these ``senders`` in a logged ``record``, whose trailer has ``batches``."""
    if not any(batch.kind == BatchKind.STREAM and batch.name in senders for batch in batches):
        return
    sources = iter(batches)
    offset = HEADER_SIZE_BYTES
    while offset < len(record):
        message_type, start, end = decode_message(record, offset)
        if message_type in _INPUT:
            batch = next(sources)
            if batch.kind == BatchKind.STREAM and batch.name in senders:
                single = message_type == MessageType.RPC
                begin = offset if single else start + decode_batch(record[start:end])[1]
                yield batch, bytes(record[begin:end])
        offset = end


# Expected outputs: what the log knows of the messages that a replay makes again, by marks and spilled extents.


class ExpectedOutputs:
    """Marks and spilled extents that a replay must reach, by destination, also of streams that do not exist yet."""

    def __init__(self, state: CoreState, policy: ReplayPolicy) -> None:
        self._state = state
        self._policy = policy
        self._checks: dict[str, OutputCheck] = {}  # by destination
        self._spilled: dict[str, Sequence[SpilledExtent]] = {}  # of streams that do not exist yet

    def restart(self, header: CheckpointHeader | None, spilled: Mapping[str, Sequence[SpilledExtent]]) -> None:
        """Start at the checkpoint of ``header``; None: nothing is replayed."""
        self._checks.clear()
        self._spilled = dict(spilled)
        if header is not None and self._policy.compares:
            on_divergence = self._policy.handle_divergence
            self._checks = {name: OutputCheck(name, mark, on_divergence) for name, mark in header.outputs.items()}

    def check(self, destination: str) -> OutputCheck | None:
        """Return the check for a stream to ``destination``; None if nothing is compared."""
        if not (self._state.catching_up and self._policy.compares):
            return None
        return self._checks.setdefault(destination, OutputCheck(destination, None, self._policy.handle_divergence))

    def pop_spilled(self, destination: str) -> Sequence[SpilledExtent]:
        """Return and remove the spilled extents of a stream that is created now."""
        return self._spilled.pop(destination, ())

    def set_spilled(self, spilled: Mapping[str, Sequence[SpilledExtent]]) -> None:
        """Replace the spilled extents by the log's current ones."""
        self._spilled = dict(spilled)

    def expect_record(self, sequence_id: int, record: memoryview, trailer: Trailer) -> None:
        """Expect the marks of a replayed ``record``. Raises DivergenceError if they do not fit."""
        own = self.check(ONESELF) if self._policy.only_counts else None
        if own is not None:
            for batch, calls in stream_batches(record, trailer.batches, (ONESELF,)):
                own.add_logged(OutputBatch(batch.first_position, batch.count, calls))
        for mark in trailer.outputs:
            check = self.check(mark.destination)
            if check is not None:
                check.expect(sequence_id, OutputMark(mark.position, mark.checksum))
                check.compare()

    @property
    def destinations(self) -> list[str]:
        """Destinations of all streams with something expected."""
        return [*self._checks, *self._spilled]

    @property
    def has_more(self) -> bool:
        """True if the replay has not yet made everything that the marks cover."""
        return any(check.has_open_marks for check in self._checks.values())


# Outputs of a follower's app, until their positions are known.
#
# The writer's impulse takes its position when its app sends it, but can be logged after the record of the calls that
# follow it. So a follower's message gets its position only once a mark covers it: then all impulses before it are
# known. Later messages wait here in their order.


@dataclass(slots=True)
class FollowerSnapshotCut:
    """State of the output streams between two messages of the app; each stream's state is known once the earlier
    messages have positions.

    ``waits_for``: number of these messages without a position. ``outputs``, ``unacknowledged``: as in a
    checkpoint's header.
    """

    waits_for: dict[str, int] = field(default_factory=dict)
    outputs: dict[str, OutputMark] = field(default_factory=dict)
    unacknowledged: dict[str, list[OutputBatch]] = field(default_factory=dict)

    def reach(self, stream: OutputStream) -> None:
        self.waits_for.pop(stream.destination, None)
        self.outputs[stream.destination] = stream.mark
        if stream.memory_bytes:
            self.unacknowledged[stream.destination] = stream.unacknowledged


class FollowerOutputs:
    """Outputs of a follower's app that have no position yet, by destination."""

    def __init__(self, state: CoreState) -> None:
        self._state = state
        self._cut: FollowerSnapshotCut | None = None
        self._made: dict[str, deque[tuple[int, bytes]]] = {}  # (count, payload)
        self._marked: dict[str, int] = {}  # the last position in a mark of the log

    def forget(self) -> None:
        self._made.clear()
        self._marked.clear()
        self._cut = None

    def cut(self, streams: Mapping[str, OutputStream]) -> FollowerSnapshotCut:
        """Cut the outputs here: include what the app has made so far, and nothing later. One cut at a time."""
        cut = self._cut = FollowerSnapshotCut()
        for destination, stream in streams.items():
            if waiting := sum([count for count, _ in self._made.get(destination, ())]):
                cut.waits_for[destination] = waiting
            else:
                cut.reach(stream)
        return cut

    def append(self, stream: OutputStream, count: int, payload: bytes) -> None:
        """Add the app's next ``count`` packed messages. Raises DivergenceError."""
        self._made.setdefault(stream.destination, deque()).append((count, payload))
        self._place(stream)

    def mark_reached(self, stream: OutputStream, position: int) -> None:
        """Place messages up to ``position``, which a mark of the log has, so all impulses before it are known. Raises
        DivergenceError."""
        self._marked[stream.destination] = max(position, self._marked.get(stream.destination, 0))
        self._place(stream)

    def _place(self, stream: OutputStream) -> None:
        made, marked = self._made.get(stream.destination), self._marked.get(stream.destination, 0)
        while made and (room := stream.room_before(marked)):
            count, payload = made.popleft()
            if count > room:
                offset = offset_after(payload, room, count)
                made.appendleft((count - room, payload[offset:]))
                count, payload = room, payload[:offset]
            stream.append(count, payload)
            if self._cut is not None and stream.destination in self._cut.waits_for:
                self._cut.waits_for[stream.destination] -= count
                if not self._cut.waits_for[stream.destination]:
                    self._cut.reach(stream)

    def place_all(self, streams: Mapping[str, OutputStream]) -> None:
        """Give positions to all outputs, without waiting for marks. Raises DivergenceError."""
        waiting, self._made = self._made, {}
        self._marked.clear()
        self._cut = None
        for destination, made in waiting.items():
            for count, payload in made:
                streams[destination].append(count, payload, self._state.last_verdict_ticket)
