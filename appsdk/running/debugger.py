"""Whether a thread stands in a debugger: time that a person takes is no handler's."""

from __future__ import annotations

import sys

_DEBUGGERS = frozenset({"bdb", "pdb", "pydevd", "_pydevd_bundle"})  # ipdb, pudb and pdb++ are made of the first two


def in_debugger(thread_id: int) -> bool:
    """Whether thread ``thread_id`` (:func:`threading.get_ident`) runs code of a debugger now, at its prompt say."""
    frame = sys._current_frames().get(thread_id)
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] in _DEBUGGERS:
            return frame.f_code.co_name not in ("runcall", "run")  # below these runs what is debugged
        frame = frame.f_back
    return False
