"""How long a message waits, once it is durable, until the app has executed all before it: one sample a second.

To time each message would cost each of them. Instead the app is asked a question that it answers in its turn, behind
what it was given before: when the answer comes, all that was durable at the question's time is executed. So what is
measured is what a message would have waited that became durable then.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Histogram

from protocol.errors import ImmortalError

INTERVAL_S = 1.0
PAUSE_FACTOR = 200  # as many times what asking took: of an instance whose status is large
GIVEN_POLL_S = 0.05  # while the app has not been given all of it yet
WAIT_S_MAX = 60.0  # a control connection lives as long; more counts as that
NO_TASK = (1 << 63) - 1  # a handler that there is not: the shortest answer

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
        self._ask = ask
        self._wait = wait or threading.Event().wait
        self._clock_s = clock_s
        buckets = [65.536 / 2**power for power in reversed(range(18))]  # from 0.5 ms
        self._histogram = Histogram(
            "immortal_execution_wait_seconds",
            "From when a message is durable until the app has executed all before it, sampled",
            ["instance_name"],
            registry=registry,
            buckets=buckets,
        ).labels(name)

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
            self._ask("handlers", {"task": NO_TASK}, WAIT_S_MAX)
        except ImmortalError:  # the app has ended or recovers; or it has not answered in time
            if self._clock_s() - asked_s < WAIT_S_MAX:
                return pause_s
            self._histogram.observe(WAIT_S_MAX)
            return WAIT_S_MAX
        self._histogram.observe(self._clock_s() - began_s)
        return pause_s

    def _status(self) -> Mapping[str, Any]:
        return self._ask("status", None, WAIT_S_MAX)
