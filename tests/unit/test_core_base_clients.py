"""Clients that know only the base protocol, and what they do that the protocol leaves open. Their bytes are by hand."""

from __future__ import annotations

import pytest

from immortal.coordinator.core import effects as ef
from immortal.coordinator.core import events as ev
from immortal.coordinator.core.errors import DivergenceError
from immortal.coordinator.core.interfaces import LogSpace
from immortal.coordinator.core.life_cycle.session import Phase
from immortal.coordinator.core.limits import Limits, ReplayCheck
from immortal.protocol.extensions import Hello, encode_hello
from immortal.protocol.messages import MessageType, encode_outgoing_rpc
from immortal.protocol.peer_frames import FrameType
from immortal.protocol.varint import encode_zigzag
from tests.helpers.core import EXTENSIONS, Driven, arguments, checkpoint

# Outgoing RPCs of method 3 with one byte of arguments: a fork and an impulse, to b and to oneself.
CALL_B = bytes.fromhex("0e 00 02 62 00 06 01 05")
IMPULSE_B = bytes.fromhex("0e 00 02 62 00 06 02 07")
IMPULSE_OWN = bytes.fromhex("0c 00 00 00 06 02 08")
# ... and as their receivers get them.
CALL_IN = bytes.fromhex("0a 00 00 06 01 05")
IMPULSE_IN = bytes.fromhex("0a 00 00 06 02 07")
IMPULSE_OWN_IN = bytes.fromhex("0a 00 00 06 02 08")

HELLO = encode_hello(Hello(EXTENSIONS - {MessageType.VERDICTS, MessageType.CAREFUL, MessageType.APP_DESCRIPTION}))


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
    second.machine.state.versions.upgrade_to = None  # an operator takes it back
    second.connect()
    second.data(checkpoint(b"old"))
    assert second.phase is Phase.NORMAL
    assert arguments(bytes(second.app_bytes)) == []
    assert second.machine.view.status(0)["impulses"] == 0


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


# --- a replay with other contents -------------------------------------------------------------------------------------

OWN = bytes.fromhex("0c 00 00 00 06 01 05")  # a fork call of method 3 to oneself: at ten past five
OWN_LATER = bytes.fromhex("0c 00 00 00 06 01 06")
OWN_IN = bytes.fromhex("0a 00 00 06 01 05")
OWN_OTHER_METHOD = bytes.fromhex("0c 00 00 00 08 01 05")
CALL_B_LATER = bytes.fromhex("0e 00 02 62 00 06 01 06")
CALL_LATER_IN = bytes.fromhex("0a 00 00 06 01 06")
ATTACH_B = bytes.fromhex("04 01 62")
SDK_HELLO = encode_hello(Hello(EXTENSIONS - {MessageType.VERDICTS, MessageType.CAREFUL}))


def replayed(
    lived: bytes, hello: bytes = b"", check: ReplayCheck | None = None, *, welcomed: int | None = None
) -> Driven:
    """The next life of an app that has sent ``lived``; its replay is to come. ``welcomed``: b had so many."""
    driven = Driven.started(hello=bool(hello), limits=Limits(replay_check=check))
    driven.data(lived)
    if welcomed is not None:
        driven.reply(FrameType.WELCOME, 0)
        driven.reply(FrameType.TRIM_TO, welcomed)
    driven.batch("t", 1, bytes.fromhex("0a 00 00 06 01 01"))  # a record that holds the mark
    second = driven.crash()
    second.connect(hello)
    return second


def warnings(driven: Driven) -> list[str]:
    return [message for level, message in driven.reports if level == "warning"]


def test_a_call_to_oneself_that_carries_the_time_is_a_warning_and_the_log_s_version_holds() -> None:
    second = replayed(OWN)
    assert arguments(bytes(second.app_bytes))[:1] == [OWN_IN]
    second.app_bytes.clear()
    second.data(OWN_LATER + checkpoint(b"two"))
    assert second.phase is Phase.NORMAL
    assert arguments(bytes(second.app_bytes)) == [], "not a second time"
    (warning,) = warnings(second)
    assert "the calls to itself had reached number 1; number 1 is another one now" in warning
    assert "(then: 1: method 3(05); now: 1: method 3(06)); what the log has stays as it was" in warning


