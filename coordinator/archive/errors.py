"""What can go wrong with an archive."""

from __future__ import annotations

from protocol.errors import ImmortalError


class ArchiveError(ImmortalError):
    """What was asked cannot be done with this archive: said to the operator, who decides."""


class DamagedObjectError(ArchiveError):
    """An object is missing, or is not what was written."""


class ConflictError(ArchiveError):
    """Another archiver has written the next moment first."""


class StoreError(ImmortalError):
    """The store is away, refuses, or is full: it may take the same later."""
