"""Which moments of an archive may go. Pure: the archiver removes them."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from immortal.coordinator.archive.chain import needs_of
from immortal.coordinator.archive.manifests import Moment

_DAY_NS = 86_400 * 1_000_000_000
_MIB = 1 << 20


class Retention(Struct, frozen=True):
    """``keep_days``: any moment of so many days before the newest can be brought back. ``keep_mb``: at most so many MiB
    are kept, where the newest moment alone needs no more. With both, whichever keeps less."""

    keep_days: float | None = None
    keep_mb: int | None = None

    def __bool__(self) -> bool:
        return self.keep_days is not None or self.keep_mb is not None

    def first_kept(self, moments: Sequence[Moment], stored_s: Sequence[float]) -> int:
        """The index of the oldest moment that is to stay one that can be brought back.

        ``stored_s``: when the manifest of each was stored, by the store's clock.
        """
        index = 0
        if self.keep_days is not None:
            keep_ns = int(self.keep_days * _DAY_NS)
            ages_ns = _ages_ns(moments, stored_s)
            index = max((at for at, age_ns in enumerate(ages_ns) if age_ns >= keep_ns), default=0)
        if self.keep_mb is not None:
            index = max(index, self._first_within(moments, self.keep_mb * _MIB))
        return index

    def _first_within(self, moments: Sequence[Moment], size_bytes_max: int) -> int:
        own = [sum(part.size_bytes for part in moment.new_parts) for moment in moments]
        behind = [0] * (len(moments) + 1)
        for at in range(len(moments) - 1, -1, -1):
            behind[at] = behind[at + 1] + own[at]
        checkpoints: dict[str, int] = {}
        first = len(moments) - 1
        for at in range(len(moments) - 1, -1, -1):
            checkpoints |= {part.name: part.size_bytes for part in moments[at].checkpoint_parts}
            if behind[needs_of(moments, at).oldest_index] + sum(checkpoints.values()) > size_bytes_max:
                break
            first = at
        return first


def _ages_ns(moments: Sequence[Moment], stored_s: Sequence[float]) -> list[int]:
    """How much older than the newest each is: by its records and by the store, whichever says less. No clock that runs
    now is asked, and of those that did one alone cannot make a moment old: a jump would remove what nobody has twice.
    """
    return [
        min(moments[-1].time_ns - moment.time_ns, int((stored_s[-1] - when_s) * 1e9))
        for moment, when_s in zip(moments, stored_s, strict=True)
    ]


def names_kept(moments: Sequence[Moment]) -> set[str]:
    """The objects that manifests which stay name."""
    return {part.name for moment in moments for part in (*moment.new_parts, *moment.checkpoint_parts)}
