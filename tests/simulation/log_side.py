"""What the driver has for the log, while one process of the coordinator lives.

A commit is written at once or beside the loop, as it comes; a read is answered at once or later.
"""

from __future__ import annotations

import random
from collections import deque
from typing import TYPE_CHECKING

from coordinator.core import effects as ef
from coordinator.core import events as ev
from coordinator.driver.ports import Read, Write
from coordinator.driver.reads import answer
from tests.simulation.clock import US
from tests.simulation.disk import Job
from tests.simulation.trace import Violation

if TYPE_CHECKING:
    from tests.simulation.node import Node

SYNC_MOMENTS = 4  # a write at once takes so many times as long as another effect, and is as likely to be interrupted


class LogSide:
    """``node.disk`` holds what outlives it."""

    def __init__(self, node: Node, rng: random.Random, inbox: list[ev.Event]) -> None:
        self._node = node
        self._inbox = inbox
        self._disk = node.disk
        self._world = node.world
        self._rng = rng
        self._clock = node.world.clock
        self._inline: deque[Job] = deque()
        self._inline_share = rng.choice((0, 0, 0.5, 1))
        self._late_share = rng.choice((0, 0, 0.3))
        self._reads_under_way = 0
        self._busy = self._is_gone = False

    @property
    def is_quiet(self) -> bool:
        return not (self._inline or self._disk.jobs or self._reads_under_way)

    def end(self) -> None:
        """What was to be written at once may have been, or not: as what is written beside the loop."""
        self._is_gone = True
        self._disk.jobs.extend(self._inline)

    # --- the driver's port -------------------------------------------------------------------------------------------

    def submit(self, request: Write | Read) -> None:
        if isinstance(request, ef.Commit | ef.WriteCheckpointChunk):
            self._write(request)
        elif self._rng.random() < self._late_share:
            self._world.marks["read answered late"] += 1
            self._reads_under_way += 1
            self._clock.after(self._rng.random() * 300 * US, self._answer_late, request)
        else:
            self._inbox.append(self._answer(request))

    def trim(self, effect: ef.Trim) -> None:
        self._disk.trimming = True
        self._work_later()

    @property
    def has_inline(self) -> bool:
        return bool(self._inline)

    def run_inline(self) -> None:
        while self._inline:
            self._node.may_be_struck(self._inline[0], moments=SYNC_MOMENTS)  # what has left before it arrives
            self._inbox += self._disk.write_at_once(self._inline.popleft())

    # --- writes ------------------------------------------------------------------------------------------------------

    def _write(self, job: Job) -> None:
        machine = self._node.machine
        assert machine is not None
        if isinstance(job, ef.Commit) and job.transaction.records:
            self._world.marks["record later than the machine's clock"] += (
                machine._log._last_time_ns > self._node.time.wall_ns
            )
        is_small = isinstance(job, ef.Commit) and self._rng.random() < self._inline_share
        if is_small and not self._busy and not self._disk.jobs:
            self._world.marks["commit written at once"] += 1
            self._inline.append(job)
            return
        self._disk.jobs.extend((*self._inline, job))  # the order is kept
        self._inline.clear()
        self._work_later()

    def _work_later(self) -> None:
        if not self._busy and (self._disk.jobs or self._disk.trimming):
            self._busy = True
            self._clock.after(self._disk.latency_ns(), self._work)

    def _work(self) -> None:
        if self._is_gone:
            return
        self._busy = False
        self._node.post(*self._disk.work())
        self._work_later()

    # --- reads -------------------------------------------------------------------------------------------------------

    def _answer_late(self, request: Read) -> None:
        if not self._is_gone:
            self._reads_under_way -= 1
            self._node.post(self._answer(request))

    def _answer(self, request: Read) -> ev.Event:
        event = answer(self._disk.store, request)
        marks = self._world.marks
        if isinstance(event, ev.LogLoaded):
            summary = event.summary
            outputs = summary.checkpoints[-1].outputs if summary.checkpoints else {}
            for batch in summary.impulses:
                mark = outputs.get(batch.destination)
                if mark is None or batch.first_position > mark.position:
                    marks["impulse put back by a replay"] += 1
        elif isinstance(event, ev.CheckpointChecked) and event.problem is not None:
            if not self._disk.damaged:
                raise Violation(f"checkpoint {event.checkpoint_id} is not what was written: {event.problem}")
        elif isinstance(request, ef.ReadSpilled):
            marks["spilled messages read"] += 1
        elif isinstance(request, ef.ReadLetters):
            marks["refused letters looked for"] += 1
        return event
