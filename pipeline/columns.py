"""The columns of the tables of records, messages and outputs, as Arrow has them: for who reads logs without Spark.

:mod:`immortal.pipeline.schema` says what each is; a test compares the two.
"""

from __future__ import annotations

import pyarrow as pa

RECORDS = pa.schema(
    [
        ("instance", pa.string()),
        ("committer_id", pa.int64()),
        ("sequence_id", pa.int64()),
        ("time", pa.timestamp("us", "UTC")),
        ("time_ns", pa.int64()),
        ("size_bytes", pa.int32()),
        ("message_count", pa.int32()),
        ("ok", pa.bool_()),
        ("reason", pa.string()),
    ]
)

MESSAGES = pa.schema(
    [
        ("instance", pa.string()),
        ("sequence_id", pa.int64()),
        ("index", pa.int32()),
        ("time_ns", pa.int64()),
        ("kind", pa.string()),
        ("source", pa.string()),
        ("position", pa.int64()),
        ("sent_ns", pa.int64()),
        ("rpc_kind", pa.string()),
        ("rpc_type", pa.string()),
        ("method_id", pa.int32()),
        ("method", pa.string()),
        ("arguments", pa.binary()),
        ("arguments_json", pa.string()),
        ("ok", pa.bool_()),
        ("reason", pa.string()),
    ]
)

OUTPUTS = pa.schema(
    [
        ("instance", pa.string()),
        ("sequence_id", pa.int64()),
        ("destination", pa.string()),
        ("position", pa.int64()),
        ("checksum", pa.int64()),
    ]
)
