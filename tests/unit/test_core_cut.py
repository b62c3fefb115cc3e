"""A log that was cut by hand: the streams go on behind what the lost part had sent, with nothing doubled."""

from __future__ import annotations

from immortal.coordinator.core.interfaces import ImpulseBatch
from immortal.coordinator.core.life_cycle.session import Phase
from immortal.protocol.peer_frames import FrameType
from tests.helpers.core import HELLO, Driven, attach, call, checkpoint, rpc


def lived() -> Driven:
    """Record 1 made calls 1 and 2 to b, record 2 made 3 and 4; impulses 5 and 6 follow; b has the first four."""
    driven = Driven.started()
    driven.batch("t1", 1, rpc(1))
    driven.data(attach("b") + call("b", 1) + call("b", 2))
    driven.reply(FrameType.WELCOME, 0)
    driven.batch("t2", 2, rpc(2))
    driven.data(call("b", 3) + call("b", 4))
    driven.data(call("b", 5, rpc_type=2) + call("b", 6, rpc_type=2))
    driven.reply(FrameType.TRIM_TO, 4)
    driven.batch("t3", 3, rpc(3))
    return driven


def recovered(driven: Driven, welcome: int = 4) -> Driven:
    """Its next life, in which the replay makes calls 1 and 2 only; ``welcome``: what b says that it has."""
    second = driven.crash()
    second.connect()
    second.data(HELLO + attach("b") + call("b", 1) + call("b", 2))
    second.reply(FrameType.WELCOME, welcome)
    second.data(checkpoint(b"cut"))
    assert second.phase is Phase.NORMAL, second.reports
    return second


def sent(driven: Driven) -> list[tuple[int, bytes]]:
    return [(frame.position, frame.payload) for frame in driven.frames(FrameType.BATCH)]


def test_without_the_cut_a_replay_that_makes_less_is_a_divergence() -> None:
    second = lived().crash()
    second.connect(HELLO)
    second.data(attach("b") + call("b", 1) + call("b", 2) + checkpoint(b"x"))
    assert "does not do again what it did before" in str(second.stop.error)


def test_the_streams_go_on_behind_what_their_receivers_have() -> None:
    driven = lived()
    driven.store.cut(2)
    second = recovered(driven)
    assert second.store.summary().cut_sequence_id is None
    second.data(call("b", 7))
    assert sent(second) == [(5, rpc(5, rpc_type=2) + rpc(6, rpc_type=2)), (7, rpc(7))]


def test_that_a_receiver_is_waited_for_is_said_once() -> None:
    driven = lived()
    driven.store.cut(2)
    second = driven.crash()
    second.connect()
    said = ("warning", "the log was cut: waiting for 'b' to report which calls of this instance they have")
    for part in (HELLO, attach("b"), call("b", 1), call("b", 2)):
        second.data(part)
    assert second.reports.count(said) == 1
    second.forget()
    second.reply(FrameType.WELCOME, 4)
    second.data(checkpoint(b"cut"))
    assert second.phase is Phase.NORMAL
    assert [text for _, text in second.reports if "waiting for" in text] == []


def test_nothing_is_sent_before_the_new_positions_are_durable() -> None:
    # A crash in between would number the impulses again, and differently, after the receiver has taken them.
    driven = lived()
    driven.store.cut(2)
    second = driven.crash()
    second.connect()
    second.data(HELLO + attach("b") + call("b", 1) + call("b", 2))
    second.reply(FrameType.WELCOME, 4)
    second.auto = False
    second.data(checkpoint(b"cut"))
    assert sent(second) == []
    second.disk_all()
    assert sent(second) == [(5, rpc(5, rpc_type=2) + rpc(6, rpc_type=2))]


def test_a_later_recovery_from_before_the_cut_puts_the_gap_back() -> None:
    driven = lived()
    driven.store.cut(2)
    second = recovered(driven)
    second.data(call("b", 7))
    third = second.crash()
    third.bad_checkpoints.add(third.store.summary().checkpoints[-1].checkpoint_id)
    third.connect()
    third.data(HELLO + attach("b") + call("b", 1) + call("b", 2) + call("b", 7))
    third.data(checkpoint(b"again"))
    assert third.phase is Phase.NORMAL, third.reports
    third.reply(FrameType.WELCOME, 4)
    assert sent(third) == [(5, rpc(5, rpc_type=2) + rpc(6, rpc_type=2) + rpc(7))]


def test_impulses_that_the_receiver_has_in_part_are_sent_from_there() -> None:
    driven = lived()
    driven.reply(FrameType.TRIM_TO, 5)
    driven.batch("t4", 4, rpc(4))
    driven.store.cut(2)
    second = recovered(driven, welcome=5)
    assert list(second.store.summary().impulses) == [
        ImpulseBatch(3, 3, b"", "b"),
        ImpulseBatch(6, 1, rpc(6, rpc_type=2), "b"),
    ]
    assert sent(second) == [(6, rpc(6, rpc_type=2))]


def test_calls_to_oneself_go_on_behind_those_that_were_logged() -> None:
    driven = Driven.started()
    driven.batch("t1", 1, rpc(1))
    driven.data(call("", 1))  # record 2
    driven.data(call("", 2))  # record 3
    driven.store.cut(3)
    second = driven.crash()
    second.connect()
    second.data(HELLO + call("", 1))
    second.data(checkpoint(b"cut"))
    second.data(call("", 9))
    assert second.phase is Phase.NORMAL, second.reports
    assert second.heard[-1] == (3, "RECORD_TIME", "RPC")
    assert second.machine.view.status(0)["inputs"]["a"] == {"position": 3}


def test_a_receiver_may_have_more_than_it_is_known_to_have() -> None:
    # Its last acknowledgement was not durable: only it can say where the stream goes on.
    driven = lived()
    driven.store.cut(2)
    second = driven.crash()
    second.connect()
    second.data(HELLO + attach("b") + call("b", 1) + call("b", 2))
    assert second.phase is Phase.REPLAYING
    waits = "the log was cut: waiting for 'b' to report which calls of this instance they have"
    assert second.reports.count(("warning", waits)) == 1
    second.reply(FrameType.WELCOME, 6)
    assert second.phase is Phase.BECOMING_PRIMARY
    second.data(checkpoint(b"cut") + call("b", 7))
    assert sent(second) == [(7, rpc(7))]
