"""Clients of an instance (Client for threads, AsyncClient for asyncio), and proxies whose methods call it.

To a type checker a proxy has the instance's class.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, Self, TypeVar, overload

from immortal.appsdk.client.connection import random_client_id
from immortal.appsdk.client.methods import CANCEL, Method, NamedMethod, Status, typed_method, typed_query
from immortal.appsdk.errors import UsageError
from immortal.appsdk.handlers.definition import ELSEWHERE, Definition, key_problem, shard_of
from immortal.protocol.client_frames import CLIENT_ID_SIZE_BYTES_MAX, KEY_PREFIX
from immortal.protocol.errors import LocalProtocolError
from immortal.protocol.safe_output import is_encodable
from immortal.protocol.trace_context import read_traceparent

if TYPE_CHECKING:
    from immortal.appsdk.handlers.decorators import RemoteHandler
import os
import time
from functools import partial

from immortal.appsdk.client.connection import Connection
from immortal.appsdk.client.discovery import Finder
from immortal.appsdk.client.errors import CallRefused, CallTimeout, ClientClosed, ClientError
from immortal.appsdk.client.methods import STATUS, ForkTracker
from immortal.appsdk.client.session import Call, Question
from immortal.appsdk.client.shells import LoopShell, OwnId, ThreadShell, require_process
from immortal.appsdk.client.transport import Transport, timeout_message

QUERY = "query"
KEY_SIZE_BYTES_MAX = CLIENT_ID_SIZE_BYTES_MAX - len(KEY_PREFIX)

P = TypeVar("P")
Q = ParamSpec("Q")
R = TypeVar("R")


class Proxy:
    """Proxy of an instance, with an attribute for each handler; calls go through ``client``."""

    def __init__(
        self,
        client: Client | AsyncClient,
        definition: Definition | None,
        name: str,
        timeout_s: float | None,
        key: str | None,
        methods: dict[str, Method] | None = None,
        trace_context: str = "",
        shards: Sequence[Client | AsyncClient] = (),
    ) -> None:
        """Make a proxy. ``methods``: known methods by name, shared by all proxies derived from each other.

        ``trace_context``: sent with its calls, see :mod:`immortal.protocol.timings`. ``shards``: the clients of all
        shards of a keyed class."""
        self._immortal_shards = shards or (client,)
        self._immortal_front: tuple[Any, ...] = ()  # the key
        self._immortal_parts = (client, definition, name, timeout_s, key)
        self._immortal_trace = (trace_context,) if trace_context else ()
        self._immortal_methods: dict[str, Method] = {} if methods is None else methods

    def __repr__(self) -> str:
        client, _, name, _, _ = self._immortal_parts
        return f"<client {client.client_id!r} of {name!r}>"

    __iter__ = __contains__ = None  # Python would call __getitem__ with 0, 1, ... without end

    def __getitem__(self, key: Any) -> Self:
        """Return the proxy of one key of a keyed class: ``carts["ann"].add("tea", 2)``. Raises TypeError."""
        _, definition, name, timeout_s, request_key = self._immortal_parts
        kind = type(key) if definition is None and isinstance(key, int) else str
        if definition is not None:
            if definition.keyed is None:
                raise TypeError(f"{self!r}[{key!r}]: {definition.name} is no keyed class")
            kind = definition.keyed
        if problem := key_problem(kind, key):
            raise TypeError(f"{name}[...]: {problem}")
        made = object.__new__(type(self))
        vars(made).update({one: value for one, value in vars(self).items() if one.startswith("_immortal_")})
        shards = self._immortal_shards
        client = shards[shard_of(key, len(shards)) - 1]
        made._immortal_parts = client, definition, name, timeout_s, request_key
        made._immortal_front = (key,)
        return made

    def __getattr__(self, name: str) -> ProxyMethod:
        if name.startswith("_"):
            raise AttributeError(name)
        _, definition, whose, *_ = self._immortal_parts
        if len(self._immortal_shards) > 1 and not self._immortal_front:
            raise UsageError(f"{whose!r} is keyed, so a call must name the key: {whose}[key].{name}(...)")
        method = self._immortal_methods.get(name)
        if definition is None:
            method = NamedMethod(name, self._immortal_front)
        elif method is None:
            method = self._immortal_methods[name] = typed_method(definition, name)
        made = self._immortal_method(method)
        setattr(self, name, made)
        return made

    def _immortal_method(self, method: Method) -> ProxyMethod:
        return ProxyMethod(self, method)

    def _immortal_query(self, method: Method) -> ProxyMethod:
        return QueryMethod(self, method)

    @cached_property
    def query(self) -> Any:
        """Queries of the instance, without its other handlers; or the handler ``query``, if the class has one."""
        _, definition, *_ = self._immortal_parts
        if definition is None:
            return NamedQueries(self)
        return self.__getattr__(QUERY) if QUERY in definition.handlers else Queries(self)


class ProxyMethod:
    """Handler to call: ``shop.place(...)`` waits for the reply, or returns an awaitable.

    ``shop.place.fork(...)`` does not wait."""

    def __init__(self, proxy: Proxy, method: Method) -> None:
        self._client, _, _, self._timeout_s, self._key = proxy._immortal_parts
        self._trace = proxy._immortal_trace
        self._front = proxy._immortal_front
        self._method = method

    def _encoded(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> bytes:
        return self._method.encode((*self._front, *arguments), keywords)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        encoded = self._encoded(arguments, keywords)
        return self._client.call(self._method, encoded, self._timeout_s, self._key, *self._trace)

    def start(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Start a call, as :func:`start` does."""
        encoded = self._encoded(arguments, keywords)
        made = self.handle(self._key or self._client.new_key())
        taken = self._client.start(self._method, encoded, self._timeout_s, made._key, *self._trace)
        return _handle_after(taken, made) if isinstance(taken, Coroutine) else made

    def handle(self, key: str | None = None) -> Handle[Any]:
        """Return the handle of the call with the key ``key``, by default the key of this proxy."""
        return Handle(self._client, self._method, self._timeout_s, key or self._key or "")

    def fork(self, *arguments: Any, **keywords: Any) -> None:
        self._client.fork(self._method, self._encoded(arguments, keywords), self._key, *self._trace)


