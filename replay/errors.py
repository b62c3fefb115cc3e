"""Why a replay could not be done. What it found is no error."""

from __future__ import annotations

from protocol.errors import ImmortalError


class ReplayError(ImmortalError):
    """The replay could not be done: the message says why and what to do."""


class AppDiedError(ReplayError):
    """The app's process ended before the replay was complete, and not because a handler raised."""

    def __init__(self, message: str, exit_status: int | None) -> None:
        super().__init__(message)
        self.exit_status = exit_status  # as subprocess gives it, negative for a signal; None: not started by us


class UpgradeFailedError(ReplayError):
    """The app's own upgrade of the state failed."""
