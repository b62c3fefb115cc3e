"""Proof of determinism: replays a part of the log, and compares outputs and state with those of the original run.

The outputs are compared with the marks in the records, the state at the end with the next checkpoint. If a
receiver's log is available, the outputs are also compared with it, which shows the original calls.
"""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct, field

from immortal.coordinator.core.formatting import Methods, format_divergence
from immortal.coordinator.core.interfaces import ONESELF, CheckpointHeader, LogSummary, OutputBatch, OutputMark
from immortal.coordinator.core.output.output_check import Divergence, OutputCheck, OutputDivergenceError
from immortal.coordinator.instances.own_logs import refuse_pickle
from immortal.coordinator.log.reader import RecordSource
from immortal.coordinator.log.record_contents import batches, record_of
from immortal.protocol.batch import offset_after
from immortal.protocol.checksum import crc64
from immortal.protocol.extensions import Origin
from immortal.protocol.messages import decode_message
from immortal.protocol.record import decode_header
from immortal.protocol.trailer import BatchKind, Trailer, decode_trailer
from immortal.replay.app_process import DIFFERENCES_MAX, AppCommand, diff_states
from immortal.replay.host import find_end, run_replay
from immortal.replay.plan import (
    NO_CHECKPOINT,
    AppExitedError,
    ReplayError,
    ReplayPlan,
    Route,
    checkpoint_problem,
    plan_route,
    usable_checkpoints,
)
from immortal.replay.result import ReplayResult, Sink
from immortal.replay.session import KeptImpulses, Outputs

MARKS_AHEAD_MAX = 1 << 20  # marks that a stream has not reached yet: a stream with more sends too few messages
PROVED_RECORDS_MAX = 20_000  # replayed again to prove a state: some tenths of a second
ORIGINS_KEPT_MAX = 1 << 16  # runs kept for each stream: an older message is reported without its origin


class OutputDivergence(Struct, frozen=True):
    """Stream of outputs that the replay makes differently.

    ``divergence``: the mark that it does not match; None if only the receiver's log shows the difference.
    ``is_surplus``: it matches all marks, but has more messages; ``divergence`` then has those after the last mark.
    ``difference``: the first different message, if the receiver's log is available. ``origins``: the messages that
    caused the outputs of both, by position.
    """

    destination: str
    divergence: Divergence | None
    difference: Difference | None
    origins: Mapping[int, Origin]
    is_surplus: bool = False


class StateDivergence(Struct, frozen=True):
    """Difference of the states at the end: [{"path", "old", "new"}]; ``problem``: why they can't be compared."""

    differences: Sequence[Mapping[str, Any]]
    problem: str | None = None


class VerifySection(Struct):
    """Result of the replay from one checkpoint to the next (``end``; None: to the end of the log).

    ``counts``: messages sent, by destination. ``unproved``: those at the end of a stream that no mark and no receiver's
    log confirms. ``state_is_same``: None if there was no state to compare with. ``ended``: the app ends at the last
    record of the log, after ``result``.
    """

    start: CheckpointHeader
    end: CheckpointHeader | None
    result: ReplayResult
    counts: dict[str, int]
    unproved: dict[str, int] = field(default_factory=dict)
    outputs: list[OutputDivergence] = field(default_factory=list)
    state: StateDivergence | None = None
    state_is_same: bool | None = None
    ended: AppExitedError | None = None

    @property
    def is_same(self) -> bool:
        result = self.result
        return not self.outputs and self.state is None and result.failure is None and not result.news


class VerifySections(Struct, frozen=True):
    """Sections to replay: from one checkpoint to the next (None: to the log's end). ``notes``: texts for people."""

    pairs: Sequence[tuple[CheckpointHeader, CheckpointHeader | None]]
    notes: Sequence[str]


