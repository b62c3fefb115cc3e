"""What memory has no room for: when it goes to the log, and how much of it there is."""

from __future__ import annotations

from collections.abc import Mapping

from immortal.coordinator.core.effects import ReadSpilled
from immortal.coordinator.core.interfaces import ONESELF, SpilledBatch
from immortal.coordinator.core.streams.local_end import LocalEnd
from immortal.coordinator.core.streams.output_stream import OutputStream, StreamState
from immortal.protocol.client import CLIENTS


class Spilling:
    """Of all output ``streams``; ``busy`` are those that are not idle.

    ``waits_for_receiver``: one waits instead of spilling; to be looked at again after a while.
    """

    def __init__(self, end: LocalEnd, streams: Mapping[str, OutputStream], busy: Mapping[str, OutputStream]) -> None:
        self.waits_for_receiver = False
        self._end = end
        self._streams = streams
        self._busy = busy

    def look(self, stream: OutputStream, now_ns: int) -> None:
        """To the log what has gathered, and back what there is room for again."""
        log, limits, spill = self._end.log, self._end.limits, stream.spill
        read = stream.next_read(log.durable_ticket)
        if read is not None:
            self._end.effects.append(ReadSpilled(stream.destination, *read))
        size_bytes = spill.gathered_bytes
        if size_bytes < limits.spill_row_bytes or self.kept_bytes + size_bytes > limits.spill_limit_bytes:
            return
        if self._slows_nobody(stream, now_ns) and stream.spill_credit_bytes < size_bytes:
            self.waits_for_receiver = True
            return
        stream.spill_credit_bytes = 0
        group = log.append_outside_record(size_bytes, from_app=True)
        group.transaction.spilled += [
            SpilledBatch(row.first_position, row.count, row.payload, stream.destination)
            for row in spill.store(group.ticket)
        ]

    def _slows_nobody(self, stream: OutputStream, now_ns: int) -> bool:
        """The app may as well wait for that receiver: it takes what it can, and nobody else could be sent to meanwhile.

        To spill would only make the disk slower, for both. What was spilled before goes on to shrink: half as much as
        was sent may be spilled anew.
        """
        recent_ns = self._end.limits.recent_ns
        if stream.state is not StreamState.OPEN or now_ns - stream.moved_on_ns >= recent_ns:
            return False
        if stream.spill.stored_bytes == 0:
            stream.spill_credit_bytes = 0
        return not any(
            other.destination not in (ONESELF, CLIENTS, stream.destination)
            and now_ns - other.called_ns < recent_ns
            and not other.spill.active
            for other in self._streams.values()
        )

    @property
    def kept_bytes(self) -> int:
        """Spilled to the log and not acknowledged, all streams together."""
        return sum([stream.spill.kept_bytes for stream in self._busy.values()])

    @property
    def full(self) -> list[str]:
        """The destinations for which memory holds more than it may: what is spilled has reached its limit too."""
        return [destination for destination, stream in self._busy.items() if stream.memory_is_full]

    @property
    def is_full(self) -> bool:
        limits = self._end.limits
        return self.kept_bytes + limits.spill_row_bytes > limits.spill_limit_bytes
