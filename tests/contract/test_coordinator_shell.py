"""The shell around the core, in this process: the writer's thread over stand-in stores, the app's socket."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from immortal.coordinator.app.endpoint import AppEndpoint
from immortal.coordinator.app.sockets import AppConnection, AppListenError, listen
from immortal.coordinator.core import effects as ef
from immortal.coordinator.core import events as ev
from immortal.coordinator.core.errors import LogError, LogFullError, LogSyncError, LogUnavailableError
from immortal.coordinator.core.interfaces import (
    CheckpointHeader,
    ImpulseBatch,
    SourcePosition,
    Transaction,
    VersionStart,
)
from immortal.coordinator.driver.ports import checkpoint_problem
from immortal.coordinator.instances.registry import Registry
from immortal.coordinator.log.memory import MemoryLogStore
from immortal.coordinator.log_port.writer import JOINED_SIZE_BYTES_MAX, LogWriter
from immortal.coordinator.notices import Notices
from immortal.coordinator.service.runtime import Coordinator
from immortal.messenger import Answer, Messenger, Outcome, Received
from immortal.protocol.checksum import crc64
from immortal.protocol.peer_frames import FrameType, PeerFrame, encode_frame
from immortal.protocol.record import encode_record
from immortal.protocol.trailer import Trailer, encode_trailer

DEADLINE_S = 10.0


class Store(MemoryLogStore):
    """Writes down what it is asked for; a write waits at ``gate``."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[str] = []
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.error: Exception | None = None

    def commit(self, transaction: Transaction, ticket: int = 0) -> None:
        self.entered.set()
        assert self.gate.wait(DEADLINE_S)
        if self.error is not None:
            raise self.error
        super().commit(transaction, ticket)
        self.done.append(f"commit {transaction.epoch}")

    def write_checkpoint_chunk(self, checkpoint_id: int, index: int, data: bytes) -> None:  # type: ignore[override]
        super().write_checkpoint_chunk(checkpoint_id, index, data)
        self.done.append(f"chunk {index}")

    def trim(self, *, keep_checkpoints: int | None, keep_since_ns: int | None, keep_bytes: int | None) -> bool:
        self.done.append(f"trim {keep_checkpoints}")
        if self.error is not None:
            raise self.error
        return False


def commit(number: int, size_bytes: int = 0) -> ef.Commit:
    return ef.Commit(number, Transaction(epoch=number), size_bytes, -1, 1)


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def writer(store: Store) -> Iterator[LogWriter]:
    made = LogWriter(store, keep_checkpoints=2, inline_size_bytes_max=100)
    yield made
    store.gate.set()
    if made._thread.is_alive():
        made.close()


def collected(writer: LogWriter, count: int) -> list[ev.Event]:
    events: list[ev.Event] = []
    while len(events) < count:
        ready, _, _ = select.select([writer], [], [], DEADLINE_S)
        assert ready, f"the thread gave only {events}"
        events += writer.pop_finished()
    return events


def test_small_commits_run_inline(store: Store, writer: LogWriter) -> None:
    writer.submit(commit(1))
    writer.submit(commit(2, 100))
    assert store.done == []
    assert writer.run_inline() == [ev.Committed(1), ev.Committed(2)]
    assert writer.run_inline() == []
    assert writer.pop_finished() == []


def test_the_order_is_kept_between_inline_and_thread(store: Store, writer: LogWriter) -> None:
    store.gate.clear()
    writer.submit(commit(1))
    writer.submit(commit(2, 101))
    writer.submit(ef.WriteCheckpointChunk(1, 0, b"blob"))
    writer.submit(commit(3))
    assert writer.run_inline() == [], "a small commit overtook a large one"
    store.gate.set()
    assert collected(writer, 4) == [ev.Committed(1), ev.Committed(2), ev.ChunkWritten(4), ev.Committed(3)]
    assert store.done == ["commit 2", "chunk 0", "commit 3"], "1 and 2 share a sync; nothing is joined across a chunk"
    writer.submit(commit(4))
    assert writer.run_inline() == [ev.Committed(4)]


