"""Removing from a store what an archive is not to keep any more."""

from __future__ import annotations

from immortal.coordinator.archive.archive import Archive
from immortal.coordinator.archive.chain import needs_of
from immortal.coordinator.archive.manifests import OBJECT_FOLDERS, moment_name
from immortal.coordinator.archive.retention import Retention, names_kept

LEFT_OVER_S = 86_400.0  # older than the newest manifest: no archiver that still runs will name it


def prune(archive: Archive, retention: Retention) -> tuple[int, int]:
    """The moments and the objects removed. Manifests go first, from the oldest on: a crash leaves objects alone, which
    the next time finds. Raises ArchiveError, StoreError."""
    dated = archive.dated_moments()
    if not dated:
        return 0, 0
    moments, stored_s = [moment for moment, _ in dated], [when_s for _, when_s in dated]
    first = retention.first_kept(moments, stored_s)
    oldest = needs_of(moments, first).oldest_index
    kept, gone = names_kept(moments[oldest:]), names_kept(moments[:oldest])
    for moment in moments[:oldest]:
        archive.objects.remove([moment_name(moment.number)])
    left_over_s = stored_s[-1] - LEFT_OVER_S
    removed = [
        stored.name
        for folder in OBJECT_FOLDERS
        for stored in archive.objects.listed(folder)
        if stored.name not in kept and (stored.name in gone or stored.modified_s < left_over_s)
    ]
    archive.objects.remove(removed)
    return oldest, len(removed)
