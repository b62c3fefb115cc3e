"""A log that another writes, as its follower's driver has it: a real log, its real lock, and the follower's thread."""

from __future__ import annotations

import select
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from immortal.coordinator.core import effects as ef
from immortal.coordinator.core import events as ev
from immortal.coordinator.core.errors import FencedError, LogUnavailableError
from immortal.coordinator.core.interfaces import CheckpointHeader, OutputBatch, Transaction
from immortal.coordinator.instances.own_logs import InstanceLog
from immortal.coordinator.instances.registry import Registry
from immortal.coordinator.log.backend import Append
from immortal.coordinator.log.memory import MemoryLogStore
from immortal.coordinator.log_port.follower import LogFollower
from immortal.coordinator.log_port.writer import LogWriter
from immortal.coordinator.notices import Notices
from immortal.protocol.checksum import crc64
from immortal.protocol.record import encode_header
from immortal.protocol.trailer import BatchKind, BatchSource, Trailer, encode_trailer

WAIT_S = 20.0
OUTPUTS = {"b": [OutputBatch(1, 1, b"output")]}


class Log:
    """One instance's log: ``store`` writes it, followers come beside it."""

    def __init__(self, home: Path) -> None:
        registry = Registry(home)
        registry.register("a", peer="tcp://127.0.0.1:*")
        self.settings = registry.load("a")
        self.places = InstanceLog(self.settings, Notices("a"), trust_pickle=False)
        self.store = self.places.open_store()
        self.followers: list[LogFollower] = []

    def record(self, sequence_id: int) -> None:
        committer_id = self.store.summary().committer_id
        message = b"\x02\x09\x00"  # an InitialMessage without data
        header = encode_header(committer_id, sequence_id, [message])
        trailer = Trailer(1, [BatchSource(BatchKind.INITIAL, "", 1, 1, 1)], [])
        check = int.from_bytes(header[8:16], "little")
        value = header + message + encode_trailer(trailer, check)
        self.store.commit(Transaction(records=[(sequence_id, value)]))

    def checkpoint(self) -> None:
        self.store.write_checkpoint_chunk(1, 0, b"state")
        header = CheckpointHeader(1, -1, 5, crc64(b"state"), 1, {}, OUTPUTS)
        self.store.commit(Transaction(checkpoint=header, extensions=frozenset(), epoch=1))

    def follower(self) -> LogFollower:
        follower = LogFollower(InstanceLog(self.settings, Notices("a"), trust_pickle=False))
        self.followers.append(follower)
        follower.acquire()
        return follower


def events_of(follower: LogFollower, count: int) -> list[ev.Event]:
    found: list[ev.Event] = []
    deadline_s = time.monotonic() + WAIT_S
    while len(found) < count and time.monotonic() < deadline_s:
        select.select([follower.fileno()], [], [], 0.5)
        found += follower.pop_all()
    assert len(found) >= count, found
    return found


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    log = Log(tmp_path)
    yield log
    for follower in log.followers:
        follower.close()
    log.store.close()


# One process opens a log once: the follower reads a log whose writer's environment is closed, under the writer's lock.


@pytest.fixture
def held(log: Log) -> Iterator[Log]:
    log.checkpoint()
    log.record(0)
    lock, log.store.backend._folder_lock = log.store.backend._folder_lock, _NoLock()  # type: ignore[assignment]
    log.store.close()
    yield log
    lock.release()


class _NoLock:
    def release(self) -> None:
        pass


def test_it_is_told_who_writes_and_reads_beside_that(held: Log) -> None:
    follower = held.follower()
    follower.submit(ef.LoadLog())
    told, loaded = events_of(follower, 2)
    assert isinstance(told, ev.WriteLeaseHeld)
    assert told.holder.startswith("process ")
    assert isinstance(loaded, ev.LogLoaded)
    assert (loaded.summary.last_sequence_id, loaded.clients) == (0, None)
    follower.submit(ef.CheckCheckpoint(loaded.summary.checkpoints[0]))
    follower.submit(ef.ReadCheckpointChunk(1, 0))
    assert events_of(follower, 2) == [ev.CheckpointChecked(1, None), ev.CheckpointChunkRead(b"state")]
    follower.submit(ef.ReadRecords(0, 1 << 20, 7))
    (grown,) = events_of(follower, 1)
    assert isinstance(grown, ev.RecordsRead)
    assert (len(grown.values), grown.session, grown.summary is not None) == (1, 7, True)


