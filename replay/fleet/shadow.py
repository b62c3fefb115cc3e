"""Shadows of running services: the code that makes a log, and changed code, handle each record as it is logged.

Both get the recorded inputs, side by side in this process, and nothing that they do leaves it. A shadow that can't go
on (a handler stops its app, other code takes over, the log was trimmed) begins again at the next checkpoint.
"""

from __future__ import annotations

import faulthandler
import os
import resource
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from itertools import islice
from pathlib import Path

from msgspec import Struct

from immortal.appsdk.errors import StateError
from immortal.appsdk.handlers.definition import Definition
from immortal.appsdk.running.inspection import describe_state
from immortal.appsdk.state.tree import differences
from immortal.coordinator.core.errors import LogError, LogUnavailableError
from immortal.coordinator.core.formatting import Methods
from immortal.coordinator.instances import own_logs
from immortal.coordinator.instances.registry import Registry
from immortal.coordinator.log.open import log_exists
from immortal.coordinator.log.reader import LogReader
from immortal.coordinator.log.record_contents import message_at, record_of, rpc_of
from immortal.coordinator.log.view_queries import version_starts
from immortal.protocol import kept_code
from immortal.protocol.errors import ImmortalError
from immortal.replay.app_process import OwnCode, code_at_end
from immortal.replay.fleet.calls import number_of_awaited
from immortal.replay.fleet.model import Difference
from immortal.replay.fleet.opening import load_definition
from immortal.replay.fleet.outcome import SHOWN_MAX, call_text, difference_text, kind_of_call, value_text
from immortal.replay.fleet.player import LoggedRecord, Place, first_checkpoint
from immortal.replay.fleet.screening import RecordDifference, Screening
from immortal.replay.plan import ReplayError, place_of, usable_checkpoints
from immortal.replay.result import format_failure

NOW_NS = 1 << 63  # later than each checkpoint
POLL_S = 0.05  # between two looks at the logs
PROGRESS_S = 0.25
RETRY_S = 0.5  # between two attempts to begin
ROUND_RECORDS_MAX = 256  # of a service, before the next one has its turn
STATES_SHARE = 20  # comparing states, or trying to begin, takes at most this part of the time
TEXTS_MAX = 20  # of one kind and handler; then one for each record
PATHS_MAX = 1_000  # parts of a state that are reported
WAITING_MAX = 10_000  # handlers of the changed code that wait for answers that no log has
TOO_LARGE = "over the memory of --memory-limit"


class Found(Struct, frozen=True, tag="difference"):
    """Difference between the two codes. ``kind``: "changed", "added" or "missing" of a call, "state", or a fate.

    ``message`` None: it is of the whole record. ``lag_s``: from the record's time to the comparison. ``count``: this
    one, and others of its kind in that record.
    """

    service: str
    kind: str
    to: str
    handler: str
    record: int
    message: int | None
    time_ns: int
    lag_s: float
    text: str
    count: int = 1


class Progress(Struct, frozen=True, tag="progress"):
    """Counts since the process began. ``record``: the last one handled, ``lag_s`` after its time."""

    service: str
    record: int
    messages: int
    same: int
    lag_s: float


class Note(Struct, frozen=True, tag="note"):
    """Message for people. ``follows``: True if records are compared from here on."""

    service: str
    text: str
    follows: bool


Event = Found | Progress | Note


class Mark(Struct):
    """Position of a shadow: records up to ``reported`` were compared; no checkpoint before ``behind`` can be used."""

    reported: int = -1
    behind: int = -1


