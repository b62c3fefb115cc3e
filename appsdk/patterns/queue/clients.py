"""Clients of a queue, which submit tasks and wait for results: ``with connect("jobs") as jobs: jobs.submit("resize",
["a.png"])``.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Generic, TypedDict, TypeVar, Unpack, overload

from immortal.appsdk.calls.codec import ValueDecoder, encode_value
from immortal.appsdk.client import CallTimeout, ConnectOptions, Connector, with_timeout
from immortal.appsdk.client import connect as connect_client
from immortal.appsdk.patterns.queue.model import (
    WAIT_S_MAX,
    NotDone,
    Outcome,
    State,
    Submission,
    TaskFailed,
)
from immortal.appsdk.patterns.queue.service import Queue

T = TypeVar("T")
Seconds = float | timedelta

_GRACE_S = 1.0  # for the queue's reply, after the time that the queue can wait


class SubmitOptions(TypedDict, total=False):
    """Options of :meth:`Jobs.submit`."""

    key: str
    priority: int
    delay: Seconds
    dedup: str
    tries: int
    timeout: Seconds
    retry_delay: Seconds
    again: bool


_IN_SECONDS = ("delay", "timeout", "retry_delay")


def submission(name: str, arguments: Sequence[Any], options: SubmitOptions) -> Submission:
    """Return a submission with the arguments of ``submit``. Raises ValueError, TypeError."""
    if isinstance(arguments, (str, bytes)) or not isinstance(arguments, Sequence):
        raise TypeError(f"{name}: arguments {arguments!r}: a list was expected, such as [{arguments!r}]")
    try:
        encoded = encode_value(list(arguments))
    except Exception as error:  # raised by a user's type in its encoding
        raise TypeError(f"{name}: the arguments can't be encoded: {error}") from error
    if unknown := options.keys() - SubmitOptions.__annotations__.keys():
        known = ", ".join(SubmitOptions.__annotations__)
        raise TypeError(f"{name}: there is no option {', '.join(sorted(unknown))} of a submission; there are {known}")
    fields: dict[str, Any] = dict(options)
    for one in fields.keys() & _IN_SECONDS:
        fields[f"{one}_s"] = _seconds(fields.pop(one))
    return Submission(name, encoded, **fields)


def _seconds(value: Seconds) -> float:
    return value.total_seconds() if isinstance(value, timedelta) else value


class _Patience:
    """Rest of a caller's timeout."""

    def __init__(self, timeout_s: float | None) -> None:
        self._timeout_s = timeout_s
        self._until_s = None if timeout_s is None else time.monotonic() + timeout_s

    def next(self) -> tuple[float, float | None]:
        """Return (time for the queue to wait, time until its reply), in seconds."""
        if self._until_s is None:
            return WAIT_S_MAX, None
        left_s = min(WAIT_S_MAX, max(0.0, self._until_s - time.monotonic()))
        return left_s, left_s + _GRACE_S

    def check(self, task: int, why: str) -> None:
        """Raise NotDone if the time is over. ``why``: the reason for the missing result."""
        if self._until_s is not None and time.monotonic() >= self._until_s:
            raise NotDone(f"task {task} has no result after {self._timeout_s:g} s: {why}") from None


class _Result(Generic[T]):
    def __init__(self, jobs: Any, task: int, kind: Any) -> None:
        self.id = task
        self._jobs = jobs
        self._kind = kind

    def __repr__(self) -> str:
        return f"<task {self.id}>"

    def _value(self, outcome: Outcome) -> T:
        """Return the result of a task that has ended. Raises TaskFailed, TypeError."""
        if outcome.state != "done":
            raise TaskFailed(self.id, outcome.reason, outcome.tries)
        try:
            value: T = ValueDecoder(self._kind).decode(outcome.result)
        except Exception as error:
            raise TypeError(f"task {self.id}: the result is no {self._kind}: {error}") from None
        return value


class Job(_Result[T]):
    """Submitted task. ``id``: its number, by which ``jobs.task(id)`` finds it again, also in another process."""

    def result(self, timeout: float | None = None) -> T:
        """Wait for the task, at most ``timeout`` seconds (None: no limit), and return the result of the worker's
        function.

        Raises TaskFailed for a dead letter, NotDone, UnknownTask, ClientError.
        """
        patience = _Patience(timeout)
        while True:
            seconds, reply_s = patience.next()
            try:
                outcome: Outcome = with_timeout(self._jobs, reply_s).wait(self.id, seconds)
            except CallTimeout as error:  # the queue was unreachable meanwhile
                patience.check(self.id, error.reason)
                continue
            if outcome.state in ("done", "dead", "dropped"):
                return self._value(outcome)
            patience.check(self.id, f"it is {outcome.state}, and goes on")

    def state(self) -> State:
        """Return the task's state: waiting, delayed, running, done, dead or dropped. Raises UnknownTask,
        ClientError.
        """
        return self._jobs.task(self.id).task.state  # type: ignore[no-any-return]


