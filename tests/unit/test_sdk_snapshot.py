"""Checkpoints beside the handlers, without a process: what the dispatcher says, and what a child's bytes mean."""

from __future__ import annotations

import struct

import pytest

import immortal
from immortal import Immortal, peer, rpc
from immortal.appsdk.dispatch.dispatcher import JOURNAL_RESULTS_MANY
from immortal.appsdk.dispatch.events import BecamePrimary, JournalGrew, SnapshotBegun
from immortal.appsdk.handlers.definition import definition_of
from immortal.appsdk.state.snapshots import SnapshotReader
from immortal.errors import StateError
from immortal.protocol.batch import encode_batch
from immortal.protocol.messages import MessageType
from immortal.protocol.record import encode_record
from tests.helpers.sdk import TAKE, TAKE_FIRST, Life, first_start, recover, upgrade_record
from tests.helpers.wire import COMMITTER_ID, call, checkpoint_record, initial_record, logged


class Inline(Immortal):
    sink = peer(lambda: Inline, "sink")
    lines: list[str]

    def __init__(self) -> None:
        self.lines = []

    @rpc(id=1)
    def add(self, line: str) -> None:
        self.lines.append(line)
        self.sink.add.fork(line)


class Forking(Inline, checkpoint="fork", formerly=("Inline",)):
    pass


class Heir(Forking):
    pass


def test_the_mode_is_a_class_s_and_its_heirs_() -> None:
    modes = [definition_of(cls).checkpoint_mode for cls in (Inline, Forking, Heir)]
    assert modes == ["inline", "fork", "fork"]


def test_a_snapshot_begins_behind_the_outputs_so_far() -> None:
    life = first_start(Forking)
    assert life.sent_types[-1] == MessageType.CHECKPOINT  # the first one is in one piece
    life.dispatcher.receive_data(logged(1, [call(1, "a")]) + TAKE + logged(2, [call(1, "b")]))
    event = life.dispatcher.next_event()
    assert isinstance(event, SnapshotBegun)
    blob = b"".join(event.encode()[1])  # as of now: the record behind it is not handled yet
    life.give(b"")
    assert life.sent_types[4:] == [
        MessageType.ATTACH_TO,
        MessageType.STREAM_BATCH,
        MessageType.SNAPSHOT_BEGIN,
        MessageType.STREAM_BATCH,
    ]
    assert life.dispatcher.instance.lines == ["a", "b"]
    assert recover(Forking, blob, logged(2, [call(1, "c")])).dispatcher.instance.lines == ["a", "c"]


def test_the_encoded_state_is_that_of_an_inline_checkpoint() -> None:
    life = first_start(Forking)
    life.dispatcher.receive_data(logged(1, [call(1, "a")]) + TAKE)
    event = life.dispatcher.next_event()
    assert isinstance(event, SnapshotBegun)
    inline = recover(
        Forking, life.output.blobs[0], initial_record(life.output.initial_message), logged(1, [call(1, "a")])
    )
    assert b"".join(event.encode()[1]) == inline.output.blobs[0]


def test_other_checkpoints_are_in_one_piece() -> None:
    """At a recovery, in a replay for inspection, and with an upgrade: nobody waits for the app then."""
    blob = first_start(Inline).output.blobs[0]
    life = recover(Forking, blob)
    assert life.events == [BecamePrimary()]
    replay = Life.of(Forking)
    replay.give(checkpoint_record(blob) + logged(0, [call(1, "a")]) + TAKE)
    upgrade = Life.of(Forking)
    upgrade.give(checkpoint_record(blob) + logged(0, [call(1, "a")]) + upgrade_record(1) + TAKE)
    assert len(upgrade.output.blobs) == 2
    for other in (life, replay, upgrade):
        assert MessageType.CHECKPOINT in other.sent_types
        assert MessageType.SNAPSHOT_BEGIN not in other.sent_types


def test_a_base_coordinator_gets_every_checkpoint_in_one_piece() -> None:
    """It has shown no sign of having taken the Hello: its records have no time."""
    blob = first_start(Forking).output.blobs[0]
    life = Life.of(Forking)
    payload = call(1, "a")
    life.give(checkpoint_record(blob) + TAKE_FIRST + encode_record(COMMITTER_ID, 0, encode_batch(payload, 1) + payload))
    life.give(TAKE)
    assert len(life.output.blobs) == 2
    assert MessageType.SNAPSHOT_BEGIN not in life.sent_types


# --- what a child writes ----------------------------------------------------------------------------------------------


def written(kind: int, data: bytes) -> bytes:
    return struct.pack("<BQ", kind, len(data)) + data


@pytest.mark.parametrize("piece_size_bytes", [1, 8, 9, 10, 1000])
def test_a_blob_in_pieces(piece_size_bytes: int) -> None:
    data = written(0, bytes(range(250)))
    reader = SnapshotReader()
    pieces = [data[start : start + piece_size_bytes] for start in range(0, len(data), piece_size_bytes)]
    assert b"".join(map(reader.receive_data, pieces)) == bytes(range(250))
    assert reader.end("left with status 0") == ""


def test_a_blob_that_is_cut_off() -> None:
    data = written(0, b"0123456789")
    for size_bytes in range(len(data)):
        reader = SnapshotReader()
        reader.receive_data(data[:size_bytes])
        assert reader.end("was killed by signal 9") == (
            "the process that encoded the state was killed by signal 9 before it was done"
        )


def test_texts() -> None:
    reader = SnapshotReader()
    assert reader.receive_data(written(2, b"no memory")) == b""
    assert reader.end("left with status 0") == "no memory"
    reader = SnapshotReader()
    assert reader.receive_data(written(1, "attribute 'ü'".encode())) == b""
    with pytest.raises(StateError, match="attribute 'ü'"):
        reader.end("left with status 0")


class Polling(Immortal):
    """Never goes on with continue_as."""

    seen: int

    def __init__(self) -> None:
        self.seen = 0

    @rpc(id=1)
    async def poll(self, rounds: int) -> None:
        for _ in range(rounds):
            await immortal.step(self.look)
        await immortal.event("more")

    @rpc(id=2)
    def look(self) -> int:
        self.seen += 1
        return self.seen


def grown(life: Life) -> list[JournalGrew]:
    return [event for event in life.events if isinstance(event, JournalGrew)]


def test_journals_that_grow_are_told_of_and_again_when_they_have_doubled() -> None:
    life = first_start(Polling)
    life.give(logged(1, [call(1, JOURNAL_RESULTS_MANY - 200)]) + TAKE)
    assert grown(life) == []
    life.give(logged(2, [call(1, 200)]) + TAKE + TAKE)
    life.give(logged(3, [call(1, JOURNAL_RESULTS_MANY - 200)]) + TAKE)
    (one,) = grown(life)
    assert (one.handler, one.tasks_count, one.results_count) == ("Polling.poll", 2, JOURNAL_RESULTS_MANY)
    life.give(logged(4, [call(1, 200)]) + TAKE)
    assert grown(life)[1].results_count == 2 * JOURNAL_RESULTS_MANY
