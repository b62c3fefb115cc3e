"""Values of the log in pieces, whatever their sizes are."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa

from immortal.coordinator.core.interfaces import Transaction
from immortal.log import create_log
from immortal.pipeline.jobs.evidence import LOG, evidence_of_few, evidence_of_values
from immortal.pipeline.reading import PIECE_SIZE_BYTES, SMALL_SIZE_BYTES, Gap, close_shared, read_range, whole_range
from tests.helpers.pipeline_logs import COMMITTER_ID, fill_new, flip, make_log, random_specs, record_value


def test_small_and_large_values_come_as_they_are(tmp_path: Path) -> None:
    """Runs of both, longer than a piece: large ones are taken from LMDB's memory, small ones are copies of its own."""
    rng = random.Random(1)
    large = [rng.randbytes(SMALL_SIZE_BYTES * 8) for _ in range(4)]
    small = [rng.randbytes(100) for _ in range(4)]
    large_count = 2 * PIECE_SIZE_BYTES // (SMALL_SIZE_BYTES * 8)
    payloads = (large * large_count)[:large_count] + small * 100 + (large * large_count)[:large_count] + small
    records = [record_value(number, 1, number + 1, [payload]) for number, payload in enumerate(payloads)]
    fill_new(tmp_path / "log", iter(records))
    found = []
    pieces = 0
    try:
        for values in read_range(whole_range(str(tmp_path / "log"))):
            assert not isinstance(values, Gap)
            assert values.sequence_ids[0] == len(found)
            found += [bytes(values.value(index)) for index in range(len(values.sequence_ids))]
            pieces += 1
    finally:
        close_shared()
    assert found == records
    assert pieces > 4


def test_what_only_the_journal_has_is_read(tmp_path: Path) -> None:
    records = [record_value(number, 1, number + 1, [b"payload"]) for number in range(6)]
    store = create_log(tmp_path / "log", "alice", committer_id=COMMITTER_ID)
    store.commit(Transaction(records=list(enumerate(records[:3])), epoch=1))
    for number in range(3, 6):
        store.commit(Transaction(records=[(number, records[number])]))
    (tmp_path / "copy").mkdir()
    for name in ("data.mdb", "journal"):
        shutil.copy(tmp_path / "log" / name, tmp_path / "copy" / name)
    store.close()
    found = []
    try:
        for values in read_range(whole_range(str(tmp_path / "copy"))):
            assert not isinstance(values, Gap)
            found += [bytes(values.value(index)) for index in range(len(values.sequence_ids))]
    finally:
        close_shared()
    assert found == records


def test_the_evidence_of_few_records_is_that_of_many(tmp_path: Path) -> None:
    log = make_log(tmp_path, "alice", random_specs(5, 60))
    flip(log, random_specs(5, 60)[7].record()[8:24], 16)
    (values,) = [piece for piece in read_range(whole_range(str(log))) if not isinstance(piece, Gap)]
    close_shared()

    def rows(of_values: Callable[..., Iterator[pa.RecordBatch]]) -> list[str]:
        found = pa.Table.from_batches(of_values(values, "alice", 77)).to_pylist()
        sound = sum(row["items"] for row in found if row["what"] == LOG and row["reason"] is None)
        return [*sorted(str(row) for row in found if row["what"] != LOG or row["reason"]), f"{sound} are sound"]

    assert rows(evidence_of_few) == rows(evidence_of_values)
    assert rows(evidence_of_few)[-1] == "59 are sound"
