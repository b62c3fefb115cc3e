"""Run of the log's own code over a whole log: the base of comparisons. It is kept as numbers in arrays, and in a file.

What grows with the log in memory are some numbers for each record, stream and execution.
"""

from __future__ import annotations

import os
from array import array
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import lru_cache
from itertools import islice
from tempfile import TemporaryFile
from weakref import finalize

from msgspec import Struct

from immortal.appsdk.handlers.definition import Definition
from immortal.appsdk.waiting.impulses import EffectResult
from immortal.coordinator.core.interfaces import CheckpointHeader
from immortal.coordinator.log.reader import RecordSource
from immortal.coordinator.log.record_contents import batches, record_of, rpcs
from immortal.protocol import decoding, personal_keys
from immortal.protocol.extensions import RandomDraw
from immortal.protocol.messages import MessageType, RpcKind
from immortal.protocol.system_methods import EFFECT_METHOD_ID
from immortal.protocol.trailer import BatchKind
from immortal.protocol.verdicts import MessageKey, Verdict
from immortal.replay.app_process import forgotten_notes
from immortal.replay.fleet.player import LoggedRecord, Output, Place, Player, Turn, logged, outputs_in
from immortal.replay.plan import ReplayError, Route, unshowable_state_text
from immortal.replay.verify import ProvingSink

_NO_TIMER = -1
_DECODED_MAX = 8  # records whose messages are kept decoded


class Runs:
    """Runs of messages of one stream, in order: first and last position, record, index of the first one there."""

    def __init__(self) -> None:
        self.firsts, self.lasts, self.records, self.indices = (array("q") for _ in range(4))

    def add(self, first: int, last: int, sequence_id: int, index: int = 0) -> None:
        self.firsts.append(first)
        self.lasts.append(last)
        self.records.append(sequence_id)
        self.indices.append(index)

    def __iter__(self) -> Iterator[range]:
        """Yield the positions of each run."""
        return (range(first, last + 1) for first, last in zip(self.firsts, self.lasts, strict=True))

    def find(self, position: int) -> int | None:
        """Return the number of the run that has the message at ``position``; None if none has."""
        at = bisect_right(self.firsts, position) - 1
        return at if at >= 0 and position <= self.lasts[at] else None

    def next_after(self, position: int) -> int | None:
        """Return the position of the first message behind ``position``; None if there is none."""
        at = bisect_right(self.lasts, position)
        return max(position + 1, self.firsts[at]) if at < len(self.firsts) else None

    def of_record(self, sequence_id: int) -> Iterator[range]:
        """Yield the positions of the runs of that record."""
        at = bisect_left(self.records, sequence_id)
        while at < len(self.records) and self.records[at] == sequence_id:
            yield range(self.firsts[at], self.lasts[at] + 1)
            at += 1

    def positions(self) -> Iterator[tuple[int, int]]:
        """Yield (position, record) of all messages."""
        for run, sequence_id in zip(self, self.records, strict=True):
            for position in run:
                yield position, sequence_id


