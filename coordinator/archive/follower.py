"""Follower that archives a log as it grows, and prunes. It reports an unreachable store or log, and retries."""

from __future__ import annotations

import time
from collections.abc import Callable

from msgspec import Struct, field

from immortal.coordinator.archive.archive import Archive
from immortal.coordinator.archive.archiver import SEGMENT_SIZE_BYTES, Archiver
from immortal.coordinator.archive.format import (
    OBJECT_FOLDERS,
    ArchiveError,
    ConflictError,
    Moment,
    Retention,
    encrypted_parts,
    moment_name,
    needed_objects,
)
from immortal.coordinator.core.errors import LogError
from immortal.coordinator.log.reader import LogReader
from immortal.coordinator.objects import ObjectError, StoreError

POLL_S = 0.25  # between checks whether records fill a segment
RETRY_S_MAX = 30.0
PRUNE_INTERVAL_S = 3600.0
REPORT_INTERVAL_S = 60.0  # between reports that all is well


class Options(Struct, frozen=True):
    """Options of a follower.

    ``every_s``: longest time between two moments while the log grows. ``segment_size_bytes``: growth after which a
    moment is made earlier.
    """

    every_s: float = 10.0
    segment_size_bytes: int = SEGMENT_SIZE_BYTES
    retention: Retention = field(default_factory=Retention)
    new_history: bool = False


class Follower:
    """Follower of one log: archives it as it grows.

    ``open_reader`` opens the present log; ``version`` changes when another log takes its place. ``wait(seconds)``
    returns True when the follower must end. ``report`` receives messages for the operator.
    """

    def __init__(
        self,
        archive: Archive,
        open_reader: Callable[[], LogReader],
        version: Callable[[], object],
        options: Options,
        wait: Callable[[float], bool],
        report: Callable[[str], None],
    ) -> None:
        self._archive = archive
        self._open_reader = open_reader
        self._version = version
        self._options = options
        self._wait = wait
        self._report = report
        self._new_history = options.new_history
        self._last_problem = ""
        self._reported_at_s = self._pruned_at_s = float("-inf")
        self._delay_s = POLL_S

    def archive_once(self) -> Moment | None:
        """Archive one moment; return None if nothing was new. Raises ArchiveError, StoreError, LogError."""
        for is_last_try in (False, True):
            try:
                with self._open_reader() as reader:
                    made = self._create_archiver(reader).store_moment()
                break
            except ConflictError:
                if is_last_try:
                    raise
        try:
            self._prune()
        except ObjectError as error:
            raise ArchiveError(f"what is new is archived, but nothing old was removed: {error}") from None
        return made

    def run(self) -> None:
        """Archive until ``wait`` returns True. Raises ArchiveError for what only an operator can decide."""
        while True:
            version = self._version()
            try:
                with self._open_reader() as reader:
                    if self._follow(self._create_archiver(reader), version):
                        return
                self._delay_s = POLL_S
            except ConflictError as error:
                self._report(f"{error}: what is to be archived is looked at again")
                if self._wait(POLL_S):
                    return
            except (StoreError, LogError) as error:
                if self._wait_to_retry(error):
                    return

    def _create_archiver(self, reader: LogReader) -> Archiver:
        return Archiver(
            self._archive,
            reader,
            new_history=self._new_history,
            segment_size_bytes=self._options.segment_size_bytes,
            report=self._report,
        )

    def _follow(self, archiver: Archiver, version: object) -> bool:
        """Archive one log; return True if the follower must end, False if another log took the place of this one.

        Raises LogError, ConflictError.
        """
        due_s = float("-inf")
        is_over = False
        while self._version() == version:
            now_s = time.monotonic()
            try:
                if archiver.ship_full_segments() or now_s >= due_s or is_over:
                    moment = archiver.store_moment()
                    self._new_history = False
                    due_s = now_s + self._options.every_s
                    self._report_success(archiver, moment)
                    self._prune_if_sound()
            except StoreError as error:  # stored objects stay valid, so the same archiver continues
                if is_over or self._wait_to_retry(error, archiver.unarchived().seconds):
                    return True
                continue
            if is_over:
                return True
            is_over = self._wait(min(POLL_S, self._options.every_s))  # at the end archive once more
        return False

    def _report_success(self, archiver: Archiver, moment: Moment | None) -> None:
        is_recovered = bool(self._last_problem)
        self._last_problem, self._delay_s = "", POLL_S
        last = archiver.last
        if last is not None and (
            is_recovered or (moment and time.monotonic() - self._reported_at_s >= REPORT_INTERVAL_S)
        ):
            self._reported_at_s = time.monotonic()
            self._report(
                f"archived up to record {last.last_sequence_id}; {archiver.unarchived().seconds:.0f} s at risk"
            )

    def _wait_to_retry(self, error: StoreError | LogError, risk_s: float | None = None) -> bool:
        """Report the error and wait; return True if the follower must end."""
        text = str(error)
        if text != self._last_problem:
            risk = "" if risk_s is None else f"; {risk_s:.0f} s at risk"
            self._report(f"{text}{risk}; it is tried again")
            self._last_problem = text
        delay_s = self._delay_s
        self._delay_s = min(2 * delay_s, RETRY_S_MAX)
        return self._wait(delay_s)

    def _prune_if_sound(self) -> None:
        """Prune; only report an error of the store, since new records must be archived all the same."""
        try:
            self._prune()
        except ObjectError as error:
            self._report(f"{error}: nothing old is removed; what is new is archived")

    def _prune(self) -> None:
        if self._options.retention and time.monotonic() - self._pruned_at_s >= PRUNE_INTERVAL_S:
            self._pruned_at_s = time.monotonic()
            moments, objects = prune(self._archive, self._options.retention)
            if moments or objects:
                self._report(f"{moments} moments that are not to be kept were removed, {objects} objects with them")


# Pruning: removes objects that an archive no longer keeps.


ORPHAN_AGE_S = 86_400.0  # an object so much older than the newest manifest is named by no running archiver


def prune(archive: Archive, retention: Retention) -> tuple[int, int]:
    """Remove moments and objects that are not to be kept; return the number of each. Manifests are removed first, the
    oldest first: a crash leaves only objects, which the next run finds. Raises ArchiveError, StoreError."""
    dated = archive.dated_moments()
    if not dated:
        return 0, 0
    moments, stored_s = [moment for moment, _ in dated], [when_s for _, when_s in dated]
    first = retention.first_kept(moments, stored_s)
    oldest = needed_objects(moments, first).oldest_index
    kept, gone = encrypted_parts(moments[oldest:]), encrypted_parts(moments[:oldest])
    for moment in moments[:oldest]:
        archive.objects.remove([moment_name(moment.number)])
    left_over_s = stored_s[-1] - ORPHAN_AGE_S
    removed = [
        stored.name
        for folder in OBJECT_FOLDERS
        for stored in archive.objects.listed(folder)
        if stored.name not in kept and (stored.name in gone or stored.modified_s < left_over_s)
    ]
    archive.objects.remove(removed)
    return oldest, len(removed)
