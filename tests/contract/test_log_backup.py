"""Backups of a log that is being written: as of one moment, verified, and only what came since."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import lmdb
import pytest
from msgspec.structs import replace

from immortal.coordinator.core.errors import LogFullError
from immortal.coordinator.core.interfaces import Transaction
from immortal.coordinator.log import view_queries
from immortal.coordinator.log.backend import Severity, View
from immortal.coordinator.log.backends.lmdb import copies, files
from immortal.coordinator.log.cut import LogCutter
from immortal.coordinator.log.open import place_of
from immortal.coordinator.log.verify import BackupError, back_up, verify_log
from immortal.log import RowLogStore, create_log, open_log, open_reader
from tests.faults.sample_log import COMMITTER_ID, NAME, put_checkpoint, put_record, read_contents, write_log

LOOK_S = 0.02
REPOSITORY = Path(__file__).parents[2]

WRITER = """
import sys
from pathlib import Path
from msgspec.structs import replace
from immortal.log import open_log
from tests.faults.sample_log import NAME, put_checkpoint, put_record
store = open_log(Path(sys.argv[1]), NAME, map_size_bytes=1 << 26)
number = store.summary().last_sequence_id + 1
checkpoint_id = store.summary().checkpoints[-1].checkpoint_id
print("writes", flush=True)
while True:
    put_record(store, number, 60_000 if number % 50 == 7 else 300)
    number += 1
    if number % 100 == 0:
        checkpoint_id += 1
        put_checkpoint(store, checkpoint_id, number - 1)
        while store.trim(keep_checkpoints=2):
            pass
"""


def opened(folder: Path) -> RowLogStore:
    return open_log(folder, NAME, map_size_bytes=1 << 26)


def last_of(log: Path) -> int:
    with open_reader(log) as reader:
        return reader.last_sequence_id()


def test_a_backup_says_what_the_log_says(tmp_path: Path) -> None:
    write_log(tmp_path / "log")
    made = back_up(tmp_path / "log", NAME, tmp_path / "backup")
    assert (made.first_sequence_id, made.last_sequence_id, made.records_copied, made.checkpoints) == (0, 119, 120, 2)
    assert read_contents(tmp_path / "backup") == read_contents(tmp_path / "log")


def test_a_backup_of_one_record_has_its_high_water_mark(tmp_path: Path) -> None:
    write_log(tmp_path / "log", 1)
    assert back_up(tmp_path / "log", NAME, tmp_path / "backup").last_sequence_id == 0
    assert (tmp_path / "backup" / files.FILE_NAME).exists()


def test_a_log_in_the_place_of_another_has_another_version(tmp_path: Path) -> None:
    place = place_of(tmp_path / "log")
    assert place.version() is None
    write_log(tmp_path / "log", 1)
    first = place.version()
    assert first is not None
    assert place.version() == first
    (tmp_path / "log").rename(tmp_path / "old")
    write_log(tmp_path / "log", 1)
    assert place.version() not in (None, first)


def test_the_next_one_copies_what_came_since(tmp_path: Path) -> None:
    write_log(tmp_path / "log")
    back_up(tmp_path / "log", NAME, tmp_path / "backup")
    assert back_up(tmp_path / "log", NAME, tmp_path / "backup").records_copied == 0
    store = opened(tmp_path / "log")
    for number in range(120, 130):
        put_record(store, number)
    put_checkpoint(store, 3, 125)
    while store.trim(keep_checkpoints=1):
        pass
    store.commit(Transaction(epoch=7, peers={"bob": 6}))
    store.close()
    made = back_up(tmp_path / "log", NAME, tmp_path / "backup")
    assert (made.first_sequence_id, made.records_copied, made.checkpoints) == (126, 10 - 6, 1)
    assert read_contents(tmp_path / "backup") == read_contents(tmp_path / "log")


def test_backups_under_load_are_sound_and_go_on(tmp_path: Path) -> None:
    write_log(tmp_path / "log")
    command = [sys.executable, "-c", WRITER, str(tmp_path / "log")]
    writer = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    try:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "writes\n"
        lasts = [0]
        for _ in range(6):
            while (before := last_of(tmp_path / "log")) <= lasts[-1]:
                time.sleep(LOOK_S)
            lasts.append(back_up(tmp_path / "log", NAME, tmp_path / "backup").last_sequence_id)
            assert lasts[-1] >= before
            shutil.copytree(tmp_path / "backup", tmp_path / f"started-{len(lasts)}")
            store = opened(tmp_path / f"started-{len(lasts)}")  # and its high-water mark is its own
            assert store.summary().last_sequence_id == lasts[-1]
            put_record(store, lasts[-1] + 1)
            store.close()
    finally:
        writer.kill()
        writer.communicate()


def test_checkpoints_that_are_trimmed_while_they_are_looked_at_are_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that were there at the first look: the writer has newer ones by then."""
    write_log(tmp_path / "log", 300)
    store = opened(tmp_path / "log")
    for checkpoint_id, number in ((11, 200), (12, 250)):
        put_checkpoint(store, checkpoint_id, number)
    while store.trim(keep_checkpoints=2):
        pass
    store.close()
    now, looks = view_queries.stored_headers, 0

    def as_they_were(view: View) -> list[tuple[int, Any]]:
        nonlocal looks
        looks += 1
        headers: list[tuple[int, Any]] = list(now(view))
        gone = 10  # checkpoints 1 and 2: the writer has taken two others since
        if looks == 1:
            headers = [
                (one - gone, replace(stored, header=replace(stored.header, checkpoint_id=one - gone)))
                for one, stored in headers
            ]
        return headers

    monkeypatch.setattr(view_queries, "stored_headers", as_they_were)
    verification = verify_log(tmp_path / "log", NAME)
    wrong = [finding for finding in verification.findings() if finding.severity is not Severity.NOTE]
    assert wrong == []
    assert (looks, verification.recovery_checkpoint_id) == (2, 12)