class Shadow:
    """Shadow of one service. ``begin_ns``: begin at the newest checkpoint up to then. ``emit`` gets what it finds.

    ``note(record, side)``: called before a side handles a record.
    """

    def __init__(
        self,
        registry: Registry,
        reader: LogReader,
        new: Definition,
        mark: Mark,
        begin_ns: int | None,
        emit: Callable[[Event], object],
        note: Callable[[int, str], object],
    ) -> None:
        self.name = reader.identity.instance_name
        self._registry = registry
        self._folder = registry.load(self.name).folder / kept_code.FOLDER_NAME
        self._reader = reader
        self._new = new
        self._mark = mark
        self._start_ns = begin_ns
        self._emit = emit
        self._note = note
        self._steps: Screening | None = None
        self._digest = ""  # of the kept code that runs
        self._versions = 0
        self._other = ""  # what was told last
        self._unsure: set[str] = set()  # destinations to which positions can't be compared
        self._retry_s = 0.0
        self._reported_gap = ""
        self._messages = self._same = 0
        self._lag_s = 0.0
        self._states_due_s = 0.0
        self._states_at = -1
        self._shown: Counter[tuple[str, str, str]] = Counter()
        self._paths: set[str] = set()  # parts of the state that were reported
        self._reported_progress: Progress | None = None

    # --- the log ------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin at a checkpoint, if there is one yet. Raises ReplayError, LogError."""
        summary, mark = self._reader.summary(), self._mark
        if mark.behind >= 0 and not any(one.sequence_id >= mark.behind for one in usable_checkpoints(summary)):
            return
        route = first_checkpoint(self._reader, self._start_ns or NOW_NS, mark.behind)
        own = code_at_end(self._registry.load(self.name), summary, route)
        kept = kept_code.code_at(self._folder, summary.last_sequence_id)
        digest = "" if kept is None else kept.digest
        if kept is not None and self._digest not in ("", digest):  # a module that is loaded stays as it was
            own = OwnCode(kept.app, kept.archive(self._folder))
        old = load_definition(own.app, own.archive)
        steps = Screening(self._reader, route, old, self._new, begins=lambda side: self._note(steps.sequence_id, side))
        self._versions, self._other, self._unsure = len(summary.versions), "", set()
        text = f"from checkpoint {route.checkpoint.checkpoint_id} ({place_of(route.checkpoint)}) on"
        if -1 < mark.reported < steps.sequence_id:
            text += f"; records {mark.reported + 1} to {steps.sequence_id} are not compared"
        self._mark = Mark(max(mark.reported, steps.sequence_id), -1)
        self._steps, self._digest, self._start_ns, self._reported_gap, self._retry_s = steps, digest, None, "", 0.0
        self._emit(Note(self.name, text, follows=True))

    def round(self) -> bool:
        """Compare records that were logged since the last call; return True if there are more."""
        if (now_s := time.monotonic()) < self._retry_s:
            return False
        try:
            if self._steps is None:
                self._retry_s = now_s + RETRY_S
                self.start()
                return self._steps is not None
            any_more = self._follow(self._steps)
        except LogUnavailableError as error:
            self._retry_s = now_s + RETRY_S
            self._report_gap(f"{error}; it is tried again")
            return False
        except ImmortalError as error:
            if self._steps is None:  # the state at the checkpoint can be large
                self._retry_s += STATES_SHARE * (time.monotonic() - now_s)
            self._end(str(error), self._mark.behind if self._steps is None else self._steps.sequence_id)
            return False
        if self._reported_gap and self._steps is not None:
            self._reported_gap = ""
            self._emit(Note(self.name, "it continues", follows=True))
        return any_more

    def _follow(self, steps: Screening) -> bool:
        last = self._reader.last_sequence_id()
        if last < steps.sequence_id:
            self._mark.reported = last
            self._end(f"the log ends with record {last} now: it was cut or replaced", -1)
            return False
        if last == steps.sequence_id:
            self.compare_states()
            return False
        values = list(islice(self._reader.values(steps.sequence_id + 1, last), ROUND_RECORDS_MAX))
        self._reader.release()
        with self._reader.view() as view:  # later than the records: it has each version that handled one of them
            versions = version_starts(view)
        kept = kept_code.code_at(self._folder, last)
        if len(versions) != self._versions:
            self._end(f"version {versions[-1].version} has taken over", versions[-1].sequence_id)
        elif kept is not None and kept.digest != self._digest:
            self._end(f"other code handles the log from record {kept.first} on", kept.first - 1)
        for value in values:
            if self._steps is None:
                break
            self._give(steps, LoggedRecord.of(value))
        return last > steps.sequence_id

    def _give(self, steps: Screening, record: LoggedRecord) -> None:
        at, sent = record.sequence_id, steps.sent
        try:
            found = steps.give(record)
            if steps.problem(self._unsure):
                self._unsure = self._new_impulses(steps)
            if problem := steps.problem(self._unsure):
                raise ReplayError(f"there is nothing to compare with: {problem}")
        except ReplayError as error:
            self._end(str(error), at)
            return
        self._lag_s = max(0.0, time.time() - record.time_ns / 1e9)
        if at > self._mark.reported:
            self._messages += sum(batch.count for batch in record.trailer.batches)
            self._same += steps.sent - sent
            self._mark.reported = at
            if found is not None:
                self._report(steps, record, found)
        if steps.new.ended is not None:
            self._end(f"the new code stops at record {at}", at)
        elif steps.new.tasks.count > steps.old.tasks.count + WAITING_MAX:
            self._end(f"over {WAITING_MAX:,} handlers of the new code wait for answers that the log does not have", at)

    def _new_impulses(self, steps: Screening) -> set[str]:
        """Return to whom the app has sent impulses since: they have positions of which the run does not know."""
        marks = steps.old.route.checkpoint.outputs
        return {
            one.destination
            for one in self._reader.summary().impulses
            if one.destination not in marks or one.first_position > marks[one.destination].position
        }

    def _end(self, why: str, behind: int) -> None:
        """End this run: the next one begins at a checkpoint after the record ``behind``."""
        if self._steps is not None:
            self._steps.close()
            self._steps = None
            self._retry_s = 0.0
        self._mark.behind = behind
        self._report_gap(f"{why}; it begins again at the next checkpoint")

    def _report_gap(self, why: str) -> None:
        """Say once why records are not compared."""
        if why != self._reported_gap:
            self._reported_gap = why
            self._emit(Note(self.name, why, follows=False))

    # --- the comparison -----------------------------------------------------------------------------------------------

    def report_progress(self) -> None:
        now = Progress(self.name, self._mark.reported, self._messages, self._same, self._lag_s)
        if now != self._reported_progress:
            self._reported_progress = now
            self._emit(now)

    def _report(self, steps: Screening, record: LoggedRecord, found: RecordDifference) -> None:
        methods: Methods = {**steps.old.methods, **steps.new.methods}
        alike: dict[tuple[str, str, str], list[Difference]] = defaultdict(list)
        for one in found.calls:
            self._same -= one.old is not None
            alike[one.kind, *kind_of_call(self.name, one.destination, one.message, methods)].append(one)
        for key, calls in alike.items():
            shown = calls[: max(1, TEXTS_MAX - self._shown[key])]
            self._shown[key] += len(shown)
            for index, one in enumerate(shown, 1):
                count = 1 if index < len(shown) else len(calls) - len(shown) + 1
                self._emit_found(record, *key, one.place[1], self._text(steps, record, one, key[1], methods), count)
        for group in found.fates:
            fate, verdict = group.fate.would_be, group.first
            text = f"{group.method or 'a message'} {fate}: {format_failure(verdict)}"
            self._emit_found(record, fate, self.name, group.method, verdict.message_index, text, group.count)
        if steps.new.ended is not None:
            text = f"would stop its app at {found.other.splitlines()[0]}"
            self._emit_found(record, "stops", self.name, "", None, text)
        elif found.other and found.other != self._other:
            self._other = found.other  # what waits is told at each record
            self._emit_found(record, "other", self.name, "", None, found.other)
        self.report_progress()  # so that a process after this one does not find them again

    def _text(self, steps: Screening, record: LoggedRecord, difference: Difference, to: str, methods: Methods) -> str:
        """Describe a call that differs: the message that makes it, and what began that; the call then and now."""
        made = self._message(record, difference.place, methods)
        player = steps.old if difference.new is None else steps.new
        began = player.start_of_call(number_of_awaited(self.name, rpc_of(difference.message)))
        if began is not None and began != difference.place:
            made = f"{made}, in {self._message(record, began, methods)}"
        was, now = (
            None if each is None else call_text(each, difference.destination, methods)
            for each in (difference.old, difference.new)
        )
        return f"{made} -> {to}: {difference_text(difference.kind, was, now)}"

    def _message(self, record: LoggedRecord, place: Place, methods: Methods) -> str:
        """Describe a message that came to the service, in this record or an earlier one."""
        value: bytes | None = record.value
        if place[0] != record.sequence_id:
            value = None
            with suppress(LogError):  # trimmed
                value = next(self._reader.values(place[0], place[0]), None)
        message = None if value is None else message_at(record_of(value).content, place[1])
        return "a message of a trimmed record" if message is None else call_text(message, "", methods)

    def compare_states(self, *, at_once: bool = False) -> None:
        """Compare the states, but not so often that it takes much of the time; report each part once."""
        begun_s = time.monotonic()
        steps = self._steps
        if steps is None or self._states_at == steps.sequence_id or (begun_s < self._states_due_s and not at_once):
            return
        self._states_at = steps.sequence_id
        sides = (steps.old, steps.new)
        try:
            old, new = (describe_state(one.definition, one.instance, one.tasks.save()) for one in sides)
        except StateError:  # it is too deep: its calls are compared
            return
        unknown = (one for one in differences(old, new) if one.path not in self._paths)
        for one in islice(unknown, min(SHOWN_MAX, PATHS_MAX - len(self._paths))):
            self._paths.add(one.path)
            values = one.to_json()
            text = f"the state: {one.path}: was {value_text(values, 'old')}; would be {value_text(values, 'new')}"
            where = self.name, "state", self.name, "", steps.sequence_id, None
            self._emit(Found(*where, time.time_ns(), self._lag_s, text))
        self._states_due_s = begun_s + STATES_SHARE * (time.monotonic() - begun_s)

    def _emit_found(
        self, record: LoggedRecord, kind: str, to: str, handler: str, message: int | None, text: str, count: int = 1
    ) -> None:
        where = self.name, kind, to, handler, record.sequence_id, message, record.time_ns
        self._emit(Found(*where, self._lag_s, text, count))