class Log:
    """Records of a log after ``checkpoint``, with the place of each message of each stream. Records are read anew."""

    def __init__(self, source: RecordSource, checkpoint: CheckpointHeader) -> None:
        self.source = source
        self.checkpoint = checkpoint
        self.messages = 0
        self._times, self._inputs = array("q"), array("q", [0])
        self._runs: dict[str, Runs] = defaultdict(Runs)
        self.read = lru_cache(_DECODED_MAX)(self._read)

    def add(self, record: LoggedRecord) -> None:
        self._times.append(record.time_ns)
        index = inputs = 0
        for batch in record.trailer.batches:
            if batch.kind == BatchKind.STREAM:
                self._runs[batch.name].add(batch.first_position, batch.last_position, record.sequence_id, index)
            elif batch.kind in (BatchKind.IMPULSES, BatchKind.CLIENT):
                inputs += batch.count
            index += batch.count
        self._inputs.append(self._inputs[-1] + inputs)
        self.messages += index

    def __len__(self) -> int:
        return len(self._times)

    def records(self) -> Iterator[LoggedRecord]:
        return islice(logged(self.source, self.checkpoint, None), len(self))

    def _read(self, sequence_id: int) -> LoggedRecord | None:
        """Read one record; return None if it is not in this part of the log."""
        if not 0 < sequence_id - self.checkpoint.sequence_id <= len(self):
            return None
        return LoggedRecord.of(next(iter(self.source.values(sequence_id, sequence_id))))

    @property
    def begin_ns(self) -> int:
        return self.checkpoint.time_ns

    @property
    def last_sequence_id(self) -> int:
        return self.checkpoint.sequence_id + len(self)

    def time_of(self, sequence_id: int) -> int:
        at = sequence_id - self.checkpoint.sequence_id - 1
        return self._times[at] if at >= 0 else self.begin_ns

    def count_inputs(self, sequence_id: int) -> int:
        """Count the messages from outside up to that record: impulses, with timers and results, clients' requests."""
        return self._inputs[sequence_id - self.checkpoint.sequence_id]

    def place_of(self, sender: str, position: int) -> Place | None:
        """Return the place of the message with ``position`` in the stream of ``sender`` ("": itself); None if the
        log's part has none."""
        runs = self._runs[sender]
        at = runs.find(position)
        return None if at is None else (runs.records[at], runs.indices[at] + position - runs.firsts[at])

    def was_before(self, sender: str, position: int) -> bool:
        """Return True if the message was handled before the first record here."""
        firsts = self._runs[sender].firsts
        return bool(firsts) and position < firsts[0]

    def received_position(self, sender: str, sequence_id: int) -> int:
        """Return the position of the last message of ``sender`` up to that record; 0 if there is none."""
        runs = self._runs[sender]
        at = bisect_right(runs.records, sequence_id)
        return runs.lasts[at - 1] if at else 0


class Draws:
    """Numbers that executions drew, by what began the execution: in the order drawn, so they only grow.

    ``waited``: of executions that waited at the checkpoint.
    """

    def __init__(self) -> None:
        self.waited: list[RandomDraw] = []
        self._numbers, self._tasks, self._next, self._last = (array("q") for _ in range(4))
        self._details = array("Q")
        self._whats = array("i")
        self._names: list[str] = []
        self._known: dict[str, int] = {}
        self.starts = lru_cache(_DECODED_MAX)(self._starts_in)
        self._records, self._firsts = array("q"), array("q")  # records in which numbers were drawn, their first draw

    def add(self, sequence_id: int, draws: list[RandomDraw]) -> None:
        if not draws:
            return
        self._records.append(sequence_id)
        self._firsts.append(len(self._numbers))
        for draw in draws:
            number = len(self._numbers)
            if (what := self._known.get(draw.what)) is None:
                what = self._known[draw.what] = len(self._names)
                self._names.append(draw.what)
            self._numbers.append(draw.number)
            self._tasks.append(draw.task)
            self._details.append(draw.detail)
            self._whats.append(what)
            self._next.append(-1)
            self._last.append(number)
            if not draw.task:
                continue
            if (start := self._find(draw.task)) is None:
                self.waited.append(draw)
            else:
                self._next[self._last[start]] = self._last[start] = number

    def _find(self, number: int) -> int | None:
        at = bisect_left(self._numbers, number)
        return at if at < len(self._numbers) and self._numbers[at] == number else None

    def task_of(self, number: int) -> int | None:
        """Return the execution that made the call of that number; None if it is none of the log's part."""
        at = self._find(number)
        return None if at is None else self._tasks[at] or None

    def start_of_task(self, task: int | None) -> Place | None:
        """Return the place of the message that began an execution; None if it began before the run."""
        at = None if task is None else self._find(task)
        if at is None or self._tasks[at]:
            return None
        return self._records[bisect_right(self._firsts, at) - 1], self._details[at]

    def draws_of(self, sequence_id: int, index: int) -> Iterator[RandomDraw]:
        """Yield all numbers of the execution that the message began, its own first."""
        at = self.starts(sequence_id).get(index, -1)
        while at >= 0:
            yield RandomDraw(self._numbers[at], self._tasks[at], self._names[self._whats[at]], self._details[at])
            at = self._next[at]

    def _starts_in(self, sequence_id: int) -> dict[int, int]:
        """Return the first draw of each execution that began in a record, by the index of what began it."""
        record = bisect_left(self._records, sequence_id)
        if record == len(self._records) or self._records[record] != sequence_id:
            return {}
        firsts = self._firsts
        end = firsts[record + 1] if record + 1 < len(firsts) else len(self._numbers)
        return {self._details[at]: at for at in range(firsts[record], end) if not self._tasks[at]}


