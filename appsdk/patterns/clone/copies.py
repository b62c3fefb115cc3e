"""Copies of a table: Clone and AsyncClone, each a mapping with its changes one by one, and writes to the table."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, Unpack, overload

import zmq

from immortal.appsdk.calls.codec import ValueDecoder, encode_value
from immortal.appsdk.client import ClientClosed, ReachOptions, with_timeout
from immortal.appsdk.client import connect as connect_client
from immortal.appsdk.client.shells import ThreadShell, require_process
from immortal.appsdk.patterns.clone.frames import POLICIES, Policy
from immortal.appsdk.patterns.clone.model import (
    BEAT_S,
    MARK_BYTES_DEFAULT,
    WINDOW_BYTES_DEFAULT,
    Change,
    CloneError,
    Ended,
    NotEntitled,
    check_change,
    check_subtrees,
    covers,
)
from immortal.appsdk.patterns.clone.subscriber import Access, Counts, Options, Places, Replica, RowChange, Subscriber
from immortal.appsdk.patterns.clone.table import Table
from immortal.protocol.process import register

TIMEOUT_DEFAULT_S = 30.0  # as in immortal.appsdk.client
PART_S = 0.5  # for the publisher's acknowledgement of the end
CHANGES_WAITING_MAX = 10_000  # that wait for a reader of changes(); above it the copy stops receiving

_FORKED = "what waits for a clone's changes", "ask the clone for them here: clone.changes()"

V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Changed(Generic[V]):
    """Change of one key. ``value``: None if the key is gone. ``number``: of the update, the same for all clients."""

    key: str
    value: V | None
    number: int
    is_gone: bool = False


class _Changes(Generic[V]):
    def __init__(self, clone: Clone[V], timeout_s: float | None) -> None:
        self._clone = clone
        self._timeout_s = timeout_s
        self._process_id = os.getpid()
        self._waiting: deque[RowChange] = deque()
        clone._add_listener(self)

    def _wake(self) -> None:
        """Note that changes have arrived, or none follow. The clone's thread calls it."""

    def close(self) -> None:
        """Stop keeping changes for this iterator."""
        self._clone._remove_listener(self)


class Changes(_Changes[V]):
    """Iterator over the changes since its creation. A reader that is too slow holds up the whole copy."""

    def __iter__(self) -> Iterator[Changed[V]]:
        return self

    def __next__(self) -> Changed[V]:
        """Wait for the next change. Raises StopIteration after ``timeout`` seconds without one, or when the clone is
        closed; Ended.

        Raises msgspec.ValidationError for a value of another type; the next call continues after it.
        """
        require_process(self._process_id, *_FORKED)
        clone, waiting = self._clone, self._waiting
        with clone._shell.processed:
            if not waiting and not clone._is_over:
                clone._shell.processed.wait_for(lambda: bool(waiting) or clone._is_over, self._timeout_s)
            change = clone._next_change(waiting)
        if change is None:
            raise StopIteration
        return clone._decoded(change)

    def __enter__(self) -> Changes[V]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Follower:
    """Machine of a clone: the copy, its connection to a publisher, and the listeners to its changes."""

    def __init__(self, options: Options, places: Places) -> None:
        self.replica = Replica(options)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        now_s = time.monotonic()
        self.subscriber = Subscriber(self._context, self.replica, places.find, places.access.finder, now_s)
        self.was_whole = False  # True after the first copy
        self.is_held = False  # True while clients hold up writers
        self.listeners: list[_Changes[Any]] = []
        self._has_more = False

    @property
    def _has_room(self) -> bool:
        return max((len(one._waiting) for one in self.listeners), default=0) < CHANGES_WAITING_MAX

    def process(self) -> None:
        news = self.subscriber.process(time.monotonic(), _NEWS_MAX if self._has_room else 0)
        self._has_more = len(news) >= _NEWS_MAX
        for listener in self.listeners:
            for one in news:
                listener._waiting.extend(one.changes)
        if news or self.replica.ended:
            self._wake()

    def _wake(self) -> None:
        for listener in self.listeners:
            listener._wake()

    def sockets(self) -> Sequence[zmq.Socket[bytes]]:
        return self.subscriber.sockets() if self._has_room else ()

    def next_deadline_s(self) -> float:
        now_s = time.monotonic()
        if self._has_more:
            return now_s
        due_s = self.subscriber.next_deadline_s() if not self.replica.ended else now_s + 1.0
        return min(due_s, now_s + BEAT_S)

    def close(self) -> None:
        self.subscriber.close()
        self._context.term()
        self._wake()


