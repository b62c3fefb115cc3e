"""Which app replays a stretch of a log, where nobody says."""

from __future__ import annotations

from immortal.coordinator.core.interfaces import LogSummary
from immortal.replay.errors import ReplayError


def default_app(name: str, registered: str | None, summary: LogSummary, version: int) -> str:
    """The app ("module:Class") of a replay that ends in ``version``.

    The instance's own, ``registered``, if that is its version now; otherwise what the app called itself in that
    version. Raises ReplayError where nothing is known.
    """
    newest = summary.versions[-1].version if summary.versions else version
    named = [start.app for start in summary.versions if start.version == version]
    named = [app for app in named if app and not app.startswith("__main__:")]  # a script's own class has no module
    if version == newest and registered is not None:
        return registered
    if named:
        return named[-1]
    if registered is not None:
        return registered
    raise ReplayError(
        f"nothing says which app {name!r} is: give it with --app MODULE:CLASS (or --app - for one of yours)"
    )
