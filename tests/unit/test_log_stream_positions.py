"""The positions of incoming streams: trailers against the table of sources."""

from __future__ import annotations

import pytest

from immortal.coordinator.log.backend import Severity
from immortal.coordinator.log.verify import StreamPositions
from immortal.protocol.client_frames import CLIENTS
from immortal.protocol.trailer import BatchKind, BatchSource, Trailer

CLIENT = f"{CLIENTS}ann"


def with_five(name: str, kind: BatchKind) -> StreamPositions:
    """The trailers end at position 5 of that source."""
    positions = StreamPositions()
    assert list(positions.check(0, Trailer(1, [BatchSource(kind, name, 1, 5, 1)]))) == []
    return positions


@pytest.mark.parametrize(
    ("sources", "severity", "outcome"),
    [
        ({"bob": 5}, None, ""),
        ({"bob": 0}, Severity.NOTE, "the stream was reset"),
        ({}, Severity.FATAL, "messages would be lost or executed twice"),
        ({"bob": 4}, Severity.FATAL, "messages would be lost or executed twice"),
        ({"bob": 6}, Severity.FATAL, "messages would be lost or executed twice"),
    ],
)
def test_a_source_ends_where_its_table_says(sources: dict[str, int], severity: Severity | None, outcome: str) -> None:
    found = list(with_five("bob", BatchKind.STREAM).compare(0, sources))
    assert [one.severity for one in found] == ([] if severity is None else [severity])
    expected = f"the stream from 'bob': table 'sources' says {sources.get('bob', 0)}, the trailers end at 5: {outcome}"
    assert [one.message for one in found] == ([] if severity is None else [expected])


@pytest.mark.parametrize(("sources", "count"), [({}, 0), ({CLIENT: 5}, 0), ({CLIENT: 4}, 1)])
def test_a_client_may_be_forgotten(sources: dict[str, int], count: int) -> None:
    assert len(list(with_five(CLIENT, BatchKind.CLIENT).compare(0, sources))) == count