@pytest.mark.parametrize("size_bytes", [0, 101], ids=["inline", "thread"])
@pytest.mark.parametrize("error", [LogFullError("full"), LogSyncError("sync"), OSError("strange"), ValueError()])
def test_a_failure_is_answered_and_the_thread_lives(
    store: Store, writer: LogWriter, error: Exception, size_bytes: int
) -> None:
    # Another exception than a LogError ended the thread, and the machine waited for ever.
    store.error = error
    writer.submit(commit(1, size_bytes))
    (event,) = writer.run_inline() if not size_bytes else collected(writer, 1)
    assert isinstance(event, ev.LogFailed)
    if isinstance(error, LogError):
        assert event.error is error
    else:
        assert repr(error) in str(event.error)
    store.error = None
    writer.submit(commit(2, size_bytes))
    assert (writer.run_inline() or collected(writer, 1)) == [ev.Committed(2)]


@pytest.mark.parametrize("size_bytes", [0, 101], ids=["inline", "thread"])
def test_what_waits_behind_a_write_without_an_answer_is_not_done(
    store: Store, writer: LogWriter, size_bytes: int
) -> None:
    """It would be in the log before the first one, or twice: whoever submits it asks where the log ends, and says."""
    store.error = LogUnavailableError("no network")
    store.gate.clear()
    commits = [commit(number, size_bytes) for number in (1, 2, 3)]
    writer.submit(commits[0])
    if size_bytes:
        assert store.entered.wait(DEADLINE_S)  # it is alone: the others are not joined to it
        writer.submit(ef.WriteCheckpointChunk(1, 0, b"blob"))
    else:
        store.gate.set()
    writer.submit(commits[1])
    writer.submit(commits[2])
    events = writer.run_inline()
    store.gate.set()
    assert (events or collected(writer, 1)) == [ev.LogFailed(store.error, True, commits[0])]
    store.error = None
    writer.submit(commits[1])
    assert writer.run_inline() == [], "no more than what was submitted before"
    writer.submit(ef.ReadTail())
    assert collected(writer, 1) == [ev.TailRead(0, -1)]
    assert store.done == []
    writer.submit(commits[0])
    assert writer.run_inline() + (collected(writer, 1) if size_bytes else []) == [ev.Committed(1)]
    assert store.done == ["commit 1"]
    writer.submit(ef.ReadTail())
    assert collected(writer, 1) == [ev.TailRead(1, -1)]


def test_after_joined_commits_have_failed_small_ones_are_inline_again(store: Store, writer: LogWriter) -> None:
    store.gate.clear()
    writer.submit(ef.WriteCheckpointChunk(1, 0, b"blob"))
    writer.submit(commit(1, 101))
    assert store.entered.wait(DEADLINE_S)
    writer.submit(commit(2, 101))
    writer.submit(commit(3, 101))  # these are joined
    store.gate.set()
    assert len(collected(writer, 4)) == 4
    store.error = LogSyncError("sync")
    store.gate.clear()
    store.entered.clear()
    for number in (4, 5, 6):
        writer.submit(commit(number, 101))
    assert store.entered.wait(DEADLINE_S)
    store.gate.set()
    failed = collected(writer, 1)
    while writer._on_thread:
        failed += collected(writer, 1)
    assert {type(event) for event in failed} == {ev.LogFailed}
    store.error = None
    writer.submit(commit(7))
    assert writer.run_inline() == [ev.Committed(7)]


def test_trimming_happens_when_there_is_nothing_to_write(store: Store, writer: LogWriter) -> None:
    store.gate.clear()
    writer.submit(commit(1, 101))
    writer.trim()
    writer.trim()
    writer.submit(commit(2, 101))
    store.gate.set()
    assert len(collected(writer, 2)) == 2
    deadline = time.monotonic() + DEADLINE_S
    while "trim 2" not in store.done:
        assert time.monotonic() < deadline
    writer.submit(commit(3, 101))
    collected(writer, 1)
    writer.close()
    assert store.done.count("trim 2") == 1
    assert store.done.index("trim 2") > store.done.index("commit 2"), "a commit waited for the trimming"


