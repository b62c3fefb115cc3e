"""Which version of the app handles which part of the log, and the upgrade that is asked for."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from immortal.coordinator.core.interfaces import CheckpointHeader, VersionStart

FIRST_VERSION = 1


class Versions:
    """``upgrade_to``: the version that the next recovery is to end in; None if it is to stay as it is."""

    def __init__(self, upgrade_to: int | None) -> None:
        self.starts: list[VersionStart] = []
        self.upgrade_to = upgrade_to
        self._ahead: deque[VersionStart] = deque()

    def load(self, starts: Sequence[VersionStart]) -> None:
        """Those of the log, oldest first."""
        self.starts = list(starts)
        if self.upgrade_to == self.current:
            self.upgrade_to = None

    @property
    def current(self) -> int:
        return self.starts[-1].version if self.starts else FIRST_VERSION

    def begin_at(self, header: CheckpointHeader) -> None:
        """A replay begins at this checkpoint: it passes the versions that began behind it."""
        self._ahead = deque(behind(self.starts, header))

    def goes_on_with(self, start: VersionStart, fed_sequence_id: int) -> bool:
        """A log that is followed has another version now, which the code that follows it knows; False where that was
        given records of it as the old one."""
        if fed_sequence_id > start.sequence_id:
            return False
        self._ahead.append(start)
        return True

    def began(self, start: VersionStart) -> None:
        self.starts.append(start)
        self.upgrade_to = None

    def replay_bound(self, target_sequence_id: int) -> int:
        """The last record that may be given to the code of now, up to ``target_sequence_id``."""
        return min(self._ahead[0].sequence_id, target_sequence_id) if self._ahead else target_sequence_id

    def begins_behind(self, fed_sequence_id: int) -> bool:
        """Another version begins behind this record."""
        return bool(self._ahead) and fed_sequence_id >= self._ahead[0].sequence_id

    def take_next(self) -> VersionStart:
        return self._ahead.popleft()


def behind(starts: Sequence[VersionStart], header: CheckpointHeader) -> list[VersionStart]:
    """Those of ``starts`` that begin behind the checkpoint of ``header``, oldest first."""
    for index in range(len(starts) - 1, -1, -1):
        if starts[index].version == header.version and starts[index].sequence_id <= header.sequence_id:
            return list(starts[index + 1 :])
    return []
