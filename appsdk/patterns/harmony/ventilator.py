"""Ventilator of a cluster: sends batches, and reads their progress and results, from any process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import islice
from typing import Any, Unpack

from immortal.appsdk.calls.codec import encode_value
from immortal.appsdk.client import TIMEOUT_DEFAULT_S, Connector, ReachOptions
from immortal.appsdk.client import connect as connect_to
from immortal.appsdk.patterns.harmony.batch import (
    FLUSH_S,
    RUN_SIZE_BYTES_MAX,
    RUN_TASKS_MAX,
    TASK_SIZE_BYTES_MAX,
    Progress,
    Result,
    array,
    results,
)
from immortal.appsdk.patterns.harmony.cluster import Begun, Cluster
from immortal.appsdk.patterns.harmony.collector import Collector
from immortal.protocol.identity import EMPTY_DIGEST, chained_digest

_PROGRESS_S = 1.0  # between two progress reports
_NO_TASKS = array([])


class Ventilator:
    """Client of a cluster, from ``with connect("cluster") as cluster``; for one thread."""

    def __init__(self, cluster: Cluster, connector: Callable[[str], Any]) -> None:
        self._cluster = cluster
        self._connector = connector

    def batch(self, name: str, function: str, *, collector: str, again: bool = False) -> Batch:
        """Begin a new batch, or return to the one of that name.

        ``function``: its name at the workers; ``collector``: the instance that gets the results. ``again``: begin a new
        batch if one of that name has ended; its results replace the earlier ones. Raises BatchConflict if the name is
        that of a batch with another function or collector, BatchError, ClientError.
        """
        begun = self._cluster.begin(name, function, collector, again)
        return Batch(self._cluster, self._connector, name, collector, begun)

    def progress(self, name: str) -> Progress:
        """Return the progress of a batch. Raises BatchError, ClientError."""
        return self._cluster.progress(name)

    def batches(self) -> list[str]:
        """Return the names of the batches that the cluster knows, the open ones last. Raises ClientError."""
        return self._cluster.batches()


class Batch:
    """Batch of this ventilator. ``name``: unique among the batches of a collector."""

    def __init__(
        self, cluster: Cluster, connector: Callable[[str], Any], name: str, collector: str, begun: Begun
    ) -> None:
        self.name = name
        self.collector = collector
        self._cluster = cluster
        self._connector = connector
        self._life = begun.life
        self._first = begun.next  # number of the first task in ``_tasks``, those that are not sent yet
        self._tasks: list[bytes] = []
        self._size_bytes = 0
        # Digests of the tasks before the first one, and of all so far; empty: unknown here.
        self._digest_before = self._digest = EMPTY_DIGEST if begun.next == 0 else b""
        self._flushed_s = time.monotonic()

    @property
    def sent(self) -> int:
        """Number of tasks so far, which is the number of the next one."""
        return self._first + len(self._tasks)

    def send(self, tasks: Iterable[Any], *, report: Callable[[Progress], object] | None = None) -> None:
        """Send all tasks of the batch, and its end. They are not held in memory: each is taken when it can be sent.

        After a crash of this process give the same tasks again, from the first on: tasks that the cluster has are
        compared by their digest and not sent. ``report``: called about once a second; ``print`` prints a line.

        Raises BatchConflict if the tasks differ, TypeError, ValueError, BatchError, ClientError.
        """
        reported_s = time.monotonic()
        rest = iter(tasks)
        if self.sent:  # compare the tasks that were sent before
            self.flush()
            digest = digest_of(islice(rest, self.sent))
            self._cluster.put(self.name, self.sent, _NO_TASKS, digest, digest, self._life)
            self._digest_before = self._digest = digest
        for task in rest:
            self.put(task)
            if report is not None and time.monotonic() - reported_s >= _PROGRESS_S:
                report(self.progress())
                reported_s = time.monotonic()
        self.end()

    def put(self, task: Any) -> None:
        """Add the next task. It is sent with others, or after FLUSH_S with the next one; this waits while the cluster
        is full. Raises TypeError, ValueError for a task that can't be sent.
        """
        encoded = _encoded(task, self.sent)
        if len(encoded) > TASK_SIZE_BYTES_MAX - RUN_SIZE_BYTES_MAX:
            raise ValueError(
                f"task {self.sent} has {len(encoded)} bytes, at most {TASK_SIZE_BYTES_MAX - RUN_SIZE_BYTES_MAX} were "
                f"expected: send where it is instead"
            )
        self._tasks.append(encoded)
        if self._digest:
            self._digest = chained_digest(self._digest, (encoded,))
        self._size_bytes += len(encoded)
        is_full = len(self._tasks) >= RUN_TASKS_MAX or self._size_bytes >= RUN_SIZE_BYTES_MAX
        if is_full or time.monotonic() - self._flushed_s >= FLUSH_S:
            self.flush()

    def flush(self) -> None:
        """Send all tasks so far; when this returns, they are durable at the cluster."""
        if self._tasks and not self._cluster.put(
            self.name, self._first, array(self._tasks), self._digest_before, self._digest, self._life
        ):
            while not self._cluster.room(self.name):
                pass  # ``room`` itself waits
        self._first, self._digest_before = self.sent, self._digest
        self._tasks, self._size_bytes = [], 0
        self._flushed_s = time.monotonic()

    def end(self) -> None:
        """End the batch: no more tasks follow."""
        self.flush()
        self._cluster.end(self.name, self.sent, self._digest, self._life)

    def progress(self) -> Progress:
        """Return this batch's progress at the cluster. Raises ClientError."""
        return self._cluster.progress(self.name)

    def results(self, first: int = 0, *, timeout: float | None = None) -> Iterator[Result]:
        """Yield one result for each task from number ``first`` on, in order of number, until the last.

        The batch's collector must be a :class:`Collector`. ``timeout``: seconds without a result after which it raises
        TimeoutError; None: no limit. Raises BatchError, ClientError.
        """
        with self._connector(self.collector) as collector:
            came_s = time.monotonic()
            while True:
                page = collector.page(self.name, first, self._life)
                if page is not None:
                    yield from results(page)
                    if not page.count:
                        return
                    first += page.count
                    came_s = time.monotonic()
                    continue
                if timeout is not None and time.monotonic() - came_s >= timeout:
                    raise TimeoutError(
                        f"batch {self.name!r}: no result {first} within {timeout:g} s: {self.progress()}"
                    )
                collector.watch(self.name, first, self._life)

    def wait(self, *, timeout: float | None = None, report: Callable[[Progress], object] | None = None) -> Progress:
        """Wait until the cluster has a result of each task. Raises TimeoutError, ClientError.

        ``timeout``: in seconds; None: no limit. ``report``: see :meth:`send`.
        """
        began_s = reported_s = time.monotonic()
        pause_s = 0.05
        while True:
            progress = self.progress()
            now_s = time.monotonic()
            if progress.is_complete:
                if report is not None:
                    report(progress)
                return progress
            if timeout is not None and now_s - began_s >= timeout:
                raise TimeoutError(f"not complete after {timeout:g} s: {progress}")
            if report is not None and now_s - reported_s >= _PROGRESS_S:
                report(progress)
                reported_s = now_s
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _PROGRESS_S)


