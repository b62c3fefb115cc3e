"""Benchmark of commits while a log is trimmed, and without that."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from immortal.bench.processes import BenchError
from immortal.bench.workload import percentile
from immortal.coordinator.core.effects import Commit
from immortal.coordinator.core.events import Committed
from immortal.coordinator.core.interfaces import CheckpointHeader, Transaction
from immortal.coordinator.log_port.writer import LogWriter
from immortal.coordinator.service.runtime import SWITCH_INTERVAL_S
from immortal.log import RowLogStore, create_log
from immortal.protocol.checksum import crc64
from immortal.protocol.command_line import echo, print_table
from immortal.protocol.record import encode_record
from immortal.protocol.trailer import BatchKind, BatchSource, Trailer, encode_trailer

LOGS = ((64, 400_000), (64 << 10, 8_000))  # (size of a record's content in bytes, number of records to trim)
COMMIT_SIZE_BYTES = 64  # of the measured commits, which a service waits for
COMMITS_WITHOUT = 3_000
COMMITS_MIN = 500  # fewer while it is trimmed give no useful 99th percentile: the log is filled again
ROUNDS_MAX = 20
TRIM_TIMEOUT_S = 120.0
_FILL_SIZE_BYTES = 4 << 20  # in one commit
_COMMITTER_ID = 1


@dataclass(frozen=True, slots=True)
class Latency:
    """Latency of commits, in milliseconds."""

    commits: int
    p50_ms: float
    p99_ms: float
    max_ms: float


@dataclass(frozen=True, slots=True)
class TrimResult:
    """Result of one log: ``records`` of ``size_bytes`` were trimmed, in ``seconds`` in all, during commits."""

    size_bytes: int
    records: int
    seconds: float
    without: Latency
    trimming: Latency

    @property
    def added_p99_ms(self) -> float:
        return self.trimming.p99_ms - self.without.p99_ms


def measure_trimming(
    logs: Sequence[tuple[int, int]] = LOGS,
    *,
    home: Path,
    progress: Callable[[str], None] = lambda text: None,
) -> list[TrimResult]:
    """Measure each of ``logs``, (content size in bytes, records), in a new log of its own.

    ``home``: for the logs. Raises BenchError.
    """
    results = []
    switch_interval_s = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL_S)  # as in a coordinator
    try:
        for size_bytes, records in logs:
            store = create_log(home / str(size_bytes), "bench", committer_id=_COMMITTER_ID)
            with contextlib.closing(store):
                results.append(_measure(store, size_bytes, records, progress))
    finally:
        sys.setswitchinterval(switch_interval_s)
    return results


def _measure(store: RowLogStore, size_bytes: int, records: int, progress: Callable[[str], None]) -> TrimResult:
    writer = LogWriter(store, keep_checkpoints=1, inline_size_bytes_max=1 << 20)
    try:
        commits = _Commits(writer)
        trimming_s: list[float] = []
        latencies_s: list[float] = []
        seconds = 0.0
        rounds = 0
        while len(trimming_s) < COMMITS_MIN and rounds < ROUNDS_MAX:
            progress(f"writing {records:,} records of {size_bytes} B")
            rounds += 1
            commits.sequence_id = _fill(store, commits.sequence_id, size_bytes, records)
            if rounds == 1:
                progress("commits alone")
                latencies_s = [commits.one() for _ in range(COMMITS_WITHOUT)]
            progress(f"commits while {records:,} records of {size_bytes} B are trimmed")
            _checkpoint(store, rounds, commits.sequence_id - 1)
            begun = time.perf_counter()
            writer.trim()
            while writer.trimming:
                trimming_s.append(commits.one())
                if time.perf_counter() - begun > TRIM_TIMEOUT_S:
                    raise BenchError(f"{records} records were not trimmed in {TRIM_TIMEOUT_S:.0f} s")
            seconds += time.perf_counter() - begun
        return TrimResult(size_bytes, rounds * records, seconds, _latency(latencies_s), _latency(trimming_s))
    finally:
        writer.close()


def _value(sequence_id: int, size_bytes: int) -> bytes:
    record = encode_record(_COMMITTER_ID, sequence_id, bytes(size_bytes))
    trailer = Trailer(time.time_ns(), [BatchSource(BatchKind.STREAM, "sender", sequence_id + 1, 1, 0)])
    return record + encode_trailer(trailer, int.from_bytes(record[8:16], "little"))


def _fill(store: RowLogStore, first_sequence_id: int, size_bytes: int, records: int) -> int:
    """Write ``records`` records; return the sequence ID after the last."""
    per_commit = max(1, _FILL_SIZE_BYTES // (size_bytes + 100))
    end = first_sequence_id + records
    for first in range(first_sequence_id, end, per_commit):
        numbers = range(first, min(first + per_commit, end))
        store.commit(Transaction(records=[(number, _value(number, size_bytes)) for number in numbers]))
    return end


def _checkpoint(store: RowLogStore, checkpoint_id: int, sequence_id: int) -> None:
    blob = b"state"
    store.write_checkpoint_chunk(checkpoint_id, 0, blob)
    header = CheckpointHeader(checkpoint_id, sequence_id, len(blob), crc64(blob), time.time_ns())
    store.commit(Transaction(checkpoint=header))


class _Commits:
    """Small commits one after the other, as the coordinator's loop makes them."""

    def __init__(self, writer: LogWriter) -> None:
        self.sequence_id = 0  # of the next record
        self._writer = writer

    def one(self) -> float:
        """Commit one record; return how long it took, in seconds. Raises BenchError."""
        value = _value(self.sequence_id, COMMIT_SIZE_BYTES)
        begun = time.perf_counter()
        transaction = Transaction(records=[(self.sequence_id, value)])
        self._writer.submit(Commit(self.sequence_id, transaction, len(value), self.sequence_id - 1, 1))
        (event,) = self._writer.run_inline()
        seconds = time.perf_counter() - begun
        if not isinstance(event, Committed):
            raise BenchError(f"a commit failed: {event}")
        self.sequence_id += 1
        return seconds


def _latency(latencies_s: list[float]) -> Latency:
    ordered = sorted(latencies_s)
    return Latency(len(ordered), 1e3 * percentile(ordered, 50), 1e3 * percentile(ordered, 99), 1e3 * ordered[-1])


# Output for people.


def print_trim(results: Sequence[TrimResult]) -> None:
    heads = ("records trimmed", "in s", "p50", "p99", "max", "p50 trimming", "p99 trimming", "max trimming")
    rows = (
        (
            f"{one.records:,} of {one.size_bytes} B",
            f"{one.seconds:.2f}",
            *(
                f"{value:.2f}"
                for latency in (one.without, one.trimming)
                for value in (latency.p50_ms, latency.p99_ms, latency.max_ms)
            ),
        )
        for one in results
    )
    title = "commits of a small record, in ms, alone and while a log is trimmed"
    print_table(heads, rows, right=heads, title=title)
    for one in results:
        echo(f"trimming records of {one.size_bytes} B adds {one.added_p99_ms:.2f} ms at the 99th percentile")
