"""Run of a what-if: it replays one log with old and new code side by side, and compares them during the replay.

Both get the same records at the same time, each in a thread with its own app process. The inputs are the log's, also
the calls of the instance to itself: effects of changed outputs on later inputs are not simulated. The old code gets
the verdicts on failed messages, and skips these; the new code gets none, and calls them.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from functools import partial
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from immortal.coordinator.core.interfaces import ONESELF, OutputBatch, OutputMark, is_outside
from immortal.coordinator.core.output.output_check import Divergence, OutputCheck, OutputDivergenceError
from immortal.coordinator.log.reader import RecordSource
from immortal.protocol.batch import offset_after
from immortal.protocol.checksum import crc64
from immortal.protocol.command_line import counted
from immortal.protocol.extensions import HandlerFailure
from immortal.protocol.trailer import Trailer
from immortal.protocol.verdicts import NOT_FIXABLE_BY_CODE, Verdict
from immortal.replay.app_process import AppCommand, Code
from immortal.replay.comparison import Comparison, Key, Outputs, Side
from immortal.replay.findings import DrawnNumbersQueue, Executions, Findings
from immortal.replay.host import find_end, run_replay
from immortal.replay.plan import (
    AppExitedError,
    ReplayError,
    ReplayPlan,
    Route,
    SharedSource,
    UpgradeFailedError,
    plan_first,
    plan_route,
    route_until,
    usable_checkpoints,
)
from immortal.replay.result import OutcomeChanges, ReplayResult, Sink, changed_outcomes, format_failure
from immortal.replay.session import KeptImpulses, VerdictFilter
from immortal.replay.session import Outputs as Made

AHEAD_SIZE_BYTES_MAX = 16 << 20  # of outputs that only one side has so far: above it ...
AHEAD_PAUSE_S = 0.05  # ... that side pauses this long at each batch, no longer: a dying app may wait to report
STOP_S = 10.0  # time to stop the other side's app after one side has failed

Progress = Callable[[int, int | None], None]


class WhatIf(Struct):
    """Result of a what-if. ``equal_count``: messages equal on both sides. ``fates``: calls that fail
    differently.

    A side's ``failure`` ends the comparison there. ``upgrade_error``: the new code could not take over the state; then
    there are no results. ``upgrade_now_error``: it could take over that one, but not the newest state.
    ``by_position``: the apps do not report which input caused which output. ``ends``: the record at which a side's app
    ends; the other fields then cover the records before the first of these.
    """

    route: Route
    results: dict[Side, ReplayResult]
    findings: Findings
    fates: list[OutcomeChanges]
    equal_count: int
    by_position: bool
    upgrade_error: str
    notes: list[str]
    executions: Executions
    upgrade_now_error: str = ""
    ends: Mapping[Side, AppExitedError] = {}


def plan_what_if(
    source: RecordSource, *, checkpoint_id: int | None = None, last_sequence_id: int | None = None
) -> Route:
    """Plan a what-if: by default from the oldest sound checkpoint to the present last record. Raises
    ReplayError if the log does not allow it.
    """
    summary = source.summary()
    last = summary.last_sequence_id if last_sequence_id is None else last_sequence_id
    if last > summary.last_sequence_id:
        raise ReplayError(f"record {last} is not in the log: its last one is {summary.last_sequence_id}")
    candidates = [header.checkpoint_id for header in usable_checkpoints(summary)]
    if checkpoint_id is not None:
        candidates = [checkpoint_id]
    route = plan_first(candidates, source, summary, ReplayPlan(last_sequence_id=last))
    return replace(route, notes=[*source.problems, *route.notes])


def run_what_if(
    source: RecordSource,
    route: Route,
    apps: Mapping[Side, AppCommand],
    *,
    upgrade_to: int | None = None,
    limit: int = 20,
    blob_paths: Mapping[Side, Path] | None = None,
    progress: Progress | None = None,
    announce: Callable[[Side, str], None] = lambda side, address: None,
) -> WhatIf:
    """Replay ``route`` of the log ``source`` with both apps, and compare their outputs; ``limit`` differences in full.

    ``upgrade_to``: the new app first takes over the state, see :class:`ReplayPlan`. ``blob_paths``: files for the
    states at the end. ``progress`` is called from both threads, not at the same time. ``announce(side, address)``:
    receives the address at which an app started by hand must connect.

    Raises the errors of :func:`run_replay`, and OutputDivergenceError if the old code does not repeat the log's
    outputs. An app that ends is a result, unless the old app ends before the log does.
    """

    def new_of(route: Route) -> Route:
        return route if upgrade_to is None else replace(route, versions=(), upgrade_to=upgrade_to)

    def run(route: Route) -> WhatIf:
        routes = {Side.OLD: route, Side.NEW: new_of(route)}
        return _run_both(source, routes, apps, limit, blob_paths, progress, announce)

    outcome = run(route)
    if not outcome.ends:
        return outcome
    ends = {}
    for side, error in outcome.ends.items():
        own = route if side is Side.OLD else new_of(route)
        ends[side] = find_end(source, own, apps[side], error, partial(announce, side), _verdict_filter(side))
        found = ends[side]
        is_end = found.sequence_id == source.summary().last_sequence_id and not found.exit_status
        if found.sequence_id is None or (side is Side.OLD and not is_end):
            raise found
    outcome = run(route_until(route, min(error.sequence_id or 0 for error in ends.values()) - 1))
    outcome.ends = ends
    return outcome


def _verdict_filter(side: Side) -> VerdictFilter:
    return lambda verdict: side is Side.OLD or verdict.cause in NOT_FIXABLE_BY_CODE


def _run_both(
    source: RecordSource,
    routes: Mapping[Side, Route],
    apps: Mapping[Side, AppCommand],
    limit: int,
    blob_paths: Mapping[Side, Path] | None,
    progress: Progress | None,
    announce: Callable[[Side, str], None],
) -> WhatIf:
    shared = SharedSource(source)
    route = routes[Side.OLD]
    old_class, new_class = (apps[side].name.rpartition(":")[2] for side in Side)
    is_other = apps[Side.NEW].code is not None and old_class == new_class
    run = _Run(limit, progress, is_in_other_folder=is_other)
    prover = _ProvingSink(run, Side.OLD, route.checkpoint.outputs, shared)
    sinks: dict[Side, _ComparingSink] = {Side.OLD: prover, Side.NEW: _ComparingSink(run, Side.NEW)}
    results: dict[Side, ReplayResult] = {}
    # An app of the base protocol sends nothing before it has outputs: do not wait for its numbers.
    tells_numbers = bool(source.summary().extensions)

    def replay(side: Side) -> None:
        result = results[side] = run_replay(
            shared,
            routes[side],
            apps[side],
            sinks[side],
            blob_path=(blob_paths or {}).get(side),
            progress=lambda records, total: run.progress(side, records, total),
            stop=lambda: sinks[side].has_seen_enough,
            announce=lambda address: announce(side, address),
            numbers=run.numbers.pop_until if side is Side.NEW and tells_numbers else None,
            sends_verdict=_verdict_filter(side),
        )
        sinks[side].finish(result)

    run.run_both(replay)
    notes = [*route.notes, *_notes(apps[Side.NEW], results, route, upgrades=routes[Side.NEW].upgrade_to is not None)]
    return WhatIf(
        route,
        {} if run.upgrade_error else results,
        run.findings,
        _outcome_changes(shared, route, results.get(Side.NEW)),
        run.comparison.equal_count,
        run.by_position is True,
        run.upgrade_error,
        notes,
        run.executions,
        ends=run.ends,
    )


def _outcome_changes(source: RecordSource, route: Route, new: ReplayResult | None) -> list[OutcomeChanges]:
    if new is None:
        return []
    end = new.last_sequence_id + 1, 0
    if new.failure is not None:
        end = new.failure.sequence_id, new.failure.message_index
    return changed_outcomes(source.summary().verdicts, new.verdicts, route.checkpoint.sequence_id, end)


def _notes(app: AppCommand, results: Mapping[Side, ReplayResult], route: Route, *, upgrades: bool) -> Iterator[str]:
    digests = {result.code.digest for result in results.values() if result.code is not None}
    if len(results) == len(Side) and len(digests) == 1:
        yield "both sides ran the same code"
    yield from sorted({note for result in results.values() for note in result.forgotten})
    new = results.get(Side.NEW)
    if upgrades or new is None:
        return
    ran = route.last_version
    if new.description is not None and (own := new.description.version) != ran:
        yield (
            f"{app.name} has version {own}; its version {ran} ran here, as in the log: --upgrade tries version {own}"
        )
    if route.versions:
        last = route.versions[-1]
        yield (
            f"the records up to {last.sequence_id} were handled by versions before {last.version}, whose code runs them"
            f" on both sides: differences are looked for after them (--upgrade: from the first checkpoint on)"
        )


def try_upgrade(source: RecordSource, route: Route, app: AppCommand, upgrade_to: int) -> str:
    """Let ``app`` take over the newest state and replay to the log's end; return the error text, "" if it succeeds.

    A what-if begins at the oldest checkpoint, at which other handlers wait than now. An app started by hand is
    not requested again. Raises the errors of :func:`run_replay`.
    """
    newest = plan_route(ReplayPlan(last_sequence_id=route.last_sequence_id), source, source.summary())
    if app.by_hand or newest.checkpoint.checkpoint_id == route.checkpoint.checkpoint_id:
        return ""
    try:
        run_replay(source, replace(newest, versions=(), upgrade_to=upgrade_to), app, Sink())
    except UpgradeFailedError as error:
        return f"from checkpoint {newest.checkpoint.checkpoint_id} on, the newest: {error}"
    return ""


class _StoppedError(Exception):
    """Raised to stop this side: the rest of its replay is not needed."""


class _Run:
    """State of a what-if that both sides share. One side at a time uses ``comparison``, which compares the outputs."""

    def __init__(self, limit: int, progress: Progress | None, *, is_in_other_folder: bool) -> None:
        """Create the state. ``is_in_other_folder``: the new code is the same class from another, named folder."""
        self._is_in_other_folder = is_in_other_folder
        self._codes: dict[Side, Code | None] = {}
        self.findings = Findings(limit)
        self.numbers = DrawnNumbersQueue()
        self.executions = Executions()
        self.comparison = Comparison(self.findings.add)
        self.by_position: bool | None = None  # None: no outputs yet
        self.upgrade_error = ""
        self.ends: dict[Side, AppExitedError] = {}
        self.failed_at: int | None = None  # the record at which the new code's handler raised
        self._progress = progress
        self._records = dict.fromkeys(Side, 0)
        self._changed = threading.Condition()
        self._running = set(Side)
        self._error: BaseException | None = None

    def run_both(self, replay: Callable[[Side], None]) -> None:
        """Run ``replay`` for both sides at the same time. Raises the error of the first side that fails."""
        threads = [threading.Thread(target=self._run_side, args=(replay, side), daemon=True) for side in Side]
        for thread in threads:
            thread.start()
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._error is not None or not self._running)
        except BaseException as error:  # Ctrl-C
            self._stop(error)
        for thread in threads:
            thread.join(STOP_S)
        if self._error is not None:
            raise self._error

    def _run_side(self, replay: Callable[[Side], None], side: Side) -> None:
        try:
            replay(side)
        except UpgradeFailedError as error:
            if side is Side.OLD:
                self._stop(error)
            else:
                self.upgrade_error = str(error)
        except AppExitedError as error:
            self.ends[side] = error
        except _StoppedError:
            pass
        except BaseException as error:
            self._stop(error)
        if side is Side.OLD:
            self.numbers.end()
        with self._changed:
            self._running.discard(side)
            self._changed.notify_all()

    def _stop(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def note_code(self, side: Side, code: Code | None) -> None:
        """Note that ``side`` runs ``code``. Raises ReplayError if both sides run the same file, _StoppedError."""
        if not self._is_in_other_folder:
            return
        with self._changed:
            self._codes[side] = code
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._error is not None or self._running <= self._codes.keys())
            self._check_not_stopped()
            old, new = (self._codes.get(each) for each in Side)
        if old is not None and new is not None and os.path.realpath(old.file) == os.path.realpath(new.file):
            raise ReplayError(
                f"the old code is {old.file} as well, so the new code would be compared with itself: start it from the"
                " folder of the old code, without the new code on PYTHONPATH, or name the old class with --old-app"
            )

    def add(self, side: Side, destination: str, outputs: Outputs, *, by_position: bool) -> None:
        """Add a side's outputs to the comparison. Raises ReplayError, _StoppedError."""
        with self._changed:
            self._check_not_stopped()
            if self.by_position is None:
                self.by_position = by_position
                self.findings.is_msgpack = not by_position
            if self.by_position != by_position:
                raise ReplayError(
                    "the two apps can't be compared: one says which input made which call, the other does not"
                )
            self.comparison.add(side, destination, outputs)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._error is not None or not self._is_ahead(side), AHEAD_PAUSE_S)

    def _is_ahead(self, side: Side) -> bool:
        pending = self.comparison.pending_size_bytes
        return (
            side.other in self._running
            and pending[side] > AHEAD_SIZE_BYTES_MAX
            and pending[side.other] <= AHEAD_SIZE_BYTES_MAX
        )

    def finish(self, side: Side, result: ReplayResult) -> None:
        """Note the end of ``side``: it makes no more outputs."""
        failure = result.failure
        with self._changed:
            if failure is None:
                self.comparison.finish(side, complete=result.flushed)
                return
            self.comparison.finish(side, complete=False, before=(failure.sequence_id, failure.message_index))
            if side is Side.NEW:
                self.failed_at = failure.sequence_id

    def progress(self, side: Side, records: int, total: int | None) -> None:
        """Report the progress of ``side``. Raises _StoppedError."""
        with self._changed:
            self._check_not_stopped()
            self._records[side] = records
            if self._progress is not None:
                self._progress(min(self._records[each] for each in self._running | {side}), total)

    def _check_not_stopped(self) -> None:
        if self._error is not None or self.upgrade_error:
            raise _StoppedError


