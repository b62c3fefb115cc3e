"""How two replays of one process share a log."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from immortal.coordinator.core.interfaces import LogSummary
from immortal.coordinator.log.source import RecordSource


class SharedSource:
    """One reader for several threads: a log can't be opened twice in one process."""

    def __init__(self, source: RecordSource) -> None:
        self.identity = source.identity
        self.trusts_pickle = source.trusts_pickle
        self._source = source
        self.problems: list[str] = []
        self._lock = threading.Lock()

    def summary(self) -> LogSummary:
        with self._lock:
            summary = self._source.summary()
            self.problems = self._source.problems
            return summary

    def values(self, first_sequence_id: int, last_sequence_id: int | None = None) -> Iterator[bytes]:
        return self._locked(self._source.values(first_sequence_id, last_sequence_id))

    def checkpoint_chunks(self, checkpoint_id: int) -> Iterator[bytes]:
        return self._locked(self._source.checkpoint_chunks(checkpoint_id))

    def _locked(self, pieces: Iterator[bytes]) -> Iterator[bytes]:
        while True:
            with self._lock:
                piece = next(pieces, None)
            if piece is None:
                return
            yield piece
