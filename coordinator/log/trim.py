"""Removing what no kept checkpoint needs, in bounded steps (docs/decisions/0002-trim-in-steps.md)."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping

from msgspec import Struct

from immortal.coordinator.core.errors import DamagedLogError, require
from immortal.coordinator.core.interfaces import CheckpointHeader
from immortal.coordinator.log import format as log_format
from immortal.coordinator.log import spilled
from immortal.coordinator.log.backend import View
from immortal.coordinator.log.budget import Budget
from immortal.coordinator.log.format import CHUNK_KEY, SEQUENCE_KEY
from immortal.coordinator.log.meta import meta_row
from immortal.coordinator.log.reading import acknowledged_positions
from immortal.coordinator.log.rows import Changes


class Retention(Struct, frozen=True):
    """What is to be kept: the newest ``keep_checkpoints`` (None: what ``keep_since_ns`` asks for alone counts), and
    all that a replay from ``keep_since_ns`` on needs (ns since the Unix epoch; None: no more than that)."""

    keep_checkpoints: int | None
    keep_since_ns: int | None

    def __post_init__(self) -> None:
        require(
            self.keep_checkpoints is None or self.keep_checkpoints >= 1,
            f"{self.keep_checkpoints} checkpoints cannot be kept, it must be at least one",
        )

    def oldest_kept(self, newest_first: Iterable[CheckpointHeader]) -> CheckpointHeader | None:
        """The oldest checkpoint to keep; None where there is none at all."""
        oldest = None
        for kept, header in enumerate(newest_first, start=1):
            oldest = header
            enough = self.keep_checkpoints is None or kept >= self.keep_checkpoints
            if enough and (self.keep_since_ns is None or header.time_ns <= self.keep_since_ns):
                break
        return oldest


def trim_step(view: View, keep: Retention | None, damaged_ids: Collection[int], budget: Budget) -> tuple[Changes, bool]:
    """What goes in one step, and whether some of it was spilled; the budget is exhausted if more may remain."""
    acknowledged = acknowledged_positions(view)
    changes = Changes()
    for destination, position in acknowledged.items():
        if not budget.exhausted:
            changes.deletes += spilled.trim(view, "spilled", destination, position, budget)
    from_spilled = bool(changes.deletes)
    if keep is not None and not budget.exhausted:
        _trim_history(view, changes, keep, damaged_ids, acknowledged, budget)
    return changes, from_spilled


def _trim_history(
    view: View,
    changes: Changes,
    keep: Retention,
    damaged_ids: Collection[int],
    acknowledged: Mapping[str, int],
    budget: Budget,
) -> None:
    """The order matters: a header goes before its chunks, and headers before the records that they need, so that a
    crash between two steps never leaves a checkpoint that looks whole and is not.
    """
    oldest = keep.oldest_kept(_valid_headers(view, damaged_ids))
    if oldest is None:
        return
    changes.deletes += budget.take_span(view, "checkpoints", SEQUENCE_KEY.pack(oldest.checkpoint_id))
    for table in ("chunks", "outputs"):
        changes.deletes += budget.take_span(view, table, CHUNK_KEY.pack(oldest.checkpoint_id, 0))
    for span in budget.take_span(view, "records", SEQUENCE_KEY.pack(oldest.sequence_id + 1)):
        (end,) = SEQUENCE_KEY.unpack(span.end or b"")
        changes.deletes.append(span)
        changes.puts.append(meta_row(log_format.META_TRIMMED, end - 1))
    changes.deletes += budget.take_span(view, "verdicts", log_format.record_key(oldest.sequence_id + 1))
    for destination, mark in oldest.outputs.items():
        if not budget.exhausted:
            # Also those before the checkpoint, while they wait: it may have left them where they are.
            position = min(mark.position, acknowledged.get(destination, 0))
            changes.deletes += spilled.trim(view, "impulses", destination, position, budget)


def _valid_headers(view: View, damaged_ids: Collection[int]) -> Iterator[CheckpointHeader]:
    """The headers of all checkpoints, newest first; those that are known to be damaged do not count."""
    for key, value in view.scan_back("checkpoints"):
        with contextlib.suppress(DamagedLogError):
            header = log_format.decode_header(bytes(key), bytes(value)).header
            if header.checkpoint_id not in damaged_ids:
                yield header
