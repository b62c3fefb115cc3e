"""Clients of a pool of plain servers or of instances, for threads and for asyncio."""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine, Mapping, Sequence
from enum import Enum
from typing import Any, Generic, TypedDict, TypeVar, Unpack, overload

import zmq

from immortal.appsdk.client.clients import KEY_SIZE_BYTES_MAX, Proxy
from immortal.appsdk.client.connection import random_client_id
from immortal.appsdk.client.discovery import Finder, home_of, is_local
from immortal.appsdk.client.errors import NotConnectable
from immortal.appsdk.client.methods import Method, TypedMethod
from immortal.appsdk.client.shells import LoopShell, OwnId, ThreadShell
from immortal.appsdk.handlers.definition import definition_of
from immortal.appsdk.patterns.pirate.driver import (
    REQUEST_KEY,
    Context,
    Driver,
    InstanceCall,
    InstanceLink,
    Link,
    Pending,
    PlainLink,
    instances,
)
from immortal.appsdk.patterns.pirate.frames import BODY_SIZE_BYTES_MAX, CLIENT_ID_SIZE_BYTES_MAX, NUMBER_MAX
from immortal.appsdk.patterns.pirate.pool import Policy

TIMEOUT_DEFAULT_S = 30.0  # of a request with all its tries: longer than a server's restart

S = TypeVar("S")
A = TypeVar("A")
T = TypeVar("T")
MakeDriver = Callable[[], Driver]
Shell = ThreadShell[Driver] | LoopShell[Driver]


class _Timeout(Enum):
    OF_POOL = "that of connect(...)"


# --- plain servers ----------------------------------------------------------------------------------------------------


class _Pool:
    """Pool in its shell. ``timeout_s``: of a request without its own timeout."""

    def __init__(self, shell: Shell, timeout_s: float | None = None) -> None:
        self._shell = shell
        self._timeout_s = timeout_s

    @property
    def client_id(self) -> str:
        return self._shell.machine.client_id

    @property
    def servers(self) -> Mapping[str, str]:
        """State of each server, by endpoint or name: "live", "dead" or "removed"."""
        driver = self._shell.machine
        with self._shell.lock:
            return {name: state.value for name, state in driver.servers.items()}

    def _request(self, body: bytes, timeout: float | _Timeout | None) -> Any:
        timeout_s = self._timeout_s if timeout is _Timeout.OF_POOL else timeout
        return self._shell.execute(Pending(_checked(body), timeout_s))


class Requests(_Pool):
    """Client of a pool of plain servers; any thread may use it."""

    def request(self, body: bytes, *, timeout: float | _Timeout | None = _Timeout.OF_POOL) -> bytes:
        """Send a request and return the result of a server's function, within ``timeout`` seconds (None: no limit).

        Raises TypeError, CalleeFailed if the function raised, GaveUp, CallRefused, OutcomeUnknown, ClientClosed,
        TooManyRequests.
        """
        reply: bytes = self._request(body, timeout)
        return reply


class AsyncRequests(_Pool):
    """Client of a pool of plain servers for asyncio: ``await pool.request(b"...")``."""

    async def request(self, body: bytes, *, timeout: float | _Timeout | None = _Timeout.OF_POOL) -> bytes:
        """Send a request; see :meth:`Requests.request`."""
        reply: bytes = await self._request(body, timeout)
        return reply


def _checked(body: bytes) -> bytes:
    if not isinstance(body, bytes) or len(body) > BODY_SIZE_BYTES_MAX:
        what = f"{len(body)} bytes" if isinstance(body, bytes) else type(body).__name__
        raise TypeError(f"a request of {what}: at most {BODY_SIZE_BYTES_MAX} bytes were expected")
    return body


