"""Where in a log a moment is, and how large a range is, from a few looks at it."""

from __future__ import annotations

from coordinator.log import LogReader
from coordinator.log.format import SEQUENCE_KEY
from pipeline.plain import read_record
from pipeline.reading import LogRange, open_range


def first_at(wanted: LogRange, time_ns: int) -> int:
    """The first record of the range that may be from ``time_ns`` or later; its end where all are earlier.

    The time of records never goes back. One that is damaged counts as the next sound one.
    """
    reader = open_range(wanted)
    first, end = wanted.first, wanted.end
    while first < end:
        middle = (first + end) // 2
        found = _time_from(reader, wanted, middle, end)
        if found is None:  # nothing sound from there on: what is left may be of any time
            end = middle
        elif found[1] < time_ns:
            first = found[0] + 1
        else:
            end = middle
    return first


def _time_from(reader: LogReader, wanted: LogRange, first: int, end: int) -> tuple[int, int] | None:
    """(sequence ID, time) of the first sound record from ``first`` on."""
    for sequence_id in range(first, end):
        with reader.view() as view:
            found = view.get("records", SEQUENCE_KEY.pack(sequence_id))
            value = None if found is None else bytes(found)
        if value is not None:
            record = read_record(value, sequence_id, wanted.committer_id, whole=False)
            if not isinstance(record, str):
                return sequence_id, record.trailer.time_ns
    return None


def size_bytes(wanted: LogRange) -> int:
    """About how much the range takes on disk: its share of the log's pages."""
    with open_range(wanted).view() as view:
        size, entries = view.size("records")
    return size * (wanted.end - wanted.first) // max(entries, 1)
