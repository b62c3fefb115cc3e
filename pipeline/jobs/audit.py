"""Was everything executed exactly once, in order, and after its cause? Over the logs of a whole fleet.

Spark reads the logs and sorts what they say by stream; each stream is then checked by itself (stream_audit). What is
left for the driver is small: what each stream came to, what is wrong, and which records must lie behind which.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_schema

from immortal.pipeline.jobs.audit_verdict import AuditReport, LogReport, judge
from immortal.pipeline.jobs.evidence import LOG, MARK, Row
from immortal.pipeline.jobs.ordering import ordered_results
from immortal.pipeline.jobs.sources import Fleet, rows_of
from immortal.pipeline.jobs.stream_audit import Mark, Part, Result, StreamAudit

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

TOLERANCE_MS = 1_000
"""By default clocks may differ by this much: where they are kept right they differ less."""

_SIGN = 1 << 64
_ORDER = ("sender", "receiver", "what", "sequence_id", "batch")
_RESULT = pa.schema(
    [
        ("what", pa.string()),
        ("sender", pa.string()),
        ("receiver", pa.string()),
        ("first", pa.int64()),
        ("last", pa.int64()),
        ("body", pa.string()),
    ]
)
_RESULTS_PER_BATCH = 10_000


def audit(spark: SparkSession, fleet: Fleet, *, tolerance_ms: int = TOLERANCE_MS) -> AuditReport:
    """Audit all streams of ``fleet``. ``tolerance_ms``: by how much the machines' clocks may differ."""
    return judge(results_of(spark, fleet.evidence(spark), tolerance_ms * 1_000_000), fleet.states)


def results_of(spark: SparkSession, evidence: DataFrame, tolerance_ns: int = 0) -> Iterator[Result]:
    """Run the audit of ``evidence`` in the workers and yield its results."""
    partitions = int(spark.conf.get("spark.sql.shuffle.partitions") or 1)
    results = (
        evidence.repartition(partitions, "sender", "receiver")
        .sortWithinPartitions(*_ORDER)
        .mapInArrow(partial(audit_partition, tolerance_ns=tolerance_ns), from_arrow_schema(_RESULT))
        .toArrow()
    )
    yield from rows_of(results.to_batches())


# --- in the workers --------------------------------------------------------------------------------------------------


def audit_partition(batches: Iterable[pa.RecordBatch], tolerance_ns: int) -> Iterator[pa.RecordBatch]:
    """Sorted evidence of whole streams into results."""
    results: list[Result] = []
    for result in audit_rows(map(Row._make, rows_of(batches)), tolerance_ns):
        results.append(result)
        if len(results) >= _RESULTS_PER_BATCH:
            yield _to_arrow(results)
            results = []
    if results:
        yield _to_arrow(results)


def _to_arrow(results: list[Result]) -> pa.RecordBatch:
    columns = zip(zip(*results, strict=True), _RESULT, strict=True)
    return pa.RecordBatch.from_arrays([pa.array(values, column.type) for values, column in columns], schema=_RESULT)


def audit_rows(rows: Iterable[Row], tolerance_ns: int = 0) -> Iterator[Result]:
    """Audit rows one by one, as :func:`audit_partition` does."""
    key: tuple[str, str] | None = None
    stream: StreamAudit | None = None
    log: LogReport | None = None
    for row in rows:
        if (row.sender, row.receiver) != key:
            yield from _results(key, stream, log)
            key = (row.sender, row.receiver)
            log = LogReport(row.receiver) if row.what == LOG else None
            stream = None if row.what == LOG else StreamAudit(row.sender, row.receiver, tolerance_ns)
        if log is not None:
            log.take(row)
        elif stream is not None and row.what == MARK:
            stream.mark(Mark(row.position, row.checksum % _SIGN, row.sequence_id, row.time_ns))
        elif stream is not None:
            yield from ordered_results(row)
            part = Part(row.position, row.items, row.impulses, row.sent_ns, row.payload or b"")
            stream.batch(row.sequence_id, row.time_ns, part)
    yield from _results(key, stream, log)


def _results(key: tuple[str, str] | None, stream: StreamAudit | None, log: LogReport | None) -> Iterator[Result]:
    if key is None:
        return
    if log is not None:
        yield "log", *key, log.first, log.last, json.dumps(asdict(log))
    if stream is not None:
        stream.finish()
        for finding in stream.findings:
            yield "finding", *key, finding.first, finding.last, json.dumps(asdict(finding))
        for needs in stream.needs:
            yield "needs", *key, needs.record, needs.sender_record, ""
        yield "stream", *key, stream.figures.first, stream.figures.last, json.dumps(asdict(stream.figures))
