"""Spark over logs: scans, a stream, jobs, and what a live writer notices of them."""

from __future__ import annotations

import importlib.util
import json
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from immortal.bench.harness import Context, Figure, rate
from immortal.bench.processes import MIB, read_line, start_module
from immortal.bench.workload import Measured
from immortal.coordinator.core.interfaces import CheckpointHeader, Transaction
from immortal.log import RowLogStore, create_log, open_reader
from immortal.protocol.checksum import crc64
from immortal.protocol.messages import RpcType, encode_incoming_rpc
from tests.helpers.pipeline_logs import COMMITTER_ID, fill_new, record_value
from tests.helpers.synthetic_logs import Fleet, write_fleet

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SPARK = "immortal pipeline"
MASTER = "local[2]"
METHOD_ID = 343_311
MESSAGES_A_SECOND = 1_000_000  # about; it sets the messages for each second of a turn
LARGE_SIZES_BYTES = (64, 4 << 10, 64 << 10, 1 << 20)
SERVICES = 20
TAIL_RECORDS_PER_S, TAIL_RECORDS_PER_COMMIT = 5_000, 25
COMMITS = 6_000


def pipeline(context: Context) -> list[Figure]:
    """Measure Spark over logs: scans, a stream, jobs, and what a live writer notices of them."""
    if importlib.util.find_spec("pyspark") is None:
        context.skipped["Spark"] = "the package pyspark is not installed: 'scripts/setup spark' does that"
        return []
    from immortal.pipeline.session import session

    spark = session(MASTER, **{"spark.sql.streaming.metricsEnabled": "false"})
    try:
        with context.home() as home:
            return [
                *_scans(context, spark, home),
                _tail(spark, home / "tail", 5 * context.amounts.seconds),
                _live_writer(context, spark),
                _growth(spark, home / "growth"),
                _jobs(context, spark, home / "fleet"),
            ]
    finally:
        spark.stop()


# --- scans -----------------------------------------------------------------------------------------------------------


