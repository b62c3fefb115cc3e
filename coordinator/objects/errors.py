"""What can go wrong with objects in a store."""

from __future__ import annotations

from immortal.protocol.errors import ImmortalError


class ObjectError(ImmortalError):
    """What was asked cannot be done with what is there: said to the operator, who decides."""


class DamagedObjectError(ObjectError):
    """An object is missing, or is not what was written."""


class StoreError(ImmortalError):
    """The store is away, refuses, or is full: it may take the same later."""