def test_a_checkpoint_that_it_has_checked_can_be_restored_when_its_reader_is_closed(held: Log) -> None:
    follower = held.follower()
    follower.submit(ef.LoadLog())
    _, loaded = events_of(follower, 2)
    assert isinstance(loaded, ev.LogLoaded)
    header = loaded.summary.checkpoints[0]
    follower.submit(ef.CheckCheckpoint(header))
    assert events_of(follower, 1) == [ev.CheckpointChecked(1, None)]
    held.followers.remove(follower)
    follower.close()
    assert dict(header.unacknowledged) == OUTPUTS


def test_it_opens_the_log_for_writing_once_the_lock_is_free(log: Log) -> None:
    log.checkpoint()
    log.store.close()
    follower = log.follower()
    follower.submit(ef.ReadRecords(0, 1 << 20, 3))
    deadline_s = time.monotonic() + WAIT_S
    store = None
    while store is None and time.monotonic() < deadline_s:
        select.select([follower.fileno()], [], [], 0.5)
        follower.pop_all()
        store = follower.release_store()
    assert store is not None
    assert follower.pop_unanswered() == [ef.ReadRecords(0, 1 << 20, 3)]
    assert store.summary().epoch == 1
    store.close()


class SilentPlaces(InstanceLog):
    """Its log can't be reached while ``is_silent``."""

    is_silent = True

    def holder(self) -> str | None:
        if self.is_silent:
            raise LogUnavailableError("out of reach")
        return super().holder()


def test_while_the_log_is_out_of_reach_it_waits_and_says_so(held: Log) -> None:
    places = SilentPlaces(held.settings, Notices("a"), trust_pickle=False)
    follower = LogFollower(places)
    held.followers.append(follower)
    follower.acquire()
    follower.submit(ef.LoadLog())
    (told,) = events_of(follower, 1)
    assert isinstance(told, ev.LogFailed)
    assert (told.retryable, told.request) == (True, ef.LoadLog())
    places.is_silent = False
    follower.submit(ef.LoadLog())
    assert {type(event) for event in events_of(follower, 2)} == {ev.WriteLeaseHeld, ev.LogLoaded}


class UnsureStore(MemoryLogStore):
    """Its first append is done, and not answered; then it is out of reach for a while."""

    def __init__(self) -> None:
        super().__init__()
        self.resolved = [False, True]
        append = self.backend.append

        def unsure(data: Append) -> None:
            append(data)
            self.backend.append = append  # type: ignore[method-assign]
            raise LogUnavailableError("no answer")

        def resolve() -> bool:
            if not self.resolved.pop(0):
                raise LogUnavailableError("still none")
            return True

        self.backend.append = unsure  # type: ignore[method-assign]
        self.backend.resolve = resolve  # type: ignore[method-assign]


def test_an_append_that_was_done_and_not_answered_is_told_of_by_the_tail() -> None:
    store = UnsureStore()
    writer = LogWriter(store, keep_checkpoints=None, inline_size_bytes_max=1 << 16)
    commit = ef.Commit(3, Transaction(epoch=1), 100, -1, 1)
    try:
        writer.submit(commit)
        (failed,) = writer.run_inline()
        assert isinstance(failed, ev.LogFailed)
        assert (failed.retryable, failed.request) == (True, commit)
        came: list[ev.Event] = []
        for count in (1, 2):
            writer.submit(ef.ReadTail())
            while len(came) < count:
                assert select.select([writer], [], [], WAIT_S)[0]
                came += writer.pop_finished()
        assert isinstance(came[0], ev.LogFailed)
        assert (came[0].retryable, came[0].request) == (True, ef.ReadTail())
        assert came[1] == ev.TailRead(3, -1)
        writer.submit(ef.Commit(4, Transaction(epoch=2), 100, -1, 1))
        assert writer.run_inline() == [ev.Committed(4)]
    finally:
        writer.close()


class FencingStore(MemoryLogStore):
    error: Exception = FencedError("process 77")

    def commit(self, transaction: Transaction, ticket: int = 0) -> None:
        raise self.error


@pytest.mark.parametrize("inline", [0, 1 << 16])
def test_the_writer_says_what_has_become_of_an_append(inline: int) -> None:
    store = FencingStore()
    writer = LogWriter(store, keep_checkpoints=None, inline_size_bytes_max=inline)
    commit = ef.Commit(3, Transaction(epoch=1), 100, -1, 1)
    try:
        for error, expected in (
            (FencedError("process 77"), ev.Fenced(3, "process 77")),
            (silent := LogUnavailableError("no network"), ev.LogFailed(silent, True, commit)),
        ):
            store.error = error
            writer.submit(commit)
            events = writer.run_inline()
            if not events:
                assert select.select([writer.fileno()], [], [], WAIT_S)[0]
                events = writer.pop_finished()
            assert events == [expected]
    finally:
        writer.close()