def verify_sections(
    source: RecordSource,
    summary: LogSummary,
    *,
    checkpoint_id: int | None = None,
    everything: bool = False,
    last_sequence_id: int | None = None,
) -> VerifySections:
    """Choose sections: the last ones with a record; one from ``checkpoint_id`` on; or ``everything`` that is kept.

    ``last_sequence_id``: end at this record. A damaged checkpoint is left out, with a note. Raises
    ReplayError.
    """
    notes = list(source.problems)
    sound: list[CheckpointHeader] = []
    last = summary.last_sequence_id if last_sequence_id is None else last_sequence_id
    if last > summary.last_sequence_id:
        raise ReplayError(f"record {last} is not in the log: its last one is {summary.last_sequence_id}")
    is_default = checkpoint_id is None and not everything
    for header in reversed([one for one in usable_checkpoints(summary) if one.sequence_id <= last]):
        if is_default and len(sound) == 2 and header.sequence_id == sound[0].sequence_id:
            continue  # a restart takes two checkpoints at one place: no record is between them
        problem = checkpoint_problem(source, header)
        if problem is not None and header.checkpoint_id == checkpoint_id:
            raise ReplayError(f"checkpoint {checkpoint_id} can't be used: {problem}; choose another one")
        if problem is not None:
            notes.append(f"checkpoint {header.checkpoint_id} is left out: {problem}")
            continue
        sound.insert(0, header)
        if header.checkpoint_id == checkpoint_id or (is_default and sound[0].sequence_id < sound[-1].sequence_id):
            break
    if not sound:
        if last < summary.last_sequence_id:
            raise ReplayError(f"the log has no sound checkpoint up to record {last} to begin at")
        raise ReplayError(NO_CHECKPOINT)
    ends: list[CheckpointHeader | None] = [*sound[1:], None]
    pairs = list(zip(sound, ends, strict=True))
    if checkpoint_id is not None:
        if sound[0].checkpoint_id != checkpoint_id:
            kept = ", ".join(str(header.checkpoint_id) for header in sound)
            raise ReplayError(f"there is no checkpoint {checkpoint_id} to begin at: the log holds {kept}")
        return VerifySections(pairs[:1], notes)
    if sound[-1].sequence_id >= last and len(pairs) > 1:
        pairs.pop()  # no record is after the last checkpoint
    return VerifySections(pairs, notes)


def verify_section(
    source: RecordSource,
    start: CheckpointHeader,
    end: CheckpointHeader | None,
    app: AppCommand,
    *,
    last_sequence_id: int | None = None,
    receivers: Mapping[str, RecordSource] | None = None,
    progress: Callable[[int, int | None], None] | None = None,
    announce: Callable[[str], None] = lambda address: None,
) -> VerifySection:
    """Replay one section with ``app`` and compare. ``receivers``: the available logs of called instances.

    ``last_sequence_id``: the last record to replay if ``end`` is None. Raises the errors of :func:`run_replay`; but an
    app that ends at the last record of the log with status 0 is a result.
    """
    plan = ReplayPlan(checkpoint_id=start.checkpoint_id, last_sequence_id=last_sequence_id)
    if end is not None:
        plan = ReplayPlan(checkpoint_id=start.checkpoint_id, last_sequence_id=end.sequence_id, last_version=end.version)
        refuse_pickle(source, [end.checkpoint_id])
    with tempfile.TemporaryDirectory(prefix="immortal-verify-") as folder:
        blob = Path(folder) / "replayed"
        checking = CheckingSink(source, start, receivers or {})
        summary = source.summary()
        route = plan_route(plan, source, summary)
        ended = None
        try:
            result = run_replay(source, route, app, checking, blob_path=blob, progress=progress, announce=announce)
        except AppExitedError as error:
            ended = find_end(source, route, app, error, announce)
            if ended.exit_status or ended.sequence_id != summary.last_sequence_id:
                raise ended from None
            plan = ReplayPlan(start.checkpoint_id, summary.last_sequence_id - 1)
            checking = CheckingSink(source, start, receivers or {})
            result = run_replay(source, plan, app, checking, progress=progress, announce=announce)
        section = VerifySection(start, end, result, checking.counts, ended=ended)
        if result.failure is None:
            checking.finish(None if end is None else end.outputs, all_made=result.flushed)
            if end is not None:
                _compare_state(section, source, end, app, blob)
        section.outputs = checking.findings()
        section.unproved = checking.unproved()
    return section


def state_problem(source: RecordSource, route: Route, app: AppCommand, first_record: int = 0) -> str:
    """Replay the section around the end of ``route`` to its checkpoint; describe a difference of the states.

    A change of the code can be invisible in the calls. Returns "" if the states are equal, or the section has over
    PROVED_RECORDS_MAX records. ``first_record``: earlier records ran other code, for which this code proves nothing.
    """
    start, usable = route.checkpoint, usable_checkpoints(source.summary())
    ends = [one for one in usable if one.sequence_id > start.sequence_id and one.version == start.version][:1]
    pairs = [(start, end) for end in ends] or [
        (one, start) for one in usable if one.sequence_id < start.sequence_id and one.version == start.version
    ][-1:]
    for first, end in pairs:
        if end.sequence_id - first.sequence_id > PROVED_RECORDS_MAX or first.sequence_id + 1 < first_record:
            continue
        try:
            section = verify_section(source, first, end, app)
        except ReplayError:
            continue  # the caller replays another part of the log
        if section.state_is_same is False:
            differences = section.state.differences if section.state is not None else ()
            where = f", such as {differences[0]['path'] or 'all of it'}" if differences else ""
            return f"at checkpoint {end.checkpoint_id} (after record {end.sequence_id}) its state differs{where}"
    return ""


