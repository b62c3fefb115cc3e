"""What is known of the instances at the receiving ends, in here and in the log."""

from __future__ import annotations

from collections.abc import Mapping

from immortal.coordinator.core.group_commit import Group
from immortal.coordinator.core.interfaces import StreamStart
from immortal.coordinator.core.streams.local_end import LocalEnd
from immortal.coordinator.core.streams.output_stream import OutputStream


class Receivers:
    """By name: ``committer_ids``, once seen; ``starts``, of the streams that were reset; ``acknowledged``, positions.

    A stream of a replay may be acknowledged beyond what is made of it again; in ``acknowledged`` are only positions
    that were made.
    """

    def __init__(self, end: LocalEnd, committer_ids: dict[str, int], starts: dict[str, StreamStart]) -> None:
        self.committer_ids = committer_ids
        self.starts = starts
        self.acknowledged: dict[str, int] = {}
        self._end = end
        self._freed_bytes = 0  # spilled and acknowledged since the end's trim_ticket

    def load(self, acknowledged: Mapping[str, int]) -> None:
        """What the log says."""
        for receiver, position in acknowledged.items():
            self.heard_of(receiver, position)

    def heard_of(self, receiver: str, position: int) -> None:
        """The log has it that ``position`` is acknowledged."""
        self.acknowledged[receiver] = max(position, self.acknowledged.get(receiver, 0))

    def start(self, receiver: str) -> StreamStart:
        return self.starts.get(receiver, StreamStart())

    def set_start(self, receiver: str, start: StreamStart, group: Group) -> None:
        """How its stream goes on from the commit of ``group``."""
        self.starts[receiver] = group.transaction.stream_starts[receiver] = start

    def set_committer(self, receiver: str, committer_id: int, group: Group) -> None:
        """Its log is that one from the commit of ``group`` on."""
        self.committer_ids[receiver] = group.transaction.peers[receiver] = committer_id

    def acknowledge(self, stream: OutputStream, position: int) -> None:
        """The receiver of ``stream`` has all up to ``position`` on disk."""
        freed_bytes = stream.acknowledge(position)
        if position <= stream.position:  # else the replay has not got there: whether it will is not known yet
            self.note_acknowledged(stream)
        if freed_bytes:
            self._freed(stream, freed_bytes)

    def note_acknowledged(self, stream: OutputStream) -> None:
        receiver, position = stream.destination, stream.acknowledged
        if position > self.acknowledged.get(receiver, -1):
            self.acknowledged[receiver] = position
            self._end.log.open.transaction.acknowledged[receiver] = position

    def _freed(self, stream: OutputStream, size_bytes: int) -> None:
        """Let what was spilled and is acknowledged be removed from the log, a step's worth at a time."""
        end = self._end
        self._freed_bytes += size_bytes
        if self._freed_bytes >= end.limits.spill_trim_bytes or not stream.spill.kept_bytes:
            self._freed_bytes = 0
            end.trim_ticket = end.log.append_outside_record(0).ticket
