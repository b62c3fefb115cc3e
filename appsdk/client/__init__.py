"""Clients, which call an instance from any Python process: ``with connect("counter") as counter: counter.total()``.

`docs/how-to/clients.md`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Protocol, TypedDict, TypeVar, Unpack, overload

from immortal.appsdk.client.clients import (
    AsyncClient,
    Client,
    Handle,
    Proxy,
    handle,
    start,
    trace_context_of,
    with_key,
    with_timeout,
    with_traceparent,
)
from immortal.appsdk.client.discovery import Finder
from immortal.appsdk.client.errors import (
    CallCancelled,
    CallConflict,
    CalleeFailed,
    CallRaised,
    CallRefused,
    CallTimeout,
    ClientClosed,
    ClientError,
    NotConnectable,
    OutcomeUnknown,
    ReplyGone,
)
from immortal.appsdk.errors import UsageError
from immortal.appsdk.handlers.definition import definition_of
from immortal.protocol import executions as listed
from immortal.protocol import shared_registry
from immortal.protocol.client_frames import CLIENT_ID_SIZE_BYTES_MAX
from immortal.protocol.executions import Execution, ExecutionsError

if TYPE_CHECKING:
    from immortal.appsdk.handlers.proxy import KeyedPeers

__all__ = [
    "CallCancelled",
    "CallConflict",
    "CallRaised",
    "CallRefused",
    "CallTimeout",
    "CalleeFailed",
    "ClientClosed",
    "ClientError",
    "Connector",
    "Execution",
    "ExecutionsError",
    "Handle",
    "NotConnectable",
    "OutcomeUnknown",
    "ReplyGone",
    "connect",
    "connect_keys",
    "executions",
    "handle",
    "start",
    "with_key",
    "with_timeout",
    "with_traceparent",
]

TIMEOUT_DEFAULT_S = 30.0  # of a call: longer than a crash and recovery of a usual service takes

S = TypeVar("S")
A = TypeVar("A")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Connector(Generic[S, A]):
    """Context manager of :func:`connect`, which opens a client for a ``with`` or ``async with`` block."""

    def __init__(
        self,
        target: type | None,
        finder: Finder,
        client_id: str | None,
        timeout_s: float | None,
        trace_context: str = "",
    ) -> None:
        self._definition = None if target is None else definition_of(target)
        self._finder = finder
        self._client_id = client_id
        self._timeout_s = timeout_s
        self._trace_context = trace_context
        self._clients: list[Client] = []
        self._async_clients: list[AsyncClient] = []

    if not TYPE_CHECKING:  # which finds that itself

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(f"{name!r} is of the client: with connect(...) as client: client.{name} ...")

    def __enter__(self) -> S:
        self._clients = [Client(finder, self._client_id) for finder in self._finder.shards()]
        return self._proxy(self._clients)  # type: ignore[no-any-return]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        clients, self._clients = self._clients, []
        with ExitStack() as stack:
            for client in clients:
                stack.callback(client.close)
            for client in clients if kind is None else ():
                client.settle(self._timeout_s)

    async def __aenter__(self) -> A:
        self._async_clients = [AsyncClient(finder, self._client_id) for finder in self._finder.shards()]
        return self._proxy(self._async_clients)  # type: ignore[no-any-return]

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        clients, self._async_clients = self._async_clients, []
        async with AsyncExitStack() as stack:
            for client in clients:
                stack.push_async_callback(client.close)
            for client in clients if kind is None else ():
                await client.settle(self._timeout_s)

    def _proxy(self, shards: Sequence[Client | AsyncClient]) -> Any:
        name, context = self._finder.name, self._trace_context
        return Proxy(shards[0], self._definition, name, self._timeout_s, None, trace_context=context, shards=shards)


class ReachOptions(TypedDict, total=False):
    """Options of :func:`connect` for the place of the instance, and the keys to use. All clients take them."""

    endpoints: Sequence[str]
    home: str | os.PathLike[str] | None
    identity: str | None
    server_keys: Sequence[str]
    insecure: bool


class ConnectOptions(ReachOptions, total=False):
    """Options of :func:`connect`."""

    client_id: str | None
    timeout: float | None
    traceparent: str | None


@overload
def connect(target: str, /, **options: Unpack[ConnectOptions]) -> Connector[Any, Any]: ...
@overload
def connect(target: type[T], name: str, /, **options: Unpack[ConnectOptions]) -> Connector[T, type[T]]: ...
def connect(
    target: str | type,
    name: str | None = None,
    /,
    *,
    client_id: str | None = None,
    timeout: float | None = TIMEOUT_DEFAULT_S,
    endpoints: Sequence[str] = (),
    home: str | os.PathLike[str] | None = None,
    identity: str | None = None,
    server_keys: Sequence[str] = (),
    insecure: bool = False,
    traceparent: str | None = None,
) -> Connector[Any, Any]:
    """Connect to the instance ``name``: ``connect("counter")``, or with its class ``connect(Counter, "counter")``.

    ``with`` gives a proxy whose methods return what the handlers return, for any threads; ``async with`` one whose
    methods are awaited. With the class, arguments, results and exceptions have its types. ``counter.add.fork(1)`` does
    not wait: the end of the block waits for the replies, at most ``timeout`` seconds, and raises ClientError for calls
    that were not done.

    ``timeout``: for each call, in seconds; None: for ever. ``client_id``: a name for this client. Its requests are
    numbered from 1 each time, so that a script that is run again gets the replies of its earlier run. ``endpoints``:
    possible places of the instance, tried in turn; by default from the registry folder ``home`` (IMMORTAL_HOME,
    ./.immortal). ``identity``: whose keys there this process uses (IMMORTAL_IDENTITY). ``server_keys``: public keys
    that the instance can have, if the folder does not have them. ``insecure``: allow calls without keys to other
    machines too. ``traceparent``: of the caller's span, as in :func:`with_traceparent`.

    Raises TypeError, DefinitionError. Entering raises NotConnectable; calls raise errors of
    immortal.appsdk.client.errors.
    """
    cls, instance = (None, target) if isinstance(target, str) else (target, name)
    if not isinstance(instance, str) or (cls is None and name is not None):
        raise TypeError('connect("name") or connect(Class, "name") were expected')
    if isinstance(endpoints, str):
        raise TypeError(f"endpoints={endpoints!r}: a list of endpoints was expected")
    if (client_id is not None and not 1 <= len(client_id.encode()) <= CLIENT_ID_SIZE_BYTES_MAX) or client_id == "":
        raise TypeError(f"client_id={client_id!r}: 1 to {CLIENT_ID_SIZE_BYTES_MAX} bytes were expected")
    finder = Finder(instance, home, tuple(endpoints), tuple(server_keys), identity, insecure)
    trace_context = "" if traceparent is None else trace_context_of(traceparent)
    return Connector(cls, finder, client_id, timeout, trace_context)


if TYPE_CHECKING:

    class KeyedClient(Protocol[T_co]):
        """Type of what ``with connect_keys(...)`` gives, for type checkers."""

        def __getitem__(self, key: str | int, /) -> T_co: ...


def connect_keys(
    target: type[T], name: str, /, **options: Unpack[ConnectOptions]
) -> Connector[KeyedClient[T], KeyedPeers[T]]:
    """Connect to the keys of a keyed class: ``with connect_keys(Cart, "carts") as carts: carts["ann"].add("tea", 2)``.

    It is :func:`connect`, with other types for type checkers. The registry says which shards there are.
    """
    made: Connector[Any, Any] = connect(target, name, **options)
    return made


def executions(
    name: str,
    /,
    *,
    where: Mapping[str, object] | None = None,
    handler: str = "",
    state: str = "",
    caller: str | None = None,
    since: datetime | None = None,
    until: datetime | None = None,
    text: str = "",
    limit: int = 100,
    home: str | os.PathLike[str] | None = None,
) -> list[Execution]:
    """List executions of an instance of this machine, the newest first: ``executions("shop", where={"order": 17})``.

    The arguments are those of `immortal executions`. ``where``: labels and their values; ``state``: "waiting", "ended",
    "failed", "cancelled" or "terminated"; ``text``: part of the arguments; ``since`` and ``until``: limits of the
    beginning, aware datetimes. ``home``: the registry folder (IMMORTAL_HOME, else .immortal). The instance need not
    run. Raises ExecutionsError, UsageError.
    """
    if state not in ("", *listed.STATES):
        raise UsageError(f"executions(state={state!r}): one of {', '.join(listed.STATES)} was expected")
    for moment in (since, until):
        if moment is not None and moment.tzinfo is None:
            raise UsageError(f"executions({moment!r}): a datetime with a time zone was expected")
    query = listed.Query(
        where=[(label, str(value)) for label, value in (where or {}).items()],
        handler=handler,
        state=state,
        caller=caller,
        since_ns=None if since is None else int(since.timestamp() * 1_000_000) * 1000,
        until_ns=None if until is None else int(until.timestamp() * 1_000_000) * 1000,
        text=text,
        limit=limit,
    )
    with listed.open_index(shared_registry.folder_of(home) / name, name) as index:
        return index.find(query)