def _compare_state(
    section: VerifySection, source: RecordSource, end: CheckpointHeader, app: AppCommand, blob: Path
) -> None:
    result = section.result
    if (result.blob_size_bytes, result.blob_check) == (end.size_bytes, end.check):
        section.state_is_same = True
        return
    old = blob.with_name("checkpoint")
    with old.open("wb") as file:
        for chunk in source.checkpoint_chunks(end.checkpoint_id):
            file.write(chunk)
    if result.description is None:  # no SDK app: only its bytes can be compared
        problem = (
            f"the checkpoint has {end.size_bytes} bytes with CRC {end.check:016x}, "
            f"the replay ends with {result.blob_size_bytes} with CRC {result.blob_check:016x}"
        )
        section.state = StateDivergence((), problem)
    else:
        name = result.label if app.by_hand else app.name
        try:
            differences = diff_states(
                name, old, name, blob, limit=DIFFERENCES_MAX + 1, old_code=app.code, new_code=app.code
            )
        except ReplayError as error:
            section.state = StateDivergence((), str(error))
        else:
            section.state = StateDivergence(differences) if differences else None
    section.state_is_same = section.state is None


class CheckingSink(Sink):
    """Sink that compares the outputs of the replay with the marks and the receivers' logs, during the replay."""

    def __init__(self, source: RecordSource, start: CheckpointHeader, receivers: Mapping[str, RecordSource]) -> None:
        self.counts: dict[str, int] = {}
        self._source = source
        self._start = start
        self._receivers = receivers
        self._streams: dict[str, _CheckedStream] = {}

    def record(self, sequence_id: int, value: bytes, trailer: Trailer) -> None:
        for mark in trailer.outputs:
            self._stream(mark.destination).expect(sequence_id, OutputMark(mark.position, mark.checksum))

    def outputs(self, made: Outputs) -> None:
        self.counts[made.destination] = self.counts.get(made.destination, 0) + made.count
        batch = OutputBatch(made.first_position, made.count, made.payload)
        self._stream(made.destination).add_outputs(batch, made.origins or ())

    def impulses(self, kept: KeptImpulses) -> None:
        self._stream(kept.destination).add_impulses(OutputBatch(kept.first_position, kept.count, kept.payload))

    def finish(self, marks: Mapping[str, OutputMark] | None, *, all_made: bool) -> None:
        """Compare the ends of all streams with ``marks``, those at the end of the section; None if unknown."""
        for destination in marks or ():
            self._stream(destination)
        for destination, stream in self._streams.items():
            mark = None if marks is None else marks.get(destination, OutputMark(0, 0))
            stream.finish(mark, all_made=all_made)

    def findings(self) -> list[OutputDivergence]:
        found = [stream.finding() for _, stream in sorted(self._streams.items())]
        return [finding for finding in found if finding is not None]

    def unproved(self) -> dict[str, int]:
        counts = {destination: stream.unproved_count for destination, stream in self._streams.items()}
        return {destination: count for destination, count in counts.items() if count}

    def _stream(self, destination: str) -> _CheckedStream:
        stream = self._streams.get(destination)
        if stream is None:
            mark = self._start.outputs.get(destination)
            stream = _CheckedStream(destination, mark, self._witness(destination))
            self._streams[destination] = stream
        return stream

    def _witness(self, destination: str) -> ReceiverComparison | None:
        if destination == ONESELF:  # outputs of a record are logged after it
            return ReceiverComparison(received(self._source, ONESELF, self._start.sequence_id + 1))
        receiver = self._receivers.get(destination)
        return None if receiver is None else ReceiverComparison(received(receiver, self._source.identity.instance_name))


