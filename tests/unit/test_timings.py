"""Notes of times: what is written is read, within its limit; what is damaged or foreign is passed over."""

from __future__ import annotations

import os
import random
import threading
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from immortal.appsdk.running.options import TIMINGS_VARIABLE, OptionError, run_options
from immortal.coordinator.service.timing_notes import Arrived, Durable, Observation, RowBuilder, SentToApp, Submitted
from immortal.protocol.record import decode_header, encode_record
from immortal.protocol.timings import (
    APP,
    COORDINATOR,
    FILES_MAX,
    HEADER_SIZE_BYTES,
    ROW_SIZE_BYTES,
    SEGMENTS_MAX,
    BackgroundWriter,
    SegmentWriter,
    TimingKind,
    TimingRow,
    decode_row,
    decode_segment_header,
    encode_row,
    encode_segment_header,
    segments,
)
from immortal.protocol.trailer import BatchKind, BatchSource, Trailer, encode_trailer
from immortal.replay.trace.messages import DAMAGED_RUN_MAX, OUTSIDE, Executed, MessageTiming, RecordTiming, Timings
from immortal.replay.trace.spans import Spans

LOG = 7
SECOND = 10**9
_LONGS = st.integers(-(1 << 63), (1 << 63) - 1)
_INTS = st.integers(-(1 << 31), (1 << 31) - 1)
rows = st.builds(TimingRow, _LONGS, _INTS, st.integers(0, 255), _LONGS, _LONGS, _LONGS)


def commit(sequence_id: int, at_ns: int = SECOND) -> TimingRow:
    return TimingRow(sequence_id, 0, TimingKind.COMMIT, at_ns + sequence_id, at_ns + sequence_id + 10, 0)


def handled(sequence_id: int, message: int, began_ns: int) -> TimingRow:
    return TimingRow(sequence_id, message, TimingKind.HANDLED, began_ns, began_ns + 5)


def write(
    folder: Path, some: list[TimingRow], *, whose: str = COORDINATOR, log: int = LOG, limit: int = 1 << 20
) -> None:
    said: list[str] = []
    writer = SegmentWriter(folder, whose, limit, said.append)
    writer.write(log, some)
    writer.close()
    assert said == []


def records_in(folder: Path, count: int) -> list[int]:
    timings = Timings(folder, LOG)
    return [number for number in range(count) if timings.record_timing(number) is not None]


@given(rows, st.integers(0, (1 << 32) - 1))
def test_a_row_reads_as_it_was_written(row: TimingRow, crc: int) -> None:
    data = encode_row(row, crc)
    assert len(data) == ROW_SIZE_BYTES
    assert decode_row(data, crc) == row
    assert decode_row(data, crc ^ 1) is None
    assert decode_row(data[:-1], crc) is None


@given(st.binary(max_size=64))
def test_bytes_that_begin_no_segment(data: bytes) -> None:
    log = decode_segment_header(data)
    assert log is None or data.startswith(encode_segment_header(log))


def test_each_record_is_found_wherever_the_search_begins(tmp_path: Path) -> None:
    numbers = [number for number in range(2_000) if number % 7]
    write(tmp_path, [commit(number) for number in numbers])
    write(tmp_path, [handled(number, index, SECOND) for number in numbers for index in range(2)], whose=APP)
    timings = Timings(tmp_path, LOG)
    order = list(range(2_000))
    for asked in (order, order[::-1], random.Random(1).sample(order, len(order))):
        for number in asked:
            found = timings.record_timing(number)
            assert (found is not None) == (number % 7 != 0)
            if found is not None:
                assert found.commit == commit(number)
                assert found.handled == {0: (SECOND, SECOND + 5), 1: (SECOND, SECOND + 5)}
    assert timings.problems == []


def test_the_oldest_make_room(tmp_path: Path) -> None:
    limit_bytes = 40_000
    said: list[str] = []
    for start in range(0, 5_000, 500):  # as many processes, one after the other
        writer = SegmentWriter(tmp_path, COORDINATOR, limit_bytes, said.append)
        for number in range(start, start + 500):
            writer.write(LOG, [commit(number)])
            assert sum(path.stat().st_size for path in segments(tmp_path, COORDINATOR)) <= limit_bytes
        writer.close()
    found = records_in(tmp_path, 5_000)
    assert found == list(range(found[0], 5_000))
    assert len(found) * ROW_SIZE_BYTES >= limit_bytes * (SEGMENTS_MAX - 2) // SEGMENTS_MAX
    assert said == []


def test_a_process_that_is_started_again_and_again_leaves_few_files(tmp_path: Path) -> None:
    for number in range(FILES_MAX + 20):
        write(tmp_path, [commit(number)])
    assert len(segments(tmp_path, COORDINATOR)) == FILES_MAX
    assert records_in(tmp_path, FILES_MAX + 20) == list(range(20, FILES_MAX + 20))


