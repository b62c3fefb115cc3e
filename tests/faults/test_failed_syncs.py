"""One failing sync, at each place: the next start has all that was acknowledged, and continues."""

from __future__ import annotations

import errno
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from immortal.coordinator.core.interfaces import Transaction
from immortal.coordinator.log.backend import Severity
from immortal.coordinator.log.backends.lmdb.files import READERS_FILE_NAME, structure_problems
from immortal.coordinator.log.backends.lmdb.pages import check_pages
from immortal.coordinator.log.verify import verify_log
from immortal.log import create_log, open_log, open_reader
from tests.faults.disk import Disk, shimmed
from tests.faults.sample_log import COMMITTER_ID, NAME, PAGE_SIZE_BYTES, put_checkpoint, put_record
from tests.faults.scene import Scene
from tests.faults.writers import MODULE

TRANSACTION_ID_OFFSET_BYTES = 144  # in a meta page
REPOSITORY = Path(__file__).parents[2]
PLACES = ("data-sync", "meta-sync", "journal-sync")

Fail = Callable[[Disk, str, int], None]


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    made = Scene(tmp_path, monkeypatch)
    yield made
    made.house.close()


@pytest.mark.parametrize("fail", [Disk.fail, Disk.fail_late], ids=["failed", "failed late"])
@pytest.mark.parametrize("place", PLACES)
def test_the_next_start_goes_on(scene: Scene, place: str, fail: Fail) -> None:
    scene.register()
    disk = scene.disk(scene.log.parent)
    scene.start()
    scene.tell(3)
    for commands in ((("log", "verify"), ("log", "show"), ("recover",)), ()):  # meta pages take turns
        fail(disk, place, errno.EIO)
        scene.tell_one(padding=0 if place == "journal-sync" else 50_000)  # 50 kB is too large for the journal
        scene.stops("what is on disk is unknown until it is opened again", 1)
        disk.work()
        for command in commands:
            told = scene.command(*command, NAME)
            assert told.returncode == 0, told
        scene.recovers()


@pytest.mark.parametrize("what", ["error", "late"])
@pytest.mark.parametrize("place", ["data-sync", "meta-sync"])
def test_the_next_start_goes_on_where_it_failed_as_the_journal_was_made(tmp_path: Path, place: str, what: str) -> None:
    """Found by the soak: the tables can name a journal that was removed."""
    folder = tmp_path / "home" / "log"
    disk = Disk(tmp_path, folder)
    command = [sys.executable, "-m", MODULE, "first_small_commit", str(folder), f"{place} {what} {errno.EIO} once"]
    told = subprocess.run(command, cwd=REPOSITORY, env=shimmed(disk), capture_output=True, text=True, check=True)
    assert "what is on disk is unknown until it is opened again" in told.stdout
    store = open_log(folder, NAME, map_size_bytes=1 << 24)
    put_record(store, store.summary().last_sequence_id + 1)
    store.close()
    assert not [one for one in verify_log(folder, NAME).findings() if one.severity is not Severity.NOTE]


def test_the_next_first_start_goes_on(scene: Scene) -> None:
    scene.register()
    disk = scene.disk(scene.home)
    disk.fail("folder-sync", errno.EIO)
    scene.stops_at_the_start("Input/output error", 1)
    disk.work()
    scene.start()
    scene.tell(2)


def unnamed_log(folder: Path, size_bytes: int = 300) -> int:
    """Write a log whose last transaction has the ID of two before, as after a flipped bit; return its real ID."""
    store = create_log(folder, NAME, committer_id=COMMITTER_ID, map_size_bytes=1 << 24)
    sequence_id = 0
    while True:
        put_record(store, sequence_id, size_bytes)
        store.commit(Transaction(epoch=sequence_id))
        transaction_id = store.backend.environment.info()["last_txnid"]
        if sequence_id > 3 and transaction_id & 2:
            break
        sequence_id += 1
    store.backend.close_uncleanly()  # without the writes of a clean stop
    set_transaction_id(folder, transaction_id & 1, transaction_id - 2)
    return int(transaction_id)


def set_transaction_id(folder: Path, page: int, transaction_id: int) -> None:
    with (folder / "data.mdb").open("r+b") as file:
        file.seek(page * PAGE_SIZE_BYTES + TRANSACTION_ID_OFFSET_BYTES)
        file.write(struct.pack("=Q", transaction_id))


def test_the_transaction_counts_whose_meta_page_names_another(tmp_path: Path) -> None:
    """The transaction can have been acknowledged: a flipped bit looks the same."""
    transaction_id = unnamed_log(tmp_path)
    unnamed = check_pages(tmp_path / "data.mdb")
    assert unnamed is not None
    assert unnamed.transaction_id == transaction_id
    (finding, *_) = verify_log(tmp_path, NAME).findings()
    assert (finding.severity, f"transaction {transaction_id} is whole" in finding.message) == (Severity.NOTE, True)
    store = open_log(tmp_path, NAME, map_size_bytes=1 << 24)
    assert f"transaction {transaction_id} is whole" in store.repairs[0]
    assert store.summary().epoch == store.summary().last_sequence_id
    put_record(store, store.summary().last_sequence_id + 1)
    put_checkpoint(store, 1, 1)
    store.close()
    assert check_pages(tmp_path / "data.mdb") is None
    assert [finding for finding in verify_log(tmp_path, NAME).findings() if finding.severity is not Severity.NOTE] == []


@pytest.mark.parametrize("size_bytes", [900, 50_000])
def test_what_earlier_failures_left_behind_its_pages_is_not_taken_for_its_own(tmp_path: Path, size_bytes: int) -> None:
    """Found by the soak: two unused pages, for which `log verify` called the log damaged for good."""
    unnamed_log(tmp_path, size_bytes)
    with (tmp_path / "data.mdb").open("ab") as file:
        file.write(bytes(2 * PAGE_SIZE_BYTES))
    open_log(tmp_path, NAME, map_size_bytes=1 << 24).close()
    assert structure_problems(tmp_path / "data.mdb") == []


def test_it_is_not_put_right_under_a_reader(tmp_path: Path) -> None:
    """A reader uses the transaction before, and would make LMDB write over the pages of the last one."""
    unnamed_log(tmp_path)
    child = os.fork()
    if child == 0:
        with open_reader(tmp_path, NAME):
            os.kill(os.getpid(), 19)
        os._exit(0)
    try:
        os.waitpid(child, os.WUNTRACED)
        assert (tmp_path / READERS_FILE_NAME).exists()
        with pytest.raises(Exception, match="a process has it open for reading: end that one"):
            open_log(tmp_path, NAME, map_size_bytes=1 << 24)
    finally:
        os.kill(child, 18)
        assert os.waitpid(child, 0)[1] == 0
    open_log(tmp_path, NAME, map_size_bytes=1 << 24).close()


@pytest.mark.parametrize("by", [4, 8, 64])
def test_no_other_number_is_believed(tmp_path: Path, by: int) -> None:
    transaction_id = unnamed_log(tmp_path)
    set_transaction_id(tmp_path, transaction_id & 1, transaction_id ^ by)
    with pytest.raises(Exception, match=r"the meta pages are of transactions|restore the log from a copy"):
        open_log(tmp_path, NAME, map_size_bytes=1 << 24)