_NEWS_MAX = 100  # in one turn


class _Copy(Mapping[str, V]):
    """Read-only part of a table's copy. ``timeout_s``: to wait for the first copy."""

    def __init__(self, shell: ThreadShell[_Follower], kind: Any, timeout_s: float) -> None:
        self._shell = shell
        self._kind = kind
        self._decode = ValueDecoder(kind).decode
        self._timeout_s = timeout_s

    @property
    def _follower(self) -> _Follower:
        """Follower of this process, once it has a copy; a forked child creates its own at the first use. Raises
        ClientClosed, CloneError.
        """
        follower = self._shell.machine
        if not follower.was_whole:
            self._wait_until_whole(follower)
        return follower

    @property
    def _replica(self) -> Replica:
        return self._follower.replica

    @property
    def _subscriber(self) -> Subscriber:
        return self._follower.subscriber

    def _wait_until_whole(self, follower: _Follower | None = None) -> None:
        """Wait for the first whole copy. Raises CloneError."""
        follower = follower or self._shell.machine
        processed = self._shell.processed
        with processed:
            processed.wait_for(lambda: follower.replica.is_whole or self._is_over, self._timeout_s)
            if self._is_over:
                self._raise()
            if not follower.replica.is_whole:
                raise CloneError(f"there is no copy after {self._timeout_s:g} s: {follower.subscriber.problem}")
            follower.was_whole = True

    @property
    def _is_over(self) -> bool:
        return self._shell.closing or bool(self._shell.machine.replica.ended)

    def _raise(self) -> None:
        error, ended = self._shell.error, self._shell.machine.replica.ended
        if error is not None:
            raise CloneError(f"the copy can't be followed: {type(error).__name__}: {error}") from error
        if ended:
            is_right = "may see nothing" in ended or "no forwarder" in ended
            raise (NotEntitled if is_right else Ended)(ended)
        raise ClientClosed("the clone is closed")

    def __getitem__(self, key: str) -> V:
        value: V = self._decode(self._replica.values[key])
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._replica.values))

    def __len__(self) -> int:
        return len(self._replica.values)

    def __contains__(self, key: object) -> bool:
        return key in self._replica.values

    def __repr__(self) -> str:
        return f"<clone at update {self.number}: {len(self)} keys{f'; {self.problem}' if self.problem else ''}>"

    @property
    def number(self) -> int:
        return self._replica.number

    @property
    def subtrees(self) -> tuple[str, ...]:
        """Subtrees in the copy, a part of the requested ones; () while it has no stream."""
        return self._replica.subtrees or ()

    @property
    def counts(self) -> Counts:
        """Counters of irregular events: holes, whole copies, resumed streams, dropped changes."""
        return self._replica.counts

    @property
    def problem(self) -> str:
        """Reason for missing updates; "" if there is none."""
        if self._replica.subtrees is not None:
            return ""
        return self._replica.ended or self._subscriber.problem

    @property
    def endpoint(self) -> str:
        """Endpoint of the publisher that the copy follows; "" if there is none."""
        return self._subscriber.endpoint

    def snapshot(self) -> tuple[int, dict[str, V]]:
        """Return the number of the last update in the copy, and all values at that number."""
        replica = self._replica
        with self._shell.lock:
            number, values = replica.number, dict(replica.values)
        return number, {key: self._decode(value) for key, value in values.items()}


