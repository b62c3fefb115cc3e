"""The decoders of the pipeline show exactly what was logged, and never fail on what was not."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql.pandas.types import to_arrow_schema

from immortal.coordinator.core.errors import DamagedLogError
from immortal.log import check_value
from immortal.pipeline.decode import PADDING, Values
from immortal.pipeline.source import SCHEMAS
from immortal.pipeline.tables import TableReader
from immortal.protocol.checksum import crc64
from immortal.protocol.trailer import BatchKind
from tests.helpers.effort import effort
from tests.helpers.pipeline_logs import (
    COMMITTER_ID,
    Batch,
    Call,
    RecordSpec,
    Row,
    message_rows,
    output_rows,
    record_rows,
)

INSTANCE = "carol"
names = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=40)
calls = st.builds(
    Call, st.integers(-(2**31), 2**31 - 1), st.integers(0, 2), st.one_of(st.binary(max_size=3), st.binary(max_size=300))
)
times = st.integers(0, 2**62)
batches = st.one_of(
    st.builds(
        Batch,
        st.sampled_from([BatchKind.STREAM, BatchKind.IMPULSES, BatchKind.CLIENT]),
        names,
        st.integers(0, 2**62),
        times,
        st.lists(calls, min_size=1, max_size=5),
        st.booleans(),
    ),
    st.builds(
        Batch, st.just(BatchKind.INITIAL), st.just(""), st.just(1), times, st.lists(calls, min_size=1, max_size=1)
    ),
)
marks = st.tuples(names, st.integers(0, 2**63 - 1), st.integers(0, 2**64 - 1))


@st.composite
def logs(draw: st.DrawFn) -> list[RecordSpec]:
    """Records of very different sizes: one kind is repeated so often that numpy takes its steps in many at once."""
    record = st.builds(
        RecordSpec, st.just(0), times, st.lists(batches, max_size=4), st.lists(marks, max_size=3), st.booleans()
    )
    specs = draw(st.lists(record, min_size=1, max_size=6))
    many = draw(st.sampled_from([0, 0, 40]))
    wide = draw(st.sampled_from([0, 0, 20]))
    repeated = [*specs, *[specs[0]] * many]
    first = draw(st.integers(0, 2**40))
    return [
        RecordSpec(
            first + index,
            spec.time_ns,
            spec.batches * wide if wide and index == 1 else spec.batches,
            spec.marks,
            spec.with_time,
        )
        for index, spec in enumerate(repeated)
    ]


def values_of(keys: Sequence[int], stored: Sequence[bytes]) -> Values:
    ends = np.cumsum([len(value) for value in stored]).astype(np.int64)
    starts = np.concatenate(([0], ends[:-1])).astype(np.int64)
    return Values(b"".join((*stored, PADDING)), np.array(keys, np.int64), starts, ends)


def shown(table: str, values: Values, *, check: bool = True, columns: Sequence[str] | None = None) -> list[Row]:
    schema = to_arrow_schema(SCHEMAS[table], timezone="UTC")
    if columns is not None:
        schema = pa.schema([schema.field(name) for name in columns])
    reader = TableReader(table, schema, INSTANCE, COMMITTER_ID, check, None)
    found: list[Row] = []
    for batch in reader.batches(values):
        batch.validate(full=True)
        assert batch.schema == schema
        found += batch.drop_columns(["time"]).to_pylist() if "time" in batch.schema.names else batch.to_pylist()
    return found


@settings(max_examples=effort(20))
@given(specs=logs(), check=st.booleans())
def test_each_table_shows_what_was_logged(specs: list[RecordSpec], check: bool) -> None:
    values = values_of([spec.sequence_id for spec in specs], [spec.value() for spec in specs])
    assert shown("messages", values, check=check) == message_rows(INSTANCE, specs)
    assert shown("records", values, check=check) == record_rows(INSTANCE, specs)
    assert shown("outputs", values, check=check) == output_rows(INSTANCE, specs)
    assert [row["value"] for row in shown("raw", values, check=check)] == [spec.value() for spec in specs]


@given(specs=logs(), columns=st.lists(st.sampled_from(SCHEMAS["messages"].names), min_size=1, unique=True))
def test_a_part_of_the_columns_is_that_part(specs: list[RecordSpec], columns: list[str]) -> None:
    values = values_of([spec.sequence_id for spec in specs], [spec.value() for spec in specs])
    whole = message_rows(INSTANCE, specs)
    assert shown("messages", values, columns=columns) == [{name: row[name] for name in columns} for row in whole]


@settings(max_examples=effort(20))
@given(specs=logs(), data=st.data())
def test_a_changed_byte_makes_one_row_that_says_so(specs: list[RecordSpec], data: st.DataObject) -> None:
    damaged = data.draw(st.integers(0, len(specs) - 1))
    stored = [spec.value() for spec in specs]
    at = data.draw(st.integers(0, len(stored[damaged]) - 1))
    changed = bytearray(stored[damaged])
    changed[at] ^= data.draw(st.integers(1, 255))
    stored[damaged] = bytes(changed)
    sequence_id = specs[damaged].sequence_id
    try:
        check_value(stored[damaged], sequence_id, COMMITTER_ID)
        raise AssertionError("the damage went unnoticed")
    except DamagedLogError as error:
        reason = str(error)
    values = values_of([spec.sequence_id for spec in specs], stored)
    sound = specs[:damaged] + specs[damaged + 1 :]

    found = shown("messages", values)
    assert [row for row in found if row["ok"]] == message_rows(INSTANCE, sound)
    assert [(row["sequence_id"], row["index"], row["reason"]) for row in found if not row["ok"]] == [
        (sequence_id, -1, reason)
    ]
    assert [row["sequence_id"] for row in found] == sorted(row["sequence_id"] for row in found)
    found = shown("records", values)
    assert [row for row in found if row["ok"]] == record_rows(INSTANCE, sound)
    assert [(row["sequence_id"], row["reason"]) for row in found if not row["ok"]] == [(sequence_id, reason)]
    assert shown("outputs", values) == output_rows(INSTANCE, sound)


def resealed(value: bytes, size_bytes: int) -> bytes:
    """``value`` with checks that fit what it says now."""
    record = bytearray(value[:size_bytes])
    check = crc64(record[24:], crc64(bytes(record[0:8] + record[16:24])))
    record[8:16] = check.to_bytes(8, "little")
    body = value[size_bytes:-8]
    return bytes(record) + body + crc64(body, crc64(check.to_bytes(8, "little"))).to_bytes(8, "little")


@settings(max_examples=effort(20))
@given(specs=logs(), data=st.data(), check=st.booleans())
def test_nonsense_with_right_checks_is_a_row_too(specs: list[RecordSpec], data: st.DataObject, check: bool) -> None:
    """A wrong writer, or with check=false anything at all: rows or reasons, never an exception, and the others stay."""
    damaged = data.draw(st.integers(0, len(specs) - 1))
    value = specs[damaged].value()
    size_bytes = len(specs[damaged].record())
    changed = bytearray(value)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(24, len(value) - 9)) if len(value) > 33 else 24
        changed[at] = data.draw(st.one_of(st.just(0xFF), st.just(0x80), st.integers(0, 255)))
    stored = [spec.value() for spec in specs]
    stored[damaged] = resealed(bytes(changed), size_bytes) if check else bytes(changed)
    values = values_of([spec.sequence_id for spec in specs], stored)
    sound = specs[:damaged] + specs[damaged + 1 :]
    sequence_id = specs[damaged].sequence_id
    found = shown("messages", values, check=check)
    assert [row for row in found if row["sequence_id"] != sequence_id] == message_rows(INSTANCE, sound)
    mine = [row for row in found if row["sequence_id"] == sequence_id]
    assert all(row["ok"] for row in mine) or [(row["index"], bool(row["reason"])) for row in mine] == [(-1, True)]
    for table in ("records", "outputs"):
        shown(table, values, check=check)


@settings(max_examples=effort(20))
@given(specs=logs(), data=st.data())
def test_the_quick_and_the_plain_way_agree(specs: list[RecordSpec], data: st.DataObject) -> None:
    """A record alone and among many takes different ways through the decoder."""
    values = [spec.value() for spec in specs]
    size_bytes = [len(spec.record()) for spec in specs]
    at = data.draw(st.integers(0, len(specs) - 1))
    changed = bytearray(values[at])
    place = data.draw(st.integers(24, len(changed) - 9))
    changed[place] = data.draw(st.integers(0, 255))
    stored = resealed(bytes(changed), size_bytes[at])
    key = specs[at].sequence_id
    for table in ("messages", "records", "outputs"):
        alone = shown(table, values_of([key], [stored]))
        many = shown(table, values_of([key] * 50, [stored] * 50))
        assert many == alone * 50