class QueryMethod(ProxyMethod):
    """Query to ask: ``counter.query.total()`` runs between two handlers, and is not logged.

    With an idempotency key it is logged and done once, like a call. So is a query of a keyed class whose key has moved
    to another shard, since shards forward only calls."""

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        call = partial(super().__call__, *arguments, **keywords)
        if self._key is not None:
            return call()
        try:
            outcome = self._client.query(self._method, self._encoded(arguments, keywords), self._timeout_s)
        except CallRefused as error:
            return _call_if_moved(error, call)
        return _query_or_call(outcome, call) if isinstance(outcome, Awaitable) else outcome


def _call_if_moved(error: CallRefused, call: Callable[[], Any]) -> Any:
    if ELSEWHERE not in str(error):
        raise error
    return call()


async def _query_or_call(query: Awaitable[Any], call: Callable[[], Awaitable[Any]]) -> Any:
    try:
        return await query
    except CallRefused as error:
        return await _call_if_moved(error, call)


class Queries:
    """Namespace ``counter.query``: the handlers that are queries, and no others."""

    def __init__(self, proxy: Proxy) -> None:
        self._immortal_proxy = proxy

    def __getattr__(self, name: str) -> ProxyMethod:
        if name.startswith("_"):
            raise AttributeError(name)
        proxy = self._immortal_proxy
        _, definition, *_ = proxy._immortal_parts
        named = NamedMethod(name, proxy._immortal_front, is_query=True)
        made = proxy._immortal_query(named if definition is None else typed_query(definition, name))
        setattr(self, name, made)
        return made


class NamedQueries(Queries, ProxyMethod):
    """Queries of an instance whose class is not known here. A call of this object calls a handler ``query``."""

    def __init__(self, proxy: Proxy) -> None:
        Queries.__init__(self, proxy)
        ProxyMethod.__init__(self, proxy, NamedMethod(QUERY, proxy._immortal_front))


