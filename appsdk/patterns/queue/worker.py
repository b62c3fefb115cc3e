"""Worker of a queue: a plain process with functions. It says ready, gets a task, and replies with its next ready."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import logging
import os
import secrets
import signal
import socket
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, Unpack

from immortal.appsdk.calls.codec import ArgumentCodec, encode_value
from immortal.appsdk.calls.failures import argument_mismatch, text_of
from immortal.appsdk.calls.user_code import RunContexts, interrupt, is_user_failure, mark_interrupts
from immortal.appsdk.client import (
    CallCancelled,
    CallRefused,
    CallTimeout,
    ClientClosed,
    ClientError,
    OutcomeUnknown,
    ReachOptions,
    ReplyGone,
    connect,
    with_timeout,
)
from immortal.appsdk.patterns.queue.model import (
    REASON_LENGTH_MAX,
    RESULT_SIZE_BYTES_MAX,
    Given,
    QueueError,
    Reject,
    Report,
    check_worker,
)
from immortal.appsdk.patterns.queue.service import Queue
from immortal.protocol import decoding

HEARTBEAT_DEFAULT_S = 1.0
STOP_S = 10.0  # time that a stopping worker waits for an unreachable queue

Function = Callable[..., Any]
Functions = Mapping[str, Callable[..., Any]]

_log = logging.getLogger("immortal.queue")


@dataclass(frozen=True, slots=True)
class CurrentTask:
    """Task that a function works on. No two runs have the same (``id``, ``attempt``)."""

    id: int
    attempt: int
    name: str


_current: contextvars.ContextVar[CurrentTask] = contextvars.ContextVar("immortal_queue_task")


def current_task() -> CurrentTask:
    """Return the task of the running function. Raises LookupError outside a task."""
    return _current.get()


class _Function:
    """Function of a worker, with the codec of its arguments."""

    def __init__(self, name: str, function: Function) -> None:
        if not callable(function):
            raise TypeError(f"function {name!r}: something to call was expected, not {function!r}")
        self.call = function
        self._codec: ArgumentCodec | None = None
        self._signature: inspect.Signature | None = None
        try:
            self._signature = signature = inspect.signature(function)
        except ValueError:  # some built-in functions have no signature
            return
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        if all(
            one.kind in kinds and one.annotation is not inspect.Parameter.empty for one in signature.parameters.values()
        ):
            self._codec = ArgumentCodec(function, signature)

    def arguments(self, encoded: bytes) -> Sequence[Any]:
        """Decode a task's arguments. Raises TypeError if they do not fit the function."""
        try:
            if self._codec is not None:
                return self._codec.decode(encoded)
            arguments = decoding.decode(encoded, type=list[Any])
            if self._signature is not None:
                self._signature.bind(*arguments)
        except BaseException as error:  # msgspec's errors, and errors of a type's __post_init__
            if not is_user_failure(error):
                raise
            why = text_of(error) if self._codec is None else argument_mismatch(self._codec, error, encoded, 0)
            raise TypeError(why) from None
        return arguments


