"""Where in a log a moment is, and how large a range is, from a few looks at it."""

from __future__ import annotations

from immortal.pipeline.moments import first_record_at
from immortal.pipeline.reading import LogRange, open_range


def first_at(wanted: LogRange, time_ns: int) -> int:
    """As :func:`immortal.pipeline.moments.first_record_at`, of the range."""
    return first_record_at(open_range(wanted), time_ns, wanted.first, wanted.end)


def size_bytes(wanted: LogRange) -> int:
    """About how much the range takes on disk: its share of the log's pages."""
    with open_range(wanted).view() as view:
        size, entries = view.size("records")
    return size * (wanted.end - wanted.first) // max(entries, 1)
