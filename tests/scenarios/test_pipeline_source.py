"""format("immortal") in a real Spark: tables, filters, damage, live logs, streams, writing, and what errors say."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession

from immortal.coordinator.core.interfaces import CheckpointHeader, Transaction
from immortal.coordinator.log import format as log_format
from immortal.coordinator.log.backends.lmdb.environment import open_environment
from immortal.coordinator.log.backends.lmdb.tables import open_tables
from immortal.coordinator.log.verify import verify_log
from immortal.log import create_log, open_reader
from immortal.pipeline.errors import one_line_error
from immortal.protocol.checksum import crc64
from immortal.protocol.messages import RpcKind
from immortal.protocol.trailer import BatchKind
from tests.helpers.pipeline_app import FETCH, OPEN, SELL, arguments
from tests.helpers.pipeline_logs import (
    START_NS,
    Batch,
    Call,
    RecordSpec,
    flip,
    make_log,
    message_rows,
    open_for_writing,
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
    for seed, (name, count) in enumerate(COUNTS.items()):
        make_log(home / name / "log", name, random_specs(seed, count))
        (home / f"{name}.toml").write_text("")
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


def test_it_is_what_the_reader_of_the_coordinator_gives(spark: SparkSession, home: Path) -> None:
    with open_reader(home / "alice" / "log") as reader:
        logged = [value.value for value in reader.records()]
    assert [row["value"] for row in rows(read(spark, "raw", home / "alice"), "sequence_id")] == logged


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
        f"OPTIONS (table 'records') LOCATION '{home}'",
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


def test_the_same_log_by_two_paths(spark: SparkSession, home: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(home / "alice" / "log")
    frames = [read(spark, "records", path) for path in (home / "alice" / "log", link)]
    assert [frame.count() for frame in frames] == [300, 300]
    assert frames[0].union(frames[1]).count() == 600


def test_arguments_by_the_class(spark: SparkSession, tmp_path: Path) -> None:
    calls = [
        (Call(SELL, 1, arguments("pen", 3)), "sell", {"item": "pen", "count": 3}, None),
        (Call(SELL, 1, arguments("ink")), "sell", {"item": "ink"}, None),
        (Call(OPEN, 2, arguments(["a", "b"])), "open", {"tags": ["a", "b"]}, None),
        (Call(SELL, 1, arguments(3)), "sell", None, "the arguments of Shop.sell cannot be shown: Expected `str`"),
        (Call(SELL, 1, b"\xc1"), "sell", None, "the arguments of Shop.sell cannot be shown: "),
        (Call(5, 1, b""), None, None, "Shop has no method with ID 5"),
        (
            Call(SELL, 0, arguments("alice", 7, "pen", 3)),
            "sell",
            {"$caller": "alice", "$call": 7, "item": "pen", "count": 3},
            None,
        ),
        (Call(SELL, 0, arguments("pen")), "sell", None, "the arguments of Shop.sell cannot be shown: "),
        (Call(FETCH, 0, arguments(8, 5), RpcKind.RETURNED_VALUE), "fetch", {"$call": 8, "value": 5}, None),
        (Call(FETCH, 0, arguments(9), RpcKind.RETURNED_NOTHING), "fetch", {"$call": 9}, None),
        (
            Call(FETCH, 0, arguments(10, "GoneError", ["pen"], {}), RpcKind.RAISED),
            "fetch",
            {"$call": 10, "raised": "GoneError", "arguments": ["pen"]},
            None,
        ),
        (Call(FETCH, 0, arguments(11), RpcKind.RAISED), "fetch", None, "the answer of Store.fetch cannot be shown: "),
        (Call(5, 0, arguments(12), RpcKind.RETURNED_NOTHING), None, {"$call": 12}, None),
    ]
    batch = Batch(BatchKind.STREAM, "alice", 1, 1, [call for call, *_ in calls])
    log = make_log(tmp_path / "log", "shop", [RecordSpec(0, START_NS, [batch])])
    for decode in ("tests.helpers.pipeline_app:Shop", "other=no:Where,shop=tests.helpers.pipeline_app:Shop"):
        if "other" in decode:
            with pytest.raises(Exception, match="there is no module 'no'"):
                read(spark, "messages", log, decode=decode).collect()
            continue
        found = rows(read(spark, "messages", log, decode=decode), "index")
        for row, (_, method, expected, problem) in zip(found, calls, strict=True):
            decoded = json.loads(row["arguments_json"]) if row["arguments_json"] else None
            assert (row["method"], decoded) == (method, expected)
            assert row["ok"] is True
            assert (row["reason"] or "").startswith(problem or "")
            assert bool(row["reason"]) == bool(problem)


def test_checkpoints(spark: SparkSession, tmp_path: Path) -> None:
    log = tmp_path / "log"
    store = open_for_writing(log, "alice")
    store.commit(transaction_of(random_specs(1, 9)))
    blobs = {1: b"older blob " * 1000, 2: b"newer blob " * 700}
    for checkpoint_id, blob in blobs.items():
        store.write_checkpoint_chunk(checkpoint_id, 0, blob)
        store.commit(
            Transaction(checkpoint=CheckpointHeader(checkpoint_id, checkpoint_id + 3, len(blob), crc64(blob), 5))
        )
    store.close()

    def found() -> list[tuple[object, ...]]:
        return [
            (row["checkpoint_id"], row["sequence_id"], row["size_bytes"], row["check"] % 2**64, row["ok"])
            for row in rows(read(spark, "checkpoints", log), "checkpoint_id")
        ]

    sound = [(key, key + 3, len(blob), crc64(blob), True) for key, blob in blobs.items()]
    assert found() == sound
    flip(log, b"newer blob ", 20)
    assert found() == [sound[0], (*sound[1][:4], False)]
    (row,) = read(spark, "checkpoints", log).where("not ok").collect()
    assert "chunk 0 of checkpoint 2 is damaged" in row.reason
    assert read(spark, "checkpoints", log, check="false").where("ok").count() == 2


# --- damage ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def damaged(home: Path, tmp_path: Path) -> Path:
    """A copy of alice's log with a changed byte in record 123, and without records 200 to 202."""
    log = tmp_path / "damaged"
    shutil.copytree(home / "alice" / "log", log)
    record = specs_of("alice")[123].record()
    flip(log, record[8:24], 16)  # its check bytes and sequence ID are found once; the content begins behind them
    environment = open_environment(log, readonly=False, map_size_bytes=0)
    tables = open_tables(environment, log)
    with environment.begin(write=True) as transaction:
        for sequence_id in (200, 201, 202):
            assert transaction.delete(log_format.SEQUENCE_KEY.pack(sequence_id), db=tables["records"])
    environment.close()
    return log


