"""Connectors to copies of a table: ``with connect("prices") as prices:``, and the same with ``async with``."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any, Generic, TypeVar, Unpack, overload

from immortal.appsdk.client import ReachOptions
from immortal.appsdk.client import connect as connect_client
from immortal.appsdk.patterns.clone import limits
from immortal.appsdk.patterns.clone.copies import AsyncClone, Clone
from immortal.appsdk.patterns.clone.frames import POLICIES, Policy
from immortal.appsdk.patterns.clone.model import check_subtrees
from immortal.appsdk.patterns.clone.replica import Options
from immortal.appsdk.patterns.clone.subscriber import Access, Places
from immortal.appsdk.patterns.clone.table import Table
from immortal.protocol.process import register

V = TypeVar("V")


class CloneConnector(Generic[V]):
    """Connector that ``connect(...)`` returns: ``with connect("prices") as prices:``, or ``async with``."""

    def __init__(self, access: Access, kind: Any, options: Options, timeout_s: float, connector: Any) -> None:
        self._access = access
        self._kind = kind
        self._options = options
        self._timeout_s = timeout_s
        self._connector = connector
        self._connecting = threading.Lock()
        self._table: Any = None
        self._clone: Clone[V] | None = None
        register(self)

    def forked_in_child(self) -> None:
        self._connecting = threading.Lock()

    def _connected(self) -> Any:
        """Connect to the table itself. A client that only reads from given publishers never needs it. Raises
        ClientError.
        """
        with self._connecting:
            if self._table is None:
                self._table = self._connector.__enter__()
            return self._table

    def __enter__(self) -> Clone[V]:
        """Return the clone, once it has a copy. Raises CloneError, ClientError."""
        try:
            places = Places(self._access, None if self._access.publishers else self._connected())
            self._clone = Clone(self._connected, self._kind, self._options, places, self._timeout_s)
            self._clone._wait_until_whole()
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self._clone

    def __exit__(self, *error: Any) -> None:
        if self._clone is not None:
            self._clone._close()
            self._clone = None
        if self._table is not None:
            self._table = None
            self._connector.__exit__(*error)

    async def __aenter__(self) -> AsyncClone[V]:
        """Return the clone, as ``with`` does."""
        return AsyncClone(await asyncio.to_thread(self.__enter__))

    async def __aexit__(self, *error: Any) -> None:
        await asyncio.to_thread(self.__exit__, *error)


class CloneOptions(ReachOptions, total=False):
    """Options of :func:`connect`."""

    subtrees: Sequence[str]
    policy: Policy
    window_bytes: int
    mark_bytes: int
    label: str
    writes: str
    timeout: float
    publishers: Sequence[str]


@overload
def connect(table: str, of: type[V], **options: Unpack[CloneOptions]) -> CloneConnector[V]: ...
@overload
def connect(table: str, **options: Unpack[CloneOptions]) -> CloneConnector[Any]: ...
def connect(
    table: str,
    of: Any = Any,
    *,
    subtrees: Sequence[str] = ("",),
    policy: Policy = "drop",
    window_bytes: int = limits.WINDOW_BYTES_DEFAULT,
    mark_bytes: int = limits.MARK_BYTES_DEFAULT,
    label: str = "",
    writes: str = "",
    timeout: float = limits.TIMEOUT_DEFAULT_S,
    publishers: Sequence[str] = (),
    **reach: Unpack[ReachOptions],
) -> CloneConnector[Any]:
    """Return a copy of the table called so, as a context manager, also for ``async with``.

    ``of``: the type of all values; they are checked as they are read. ``subtrees``: those of interest. ``policy``: when
    more than ``mark_bytes`` wait for this client beyond the ``window_bytes`` that may be on their way: "drop": changes
    are dropped, the oldest first, and the keys come again as they are then; "disconnect": it is ended; "block": writers
    wait, as long as the table allows. ``writes``: the subtree that all its changes are in, for who may write to that
    alone. ``timeout``: seconds, of a call and of the first copy. ``publishers``: endpoints to follow, in place of those
    that the table names; ``endpoints=[]`` and the rest are of :func:`immortal.appsdk.client.connect`.

    Raises TypeError, ValueError.
    """
    if policy not in POLICIES:
        raise ValueError(f"policy {policy!r}: {', '.join(map(repr, POLICIES))} were expected")
    if isinstance(publishers, str):
        raise ValueError(f"publishers={publishers!r}: a list was expected, such as [{publishers!r}]")
    if writes:
        check_subtrees([writes])
    options = Options(check_subtrees(subtrees), window_bytes, mark_bytes, policy, label, writes=writes)
    access = Access(table, reach, publishers, blocks=policy == "block")
    return CloneConnector(access, of, options, timeout, connect_client(Table, table, timeout=timeout, **reach))
