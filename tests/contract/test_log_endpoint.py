"""The log as the driver has it, with a real writer: who waits for what."""

from __future__ import annotations

import select
import threading
from collections.abc import Iterator

import pytest

from immortal.coordinator.core import effects as ef
from immortal.coordinator.core import events as ev
from immortal.coordinator.core.interfaces import CheckpointHeader, LogStore, Transaction
from immortal.coordinator.log.memory import MemoryLogStore
from immortal.coordinator.log_port import endpoint as log_endpoint
from immortal.coordinator.log_port.endpoint import LogEndpoint
from immortal.coordinator.log_port.writer import LogWriter
from immortal.coordinator.notices import Notices
from immortal.protocol.checksum import crc64

BLOB = b"a state of many gigabytes"
HEADER = CheckpointHeader(1, -1, len(BLOB), crc64(BLOB), 0)
WAIT_S = 20


class SlowStore(MemoryLogStore):
    """Its chunks come when they are let through."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.let_through = threading.Event(), threading.Event()

    def read_checkpoint_chunk(self, checkpoint_id: int, index: int) -> bytes:
        self.asked.set()
        assert self.let_through.wait(WAIT_S)
        return super().read_checkpoint_chunk(checkpoint_id, index)


class Log:
    def __init__(self) -> None:
        self.store = SlowStore()
        self.store.write_checkpoint_chunk(1, 0, BLOB)
        self.store.commit(Transaction(checkpoint=HEADER))
        self.inbox: list[ev.Event] = []
        clock = None  # asked where something is trimmed
        self.endpoint = LogEndpoint(self.store, _writer, clock, Notices("a"), None, self.inbox)  # type: ignore[arg-type]
        self.endpoint.acquire(ef.AcquireWriteLease())
        self.inbox.clear()


def _writer(store: LogStore) -> LogWriter:
    return LogWriter(store, keep_checkpoints=None, inline_size_bytes_max=1 << 16)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[Log]:
    monkeypatch.setattr(log_endpoint, "CHECKED_AT_ONCE_SIZE_BYTES_MAX", 0)  # every checkpoint is a large one
    log = Log()
    yield log
    log.store.let_through.set()
    log.endpoint.close()


def test_a_checkpoint_is_read_whole_beside_the_loop(log: Log) -> None:
    log.endpoint.submit(ef.CheckCheckpoint(HEADER))
    assert log.store.asked.wait(WAIT_S)
    log.endpoint.submit(ef.LoadLog())
    assert [type(event) for event in log.inbox] == [ev.LogLoaded], "what is asked meanwhile is answered"
    log.inbox.clear()
    log.store.let_through.set()
    assert select.select([log.endpoint], [], [], WAIT_S)[0]
    log.endpoint.collect()
    assert log.inbox == [ev.CheckpointChecked(1, None)]


def test_a_small_one_is_read_at_once(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that an app has its state before it has said anything: one that is refused can be told why."""
    monkeypatch.setattr(log_endpoint, "CHECKED_AT_ONCE_SIZE_BYTES_MAX", len(BLOB))
    log.store.let_through.set()
    log.endpoint.submit(ef.CheckCheckpoint(HEADER))
    assert log.inbox == [ev.CheckpointChecked(1, None)]


def test_of_a_log_that_is_elsewhere_nothing_is_read_or_written_at_once(log: Log) -> None:
    """It may take as long as it likes: the loop has others to serve."""
    log.endpoint.close()
    log.store.backend.is_remote = True
    log.endpoint = LogEndpoint(log.store, _writer, None, Notices("a"), None, log.inbox)  # type: ignore[arg-type]
    log.endpoint.acquire(ef.AcquireWriteLease())
    log.inbox.clear()
    log.endpoint.submit(ef.Commit(1, Transaction(epoch=3), 1, -1, 1))
    assert not log.endpoint.has_inline
    log.endpoint.submit(ef.LoadLog(with_clients=True))
    assert log.inbox == []
    while len(log.inbox) < 2:
        assert select.select([log.endpoint], [], [], WAIT_S)[0]
        log.endpoint.collect()
    assert {type(event) for event in log.inbox} == {ev.Committed, ev.LogLoaded}


def test_a_commit_on_the_thread_and_a_check_are_both_answered(log: Log) -> None:
    log.store.let_through.set()
    log.endpoint.submit(ef.CheckCheckpoint(HEADER))
    log.endpoint.submit(ef.WriteCheckpointChunk(2, 0, b"x"))
    while len(log.inbox) < 2:
        assert select.select([log.endpoint], [], [], WAIT_S)[0]
        log.endpoint.collect()
    assert {type(event) for event in log.inbox} == {ev.CheckpointChecked, ev.ChunkWritten}


def test_a_check_that_nobody_waits_for_ends_with_the_log(log: Log) -> None:
    many = CheckpointHeader(1, -1, 1 << 50, 0, 0)
    log.store.read_checkpoint_chunk = lambda checkpoint_id, index: b"more and more"  # type: ignore[method-assign]
    log.endpoint.submit(ef.CheckCheckpoint(many))
    log.endpoint.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "log-reads"]
    log.endpoint = Log().endpoint  # one that the fixture can close


def test_what_cannot_be_read_is_a_damaged_checkpoint(log: Log) -> None:
    def fails(checkpoint_id: int, index: int) -> bytes:
        raise OSError("the disk is gone")

    log.store.read_checkpoint_chunk = fails  # type: ignore[method-assign]
    log.endpoint.submit(ef.CheckCheckpoint(HEADER))
    assert select.select([log.endpoint], [], [], WAIT_S)[0]
    log.endpoint.collect()
    (event,) = log.inbox
    assert isinstance(event, ev.CheckpointChecked)
    assert "the disk is gone" in (event.problem or "")
