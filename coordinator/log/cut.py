"""Cutting the end of a log off by hand, where a damaged record keeps its instance from recovering.

What is cut is kept: it is first copied, byte for byte and durably, into a log of its own beside. Then it is removed in
one append, so that a crash leaves the log whole or cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from immortal.coordinator.core.errors import LogError, LogFullError
from immortal.coordinator.log import format as log_format
from immortal.coordinator.log.authentication import LogKey, Macs, find_key, read_marker, record_mac
from immortal.coordinator.log.backend import Append, Backend, Row, Span, View
from immortal.coordinator.log.cut_plan import CutPlan, plan_cut
from immortal.coordinator.log.findings import Finding
from immortal.coordinator.log.format import (
    META_AUTHENTICATED,
    META_CUT,
    META_FORMAT,
    META_SEAL,
    META_TRIMMED,
    SEQUENCE_KEY,
)
from immortal.coordinator.log.meta import first_and_last_sequence_id, meta_row
from immortal.coordinator.log.open import Log, place_of
from immortal.coordinator.log.removal import cut_checkpoint_ids, cut_spans, removal
from immortal.coordinator.log.sealing import seal_after

_COPIED_WHOLE = ("sources", "acknowledged", "peers", "clients", "replies", "versions", "meta")
_NOT_OF_THE_PART = (META_CUT, META_AUTHENTICATED, META_SEAL)


class LogCutter:
    """Keeps coordinators off the log, from the plan to the cut."""

    def __init__(self, log: Log, instance_name: str, keys: Sequence[LogKey] | None = None) -> None:
        """``keys``: those that the log may be authenticated with.

        Raises LogLockedError where a coordinator writes the log, LogError where there is none, or none to be cut."""
        self._place = place_of(log)
        self._instance_name = instance_name
        self._keys = keys
        if not self._place.exists():
            raise LogError(f"there is no log in {self._place.where}")
        self._held = self._place.hold()

    def __enter__(self) -> LogCutter:
        return self

    def __exit__(self, *args: object) -> None:
        self._held.release()

    def plan(
        self, sequence_id: int, *, force: bool = False, on_finding: Callable[[Finding], None] = lambda finding: None
    ) -> CutPlan:
        """What cutting at ``sequence_id`` means; nothing is changed. As :func:`coordinator.log.cut_plan.plan_cut`."""
        return plan_cut(
            self._place, self._instance_name, sequence_id, force=force, on_finding=on_finding, keys=self._keys
        )

    def cut(self, plan: CutPlan) -> Path:
        """Carry out ``plan``; the folder where what was cut is kept, as a log that can be opened for reading.

        What stays of an authenticated log is so with the same key; what was cut off is not. Raises LogError; the log is
        as it was then.
        """
        backend = self._held.open(self._instance_name)
        try:
            backend.settle()
            with backend.view() as view:
                checkpoint_ids = cut_checkpoint_ids(view, plan.sequence_id)
                append = self._removal(view, backend, plan.sequence_id, checkpoint_ids)
                name = f"cut-{plan.sequence_id}-{plan.last_sequence_id}"
                kept = backend.keep_apart(name, _kept_rows(view, plan.sequence_id, checkpoint_ids))
            try:
                backend.append(append)
            except LogFullError as error:
                raise LogError(f"the log in {self._place.where} could not be cut, it is as it was: {error}") from error
            return kept
        finally:
            backend.close()

    def _removal(self, view: View, backend: Backend, sequence_id: int, checkpoint_ids: list[int]) -> Append:
        changes = removal(view, sequence_id, checkpoint_ids)
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
    """Of the log that the part becomes: what is cut off, as it is, and whose it was. Table by table, in their order."""
    spans = [*cut_spans(sequence_id, checkpoint_ids), *map(Span, _COPIED_WHOLE)]
    for span in sorted(spans):
        for key_view, value in view.scan(span.table, span.first):
            key = bytes(key_view)
            if not span.has(key):
                break
            if span.table == "meta" and key in _NOT_OF_THE_PART:
                continue
            if span.table == "meta" and key == META_FORMAT and view.get("meta", META_AUTHENTICATED) is not None:
                yield meta_row(META_FORMAT, log_format.FORMAT_VERSION)
            elif span.table != "meta" or key != META_TRIMMED:
                yield span.table, key, value
    # It begins where the cut was, and a cut at its beginning means nothing to it.
    yield meta_row(META_TRIMMED, sequence_id - 1)
