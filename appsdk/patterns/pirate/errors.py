"""What can go wrong, beside what appsdk.client.errors has: CalleeFailed, CallRefused, OutcomeUnknown, ClientClosed.

ImmortalError
  ServerError     a server can't serve as things are
    StoreError    its store can't be opened, read or written
  ClientError
    GaveUp        a CallTimeout: no reply, after so many tries or so long
    TooManyRequests
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from immortal.appsdk.client.errors import CallTimeout, ClientError, Request
from immortal.protocol.errors import ImmortalError


class ServerError(ImmortalError):
    """A server can't serve as things are; the message says what to do."""


class StoreError(ServerError):
    """The store of replies can't be opened, read or written."""


class GaveUp(CallTimeout):
    """No reply came, and the request is not sent any more. ``tries``: by server.

    ``sent`` False: no server has got it, and none will. Otherwise it may have been done, or may still be:
    ``again(timeout)`` goes on with the same request (with asyncio: ``await error.again(timeout)``).
    """

    def __init__(self, reason: str, request: Request, tries: Mapping[str, int], again: Any) -> None:
        super().__init__(reason, request, again)
        self.tries = dict(tries)


class TooManyRequests(ClientError):  # noqa: N818
    """So many requests of this client are open that it takes no more. Nothing was sent."""