class _Connector(Generic[S, A]):
    """Base of connectors, for one ``with`` or ``async with`` block. ``client_of``: makes what the block gets."""

    def __init__(self, create_driver: MakeDriver, client_of: Callable[[Shell], Any]) -> None:
        self._create_driver = create_driver
        self._client_of = client_of
        self._shell: Any = None

    def __enter__(self) -> S:
        self._shell = ThreadShell(self._create_driver, "the pool", sends_at_once=True)
        client: S = self._client_of(self._shell)
        return client

    async def __aenter__(self) -> A:
        self._shell = LoopShell(self._create_driver, "the pool")
        client: A = self._client_of(self._shell)
        return client

    def __exit__(self, *error: Any) -> None:
        self._shell.close()

    async def __aexit__(self, *error: Any) -> None:
        await self._shell.close()


class PoolConnector(_Connector[Requests, AsyncRequests]):
    """Connector that ``connect(...)`` returns, for one ``with`` or ``async with`` block."""


def connect(
    servers: Sequence[str],
    *,
    client_id: str | None = None,
    timeout: float | None = TIMEOUT_DEFAULT_S,
    policy: Policy | None = None,
    server: str = "",
    server_keys: Sequence[str] = (),
    identity: str | None = None,
    home: str | os.PathLike[str] | None = None,
    insecure: bool = False,
) -> PoolConnector:
    """Connect to the plain servers at the endpoints ``servers``: ``with connect(["tcp://127.0.0.1:5701"]) as pool``.

    ``timeout``: of each request with all its tries, in seconds; None: no limit. ``client_id``: a name for this client,
    whose requests are numbered from 1 each time, so that a script that runs again gets the replies to its earlier
    requests. ``server``: the name whose public keys in the registry folder ``home`` the servers show; ``server_keys``:
    the keys themselves; ``identity``: the name whose keys this client shows. ``insecure``: allow servers without keys
    on other machines. Raises TypeError, NotConnectable; so does entering the block.
    """
    names = _names(servers, "endpoints")
    _check_client_id(client_id)
    for endpoint in names:
        if not (is_local(endpoint) or server or server_keys or insecure):
            raise NotConnectable(
                f"{endpoint} is not on this machine: say whose keys it has, with server=NAME or server_keys=[...] "
                f"(insecure=True calls in plain)"
            )
    ids = OwnId(client_id, "a pool")

    def create_driver() -> Driver:
        own_id = ids.claim() or random_client_id()
        context: Context = zmq.Context()

        def link(endpoint: str) -> Link:
            finder = Finder(server, home, (endpoint,), tuple(server_keys), identity, insecure)
            return PlainLink(context, finder, own_id)

        return Driver(
            lambda: names, link, policy or Policy(), own_id, keeps_replies=client_id is not None, end=context.term
        )

    return PoolConnector(
        create_driver, lambda shell: (Requests if isinstance(shell, ThreadShell) else AsyncRequests)(shell, timeout)
    )


def _names(given: Sequence[str], parameter: str) -> tuple[str, ...]:
    if isinstance(given, str) or not given or not all(isinstance(one, str) for one in given):
        raise TypeError(f"{given!r}: a list of {parameter} was expected, with one at least")
    return tuple(dict.fromkeys(given))


def _check_client_id(client_id: str | None, size_bytes_max: int = CLIENT_ID_SIZE_BYTES_MAX) -> None:
    if client_id is not None and not 1 <= len(client_id.encode()) <= size_bytes_max:
        raise TypeError(f"client_id={client_id!r}: 1 to {size_bytes_max} bytes were expected")


# --- instances --------------------------------------------------------------------------------------------------------

_INSTANCE_CLIENT_ID_MAX = KEY_SIZE_BYTES_MAX - len(REQUEST_KEY.format(client_id="", number=NUMBER_MAX))


