"""What fails in an app, as the test is to see it."""

from __future__ import annotations

import os
from types import TracebackType
from typing import NoReturn

from immortal.appsdk.errors import AppError
from immortal.coordinator.core.errors import InvariantError
from immortal.protocol.errors import ImmortalError

_OWN_FOLDERS = (os.path.dirname(os.path.dirname(__file__)),)


def raise_as_the_users(failure: ImmortalError) -> NoReturn:
    """Raise the user's own exception behind ``failure``, with the user's own traceback; without one ``failure``."""
    __tracebackhide__ = True
    error = failure.__cause__
    if not isinstance(failure, AppError) or error is None:
        raise failure if isinstance(failure, InvariantError) else failure.with_traceback(None)
    said = str(failure).split("\n")
    for line in [*getattr(failure, "__notes__", ()), *said[: 2 if said[1:2] and "arguments:" in said[1] else 1]]:
        error.add_note(line.strip())
    raise error.with_traceback(_users_own(error.__traceback__))


def _users_own(trace: TracebackType | None) -> TracebackType | None:
    """From the first frame on that is none of the SDK's."""
    found = trace
    while found is not None and os.path.dirname(found.tb_frame.f_code.co_filename).startswith(_OWN_FOLDERS):
        found = found.tb_next
    return found or trace