def _scans(context: Context, spark: SparkSession, home: Path) -> list[Figure]:
    messages = round(MESSAGES_A_SECOND * context.amounts.seconds)
    logs = {
        "small messages, 16 a record": ([16], 16, messages),
        "small messages, 1 a record": ([16], 1, messages),
        "messages of 64 B to 1 MiB": (LARGE_SIZES_BYTES, 1, max(8, messages // 2_000)),
    }
    context.progress("writing logs")
    turns: dict[str, Callable[[], Measured]] = {}
    for name, (sizes, per_record, count) in logs.items():
        some = [_call(size) for size in sizes]
        payloads = ([some[number % len(some)]] * per_record for number in range(count // per_record))
        now_ns = time.time_ns()
        records = (
            record_value(number, now_ns + number, 1 + number * per_record, batch)
            for number, batch in enumerate(payloads)
        )
        folder = home / str(len(turns))
        fill_new(folder, records)
        turns[name] = partial(_timed_scan, spark, folder, count)
    next(iter(turns.values()))()  # the first one starts Spark's workers
    return [rate("scans", context.interleave(turns, "scans"), unit="messages/s")]


def _call(size_bytes: int) -> bytes:
    return encode_incoming_rpc(METHOD_ID, RpcType.FORK, bytes(size_bytes))


def _timed_scan(spark: SparkSession, folder: Path, messages: int) -> Measured:
    begun = time.perf_counter()
    scan(spark, folder)
    return Measured(messages, time.perf_counter() - begun)


def scan(spark: SparkSession, folder: Path) -> None:
    """Read every message with its payload, in a new frame: Spark keeps the results of an old one."""
    columns = "sequence_id long, position long, method_id int, arguments binary, ok boolean"
    frame = spark.read.format("immortal").schema(columns).load(str(folder))
    totals = "count(*)", "sum(position)", "sum(length(arguments))", "max(method_id)", "min(ok)", "max(sequence_id)"
    frame.selectExpr(*totals).collect()


# --- a live writer, and who reads beside it --------------------------------------------------------------------------


class LiveWriter:
    """Process that writes a log beside this one. Its result: the commits, and the size of the log's file in bytes."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        read_line(process, "a live writer")  # now the log exists

    def release(self) -> None:
        """Let the writer end at its limits."""
        if self.process.stdin is not None:
            self.process.stdin.close()
            self.process.stdin = None

    def wait(self) -> tuple[int, int]:
        self.release()
        commits, size_bytes = self.process.communicate()[0].split()
        return int(commits), int(size_bytes)


@contextmanager
def writer(folder: Path, **load: Any) -> Iterator[LiveWriter]:
    """Run :func:`write` with ``load``."""
    with start_module(__name__, str(folder), json.dumps(load)) as process:
        yield LiveWriter(process)


def write(
    folder: Path,
    *,
    records_per_commit: int = 1,
    commits_per_s: float = 0,
    seconds: float = 0,
    commits_max: int = 0,
    commits_per_checkpoint: int = 0,
    until_released: bool = False,
) -> None:
    """Commit records of 1 KiB until a limit is reached (0: no limit), or longer, until standard input ends.

    A checkpoint trims older records, whose pages are used again. Prints the commits and the size of the log's file.
    """
    store = create_log(folder, folder.name, committer_id=COMMITTER_ID)
    payload = _call(1024)
    sequence_id = commits = 0
    begun = time.perf_counter()
    print("writing", flush=True)
    while True:
        now = time.perf_counter() - begun
        is_over = (seconds and now >= seconds) or (commits_max and commits >= commits_max)
        if is_over and not (until_released and not select.select([sys.stdin], [], [], 0)[0]):
            break
        if commits_per_s and commits > now * commits_per_s:
            time.sleep(commits / commits_per_s - now)
        numbers = range(sequence_id, sequence_id + records_per_commit)
        time_ns = time.time_ns()
        records = [(number, record_value(number, time_ns, number + 1, [payload])) for number in numbers]
        store.commit(Transaction(records=records))
        sequence_id, commits = numbers.stop, commits + 1
        if commits_per_checkpoint and commits % commits_per_checkpoint == 0:
            _checkpoint_and_trim(store, commits, sequence_id - 1, time_ns)
    store.close()
    print(commits, sum(path.stat().st_size for path in folder.iterdir()), flush=True)


def _checkpoint_and_trim(store: RowLogStore, checkpoint_id: int, sequence_id: int, time_ns: int) -> None:
    state = bytes(1024)
    store.write_checkpoint_chunk(checkpoint_id, 0, state)
    header = CheckpointHeader(checkpoint_id, sequence_id, len(state), crc64(state), time_ns)
    store.commit(Transaction(checkpoint=header))
    while store.trim(keep_checkpoints=2):
        pass


def _tail(spark: SparkSession, folder: Path, seconds: float) -> Figure:
    """Follow a log while it is written."""
    ages_s: list[float] = []

    def take(frame: DataFrame, batch_id: int) -> None:
        newest_ns = frame.selectExpr("max(time_ns)").collect()[0][0]
        if newest_ns is not None:
            ages_s.append((time.time_ns() - newest_ns) / 1e9)

    commits_per_s = TAIL_RECORDS_PER_S / TAIL_RECORDS_PER_COMMIT
    load = {"records_per_commit": TAIL_RECORDS_PER_COMMIT, "commits_per_s": commits_per_s, "seconds": seconds}
    with writer(folder, **load) as live:
        reader = spark.readStream.format("immortal").option("table", "records")
        query = reader.load(str(folder)).writeStream.foreachBatch(take).start()
        try:
            live.wait()
            query.processAllAvailable()
        finally:
            query.stop()
    warm = ages_s[len(ages_s) // 3 :]
    return Figure(f"age of the newest row, {TAIL_RECORDS_PER_S:,} records/s are written", "s", "lower", {SPARK: warm})


def scan_while_written(spark: SparkSession, folder: Path, **load: Any) -> tuple[tuple[int, int], int]:
    """Scan a log repeatedly while it is written; return the writer's result and the number of scans.

    A writer that waits for it is released after the second scan.
    """
    from pyspark.errors import PySparkException

    scans = 0
    with writer(folder, **load) as live:
        while live.process.poll() is None:
            try:
                scan(spark, folder)
            except PySparkException as error:
                if "was trimmed up to record" not in str(error):
                    raise
            scans += 1
            if scans == 2:
                live.release()
        return live.wait(), scans


def write_alone(folder: Path, **load: Any) -> tuple[int, int]:
    with writer(folder, **load) as live:
        return live.wait()


def _live_writer(context: Context, spark: SparkSession) -> Figure:
    seconds = context.amounts.seconds

    def commits_per_s(write: Callable[[Path], int]) -> float:
        with context.home() as folder:
            return write(folder / "log") / seconds

    turns = {
        "alone": partial(commits_per_s, lambda folder: write_alone(folder, seconds=seconds)[0]),
        "beside scans": partial(commits_per_s, lambda folder: scan_while_written(spark, folder, seconds=seconds)[0][0]),
    }
    return Figure("a live writer", "commits/s", "higher", context.interleave(turns, "a live writer"))


def measure_growth(spark: SparkSession, folder: Path, commits: int) -> tuple[dict[str, int], int]:
    """Return sizes in bytes of the file of a log that is trimmed while it is written, by its readers, and the number of
    scans. One reader keeps a read transaction open all the time, as ours must not."""
    load = {"records_per_commit": 8, "commits_max": commits, "commits_per_checkpoint": max(1, commits // 6)}
    _, alone = write_alone(folder / "alone", **load)
    scan(spark, folder / "alone")  # the first one starts Spark's workers
    (_, beside), scans = scan_while_written(spark, folder / "scanned", **load, until_released=True)
    with writer(folder / "held", **load) as live, open_reader(folder / "held") as reader, reader.view():
        _, held = live.wait()
    return {"alone": alone, "beside scans": beside, "beside a reader that holds on": held}, scans


def _growth(spark: SparkSession, folder: Path) -> Figure:
    sizes, _ = measure_growth(spark, folder, COMMITS)
    samples = {name: [size_bytes / MIB] for name, size_bytes in sizes.items()}
    return Figure("file of a live log that is trimmed", "MiB", "lower", samples)


# --- jobs ------------------------------------------------------------------------------------------------------------


def _jobs(context: Context, spark: SparkSession, folder: Path) -> Figure:
    from immortal.pipeline.jobs.audit import audit
    from immortal.pipeline.jobs.export import export
    from immortal.pipeline.jobs.sources import open_fleet
    from immortal.pipeline.jobs.stats import stats
    from immortal.pipeline.jobs.verify import verify

    messages = round(MESSAGES_A_SECOND * context.amounts.seconds)
    context.progress("writing a fleet's logs")
    write_fleet(folder / "logs", Fleet(SERVICES, messages, 1, 24))
    logs, exported = [str(folder / "logs")], [str(folder / "export")]
    jobs: dict[str, Callable[[], object]] = {
        "export of raw records": lambda: export(spark, open_fleet(logs), folder / "export", ["raw"]),
        "audit of the export": lambda: audit(spark, open_fleet(exported)),
        "audit": lambda: audit(spark, open_fleet(logs)),
        "verify": lambda: verify(spark, open_fleet(logs)),
        "stats": lambda: stats(spark, open_fleet(logs)),
    }
    samples = {}
    for name, job in jobs.items():
        context.progress(f"jobs: {name}")
        begun = time.perf_counter()
        job()
        samples[name] = [time.perf_counter() - begun]
    return Figure(f"jobs over {SERVICES} services, {messages:,} messages", "s", "lower", samples)


if __name__ == "__main__":
    write(Path(sys.argv[1]), **json.loads(sys.argv[2]))