class Clone(_Copy[V]):
    """Copy of a table, from :func:`immortal.appsdk.patterns.clone.connect`. Any thread can use it.

    Reads need no message: they return what has arrived. ``number``: of the last update in the copy.
    """

    def __init__(self, table: Callable[[], Any], kind: Any, options: Options, places: Places, timeout_s: float) -> None:
        super().__init__(ThreadShell(lambda: _Follower(options, places), "the clone"), kind, timeout_s)
        self._table = table  # connects to the table at the first call
        self._options = options

    def wait(self, number: int, timeout: float | None = None) -> None:
        """Wait until update ``number`` is in the copy. Raises TimeoutError, Ended."""
        timeout_s = self._timeout_s if timeout is None else timeout
        replica = self._replica
        with self._shell.processed:
            if not self._shell.processed.wait_for(lambda: replica.number >= number or self._is_over, timeout_s):
                raise TimeoutError(f"update {number} has not come within {timeout_s:g} s: {self!r}")
            if replica.number < number:
                self._raise()

    def changes(self, timeout: float | None = None) -> Changes[V]:
        """Return an iterator over the changes from now on, in the order that all clients see.

        ``timeout``: seconds without a change after which it ends; None: no limit.
        """
        return Changes(self, timeout)

    # --- writing -----------------------------------------------------------------------------------------------------

    def put(self, key: str, value: V, *, ttl: float = 0.0, wait: bool = True) -> int:
        """Set ``key`` and return the update's number; it is durable when this returns. ``ttl``: seconds after which the
        key is deleted.

        ``wait``: until the change is in this copy, if the copy has that key. Raises ValueError, TypeError, TableFull,
        ClientError.
        """
        return self._write([_change(key, value, ttl)], wait=wait)

    def delete(self, key: str, *, wait: bool = True) -> int:
        """Delete ``key``, even if it does not exist, and return the update's number. Options as in :meth:`put`."""
        return self._write([_change(key, None, 0.0, is_deleted=True)], wait=wait)

    def update(self, values: Mapping[str, V], *, ttl: float = 0.0, wait: bool = True) -> int:
        """Set all keys of ``values`` or none, and return the last update's number. Options as in :meth:`put`."""
        return self._write([_change(key, value, ttl) for key, value in values.items()], wait=wait)

    def _write(self, changes: list[Change], *, wait: bool) -> int:
        table, follower = self._table(), self._follower
        while follower.is_held:  # a client that may block holds up writers
            follower.is_held = not with_timeout(table, None).room()
        below = self._options.writes
        written = table.update_below(below, changes) if below else table.update(changes)
        follower.is_held = not written.has_room
        number: int = written.number
        if wait and any(covers(subtree, change.key) for subtree in self.subtrees for change in changes):
            self.wait(number)
        return number

    # --- changes -----------------------------------------------------------------------------------------------------

    def _next_change(self, waiting: deque[RowChange]) -> RowChange | None:
        """Take the next change; None if there is none. Raises Ended when no more can follow. The caller must hold the
        lock.
        """
        if waiting:
            change = waiting.popleft()
            if len(waiting) == CHANGES_WAITING_MAX // 2:
                self._shell.wake()
            return change
        if self._shell.error is not None or (self._is_over and not self._shell.closing):
            self._raise()
        return None

    def _decoded(self, change: RowChange) -> Changed[V]:
        key, number, value = change
        return Changed(key, None if value is None else self._decode(value), number, value is None)

    def _add_listener(self, changes: _Changes[V]) -> None:
        follower = self._follower
        with self._shell.lock:
            follower.listeners.append(changes)

    def _remove_listener(self, changes: _Changes[V]) -> None:
        def forget(follower: _Follower) -> None:
            follower.listeners = [other for other in follower.listeners if other is not changes]

        if self._shell.is_open:  # a forked child that has not used it has no thread
            self._shell.post(forget)

    # --- the end -----------------------------------------------------------------------------------------------------

    def _close(self) -> None:
        """End the stream, and wait at most PART_S for the publisher's acknowledgement."""
        shell = self._shell
        if shell.is_open:
            follower = shell.machine
            with shell.processed:
                if not (shell.closing or follower.replica.ended):
                    follower.subscriber.deactivate()
                    shell.wake()
                    shell.processed.wait_for(lambda: follower.subscriber.has_ended or self._is_over, PART_S)
        shell.close()


def _change(key: str, value: Any, ttl: float, *, is_deleted: bool = False) -> Change:
    """Return a change of a key, with its value encoded. Raises ValueError, TypeError."""
    try:
        encoded = None if is_deleted else encode_value(value)
    except Exception as error:  # raised by a user's type in its encoding
        raise TypeError(f"key {key!r}: the value can't be encoded: {error}") from error
    change = Change(key, encoded, float(ttl))
    check_change(change)
    return change


# The same for asyncio. The clone's thread follows the table; all waiting here is by ``await``.


