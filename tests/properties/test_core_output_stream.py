"""An output stream against a plain list: whatever is lost, given up, spilled or crashes, the receiver's list is the
sender's.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from immortal.coordinator.core.interfaces import OutputBatch, OutputMark, SpilledBatch, Transaction
from immortal.coordinator.core.limits import Limits
from immortal.coordinator.core.output.output_stream import OutputStream, StreamState
from immortal.coordinator.core.output.send_buffer import cut, part_after, split_to_fit
from immortal.coordinator.log.memory import MemoryLogStore
from immortal.protocol.batch import check_batch
from immortal.protocol.checksum import crc64
from immortal.protocol.messages import decode_messages, encode_incoming_rpc
from tests.helpers.effort import effort

LIMITS = Limits(
    peer_window_bytes=200,
    peer_window_frames=4,
    peer_frame_bytes=80,
    peer_gather_bytes=40,
    output_memory_bytes=250,
    spill_row_bytes=60,
    read_size_bytes=70,
)
sizes = st.lists(st.integers(0, 40), min_size=1, max_size=6)


@dataclass(frozen=True)
class Sent:
    """One message of the model's list; ``ticket`` is an impulse's commit, 0 for what a replay makes again."""

    data: bytes
    ticket: int = 0


@dataclass(frozen=True)
class Snapshot:
    """What a checkpoint keeps."""

    mark: OutputMark
    unacknowledged: tuple[OutputBatch, ...]


def messages_of(payload: bytes) -> list[bytes]:
    ends = [0, *(end for _, _, end in decode_messages(payload))]
    return [payload[start:end] for start, end in itertools.pairwise(ends)]


class OutputStreamMachine(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.numbers = itertools.count()
        self.model: list[Sent] = []  # what the app has made, by position
        self.received: list[bytes] = []  # what the receiver has
        self.largest_bytes = 0  # that the app has sent in one piece
        self.store = MemoryLogStore()
        self.store.impulses_loaded_size_bytes_max = 100
        self.waiting: list[tuple[int, Transaction]] = []  # for the disk, by ticket
        self.snapshot = Snapshot(OutputMark(0, 0), ())
        self.ticket = self.durable = 0
        self.read: tuple[int, list[OutputBatch]] | None = None  # of the log, on its way
        self.in_flight: list[OutputBatch] = []
        self.stream = OutputStream("b", LIMITS)

    def _make(self, lengths: list[int], ticket: int = 0) -> bytes:
        made = [encode_incoming_rpc(next(self.numbers), 1, b"x" * length) for length in lengths]
        self.model += [Sent(data, ticket) for data in made]
        self.largest_bytes = max(self.largest_bytes, sum(map(len, made)))  # rows are not cut
        return b"".join(made)

    @rule(lengths=sizes)
    def the_app_calls(self, lengths: list[int]) -> None:
        self.stream.append(len(lengths), self._make(lengths))

    @rule(lengths=sizes)
    def an_impulse(self, lengths: list[int]) -> None:
        self.ticket += 1
        payload = self._make(lengths, self.ticket)
        batch = self.stream.append_impulses(len(lengths), payload, self.ticket)
        assert (batch.destination, batch.first_position) == ("b", len(self.model) - len(lengths) + 1)
        assert (batch.count, batch.payload) == (len(lengths), payload)
        self.waiting.append((self.ticket, Transaction(impulses=[batch])))

    @precondition(lambda self: self.durable < self.ticket)
    @rule(data=st.data())
    def a_commit_is_durable(self, data: st.DataObject) -> None:
        self._commit(data.draw(st.integers(self.durable + 1, self.ticket)))

    def _commit(self, durable: int) -> None:
        while self.waiting and self.waiting[0][0] <= durable:
            self.store.commit(self.waiting.pop(0)[1])
        self.durable = durable

    @precondition(lambda self: self.stream.spill.gathered_bytes)
    @rule()
    def what_gathered_is_spilled(self) -> None:
        self.ticket += 1
        rows = self.stream.spill.store(self.ticket)
        spilled = [SpilledBatch(row.first_position, row.count, row.payload, "b") for row in rows]
        self.waiting.append((self.ticket, Transaction(spilled=spilled)))

    @precondition(lambda self: self.read is None)
    @rule()
    def the_log_is_read(self) -> None:
        found = self.stream.next_read(self.durable)
        if found is not None:
            self.read = (found[0], self.store.read_spilled("b", *found))

    @precondition(lambda self: self.read is not None)
    @rule()
    def what_was_read_comes(self) -> None:
        assert self.read is not None
        self.stream.spilled_read(*self.read)
        self.read = None

    @precondition(lambda self: self.stream.state is not StreamState.OPEN)
    @rule()
    def it_is_welcomed(self) -> None:
        self.stream.state = StreamState.OPEN
        self.stream.acknowledge(len(self.received))

    @rule()
    def it_sends(self) -> None:
        while (batch := self.stream.next_batch(self.durable)) is not None:
            assert self.stream.state is StreamState.OPEN
            expected = self.in_flight[-1].last_position if self.in_flight else self.stream.acknowledged
            assert batch.first_position == expected + 1
            check_batch(batch.payload, batch.count)
            sent = self.model[batch.first_position - 1 : batch.last_position]
            assert batch.payload == b"".join(message.data for message in sent)
            assert all(message.ticket <= self.durable for message in sent), "an impulse left before it was durable"
            in_flight_bytes = sum(len(other.payload) for other in [*self.in_flight, batch])
            assert in_flight_bytes <= self.stream.window_bytes or (not self.in_flight and batch.count == 1)
            assert len(self.in_flight) < LIMITS.peer_window_frames
            self.in_flight.append(batch)

    @precondition(lambda self: self.in_flight)
    @rule(answered=st.booleans())
    def a_frame_arrives(self, answered: bool) -> None:
        batch = self.in_flight[0]
        assert batch.first_position <= len(self.received) + 1
        self.received += messages_of(batch.payload)[len(self.received) - batch.first_position + 1 :]
        if answered:
            self.in_flight.pop(0)
            self.stream.acknowledge(len(self.received))
            self.in_flight = [other for other in self.in_flight if other.last_position > len(self.received)]

    @rule(window_bytes=st.sampled_from((20, 60, 200)))
    def a_window_is_granted(self, window_bytes: int) -> None:
        self.stream.window_bytes = window_bytes

    @rule(back=st.integers(0, 5))
    def a_late_acknowledgement(self, back: int) -> None:
        self.stream.acknowledge(max(0, self.stream.acknowledged - back))

    @rule()
    def frames_are_given_up(self) -> None:
        attempt = self.stream.attempt
        self.stream.requeue_in_flight()
        assert self.stream.attempt == attempt + 1
        self.in_flight.clear()

    @rule()
    def acknowledgements_reach_the_disk(self) -> None:
        self.ticket += 1
        self.waiting.append((self.ticket, Transaction(acknowledged={"b": self.stream.acknowledged})))

    @rule()
    def the_log_is_trimmed(self) -> None:
        self.store.trim(keep_checkpoints=None)

    @rule()
    def a_checkpoint(self) -> None:
        self.acknowledgements_reach_the_disk()
        self._commit(self.ticket)  # it follows them into the log
        self.snapshot = Snapshot(self.stream.mark, tuple(self.stream.unacknowledged))

    @rule(data=st.data())
    def a_crash_and_a_replay(self, data: st.DataObject) -> None:
        """Impulses that were not durable are gone, and were never seen; the app makes everything else again."""
        self.store = self.store.crash()
        self.waiting.clear()
        self.read = None
        self.model = [message for message in self.model if message.ticket <= self.durable]
        self.ticket = self.durable
        mark = self.snapshot.mark
        summary = self.store.summary()
        self.stream = OutputStream(
            "b",
            LIMITS,
            mark=mark,
            unacknowledged=self.snapshot.unacknowledged,
            acknowledged=summary.acknowledged.get("b", 0),
            impulses=summary.impulses,
            spilled=summary.spilled.get("b", ()),
        )
        self.in_flight.clear()
        again = [message.data for message in self.model[mark.position :] if not message.ticket]
        while again:
            if self.stream.state is not StreamState.OPEN and data.draw(st.integers(0, 3)) == 0:
                self.it_is_welcomed()
                self.it_sends()
            if data.draw(st.integers(0, 3)) == 0:
                data.draw(st.sampled_from((self._spill, self._read, self._read_comes, self.the_log_is_trimmed)))()
            count = data.draw(st.integers(1, len(again)))
            self.largest_bytes = max(self.largest_bytes, sum(map(len, again[:count])))
            self.stream.append(count, b"".join(again[:count]))
            again = again[count:]
        self.stream.finish_replay()

    def _spill(self) -> None:
        if self.stream.spill.gathered_bytes:
            self.what_gathered_is_spilled()

    def _read(self) -> None:
        if self.read is None:
            self.the_log_is_read()

    def _read_comes(self) -> None:
        if self.read is not None:
            self.what_was_read_comes()

    @invariant()
    def it_is_the_list(self) -> None:
        stream = self.stream
        assert stream.position == len(self.model)
        assert stream.checksum == crc64(b"".join(message.data for message in self.model if not message.ticket))
        waiting = [message.data for message in self.model[stream.acknowledged :]]
        in_memory = stream.unacknowledged
        assert sum(len(batch.payload) for batch in in_memory) == stream.memory_bytes
        assert sorted(in_memory, key=lambda batch: batch.first_position) == in_memory
        for batch in in_memory:
            behind_acknowledged = part_after(batch, stream.acknowledged)
            assert behind_acknowledged is not None
            first = behind_acknowledged.first_position - stream.acknowledged - 1
            assert behind_acknowledged.payload == b"".join(waiting[first : first + behind_acknowledged.count])
        if not stream.spill.active:
            assert stream.waiting_bytes >= sum(map(len, waiting))
            assert stream.spilled_bytes == 0
        # All that memory has no room for is gathered, so that it can be spilled; what is sent first is bounded.
        sent_first_bytes = stream.memory_bytes - stream.spill.gathered_bytes
        assert sent_first_bytes <= LIMITS.output_memory_bytes + self.largest_bytes
        assert stream.spill.kept_bytes >= 0
        assert self.received == [message.data for message in self.model[: len(self.received)]]

    def teardown(self) -> None:
        if not hasattr(self, "stream"):
            return
        self._commit(self.ticket)
        if self.stream.state is not StreamState.OPEN:
            self.it_is_welcomed()
        while True:
            self.it_sends()
            if self.read is not None:
                self.what_was_read_comes()
                continue
            if self.in_flight:
                self.a_frame_arrives(answered=True)
                continue
            self.the_log_is_read()  # or what gathered has room again
            self.it_sends()
            if self.read is None and not self.in_flight:
                break
        assert self.received == [message.data for message in self.model]
        assert self.stream.waiting_bytes == 0
        assert not self.stream.spill.active
        assert self.stream.spill.kept_bytes == 0
        assert self.stream.next_batch(self.durable) is None
        self.acknowledgements_reach_the_disk()
        self._commit(self.ticket)
        self.store.trim(keep_checkpoints=None)
        assert not self.store.summary().spilled


OutputStreamMachine.TestCase.settings = settings(max_examples=effort(50), stateful_step_count=40, deadline=None)
TestOutputStream = OutputStreamMachine.TestCase


@given(lengths=sizes.filter(lambda found: len(found) > 1), first=st.integers(1, 10**9), data=st.data())
def test_cut_and_behind_are_slices(lengths: list[int], first: int, data: st.DataObject) -> None:
    made = [encode_incoming_rpc(index, 1, b"x" * length) for index, length in enumerate(lengths)]
    batch = OutputBatch(first, len(made), b"".join(made))
    count = data.draw(st.integers(1, len(made) - 1))
    front, back = cut(batch, count)
    assert front == OutputBatch(first, count, b"".join(made[:count]))
    assert back == OutputBatch(first + count, len(made) - count, b"".join(made[count:]))
    assert part_after(batch, first + count - 1) == back
    assert part_after(batch, first - 1) is batch
    assert part_after(batch, batch.last_position) is None
    with pytest.raises(Exception, match=f"cut {len(made)} of {len(made)} messages"):
        cut(batch, len(made))


@given(lengths=sizes | st.integers(1, 9).map(lambda count: [7] * count), size_bytes_max=st.integers(1, 200))
def test_what_fits_is_as_much_as_can_be(lengths: list[int], size_bytes_max: int) -> None:
    made = [encode_incoming_rpc(index, 1, b"x" * length) for index, length in enumerate(lengths)]
    batch = OutputBatch(5, len(made), b"".join(made))
    front, rest = split_to_fit(batch, size_bytes_max)
    assert front.payload + (rest.payload if rest else b"") == batch.payload
    assert front.payload == b"".join(made[: front.count])
    assert front.count + (rest.count if rest else 0) == len(made)
    assert len(front.payload) <= size_bytes_max or front.count == 1
    if rest is not None:
        assert rest.first_position == front.last_position + 1
        assert len(batch.payload) > size_bytes_max
    if len(set(lengths)) == 1:
        assert front.count == max(1, min(len(made), size_bytes_max // len(made[0])))
