"""Errors of the SDK, below :class:`immortal.protocol.errors.ImmortalError`, by who can do something about it.

    AppError
      DefinitionError    the class is not an app that could be replayed: raised where the class is made
      UsageError         a call that is not possible here: from the wrong thread, outside a handler, too large
        QueryError       a query has done more than read
      StateError         the state can't be written into a checkpoint, or a checkpoint can't be read back
      HandlerError       a logged input can't be handled: replay would only repeat it, so the app stops
      CallRefused        a call can't be made: raised in the async handler that waits for it
      CalleeFailed       the handler that was called has failed: the same
        CallCancelled    it was cancelled
      EffectFailed       an effect has failed: the same
      RecoveryNeeded     the state is to be as it was before a call that failed, and there is no copy of it in memory
      UpgradeError       the state can't be brought to the version that was asked for
      LoadError          the class to run can't be found
      ConnectError       no coordinator answers
      Refused            the coordinator closed the connection and said why
      Disconnected       the coordinator is gone

:data:`Cancelled` is none of them: it is asyncio.CancelledError, the end of a task.

The exit status of the app's process is the error's ``exit_status``.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import ClassVar, Literal

from immortal.protocol.errors import ImmortalError
from immortal.protocol.verdicts import Cause

OnError = Literal["undo", "keep", "stop"]
"""Effect of an exception that a handler does not declare: the call fails and the state is as before it ("undo"), the
call fails and the state stays as the handler left it ("keep"), or the app stops ("stop")."""

EXIT_DONE = 0  # the coordinator said Goodbye: a clean stop
EXIT_FAILED = 1  # the coordinator is gone or refused
EXIT_NOT_RUNNABLE = 2  # the class can't be found, or can't be run: starting again without a change is of no use
EXIT_HANDLER_FAILED = 70  # the app's own code failed: starting again without a change would only repeat it
EXIT_UPGRADE_FAILED = 71  # an upgrade() failed: the instance is of its old version, as before
EXIT_RECOVER = 75  # a call failed, and the app is to be recovered without it: start it again at once
EXIT_INTERRUPTED = 130  # SIGINT
EXIT_TERMINATED = 143  # SIGTERM

__all__ = [
    "AS_RPC",
    "EXIT_DONE",
    "EXIT_FAILED",
    "EXIT_HANDLER_FAILED",
    "EXIT_INTERRUPTED",
    "EXIT_NOT_RUNNABLE",
    "EXIT_RECOVER",
    "EXIT_TERMINATED",
    "EXIT_UPGRADE_FAILED",
    "AppError",
    "CallCancelled",
    "CallRefused",
    "CalleeFailed",
    "Cancelled",
    "ConnectError",
    "DefinitionError",
    "Disconnected",
    "EffectFailed",
    "Failure",
    "HandlerError",
    "HookError",
    "ImmortalError",
    "LoadError",
    "OnError",
    "QueryError",
    "QueryTooLong",
    "RecoveryNeeded",
    "Refused",
    "StartError",
    "StateError",
    "UpgradeError",
    "UsageError",
]


class AppError(ImmortalError):
    """Root of the SDK's errors."""

    exit_status: ClassVar[int] = EXIT_FAILED


class DefinitionError(AppError, TypeError):
    """Raised for a class, handler or hook that the SDK can't run; the message names it and the way out."""

    exit_status = EXIT_NOT_RUNNABLE


class UsageError(AppError):
    """Raised for a call that is not possible where it was made."""


class QueryError(UsageError):
    """Raised if a ``@query`` method has changed the state (``changed``), or tried to call, signal or draw; it says what
    it did."""

    changed = False


class QueryTooLong(BaseException):
    """Raised in a query that is not logged, wherever it is: it has kept the handlers waiting for too long. It is below
    BaseException: a query that goes on behind each exception goes on behind no other."""


AS_RPC = "make the method an @rpc, or leave this out"


class StateError(AppError):
    """Raised if an attribute can't be saved, or a checkpoint does not fit the class.

    ``takes_too_long``: to encode the state was given up.
    """

    exit_status = EXIT_HANDLER_FAILED
    takes_too_long = False


@dataclass(frozen=True, slots=True)
class Failure:
    """Failure of a message, or of a step of an async handler. ``policy``: what happens to the state.

    ``method_id`` None: what has failed is none of the class's own. ``refused``: why it can't be called, with ``text``.
    """

    policy: OnError
    method: str
    method_id: int | None
    type_name: str
    text: str
    trace: str = ""
    refused: Cause = Cause.NONE
    task: int = 0
    step: int = 0


