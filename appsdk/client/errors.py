"""Errors of calls from outside, by what is known of the request.

ClientError
  NotConnectable     the instance can't be called as things are: not registered, stopped, no key that it lets in
  CallTimeout        no reply within the time given; ``sent`` False: the request will not be done
  CallRefused        the call can't be made: no such method, or arguments that do not fit; nothing was done
    CallConflict     its key, or the number of its client ID, is that of another call
  CallRaised         the handler raised an exception that it declares (where the class is not known here)
  CalleeFailed       the handler raised what it does not declare: the call failed, and changed nothing, or what its
                     ``on_error`` says
    CallCancelled    the handler was cancelled
  ReplyGone          the request was done, and its reply is not kept any more
  OutcomeUnknown     the request may have been done or not, and nobody can say any more
  ClientClosed       the client is closed; what was sent may still be done
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from immortal.appsdk import errors
from immortal.protocol.errors import ImmortalError
from immortal.protocol.identity import IdentityConflict


class ClientError(ImmortalError):
    """Root of the errors of clients."""


class NotConnectable(ClientError):  # noqa: N818 (what happened, not what is wrong)
    """The instance can't be called at present; the message says what to do."""


class Request(Protocol):
    """Identity of a request: client ID and number."""

    client_id: str
    number: int

    @property
    def sent(self) -> bool: ...


class CallTimeout(ClientError, TimeoutError):  # noqa: N818
    """No reply came within the time given.

    ``sent`` False: the request never left, and never will. Otherwise it may have been done, or may still be: this
    client goes on asking, and ``again(timeout)`` waits for the same request once more (with an async client: ``await
    error.again(timeout)``). ``client_id`` and ``number`` are what the request is known by, ``reason`` is the message
    without the advice.
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
        """Wait for the reply of the same request, ``timeout`` seconds at most. Raises CallTimeout, ClientError."""
        return self._again(timeout)


class CallRefused(ClientError, errors.CallRefused):  # noqa: N818
    """The call can't be made: the instance has no such method, or the arguments do not fit. Nothing was done."""


class CallConflict(IdentityConflict, CallRefused):
    """The key, or the client ID's number, is that of a call of another method or with other arguments. See ``known``
    and ``given``."""


class CalleeFailed(ClientError, errors.CalleeFailed):  # noqa: N818
    """The handler raised what it does not declare, or returned what it does not say: see appsdk.errors.CalleeFailed."""


class CallCancelled(CalleeFailed, errors.CallCancelled):
    """The handler was cancelled, and has ended with that: see immortal.appsdk.errors.CallCancelled."""

    def __init__(self, called: str, reason: str, reference: str = "") -> None:
        errors.CallCancelled.__init__(self, called, reason, reference)


class CallRaised(ClientError):  # noqa: N818
    """The handler raised an exception that it declares: ``name``, its ``arguments`` and ``attributes``."""

    def __init__(self, method: str, name: str, arguments: Sequence[Any], attributes: Mapping[str, Any]) -> None:
        super().__init__(f"{method} raised {name}({', '.join(map(repr, arguments))})")
        self.name = name
        self.arguments = tuple(arguments)
        self.attributes = dict(attributes)


class ReplyGone(ClientError):  # noqa: N818
    """The request was done, and its reply is not kept any more."""


class OutcomeUnknown(ClientError):  # noqa: N818
    """The request may have been done or not, and nobody can say any more. It is not sent again."""


class ClientClosed(ClientError):  # noqa: N818
    """The client is closed, or was closed while the call waited."""
