"""What the machine waits for: a driver may put off whatever it does not."""

from __future__ import annotations

from immortal.coordinator.core import events as ev
from immortal.coordinator.core.life_cycle.session import Phase
from immortal.coordinator.core.limits import Limits
from immortal.protocol.messages import MessageType
from immortal.protocol.peer_frames import FrameType, RefusedCode
from tests.helpers.core import Driven, call, checkpoint, rpc


def test_it_waits_for_peers_until_their_streams_are_open_and_all_is_sent() -> None:
    driven = Driven.started(limits=Limits(peer_gather_bytes=1 << 20))
    assert not driven.machine.waits_for_peers
    driven.open_stream()
    assert not driven.machine.waits_for_peers, "the stream is open, its first call on its way"
    driven.data(call("b", 2))
    assert not driven.machine.waits_for_peers
    driven.data(call("b", 3))  # gathers until one of the two frames is answered
    assert driven.machine.waits_for_peers
    driven.reply(FrameType.TRIM_TO, 1)
    assert not driven.machine.waits_for_peers


def test_it_waits_for_a_welcome() -> None:
    driven = Driven.started()
    driven.open_stream()
    driven.handle(ev.PeerMoved("b"))
    assert driven.machine.waits_for_peers
    driven.reply(FrameType.WELCOME, 1)
    assert not driven.machine.waits_for_peers


def test_it_waits_for_peers_when_much_is_on_its_way() -> None:
    driven = Driven.started(limits=Limits(peer_window_bytes=4_000))
    driven.open_stream()
    driven.reply(FrameType.TRIM_TO, 1)
    driven.data(call("b", b"x" * 3_000))
    assert driven.machine.waits_for_peers
    driven.reply(FrameType.TRIM_TO, 2)
    assert not driven.machine.waits_for_peers


def test_it_waits_for_peers_while_the_app_is_held_back_by_them() -> None:
    driven = Driven.started(limits=Limits(output_memory_bytes=1_000, spill_limit_bytes=0))
    driven.open_stream()
    driven.data(call("b", b"x" * 2_000))
    assert driven.machine.waits_for_peers
    driven.reply(FrameType.TRIM_TO, 1)
    driven.reply(FrameType.TRIM_TO, 2)
    assert not driven.machine.waits_for_peers


def test_a_stream_that_failed_is_told_of() -> None:
    driven = Driven.started()
    driven.open_stream()
    driven.reply(FrameType.REFUSED, 0, code=RefusedCode.STALE_EPOCH, reason="no")
    assert driven.machine.waits_for_peers, "its call is to be sent again"
    assert driven.machine.components.peers.outbound.any_failed


def test_it_waits_for_the_app_while_there_is_no_room() -> None:
    driven = Driven.started(limits=Limits(app_window_bytes=1_000))
    driven.batch("t", 1, rpc(b"x" * 100))
    assert not driven.machine.waits_for_app
    driven.batch("t", 2, rpc(b"x" * 2_000))
    assert driven.machine.waits_for_app
    driven.app_took_all()
    assert not driven.machine.waits_for_app


def test_it_waits_for_the_app_to_hear_a_goodbye() -> None:
    driven = Driven.started(auto=False)
    driven.handle(ev.StopRequested())
    driven.data(checkpoint(b"last"))
    driven.disk_all()
    assert (-1, MessageType.GOODBYE.name) in driven.heard
    assert driven.machine.waits_for_app
    driven.app_took_all()
    assert driven.phase is Phase.STOPPED
