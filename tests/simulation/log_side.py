"""Driver's port for the log, while one process of the coordinator lives.

A commit is written at once or beside the loop, at random; a read is answered at once or later.
"""

from __future__ import annotations

import random
from collections import deque
from typing import TYPE_CHECKING

from immortal.coordinator.core import effects as ef
from immortal.coordinator.core import events as ev
from immortal.coordinator.core.effects import Read, Write
from immortal.coordinator.core.errors import DamagedLogError, FencedError
from immortal.coordinator.core.interfaces import Offer
from immortal.coordinator.core.life_cycle.session import Phase
from immortal.coordinator.driver.ports import Offered, answer
from immortal.coordinator.log.checkpoints import decode_offer, encode_offer, sealed_chunk
from immortal.coordinator.log.format import CHUNK_KEY
from tests.simulation.clock import MS, US
from tests.simulation.disk import Job
from tests.simulation.shared_log import Asked
from tests.simulation.trace import Violation

if TYPE_CHECKING:
    from tests.simulation.node import Node

SYNC_MOMENTS = 4  # an inline write takes so many times as long as another effect, and is as likely to be interrupted

READS_IN_A_TURN_MAX = 10_000  # a log of a plan has some hundred records


class LogSide:
    """Log of one process; ``node.disk`` holds what outlives it."""

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
        self._read_at = (0, 0)  # the world's event at the last read, and the number of reads in it
        self._busy = self._is_gone = False
        self._appends_max = rng.choice((1, 1, 3))
        self._waiting: list[ef.LoadLog | ef.ReadRecords] = []  # a follower's reads that wait for the log to grow
        self._right_asked = self._looking = False
        self._offered: deque[Offered] = deque()

    @property
    def is_quiet(self) -> bool:
        return not (self._inline or self._disk.jobs or self._reads_under_way)

    def end(self) -> None:
        """End the process: inline writes are done or not, as those beside the loop."""
        self._is_gone = True
        self._disk.jobs.extend(self._inline)

    # --- the right to write, and following ---------------------------------------------------------------------------

    def acquire(self, effect: ef.AcquireWriteLease) -> None:
        shared, node = self._disk.shared, self._node
        if shared.writer is None:
            self._inbox.append(self._grant())
            return
        if shared.writer is node:
            raise Violation(f"{node.name} asks for a right that it has")
        shared.waiting.append(node)
        self._inbox.append(ev.WriteLeaseHeld(f"node {shared.writer.number}"))

    def _grant(self) -> ev.Event:
        self._disk.fence = self._disk.shared.grant(self._node)
        return ev.WriteLeaseGranted(self._disk.fence, self._appends_max)

    def granted(self) -> None:
        """Take the right to write, whoever has it."""
        if self._is_gone:
            return
        self._node.note("is given the right to write")
        events = [self._grant()]
        waiting, self._waiting = self._waiting, []
        for request in waiting:
            if isinstance(request, ef.ReadRecords):
                events.append(ev.RecordsRead([], None, request.session))
            else:
                events.append(answer(self._disk.store, request))
        self._node.post(*events)

    def log_grew(self) -> None:
        """Note that the writer has written something."""
        if self._waiting and not self._looking:
            self._looking = True
            self._clock.after(self._rng.random() * 200 * US, self._look)

    def _look(self) -> None:
        self._looking = False
        waiting, self._waiting = self._waiting, []
        if not self._is_gone:
            for request in waiting:
                self._follow(request)

    def _follow(self, request: ef.LoadLog | ef.ReadRecords) -> None:
        """Answer a request, or keep it until the log has more."""
        store = self._disk.store
        if isinstance(request, ef.ReadRecords) and store.last_sequence_id == request.first_sequence_id - 1:
            self._waiting.append(request)
            return
        summary = store.summary()
        if isinstance(request, ef.LoadLog):
            if summary.checkpoints:
                self._node.post(ev.LogLoaded(summary))
            else:
                self._waiting.append(request)
        else:
            first = request.first_sequence_id
            is_there = summary.first_sequence_id <= first <= summary.last_sequence_id
            values = store.read(first, request.size_bytes_max) if is_there else []
            self._world.marks["record followed"] += len(values) > 0
            self._node.post(ev.RecordsRead(values, summary, request.session))

    # --- the driver's port -------------------------------------------------------------------------------------------

    def submit(self, request: Write | Read) -> None:
        if isinstance(request, ef.Commit | ef.WriteCheckpointChunk):
            self._write(request)
        elif not self._disk.fence and isinstance(request, ef.LoadLog | ef.ReadRecords):
            self._clock.after(self._rng.random() * 100 * US, self._follow_later, request)
        elif self._rng.random() < self._late_share:
            self._world.marks["read answered late"] += 1
            self._reads_under_way += 1
            self._clock.after(self._rng.random() * 300 * US, self._answer_late, request)
        else:
            self._count_reads()
            self._inbox.append(self._answer(request))

    def _count_reads(self) -> None:
        """Count reads within one turn: a turn that reads for ever would never end."""
        event, count = self._read_at
        self._read_at = (self._world.events, count + 1 if event == self._world.events else 1)
        if self._read_at[1] > READS_IN_A_TURN_MAX:
            raise Violation(f"{self._node.name} reads on in one turn: {READS_IN_A_TURN_MAX} times")

    def _follow_later(self, request: ef.LoadLog | ef.ReadRecords) -> None:
        if self._is_gone:
            return
        if not self._disk.fence:
            self._follow(request)
        elif isinstance(request, ef.ReadRecords):
            self._node.post(ev.RecordsRead([], None, request.session))
        else:
            self._node.post(answer(self._disk.store, request))

    def trim(self, effect: ef.Trim) -> None:
        self._disk.trimming = True
        self._work_later()

    # --- checkpoints of standbys -------------------------------------------------------------------------------------

    def request_standby_checkpoint(self, effect: ef.RequestStandbyCheckpoint) -> None:
        self._clock.after(self._rng.random() * 500 * US, self._asks, effect)

    def _asks(self, effect: ef.RequestStandbyCheckpoint) -> None:
        shared = self._disk.shared
        following = [node for node in shared.waiting if node.phase is Phase.FOLLOWING]
        if self._is_gone or not self._disk.is_writer or not following:
            return
        node = self._rng.choice(following)
        shared.asked = Asked(shared.term, node, effect.checkpoint_id, effect.epoch)
        if self._rng.random() < 0.95:
            node.post(ev.StandbyCheckpointRequested(effect.checkpoint_id, effect.epoch))

    def cancel_standby_request(self, effect: ef.CancelStandbyRequest) -> None:
        if self._disk.is_writer:
            self._disk.shared.asked = None

    def offer(self, effect: Offered) -> None:
        if self._disk.fence:
            if isinstance(effect, ef.OfferChunk):
                self._inbox.append(ev.ChunkOffered(effect.checkpoint_id, len(effect.data), "it writes"))
            return
        self._offered.append(effect)
        if len(self._offered) == 1:
            self._clock.after(self._rng.random() * 100 * US, self._puts)

    def _puts(self) -> None:
        if self._is_gone:
            return
        effect = self._offered.popleft()
        if isinstance(effect, ef.OfferChunk):
            problem = self._put_chunk(effect)
            self._node.post(ev.ChunkOffered(effect.checkpoint_id, len(effect.data), problem))
        else:
            self._put_offer(effect)
        if self._offered:
            self._clock.after(self._rng.random() * 100 * US, self._puts)

    def _is_asked_for(self, checkpoint_id: int) -> bool:
        asked = self._disk.shared.asked
        return asked is not None and (asked.node, asked.checkpoint_id) == (self._node, checkpoint_id)

    def _put_chunk(self, chunk: ef.OfferChunk) -> str:
        if not self._is_asked_for(chunk.checkpoint_id):
            return "not wanted any more (simulated)"
        key = CHUNK_KEY.pack(chunk.checkpoint_id, chunk.index)
        durable = self._disk.store.backend.durable
        if durable.get("chunks", key) is not None:
            return "it is there already (simulated)"
        durable.put("chunks", key, sealed_chunk(chunk.checkpoint_id, chunk.index, chunk.data))
        return ""

    def _put_offer(self, effect: ef.OfferCheckpoint) -> None:
        """Offer a checkpoint; the writer at its arrival gets it."""
        shared, checkpoint_id = self._disk.shared, effect.offer.header.checkpoint_id
        if not self._is_asked_for(checkpoint_id):
            return
        shared.offers[checkpoint_id] = shared.term
        self._world.marks["checkpoint offered"] += 1
        delay_ns = self._rng.random() * self._rng.choice((200 * US, 200 * US, 10 * MS))
        self._clock.after(delay_ns, self._tell_writer, decode_offer(encode_offer(effect.offer)))

    def _tell_writer(self, offer: Offer) -> None:
        writer = self._disk.shared.writer
        if writer is not None:
            self._world.marks["checkpoint offered to the next writer"] += (
                self._disk.shared.offers[offer.header.checkpoint_id] != self._disk.shared.term
            )
            writer.post(ev.CheckpointOffered(offer))

    @property
    def has_inline(self) -> bool:
        return bool(self._inline)

    def run_inline(self) -> None:
        while self._inline and not self._disk.holds:
            self._node.may_be_struck(self._inline[0], moments=SYNC_MOMENTS)  # earlier effects have left by then
            self._inbox += self._disk.write_at_once(self._inline.popleft())
        self._inline.clear()

    # --- writes ------------------------------------------------------------------------------------------------------

    def _write(self, job: Job) -> None:
        machine = self._node.machine
        assert machine is not None
        if isinstance(job, ef.Commit) and job.transaction.records:
            self._world.marks["record later than the machine's clock"] += (
                machine.state.log._last_time_ns > self._node.time.wall_ns
            )
        if self._disk.holds:
            return
        is_small = isinstance(job, ef.Commit) and self._rng.random() < self._inline_share
        if self._disk.crashes_at_verdict and isinstance(job, ef.Commit) and job.transaction.verdicts:
            self._disk.crashes_at_verdict = is_small = False
            self._world.crash_soon(self._node, 300 * US)
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
        marks = self._world.marks
        if (silence := self._disk.answers_nothing(request)) is not None:
            marks["read not answered"] += 1
            return silence
        if isinstance(request, ef.ReadTail):
            marks["append settled"] += 1
            self._disk.holds = False
            shared = self._disk.shared
            # A fenced writer gets no ticket: its next answer says that it was fenced.
            ticket = shared.ticket if self._disk.is_writer else 0
            return ev.TailRead(ticket, shared.store.last_sequence_id)
        event = answer(self._disk.store, request)
        if isinstance(event, ev.LogFailed) and isinstance(event.error, DamagedLogError) and not self._disk.is_writer:
            # As in a real store: missing rows can have been trimmed by the new writer.
            holder = f"node {self._disk.shared.term}"
            return ev.LogFailed(FencedError(holder, f"fenced by {holder} (simulated)"), request=request)
        if isinstance(event, ev.LogLoaded):
            summary = event.summary
            outputs = summary.checkpoints[-1].outputs if summary.checkpoints else {}
            for batch in summary.impulses:
                mark = outputs.get(batch.destination)
                if mark is None or batch.first_position > mark.position:
                    marks["impulse put back by a replay"] += 1
        elif isinstance(event, ev.CheckpointChecked) and event.problem is not None:
            checkpoints = self._disk.store.summary().checkpoints
            is_there = any(header.checkpoint_id == event.checkpoint_id for header in checkpoints)
            if is_there and not self._disk.damaged:  # a checkpoint that a follower has read of can be trimmed by now
                raise Violation(f"checkpoint {event.checkpoint_id} is not what was written: {event.problem}")
        elif isinstance(request, ef.ReadSpilled):
            marks["spilled messages read"] += 1
        elif isinstance(request, ef.ReadLetters):
            marks["refused letters looked for"] += 1
        return event
