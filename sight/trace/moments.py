"""Where in a log a moment is."""

from __future__ import annotations

from coordinator.log import LogReader
from pipeline.plain import read_record


def first_record_at(reader: LogReader, time_ns: int) -> int:
    """The first record from ``time_ns`` or later; behind the last one where all are earlier.

    The time of records never goes back. One that is damaged counts as the next sound one.
    """
    first, last = reader.ends()
    end = last + 1
    while first < end:
        middle = (first + end) // 2
        found = _time_from(reader, middle, end)
        if found is None:
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
