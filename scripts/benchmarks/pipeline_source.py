"""Measures the pipeline's data source, with logs in a folder of its own.

python -m scripts.benchmarks.pipeline_source
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO

import click
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from immortal.bench.processes import hear, start_module
from immortal.coordinator.core.interfaces import CheckpointHeader, Transaction
from immortal.log import RowLogStore, create_log, open_reader
from immortal.pipeline.session import session
from immortal.protocol.checksum import crc64
from immortal.protocol.messages import RpcType, encode_incoming_rpc
from immortal.protocol.trailer import BatchKind, OutputMarkEntry
from tests.helpers.synthetic_logs import Input, PlannedRecord, encode_planned

_COMMITTER_ID = 7
_MODULE = "scripts.benchmarks.pipeline_source"
_METHOD_ID = 343_311
_COMMIT_SIZE_BYTES = 8 << 20
_LARGE_SIZES_BYTES = (64, 4 << 10, 64 << 10, 1 << 20)
_TURN_S = 2.5
_RUNS = 6
_PAYLOADS = 64  # different ones; their content does not matter, only that it differs


def record_value(sequence_id: int, time_ns: int, first_position: int, payloads: list[bytes]) -> bytes:
    """Return a record of one batch, as a coordinator writes it."""
    batch = Input(BatchKind.STREAM, "sender", first_position, len(payloads), time_ns - 1000, b"".join(payloads))
    record = PlannedRecord(time_ns, [batch], [OutputMarkEntry("receiver", sequence_id + 1, sequence_id)])
    return encode_planned(record, _COMMITTER_ID, sequence_id)


def calls(size_bytes: int) -> list[bytes]:
    """Return some calls whose arguments have that size."""
    draw = random.Random(size_bytes)
    return [encode_incoming_rpc(_METHOD_ID, RpcType.FORK, draw.randbytes(size_bytes)) for _ in range(_PAYLOADS)]


def fill_new(folder: Path, records: Iterator[bytes]) -> None:
    store = create_log(folder, folder.name, committer_id=_COMMITTER_ID)
    transaction, size_bytes = Transaction(), 0
    for sequence_id, value in enumerate(records):
        transaction.records.append((sequence_id, value))
        size_bytes += len(value)
        if size_bytes >= _COMMIT_SIZE_BYTES:
            store.commit(transaction)
            transaction, size_bytes = Transaction(), 0
    store.commit(transaction)
    store.close()


def make_log(folder: Path, messages: int, messages_per_record: int) -> None:
    """Write a log of that many small messages."""
    some = calls(16)
    now_ns = time.time_ns()

    def records() -> Iterator[bytes]:
        for index in range(messages // messages_per_record):
            payloads = [some[(index + number) % _PAYLOADS] for number in range(messages_per_record)]
            yield record_value(index, now_ns + index, 1 + index * messages_per_record, payloads)

    fill_new(folder, records())


def make_large_log(folder: Path, size_bytes: int) -> None:
    """Write a log of that size, with records of very different sizes."""
    some = {size: calls(size) for size in _LARGE_SIZES_BYTES}
    now_ns = time.time_ns()

    def records() -> Iterator[bytes]:
        rest_bytes, index = size_bytes, 0
        while rest_bytes > 0:
            payloads = [some[_LARGE_SIZES_BYTES[index % len(_LARGE_SIZES_BYTES)]][index % _PAYLOADS]]
            yield record_value(index, now_ns + index, index + 1, payloads)
            rest_bytes -= len(payloads[0])
            index += 1

    fill_new(folder, records())


# --- measuring -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cost:
    """Cost of a run. ``processor_s``: of this process and its descendants, Spark's too, but of no other process."""

    wall_s: float
    processor_s: float

    def __str__(self) -> str:
        return f"{self.wall_s:.2f} s, {self.processor_s:.2f} s of processors"


def best_of(runs: int, action: Callable[[], object]) -> Cost:
    """Return the least of each cost over several runs."""
    costs = []
    for _ in range(runs):
        start_s, processor_start_s = time.perf_counter(), processor_time_s()
        action()
        costs.append(Cost(time.perf_counter() - start_s, processor_time_s() - processor_start_s))
    return Cost(min(cost.wall_s for cost in costs), min(cost.processor_s for cost in costs))