def test_numbers_that_a_cut_gave_away_again(tmp_path: Path) -> None:
    write(tmp_path, [commit(number) for number in range(10)])
    write(tmp_path, [commit(number, 9 * SECOND) for number in range(5, 10)])
    timings = Timings(tmp_path, LOG)
    assert [timings.record_timing(number).commit.first_ns // SECOND for number in range(10)] == [1] * 5 + [9] * 5  # type: ignore[union-attr]


def test_a_record_over_two_segments(tmp_path: Path) -> None:
    some = [handled(number, index, SECOND) for number in range(3) for index in range(100)]
    write(tmp_path, some, whose=APP, limit=SEGMENTS_MAX * (HEADER_SIZE_BYTES + 130 * ROW_SIZE_BYTES))
    write(tmp_path, [commit(number) for number in range(3)])
    timings = Timings(tmp_path, LOG)
    assert [len(timings.record_timing(number).handled) for number in range(3)] == [100] * 3  # type: ignore[union-attr]


def test_of_another_log_nothing_is_taken(tmp_path: Path) -> None:
    write(tmp_path, [commit(number) for number in range(10)], log=LOG + 1)
    assert records_in(tmp_path, 10) == []


@given(
    st.lists(st.tuples(st.integers(0, 1 << 14), st.integers(0, 255)), min_size=1, max_size=30),
    st.integers(0, 60 * ROW_SIZE_BYTES),
)
def test_damage_takes_rows_and_never_changes_one(
    tmp_path_factory: pytest.TempPathFactory, hits: list[tuple[int, int]], cut_bytes: int
) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    write(folder, [commit(number) for number in range(300)])
    (path,) = segments(folder, COORDINATOR)
    data = bytearray(path.read_bytes())
    for at, byte in hits:
        data[at % len(data)] = byte
    path.write_bytes(data[: len(data) - cut_bytes])
    timings = Timings(folder, LOG)
    for number in range(300):
        found = timings.record_timing(number)
        assert found is None or found.commit == commit(number)


@given(st.binary(max_size=4096))
def test_any_bytes_as_a_segment(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    folder = tmp_path_factory.mktemp("foreign")
    for name, front in ((COORDINATOR, b""), (APP, encode_segment_header(LOG))):
        (folder / f"{name}-00000001.times").write_bytes(front + data)
    (folder / "coordinator-00000002.times").mkdir()
    os.mkfifo(folder / "coordinator-00000003.times")
    (folder / "coordinator-00000004.times").symlink_to(folder / "coordinator-00000001.times")
    timings = Timings(folder, LOG)
    assert timings.record_timing(1) is None
    assert sum("can't be read" in problem for problem in timings.problems) == 3


def test_a_segment_that_is_damaged_all_over_is_given_up(tmp_path: Path) -> None:
    write(tmp_path, [commit(number) for number in range(100)])
    garbage = encode_segment_header(LOG) + bytes(ROW_SIZE_BYTES * 10 * DAMAGED_RUN_MAX)
    (tmp_path / f"{COORDINATOR}-00000002.times").write_bytes(garbage)
    timings = Timings(tmp_path, LOG)
    assert [number for number in range(100) if timings.record_timing(number)] == list(range(100))
    assert len(timings.problems) == 1
    assert "rows one after the other can't be read" in timings.problems[0]


def test_a_folder_that_can_not_be_written_is_told_once(tmp_path: Path) -> None:
    (tmp_path / "timings").write_text("mine")
    said: list[str] = []
    writer = SegmentWriter(tmp_path / "timings", APP, 1 << 20, said.append)
    for number in range(3):
        writer.write(LOG, [commit(number)])
    writer.close()
    assert len(said) == 1
    assert "no times are noted any more" in said[0]
    assert (tmp_path / "timings").read_text() == "mine"


def test_what_was_put_is_handled_by_the_end() -> None:
    taken: list[int] = []
    threads: set[int] = set()

    def take(some: list[int]) -> None:
        taken.extend(some)
        threads.add(threading.get_ident())

    noting: BackgroundWriter[int] = BackgroundWriter(take)
    for number in range(10_000):
        noting.put(number)
    noting.close()
    assert taken == list(range(10_000))
    assert threading.get_ident() not in threads


# --- what a coordinator sees ------------------------------------------------------------------------------------------


def submitted(ticket: int, sequence_id: int, time_ns: int, *batches: BatchSource) -> Submitted:
    check = decode_header(encode_record(LOG, sequence_id, b"some")).check
    return Submitted(ticket, sequence_id, LOG, time_ns, encode_trailer(Trailer(1, batches), check), check)


def stream(first: int, count: int, name: str = "a") -> BatchSource:
    return BatchSource(BatchKind.STREAM, name, first, count, 1)


def test_batches_find_when_they_came() -> None:
    records, source = RowBuilder(), (int(BatchKind.STREAM), "a")
    seen: list[Observation] = [
        Arrived(source, 2, 100),
        Arrived(source, 5, 200),
        Arrived(source, 5, 250),  # sent again
        submitted(1, 0, 300, stream(1, 2), BatchSource(BatchKind.IMPULSES, "", 1, 3, 1), stream(3, 3)),
        Arrived(source, 9, 320),
        Durable(1, 400),
    ]
    assert [row for one in seen for row in records.add(one)] == []
    assert records.add(SentToApp(0, 500)) == [
        TimingRow(0, 0, TimingKind.COMMIT, 300, 400, 500),
        TimingRow(0, 0, TimingKind.ARRIVED, 100),
        TimingRow(0, 5, TimingKind.ARRIVED, 200),
    ]
    records.add(submitted(2, 1, 600, stream(6, 1), stream(7, 1, "b")))
    assert records.pop_rest() == [
        TimingRow(1, 0, TimingKind.COMMIT, 600, 0, 0),
        TimingRow(1, 0, TimingKind.ARRIVED, 320),  # a part of what came
    ]


def test_joined_commits_are_durable_together_and_records_come_in_order() -> None:
    records = RowBuilder()
    for number in range(4):
        records.add(submitted(number + 1, number, 100 + number))
    records.add(submitted(1, 0, 999))  # the log did not answer, and is asked once more
    records.add(Durable(3, 200))
    assert records.add(SentToApp(2, 300)) == [
        TimingRow(0, 0, TimingKind.COMMIT, 100, 200, 0),
        TimingRow(1, 0, TimingKind.COMMIT, 101, 200, 0),
        TimingRow(2, 0, TimingKind.COMMIT, 102, 200, 300),
    ]
    assert records.add(SentToApp(1, 400)) == []  # to an app that recovers
    assert records.pop_rest() == [TimingRow(3, 0, TimingKind.COMMIT, 103, 0, 0)]


# --- spans ------------------------------------------------------------------------------------------------------------

_TIMES = st.integers(0, 40) | st.integers(0, (1 << 62))


@given(_TIMES, _TIMES, _TIMES, _TIMES, _TIMES, _TIMES, st.none() | _TIMES, st.integers(0, 100))
def test_no_span_is_shorter_than_nothing(
    first: int, second: int, third: int, arrived: int, began: int, ended: int, taken: int | None, sent: int
) -> None:
    """Whatever a file says."""
    time_ns = 50
    record = RecordTiming(TimingRow(0, 0, TimingKind.COMMIT, first, second, third), {0: arrived}, {0: (began, ended)})
    timing = record.message_timing(0, 0, time_ns, taken)
    message = Executed(
        "a", LOG, 0, 0, OUTSIDE, BatchKind.IMPULSES, 1, min(sent, time_ns), time_ns, "A.add", 1, None, timing=timing
    )
    spans = {span.kind: span for span in Spans().all_of([message])}
    assert all(span.start_ns <= span.end_ns for span in spans.values())
    assert {"call", "handler"} <= spans.keys() <= {"call", "handler", "queue", "commit"}
    if "queue" in spans:
        assert spans["call"].start_ns <= spans["queue"].start_ns
        assert spans["queue"].end_ns <= spans["handler"].start_ns or spans["queue"].end_ns == spans["handler"].start_ns
    for before, after in pairwise(
        at for at in (time_ns, timing.durable_ns, timing.given_ns, timing.began_ns, timing.ended_ns) if at is not None
    ):
        assert before <= after


def test_spans_of_what_was_noted() -> None:
    timing = MessageTiming(100, 120, 150, 160, 300, 340)
    message = Executed("a", LOG, 4, 2, "b", BatchKind.STREAM, 9, 80, 120, "A.add", 1, None, timing=timing)
    call, queue, commit_span, handler = Spans().all_of([message])
    assert [(one.kind, one.start_ns, one.end_ns) for one in (call, queue, commit_span, handler)] == [
        ("call", 80, 150),
        ("queue", 100, 300),
        ("commit", 120, 150),
        ("handler", 300, 340),
    ]
    assert (queue.parent_id, commit_span.parent_id, handler.parent_id) == (call.span_id, queue.span_id, call.span_id)
    assert len({one.trace_id for one in (call, queue, commit_span, handler)}) == 1


def test_an_app_that_notes_nothing_has_a_queue_up_to_where_it_was_given() -> None:
    timing = MessageTiming(100, 120, 150, 160, None, None)
    message = Executed("a", LOG, 4, 2, "b", BatchKind.STREAM, 9, 80, 120, "A.add", 1, None, timing=timing)
    _, queue, _, handler = Spans().all_of([message])
    assert (queue.end_ns, handler.start_ns, handler.end_ns) == (160, 160, 160)


def test_what_the_environment_says() -> None:
    assert run_options(environment={}).timings is None
    assert run_options(environment={TIMINGS_VARIABLE: "512:/a:b"}).timings == (Path("/a:b"), 512)
    with pytest.raises(OptionError, match="BYTES:FOLDER was expected"):
        run_options(environment={TIMINGS_VARIABLE: "/a"})
