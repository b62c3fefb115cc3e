"""Module paths from before the one import root `immortal`: checkpoints, registrations, projects still name them."""

from __future__ import annotations

from importlib.util import find_spec

_FORMER_ROOT = "appsdk"
_MOVED = {"appsdk.waits": "immortal.appsdk.waiting.waits"}


def current_module(name: str) -> str:
    """Return today's path of the module ``name``: ``appsdk.patterns.queue`` is ``immortal.appsdk.patterns.queue``.

    Any other name comes back as it is, also one below a package `appsdk` of the user's own that the SDK does not have.
    """
    if name in _MOVED:
        return _MOVED[name]
    if name.partition(".")[0] != _FORMER_ROOT:
        return name
    path = f"immortal.{name}"
    try:
        return path if find_spec(path) is not None else name
    except ModuleNotFoundError:  # a package above it
        return name
