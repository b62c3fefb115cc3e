"""Several commits under way at a time: begun by the loop, finished as their answers come, settled where none comes."""

from __future__ import annotations

import select
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from immortal.coordinator.core import effects as ef
from immortal.coordinator.core import events as ev
from immortal.coordinator.core.errors import LogFullError, LogUnavailableError
from immortal.coordinator.core.interfaces import CheckpointHeader, Transaction
from immortal.coordinator.log_port.writer import LogWriter
from immortal.protocol.checksum import crc64
from immortal.protocol.record import encode_record
from immortal.protocol.trailer import Trailer, encode_trailer
from tests.helpers.far_backend import FarStore

WAIT_S = 20.0
SMALL, LARGE = 100, 101  # bytes, as the writer is told


def value(sequence_id: int) -> bytes:
    record = encode_record(1, sequence_id, b"hi")
    return record + encode_trailer(Trailer(1, []), int.from_bytes(record[8:16], "little"))


def commit(ticket: int, size_bytes: int = SMALL, sequence_id: int | None = None) -> ef.Commit:
    """Of one record: ``ticket`` - 1, where nothing else is said."""
    number = ticket - 1 if sequence_id is None else sequence_id
    return ef.Commit(ticket, Transaction(records=[(number, value(number))]), size_bytes, number - 1, 1)


