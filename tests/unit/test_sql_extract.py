"""The Parquet files beside a log hold what the log holds, whatever has become of it since they were made."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import lmdb
import pyarrow.parquet as pq
import pytest
from pyspark.sql.pandas.types import to_arrow_schema

from immortal.coordinator.log.authentication import ForgedLogError, LogKey
from immortal.coordinator.log.format import META_TRIMMED, SEQUENCE_KEY
from immortal.log import LogReader, create_log, open_log, open_reader
from immortal.pipeline import source, tables
from immortal.pipeline.sql import parquet_cache
from immortal.pipeline.sql.parquet_cache import TABLES, Range, update
from tests.helpers.fleet import flip_byte
from tests.helpers.pipeline_logs import (
    COMMITTER_ID,
    RecordSpec,
    Row,
    make_log,
    message_rows,
    output_rows,
    random_specs,
    record_rows,
    transaction_of,
)

NAME = "counter"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / NAME / "log"


@contextmanager
def reading(log: Path) -> Iterator[LogReader]:
    reader = open_reader(log)
    try:
        yield reader
    finally:
        reader.close()


def made(log: Path) -> list[Range]:
    with reading(log) as reader:
        return update(reader, log.parent)


def rows(ranges: list[Range], table: str) -> list[Row]:
    return [row for one in ranges for row in pq.read_table(one.path(table)).to_pylist()]


def same(ranges: list[Range], specs: list[RecordSpec]) -> None:
    """The files hold exactly these records, and each once."""
    expected = {"messages": message_rows(NAME, specs), "records": record_rows(NAME, specs)}
    for table, wanted in (expected | {"outputs": output_rows(NAME, specs)}).items():
        names = [name for name in TABLES[table].names if name != "time"]
        found = [{name: row[name] for name in names} for row in rows(ranges, table)]
        assert found == [{name: row[name] for name in names} for row in wanted]


def append(log: Path, specs: list[RecordSpec]) -> None:
    store = open_log(log, NAME)
    store.commit(transaction_of(specs))
    store.close()


def files(log: Path) -> set[str]:
    (folder,) = (log.parent / "columns").iterdir()
    return {path.name for path in folder.iterdir()}


def test_the_columns_are_those_of_spark() -> None:
    for table, ours in tables.TABLES.items():
        assert ours == to_arrow_schema(source.SCHEMAS[table], timezone="UTC")


def test_a_log_that_grows(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_cache, "RANGE_MESSAGES_MIN", 60)
    monkeypatch.setattr("immortal.pipeline.reading.PIECE_ROWS_MAX", 7)
    specs = random_specs(1, 90)
    make_log(log, NAME, specs[:10])
    same(made(log), specs[:10])
    first = files(log)
    same(made(log), specs[:10])
    assert files(log) == first  # nothing was made again
    for end in (11, 40, 41, 90):
        append(log, specs[end - {11: 1, 40: 29, 41: 1, 90: 49}[end] : end])
        ranges = made(log)
        same(ranges, specs[:end])
    assert len(ranges) > 1  # what is large is not made again


def test_ranges_are_bounded(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_cache, "RANGE_MESSAGES_MAX", 50)
    monkeypatch.setattr(parquet_cache, "RANGE_MESSAGES_MIN", 5)
    monkeypatch.setattr("immortal.pipeline.reading.PIECE_ROWS_MAX", 7)
    specs = random_specs(2, 80)
    make_log(log, NAME, specs)
    ranges = made(log)
    same(ranges, specs)
    assert len(ranges) > 4
    assert [one.first for one in ranges[1:]] == [one.last + 1 for one in ranges[:-1]]


def test_a_log_that_was_cut_and_went_on(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_cache, "RANGE_MESSAGES_MAX", 20)
    monkeypatch.setattr(parquet_cache, "RANGE_MESSAGES_MIN", 1)
    monkeypatch.setattr("immortal.pipeline.reading.PIECE_ROWS_MAX", 5)
    specs, others = random_specs(3, 30), random_specs(4, 30)
    make_log(log, NAME, specs)
    same(made(log), specs)
    replace(log, {one.sequence_id: one.value() for one in others[17:]})
    same(made(log), [*specs[:17], *others[17:]])


def test_a_log_that_was_trimmed(log: Path) -> None:
    specs = random_specs(5, 30)
    make_log(log, NAME, specs)
    made(log)
    with lmdb_environment(log) as (environment, table), environment.begin(write=True) as transaction:
        for sequence_id in range(12):
            transaction.delete(SEQUENCE_KEY.pack(sequence_id), db=table)
        meta = environment.open_db(b"meta", create=False, txn=transaction)
        transaction.put(META_TRIMMED, (11).to_bytes(8, "little", signed=True), db=meta)
    with reading(log) as reader:
        assert reader.ends() == (12, 29)
        ranges = update(reader, log.parent)
    assert [row["sequence_id"] for row in rows(ranges, "records")][-18:] == list(range(12, 30))


def test_damage_is_a_row(log: Path) -> None:
    specs = random_specs(6, 12)
    make_log(log, NAME, specs)
    flip_byte(log, 4)
    ranges = made(log)
    (damaged,) = [row for row in rows(ranges, "messages") if not row["ok"]]
    assert (damaged["sequence_id"], damaged["index"]) == (4, -1)
    assert "damaged" in damaged["reason"]
    assert [row["sequence_id"] for row in rows(ranges, "records") if not row["ok"]] == [4]
    assert 4 not in {row["sequence_id"] for row in rows(ranges, "outputs")}


def test_a_file_that_is_gone_or_cut_off_is_made_again(log: Path) -> None:
    specs = random_specs(7, 12)
    make_log(log, NAME, specs)
    (one,) = made(log)
    one.path("outputs").unlink()
    same(made(log), specs)
    data = one.path("messages").read_bytes()
    one.path("messages").write_bytes(data[: len(data) // 2])
    same(made(log), specs)


def test_another_log_in_its_place(log: Path) -> None:
    specs, others = random_specs(8, 12), random_specs(9, 9)
    make_log(log, NAME, specs)
    made(log)
    log.rename(log.with_name("old"))
    make_log(log, NAME, others)
    same(made(log), others)


def test_files_are_their_owners_alone(log: Path) -> None:
    before = os.umask(0)
    try:
        make_log(log, NAME, random_specs(10, 3))
        made(log)
    finally:
        os.umask(before)
    assert (log.parent / "columns").stat().st_mode & 0o077 == 0


def test_a_forged_record_of_an_authenticated_log_is_refused(log: Path) -> None:
    key = LogKey.new()
    specs = random_specs(11, 12)
    store = create_log(log, NAME, committer_id=COMMITTER_ID, keys=[key])
    store.commit(transaction_of(specs))
    store.close()
    with open_reader(log, NAME, keys=[key]) as reader:
        same(update(reader, log.parent), specs)
    replace(log, {5: random_specs(12, 12)[5].value()})
    for path in (log.parent / "columns").rglob("*.parquet"):
        path.unlink()
    with open_reader(log, NAME, keys=[key], check=False) as reader, pytest.raises(ForgedLogError):
        update(reader, log.parent)


@contextmanager
def lmdb_environment(log: Path) -> Iterator[tuple[lmdb.Environment, object]]:
    environment = lmdb.open(str(log), max_dbs=32, map_size=1 << 30, lib_version=0)  # type: ignore[call-arg]
    try:
        yield environment, environment.open_db(b"records", create=False)
    finally:
        environment.close()


def replace(log: Path, values: dict[int, bytes]) -> None:
    with lmdb_environment(log) as (environment, table), environment.begin(write=True) as transaction:
        for sequence_id, value in values.items():
            transaction.put(SEQUENCE_KEY.pack(sequence_id), value, db=table)
