"""Rows of logs as Spark's tasks read them, in this process: arguments, options, damage, live logs, what errors say.

tests/scenarios/test_pipeline_source.py has what needs Spark itself.
"""

from __future__ import annotations

import datetime as dt
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark")

from pyspark.sql.types import StringType, StructType

from immortal.coordinator.core.interfaces import CheckpointHeader, Transaction
from immortal.coordinator.log import format as log_format
from immortal.coordinator.log.backends.lmdb.environment import open_environment
from immortal.coordinator.log.backends.lmdb.tables import open_tables
from immortal.log import create_log, open_log, open_reader
from immortal.pipeline.errors import LogChangedError, SourceError
from immortal.pipeline.reading import close_shared, read_range, whole_range
from immortal.pipeline.source import SCHEMAS, ImmortalSource, StreamReader
from immortal.protocol.checksum import crc64
from immortal.protocol.errors import ImmortalError
from immortal.protocol.messages import RpcKind
from immortal.protocol.trailer import BatchKind
from tests.helpers.pipeline_app import FETCH, OPEN, SELL, arguments
from tests.helpers.pipeline_logs import (
    START_NS,
    Batch,
    Call,
    RecordSpec,
    flip,
    make_log,
    message_rows,
    open_for_writing,
    output_rows,
    random_specs,
    transaction_of,
)
from tests.helpers.spark import rows_here

ROOT = Path(__file__).parents[2]
COUNTS = {"alice": 300, "bob": 40, "carol": 1}


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    close_shared()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    for name, count in COUNTS.items():
        make_log(home / name / "log", name, specs_of(name)[:count])
    return home


def specs_of(name: str) -> list[RecordSpec]:
    return random_specs(list(COUNTS).index(name), COUNTS[name])


def messages_here(*paths: object, **options: object) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in row.items() if name != "time"}
        for row in rows_here("messages", *paths, **options)
    ]


# --- what is read ----------------------------------------------------------------------------------------------------


def test_it_is_what_the_reader_of_the_coordinator_gives(home: Path) -> None:
    with open_reader(home / "alice" / "log") as reader:
        logged = [value.value for value in reader.records()]
    assert [row["value"] for row in rows_here("raw", home / "alice")] == logged


