"""What user code raises, whatever its type: one rule for all that calls some.

``sys.exit()``, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError and each BaseException of a user's own are what
a ValueError is: the run that raised it has failed, and the process goes on. What ends the process is a signal that asks
for it. docs/guide/errors.md has the table.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any


class PassesThrough(BaseException):
    """The SDK's own way out of user code, which is no failure of it: nothing on the way is to catch it."""


def is_failure(error: BaseException) -> bool:
    """Whether the run of user code that ``error`` comes out of has failed with it; else it is to be raised on."""
    if isinstance(error, Exception):
        return True
    return not isinstance(error, PassesThrough) and not _is_of_a_signal(error)


def _is_of_a_signal(error: BaseException) -> bool:
    """It was raised by what the process does at a signal, wherever that found it."""
    if threading.current_thread() is not threading.main_thread():
        return False
    codes = {_code_of(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in codes:
            return True
        trace = trace.tb_next
    return False


def _code_of(handler: Any) -> CodeType | None:
    """Of a function, a method, or an object that can be called."""
    code = getattr(handler, "__code__", None)
    if code is None and callable(handler):
        code = getattr(handler.__call__, "__code__", None)
    return code if isinstance(code, CodeType) else None


def interrupt(number: int, frame: FrameType | None) -> None:
    """What Ctrl-C does by default, in Python: so its KeyboardInterrupt says where it is from."""
    raise KeyboardInterrupt


@contextmanager
def interrupts_known() -> Iterator[None]:
    """Meanwhile Ctrl-C, where it does what it does by default, is told from a KeyboardInterrupt that user code raises.

    It does nothing in other threads than the main one.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is interrupt:
            signal.signal(signal.SIGINT, signal.default_int_handler)
