"""Restores a moment of an archive as a log: fetches and checks all objects, makes the log in one step, then verifies
it.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from immortal.coordinator.archive.archive import Archive
from immortal.coordinator.archive.chain import encrypted_parts, needed_objects
from immortal.coordinator.archive.format import ArchiveError, Moment, PackedRow, Part
from immortal.coordinator.archive.view import ArchivedView
from immortal.coordinator.core.errors import LogError
from immortal.coordinator.log.authentication import LogKey, Macs, find_key, read_marker
from immortal.coordinator.log.backend import Place, Severity
from immortal.coordinator.log.identity import LogIdentity, read_identity
from immortal.coordinator.log.verify import verify_log


class Restored(Struct, frozen=True):
    first_sequence_id: int
    last_sequence_id: int
    checkpoints_count: int
    objects_count: int
    authenticated: bool


def restore(
    archive: Archive, name: str, moments: Sequence[Moment], index: int, place: Place, keys: Sequence[LogKey]
) -> Restored:
    """Make the log of ``moments[index]``, of the instance ``name``, in ``place``, where none is.

    ``keys``: those it may be authenticated with.

    What fails leaves no log. Raises ArchiveError, which names what is damaged; StoreError, LogError, OSError.
    """
    moment = moments[index]
    needs = needed_objects(moments, index)
    if moment.instance != name:
        raise ArchiveError(
            f"the archive in {archive.objects.where} is of the instance {moment.instance!r}, not of {name!r}: nothing"
            f" was written; 'immortal archive --show' says what each archive has"
        )
    encrypted = encrypted_parts(moments[: index + 1])
    with tempfile.TemporaryDirectory(prefix="immortal-restore-", dir=_beside(place)) as folder:
        spool = Path(folder)
        parts = needs.parts
        for number, data in enumerate(archive.stored(parts)):
            (spool / str(number)).write_bytes(data)
        files = {part.name: spool / str(number) for number, part in enumerate(parts)}

        def rows_of(part: Part) -> list[PackedRow]:
            return archive.rows_of(part, files[part.name].read_bytes(), encrypted=encrypted[part.name])

        view = ArchivedView(needs, rows_of, moment)
        identity = read_identity(view, archive.objects.where, moment.instance)
        marker = read_marker(view)
        mac = None
        if marker is not None:
            mac = Macs(find_key(keys, marker, moment.instance), identity, marker).mark
        if place.exists():
            raise ArchiveError(f"there is a log in {place.where} already: nothing was written")
        place.copy(view, identity, mac)
    try:
        _check(place, moment, identity, keys)
    except LogError:
        with contextlib.suppress(LogError, OSError):
            place.remove()
        raise
    return Restored(
        moment.first_sequence_id, moment.last_sequence_id, len(moment.checkpoints), len(parts), marker is not None
    )


def _beside(place: Place) -> Path | None:
    """Return the folder for a temporary log, beside the log to be made; None for a log that is not in a folder."""
    if place.scheme != "lmdb":
        return None
    folder = Path(place.location).parent
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def _check(place: Place, moment: Moment, identity: LogIdentity, keys: Sequence[LogKey]) -> None:
    """Check that the restored log is that of ``moment``, and verify it. Raises LogError."""
    verification = verify_log(place, moment.instance, keys=keys)
    wrong = [str(finding.message) for finding in verification.findings() if finding.severity is not Severity.NOTE]
    if wrong:
        raise LogError(f"what came back of {moment.instance!r} is damaged, and was removed again: {wrong[0]}")
    found = verification.first_sequence_id, verification.last_sequence_id
    if found != (moment.first_sequence_id, moment.last_sequence_id):
        raise LogError(f"what came back of {moment.instance!r} has records {found[0]} to {found[1]}, and was removed")
