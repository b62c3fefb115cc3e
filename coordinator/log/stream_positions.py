"""Whether the positions of each incoming stream follow one another through a log, and end where its tables say."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from immortal.coordinator.core.interfaces import IMPULSES
from immortal.coordinator.log.findings import Finding, Severity
from immortal.protocol.client import CLIENTS
from immortal.protocol.trailer import BatchKind, Trailer

_CUT_OFF = "what was between was cut off by hand"


class StreamPositions:
    """Fed with the trailers of a log in their order. ``cuts``: the sequence IDs at which the log was once cut off."""

    def __init__(self, cuts: Iterable[int] = ()) -> None:
        self._expected: dict[str, int] = {}  # by source
        self._cuts = sorted(cuts)  # those that lie ahead
        self._cut_sources: set[str] = set()  # those of which nothing has come yet behind the last cut

    def skip(self, sequence_id: int) -> None:
        """A record can't be read: what it held of any stream is unknown."""
        self._pass_cuts(sequence_id)
        self._expected.clear()

    def check(self, sequence_id: int, trailer: Trailer) -> Iterator[Finding]:
        """Each stream's positions must follow one another; 1 is a stream that began anew."""
        self._pass_cuts(sequence_id)
        place = f"record {sequence_id}"
        for batch in trailer.batches:
            if batch.kind == BatchKind.INITIAL:
                continue
            source = IMPULSES if batch.kind == BatchKind.IMPULSES else batch.name
            expected = self._expected.get(source)
            self._expected[source] = batch.last_position + 1
            behind_cut = source in self._cut_sources
            self._cut_sources.discard(source)
            if expected is None or batch.first_position == expected:
                continue
            message = f"{place}: {_text(source)} goes on at position {batch.first_position}, expected {expected}"
            if behind_cut and batch.first_position > expected:
                yield Finding(Severity.NOTE, place, f"{message}: {_CUT_OFF}")
            elif batch.first_position == 1:
                yield Finding(Severity.NOTE, place, f"{message}: that stream began anew")
            else:
                yield Finding(Severity.FATAL, place, f"{message}: messages were lost or executed twice")

    def compare(self, last_sequence_id: int, sources: Mapping[str, int]) -> Iterator[Finding]:
        """The last position of each source by the tables, against the trailers up to the last record.

        ``sources``: the table of that name, and that of clients by their callers' names.
        """
        self._pass_cuts(last_sequence_id + 1)
        for source, expected in sorted(self._expected.items()):
            position = sources.get(source, 0)
            if position == expected - 1 or (source.startswith(CLIENTS) and source not in sources):  # forgotten
                continue
            table = "clients" if source.startswith(CLIENTS) else "sources"
            message = f"{_text(source)}: table {table!r} says {position}, the trailers end at {expected - 1}"
            if source in self._cut_sources and position >= expected:
                yield Finding(Severity.NOTE, table, f"{message}: {_CUT_OFF}")
            elif position == 0 and source in sources:
                yield Finding(Severity.NOTE, table, f"{message}: the stream was reset")
            else:
                yield Finding(Severity.FATAL, table, f"{message}: messages would be lost or executed twice")

    def _pass_cuts(self, sequence_id: int) -> None:
        """What was cut off counts as received: behind a cut each stream may jump ahead, once."""
        while self._cuts and self._cuts[0] <= sequence_id:
            self._cuts.pop(0)
            self._cut_sources = set(self._expected)


def _text(source: str) -> str:
    if source == IMPULSES:
        return "the impulses to oneself"
    if source.startswith(CLIENTS):
        return f"the requests of client {source[len(CLIENTS) :]!r}"
    return f"the stream from {source!r}" if source else "the stream from oneself"