class AsyncJob(_Result[T]):
    """Submitted task, for asyncio; like :class:`Job`."""

    async def result(self, timeout: float | None = None) -> T:
        """Wait for the task's result; see :meth:`Job.result`."""
        patience = _Patience(timeout)
        while True:
            seconds, reply_s = patience.next()
            try:
                outcome: Outcome = await with_timeout(self._jobs, reply_s).wait(self.id, seconds)
            except CallTimeout as error:  # the queue was unreachable meanwhile
                patience.check(self.id, error.reason)
                continue
            if outcome.state in ("done", "dead", "dropped"):
                return self._value(outcome)
            patience.check(self.id, f"it is {outcome.state}, and goes on")

    async def state(self) -> State:
        """Return the task's state; see :meth:`Job.state`."""
        return (await self._jobs.task(self.id)).task.state  # type: ignore[no-any-return]


class Jobs:
    """Client of a queue. Any thread can use it."""

    def __init__(self, queue: Queue) -> None:
        self._queue: Any = queue

    @overload
    def submit(
        self, name: str, arguments: Sequence[Any] = ..., *, returns: type[T], **options: Unpack[SubmitOptions]
    ) -> Job[T]: ...
    @overload
    def submit(self, name: str, arguments: Sequence[Any] = ..., **options: Unpack[SubmitOptions]) -> Job[Any]: ...
    def submit(
        self,
        name: str,
        arguments: Sequence[Any] = (),
        *,
        returns: Any = Any,
        **options: Unpack[SubmitOptions],
    ) -> Job[Any]:
        """Submit a task for the workers that have a function ``name``. It is durable when this returns.

        ``returns``: the type of the result. ``key``: the owner of the task, for limits by key. ``priority``: higher
        ones run first. ``delay``: time before the task can start. ``dedup``: a further submission with this key returns
        the same task; ``again``: a new one, if that task has ended.
        ``tries``: number of tries (default 3) before the task becomes a dead letter. ``timeout``: of one try, 60 s.
        ``retry_delay``: time before the next try after an exception, 1 s, doubled each time. Times are seconds or
        timedeltas. Raises ValueError, TypeError, QueueFull, DedupConflict, ClientError.
        """
        return Job(self._queue, self._queue.submit(submission(name, arguments, options)), returns)

    @overload
    def task(self, task: int, *, returns: type[T]) -> Job[T]: ...
    @overload
    def task(self, task: int) -> Job[Any]: ...
    def task(self, task: int, *, returns: Any = Any) -> Job[Any]:
        """Return the task with that ID, submitted by any process. This does not ask the queue."""
        return Job(self._queue, task, returns)

    def limit(self, name: str, *, running: int = 0, starts: int = 0, per: Seconds = 0.0) -> None:
        """Limit each key of that function: at most ``running`` tasks run at once, at most ``starts`` start in any
        ``per``.

        0: no limit. The limit holds until it is set again. Raises ValueError, ClientError.
        """
        self._queue.limit(name, running, starts, _seconds(per))


class AsyncJobs:
    """Client of a queue for asyncio; like :class:`Jobs`."""

    def __init__(self, queue: type[Queue]) -> None:
        self._queue: Any = queue

    @overload
    async def submit(
        self, name: str, arguments: Sequence[Any] = ..., *, returns: type[T], **options: Unpack[SubmitOptions]
    ) -> AsyncJob[T]: ...
    @overload
    async def submit(
        self, name: str, arguments: Sequence[Any] = ..., **options: Unpack[SubmitOptions]
    ) -> AsyncJob[Any]: ...
    async def submit(
        self,
        name: str,
        arguments: Sequence[Any] = (),
        *,
        returns: Any = Any,
        **options: Unpack[SubmitOptions],
    ) -> AsyncJob[Any]:
        """Submit a task; see :meth:`Jobs.submit`."""
        return AsyncJob(self._queue, await self._queue.submit(submission(name, arguments, options)), returns)

    @overload
    def task(self, task: int, *, returns: type[T]) -> AsyncJob[T]: ...
    @overload
    def task(self, task: int) -> AsyncJob[Any]: ...
    def task(self, task: int, *, returns: Any = Any) -> AsyncJob[Any]:
        """Return the task with that ID; see :meth:`Jobs.task`."""
        return AsyncJob(self._queue, task, returns)

    async def limit(self, name: str, *, running: int = 0, starts: int = 0, per: Seconds = 0.0) -> None:
        """Limit each key of a function; see :meth:`Jobs.limit`."""
        await self._queue.limit(name, running, starts, _seconds(per))


class JobsConnector:
    """Connector that ``connect(...)`` returns, for one ``with`` or ``async with`` block."""

    def __init__(self, connector: Connector[Queue, type[Queue]]) -> None:
        self._connector = connector

    def __enter__(self) -> Jobs:
        return Jobs(self._connector.__enter__())

    def __exit__(self, *error: Any) -> None:
        self._connector.__exit__(*error)

    async def __aenter__(self) -> AsyncJobs:
        return AsyncJobs(await self._connector.__aenter__())

    async def __aexit__(self, *error: Any) -> None:
        await self._connector.__aexit__(*error)


def connect(queue: str, /, **options: Unpack[ConnectOptions]) -> JobsConnector:
    """Connect to the queue that runs as the instance ``queue``. The options are those of
    :func:`immortal.client.connect`.
    """
    return JobsConnector(connect_client(Queue, queue, **options))