def test_a_failed_trim_leaves_the_thread_alive(store: Store, writer: LogWriter) -> None:
    trimmed = threading.Event()

    def trim(*, keep_checkpoints: int | None, keep_since_ns: int | None, keep_bytes: int | None) -> bool:
        trimmed.set()
        raise OSError("strange")

    store.trim = trim  # type: ignore[method-assign]
    writer.trim()
    assert trimmed.wait(DEADLINE_S)
    writer.submit(commit(1, 101))
    assert collected(writer, 1) == [ev.Committed(1)]


def test_close_finishes_what_was_submitted_behind_a_trim(store: Store, writer: LogWriter) -> None:
    store.gate.clear()
    writer.submit(commit(1, 101))
    assert store.entered.wait(DEADLINE_S)
    writer.trim()
    writer.submit(commit(2, 101))
    closing = threading.Thread(target=writer.close)
    closing.start()
    while not writer._closing:
        pass
    store.gate.set()
    closing.join(DEADLINE_S)
    assert store.done[-1] == "commit 2"


def test_a_failed_join_answers_with_its_error(store: Store, writer: LogWriter) -> None:
    store.gate.clear()
    for number in (1, 2, 3):
        writer.submit(commit(number, 101))
    store.error = LogFullError("full")
    store.gate.set()
    assert isinstance(collected(writer, 1)[0], ev.LogFailed)
    assert store.done == []


def test_commits_that_cannot_be_joined_are_answered_and_the_thread_lives(store: Store, writer: LogWriter) -> None:
    # The exception ended the thread, and the machine waited for ever.
    store.gate.clear()
    writer.submit(commit(1, 101))
    assert store.entered.wait(DEADLINE_S)
    for number in (2, 3):
        writer.submit(ef.Commit(number, Transaction(version=VersionStart(number, 0)), 101, -1, 1))
    store.gate.set()
    committed, failed = collected(writer, 2)
    assert committed == ev.Committed(1)
    assert isinstance(failed, ev.LogFailed)
    assert "two versions begin in one transaction" in str(failed.error)
    assert store.done == ["commit 1"]
    writer.submit(commit(4, 101))
    assert collected(writer, 1) == [ev.Committed(4)]


def test_a_trim_that_is_asked_for_during_the_last_step_is_done(store: Store, writer: LogWriter) -> None:
    again = threading.Event()
    asked: list[int | None] = []

    def trim(*, keep_checkpoints: int | None, keep_since_ns: int | None, keep_bytes: int | None) -> bool:
        asked.append(keep_since_ns)
        if len(asked) == 1:
            writer.trim(2)  # the loop's thread asks, when this step has looked at what there is
        else:
            again.set()
        return False

    store.trim = trim  # type: ignore[method-assign]
    writer.trim(1)
    assert again.wait(DEADLINE_S)
    writer.submit(commit(1, 101))
    collected(writer, 1)
    assert asked == [1, 2]
    assert not writer.trimming