class _ComparingSink(Sink):
    """Sink that passes one side's outputs to the comparison."""

    def __init__(self, run: _Run, side: Side) -> None:
        self._run = run
        self._side = side
        self._counts: Counter[str] = Counter()
        self.fed_sequence_id = -1

    @property
    def has_seen_enough(self) -> bool:
        """True if the rest of this side's replay is not needed."""
        failed_at = self._run.failed_at
        return failed_at is not None and self.fed_sequence_id >= failed_at

    def code(self, code: Code | None) -> None:
        self._run.note_code(self._side, code)

    def record(self, sequence_id: int, value: bytes, trailer: Trailer) -> None:
        self.fed_sequence_id = sequence_id

    def outputs(self, made: Made) -> None:
        keys: list[Key] = []
        if made.origins is None:  # positions are no keys: impulses lie between them, at other places on each side
            before = self._counts[made.destination]
            keys += [(number, 0) for number in range(before + 1, before + made.count + 1)]
            self._counts[made.destination] += made.count
        for origin in made.origins or ():
            keys += [(origin.sequence_id, origin.message_index)] * origin.count
        outputs = Outputs(keys, made.payload, made.first_position)
        self._run.add(self._side, made.destination, outputs, by_position=made.origins is None)

    def finish(self, result: ReplayResult) -> None:
        """Note that the replay has ended."""
        self._run.finish(self._side, result)


