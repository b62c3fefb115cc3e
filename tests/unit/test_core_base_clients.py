"""Clients that know only the base protocol, and what they do that the protocol leaves open. Their bytes are by hand."""

from __future__ import annotations

import pytest

from coordinator.core import effects as ef
from coordinator.core import events as ev
from coordinator.core.interfaces import LogSpace
from coordinator.core.limits import Limits
from coordinator.core.session import Phase
from protocol.messages import MessageType
from protocol.peer import FrameType
from protocol.extensions import ALL_EXTENSIONS, Hello, encode_hello
from tests.helpers.core import Driven, arguments, checkpoint

# Outgoing RPCs of method 3 with one byte of arguments: a fork and an impulse, to b and to oneself.
CALL_B = bytes.fromhex("0e 00 02 62 00 06 01 05")
IMPULSE_B = bytes.fromhex("0e 00 02 62 00 06 02 07")
IMPULSE_OWN = bytes.fromhex("0c 00 00 00 06 02 08")
# ... and as their receivers get them.
CALL_IN = bytes.fromhex("0a 00 00 06 01 05")
IMPULSE_IN = bytes.fromhex("0a 00 00 06 02 07")
IMPULSE_OWN_IN = bytes.fromhex("0a 00 00 06 02 08")

HELLO = encode_hello(Hello(ALL_EXTENSIONS - {MessageType.VERDICTS, MessageType.CAREFUL, MessageType.APP_DESCRIPTION}))


def base() -> Driven:
    return Driven.started(hello=False)


# --- calls without AttachTo -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("said", [CALL_B, bytes.fromhex("14 05 02") + CALL_B, IMPULSE_B])
def test_a_call_without_attach_to_attaches(said: bytes) -> None:
    driven = base()
    driven.data(said)
    assert not driven.of(ef.CloseApp), driven.reports
    assert driven.of(ef.OpenPeer) == [ef.OpenPeer("b")]
    driven.reply(FrameType.WELCOME, 0)
    (sent,) = driven.frames(FrameType.BATCH)
    assert (sent.position, sent.payload) == (1, IMPULSE_IN if said is IMPULSE_B else CALL_IN)


def test_it_attaches_once_and_an_attach_to_behind_it_is_harmless() -> None:
    driven = base()
    driven.data(CALL_B + bytes.fromhex("04 01 62") + CALL_B)
    driven.reply(FrameType.WELCOME, 0)
    assert b"".join(frame.payload for frame in driven.frames(FrameType.BATCH)) == CALL_IN * 2
    assert not driven.of(ef.CloseApp)


def test_it_attaches_in_a_replay_too() -> None:
    driven = base()
    driven.data(CALL_B)
    second = driven.crash()
    second.connect()
    second.data(CALL_B + checkpoint(b"two"))
    second.reply(FrameType.WELCOME, 0)
    assert [frame.payload for frame in second.frames(FrameType.BATCH)] == [CALL_IN]


def test_with_a_hello_it_stays_an_error() -> None:
    driven = Driven.started()
    driven.data(CALL_B)
    assert driven.of(ef.CloseApp)
    assert "called 'b' without AttachTo" in driven.reports[-1][1]


# --- impulses between the two checkpoints of an upgrade ---------------------------------------------------------------


def upgrading(hello: bytes = b"", limits: Limits | None = None) -> Driven:
    """The app has answered UpgradeTakeCheckpoint, and has not answered the TakeCheckpoint that confirms it."""
    second = Driven.started(hello=bool(hello), limits=limits).crash(upgrade_to=2)
    second.connect(hello)
    second.data(checkpoint(b"upgraded"))
    assert second.phase is Phase.CONFIRMING_UPGRADE
    second.forget()
    return second


@pytest.mark.parametrize("hello", [b"", HELLO], ids=["base", "hello"])
def test_impulses_before_the_upgrade_is_confirmed_are_held_and_then_taken(hello: bytes) -> None:
    second = upgrading(hello)
    attach = bytes.fromhex("04 01 62")
    second.data(IMPULSE_OWN + attach + IMPULSE_B)
    assert second.phase is Phase.CONFIRMING_UPGRADE, second.reports
    assert not any(commit.transaction.records or commit.transaction.impulses for commit in second.of(ef.Commit))
    late = bytes.fromhex("0c 00 00 00 06 02 09")
    second.data(checkpoint(b"confirmed") + late)
    assert second.phase is Phase.NORMAL
    assert arguments(bytes(second.app_bytes)) == [IMPULSE_OWN_IN, bytes.fromhex("0a 00 00 06 02 09")], "in order"
    second.reply(FrameType.WELCOME, 0)
    assert [frame.payload for frame in second.frames(FrameType.BATCH)] == [IMPULSE_IN]
    if hello:
        assert (-1, "IMPULSES_ACCEPTED") in second.heard
    third = second.crash()
    third.connect(hello)
    assert arguments(bytes(third.app_bytes))[:1] == [IMPULSE_OWN_IN], "behind the checkpoint that confirms it"


def test_they_are_dropped_with_an_upgrade_that_fails() -> None:
    second = upgrading()
    second.data(IMPULSE_OWN)
    second.close()
    second.machine._versions.upgrade_to = None  # an operator takes it back
    second.connect()
    second.data(checkpoint(b"old"))
    assert second.phase is Phase.NORMAL
    assert arguments(bytes(second.app_bytes)) == []
    assert second.machine.status(0)["impulses"] == 0


def test_room_in_the_log_lets_none_in_before_the_upgrade_is_confirmed() -> None:
    second = upgrading(limits=Limits(disk_free_bytes_min=1))
    second.handle(ev.LogMeasured(LogSpace(used_bytes=0, free_bytes=0)))
    second.data(IMPULSE_OWN)
    second.handle(ev.LogMeasured(LogSpace(used_bytes=0, free_bytes=1 << 40)))
    assert any("has room again" in message for _, message in second.reports)
    assert not any(commit.transaction.records for commit in second.of(ef.Commit))


def test_impulses_behind_a_repeated_upgrade_of_the_past_wait_for_the_end_of_the_replay() -> None:
    # A base client can't tell that upgrade from one that is new: behind it, it takes itself for primary.
    second = upgrading()
    second.data(checkpoint(b"confirmed"))
    third = second.crash()
    third.bad_checkpoints.add(third.store.summary().checkpoints[-1].checkpoint_id)
    third.connect()
    assert third.heard[-1] == (-1, MessageType.UPGRADE_TAKE_CHECKPOINT.name)
    third.data(checkpoint(b"upgraded again") + IMPULSE_OWN)
    assert third.phase is Phase.BECOMING_PRIMARY, third.reports
    third.data(checkpoint(b"recovered"))
    assert arguments(bytes(third.app_bytes)) == [IMPULSE_OWN_IN]


def test_before_the_first_checkpoint_of_an_upgrade_they_stay_an_error() -> None:
    second = base().crash(upgrade_to=2)
    second.connect()
    second.data(IMPULSE_OWN)
    assert second.of(ef.CloseApp)
    assert "an impulse in the phase 'upgrading'" in second.reports[-1][1]
