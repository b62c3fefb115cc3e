"""What is said when the app's own code fails: where, with which arguments, its traceback, and what to do."""

from __future__ import annotations

import os
import reprlib
import time
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

from immortal.appsdk.calls.run_failures import is_failure
from immortal.appsdk.errors import AppError, HandlerError
from immortal.protocol.rate_limit import RateLimit
from immortal.protocol.shown import printable
from immortal.protocol.verdicts import Verdict, VerdictKind

T = TypeVar("T")

ARGUMENT_CHARACTERS_MAX = 200
ARGUMENT_ITEMS_MAX = 8
FAILURES_TOLD_EACH_S = 10.0

# The second where a module is compiled.
_OWN_FOLDERS = (os.path.join(os.path.dirname(os.path.dirname(__file__)), ""), os.path.join("immortal", "appsdk", ""))

_shortener = reprlib.Repr()
_shortener.maxstring = _shortener.maxother = _shortener.maxlong = ARGUMENT_CHARACTERS_MAX
_shortener.maxlist = _shortener.maxtuple = _shortener.maxdict = _shortener.maxset = ARGUMENT_ITEMS_MAX


def describe_arguments(arguments: tuple[Any, ...]) -> str:
    try:
        return f"({', '.join(map(_shortener.repr, arguments))})"
    except BaseException as error:  # a __repr__ of the user's
        if not is_failure(error):
            raise
        return f"(... their repr raises {error!r})"


def user_traceback(error: BaseException) -> str:
    """The traceback without the SDK's own frames, indented."""
    whole = traceback.TracebackException.from_exception(error)
    pending: list[traceback.TracebackException | None] = [whole]
    while pending:
        if (one := pending.pop()) is not None:
            users = [frame for frame in one.stack if not frame.filename.startswith(_OWN_FOLDERS)]
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


def call_user_code(what: str, function: Callable[[], T], error_type: type[AppError]) -> T:
    """Call ``function``, the user's; what it raises becomes an ``error_type`` with the traceback."""
    try:
        return function()
    except AppError:
        raise
    except BaseException as error:
        if not is_failure(error):
            raise
        raise error_type(f"{what} raised {type(error).__name__}; the app stops\n{user_traceback(error)}") from error


class FailureReporter:
    """Tells the user of messages that have failed alone: the first of each kind whole, then once in a while how many.

    ``say``: shows a text to the user.
    """

    def __init__(self, say: Callable[[str], None], clock_s: Callable[[], float] = time.monotonic) -> None:
        self._say = say
        self._clock_s = clock_s
        self._limit = RateLimit(burst=1, interval_ns=int(FAILURES_TOLD_EACH_S * 1e9))

    def failed(self, verdict: Verdict) -> None:
        count = self._limit.admit((verdict.method, verdict.type_name), int(self._clock_s() * 1e9))
        if count is None:
            return
        others = f" (and {count} more of this kind since the last time)" if count else ""
        self._say("\n".join([f"warning: {in_words(verdict)}{others}", *filter(None, verdict.trace.split("\n"))]))


def in_words(verdict: Verdict) -> str:
    """What has become of a message, in one line."""
    where = f"at record {verdict.sequence_id}, message {verdict.message_index}"
    told = "its caller is told so" if verdict.caller is not None or verdict.step else "it is a dead letter"
    if verdict.kind is VerdictKind.REFUSED:
        return f"a call {where} is refused: {printable(verdict.text)}; {told}"
    state = "the state is as it was before" if verdict.kind is VerdictKind.UNDONE else "the state stays as it is"
    return f"{verdict.method} raised {printable(verdict.type_name)} {where}: the call fails, {state}; {told}"
