"""Calls that nobody waits for: what is still to be heard of them before the client is closed."""

from __future__ import annotations

import asyncio
import threading

from immortal.appsdk.client.errors import CallRaised, ClientClosed, ClientError
from immortal.appsdk.client.lane import Call
from immortal.appsdk.client.results import Method


class Forks:
    """Used where the client's connection is owned. ``all_done``: no reply is missing."""

    def __init__(self, instance: str, all_done: threading.Event | asyncio.Event) -> None:
        self._instance = instance
        self._all_done = all_done
        self._missing_count = 0
        self._error: ClientError | None = None  # the first
        all_done.set()

    def call(self, method: Method, arguments: bytes, trace_context: str = "") -> Call:
        """A call to be submitted."""
        self._missing_count += 1
        self._all_done.clear()
        return Call(method.method, arguments, lambda call: self._done(method, call), trace_context)

    def _done(self, method: Method, call: Call) -> None:
        self._missing_count -= 1
        if not self._missing_count:
            self._all_done.set()
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

    def check(self, timeout_s: float | None) -> None:
        """After a wait of ``timeout_s``. Raises ClientError for the first call that may not have been done."""
        if self._error is not None:
            raise self._error
        if self._missing_count:
            raise ClientClosed(
                f"{self._missing_count} calls that were forked to {self._instance!r} have no reply within "
                f"{timeout_s:g} s: they may have been done or not"
            )
