"""Where in a log a moment is. Needs neither Arrow nor Spark."""

from __future__ import annotations

from immortal.coordinator.log import LogReader
from immortal.pipeline.plain import read_record


def first_record_at(reader: LogReader, time_ns: int, first: int | None = None, end: int | None = None) -> int:
    """The first of the records ``first`` to ``end`` - 1 (None: all) that may be from ``time_ns`` or later; ``end``, or
    the one behind the last, where all are earlier.

    The time of records never goes back. One that is damaged counts as the next sound one.
    """
    first_kept, last = reader.ends()
    first = first_kept if first is None else first
    end = last + 1 if end is None else end
    while first < end:
        middle = (first + end) // 2
        found = _time_from(reader, middle, end)
        if found is None:  # nothing sound from there on: what is left may be of any time
            end = middle
        elif found[1] < time_ns:
            first = found[0] + 1
        else:
            end = middle
    return first


def _time_from(reader: LogReader, first: int, end: int) -> tuple[int, int] | None:
    """(sequence ID, time) of the first sound record from ``first`` on."""
    for sequence_id in range(first, end):
        for logged in reader.records(sequence_id, sequence_id):
            record = logged.problem or read_record(logged.value, sequence_id, reader.identity.committer_id, whole=False)
            if not isinstance(record, str):
                return sequence_id, record.trailer.time_ns
    return None