class Handle(Generic[R]):
    """Call that was started. ``id``: text by which :func:`handle` finds it again, also in another process.

    With an async client the methods return awaitables.
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
        """Wait until the handler has ended, at most ``timeout`` seconds (None: without limit); return its result.

        Raises what it raised, CallCancelled, CallTimeout (the handler continues), ClientError.
        """
        return self._client.result(self._method, timeout, self._key)

    def status(self) -> Any:
        """Return the status at the instance: "waiting", "done" (with a result or an error), or "unknown".

        It is "unknown" if the instance has no such call. Raises ClientError."""
        return self._client.status(self._timeout_s, self._key)

    def cancel(self, reason: str = "") -> Any:
        """Cancel the handler. Return True if it still waited, False if it had ended or is no ``async def``.

        A second cancel of the same call does nothing and returns the same. Raises ClientError.
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
    """Start a call; return a :class:`Handle` as soon as the instance has it: ``start(shop.place, "book")``.

    With an async client the result is awaited. The call has its own key, a random one or that of ``with_key(shop,
    ...)``: a second start with the same key finds the same call. Raises TypeError, ClientError.
    """
    if not isinstance(method, ProxyMethod):
        raise TypeError(f"start({method!r}, ...): a method of what 'with connect(...)' gives was expected")
    return method.start(arguments, keywords)


def handle(proxy: object, handle_id: str) -> Any:
    """Return the :class:`Handle` with the ID ``handle_id``, of a call that any process has started.

    It sends nothing to the instance. Raises TypeError, AttributeError.
    """
    checked = _checked(proxy)
    name, colon, key = handle_id.partition(":") if isinstance(handle_id, str) else ("", "", "")
    if not (colon and key and name.isidentifier()):
        raise TypeError(f"handle(..., {handle_id!r}): the id of a Handle was expected, such as 'place:order-17'")
    made: ProxyMethod = getattr(with_key(checked, key), name)
    return made.handle()


def with_key(proxy: P, key: str) -> P:
    """Return a proxy for one request with the idempotency key ``key``: ``with_key(shop, "order-17").buy("book")``.

    The first call with ``key``, from anywhere, is done; each later one gets its reply. Raises TypeError.
    """
    is_text = isinstance(key, str) and is_encodable(key)
    if not is_text or not 1 <= len(key.encode()) <= KEY_SIZE_BYTES_MAX or "\0" in key:
        raise TypeError(f"a key of 1 to {KEY_SIZE_BYTES_MAX} bytes without a zero byte was expected, not {key!r}")
    return _derived(proxy, key=key)


def with_traceparent(proxy: P, traceparent: str) -> P:
    """Return a proxy whose calls are part of a trace: ``with_traceparent(shop, "00-4bf9...-01").buy("book")``.

    ``traceparent``: of the caller's span, in the form of W3C Trace Context. The instance notes it in its log, and
    ``immortal trace`` continues the trace. Raises TypeError.
    """
    return _derived(proxy, trace_context=trace_context_of(traceparent))


def trace_context_of(traceparent: object) -> str:
    """Return the trace context of a ``traceparent``. Raises TypeError."""
    if not isinstance(traceparent, str):
        raise TypeError(f"a traceparent was expected, as W3C Trace Context has it, not {traceparent!r}")
    try:
        return read_traceparent(traceparent)
    except LocalProtocolError as error:
        raise TypeError(str(error)) from None


async def _handle_after(submitted: Awaitable[Any], handle: Handle[Any]) -> Handle[Any]:
    await submitted
    return handle


def with_timeout(proxy: P, timeout: float | None) -> P:
    """Return a proxy with another timeout for each call, in seconds; None: without limit. Raises TypeError."""
    return _derived(proxy, timeout_s=timeout)


def _derived(proxy: P, **changes: Any) -> P:
    before = _checked(proxy)
    client, definition, name, timeout_s, key = before._immortal_parts
    trace_context = "".join(before._immortal_trace)
    options = {"timeout_s": timeout_s, "key": key, "trace_context": trace_context} | changes
    shards = before._immortal_shards
    made: Any = Proxy(client, definition, name, **options, methods=before._immortal_methods, shards=shards)
    made._immortal_front = before._immortal_front
    return made  # type: ignore[no-any-return]


