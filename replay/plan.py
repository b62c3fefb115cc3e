"""Plans a replay: the part of a log that was asked for, and its meaning for this log."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct, field, structs

from immortal.coordinator.core.errors import LogError
from immortal.coordinator.core.interfaces import CheckpointHeader, LogSummary, VersionStart
from immortal.coordinator.log.reader import RecordSource
from immortal.replay.errors import ReplayError

OWN_VERSION = 0
"""As ``ReplayPlan.upgrade_to``: the version of the app's own class, whatever that is."""


class ReplayPlan(Struct, frozen=True):
    """Request for a replay. Each field may be left open.

    ``checkpoint_id``: where to begin; None: the newest sound checkpoint from which ``last_sequence_id`` can be reached.
    ``last_sequence_id``: the last record; None: the last one of the log as the replay begins.
    ``last_message``: of that record only the messages up to this one, itself included, counted from 0.
    ``before_last``: begin before the last record in any case, so that it is replayed and not only reached.
    ``last_version``: the version of the state at the end; None: the one that handled ``last_sequence_id``, or without
    that the newest. It makes a difference only where an upgrade comes right behind the last record.
    ``upgrade_to``: what if this version (OWN_VERSION: the app's own) had handled the records? It takes over right
    behind the checkpoint, and no upgrade of the log's past is repeated.
    ``follow``: at the end of the log wait for more, until ``last_sequence_id`` (None: until stopped).
    """

    checkpoint_id: int | None = None
    last_sequence_id: int | None = None
    last_message: int | None = None
    before_last: bool = False
    last_version: int | None = None
    upgrade_to: int | None = None
    follow: bool = False


class Route(Struct, frozen=True):
    """A plan for one log: every question answered.

    ``last_sequence_id`` None: no end but that of whoever follows. ``versions``: the upgrades on the way, in order.
    ``notes``: what the operator should know, in words.
    """

    checkpoint: CheckpointHeader
    last_sequence_id: int | None
    last_message: int | None = None
    versions: Sequence[VersionStart] = ()
    upgrade_to: int | None = None
    notes: Sequence[str] = field(default_factory=list)

    @property
    def last_version(self) -> int:
        """The version whose code handles the last record, or takes over right behind it; not that of a what-if."""
        return self.versions[-1].version if self.versions else self.checkpoint.version

    @property
    def record_count(self) -> int | None:
        """Return the number of records to replay; None if there is no end."""
        return None if self.last_sequence_id is None else self.last_sequence_id - self.checkpoint.sequence_id


def route_until(route: Route, sequence_id: int) -> Route:
    """Return ``route`` with that record as its last one."""
    versions = [start for start in route.versions if start.sequence_id <= sequence_id]
    return structs.replace(route, last_sequence_id=sequence_id, last_message=None, versions=versions)


def plan_route(plan: ReplayPlan, source: RecordSource, summary: LogSummary) -> Route:
    """Turn a plan into a route through the log ``source``. Raises ReplayError for what the log can't do."""
    if summary.extensions is None:
        raise ReplayError("the log is empty: the instance has never completed its first start")
    last = _last_sequence_id(plan, summary)
    latest = last
    if last is not None and (plan.before_last or plan.last_message is not None):
        latest = last - 1
    notes: list[str] = []
    if plan.checkpoint_id is None:
        notes += source.problems
        behind = plan.last_sequence_id if plan.last_version is None else None
        checkpoint = _newest_checkpoint(source, summary, latest, behind, notes)
    else:
        checkpoint = _given_checkpoint(plan.checkpoint_id, source, summary, latest)
    versions: list[VersionStart] = []
    if plan.upgrade_to is None:
        versions = _versions_on_the_way(summary.versions, checkpoint, last, plan)
    return Route(checkpoint, last, plan.last_message, versions, plan.upgrade_to, notes)


def _last_sequence_id(plan: ReplayPlan, summary: LogSummary) -> int | None:
    last = plan.last_sequence_id
    if last is None:
        return None if plan.follow else summary.last_sequence_id
    if last < 0:
        raise ReplayError(f"record {last} was asked for; records are counted from 0")
    if last > summary.last_sequence_id and not plan.follow:
        raise ReplayError(
            f"record {last} is not in the log: its last one is {summary.last_sequence_id} (--follow waits for it)"
        )
    return last