class _ProvingSink(_ComparingSink):
    """Sink of the old side. Its outputs must match the log's marks; else a comparison means nothing.

    A message that fails only here ends the replay. Methods raise OutputDivergenceError.
    """

    def __init__(self, run: _Run, side: Side, outputs: Mapping[str, OutputMark], source: RecordSource) -> None:
        super().__init__(run, side)
        self._source = source
        self._failed: Verdict | None = None
        self._marks = dict(outputs)
        self._checks = {name: OutputCheck(name, mark, self._differs) for name, mark in outputs.items()}

    def _differs(self, divergence: Divergence) -> None:
        if not self.forgotten():  # else both sides lack the same data, and can be compared
            raise OutputDivergenceError(divergence)

    def _check(self, destination: str) -> OutputCheck:
        return self._checks.setdefault(destination, OutputCheck(destination, on_divergence=self._differs))

    @property
    def has_seen_enough(self) -> bool:
        return self._failed is not None or super().has_seen_enough

    def verdict(self, verdict: Verdict) -> None:
        if self._failed is None and all(verdict.key != known.key for known in self._source.summary().verdicts):
            self._failed = verdict

    def record(self, sequence_id: int, value: bytes, trailer: Trailer) -> None:
        super().record(sequence_id, value, trailer)
        if self._failed is not None:
            return
        for mark in trailer.outputs:
            check = self._check(mark.destination)
            check.expect(sequence_id, OutputMark(mark.position, mark.checksum))
            check.compare()

    def outputs(self, made: Made) -> None:
        if self._failed is None:
            self._check_outputs(made, made.payload)
        elif made.origins is None:
            return  # it may have been sent after the failed message
        else:
            origins = [each for each in made.origins if (each.sequence_id, each.message_index) < self._failed.key[:2]]
            before = sum(origin.count for origin in origins)
            payload = made.payload[: offset_after(made.payload, before, made.count)]
            made = replace(made, count=before, payload=payload, origins=origins)
        super().outputs(made)

    def impulses(self, kept: KeptImpulses) -> None:
        if self._failed is None:
            self._check_outputs(kept, b"")

    def _check_outputs(self, made: Made | KeptImpulses, checked: bytes) -> None:
        destination, batch = made.destination, OutputBatch(made.first_position, made.count, made.payload)
        before = self._marks.get(destination, OutputMark(0, 0)).checksum
        after = crc64(checked, before)
        self._marks[destination] = OutputMark(batch.last_position, after)
        self._check(destination).add_made(batch, before, after)

    def numbers(self, sequence_id: int | None, data: bytes, *, complete: bool) -> None:
        if sequence_id is None:
            self._run.numbers.end()
        else:
            self._run.numbers.add(sequence_id, data, complete=complete)
            self._run.executions.add(sequence_id, data)

    def finish(self, result: ReplayResult) -> None:
        failed = self._failed
        if failed is not None:
            text = f"{failed.method or 'a message'}: {format_failure(failed)}\n{failed.trace}"
            result.failure = HandlerFailure(failed.sequence_id, failed.message_index, text)
        if result.failure is None and result.flushed and self._run.failed_at is None:
            for check in self._checks.values():
                check.finish()
        super().finish(result)


