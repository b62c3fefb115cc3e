"""Chain of an archive's moments: which objects a moment needs, and which moment a time stands for. No I/O."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from immortal.coordinator.archive.format import ArchiveError, Moment, Part, Segment
from immortal.coordinator.objects import DamagedObjectError


class NeededObjects(Struct, frozen=True):
    """The objects that a moment is made of, each kind from the oldest on."""

    states: list[Part]  # the first is whole
    segments: list[Segment]
    checkpoint_parts: list[Part]
    oldest_index: int  # index of the first moment whose manifest names one of these

    @property
    def parts(self) -> list[Part]:
        return [*self.states, *(segment.part for segment in self.segments), *self.checkpoint_parts]


def needed_objects(moments: Sequence[Moment], index: int) -> NeededObjects:
    """Find the objects of ``moments[index]``. ``moments`` are consecutive. Raises DamagedObjectError for a gap."""
    moment = moments[index]
    states: list[Part] = []
    segments: list[Segment] = []
    first, wanted = moment.first_sequence_id, moment.last_sequence_id
    has_state, oldest = False, index
    for at in range(index, -1, -1):
        before = moments[at]
        if not has_state:
            oldest = at
            states += [] if before.state is None else [before.state]
            has_state = before.state_is_whole
        for segment in reversed(before.segments):
            if wanted >= first and segment.last_sequence_id >= first:
                if segment.last_sequence_id != wanted:
                    break
                oldest = at
                segments.append(segment)
                wanted = segment.first_sequence_id - 1
        if before.begins or (has_state and wanted < first):
            break
    if wanted >= first:
        raise DamagedObjectError(f"the archive has no records {first} to {wanted}, which moment {moment.number} needs")
    if not has_state:
        raise DamagedObjectError(f"the archive has no whole state at or before moment {moment.number}")
    return NeededObjects(states[::-1], segments[::-1], moment.checkpoint_parts, oldest)


def encrypted_parts(moments: Sequence[Moment]) -> dict[str, bool]:
    """Return the names of all objects of ``moments``, each with True if it is encrypted."""
    return {part.name: one.encrypted for one in moments for part in (*one.new_parts, *one.checkpoint_parts)}


def check_follows(moments: Sequence[Moment], digests: Sequence[str]) -> None:
    """Check that each manifest follows the one before. Raises DamagedObjectError."""
    for before, moment, its_digest in zip(moments, moments[1:], digests, strict=False):
        if moment.number != before.number + 1:
            missing = f"{before.number + 1} to {moment.number - 1}"
            raise DamagedObjectError(f"the archive has no manifest of the moments {missing}: they were removed")
        if moment.before_digest != its_digest:
            raise DamagedObjectError(
                f"the manifest of moment {moment.number} does not follow the one of moment {before.number}: one of the"
                " two was replaced"
            )


def index_of(moments: Sequence[Moment], *, until_ns: int | None, until_record: int | None) -> int:
    """Return the last moment that has no record after ``until_record`` or later than ``until_ns``.

    Raises ArchiveError where all are later.
    """
    for index in range(len(moments) - 1, -1, -1):
        moment = moments[index]
        if (until_ns is None or moment.time_ns <= until_ns) and (
            until_record is None or moment.last_sequence_id <= until_record
        ):
            return index
    oldest = moments[0]
    raise ArchiveError(
        f"the oldest moment of {oldest.instance!r} in the archive ends with record {oldest.last_sequence_id}: that is"
        " later than what was asked for"
    )


# Retention: chooses the moments that may be removed. Pure; the archiver removes them.


_DAY_NS = 86_400 * 1_000_000_000
_MIB = 1 << 20


class Retention(Struct, frozen=True):
    """Retention of an archive.

    ``keep_days``: any moment of these days before the newest can be restored. ``keep_mb``: largest size in MiB, unless
    the newest moment alone needs more. With both, whichever keeps less.
    """

    keep_days: float | None = None
    keep_mb: int | None = None

    def __bool__(self) -> bool:
        return self.keep_days is not None or self.keep_mb is not None

    def first_kept(self, moments: Sequence[Moment], stored_s: Sequence[float]) -> int:
        """Return the index of the oldest moment that must stay restorable.

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
            if behind[needed_objects(moments, at).oldest_index] + sum(checkpoints.values()) > size_bytes_max:
                break
            first = at
        return first


def _ages_ns(moments: Sequence[Moment], stored_s: Sequence[float]) -> list[int]:
    """Return how old each moment is at the newest, in ns: by its records or by the store's clock, whichever is less.

    No clock that runs now is asked, and one wrong clock cannot make a moment old: a jump would remove what has no
    second copy.
    """
    return [
        min(moments[-1].time_ns - moment.time_ns, int((stored_s[-1] - when_s) * 1e9))
        for moment, when_s in zip(moments, stored_s, strict=True)
    ]


def object_names_kept(moments: Sequence[Moment]) -> set[str]:
    """Return the names of the objects that the manifests of ``moments`` list."""
    return {part.name for moment in moments for part in (*moment.new_parts, *moment.checkpoint_parts)}
