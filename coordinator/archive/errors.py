"""What can go wrong with an archive, beside its objects."""

from __future__ import annotations

from immortal.coordinator.objects.errors import ObjectError


class ArchiveError(ObjectError):
    """What was asked cannot be done with this archive."""


class ConflictError(ArchiveError):
    """Another archiver has written the next moment first."""