def test_a_backup_that_is_cut_off_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_log(tmp_path / "log", 20)

    def full(*arguments: object) -> int:
        raise lmdb.DiskError("No space left on device")

    def fails() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(copies, "_copy_checkpoints", full)
            with pytest.raises(LogFullError, match=r"the disk of the log folder .*/backup is full"):
                back_up(tmp_path / "log", NAME, tmp_path / "backup")

    fails()
    assert back_up(tmp_path / "log", NAME, tmp_path / "backup").records_copied == 20
    kept = read_contents(tmp_path / "backup")
    store = opened(tmp_path / "log")
    put_record(store, 20)
    store.close()
    fails()
    assert read_contents(tmp_path / "backup") == kept
    assert back_up(tmp_path / "log", NAME, tmp_path / "backup").records_copied == 1


def test_what_is_no_place_for_a_backup(tmp_path: Path) -> None:
    write_log(tmp_path / "log", 20)
    other = create_log(tmp_path / "other", NAME, committer_id=COMMITTER_ID, map_size_bytes=1 << 24)
    other.close()
    with pytest.raises(BackupError, match="has a backup of another log"):
        back_up(tmp_path / "log", NAME, tmp_path / "other")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter").write_text("dear")
    with pytest.raises(BackupError, match="holds something, and no backup"):
        back_up(tmp_path / "log", NAME, tmp_path / "full")


def test_a_log_that_was_cut_since_is_not_mixed_with_its_backup(tmp_path: Path) -> None:
    write_log(tmp_path / "log", 20)
    back_up(tmp_path / "log", NAME, tmp_path / "backup")
    kept = read_contents(tmp_path / "backup")
    with LogCutter(tmp_path / "log", NAME) as cutter:
        cutter.cut(cutter.plan(15, force=True))
    with pytest.raises(BackupError, match="has records that the log has not"):
        back_up(tmp_path / "log", NAME, tmp_path / "backup")
    assert read_contents(tmp_path / "backup") == kept


def test_a_damaged_log_does_not_reach_its_backup(tmp_path: Path) -> None:
    write_log(tmp_path / "log", 20)
    back_up(tmp_path / "log", NAME, tmp_path / "backup")
    kept = read_contents(tmp_path / "backup")
    data = (tmp_path / "log" / "data.mdb").read_bytes()  # with pages that were replaced
    (tmp_path / "log" / "data.mdb").write_bytes(data.replace(b"<record 7>", b"<record 8>"))
    with pytest.raises(BackupError, match="the log of 'alice' is damaged: record 7"):
        back_up(tmp_path / "log", NAME, tmp_path / "backup")
    assert read_contents(tmp_path / "backup") == kept