class EffectDone(Struct):
    """Effect whose result is in the log."""

    name: str
    encoded: bytes
    key: str | None
    number: int
    begun_ns: int
    done: Place | None = None
    done_ns: int = 0
    message: bytes = b""


class Recorded:
    """Complete run of the log's own code from the checkpoint of ``route`` to ``to_ns``. Raises ReplayError if its
    calls differ from the log's. ``watch``: called with each record, its result, and when the next timer is due.
    """

    def __init__(
        self,
        source: RecordSource,
        route: Route,
        definition: Definition,
        outsiders: frozenset[str],
        to_ns: int | None,
        watch: Callable[[LoggedRecord, Turn, int | None], object] = lambda record, turn, due_ns: None,
    ) -> None:
        name = source.identity.instance_name
        self.log = Log(source, route.checkpoint)
        self.runs: dict[str, Runs] = defaultdict(Runs)  # of the app's outputs, by destination
        self.draws = Draws()
        self.effects: dict[int, EffectDone] = {}
        self.verdicts: dict[MessageKey, Verdict] = {}
        self.outputs_by_place = lru_cache(_DECODED_MAX)(self._outputs_by_place)
        self._next_dues_ns = array("q")  # after the checkpoint, and after each record
        self._file = TemporaryFile(prefix="immortal-what-if-")  # noqa: SIM115 (open as long as the run is used)
        finalize(self, self._file.close)
        self._ends = array("q", [0])  # in the file, of each record's outputs
        proving = ProvingSink(source, route)
        forgotten_elsewhere = personal_keys.noted.copy()  # by this process, in other runs
        personal_keys.noted.clear()
        with closing(Player(source, route, definition, proving, outsiders=outsiders)) as player:
            self._note(player, route.checkpoint.time_ns)
            for record in logged(source, route.checkpoint, to_ns):
                self.log.add(record)
                proving.record(record.sequence_id, record.value, record.trailer)
                for place, message, number in _effect_results(record) if self.effects else ():
                    if (effect := self.effects.get(number)) is not None:
                        effect.done, effect.done_ns, effect.message = place, record.time_ns, message
                turn = player.give_logged(record)
                if turn.stopped:
                    raise ReplayError(f"{name}: {definition.name}, the code of the log, stops at {turn.stopped}")
                for made in turn.made:
                    last_position = made.first_position + made.count - 1
                    self.runs[made.destination].add(made.first_position, last_position, record.sequence_id)
                self._ends.append(self._ends[-1] + self._file.write(turn.output))
                self.draws.add(record.sequence_id, turn.draws)
                self.verdicts |= {verdict.key: verdict for verdict in turn.verdicts}
                watch(record, turn, self._note(player, record.time_ns))
            if problem := proving.difference(name, player.methods):
                if personal_keys.noted:
                    raise ReplayError(
                        f"{name}: {'; '.join(forgotten_notes(sorted(personal_keys.noted)))}. So its calls are not those"
                        f" of the log, and what follows from a change can't be told: give --from with a time after that"
                    )
                raise ReplayError(unshowable_state_text(name, problem))
            personal_keys.noted.update(forgotten_elsewhere)
            self._file.flush()
            last = self.log.last_sequence_id
            told = {one.key: one for one in source.summary().verdicts if one.sequence_id <= last}
            self.verdicts |= {key: one for key, one in told.items() if key[0] > route.checkpoint.sequence_id}
            self.state = player.finish(last)
            self.methods = player.methods

    def _note(self, player: Player, time_ns: int) -> int | None:
        due_ns = player.next_due_ns
        self._next_dues_ns.append(_NO_TIMER if due_ns is None else due_ns)
        for number, effect in player.waiting_effects().items():
            if number not in self.effects:
                key = effect.options.key
                self.effects[number] = EffectDone(effect.function.name, effect.encoded, key, number, time_ns)
        return due_ns

    @property
    def sent_count(self) -> int:
        return sum(len(run) for runs in self.runs.values() for run in runs)

    def due_ns(self, sequence_id: int) -> int | None:
        """Return the time of the next timer after that record; None if there was none."""
        due_ns = self._next_dues_ns[sequence_id - self.log.checkpoint.sequence_id]
        return None if due_ns == _NO_TIMER else due_ns

    def output_of_record(self, sequence_id: int) -> bytes:
        """Return the app's output in a record, as bytes; nothing if the record is not in the log's part."""
        at = sequence_id - self.log.checkpoint.sequence_id
        if not 0 < at < len(self._ends):
            return b""
        begin = self._ends[at - 1]
        return os.pread(self._file.fileno(), self._ends[at] - begin, begin)

    def _outputs_by_place(self, sequence_id: int) -> dict[Place, dict[str, list[Output]]]:
        """Return what each message of a record sent, by destination."""
        found: dict[Place, dict[str, list[Output]]] = {}
        runs = ((destination, run) for destination, runs in self.runs.items() for run in runs.of_record(sequence_id))
        for output in outputs_in(self.output_of_record(sequence_id), self.log.source.identity.instance_name, runs):
            found.setdefault(output.place, {}).setdefault(output.destination, []).append(output)
        return found

    def outputs_of(self, place: Place) -> dict[str, list[Output]]:
        """Return what the message at ``place`` sent, by destination; nothing if it is not in the log's part."""
        return self.outputs_by_place(place[0]).get(place, {})

    def sent(self, destination: str, run: range) -> Iterator[Output]:
        """Yield the messages at these positions of a stream, which one record made."""
        at = self.runs[destination].find(run.start)
        outputs_by_place = {} if at is None else self.outputs_by_place(self.runs[destination].records[at])
        outputs = [output for made in outputs_by_place.values() for output in made.get(destination, ())]
        yield from sorted((one for one in outputs if one.position in run), key=lambda one: one.position)

    def record_up_to(self, destination: str, position: int) -> int | None:
        """Return the record that made a stream's last message up to ``position``; None if there is none."""
        runs = self.runs[destination]
        at = bisect_right(runs.firsts, position) - 1
        return runs.records[at] if at >= 0 else None

    def origin_of(self, destination: str, position: int) -> Place | None:
        """Return the place that caused that message of a stream; None for an impulse, and before the run."""
        runs = self.runs[destination]
        if (at := runs.find(position)) is None:
            return None
        for place, made in self.outputs_by_place(runs.records[at]).items():
            if any(output.position == position for output in made.get(destination, ())):
                return place
        return None


def _effect_results(record: LoggedRecord) -> Iterator[tuple[Place, bytes, int]]:
    if not any(batch.kind == BatchKind.IMPULSES for batch in record.trailer.batches):
        return
    index = 0
    for content in batches(record_of(record.value).content):
        if content.message_type != MessageType.INITIAL_MESSAGE:
            for at, (message, rpc) in enumerate(rpcs(content.payload)):
                if rpc.kind == RpcKind.CALL and rpc.method_id == EFFECT_METHOD_ID:
                    number = decoding.decode(rpc.arguments, type=EffectResult).number
                    yield (record.sequence_id, index + at), message, number
        index += content.count
