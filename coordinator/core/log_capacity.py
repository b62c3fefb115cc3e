"""Room in the log: measured now and then, against the limits of the log and its disk."""

from __future__ import annotations

from immortal.coordinator.core.interfaces import CheckpointHeader, LogSpace
from immortal.coordinator.core.limits import MIB, Limits

CHECKPOINTS_IN_ONE_PLACE_MAX = 2  # of two that are kept, both must be new before old records can go


class LogCapacity:
    """Room in the log. ``full``: why the log takes no more than it must; "" while there is room."""

    def __init__(self, name: str, limits: Limits) -> None:
        self.full = ""
        self.space: LogSpace | None = None
        self._name = name
        self._limits = limits
        self._asked_at = -2  # the record behind which a checkpoint was last asked for
        self._asked = 0  # how often there

    def measured(self, space: LogSpace) -> bool:
        """Take a measurement; return whether :attr:`full` has changed. A full log has room at 90 % of its limit."""
        self.space = space
        limits, was_full = self._limits, bool(self.full)
        most_bytes = limits.log_limit_bytes
        least_bytes = limits.disk_free_bytes_min
        too_large = most_bytes is not None and space.used_bytes > (most_bytes * 9 // 10 if was_full else most_bytes)
        too_little = space.free_bytes < (least_bytes * 11 // 10 if was_full else least_bytes)
        if was_full == (too_large or too_little):
            return False
        self.full = self._reason(space, too_large=too_large) if not was_full else ""
        self._asked_at = -2
        return True

    def _reason(self, space: LogSpace, *, too_large: bool) -> str:
        if too_large:
            limit_text = _mib_text(self._limits.log_limit_bytes or 0)
            what = f"its log takes {_mib_text(space.used_bytes)}, log_limit_mb is {limit_text}"
        else:
            free, least = _mib_text(space.free_bytes), _mib_text(self._limits.disk_free_bytes_min)
            what = f"its disk has {free} left, disk_free_mb is {least}"
        return f"{self._name!r} is full: {what}; its app must catch up, or the limit be raised"

    def wants_checkpoint(self, fed_sequence_id: int, durable_sequence_id: int, last: CheckpointHeader | None) -> bool:
        """Return whether a checkpoint now would free records: the app has handled a good part of those after the
        last one.

        Call it once for each measurement.
        """
        if not self.full or last is None:
            return False
        behind = durable_sequence_id - last.sequence_id
        if fed_sequence_id < durable_sequence_id and (fed_sequence_id - last.sequence_id) * 4 < behind:
            return False
        if self._asked_at != fed_sequence_id:
            self._asked_at, self._asked = fed_sequence_id, 0
        self._asked += 1
        return self._asked <= CHECKPOINTS_IN_ONE_PLACE_MAX


def _mib_text(size_bytes: int) -> str:
    return f"{size_bytes / MIB:.0f} MiB"
