"""What goes wrong in this package."""

from __future__ import annotations

from immortal.protocol.errors import ImmortalError


class SightError(ImmortalError):
    """A log can't be shown so, or what shows it can't be reached."""