class HandlerError(AppError):
    """Raised for a logged message that can't be handled. ``sequence_id``, ``message_index`` (from 0): which one.

    ``failure``: how it may fail alone; None: it can't. ``arguments``: of the call, as text, "" if it has none.
    """

    exit_status = EXIT_HANDLER_FAILED
    arguments = ""

    def __init__(self, text: str, sequence_id: int, message_index: int, failure: Failure | None = None) -> None:
        super().__init__(text)
        self.sequence_id = sequence_id
        self.message_index = message_index
        self.failure = failure


class RecoveryNeeded(AppError):  # noqa: N818 (what happened, not what is wrong)
    """Raised after a failed call: the coordinator knows of it, and the app is to be recovered without it."""

    exit_status = EXIT_RECOVER


class CallRefused(AppError):  # noqa: N818
    """Raised if a call can't be made: no such method, or arguments that do not fit it. Nothing was called there.

    Raised where an async handler waits for the answer; the message says what came and what was expected.
    """


class CalleeFailed(AppError):  # noqa: N818
    """Raised if the called handler raised what it does not declare, or returned what it does not say.

    Raised where an async handler waits for the answer. ``type_name`` and ``message``: of what it raised, as text;
    ``reference``: where to look for it, "NAME record SEQ:INDEX" of the callee's log, or "" where nobody says.
    """

    def __init__(self, called: str, type_name: str, message: str, reference: str = "") -> None:
        where = f" ({reference})" if reference else ""
        super().__init__(f"{called} failed{where}: {type_name}{f': {message}' if message else ''}")
        self.type_name = type_name
        self.message = message
        self.reference = reference


class CallCancelled(CalleeFailed):
    """Raised if the called handler was cancelled, and has ended with that; ``message`` is the reason."""

    def __init__(self, called: str, reason: str, reference: str = "") -> None:
        super().__init__(called, "Cancelled", reason, reference)
        where = f" ({reference})" if reference else ""
        self.args = (f"{called} was cancelled{where}{f': {reason}' if reason else ''}",)


Cancelled = asyncio.CancelledError
"""Raised at the ``await`` where an ``async def`` handler waits, when the handler is cancelled: asyncio's own class.

The handler may clean up, and await what that takes, in ``finally`` or ``except Cancelled``; then it is to end, by
letting this pass or with another exception. ``str(error)``: the reason.
"""


class EffectFailed(AppError):  # noqa: N818
    """Raised where a handler waits for an effect of which all attempts have failed, or one that is not retried.

    ``effect``: the function's name; ``type_name``, ``message`` and ``traceback``: of what the last attempt raised, as
    text, since it was raised elsewhere and went through the log; ``attempts``: how many there were, since the last
    start of the app.
    """

    def __init__(self, effect: str, type_name: str, message: str, traceback: str, attempts: int) -> None:
        times = "" if attempts == 1 else f" after {attempts} attempts"
        super().__init__(f"the effect {effect} failed{times}: {type_name}{f': {message}' if message else ''}")
        if traceback:
            self.add_note(f"in the effect:\n{traceback}")
        self.effect = effect
        self.type_name = type_name
        self.message = message
        self.traceback = traceback
        self.attempts = attempts


class UpgradeError(AppError):
    """Raised if the state can't be brought to the version that was asked for. ``reason`` says why in one line."""

    exit_status = EXIT_UPGRADE_FAILED

    def __init__(self, text: str, reason: str) -> None:
        super().__init__(text)
        self.reason = reason


class HookError(AppError):
    """Raised if an ``@on_primary`` hook raised."""

    exit_status = EXIT_HANDLER_FAILED


class LoadError(AppError):
    """Raised if ``module:Class`` does not lead to a class that can be run."""

    exit_status = EXIT_NOT_RUNNABLE


class ConnectError(AppError):
    """Raised if no coordinator listens at the address."""


class StartError(AppError):
    """Raised if an instance that was to run in this process does not."""


class Refused(AppError):  # noqa: N818 (what happened, not what is wrong)
    """Raised if the coordinator closed the connection and said why."""


class Disconnected(AppError):  # noqa: N818
    """Raised when the connection with the coordinator has ended: what was not accepted may or may not be in its log."""
