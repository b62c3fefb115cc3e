"""Proxies for an instance, whose methods call it. To a type checker they are its class."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, overload

from immortal.appsdk.client.clients import AsyncClient, Client
from immortal.appsdk.client.connection import random_client_id
from immortal.appsdk.client.methods import CANCEL, Method, NamedMethod, NamedQuery, Status, typed_method, typed_query
from immortal.appsdk.handlers.definition import Definition
from immortal.protocol.client_frames import CLIENT_ID_SIZE_BYTES_MAX, KEY_PREFIX
from immortal.protocol.errors import LocalProtocolError
from immortal.protocol.safe_output import is_encodable
from immortal.protocol.trace_context import read_traceparent

QUERY = "query"
KEY_SIZE_BYTES_MAX = CLIENT_ID_SIZE_BYTES_MAX - len(KEY_PREFIX)

P = TypeVar("P")
Q = ParamSpec("Q")
R = TypeVar("R")

if TYPE_CHECKING:
    from immortal.appsdk.handlers.decorators import RemoteHandler


class Proxy:
    """Proxy with an attribute for each handler; calls go through ``client``."""

    def __init__(
        self,
        client: Client | AsyncClient,
        definition: Definition | None,
        name: str,
        timeout_s: float | None,
        key: str | None,
        methods: dict[str, Method] | None = None,
        trace_context: str = "",
    ) -> None:
        """Make a proxy. ``methods``: known methods by name, shared by all proxies made of each other.
        ``trace_context``: of its calls, in the form of :mod:`immortal.protocol.trace_context`.
        """
        self._immortal_parts = (client, definition, name, timeout_s, key)
        self._immortal_trace = (trace_context,) if trace_context else ()
        self._immortal_methods: dict[str, Method] = {} if methods is None else methods

    def __repr__(self) -> str:
        client, _, name, _, _ = self._immortal_parts
        return f"<client {client.client_id!r} of {name!r}>"

    def __getattr__(self, name: str) -> ProxyMethod:
        if name.startswith("_"):
            raise AttributeError(name)
        _, definition, *_ = self._immortal_parts
        method = self._immortal_methods.get(name)
        if method is None:
            method = NamedMethod(name) if definition is None else typed_method(definition, name)
            self._immortal_methods[name] = method

        made = self._immortal_method(method)
        setattr(self, name, made)
        return made

    def _immortal_method(self, method: Method) -> ProxyMethod:
        return ProxyMethod(self, method)

    def _immortal_query(self, method: Method) -> ProxyMethod:
        return QueryMethod(self, method)

    @cached_property
    def query(self) -> Any:
        """Queries of the instance, and no other handlers. A class with a handler called ``query`` has that here."""
        _, definition, *_ = self._immortal_parts
        if definition is None:
            return NamedQueries(self)
        return self.__getattr__(QUERY) if QUERY in definition.handlers else Queries(self)


class ProxyMethod:
    """Handler to call: ``shop.place(...)`` waits for the reply, or returns an awaitable; ``shop.place.fork(...)`` does
    not wait.
    """

    def __init__(self, proxy: Proxy, method: Method) -> None:
        self._client, _, _, self._timeout_s, self._key = proxy._immortal_parts
        self._trace = proxy._immortal_trace
        self._method = method

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        encoded = self._method.encode(arguments, keywords)
        return self._client.call(self._method, encoded, self._timeout_s, self._key, *self._trace)

    def start(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Start a call; see :func:`start`."""
        encoded = self._method.encode(arguments, keywords)
        made = self.handle(self._key or random_client_id())
        taken = self._client.start(self._method, encoded, self._timeout_s, made._key, *self._trace)
        return _after(taken, made) if isinstance(taken, Coroutine) else made

    def handle(self, key: str | None = None) -> Handle[Any]:
        """Make the handle of the call with that key; without one, with the key of this proxy."""
        return Handle(self._client, self._method, self._timeout_s, key or self._key or "")

    def fork(self, *arguments: Any, **keywords: Any) -> None:
        self._client.fork(self._method, self._method.encode(arguments, keywords), self._key, *self._trace)


class QueryMethod(ProxyMethod):
    """Query to ask: ``counter.query.total()`` runs between two handlers, and is not logged. With a key it is a request
    like any call, logged and done once.
    """

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        if self._key is not None:
            return super().__call__(*arguments, **keywords)
        return self._client.query(self._method, self._method.encode(arguments, keywords), self._timeout_s)


class Queries:
    """Namespace ``counter.query``: the handlers that are queries, and no others."""

    def __init__(self, proxy: Proxy) -> None:
        self._immortal_proxy = proxy

    def __getattr__(self, name: str) -> ProxyMethod:
        if name.startswith("_"):
            raise AttributeError(name)
        _, definition, *_ = self._immortal_proxy._immortal_parts
        method = NamedQuery(name) if definition is None else typed_query(definition, name)
        made = self._immortal_proxy._immortal_query(method)
        setattr(self, name, made)
        return made


class NamedQueries(Queries, ProxyMethod):
    """Queries of an instance whose class is not known here. It may have a handler ``query``, which a call of this
    object calls.
    """

    def __init__(self, proxy: Proxy) -> None:
        Queries.__init__(self, proxy)
        ProxyMethod.__init__(self, proxy, NamedMethod(QUERY))


