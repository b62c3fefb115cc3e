"""Streams of messages between the services of a what-if's cone, on their way to their places in the receivers' logs."""

from __future__ import annotations

import random
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Mapping

from msgspec import Struct, field

from immortal.coordinator.core.interfaces import ONESELF
from immortal.protocol.trailer import BatchKind
from immortal.replay.fleet.model import DELAY_NS, Service
from immortal.replay.fleet.player import LoggedRecord, Place


class Sent(Struct, eq=False):
    """Message on its way. ``slot``: its place in the receiver's log."""

    message: bytes
    slot: Place | None
    difference: int | None
    is_due: bool = False


class Stream(Struct, eq=False):
    """Stream between two services. ``settled``: position up to which it was equal to the log's before the receiver
    joined. ``equal``: positions of messages behind ``queue`` that are the log's, and come at their places.
    ``kind``: see ``Rules.delays``. ``delays``: (time it was sent, delay) of all messages of the log, in ns.
    """

    kind: str = "recorded"
    settled: int = 0
    queue: deque[Sent] = field(default_factory=deque)
    equal: deque[range] = field(default_factory=deque)
    last_ns: int = 0
    drawn: random.Random | None = None
    delays: tuple[array[int], array[int]] | None = None

    def has(self, first: int, last: int) -> bool:
        """Return True if these positions come next, as in the log. Earlier ones were taken."""
        if self.queue:
            return False
        for run in self.equal:
            if run.start <= first < run.stop:
                first = run.stop
            if first > last:
                return True
        return False

    def pop_until(self, last: int) -> None:
        """Take the messages up to the position ``last``."""
        while self.equal and self.equal[0].start <= last:
            if (run := self.equal.popleft()).stop > last + 1:
                self.equal.appendleft(range(last + 1, run.stop))

    def delay_ns(self, sender: Service, receiver: Service, seed: int, time_ns: int) -> int:
        """Return a new message's delay in ns, from delays in the log. ``seed`` 0: that of the last message before."""
        if self.delays is None:
            self.delays = array("q"), array("q")
            destination = ONESELF if sender is receiver else receiver.name
            for position, sequence_id in sender.recorded.runs[destination].positions():
                to = receiver.log.place_of(ONESELF if sender is receiver else sender.name, position)
                if to is not None:
                    made_ns = sender.log.time_of(sequence_id)
                    self.delays[0].append(made_ns)
                    self.delays[1].append(max(0, receiver.log.time_of(to[0]) - made_ns))
            if self.delays[1] and self.kind != "recorded":
                pick = min if self.kind == "shortest" else max
                self.delays = array("q", [0]), array("q", [pick(self.delays[1])])
        made, delays = self.delays
        if not delays:
            return DELAY_NS
        if seed:
            if self.drawn is None:
                self.drawn = random.Random(f"{seed} {sender.name} {receiver.name}")  # noqa: S311 (from a seed)
            return self.drawn.choice(delays)
        return delays[max(0, bisect_right(made, time_ns) - 1)]


class Streams(dict[tuple[str, str], Stream]):
    """Streams by (sender, receiver). ``services``: those of the cone. ``delays``: see ``Rules``."""

    def __init__(self, services: Mapping[str, Service], delays: str) -> None:
        self._services = services
        self._delays = delays

    def __missing__(self, names: tuple[str, str]) -> Stream:
        stream = self[names] = Stream(self._delays)
        return stream

    def pop_as_recorded(self, service: Service, record: LoggedRecord) -> bool:
        """Take the messages of ``record`` from their streams if all come now as they are in the log; else return
        False."""
        taken: list[tuple[Stream, int]] = []
        for batch in record.trailer.batches:
            sender = self._services.get(batch.name or service.name)
            if batch.kind != BatchKind.STREAM or sender is None:
                continue
            stream = self[sender.name, service.name]
            before = max(batch.first_position - 1, service.received_positions.get(sender.name, 0), stream.settled)
            first = sender.recorded.runs[ONESELF if sender is service else service.name].next_after(before)
            if first is None or first > batch.last_position:
                continue  # impulses, and messages from before the run: the record's stand
            if not stream.has(first, batch.last_position):
                return False
            taken.append((stream, batch.last_position))
        if any(place[0] == record.sequence_id for place in service.done):
            return False
        for stream, last_position in taken:
            stream.pop_until(last_position)
        return True

    def add_as_recorded(self, service: Service, destination: str, receiver: Service | None, run: range) -> bool:
        """Send messages that are the log's to a receiver (None: it is not in the cone); return False if they can't
        be sent together."""
        stream = self[service.name, service.receiver(destination)]
        if receiver is None:
            if service.recorded.runs[destination].next_after(stream.settled) == run.start:
                stream.settled = run.stop - 1
                return True
        elif run.start > receiver.received_positions.get(service.name, 0):
            from_name = ONESELF if receiver is service else service.name
            first, last = (receiver.log.place_of(from_name, position) for position in (run.start, run.stop - 1))
            if first is not None and last is not None and first[0] > receiver.reached:
                stream.equal.append(run)
                return True
        return False

    def queue(self, sender: Service, receiver: Service) -> deque[Sent]:
        """Return the messages on their way in a stream, one by one."""
        stream = self[sender.name, receiver.name]
        destination, from_name = (ONESELF, ONESELF) if sender is receiver else (receiver.name, sender.name)
        while stream.equal:
            for output in sender.recorded.sent(destination, stream.equal.popleft()):
                stream.queue.append(Sent(output.message, receiver.log.place_of(from_name, output.position), None))
        return stream.queue

    def is_past_settled(self, sender: str, receiver: Service) -> bool:
        """Return True if all messages that were sent before the receiver joined have arrived, as recorded."""
        if not (settled := self[sender, receiver.name].settled):
            return True
        place = receiver.log.place_of(sender, settled)
        return place is None or place[0] <= receiver.reached
