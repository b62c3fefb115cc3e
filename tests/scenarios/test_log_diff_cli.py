"""`immortal log diff`: two logs compared, from the command line."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from immortal.coordinator.core.interfaces import CheckpointHeader, OutputMark, Transaction
from immortal.coordinator.instances.registry import Registry
from immortal.log import create_log, open_log
from immortal.protocol.batch import encode_batch
from immortal.protocol.checksum import crc64
from immortal.protocol.extensions import encode_record_time
from immortal.protocol.messages import RpcType, encode_incoming_rpc
from immortal.protocol.record import encode_record
from immortal.protocol.trailer import BatchKind, BatchSource, Trailer, encode_trailer

METHOD = 300
SECOND_NS = 1_000_000_000


def value(
    committer_id: int, sequence_id: int, *, calls: Sequence[bytes], time_ns: int = SECOND_NS, source: str = "reader"
) -> bytes:
    payload = b"".join(encode_incoming_rpc(METHOD, RpcType.FORK, call) for call in calls)
    content = encode_record_time(time_ns) + encode_batch(payload, len(calls)) + payload
    record = encode_record(committer_id, sequence_id, content)
    batch = BatchSource(BatchKind.STREAM, source, 2 * sequence_id + 1, len(calls), time_ns)
    return record + encode_trailer(Trailer(time_ns, [batch]), int.from_bytes(record[8:16], "little"))


def make_log(folder: Path, count: int = 10, committer_id: int = 7, **changed: Any) -> Path:
    """``count`` records of two calls; ``changed``: what record 4 has instead. And checkpoint 1, after record 2."""
    store = create_log(folder, "counter", committer_id=committer_id, map_size_bytes=1 << 22)
    records = []
    for sequence_id in range(count):
        own: dict[str, Any] = {"calls": [b"a%d" % sequence_id, b"b%d" % sequence_id]}
        if sequence_id == 4:
            own |= changed
        records.append((sequence_id, value(committer_id, sequence_id, **own)))
    store.commit(Transaction(records=records))
    store.write_checkpoint_chunk(1, 0, b"state")
    header = CheckpointHeader(1, 2, 5, crc64(b"state"), SECOND_NS, {"b": OutputMark(3, 9)})
    store.commit(Transaction(checkpoint=header))
    store.close()
    return folder


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


def diff(home: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "immortal", "--home", str(home), "log", "diff", *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=home.parent)
    assert "Traceback" not in result.stderr
    return result


def values_of(home: Path, *arguments: object) -> dict[str, Any]:
    result = diff(home, *arguments, "--json")
    found: dict[str, Any] = json.loads(result.stdout)
    assert result.returncode == (0 if found["same"] else 3), result
    return found


def test_a_copy_is_the_same(home: Path, tmp_path: Path) -> None:
    first = make_log(tmp_path / "first")
    shutil.copytree(first, tmp_path / "copy")
    result = diff(home, first, tmp_path / "copy")
    assert result.returncode == 0
    assert result.stdout.splitlines()[-1] == "same: 10 records the same, 1 checkpoint"
    assert "instance counter, records 0 to 9: 10 with 20 messages" in result.stdout


def test_logs_made_apart_are_compared_by_what_they_hold(home: Path, tmp_path: Path) -> None:
    found = values_of(home, make_log(tmp_path / "first"), make_log(tmp_path / "second", committer_id=8))
    assert found["identity"]["committer_id"] == {"a": 7, "b": 8}
    assert found["records"] == {"same": 10, "different": 0, "only_a": 0, "only_b": 0}


def test_the_first_message_that_differs(home: Path, tmp_path: Path) -> None:
    first = make_log(tmp_path / "first")
    second = make_log(tmp_path / "second", calls=[b"a4", b"other", b"more"])
    found = values_of(home, first, second)
    assert found["records"]["different"] == 1
    (record,) = found["first"]
    assert (record["record"], record["message"]) == (4, 1)
    assert record["what"] == ["messages", "sources"]
    assert (record["a"]["arguments"], record["b"]["arguments"]) == ("b4", "other")

    text = diff(home, first, second).stdout
    assert "record 4, message 1 differs (sources too):" in text
    assert f"    {first}   RPC_BATCH RPC method 300 fork  2 bytes  b4" in text
    assert f"    {second}  RPC_BATCH RPC method 300 fork  5 bytes  other" in text
    assert "different: 9 records the same, 1 different, 0 only in" in text


def test_a_message_that_one_log_does_not_have(home: Path, tmp_path: Path) -> None:
    found = values_of(home, make_log(tmp_path / "first", calls=[b"a4"]), make_log(tmp_path / "second"))
    (record,) = found["first"]
    assert (record["message"], record["a"], record["b"]["arguments"]) == (1, None, "b4")


def test_the_same_messages_at_another_time_and_from_another_source(home: Path, tmp_path: Path) -> None:
    found = values_of(
        home, make_log(tmp_path / "first"), make_log(tmp_path / "second", time_ns=2 * SECOND_NS, source="writer")
    )
    (record,) = found["first"]
    assert (record["what"], record["message"]) == (["time", "sources"], None)
    assert [source["source"] for source in record["b"]["sources"]] == ["writer"]


def test_what_only_one_of_them_holds(home: Path, tmp_path: Path) -> None:
    first, longer = make_log(tmp_path / "first"), tmp_path / "longer"
    shutil.copytree(first, longer)
    store = open_log(longer, "counter", map_size_bytes=1 << 22)
    store.commit(Transaction(records=[(number, value(7, number, calls=[b"x"])) for number in (10, 11, 12)]))
    store.write_checkpoint_chunk(2, 0, b"later")
    store.commit(Transaction(checkpoint=CheckpointHeader(2, 11, 5, crc64(b"later"), SECOND_NS)))
    while store.trim(keep_checkpoints=1):
        pass
    store.close()
    found = values_of(home, first, longer)
    assert (found["only_a"], found["only_b"]) == ([[0, 9]], [[12, 12]])  # 0 to 11 are trimmed there
    assert [(each["checkpoint"], each["a"] is None) for each in found["checkpoints"]] == [(1, False), (2, True)]


def test_a_damaged_record_is_a_difference(home: Path, tmp_path: Path) -> None:
    first, damaged = make_log(tmp_path / "first", calls=[b"a4", b"unmistakable"]), tmp_path / "damaged"
    shutil.copytree(first, damaged)
    data = (damaged / "data.mdb").read_bytes()
    assert b"unmistakable" in data
    (damaged / "data.mdb").write_bytes(data.replace(b"unmistakable", b"Unmistakable"))
    found = values_of(home, first, damaged)
    assert (found["records"]["different"], found["b"]["damaged"]) == (1, 1)
    assert found["first"][0]["what"] == ["damage"]
    assert "check bytes" in found["first"][0]["b"]["problem"]


def test_the_limit_bounds_what_is_shown_and_not_what_is_counted(home: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder, letter in ((first, b"x"), (second, b"y")):
        store = create_log(folder, "counter", committer_id=7, map_size_bytes=1 << 22)
        store.commit(Transaction(records=[(number, value(7, number, calls=[letter])) for number in range(20)]))
        store.close()
    text = diff(home, first, second, "--limit", 2).stdout
    assert text.count("message 0 differs") == 2
    assert "and 18 more records that differ" in text


def test_instances_by_name_and_wrong_names(home: Path, tmp_path: Path) -> None:
    Registry(home).register("counter", "tcp://127.0.0.1:*")
    Registry(home).register("idle", "tcp://127.0.0.1:*")
    log = make_log(home / "counter" / "log")
    shutil.copytree(log, tmp_path / "copy")
    assert diff(home, "counter", "copy").returncode == 0

    same = diff(home, "counter", log)
    assert (same.returncode, "are the same log" in same.stderr) == (2, True)
    assert diff(home, "counter").returncode == 2
    assert diff(home, "counter", "idle").stderr.startswith("error: 'idle' has not been started yet")
    assert diff(home, "counter", "idel").stderr.startswith("error: there is no instance 'idel': did you mean 'idle'?")
    assert diff(home, "counter", home).stderr == (
        f"error: there is no log in {home}: expected an instance or the folder of a log\n"
    )
