"""What cutting a log off at a record would take away and what would be left; and when it is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct, field

from immortal.coordinator.core.errors import DamagedLogError, LogError
from immortal.coordinator.core.interfaces import IMPULSES, LogSummary
from immortal.coordinator.log.authentication import LogKey
from immortal.coordinator.log.findings import Finding, Severity
from immortal.coordinator.log.open import Log, open_reader
from immortal.coordinator.log.reader import LoggedValue, LogReader
from immortal.coordinator.log.values import verify_value
from immortal.coordinator.log.verify import LogVerification, verify_log
from immortal.protocol.trailer import BatchKind


class CutRefusedError(LogError):
    """Cutting there would not help, or is not needed."""


class LostMessages(Struct, frozen=True):
    """What a cut takes away of one source: an instance, ONESELF or IMPULSES.

    ``first_position`` None: which ones is not known, at most those up to ``last_position``; no kept record has any of
    this source, and of those to be cut the damaged ones can't tell.
    """

    source: str
    first_position: int | None
    last_position: int


class CutPlan(Struct, frozen=True):
    """The records from ``sequence_id`` on are to be cut off."""

    sequence_id: int
    last_sequence_id: int
    recovery_checkpoint_id: int  # recovery starts from this one afterwards
    recovery_sequence_id: int  # ... and replays from the record behind this one
    checkpoint_ids: list[int] = field(default_factory=list)  # readable ones that are cut as well
    records_readable: int = 0  # of those to be cut
    records_damaged: int = 0
    first_damaged: int | None = None  # of those to be cut
    lost: list[LostMessages] = field(default_factory=list)


def plan_cut(
    log: Log,
    instance_name: str,
    sequence_id: int,
    *,
    force: bool = False,
    on_finding: Callable[[Finding], None] = lambda finding: None,
    keys: Sequence[LogKey] | None = None,
) -> CutPlan:
    """Judge a cut at ``sequence_id``. The caller holds the log's lock, and no reader is open in this process.

    ``force``: also where recovery does not need the record. Raises CutRefusedError, which says why, and LogError.
    """
    verification = verify_log(log, instance_name, lock_held=True, keys=keys)
    unreadable = None
    for finding in verification.findings():
        on_finding(finding)
        if finding.severity is Severity.FATAL and verification.identity is None:
            unreadable = finding
    if unreadable is not None:
        raise CutRefusedError(f"{unreadable.message}: cutting records off does not help")
    with open_reader(log, instance_name) as reader:
        try:
            summary = reader.summary()
        except DamagedLogError as error:
            raise CutRefusedError(
                f"{error}: the log cannot be opened at all, cutting records off does not help; restore it from a copy"
            ) from None
        checkpoint_id, checkpoint_sequence_id = _judge(verification, summary, instance_name, sequence_id, force)
        return _plan(reader, verification, summary, sequence_id, checkpoint_id, checkpoint_sequence_id)


def _judge(
    verification: LogVerification, summary: LogSummary, name: str, sequence_id: int, force: bool
) -> tuple[int, int]:
    """(ID, sequence ID) of the checkpoint from which recovery would start afterwards. Raises CutRefusedError."""
    first, last = summary.first_sequence_id, summary.last_sequence_id
    # Where records at the end are missing, the first that is not there is a place to cut: a checkpoint has seen it.
    newest = max((header.sequence_id for header in summary.checkpoints), default=-1)
    if not first <= sequence_id <= max(last, newest):
        kept = f"records {first} to {last}" if first <= last else "no record"
        raise CutRefusedError(f"record {sequence_id} is not in the log of {name!r}: it holds {kept}")
    for checkpoint_id, seen in reversed(verification.whole_checkpoints):
        if sequence_id <= seen <= last and not force:
            raise CutRefusedError(
                f"checkpoint {checkpoint_id} (after record {seen}) is whole, so recovery does not need record"
                f" {sequence_id}: 'immortal recover {name}' says what it needs (--force cuts all the same)"
            )
    usable = [one for one in verification.whole_checkpoints if first - 1 <= one[1] < sequence_id]
    if not usable:
        raise CutRefusedError(
            f"no whole checkpoint from before record {sequence_id} is kept, so the state there can't be rebuilt:"
            f" restore the log of {name!r} from a copy"
        )
    before = verification.first_damage(usable[-1][1] + 1)
    if before is not None and before < sequence_id:
        raise CutRefusedError(
            f"record {before} is damaged as well, and recovery needs it: cut there"
            f" ('immortal recover {name} --truncate-at {before}')"
        )
    return usable[-1]


def _plan(
    reader: LogReader,
    verification: LogVerification,
    summary: LogSummary,
    sequence_id: int,
    checkpoint_id: int,
    checkpoint_sequence_id: int,
) -> CutPlan:
    committer_id = reader.identity.committer_id
    kept: dict[str, int] = {}
    for logged in reader.records(last_sequence_id=sequence_id - 1):
        for source, (_, last_position) in _positions(logged, committer_id).items():
            kept[source] = last_position
    cut: dict[str, tuple[int, int]] = {}
    readable = damaged = 0
    for logged in reader.records(sequence_id):
        if logged.problem is not None:
            damaged += max(1, logged.last_sequence_id - logged.sequence_id + 1)
            continue
        readable += 1
        for source, (first_position, last_position) in _positions(logged, committer_id).items():
            cut[source] = (cut[source][0] if source in cut else first_position, last_position)
    return CutPlan(
        sequence_id,
        max(summary.last_sequence_id, sequence_id - 1),
        checkpoint_id,
        checkpoint_sequence_id,
        [header.checkpoint_id for header in summary.checkpoints if header.sequence_id >= sequence_id],
        readable,
        damaged,
        verification.first_damage(sequence_id),
        _lost(summary, kept, cut, bool(damaged)),
    )


def _positions(logged: LoggedValue, committer_id: int) -> dict[str, tuple[int, int]]:
    """(first, last) position of each source in a record; nothing where it is damaged."""
    positions: dict[str, tuple[int, int]] = {}
    if logged.problem is not None:
        return positions
    try:
        _, trailer = verify_value(logged.value, logged.sequence_id, committer_id)
    except DamagedLogError:
        return positions
    for batch in trailer.batches:
        if batch.kind == BatchKind.INITIAL:
            continue
        source = IMPULSES if batch.kind == BatchKind.IMPULSES else batch.name
        first_position = positions[source][0] if source in positions else batch.first_position
        positions[source] = (first_position, batch.last_position)
    return positions


def _lost(
    summary: LogSummary, kept: Mapping[str, int], cut: Mapping[str, tuple[int, int]], any_damaged: bool
) -> list[LostMessages]:
    """By source: what it has sent last is in the table of sources, also where the records themselves are unreadable."""
    lost = []
    for source in sorted({*summary.sources, *cut}):
        known = summary.sources.get(source)
        last_position = max(known.position if known else 0, cut[source][1] if source in cut else 0)
        if source in kept:
            first_position: int | None = kept[source] + 1
        elif any_damaged and source not in cut:
            first_position = None
        else:
            first_position = cut[source][0] if source in cut else last_position + 1
        if first_position is None or first_position <= last_position:
            lost.append(LostMessages(source, first_position, last_position))
    return lost
