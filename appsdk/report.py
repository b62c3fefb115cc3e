"""What is said when the app's own code fails: where, with which arguments, its traceback, and what to do."""

from __future__ import annotations

import os
import reprlib
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

from appsdk.errors import AppError, HandlerError

T = TypeVar("T")

ARGUMENT_CHARACTERS_MAX = 200
ARGUMENT_ITEMS_MAX = 8

_OWN_FOLDERS = {os.path.dirname(__file__), "appsdk"}  # the second where a module is compiled

_shortener = reprlib.Repr()
_shortener.maxstring = _shortener.maxother = _shortener.maxlong = ARGUMENT_CHARACTERS_MAX
_shortener.maxlist = _shortener.maxtuple = _shortener.maxdict = _shortener.maxset = ARGUMENT_ITEMS_MAX


def describe_arguments(arguments: tuple[Any, ...]) -> str:
    try:
        return f"({', '.join(map(_shortener.repr, arguments))})"
    except Exception as error:  # a __repr__ of the user's
        return f"(... their repr raises {error!r})"


def user_traceback(error: BaseException) -> str:
    """The traceback without the SDK's own frames, indented."""
    whole = traceback.TracebackException.from_exception(error)
    pending: list[traceback.TracebackException | None] = [whole]
    while pending:
        if (one := pending.pop()) is not None:
            users = [frame for frame in one.stack if os.path.dirname(frame.filename) not in _OWN_FOLDERS]
            one.stack = traceback.StackSummary.from_list(users or one.stack)
            pending += [one.__cause__, one.__context__]
    lines = list(whole.format())
    return "".join(f"    {line}\n" for part in lines for line in part.rstrip("\n").split("\n")).rstrip()


def handler_failed(
    method: str, arguments: tuple[Any, ...], error: BaseException, sequence_id: int, message_index: int
) -> HandlerError:
    return HandlerError(
        f"{method} raised {type(error).__name__} at record {sequence_id}, message {message_index}; the app stops\n"
        f"  arguments: {describe_arguments(arguments)}\n"
        f"{user_traceback(error)}\n"
        f"  The call is in the log: nothing is lost, and nothing after it has been handled. Fix the handler and "
        f"start the\n"
        f"  app again: it recovers and handles this call with the new code. Starting it without a change repeats "
        f"the error.",
        sequence_id,
        message_index,
    )


def undecodable(method: str, problem: str, size_bytes: int, sequence_id: int, message_index: int) -> HandlerError:
    return HandlerError(
        f"{method} got arguments that do not fit its annotations, at record {sequence_id}, message {message_index}: "
        f"{problem} ({size_bytes} bytes of arguments); the app stops\n"
        f"  The call is in the log. Make the handler accept what its callers send (a wider type, a default for a new\n"
        f"  parameter) and start the app again.",
        sequence_id,
        message_index,
    )


def call_user_code(what: str, function: Callable[[], T], error_type: type[AppError]) -> T:
    """Call ``function``, the user's; what it raises becomes an ``error_type`` with the traceback."""
    try:
        return function()
    except AppError:
        raise
    except (Exception, SystemExit) as error:
        raise error_type(f"{what} raised {type(error).__name__}; the app stops\n{user_traceback(error)}") from error
