"""First round of a what-if: old and new code of one service side by side over its log, compared as bytes.

Nothing is kept of the log. Where both send the same bytes for a record, no message of it is looked at.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable

from msgspec import Struct

from immortal.appsdk.handlers.definition import Definition
from immortal.appsdk.running.inspection import inspect_state
from immortal.appsdk.state.tree import differences
from immortal.coordinator.core.formatting import time_text
from immortal.coordinator.log.reader import RecordSource
from immortal.protocol.verdicts import Verdict
from immortal.replay.comparison import aligned
from immortal.replay.fleet.model import Difference
from immortal.replay.fleet.player import FIRST_OTHER_NUMBER, LoggedRecord, Place, Player, Turn, logged, not_of_code
from immortal.replay.plan import ReplayError, Route, never_was
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


class Screening:
    """Run of old and new code of one service over the same records, from the checkpoint of ``route`` on.

    The recorded inputs go to both, also after a difference. ``messages``: given so far; ``sent``: by the old code.
    ``begins``: called with "old" and "new" before that code handles a record.
    Raises ReplayError if a class does not take the state, or the log was handled by more than one version.
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
        self.name = source.identity.instance_name
        if route.versions:
            raise ReplayError(f"{self.name}: the log was handled by several versions")
        self.sequence_id = route.checkpoint.sequence_id
        self.messages = self.sent = 0
        self._proving = ProvingSink(source, route)
        self.old = Player(source, route, old, self._proving, outsiders=outsiders)
        try:
            self.new = Player(source, route, new, Sink(), is_new=True, outsiders=outsiders)
        except BaseException:
            self.old.close()
            raise
        self._begins = begins
        self._due: object = None  # the due times that were reported as different
        self._verdicts: dict[int, list[Verdict]] = defaultdict(list)  # of the log, by record
        for one in source.summary().verdicts:
            self._verdicts[one.sequence_id].append(one)

    def give(self, record: LoggedRecord) -> RecordDifference | None:
        """Give both the next record; return what differs, None if nothing does.

        Raises ReplayError if the log's code stops.
        """
        self.sequence_id = record.sequence_id
        count = sum([batch.count for batch in record.trailer.batches])
        self.messages += count
        self._proving.record(record.sequence_id, record.value, record.trailer)
        old, new = self.old, self.new
        self._begins("old")
        was = old.give_logged(record)
        if was.stopped:
            raise ReplayError(f"{self.name}: {old.definition.name}, the code of the log, stops at {was.stopped}")
        self.sent += sum([made.count for made in was.made])
        if new.ended is not None:
            return None
        new.tasks.told(was.draws)
        self._begins("new")
        now = new.give_logged(record)
        calls = [] if was.said == now.said else self._compare(record, was, now)
        fates = self._fates(record.sequence_id, was, now)
        other = now.stopped or self._other()
        if calls or fates or other:
            return RecordDifference(calls, fates, other)
        return None

    def _compare(self, record: LoggedRecord, was: Turn, now: Turn) -> list[Difference]:
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

    def _other(self) -> str:
        """Describe a timer or an effect that differs after a record; "" if none does."""
        old, new = self.old, self.new
        waiting = new.tasks.effects.waiting
        if waiting and max(waiting) >= FIRST_OTHER_NUMBER:
            name = waiting[max(waiting)].function.name
            return f"the effect {name}, which the log's code does not ask for"
        due = old.next_due_ns, new.next_due_ns
        if due[0] == due[1] or due == self._due:
            return ""
        self._due = due
        was, now = ("none" if one is None else time_text(one) for one in due)
        return f"the next timer: was {was}; would be {now}"

    def problem(self, unsure: Collection[str] = ()) -> str:
        """Describe where the old code left the log; "" if nothing shows that it did. ``unsure``: as of ProvingSink."""
        return self._proving.difference(self.name, self.old.methods, unsure)

    def states_differ(self) -> bool:
        """End both runs, and return True if their states at the end differ.

        Raises ReplayError if they can't be had, or if the old code did not do what is in the log.
        """
        if problem := self.problem():
            raise ReplayError(never_was(self.name, problem))
        blobs = [player.finish(self.sequence_id) for player in (self.old, self.new)]
        if blobs[0] == blobs[1]:
            return False
        old, new = map(inspect_state, (self.old.definition, self.new.definition), blobs)
        return next(iter(differences(old.state, new.state)), None) is not None

    def close(self) -> None:
        self.old.close()
        self.new.close()


class Screened(Struct, frozen=True):
    """Result of the screening of a whole log. ``first``: the first record that differs; None: none does.

    ``state_differs``: the states at the end do; None: it did not come so far. ``messages`` and ``sent``: up to
    where it ended.
    """

    messages: int
    sent: int
    first: RecordDifference | None
    state_differs: bool | None

    @property
    def is_different(self) -> bool:
        return self.first is not None or self.state_differs is True


def screen(
    source: RecordSource,
    route: Route,
    old: Definition,
    new: Definition,
    *,
    to_ns: int | None = None,
    outsiders: frozenset[str] = frozenset(),
) -> Screened:
    """Screen a log from the checkpoint of ``route`` up to ``to_ns``, or to the first record that differs.

    "The same" is certain: the what-if of a fleet would say that too. What differs here can still come out the same
    there, as where handlers draw other numbers for equal calls. Raises ReplayError if this log or code can't be
    screened.
    """
    screening = Screening(source, route, old, new, outsiders)
    try:
        for record in logged(source, route.checkpoint, to_ns):
            if (first := screening.give(record)) is not None:
                return Screened(screening.messages, screening.sent, first, None)
        return Screened(screening.messages, screening.sent, None, screening.states_differ())
    finally:
        screening.close()