def _checked(proxy: object) -> Proxy:
    if not isinstance(proxy, Proxy):
        raise TypeError(f"{proxy!r}: what 'with connect(...)' gives was expected")
    return proxy


Execute = Callable[[Any], Any]


class _ClientMachine(Transport):
    """State machine of a client: its connection, and its forked calls."""

    def __init__(self, finder: Finder, client_id: str | None) -> None:
        super().__init__(Connection(finder.name, client_id, time.monotonic()), finder)
        self.forks = ForkTracker(finder.name)
        self._closed = False

    def require_open(self) -> None:
        """Check that :meth:`close` was not called. Raises ClientClosed."""
        if self._closed:
            raise ClientClosed(f"the client of {self.connection.instance!r} is closed")

    def close(self) -> None:
        self._closed = True
        super().close()
        self.connection.close(
            ClientClosed(
                f"the client of {self.connection.instance!r} was closed; a call that was sent may still be done"
            )
        )


@dataclass(slots=True, eq=False)
class _Waiting:
    """Wait for the outcome of a call. ``_submit``: gives the call to the connection; None: it was given before.

    ``_retry``: function with which a CallTimeout waits again; None: wait for the same call.
    """

    _method: Method
    _call: Call
    wait_timeout_s: float | None
    _submit: Callable[[Connection], None] | None
    _retry: Callable[[float | None], Any] | None = None
    _text: str = ""  # why there is no outcome
    _process_id: int = field(default_factory=os.getpid)

    def start(self, machine: _ClientMachine, done: Callable[[], None]) -> None:
        call = self._call
        if self._submit is not None:
            machine.require_open()
            call.done = lambda call: done()
            self._submit(machine.connection)
        elif call.outcome is None:
            call.done = partial(_call_both, call.done, done)
        else:
            done()

    def withdraw(self, machine: _ClientMachine) -> None:
        machine.connection.withdraw(self._call)

    def expire(self, machine: _ClientMachine) -> None:
        if self._call.outcome is None:
            self.withdraw(machine)
            self._text = timeout_message(machine, self._method.name, self._call, self.wait_timeout_s or 0.0)

    def value(self, execute: Execute) -> Any:
        if self._text:
            raise CallTimeout(self._text, self._call, self._retry or partial(self._wait_again, execute))
        outcome = self._call.outcome
        if isinstance(outcome, ClientError):
            raise outcome
        assert outcome is not None
        return self._method.value(outcome)

    def _wait_again(self, execute: Execute, timeout_s: float | None) -> Any:
        """Wait again, if the call belongs to this process. Raises ClientError."""
        require_process(self._process_id, "a call", "only there its reply comes")
        return execute(_Waiting(self._method, self._call, timeout_s, None))


def _call_both(first: Callable[[Call], None], second: Callable[[], None], call: Call) -> None:
    first(call)
    second()


def _ignore_end(call: Call) -> None:
    """Do nothing at the end of a call that nobody waits for."""


