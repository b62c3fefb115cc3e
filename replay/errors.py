"""Why a replay could not be done. What it found is no error."""

from __future__ import annotations

from immortal.protocol.errors import ImmortalError
from immortal.protocol.verdicts import Unsaved


class ReplayError(ImmortalError):
    """The replay could not be done: the message says why and what to do."""


class AppExitedError(ReplayError):
    """The app's process ended before the replay was complete, and not because a handler raised.

    ``fed_sequence_id``: the last record that it was given. ``sequence_id``: the one at which it ends, if that was found
    out (:func:`immortal.replay.host.find_end`).
    """

    def __init__(self, message: str, exit_status: int | None) -> None:
        super().__init__(message)
        self.exit_status = exit_status  # as subprocess gives it, negative for a signal; None: not started by us
        self.fed_sequence_id = -1
        self.sequence_id: int | None = None


class StateUnsavedError(ReplayError):
    """The app's state at the end of the replay can't be saved: ``unsaved`` says since when."""

    def __init__(self, unsaved: Unsaved) -> None:
        since, why = "", f" ({unsaved.why})" if unsaved.why else ""
        if unsaved.sequence_id >= 0:
            method = f", {unsaved.method}" if unsaved.method else ""
            since, why = f" since record {unsaved.sequence_id}, message {unsaved.message_index}{method}", ""
        super().__init__(f"its state can't be saved{since}: {unsaved.text}{why}")
        self.unsaved = unsaved


class UpgradeFailedError(ReplayError):
    """The app's own upgrade of the state failed."""


# What goes wrong in this package.


class LogViewError(ImmortalError):
    """A log can't be shown so, or what shows it can't be reached."""


def never_was(name: str, problem: str) -> str:
    """Say that a state can't be shown, since the code of ``name`` is not the one that made its log."""
    return (
        f"the state of {name} there would be one that never was: {problem}. Its code has changed without an upgrade, or"
        f" does what a replay can't repeat: see 'immortal verify {name}'; with the code that made the log it can be had"
    )
