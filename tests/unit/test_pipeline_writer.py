"""Rows that make a log, and rows that make none: the writer without Spark around it."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import from_arrow_schema

from immortal.coordinator.core.errors import DamagedLogError
from immortal.coordinator.log.verify import verify_log
from immortal.log import open_reader
from immortal.pipeline.errors import SourceError
from immortal.pipeline.writer import Writer
from immortal.protocol.errors import ImmortalError
from tests.helpers.pipeline_logs import COMMITTER_ID, Row, message_rows, random_specs
from tests.helpers.strangers import modes

SPECS = random_specs(1, 12)
RAW = pa.schema([("instance", pa.string()), ("sequence_id", pa.int64()), ("value", pa.binary())])
MESSAGES = pa.schema(
    [
        *(("instance", pa.string()), ("sequence_id", pa.int64()), ("index", pa.int32()), ("time_ns", pa.int64())),
        *(("kind", pa.string()), ("source", pa.string()), ("position", pa.int64()), ("sent_ns", pa.int64())),
        *(("rpc_kind", pa.string()), ("rpc_type", pa.string()), ("method_id", pa.int32())),
        *(("arguments", pa.binary()), ("ok", pa.bool_())),
    ]
)


def raw_rows(first: int = 0) -> list[Row]:
    specs = random_specs(1, 12, first_sequence_id=first)
    return [{"instance": "alice", "sequence_id": spec.sequence_id, "value": spec.value()} for spec in specs]


def write(folder: Path, rows: list[Row], schema: pa.Schema = RAW, *, parts: int = 3, **options: str) -> None:
    """As Spark does it: some tasks, then the commit."""
    writer = Writer({"path": str(folder), **options}, from_arrow_schema(schema), overwrite=False)
    written = []
    for part in range(parts):
        mine = [row for index, row in enumerate(rows) if index % parts == part]
        try:
            written.append(writer.write(iter([pa.RecordBatch.from_pylist(mine, schema=schema)])))
        except ImmortalError:
            writer.abort([])
            raise
    writer.commit(list(written))


@pytest.mark.parametrize("first", [0, 100])
def test_raw_rows_in_any_order(tmp_path: Path, first: int) -> None:
    rows = raw_rows(first)
    write(tmp_path / "log", [*rows[6:], *reversed(rows[:6])])
    assert modes(tmp_path) == {}
    with open_reader(tmp_path / "log", "alice") as reader:
        assert [row.value for row in reader.records()] == [row["value"] for row in rows]
        assert reader.identity.committer_id == COMMITTER_ID
        assert reader.summary().first_sequence_id == first
    problems = [finding.message for finding in verify_log(tmp_path / "log").findings()]
    assert problems == [
        "there is no checkpoint yet",
        *([f"recovery is impossible: no whole checkpoint, and the first record is {first}"] if first else []),
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["log"]


def changed(row: int, **values: object) -> list[Row]:
    rows = message_rows("alice", SPECS)
    rows[row] |= values
    return rows


DAMAGED = raw_rows()
DAMAGED[4]["value"] = DAMAGED[4]["value"][:-1] + bytes([DAMAGED[4]["value"][-1] ^ 1])
WRONG = [
    (raw_rows()[:5] + raw_rows()[6:], RAW, "record 5 is missing: the next row is of record 6"),
    (raw_rows() + raw_rows()[3:4], RAW, "there are two rows for the same place, in record 3"),  # of one task
    (raw_rows() + raw_rows()[4:5], RAW, "there are two rows for the same place, in record 4"),  # of two
    ([*raw_rows(), {**raw_rows()[0], "instance": "bob"}], RAW, "there are two rows|several instances: alice, bob"),
    ([], RAW, "the rows are of several instances: none"),
    ([{**raw_rows()[0], "value": None}], RAW, "the row of record 0 has no value"),
    ([{**raw_rows()[0], "sequence_id": None}], RAW, "a row with sequence_id None has no place in a log"),
    ([{**raw_rows()[0], "sequence_id": -1}], RAW, "a row with sequence_id -1 has no place in a log"),
    ([{**raw_rows()[0], "value": b"short"}], RAW, "the value of record 0 is no record: a record header has 24 bytes"),
    (DAMAGED, RAW, "the trailer of record 4 is damaged"),
    (changed(3, index=-1), MESSAGES, "index -1 has no place in a log; leave the rows of damaged records out"),
    (changed(3, ok=False), MESSAGES, "is damaged: leave the rows out that are not ok"),
    (changed(3, time_ns=5), MESSAGES, "is missing, or of another time"),
    (changed(3, kind="call"), MESSAGES, "cannot be made of its rows"),
    (changed(3, rpc_type=None), MESSAGES, "cannot be made of its rows"),
    (changed(3, arguments=None), MESSAGES, "cannot be made of its rows"),
    (changed(3, position=-1), MESSAGES, "cannot be made of its rows"),
]


@pytest.mark.parametrize(("rows", "schema", "reason"), WRONG)
def test_rows_that_make_no_log(tmp_path: Path, rows: list[Row], schema: pa.Schema, reason: str) -> None:
    with pytest.raises(ImmortalError, match=reason) as caught:
        write(tmp_path / "log", rows, schema)
    assert isinstance(caught.value, SourceError | DamagedLogError)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == [], "something was left behind"


def test_committer_ids(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="several committers: 5, 77"):
        write(tmp_path / "log", raw_rows(), committerId="5")
    with pytest.raises(SourceError, match="at most 2147483647"):
        write(tmp_path / "log", raw_rows(), committerId="2147483648")
    write(tmp_path / "log", message_rows("alice", SPECS), MESSAGES, committerId="5")
    with open_reader(tmp_path / "log", "alice") as reader:
        assert reader.identity.committer_id == 5
    write(tmp_path / "drawn", message_rows("alice", SPECS), MESSAGES)
    with open_reader(tmp_path / "drawn", "alice") as reader:
        assert reader.identity.committer_id > 0


def test_places_and_columns_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("x")
    with pytest.raises(SourceError, match="is not empty: a log is written to a folder of its own"):
        write(tmp_path / "taken", raw_rows())
    with pytest.raises(SourceError, match="0 were given"):
        Writer({}, from_arrow_schema(RAW), overwrite=False)
    with pytest.raises(SourceError, match="rows with the columns instance make no log"):
        Writer({"path": str(tmp_path / "x")}, from_arrow_schema(pa.schema([RAW.field(0)])), overwrite=False)
    with pytest.raises(SourceError, match="a log is never overwritten"):
        Writer({"path": str(tmp_path / "x")}, from_arrow_schema(RAW), overwrite=True)