class _Watchdog:
    """Ends the process if records take over twice ``limit_s``, or its code too much memory, and says so on stderr: code
    can catch all errors.
    """

    def __init__(self, limit_s: float, memory_bytes: int) -> None:
        self._limit_s = limit_s
        self._armed_s = 0.0
        self._memory_bytes = memory_bytes
        self._counts = os.open("/proc/self/statm", os.O_RDONLY)
        # Within a record. Not of the address space: the mapped log takes as much of that as it can grow to.
        resource.setrlimit(resource.RLIMIT_DATA, (2 * memory_bytes, 2 * memory_bytes))

    def arm(self) -> None:
        self._check_memory()
        if (now_s := time.monotonic()) - self._armed_s > self._limit_s / 4:
            self._armed_s = now_s
            faulthandler.dump_traceback_later(2 * self._limit_s, exit=True)

    def disarm(self) -> None:
        self._check_memory()
        self._armed_s = 0.0
        faulthandler.cancel_dump_traceback_later()

    def _check_memory(self) -> None:
        _, resident, shared, *_ = map(int, os.pread(self._counts, 200, 0).split())
        if (resident - shared) * resource.getpagesize() > self._memory_bytes:
            os.write(2, f"{TOO_LARGE}\n".encode())
            os._exit(1)


