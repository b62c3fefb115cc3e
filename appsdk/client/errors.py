"""Errors of calls from outside, grouped by what is known of the request.

ClientError
  NotConnectable     the instance can't be called at present: not registered, stopped, no key that it accepts
  CallTimeout        no reply within the given time; ``sent`` False: the request will not be done
  CallRefused        the call can't be carried out: no such method, or arguments that do not fit; nothing was done
    CallConflict     its key, or the number of its client ID, belongs to another call
  CallRaised         the handler raised an exception that it declares (if the class is not known here)
  CalleeFailed       the handler raised an undeclared exception: the call failed, and changed nothing, or what its
                     ``on_error`` says
    CallCancelled    the handler was cancelled
  ReplyGone          the request was done, and its reply is no longer kept
  OutcomeUnknown     the request was done or not, and nobody can tell any more
  ClientClosed       the client is closed; what was sent can still be done
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from immortal.appsdk import errors
from immortal.protocol.errors import ImmortalError
from immortal.protocol.identity import IdentityConflict


class ClientError(ImmortalError):
    """Base class of the errors of clients."""


class NotConnectable(ClientError):  # noqa: N818 (what happened, not what is wrong)
    """Raised if the instance can't be called at present; the message says what to do."""


class Request(Protocol):
    """Identity of a request: client ID and number."""

    client_id: str
    number: int

    @property
    def sent(self) -> bool: ...


class CallTimeout(ClientError, TimeoutError):  # noqa: N818
    """Raised if no reply came within the given time.

    ``sent`` False: the request was never sent, and never will be. Otherwise it was done or can still be done: this
    client continues to ask, and ``again(timeout)`` waits for the same request again (with an async client: ``await
    error.again(timeout)``). ``client_id`` and ``number`` identify the request; ``reason`` is the message without the
    advice.
    """

    def __init__(self, reason: str, call: Request, again: Any) -> None:
        advice = ": error.again(timeout) waits for its reply, a new call would be another request"
        super().__init__(f"{reason}{advice if call.sent else ''}")
        self.reason = reason
        self.sent = call.sent
        self.client_id = call.client_id
        self.number = call.number
        self._again = again

    def again(self, timeout: float | None = None) -> Any:
        """Wait for the reply of the same request, at most ``timeout`` seconds. Raises CallTimeout, ClientError."""
        return self._again(timeout)


class CallRefused(ClientError, errors.CallRefused):  # noqa: N818
    """Raised if the instance has no such method, or the arguments do not fit it. Nothing was done."""


class CallConflict(IdentityConflict, CallRefused):
    """Raised if the key, or the client ID's number, belongs to a different call: see ``known`` and ``given``."""


class CalleeFailed(ClientError, errors.CalleeFailed):  # noqa: N818
    """Raised if the handler raised an undeclared exception, or returned a value that does not fit its annotation."""


class CallCancelled(CalleeFailed, errors.CallCancelled):
    """Raised if the handler was cancelled, and ended by that: see immortal.appsdk.errors.CallCancelled."""

    def __init__(self, called: str, reason: str, reference: str = "") -> None:
        errors.CallCancelled.__init__(self, called, reason, reference)


class CallRaised(ClientError):  # noqa: N818
    """Raised if the handler raised a declared exception: ``name``, its ``arguments`` and ``attributes``."""

    def __init__(self, method: str, name: str, arguments: Sequence[Any], attributes: Mapping[str, Any]) -> None:
        super().__init__(f"{method} raised {name}({', '.join(map(repr, arguments))})")
        self.name = name
        self.arguments = tuple(arguments)
        self.attributes = dict(attributes)


class ReplyGone(ClientError):  # noqa: N818
    """Raised if the request was done, and its reply is no longer kept."""


class OutcomeUnknown(ClientError):  # noqa: N818
    """Raised if the request was done or not, and nobody can tell any more. It is not sent again."""


class ClientClosed(ClientError):  # noqa: N818
    """Raised if the client is closed, or was closed while the call waited."""
