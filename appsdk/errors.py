"""Errors of the SDK, below :class:`immortal.protocol.errors.ImmortalError`, grouped by who can act on them.

    AppError
      DefinitionError    the class is not an app that a replay could repeat: raised at its definition
      UsageError         a call is not possible here: from the wrong thread, outside a handler, too large
        QueryError       a query has done more than read
        StoredFileError  a file can't be stored, or its content is missing or damaged
      StateError         the state can't be written into a checkpoint, or a checkpoint can't be read back
      HandlerError       a logged input can't be handled: a replay would only repeat it, so the app stops
      CallRefused        a call can't be carried out: raised in the async handler that waits for it
      CalleeFailed       the called handler failed: raised in the async handler that waits for it
        CallCancelled    the called handler was cancelled
      EffectFailed       an effect failed: raised in the async handler that waits for it
      RecoveryNeeded     the state before a failed call must be restored, and there is no copy of it in memory
      UpgradeError       the state can't be converted to the requested version
      LoadError          the class to run can't be found
      ConnectError       no coordinator answers
      Refused            the coordinator closed the connection and said why
      Disconnected       the connection with the coordinator has ended

:data:`Cancelled` is not below AppError: it is asyncio.CancelledError, which ends a task.

The exit status of the app's process is the error's ``exit_status``.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import ClassVar, Literal

from immortal.protocol.errors import ImmortalError
from immortal.protocol.verdicts import Cause

OnError = Literal["undo", "keep", "stop"]
"""Effect of an exception that a handler does not declare. "undo": the call fails and its changes are undone; "keep":
the call fails and its changes stay; "stop": the app stops."""

EXIT_DONE = 0  # the coordinator said Goodbye: a clean stop
EXIT_FAILED = 1  # the connection with the coordinator has ended, or was refused
EXIT_NOT_RUNNABLE = 2  # the class can't be found or run: a restart without a change does not help
EXIT_HANDLER_FAILED = 70  # the app's own code failed: a restart without a change would only repeat it
EXIT_UPGRADE_FAILED = 71  # an upgrade() failed: the instance keeps its old version
EXIT_RECOVER = 75  # a call failed, and the app must be recovered without it: restart it at once
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
    "StoredFileError",
    "UpgradeError",
    "UsageError",
]


class AppError(ImmortalError):
    """Base class of the SDK's errors."""

    exit_status: ClassVar[int] = EXIT_FAILED


class DefinitionError(AppError, TypeError):
    """Raised for a class, handler or hook that the SDK can't run; the message names it and says how to fix it."""

    exit_status = EXIT_NOT_RUNNABLE


class UsageError(AppError):
    """Raised for a call that is not possible in this place."""


class StoredFileError(UsageError):
    """Raised for a file that can't be stored, and for a handle whose content is missing or damaged in the store."""


class QueryError(UsageError):
    """Raised if a ``@query`` method changed the state (``changed``), or tried to call, signal or draw; it says so."""

    changed = False


class QueryTooLong(BaseException):
    """Raised inside a query that is not logged if it has delayed the handlers for too long. Below BaseException, so
    that a query that catches each Exception does not catch this."""


AS_RPC = "make the method an @rpc, or leave this out"


class StateError(AppError):
    """Raised if an attribute can't be saved, or a checkpoint does not fit the class.

    ``takes_too_long``: encoding the state was given up because it took too long.
    """

    exit_status = EXIT_HANDLER_FAILED
    takes_too_long = False


@dataclass(frozen=True, slots=True)
class Failure:
    """Failure of a message, or of a step of an async handler. ``policy``: what happens to the state.

    ``method_id`` None: what failed is no method of the class. ``refused``: why a call was refused, see ``text``.
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
    """Raised for a logged message that can't be handled: message ``message_index`` (from 0) of ``sequence_id``.

    ``failure``: how the message can fail alone; None: it can't. ``arguments``: those of the call, as text; "": none.
    """

    exit_status = EXIT_HANDLER_FAILED
    arguments = ""

    def __init__(self, text: str, sequence_id: int, message_index: int, failure: Failure | None = None) -> None:
        super().__init__(text)
        self.sequence_id = sequence_id
        self.message_index = message_index
        self.failure = failure


class RecoveryNeeded(AppError):  # noqa: N818 (what happened, not what is wrong)
    """Raised after a failed call that the coordinator knows: the app must be recovered without that call."""

    exit_status = EXIT_RECOVER


class CallRefused(AppError):  # noqa: N818
    """Raised if a call can't be carried out: no such method, or arguments that do not fit. The callee ran nothing.

    Raised where an async handler waits for the answer. The message says what was received and what was expected.
    """


class CalleeFailed(AppError):  # noqa: N818
    """Raised if the called handler raised an undeclared exception, or returned a value that does not fit.

    Raised where an async handler waits for the answer. ``type_name`` and ``message``: of the exception, as text;
    ``reference``: its place in the callee's log, "NAME record SEQ:INDEX"; "" if that is unknown.
    """

    def __init__(self, called: str, type_name: str, message: str, reference: str = "") -> None:
        where = f" ({reference})" if reference else ""
        super().__init__(f"{called} failed{where}: {type_name}{f': {message}' if message else ''}")
        self.type_name = type_name
        self.message = message
        self.reference = reference


class CallCancelled(CalleeFailed):
    """Raised if the called handler was cancelled and ended by that; ``message`` is the reason."""

    def __init__(self, called: str, reason: str, reference: str = "") -> None:
        super().__init__(called, "Cancelled", reason, reference)
        where = f" ({reference})" if reference else ""
        self.args = (f"{called} was cancelled{where}{f': {reason}' if reason else ''}",)


Cancelled = asyncio.CancelledError
"""Raised at the ``await`` of an ``async def`` handler that is cancelled: asyncio's own class.

The handler can clean up, and await while it does, in ``finally`` or ``except Cancelled``. Then it must end: by raising
this again, or another exception. ``str(error)``: the reason.
"""


class EffectFailed(AppError):  # noqa: N818
    """Raised where a handler waits for an effect whose last attempt failed, or whose error is not retried.

    ``effect``: the function's name; ``type_name``, ``message`` and ``traceback``: of what the last attempt raised, as
    text, since it came through the log; ``attempts``: their number since the last start of the app.
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
    """Raised if the state can't be converted to the requested version. ``reason`` says why in one line."""

    exit_status = EXIT_UPGRADE_FAILED

    def __init__(self, text: str, reason: str) -> None:
        super().__init__(text)
        self.reason = reason


class HookError(AppError):
    """Raised if an ``@on_primary`` hook raised an exception."""

    exit_status = EXIT_HANDLER_FAILED


class LoadError(AppError):
    """Raised if ``module:Class`` does not name a class that can be run."""

    exit_status = EXIT_NOT_RUNNABLE


class ConnectError(AppError):
    """Raised if no coordinator listens at the address."""


class StartError(AppError):
    """Raised if an instance in this process does not become ready."""


class Refused(AppError):  # noqa: N818 (what happened, not what is wrong)
    """Raised if the coordinator closed the connection and said why."""


class Disconnected(AppError):  # noqa: N818
    """Raised when the connection with the coordinator has ended. Impulses not yet accepted can be lost or logged."""