class SlowTrims(FarStore):
    """A step of trimming waits at ``gate``. ``beside``: how many were done while something was under way."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.trims = threading.Event(), threading.Event()
        self.gate.set()
        self.beside = 0

    def trim(self, **options: Any) -> bool:
        self.beside += len(self.backend.begun) > 0
        self.trims.set()
        assert self.gate.wait(WAIT_S)
        return super().trim(**options)


@pytest.fixture
def store() -> SlowTrims:
    return SlowTrims()


@pytest.fixture
def writer(store: SlowTrims) -> Iterator[LogWriter]:
    writer = made(store)
    yield writer
    store.gate.set()
    end(writer, store)


def made(store: FarStore) -> LogWriter:
    return LogWriter(store, keep_checkpoints=None, inline_size_bytes_max=SMALL)


def end(writer: LogWriter, store: FarStore) -> None:
    if store.backend.failure is None:
        store.backend.answer(len(store.backend.begun))
    writer.close()
    store.close()


def submit(writer: LogWriter, *jobs: Any) -> None:
    for job in jobs:
        writer.submit(job)
    assert writer.run_inline() == []


def collected(writer: LogWriter, count: int) -> list[ev.Event]:
    events: list[ev.Event] = []
    while len(events) < count:
        assert select.select([writer], [], [], WAIT_S)[0], f"there came only {events}"
        events += writer.pop_finished()
    return events


def is_silent(writer: LogWriter) -> bool:
    return not select.select([writer], [], [], 0)[0]


def until(condition: Callable[[], object]) -> None:
    pause = threading.Event()
    for _ in range(round(WAIT_S / 0.001)):
        if condition():
            return
        pause.wait(0.001)
    pytest.fail("it did not come about")


def test_each_is_durable_when_its_answer_is_there(store: SlowTrims, writer: LogWriter) -> None:
    submit(writer, commit(1), commit(2))
    submit(writer, commit(3))
    assert len(store.backend.begun) == 3, "none waits for another"
    assert is_silent(writer)
    store.backend.answer(1)
    assert collected(writer, 1) == [ev.Committed(1)]
    assert is_silent(writer)
    assert [len(store.read(0, 1 << 20)), store.tail()] == [1, (1, 0)]
    store.backend.answer(2)
    assert collected(writer, 2) == [ev.Committed(2), ev.Committed(3)]
    assert is_silent(writer)
    assert store.tail() == (3, 2)


def test_what_is_for_the_thread_comes_behind_what_was_begun(store: SlowTrims, writer: LogWriter) -> None:
    submit(writer, commit(1), commit(2))
    submit(writer, ef.WriteCheckpointChunk(1, 0, b"blob"), commit(3), commit(4, LARGE))
    assert len(store.backend.begun) == 2, "a small one does not overtake a chunk"
    assert writer.pop_finished() == []
    store.backend.answer(2)
    assert collected(writer, 5) == [
        ev.Committed(1),
        ev.Committed(2),
        ev.ChunkWritten(4),
        ev.Committed(3),
        ev.Committed(4),
    ]
    submit(writer, commit(5))
    assert len(store.backend.begun) == 1, "the thread has nothing to do any more"


def test_what_depends_on_the_log_is_for_the_thread(store: SlowTrims, writer: LogWriter) -> None:
    header = CheckpointHeader(1, 0, 4, crc64(b"blob"), 1)
    submit(writer, commit(1), ef.WriteCheckpointChunk(1, 0, b"blob"))
    store.backend.answer(1)
    assert len(collected(writer, 2)) == 2
    submit(writer, ef.Commit(2, Transaction(checkpoint=header), 0, 0, 1), commit(3, sequence_id=1))
    assert collected(writer, 2) == [ev.Committed(2), ev.Committed(3)]
    assert len(store.summary().checkpoints) == 1


def test_a_step_of_trimming_waits_for_what_was_begun_and_keeps_nobody(store: SlowTrims, writer: LogWriter) -> None:
    store.gate.clear()
    writer.trim()
    until(store.trims.is_set)
    submit(writer, commit(1))
    assert not store.backend.begun, "the loop does not wait for the thread: the thread has it"
    store.gate.set()
    assert collected(writer, 1) == [ev.Committed(1)]
    until(lambda: not writer.trimming)

    store.trims.clear()
    submit(writer, commit(2))
    writer.trim()
    store.backend.answer(1)
    until(store.trims.is_set)
    assert not store.beside
    submit(writer, commit(3))
    store.backend.answer(1)
    assert collected(writer, 2) == [ev.Committed(2), ev.Committed(3)]


@pytest.mark.parametrize("done", [0, 1, 2])
def test_where_the_connection_breaks_the_oldest_is_answered_and_the_tail_says_the_rest(
    store: SlowTrims, writer: LogWriter, done: int
) -> None:
    jobs = [commit(number) for number in (1, 2, 3)]
    submit(writer, *jobs)
    store.backend.answer(1)
    store.backend.do(done)
    store.backend.break_off()
    committed, failed = collected(writer, 2)
    assert committed == ev.Committed(1)
    assert isinstance(failed, ev.LogFailed)
    assert (failed.request, failed.retryable) == (jobs[1], True)
    submit(writer, commit(4), commit(5, LARGE))
    assert len(store.backend.begun) == 2, "nothing is written before the end of the log is known"
    writer.submit(ef.ReadTail())
    assert collected(writer, 1) == [ev.TailRead(1 + done, done)]
    again = jobs[1 + done :]
    submit(writer, *again)
    store.backend.answer(len(again))
    assert collected(writer, len(again)) == [ev.Committed(job.ticket) for job in again]
    assert store.tail() == (3, 2)


def test_one_that_can_not_be_sent_is_answered_behind_what_the_thread_has_left(
    store: SlowTrims, writer: LogWriter
) -> None:
    jobs = [commit(1), commit(2)]
    submit(writer, jobs[0])
    writer.trim()
    store.backend.answer(1)
    until(lambda: not writer.trimming)  # it has waited for the first one, of which nobody has heard yet
    store.backend.sends = False
    submit(writer, jobs[1])
    committed, failed = collected(writer, 2)
    assert committed == ev.Committed(1)
    assert isinstance(failed, ev.LogFailed)
    assert failed.request is jobs[1]
    assert is_silent(writer)


def test_one_that_is_refused_ends_it(store: SlowTrims, writer: LogWriter) -> None:
    submit(writer, commit(1), commit(2))
    store.backend.fails_next = LogFullError("full")
    with pytest.raises(LogFullError):
        store.backend.do(1)
    store.backend.break_off()
    (failed,) = collected(writer, 1)
    assert isinstance(failed, ev.LogFailed)
    assert failed.retryable is False
    assert isinstance(failed.error, LogFullError)


def test_the_writer_ends_once_what_was_begun_is_answered(store: SlowTrims) -> None:
    writer = made(store)
    submit(writer, commit(1))
    closing = threading.Thread(target=writer.close)
    closing.start()
    store.backend.answer(1)
    closing.join(WAIT_S)
    assert not closing.is_alive()
    assert store.tail() == (1, 0)
    store.close()


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("commits"), st.lists(st.sampled_from([SMALL, SMALL, LARGE]), min_size=1, max_size=3)),
        st.tuples(st.just("answer"), st.integers(1, 3)),
        st.tuples(st.just("do"), st.integers(1, 3)),
        st.sampled_from([("break", 0), ("send fails", 0), ("trim", 0), ("chunk", 0), ("collect", 0)]),
    ),
    max_size=30,
)


@settings(max_examples=150, deadline=None)
@given(steps=STEPS)
def test_whatever_happens_each_is_there_once_and_in_order(steps: list[tuple[str, Any]]) -> None:
    """Asked for as the core does: of what has failed the tail is read, and what is not there is written again."""
    store = FarStore()
    writer = made(store)
    open_jobs: deque[ef.Commit | ef.WriteCheckpointChunk] = deque()
    ticket = chunks = 0
    is_held = False

    def take(events: list[ev.Event]) -> None:
        nonlocal is_held
        for event in events:
            if isinstance(event, ev.Committed):
                assert isinstance(job := open_jobs.popleft(), ef.Commit)
                assert job.ticket == event.ticket
            elif isinstance(event, ev.ChunkWritten):
                assert isinstance(open_jobs.popleft(), ef.WriteCheckpointChunk)
            elif isinstance(event, ev.LogFailed):
                assert isinstance(event.error, LogUnavailableError), event.error
                assert event.request is open_jobs[0]
                assert not is_held
                is_held = True
                writer.submit(ef.ReadTail())
            else:
                assert isinstance(event, ev.TailRead)
                done = [
                    n for n, job in enumerate(open_jobs) if isinstance(job, ef.Commit) and job.ticket <= event.ticket
                ]
                for _ in range(max(done, default=-1) + 1):
                    open_jobs.popleft()
                is_held = False
                submit(writer, *open_jobs)

    def ask(*jobs: ef.Commit | ef.WriteCheckpointChunk) -> None:
        open_jobs.extend(jobs)
        if not is_held:
            submit(writer, *jobs)

    try:
        for what, how in steps:
            if what == "commits":
                ask(*[commit(ticket + number, size) for number, size in enumerate(how, 1)])
                ticket += len(how)
            elif what == "chunk":
                ask(ef.WriteCheckpointChunk(1, chunks, b"blob"))
                chunks += 1
            elif what == "answer":
                store.backend.answer(how)
            elif what == "do":
                store.backend.do(how)
            elif what == "break" and store.backend.begun:
                store.backend.break_off()
            elif what == "send fails":
                store.backend.sends = False
            elif what == "trim":
                writer.trim()
            else:
                take(writer.pop_finished())
        while open_jobs or is_held:
            store.backend.answer(len(store.backend.begun))
            assert select.select([writer], [], [], WAIT_S)[0], f"these were never answered: {open_jobs}"
            take(writer.pop_finished())
        assert store.tail() == (ticket, ticket - 1)
        assert store.read(0, 1 << 20) == [value(number) for number in range(ticket)]
    finally:
        store.backend.sends = True
        end(writer, store)
