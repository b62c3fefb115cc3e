"""An instance as web handlers name it: one connection for each process, opened when it is first used."""

# No ``from __future__ import annotations``: FastAPI reads those of Service.__call__, and would find mere text.

import asyncio
import os
from collections.abc import Sequence
from typing import Any, Generic, TypeVar, overload

from starlette.requests import HTTPConnection

from immortal.appsdk.client import Connector, connect
from immortal.appsdk.client.aio import AsyncClient
from immortal.appsdk.errors import UsageError
from immortal.appsdk.handlers.definition import definition_of
from immortal.appsdk.integrations.asgi.calls import (
    SCOPE_KEY,
    RequestCalls,
    RequestClient,
    RequestProxy,
    Room,
    TooManyCalls,
)

__all__ = ["Service", "TooManyCalls"]

S = TypeVar("S")
T = TypeVar("T")

TIMEOUT_DEFAULT_S = 20.0  # of a call: below what browsers and proxies wait for an answer, so that they get ours
CALLS_MAX = 1000  # of one process that wait at once: what more would wait in turn is better told so


class Service(Generic[S]):
    """``shop = Service(Shop, "shop")``, or ``Service("shop")`` without its class; once in a module.

    ``shop(request)`` is what a handler calls: ``await shop(request).place(...)``. It is a dependency for FastAPI, too:
    ``Depends(shop)``. ``timeout``: of each call, in seconds. ``calls_max``: how many calls of this process may wait at
    once; one more raises TooManyCalls. The other options are those of :func:`appsdk.client.connect`. Raises TypeError,
    DefinitionError, UsageError.
    """

    @overload
    def __init__(
        self: "Service[type[T]]",
        target: type[T],
        name: str,
        /,
        *,
        timeout: float = ...,
        calls_max: int = ...,
        endpoints: Sequence[str] = ...,
        home: str | os.PathLike[str] | None = ...,
        identity: str | None = ...,
        server_keys: Sequence[str] = ...,
        insecure: bool = ...,
    ) -> None: ...
    @overload
    def __init__(
        self: "Service[Any]",
        target: str,
        /,
        *,
        timeout: float = ...,
        calls_max: int = ...,
        endpoints: Sequence[str] = ...,
        home: str | os.PathLike[str] | None = ...,
        identity: str | None = ...,
        server_keys: Sequence[str] = ...,
        insecure: bool = ...,
    ) -> None: ...
    def __init__(
        self,
        target: type | str,
        name: str | None = None,
        /,
        *,
        timeout: float = TIMEOUT_DEFAULT_S,
        calls_max: int = CALLS_MAX,
        **options: Any,
    ) -> None:
        if isinstance(calls_max, bool) or not isinstance(calls_max, int) or calls_max < 1:
            raise UsageError(f"Service(calls_max={calls_max!r}): a number from 1 was expected")
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or timeout <= 0:
            raise UsageError(f"Service(timeout={timeout!r}): a number of seconds above 0 was expected")
        chosen: Any = connect
        connector: Connector[Any, Any] = chosen(target, *([] if name is None else [name]), timeout=timeout, **options)
        self._finder = connector._finder
        self.name = name or str(target)
        self._definition = None if isinstance(target, str) else definition_of(target)
        self._timeout_s = timeout
        self._room = Room(self.name, calls_max)
        self._open: tuple[asyncio.AbstractEventLoop, AsyncClient] | None = None

    def __repr__(self) -> str:
        return f"<service {self.name!r}>"

    def __call__(self, request: HTTPConnection) -> S:
        """For the calls of this request; any thread may ask for it. Raises UsageError without ImmortalMiddleware."""
        calls = request.scope.get(SCOPE_KEY)
        if not isinstance(calls, RequestCalls):
            raise UsageError(
                f"{self!r}: the request did not come through ImmortalMiddleware: app.add_middleware("
                f"ImmortalMiddleware, services=[...])"
            )
        client = RequestClient(self._client, self.name, calls, self._room)
        proxy: Any = RequestProxy(client, self._definition, self.name, self._timeout_s, calls)
        return proxy  # type: ignore[no-any-return]

    def _client(self) -> AsyncClient:
        """Raises NotConnectable, UsageError."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            raise UsageError(f"{self!r} is called in a 'def' handler: write 'async def', and await its calls") from None
        if self._open is None or self._open[0] is not loop:  # another one: a test client's, whose own has ended
            self._open = (loop, AsyncClient(self._finder, None))
        return self._open[1]

    async def close(self) -> None:
        """Calls that wait end with ClientClosed. The next request opens the connection anew."""
        opened, self._open = self._open, None
        if opened is not None and opened[0] is asyncio.get_running_loop():
            await opened[1].close()
