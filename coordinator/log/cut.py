"""Cuts off the end of a log on an operator's command, if a damaged record prevents recovery.

The part to be cut is first copied, byte for byte and durably, into a separate log next to this one. Then one append
removes it, so a crash leaves the log either whole or cut.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from msgspec import Struct, field

from immortal.coordinator.core.errors import DamagedLogError, LogError, LogFullError
from immortal.coordinator.core.interfaces import IMPULSES, LogSummary
from immortal.coordinator.log import format as log_format
from immortal.coordinator.log.authentication import LogKey, Macs, find_key, read_marker, record_mac
from immortal.coordinator.log.backend import Append, Backend, Finding, Row, Severity, Span, View
from immortal.coordinator.log.checkpoints import checkpoint_spans
from immortal.coordinator.log.format import META_AUTHENTICATED, SEQUENCE_KEY
from immortal.coordinator.log.identity import first_and_last_sequence_id, meta_row, meta_value, verify_value
from immortal.coordinator.log.open import Log, open_reader, place_of, with_encryption
from immortal.coordinator.log.reader import LoggedValue, LogReader
from immortal.coordinator.log.rows import Changes
from immortal.coordinator.log.sealer import seal_after
from immortal.coordinator.log.verify import LogVerification, verify_log
from immortal.coordinator.log.view_queries import stored_headers
from immortal.protocol.trailer import BatchKind

_COPIED_WHOLE = ("sources", "acknowledged", "peers", "clients", "replies", "versions", "meta")
_NOT_OF_THE_PART = (log_format.META_CUT, META_AUTHENTICATED, log_format.META_SEAL)


class LogCutter:
    """Cutter of one log. It excludes coordinators from the log, from the plan to the cut."""

    def __init__(self, log: Log, instance_name: str, keys: Sequence[LogKey] | None = None) -> None:
        """``keys``: possible keys of the log.

        Raises LogLockedError if a coordinator writes the log, LogError if there is no log, or it can't be cut."""
        self._place = place_of(log)
        self._instance_name = instance_name
        self._keys = keys
        if not self._place.exists():
            raise LogError(f"there is no log in {self._place.label}")
        self._release = self._place.lock()

    def __enter__(self) -> LogCutter:
        return self

    def __exit__(self, *args: object) -> None:
        self._release()

    def plan(
        self, sequence_id: int, *, force: bool = False, on_finding: Callable[[Finding], None] = lambda finding: None
    ) -> CutPlan:
        """Plan a cut at ``sequence_id`` without changing anything. No reader of the log is open in this process.

        ``force``: plan it even if recovery does not need the record. Raises CutRefusedError with the reason, LogError.
        """
        verification = verify_log(self._place, self._instance_name, lock_held=True, keys=self._keys)
        unreadable = None
        for finding in verification.findings():
            on_finding(finding)
            if finding.severity is Severity.FATAL and verification.identity is None:
                unreadable = finding
        if unreadable is not None:
            raise CutRefusedError(f"{unreadable.message}: cutting records off does not help")
        with open_reader(self._place, self._instance_name) as reader:
            try:
                summary = reader.summary()
            except DamagedLogError as error:
                raise CutRefusedError(
                    f"{error}: the log cannot be opened at all, cutting records off does not help; restore it from a"
                    " copy"
                ) from None
            start = _assess(verification, summary, self._instance_name, sequence_id, force)
            return _plan(reader, verification, summary, sequence_id, start)

    def cut(self, plan: CutPlan) -> Path:
        """Carry out ``plan``; return the folder with the removed part, a log that can be opened for reading.

        The rest of an authenticated log stays authenticated with the same key; the removed part is not authenticated.
        Raises LogError; then the log is unchanged.
        """
        with contextlib.closing(with_encryption(self._place, self._place.open_locked(self._instance_name))) as backend:
            backend.flush()
            with backend.view() as view:
                checkpoint_ids = cut_checkpoint_ids(view, plan.sequence_id)
                append = self._removal(view, backend, plan.sequence_id, checkpoint_ids)
                name = f"cut-{plan.sequence_id}-{plan.last_sequence_id}"
                kept = backend.export_cut_rows(name, _kept_rows(view.stored, plan.sequence_id, checkpoint_ids))
            try:
                backend.append(append)
            except LogFullError as error:
                raise LogError(f"the log in {self._place.label} could not be cut, and is unchanged: {error}") from error
            return kept

    def _removal(self, view: View, backend: Backend, sequence_id: int, checkpoint_ids: list[int]) -> Append:
        changes = rows_removed_by_cut(view, sequence_id, checkpoint_ids)
        marker = read_marker(view)
        if marker is not None:
            macs = Macs(find_key(self._keys or (), marker, self._instance_name), backend.identity, marker)
            head = record_mac(view, macs, sequence_id - 1)
            changes.deletes.append(Span("record_seals", SEQUENCE_KEY.pack(sequence_id)))
            for checkpoint_id in checkpoint_ids:
                changes.remove("checkpoint_seals", SEQUENCE_KEY.pack(checkpoint_id))
            changes.puts.append(seal_after(view, macs, changes.puts, changes.deletes, head))
        _, last = first_and_last_sequence_id(view)
        return Append(last, backend.fence, puts=changes.puts, deletes=changes.deletes, points=())


