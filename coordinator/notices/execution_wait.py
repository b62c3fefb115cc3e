"""How long a message waits, once it is durable, until the app has executed all before it: one sample a second.

To time each message would cost each of them. Instead the app is asked a question that it answers in its turn, behind
what it was given before: when the answer comes, all that was durable at the question's time is executed. So what is
measured is what a message would have waited that became durable then. The question is the one for handler times: the
answer has how long some messages took since the last one (:mod:`immortal.appsdk.dispatch.times`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Histogram

from immortal.protocol.errors import ImmortalError
from immortal.protocol.handlers import OTHER_MESSAGES, TIMES_TASK

INTERVAL_S = 1.0
PAUSE_FACTOR = 200  # as many times what asking took: of an instance whose status is large
GIVEN_POLL_S = 0.05  # while the app has not been given all of it yet
WAIT_S_MAX = 60.0  # a control connection lives as long; more counts as that
METHODS_MAX = 200  # with a histogram of their own; what an app names beyond counts as others
METHOD_CHARACTERS_MAX = 200
EXECUTION_WAIT = (
    "immortal_execution_wait_seconds",
    "From when a message is durable until the app has executed all before it, sampled",
)
HANDLER = "immortal_handler_seconds", "What a handler takes for a message, until it returns or waits; sampled"

Ask = Callable[[str, object, float], Mapping[str, Any]]
"""(verb, argument, timeout in seconds); raises ImmortalError."""


class ExecutionWait:
    """``ask``: the instance's coordinator. ``wait(seconds)``: True once it is to end."""

    def __init__(
        self,
        name: str,
        registry: CollectorRegistry,
        ask: Ask,
        wait: Callable[[float], bool] | None = None,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._ask = ask
        self._wait = wait or threading.Event().wait
        self._clock_s = clock_s
        buckets = [65.536 / 2**power for power in reversed(range(18))]  # from 0.5 ms
        self._histogram = Histogram(*EXECUTION_WAIT, ["instance_name"], registry=registry, buckets=buckets).labels(name)
        buckets = [1e-6 * 4**power for power in range(14)]  # to 67 s
        self._handlers = Histogram(*HANDLER, ["instance_name", "method"], registry=registry, buckets=buckets)
        self._methods: set[str] = set()

    def start(self) -> None:
        threading.Thread(target=self.run, name="execution wait", daemon=True).start()

    def run(self) -> None:
        pause_s = INTERVAL_S
        while not self._wait(pause_s):
            pause_s = self.sample()

    def sample(self) -> float:
        """Once; gives how long to pause, in seconds."""
        began_s = self._clock_s()
        try:
            status = self._status()
        except ImmortalError:
            return INTERVAL_S
        asked_s = self._clock_s()
        pause_s = max(INTERVAL_S, PAUSE_FACTOR * (asked_s - began_s))
        if not status.get("app_connected") or status.get("handling"):
            return pause_s  # behind a handler that takes long the questions would only pile up
        durable = status["fed_sequence_id"] + status["backlog_records"]
        try:
            while status["fed_sequence_id"] < durable:
                if self._clock_s() - began_s >= WAIT_S_MAX:
                    self._histogram.observe(WAIT_S_MAX)
                    return WAIT_S_MAX
                if self._wait(GIVEN_POLL_S):
                    return pause_s
                status = self._status()
            asked_s = self._clock_s()
            answer = self._ask("handlers", {"task": TIMES_TASK}, WAIT_S_MAX)
        except ImmortalError:  # the app has ended or recovers; or it has not answered in time
            if self._clock_s() - asked_s < WAIT_S_MAX:
                return pause_s
            self._histogram.observe(WAIT_S_MAX)
            return WAIT_S_MAX
        self._histogram.observe(self._clock_s() - began_s)
        for method, duration_ns in answer.get("times", ()):
            self._handlers.labels(self._name, self._method(str(method))).observe(max(0, duration_ns) / 1e9)
        return pause_s

    def _method(self, name: str) -> str:
        """A label: of an app that names ever new ones there are not ever more."""
        name = name[:METHOD_CHARACTERS_MAX]
        if name not in self._methods and len(self._methods) >= METHODS_MAX:
            return OTHER_MESSAGES
        self._methods.add(name)
        return name

    def _status(self) -> Mapping[str, Any]:
        return self._ask("status", None, WAIT_S_MAX)