def usable_checkpoints(summary: LogSummary) -> list[CheckpointHeader]:
    """Return the checkpoints from which a replay can begin: every record after them is kept."""
    return [header for header in summary.checkpoints if header.sequence_id + 1 >= summary.first_sequence_id]


def _given_checkpoint(
    checkpoint_id: int, source: RecordSource, summary: LogSummary, latest: int | None
) -> CheckpointHeader:
    for header in usable_checkpoints(summary):
        if header.checkpoint_id != checkpoint_id:
            continue
        if latest is not None and header.sequence_id > latest:
            raise ReplayError(
                f"checkpoint {checkpoint_id} was taken {place_of(header)}: "
                f"a replay from it can't end at record {latest}; choose an earlier checkpoint"
            )
        problem = checkpoint_problem(source, header)
        if problem is not None:
            raise ReplayError(f"checkpoint {checkpoint_id} can't be used: {problem}; choose another one")
        return header
    kept = ", ".join(f"{header.checkpoint_id} ({place_of(header)})" for header in usable_checkpoints(summary))
    damaged = "".join(f"; {problem}" for problem in source.problems)
    raise ReplayError(
        f"there is no checkpoint {checkpoint_id} in the log to begin at; it holds {kept or 'none that can be used'}"
        f"{damaged}"
    )


def _newest_checkpoint(
    source: RecordSource, summary: LogSummary, latest: int | None, upgraded_at: int | None, notes: list[str]
) -> CheckpointHeader:
    """``upgraded_at``: the checkpoint of an upgrade right behind this record holds another state than that record's."""
    usable = usable_checkpoints(summary)
    within = [header for header in usable if latest is None or header.sequence_id <= latest]
    upgrades = {start.version for start in summary.versions if start.sequence_id == upgraded_at}
    within.sort(key=lambda header: header.sequence_id != upgraded_at or header.version not in upgrades)
    for header in reversed(within):
        problem = checkpoint_problem(source, header)
        if problem is None:
            return header
        notes.append(f"checkpoint {header.checkpoint_id} is left out: {problem}")
    if within or not usable:
        raise ReplayError(
            "the log has no sound checkpoint to begin at: 'immortal log verify' says what is damaged"
            + "".join(f"; {note}" for note in notes)
        )
    oldest = usable[0]
    raise ReplayError(
        f"no checkpoint before that record is kept: the oldest one is {oldest.checkpoint_id}, "
        f"taken {place_of(oldest)} (--keep-log-days and --keep-log-mb of the instance say how much is kept)"
    )


def place_of(header: CheckpointHeader) -> str:
    """Say where in the log a checkpoint was taken."""
    return f"after record {header.sequence_id}" if header.sequence_id >= 0 else "before record 0"


def checkpoint_problem(source: RecordSource, header: CheckpointHeader) -> str | None:
    """Check a checkpoint's blob; return the problem as text, None if it is sound."""
    try:
        for _ in source.checkpoint_chunks(header.checkpoint_id):
            pass
    except LogError as error:
        return str(error)
    return None


def _versions_on_the_way(
    versions: Sequence[VersionStart], checkpoint: CheckpointHeader, last: int | None, plan: ReplayPlan
) -> list[VersionStart]:
    """The upgrades between the checkpoint and the end.

    A version may come back after a downgrade: of those that began at or before the checkpoint, the last one of the
    checkpoint's own version is the one that it is from.
    """
    begun = 0
    for index, start in enumerate(versions):
        if start.sequence_id < checkpoint.sequence_id or (
            start.sequence_id == checkpoint.sequence_id and start.version == checkpoint.version
        ):
            begun = index + 1
    on_the_way = [start for start in versions[begun:] if last is None or start.sequence_id <= last]
    if last is None or (plan.last_sequence_id is None and plan.last_version is None):
        return on_the_way
    before_last = [start for start in on_the_way if start.sequence_id < last]
    at_last = on_the_way[len(before_last) :]
    if plan.last_version is not None:
        for index, start in enumerate(at_last):
            if start.version == plan.last_version:
                return [*before_last, *at_last[: index + 1]]
    return before_last
