"""Upgrades in the core: the handshake, what a crash at each of its steps leaves, and a log that has passed one."""

from __future__ import annotations

import pytest

from immortal.coordinator.core import effects as ef
from immortal.coordinator.core.errors import DivergenceError
from immortal.coordinator.core.interfaces import CheckpointHeader, VersionStart
from immortal.coordinator.core.life_cycle.session import Phase
from immortal.coordinator.core.state import after_checkpoint
from immortal.protocol.extensions import AppDescription, Hello, encode_app_description, encode_hello
from immortal.protocol.messages import MessageType, encode_message
from immortal.protocol.peer_frames import FrameType
from tests.helpers.core import EXTENSIONS, Driven, attach, call, checkpoint, first_start, rpc

PRIMARY = (-1, "TAKE_BECOMING_PRIMARY_CHECKPOINT")
UPGRADE = (-1, "VERSION", "UPGRADE_TAKE_CHECKPOINT")
TAKE = (-1, "TAKE_CHECKPOINT")


def hello(version: int, label: str = "new:Counter") -> bytes:
    extensions = EXTENSIONS - {MessageType.VERDICTS, MessageType.CAREFUL}
    return encode_hello(Hello(extensions, label)) + encode_app_description(AppDescription(version))


def old() -> Driven:
    """An instance of version 1 with one record behind its first."""
    driven = Driven()
    driven.connect()
    driven.data(hello(1, "old:Counter") + first_start())
    driven.settle()
    driven.batch("t", 1, rpc(1))
    return driven


def failed(reason: str) -> bytes:
    return encode_message(MessageType.UPGRADE_FAILED, reason.encode())


class _HeldLog(Driven):
    """The app speaks before the log is loaded, as a real one does."""

    def connect(self, said: bytes = b"") -> list[ef.Effect]:
        return super().connect(said or self.first_words)

    first_words = b""


def upgrading(driven: Driven, version: int = 2, *, said: bytes | None = None) -> Driven:
    """The next life, in which the app has been told to upgrade."""
    second = driven.crash(upgrade_to=version)
    second.__class__ = _HeldLog
    second.first_words = hello(version) if said is None else said
    second.connect()
    assert second.phase is Phase.UPGRADING
    return second


def test_the_handshake_and_its_one_transaction() -> None:
    second = upgrading(old())
    assert second.heard == [
        b"state one",
        (0, "RECORD_TIME", "INSTANCE_NAME", "INITIAL_MESSAGE"),
        (1, "RECORD_TIME", "RPC"),
        UPGRADE,
    ]
    second.app_bytes.clear()
    second.data(checkpoint(b"upgraded"))
    assert second.heard == [TAKE]
    assert second.phase is Phase.CONFIRMING_UPGRADE
    second.forget()
    second.data(checkpoint(b"confirmed"))
    (commit,) = [commit for commit in second.of(ef.Commit) if commit.transaction.checkpoint is not None]
    assert commit.transaction.version == VersionStart(2, 1, "new:Counter")
    assert commit.transaction.checkpoint is not None
    assert commit.transaction.checkpoint.version == 2
    assert second.phase is Phase.NORMAL
    assert second.of(ef.UpgradeEnded) == [ef.UpgradeEnded(2)]
    summary = second.store.summary()
    assert [start.version for start in summary.versions] == [1, 2]
    assert second.store.read_checkpoint_chunk(summary.checkpoints[-1].checkpoint_id, 0) == b"confirmed"
    assert second.machine.view.status(0)["version"] == 2


@pytest.mark.parametrize("blobs", [0, 1])
def test_a_crash_before_the_last_checkpoint_is_durable_leaves_the_old_version_whole(blobs: int) -> None:
    second = upgrading(old())
    for _ in range(blobs):
        second.data(checkpoint(b"upgraded"))
    second.auto = False
    second.data(checkpoint(b"never durable"))
    third = second.crash()
    third.auto = True
    assert third.machine.view.status(0)["version"] == 1
    third.connect(hello(2))
    assert third.heard == [
        b"state one",
        (0, "RECORD_TIME", "INSTANCE_NAME", "INITIAL_MESSAGE"),
        (1, "RECORD_TIME", "RPC"),
        PRIMARY,
    ]
    third.data(checkpoint(b"still old"))
    assert third.store.summary().checkpoints[-1].version == 1