def processor_time_s() -> float:
    """Return the processor time of this process and its living descendants (Linux; exact to 10 ms)."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # the process has just ended
            values = file.read_text().rpartition(")")[2].split()
            process_id = int(file.parent.name)
            parents[process_id], ticks[process_id] = int(values[1]), int(values[11]) + int(values[12])

    def is_ours(process_id: int) -> bool:
        while process_id not in (os.getpid(), 0):
            process_id = parents.get(process_id, 0)
        return process_id != 0

    return sum(used for process_id, used in ticks.items() if is_ours(process_id)) / os.sysconf("SC_CLK_TCK")


def scan(spark: SparkSession, folder: Path) -> tuple[object, ...]:
    """Read every message with its payload, in a new frame: Spark keeps the results of an old one."""
    columns = "sequence_id long, position long, method_id int, arguments binary, ok boolean"
    frame = spark.read.format("immortal").schema(columns).load(str(folder))
    totals = "count(*)", "sum(position)", "sum(length(arguments))", "max(method_id)", "min(ok)", "max(sequence_id)"
    return tuple(frame.selectExpr(*totals).collect()[0])


@dataclass(frozen=True)
class Load:
    """Load of a live writer: commits of records of 1 KiB until a limit is reached (0: no limit)."""

    records_per_commit: int = 1
    commits_per_s: float = 0  # 0: as fast as the disk takes them
    seconds: float = 0
    commits: int = 0
    commits_per_checkpoint: int = 0  # a checkpoint trims older records, whose pages are used again; 0: all are kept
    until_released: bool = False  # continue after the limits until then


@dataclass(frozen=True)
class Written:
    """Result of a live writer."""

    commits: int
    size_bytes: int  # of the log's file


class LiveWriter:
    """Process that writes a log beside this one."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        hear(process, "a live writer")  # now the log exists

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    def release(self) -> None:
        """Let the writer end at its limits."""
        if self.process.stdin is not None:
            self.process.stdin.close()
            self.process.stdin = None

    def wait(self) -> Written:
        self.release()
        commits, size_bytes = self.process.communicate()[0].split()
        return Written(int(commits), int(size_bytes))


@contextlib.contextmanager
def writer(folder: Path, load: Load) -> Iterator[LiveWriter]:
    with start_module(_MODULE, "write", str(folder), json.dumps(asdict(load))) as process:
        yield LiveWriter(process)


@dataclass
class Tail:
    """Rows that a stream has read."""

    rows: int = 0
    ages_s: list[float] = field(default_factory=list)

    def take(self, frame: DataFrame, batch_id: int) -> None:
        count, newest_ns = frame.selectExpr("count(*)", "max(time_ns)").collect()[0]
        self.rows += count
        if newest_ns is not None:
            self.ages_s.append((time.time_ns() - newest_ns) / 1e9)


def measure_tail(spark: SparkSession, folder: Path, records_per_s: int, seconds: float) -> tuple[Tail, int]:
    """Follow a log while it is written; return the stream's figures, and how many records were written."""
    tail = Tail()
    with writer(folder, Load(25, records_per_s / 25, seconds)) as live:
        reader = spark.readStream.format("immortal").option("table", "records")
        query = reader.load(str(folder)).writeStream.foreachBatch(tail.take).start()
        try:
            commits = live.wait().commits
            query.processAllAvailable()
        finally:
            query.stop()
    return tail, commits * 25


def scan_while_written(spark: SparkSession, folder: Path, load: Load) -> tuple[Written, int]:
    """Scan a log repeatedly while it is written; return the writer's result and the number of scans.

    A writer that waits for it is released after the second scan.
    """
    scans = 0
    with writer(folder, load) as live:
        while live.is_running:
            try:
                scan(spark, folder)
            except PySparkException as error:
                if "was trimmed up to record" not in str(error):
                    raise
            scans += 1
            if scans == 2:
                live.release()
        return live.wait(), scans


def write_alone(folder: Path, load: Load) -> Written:
    with writer(folder, load) as live:
        return live.wait()


def write_beside_one_transaction(folder: Path, load: Load) -> Written:
    """Write beside a reader that keeps one read transaction open all the time, as ours must not."""
    with writer(folder, load) as live, open_reader(folder) as reader, reader.view():
        return live.wait()


@dataclass(frozen=True)
class Growth:
    """Sizes of the file of a log that is trimmed while it is written, by its readers."""

    alone_bytes: int
    beside_scans_bytes: int
    beside_one_transaction_bytes: int
    scans: int


