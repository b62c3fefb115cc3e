"""A checkpoint that a follower takes: what it offers, and what the machine that writes the log adopts of it."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest
from msgspec.structs import replace

from immortal.coordinator.core import effects as ef
from immortal.coordinator.core import events as ev
from immortal.coordinator.core.errors import DivergenceError, LogError
from immortal.coordinator.core.interfaces import CheckpointHeader, Offer, OutputMark
from immortal.coordinator.core.life_cycle.session import Phase
from immortal.coordinator.core.limits import Limits, ReplayCheck
from immortal.coordinator.log.checkpoints import decode_offer, encode_offer, sealed_chunk
from immortal.coordinator.log.format import CHUNK_KEY
from immortal.protocol.checksum import crc64
from immortal.protocol.extensions import Hello, encode_hello
from immortal.protocol.messages import MessageType, encode_message
from immortal.protocol.verdicts import Verdict, VerdictKind, encode_verdict
from tests.helpers.core import EXTENSIONS, HELLO, Driven, attach, call, checkpoint, rpc

LIMITS = Limits(checkpoints_on_standby=True)
ALL_HELLO = encode_hello(Hello(EXTENSIONS, "test"))
BLOB = b"the state of the follower"
TAKE = "TAKE_CHECKPOINT"


def writing(limits: Limits = LIMITS, hello: bytes = HELLO) -> Driven:
    """A writer that somebody follows."""
    writer = Driven(limits=limits)
    writer.connect()
    writer.data(hello + encode_message(MessageType.INITIAL_MESSAGE, b"begin") + checkpoint(b"first"))
    writer.settle()
    writer.open_stream()
    writer.handle(ev.StandbysChanged(True))
    writer.forget()
    return writer


def following(writer: Driven, said: bytes = HELLO, limits: Limits | None = None) -> Driven:
    follower = Driven(writer.store, follow=True, limits=limits)
    follower.connect(said)
    follower.data(attach("b") + attach("c"))
    assert follower.phase is Phase.FOLLOWING
    return follower


def record(writer: Driven, position: int, *followers: Driven) -> None:
    writer.batch(f"t{position}", position, rpc(position))
    writer.app_took_all()
    for follower in followers:
        follower.look()


def asked(follower: Driven) -> None:
    follower.forget()
    follower.handle(ev.StandbyCheckpointRequested(2, 1))


def took(follower: Driven) -> None:
    """All its chunks are in the log."""
    for chunk in follower.of(ef.OfferChunk):
        follower.store.backend.durable.put(*_row(chunk))
        follower.handle(ev.ChunkOffered(chunk.checkpoint_id, len(chunk.data)))


def _row(chunk: ef.OfferChunk) -> tuple[str, bytes, bytes]:
    key = CHUNK_KEY.pack(chunk.checkpoint_id, chunk.index)
    return "chunks", key, sealed_chunk(chunk.checkpoint_id, chunk.index, chunk.data)


def offers(follower: Driven) -> list[Offer]:
    return [effect.offer for effect in follower.of(ef.OfferCheckpoint)]


def types(driven: Driven) -> list[str]:
    return [str(name) for entry in driven.heard if isinstance(entry, tuple) for name in entry[1:]]


# --- who follows ------------------------------------------------------------------------------------------------------


def test_a_follower_gives_its_state_behind_the_record_that_it_has() -> None:
    writer = writing()
    follower = following(writer)
    follower.data(call("b", 1))
    record(writer, 1, follower)
    asked(follower)
    assert types(follower) == [TAKE]
    follower.data(checkpoint(BLOB))
    (chunk,) = follower.of(ef.OfferChunk)
    assert (chunk.checkpoint_id, chunk.index, chunk.data) == (2, 0, BLOB)
    assert offers(follower) == [], "it is not in the log yet"
    took(follower)
    (offer,) = offers(follower)
    header = offer.header
    assert (offer.epoch, header.checkpoint_id, header.sequence_id) == (1, 2, 1)
    assert (header.size_bytes, header.check) == (len(BLOB), crc64(BLOB))
    assert header.outputs == {"b": writer.machine.components.peers.outbound.streams["b"].mark}
    assert header.unacknowledged["b"][0].count == 1
    assert not follower.of(ef.Commit)


def test_calls_that_have_no_place_yet_are_waited_for_and_later_ones_do_not_count() -> None:
    writer = writing()
    follower = following(writer)
    follower.data(call("b", 1))
    record(writer, 1, follower)
    follower.data(call("b", 2))  # of record 1; no record has a mark of it
    asked(follower)
    follower.data(checkpoint(BLOB) + call("b", 3))
    took(follower)
    assert offers(follower) == []
    writer.data(call("b", 2))
    mark = writer.machine.components.peers.outbound.streams["b"].mark
    writer.data(call("b", 3))
    record(writer, 2, follower)
    (offer,) = offers(follower)
    assert (offer.header.sequence_id, offer.header.outputs) == (1, {"b": mark})


def test_one_that_has_diverged_says_so_and_offers_nothing() -> None:
    writer = writing()
    follower = following(writer)
    follower.data(call("b", 1))
    record(writer, 1, follower)
    follower.data(call("b", 77))
    asked(follower)
    follower.data(checkpoint(BLOB))
    took(follower)
    writer.data(call("b", 2))
    record(writer, 2, follower)
    assert isinstance(follower.stop.error, DivergenceError)
    assert offers(follower) == []


def test_one_whose_calls_have_other_contents_offers_nothing_where_that_is_let_pass() -> None:
    limits = dataclasses.replace(LIMITS, replay_check=ReplayCheck.COUNTS)
    writer = writing(limits)
    follower = following(writer, limits=limits)
    follower.data(call("b", 1))
    record(writer, 1, follower)
    follower.data(call("b", 77))
    asked(follower)
    follower.data(checkpoint(BLOB))
    took(follower)
    writer.data(call("b", 2))
    record(writer, 2, follower)
    assert follower.machine.stopped is False
    assert offers(follower) == []


def failed(sequence_id: int) -> bytes:
    return encode_verdict(Verdict(sequence_id, 0, VerdictKind.UNDONE, "ValueError", "no", method="m"))


def test_one_for_which_a_message_has_failed_alone_offers_nothing() -> None:
    writer = writing(hello=ALL_HELLO)
    follower = following(writer, ALL_HELLO)
    follower.data(call("b", 1))
    record(writer, 1, follower)
    follower.data(failed(1))
    asked(follower)
    follower.data(checkpoint(BLOB))
    took(follower)
    assert offers(follower) == []
    writer.data(failed(1))
    record(writer, 2, follower)
    assert [key[0] for key in offers(follower)[0].verdicts] == [1]


def test_who_takes_over_gives_nothing_and_reads_what_its_app_still_sends() -> None:
    writer = writing()
    follower = following(writer)
    follower.data(call("b", 1))
    record(writer, 1, follower)
    asked(follower)
    follower.take_over()
    assert follower.phase is Phase.NORMAL
    follower.forget()
    follower.data(checkpoint(BLOB))
    assert follower.effects == []
    assert follower.phase is Phase.NORMAL, "nobody wants it any more"
    follower.handle(ev.CheckpointRequested())
    follower.data(checkpoint(b"its own"))
    assert [commit.transaction.checkpoint is not None for commit in follower.of(ef.Commit)][-1]


def test_one_that_is_told_that_it_is_not_wanted_any_more_can_be_asked_again() -> None:
    writer = writing()
    follower = following(writer)
    follower.data(call("b", 1))
    record(writer, 1, follower)
    asked(follower)
    follower.data(checkpoint(BLOB))
    follower.handle(ev.ChunkOffered(2, len(BLOB), "not wanted any more"))
    assert offers(follower) == []
    follower.forget()
    follower.handle(ev.StandbyCheckpointRequested(3, 1))
    follower.data(checkpoint(BLOB))
    took(follower)
    assert [offer.header.checkpoint_id for offer in offers(follower)] == [3]


# --- who writes -------------------------------------------------------------------------------------------------------


def offered(writer: Driven, **other: object) -> Offer:
    """What a follower has put into the log, and says of it."""
    (ask,) = writer.of(ef.RequestStandbyCheckpoint)
    writer.store.backend.durable.put(*_row(ef.OfferChunk(ask.checkpoint_id, 0, BLOB)))
    outputs = {name: stream.mark for name, stream in writer.machine.components.peers.outbound.streams.items()}
    values: dict = {"outputs": outputs, "version": 1, **other}
    header = CheckpointHeader(ask.checkpoint_id, 1, len(BLOB), crc64(BLOB), 0)
    return Offer(ask.epoch, replace(header, **values))


def due() -> Driven:
    writer = writing()
    record(writer, 1)
    writer.forget()
    writer.handle(ev.CheckpointRequested())
    return writer


def test_a_checkpoint_that_is_due_is_asked_of_who_follows_read_and_adopted() -> None:
    writer = due()
    assert types(writer) == [], "its own app is asked for nothing"
    offer = offered(writer)
    writer.handle(ev.CheckpointOffered(offer))
    assert len(writer.of(ef.CheckCheckpoint)) == 1
    (commit,) = [one for one in writer.of(ef.Commit) if one.transaction.checkpoint is not None]
    assert commit.transaction.adopts
    taken = writer.store.summary().checkpoints[-1]
    assert (taken.checkpoint_id, taken.sequence_id, taken.time_ns) == (2, 1, writer.now_ns)
    assert ("info", "checkpoint taken by a standby") in writer.reports
    assert writer.of(ef.Trim)


def test_its_app_goes_on_meanwhile() -> None:
    writer = due()
    record(writer, 2)
    writer.data(call("b", 5))
    assert writer.phase is Phase.NORMAL


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"sequence_id": 0, "outputs": {}}, "it lacks calls to 'b'"),
        ({"version": 2}, "it is of version 2 of the app, which runs version 1"),
        ({"outputs": {"b": OutputMark(1, 5)}}, "its app has made other calls to 'b'"),
        ({"outputs": {"b": OutputMark(9, 5)}}, "its app has made other calls to 'b'"),
        ({"check": 1}, "its check is"),
    ],
)
def test_what_is_not_what_its_app_would_give_is_not_adopted_and_the_app_is_asked(other: dict, says: str) -> None:
    writer = due()
    if "sequence_id" in other:
        own = replace(writer.machine.state.checkpoints.last, outputs={"b": OutputMark(1, 1)})
        writer.machine.state.checkpoints.last = own
    writer.handle(ev.CheckpointOffered(offered(writer, **other)))
    assert not [one for one in writer.of(ef.Commit) if one.transaction.checkpoint is not None]
    ((level, text),) = [report for report in writer.reports if "no standby took" in report[1]]
    assert (level, says in text) == ("warning", True), text
    assert writer.of(ef.CancelStandbyRequest)
    assert types(writer) == [TAKE]


def test_one_of_a_record_that_it_has_not_given_its_app_is_not_adopted() -> None:
    writer = due()
    writer.handle(ev.CheckpointOffered(offered(writer, sequence_id=7)))
    assert writer.of(ef.CheckCheckpoint) == []


@pytest.mark.parametrize("wrong", ["epoch", "checkpoint"])
def test_one_that_was_asked_for_by_another_or_before_is_not_taken(wrong: str) -> None:
    writer = due()
    offer = offered(writer)
    if wrong == "epoch":
        offer = replace(offer, epoch=offer.epoch - 1)
    else:
        offer = replace(offer, header=replace(offer.header, checkpoint_id=1))
    writer.handle(ev.CheckpointOffered(offer))
    assert writer.of(ef.CheckCheckpoint) == []


def test_where_messages_have_failed_for_one_alone_it_is_not_adopted() -> None:
    writer = writing(hello=ALL_HELLO)
    record(writer, 1)
    writer.data(failed(1))
    writer.handle(ev.CheckpointRequested())
    writer.handle(ev.CheckpointOffered(offered(writer)))
    assert any("messages have failed for one app and not for the other" in text for _, text in writer.reports)


def test_an_app_that_fails_later_at_what_the_checkpoint_has_begins_anew_from_there() -> None:
    writer = writing(hello=ALL_HELLO)
    record(writer, 1)
    writer.handle(ev.CheckpointRequested())
    writer.handle(ev.CheckpointOffered(offered(writer)))
    writer.forget()
    writer.data(failed(1) + call("b", 9))
    assert writer.of(ef.CloseApp)
    assert not writer.of(ef.SendToPeer), "what follows the failure is no other's to hear"
    assert not [one for one in writer.of(ef.Commit) if one.transaction.verdicts]
    writer.close()
    writer.connect(ALL_HELLO)
    assert BLOB in writer.heard


def test_after_a_while_its_app_is_asked() -> None:
    writer = due()
    writer.now_ns += LIMITS.standby_checkpoint_ns
    writer.handle(ev.Tick())
    assert types(writer) == [TAKE]
    writer.data(checkpoint(b"its own"))
    (commit,) = [one for one in writer.of(ef.Commit) if one.transaction.checkpoint is not None]
    assert not commit.transaction.adopts
    writer.handle(ev.CheckpointOffered(offered(writer)))
    assert len(writer.store.summary().checkpoints) == 2, "that comes too late"


def test_without_anybody_who_follows_an_operator_need_not_wait() -> None:
    writer = writing()
    writer.handle(ev.StandbysChanged(False))
    writer.handle(ev.CheckpointRequested())
    assert types(writer) == [TAKE]


def test_one_that_is_due_by_size_waits_for_somebody_who_follows_for_a_while() -> None:
    writer = writing(dataclasses.replace(LIMITS, checkpoint_trigger_bytes=1000))
    writer.handle(ev.StandbysChanged(False))
    writer.batch("t", 1, rpc(bytes(1000)))
    assert (types(writer).count(TAKE), writer.of(ef.RequestStandbyCheckpoint)) == (0, [])
    writer.handle(ev.StandbysChanged(True))
    assert len(writer.of(ef.RequestStandbyCheckpoint)) == 1


def test_who_writes_has_a_record_for_marks_that_nobody_has_heard_of() -> None:
    writer = writing()
    follower = following(writer)
    follower.data(call("b", 1))
    record(writer, 1, follower)
    writer.data(call("b", 2))
    follower.data(call("b", 2))
    writer.handle(ev.CheckpointRequested())
    writer.handle(ev.Tick())
    asked(follower)
    follower.data(checkpoint(BLOB))
    took(follower)
    follower.look()
    (offer,) = offers(follower)
    assert offer.header.outputs == {"b": writer.machine.components.peers.outbound.streams["b"].mark}
    count = writer.store.last_sequence_id
    writer.handle(ev.Tick())
    assert writer.store.last_sequence_id == count, "one is enough"


def test_a_stop_is_not_held_up_by_it() -> None:
    writer = due()
    writer.handle(ev.StopRequested())
    assert types(writer) == [TAKE]
    assert writer.of(ef.CancelStandbyRequest)


@pytest.mark.parametrize("missing", ["size_bytes", "check", "time_ns"])
def test_an_offer_says_all_of_its_blob(missing: str) -> None:
    offer = Offer(1, CheckpointHeader(2, 3, len(BLOB), crc64(BLOB), 9))
    assert decode_offer(encode_offer(offer)) == replace(offer, verdicts=[])
    plain = msgspec.to_builtins(offer)
    del plain["header"][missing]
    with pytest.raises(LogError, match=f"can't be read: Object missing required field `{missing}`"):
        decode_offer(msgspec.msgpack.encode(plain))