def test_it_is_told_once_for_each_destination_and_recovery() -> None:
    driven = Driven.started(hello=False)
    for number in range(3):
        driven.data(OWN + CALL_B)
        driven.batch("t", 1 + number, bytes.fromhex("0a 00 00 06 01 01"))
    second = driven.crash()
    for _ in range(2):
        second.connect()
        second.data((OWN_LATER + CALL_B_LATER) * 3 + checkpoint(b"two"))
        assert second.phase is Phase.NORMAL, second.reports
        second.close()
        second.bad_checkpoints.add(second.store.summary().checkpoints[-1].checkpoint_id)
    told = [message for message in warnings(second) if "does not do again" in message]
    assert [("itself" in message, "'b'" in message) for message in told] == [(True, False), (False, True)] * 2


def test_what_a_receiver_has_stays_and_the_rest_is_sent_as_it_is_now() -> None:
    second = replayed(CALL_B * 2, welcomed=1)
    second.data(CALL_B_LATER * 2 + checkpoint(b"two"))
    second.reply(FrameType.WELCOME, 1)
    (sent,) = second.frames(FrameType.BATCH)
    assert (sent.position, sent.payload) == (2, CALL_LATER_IN)
    (warning,) = warnings(second)
    assert "the calls to 'b' had reached number 2; numbers 1 to 2 are others now (now: 1: method 3(06);" in warning
    assert warning.endswith("what 'b' has already stays as it was sent, the rest is sent as it is now")


@pytest.mark.parametrize(
    ("hello", "check", "stops", "warned"),
    [
        (b"", None, False, 1),
        (SDK_HELLO, None, True, 0),
        (b"", ReplayCheck.STRICT, True, 0),
        (SDK_HELLO, ReplayCheck.COUNTS, False, 1),
        (b"", ReplayCheck.OFF, False, 0),
        (SDK_HELLO, ReplayCheck.OFF, False, 0),
    ],
)
def test_the_setting(hello: bytes, check: ReplayCheck | None, stops: bool, warned: int) -> None:
    second = replayed(OWN, hello, check)
    second.data(OWN_LATER + checkpoint(b"two"))
    assert bool(second.of(ef.Stop)) is stops
    assert len(warnings(second)) == warned
    if stops:
        assert isinstance(second.stop.error, DivergenceError)


@pytest.mark.parametrize("check", [None, ReplayCheck.STRICT])
def test_fewer_calls_stop_it_at_the_next_checkpoint_and_no_new_record_takes_their_place(
    check: ReplayCheck | None,
) -> None:
    second = replayed(CALL_B * 2, check=check)
    second.data(CALL_B + checkpoint(b"two"))
    second.batch("t", 2, bytes.fromhex("0a 00 00 06 01 02"))
    assert second.heard[-1] == (-1, "TAKE_CHECKPOINT"), "and no record behind it"
    second.data(checkpoint(b"three"))
    assert isinstance(second.stop.error, DivergenceError)
    assert "had reached number 2; the replay makes only 1" in str(second.stop.error)


def test_calls_that_were_held_back_may_come_behind_the_checkpoint() -> None:
    second = replayed(CALL_B * 2)
    second.auto = False
    second.data(CALL_B + checkpoint(b"two") + CALL_B_LATER)
    second.auto = True
    second.disk_all()
    assert second.phase is Phase.NORMAL
    assert "TAKE_CHECKPOINT" not in str(second.heard)
    second.batch("t", 2, bytes.fromhex("0a 00 00 06 01 02"))
    assert second.heard[-1] == (2, "RPC")
    assert len(warnings(second)) == 1


def test_another_order_of_calls_to_oneself_stops_it() -> None:
    second = replayed(OWN + OWN_OTHER_METHOD)
    second.data(OWN_OTHER_METHOD + OWN_LATER)
    assert isinstance(second.stop.error, DivergenceError)
    assert "then: 1: method 3(05); 2: method 4(05); now: 1: method 4(05); 2: method 3(06)" in str(second.stop.error)


