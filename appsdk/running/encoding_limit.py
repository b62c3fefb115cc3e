"""To encode the state has its time: hooks of the user's own may wait for what never comes.

What takes longer is ended by a signal, which also reaches code that sleeps or waits for a lock. Only the main thread
has signals, and what the user's code does with SIGALRM stays: elsewhere there is no limit.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import NoReturn, TypeVar

from immortal.appsdk.errors import StateError

T = TypeVar("T")

LIMIT_S = 120.0  # 1 GiB is encoded in 3 s
AGAIN_S = 1.0  # where the code goes on behind it


class _TakesTooLong(BaseException):
    pass


def limited(encode: Callable[[], T]) -> T:
    """What ``encode`` returns. Raises StateError where it takes too long, and whatever it raises."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGALRM) is not signal.SIG_DFL:
        return encode()
    is_over = False

    def ring(number: int, frame: object) -> None:
        if not is_over:
            raise _TakesTooLong

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S, AGAIN_S)
    try:
        return encode()
    except _TakesTooLong:
        is_over = True
        _refuse()
    finally:
        is_over = True
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)


def _refuse() -> NoReturn:
    error = StateError(f"to encode the state has not come to its end within {LIMIT_S:g} s")
    error.takes_too_long = True
    raise error from None
