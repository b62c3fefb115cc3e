"""Instances for web handlers: one connection per process, idempotency keys, limits on open calls."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Generic, TypeVar, Unpack, overload

from starlette.requests import HTTPConnection

from immortal.appsdk.client import Connector, ReachOptions, connect
from immortal.appsdk.client.clients import AsyncClient, Proxy, ProxyMethod
from immortal.appsdk.client.discovery import Finder
from immortal.appsdk.client.errors import ClientError
from immortal.appsdk.client.methods import Method
from immortal.appsdk.errors import UsageError
from immortal.appsdk.handlers.definition import definition_of

S = TypeVar("S")
T = TypeVar("T")

SCOPE_KEY = "immortal"  # key of a request's calls in its ASGI scope
_KEY_SIZE_BYTES = 20
TIMEOUT_DEFAULT_S = 20.0  # of a call: below the timeouts of browsers and proxies, so that they get our answer
CALLS_MAX = 1000  # of one process that wait at once: a refusal is better than a longer queue


class TooManyCalls(ClientError):  # noqa: N818 (what happened, not what is wrong)
    """Raised if a call was not sent because this process has the allowed number of open calls to the service."""


class RequestCalls:
    """Calls of one request. ``idempotency_key``: unique key of the request; None if it has none.

    ``trace_context``: of the request, or "". ``declared``: exceptions of the calls that their handlers declare.
    ``misfits``: errors for arguments that do not fit the handler.
    """

    def __init__(self, idempotency_key: str | None, trace_context: str = "") -> None:
        self.trace_context = trace_context
        self.declared: list[BaseException] = []
        self.misfits: list[BaseException] = []
        self._idempotency_key = idempotency_key
        self._counts: Counter[str] = Counter()

    def key(self, service: str) -> str | None:
        """Return a unique key for the next call; a repeated request gets the same keys again.

        The key does not cover the method: a different call in its place, caused by another body, is refused.
        """
        if self._idempotency_key is None:
            return None
        self._counts[service] += 1
        parts = (self._idempotency_key, service, str(self._counts[service]))
        return hashlib.blake2b("\n".join(parts).encode(), digest_size=_KEY_SIZE_BYTES).hexdigest()


class RequestClient:
    """AsyncClient for the calls of one request, by the client of ``service`` on the server's loop."""

    def __init__(self, service: Service[Any], calls: RequestCalls, finder: Finder) -> None:
        self._service = service
        self._client = partial(service._client, finder)
        self._calls = calls

    @property
    def client_id(self) -> str:
        return self._client().client_id

    async def call(
        self, method: Method, arguments: bytes, timeout_s: float | None, key: str | None, trace_context: str = ""
    ) -> Any:
        key = key or self._calls.key(self._service.name)
        return await self._await_call(lambda: self._client().call(method, arguments, timeout_s, key, trace_context))

    async def query(self, method: Method, arguments: bytes, timeout_s: float | None) -> Any:
        """Ask a query. In a request with an idempotency key it is a logged call, so that a repeated request
        gets the same answer.
        """
        key = self._calls.key(self._service.name)
        if key is not None:
            return await self._await_call(lambda: self._client().call(method, arguments, timeout_s, key))
        return await self._await_call(lambda: self._client().query(method, arguments, timeout_s))

    async def _await_call(self, make: Callable[[], Awaitable[Any]]) -> Any:
        with self._service._slot():
            try:
                return await make()
            except Exception as error:
                if not isinstance(error, ClientError):  # the handler raised it
                    self._calls.declared.append(error)
                raise

    def fork(self, method: Method, arguments: bytes, key: str | None, trace_context: str = "") -> None:
        self._client().fork(method, arguments, key or self._calls.key(self._service.name), trace_context)

    def new_key(self) -> str:
        """Return the key of a call that is started: that of the request, so that a repeated request finds the call."""
        return self._calls.key(self._service.name) or self._client().new_key()

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        """Return the client's method ``name``: start, status, result or cancel."""
        return lambda *arguments: self._await_call(lambda: getattr(self._client(), name)(*arguments))


