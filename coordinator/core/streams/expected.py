"""What the log says of the messages that a replay is to make: their marks, and those that were spilled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from immortal.coordinator.core.interfaces import ONESELF, CheckpointHeader, OutputMark, SpilledExtent
from immortal.coordinator.core.output_check import OutputCheck
from immortal.coordinator.core.replay_check import ReplayPolicy, own_calls
from immortal.coordinator.core.streams.local_end import LocalEnd
from immortal.protocol.trailer import Trailer


class Expected:
    """Of the streams that a replay may fill, whether it has begun to or not."""

    def __init__(self, end: LocalEnd, policy: ReplayPolicy) -> None:
        self._end = end
        self._policy = policy
        self._checks: dict[str, OutputCheck] = {}  # by destination
        self._spilled: dict[str, Sequence[SpilledExtent]] = {}  # of streams that there are not yet

    def begin(self, header: CheckpointHeader | None, spilled: Mapping[str, Sequence[SpilledExtent]]) -> None:
        """A replay begins at that checkpoint; without one nothing is replayed."""
        self._checks.clear()
        self._spilled = dict(spilled)
        if header is not None and self._policy.compares:
            differs = self._policy.differs
            self._checks = {name: OutputCheck(name, mark, differs) for name, mark in header.outputs.items()}

    def check(self, destination: str) -> OutputCheck | None:
        """The check of a stream that the replay may fill."""
        if not (self._end.catching_up and self._policy.compares):
            return None
        return self._checks.setdefault(destination, OutputCheck(destination, differs=self._policy.differs))

    def take_spilled(self, destination: str) -> Sequence[SpilledExtent]:
        """What the log has of a stream that there is now."""
        return self._spilled.pop(destination, ())

    def spilled(self, spilled: Mapping[str, Sequence[SpilledExtent]]) -> None:
        """The log has these now, of what is made by then or is still to be made."""
        self._spilled = dict(spilled)

    def record(self, sequence_id: int, record: memoryview, trailer: Trailer) -> None:
        """A ``record`` to be replayed holds these marks. Raises DivergenceError where they do not fit the replay."""
        own = self.check(ONESELF) if self._policy.counts else None
        if own is not None:
            for calls in own_calls(record, trailer.batches):
                own.logged(calls)
        for mark in trailer.outputs:
            check = self.check(mark.destination)
            if check is not None:
                check.expect(sequence_id, OutputMark(mark.position, mark.checksum))
                check.compare()

    @property
    def destinations(self) -> list[str]:
        """Of all streams with something to be expected."""
        return [*self._checks, *self._spilled]

    @property
    def has_more(self) -> bool:
        """The replay has not made yet all that the marks say that there was."""
        return any(check.waits for check in self._checks.values())