def test_another_order_behind_other_contents_stops_it_too() -> None:
    driven = Driven.started(hello=False)
    driven.data(OWN)
    driven.data(OWN + OWN_OTHER_METHOD)
    second = driven.crash()
    second.connect()
    second.data(OWN_LATER)
    assert len(warnings(second)) == 1
    second.data(OWN_OTHER_METHOD + OWN)
    assert isinstance(second.stop.error, DivergenceError)


# --- large batches, and calls that are too large ----------------------------------------------------------------------

MIB = 1 << 20


def outgoing(size_bytes: int) -> bytes:
    return encode_outgoing_rpc("b", 3, 1, bytes(size_bytes))


def test_a_batch_of_more_than_64_mib_is_taken() -> None:
    driven = base()
    one = outgoing(MIB)
    size_bytes = 1 + 2 + 70 * len(one)
    driven.data(encode_zigzag(size_bytes) + b"\x05" + encode_zigzag(70))
    for _ in range(70):
        driven.data(one)
    assert not driven.of(ef.CloseApp), driven.reports
    assert driven.machine.view.peers()["b"]["made"] == 70
    driven.data(CALL_B)
    assert driven.machine.view.peers()["b"]["made"] == 71


@pytest.mark.parametrize("arguments_bytes", [64 * MIB, 64 * MIB - 5])
def test_a_call_may_have_64_mib_of_arguments(arguments_bytes: int) -> None:
    driven = base()
    driven.data(outgoing(arguments_bytes))
    assert driven.machine.view.peers()["b"]["made"] == 1
    assert not driven.of(ef.CloseApp)


def test_a_call_that_is_too_large_is_dropped_now_and_at_each_replay() -> None:
    limits = Limits(arguments_bytes_max=2 * MIB)
    driven = Driven.started(hello=False, limits=limits)
    said = CALL_B + outgoing(3 * MIB) + CALL_B_LATER
    driven.data(said)
    driven.batch("t", 1, bytes.fromhex("0a 00 00 06 01 01"))  # a record that holds the mark
    second = driven.crash()
    second.connect()
    second.data(said + checkpoint(b"two"))
    assert second.phase is Phase.NORMAL
    second.reply(FrameType.WELCOME, 0)
    assert b"".join(frame.payload for frame in second.frames(FrameType.BATCH)) == CALL_IN + CALL_LATER_IN
    for life in (driven, second):
        assert not life.of(ef.CloseApp)
        assert not life.of(ef.Stop)
        (error,) = [message for level, message in life.reports if level == "error"]
        assert "a call of 3145734 bytes to 'b', at most 2 MiB of arguments are allowed (rpc_limit_mb)" in error


def test_a_recovered_app_may_begin_with_one() -> None:
    driven = Driven.started(hello=False, limits=Limits(arguments_bytes_max=MIB))
    second = driven.crash()
    second.connect()
    second.data(outgoing(2 * MIB))
    second.data(checkpoint(b"two"))
    assert second.phase is Phase.NORMAL


def test_with_a_hello_a_call_that_is_too_large_ends_the_connection() -> None:
    driven = Driven.started(limits=Limits(arguments_bytes_max=MIB))
    driven.data(ATTACH_B + outgoing(2 * MIB))
    assert driven.of(ef.CloseApp)
    assert "an RPC of 2097158 bytes, at most 1049088 are accepted" in driven.reports[-1][1]


# --- method IDs of other bindings -------------------------------------------------------------------------------------

POSTED = bytes.fromhex("0e 00 02 62 00 01 01 05")  # a fork of method -1 to b
POSTED_IN = bytes.fromhex("0a 00 00 01 01 05")


def test_a_base_app_may_call_negative_methods_of_others() -> None:
    driven = base()
    driven.data(POSTED + CALL_B)
    assert not driven.of(ef.CloseApp), driven.reports
    driven.reply(FrameType.WELCOME, 0)
    assert b"".join(frame.payload for frame in driven.frames(FrameType.BATCH)) == POSTED_IN + CALL_IN


def test_a_base_app_gets_calls_of_negative_methods_from_others() -> None:
    driven = base()
    driven.batch("t", 1, POSTED_IN, CALL_IN)
    assert driven.replies == [("t", FrameType.TRIM_TO, 2)]
    assert arguments(bytes(driven.app_bytes)) == [POSTED_IN, CALL_IN]
