"""What cutting a log off at a record takes out of its tables."""

from __future__ import annotations

from immortal.coordinator.core.errors import DamagedLogError
from immortal.coordinator.log import format as log_format
from immortal.coordinator.log.backend import Span, View
from immortal.coordinator.log.checkpoint_store import checkpoint_spans
from immortal.coordinator.log.format import INT, INTS, META_CUT, META_CUTS, META_SUSPECT, SEQUENCE_KEY, record_key
from immortal.coordinator.log.meta import meta_row, meta_value
from immortal.coordinator.log.reading import stored_headers
from immortal.coordinator.log.rows import Changes


def cut_spans(sequence_id: int, checkpoint_ids: list[int]) -> list[Span]:
    """The records from ``sequence_id`` on with what is said of them, and those checkpoints."""
    spans = [Span("records", SEQUENCE_KEY.pack(sequence_id))]
    spans += [Span(table, record_key(sequence_id)) for table in ("verdicts", "letters")]
    for checkpoint_id in checkpoint_ids:
        spans += [Span.of_one("checkpoints", SEQUENCE_KEY.pack(checkpoint_id)), *checkpoint_spans(checkpoint_id)]
    return spans


def removal(view: View, sequence_id: int, checkpoint_ids: list[int]) -> Changes:
    """Remove :func:`cut_spans`, and the versions that began there. Raises DamagedLogError."""
    changes = Changes(deletes=cut_spans(sequence_id, checkpoint_ids))
    changes.remove("meta", META_SUSPECT)
    for key_view, value in view.scan("versions"):
        key = bytes(key_view)
        if log_format.decode_version_start(key, bytes(value)).sequence_id >= sequence_id:
            changes.remove("versions", key)
    earlier = meta_value(view, META_CUT, INT)
    cuts = meta_value(view, META_CUTS, INTS) or []
    changes.puts.append(meta_row(META_CUT, sequence_id if earlier is None else min(earlier, sequence_id)))
    # A cut in what is cut off now is no longer in this log.
    changes.puts.append(meta_row(META_CUTS, [one for one in cuts if one < sequence_id] + [sequence_id]))
    return changes


def cut_checkpoint_ids(view: View, sequence_id: int) -> list[int]:
    """The checkpoints that have seen the record: sequence IDs never shrink from one checkpoint to the next.

    One with an unreadable header goes with those behind the last that stays: it is of no use in either place.
    """
    headers = list(stored_headers(view))
    staying = [
        checkpoint_id
        for checkpoint_id, stored in headers
        if not isinstance(stored, DamagedLogError) and stored.header.sequence_id < sequence_id
    ]
    last_staying = max(staying, default=0)
    return [checkpoint_id for checkpoint_id, _ in headers if checkpoint_id > last_staying]