def measure_growth(spark: SparkSession, folder: Path, commits: int) -> Growth:
    load = Load(records_per_commit=8, commits=commits, commits_per_checkpoint=max(1, commits // 6))
    alone = write_alone(folder / "alone", load)
    scan(spark, folder / "alone")  # the first one starts Spark's workers
    beside, scans = scan_while_written(spark, folder / "scanned", replace(load, until_released=True))
    held = write_beside_one_transaction(folder / "held", load)
    return Growth(alone.size_bytes, beside.size_bytes, held.size_bytes, scans)


def measure_writer(spark: SparkSession, folder: Path, seconds: float) -> tuple[float, float]:
    """Return commits/s of a writer alone, and while Spark reads its log repeatedly; in turns.

    Turns are needed because other load on this machine must not affect one side only.
    """
    alone = beside = 0
    turns = max(1, round(seconds / _TURN_S))
    load = Load(seconds=seconds / turns)
    for turn in range(turns):
        alone += write_alone(folder / f"alone-{turn}", load).commits
        beside += scan_while_written(spark, folder / f"scanned-{turn}", load)[0].commits
    return alone / seconds, beside / seconds


# --- the command -----------------------------------------------------------------------------------------------------


@click.group(invoke_without_command=True)
@click.option("--messages", default=2_000_000, show_default=True, help="In the logs of small messages.")
@click.option("--large-mib", default=1024, show_default=True, help="Size of the log of large records.")
@click.option("--seconds", default=10.0, show_default=True, help="For each measurement beside a live writer.")
@click.option("--master", default="local[2]", show_default=True)
@click.pass_context
def main(context: click.Context, messages: int, large_mib: int, seconds: float, master: str) -> None:
    """Measure reading, the live tail, and what a live writer loses."""
    if context.invoked_subcommand is not None:
        return
    with tempfile.TemporaryDirectory(prefix="immortal-bench-") as name:
        folder = Path(name)
        click.echo("making logs", err=True)
        make_log(folder / "batched", messages, 16)
        make_log(folder / "single", messages, 1)
        make_large_log(folder / "large", large_mib << 20)
        start = time.perf_counter()
        spark = session(master, **{"spark.sql.streaming.metricsEnabled": "false"})
        scan(spark, folder / "batched")
        click.echo(f"session and first query: {time.perf_counter() - start:.1f} s")
        click.echo(f"{os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}; the best of {_RUNS} runs")
        for log, what in (("batched", "16 messages a record"), ("single", "1 message a record")):
            cost = best_of(_RUNS, lambda log=log: scan(spark, folder / log))  # type: ignore[misc]
            click.echo(f"{messages:,} messages, {what}: {cost} ({messages / cost.wall_s / 1e6:.1f} M/s)")
        cost = best_of(_RUNS, lambda: scan(spark, folder / "large"))
        click.echo(
            f"{large_mib} MiB of records, 64 B - 1 MiB: {cost} ({large_mib * (1 << 20) / 1e9 / cost.wall_s:.2f} GB/s)"
        )
        tail, written = measure_tail(spark, folder / "tail", 5000, seconds)
        warm = sorted(tail.ages_s[len(tail.ages_s) // 3 :]) or [float("nan")]
        click.echo(
            f"tail: {tail.rows:,} of {written:,} records at {written / seconds:,.0f}/s; newest row"
            f" {warm[len(warm) // 2]:.2f} s old (median), {warm[-1]:.2f} s at most"
        )
        alone, beside = measure_writer(spark, folder, seconds)
        click.echo(
            f"a live writer: {alone:,.0f} commits/s alone, {beside:,.0f} beside scans"
            f" ({100 * (1 - beside / alone):.0f} % lost)"
        )
        growth = measure_growth(spark, folder / "growth", 6000)
        click.echo(
            f"the file of a live log that is trimmed: {growth.alone_bytes / (1 << 20):.1f} MiB alone,"
            f" {growth.beside_scans_bytes / (1 << 20):.1f} beside {growth.scans} scans"
            f" ({100 * (growth.beside_scans_bytes / growth.alone_bytes - 1):+.1f} %),"
            f" {growth.beside_one_transaction_bytes / (1 << 20):.1f} beside a reader that holds on"
        )
        spark.stop()


def is_open(pipe: IO[str]) -> bool:
    """Return True while the pipe is open: it gets no data, so it is readable once it has ended."""
    return not select.select([pipe], [], [], 0)[0]


@main.command(hidden=True)
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("load_json")
def write(folder: Path, load_json: str) -> None:
    """Do what Load says, and print what Written holds."""
    load = Load(**json.loads(load_json))
    store = create_log(folder, folder.name, committer_id=_COMMITTER_ID)
    some = calls(1024)
    sequence_id = commits = 0
    start = time.perf_counter()
    click.echo("writing")
    while True:
        now = time.perf_counter() - start
        is_over = (load.seconds and now >= load.seconds) or (load.commits and commits >= load.commits)
        if is_over and not (load.until_released and is_open(sys.stdin)):
            break
        if load.commits_per_s and commits > now * load.commits_per_s:
            time.sleep(commits / load.commits_per_s - now)
        time_ns = time.time_ns()
        records = []
        for _ in range(load.records_per_commit):
            payloads = [some[sequence_id % _PAYLOADS]]
            records.append((sequence_id, record_value(sequence_id, time_ns, sequence_id + 1, payloads)))
            sequence_id += 1
        store.commit(Transaction(records=records))
        commits += 1
        if load.commits_per_checkpoint and commits % load.commits_per_checkpoint == 0:
            checkpoint_and_trim(store, commits, sequence_id - 1, time_ns)
    store.close()
    size_bytes = sum(path.stat().st_size for path in folder.iterdir())
    click.echo(f"{commits} {size_bytes}")


def checkpoint_and_trim(store: RowLogStore, checkpoint_id: int, sequence_id: int, time_ns: int) -> None:
    state = bytes(1024)
    store.write_checkpoint_chunk(checkpoint_id, 0, state)
    header = CheckpointHeader(checkpoint_id, sequence_id, len(state), crc64(state), time_ns)
    store.commit(Transaction(checkpoint=header))
    while store.trim(keep_checkpoints=2):
        pass


if __name__ == "__main__":
    main()
