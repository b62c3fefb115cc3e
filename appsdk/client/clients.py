"""The two clients of one instance: Client for threads, AsyncClient for asyncio."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from immortal.appsdk.client.connection import Connection
from immortal.appsdk.client.discovery import Finder
from immortal.appsdk.client.errors import CallRaised, CallTimeout, ClientClosed, ClientError
from immortal.appsdk.client.methods import CANCEL, STATUS, Method
from immortal.appsdk.client.session import Call, Question
from immortal.appsdk.client.shells import LoopShell, OwnId, ThreadShell, require_process
from immortal.appsdk.client.transport import Transport, timeout_message

Ask = Callable[[Any], Any]


class _Talk(Transport):
    """Machine of a client: its connection, and the calls that nobody waits for."""

    def __init__(self, finder: Finder, client_id: str | None) -> None:
        super().__init__(Connection(finder.name, client_id, time.monotonic()), finder)
        self.forks = ForkTracker(finder.name)
        self._closed = False

    def require_open(self) -> None:
        """Raise ClientClosed after :meth:`close`."""
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


class _Waiting:
    """One wait for the outcome of ``call``. ``submit`` gives it to the connection; None: that has it already.

    ``again``: the function by which a CallTimeout waits once more; None: for the same call.
    """

    def __init__(
        self,
        method: Method,
        call: Call,
        patience_s: float | None,
        submit: Callable[[Connection], None] | None,
        again: Callable[[float | None], Any] | None = None,
    ) -> None:
        self.patience_s = patience_s
        self._method = method
        self._call = call
        self._submit = submit
        self._again = again
        self._text = ""  # why there is no outcome
        self._process_id = os.getpid()

    def begin(self, machine: _Talk, done: Callable[[], None]) -> None:
        call = self._call
        if self._submit is not None:
            machine.require_open()
            call.done = lambda call: done()
            self._submit(machine.connection)
        elif call.outcome is None:
            call.done = partial(_tell_both, call.done, done)
        else:
            done()

    def withdraw(self, machine: _Talk) -> None:
        machine.connection.withdraw(self._call)

    def expire(self, machine: _Talk) -> None:
        if self._call.outcome is None:
            self.withdraw(machine)
            self._text = timeout_message(machine, self._method.name, self._call, self.patience_s or 0.0)

    def value(self, ask: Ask) -> Any:
        if self._text:
            raise CallTimeout(self._text, self._call, self._again or partial(self._wait_again, ask))
        outcome = self._call.outcome
        if isinstance(outcome, ClientError):
            raise outcome
        assert outcome is not None
        return self._method.value(outcome)

    def _wait_again(self, ask: Ask, timeout_s: float | None) -> Any:
        """Wait once more, if that is this process's call. Raises ClientError."""
        require_process(self._process_id, "a call", "only there its reply comes")
        return ask(_Waiting(self._method, self._call, timeout_s, None))


def _tell_both(first: Callable[[Call], None], second: Callable[[], None], call: Call) -> None:
    first(call)
    second()


def _nobody(call: Call) -> None:
    """Do nothing: ``done`` of a call that nobody waits for."""


class _Calls:
    """Calls of a client. With an :class:`AsyncClient` each is to be awaited but ``fork``."""

    _shell: ThreadShell[_Talk] | LoopShell[_Talk]

    @property
    def client_id(self) -> str:
        return self._shell.machine.connection.client_id

    @property
    def heartbeats(self) -> int:
        return self._shell.machine.connection.heartbeats

    def call(
        self, method: Method, arguments: bytes, timeout_s: float | None, key: str | None, trace_context: str = ""
    ) -> Any:
        """Call the method and return what it returned. Raises what it raised, and ClientError."""
        call = Call(method.method, arguments, _nobody, trace_context)
        return self._shell.ask(_Waiting(method, call, timeout_s, lambda connection: connection.submit(call, key)))

    def query(self, method: Method, arguments: bytes, timeout_s: float | None) -> Any:
        """Ask a query and return its value, beside the log where the instance can do that. Raises as :meth:`call`."""
        call = Call(method.method, arguments, _nobody)
        again = partial(self.query, method, arguments)
        return self._shell.ask(_Waiting(method, call, timeout_s, lambda connection: connection.query(call), again))

    def fork(self, method: Method, arguments: bytes, key: str | None, trace_context: str = "") -> None:
        """Send a call without waiting for its reply. Raises ClientClosed."""

        def submit(machine: _Talk) -> None:
            machine.require_open()
            machine.connection.submit(machine.forks.call(method, arguments, trace_context), key)

        self._shell.post(submit)

    def settle(self, timeout_s: float | None) -> Any:
        """Wait until each call that this process forked has a reply. Raises ClientError."""
        return self._shell.ask(_Settling(timeout_s))

    # --- requests that have a handle ---------------------------------------------------------------------------------

    def start(
        self, method: Method, arguments: bytes, timeout_s: float | None, key: str, trace_context: str = ""
    ) -> Any:
        """Submit a call and wait until the instance has it. Raises ClientError."""
        call, question = Call(method.method, arguments, _nobody, trace_context), Question(True, _nobody)

        def submit(connection: Connection) -> None:
            connection.submit(call, key)
            connection.ask(question, key)

        return self._shell.ask(_Waiting(STATUS, question, timeout_s, submit))

    def status(self, timeout_s: float | None, key: str) -> Any:
        question = Question(False, _nobody)
        return self._shell.ask(_Waiting(STATUS, question, timeout_s, lambda connection: connection.ask(question, key)))

    def result(self, method: Method, timeout_s: float | None, key: str) -> Any:
        call = Call(method.method, b"", _nobody)
        return self._shell.ask(_Waiting(method, call, timeout_s, lambda connection: connection.attach(call, key)))

    def cancel(self, arguments: bytes, timeout_s: float | None, key: str) -> Any:
        call = Call(CANCEL.method, arguments, _nobody)
        return self._shell.ask(_Waiting(CANCEL, call, timeout_s, lambda connection: connection.cancel(call, key)))


