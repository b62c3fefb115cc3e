"""Options that make no sense are told, with what was expected; ranges are cut as asked for."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.types import StringType, StructField, StructType

from immortal.coordinator.core.errors import LogFormatError
from immortal.errors import LoadError
from immortal.pipeline.arguments import decode_targets
from immortal.pipeline.errors import SourceError
from immortal.pipeline.reading import LogRange, close_shared, whole_range
from immortal.pipeline.source import SCHEMAS, Options, Reader, StreamReader, pack, shares, split
from tests.helpers.pipeline_logs import make_log, random_specs


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"table": "calls"}, "option table: 'calls': there are records, messages"),
        ({"from": "-1"}, "option from: '-1': a number, 0 or more"),
        ({"to": "x"}, "option to: 'x': a number, 0 or more"),
        ({"to": str(2**63)}, "option to: '9223372036854775808': a number"),
        ({"partitionBytes": "1 MB"}, "option partitionBytes: '1 MB': a number"),
        ({"option.tabel": "records"}, "there is no option 'option.tabel': there are check, "),
        ({"check": "maybe"}, "option check: 'maybe': true or false"),
        ({"tabel": "records"}, "there is no option 'tabel': there are check, "),
        ({"paths": "{}"}, "option paths: '{}': a JSON list"),
        ({"decode": "a=b:C,"}, "option decode: 'a=b:C,': module:Class, or NAME=module:Class"),
    ],
)
def test_wrong_options(options: dict[str, str], expected: str) -> None:
    with pytest.raises(SourceError) as caught:
        Options.parse(options)
    assert str(caught.value).startswith(expected)


@pytest.mark.parametrize(
    ("decode", "expected"),
    [
        ("nowhere:Shop", "'nowhere:Shop': there is no module 'nowhere'"),
        ("json:dumps", "'json:dumps': dumps is not a class below immortal.Immortal"),
        (
            "tests.helpers.pipeline_app:Shoe",
            "'tests.helpers.pipeline_app:Shoe': module 'tests.helpers.pipeline_app' has no",
        ),
        ("Shop", "'Shop': the app is given as module:Class"),
    ],
)
def test_a_class_that_is_not_there(decode: str, expected: str) -> None:
    with pytest.raises(LoadError) as caught:
        Reader(Options.parse({"decode": decode}), SCHEMAS["messages"])
    assert str(caught.value).startswith(expected)


def test_a_class_by_instance() -> None:
    assert decode_targets("m:C") == {"": "m:C"}
    assert decode_targets("a=m:C, b=n:D,o:E") == {"a": "m:C", "b": "n:D", "": "o:E"}


def test_a_column_that_is_not_there() -> None:
    for name in ("position", "nothing"):
        with pytest.raises(SourceError, match=f"has no column '{name}' of type string: it has instance string, "):
            Reader(Options.parse({}), StructType([StructField(name, StringType())]))


def test_what_is_no_stream() -> None:
    with pytest.raises(SourceError, match="'checkpoints' is no stream"):
        StreamReader({"table": "checkpoints"}, SCHEMAS["checkpoints"])
    with pytest.raises(SourceError, match="option startingOffset: 'middle': earliest or latest"):
        StreamReader({"startingOffset": "middle"}, SCHEMAS["messages"])


def test_the_checkpoint_location_of_another_source() -> None:
    """Its offset's names were taken for folders of logs."""
    stream: Any = StreamReader({}, SCHEMAS["messages"])
    foreign = {"offset": 0, "timestamp": 0}
    for call in (lambda: stream.partitions({}, foreign), lambda: stream.latestOffset(foreign, None)):
        with pytest.raises(SourceError, match="the checkpoint location is of another source: its offset is"):
            call()


@pytest.mark.parametrize(
    ("waiting", "count_max", "expected"),
    [
        ({}, 5, {}),
        ({"a": 3}, 5, {"a": 3}),
        ({"a": 30, "b": 1}, 10, {"a": 9, "b": 1}),
        ({"a": 30, "b": 30, "c": 30}, 10, {"a": 4, "b": 3, "c": 3}),
        ({"a": 0, "b": 30}, 1, {"a": 0, "b": 1}),
        ({"a": 5, "b": 5}, 1, {"a": 1, "b": 0}),
    ],
)
def test_the_shares_of_a_limited_batch(waiting: dict[str, int], count_max: int, expected: dict[str, int]) -> None:
    assert shares(waiting, count_max) == expected


def test_parts_are_the_whole(tmp_path: Path) -> None:
    make_log(tmp_path, "alice", random_specs(1, 500))
    try:
        whole = whole_range(str(tmp_path))
        assert (whole.first, whole.end) == (0, 500)
        for partition_bytes in (1, 5_000, 50_000, 1 << 30):
            parts = split(whole, partition_bytes)
            assert [part.first for part in parts] == [0, *(part.end for part in parts[:-1])]
            assert parts[-1].end == 500
        assert len(split(whole, 1)) == 500
        assert len(split(whole, 1 << 30)) == 1
    finally:
        close_shared()


def ranges_of(*sizes_bytes: int) -> list[LogRange]:
    return [LogRange(f"{number}", f"{number}", 1, 0, 9, size) for number, size in enumerate(sizes_bytes)]


def test_small_ranges_share_a_task() -> None:
    small = ranges_of(*[40_000] * 10_000)
    packs = pack(small, 2)
    assert [each for packed in packs for each in packed] == small
    assert 20 < len(packs) < 80
    assert len(pack(small[:20], 2)) in range(8, 11)  # few: each processor has something to do
    mixed = ranges_of(1, 600 << 20, 1, 1, 600 << 20)
    assert [[each.folder for each in packed] for packed in pack(mixed, 2)] == [["0"], ["1"], ["2", "3"], ["4"]]
    assert [len(packed) for packed in pack(ranges_of(1, 1, 1), 1, 1)] == [1, 1, 1]
    assert pack([], 2) == []


def test_two_logs_of_one_instance_are_named(tmp_path: Path) -> None:
    folders = [str(make_log(tmp_path / name, "alice", random_specs(1, 5))) for name in ("one", "two")]
    try:
        with pytest.raises(SourceError, match=f"{folders[0]} and {folders[1]} are both logs of 'alice': give one"):
            Reader(Options.parse({"path": ",".join(folders)}), SCHEMAS["messages"]).partitions()
    finally:
        close_shared()


def test_a_log_by_two_paths_is_opened_once(tmp_path: Path) -> None:
    log = make_log(tmp_path / "log", "alice", random_specs(1, 5))
    (tmp_path / "link").symlink_to(log)
    try:
        assert whole_range(str(log)).end == whole_range(str(tmp_path / "link")).end == 5
    finally:
        close_shared()


def test_a_log_that_is_truncated_while_it_is_open(tmp_path: Path) -> None:
    log = make_log(tmp_path / "log", "alice", random_specs(1, 50))
    try:
        assert whole_range(str(log)).end == 50
        os.truncate(log / "data.mdb", 16 << 10)
        with pytest.raises(LogFormatError, match="is truncated"):
            whole_range(str(log))
    finally:
        close_shared()
