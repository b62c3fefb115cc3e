"""The tables of a log as Spark sees them: names of columns, their types, their order."""

from __future__ import annotations

from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

RECORDS = StructType(
    [
        StructField("instance", StringType()),
        StructField("committer_id", LongType()),
        StructField("sequence_id", LongType()),
        StructField("time", TimestampType()),  # when the record was committed, to the microsecond
        StructField("time_ns", LongType()),  # the same since 1970, UTC
        StructField("size_bytes", IntegerType()),  # header and content, as in the header
        StructField("message_count", IntegerType()),
        StructField("ok", BooleanType()),
        StructField("reason", StringType()),  # what is damaged; null while ok
    ]
)

MESSAGES = StructType(
    [
        StructField("instance", StringType()),
        StructField("sequence_id", LongType()),
        StructField("index", IntegerType()),  # in its record, from 0; -1: the whole record is damaged
        StructField("time_ns", LongType()),  # the record's
        StructField("kind", StringType()),  # "stream", "impulse", "initial" or "client"
        StructField("source", StringType()),  # who sent it; the own name for oneself, impulses and the initial message
        StructField("position", LongType()),  # in the stream source -> instance; impulses have a count of their own
        StructField("sent_ns", LongType()),
        StructField("rpc_kind", StringType()),  # "call"; an answer is "returned_value", "returned_nothing" or "raised"
        StructField("rpc_type", StringType()),  # "async", "fork" or "impulse"
        StructField("method_id", IntegerType()),
        StructField("method", StringType()),  # its name, with the option decode
        StructField("arguments", BinaryType()),
        StructField("arguments_json", StringType()),  # with the option decode
        StructField("ok", BooleanType()),
        StructField("reason", StringType()),
    ]
)

OUTPUTS = StructType(
    [
        StructField("instance", StringType()),
        StructField("sequence_id", LongType()),
        StructField("destination", StringType()),  # the own name for oneself
        StructField("position", LongType()),  # the last one that this stream had given out
        StructField("checksum", LongType()),  # CRC-64/XZ up to there, as a signed 64-bit number
    ]
)

CHECKPOINTS = StructType(
    [
        StructField("instance", StringType()),
        StructField("checkpoint_id", LongType()),
        StructField("sequence_id", LongType()),  # of the last record that it holds
        StructField("time_ns", LongType()),
        StructField("size_bytes", LongType()),
        StructField("check", LongType()),  # CRC-64/XZ of the blob, as a signed 64-bit number
        StructField("ok", BooleanType()),
        StructField("reason", StringType()),
    ]
)

RAW = StructType(
    [
        StructField("instance", StringType()),
        StructField("sequence_id", LongType()),
        StructField("value", BinaryType()),  # record and trailer, byte for byte as stored
    ]
)

SCHEMAS = {"records": RECORDS, "messages": MESSAGES, "outputs": OUTPUTS, "checkpoints": CHECKPOINTS, "raw": RAW}