class ProvingSink(CheckingSink):
    """Sink that compares a replay's outputs with the log, as a recovery does. ``counting``: receives them too."""

    def __init__(self, source: RecordSource, route: Route, counting: Sink | None = None) -> None:
        super().__init__(source, route.checkpoint, {})
        self._route = route
        self._counting = counting or Sink()

    def outputs(self, made: Outputs) -> None:
        super().outputs(made)
        self._counting.outputs(made)

    def problem(self, name: str, result: ReplayResult) -> str:
        """Describe where the ended replay of the instance ``name`` left the log; "" if nothing shows that it did."""
        if result.failure is not None:
            return ""
        if self._route.last_message is None:
            self.check_next_marks(result.last_sequence_id)
        self.finish(None, all_made=result.flushed)
        methods = {} if result.description is None else result.description.methods
        return self.difference(name, methods)

    def difference(self, name: str, methods: Methods, unsure: Collection[str] = ()) -> str:
        """Describe where the replay has left the log so far; "" if nothing shows that it did. ``unsure``: destinations
        whose positions say nothing."""
        for finding in self.findings():
            if finding.destination in unsure:
                continue
            if finding.divergence is not None:
                return format_divergence(finding.divergence, name, methods, shown=1)
            return f"{name!r} does not repeat what its log has: its calls to itself are different"
        return ""

    def check_next_marks(self, last_sequence_id: int) -> None:
        """Compare with the marks of the record after the last one, unless an upgrade is between them."""
        summary, following = self._source.summary(), last_sequence_id + 1
        if following > summary.last_sequence_id or any(v.sequence_id == last_sequence_id for v in summary.versions):
            return
        for value in self._source.values(following, following):
            header = decode_header(value)
            for mark in decode_trailer(value[header.size_bytes :], header.check).outputs:
                stream = self._stream(mark.destination)
                if (
                    mark.position <= stream.replayed_position
                ):  # else impulses can lie between, which the replay has not met
                    stream.expect(following, OutputMark(mark.position, mark.checksum))


class _CheckedStream:
    def __init__(self, destination: str, mark: OutputMark | None, witness: ReceiverComparison | None) -> None:
        self.destination = destination
        self._check = OutputCheck(destination, mark)
        self._checksum = mark.checksum if mark else 0
        self._witness = witness
        self._divergence: Divergence | None = None
        self._unproved: deque[tuple[int, int]] = deque()  # (first position, count) of unproved batches
        self._proved_position = self._called_position = mark.position if mark else 0
        self.replayed_position = self._called_position  # of the last message that the replay has made or skipped
        self._is_surplus = False
        self._marks: deque[int] = deque()  # positions of marks not reached yet
        self._origins: deque[tuple[int, Origin]] = deque(maxlen=ORIGINS_KEPT_MAX)  # (first position, its origin)

    def expect(self, sequence_id: int | None, mark: OutputMark) -> None:
        def compare() -> None:
            self._check.expect(sequence_id, mark)
            self._check.compare()

        self._guard(compare)
        if self._divergence is None:
            self._marks.append(mark.position)
            self._prove()
            if len(self._marks) > MARKS_AHEAD_MAX:
                self._guard(self._check.finish)

    def add_outputs(self, batch: OutputBatch, origins: Sequence[Origin]) -> None:
        if self._divergence is not None:
            return
        position = batch.first_position
        for origin in origins:
            self._origins.append((position, origin))
            position += origin.count
        before, self._checksum = self._checksum, crc64(batch.payload, self._checksum)
        if self._witness is not None:
            self._witness.compare_outputs(batch.first_position, batch.count, batch.payload)
        self._guard(lambda: self._check.add_made(batch, before, self._checksum))
        self._unproved.append((batch.first_position, batch.count))
        self.replayed_position = self._called_position = batch.last_position
        self._prove()

    def _prove(self) -> None:
        """Drop proved batches: a mark that is reached proves all messages before it."""
        while self._marks and self._marks[0] <= self.replayed_position:
            self._proved_position = max(self._proved_position, self._marks.popleft())
        if self._witness is not None:
            self._proved_position = max(self._proved_position, self._witness.compared_position)
        unproved = self._unproved
        while unproved and unproved[0][0] + unproved[0][1] - 1 <= self._proved_position:
            unproved.popleft()

    @property
    def unproved_count(self) -> int:
        return sum(count - max(0, self._proved_position - first + 1) for first, count in self._unproved)

    def add_impulses(self, impulses: OutputBatch) -> None:
        self._guard(lambda: self._check.add_made(impulses, self._checksum, self._checksum))
        self.replayed_position = impulses.last_position
        self._prove()

    def finish(self, mark: OutputMark | None, *, all_made: bool) -> None:
        """Compare the stream's end with ``mark`` (None: unknown). ``all_made``: the app holds no output back."""
        if mark is not None:
            self.expect(None, mark)
        if not all_made:  # outputs that the app held back then can come earlier or later now
            return
        self._guard(self._check.finish)
        if mark is not None and self._called_position > mark.position and self._divergence is None:
            # No stream ever had this mark: the messages after the real one are the surplus.
            self._is_surplus = True
            self.expect(None, OutputMark(self._called_position, self._checksum ^ 1))

    def _guard(self, compare: Callable[[], None]) -> None:
        """Run ``compare`` unless a divergence was found: nothing after the first one can be compared."""
        if self._divergence is None:
            try:
                compare()
            except OutputDivergenceError as error:
                self._divergence = error.divergence

    def finding(self) -> OutputDivergence | None:
        difference = self._witness.difference if self._witness is not None else None
        if self._divergence is None and difference is None:
            return None
        positions = [position for position, _ in self._divergence.made] if self._divergence else []
        if difference is not None:
            positions.append(difference.position)
        origins = self._origins_of(positions)
        return OutputDivergence(self.destination, self._divergence, difference, origins, self._is_surplus)

    def _origins_of(self, positions: Sequence[int]) -> dict[int, Origin]:
        wanted = set(positions)
        found = {}
        for first, origin in self._origins:
            for position in wanted.intersection(range(first, first + origin.count)):
                found[position] = origin
        return found


