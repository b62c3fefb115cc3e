"""The way to an instance, which is found by its name in the registry folder: as any caller from outside.

A request has the key "CLIENT NUMBER" there: the instance does each key once, whoever asks again, and however often.
An instance finds nobody's replies but its own, so each is a domain of its own.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from immortal.appsdk.client.connection import Connection
from immortal.appsdk.client.errors import ClientError, NotConnectable
from immortal.appsdk.client.lane import Call
from immortal.appsdk.client.places import Finder
from immortal.appsdk.client.results import Method
from immortal.appsdk.client.transport import Transport
from immortal.appsdk.patterns.pirate.links import Event, Heard, Lost, Reached, Replied, Unsent

REQUEST_KEY = "{client_id} {number}"


@dataclass(frozen=True, slots=True)
class InstanceCall:
    """What is sent. ``key``: the user's own, None: that of the number."""

    method: Method
    arguments: bytes
    key: str | None


class InstanceLink:
    """To the instance of ``finder``. Raises NotConnectable as it is made."""

    def __init__(self, finder: Finder, client_id: str) -> None:
        self._client_id = client_id
        self._name = finder.name
        self._connection = Connection(finder.name, None, time.monotonic())
        self._transport = Transport(self._connection, finder)
        self._events: list[Event] = []
        self._heard_s = 0.0
        self._was_talking = False

    @property
    def problem(self) -> str:
        return self._transport.problem

    def filenos(self) -> list[int]:
        return [self._transport.fileno()]

    def process(self) -> list[Event]:
        self._transport.process()
        connection = self._connection
        if self._was_talking and not connection.is_talking:
            self._events.append(Lost())
        if connection.is_talking and not self._was_talking:
            self._events.append(Reached())
        if connection.is_talking and connection.heard_s > self._heard_s:
            self._events.append(Heard(self._name.encode()))
        self._was_talking, self._heard_s = connection.is_talking, connection.heard_s
        events, self._events = self._events, []
        return events

    def send(self, number: int, settled: int, payload: InstanceCall) -> bool:
        """The instance knows the request by its key, and keeps its reply as for any key."""
        key = payload.key or REQUEST_KEY.format(client_id=self._client_id, number=number)
        call = Call(payload.method.method, payload.arguments, lambda call: self._done(number, payload.method, call))
        self._connection.submit(call, key)
        return True

    def _done(self, number: int, method: Method, call: Call) -> None:
        outcome = call.outcome
        if isinstance(outcome, NotConnectable) and not call.sent:
            self._events.append(Unsent(number))
            return
        if outcome is None or isinstance(outcome, ClientError):
            self._events.append(Replied(number, outcome))
            return
        try:
            value = method.value(outcome)
        except Exception as error:  # what the handler raised
            value = error
        self._events.append(Replied(number, value))

    def ping(self) -> None:
        self._connection.ask_soon(time.monotonic())

    def next_deadline_s(self) -> float:
        return self._transport.next_deadline_s()

    def close(self) -> None:
        self._transport.close()


def instances(home: Path, pattern: str) -> Iterator[str]:
    """The names of those in the registry folder that fit ``pattern``, as a shell's: "bank-*"."""
    for file in sorted(home.glob("*.toml")):
        if fnmatchcase(file.stem, pattern):
            yield file.stem