class _Calls:
    """Calls of a client. With an :class:`AsyncClient` all except ``fork`` return awaitables."""

    _shell: ThreadShell[_ClientMachine] | LoopShell[_ClientMachine]

    @property
    def client_id(self) -> str:
        return self._shell.machine.connection.client_id

    @property
    def heartbeats(self) -> int:
        return self._shell.machine.connection.heartbeats

    def call(
        self, method: Method, arguments: bytes, timeout_s: float | None, key: str | None, trace_context: str = ""
    ) -> Any:
        call = Call(method.method, arguments, _ignore_end, trace_context)
        return self._shell.execute(_Waiting(method, call, timeout_s, lambda connection: connection.submit(call, key)))

    def query(self, method: Method, arguments: bytes, timeout_s: float | None) -> Any:
        """Run a query without a log entry if the instance supports that; return its result. Raises as :meth:`call`."""
        call = Call(method.method, arguments, _ignore_end)
        again = partial(self.query, method, arguments)
        return self._shell.execute(_Waiting(method, call, timeout_s, lambda connection: connection.query(call), again))

    def fork(self, method: Method, arguments: bytes, key: str | None, trace_context: str = "") -> None:
        def submit(machine: _ClientMachine) -> None:
            machine.require_open()
            machine.connection.submit(machine.forks.call(method, arguments, trace_context), key)

        self._shell.post(submit)

    def settle(self, timeout_s: float | None) -> Any:
        return self._shell.execute(_Settling(timeout_s))

    # --- requests with a handle --------------------------------------------------------------------------------------

    def new_key(self) -> str:
        """Return a key for a call that is started without one."""
        return random_client_id()

    def start(
        self, method: Method, arguments: bytes, timeout_s: float | None, key: str, trace_context: str = ""
    ) -> Any:
        """Submit a call and wait until the instance has it. Raises ClientError."""
        call, question = Call(method.method, arguments, _ignore_end, trace_context), Question(True, _ignore_end)

        def submit(connection: Connection) -> None:
            connection.submit(call, key)
            connection.ask_status(question, key)

        return self._shell.execute(_Waiting(STATUS, question, timeout_s, submit))

    def status(self, timeout_s: float | None, key: str) -> Any:
        question = Question(False, _ignore_end)
        return self._shell.execute(
            _Waiting(STATUS, question, timeout_s, lambda connection: connection.ask_status(question, key))
        )

    def result(self, method: Method, timeout_s: float | None, key: str) -> Any:
        call = Call(method.method, b"", _ignore_end)
        return self._shell.execute(_Waiting(method, call, timeout_s, lambda connection: connection.attach(call, key)))

    def cancel(self, arguments: bytes, timeout_s: float | None, key: str) -> Any:
        call = Call(CANCEL.method, arguments, _ignore_end)
        return self._shell.execute(_Waiting(CANCEL, call, timeout_s, lambda connection: connection.cancel(call, key)))


class Client(_Calls):
    """Client of one instance for threads, open from its creation on. Raises NotConnectable.

    A forked child gets its own client at its first use."""

    def __init__(self, finder: Finder, client_id: str | None) -> None:
        self._own_id = OwnId(client_id, f"{finder.name!r}")
        self._shell: ThreadShell[_ClientMachine] = ThreadShell(
            lambda: _ClientMachine(finder, self._own_id.claim()), f"the client of {finder.name!r}"
        )

    @property
    def client_id(self) -> str:
        return self._own_id.given or super().client_id

    def settle(self, timeout_s: float | None) -> None:
        """Wait until each call that this process forked has a reply. Raises ClientError."""
        if self._shell.is_open:  # a child that has not used it has no calls
            super().settle(timeout_s)

    def close(self) -> None:
        """Close the client. Waiting calls end with ClientClosed; the instance can still do what was sent."""
        self._shell.close()


class AsyncClient(_Calls):
    """Client of one instance for the asyncio loop that runs at its creation. Raises NotConnectable."""

    def __init__(self, finder: Finder, client_id: str | None) -> None:
        self._shell: LoopShell[_ClientMachine] = LoopShell(
            lambda: _ClientMachine(finder, client_id), f"the client of {finder.name!r}"
        )

    async def close(self) -> None:
        """Close the client. Waiting calls end with ClientClosed; the instance can still do what was sent."""
        await self._shell.close()


class _Settling:
    """Wait for the replies of forked calls."""

    def __init__(self, wait_timeout_s: float | None) -> None:
        self.wait_timeout_s = wait_timeout_s
        self._forks: ForkTracker | None = None

    def start(self, machine: _ClientMachine, done: Callable[[], None]) -> None:
        self._forks = machine.forks
        self._forks.when_done(done)

    def withdraw(self, machine: _ClientMachine) -> None:
        """Do nothing: the calls are done all the same."""

    expire = withdraw

    def value(self, execute: Execute) -> None:
        assert self._forks is not None
        self._forks.check(self.wait_timeout_s)