def test_the_same_log_by_two_paths(home: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(home / "alice" / "log")
    for _ in range(2):
        assert [len(rows_here("records", path)) for path in (home / "alice" / "log", link)] == [300, 300]


def test_options_narrow_what_is_read(home: Path) -> None:
    """Exactly: no filter is needed beside them."""

    def found(**options: object) -> dict[str, list[int]]:
        ids: dict[str, list[int]] = {}
        for row in rows_here("records", home, **options):
            ids.setdefault(row["instance"], []).append(row["sequence_id"])
        return ids

    times = [spec.time_ns for spec in specs_of("alice")]
    assert found(instance="bob") == {"bob": list(range(40))}
    assert found(instance="bob, carol", from_=0, to=3) == {"bob": [0, 1, 2, 3], "carol": [0]}
    assert found(instance="alice", fromTime=times[20]) == {"alice": list(range(20, 300))}
    assert found(instance="alice", fromTime=times[20], toTime=times[25], to=23) == {"alice": [20, 21, 22, 23]}
    assert found(instance="alice", toTime=times[0] - 1) == {}
    (row,) = rows_here("records", home, instance="alice", from_=20, to=20)
    assert isinstance(row["time"], dt.datetime)
    assert found(instance="alice", toTime=row["time"].isoformat()) == {"alice": list(range(21))}
    assert found(toTime="2023-11-14T22:13:19Z") == {}
    for option, value, expected in (
        ("instance", "bob,dora", "option instance: there is no log of dora: there are alice, bob, carol"),
        ("fromTime", "noon", "option fromTime: 'noon': a time such as 2026-01-31T12:00:00Z, or ns since 1970, was"),
    ):
        with pytest.raises(SourceError, match=f"^{expected}"):
            found(**{option: value})


def test_arguments_by_the_class(tmp_path: Path) -> None:
    calls = [
        (Call(SELL, 1, arguments("pen", 3)), "sell", {"item": "pen", "count": 3}, None),
        (Call(SELL, 1, arguments("ink")), "sell", {"item": "ink"}, None),
        (Call(OPEN, 2, arguments(["a", "b"])), "open", {"tags": ["a", "b"]}, None),
        (Call(SELL, 1, arguments(3)), "sell", None, "the arguments of Shop.sell cannot be shown: Expected `str`"),
        (Call(SELL, 1, b"\xc1"), "sell", None, "the arguments of Shop.sell cannot be shown: "),
        (Call(5, 1, b""), None, None, "Shop has no method with ID 5"),
        (
            Call(SELL, 0, arguments("alice", 7, "pen", 3)),
            "sell",
            {"$caller": "alice", "$call": 7, "item": "pen", "count": 3},
            None,
        ),
        (Call(SELL, 0, arguments("pen")), "sell", None, "the arguments of Shop.sell cannot be shown: "),
        (Call(FETCH, 0, arguments(8, 5), RpcKind.RETURNED_VALUE), "fetch", {"$call": 8, "value": 5}, None),
        (Call(FETCH, 0, arguments(9), RpcKind.RETURNED_NOTHING), "fetch", {"$call": 9}, None),
        (
            Call(FETCH, 0, arguments(10, "GoneError", ["pen"], {}), RpcKind.RAISED),
            "fetch",
            {"$call": 10, "raised": "GoneError", "arguments": ["pen"]},
            None,
        ),
        (Call(FETCH, 0, arguments(11), RpcKind.RAISED), "fetch", None, "the answer of Store.fetch cannot be shown: "),
        (Call(5, 0, arguments(12), RpcKind.RETURNED_NOTHING), None, {"$call": 12}, None),
    ]
    batch = Batch(BatchKind.STREAM, "alice", 1, 1, [call for call, *_ in calls])
    log = make_log(tmp_path / "log", "shop", [RecordSpec(0, START_NS, [batch])])
    shop = "tests.helpers.pipeline_app:Shop"
    with pytest.raises(ImmortalError, match="there is no module 'no'"):
        rows_here("messages", log, decode=f"other=no:Where,shop={shop}")
    for row, (_, method, expected, problem) in zip(rows_here("messages", log, decode=shop), calls, strict=True):
        decoded = json.loads(row["arguments_json"]) if row["arguments_json"] else None
        assert (row["method"], decoded) == (method, expected)
        assert row["ok"] is True
        assert (row["reason"] or "").startswith(problem or "")
        assert bool(row["reason"]) == bool(problem)


def test_checkpoints(tmp_path: Path) -> None:
    log = tmp_path / "log"
    store = open_for_writing(log, "alice")
    store.commit(transaction_of(random_specs(1, 9)))
    blobs = {1: b"older blob " * 1000, 2: b"newer blob " * 700}
    for checkpoint_id, blob in blobs.items():
        store.write_checkpoint_chunk(checkpoint_id, 0, blob)
        store.commit(
            Transaction(checkpoint=CheckpointHeader(checkpoint_id, checkpoint_id + 3, len(blob), crc64(blob), 5))
        )
    store.close()

    def found() -> list[tuple[object, ...]]:
        return [
            (row["checkpoint_id"], row["sequence_id"], row["size_bytes"], row["check"] % 2**64, row["ok"])
            for row in rows_here("checkpoints", log)
        ]

    sound = [(key, key + 3, len(blob), crc64(blob), True) for key, blob in blobs.items()]
    assert found() == sound
    close_shared()
    flip(log, b"newer blob ", 20)
    assert found() == [sound[0], (*sound[1][:4], False)]
    assert "chunk 0 of checkpoint 2 is damaged" in rows_here("checkpoints", log)[1]["reason"]
    assert [row["ok"] for row in rows_here("checkpoints", log, check="false")] == [True, True]


# --- damage ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def damaged(home: Path, tmp_path: Path) -> Path:
    """A copy of alice's log with a changed byte in record 123, and without records 200 to 202."""
    log = tmp_path / "damaged"
    shutil.copytree(home / "alice" / "log", log)
    record = specs_of("alice")[123].record()
    flip(log, record[8:24], 16)  # its check bytes and sequence ID are found once; the content begins behind them
    environment = open_environment(log, readonly=False, map_size_bytes=0)
    tables = open_tables(environment, log)
    with environment.begin(write=True) as transaction:
        for sequence_id in (200, 201, 202):
            assert transaction.delete(log_format.SEQUENCE_KEY.pack(sequence_id), db=tables["records"])
    environment.close()
    return log


def test_damage_is_a_row_and_the_rest_is_read(damaged: Path) -> None:
    sound = [spec for spec in specs_of("alice") if spec.sequence_id not in (123, 200, 201, 202)]
    found = messages_here(damaged, partitionBytes=8192)
    assert [row for row in found if row["ok"]] == message_rows("alice", sound)
    bad = [(row["sequence_id"], row["index"], row["reason"]) for row in found if not row["ok"]]
    assert [(sequence_id, index) for sequence_id, index, _ in bad] == [(123, -1), (200, -1)]
    assert bad[0][2].startswith("record 123 is damaged: record 123: the check bytes are ")
    assert bad[1][2] == "records 200 to 202 are missing"
    close_shared()
    with open_reader(damaged) as reader:
        assert [row.problem for row in reader.records() if row.problem] == [reason for _, _, reason in bad]
    records = rows_here("records", damaged)
    assert [(row["sequence_id"], row["reason"]) for row in records if not row["ok"]] == [
        (sequence_id, reason) for sequence_id, _, reason in bad
    ]
    assert len(rows_here("outputs", damaged)) == len(output_rows("alice", sound))


def test_raw_bytes_of_a_damaged_record_only_where_asked_for(damaged: Path) -> None:
    reason = next(row["reason"] for row in rows_here("records", damaged) if not row["ok"])
    assert said("raw", damaged) == f"the log of 'alice': {reason}; option check=false reads what is there as it is"
    assert len(rows_here("raw", damaged, check="false")) == 297


# --- what is said ----------------------------------------------------------------------------------------------------


def said(table: str, path: Path, **options: object) -> str:
    with pytest.raises(ImmortalError) as caught:
        rows_here(table, path, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_is_said_of_wrong_options_and_paths(home: Path, tmp_path: Path) -> None:
    junk = tmp_path / "junk"
    junk.mkdir()
    (junk / "data.mdb").write_bytes(b"no log" * 1000)
    newer = make_log(tmp_path / "newer", "newer", random_specs(1, 2))
    environment = open_environment(newer, readonly=False, map_size_bytes=0)
    tables = open_tables(environment, newer)
    with environment.begin(write=True) as transaction:
        key = log_format.META_FORMAT
        transaction.put(key, log_format.seal(b"meta", key, 99), db=tables["meta"])
    environment.close()
    for path, expected in (
        (tmp_path / "nowhere", f"there is no folder {tmp_path}/nowhere"),
        (junk, f"{junk}/data.mdb is not an LMDB file"),
        (newer, f"the log in {newer} has format version 99, this program reads version"),
    ):
        assert said("messages", path).startswith(expected)
    assert said("messages", home, decode="nowhere:Shop").startswith("'nowhere:Shop': there is no")
    assert said("calls", home) == "option table: 'calls': there are records, messages, outputs, checkpoints, raw"
    with pytest.raises(SourceError, match=r"^the table 'messages' has no column 'position' of type"):
        ImmortalSource({"path": str(home)}).reader(StructType().add("position", StringType()))


def test_a_log_that_was_trimmed_or_replaced_meanwhile(tmp_path: Path) -> None:
    log = tmp_path / "log"
    store = open_for_writing(log, "alice")
    store.commit(transaction_of(random_specs(1, 20)))
    for checkpoint_id, sequence_id in ((1, 9), (2, 14)):
        header = CheckpointHeader(checkpoint_id, sequence_id, 0, crc64(b""), 5)
        store.commit(Transaction(checkpoint=header))
    store.close()
    wanted = whole_range(str(log))
    close_shared()
    store = open_log(log, "alice", map_size_bytes=1 << 22)
    while store.trim(keep_checkpoints=1):
        pass
    store.close()
    with pytest.raises(
        LogChangedError, match="was trimmed up to record 14 while record 0 was to be read: run it again"
    ):
        list(read_range(wanted))
    close_shared()
    shutil.rmtree(log)
    with pytest.raises(LogChangedError, match="was removed while it was read"):
        list(read_range(wanted))
    create_log(log, "alice", committer_id=5).close()
    with pytest.raises(LogChangedError, match="was replaced while it was read: it had committer 77, now it has 5"):
        list(read_range(wanted))


# --- live ------------------------------------------------------------------------------------------------------------


def test_a_log_is_read_while_it_is_written(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.helpers.pipeline_app", str(tmp_path / "live"), "500", "0.001"]
    expected = message_rows("live", random_specs(3, 500))
    counts = []
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "writing\n"
        while writer.poll() is None:
            found = messages_here(tmp_path / "live", partitionBytes=8192)
            assert found == expected[: len(found)]
            counts.append(len(found))
    assert writer.returncode == 0
    assert len(set(counts)) > 1, "the log did not grow while it was read"
    assert counts == sorted(counts)
    assert messages_here(tmp_path / "live") == expected


def test_a_stream_says_when_its_log_is_another(tmp_path: Path) -> None:
    log = make_log(tmp_path / "log", "alice", random_specs(5, 20))
    stream = StreamReader({"path": str(log)}, SCHEMAS["messages"])
    limit = stream.getDefaultReadLimit()
    offset = stream.latestOffset(stream.initialOffset(), limit)
    for count, committer_id, expected in (
        (10, 77, f"the log of 'alice' in {log} ends with record 9, record 19 was there before"),
        (0, 5, f"the log of 'alice' in {log} was replaced: the stream has read that of committer 77, now it is 5's"),
    ):
        close_shared()
        shutil.rmtree(log)
        store = open_for_writing(log, "alice", committer_id)
        store.commit(transaction_of(random_specs(5, count)))
        store.close()
        with pytest.raises(LogChangedError) as caught:
            stream.latestOffset(offset, limit)
        assert str(caught.value).startswith(expected)
