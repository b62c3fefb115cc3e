"""Time travel within one log: a replay that stops at any record and continues, and questions about moments.

A moment is after a message: (record, the message's index in it).
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

from immortal.appsdk.handlers.definition import Definition, definition_of
from immortal.appsdk.handlers.proxy import all_method_names
from immortal.appsdk.running.inspection import class_names
from immortal.appsdk.running.runner import load_or_report
from immortal.appsdk.running.tracing import TracingOutbox
from immortal.appsdk.state.tree import Difference, Fields, Tree, differences, tree
from immortal.coordinator.core.formatting import format_call
from immortal.coordinator.core.interfaces import CheckpointHeader, OutputMark
from immortal.coordinator.log.reader import RecordSource
from immortal.coordinator.log.record_contents import batches, message_at, record_of, rpcs
from immortal.protocol import redaction
from immortal.protocol.messages import IncomingRpc
from immortal.protocol.verdicts import Verdict
from immortal.replay.plan import ReplayError, usable_checkpoints
from immortal.replay.result import format_failure
from immortal.replay.travel.lines import LineWatch
from immortal.replay.travel.minimal import PartialRuns, fewest, literals
from immortal.replay.travel.values import (
    MISSING,
    Step,
    compiled,
    evaluate,
    part_of,
    same,
    shown,
    steps_of,
    text_at,
    text_of,
    value_at,
)
from immortal.replay.travel.walk import AfterMessage, Walk, name_of

At = tuple[int, int]
Values = dict[str, Any]

STATES_MAX = 64  # states kept, to step back and forth between them
STATES_S = 0.2  # for states of a record that were not asked for
DIFFERENCES_MAX = 100
QUESTION_S = 10.0  # then the answer is cut, and says how far the search got
POINTS_MAX = 400
MADE_MAX = 200  # outputs of one message that are shown


class MomentExplorer:
    """Explorer that answers questions about one log's moments. ``app``: "module:Class" to replay. Not thread-safe."""

    def __init__(self, source: RecordSource, app: str) -> None:
        """Load the class. Raises ReplayError if it can't be used, AppError."""
        cls = load_or_report(app)
        if cls is None:
            raise ReplayError(f"{app} can't be used")
        self._source = source
        self._definition: Definition = definition_of(cls)
        self._methods = all_method_names(self._definition)
        self._walk: Walk | None = None
        self._states: OrderedDict[At, Fields] = OrderedDict()
        self._made: OrderedDict[int, dict[int, list[tuple[str, int, bytes]]]] = OrderedDict()
        self._end_s = 0.0

    def begin(self, end_s: float) -> None:
        """Begin a question, whose answer is cut at that time of the monotonic clock."""
        self._end_s = end_s

    def overview(self, record: int = 0) -> Values:
        """Return the records that can be visited, the checkpoints and the handlers, by the code of ``record``."""
        summary = self._source.summary()
        usable = usable_checkpoints(summary)
        return {
            "first": usable[0].sequence_id + 1 if usable else None,
            "last": summary.last_sequence_id,
            "checkpoints": [[one.checkpoint_id, one.sequence_id, one.time_ns] for one in usable],
            "handlers": sorted({name for (destination, _), name in self._methods.items() if not destination}),
        }

    # --- one moment --------------------------------------------------------------------------------------------------

    def moment(self, record: int, index: int | None, path: str = "") -> Values:
        """Return the state, the message's changes and its outputs. ``index`` None: the record's last message."""
        count, index = self._place(record, index)
        at = (record, index)
        self._visit(at)
        steps = steps_of(path)
        state, before = self._states[at], self._states.get(_before(at))
        part = part_of(state, steps)
        changes = [] if before is None else _changes(before, state)
        return {
            "record": record,
            "index": index,
            "count": count,
            "message": self._words(record, index),
            "state": None if part is MISSING else shown(part, path),
            **_change_values(changes),
            "made": [
                {"destination": to, "position": position, "words": format_call(message, to, self._methods)}
                for to, position, message in self._made.get(record, {}).get(index, [])[:MADE_MAX]
            ],
            "made_count": len(self._made.get(record, {}).get(index, [])),
            "failed": self._failed(at),
        }

    def between(self, since: At, record: int | None, index: int | None) -> Values:
        """Return the states before ``since`` and after another message, and how they differ. ``record`` None: last."""
        record = self._source.summary().last_sequence_id if record is None else record
        index = max(0, self._count(record) - 1) if index is None else index
        since = since[0], since[1]
        self._visit(since)
        if _before(since) not in self._states:  # the message before failed alone
            self._visit(_before(since))
        before = self._states[_before(since)]
        self._visit((record, index))
        after = self._states[record, index]
        changes = _changes(before, after)
        return {
            "before": shown(before, ""),
            "after": shown(after, ""),
            "at": [record, index],
            **_change_values(changes),
        }

    def _visit(self, at: At) -> None:
        """Store the state at a moment, and the state before."""
        if at in self._states and _before(at) in self._states and at[0] in self._made:
            self._states.move_to_end(at)
            return
        record, wanted = at
        walk = self._before_record(record)
        states: dict[At, Fields] = {(record, -1): walk.state()} if wanted == 0 else {}
        end_s: float | None = None

        def after_message(sequence_id: int, index: int, rpc: IncomingRpc | None, instance: Any) -> None:
            nonlocal end_s
            if index < wanted - 1 or (end_s is not None and index > wanted and time.monotonic() > end_s):
                return
            if len(states) < STATES_MAX // 2:
                states[record, index] = walk.state(instance)
            end_s = end_s or time.monotonic() + STATES_S

        walk.made.clear()
        walk.advance(record, after_message, collects=True)
        walk.check_next_record()
        if at not in states:  # the message failed alone, without a callback: it changed nothing
            states[at] = states.get(_before(at)) or walk.state()
        self._store_states(record, states, walk)

    def _store_states(self, record: int, states: dict[At, Fields], walk: Walk) -> None:
        for at, state in states.items():
            self._states[at] = state
            self._states.move_to_end(at)
        while len(self._states) > STATES_MAX:
            self._states.popitem(last=False)
        made: dict[int, list[tuple[str, int, bytes]]] = {}
        for origin, to, position, message in _messages_made(walk):
            if origin[0] == record:
                made.setdefault(origin[1], []).append((to, position, message))
        self._made[record] = made
        while len(self._made) > STATES_MAX:
            self._made.popitem(last=False)

    def evaluate(self, record: int, index: int, expression: str) -> Values:
        """Evaluate a Python expression after a message."""
        code, walk = compiled(expression), self._before_record(record)
        answer: Values = {}

        def after_message(sequence_id: int, at: int, rpc: IncomingRpc | None, instance: Any) -> None:
            if at == index:
                try:
                    value = evaluate(code, instance, name_of(rpc, self._methods), rpc, sequence_id, at)
                    answer.update(value=shown(_of_expression(tree(value)), "") | {"label": expression})
                except Exception as error:
                    answer.update(raised=_raised(error)[:500])

        walk.advance(record, after_message)
        self._walk = None  # the expression can have changed the state
        return answer or {"raised": "that message has failed, so there is no moment behind it"}

    # --- searches ----------------------------------------------------------------------------------------------------

    def find(self, record: int, index: int, handler: str, expression: str, *, back: bool) -> Values:
        """Find the next (or previous) moment after a message of ``handler`` ("": any) at which ``expression`` holds."""
        code = compiled(expression) if expression else None
        raised: list[str] = []

        def hits(sequence_id: int, at: int, rpc: IncomingRpc | None, instance: Any) -> bool:
            method = name_of(rpc, self._methods)
            if handler and handler not in (method, method.rpartition(".")[2]):
                return False
            if code is None:
                return True
            try:
                return bool(evaluate(code, instance, method, rpc, sequence_id, at))
            except Exception as error:
                if not raised:
                    raised.append(f"{_raised(error)} (at {sequence_id}:{at})"[:300])
                return False

        found = self._find_back((record, index), hits) if back else self._find_on((record, index), hits)
        if code is not None:
            self._walk = None
        return found | {"raised": raised[0] if raised else ""}

    def _find_on(self, at: At, hits: Callable[[int, int, IncomingRpc | None, Any], bool]) -> Values:
        last = self._source.summary().last_sequence_id
        walk = self._before_record(at[0])
        hit: At | None = None

        def after_message(sequence_id: int, index: int, rpc: IncomingRpc | None, instance: Any) -> None:
            nonlocal hit
            if hit is None and (sequence_id, index) > at and hits(sequence_id, index, rpc, instance):
                hit = sequence_id, index

        for record in range(at[0], last + 1):
            walk.advance(record, after_message)
            if hit is not None or self._is_late():
                break
        return {"at": hit, "looked": walk.reached, "is_cut": hit is None and walk.reached < last}

    def _find_back(self, at: At, hits: Callable[[int, int, IncomingRpc | None, Any], bool]) -> Values:
        upper = at[0]
        hit: At | None = None

        def after_message(sequence_id: int, index: int, rpc: IncomingRpc | None, instance: Any) -> None:
            nonlocal hit
            if (sequence_id, index) < at and hits(sequence_id, index, rpc, instance):
                hit = sequence_id, index

        for checkpoint in reversed(self._checkpoints(at[0] - 1)):
            self._walk_on(Walk(self._source, self._definition, checkpoint), upper, after_message)
            if self._is_late():
                return {"at": hit, "looked": checkpoint.sequence_id + 1, "is_cut": True}
            if hit is not None:
                break
            upper = checkpoint.sequence_id
        return {"at": hit, "looked": upper, "is_cut": False}

    def last_change(self, record: int, index: int, path: str) -> Values:
        """Find the last message, up to that one, that changed the value at ``path``.

        Checkpoints are compared first, in steps that double and are then halved. Only the part between two of them is
        replayed, so a value that changed and changed back between two other checkpoints is not found.
        """
        steps, at = steps_of(path), (record, index)
        self._visit(at)
        now = part_of(self._states[at], steps)
        start, is_oldest = self._checkpoint_before_change(record - 1, steps, now)
        walk = Walk(self._source, self._definition, start)
        later = [one for one in self._checkpoints(record - 1) if one.sequence_id > start.sequence_id]
        has_value_then = bool(later) and same(self._value(later[0], steps), now)
        upper = later[0].sequence_id if has_value_then else record  # the end of the part to replay
        found, _ = self._change_on(walk, upper, at, steps)
        if found is None:
            return {"at": None, "since": start.sequence_id if is_oldest else None, "is_cut": walk.reached < upper}
        (hit, old, new) = found
        return {"at": hit, "old": text_of(old), "new": text_of(new), "is_cut": walk.reached < upper}

    def _change_on(
        self, walk: Walk, upper: int, at: At, steps: list[Step]
    ) -> tuple[tuple[At, Tree, Tree] | None, Tree]:
        """Walk on to the record ``upper``: the last change (where, old, new) up to the message ``at``, and the value
        behind that."""
        before = self._read_value(walk, walk.instance, steps)
        found: tuple[At, Tree, Tree] | None = None

        def after_message(sequence_id: int, message: int, rpc: IncomingRpc | None, instance: Any) -> None:
            nonlocal before, found
            if (sequence_id, message) <= at:
                value = self._read_value(walk, instance, steps)
                if not same(value, before):
                    found = (sequence_id, message), before, value
                before = value

        self._walk_on(walk, upper, after_message)
        return found, before

    def change_behind_checkpoint(self, record: int, index: int | None, path: str) -> Values:
        """Find the exact last change up to that message, back to the newest checkpoint before the record.

        ``since``: that checkpoint's record; ``began``: the value there. :meth:`last_change` looks further back.
        """
        _, index = self._place(record, index)
        steps, kept, schema = steps_of(path), self._checkpoints(record - 1), self._definition.state()
        answer: Values = {"since": kept[-1].sequence_id, "is_oldest": len(kept) == 1, "is_cut": False}
        name = str(steps[0][1]) if steps else "$"
        if schema.serializer != "own" and name[0] != "$" and name not in schema.fields:  # a peer, say
            return answer | {"is_oldest": True, "now": None, "began": None}
        walk = Walk(self._source, self._definition, kept[-1])
        began = self._read_value(walk, walk.instance, steps)
        found, now = self._change_on(walk, record, (record, index), steps)
        texts = {key: None if value is MISSING else text_of(value) for key, value in (("now", now), ("began", began))}
        if found is not None:
            texts |= {"old": text_of(found[1]), "new": text_of(found[2])}
        return answer | texts | {"at": found and found[0], "is_cut": walk.reached < record}

    def line(
        self, record: int, index: int, path: str | None, destination: str | None = None, number: int = 0
    ) -> Values:
        """Find the line of user code at which a message set the value at ``path``; with ``destination``, the line that
        made its call ``number`` (from 0) to that instance; None: no line. Also return the async handler that ran it, if
        any, and what ran before: the lines that made what that line used, and the paths of the values that were
        read."""
        steps, walk = steps_of(path or ""), self._before_record(record)
        dispatcher = walk.app.dispatcher
        assert isinstance(dispatcher.outbox, TracingOutbox)
        made = dispatcher.outbox.made
        package = self._definition.cls.__module__.partition(".")[0]
        watch: LineWatch | None = None

        def before_message(sequence_id: int, at: int, instance: Any) -> None:
            nonlocal watch
            if watch is not None:
                watch.stop()
            if (sequence_id, at) == (record, index):
                before = made[destination or ""]

                def read_value() -> Tree:
                    if path is None:
                        return None
                    if destination is None:
                        return self._read_value(walk, instance, steps)
                    return made[destination] > before + number

                watch = LineWatch(read_value, package, lambda: dispatcher.tasks.running, self._is_late, instance)

        def after_message(sequence_id: int, at: int, rpc: IncomingRpc | None, instance: Any) -> None:
            if watch is not None and (sequence_id, at) == (record, index):
                watch.stop()

        try:
            walk.advance(record, after_message, before_message=before_message)
        finally:
            if watch is not None:
                watch.stop()
        if watch is None:
            raise ReplayError(f"record {record} has no message {index}")
        task = watch.found and watch.found[2]
        return {
            "message": self._words(record, index),
            "line": watch.place(),
            "behind": watch.lines_before(),
            "read": watch.read,
            "changed": watch.changed,
            "is_cut": watch.is_cut,
            "handler": task.described_call if task else None,
            "began": task.started_by if task else None,
            "number": task.number if task else None,
        }

    def had(self, number: int, began: At, record: int, index: int) -> Values:
        """Return the messages between ``began`` and that one whose answers and results the async handler ``number``
        received, without these two: (record, message, words)."""
        walk = self._before_record(max(began[0], self._checkpoints()[0].sequence_id + 1))
        places: list[At] = []
        known = 0

        def after_message(sequence_id: int, at: int, rpc: IncomingRpc | None, instance: Any) -> None:
            nonlocal known
            task = walk.app.dispatcher.tasks.waiting(number)
            if task is not None and len(task.entries) != known:
                known = len(task.entries)
                places.append((sequence_id, at))

        self._walk_on(walk, record, after_message)
        between = [at for at in places if (began[0], began[1]) < at < (record, index)]
        return {"had": [[*at, self._words(*at)] for at in between], "is_cut": walk.reached < record}

    def _checkpoint_before_change(self, last: int, steps: list[Step], now: Tree) -> tuple[CheckpointHeader, bool]:
        """Return (newest checkpoint with another value, False), or (oldest checkpoint, True) if no value differs.
        The search takes steps that double, and then halves the range."""
        kept = self._checkpoints(last)
        high = len(kept)  # from here on all compared checkpoints have the value
        low, step = -1, 1
        while high > 0 and low < 0:
            place = max(0, high - step)
            if same(self._value(kept[place], steps), now):
                high, step = place, step * 2
            else:
                low = place
        while high - low > 1 and low >= 0:
            middle = (low + high) // 2
            if same(self._value(kept[middle], steps), now):
                high = middle
            else:
                low = middle
        return (kept[0], True) if low < 0 else (kept[low], False)

    def _value(self, checkpoint: CheckpointHeader, steps: list[Step]) -> Tree:
        walk = Walk(self._source, self._definition, checkpoint)
        return self._read_value(walk, walk.instance, steps)

    def _read_value(self, walk: Walk, instance: Any, steps: list[Step]) -> Tree:
        if not steps or str(steps[0][1]).startswith("$"):
            return part_of(walk.state(instance), steps)
        return self._value_at(instance, steps)

    def _value_at(self, instance: Any, steps: list[Step]) -> Tree:
        path = [key if isinstance(key, str | int) else None for _, key in steps]
        return redaction.redact(value_at(instance, steps), path, class_names(self._definition))

    def watch(self, path: str, first: int, last: int) -> Values:
        """Return the value after each record of a range, or after each n-th: [[record, text, number or null]]."""
        steps = steps_of(path)
        points: list[list[Any]] = []
        walk = self._before_record(first)
        stride = max(1, -(-(last - first + 1) // POINTS_MAX))
        for record in range(first, last + 1, stride):
            walk.advance(record)
            value = self._read_value(walk, walk.instance, steps)
            number = value if isinstance(value, int | float) and not isinstance(value, bool) else None
            points.append([record, text_of(value, 80), number])
            if self._is_late():
                break
        return {"points": points, "stride": stride, "is_cut": walk.reached < last - stride}

    def origin(self, destination: str, position: int, record: int | None = None) -> Values:
        """Find the message that caused the output at ``position`` of the stream to ``destination``.

        ``number`` in the answer: which of its outputs to there, from 0. ``record``: its code is used, see
        :class:`Sessions`.
        """
        kept = [
            one for one in self._checkpoints() if one.outputs.get(destination, OutputMark(0, 0)).position < position
        ]
        if not kept:
            return {"at": None, "is_cut": False}
        walk = Walk(self._source, self._definition, kept[-1])
        last = self._source.summary().last_sequence_id
        for each in range(walk.reached + 1, last + 1):
            walk.made.clear()
            walk.advance(each, collects=True)
            sent = [(origin, made) for origin, to, made, _ in _messages_made(walk) if to == destination]
            for origin, made in sent:
                if made == position and origin[0] >= 0:
                    number = sum(other == origin and before < made for other, before in sent)
                    return {"at": origin, "message": self._words(*origin), "number": number, "is_cut": False}
            if self._is_late():
                return {"at": None, "is_cut": True}
        return {"at": None, "is_cut": False}

    def minimal(self, record: int, index: int, path: str, likely: Sequence[Sequence[int]] = ()) -> Values:
        """The fewest inputs, from the oldest checkpoint to that message, behind which the value is the same.

        ``likely``: messages that may be enough, to begin with.
        """
        steps, at = steps_of(path), (record, index)
        self._visit(at)
        wanted = part_of(self._states[at], steps)
        if not steps or str(steps[0][1]).startswith("$"):
            raise ReplayError(f"{path!r}: the fewest inputs are found for an attribute, or a part of one")
        runs = PartialRuns(self._source, self._definition, at)
        inputs, tried = runs.inputs, 0

        def holds(kept: list[At]) -> bool:
            nonlocal tried
            tried += 1
            return same(runs.value_after(kept, lambda player: self._value_at(player.instance, steps)), wanted)

        if not holds(inputs):
            raise ReplayError(f"{path}: the inputs of the log, given once more, do not give it that value")
        some = sorted(set(inputs).intersection(map(tuple, likely)))
        kept = fewest(some if holds(some) else inputs, holds, self._is_late)
        cls = self._definition.cls
        return {
            "of": len(inputs),
            "tried": tried,
            "is_cut": self._is_late(),
            "begins_at": runs.begins_at,
            "inputs": [
                {"record": one[0], "message": one[1], "call": self._words(*one), "code": runs.call_code(one)}
                for one in kept
            ],
            "module": cls.__module__,
            "class": cls.__name__,
            "value": literals(wanted)[0],
        }

    # --- the log -----------------------------------------------------------------------------------------------------

    def _walk_on(self, walk: Walk, last: int, after_message: AfterMessage) -> None:
        """Walk on to the record ``last``, or as far as there is time for."""
        for record in range(walk.reached + 1, last + 1):
            walk.advance(record, after_message)
            if self._is_late():
                break

    def _is_late(self) -> bool:
        return time.monotonic() > self._end_s

    def _checkpoints(self, last: int | None = None) -> list[CheckpointHeader]:
        """Return the checkpoints to begin at, up to a record; at least one. Raises ReplayError."""
        usable = usable_checkpoints(self._source.summary())
        kept = [one for one in usable if last is None or one.sequence_id <= last]
        if not kept:
            first = usable[0].sequence_id + 1 if usable else None
            raise ReplayError(
                "the log has no checkpoint to begin at"
                if first is None
                else f"no checkpoint before that record is kept: record {first} is the first to go to"
            )
        return kept

    def _before_record(self, record: int) -> Walk:
        """Return a walk that has handled the records before ``record``, and no later ones."""
        if record > self._source.summary().last_sequence_id:
            raise ReplayError(f"record {record} is not in the log yet")
        problems = []
        for checkpoint in reversed(self._checkpoints(record - 1)):
            walk, self._walk = self._walk, None  # a walk that fails on its way is not used again
            if walk is None or not checkpoint.sequence_id <= walk.reached < record:
                try:
                    walk = Walk(self._source, self._definition, checkpoint)
                except ReplayError as error:  # if its blob is damaged, an earlier checkpoint can work
                    problems.append(str(error))
                    continue
            walk.advance(record - 1)
            self._walk = walk
            return walk
        raise ReplayError("; ".join(problems))

    def _value_of(self, record: int) -> bytes:
        for value in self._source.values(record, record):
            return value
        raise ReplayError(f"record {record} is not in the log yet")

    def _count(self, record: int) -> int:
        return sum(batch.count for batch in batches(record_of(self._value_of(record)).content))

    def _place(self, record: int, index: int | None) -> tuple[int, int]:
        """Return how many messages a record has, and ``index``; None: of the last. Raises ReplayError for another."""
        count = self._count(record)
        index = max(0, count - 1) if index is None else index
        if index >= max(1, count):
            raise ReplayError(f"record {record} has no message {index}: it has {count}, counted from 0")
        return count, index

    def _words(self, record: int, index: int) -> str:
        message = message_at(record_of(self._value_of(record)).content, index)
        return "no message" if message is None else format_call(message, "", self._methods)

    def _failed(self, at: At) -> str:
        verdicts: list[Verdict] = [one for one in self._source.summary().verdicts if one.key[:2] == at]
        return "; ".join(map(format_failure, verdicts))


def _of_expression(value: Tree) -> Tree:
    """Return an expression's value as people are shown it: rules can't follow values through code."""
    return redaction.Redacted(value) if redaction.rules() and not isinstance(value, bool | None) else value


def _raised(error: Exception) -> str:
    return type(error).__name__ if redaction.rules() else f"{type(error).__name__}: {error}"


def _before(at: At) -> At:
    return at[0], at[1] - 1


def _changes(before: Fields, after: Fields) -> list[Difference]:
    return list(islice(differences(before, after), DIFFERENCES_MAX + 1))


def _change_values(changes: list[Difference]) -> Values:
    return {
        "changes": [
            {"path": one.path, "old": _side(one.path, one.old), "new": _side(one.path, one.new)}
            for one in changes[:DIFFERENCES_MAX]
        ],
        "changes_more": len(changes) > DIFFERENCES_MAX,
    }


def _side(path: str, value: Any) -> str | None:
    return None if repr(value) == "ABSENT" else text_at(path, value)


def _messages_made(walk: Walk) -> Iterator[tuple[At, str, int, bytes]]:
    """Yield (message that caused it, destination, position, output) for each output."""
    for made in walk.made:
        origins = iter([(one.sequence_id, one.message_index) for one in made.origins or () for _ in range(one.count)])
        for position, (message, _) in enumerate(rpcs(made.payload), made.first_position):
            yield next(origins, (-1, -1)), made.destination, position, message
