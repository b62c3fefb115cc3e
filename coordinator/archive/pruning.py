"""Removing from a store what an archive is not to keep any more."""

from __future__ import annotations

import time
from collections.abc import Callable

from coordinator.archive.archive import Archive
from coordinator.archive.chain import needs_of
from coordinator.archive.manifests import OBJECT_FOLDERS, moment_name
from coordinator.archive.retention import Retention, names_kept

LEFT_OVER_S = 86_400.0  # an object that no manifest names is on its way, or was left by an archiver that ended


def prune(archive: Archive, retention: Retention, now_ns: Callable[[], int] = time.time_ns) -> tuple[int, int]:
    """The moments and the objects removed. Manifests go first, from the oldest on: a crash leaves objects alone, which
    the next time finds. Raises ArchiveError, StoreError."""
    moments = archive.moments()
    if not moments:
        return 0, 0
    first = retention.first_kept(moments, now_ns())
    oldest = needs_of(moments, first).oldest_index
    kept, gone = names_kept(moments[oldest:]), names_kept(moments[:oldest])
    for moment in moments[:oldest]:
        archive.objects.remove([moment_name(moment.number)])
    left_over_s = now_ns() / 1e9 - LEFT_OVER_S
    removed = [
        stored.name
        for folder in OBJECT_FOLDERS
        for stored in archive.objects.listed(folder)
        if stored.name not in kept and (stored.name in gone or stored.modified_s < left_over_s)
    ]
    archive.objects.remove(removed)
    return oldest, len(removed)
