"""The tables of a log: names of columns, their Arrow types, their order. Spark's own form of them is in `source`."""

from __future__ import annotations

import pyarrow as pa

RECORDS = pa.schema(
    [
        ("instance", pa.string()),
        ("committer_id", pa.int64()),
        ("sequence_id", pa.int64()),
        ("time", pa.timestamp("us", "UTC")),  # when the record was committed, to the microsecond
        ("time_ns", pa.int64()),  # the same since 1970, UTC
        ("size_bytes", pa.int32()),  # header and content, as in the header
        ("message_count", pa.int32()),
        ("ok", pa.bool_()),
        ("reason", pa.string()),  # what is damaged; null while ok
    ]
)

MESSAGES = pa.schema(
    [
        ("instance", pa.string()),
        ("sequence_id", pa.int64()),
        ("index", pa.int32()),  # in its record, from 0; -1: the whole record is damaged
        ("time_ns", pa.int64()),  # the record's
        ("kind", pa.string()),  # "stream", "impulse", "initial" or "client"
        ("source", pa.string()),  # who sent it; the own name for oneself, impulses and the initial message
        ("position", pa.int64()),  # in the stream source -> instance; impulses have a count of their own
        ("sent_ns", pa.int64()),
        ("rpc_kind", pa.string()),  # "call"; an answer is "returned_value", "returned_nothing" or "raised"
        ("rpc_type", pa.string()),  # "async", "fork" or "impulse"
        ("method_id", pa.int32()),
        ("method", pa.string()),  # its name, with the option decode
        ("arguments", pa.binary()),
        ("arguments_json", pa.string()),  # with the option decode
        ("ok", pa.bool_()),
        ("reason", pa.string()),
    ]
)

OUTPUTS = pa.schema(
    [
        ("instance", pa.string()),
        ("sequence_id", pa.int64()),
        ("destination", pa.string()),  # the own name for oneself
        ("position", pa.int64()),  # the last one that this stream had given out
        ("checksum", pa.int64()),  # CRC-64/XZ up to there, as a signed 64-bit number
    ]
)

CHECKPOINTS = pa.schema(
    [
        ("instance", pa.string()),
        ("checkpoint_id", pa.int64()),
        ("sequence_id", pa.int64()),  # of the last record that it holds
        ("time_ns", pa.int64()),
        ("size_bytes", pa.int64()),
        ("check", pa.int64()),  # CRC-64/XZ of the blob, as a signed 64-bit number
        ("ok", pa.bool_()),
        ("reason", pa.string()),
    ]
)

RAW = pa.schema(
    [
        ("instance", pa.string()),
        ("sequence_id", pa.int64()),
        ("value", pa.binary()),  # record and trailer, byte for byte as stored
    ]
)

TABLES = {"records": RECORDS, "messages": MESSAGES, "outputs": OUTPUTS, "checkpoints": CHECKPOINTS, "raw": RAW}
