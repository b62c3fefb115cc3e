"""format("immortal") in a real Spark: tables, filters, streams, writing, and errors of its processes.

tests/contract/test_pipeline_reader.py has what is read without Spark around it.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession

from immortal.coordinator.log.verify import verify_log
from immortal.log import open_log, open_reader
from immortal.pipeline.errors import one_line_error
from tests.faults.sample_log import put_checkpoint
from tests.helpers.pipeline_logs import (
    RecordSpec,
    flip,
    make_log,
    message_rows,
    output_rows,
    random_specs,
    record_rows,
    transaction_of,
)
from tests.helpers.spark import read, rows

ROOT = Path(__file__).parents[2]
COUNTS = {"alice": 300, "bob": 40, "carol": 1}
ORDER = ("instance", "sequence_id", "index")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    for name in COUNTS:
        make_log(home / name / "log", name, specs_of(name))
        (home / f"{name}.toml").write_text("")
    store = open_log(home / "alice" / "log", "alice", map_size_bytes=1 << 22)
    put_checkpoint(store, 1, 200)
    store.close()
    return home


def specs_of(name: str) -> list[RecordSpec]:
    return random_specs(list(COUNTS).index(name), COUNTS[name])


def expected_messages() -> list[dict[str, object]]:
    return [row for name in COUNTS for row in message_rows(name, specs_of(name))]


# --- reading ---------------------------------------------------------------------------------------------------------


def test_all_tables_of_a_home(spark: SparkSession, home: Path) -> None:
    assert rows(read(spark, "messages", home, partitionBytes=8192), *ORDER) == expected_messages()
    records = rows(read(spark, "records", home, partitionBytes=8192), "instance", "sequence_id")
    assert [{name: value for name, value in row.items() if name != "time"} for row in records] == [
        row for name in COUNTS for row in record_rows(name, specs_of(name))
    ]
    assert [int(row["time"].timestamp() * 10**6) for row in records] == [row["time_ns"] // 1000 for row in records]
    marks = rows(read(spark, "outputs", home))
    expected = [row for name in COUNTS for row in output_rows(name, specs_of(name))]
    assert sorted(map(str, marks)) == sorted(map(str, expected))
    raw = rows(read(spark, "raw", home), "instance", "sequence_id")
    assert [row["value"] for row in raw] == [spec.value() for name in COUNTS for spec in specs_of(name)]
    checkpoints = rows(read(spark, "checkpoints", home / "alice"))
    assert [(row["checkpoint_id"], row["sequence_id"], row["ok"]) for row in checkpoints] == [(1, 200, True)]


def test_ranges_filters_and_columns(spark: SparkSession, home: Path) -> None:
    def ids(frame: DataFrame) -> list[object]:
        return sorted({row["sequence_id"] for row in frame.collect()})

    alice = read(spark, "records", home / "alice")
    assert ids(read(spark, "records", home / "alice", from_=10, to=12)) == [10, 11, 12]
    assert ids(alice.where("sequence_id > 10 and sequence_id <= 12")) == [11, 12]
    assert ids(alice.where("sequence_id in (3, 250)")) == [3, 250]
    assert ids(alice.where("sequence_id = 7 or sequence_id = 9")) == [7, 9]
    time_ns = specs_of("alice")[200].time_ns
    assert ids(alice.where(f"time_ns >= {time_ns}")) == list(range(200, 300))
    assert ids(alice.where(f"time_ns < {time_ns}")) == list(range(200))
    early = alice.where(f"time <= timestamp_micros({time_ns // 1000})")
    assert ids(early) == [spec.sequence_id for spec in specs_of("alice") if spec.time_ns // 1000 <= time_ns // 1000]
    assert ids(read(spark, "messages", home).where("instance = 'bob' and position = 1")) == sorted(
        {row["sequence_id"] for row in message_rows("bob", specs_of("bob")) if row["position"] == 1}
    )
    part = spark.read.format("immortal").schema("position long, source string").load(str(home))
    assert sorted(map(tuple, part.collect())) == sorted((row["position"], row["source"]) for row in expected_messages())


def test_tables_of_a_catalog(spark: SparkSession, home: Path) -> None:
    definitions = [
        f"OPTIONS (path '{home}', table 'records')",
        f"OPTIONS (table 'records') COMMENT 'all records' LOCATION '{home}'",
    ]
    for definition in definitions:
        spark.sql(f"CREATE TABLE all_records USING immortal {definition}")
        try:
            assert spark.table("all_records").count() == sum(COUNTS.values())
            (found,) = spark.sql("SELECT count(*) AS rows FROM all_records WHERE instance = 'bob'").collect()
            assert found["rows"] == COUNTS["bob"]
            assert "sequence_id" in [column.name for column in spark.catalog.listColumns("all_records")]
        finally:
            spark.sql("DROP TABLE all_records")
    spark.catalog.createTable("named", source="immortal", path=str(home), table="messages")
    try:
        assert spark.table("named").count() == len(expected_messages())
    finally:
        spark.sql("DROP TABLE named")
    wrong = f"CREATE TABLE wrong USING immortal OPTIONS (path '{home}', tabel 'records')"
    assert said(lambda: spark.sql(wrong)).startswith("there is no option 'tabel': there are check, ")


# --- what is said ----------------------------------------------------------------------------------------------------


def said(action: Callable[[], object]) -> str:
    with pytest.raises(Exception) as caught:  # noqa: PT011 (whatever it is, one line of it must come out)
        action()
    line = str(one_line_error(caught.value))
    assert "\n" not in line
    assert "Exception" not in line
    return line


def test_what_each_process_of_spark_says(spark: SparkSession, tmp_path: Path) -> None:
    """While it plans, in a task, and in a stream."""
    nowhere = tmp_path / "nowhere"
    assert said(lambda: read(spark, "messages", nowhere).collect()).startswith(f"there is no folder {nowhere}")
    log = make_log(tmp_path / "log", "alice", random_specs(5, 20))
    tail(spark, log, tmp_path)
    shutil.rmtree(log)
    make_log(log, "alice", random_specs(5, 10))
    assert said(lambda: tail(spark, log, tmp_path)).startswith(
        f"the log of 'alice' in {log} ends with record 9, record 19 was there before"
    )
    flip(log, random_specs(5, 10)[3].record()[8:24], 16)
    assert said(lambda: read(spark, "raw", log).collect()).startswith("the log of 'alice': record 3 is damaged: ")


# --- live ------------------------------------------------------------------------------------------------------------


def tail(spark: SparkSession, log: Path, target: Path, **options: object) -> None:
    """One run of a stream to Parquet: from where the last run ended to what is there now."""
    reader = spark.readStream.format("immortal")
    for name, value in options.items():
        reader = reader.option(name, str(value))
    query = (
        reader.load(str(log))
        .writeStream.format("parquet")
        .option("path", str(target / "rows"))
        .option("checkpointLocation", str(target / "offsets"))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(60)


def test_a_stream_goes_on_exactly_where_it_was(spark: SparkSession, tmp_path: Path) -> None:
    home = tmp_path / "home"
    specs = random_specs(5, 60)
    make_log(home / "alice" / "log", "alice", specs[:25])
    make_log(home / "bob" / "log", "bob", random_specs(6, 10))
    tail(spark, home, tmp_path, maxRecordsPerBatch=12)
    with_offsets = len(list((tmp_path / "offsets" / "offsets").glob("[0-9]*")))
    assert with_offsets >= 3  # 35 records, 12 at a time
    store = open_log(home / "alice" / "log", "alice", map_size_bytes=1 << 22)
    store.commit(transaction_of(specs[25:]))
    store.close()
    make_log(home / "carol" / "log", "carol", random_specs(7, 3))  # a log that was not there before
    tail(spark, home, tmp_path)
    tail(spark, home, tmp_path)  # nothing is new
    found = rows(spark.read.parquet(str(tmp_path / "rows")), *ORDER)
    assert found == [
        *message_rows("alice", specs),
        *message_rows("bob", random_specs(6, 10)),
        *message_rows("carol", random_specs(7, 3)),
    ]


def test_a_stream_follows_a_live_log(spark: SparkSession, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.helpers.pipeline_app", str(tmp_path / "live"), "300", "0.002"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "writing\n"
        query = (
            spark.readStream.format("immortal")
            .load(str(tmp_path / "live"))
            .writeStream.format("parquet")
            .option("path", str(tmp_path / "rows"))
            .option("checkpointLocation", str(tmp_path / "offsets"))
            .start()
        )
        try:
            assert writer.wait(60) == 0
            query.processAllAvailable()
        finally:
            query.stop()
            writer.kill()
    found = rows(spark.read.parquet(str(tmp_path / "rows")), *ORDER)
    assert found == message_rows("live", random_specs(3, 300))


# --- writing ---------------------------------------------------------------------------------------------------------


def write(frame: DataFrame, folder: Path, **options: object) -> None:
    writer = frame.write.format("immortal").mode("append")
    for name, value in options.items():
        writer = writer.option(name, str(value))
    writer.save(str(folder))


def is_sound(folder: Path) -> bool:
    verification = verify_log(folder)
    list(verification.findings())
    return verification.is_sound


def test_an_archive_comes_back_byte_for_byte(spark: SparkSession, home: Path, tmp_path: Path) -> None:
    read(spark, "raw", home).write.parquet(str(tmp_path / "archive"))
    archive = spark.read.parquet(str(tmp_path / "archive")).where("instance = 'alice'")
    write(archive.repartition(3), tmp_path / "restored" / "alice")
    assert is_sound(tmp_path / "restored" / "alice")
    with open_reader(home / "alice" / "log") as old, open_reader(tmp_path / "restored" / "alice", "alice") as new:
        assert [row.value for row in new.records()] == [row.value for row in old.records()]
        assert new.identity.committer_id == old.identity.committer_id
    assert [path.name for path in (tmp_path / "restored").iterdir()] == ["alice"], "something was left behind"


def test_a_log_of_messages(spark: SparkSession, home: Path, tmp_path: Path) -> None:
    """Records without messages are not among those rows: bob's have one each at least."""
    write(read(spark, "messages", home / "bob").repartition(3), tmp_path / "bob", committerId=1234)
    assert is_sound(tmp_path / "bob")
    assert rows(read(spark, "messages", tmp_path / "bob"), *ORDER) == message_rows("bob", specs_of("bob"))
    with open_reader(tmp_path / "bob", "bob") as reader:
        assert reader.identity.committer_id == 1234


def test_what_makes_no_log_is_not_written(spark: SparkSession, home: Path, tmp_path: Path) -> None:
    """tests/unit/test_pipeline_writer.py has the other reasons."""
    raw, target = read(spark, "raw", home / "bob"), tmp_path / "target"
    gap = raw.where("sequence_id <> 5")
    assert said(lambda: write(gap, target)) == "record 5 is missing: the next row is of record 6"
    assert list(tmp_path.iterdir()) == [], "something was left behind"
    overwriting = raw.write.format("immortal").mode("overwrite")
    assert said(lambda: overwriting.save(str(target))).startswith("a log is never overwritten: write with mode")