class InstanceCalls(_Pool):
    """Client behind a proxy that sends each call to one of several instances."""

    def __init__(self, shell: Shell, *, idempotent: bool) -> None:
        super().__init__(shell)
        self._idempotent = idempotent

    def call(
        self, method: Method, arguments: bytes, timeout_s: float | None, key: str | None, trace_context: str = ""
    ) -> Any:
        """Call the method and return its result, or an awaitable of the result. Raises the handler's exception, and
        ClientError.
        """
        if trace_context:
            raise TypeError(f"{method.name}: a pool's requests carry no traceparent; those of connect(NAME) do")
        idempotent = self._idempotent or (isinstance(method, TypedMethod) and method.is_query)
        return self._shell.execute(Pending(InstanceCall(method, arguments, key), timeout_s, idempotent=idempotent))

    def fork(self, method: Method, arguments: bytes, key: str | None, trace_context: str = "") -> None:
        raise TypeError(f"{method.name}.fork: calls to a pool wait for their replies; connect(NAME) has forks")

    def new_key(self) -> str:
        """Return a key for a call that is started without one."""
        return random_client_id()

    def start(
        self, method: Method, arguments: bytes, timeout_s: float | None, key: str, trace_context: str = ""
    ) -> Coroutine[Any, Any, None]:
        raise TypeError(f"start({method.name}): a handle is of one instance; connect(NAME) has handles")


class InstancesConnector(_Connector[S, A]):
    """Connector that ``connect_instances(...)`` returns, for one ``with`` or ``async with`` block."""


class InstancesOptions(TypedDict, total=False):
    """Options of :func:`connect_instances`."""

    idempotent: bool
    client_id: str | None
    timeout: float | None
    policy: Policy | None
    identity: str | None
    home: str | os.PathLike[str] | None
    insecure: bool


@overload
def connect_instances(
    target: str | Sequence[str], /, **options: Unpack[InstancesOptions]
) -> InstancesConnector[Any, Any]: ...
@overload
def connect_instances(
    target: type[T], names: str | Sequence[str], /, **options: Unpack[InstancesOptions]
) -> InstancesConnector[T, type[T]]: ...
def connect_instances(
    target: Any,
    names: Any = None,
    /,
    *,
    idempotent: bool = False,
    client_id: str | None = None,
    timeout: float | None = TIMEOUT_DEFAULT_S,
    policy: Policy | None = None,
    identity: str | None = None,
    home: str | os.PathLike[str] | None = None,
    insecure: bool = False,
) -> InstancesConnector[Any, Any]:
    """Connect to several instances, one of which gets each call: ``connect_instances(Bank, ["bank-1", "bank-2"])``, or
    ``"bank-*"``.

    They are found in the registry folder ``home``; a pattern is matched again every two seconds. A call that an
    instance may have begun stays with it, so each is done once; queries, and with ``idempotent`` all calls, can move to
    the next instance. ``client_id``, ``timeout``, ``identity``, ``insecure``: as for immortal.appsdk.client.connect.

    Raises TypeError, DefinitionError; entering the block raises NotConnectable.
    """
    cls, given = (target, names) if isinstance(target, type) else (None, target)
    if given is None or (cls is None and names is not None):
        raise TypeError('connect_instances("bank-*") or connect_instances(Class, ["bank-1", ...]) were expected')
    _check_client_id(client_id, _INSTANCE_CLIENT_ID_MAX)
    ids = OwnId(client_id, "a pool")
    folder = home_of(home)
    fixed = None if isinstance(given, str) else _names(given, "names")
    definition = None if cls is None else definition_of(cls)

    def find() -> Sequence[str]:
        return list(instances(folder, given)) if fixed is None else fixed

    def create_driver() -> Driver:
        if not find():
            raise NotConnectable(f"no instance in {folder} fits {given!r}: 'immortal register NAME' makes one")
        own_id = ids.claim() or random_client_id()
        return Driver(
            find,
            lambda name: InstanceLink(Finder(name, home, (), (), identity, insecure), own_id),
            policy or Policy(),
            own_id,
            keeps_replies=True,  # an instance keeps replies by its own rules for keys
            polls_servers=fixed is None,
        )

    def proxy(shell: Shell) -> Any:
        calls: Any = InstanceCalls(shell, idempotent=idempotent)
        return Proxy(calls, definition, str(given), timeout, None)

    return InstancesConnector(create_driver, proxy)
