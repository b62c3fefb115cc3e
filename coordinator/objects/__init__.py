"""Object storage, for archives of logs and for large checkpoints of logs in a database.

This module has the errors; store.py opens a store by its URL, and needs the extra ``archive``. A coordinator imports
it only if its settings name a store.
"""

from __future__ import annotations

from immortal.protocol.errors import ImmortalError


class ObjectError(ImmortalError):
    """Raised if the objects in a store do not allow a requested operation. An operator decides what to do."""


class DamagedObjectError(ObjectError):
    """Raised for an object that is missing or damaged."""


class StoreError(ImmortalError):
    """Raised if the store is unreachable, refuses, or is full: a later retry can succeed."""