def follow(
    home: Path,
    changes: Mapping[str, str],
    marks: Mapping[str, Mark],
    emit: Callable[[Event], object],
    note: Callable[[str], object],
    is_over: Callable[[], bool],
    *,
    code: Path | None = None,
    begin_ns: int | None = None,
    trust_pickle: bool = False,
    limit_s: float,
    memory_bytes: int,
) -> None:
    """Follow the logs of ``changes`` (the class to try, by service) until ``is_over``.

    ``marks``: where an earlier process ended. ``note``: gets "service record side" before that code handles a record,
    "" for none. The process is ended if code goes on for twice ``limit_s``, or takes over ``memory_bytes``. Raises
    ReplayError if a shadow can't begin, LogError.
    """
    registry, watchdog = Registry(home), _Watchdog(limit_s, memory_bytes)
    with ExitStack() as stack:
        shadows = []
        for name, app in changes.items():
            settings = registry.load(name)
            if not log_exists(settings.log):
                raise ReplayError(f"{name!r} has no log here: it has not been started yet")
            reader = stack.enter_context(own_logs.open_reader(settings, trust_pickle=trust_pickle))

            def noted(record: int, side: str, name: str = name) -> None:
                watchdog.arm()
                note(f"{name} {record} {side}")

            mark = marks.get(name)
            definition = load_definition(app, code)
            shadow = Shadow(registry, reader, definition, mark or Mark(), begin_ns, emit, noted)
            if mark is None:
                shadow.start()
            shadows.append(shadow)
        progress_s = 0.0
        while not is_over():
            any_more = False
            for shadow in shadows:
                note("")
                any_more |= shadow.round()
                watchdog.disarm()
            if (now_s := time.monotonic()) - progress_s >= PROGRESS_S:
                progress_s = now_s
                for shadow in shadows:
                    shadow.report_progress()
            if not any_more:
                time.sleep(POLL_S)
        for shadow in shadows:
            shadow.compare_states(at_once=True)
            shadow.report_progress()
