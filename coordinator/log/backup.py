"""Makes backups: copies of a log as of one moment, beside its writer. A later backup copies only what is new.

A backup is a log: any command reads it, and an instance can start from it.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from immortal.coordinator.core.errors import LogError
from immortal.coordinator.log.authentication import LogKey
from immortal.coordinator.log.backend import Severity
from immortal.coordinator.log.identity import first_and_last_sequence_id
from immortal.coordinator.log.open import Log, open_reader, place_of
from immortal.coordinator.log.verify import LogVerification, verify_log
from immortal.coordinator.log.view_queries import stored_headers


class Backup(Struct, frozen=True):
    first_sequence_id: int
    last_sequence_id: int
    records_copied: int
    checkpoints: int


class BackupError(LogError):
    """Raised when no backup was made; an existing one is unchanged."""


def back_up(log: Log, instance_name: str, target: Log, keys: Sequence[LogKey] | None = None) -> Backup:
    """Bring the backup ``target``, a new or empty folder at first, to the last commit of the log.

    ``keys``: those that the log may be authenticated with; the backup is so as well. Log and backup are verified, byte
    by byte. Raises BackupError, LogError, OSError.
    """
    _check_sound(verify_log(log, instance_name, keys=keys), f"the log of {instance_name!r}")
    place = place_of(target)
    with open_reader(log, instance_name, keys=keys, check=False) as reader:
        mac = None if reader.macs is None else reader.macs.mark
        with reader.view() as view:
            first, last = first_and_last_sequence_id(view)
            checkpoints_count = len(list(stored_headers(view)))
            try:
                copied = place.copy(view, reader.identity, mac)
            except ValueError as error:
                raise BackupError(str(error)) from None
    _check_sound(verify_log(place, instance_name, keys=keys), f"the backup in {place.where}")
    return Backup(first, last, copied, checkpoints_count)


def _check_sound(verification: LogVerification, what: str) -> None:
    wrong = [str(finding.message) for finding in verification.findings() if finding.severity is not Severity.NOTE]
    if wrong:
        others = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise BackupError(f"{what} is damaged: {wrong[0]}{others}")
