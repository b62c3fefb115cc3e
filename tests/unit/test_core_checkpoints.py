"""When a checkpoint is due, and one that the app takes beside its work."""

from __future__ import annotations

import pytest

from immortal.coordinator.core import effects as ef
from immortal.coordinator.core import events as ev
from immortal.coordinator.core.life_cycle.session import Phase
from immortal.coordinator.core.limits import Limits
from immortal.protocol.messages import MessageType, encode_message
from immortal.protocol.peer_frames import FrameType
from tests.helpers.core import HELLO, NOW_NS, Driven, attach, call, checkpoint, rpc

TAKE = (-1, "TAKE_CHECKPOINT")
BEGIN = encode_message(MessageType.SNAPSHOT_BEGIN)
END = encode_message(MessageType.SNAPSHOT_END)
AGE_NS = 60 * 10**9


def chunk(data: bytes) -> bytes:
    return encode_message(MessageType.SNAPSHOT_CHUNK, data)


def asked() -> Driven:
    driven = Driven.started()
    driven.data(attach("b") + call("b", 1))
    driven.reply(FrameType.WELCOME, 0)
    driven.handle(ev.CheckpointRequested())
    assert driven.heard == [TAKE]
    driven.forget()
    return driven


def test_a_snapshot_is_the_state_of_its_begin() -> None:
    driven = asked()
    driven.data(BEGIN)
    driven.batch("t", 1, rpc(1))
    driven.data(chunk(b"one ") + call("b", 2) + chunk(b"two"))
    assert [frame.payload for frame in driven.frames(FrameType.BATCH)] == [rpc(2)], "outputs wait for no snapshot"
    assert driven.heard[-1] == (1, "RECORD_TIME", "RPC")
    driven.data(END)
    header = driven.store.summary().checkpoints[-1]
    assert (header.sequence_id, header.size_bytes, header.outputs["b"].position) == (0, 7, 1)
    assert [batch.payload for batch in header.unacknowledged["b"]] == [rpc(1)]
    second = driven.crash()
    second.connect(HELLO)
    assert second.heard[:2] == [b"one two", (1, "RECORD_TIME", "RPC")]
    second.data(attach("b") + call("b", 2) + checkpoint(b"x"))
    second.reply(FrameType.WELCOME, 0)
    assert [frame.payload for frame in second.frames(FrameType.BATCH)] == [rpc(1) + rpc(2)]


def test_the_next_checkpoint_waits_until_the_last_one_counts() -> None:
    # Found by the simulation: on a slow disk its chunks came before the header of the one before, and stopped all.
    driven = asked()
    driven.auto = False
    driven.batch("t", 1, rpc(1))  # a commit that is on its way
    driven.data(checkpoint(b"one"))
    driven.forget()
    driven.handle(ev.CheckpointRequested())
    assert (driven.phase, driven.heard) == (Phase.NORMAL, [])
    driven.disk_all()
    assert driven.heard[-1] == TAKE
    driven.data(checkpoint(b"two"))
    driven.disk_all()
    assert [header.size_bytes for header in driven.store.summary().checkpoints][1:] == [3, 3]


def test_a_snapshot_that_fails_leaves_the_checkpoint_before_it() -> None:
    driven = asked()
    driven.data(BEGIN + chunk(b"half") + encode_message(MessageType.SNAPSHOT_END, b"the child was killed"))
    assert driven.phase is Phase.NORMAL
    assert [header.checkpoint_id for header in driven.store.summary().checkpoints] == [1]
    assert (
        "error",
        "the app could not take a checkpoint: the child was killed; the previous one stays in use",
    ) in driven.reports
    driven.handle(ev.CheckpointRequested())
    driven.data(checkpoint(b"whole"))
    assert driven.store.read_checkpoint_chunk(driven.store.summary().checkpoints[-1].checkpoint_id, 0) == b"whole"


def test_a_clean_stop_goes_on_without_the_last_checkpoint_if_there_is_none() -> None:
    driven = Driven.started()
    driven.handle(ev.StopRequested())
    driven.data(BEGIN + encode_message(MessageType.SNAPSHOT_END, b"no memory"))
    driven.app_took_all()
    assert driven.stop.error is None


@pytest.mark.parametrize("said", [BEGIN, chunk(b"x"), END])
def test_a_snapshot_that_nobody_asked_for_breaks_the_protocol(said: bytes) -> None:
    driven = Driven.started()
    driven.data(said)
    assert driven.heard == [(-1, "REFUSAL")]


def test_a_lost_app_s_half_snapshot_counts_for_nothing() -> None:
    driven = asked()
    driven.data(BEGIN + chunk(b"half"))
    driven.close()
    driven.connect()
    assert driven.heard[0] == b"state one"


def test_an_old_checkpoint_is_followed_by_the_next_if_there_is_anything_new() -> None:
    driven = Driven(limits=Limits(checkpoint_age_ns=AGE_NS))
    driven.connect()
    driven.data(HELLO + encode_message(MessageType.INITIAL_MESSAGE, b"") + checkpoint(b"x"))
    assert driven.of(ef.WakeAt) == [ef.WakeAt(NOW_NS + AGE_NS)]
    driven.batch("t", 1, rpc(1))
    driven.forget()
    driven.now_ns += AGE_NS - 1
    driven.handle(ev.Tick())
    assert driven.phase is Phase.NORMAL
    driven.now_ns += 1
    driven.handle(ev.Tick())
    assert driven.heard == [TAKE]
    driven.data(checkpoint(b"y"))
    assert driven.of(ef.WakeAt)[-1] == ef.WakeAt(NOW_NS + 2 * AGE_NS)
    driven.forget()
    driven.now_ns += AGE_NS
    driven.handle(ev.Tick())
    assert driven.phase is Phase.NORMAL, "nothing is new"
    driven.batch("u", 2, rpc(2))
    assert driven.phase is Phase.CHECKPOINTING
