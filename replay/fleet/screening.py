"""First round of a what-if: old and new code of one service side by side over its log, compared as bytes.

Where both send the same bytes for a record, no message of it is looked at. Each code has a process, if it can be had.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from contextlib import closing, suppress
from multiprocessing import Pipe
from typing import Any

import msgspec
from msgspec import Struct

from immortal.appsdk.handlers.definition import Definition
from immortal.appsdk.running.inspection import inspect_state
from immortal.appsdk.state.tree import differences
from immortal.coordinator.core.formatting import time_text
from immortal.coordinator.log.reader import RecordSource
from immortal.protocol import decoding
from immortal.protocol.verdicts import Verdict
from immortal.replay.comparison import aligned
from immortal.replay.fleet.model import Difference
from immortal.replay.fleet.player import FIRST_OTHER_NUMBER, LoggedRecord, Place, Player, Turn, can_fork, not_of_code
from immortal.replay.fleet.recorded import Recorded
from immortal.replay.plan import ReplayError, Route
from immortal.replay.result import OutcomeChanges, Sink, group_outcomes
from immortal.replay.verify import ProvingSink


def changed_fates(then: Iterable[Verdict], now: Iterable[Verdict]) -> list[OutcomeChanges]:
    """Group the calls that fail in one of two runs, or differently; an execution is one call wherever it fails."""
    was, is_now = (
        {("task", one.task) if one.task else one.key: one for one in verdicts if not not_of_code(one)}
        for verdicts in (then, now)
    )
    return group_outcomes((was.get(key), is_now.get(key)) for key in {**was, **is_now})


class RecordDifference(Struct, frozen=True):
    """Difference that new code makes in a record. ``calls``: by message; ``fates``: messages that fail otherwise.

    ``other``: a timer or an effect that differs, or why the new code stops, in words; "" if nothing of that kind does.
    """

    calls: list[Difference]
    fates: list[OutcomeChanges]
    other: str


class Trial:
    """Run of new code of one service from the checkpoint of ``route`` on, beside that of the log's own code.

    The recorded inputs go to it, also after a difference. ``is_same``: nothing differs so far.
    Raises ReplayError if the class does not take the state, or the log was handled by more than one version.
    """

    def __init__(
        self, source: RecordSource, route: Route, old: Definition, new: Definition, outsiders: frozenset[str]
    ) -> None:
        self.name = source.identity.instance_name
        self.sequence_id = route.checkpoint.sequence_id
        if route.versions:
            raise ReplayError(f"{self.name}: the log was handled by several versions")
        self.is_same = True
        self._old = old
        self.new = Player(source, route, new, Sink(), is_new=True, outsiders=outsiders)
        self._reported_due: object = None  # the due times that were reported as different
        self._verdicts: dict[int, list[Verdict]] = defaultdict(list)  # of the log, by record
        for one in source.summary().verdicts:
            self._verdicts[one.sequence_id].append(one)

    def compare_next(self, record: LoggedRecord, was: Turn, due_ns: int | None) -> None:
        """Compare a record, unless an earlier one differs. ``was``: the result of the log's code, whose next timer is
        at ``due_ns``."""
        self.is_same = self.is_same and self.compare(record, was, due_ns) is None

    def is_same_at_end(self, blob: bytes) -> bool:
        """Return True if nothing differs, nor the state at the end. ``blob``: that of the log's code.

        Raises ReplayError if the state can't be had.
        """
        if not self.is_same or (own := self.new.finish(self.sequence_id)) == blob:
            return self.is_same
        old, new = (inspect_state(code, one).state for code, one in ((self._old, blob), (self.new.definition, own)))
        return next(iter(differences(old, new)), None) is None

    def close(self) -> None:
        self.new.close()

    def compare(self, record: LoggedRecord, was: Turn, due_ns: int | None) -> RecordDifference | None:
        """Give the new code the next record; return what differs, None if nothing does."""
        self.sequence_id = record.sequence_id
        if self.new.ended is not None:
            return None
        self.new.tasks.receive_draws(was.draws)
        now = self.new.give_logged(record)
        calls = [] if was.output == now.output else self._calls(record, was, now)
        fates = self._fates(record.sequence_id, was, now)
        other = now.stopped or self._other(due_ns)
        return RecordDifference(calls, fates, other) if calls or fates or other else None

    def _calls(self, record: LoggedRecord, was: Turn, now: Turn) -> list[Difference]:
        made: tuple[dict[tuple[str, Place], list[bytes]], ...] = ({}, {})
        for found, turn in zip(made, (was, now), strict=True):
            for output in turn.outputs:
                found.setdefault((output.destination, output.place), []).append(output.message)
        return [
            Difference(self.name, kind.value, *key, old, new, None, record.time_ns)
            for key in {**made[0], **made[1]}
            if (before := made[0].get(key, [])) != (after := made[1].get(key, []))
            for kind, old, new in aligned(before, after, whole=True)
            if kind is not None
        ]

    def _fates(self, sequence_id: int, was: Turn, now: Turn) -> list[OutcomeChanges]:
        known = self._verdicts.pop(sequence_id, ())
        if not (known or was.verdicts or now.verdicts):
            return []
        return changed_fates((*was.verdicts, *known), now.verdicts)

    def _other(self, due_ns: int | None) -> str:
        """Describe a timer or an effect that differs after a record; "" if none does."""
        waiting = self.new.tasks.effects.waiting
        if waiting and max(waiting) >= FIRST_OTHER_NUMBER:
            name = waiting[max(waiting)].function.name
            return f"the effect {name}, which the log's code does not ask for"
        due = due_ns, self.new.next_due_ns
        if due[0] == due[1] or due == self._reported_due:
            return ""
        self._reported_due = due
        was, now = ("none" if one is None else time_text(one) for one in due)
        return f"the next timer: was {was}; would be {now}"


class Screening(Trial):
    """Run of old and new code of one service over the same records, one by one. ``sent``: messages of the old code.

    ``begins``: called with "old" and "new" before that code handles a record.
    """

    def __init__(
        self,
        source: RecordSource,
        route: Route,
        old: Definition,
        new: Definition,
        outsiders: frozenset[str] = frozenset(),
        begins: Callable[[str], object] = lambda side: None,
    ) -> None:
        super().__init__(source, route, old, new, outsiders)
        self.sent = 0
        self._proving = ProvingSink(source, route)
        self._begins = begins
        try:
            self.old = Player(source, route, old, self._proving, outsiders=outsiders)
        except BaseException:
            super().close()
            raise

    def give(self, record: LoggedRecord) -> RecordDifference | None:
        """Give both the next record; return what differs, None if nothing does.

        Raises ReplayError if the log's code stops.
        """
        self.sequence_id = record.sequence_id
        self._proving.record(record.sequence_id, record.value, record.trailer)
        self._begins("old")
        was = self.old.give_logged(record)
        if was.stopped:
            raise ReplayError(f"{self.name}: {self.old.definition.name}, the code of the log, stops at {was.stopped}")
        self.sent += sum([made.count for made in was.made])
        self._begins("new")
        return self.compare(record, was, self.old.next_due_ns)

    def problem(self, unsure: Collection[str] = ()) -> str:
        """Describe where the old code left the log; "" if nothing shows that it did. ``unsure``: as of ProvingSink."""
        return self._proving.difference(self.name, self.old.methods, unsure)

    def close(self) -> None:
        self.old.close()
        super().close()


_Step = tuple[bytes, Turn, int | None]  # what Trial.compare_next gets
_read = decoding.Decoder(tuple[list[_Step], bytes | None]).decode
PART_SIZE_BYTES = 1 << 18  # sent at once, so that neither process waits for the other at each record
_SAME = b"same"


class TrialBeside:
    """Trial in a copy of this process, beside the log's code in this one. It tells of a difference some records later.

    Where the new code ends its process, that is a difference.
    """

    def __init__(self, *what: Any) -> None:
        trial = Trial(*what)
        self.is_same = True
        self._steps: list[_Step] = []  # not sent yet
        self._size_bytes = 0  # of these
        self._connection, here = Pipe()
        self._pid = os.fork()
        if not self._pid:
            try:
                self._connection.close()
                blob = None
                while trial.is_same and blob is None:
                    steps, blob = _read(here.recv_bytes())
                    for value, was, due_ns in steps:
                        trial.compare_next(LoggedRecord.of(value), was, due_ns)
                if blob is not None and trial.is_same_at_end(blob):
                    here.send_bytes(_SAME)
            finally:
                os._exit(0)  # without clearing away, and no traceback: what it means is found by the whole fleet
        here.close()
        trial.close()

    def compare_next(self, record: LoggedRecord, was: Turn, due_ns: int | None) -> None:
        self._steps.append((record.value, was, due_ns))
        self._size_bytes += len(record.value) + len(was.output)
        if self._size_bytes >= PART_SIZE_BYTES:
            self._send(None)

    def is_same_at_end(self, blob: bytes) -> bool:
        self._send(blob)
        with suppress(OSError, EOFError):
            return self._connection.recv_bytes() == _SAME
        return False

    def _send(self, blob: bytes | None) -> None:
        """Send the steps so far; ``blob``: the state of the log's code at the end."""
        if self.is_same:
            try:
                self._connection.send_bytes(msgspec.msgpack.encode((self._steps, blob)))
            except OSError:
                self.is_same = False
        self._steps, self._size_bytes = [], 0

    def close(self) -> None:
        self._connection.close()
        os.waitpid(self._pid, 0)


def screen(
    source: RecordSource,
    route: Route,
    old: Definition,
    new: Definition,
    outsiders: frozenset[str] = frozenset(),
    to_ns: int | None = None,
    *,
    continues: bool = True,
) -> tuple[Recorded, bool]:
    """Run the log's code from the checkpoint of ``route`` up to ``to_ns``, and the new code up to the first record that
    differs. Return the run of the log's code, and True if nothing differs.

    "The same" is certain: the what-if of a fleet would say that too. What differs here can still come out the same
    there, as where handlers draw other numbers for equal calls. Raises ReplayError if this log or code can't be
    screened, or, unless the log's code ``continues``, if something differs.
    """

    def watch(record: LoggedRecord, was: Turn, due_ns: int | None) -> None:
        trial.compare_next(record, was, due_ns)
        if not (continues or trial.is_same):
            raise ReplayError(f"record {record.sequence_id}, or one before it, differs")

    trial_class: type[Trial | TrialBeside] = TrialBeside if can_fork() else Trial
    with closing(trial_class(source, route, old, new, outsiders)) as trial:
        recorded = Recorded(source, route, old, outsiders, to_ns, watch)
        return recorded, trial.is_same_at_end(recorded.state)