def test_damage_is_a_row_and_the_rest_is_read(spark: SparkSession, damaged: Path) -> None:
    sound = [spec for spec in specs_of("alice") if spec.sequence_id not in (123, 200, 201, 202)]
    found = rows(read(spark, "messages", damaged, partitionBytes=8192), *ORDER)
    assert [row for row in found if row["ok"]] == message_rows("alice", sound)
    bad = [(row["sequence_id"], row["index"], row["reason"]) for row in found if not row["ok"]]
    assert [(sequence_id, index) for sequence_id, index, _ in bad] == [(123, -1), (200, -1)]
    assert bad[0][2].startswith("record 123 is damaged: record 123: the check bytes are ")
    assert bad[1][2] == "records 200 to 202 are missing"
    with open_reader(damaged) as reader:
        assert [row.problem for row in reader.records() if row.problem] == [reason for _, _, reason in bad]
    records = rows(read(spark, "records", damaged), "sequence_id")
    assert [(row["sequence_id"], row["reason"]) for row in records if not row["ok"]] == [
        (sequence_id, reason) for sequence_id, _, reason in bad
    ]
    assert read(spark, "outputs", damaged).count() == len(output_rows("alice", sound))


def test_raw_bytes_of_a_damaged_record_only_where_asked_for(spark: SparkSession, damaged: Path) -> None:
    assert said(lambda: read(spark, "raw", damaged).collect()) == (
        "the log of 'alice': "
        + next(row.reason for row in read(spark, "records", damaged).where("not ok").orderBy("sequence_id").collect())
        + "; option check=false reads what is there as it is"
    )
    assert read(spark, "raw", damaged, check="false").count() == 297


