"""An output stream against a plain list: whatever is lost, given up or crashes, the receiver's list is the sender's."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from coordinator.core.interfaces import ImpulseBatch, OutputBatch, OutputMark
from coordinator.core.limits import Limits
from coordinator.core.output_stream import OutputStream, StreamState, behind, cut
from protocol.batch import check_batch
from protocol.checksum import crc64
from protocol.messages import decode_messages, encode_incoming_rpc

LIMITS = Limits(peer_window_bytes=200, peer_window_frames=4, peer_frame_bytes=80, peer_gather_bytes=40)
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
        self.kept: list[ImpulseBatch] = []  # as the log has them
        self.kept_tickets: list[int] = []
        self.snapshot = Snapshot(OutputMark(0, 0), ())
        self.ticket = self.durable = 0
        self.acknowledged_on_disk = 0
        self.in_flight: list[OutputBatch] = []
        self.stream = OutputStream("b", LIMITS)

    def _make(self, lengths: list[int], ticket: int = 0) -> bytes:
        made = [encode_incoming_rpc(next(self.numbers), 1, b"x" * length) for length in lengths]
        self.model += [Sent(data, ticket) for data in made]
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
        self.kept.append(batch)
        self.kept_tickets.append(self.ticket)

    @precondition(lambda self: self.durable < self.ticket)
    @rule(data=st.data())
    def a_commit_is_durable(self, data: st.DataObject) -> None:
        self.durable = data.draw(st.integers(self.durable + 1, self.ticket))

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
            assert sum(len(other.payload) for other in self.in_flight) < LIMITS.peer_window_bytes
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

    @rule(back=st.integers(0, 5))
    def a_late_acknowledgement(self, back: int) -> None:
        self.stream.acknowledge(max(0, self.stream.acknowledged - back))

    @rule()
    def frames_are_given_up(self) -> None:
        attempt = self.stream.attempt
        self.stream.give_up_in_flight()
        assert self.stream.attempt == attempt + 1
        self.in_flight.clear()

    @rule()
    def acknowledgements_reach_the_disk(self) -> None:
        self.acknowledged_on_disk = self.stream.acknowledged

    @rule()
    def a_checkpoint(self) -> None:
        if any(message.ticket > self.durable for message in self.model):
            return  # it follows them into the log
        self.snapshot = Snapshot(self.stream.mark, tuple(self.stream.unacknowledged))
        self.acknowledged_on_disk = self.stream.acknowledged  # in the same transaction, or in one before it

    @rule(data=st.data())
    def a_crash_and_a_replay(self, data: st.DataObject) -> None:
        """Impulses that were not durable are gone, and were never seen; the app makes everything else again."""
        self.kept = [
            batch for batch, ticket in zip(self.kept, self.kept_tickets, strict=True) if ticket <= self.durable
        ]
        self.kept_tickets = [ticket for ticket in self.kept_tickets if ticket <= self.durable]
        self.model = [message for message in self.model if message.ticket <= self.durable]
        self.ticket = self.durable
        mark = self.snapshot.mark
        kept = [
            ImpulseBatch("b", batch.first_position, batch.count, b"")
            if batch.last_position <= self.acknowledged_on_disk
            else batch
            for batch in self.kept
        ]
        self.stream = OutputStream(
            "b",
            LIMITS,
            mark=mark,
            unacknowledged=self.snapshot.unacknowledged,
            acknowledged=self.acknowledged_on_disk,
            impulses=kept,
        )
        self.in_flight.clear()
        again = [message.data for message in self.model[mark.position :] if not message.ticket]
        while again:
            if self.stream.state is not StreamState.OPEN and data.draw(st.integers(0, 3)) == 0:
                self.it_is_welcomed()
                self.it_sends()
            count = data.draw(st.integers(1, len(again)))
            self.stream.append(count, b"".join(again[:count]))
            again = again[count:]
        self.stream.finish_replay()

    @invariant()
    def it_is_the_list(self) -> None:
        stream = self.stream
        assert stream.position == len(self.model)
        assert stream.checksum == crc64(b"".join(message.data for message in self.model if not message.ticket))
        waiting = b"".join(message.data for message in self.model[stream.acknowledged :])
        assert b"".join(batch.payload for batch in stream.unacknowledged) == waiting
        assert stream.waiting_bytes == len(waiting)
        assert self.received == [message.data for message in self.model[: len(self.received)]]

    def teardown(self) -> None:
        if not hasattr(self, "stream"):
            return
        self.durable = self.ticket
        if self.stream.state is not StreamState.OPEN:
            self.it_is_welcomed()
        while True:
            self.it_sends()
            if not self.in_flight:
                break
            self.a_frame_arrives(answered=True)
        assert self.received == [message.data for message in self.model]
        assert self.stream.waiting_bytes == 0
        assert self.stream.next_batch(self.durable) is None


OutputStreamMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestOutputStream = OutputStreamMachine.TestCase


@given(lengths=sizes.filter(lambda found: len(found) > 1), first=st.integers(1, 10**9), data=st.data())
@settings(deadline=None)
def test_cut_and_behind_are_slices(lengths: list[int], first: int, data: st.DataObject) -> None:
    made = [encode_incoming_rpc(index, 1, b"x" * length) for index, length in enumerate(lengths)]
    batch = OutputBatch(first, len(made), b"".join(made))
    count = data.draw(st.integers(1, len(made) - 1))
    front, back = cut(batch, count)
    assert front == OutputBatch(first, count, b"".join(made[:count]))
    assert back == OutputBatch(first + count, len(made) - count, b"".join(made[count:]))
    assert behind(batch, first + count - 1) == back
    assert behind(batch, first - 1) is batch
    assert behind(batch, batch.last_position) is None
    with pytest.raises(Exception, match=f"cut {len(made)} of {len(made)} messages"):
        cut(batch, len(made))
