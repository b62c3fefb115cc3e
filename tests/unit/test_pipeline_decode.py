"""What the quick decoder takes, and that it takes nothing that the plain one refuses."""

from __future__ import annotations

import re

import numpy as np
import pytest

from immortal.coordinator.log.record_contents import read_record
from immortal.pipeline.decode import (
    decode_headers,
    decode_messages,
    decode_names,
    decode_trailers,
    verify_checks,
    zigzag,
)
from immortal.protocol.errors import RemoteProtocolError
from immortal.protocol.record import encode_record
from immortal.protocol.trailer import BatchKind, BatchSource, Trailer, encode_trailer
from immortal.protocol.varint import decode_zigzag_int, decode_zigzag_long, encode_zigzag
from tests.helpers.pipeline_logs import COMMITTER_ID, Batch, RecordSpec, random_specs
from tests.properties.test_pipeline_decode import shown, values_of

SOUND = bytes.fromhex("0a0000060101")  # a call of method 3, fork, with one byte of arguments


@pytest.mark.parametrize("count", [1, 100])
def test_the_quick_way_takes_all_usual_records(count: int) -> None:
    """Otherwise all tables would still be right, and fifty times slower."""
    specs = random_specs(1, count, first_sequence_id=1)
    values = values_of([spec.sequence_id for spec in specs], [spec.value() for spec in specs])
    headers = decode_headers(values, COMMITTER_ID)
    verify_checks(values, headers)
    trailers = decode_trailers(values, headers, with_marks=True)
    decode_names(values, headers, trailers.batches)
    decode_names(values, headers, trailers.marks)
    messages = decode_messages(values, headers, trailers.batches)
    assert headers.usual.all()
    assert len(messages.record) == sum(len(batch.calls) for spec in specs for batch in spec.batches)


def value_of(content: bytes, *counts: int, kind: BatchKind = BatchKind.STREAM) -> bytes:
    record = encode_record(COMMITTER_ID, 5, content)
    sources = [BatchSource(kind, "alice", 1, count, 0) for count in counts]
    return record + encode_trailer(Trailer(9, sources), int.from_bytes(record[8:16], "little"))


NONSENSE = {
    "kind of RPC": (value_of(bytes.fromhex("0a0004060101"), 1), "first byte is 4"),
    "RPC type": (value_of(bytes.fromhex("0a0000060301"), 1), "has type 3"),
    "no RPC type": (value_of(bytes.fromhex("06000006"), 1), "at least 3 were expected"),
    "method ID runs out": (value_of(bytes.fromhex("0a0000808080"), 1), "ZigZagInt"),
    "method ID beyond 32 bits": (value_of(bytes.fromhex("140000ffffffff1f0101aa"), 1), "larger than its type"),
    "method ID of 6 bytes": (value_of(bytes.fromhex("140000ffffffffff000101"), 1), "longer than 5 bytes"),
    "negative size": (value_of(bytes.fromhex("0b0000060101"), 1), "at least 1 was expected"),
    "size 0": (value_of(b"\0" + SOUND, 1), "at least 1 was expected"),
    "size beyond the end": (value_of(bytes.fromhex("0c0000060101"), 1), "bytes are left"),
    "size that wraps around": (value_of(bytes.fromhex("ffffffff0f00") + SOUND, 1), "at least 1 was expected"),
    "size over the limit": (value_of(bytes.fromhex("feffffff0f00") + SOUND, 1), "at most 1073676288"),
    "another type": (value_of(bytes.fromhex("0402aa"), 1), "type 2"),
    "bytes behind": (value_of(SOUND + b"\x0a", 1), "past the end|bytes are left|runs past"),
    "more than the trailer": (value_of(SOUND + SOUND, 1), "it has more"),
    "fewer than the trailer": (value_of(SOUND, 1, 1), "it has fewer"),
    "another count in the trailer": (value_of(SOUND, 2), "count as 1"),
    "batch: count of the trailer": (value_of(bytes.fromhex("1c0504") + SOUND + SOUND, 3), "count as 2"),
    "batch: too few": (value_of(bytes.fromhex("100504") + SOUND, 2), "a batch of 1 messages"),
    "batch: too many": (value_of(bytes.fromhex("1c0502") + SOUND + SOUND, 1), "a batch of 2 messages"),
    "batch: in a batch": (value_of(bytes.fromhex("140502100502") + SOUND, 1), "type 5|bytes are left"),
    "batch: negative count": (value_of(bytes.fromhex("100501") + SOUND, 1), "count as -1"),
    "replayable: more than there are": (value_of(bytes.fromhex("120d0204") + SOUND, 1), "gives 2 as replayable"),
    "time of another size": (value_of(bytes.fromhex("1041000000000000000000")[:9] + SOUND, 1), "8 were expected"),
    "time not first": (value_of(SOUND + bytes.fromhex("12410000000000000000"), 1), "it has more"),
    "initial that is none": (value_of(SOUND, 1, kind=BatchKind.INITIAL), "type 0 where"),
    "call that is an initial": (value_of(bytes.fromhex("0409aa"), 1), "type 9 where"),
}