# --- what is said ----------------------------------------------------------------------------------------------------


def said(action: Callable[[], object]) -> str:
    with pytest.raises(Exception) as caught:  # noqa: PT011 (whatever it is, one line of it must come out)
        action()
    line = str(one_line_error(caught.value))
    assert "\n" not in line
    assert "Exception" not in line
    return line


def test_what_is_said_of_wrong_options_and_paths(spark: SparkSession, home: Path, tmp_path: Path) -> None:
    junk = tmp_path / "junk"
    junk.mkdir()
    (junk / "data.mdb").write_bytes(b"no log" * 1000)
    newer = make_log(tmp_path / "newer", "newer", random_specs(1, 2))
    environment = open_environment(newer, readonly=False, map_size_bytes=0)
    tables = open_tables(environment, newer)
    with environment.begin(write=True) as transaction:
        key = log_format.META_FORMAT
        transaction.put(key, log_format.seal(b"meta", key, 99), db=tables["meta"])
    environment.close()
    for path, expected in (
        (tmp_path / "nowhere", f"there is no folder {tmp_path}/nowhere"),
        (junk, f"{junk}/data.mdb is not an LMDB file"),
        (newer, f"the log in {newer} has format version 99, this program reads version"),
    ):
        assert said(lambda path=path: read(spark, "messages", path).collect()).startswith(expected)
    decode = "nowhere:Shop"
    assert said(lambda: read(spark, "messages", home, decode=decode).collect()).startswith(
        "'nowhere:Shop': there is no"
    )
    assert said(lambda: read(spark, "calls", home)) == (
        "option table: 'calls': there are records, messages, outputs, checkpoints, raw"
    )
    odd = spark.read.format("immortal").schema("position string")
    assert said(lambda: odd.load(str(home)).collect()).startswith(
        "the table 'messages' has no column 'position' of type"
    )


def test_a_log_that_was_trimmed_or_replaced_meanwhile(tmp_path: Path) -> None:
    from immortal.pipeline.errors import LogChangedError
    from immortal.pipeline.reading import close_shared, read_range, whole_range

    log = tmp_path / "log"
    store = open_for_writing(log, "alice")
    store.commit(transaction_of(random_specs(1, 20)))
    for checkpoint_id, sequence_id in ((1, 9), (2, 14)):
        header = CheckpointHeader(checkpoint_id, sequence_id, 0, crc64(b""), 5)
        store.commit(Transaction(checkpoint=header))
    store.close()
    try:
        wanted = whole_range(str(log))
        close_shared()
        from immortal.log import open_log

        store = open_log(log, "alice", map_size_bytes=1 << 22)
        while store.trim(keep_checkpoints=1):
            pass
        store.close()
        with pytest.raises(
            LogChangedError, match="was trimmed up to record 14 while record 0 was to be read: run it again"
        ):
            list(read_range(wanted))
        close_shared()
        shutil.rmtree(log)
        with pytest.raises(LogChangedError, match="was removed while it was read"):
            list(read_range(wanted))
        create_log(log, "alice", committer_id=5).close()
        with pytest.raises(LogChangedError, match="was replaced while it was read: it had committer 77, now it has 5"):
            list(read_range(wanted))
    finally:
        close_shared()


