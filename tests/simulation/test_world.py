"""Seeds of the simulated world, and bugs planted in the core that it must find."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.core.checkpoint_writer import CheckpointWriter
from coordinator.core.input_stream import InputStream
from coordinator.core.interfaces import SourcePosition, Transaction
from coordinator.core.output_stream import OutputStream
from coordinator.core.peers import Peers, _Reply
from coordinator.core.spill import Spill
from coordinator.log.memory import MemoryLogStore
from protocol.peer import FrameType, PeerFrame
from tests.simulation.world import World

SEEDS = 60
SEEDS_TO_FIND_A_BUG = 300


def world_of(seed: int) -> World:
    names = ("a", "b", "c") if seed % 3 == 0 else ("a", "b")
    return World(seed, names=names, crash_rate=random.Random(seed).choice((0.0, 0.01, 0.03)), loss_rate=0.15)


@pytest.mark.parametrize("first", range(0, SEEDS, 10))
def test_every_call_is_executed_exactly_once_in_order(first: int) -> None:
    for seed in range(first, first + 10):
        world = world_of(seed)
        world.run()
        world.check()


@given(
    seed=st.integers(0, 2**32),
    crash_rate=st.sampled_from((0.0, 0.005, 0.02, 0.05)),
    loss_rate=st.sampled_from((0.0, 0.1, 0.4)),
)
@settings(max_examples=40, deadline=None)
def test_streams_agree_with_plain_lists_under_loss_duplication_reordering_and_crashes(
    seed: int, crash_rate: float, loss_rate: float
) -> None:
    world = World(seed, tick_count=15, crash_rate=crash_rate, loss_rate=loss_rate)
    world.run()
    world.check()


def test_a_seed_gives_the_same_run_again() -> None:
    first, second = world_of(7), world_of(7)
    first.run()
    second.run()
    assert first.trace
    assert (first.step_count, first.trace) == (second.step_count, second.trace)


def test_time_never_goes_back_when_a_peer_writes_before_the_app_is_back() -> None:
    # Seeds that found it: the time of the last record was only learned as the app was fed.
    for seed, names in ((376, ("a", "b")), (412, ("a", "b"))):
        for crash_rate in (0.01, 0.03):
            world = World(seed, names=names, crash_rate=crash_rate, loss_rate=0.15)
            world.run()
            world.check()


def test_an_acknowledgement_may_overtake_a_welcome() -> None:
    # The Welcome then names less than is acknowledged; it was taken for a receiver that had lost something.
    world = World(11197, crash_rate=0.01, loss_rate=0.15)
    world.run()
    world.check()


# --- planted bugs: each must be found ---------------------------------------------------------------------------------


def _acknowledge_before_durable(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = Peers._answer

    def hasty(self: Peers, token: object, frame: PeerFrame) -> _Reply | None:
        reply = answer(self, token, frame)
        stream = self.input(frame.sender)
        if reply is None:
            stream._waiting.pop()
            return _Reply(FrameType.TRIM_TO, stream.received)
        return reply

    monkeypatch.setattr(Peers, "_answer", hasty)


def _checkpoint_without_unacknowledged_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    init = CheckpointWriter.__init__

    def forgetful(self: CheckpointWriter, *arguments: object) -> None:
        init(self, *arguments[:4], {}, *arguments[5:])  # type: ignore[arg-type]

    monkeypatch.setattr(CheckpointWriter, "__init__", forgetful)


def _impulses_sent_before_durable(monkeypatch: pytest.MonkeyPatch) -> None:
    append = OutputStream.append_impulses
    monkeypatch.setattr(
        OutputStream, "append_impulses", lambda self, count, payload, ticket: append(self, count, payload, 0)
    )


def _duplicates_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InputStream, "new_part", lambda self, frame: (frame.position, frame.count, frame.payload))


def _positions_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_short(self: InputStream, frame: PeerFrame, last_position: int) -> SourcePosition:
        self.committer_id, self.received = frame.committer_id, last_position
        return SourcePosition(frame.committer_id, frame.epoch, max(0, last_position - 1))

    monkeypatch.setattr(InputStream, "take", one_short)


def _trimmed_one_too_far(monkeypatch: pytest.MonkeyPatch) -> None:
    acknowledge = OutputStream.acknowledge
    monkeypatch.setattr(OutputStream, "acknowledge", lambda self, position: acknowledge(self, position + 1))


def _spilled_read_before_durable(monkeypatch: pytest.MonkeyPatch) -> None:
    next_read = Spill.next_read
    monkeypatch.setattr(Spill, "next_read", lambda self, durable_ticket: next_read(self, 1 << 60))


def _spilled_and_already_there_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the positions that the replay happens to cut it at."""
    init = Spill.__init__
    monkeypatch.setattr(Spill, "__init__", lambda self, row_bytes, extents=(): init(self, row_bytes))
    commit = MemoryLogStore.commit

    def no_two(self: MemoryLogStore, transaction: Transaction) -> None:
        for batch in transaction.spilled:
            for other in self._durable.spilled.values():
                apart = other.last_position < batch.first_position or batch.last_position < other.first_position
                assert other.destination != batch.destination or apart, "two rows with the same message"
        commit(self, transaction)

    monkeypatch.setattr(MemoryLogStore, "commit", no_two)


def _spilled_removed_before_it_is_acknowledged(monkeypatch: pytest.MonkeyPatch) -> None:
    trim = MemoryLogStore.trim

    def greedy(self: MemoryLogStore, **options: int | None) -> bool:
        for key, batch in list(self._durable.spilled.items()):
            if batch.destination in self._durable.acknowledged:
                del self._durable.spilled[key]
        return trim(self, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(MemoryLogStore, "trim", greedy)


@pytest.mark.parametrize(
    "plant",
    [
        _acknowledge_before_durable,
        _checkpoint_without_unacknowledged_outputs,
        _impulses_sent_before_durable,
        _duplicates_taken,
        _positions_not_remembered,
        _trimmed_one_too_far,
        _spilled_read_before_durable,
        _spilled_and_already_there_written_again,
        _spilled_removed_before_it_is_acknowledged,
    ],
)
def test_a_planted_bug_is_found(plant: object, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)  # type: ignore[operator]
    for seed in range(SEEDS_TO_FIND_A_BUG):
        world = world_of(seed)
        try:
            world.run(steps_max=15_000)
            world.check()
        except Exception:
            return
    pytest.fail(f"not found by {SEEDS_TO_FIND_A_BUG} seeds")