class Handle(Generic[R]):
    """Call that was started. ``id``: text by which :func:`handle` finds it again, also in another process.

    With an async client the methods give something to await.
    """

    def __init__(self, client: Client | AsyncClient, method: Method, timeout_s: float | None, key: str) -> None:
        self.id = f"{method.name.rpartition('.')[2]}:{key}"
        self._client = client
        self._method = method
        self._timeout_s = timeout_s
        self._key = key

    def __repr__(self) -> str:
        return f"<handle {self.id!r}>"

    def result(self, timeout: float | None = None) -> Any:
        """Wait until the handler has ended, ``timeout`` seconds at most (None: without limit), and return what it
        returned.

        Raises what it raised, CallCancelled, CallTimeout (it goes on), ClientError.
        """
        return self._client.result(self._method, timeout, self._key)

    def status(self) -> Any:
        """Return the status at the instance: "waiting", "done" (with a result or an error), or "unknown" where the
        instance has no such call. Raises ClientError.
        """
        return self._client.status(self._timeout_s, self._key)

    def cancel(self, reason: str = "") -> Any:
        """Cancel the handler. True: it still waited. False: it had ended, or is no ``async def``.

        Once for each call: the next time it gives the same. Raises ClientError.
        """
        return self._client.cancel(CANCEL.encode((reason,), {}), self._timeout_s, self._key)


if TYPE_CHECKING:

    class SyncHandle(Handle[R]):
        def result(self, timeout: float | None = None) -> R: ...
        def status(self) -> Status: ...
        def cancel(self, reason: str = "") -> bool: ...

    class AsyncHandle(Handle[R]):
        def result(self, timeout: float | None = None) -> Awaitable[R]: ...
        def status(self) -> Awaitable[Status]: ...
        def cancel(self, reason: str = "") -> Awaitable[bool]: ...


@overload
def start(  # type: ignore[overload-overlap]
    method: RemoteHandler[Q, R], /, *args: Q.args, **kwargs: Q.kwargs
) -> Awaitable[AsyncHandle[R]]: ...
@overload
def start(method: Callable[Q, Coroutine[Any, Any, R]], /, *args: Q.args, **kwargs: Q.kwargs) -> SyncHandle[R]: ...
@overload
def start(method: Callable[Q, R], /, *args: Q.args, **kwargs: Q.kwargs) -> SyncHandle[R]: ...
def start(method: Any, /, *arguments: Any, **keywords: Any) -> Any:
    """Start a call and return a :class:`Handle` as soon as the instance has it: ``start(shop.place, "book")``.

    With an async client it is awaited. The call has a key of its own, a random one or that of ``with_key(shop, ...)``:
    to start it once more with the same key gives the same call. Raises TypeError, ClientError.
    """
    if not isinstance(method, ProxyMethod):
        raise TypeError(f"start({method!r}, ...): a method of what 'with connect(...)' gives was expected")
    return method.start(arguments, keywords)


def handle(proxy: object, handle_id: str) -> Any:
    """Return the :class:`Handle` with that ID, of a call that was started here or in another process.

    Nothing is asked of the instance yet. Raises TypeError, AttributeError.
    """
    checked = _checked(proxy)
    name, colon, key = handle_id.partition(":") if isinstance(handle_id, str) else ("", "", "")
    if not (colon and key and name.isidentifier()):
        raise TypeError(f"handle(..., {handle_id!r}): the id of a Handle was expected, such as 'place:order-17'")
    made: ProxyMethod = getattr(with_key(checked, key), name)
    return made.handle()


def with_key(proxy: P, key: str) -> P:
    """Return a proxy whose next call is one request, however often and from wherever it is made: ``with_key(shop,
    "order-17").buy("book")``.

    The first call with ``key`` is done, and each other one gets the reply of that. Raises TypeError.
    """
    is_text = isinstance(key, str) and is_encodable(key)
    if not is_text or not 1 <= len(key.encode()) <= KEY_SIZE_BYTES_MAX or "\0" in key:
        raise TypeError(f"a key of 1 to {KEY_SIZE_BYTES_MAX} bytes without a zero byte was expected, not {key!r}")
    return _made_of(proxy, key=key)


def with_traceparent(proxy: P, traceparent: str) -> P:
    """Return a proxy whose calls are part of that trace: ``with_traceparent(shop,
    "00-4bf9...-00f0...-01").buy("book")``.

    ``traceparent``: of the caller's span, as W3C Trace Context has it. The instance notes it in its log, and
    ``immortal trace`` goes on with it. Raises TypeError.
    """
    return _made_of(proxy, trace_context=trace_context_of(traceparent))


def trace_context_of(traceparent: object) -> str:
    """Return the trace context that ``traceparent`` names. Raises TypeError."""
    if not isinstance(traceparent, str):
        raise TypeError(f"a traceparent was expected, as W3C Trace Context has it, not {traceparent!r}")
    try:
        return read_traceparent(traceparent)
    except LocalProtocolError as error:
        raise TypeError(str(error)) from None


async def _after(taken: Awaitable[Any], made: Handle[Any]) -> Handle[Any]:
    await taken
    return made


def with_timeout(proxy: P, timeout: float | None) -> P:
    """Return a proxy with another timeout for each call, in seconds; None: without limit. Raises TypeError."""
    return _made_of(proxy, timeout_s=timeout)


def client_of(proxy: object) -> Client | AsyncClient:
    """Return the client behind a proxy. Raises TypeError."""
    return _checked(proxy)._immortal_parts[0]


def _made_of(proxy: P, **changes: Any) -> P:
    before = _checked(proxy)
    client, definition, name, timeout_s, key = before._immortal_parts
    trace_context = "".join(before._immortal_trace)
    options = {"timeout_s": timeout_s, "key": key, "trace_context": trace_context} | changes
    made: Any = Proxy(client, definition, name, **options, methods=before._immortal_methods)
    return made  # type: ignore[no-any-return]


def _checked(proxy: object) -> Proxy:
    if not isinstance(proxy, Proxy):
        raise TypeError(f"{proxy!r}: what 'with connect(...)' gives was expected")
    return proxy