class Worker:
    """Worker with functions for the tasks of one queue, one task at a time. Call ``run``, in any thread.

    ``functions``: by name; ``def`` and ``async def``. Arguments are checked against annotations
    if all parameters have one. ``worker_id``: by default one that no other process has. ``heartbeat``: seconds between
    two signs of life to the queue; after 5 missed ones its task goes to the next worker. The other options are those
    of :func:`immortal.appsdk.client.connect`.

    Raises TypeError, ValueError, DefinitionError for annotations that can't be read.
    """

    def __init__(
        self,
        queue: str,
        functions: Functions,
        *,
        worker_id: str | None = None,
        heartbeat: float = HEARTBEAT_DEFAULT_S,
        **options: Unpack[ReachOptions],
    ) -> None:
        if not isinstance(functions, Mapping):
            raise TypeError(f"functions={functions!r}: {{name: function}} was expected")
        self.id = worker_id or f"{socket.gethostname()[:100]}-{os.getpid()}-{secrets.token_hex(4)}"
        check_worker(self.id, functions, heartbeat)
        self._functions = {name: _Function(name, function) for name, function in functions.items()}
        self._session = secrets.token_hex(16)
        self._queue = queue
        self._heartbeat_s = heartbeat
        self._connector = connect(Queue, queue, timeout=None, **options)
        self._changed = threading.Event()  # set when stopping or ended
        self._stopping = self._ended = self._busy = False
        self._runner: asyncio.Runner | None = None

    def run(self) -> None:
        """Work until :meth:`stop`. The queue can stop and start meanwhile. Each task has its own context variables,
        which begin as copies of the caller's.

        Raises Superseded if another process says ready under the same ID; QueueError if the instance is no
        queue; NotConnectable and other ClientErrors.
        """
        self._contexts = RunContexts()
        with mark_interrupts(), self._connector as queue:
            heart = threading.Thread(target=self._beat, args=(queue,), name=f"heartbeats to {self._queue}", daemon=True)
            heart.start()
            try:
                self._work(queue)
            finally:
                self._ended = True
                self._changed.set()
                if self._runner is not None:
                    self._runner.close()
        heart.join()

    def stop(self) -> None:
        """Stop after the current task; then :meth:`run` returns. Call it from any thread, or from a signal handler."""
        self._stopping = True
        self._changed.set()

    def _work(self, queue: Queue) -> None:
        report: Report | None = None
        while not self._stopping:
            try:
                given: Any = queue.ready(self.id, self._session, list(self._functions), self._heartbeat_s, report)
            except CallRefused as error:
                raise QueueError(f"{self._queue!r} takes no workers like this one, or is no queue: {error}") from None
            except (CallCancelled, OutcomeUnknown, ReplyGone):
                given = None  # the queue knows the report's fate; if not, the task is tried again
            except ClientClosed:
                if self._stopping:
                    return
                raise
            report = None
            if given is not None:
                self._busy = True
                try:
                    report = self._done(given)
                except BaseException as error:
                    # The next worker gets the task now, not after missed heartbeats.
                    why = f"worker {self.id!r} was ended by {type(error).__name__}"
                    with contextlib.suppress(ClientError):
                        given_back = Report(given.task, given.attempt, error=why)
                        with_timeout(queue, self._heartbeat_s).leave(self.id, self._session, given_back)
                    raise
                finally:
                    self._busy = False
        if report is not None:
            try:
                with_timeout(queue, STOP_S).leave(self.id, self._session, report)
            except (CallTimeout, ClientClosed):
                _log.error("task %d was done, and the queue is away: it will be done again", report.task)

    def _done(self, given: Given) -> Report:
        def failed(reason: str, *, again: bool) -> Report:
            return Report(given.task, given.attempt, error=reason[:REASON_LENGTH_MAX], again=again)

        function = self._functions[given.name]
        try:
            arguments = function.arguments(given.arguments)
        except TypeError as error:
            return failed(str(error), again=False)
        context, current = self._contexts.new(), CurrentTask(given.task, given.attempt, given.name)
        try:
            context.run(_current.set, current)
            value = context.run(function.call, *arguments)
            if inspect.iscoroutine(value):
                value = self._awaited(value, context)
        except Reject as error:
            return failed(str(error) or "rejected", again=False)
        except BaseException as error:
            if not is_user_failure(error):
                raise
            _log.exception("task %d: %s failed", given.task, given.name)
            return failed(f"{type(error).__name__}: {text_of(error)}", again=True)
        try:
            result = encode_value(value)
        except BaseException as error:  # raised by a user's type in its encoding
            if not is_user_failure(error):
                raise
            return failed(f"what {given.name} returned can't be encoded: {text_of(error)}", again=False)
        if len(result) > RESULT_SIZE_BYTES_MAX:
            return failed(
                f"what {given.name} returned takes {len(result)} bytes, at most {RESULT_SIZE_BYTES_MAX} are "
                f"possible: keep it elsewhere, and return where it is",
                again=False,
            )
        return Report(given.task, given.attempt, result)

    def _awaited(self, value: Coroutine[Any, Any, Any], context: contextvars.Context) -> Any:
        if self._runner is None:
            self._runner = asyncio.Runner()
        found, error = self._runner.run(_outcome(value), context=context)
        if error is not None:
            raise error
        return found

    def _beat(self, queue: Queue) -> None:
        """Send heartbeats, in a separate thread, whatever the functions do."""
        unanswered: CallTimeout | None = None
        while True:
            self._changed.wait(self._heartbeat_s)
            self._changed.clear()
            if self._ended:
                return
            leaves = self._stopping
            try:
                if leaves:  # repeated: a call that waits for a task may just have been sent
                    with_timeout(queue, STOP_S).leave(self.id, self._session, None)
                elif unanswered is None:
                    with_timeout(queue, self._heartbeat_s).heartbeat(self.id, self._session)
                else:
                    unanswered.again(self._heartbeat_s)
                unanswered = None
            except ClientClosed:
                return
            except CallTimeout as error:
                unanswered = error if error.sent and not leaves else None
                if leaves and not self._busy:  # the queue is unreachable: a waiting worker has nothing to lose
                    self._connector.__exit__(None, None, None)
            except ClientError:
                unanswered = None  # the next heartbeat replaces it


async def _outcome(value: Coroutine[Any, Any, Any]) -> tuple[Any, BaseException | None]:
    """Return (value, None) or (None, error) of an awaitable, since asyncio raises some errors inside its loop and logs
    them.
    """
    try:
        return await value, None
    except BaseException as error:
        return None, error


def work(queue: str, functions: Functions, **options: Any) -> None:
    """Run a :class:`Worker` until SIGTERM or SIGINT: it ends after its current task; a second SIGINT interrupts that.

    The options are the worker's. For the main thread only. Raises the worker's errors.
    """
    worker = Worker(queue, functions, **options)

    def stop(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, interrupt)
        worker.stop()

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        worker.run()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
