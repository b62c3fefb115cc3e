"""To whom a running coordinator hands its instance over."""

from __future__ import annotations

from collections.abc import Sequence

from immortal.coordinator.core.interfaces import Standby
from immortal.protocol.errors import ImmortalError


class HandOverError(ImmortalError):
    """There is nobody to hand over to."""


def heir_of(standbys: Sequence[Standby], to: str) -> Standby:
    """``to``: the host of a standby, or its whole name; "": whoever is ready. Raises HandOverError."""
    if not standbys:
        raise HandOverError("nobody follows its log: 'immortal run' it on another machine first, with the same log")
    meant = [standby for standby in standbys if not to or to in (standby.host, standby.name)]
    names = ", ".join(standby.name for standby in standbys)
    if not meant:
        raise HandOverError(f"{to!r} does not follow its log; who does: {names}")
    ready = next((standby for standby in meant if standby.is_ready), None)
    if ready is None:
        names = ", ".join(standby.name for standby in meant)
        raise HandOverError(f"{names} has not caught up with the log yet: try again once it has")
    return ready