def test_a_crash_behind_it_leaves_the_new_version() -> None:
    second = upgrading(old())
    second.data(checkpoint(b"upgraded"))
    second.data(checkpoint(b"confirmed"))
    third = second.crash(upgrade_to=2)  # the mark may still be there
    third.connect(hello(2))
    assert third.heard == [b"confirmed", PRIMARY]
    assert third.machine.view.status(0)["version"] == 2


def test_the_outputs_of_the_old_code_go_on_behind_the_upgrade() -> None:
    driven = old()
    driven.data(attach("b") + call("b", 1) + call("b", 2))
    driven.reply(FrameType.WELCOME, 0)
    driven.batch("u", 2, rpc(2))  # a record that holds the mark
    second = upgrading(driven)
    second.data(attach("b") + call("b", 1) + call("b", 2))
    second.reply(FrameType.WELCOME, 0)
    second.data(checkpoint(b"upgraded"))
    second.data(checkpoint(b"confirmed") + call("b", 3))
    third = second.crash()
    third.connect()
    third.data(hello(2) + attach("b") + call("b", 3) + checkpoint(b"again"))
    third.reply(FrameType.WELCOME, 0)
    (sent,) = third.frames(FrameType.BATCH)
    assert (sent.position, sent.payload) == (1, rpc(1) + rpc(2) + rpc(3))


@pytest.mark.parametrize("blobs", [0, 1])
def test_an_upgrade_that_fails_is_given_up_and_the_old_version_goes_on(blobs: int) -> None:
    second = upgrading(old())
    for _ in range(blobs):
        second.data(checkpoint(b"upgraded"))
    second.data(failed("ValueError: no such word (counter.py, line 3)"))
    assert second.of(ef.UpgradeEnded) == [ef.UpgradeEnded(2, "ValueError: no such word (counter.py, line 3)")]
    assert (
        "error",
        "the upgrade to version 2 failed: ValueError: no such word (counter.py, line 3); version 1 stays in use",
    ) in second.reports
    assert second.of(ef.CloseApp)
    second.close()
    second.first_words = hello(2)
    second.connect()
    assert second.heard[-1] == PRIMARY
    second.data(checkpoint(b"old"))
    assert second.phase is Phase.NORMAL
    assert not second.of(ef.Stop)


def test_an_app_of_another_version_than_was_asked_for_is_refused_and_the_upgrade_given_up() -> None:
    second = upgrading(old(), 3, said=hello(2))
    second.data(checkpoint(b"upgraded"))
    problem = "the app is of version 2, the upgrade is to version 3"
    assert second.of(ef.UpgradeEnded) == [ef.UpgradeEnded(3, problem)]
    assert second.heard[-1] == (-1, "REFUSAL")
    assert second.of(ef.CloseApp)


def test_an_app_that_is_lost_in_an_upgrade_may_try_again() -> None:
    second = upgrading(old())
    second.close()
    assert any("was interrupted: the old version is intact" in message for _, message in second.reports)
    assert not second.of(ef.UpgradeEnded)
    second.connect()
    assert second.phase is Phase.UPGRADING


def test_an_upgrade_whose_code_makes_fewer_calls_of_the_past_than_a_receiver_has_stops() -> None:
    driven = old()
    driven.data(attach("b") + call("b", 1) + call("b", 2))
    driven.reply(FrameType.WELCOME, 0)
    driven.reply(FrameType.TRIM_TO, 2)
    driven.batch("u", 2, rpc(2))  # a record that holds the mark
    second = upgrading(driven)
    second.data(attach("b") + call("b", 1) + checkpoint(b"upgraded"))
    assert isinstance(second.stop.error, DivergenceError)