def _kept_rows(view: View, sequence_id: int, checkpoint_ids: list[int]) -> Iterator[Row]:
    """Yield the rows of the removed part as a log, ordered by table and key."""
    spans = [*cut_spans(sequence_id, checkpoint_ids), *map(Span, _COPIED_WHOLE)]
    for span in sorted(spans):
        for key, value in span.rows(view):
            if span.table == "meta" and key in _NOT_OF_THE_PART:
                continue
            if (
                span.table == "meta"
                and key == log_format.META_FORMAT
                and meta_value(view, key, log_format.INT) == log_format.AUTHENTICATED_VERSION
            ):
                yield meta_row(log_format.META_FORMAT, log_format.FORMAT_VERSION)
            elif span.table != "meta" or key != log_format.META_TRIMMED:
                yield span.table, key, value
    # The new log begins at the cut, and needs no mark of a cut at its beginning.
    yield meta_row(log_format.META_TRIMMED, sequence_id - 1)


# Planning a cut: what it removes, what stays, and when it is refused.


class CutRefusedError(LogError):
    """Raised if a cut there would not help, or is not needed."""


class LostMessages(Struct, frozen=True):
    """Messages of one source (an instance, ONESELF or IMPULSES) that a cut removes.

    ``first_position`` None: which ones is unknown, at most those up to ``last_position``; no kept record has any of
    this source, and the removed records are too damaged to tell.
    """

    source: str
    first_position: int | None
    last_position: int


class CutPlan(Struct, frozen=True):
    """Plan of a cut: it removes the records from ``sequence_id`` on."""

    sequence_id: int
    last_sequence_id: int
    recovery_checkpoint_id: int  # recovery starts from this one after the cut
    recovery_sequence_id: int  # ... and replays from the record after this one
    checkpoint_ids: list[int] = field(default_factory=list)  # readable ones that are removed as well
    records_readable: int = 0  # among the removed ones
    records_damaged: int = 0
    first_damaged: int | None = None  # among the removed ones
    lost: list[LostMessages] = field(default_factory=list)


def _assess(
    verification: LogVerification, summary: LogSummary, name: str, sequence_id: int, force: bool
) -> tuple[int, int]:
    """Choose the checkpoint for a recovery after the cut: (ID, sequence ID). Raises CutRefusedError."""
    first, last = summary.first_sequence_id, summary.last_sequence_id
    # If records at the end are missing, the first missing one is a valid place: a checkpoint covers it.
    newest = max((header.sequence_id for header in summary.checkpoints), default=-1)
    if not first <= sequence_id <= max(last, newest):
        kept = f"records {first} to {last}" if first <= last else "no record"
        raise CutRefusedError(f"record {sequence_id} is not in the log of {name!r}: it holds {kept}")
    for checkpoint_id, seen in reversed(verification.whole_checkpoints):
        if sequence_id <= seen <= last and not force:
            raise CutRefusedError(
                f"checkpoint {checkpoint_id} (after record {seen}) is whole, so recovery does not need record"
                f" {sequence_id}: 'immortal recover {name}' says what it needs (--force cuts anyway)"
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
    reader: LogReader, verification: LogVerification, summary: LogSummary, sequence_id: int, start: tuple[int, int]
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
        *start,
        [header.checkpoint_id for header in summary.checkpoints if header.sequence_id >= sequence_id],
        readable,
        damaged,
        verification.first_damage(sequence_id),
        _lost(summary, kept, cut, bool(damaged)),
    )


def _positions(logged: LoggedValue, committer_id: int) -> dict[str, tuple[int, int]]:
    """Return the first and last position of each source in a record; empty if it is damaged."""
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
    """Return the lost messages by source. The table of sources has the last position even of unreadable records."""
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


# Carrying out a cut: the rows that it removes.


def cut_spans(sequence_id: int, checkpoint_ids: list[int]) -> list[Span]:
    """Return the spans of records from ``sequence_id`` on, their verdicts and dead letters, and these checkpoints."""
    spans = [Span("records", SEQUENCE_KEY.pack(sequence_id))]
    spans += [Span(table, log_format.record_key(sequence_id)) for table in ("verdicts", "letters")]
    for checkpoint_id in checkpoint_ids:
        spans += [
            Span.of_key("checkpoints", SEQUENCE_KEY.pack(checkpoint_id)),
            *checkpoint_spans(checkpoint_id),
        ]
    return spans


def rows_removed_by_cut(view: View, sequence_id: int, checkpoint_ids: list[int]) -> Changes:
    """Return changes that remove :func:`cut_spans`, and the versions that began there. Raises DamagedLogError."""
    changes = Changes(deletes=cut_spans(sequence_id, checkpoint_ids))
    changes.remove("meta", log_format.META_SUSPECT)
    for key, value in Span("versions").rows(view):
        if log_format.decode_version_start(key, bytes(value)).sequence_id >= sequence_id:
            changes.remove("versions", key)
    earlier = meta_value(view, log_format.META_CUT, log_format.INT)
    cuts = meta_value(view, log_format.META_CUTS, log_format.INTS) or []
    changes.puts.append(meta_row(log_format.META_CUT, sequence_id if earlier is None else min(earlier, sequence_id)))
    # An earlier cut inside the removed part is no longer in this log.
    changes.puts.append(meta_row(log_format.META_CUTS, [one for one in cuts if one < sequence_id] + [sequence_id]))
    return changes


def cut_checkpoint_ids(view: View, sequence_id: int) -> list[int]:
    """Return the checkpoints that contain the record: sequence IDs never fall from one checkpoint to the next.

    One with an unreadable header is removed if it follows the last one that stays: it is useless in either log.
    """
    headers = list(stored_headers(view))
    staying = [
        checkpoint_id
        for checkpoint_id, stored in headers
        if not isinstance(stored, DamagedLogError) and stored.header.sequence_id < sequence_id
    ]
    last_staying = max(staying, default=0)
    return [checkpoint_id for checkpoint_id, _ in headers if checkpoint_id > last_staying]