# Limits of a what-if: its inputs are the log's, even if the new code would have caused others.


NAMES_MAX = 5


class Why(Enum):
    ONESELF = "calls to itself"
    OTHERS = "calls to others"
    CLIENTS = "answers to clients"
    WAITING = "waiting"
    FAILURE = "failure"


class Unknown(Struct, frozen=True):
    """Unknown consequences of one kind. ``count``: number of outputs or handlers that have them. ``text``: in words.

    ``hides_state``: the instance's own inputs would be others, so its state at the end is unknown, even if no
    difference was found.
    """

    why: Why
    count: int
    hides_state: bool
    text: str


def not_worked_out(name: str, outcome: WhatIf, waiting: int) -> Iterator[Unknown]:
    """Yield the unknown consequences of a what-if. ``waiting``: handlers that wait for answers the log lacks."""
    counts: Counter[str] = Counter()
    for (destination, _, _), kinds in outcome.findings.counts.items():
        counts[ONESELF if destination == name else destination] += kinds.total()
    if own := counts.pop(ONESELF, 0):
        text = f"what {counted(own, 'other call')} to itself would do: the calls in the log were handled instead"
        yield Unknown(
            Why.ONESELF, own, hides_state=True, text=f"{text}, so the state and the calls made then may differ"
        )
    clients = sum(count for destination, count in counts.items() if is_outside(destination))
    if others := counts.total() - clients:
        names = sorted(destination for destination in counts if not is_outside(destination))
        shown = ", ".join(names[:NAMES_MAX]) + (", ..." if len(names) > NAMES_MAX else "")
        text = f"what {shown} would do with {counted(others, 'other call')}, and send back"
        yield Unknown(Why.OTHERS, others, hides_state=False, text=text)
    if clients:
        text = f"what clients would do with {counted(clients, 'other answer')}"
        yield Unknown(Why.CLIENTS, clients, hides_state=False, text=text)
    if waiting:
        text = f"what {counted(waiting, 'handler')} would do with the answers that the log does not have"
        yield Unknown(Why.WAITING, waiting, hides_state=True, text=text)
    new = outcome.results.get(Side.NEW)
    failed = {side: result.failure for side, result in outcome.results.items() if result.failure is not None}
    if outcome.upgrade_error:
        yield Unknown(Why.FAILURE, 1, hides_state=True, text="what the new code would do with any record")
    elif failed and new is not None:
        first = min(failure.sequence_id for failure in failed.values())
        text = f"what differs after record {first}, where the {' and the '.join(s.value for s in failed)} code fails"
        yield Unknown(Why.FAILURE, len(failed), hides_state=True, text=text)