# A receiver's log has the messages as they were sent then: the best witness of a stream, message by message.


class Difference(Struct, frozen=True):
    """First message of a stream that differs now; both are whole RPC messages in incoming form."""

    position: int
    then: bytes
    now: bytes


class _Segment(Struct):
    """Consecutive messages, ``count`` of them left."""

    position: int  # position of the first message left
    count: int
    payload: bytes

    def pop(self, count: int) -> bytes:
        """Take the next ``count`` messages."""
        offset = offset_after(self.payload, count, self.count)
        taken, self.payload = self.payload[:offset], self.payload[offset:]
        self.position += count
        self.count -= count
        return taken


def received(
    source: RecordSource, sender: str, first_sequence_id: int | None = None
) -> Iterator[tuple[int, int, bytes]]:
    """Yield the messages of ``sender`` in a log ("": of its own instance): (first position, count, payload).

    It begins with the record ``first_sequence_id``; None: with the log's first one.
    """
    first = source.summary().first_sequence_id if first_sequence_id is None else first_sequence_id
    for value in source.values(first):
        record = record_of(value)
        trailer = decode_trailer(value[record.header.size_bytes :], record.header.check)
        if not any(batch.kind == BatchKind.STREAM and batch.name == sender for batch in trailer.batches):
            continue
        for batch, content in zip(trailer.batches, batches(record.content), strict=True):
            if batch.kind == BatchKind.STREAM and batch.name == sender:
                yield batch.first_position, batch.count, content.payload


class ReceiverComparison:
    """Comparison of a replay's outputs with a receiver's log. Positions must only grow.

    ``compared_position``: of the last message that both sides have. Messages that the receiver lacks, because it
    trimmed them or they had not arrived, are skipped, and so are impulses, which only its log has.
    """

    def __init__(self, segments: Iterator[tuple[int, int, bytes]]) -> None:
        self.compared_position = 0
        self.difference: Difference | None = None
        self._segments = segments
        self._then: _Segment | None = self._next()

    def _next(self) -> _Segment | None:
        segment = next(self._segments, None)
        return None if segment is None else _Segment(*segment)

    def compare_outputs(self, first_position: int, count: int, payload: bytes) -> None:
        """Compare outputs of the replay; set ``difference`` at the first that differs."""
        now = _Segment(first_position, count, payload)
        while now.count and self._then is not None and self.difference is None:
            then = self._then
            if not then.count or then.position + then.count <= now.position:
                self._then = self._next()
            elif then.position < now.position:
                then.pop(now.position - then.position)
            elif now.position < then.position:
                now.pop(min(now.count, then.position - now.position))
            else:
                self._compare(then, now, min(then.count, now.count))

    def _compare(self, then: _Segment, now: _Segment, count: int) -> None:
        position = now.position
        old, new = then.pop(count), now.pop(count)
        self.compared_position = position + count - 1
        if old == new:
            return
        for index in range(count):
            old_end, new_end = decode_message(old, 0)[2], decode_message(new, 0)[2]
            if old[:old_end] != new[:new_end]:
                self.difference = Difference(position + index, old[:old_end], new[:new_end])
                return
            old, new = old[old_end:], new[new_end:]