class Client(_Calls):
    """Client of one instance for threads; open from the moment that it is made. A forked child gets a client of its own
    at its first use. Raises NotConnectable.
    """

    def __init__(self, finder: Finder, client_id: str | None) -> None:
        self._own_id = OwnId(client_id, f"{finder.name!r}")
        self._shell: ThreadShell[_Talk] = ThreadShell(
            lambda: _Talk(finder, self._own_id.take()), f"the client of {finder.name!r}"
        )

    @property
    def client_id(self) -> str:
        return self._own_id.given or super().client_id

    def settle(self, timeout_s: float | None) -> None:
        """Wait until each call that this process forked has a reply. Raises ClientError."""
        if self._shell.is_open:  # a child that has not used it has none
            super().settle(timeout_s)

    def close(self) -> None:
        """Close the client. Calls that wait end with ClientClosed; the instance may still do what was sent."""
        self._shell.close()


class AsyncClient(_Calls):
    """Client of one instance for one asyncio loop, the one that runs when it is made. Raises NotConnectable."""

    def __init__(self, finder: Finder, client_id: str | None) -> None:
        self._shell: LoopShell[_Talk] = LoopShell(lambda: _Talk(finder, client_id), f"the client of {finder.name!r}")

    async def close(self) -> None:
        """Close the client. Calls that wait end with ClientClosed; the instance may still do what was sent."""
        await self._shell.close()


# Calls that nobody waits for: what is still to be heard of them before the client is closed.


class ForkTracker:
    """Forked calls that have no reply yet, and the first error among them."""

    def __init__(self, instance: str) -> None:
        self._instance = instance
        self._missing_count = 0
        self._error: ClientError | None = None  # the first
        self._waiting: list[Callable[[], None]] = []

    def call(self, method: Method, arguments: bytes, trace_context: str = "") -> Call:
        """Make a call whose reply is counted here, for the caller to submit."""
        self._missing_count += 1
        return Call(method.method, arguments, lambda call: self._done(method, call), trace_context)

    def when_done(self, tell: Callable[[], None]) -> None:
        """Call ``tell`` once no reply is missing, perhaps at once."""
        self._waiting.append(tell)
        self._tell()

    def _tell(self) -> None:
        if not self._missing_count:
            waiting, self._waiting = self._waiting, []
            for tell in waiting:
                tell()

    def _done(self, method: Method, call: Call) -> None:
        self._missing_count -= 1
        try:
            if isinstance(call.outcome, ClientError):
                raise call.outcome
            if call.outcome is not None:
                method.value(call.outcome)
        except CallRaised:
            pass  # it was done, and nobody is told how it ended
        except ClientError as error:
            self._error = self._error or error
        except Exception:  # noqa: S110 (what the handler declares to raise)
            pass
        self._tell()

    def check(self, timeout_s: float | None) -> None:
        """Raise ClientError for the first forked call that may not have been done, after a wait of ``timeout_s``."""
        if self._error is not None:
            raise self._error
        if self._missing_count:
            raise ClientClosed(
                f"{self._missing_count} calls that were forked to {self._instance!r} have no reply within "
                f"{timeout_s:g} s: they may have been done or not"
            )


class _Settling:
    """Wait for the replies of forked calls."""

    def __init__(self, patience_s: float | None) -> None:
        self.patience_s = patience_s
        self._forks: ForkTracker | None = None

    def begin(self, machine: _Talk, done: Callable[[], None]) -> None:
        self._forks = machine.forks
        self._forks.when_done(done)

    def withdraw(self, machine: _Talk) -> None:
        """Do nothing: the calls are done all the same."""

    expire = withdraw

    def value(self, ask: Ask) -> None:
        assert self._forks is not None
        self._forks.check(self.patience_s)
