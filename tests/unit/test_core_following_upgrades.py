"""A follower whose app knows the next version: it follows with the old code, and is upgraded as it takes over."""

from __future__ import annotations

import pytest

from immortal.coordinator.core import effects as ef
from immortal.coordinator.core import events as ev
from immortal.coordinator.core.errors import FollowerError
from immortal.coordinator.core.interfaces import Transaction, VersionStart
from immortal.coordinator.core.life_cycle.session import Phase
from immortal.protocol.extensions import AppDescription, encode_app_description
from tests.helpers.core import HELLO, Driven, arguments, checkpoint, rpc

KINDS = pytest.mark.parametrize("hello", [b"", HELLO], ids=["base", "hello"])


def both(hello: bytes, upgrade_to: int | None = 2) -> tuple[Driven, Driven]:
    """A writer of version 1, and who follows it; both have record 1."""
    writer = Driven.started(hello=bool(hello))
    follower = Driven(writer.store, follow=True, upgrade_to=upgrade_to)
    follower.connect(hello and hello + encode_app_description(AppDescription(2)))
    record(writer, follower, 1)
    assert follower.phase is Phase.FOLLOWING
    return writer, follower


def record(writer: Driven, follower: Driven, position: int) -> None:
    writer.batch(f"t{position}", position, rpc(position))
    writer.app_took_all()
    follower.look()


def types(driven: Driven) -> list[str]:
    """The control messages that its app was sent."""
    return [str(name) for entry in driven.heard if isinstance(entry, tuple) and entry[0] == -1 for name in entry[1:]]


@KINDS
def test_it_is_a_secondary_like_others_until_the_log_is_its_own(hello: bytes) -> None:
    _, follower = both(hello)
    assert arguments(bytes(follower.app_bytes)) == [rpc(1)]
    assert "UPGRADE_TAKE_CHECKPOINT" not in types(follower)
    assert follower.of(ef.Commit) == []


@KINDS
def test_it_is_upgraded_as_it_takes_over_and_works_once_that_is_durable(hello: bytes) -> None:
    writer, follower = both(hello)
    record(writer, follower, 2)
    follower.forget()
    follower.take_over()
    assert follower.phase is Phase.UPGRADING
    assert [name for name in types(follower) if name.endswith("CHECKPOINT")] == ["UPGRADE_TAKE_CHECKPOINT"]
    follower.data(checkpoint(b"upgraded"))
    assert follower.store.summary().checkpoints[-1].version == 1
    follower.auto = False
    follower.data(checkpoint(b"confirmed"))
    assert follower.store.summary().checkpoints[-1].version == 1, "nothing of it is in the log before it is durable"
    assert follower.phase is Phase.COMPLETING_UPGRADE
    follower.disk_all()
    assert follower.phase is Phase.NORMAL
    assert follower.of(ef.UpgradeEnded) == [ef.UpgradeEnded(2)]
    summary = follower.store.summary()
    assert (summary.checkpoints[-1].version, summary.versions[-1].sequence_id) == (2, 2)


@KINDS
def test_it_repeats_the_upgrade_of_the_one_that_writes_and_follows_on(hello: bytes) -> None:
    writer, follower = both(hello)
    follower.forget()
    writer.store.commit(Transaction(version=VersionStart(2, 1, "x")))
    record(writer, follower, 2)
    assert types(follower)[-1:] == ["UPGRADE_TAKE_CHECKPOINT"]
    assert arguments(bytes(follower.app_bytes)) == [], "the new code gets what is behind it"
    follower.data(checkpoint(b"upgraded"))
    follower.look()
    assert (follower.phase, arguments(bytes(follower.app_bytes))) == (Phase.FOLLOWING, [rpc(2)])
    assert not follower.of(ef.Commit)
    assert not follower.of(ef.OfferChunk)
    follower.take_over()
    if not hello:
        assert types(follower)[-1:] == ["TAKE_BECOMING_PRIMARY_CHECKPOINT"]
        follower.data(checkpoint(b"primary"))
    assert follower.phase is Phase.NORMAL, "there is nothing to upgrade any more"
    assert follower.of(ef.UpgradeEnded) == []


def test_where_its_old_code_was_given_records_of_the_new_version_it_begins_anew() -> None:
    writer, follower = both(HELLO)
    writer.store.commit(Transaction(version=VersionStart(2, 0, "x")))
    record(writer, follower, 2)
    assert follower.of(ef.CloseApp)
    assert any("the last one of the old version" in text for _, text in follower.reports)
    assert not follower.of(ef.Stop)
    follower.close()
    follower.connect(HELLO)
    follower.data(checkpoint(b"upgraded"))
    follower.look()
    assert (follower.phase, follower.machine.view.status(0)["version"]) == (Phase.FOLLOWING, 2)


@pytest.mark.parametrize("version", [3, 1])
def test_another_version_than_its_own_ends_it(version: int) -> None:
    writer, follower = both(HELLO)
    writer.store.commit(Transaction(version=VersionStart(version, 1, "x")))
    record(writer, follower, 2)
    assert isinstance(follower.stop.error, FollowerError)


def test_the_checkpoint_that_it_gives_while_it_follows_is_of_the_old_version() -> None:
    _, follower = both(b"")
    follower.handle(ev.StandbyCheckpointRequested(2, 1))
    follower.data(checkpoint(b"old"))
    follower.handle(ev.ChunkOffered(2, 3))
    (offered,) = follower.of(ef.OfferCheckpoint)
    assert (offered.offer.header.version, offered.offer.header.sequence_id) == (1, 1)


def test_one_that_has_just_repeated_an_upgrade_gives_no_checkpoint_before_its_next_record() -> None:
    """A base app can't tell whether it is primary from then on."""
    writer, follower = both(b"")
    writer.store.commit(Transaction(version=VersionStart(2, 1, "x")))
    writer.machine.state.versions.starts.append(VersionStart(2, 1, "x"))
    record(writer, follower, 2)
    follower.forget()
    follower.handle(ev.StandbyCheckpointRequested(2, 1))
    assert follower.app_bytes == b""
    follower.data(checkpoint(b"upgraded"))
    follower.look()
    assert types(follower)[-1:] == ["TAKE_CHECKPOINT"]
    follower.data(checkpoint(b"new"))
    follower.handle(ev.ChunkOffered(2, 3))
    (offered,) = follower.of(ef.OfferCheckpoint)
    assert (offered.offer.header.version, offered.offer.header.sequence_id) == (2, 2)
