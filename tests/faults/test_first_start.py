"""A first start that ends at any moment: the next one works, and never takes a log for an unfinished one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from immortal.coordinator.core.errors import DamagedLogError, LogFormatError
from immortal.coordinator.log.backend import Severity
from immortal.coordinator.log.backends.lmdb.environment import open_lmdb
from immortal.coordinator.log.format import ALL_TABLES
from immortal.coordinator.log.verify import verify_log
from immortal.log import create_log, log_exists, open_log
from tests.faults.disk import Disk, shimmed
from tests.faults.sample_log import COMMITTER_ID, NAME, PAGE_SIZE_BYTES, put_record
from tests.faults.scene import Scene
from tests.faults.writers import MODULE

REPOSITORY = Path(__file__).parents[2]
DISK_PAGES = 600


def start(folder: Path, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", MODULE, "two_records", str(folder)]
    return subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, env=environment, check=False)


def goes_on(folder: Path, told: str) -> None:
    """Check that the next start has all that the last one has reported."""
    again = start(folder)
    assert again.returncode == 0, again
    assert int(again.stdout.split()[0]) >= len(told.split())
    assert not [one for one in verify_log(folder, NAME).findings() if one.severity is not Severity.NOTE]


def test_a_first_start_killed_at_each_write_and_sync(tmp_path: Path) -> None:
    count = 0
    while True:
        count += 1
        folder = tmp_path / f"home-{count}" / "log"
        folder.parent.mkdir()
        disk = Disk(folder.parent, folder)
        disk.kill_at("any", count)
        ended = start(folder, shimmed(disk))
        if ended.returncode == 0:
            break
        assert ended.returncode == -signal.SIGKILL, ended
        goes_on(folder, ended.stdout)
    assert count > 20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_PAGES * PAGE_SIZE_BYTES}", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this machine lets nobody mount a tmpfs")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.parametrize("pages", [*range(8), *range(8, 60, 4)])
def test_a_first_start_on_a_disk_with_little_room(small_disk: Path, pages: int) -> None:
    ballast = small_disk / "ballast"
    free = os.statvfs(small_disk).f_bavail - pages
    ballast.write_bytes(bytes(free * PAGE_SIZE_BYTES))
    told = start(small_disk / "log")
    if told.returncode:
        assert told.returncode == 1, told
        assert "LogFullError: the disk of the log folder" in told.stderr
        assert "make room, then start again" in told.stderr
    ballast.unlink()
    goes_on(small_disk / "log", told.stdout)


@pytest.mark.parametrize("pages", [2, 7, 12])
def test_a_coordinator_on_a_full_disk_says_so_and_starts_once_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_disk: Path, pages: int
) -> None:
    scene = Scene(tmp_path, monkeypatch)
    try:
        scene.register(log=small_disk / "log")
        ballast = small_disk / "ballast"
        ballast.write_bytes(bytes((os.statvfs(small_disk).f_bavail - pages) * PAGE_SIZE_BYTES))
        scene.stops_at_the_start("is full", 1)
        ballast.unlink()
        scene.start()
        scene.tell(3)
        scene.kill()
        ballast.write_bytes(bytes(os.statvfs(small_disk).f_bavail * PAGE_SIZE_BYTES))
        scene.process = scene.house.start(NAME)
        scene.house.app(NAME, extended=True).until_closed()
        scene.stops("is full", 1)
        ballast.unlink()
        scene.recovers()
    finally:
        scene.house.close()


def unfinished_log(folder: Path, transactions: int) -> bytes:
    """Return the file that a version up to 4 left if it was killed before its second transaction."""
    with open_lmdb(folder, map_size=1 << 26, lock=False) as environment:
        if transactions:
            with environment.begin(write=True) as transaction:
                for name in ALL_TABLES:
                    environment.open_db(name.encode(), txn=transaction)
    return (folder / "data.mdb").read_bytes()


@pytest.mark.parametrize("transactions", [0, 1])
def test_what_an_earlier_version_left_is_made_anew(tmp_path: Path, transactions: int) -> None:
    unfinished_log(tmp_path, transactions)
    assert not log_exists(tmp_path)
    goes_on(tmp_path, "")


def test_one_page_of_what_an_earlier_version_left_is_made_anew(tmp_path: Path) -> None:
    (tmp_path / "data.mdb").write_bytes(unfinished_log(tmp_path, 0)[:PAGE_SIZE_BYTES])
    goes_on(tmp_path, "")


def test_nothing_else_is_taken_for_unfinished(tmp_path: Path) -> None:
    store = create_log(tmp_path, NAME, committer_id=COMMITTER_ID, map_size_bytes=1 << 24)
    put_record(store, 0)
    store.close()
    whole = (tmp_path / "data.mdb").read_bytes()
    first, second, rest = (
        whole[:PAGE_SIZE_BYTES],
        whole[PAGE_SIZE_BYTES:][:PAGE_SIZE_BYTES],
        whole[2 * PAGE_SIZE_BYTES :],
    )
    new = unfinished_log(new_folder(tmp_path), 0)[:PAGE_SIZE_BYTES]
    for data in (b"", bytes(PAGE_SIZE_BYTES), first, first + second, new + second, new + second + rest, first[:100]):
        (tmp_path / "data.mdb").write_bytes(data)
        for beside in ("high-water-mark", "journal"):
            (tmp_path / beside).unlink(missing_ok=True)
        is_a_log(tmp_path)
    (tmp_path / "data.mdb").write_bytes(new)
    (tmp_path / "journal").touch()
    is_a_log(tmp_path)


def test_what_cannot_be_read_is_not_taken_for_unfinished(tmp_path: Path) -> None:
    (tmp_path / "data.mdb").mkdir()
    assert log_exists(tmp_path)


def is_a_log(folder: Path) -> None:
    """Check that the folder counts as a log, but a damaged one, which is not changed."""
    data = (folder / "data.mdb").read_bytes()
    assert log_exists(folder), data[:160]
    for opener in (open_log, create_log):
        with pytest.raises((LogFormatError, DamagedLogError)):
            opener(folder, NAME, map_size_bytes=1 << 24)
    assert (folder / "data.mdb").read_bytes() == data


def new_folder(folder: Path) -> Path:
    (folder / "new").mkdir()
    return folder / "new"