class _NotedMethod:
    """Method that notes errors for unsuitable arguments, to distinguish them from errors of the web server's code."""

    def __init__(self, method: Method, calls: RequestCalls) -> None:
        self._method = method
        self._calls = calls
        self.method = method.method
        self.name = method.name

    def encode(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> bytes:
        try:
            return self._method.encode(arguments, keywords)
        except TypeError as error:
            self._calls.misfits.append(error)
            raise

    def value(self, reply: Any) -> Any:
        return self._method.value(reply)


class RequestProxy(Proxy):
    """Proxy that a web handler calls. To a type checker it is the service's class."""

    def __init__(self, service: Service[Any], calls: RequestCalls) -> None:
        shards: Any = [RequestClient(service, calls, finder) for finder in service._finder.shards()]
        context = calls.trace_context
        definition, timeout_s = service._definition, service._timeout_s
        super().__init__(shards[0], definition, service.name, timeout_s, None, trace_context=context, shards=shards)
        self._immortal_calls = calls

    def _immortal_method(self, method: Method) -> ProxyMethod:
        return super()._immortal_method(_NotedMethod(method, self._immortal_calls))

    def _immortal_query(self, method: Method) -> ProxyMethod:
        return super()._immortal_query(_NotedMethod(method, self._immortal_calls))


class ServiceOptions(ReachOptions, total=False):
    """Options of :class:`Service`."""

    timeout: float
    calls_max: int


class Service(Generic[S]):
    """Instance to call from web handlers: ``shop = Service(Shop, "shop")``, or ``Service("shop")`` without its class;
    created once, in a module.

    ``shop(request)`` returns a proxy for a handler: ``await shop(request).place(...)``. It is also a dependency for
    FastAPI: ``Depends(shop)``. ``timeout``: of each call, in seconds. ``calls_max``: limit of this process's waiting
    calls; one more raises TooManyCalls. The other options: see :func:`immortal.client.connect`. Raises TypeError,
    DefinitionError, UsageError.
    """

    @overload
    def __init__(self: Service[type[T]], target: type[T], name: str, /, **options: Unpack[ServiceOptions]) -> None: ...
    @overload
    def __init__(self: Service[Any], target: str, /, **options: Unpack[ServiceOptions]) -> None: ...
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
        self._count = 0  # of this process's calls that wait
        self._count_max = calls_max
        self._open: tuple[asyncio.AbstractEventLoop, dict[str, AsyncClient]] | None = None

    def __repr__(self) -> str:
        return f"<service {self.name!r}>"

    def __call__(self, request: HTTPConnection) -> S:
        """Return a proxy for the calls of this request, in any thread. Raises UsageError without ImmortalMiddleware."""
        calls = request.scope.get(SCOPE_KEY)
        if not isinstance(calls, RequestCalls):
            raise UsageError(
                f"{self!r}: the request did not come through ImmortalMiddleware: app.add_middleware("
                f"ImmortalMiddleware, services=[...])"
            )
        proxy: Any = RequestProxy(self, calls)
        return proxy  # type: ignore[no-any-return]

    @contextmanager
    def _slot(self) -> Iterator[None]:
        """Count a call as waiting. Raises TooManyCalls."""
        if self._count >= self._count_max:
            raise TooManyCalls(f"{self._count_max} calls wait for {self.name!r} already, as many as it may be")
        self._count += 1
        try:
            yield
        finally:
            self._count -= 1

    def _clients(self) -> list[AsyncClient]:
        """Return the clients of the running loop, of each shard. Raises NotConnectable, UsageError."""
        return [self._client(finder) for finder in self._finder.shards()]

    def _client(self, finder: Finder) -> AsyncClient:
        """Return the client of the running loop. Raises NotConnectable, UsageError."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            raise UsageError(f"{self!r} is called in a 'def' handler: write 'async def', and await its calls") from None
        if self._open is None or self._open[0] is not loop:  # another loop, as of a test client whose own has ended
            self._open = (loop, {})
        clients = self._open[1]
        if finder.name not in clients:
            clients[finder.name] = AsyncClient(finder, None)
        return clients[finder.name]

    async def close(self) -> None:
        """Close the connection. Waiting calls end with ClientClosed; the next request opens a new connection."""
        opened, self._open = self._open, None
        if opened is not None and opened[0] is asyncio.get_running_loop():
            for client in opened[1].values():
                await client.close()