# --- live ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[Callable[[int, float], subprocess.Popen[str]]]:
    """Starts a process that commits one record after the other to the log "live"."""
    started: list[subprocess.Popen[str]] = []

    def start(count: int, pause_s: float) -> subprocess.Popen[str]:
        arguments = [str(tmp_path / "live"), str(count), str(pause_s)]
        command = [sys.executable, "-m", "tests.helpers.pipeline_app", *arguments]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "writing\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_a_log_is_read_while_it_is_written(
    spark: SparkSession, tmp_path: Path, writer: Callable[[int, float], subprocess.Popen[str]]
) -> None:
    process = writer(2000, 0.004)
    expected = message_rows("live", random_specs(3, 2000))
    counts = []
    while process.poll() is None:
        found = rows(read(spark, "messages", tmp_path / "live", partitionBytes=8192), *ORDER)
        assert found == expected[: len(found)]
        counts.append(len(found))
    assert process.returncode == 0
    assert len(set(counts)) > 1, "the log did not grow while it was read"
    assert counts == sorted(counts)
    assert rows(read(spark, "messages", tmp_path / "live"), *ORDER) == expected


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
    from immortal.log import open_log

    home = tmp_path / "home"
    specs = random_specs(5, 60)
    make_log(home / "alice" / "log", "alice", specs[:25])
    make_log(home / "bob" / "log", "bob", random_specs(6, 10))
    tail(spark, home, tmp_path, maxRecordsPerBatch=7)
    with_offsets = len(list((tmp_path / "offsets" / "offsets").glob("[0-9]*")))
    assert with_offsets >= 5  # 35 records, 7 at a time
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


def test_a_stream_follows_a_live_log(
    spark: SparkSession, tmp_path: Path, writer: Callable[[int, float], subprocess.Popen[str]]
) -> None:
    process = writer(500, 0.002)
    query = (
        spark.readStream.format("immortal")
        .load(str(tmp_path / "live"))
        .writeStream.format("parquet")
        .option("path", str(tmp_path / "rows"))
        .option("checkpointLocation", str(tmp_path / "offsets"))
        .start()
    )
    try:
        assert process.wait(60) == 0
        query.processAllAvailable()
    finally:
        query.stop()
    found = rows(spark.read.parquet(str(tmp_path / "rows")), *ORDER)
    assert found == message_rows("live", random_specs(3, 500))


def test_a_stream_says_when_its_log_is_another(spark: SparkSession, tmp_path: Path) -> None:
    log = make_log(tmp_path / "log", "alice", random_specs(5, 20))
    tail(spark, log, tmp_path)
    shutil.rmtree(log)
    make_log(log, "alice", random_specs(5, 10))
    assert said(lambda: tail(spark, log, tmp_path)).startswith(
        f"the log of 'alice' in {log} ends with record 9, record 19 was there before"
    )
    shutil.rmtree(log)
    create_log(log, "alice", committer_id=5).close()
    assert "was replaced: the stream has read that of committer 77, now it is 5's" in said(
        lambda: tail(spark, log, tmp_path)
    )


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


def test_a_part_of_a_log_says_what_it_lacks(spark: SparkSession, home: Path, tmp_path: Path) -> None:
    write(read(spark, "raw", home / "alice", from_=100, to=199), tmp_path / "part")
    with open_reader(tmp_path / "part") as reader:
        summary = reader.summary()
        assert (summary.first_sequence_id, summary.last_sequence_id) == (100, 199)
    assert rows(read(spark, "messages", tmp_path / "part"), *ORDER) == message_rows("alice", specs_of("alice")[100:200])


def test_a_log_of_messages(spark: SparkSession, home: Path, tmp_path: Path) -> None:
    """Records without messages are not among those rows: bob's have one each at least."""
    write(read(spark, "messages", home / "bob").repartition(3), tmp_path / "bob", committerId=1234)
    assert is_sound(tmp_path / "bob")
    assert rows(read(spark, "messages", tmp_path / "bob"), *ORDER) == message_rows("bob", specs_of("bob"))
    with open_reader(tmp_path / "bob", "bob") as reader:
        assert reader.identity.committer_id == 1234


def test_what_makes_no_log_is_not_written(spark: SparkSession, home: Path, tmp_path: Path) -> None:
    """tests/unit/test_pipeline_writer.py has the other reasons."""
    raw, target = read(spark, "raw", home / "alice"), tmp_path / "target"
    gap = raw.where("sequence_id <> 5")
    assert said(lambda: write(gap, target)) == "record 5 is missing: the next row is of record 6"
    twice = raw.union(raw.where("sequence_id = 3"))
    assert said(lambda: write(twice, target)) == "there are two rows for the same place, in record 3"
    assert list(tmp_path.iterdir()) == [], "something was left behind"
    overwriting = raw.write.format("immortal").mode("overwrite")
    assert said(lambda: overwriting.save(str(target))).startswith("a log is never overwritten: write with mode")
