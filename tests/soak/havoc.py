"""What happens to the services of a workload, drawn from one seed: kills, stops, and kills at named points."""

from __future__ import annotations

import contextlib
import heapq
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence

from immortal.coordinator.fault_points import FaultPoint
from immortal.coordinator.operator import control
from immortal.protocol.errors import ImmortalError
from tests.soak.service import APP, COORDINATOR, POLL_S, ROLES, Service, wait_for

# What makes a point come, where the ordinary traffic does not: a recovery, or a checkpoint asked for.
AT_RECOVERY = (
    FaultPoint.BEFORE_EPOCH,
    FaultPoint.AFTER_EPOCH,
    FaultPoint.LOG_LOADED,
    FaultPoint.CHECKPOINT_READ,
    FaultPoint.RECORDS_READ,
    FaultPoint.AFTER_CHUNK,
    FaultPoint.BEFORE_HEADER,
    FaultPoint.AFTER_HEADER,
    FaultPoint.DURING_TRIM,
    FaultPoint.AFTER_TRIM,
)
AT_START = (FaultPoint.ANNOUNCED, FaultPoint.BEFORE_REPLACE, FaultPoint.AFTER_REPLACE)
AT_A_CHECKPOINT = (
    FaultPoint.CONTROL,
    FaultPoint.AFTER_CHUNK,
    FaultPoint.BEFORE_HEADER,
    FaultPoint.AFTER_HEADER,
    FaultPoint.DURING_TRIM,
    FaultPoint.AFTER_TRIM,
)
IN_TRAFFIC = (
    FaultPoint.BEFORE_COMMIT,
    FaultPoint.DURING_COMMIT,
    FaultPoint.AFTER_COMMIT,
    FaultPoint.BEFORE_SEND,
    FaultPoint.BEFORE_ANSWER,
    FaultPoint.FRAME_RECEIVED,
)
POINT_TIMEOUT_S = 1.5  # not every point comes in every state: the receiver of a stream may send nothing
STOPPED_S_MAX = 0.4
STOP = "stop for a while"
SHARE_AT_POINTS = 0.3
SHARE_OF_STOPS = 0.15
SHARE_IN_RECOVERY = 0.25  # of the kills: without waiting until the last one is recovered from


class Havoc:
    """``counts`` are of kill -9, by victim; ``beside`` of SIGSTOPs."""

    def __init__(self, services: Sequence[Service], rng: random.Random, feed: Callable[[], None]) -> None:
        self._services, self._rng, self._feed = services, rng, feed
        self._stopped: list[tuple[float, int, Service, str]] = []  # until when
        self.counts: Counter[str] = Counter()
        self.beside: Counter[str] = Counter()

    def start(self) -> None:
        for service in self._services:
            service.start()

    def wreak(self, kills: int, deadline_s: float) -> None:
        """Until so many processes were killed, or time (monotonic) is up. Raises SoakError where one is not started."""
        while self.counts.total() < kills and time.monotonic() < deadline_s:
            service = self._rng.choice(self._services)
            dice = self._rng.random()
            self._feed()
            if self._rng.random() >= SHARE_IN_RECOVERY:
                self._wait_until_ready(service)
            if dice < SHARE_OF_STOPS:
                self._stop(service)
            elif dice < SHARE_OF_STOPS + SHARE_AT_POINTS:
                self._kill_at_a_point(service)
            else:
                role = self._rng.choices(ROLES, (4, 4, 1))[0]
                if service.kill(role):
                    self.counts[role] += 1
                time.sleep(self._rng.uniform(0, 0.05))

    def finish(self) -> None:
        self._continue_all()

    def end(self) -> None:
        """Nothing of it runs by itself."""

    def _wait_until_ready(self, service: Service) -> None:
        wait_for(lambda: self._continue_due() and service.ready, lambda: f"{service.name} is ready\n{service.tail()}")

    # --- SIGSTOP ------------------------------------------------------------------------------------------------------

    def _stop(self, service: Service) -> None:
        role = self._rng.choice(ROLES)
        if service.signal(role, signal.SIGSTOP):
            self.beside[STOP] += 1
            until_s = time.monotonic() + self._rng.uniform(0.01, STOPPED_S_MAX)
            heapq.heappush(self._stopped, (until_s, self.beside[STOP], service, role))

    def _continue_due(self) -> bool:
        while self._stopped and self._stopped[0][0] <= time.monotonic():
            self._continue(*heapq.heappop(self._stopped)[2:])
        return True

    def _continue(self, service: Service, role: str) -> None:
        service.signal(role, signal.SIGCONT)

    def _continue_all(self) -> None:
        while self._stopped:
            self._continue(*heapq.heappop(self._stopped)[2:])

    # --- at a named point ---------------------------------------------------------------------------------------------

    def _kill_at_a_point(self, service: Service) -> None:
        provoke, points = self._rng.choice(
            (
                (self._recover, AT_RECOVERY),
                (self._start, AT_START),
                (self._ask_for_a_checkpoint, AT_A_CHECKPOINT),
                (self._recover, IN_TRAFFIC),
            )
        )
        point = self._rng.choice(points)
        service.arm(point, self._rng.choice((1, 1, 2, 5)) if points is IN_TRAFFIC else 1)
        provoke(service)
        deadline_s = time.monotonic() + POINT_TIMEOUT_S
        while service.armed and time.monotonic() < deadline_s:
            self._continue_due()
            time.sleep(POLL_S)
        if not service.disarm():
            self.counts[f"at {point.value!r}"] += 1

    def _recover(self, service: Service) -> None:
        if service.kill(APP):
            self.counts[APP] += 1

    def _start(self, service: Service) -> None:
        if service.kill(COORDINATOR):
            self.counts[COORDINATOR] += 1

    def _ask_for_a_checkpoint(self, service: Service) -> None:
        with contextlib.suppress(ImmortalError):  # it may be killed at that question
            control.query(service.settings.folder, "checkpoint", 0.5)