@pytest.mark.parametrize("copies", [1, 50])
@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_is_told(name: str, copies: int) -> None:
    value, reason = NONSENSE[name]
    plain = read_record(value, 5, COMMITTER_ID, whole=True)
    assert isinstance(plain, str)
    assert re.search(reason, plain), plain
    for row in shown("messages", values_of([5] * copies, [value] * copies)):
        assert (row["index"], row["ok"], row["reason"]) == (-1, False, plain)


def test_what_follows_nonsense_is_not_touched_by_it() -> None:
    stored = [value for value, _ in NONSENSE.values()] + [value_of(SOUND, 1)]
    found = shown("messages", values_of([5] * len(stored), stored))
    assert [row["ok"] for row in found] == [False] * len(NONSENSE) + [True]


def test_a_record_that_is_in_the_wrong_place() -> None:
    spec = random_specs(1, 1)[0]
    (row,) = shown("records", values_of([7], [spec.value()]))
    assert row["reason"] == "record 7 is in the wrong place: the log holds record 0 there"
    other = RecordSpec(0, 5, [], committer_id=3)
    (row,) = shown("records", values_of([0], [other.value()]))
    assert "written by committer 3" in row["reason"]


def test_no_record_is_no_row() -> None:
    assert shown("messages", values_of([], [])) == []
    empty = RecordSpec(0, 5, [])
    assert shown("messages", values_of([0], [empty.value()])) == []
    assert shown("records", values_of([0], [empty.value()]))[0]["message_count"] == 0


def test_clients_are_one_whatever_traces_they_are_part_of() -> None:
    context = f"{'4b' * 16}-{'0f' * 8}-01"
    content = SOUND
    named = [("~a", ""), ("~a", context), ("~b", context), ("~a", context.replace("4", "5"))]
    record = encode_record(COMMITTER_ID, 0, content * len(named))
    batches = [BatchSource(BatchKind.CLIENT, name, 1 + n, 1, 4, trace) for n, (name, trace) in enumerate(named)]
    value = record + encode_trailer(Trailer(5, batches), int.from_bytes(record[8:16], "little"))
    values = values_of([0], [value])
    headers = decode_headers(values, COMMITTER_ID)
    trailers = decode_trailers(values, headers, with_marks=False)
    numbers, names = decode_names(values, headers, trailers.batches)
    assert [names[number] for number in numbers.to_pylist()] == ["~a", "~a", "~b", "~a"]
    assert names == ["~a", "~b"]
    assert headers.usual.all()


def test_a_name_that_is_no_utf8() -> None:
    spec = RecordSpec(0, 5, [Batch(BatchKind.STREAM, "alice", 1, 0, random_specs(1, 1)[0].batches[0].calls)])
    changed = spec.value().replace(b"alice", b"al\xffce")
    (row,) = shown("messages", values_of([0], [changed]), check=False)
    assert row["reason"].startswith("the trailer of record 0 is damaged")


NUMBERS = [0, 1, -1, 63, 64, -64, -65, 8191, 8192, -8192, 2**31 - 1, -(2**31), 2**31, -(2**31) - 1, 2**63 - 1, -(2**63)]
LENGTHENED = [
    b"\x80\x00",
    b"\x80\x80\x80\x80\x00",
    b"\x80\x80\x80\x80\x80\x00",
    b"\x80" * 9 + b"\x00",
    b"\x80" * 10 + b"\x00",
]
TOO_LARGE = [
    b"\xff\xff\xff\xff\x10",
    b"\xff" * 9 + b"\x01",
    b"\xff" * 9 + b"\x02",
    b"\xff" * 11,
    b"\xff",
    b"",
    b"\x80\x80",
]


@pytest.mark.parametrize("bits", [32, 64])
def test_zigzag_is_that_of_the_protocol(bits: int) -> None:
    encoded = [*map(encode_zigzag, NUMBERS), *LENGTHENED, *TOO_LARGE]
    ends = np.cumsum([len(item) for item in encoded])
    starts = np.concatenate(([0], ends[:-1]))
    data = np.frombuffer(b"".join(encoded), np.uint8)
    decode = decode_zigzag_int if bits == 32 else decode_zigzag_long
    value, after, ok = zigzag(data, starts, ends, bits)
    for index, item in enumerate(encoded):
        try:
            expected, size_bytes = decode(item)
        except RemoteProtocolError:
            assert not ok[index], item
            continue
        assert ok[index], item
        assert (value[index], after[index] - starts[index]) == (expected, size_bytes)
