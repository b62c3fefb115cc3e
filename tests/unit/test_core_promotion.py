"""A recovered app that becomes primary without a checkpoint (type 15), and proves its replay with the next one."""

from __future__ import annotations

from immortal.coordinator.core import effects as ef
from immortal.coordinator.core import events as ev
from immortal.coordinator.core.life_cycle.session import Phase
from immortal.protocol.peer_frames import FrameType
from tests.helpers.core import HELLO, Driven, attach, call, checkpoint, rpc

PRIMARY = (-1, "BECOMING_PRIMARY")


def promoted(driven: Driven) -> Driven:
    """Its next life, connected."""
    second = Driven(driven.store.crash(), promote=True)
    second.connect(HELLO)
    return second


def with_outputs() -> Driven:
    driven = Driven.started()
    driven.data(attach("b") + call("b", 1))
    driven.reply(FrameType.WELCOME, 0)
    driven.data(call("b", 2, rpc_type=2))
    driven.data(call("b", 3))
    driven.batch("t", 1, rpc(1))  # holds the mark
    return driven


def test_it_waits_for_the_calls_that_the_log_knows_of() -> None:
    second = promoted(with_outputs())
    second.data(attach("b") + call("b", 1))
    assert second.phase is Phase.REPLAYING
    second.data(call("b", 3))
    assert second.phase is Phase.NORMAL
    second.reply(FrameType.WELCOME, 0)
    second.data(call("b", 4, rpc_type=2))
    sent = b"".join(frame.payload for frame in second.frames(FrameType.BATCH))
    assert sent == rpc(1) + rpc(2, rpc_type=2) + rpc(3) + rpc(4, rpc_type=2)


def test_an_impulse_with_no_call_before_it_is_not_waited_for() -> None:
    # Found by the simulation: its mark waited for the impulse, and the impulse was not put back: for ever.
    driven = Driven.started()
    driven.open_stream()
    driven.handle(ev.CheckpointRequested())
    driven.data(checkpoint(b"state two"))
    driven.data(call("b", 2, rpc_type=2))
    driven.batch("t", 1, rpc(1))  # holds the mark
    second = promoted(driven)
    assert second.phase is Phase.NORMAL
    second.reply(FrameType.WELCOME, 0)
    assert b"".join(frame.payload for frame in second.frames(FrameType.BATCH)) == rpc(1) + rpc(2, rpc_type=2)


def test_its_next_checkpoint_proves_the_replay() -> None:
    driven = with_outputs()
    driven.data(call("b", 9))  # no mark knows of it, but its receiver does
    driven.reply(FrameType.TRIM_TO, 4)
    driven.batch("u", 2, rpc(2))
    second = promoted(driven)
    second.data(attach("b") + call("b", 1) + call("b", 3) + call("b", 9))
    assert second.phase is Phase.NORMAL
    second.handle(ev.CheckpointRequested())
    second.data(checkpoint(b"proved"))
    assert second.phase is Phase.NORMAL
    assert not second.of(ef.Stop)


def test_a_replay_that_made_less_than_a_receiver_has_is_found_by_the_next_checkpoint() -> None:
    driven = Driven.started()
    driven.data(attach("b") + call("b", 1))
    driven.reply(FrameType.WELCOME, 0)
    driven.reply(FrameType.TRIM_TO, 1)
    driven.data(attach("c") + call("c", 1))
    driven.reply(FrameType.WELCOME, 0, destination="c")  # a commit without a record, so without a mark
    assert driven.store.summary().acknowledged["b"] == 1
    second = promoted(driven)
    assert second.phase is Phase.NORMAL, "no mark says that anything is missing"
    second.handle(ev.CheckpointRequested())
    second.data(checkpoint(b"x"))
    assert "'b' has 1 messages of this instance, the replay made only 0" in str(second.stop.error)


def test_a_cut_log_takes_its_checkpoint_first() -> None:
    driven = Driven.started()
    driven.batch("t", 1, rpc(1))
    driven.store.cut(1)
    assert promoted(driven).heard[-1] == (-1, "TAKE_BECOMING_PRIMARY_CHECKPOINT")