def test_a_base_app_is_upgraded_without_a_version() -> None:
    driven = Driven.started(hello=False)
    second = driven.crash(upgrade_to=2)
    second.connect()
    assert second.heard[-1] == (-1, "UPGRADE_TAKE_CHECKPOINT")
    second.data(checkpoint(b"upgraded"))
    second.data(checkpoint(b"confirmed"))
    assert second.phase is Phase.NORMAL
    assert second.store.summary().versions[-1] == VersionStart(2, 0, "")


def test_a_downgrade_is_an_upgrade_to_a_lower_version() -> None:
    second = upgrading(old())
    second.data(checkpoint(b"upgraded"))
    second.data(checkpoint(b"confirmed"))
    third = upgrading(second, 1)
    third.data(checkpoint(b"back"))
    third.data(checkpoint(b"back"))
    assert [start.version for start in third.store.summary().versions] == [1, 2, 1]


def passed() -> Driven:
    """A log with a checkpoint of version 1, an upgrade behind record 1, and a record of version 2 behind that."""
    second = upgrading(old())
    second.data(checkpoint(b"upgraded"))
    second.data(checkpoint(b"confirmed"))
    second.batch("u", 2, rpc(2))
    return second


def test_a_damaged_checkpoint_behind_an_upgrade_falls_back_across_it() -> None:
    second = passed()
    third = second.crash()
    third.bad_checkpoints.add(third.store.summary().checkpoints[-1].checkpoint_id)
    third.__class__ = _HeldLog
    third.first_words = hello(2)
    third.connect()
    assert third.phase is Phase.UPGRADING
    assert third.heard[-2:] == [(1, "RECORD_TIME", "RPC"), UPGRADE]
    third.app_bytes.clear()
    third.data(checkpoint(b"upgraded again"))
    assert third.heard == [(2, "RECORD_TIME", "RPC"), PRIMARY]
    third.data(checkpoint(b"recovered"))
    assert third.phase is Phase.NORMAL
    assert [start.version for start in third.store.summary().versions] == [1, 2]


def test_an_app_that_can_t_repeat_an_upgrade_of_the_past_stops_the_recovery() -> None:
    second = passed()
    third = second.crash()
    third.bad_checkpoints.add(third.store.summary().checkpoints[-1].checkpoint_id)
    third.connect()
    third.data(hello(2))
    third.data(failed("no upgrade"))
    assert isinstance(third.stop.error, DivergenceError)
    assert "can't repeat the upgrade to version 2 that the log has behind record 1: no upgrade" in str(third.stop.error)


@pytest.mark.parametrize(
    ("version", "sequence_id", "expected"),
    [(1, -1, [2, 1]), (1, 4, [2, 1]), (1, 5, [2, 1]), (2, 5, [1]), (2, 8, [1]), (1, 9, []), (1, 30, []), (7, 30, [])],
)
def test_the_versions_behind_a_checkpoint(version: int, sequence_id: int, expected: list[int]) -> None:
    starts = [VersionStart(1, -1), VersionStart(2, 5), VersionStart(1, 9)]
    header = CheckpointHeader(1, sequence_id, 0, 0, 0, version=version)
    assert [start.version for start in after_checkpoint(starts, header)] == expected


def test_a_failure_that_nobody_asked_for_breaks_the_protocol() -> None:
    driven = old()
    driven.data(failed("what?"))
    assert driven.heard[-1] == (-1, "REFUSAL")


def test_records_that_come_in_while_the_app_s_hello_is_awaited_are_not_read_again_and_again() -> None:
    # Found by the simulation: the replay was complete, the log was not, and the machine asked for the rest for ever.
    second = old().crash(upgrade_to=2)
    second.connect()
    assert second.phase is Phase.REPLAYING
    second.forget()
    second.batch("u", 2, rpc(2))
    assert not second.of(ef.ReadRecords)
    second.data(hello(2))
    assert second.phase is Phase.UPGRADING