@contextmanager
def _connected(client: Connector[Cluster, Any], collector: Callable[[str], Any]) -> Iterator[Ventilator]:
    with client as cluster:
        yield Ventilator(cluster, collector)


def connect(
    cluster: str,
    *,
    timeout: float | None = TIMEOUT_DEFAULT_S,
    **options: Unpack[ReachOptions],
) -> AbstractContextManager[Ventilator]:
    """Connect to a cluster to send batches: ``with connect("cluster") as cluster: cluster.batch(...).send(tasks)``.

    ``timeout``: of each message, in seconds; None: no limit. The rest as in :func:`immortal.client.connect`; collectors
    are found in ``home``. Raises TypeError; entering the block raises NotConnectable.
    """
    if not isinstance(cluster, str):
        raise TypeError(f"connect({cluster!r}): the name of a cluster was expected")
    client = connect_to(Cluster, cluster, timeout=timeout, **options)
    of_collectors: ReachOptions = {**options, "endpoints": (), "server_keys": ()}
    return _connected(client, lambda name: connect_to(Collector, name, timeout=timeout, **of_collectors))


def digest_of(tasks: Iterable[Any]) -> bytes:
    """Return the digest of a batch's first tasks. Raises TypeError."""
    return chained_digest(EMPTY_DIGEST, (_encoded(task, number) for number, task in enumerate(tasks)))


def _encoded(task: Any, number: int) -> bytes:
    try:
        return encode_value(task)
    except Exception as error:
        raise TypeError(f"task {number}, a {type(task).__qualname__}, can't be encoded: {error}") from None
