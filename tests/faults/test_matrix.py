"""Each cell of the fault matrix, with real processes: the outcome, message and remedy that the docs promise."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from immortal.client import connect, with_key
from immortal.coordinator.config import ConfigError
from immortal.coordinator.core.interfaces import IMPULSES
from immortal.coordinator.fault_points import FaultPoint
from immortal.coordinator.instances.registry import Registry
from immortal.coordinator.log import format as log_format
from immortal.coordinator.log.verify import verify_log
from immortal.log import open_reader
from immortal.protocol.record import decode_header
from immortal.protocol.trailer import decode_trailer
from scripts.docs_site.tables import with_tables
from tests.faults.clock import JUMPS
from tests.faults.disk import Disk, read_journal, synced_paths, without_power
from tests.faults.matrix import CELLS, Cell, Fault, Thing, document
from tests.faults.scene import NAME, Scene
from tests.faults.spilling import SPILL_SHOWS, SpillScene
from tests.helpers.apps import COUNTER
from tests.helpers.cli import Run

GUARANTEES = Path(__file__).parents[2] / "docs" / "guarantees.md"
DELAY_MS = 80

Show = Callable[[Scene, Cell], None]
SHOWS: dict[tuple[Fault, Thing], Show] = {}


def shows(fault: Fault, *things: Thing) -> Callable[[Show], Show]:
    def register(show: Show) -> Show:
        SHOWS.update({(fault, thing): show for thing in things})
        return show

    return register


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    made = Scene(tmp_path, monkeypatch)
    yield made
    made.house.close()


@pytest.mark.parametrize(("fault", "thing"), CELLS, ids=lambda one: one.value)
def test_cell(scene: Scene, fault: Fault, thing: Thing) -> None:
    SHOWS[fault, thing](scene, CELLS[fault, thing])


def test_the_document_shows_the_matrix() -> None:
    assert document().strip() in with_tables(GUARANTEES.read_text()), "docs/guarantees.md has no marker of the table"


def test_every_cell_has_an_outcome() -> None:
    assert set(CELLS) == {(fault, thing) for fault in Fault for thing in Thing}


# --- spilled calls: tests/faults/spilling.py ------------------------------------------------------------------------


def shows_spilled(show: Callable[[SpillScene, Cell], None]) -> Show:
    return lambda scene, cell: show(SpillScene(scene), cell)


for _fault, _show in SPILL_SHOWS.items():
    shows(_fault, Thing.SPILL)(shows_spilled(_show))


# --- process kill ----------------------------------------------------------------------------------------------------


@shows(Fault.PROCESS_KILL, Thing.RECORD)
def killed_around_a_commit(scene: Scene, cell: Cell) -> None:
    scene.register()
    for point in (FaultPoint.BEFORE_COMMIT, FaultPoint.DURING_COMMIT, FaultPoint.AFTER_COMMIT):
        killed_at(scene, point)
    scene.recovers()


def killed_at(scene: Scene, point: FaultPoint) -> None:
    """Start with a distant fault point, reach normal work, then be killed at the point."""
    scene.arm(point, count=1_000_000)
    scene.start() if not scene.sent else scene.recovers()
    scene.tell(3)
    scene.arm(point)
    scene.tell_one()
    scene.died_at_its_point()


@shows(Fault.PROCESS_KILL, Thing.META)
def killed_around_an_epoch(scene: Scene, cell: Cell) -> None:
    scene.register()
    scene.start()
    scene.tell(3)
    epoch = scene.process.status()["epoch"]
    for point in (FaultPoint.BEFORE_EPOCH, FaultPoint.AFTER_EPOCH):
        scene.kill()
        scene.arm(point)
        scene.process = scene.house.start(NAME)
        scene.app = scene.house.app(NAME, extended=True)
        scene.died_at_its_point()
        scene.recovers()
    assert scene.process.status()["epoch"] > epoch


@shows(Fault.PROCESS_KILL, Thing.CHUNK)
def killed_between_chunk_and_header(scene: Scene, cell: Cell) -> None:
    scene.register()
    scene.arm(FaultPoint.AFTER_CHUNK, count=1_000_000)
    scene.start()
    scene.tell(3)
    for point in (FaultPoint.AFTER_CHUNK, FaultPoint.BEFORE_HEADER):
        before = scene.process.status()["checkpoint"]["id"]
        scene.arm(point)
        scene.ask_for_checkpoint()
        scene.app.until_closed()
        scene.died_at_its_point()
        scene.recovers()
        assert f"checkpoint={before} " in scene.process.line("recovering")


@shows(Fault.PROCESS_KILL, Thing.REGISTRY)
def killed_while_registering(scene: Scene, cell: Cell) -> None:
    scene.register()
    registry = Registry(scene.home)
    scene.arm(FaultPoint.BEFORE_REPLACE)
    assert scene.command("register", "bob", "--peer", "tcp://127.0.0.1:*").returncode == -signal.SIGKILL
    assert registry.names() == [NAME]
    scene.arm(FaultPoint.AFTER_REPLACE)
    assert scene.command("register", "bob", "--peer", "tcp://127.0.0.1:*").returncode == -signal.SIGKILL
    assert registry.load("bob").peer
    assert scene.command("register", "carol", "--peer", "tcp://127.0.0.1:*").returncode == 0


# --- loss of unsynced pages ------------------------------------------------------------------------------------------


LOSSES = {
    Thing.RECORD: (FaultPoint.DURING_COMMIT, FaultPoint.AFTER_COMMIT),
    Thing.META: (FaultPoint.BEFORE_EPOCH, FaultPoint.AFTER_EPOCH),
    Thing.CHUNK: (FaultPoint.AFTER_CHUNK, FaultPoint.BEFORE_HEADER, FaultPoint.AFTER_HEADER),
}


def lose_power_at(scene: Scene, point: FaultPoint, rng: random.Random) -> None:
    """Kill the process at that point, and take away some of its unsynced writes."""
    scene.arm(point, count=1_000_000)
    disk = scene.disk(scene.log.parent, journal=True)
    disk.journal.unlink(missing_ok=True)
    at_start = point in LOSSES[Thing.META]
    if at_start:
        scene.arm(point)
        scene.process = scene.house.start(NAME)
        scene.app = scene.house.app(NAME, extended=True)
    else:
        scene.recovers()
        scene.tell(3, padding=5000)
        scene.arm(point)
        if point in LOSSES[Thing.CHUNK]:
            scene.ask_for_checkpoint()
            scene.app.until_closed()
        else:
            scene.tell_one()
    scene.died_at_its_point()
    _, moments = read_journal(disk.journal)
    for path in (scene.log, scene.log.with_name("journal")):
        pending = [write for write in moments[-1].pending if write.path == str(path)]
        if path.exists():
            path.write_bytes(without_power(bytearray(path.read_bytes()), pending, rng))


def loses_power(thing: Thing) -> Show:
    def show(scene: Scene, cell: Cell) -> None:
        scene.with_two_checkpoints()
        rng = random.Random(1)
        for point in LOSSES[thing]:
            lose_power_at(scene, point, rng)
        scene.recovers()

    return show


for _thing in LOSSES:
    shows(Fault.LOST_PAGES, _thing)(loses_power(_thing))


@shows(Fault.LOST_PAGES, Thing.REGISTRY)
def power_is_lost_while_registering(scene: Scene, cell: Cell) -> None:
    disk = scene.disk(scene.home, journal=True)
    scene.arm(FaultPoint.BEFORE_REPLACE)
    assert scene.command("register", NAME, "--peer", "tcp://127.0.0.1:*").returncode == -signal.SIGKILL
    writes, moments = read_journal(disk.journal)
    assert any(".toml" in write.path for write in writes)
    assert [write.path for write in moments[-1].pending] == []  # it is synced before it gets its name
    disk.journal.unlink()
    assert scene.command("register", NAME, "--peer", "tcp://127.0.0.1:*").returncode == 0
    synced = synced_paths(disk.journal)
    settings = max(index for index, path in enumerate(synced) if ".toml" in path)
    assert str(scene.home) in synced[settings:]  # the folder, once it has the file's name
    assert Registry(scene.home).load(NAME)


# --- bit flip --------------------------------------------------------------------------------------------------------


@shows(Fault.BIT_FLIP, Thing.RECORD)
def a_flipped_bit_in_a_record(scene: Scene, cell: Cell) -> None:
    scene.register()
    scene.start()
    scene.tell(4, padding=500)
    scene.kill()
    sound = scene.copy_log()
    scene.flip((3).to_bytes(4, "little") + bytes(400), 200)
    scene.process = scene.house.start(NAME)
    scene.house.app(NAME, extended=True).until_closed()
    assert "'immortal recover alice' says what can be done" in scene.stops(cell.says, 3)
    told = scene.command("recover", NAME)
    assert told.returncode == 1
    assert "--truncate-at 3" in told.stdout
    scene.log.write_bytes(sound)
    scene.recovers()


@shows(Fault.BIT_FLIP, Thing.META)
def a_flipped_bit_in_a_table_and_in_a_page_of_lmdb(scene: Scene, cell: Cell) -> None:
    scene.with_two_checkpoints()
    sound = scene.copy_log()
    scene.flip(b"epoch", 7)
    line = scene.stops_at_the_start(cell.says, 3)
    assert "table 'meta' is damaged at key 'epoch'" in line
    scene.log.write_bytes(sound)
    scene.flip(log_format.name_key(IMPULSES), len(IMPULSES) + 10)
    scene.recovers()
    assert "one flipped bit was corrected" in scene.process.line("table 'sources' is damaged")
    scene.kill()
    sound = scene.copy_log()
    for page, offset_bytes in ((0, 144), (1, 144)):  # the transaction's ID
        data = bytearray(sound)
        data[page * 4096 + offset_bytes] ^= 4  # the other bits: tests/contract/test_log_pages.py
        scene.log.write_bytes(data)
        assert "restore the log from a copy" in scene.stops_at_the_start(cell.says, 3)
    scene.log.write_bytes(sound)
    scene.recovers()


@shows(Fault.BIT_FLIP, Thing.CHUNK)
def a_flipped_bit_in_a_checkpoint(scene: Scene, cell: Cell) -> None:
    scene.with_two_checkpoints()
    needle = b'"told": [1, 2, 3, 4, 5, 6, 7, 8]'
    scene.flip(needle, 12)
    verification = verify_log(scene.log.parent)
    assert [finding.place for finding in verification.findings()] == ["checkpoint 2"]
    scene.recovers()
    assert "checkpoint 2 is damaged" in scene.process.line(cell.says)
    assert "checkpoint=1 " in scene.process.line("recovering")


@shows(Fault.BIT_FLIP, Thing.REGISTRY)
def any_flipped_bit_in_the_settings(scene: Scene, cell: Cell) -> None:
    scene.register(keep_log_days=3)
    path = scene.home / f"{NAME}.toml"
    text = path.read_bytes()
    refused = 0
    for position in range(len(text)):
        for bit in range(8):
            data = bytearray(text)
            data[position] ^= 1 << bit
            refused += _is_refused(scene, bytes(data), cell)
    assert refused > len(text) * 4  # more than half of all bits
    path.write_bytes(text)
    scene.start()


def _is_refused(scene: Scene, text: bytes, cell: Cell) -> bool:
    (scene.home / f"{NAME}.toml").write_bytes(text)
    problem = ""
    try:
        Registry(scene.home).load(NAME)
    except ConfigError as error:
        problem = str(error)
    assert not problem or (cell.says in problem and "\n" not in problem), problem
    return bool(problem)


# --- truncation ------------------------------------------------------------------------------------------------------


@shows(Fault.TRUNCATION, Thing.RECORD, Thing.CHUNK, Thing.META)
def a_truncated_log(scene: Scene, cell: Cell) -> None:
    scene.register()
    scene.start()
    scene.tell(4, padding=20_000)
    assert scene.checkpoint() == 2
    scene.kill()
    sound = scene.copy_log()
    for size_bytes in (4096 + 100, 100) if cell.says == "LMDB" else (len(sound) // 2, len(sound) - 16_384):
        scene.log.write_bytes(sound[:size_bytes])
        scene.stops_at_the_start(cell.says, 3)
    scene.log.write_bytes(sound)
    scene.recovers()


@shows(Fault.TRUNCATION, Thing.REGISTRY)
def settings_cut_off_anywhere(scene: Scene, cell: Cell) -> None:
    scene.register()
    path = scene.home / f"{NAME}.toml"
    text = path.read_bytes()
    lines_end = {position + 1 for position in range(len(text)) if text[position : position + 1] == b"\n"}
    refused = sum(_is_refused(scene, text[:size], cell) for size in range(len(text) - 1) if size not in lines_end)
    assert refused > len(text) // 2
    path.write_bytes(text)
    scene.start()


# --- full disk -------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this machine lets nobody mount a tmpfs")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_file_system_that_is_really_full(scene: Scene, small_disk: Path) -> None:
    """A checkpoint of a state that is too large: earlier checkpoints stay, and nothing accepted is lost."""
    scene.register(log=small_disk / "log")
    scene.start()
    scene.tell(2, padding=400_000)
    (small_disk / "ballast").write_bytes(bytes(_room(small_disk) - 60_000))
    scene.app.state["ballast"] = "x" * 500_000
    scene.ask_for_checkpoint()
    scene.app.until_closed()
    scene.stops(CELLS[Fault.FULL_DISK, Thing.CHUNK].says, 1)
    (small_disk / "ballast").unlink()
    scene.recovers()


def _room(folder: Path) -> int:
    state = os.statvfs(folder)
    return state.f_bavail * state.f_frsize


Fail = Callable[[Disk], None]


def fails_at(thing: Thing, *fails: Fail) -> Show:
    """Show a write or sync that fails while the thing is written, in each of these ways, one after the other."""

    def show(scene: Scene, cell: Cell) -> None:
        scene.register()
        disk = scene.disk(scene.log.parent)
        scene.start()
        for fail in fails:
            fails_once(scene, cell, disk, fail)

    def fails_once(scene: Scene, cell: Cell, disk: Disk, fail: Fail) -> None:
        scene.tell(3)
        if thing is Thing.META:
            scene.kill()
            scene.process = scene.house.start(NAME)
            fail(disk)
            scene.house.app(NAME, extended=True).until_closed()
        elif thing is Thing.CHUNK:
            fail(disk)
            scene.ask_for_checkpoint()
            scene.app.until_closed()
        else:
            fail(disk)
            scene.tell_one()
            scene.app.until_closed()
        scene.stops(cell.says, 1)
        disk.work()
        scene.recovers()

    return show


def one_sync(place: str, *, late: bool = False) -> Fail:
    return lambda disk: (disk.fail_late if late else disk.fail)(place, errno.EIO, once=True)


# Small commits go to the journal, large ones and checkpoints to LMDB's pages. More: tests/faults/test_failed_syncs.py.
PLACES = {Thing.RECORD: ("sync",), Thing.META: ("sync",), Thing.CHUNK: ("data-sync", "meta-sync")}

for _thing in (Thing.RECORD, Thing.META, Thing.CHUNK):
    shows(Fault.FULL_DISK, _thing)(fails_at(_thing, lambda disk: disk.fail("write", errno.ENOSPC)))
    shows(Fault.FAILED_SYNC, _thing)(fails_at(_thing, lambda disk: disk.fail("sync", errno.EIO)))
    shows(Fault.ONE_SYNC, _thing)(fails_at(_thing, *(one_sync(place) for place in PLACES[_thing])))
    shows(Fault.LATE_SYNC, _thing)(fails_at(_thing, *(one_sync(place, late=True) for place in PLACES[_thing])))
    shows(Fault.LATE_WRITE, _thing)(fails_at(_thing, lambda disk: disk.fail_late("write", errno.EIO, once=True)))


def fails_in_the_registry(call: str, number: int) -> Show:
    def show(scene: Scene, cell: Cell) -> None:
        scene.register()
        before = {path.name for path in scene.home.iterdir()}
        disk = scene.disk(scene.home)
        disk.fail(call, number)
        told = scene.command("register", "bob", "--peer", "tcp://127.0.0.1:*")
        assert (told.returncode, told.stderr.count("\n")) == (1, 1), told
        assert cell.says in told.stderr
        assert {path.name for path in scene.home.iterdir()} == before
        disk.work()
        assert scene.command("register", "bob", "--peer", "tcp://127.0.0.1:*").returncode == 0

    return show


shows(Fault.FULL_DISK, Thing.REGISTRY)(fails_in_the_registry("write", errno.ENOSPC))
shows(Fault.FAILED_SYNC, Thing.REGISTRY)(fails_in_the_registry("sync", errno.EIO))


@shows(Fault.ONE_SYNC, Thing.REGISTRY)
@shows(Fault.LATE_SYNC, Thing.REGISTRY)
def one_sync_fails_in_the_registry(scene: Scene, cell: Cell) -> None:
    scene.register()
    disk = scene.disk(scene.home)
    registry = Registry(scene.home)
    for place, name, is_there in (("other-sync", "bob", False), ("folder-sync", "carol", True)):
        one_sync(place, late=cell is CELLS[Fault.LATE_SYNC, Thing.REGISTRY])(disk)
        told = scene.command("register", name, "--peer", "tcp://127.0.0.1:*")
        assert (told.returncode, told.stderr.count("\n")) == (1, 1), told
        assert cell.says in told.stderr
        assert (name in registry.names()) == is_there
        again = scene.command("register", name, "--peer", "tcp://127.0.0.1:*")
        assert (again.returncode, "is registered already" in again.stderr) == (int(is_there), is_there)
        assert registry.load(name).peer.startswith("tcp://127.0.0.1:")


@shows(Fault.LATE_WRITE, Thing.REGISTRY)
def a_write_fails_late_in_the_registry(scene: Scene, cell: Cell) -> None:
    scene.register()
    disk = scene.disk(f"{scene.home}/.bob.toml")
    disk.fail_late("write", errno.EIO, once=True)
    told = scene.command("register", "bob", "--peer", "tcp://127.0.0.1:*")
    assert (told.returncode, told.stderr.count("\n")) == (1, 1), told
    assert cell.says in told.stderr
    assert Registry(scene.home).names() == [NAME]
    assert scene.command("register", "bob", "--peer", "tcp://127.0.0.1:*").returncode == 0


def test_a_start_on_a_full_disk_says_so_in_one_line(scene: Scene) -> None:
    scene.register()
    disk = scene.disk(scene.home / NAME / ".")
    scene.start()
    scene.kill()
    disk.fail("write", errno.ENOSPC)
    line = scene.stops_at_the_start("No space left on device", 1)
    assert "coordinator.json" in line
    disk.work()
    scene.recovers()


# --- read error ------------------------------------------------------------------------------------------------------


@shows(Fault.READ_ERROR, Thing.RECORD)
def a_mapped_page_that_the_disk_does_not_give(scene: Scene, cell: Cell) -> None:
    """Read a page after the end of a mapped file, which acts as an unreadable page: SIGBUS."""
    scene.register()
    scene.start()
    scene.tell(4, padding=200_000)
    scene.app.close()
    scene.process.line("the app disconnected")
    scene.process.status()  # now its commit about the app is done; a later one would make the file longer again
    sound = scene.copy_log()
    scene.process.pause()
    os.truncate(scene.log, 8192)
    app = scene.house.app(NAME, extended=True)
    scene.process.resume()
    app.until_closed()
    assert scene.process.ended()[0] == -signal.SIGBUS  # the supervisor's message: tests/crash/test_supervisor.py
    assert app.state == {}
    scene.log.write_bytes(sound)
    scene.recovers()


@shows(Fault.READ_ERROR, Thing.META)
def a_read_error_at_the_start(scene: Scene, cell: Cell) -> None:
    scene.with_two_checkpoints()
    disk = scene.disk(scene.log)
    disk.fail("read", errno.EIO)
    scene.stops_at_the_start(cell.says, 1)
    disk.work()
    scene.recovers()


@shows(Fault.READ_ERROR, Thing.CHUNK)
def a_read_error_is_named(scene: Scene, cell: Cell) -> None:
    scene.with_two_checkpoints()
    disk = scene.disk(scene.log)
    disk.cannot_read_from(3 * 4096)
    told = scene.command("log", "verify", NAME)
    assert told.returncode == 1
    assert f"{cell.says} {3 * 4096}: Input/output error" in told.stdout + told.stderr
    assert "Traceback" not in told.stderr
    disk.work()
    scene.recovers()


@shows(Fault.READ_ERROR, Thing.REGISTRY)
def a_read_error_in_the_registry(scene: Scene, cell: Cell) -> None:
    scene.register()
    disk = scene.disk(f"{NAME}.toml")
    disk.fail("read", errno.EIO)
    told = scene.command("status", NAME)
    assert told.returncode == 1
    assert cell.says in told.stdout + told.stderr
    scene.stops_at_the_start(cell.says, 1)
    disk.work()
    scene.start()


# --- slow disk -------------------------------------------------------------------------------------------------------


@shows(Fault.SLOW_DISK, Thing.RECORD, Thing.META, Thing.CHUNK)
def a_slow_disk(scene: Scene, cell: Cell) -> None:
    scene.register()
    disk = scene.disk(scene.log.parent)
    scene.start()
    disk.delay("sync", DELAY_MS)
    scene.tell(8)
    if cell.says:
        assert scene.process.status()["commit_ms"] > DELAY_MS / 2
        assert cell.says in " ".join(scene.command("status", NAME).stdout.split())
    else:
        assert scene.checkpoint() == 2
    scene.kill()
    scene.recovers()


@shows(Fault.SLOW_DISK, Thing.REGISTRY)
def a_slow_disk_under_the_registry(scene: Scene, cell: Cell) -> None:
    scene.disk(scene.home).delay("sync", DELAY_MS)
    assert scene.command("register", NAME, "--peer", "tcp://127.0.0.1:*").returncode == 0
    assert Registry(scene.home).load(NAME)


# --- a clock that jumps ----------------------------------------------------------------------------------------------


@shows(Fault.CLOCK_JUMP, Thing.RECORD)
def a_clock_that_jumps(scene: Scene, cell: Cell) -> None:
    clock = scene.clock()
    scene.register(keep_checkpoints=None)
    began_ns = time.time_ns()
    scene.start()
    for number, jump in enumerate(JUMPS):
        clock.jump(jump)
        scene.tell(2)
        scene.process.until(lambda status: status["clock"]["ahead_s"] != 0)
        scene.process.line(cell.says)
        if number == 0:
            assert cell.says in " ".join(scene.command("status", NAME).stdout.split())
        if number in (2, 5):
            scene.kill()  # the next start has the wrong clock
            scene.recovers()
        clock.jump(timedelta(0))
        scene.tell(1)
        scene.process.until(lambda status: status["clock"]["ahead_s"] == 0)
    scene.kill()
    with open_reader(scene.log.parent) as reader:
        last = reader.summary().last_sequence_id
        times_ns = [time_of(value) for value in reader.read(0, 1 << 20)]
    assert len(times_ns) == last + 1
    assert times_ns == sorted(times_ns)
    assert began_ns <= times_ns[0] <= times_ns[-1] <= time.time_ns()


def time_of(value: bytes | memoryview) -> int:
    header = decode_header(value)
    return decode_trailer(memoryview(value)[header.size_bytes :], header.check).time_ns


@shows(Fault.CLOCK_JUMP, Thing.META)
def a_clock_that_jumps_and_keys(scene: Scene, cell: Cell) -> None:
    assert scene.command("register", NAME, "--peer", "tcp://127.0.0.1:*").returncode == 0
    clock = scene.clock()
    (scene.folder / "counter.py").write_text(COUNTER)
    run = Run(scene.folder, NAME, "counter:Counter", "--restart")
    try:
        run.line("ready")
        scene.monkeypatch.setenv("IMMORTAL_HOME", str(scene.home))

        def ask(key: str) -> int:
            with connect(NAME) as counted:
                return int(with_key(counted, key).add())

        assert ask("order 1") == 1
        for count, jump in enumerate(JUMPS, 2):
            clock.jump(jump)
            assert ask(f"another {jump}") == count  # this forgets old keys
            assert ask("order 1") == 1
        clock.jump(timedelta(0))
        assert ask("order 1") == 1
        assert ask("order 2") == len(JUMPS) + 2
    finally:
        run.kill()


@shows(Fault.CLOCK_JUMP, Thing.CHUNK)
def a_clock_that_jumps_and_checkpoints(scene: Scene, cell: Cell) -> None:
    clock = scene.clock()
    scene.register(keep_log_days=30, keep_checkpoints=1)
    with scene.house.registry.path(NAME).open("a") as file:
        file.write("[tuning]\nclock_hold_s = 1\n")
    scene.start()
    taken = [1]
    for jump in JUMPS:
        clock.jump(jump)
        scene.tell(1)
        taken.append(scene.checkpoint())
    clock.jump(timedelta(days=60))
    scene.process.until(lambda status: status["clock"]["time_ns"] > time.time_ns() + 59 * 86_400 * 10**9)  # believed
    scene.tell(1)
    taken.append(scene.checkpoint())
    scene.kill()
    scene.recovers()  # also with a checkpoint and trimming
    scene.kill()
    with open_reader(scene.log.parent) as reader:
        summary = reader.summary()
    assert summary.first_sequence_id == 0
    assert [header.checkpoint_id for header in summary.checkpoints][: len(taken)] == taken


@shows(Fault.CLOCK_JUMP, Thing.REGISTRY)
def a_clock_that_jumps_under_the_registry(scene: Scene, cell: Cell) -> None:
    clock = scene.clock()
    for jump, name in zip(JUMPS[-2:], ("alice", "bob"), strict=True):
        clock.jump(jump)
        assert scene.command("register", name, "--peer", "tcp://127.0.0.1:*").returncode == 0
    clock.jump(timedelta(0))
    assert Registry(scene.home).names() == ["alice", "bob"]