def test_commits_that_wait_share_a_sync_up_to_a_size(store: Store, writer: LogWriter) -> None:
    store.gate.clear()
    for number in range(1, 9):
        writer.submit(commit(number, JOINED_SIZE_BYTES_MAX // 2))
    store.gate.set()
    assert collected(writer, 8) == [ev.Committed(number) for number in range(1, 9)]
    syncs = [int(done.removeprefix("commit ")) for done in store.done]
    assert syncs == sorted(syncs)
    assert 4 <= len(syncs) <= 5  # two at a time; or the first alone, where the thread was at it already


def test_joined_transactions_are_what_they_would_have_been_one_by_one() -> None:
    def made() -> list[Transaction]:
        impulses = [ImpulseBatch(first, 1, b"\x08\x00\x00\x02\x01", "b") for first in (1, 2)]
        return [
            Transaction(
                records=[(0, _record(0))],
                sources={"b": SourcePosition(7, 1, 3), "c": SourcePosition(8, 1, 1)},
                acknowledged={"b": 1},
                peers={"b": 7},
                impulses=impulses[:1],
                epoch=4,
                extensions=frozenset({65}),
            ),
            Transaction(checkpoint=CheckpointHeader(1, 0, 0, 0, 5)),
            Transaction(
                records=[(1, _record(1))],
                sources={"b": SourcePosition(7, 2, 5)},
                acknowledged={"b": 2, "c": 1},
                impulses=impulses[1:],
            ),
        ]

    singly, joined = MemoryLogStore(), MemoryLogStore()
    together = Transaction()
    for transaction in made():
        singly.commit(transaction)
        together.absorb(transaction)
    joined.commit(together)
    assert joined.summary() == singly.summary()
    assert joined.read(0, 1000) == singly.read(0, 1000)


def _record(sequence_id: int) -> bytes:
    record = encode_record(1, sequence_id, b"content")
    return record + encode_trailer(Trailer(5), int.from_bytes(record[8:16], "little"))


# --- the whole blob is read before it is given to an app -------------------------------------------------------------


@pytest.mark.parametrize(
    ("header", "problem"),
    [
        (CheckpointHeader(1, -1, 8, crc64(b"blobblob"), 0), None),
        (CheckpointHeader(1, -1, 8, 1, 0), "its check is"),
        (CheckpointHeader(1, -1, 9, crc64(b"blobblob"), 0), "it has 8 bytes, 9 were written"),
        (CheckpointHeader(1, -1, 7, crc64(b"blobblo"), 0), "over 8 bytes"),
    ],
)
def test_a_checkpoint_is_compared_with_what_was_written(header: CheckpointHeader, problem: str | None) -> None:
    store = MemoryLogStore()
    store.write_checkpoint_chunk(1, 0, b"blob")
    store.write_checkpoint_chunk(1, 1, b"blob")
    store.commit(Transaction(checkpoint=CheckpointHeader(1, -1, 8, crc64(b"blobblob"), 0)))
    found = checkpoint_problem(store, header)
    assert found is None if problem is None else problem in (found or "")


# --- the app's socket ------------------------------------------------------------------------------------------------


def test_what_a_socket_does_not_take_waits() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        connection = AppConnection(ours)
        chunks = [bytes((index % 251,)) * 5000 for index in range(400)]
        for chunk in chunks:
            connection.send(chunk)
        received = bytearray()
        sent = connection.flush()
        assert connection.has_waiting
        while len(received) < 2_000_000:
            received += theirs.recv(1 << 20)
            sent += connection.flush()
        assert sent == 2_000_000
        assert not connection.has_waiting
        assert received == b"".join(chunks)
        assert connection.receive() is None
        theirs.close()
        assert connection.receive() == b""
        connection.send(b"to nobody")
        assert connection.flush() == 0
        assert not connection.has_waiting


def test_an_address_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(AppListenError, match=r"can't listen for the app of 'alice' at 192\.0\.2\.1:7002"):
        listen("192.0.2.1", 7002, "alice", "app_port")


def test_what_the_app_was_sent_is_told_when_it_is_asked_for(tmp_path: Path) -> None:
    registry = Registry(tmp_path)
    settings = registry.register("alice", "tcp://127.0.0.1:*", app_auth="none")
    epoll = select.epoll()
    endpoint = AppEndpoint(settings, Notices("alice"), epoll)
    endpoint.listen()
    try:
        with socket.create_connection(("127.0.0.1", settings.app_port)) as app:
            assert endpoint.process(dict(epoll.poll(DEADLINE_S))) == [ev.AppConnected()]
            for data in (b"one", b"three"):
                endpoint.send(ef.SendToApp(data))
                assert endpoint.flush() == []
            assert endpoint.sent_bytes == 8
            assert endpoint.pop_sent_events() == [ev.AppSent(8)]
            assert endpoint.pop_sent_events() == []
            endpoint.send(ef.SendToApp(b"four"))
            endpoint.flush()
            app.shutdown(socket.SHUT_RDWR)
            assert endpoint.process(dict(epoll.poll(DEADLINE_S))) == [ev.AppClosed()]
            assert endpoint.pop_sent_events() == [], "the next app would be taken to have been sent that"
    finally:
        endpoint.close()
        epoll.close()


def test_the_next_app_is_accepted_only_when_the_core_knows_that_the_last_one_is_gone(tmp_path: Path) -> None:
    # Accepted in the same turn, it was sent what was still meant for the last one.
    registry = Registry(tmp_path)
    settings = registry.register("alice", "tcp://127.0.0.1:*", app_auth="none")
    epoll = select.epoll()
    endpoint = AppEndpoint(settings, Notices("alice"), epoll)
    endpoint.listen()

    def turn() -> list[ev.Event]:
        return endpoint.process(dict(epoll.poll(DEADLINE_S)))

    address = ("127.0.0.1", settings.app_port)
    try:
        with socket.create_connection(address) as first:
            assert turn() == [ev.AppConnected()]
            first.close()
            with socket.create_connection(address):
                assert turn() == [ev.AppClosed()]
                endpoint.send(ef.SendToApp(b"for the first one"))
                assert turn() == [ev.AppConnected()]
                assert endpoint.flush() == [], "the second one was sent what was for the first one"
    finally:
        endpoint.close()
        epoll.close()


def test_a_peer_that_says_hello_is_connected_to_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has just been started; ZeroMQ by itself would wait for a minute."""
    for name in ("RECONNECT_MS_MIN", "RECONNECT_MS_MAX"):
        monkeypatch.setattr(f"immortal.coordinator.messenger.limits.{name}", 60_000)
    registry = Registry(tmp_path)
    settings, bob = (registry.register(name, f"ipc://{tmp_path}/{name}.peers") for name in ("alice", "bob"))
    coordinator = Coordinator(settings, registry, MemoryLogStore(), Notices("alice"))
    ours, theirs = coordinator._peers._messenger, Messenger()

    def drive(until: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while not until():
            assert time.monotonic() < deadline_s
            select.select([ours, theirs], [], [], 0.01)
            ours.process()
            theirs.process()

    try:
        coordinator._peers.listen()
        coordinator._peers.open(ef.OpenPeer("bob"))
        ours.send_message(bob.peer, b"a call")
        theirs.listen(bob.peer, lambda received: received.reply())
        drive(lambda: ours.connected(bob.peer))
        theirs.close()
        theirs = Messenger()
        drive(lambda: not ours.connected(bob.peer))
        theirs.listen(bob.peer, lambda received: received.reply())
        theirs.send_message(settings.peer, encode_frame(PeerFrame(FrameType.HELLO, "bob", "alice", 7, 1, 0)))
        drive(lambda: ours.connected(bob.peer))
    finally:
        theirs.close()
        coordinator._close()


def test_a_coordinator_has_no_callbacks_for_its_peers_and_takes_their_messages_in_order(tmp_path: Path) -> None:
    registry = Registry(tmp_path)
    settings, bob = (registry.register(name, f"ipc://{tmp_path}/{name}.peers") for name in ("alice", "bob"))
    coordinator = Coordinator(settings, registry, MemoryLogStore(), Notices("alice"))
    ours, theirs = coordinator._peers._messenger, Messenger()
    answers: list[Answer] = []
    replies: list[list[bytes]] = []
    came: list[Received] = []

    def drive(until: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while not until():
            assert time.monotonic() < deadline_s
            select.select([ours, theirs], [], [], 0.01)
            ours.process()
            theirs.process()

    try:
        coordinator._peers.listen()
        theirs.converse(settings.peer, b"for a callback that it never gave", answers.append, 12345)
        theirs.converse(settings.peer, [b"", b"damaged: answered without a frame"], answers.append)
        theirs.send_message(settings.peer, [b"", b"damaged as well"], replies.append)
        drive(lambda: len(answers) == 2 and bool(replies))
        assert [answer.outcome for answer in answers] == [Outcome.CALLBACK_UNKNOWN, Outcome.REPLIED]
        assert [answer.callback_id for answer in answers] == [0, 0]
        (conversation,) = ours._listeners.all[0]._inbox._plain.links.values()
        assert conversation.window.ordered
        assert conversation.callbacks == {}
        theirs.listen(bob.peer, came.append)
        coordinator._peers.open(ef.OpenPeer("bob"))
        coordinator._peers.send(ef.SendToPeer("bob", 1, PeerFrame(FrameType.HELLO, "alice", "bob", 7, 1, 0)))
        coordinator._peers.flush(patient=False)
        drive(lambda: bool(came))
        assert not came[0].takes_callback, "it is of kind 1, as ever"
    finally:
        theirs.close()
        coordinator._close()
