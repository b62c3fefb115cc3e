"""Object storage, for archives of logs and for large checkpoints of logs in a database.

This module has the errors; store.py opens a store by its URL, and needs the extra ``archive``. A coordinator imports
it only where its settings name a store.
"""

from __future__ import annotations

from immortal.protocol.errors import ImmortalError

# Errors.


class ObjectError(ImmortalError):
    """Raised when the objects in a store do not allow what was requested. An operator decides what to do."""


class DamagedObjectError(ObjectError):
    """Raised for an object that is missing or damaged."""


class StoreError(ImmortalError):
    """Raised if the store is away, refuses, or is full: it may take the same later."""