class AsyncChanges(_Changes[V]):
    """Changes for asyncio: ``async for change in prices.changes():``. Like
    :class:`~immortal.appsdk.patterns.clone.copies.Changes`.
    """

    def __init__(self, clone: Clone[V], timeout_s: float | None) -> None:
        self._arrived = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        super().__init__(clone, timeout_s)

    def _wake(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._arrived.set)

    def __aiter__(self) -> AsyncIterator[Changed[V]]:
        return self

    async def __anext__(self) -> Changed[V]:
        require_process(self._process_id, *_FORKED)
        while True:
            self._arrived.clear()
            with self._clone._shell.lock:
                change = self._clone._next_change(self._waiting)
                is_over = self._clone._is_over
            if change is not None:
                return self._clone._decoded(change)
            if is_over:
                raise StopAsyncIteration
            try:
                await asyncio.wait_for(self._arrived.wait(), self._timeout_s)
            except TimeoutError:
                raise StopAsyncIteration from None


class AsyncClone(_Copy[V]):
    """Copy of a table for asyncio, like :class:`~immortal.appsdk.patterns.clone.copies.Clone`. Reads are local and
    not awaited.
    """

    def __init__(self, clone: Clone[V]) -> None:
        super().__init__(clone._shell, clone._kind, clone._timeout_s)
        self._clone = clone

    def changes(self, timeout: float | None = None) -> AsyncChanges[V]:
        """Return an iterator over the changes from now on; see Clone."""
        return AsyncChanges(self._clone, timeout)

    async def wait(self, number: int, timeout: float | None = None) -> None:
        """Wait until update ``number`` is in the copy; see Clone."""
        await asyncio.to_thread(self._clone.wait, number, timeout)

    async def put(self, key: str, value: V, *, ttl: float = 0.0, wait: bool = True) -> int:
        """Set a key; see Clone."""
        return await asyncio.to_thread(self._clone.put, key, value, ttl=ttl, wait=wait)

    async def delete(self, key: str, *, wait: bool = True) -> int:
        """Delete a key; see Clone."""
        return await asyncio.to_thread(self._clone.delete, key, wait=wait)

    async def update(self, values: Mapping[str, V], *, ttl: float = 0.0, wait: bool = True) -> int:
        """Set several keys; see Clone."""
        return await asyncio.to_thread(self._clone.update, values, ttl=ttl, wait=wait)


# Connectors to copies: ``with connect("prices") as prices:``, and the same with ``async with``.


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
        """Connect to the table itself, unless connected. A client that only reads from given publishers never needs it.
        Raises ClientError.
        """
        with self._connecting:
            if self._table is None:
                self._table = self._connector.__enter__()
            return self._table

    def __enter__(self) -> Clone[V]:
        """Return the clone after its first copy has arrived. Raises CloneError, ClientError."""
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
        """Return the clone, like ``with``."""
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
    window_bytes: int = WINDOW_BYTES_DEFAULT,
    mark_bytes: int = MARK_BYTES_DEFAULT,
    label: str = "",
    writes: str = "",
    timeout: float = TIMEOUT_DEFAULT_S,
    publishers: Sequence[str] = (),
    **reach: Unpack[ReachOptions],
) -> CloneConnector[Any]:
    """Return a connector to a copy of the named table, for ``with`` or ``async with``.

    ``of``: the type of all values; reads check it. ``subtrees``: those to copy. ``policy``: what happens if more than
    ``mark_bytes`` wait for this client beyond the ``window_bytes`` in flight: "drop": the oldest changes are dropped,
    and their keys are sent later with their values of then; "disconnect": the stream ends; "block": writers
    wait, as long as the table allows. ``writes``: the subtree of all its changes, for a client that may write only
    there. ``timeout``: seconds, of a call and of the first copy. ``publishers``: endpoints to follow, instead of those
    that the table names; ``endpoints=[]`` and the rest as in :func:`immortal.appsdk.client.connect`.

    Raises TypeError, ValueError.
    """
    if policy not in POLICIES:
        raise ValueError(f"policy {policy!r}: {', '.join(map(repr, POLICIES))} were expected")
    if isinstance(publishers, str):
        raise ValueError(f"publishers={publishers!r}: a list was expected, such as [{publishers!r}]")
    if writes:
        check_subtrees([writes])
    options = Options(check_subtrees(subtrees), window_bytes, mark_bytes, policy, label, writes=writes)
    access = Access(table, reach, publishers, prefers_blocking=policy == "block")
    return CloneConnector(access, of, options, timeout, connect_client(Table, table, timeout=timeout, **reach))
