"""How much of a log is kept, from the command line to the log: by number of checkpoints and by days."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from immortal.cli import main
from immortal.coordinator.config import InstanceSettings
from immortal.coordinator.core.clock import RunningTime
from immortal.coordinator.core.interfaces import CheckpointHeader, Transaction
from immortal.coordinator.instances.registry import Registry
from immortal.coordinator.log_port.writer import LogWriter
from immortal.log import create_log, open_reader
from immortal.protocol.checksum import crc64
from immortal.protocol.record import encode_record
from immortal.protocol.trailer import Trailer, encode_trailer

DEADLINE_S = 20.0
DAY_NS = 86_400 * 10**9
DAYS_AGO = {1: 30, 2: 8, 3: 6, 4: 2, 5: 1}  # when each checkpoint was taken


def kept_checkpoints(
    folder: Path, *, keep_checkpoints: int | None, keep_log_days: int | None, keep_bytes: int | None = None
) -> list[int]:
    """Which of five checkpoints are left once the writer has trimmed a log; each was taken behind one record."""
    store = create_log(folder, "alice", committer_id=77)
    now_ns = time.time_ns()
    for checkpoint_id, days in DAYS_AGO.items():
        record = encode_record(77, checkpoint_id - 1, b"content" * 10_000)
        value = record + encode_trailer(Trailer(1), int.from_bytes(record[8:16], "little"))
        store.commit(Transaction(records=[(checkpoint_id - 1, value)]))
        store.write_checkpoint_chunk(checkpoint_id, 0, b"blob")
        header = CheckpointHeader(checkpoint_id, checkpoint_id - 1, 4, crc64(b"blob"), now_ns - days * DAY_NS)
        store.commit(Transaction(checkpoint=header))
    writer = LogWriter(store, keep_checkpoints=keep_checkpoints, keep_bytes=keep_bytes, inline_size_bytes_max=1 << 20)
    running = RunningTime(first_ns=now_ns - 400 * DAY_NS, last_ns=now_ns)
    try:
        writer.trim(None if keep_log_days is None else running.time_of_age(keep_log_days * DAY_NS))
        waiting, begun = threading.Event(), time.monotonic()
        while writer.trimming:
            assert not waiting.wait(0.001)
            assert time.monotonic() - begun < DEADLINE_S
    finally:
        writer.close()
        store.close()
    with open_reader(folder) as reader:
        summary = reader.summary()
        assert summary.first_sequence_id <= summary.checkpoints[0].sequence_id + 1
    return [header.checkpoint_id for header in summary.checkpoints]


@pytest.mark.parametrize(
    ("keep_checkpoints", "keep_log_days", "kept"),
    [
        (2, None, [4, 5]),
        (2, 7, [2, 3, 4, 5]),  # from seven days ago on: the checkpoint from before that, and all since
        (3, 1, [3, 4, 5]),
        (1, 365, [1, 2, 3, 4, 5]),
        (None, 7, [2, 3, 4, 5]),
        (None, None, [1, 2, 3, 4, 5]),
    ],
)
def test_the_writer_trims_by_number_and_by_days(
    tmp_path: Path, keep_checkpoints: int | None, keep_log_days: int | None, kept: list[int]
) -> None:
    assert kept_checkpoints(tmp_path, keep_checkpoints=keep_checkpoints, keep_log_days=keep_log_days) == kept


@pytest.mark.parametrize(
    ("keep_checkpoints", "keep_log_days", "keep_bytes", "kept"),
    [
        (2, 7, 1 << 30, [2, 3, 4, 5]),
        (2, 7, 170_000, [3, 4, 5]),  # behind checkpoint 3 there are two records of 70 kB, behind 2 three
        (2, 7, 0, [4, 5]),  # in any case
        (None, None, 170_000, [3, 4, 5]),
        (None, None, 0, [5]),
    ],
)
def test_of_the_days_no_more_is_kept_than_so_much(
    tmp_path: Path, keep_checkpoints: int | None, keep_log_days: int | None, keep_bytes: int, kept: list[int]
) -> None:
    found = kept_checkpoints(
        tmp_path, keep_checkpoints=keep_checkpoints, keep_log_days=keep_log_days, keep_bytes=keep_bytes
    )
    assert found == kept


def test_a_week_is_kept_by_default_in_a_bounded_size(tmp_path: Path) -> None:
    def kept(**given: Any) -> tuple[int | None, int | None, int | None]:
        one = InstanceSettings(name="counter", folder=tmp_path, peer="tcp://127.0.0.1:7001", log="log", **given)
        return one.keep_checkpoints, one.log_days, one.log_mib

    open_ones = InstanceSettings(name="counter", folder=tmp_path, peer="tcp://127.0.0.1:7001", log="log")
    assert open_ones.sets_no_retention  # so 'immortal dev' keeps all
    assert not replace(open_ones, keep_log_mb=50).sets_no_retention
    assert kept() == (2, 7, 1024)
    assert kept(keep_log_mb=50) == (2, 7, 50)
    assert kept(log_limit_mb=500) == (2, 7, 250)  # else a full log would never get room
    assert kept(keep_log_days=30) == (2, 30, None)
    assert kept(keep_log_days=30, keep_log_mb=50) == (2, 30, 50)
    assert kept(keep_checkpoints=None) == (None, None, None)
    assert kept(keep_checkpoints=None, keep_log_days=30) == (None, 30, None)


def test_days_at_the_command_line(tmp_path: Path) -> None:
    def register(name: str, *options: str) -> int:
        arguments = ["--home", str(tmp_path), "register", name, "--peer", "tcp://127.0.0.1:*", *options]
        return CliRunner().invoke(main, arguments).exit_code

    assert register("counter", "--keep-log-days", "14", "--keep-checkpoints", "all") == 0
    settings = Registry(tmp_path).load("counter")
    assert (settings.keep_log_days, settings.keep_checkpoints) == (14, None)
    assert register("reader") == 0
    assert Registry(tmp_path).load("reader").keep_log_days is None
    assert register("writer", "--keep-log-days", "0") == 2
